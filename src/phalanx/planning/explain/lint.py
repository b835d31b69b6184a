"""Anti-patterns in a strategy, each with numbers and a remedy; a strategy without any yields no findings."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any

from phalanx.planning.explain.lint_subject import Alternative, Finding, Lint, LintSubject
from phalanx.planning.explain.targets import IMBALANCE, MICRO_BATCHES, TOKENS
from phalanx.schedule.pipeline.schedules import facts_of
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.job import DTYPE_BYTES
from phalanx.spec.strategy.compressors import PLACE_BYTES, GatheredElements
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, format_field
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

_WORTH = 0.01
"""A remedy that saves less than this share of the step is not reported."""


def lint(subject: LintSubject) -> list[Finding]:
    """Return the findings of every lint, in the order of LINTS, and then other single changes that save much."""
    listed = [finding for name in LINTS for finding in LINTS[name](subject)]
    return [*listed, *_savings(subject, listed)]


_SAVES = 0.05
"""Share of the step, or of the memory, from which any single change that saves it is reported."""


def _savings(x: LintSubject, reported: Sequence[Finding]) -> Iterator[Finding]:
    """Report the best single change of each field that saves time, or memory at no cost in time, unless another
    finding is about that field."""
    (needs, has), now_s = x.memory, x.comparable_seconds
    if needs > has:
        return
    said = [f.remedy for f in reported]
    faster: dict[str, tuple[str, Alternative]] = {}
    smaller: dict[str, tuple[str, Alternative]] = {}
    for field, line, p in x.gains():
        if any(f"{field}=" in remedy for remedy in said):
            continue
        if p.seconds <= (1 - _SAVES) * now_s and (field not in faster or p.seconds < faster[field][1].seconds):
            faster[field] = line, p
        least = smaller[field][1].bytes_ if field in smaller else (1 - _SAVES) * needs
        if p.seconds <= now_s and p.bytes_ <= least:
            smaller[field] = line, p
    for line, p in sorted(faster.values(), key=lambda way: way[1].seconds):
        problem = f"a step takes {now_s:.3g} s, and {p.seconds:.3g} s with {line} ({_of_memory(p, has)})"
        yield Finding("faster-setting", problem, f"{line} saves {1 - p.seconds / now_s:.0%}")
    for line, p in sorted((w for name, w in smaller.items() if name not in faster), key=lambda way: way[1].bytes_):
        problem = f"the fullest rank holds {needs / GIB:.1f} GiB, and {p.bytes_ / GIB:.1f} GiB with {line}, as fast"
        yield Finding("less-memory", problem, f"{line} saves {1 - p.bytes_ / needs:.0%} of the memory")


def _of_memory(p: Alternative, has: float) -> str:
    return f"{p.bytes_ / GIB:.1f} of {has / GIB:.1f} GiB"


def _too_large(x: LintSubject) -> Iterator[Finding]:
    """Report a need for more memory than a device has."""
    needs, has = x.memory
    if needs > has:
        problem = f"{needs / GIB:.1f} GiB do not fit in the {has / GIB:.1f} GiB of a device"
        fitting = _smaller(x)
        yield Finding("too-large", problem, f"{fitting}; or more GPUs" if fitting else f"{_NO_CHANGE}: more GPUs")
    host = x.cluster.host_memory_bytes
    if host is not None and x.host_bytes > host:
        problem = f"offloaded state takes {x.host_bytes / GIB:.1f} GiB of a host, which has {host / GIB:.1f} GiB"
        yield Finding("too-large", problem, "more nodes, a smaller optimizer_offload, or shards without offloading")


def _tight(x: LintSubject) -> Iterator[Finding]:
    """Report less free memory than a search leaves."""
    needs, has = x.memory
    if (1 - x.headroom) * has < needs <= has:
        left = f"leave {1 - needs / has:.1%} free, and plan would leave {x.headroom:.0%}"
        problem = f"{needs / GIB:.1f} of {has / GIB:.1f} GiB {left}"
        yield Finding("tight-memory", problem, _smaller(x) or _NO_CHANGE)


_NO_CHANGE = "no change of recomputation, ZeRO, micro-batch or axes fits"
_WAYS = (2, 4, 8)
"""Ranks among which a replica may be split further."""


def _smaller(x: LintSubject) -> str:
    """Return the fastest one or two changes with which a strategy fits, and the fastest offloading with which one
    fits that does not fit otherwise; in words, "" if there is none."""
    s = x.strategy
    repeated: list[dict[str, Any]] = [{"recompute": "selective"}, {"recompute": "full"}]
    sharded: list[dict[str, Any]] = []
    if s.gradient_ranks > 1:
        sharded = [{"zero": level.number} for level in ZERO_LEVELS[s.zero + 1 :]]
    small: list[dict[str, Any]] = [{"micro_batch": 1}] if s.micro_batch > 1 else []
    split: list[dict[str, Any]] = [
        {axis: getattr(s, axis) * ways, "dp": s.dp // ways}
        for axis, ways in product(("tp", "pp"), _WAYS)
        if x.sets(axis) and s.dp % ways == 0 and s.shard is None
        if (s.tp * ways <= x.cluster.ranks_per_node if axis == "tp" else s.edp % ways == 0)
    ]
    pairs = [one | other for one, other in (*product(sharded, [*repeated, *small]), *product(small, repeated))]
    each = [(change, x.alternative(replace(s, **change))) for change in (*repeated, *small, *sharded, *split, *pairs)]
    fitting = [(p.seconds, len(change), _line(change)) for change, p in each if p is not None and p.strategy != s]
    on_host = sorted((p.seconds, line) for line, p in x.offloaded() if x.alternative(p.strategy) is None)
    remedies = [f"{min(fitting)[-1]} fits"] if fitting else []
    remedies += [f"{on_host[0][1]} fits"] if on_host else []
    return "; or ".join(remedies)


def changed_fields(s: Strategy, other: Strategy) -> str:
    """Return the fields in which another strategy differs, as a line of settings."""
    names = (f.name for f in fields(Strategy) if getattr(s, f.name) != getattr(other, f.name))
    return ",".join(f"{name}={format_field(getattr(other, name))}" for name in names)


def _line(change: dict[str, Any]) -> str:
    return ",".join(f"{name}={value}" for name, value in change.items())


def _wide_tp(x: LintSubject) -> Iterator[Finding]:
    """Report a tp that spans more ranks than the fastest links join."""
    s, node = x.strategy, x.cluster.ranks_per_node
    fast = x.cluster.tiers[0].ranks
    if s.tp > 1 and not mesh(s).within("tp", min(fast, node)) and not (s.tp < node and node % s.tp):  # `_straddling`
        best = _fastest_order(x) if s.tp <= min(fast, node) else None
        yield Finding(
            "wide-tp",
            f"tp={s.tp} leaves the {min(fast, node)} ranks that the fastest links join: its communication is "
            f"{x.tensor_parallel:.0%} of the step",
            f"order={best.strategy.order}, whose tp ranks are neighbours"
            if best
            else f"tp at most {min(fast, node)}, more of pp",
        )


def _straddling(x: LintSubject) -> Iterator[Finding]:
    """Report groups of tp, or of cp x tp, that lie partly on one node and partly on another."""
    s, node = x.strategy, x.cluster.ranks_per_node
    inner = s.tp * s.cp
    if 1 < s.tp < node and node % s.tp and s.world > node:
        yield Finding(
            "straddling",
            f"groups of tp={s.tp} do not divide a node of {node}: some lie on two nodes{_costs_now(x, 'tp')}",
            f"tp a divisor of {node}{_inside(x, node)}",
        )
    elif s.cp > 1 and 1 < inner < node and node % inner and s.world > node:
        yield Finding(
            "straddling",
            f"groups of cp x tp = {inner} do not divide a node of {node}: some lie on two nodes{_costs_now(x, 'cp')}",
            f"cp x tp a divisor of {node}",
        )


def _costs_now(x: LintSubject, axis: str) -> str:
    """Return the time of an axis's exposed communication, in words; "" if none is exposed."""
    seconds = x.exposed_seconds(axis)
    return f", and its communication takes {seconds:.3g} s of a step of {x.comparable_seconds:.3g}" if seconds else ""


