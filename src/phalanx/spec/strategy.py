"""The strategy: how a job is split over ranks. One line (`dp=4,zero=3`) or a TOML table.

The whole grammar is parsed and checked here. What the trainer cannot run yet is refused by name in
`require_runnable`, never ignored.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from phalanx.spec import compression
from phalanx.spec.compression import Compression
from phalanx.spec.context import require_context
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import DType, Job, Precision
from phalanx.spec.model import ModelSpec
from phalanx.spec.split import require_split

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
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
    def split_backward(self) -> bool:
        """Whether the schedule runs gradients of inputs and of weights apart."""
        return self.pp > 1 and self.schedule in ("zb-h1", "zb-v", "dualpipe-v")

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
        return ",".join(f"{f.name}={_written(getattr(self, f.name))}" for f in changed) or "dp=1"


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


def check(strategy: Strategy, model: ModelSpec, job: Job, world: int | None) -> None:
    """That the strategy fits this model, batch and number of ranks. Raises InputError where it does not."""
    s = strategy
    if world is not None and s.world != world:
        factors = " x ".join(f"{axis}={getattr(s, axis)}" for axis in AXES)
        raise InputError(
            "strategy",
            str(s),
            f"{factors} = {s.world} ranks, but there are {world}",
            f"make the product {world}",
        )
    if job.global_batch % (s.micro_batch * s.dp):
        if job.global_batch % s.dp:
            fits = divisors(job.global_batch)
            raise InputError(
                "strategy.dp",
                s.dp,
                f"does not divide job.global_batch = {job.global_batch}",
                f"use one of {_some(fits)}",
            )
        per_replica = job.global_batch // s.dp
        fits = divisors(per_replica)
        raise InputError(
            "strategy.micro_batch",
            s.micro_batch,
            f"micro_batch x dp = {s.micro_batch} x {s.dp} does not divide job.global_batch = {job.global_batch}",
            f"use one of {_some(fits)}",
        )
    require_split(model, s)
    if model.experts is not None and s.experts_apart and s.compressor is not None:
        raise InputError(
            "strategy.compression",
            s.compression,
            "is for gradients that all reduce over the same ranks, and experts' reduce over others",
            "use ep=1 and etp=1, or leave it out",
        )
    require_context(model, job.seq, s)
    if s.sp and s.micro_batch * job.seq // s.cp % s.tp:
        raise InputError(
            "strategy.sp",
            1,
            f"tp = {s.tp} does not divide the tokens of a micro-batch, micro_batch x job.seq = "
            f"{s.micro_batch} x {job.seq}" + (f", over cp = {s.cp}" if s.cp > 1 else ""),
            "use another micro_batch, or leave sp out",
        )
    if job.seq > model.max_seq:
        raise InputError(
            "job.seq",
            job.seq,
            f"is longer than model.max_seq = {model.max_seq}",
            "shorten seq or raise model.max_seq",
        )


# Fields that the trainer runs today, with the values it takes (None: any legal one).
_RUNNABLE: dict[str, set[Any] | None] = {
    "dp": None,
    "zero": None,
    "shard": None,
    "tp": None,
    "sp": None,
    "cp": None,
    "ulysses": None,
    "ep": None,
    "etp": None,
    "pp": None,
    "virtual": None,
    "schedule": None,
    "layers": None,
    "micro_batch": None,
    "recompute": None,
    "compression": None,
    "grad_sync": None,
    "reshard": None,
    "bucket": None,
    "prefetch": {0, 1},
    "order": {"pp/dp/cp/tp"},
}


def require_runnable(strategy: Strategy, job: Job) -> None:
    """Refuse by name what is part of the grammar but cannot be run or priced yet."""
    p = job.precision
    _require_in_range(p)
    if strategy.grad_sync == "micro" and strategy.zero < 2:
        raise InputError(
            "strategy.grad_sync", "micro", f"zero={strategy.zero} reduces once a step", "use zero=2 or 3"
        )
    if strategy.grad_sync == "step" and strategy.zero == 3:
        raise InputError(
            "strategy.grad_sync", "step", "zero=3 has no room for whole gradients", "use zero=2, or leave it out"
        )
    if strategy.reshard is not None and strategy.zero != 3:
        raise InputError("strategy.reshard", strategy.reshard, "only zero=3 gathers parameters", "leave it out")
    if strategy.reshard == "action" and strategy.pp > 1:
        raise InputError(
            "strategy.reshard",
            "action",
            "is part of the grammar but not yet runnable with pp > 1",
            "leave it out: each unit is gathered once a step",
        )
    require_compressible(strategy, p.accumulate_dtype)
    if strategy.tp > 1 and strategy.compressor is not None:
        raise InputError(
            "strategy.compression",
            strategy.compression,
            "rounds what all tp ranks hold differently on each",
            "use tp=1, or leave it out",
        )
    if strategy.pp > 1 and strategy.compressor is not None:
        raise InputError(
            "strategy.compression",
            strategy.compression,
            "keeps back what each pipeline rank counts by itself, which a checkpoint cannot say yet",
            "use pp=1, or leave it out",
        )
    for name, runnable in _RUNNABLE.items():
        given = getattr(strategy, name)
        if runnable is not None and given not in runnable:
            usable = ", ".join(_written(v) for v in runnable if v is not None)
            raise InputError(
                f"strategy.{name}",
                given,
                "is part of the grammar but not yet runnable",
                f"leave it out or use {usable}" if usable else "leave it out",
            )


def _require_in_range(p: Precision) -> None:
    """fp16 where a loss scale keeps numbers inside of its range, and nowhere else."""
    for name, dtype, why in (
        ("accumulate", p.accumulate_dtype, "sums of gradients do not fit into its range"),
        ("master", p.master_dtype, "small updates and Adam's eps vanish in it"),
    ):
        if dtype == "float16":
            raise InputError(f"job.precision.{name}", dtype, why, "use float32")
    if p.reduce_dtype == "float16" and p.compute != "float16":
        raise InputError(
            "job.precision.reduce",
            "float16",
            f"needs the loss scale, which compute = {p.compute} does without",
            "use bfloat16, or compression=fp16, which scales every block",
        )


def require_compressible(strategy: Strategy, accumulate: DType) -> None:
    """Refuse what no engine could do: reduce whole buckets where there is room for parts alone."""
    found = compression.parse(strategy.compression)
    if found is None:
        return
    if strategy.zero == 3 and not found.quantised:
        raise InputError(
            "strategy.compression",
            strategy.compression,
            "reduces whole buckets, for which zero=3 has no room",
            "use zero=2, or one of fp16, bf16, int8, int4",
        )
    if accumulate not in ("float32", "float64"):
        raise InputError(
            "job.precision.accumulate", accumulate, "is too coarse for what compression keeps back", "use float32"
        )


def _divides(name: str, part: int, whole_name: str, whole: int) -> None:
    if part < 1 or whole % part:
        raise InputError(f"strategy.{name}", part, f"does not divide {whole_name} = {whole}")


def _written(given: Any) -> str:
    if isinstance(given, bool):
        return str(int(given))
    return f"{given:g}" if isinstance(given, float) else str(given)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
