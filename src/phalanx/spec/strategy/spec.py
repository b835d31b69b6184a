"""The strategy: how a job is split over ranks. One line (`dp=4,zero=3`) or a TOML table.

    world size = pp x dp x cp x tp          ep x etp divides dp x cp x tp; ulysses divides cp; shard divides dp

The whole grammar is parsed and checked here, field by field. Whether a strategy fits a model, a batch and a world
size, and whether the trainer runs it, is checked in legality.py: what cannot run is refused by name, never ignored.
"""

import math
import re
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import Job
from phalanx.spec.ranges import Count, FilePath, Length, Name, Range, Ranks, require_ranges
from phalanx.spec.strategy import compressors
from phalanx.spec.strategy import recompute as recomputation
from phalanx.spec.strategy.compressors import Compression
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS, ZeroLevel

Schedule = Literal["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
"""Names of pipeline schedules; schedule/pipeline/schedules.py must have a row for each."""
Recompute = Literal["none", "selective", "full"]
AXES = ("pp", "dp", "cp", "tp")
MOST_RANKS = 10**7
"""Upper limit of a world size: more is a typing error."""
DEFAULT_BUCKET_MIB = 25.0  # torch DDP's default


@dataclass(frozen=True)
class Strategy:
    """Degrees of every parallelism, and the behaviour of the engines. The defaults describe one plain process.

    Raises InputError for a field outside its range, and for degrees that do not divide each other.
    """

    dp: Ranks = 1
    """Data-parallel replicas: each takes global_batch / dp sequences a step."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO level (Rajbhandari et al. 2020): the state sharded over the shard group. 0: nothing, gradients are
    all-reduced. 1: optimizer state and master parameters. 2: gradients too. 3: parameters too."""
    shard: Ranks | None = None
    """Replicas that share one model state, a divisor of dp; None: all of them. Fewer than dp is HSDP: dp / shard
    copies of the state, whose gradient shards are all-reduced. Ranks of cp always shard too."""
    tp: Ranks = 1
    """Tensor-parallel ranks: each holds a part of the heads, of the MLP's width and of the vocabulary."""
    sp: bool = False
    """Sequence parallelism (Korthikanti et al. 2022): norms and the residual stream are split by tokens over the tp
    ranks. Needs tp > 1."""
    cp: Ranks = 1
    """Context-parallel ranks: each holds a part of every sequence. cp = ring x ulysses."""
    ulysses: Ranks = 1
    """The part of cp that exchanges tokens for heads (Jacobs et al. 2023), a divisor of cp; the rest is a ring."""
    ep: Ranks = 1
    """Expert-parallel ranks: each holds count / ep of a layer's experts. Folds into dp x cp x tp."""
    etp: Ranks = 1
    """Ranks that split the width of each expert. Folds into dp x cp x tp, as ep does."""
    pp: Ranks = 1
    """Pipeline ranks (stages)."""
    virtual: Annotated[int, Range(1, 10**4)] = 1
    """Chunks of the model per pipeline rank (virtual stages)."""
    schedule: FilePath = "1f1b"
    """Pipeline schedule: the order of forward and backward actions on each stage, by name (`Schedule`) or as a CSV
    file of torch's form (schedule/pipeline/torch_csv.py). Has no effect at pp = 1."""
    layers: Annotated[str, Length(10**5)] = "auto"
    """Blocks of each chunk in forward order, as `7/9/9/7`; auto: balanced by the planner."""
    micro_batch: Count = 1
    """Sequences in a micro-batch. A replica accumulates global_batch / (micro_batch x dp) of them a step."""
    recompute: Name = "none"
    """Activations recomputed in the backward pass: none; selective (attention's core); selective:a+b (modules of
    every block); full (every block); every:k (blocks 0, k, 2k, ...); block:n (the first n blocks of each chunk);
    uniform:n (every block, from the input of each n-th). recompute.py has the grammar."""
    compression: Name = "none"
    """Compression of gradients in transit, with `local` of the replicas' changes; compressors.py has the grammar."""
    grad_sync: Literal["step", "micro"] | None = None
    """When gradients are reduced: once a step, or after every micro-batch. None: micro at zero = 2 and 3, else
    step."""
    reshard: Literal["step", "action"] | None = None
    """When zero = 3 releases gathered parameters: at the end of the step, or after each forward or backward of a
    unit. None: step with a pipeline, else action."""
    bucket: Annotated[float, Range(1e-6, 2**20)] | Literal["auto"] = "auto"
    """MiB of gradients that are reduced together; auto: chosen from the cluster's links."""
    prefetch: Annotated[int, Range(0, 10**4)] = 1
    """Units that zero = 3 gathers ahead of the one in use. The trainer runs 0 and 1."""
    local: Annotated[int, Range(0, 10**6)] = 0
    """Steps that replicas take alone before they synchronise (local SGD, Stich 2019; DiLoCo, Douillard et al. 2023):
    the mean change of their parameters is then the gradient of an outer optimizer (job.outer). Each shard group is
    such a replica. 0: replicas reduce gradients in every step."""
    order: Name = "pp/dp/cp/tp"
    """Mesh axes from the outermost to the innermost, whose groups have neighbouring ranks."""

    def __post_init__(self) -> None:
        require_ranges(self, "strategy")
        # Degrees.
        if self.world > MOST_RANKS:
            raise InputError("strategy", str(self), f"has {self.world:,} ranks", f"at most {MOST_RANKS:,}")
        _require_divisor("shard", self.shard or 1, "dp", self.dp)
        _require_divisor("ulysses", self.ulysses, "cp", self.cp)
        block = self.dp // self.dp_local * self.cp * self.tp
        if block % (self.ep * self.etp):
            raise InputError(
                "strategy.ep",
                self.ep,
                f"ep x etp = {self.ep} x {self.etp} does not divide dp x cp x tp = "
                f"{self.dp // self.dp_local} x {self.cp} x {self.tp} = {block}"
                + (" of a replica that steps alone" if self.dp_local > 1 else ""),
            )
        if not self.level.state and (self.shard or 1) > 1:
            raise InputError("strategy.shard", self.shard, "zero=0 shards nothing", "use zero=1, 2 or 3")
        if self.local and self.dp_local == 1:
            reason = f"needs several replicas, and dp = {self.dp} over dp_shard = {self.dp_shard} is one"
            raise InputError("strategy.local", self.local, reason, "use zero=0, or a shard below dp")
        if self.sp and self.tp == 1:
            raise InputError("strategy.sp", 1, "sequence parallelism runs over the tp ranks", "use tp >= 2")
        # Fields with a grammar.
        if self.schedule not in get_args(Schedule) and not self.schedule.endswith(".csv"):
            remedy = nearest(self.schedule, (*get_args(Schedule), "FILE.csv"))
            raise InputError("strategy.schedule", self.schedule, "is not a pipeline schedule", remedy)
        recomputation.parse(self.recompute)
        if not re.fullmatch(r"auto|[0-9]{1,9}(/[0-9]{1,9})*", self.layers):
            raise InputError(
                "strategy.layers", self.layers, "does not list the blocks of each chunk", "write 7/9/9/7, or use auto"
            )
        compressors.parse(self.compression)
        if sorted(self.order.split("/")) != sorted(AXES):
            raise InputError(
                "strategy.order", self.order, f"must name each of {', '.join(AXES)} once, as pp/dp/cp/tp"
            )

    @property
    def world(self) -> int:
        """World size: the product of the mesh axes."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def level(self) -> ZeroLevel:
        """The state that `zero` shards if there are several ranks to shard over."""
        return ZERO_LEVELS[self.zero]

    @property
    def dp_shard(self) -> int:
        """Replicas that share one model state: 1 at zero=0, else `shard`, or dp where that is None."""
        return (self.shard or self.dp) if self.level.state else 1

    @property
    def dp_local(self) -> int:
        """Replicas that take steps alone: dp / dp_shard with `local`, else 1."""
        return self.dp // self.dp_shard if self.local else 1

    @property
    def dp_replicate(self) -> int:
        """Copies of the model state along dp whose gradients are reduced together: dp / (dp_local x dp_shard)."""
        return self.dp // (self.dp_local * self.dp_shard)

    @property
    def ring(self) -> int:
        """Ranks that pass keys and values around a ring: cp / ulysses."""
        return self.cp // self.ulysses

    @property
    def shards(self) -> int:
        """Ranks over which the model state is sharded: dp_shard x cp, since ranks of cp hold the same parameters."""
        return self.dp_shard * self.cp if self.level.state else 1

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose dense gradients are summed, each from its own tokens: dp x cp / dp_local."""
        return self.dp * self.cp // self.dp_local

    @property
    def separate_experts(self) -> bool:
        """Whether expert gradients reduce over other ranks than dense ones. With tp = ep = etp = 1 the `edp` group is
        the group of dp and cp."""
        return self.tp * self.ep * self.etp > 1

    @property
    def edp(self) -> int:
        """Replicas of an expert, each with its own tokens: dp x cp x tp / (dp_local x ep x etp)."""
        return self.dp * self.cp * self.tp // (self.dp_local * self.ep * self.etp)

    @property
    def gradients_differ_by_rank(self) -> bool:
        """Whether ranks hold different parts of the reduced gradients, so that their norm needs a reduction."""
        return self.shards > 1 or self.pp > 1 or self.separate_experts

    def recompute_of(self, block: int) -> Recompute:
        """Return the recomputation in the backward pass of a block (numbered from 0): none, attention's core, or all.
        Raises InputError for kinds that our runtime lacks: modules, and numbers of blocks per chunk."""
        how = recomputation.parse(self.recompute)
        if how.kind == "every":
            return "none" if block % how.count else "full"
        if how.kind in ("block", "uniform") or how.modules not in ((), ("core_attn",)):
            reason = "is what other stacks recompute, not Phalanx's runtime"
            raise InputError("strategy.recompute", self.recompute, reason, "use none, selective, full or every:k")
        return how.kind  # type: ignore[return-value]

    @property
    def compressor(self) -> Compression | None:
        """The parsed compression of gradients; None if they are not compressed, or not sent."""
        return compressors.parse(self.compression) if self.gradient_ranks > 1 and not self.local else None

    @property
    def outer_compressor(self) -> Compression | None:
        """The parsed compression of what replicas that take steps alone send each other; None if it travels whole."""
        return compressors.parse(self.compression) if self.local else None

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a full bucket; the default if `auto` was not resolved (planning/auto/bucket_size.py)."""
        return int((DEFAULT_BUCKET_MIB if self.bucket == "auto" else self.bucket) * 2**20)

    def accumulation(self, job: Job) -> int:
        """Return the micro-batches per replica and step: global_batch / (micro_batch x dp)."""
        return job.global_batch // (self.micro_batch * self.dp)

    def __str__(self) -> str:
        """Return the one-line form: only the fields that differ from their defaults, `dp=1` if none does."""
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{f.name}={format_field(getattr(self, f.name))}" for f in changed) or "dp=1"


FIELDS = {f.name: f for f in fields(Strategy)}


def parse(line: str) -> dict[str, Any]:
    """Parse `dp=4,zero=3` into a table; types are checked when a Strategy is built from it.

    Raises InputError for an unknown field, a missing `=`, or a field named twice.
    """
    table: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in line.split(","))):
        name, equals, text = item.partition("=")
        name, text = name.strip(), text.strip()
        if not equals or not text:
            raise InputError("strategy", line, f"{item!r} is not of the form field=value", "e.g. dp=4,zero=3")
        if name.rstrip("<>!") in FIELDS and name not in FIELDS:
            remedy = "give it as a condition (where) to a search"
            raise InputError("strategy", item, "is a condition, where a strategy has a value", remedy)
        if name not in FIELDS:
            raise InputError(f"strategy.{name}", text, "no such field", nearest(name, FIELDS))
        if name in table:
            raise InputError(f"strategy.{name}", text, "is given twice")
        table[name] = text if isinstance(FIELDS[name].default, str) and name != "bucket" else value(text)
    return table


def value(text: str) -> Any:
    """Parse a word as bool, int, float or, failing these, a string."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def pieces(ring: int, ulysses: int) -> int:
    """Return the pieces of neighbouring tokens, all of one length, that a rank has of a sequence (schedule/layers/
    context.py)."""
    return 2 if ring > 1 and ulysses % 2 else 1


def divisors(n: int) -> list[int]:
    """Return all divisors of n >= 1, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def _require_divisor(name: str, part: int, total_name: str, total: int) -> None:
    if part < 1 or total % part:
        raise InputError(f"strategy.{name}", part, f"does not divide {total_name} = {total}")


def format_field(field: Any) -> str:
    """Write a field for the one-line form: 1 for True, 0.5 for a float, anything else as printed."""
    if isinstance(field, bool):
        return str(int(field))
    return f"{field:g}" if isinstance(field, float) else str(field)
