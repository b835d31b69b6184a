"""What every manifest of Kubernetes is made of: groups of servers, whose workers are a pod each, or a pod a node."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.serving.launch.launch import Command, Launch, WorkerPlace, places
from phalanx.serving.plan_file import ServingPlan

SECRET = "hf-token-secret"
"""The secret with HF_TOKEN, as Dynamo's templates name it."""


@dataclass(frozen=True)
class ServerGroup:
    """The workers of one role, which are alike."""

    place: WorkerPlace
    """That of its first worker."""
    commands: tuple[Command, ...]
    """Of the pods of a worker: the first takes requests."""
    gpus: int
    """GPUs of a pod."""

    @property
    def name(self) -> str:
        """Its role: worker, prefill or decode."""
        return self.place.name.removesuffix("-0")


def groups(plan: ServingPlan, line: Launch) -> tuple[ServerGroup, ...]:
    """Return the groups of a plan whose command lines are `line`, prefill before decode."""
    first = {place.workers.role: place for place in reversed(places(plan))}
    return tuple(
        ServerGroup(
            first[w.role],
            tuple(c for c in line.commands if c.title == first[w.role].name),
            min(w.gpus, plan.node_gpus),
        )
        for w in plan.workers
    )


def without(options: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the options of a command line without some, whose values go with them."""
    left: list[str] = []
    dropped = False
    for word in options:
        dropped = word in names if word.startswith("--") else dropped
        left += [] if dropped else [word]
    return left


def variables(group: ServerGroup) -> list[dict[str, Any]]:
    """Return the environment of a group's pods. NIXL says by it where the others find its side channel (vLLM's
    docs/features/nixl_connector_usage.md)."""
    pairs = (each.partition("=") for each in group.commands[0].environment)
    env: list[dict[str, Any]] = [{"name": key, "value": value} for key, _, value in pairs]
    if "--kv-transfer-config" in group.commands[0].options:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        env.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address})
    return env


def label(text: str) -> str:
    """Return the name of an object of Kubernetes after a model's: letters, digits and dashes, 50 at most."""
    return re.sub(r"[^a-z0-9]+", "-", text.rpartition("/")[2].lower())[:50].strip("-") or "model"


def yaml(documents: Iterable[Any], notes: Iterable[str] = ()) -> str:
    """Write documents of tables, lists and words as YAML, below notes."""
    head = "".join(f"# {line}\n" for note in notes for line in note.splitlines())
    return head + "---\n".join("\n".join(_lines(each)) + "\n" for each in documents)


def _lines(value: Any, indent: str = "") -> list[str]:
    lines = []
    if isinstance(value, dict):
        for key, each in value.items():
            if isinstance(each, dict | list) and each:
                lines += [f"{indent}{key}:", *_lines(each, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {json.dumps(each)}")
        return lines
    for each in value:
        first, *rest = _lines(each, indent + "  ") if isinstance(each, dict) else [f"{indent}  {json.dumps(each)}"]
        lines += [f"{indent}- {first[len(indent) + 2 :]}", *rest]
    return lines
