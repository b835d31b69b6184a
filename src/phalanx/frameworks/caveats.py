"""What makes a price doubtful: keys that have no price or no verdict, and assumptions where the file says
nothing. Each caveat says what it may change: layout, model, time or memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.frameworks.configuration import Configuration, shown
from phalanx.frameworks.trainer_tuning import SLICED, WHOLE_LOGITS
from phalanx.frameworks.verdicts import CHANGES, Verdict
from phalanx.spec.model.spec import ModelSpec, expert_layers
from phalanx.spec.strategy.spec import Strategy

_LISTED = 8
"""Keys of one caveat that are named in its line; --json has all."""


@dataclass(frozen=True)
class Caveat:
    """One line of doubt about a price."""

    kind: Literal["not modelled", "not judged", "assumed", "missing"]
    keys: tuple[str, ...]
    """As the file writes them; (): the file says nothing."""
    reason: str
    """What the keys do, or what was assumed."""
    changes: tuple[str, ...] = ()
    """Of verdicts.CHANGES: what may differ from the price."""
    limit: str = ""
    """Of verdicts.LIMITS: the part of the price that bounds the difference; "": unknown."""
    bound: str = ""
    """The largest difference, with its unit; "": unknown, or there is no price yet."""

    @property
    def line(self) -> str:
        """The caveat in one line."""
        more = f" and {len(self.keys) - _LISTED} more" if len(self.keys) > _LISTED else ""
        named = ", ".join(self.keys[:_LISTED]) + more
        consequence = ", ".join(filter(None, (_consequence(self.kind, self.changes), self.bound)))
        return (
            f"{self.kind}: {' '.join(filter(None, (named, self.reason)))}{f': {consequence}' if consequence else ''}"
        )


BALANCED = Caveat(
    "assumed",
    (),
    "every expert gets as many tokens, as benchmarks force; a learned router's do not",
    ("time",),
    "routing",
)


UNMEASURED = Caveat(
    "assumed",
    (),
    "kernels and links reach the shares of the datasheet that they do on others; no fitted run is of this chip",
    ("time",),
)


COMPILED = Caveat(
    "assumed",
    (),
    'products of 8 bits run in compiled blocks (train.compile = "blocks"); uncompiled steps on an H100 and an H200 '
    "took 1.4 to 1.8 times as long as in bf16",
    ("time",),
)
"""docs/gpu.md: a scale on the GPU keeps the kernels that cast from being vectorised."""


FITTED_ON_GPUS = Caveat(
    "assumed", (), "the stack runs on GPUs, not on TPUs: it is priced as if it did", ("layout", "time", "memory")
)


UNTIMED = Caveat(
    "assumed",
    (),
    "compressed keys, residual streams and Mamba's scan take the time of their FLOPs and bytes: no kernel of theirs "
    "was timed, and published steps of DeepSeek-V4 are a third longer",
    ("time",),
)


def nodes_of(kind: str, cluster: str) -> Caveat:
    """Return the caveat that a cluster is taken by what its GPUs are called."""
    reason = f"names the GPUs: nodes and links are taken from {cluster}, unless --cluster says others"
    return Caveat("assumed", (kind,), reason, ("time", "memory"))


def unfilled(key: str, seq: int) -> Caveat:
    """Return the caveat that every sample fills the sequence, whose length a key only bounds."""
    return Caveat(
        "assumed",
        (f"{key} {seq:,}",),
        "is taken as the length of every sample: unpacked ones are padded to the longest of a micro-batch, and a seq "
        "of their mean has their time",
        bound="time and memory are at most as said",
    )


MAGNITUDES = Caveat(
    "assumed",
    (),
    "norms and scales of DoRA take the time of their FLOPs and bytes: two published pairs of runs took 1.7 to 2.0 "
    "times as long as with LoRA",
    ("time",),
)
"""huggingface/peft#1474 (Qwen1.5-1.8B: 2.7 s, and 4.5 to 5.5), #3341 (765 and 1,466 s)."""


def unadapted(model: ModelSpec, rank: int, strategy: Strategy) -> Caveat:
    """Return the caveat that no expert has an adapter: peft adapts each where every expert is a module of its own.
    The bound is of adapters of this rank without ZeRO."""
    experts = model.experts
    assert experts is not None
    width = (experts.latent or model.hidden) + experts.ffn
    each = rank * (3 if model.gated else 2) * width * experts.count * len(expert_layers(model))
    held = each * _STATE / (strategy.ep * strategy.etp * strategy.pp) / 2**30
    return Caveat(
        "assumed",
        (),
        "experts have no adapters, as under transformers 5; with one on each (lora_targets=experts)",
        ("memory", "time"),
        bound=f"memory by at most {held:.1f} GiB more",
    )


UNTIMED_ADAPTERS = Caveat("assumed", (), "adapters of experts take memory, and no time in this price", ("time",))

_STATE = 18
"""Bytes of an adapter's parameter: a weight of 2, a gradient of 4, and an optimizer of 12."""


def _consequence(kind: str, changes: tuple[str, ...]) -> str:
    if kind == "not modelled" and {"layout", "model"} & set(changes):
        return "a price would be of another program"
    return f"{', '.join(changes[:-1])}{' and ' if changes[1:] else ''}{changes[-1]} may differ" if changes else ""


_LIMITS = {WHOLE_LOGITS: "logits", SLICED: "slices"}
"""What a configuration assumes -> the part of the price that bounds the difference."""


def assumption(text: str) -> Caveat:
    """Return the caveat of what a configuration assumes."""
    limit = _LIMITS.get(text, "")
    return Caveat("assumed", (), text, ("memory",) if limit else (), limit)


def caveats_of(c: Configuration) -> tuple[Caveat, ...]:
    """Return the caveats of a configuration: keys without a price first, by what they change (layout, model, time,
    memory), then keys that are not judged."""
    modelled = sorted(_not_modelled(c.not_modelled), key=lambda caveat: min(map(CHANGES.index, caveat.changes)))
    return (*modelled, *_not_judged(c.unknown))


def _not_modelled(keys: Mapping[str, Verdict]) -> Iterator[Caveat]:
    """Yield a caveat for each group of keys with the same effect."""
    groups: dict[tuple[str, tuple[str, ...], str], list[str]] = {}
    for key, verdict in keys.items():
        groups.setdefault((verdict.what, verdict.changes, verdict.limit), []).append(shown(key))
    for (what, changes, limit), names in groups.items():
        yield Caveat("not modelled", tuple(names), f"({what})", changes, limit)


def _not_judged(keys: Mapping[str, str]) -> Iterator[Caveat]:
    if keys:
        names = tuple(f"{shown(key)} (did you mean {near}?)" if near else shown(key) for key, near in keys.items())
        known = "is a key" if len(names) == 1 else "are keys"
        yield Caveat("not judged", names, f"{known} of no release that Phalanx knows", ("layout", "time", "memory"))