def _inside(x: LintSubject, node: int) -> str:
    """Return the step time with tp reduced to the next divisor of a node, in words; "" if the number of GPUs does not
    allow it."""
    s = x.strategy
    for tp in (t for t in range(s.tp, 0, -1) if node % t == 0):
        ranks = s.dp * s.tp
        if ranks % tp or (p := x.alternative(replace(s, tp=tp, dp=ranks // tp, shard=None))) is None:
            continue
        return f": tp={tp},dp={ranks // tp} takes {p.seconds:.3g} s"
    return ""


def _few_micro_batches(x: LintSubject) -> Iterator[Finding]:
    """Report fewer micro-batches than stages."""
    s, m = x.strategy, x.strategy.accumulation(x.job)
    if s.pp > 1 and m < s.pp:
        yield Finding(
            "few-micro-batches",
            f"{m} micro-batches do not fill {s.pp} stages: the bubble is {x.bubble:.0%} of the step",
            f"at least {s.pp} micro-batches: a smaller micro_batch, fewer stages, or a larger batch",
        )


def _not_interleaved(x: LintSubject) -> Iterator[Finding]:
    """Report a plain schedule where interleaving would be faster."""
    s, m = x.strategy, x.strategy.accumulation(x.job)
    facts = facts_of(s.schedule)
    plain = facts.chunks == 1 and not facts.split_backward
    if s.pp > 1 and plain and s.pp <= m < MICRO_BATCHES * s.pp:
        for virtual in range(2, (x.model.layers + 2) // s.pp + 1):
            other = replace(s, schedule="interleaved", virtual=virtual)
            p = x.alternative(other)
            if p is not None and p.seconds < (1 - _WORTH) * x.comparable_seconds:
                gain = 1 - p.seconds / x.comparable_seconds
                yield Finding(
                    "not-interleaved",
                    f"M = {m} micro-batches are fewer than {MICRO_BATCHES}P = {MICRO_BATCHES * s.pp}: the bubble is "
                    f"{x.bubble:.0%} of the step",
                    f"virtual={virtual},schedule=interleaved saves {gain:.0%}",
                )
                return


def _small_micro_batch(x: LintSubject) -> Iterator[Finding]:
    """Report too few tokens per micro-batch to keep the chip busy."""
    s = x.strategy
    tokens = s.micro_batch * x.job.seq // s.cp
    if tokens < TOKENS:
        p = _larger_micro_batch(x)
        saved = 1 - p.seconds / x.comparable_seconds if p else 0.0
        gain = f", saves {saved:.0%}" if saved >= _WORTH else ""
        remedy = f"micro_batch={p.strategy.micro_batch}{gain}" if p else "fewer ranks of cp or dp, or a larger batch"
        yield Finding(
            "small-micro-batch", f"a rank multiplies {tokens} tokens at a time, fewer than {TOKENS}", remedy
        )


def _needless_accumulation(x: LintSubject) -> Iterator[Finding]:
    """Report gradient accumulation where a larger micro-batch fits and is faster."""
    s, m = x.strategy, x.strategy.accumulation(x.job)
    if s.pp == 1 and m > 1:
        p = _larger_micro_batch(x)
        if p is not None and p.seconds < (1 - _WORTH) * x.comparable_seconds:
            yield Finding(
                "needless-accumulation",
                f"{m} micro-batches are accumulated, but {p.strategy.micro_batch} sequences at once fit "
                f"({p.bytes_ / GIB:.1f} of {x.memory[1] / GIB:.1f} GiB)",
                f"micro_batch={p.strategy.micro_batch} saves {1 - p.seconds / x.comparable_seconds:.0%}",
            )


def _uneven_heads(x: LintSubject) -> Iterator[Finding]:
    """Report a tp that duplicates key heads, or does not divide the vocabulary."""
    s, kv, vocab = x.strategy, x.model.kv_heads, x.model.vocab
    if s.tp > kv:
        yield Finding(
            "uneven-heads",
            f"tp={s.tp} ranks share {kv} key heads: each is stored and computed {s.tp // kv} times",
            f"tp at most {kv}",
        )
    if vocab % s.tp and vocab / s.tp < 1024:
        yield Finding("uneven-heads", f"a vocabulary of {vocab} is not divisible by tp={s.tp}", "pad the vocabulary")


def _unbalanced_stages(x: LintSubject) -> Iterator[Finding]:
    """Report a slowest stage with clearly more work than the mean."""
    s = x.strategy
    if s.pp > 1 and x.imbalance > IMBALANCE.good:
        blocks = x.model.layers
        yield Finding(
            "unbalanced-stages",
            f"{blocks} blocks and the head over {s.pp} ranks: the slowest has {x.imbalance:.0%} more than the mean",
            "another pp, or virtual stages, which divide the blocks more finely",
        )


def _mesh_order(x: LintSubject) -> Iterator[Finding]:
    """Report a mesh order slower than another."""
    s = x.strategy
    if sum(degree > 1 for degree in (s.pp, s.dp, s.cp, s.tp)) < 2:
        return
    best = _fastest_order(x)
    if best is not None and best.seconds < (1 - _WORTH) * x.comparable_seconds:
        saved = 1 - best.seconds / x.comparable_seconds
        yield Finding(
            "mesh-order",
            f"order={s.order}: axes that send much have far neighbours",
            f"order={best.strategy.order} saves {saved:.0%}",
        )


_ORDERS = ("pp/dp/cp/tp", "dp/pp/cp/tp", "pp/cp/dp/tp", "cp/pp/dp/tp", "dp/cp/pp/tp", "cp/dp/pp/tp")
"""Orders with tp ranks as neighbours; one of them avoids the far links that other orders use."""


def _fastest_order(x: LintSubject) -> Alternative | None:
    """Return the strategy in the fastest other order that has tp ranks as neighbours; None if none can be run."""
    others = [x.alternative(replace(x.strategy, order=order)) for order in _ORDERS if order != x.strategy.order]
    return min((p for p in others if p is not None), key=lambda p: p.seconds, default=None)


def _small_buckets(x: LintSubject) -> Iterator[Finding]:
    """Report buckets whose latency takes longer than their bytes."""
    s = x.strategy
    if s.bucket == "auto" or s.gradient_ranks == 1:
        return
    grid = mesh(s)
    tier = grid.tier(grid.gradient_axis, x.cluster)
    rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
    # A ring of p ranks takes 2(p-1) steps of latency: its crossover is p times the link's.
    crossover = tier.latency_s * rate * s.gradient_ranks
    if s.bucket_bytes < crossover:
        yield Finding(
            "small-buckets",
            f"buckets of {s.bucket_bytes / 2**20:.3g} MiB are below the crossover of {tier.name} over "
            f"{s.gradient_ranks} ranks, p x alpha x rate = {crossover / 2**20:.3g} MiB: latency takes "
            "more than bytes",
            "bucket=auto, or a larger one",
        )


def _idle(x: LintSubject) -> Iterator[Finding]:
    """Report a strategy that uses fewer GPUs than there are."""
    s = x.strategy
    if s.world < x.gpus:
        yield Finding(
            "idle-gpus", f"{x.gpus - s.world} of {x.gpus} GPUs are idle", f"choose degrees whose product is {x.gpus}"
        )


def _needless_recompute(x: LintSubject) -> Iterator[Finding]:
    """Report recomputation if the step also fits with none or less of it, and is faster."""
    for kind in ("none", "selective") if x.strategy.recompute != "none" else ():
        p = x.alternative(replace(x.strategy, recompute=kind))
        if p is not None and p.seconds < (1 - _WORTH) * x.comparable_seconds:
            saved = x.comparable_seconds - p.seconds
            yield Finding(
                "needless-recompute",
                f"recompute={x.strategy.recompute} costs {saved:.3g} s of a step of {x.comparable_seconds:.3g}, and "
                f"recompute={kind} fits as well ({p.bytes_ / GIB:.1f} of {x.memory[1] / GIB:.1f} GiB)",
                f"recompute={kind} saves {saved / x.comparable_seconds:.0%}",
            )
            return


def _needless_zero3(x: LintSubject) -> Iterator[Finding]:
    """Report ZeRO-3 where a lower level fits and is faster."""
    if not x.strategy.level.parameters:
        return
    for zero in (level.number for level in ZERO_LEVELS[: x.strategy.zero]):
        shard = x.strategy.shard if zero else None
        p = x.alternative(replace(x.strategy, zero=zero, shard=shard))
        if p is not None and p.seconds < x.comparable_seconds:
            yield Finding(
                "needless-zero3",
                f"zero={zero} fits as well ({p.bytes_ / GIB:.1f} of {x.memory[1] / GIB:.1f} GiB), and "
                "gathers parameters once a step or never",
                f"zero={zero} saves {1 - p.seconds / x.comparable_seconds:.1%}",
            )
            return


def _wide_gradients(x: LintSubject) -> Iterator[Finding]:
    """Report gradients reduced in a wider type than they are computed in."""
    p, s = x.job.precision, x.strategy
    if s.gradient_ranks > 1 and p.compute in ("bfloat16", "float16") and p.reduce == "float32":
        half = DTYPE_BYTES["float32"] // DTYPE_BYTES[p.compute]
        yield Finding(
            "wide-gradients",
            f"gradients of {p.compute} products are reduced in float32: {x.gradients_sent / GIB:.2f} GiB a rank and "
            f"step, {half} times what they need",
            f"job.precision.reduce={'bfloat16' if p.compute == 'bfloat16' else 'float32 with compression=fp16'}",
        )


def _losing_compressor(x: LintSubject) -> Iterator[Finding]:
    """Report a compressor of gathered elements that sends more than the dense all-reduce."""
    s = x.strategy
    c, p = s.compressor, s.gradient_ranks
    if c is None or not isinstance(c.row, GatheredElements) or c.row.counted:
        return
    e, share = DTYPE_BYTES[x.job.precision.accumulate_dtype], c.row.share(c, p)
    element = e + PLACE_BYTES
    sparse, dense = (p - 1) * share * element, 2 * (p - 1) / p * e
    if sparse >= dense:
        most = 2 * e / element / share
        yield Finding(
            "losing-compressor",
            f"{s.compression} over {p} ranks travels by all-gather: {sparse:.2f} bytes sent per gradient, "
            f"{dense:.2f} by the dense all-reduce",
            f"at most {int(most)} ranks, or a smaller share than {2 * e / element / p:.2g}",
        )


LINTS: dict[str, Lint] = {
    "too-large": _too_large,
    "tight-memory": _tight,
    "wide-tp": _wide_tp,
    "straddling": _straddling,
    "few-micro-batches": _few_micro_batches,
    "not-interleaved": _not_interleaved,
    "small-micro-batch": _small_micro_batch,
    "needless-accumulation": _needless_accumulation,
    "uneven-heads": _uneven_heads,
    "unbalanced-stages": _unbalanced_stages,
    "mesh-order": _mesh_order,
    "small-buckets": _small_buckets,
    "idle-gpus": _idle,
    "needless-recompute": _needless_recompute,
    "needless-zero3": _needless_zero3,
    "wide-gradients": _wide_gradients,
    "losing-compressor": _losing_compressor,
}


def _larger_micro_batch(x: LintSubject) -> Alternative | None:
    """Return the strategy with the fastest larger micro-batch that fits; None if no larger one is faster."""
    best: Alternative | None = None
    size = 2 * x.strategy.micro_batch
    while size * x.strategy.dp <= x.job.global_batch:
        p = x.alternative(replace(x.strategy, micro_batch=size))
        if p is not None and p.seconds < (best.seconds if best else x.comparable_seconds):
            best = p
        size *= 2
    return best
