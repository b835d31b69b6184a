"""The cases: what is done to which process of which run, in which phase."""

from __future__ import annotations

from dataclasses import dataclass

MOE = ("model.experts.count=4", "model.experts.top_k=2", "model.experts.ffn=32")
FAMILIES: dict[str, tuple[str, ...]] = {
    "data parallel": ("dp=2,micro_batch=2",),
    "ZeRO-1": ("dp=3,zero=1,micro_batch=2",),
    "ZeRO-2": ("dp=2,zero=2,micro_batch=2",),
    "ZeRO-3": ("dp=4,zero=3,micro_batch=1",),
    "HSDP": ("dp=4,zero=2,shard=2,micro_batch=1",),
    "compressed": ("dp=2,compression=topk:0.1:nofeedback,micro_batch=2",),
    "error feedback": ("dp=2,zero=1,compression=int8,micro_batch=2",),
    "PowerSGD": ("dp=3,compression=powersgd:2,micro_batch=2",),
    "tensor": ("tp=2,sp=1,micro_batch=2",),
    "ring attention": ("cp=2,micro_batch=2",),
    "Ulysses": ("cp=2,ulysses=2,micro_batch=2",),
    "1F1B": ("pp=2,micro_batch=2",),
    "zero bubble": ("pp=2,schedule=zb-h1,micro_batch=2",),
    "tensor, pipeline": ("tp=2,pp=2,micro_batch=2",),
    "data, pipeline": ("dp=2,zero=1,pp=2,micro_batch=2",),
    "experts": ("dp=2,ep=2,micro_batch=2", *MOE),
}
"""Strategies, each with settings that it needs."""

PHASES = {
    "start": ("start-up", 1),
    "forward": ("forward", 5),
    "collective": ("a collective", 30),
    "optimizer": ("optimizer", 3),
    "saving": ("writing the checkpoint", 2),
    "evaluation": ("evaluation", 1),
    "end": ("waiting for the checkpoint of step 8", 1),
}
"""The event at which a process is struck, and which one of its kind."""

RANK_STROKES = ("SIGKILL", "SIGSTOP", "SIGTERM", "raise", "slow", "clock")
LAUNCHER_STROKES = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT")
FILES = (
    "flipped rank file",
    "flipped index",
    "flipped manifest",
    "truncated rank file",
    "truncated index",
    "truncated manifest",
    "missing rank file",
    "missing index",
    "missing manifest",
    "missing checkpoint",
    "truncated metrics",
    "missing metrics",
    "missing tokenizer",
    "flipped plan",
    "truncated plan",
    "missing plan",
    "links where the run writes",
    "two runs in one folder",
    "full disk",
    "read-only folder",
)


@dataclass(frozen=True)
class Case:
    """One case. `victim`: a rank, "launcher" or "files". `restarts`: the launcher goes on by itself."""

    family: str
    victim: int | str
    stroke: str
    phase: str = ""
    restarts: bool = False

    def __str__(self) -> str:
        who = f"rank {self.victim}" if isinstance(self.victim, int) else self.victim
        on = f" in {self.phase}" if self.phase else ""
        return f"{self.family}: {self.stroke} of {who}{on}{', restarted' if self.restarts else ''}"


def world(family: str) -> int:
    """Return the number of ranks of a family's strategy."""
    fields = dict(part.split("=") for part in FAMILIES[family][0].split(","))
    size = 1
    for axis in ("dp", "tp", "cp", "pp"):
        size *= int(fields.get(axis, 1))
    return size


def every() -> list[Case]:
    """List all cases."""
    cases = []
    for family in FAMILIES:
        for phase in PHASES:
            for rank in range(world(family)):
                for stroke in RANK_STROKES:
                    ends = stroke in ("SIGKILL", "SIGSTOP", "raise")
                    cases += [Case(family, rank, stroke, phase, r) for r in ((False, True) if ends else (False,))]
            cases += [Case(family, "launcher", stroke, phase) for stroke in LAUNCHER_STROKES]
        cases += [Case(family, "files", stroke) for stroke in FILES]
    return cases
