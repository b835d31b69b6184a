"""The parts of a launch, and what the command lines of all engines share."""

import re
import shlex
from dataclasses import dataclass, field

from phalanx.serving.cost.shape import shape_of
from phalanx.serving.cost.step import TWO_BATCHES_FROM
from phalanx.serving.plan_file import ServingPlan, Workers
from phalanx.serving.simulation.engines import engine
from phalanx.spec.errors import InputError

_MOST = 4096


@dataclass(frozen=True)
class Command:
    """A command line of one worker, or of what routes requests to them."""

    title: str
    program: tuple[str, ...]
    options: tuple[str, ...]
    """As the program's own parser reads them."""
    gpus: tuple[int, ...] = ()
    """GPU numbers on its node; empty: no GPUs, or all of the nodes that it spans."""
    node: int = 0
    environment: tuple[str, ...] = ()
    """Variables that its limits need, as NAME=value."""
    checked_by: tuple[str, ...] = ()
    """Programs of data/arguments.json that own the options; empty: not checked."""

    def line(self) -> str:
        """Format the command for a shell, one option with its value per line."""
        devices = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, self.gpus))}"] if self.gpus else []
        parts: list[str] = [" ".join([*devices, *self.environment, *map(_quoted, self.program)])]
        for word in self.options:
            if word.startswith("--"):
                parts.append(_quoted(word))
            else:
                parts[-1] += f" {_quoted(word)}"
        return " \\\n  ".join(parts)


def _quoted(word: str) -> str:
    """Quote a word for a shell, which expands only placeholders such as $NODE_RANK or $HEAD:5000."""
    return f'"{word}"' if re.fullmatch(r"\$(NODE_RANK|HEAD)(:[0-9]+)?", word) else shlex.quote(word)


@dataclass(frozen=True)
class Launch:
    """Everything that starts a deployment."""

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
    """Place the workers on nodes in order, each within one node if it fits. Raises InputError for more workers than
    anyone would start by hand."""
    if (count := sum(workers.count for workers in plan.workers)) > _MOST:
        raise InputError(
            "workers", count, f"are more than {_MOST:,}, and each has a launch line", "plan a part of them"
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
    """Return the tokens of the longest request to allow, prompt and answer, in multiples of 64. None where the
    cache holds one as long as the model's context, which engines then allow by themselves."""
    if workers.cache_tokens // workers.attention_dp >= plan.model.max_seq:
        return None
    return min(plan.model.max_seq, -(-plan.longest // 64) * 64)


def most_requests(workers: Workers, shared: int = 1) -> int | None:
    """Return the most requests at once of each of `shared` parts of a worker. None for workers that prefill: the
    tokens of a step bound these, and the engine's own limit holds."""
    return None if workers.role == "prefill" else -(-workers.slots // shared)


REDUNDANT_EXPERTS = 32
"""Copies of the busiest experts, as published deployments have (lmsys.org/blog/2025-05-05-large-scale-ep)."""


def overlaps(plan: ServingPlan, w: Workers) -> bool:
    """Whether one half of a step's tokens computes while the other half's travel: over a network, where a step has
    enough of them."""
    full = w.role == "prefill" or w.slots // w.attention_dp * (1 + plan.draft_tokens) >= TWO_BATCHES_FROM
    return w.large_ep and w.tp * w.attention_dp > plan.node_gpus and full


_MTP = ("deepseek-v3", "deepseek-r1", "qwen3-next", "glm-4.5", "glm-4.6", "glm-5")


def predicts_tokens(plan: ServingPlan) -> bool:
    """Whether the model is published with modules that predict further tokens, which then draft."""
    return any(name in plan.model_name.lower() for name in _MTP)


def caching_note(plan: ServingPlan) -> str:
    """Say what prefix caching, which engines do by themselves, adds to the plan."""
    if shape_of(plan.model).state:
        return f"{engine(plan.engine).state_reuse}; the plan counts on {plan.load.reuse:.0%} of each prompt"
    if plan.load.reuse:
        return f"prefix caching is the engine's default; the plan counts on {plan.load.reuse:.0%} of each prompt"
    return "prefix caching is the engine's default; the plan counts on none of it"
