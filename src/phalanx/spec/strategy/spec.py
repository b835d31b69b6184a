"""The strategy: how a job is split over ranks. One line (`dp=4,zero=3`) or a TOML table.

The whole grammar is parsed and checked here. What the trainer cannot run yet is refused by name in
`require_runnable`, never ignored.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import Job
from phalanx.spec.strategy import compression
from phalanx.spec.strategy.compression import Compression

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
"""The names; schedule/pipeline/schedules.py must have a row for each, with every other fact about it."""
Recompute = Literal["none", "selective", "full"]
AXES = ("pp", "dp", "cp", "tp")
DEFAULT_BUCKET_MIB = 25.0  # torch DDP's default


@dataclass(frozen=True)
class Strategy:
    """Degrees of every parallelism and how the engines behave. Defaults are one plain process."""

    dp: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    shard: int | None = None
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ulysses: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    virtual: int = 1
    schedule: Schedule = "1f1b"
    layers: str = "auto"
    micro_batch: int = 1
    recompute: str = "none"
    compression: str = "none"
    grad_sync: Literal["step", "micro"] | None = None
    reshard: Literal["step", "action"] | None = None
    bucket: float | Literal["auto"] = "auto"
    prefetch: int = 1
    order: str = "pp/dp/cp/tp"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "cp", "ulysses", "ep", "etp", "pp", "virtual", "micro_batch"):
            if getattr(self, name) < 1:
                raise InputError(f"strategy.{name}", getattr(self, name), "must be at least 1")
        _divides("shard", self.shard or 1, "dp", self.dp)
        _divides("ulysses", self.ulysses, "cp", self.cp)
        block = self.dp * self.cp * self.tp
        if block % (self.ep * self.etp):
            raise InputError(
                "strategy.ep",
                self.ep,
                f"ep x etp = {self.ep} x {self.etp} does not divide dp x cp x tp = "
                f"{self.dp} x {self.cp} x {self.tp} = {block}",
            )
        if self.zero == 0 and (self.shard or 1) > 1:
            raise InputError("strategy.shard", self.shard, "zero=0 shards nothing", "use zero=1, 2 or 3")
        if self.sp and self.tp == 1:
            raise InputError("strategy.sp", 1, "sequence parallelism runs over the tp ranks", "use tp >= 2")
        if self.bucket != "auto" and self.bucket <= 0:
            raise InputError("strategy.bucket", self.bucket, "must be positive (MiB) or auto")
        if self.prefetch < 0:
            raise InputError("strategy.prefetch", self.prefetch, "must not be negative")
        if not re.fullmatch(r"none|selective|full|every:[1-9]\d*", self.recompute):
            raise InputError(
                "strategy.recompute", self.recompute, "is not known", "use none, selective, full or every:k"
            )
        if not re.fullmatch(r"auto|\d+(/\d+)*", self.layers):
            raise InputError(
                "strategy.layers", self.layers, "is not the blocks of each chunk", "write 7/9/9/7, or use auto"
            )
        compression.parse(self.compression)
        if sorted(self.order.split("/")) != sorted(AXES):
            raise InputError(
                "strategy.order", self.order, f"must name each of {', '.join(AXES)} once, as pp/dp/cp/tp"
            )

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp_shard(self) -> int:
        """Replicas of the data axis that share a model state: 1 at zero=0, `shard` (default dp) otherwise."""
        return 1 if self.zero == 0 else (self.shard or self.dp)

    @property
    def dp_replicate(self) -> int:
        return self.dp // self.dp_shard

    @property
    def ring(self) -> int:
        """Ranks of cp that pass keys and values round; the rest of it is Ulysses."""
        return self.cp // self.ulysses

    @property
    def shards(self) -> int:
        """Ranks that the model state is sharded over: those of cp hold the same model, and share in it too."""
        return 1 if self.zero == 0 else self.dp_shard * self.cp

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients are summed: each has tokens of its own."""
        return self.dp * self.cp

    @property
    def experts_apart(self) -> bool:
        """Whether experts' gradients reduce over other ranks than all others do. Where layers are not split over tp
        nor experts over ranks, those of `edp` are those of dp and cp."""
        return self.tp * self.ep * self.etp > 1

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts, with tokens of their own: what is left of dp x cp x tp."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def unlike(self) -> bool:
        """Whether ranks hold different parts of the gradients when these are reduced."""
        return self.stage > 0 or self.pp > 1 or self.experts_apart

    @property
    def stage(self) -> int:
        """The ZeRO stage that takes effect: over a single shard none does; at zero=2 with grad_sync=step gradients
        stay whole until the end of the step, which is stage 1."""
        if self.shards == 1:
            return 0
        return 1 if self.zero == 2 and self.grad_sync == "step" else self.zero

    @property
    def gathers_once(self) -> bool:
        """Whether zero=3 keeps what it has gathered until the end of the step."""
        return self.reshard == "step" or (self.reshard is None and self.pp > 1)

    def recompute_of(self, block: int) -> Recompute:
        """What of a block's forward pass is repeated in its backward pass: nothing, attention's core, all."""
        kind, _, k = self.recompute.partition(":")
        if kind == "every":
            return "none" if block % int(k) else "full"
        return kind  # type: ignore[return-value]

    @property
    def compressor(self) -> Compression | None:
        """How gradients are compressed where they travel."""
        return compression.parse(self.compression) if self.gradient_ranks > 1 else None

    @property
    def bucket_bytes(self) -> int:
        """Of a full bucket; where nobody resolved `auto` on a cluster (plan/bucket.py), the default."""
        return int((DEFAULT_BUCKET_MIB if self.bucket == "auto" else self.bucket) * 2**20)

    def accumulation(self, job: Job) -> int:
        """Micro-batches per data-parallel replica and step: global batch / (micro_batch x dp)."""
        return job.global_batch // (self.micro_batch * self.dp)

    def __str__(self) -> str:
        """The one-line form, fields that differ from the default only."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={format_field(getattr(self, f.name))}" for f in changed) or "dp=1"


FIELDS = {f.name: f for f in fields(Strategy)}


def parse(line: str) -> dict[str, Any]:
    """`dp=4,zero=3` as a table; types are checked when the Strategy is made from it.

    Raises InputError for an unknown field, a missing `=`, or a field named twice.
    """
    table: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in line.split(","))):
        name, equals, text = item.partition("=")
        name, text = name.strip(), text.strip()
        if not equals or not text:
            raise InputError("strategy", line, f"{item!r} is not of the form field=value", "e.g. dp=4,zero=3")
        if name not in FIELDS:
            raise InputError(f"strategy.{name}", text, "no such field", nearest(name, FIELDS))
        if name in table:
            raise InputError(f"strategy.{name}", text, "given twice")
        table[name] = text if FIELDS[name].type == "str" else value(text)
    return table


def value(text: str) -> Any:
    """A word of a command line as int, float, bool or string."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def _divides(name: str, part: int, whole_name: str, whole: int) -> None:
    if part < 1 or whole % part:
        raise InputError(f"strategy.{name}", part, f"does not divide {whole_name} = {whole}")


def format_field(given: Any) -> str:
    if isinstance(given, bool):
        return str(int(given))
    return f"{given:g}" if isinstance(given, float) else str(given)
