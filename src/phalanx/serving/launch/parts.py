"""The parts of a launch, and the limits that the command lines of all engines share."""

import re
import shlex
from dataclasses import dataclass, field

from phalanx.serving.cost.shape import shape_of
from phalanx.serving.cost.step import TWO_BATCHES_FROM
from phalanx.serving.plan_file import ServingPlan, Workers
from phalanx.serving.simulation.engines import engine
from phalanx.spec.errors import InputError

_MOST_WORKERS = 4096


@dataclass(frozen=True)
class Command:
    """The command line of a worker, or of a router."""

    title: str
    program: tuple[str, ...]
    options: tuple[str, ...]
    """Words of the options, in the syntax of the program's parser."""
    gpus: tuple[int, ...] = ()
    """GPU numbers on its node; empty: no GPUs, or all GPUs of its nodes."""
    node: int = 0
    environment: tuple[str, ...] = ()
    """Variables that its limits need, as NAME=value."""
    checked_by: tuple[str, ...] = ()
    """Programs of data/arguments.json that own the options; empty: not checked."""

    def line(self) -> str:
        """Return the command for a shell, one option with its value per line."""
        devices = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, self.gpus))}"] if self.gpus else []
        parts: list[str] = [" ".join([*devices, *self.environment, *map(_quoted, self.program)])]
        for word in self.options:
            if word.startswith("--"):
                parts.append(_quoted(word))
            else:
                parts[-1] += f" {_quoted(word)}"
        return " \\\n  ".join(parts)


def _quoted(word: str) -> str:
    """Return a word quoted for a shell, which expands only placeholders such as $NODE_RANK or $HEAD:5000."""
    return f'"{word}"' if re.fullmatch(r"\$(NODE_RANK|HEAD)(:[0-9]+)?", word) else shlex.quote(word)


@dataclass(frozen=True)
class Launch:
    """The commands and files that start a deployment."""

    engine: str
    version: str
    commands: tuple[Command, ...]
    files: dict[str, str] = field(default_factory=dict)
    """Files that the commands read, by name."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerPlace:
    """The GPUs of one worker."""

    workers: Workers
    name: str
    port: int
    node: int
    gpus: tuple[int, ...]
    """Empty: whole nodes."""
    nodes: int
    """Nodes that it spans."""


def places(plan: ServingPlan, first_port: int = 8000) -> list[WorkerPlace]:
    """Place the workers on nodes in order, each within one node if it fits. Raises InputError for too many workers to
    print a line for each."""
    if (count := sum(workers.count for workers in plan.workers)) > _MOST_WORKERS:
        raise InputError(
            "workers", count, f"are more than {_MOST_WORKERS:,}, and each has a launch line", "plan a part of them"
        )
    placed: list[WorkerPlace] = []
    node = used = 0
    for workers in plan.workers:
        for i in range(workers.count):
            spans = -(-workers.gpus // plan.node_gpus)
            if used + workers.gpus > plan.node_gpus and used:
                node, used = node + 1, 0
            gpus = tuple(range(used, used + workers.gpus)) if spans == 1 else ()
            role = "worker" if workers.role == "both" else workers.role
            placed.append(WorkerPlace(workers, f"{role}-{i}", first_port + len(placed), node, gpus, spans))
            node, used = (node + spans, 0) if spans > 1 else (node, used + workers.gpus)
    return placed


def context(plan: ServingPlan, workers: Workers) -> int | None:
    """Return the tokens of the longest request to allow, prompt and answer, in multiples of 64. None: the cache holds
    a request as long as the model's context, the engine's default."""
    if workers.cache_tokens // workers.attention_dp >= plan.model.max_seq:
        return None
    return min(plan.model.max_seq, -(-plan.longest // 64) * 64)


def most_requests(workers: Workers, shared: int = 1) -> int | None:
    """Return the most concurrent requests of each of `shared` parts of a worker. None for prefill, which the tokens
    of a step limit: the engine's default."""
    return None if workers.role == "prefill" else -(-workers.slots // shared)


REDUNDANT_EXPERTS = 32
"""Copies of the busiest experts in published deployments (lmsys.org/blog/2025-05-05-large-scale-ep)."""


def overlaps(plan: ServingPlan, w: Workers) -> bool:
    """Whether one half of a step computes while the tokens of the other are sent: over a network, if a step has
    enough tokens."""
    full = w.role == "prefill" or w.slots // w.attention_dp * (1 + plan.draft_tokens) >= TWO_BATCHES_FROM
    return w.large_ep and w.tp * w.attention_dp > plan.node_gpus and full


_MTP = ("deepseek-v3", "deepseek-r1", "qwen3-next", "glm-4.5", "glm-4.6", "glm-5")


def predicts_tokens(plan: ServingPlan) -> bool:
    """Whether the model is published with modules of multi-token prediction, which can draft."""
    return any(name in plan.model_name.lower() for name in _MTP)


def caching_note(plan: ServingPlan) -> str:
    """Return a note on prefix caching, an engine's default, and on the share that the plan counts on."""
    if shape_of(plan.model).state:
        return f"{engine(plan.engine).state_reuse}; the plan counts on {plan.load.reuse:.0%} of each prompt"
    if plan.load.reuse:
        return f"prefix caching is the engine's default; the plan counts on {plan.load.reuse:.0%} of each prompt"
    return "prefix caching is the engine's default; the plan counts on none of it"
