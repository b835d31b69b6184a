"""Sheets of what is sent and of both rooflines."""

from __future__ import annotations

from phalanx.cost.analytic.chips import system_of
from phalanx.plan import operators
from phalanx.plan.flows import term_of
from phalanx.plan.operators import Operator
from phalanx.plan.pricing import Pricing
from phalanx.plan.sheet import Sheet, columns
from phalanx.plan.subject import Subject
from phalanx.spec.cluster.presets import PRESETS, preset
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy


def sheet(x: Subject) -> Sheet:
    """Each kind of operation of a strategy, per rank and step."""
    rows = []
    whole: dict[str, float] = {}
    for f in x.flows:
        whole[term_of(f.axis)] = whole.get(term_of(f.axis), 0.0) + f.seconds
    for f in x.flows:
        term = term_of(f.axis)
        share = min(1.0, x.priced.terms.get(term, 0.0) / whole[term])
        said = "critical" if share > 0.5 else "hidden" if share < 0.05 else "partly hidden"
        rows.append(
            (
                f.axis,
                f.op,
                f.what,
                f.ranks,
                f.tier,
                f.count,
                f.payload,
                f.sent,
                f.network,
                f.sent * x.strategy.world,
                f.seconds,
                said,
            )
        )
    node = x.pricing.cluster.ranks_per_node
    port = sum(f.network for f in x.flows)
    return Sheet(
        f"what {x.strategy} sends in a step",
        columns(
            "axis",
            "operation",
            "of",
            ("ranks", "count"),
            "links",
            ("times", "count"),
            ("payload", "bytes"),
            ("sent", "bytes"),
            ("over the network", "bytes"),
            ("all ranks", "bytes"),
            ("alone", "s"),
            "critical or hidden",
        ),
        rows,
        "payload: the buffer of one operation as nccl-tests counts it; sent, over the network: by one rank, "
        "a ring's bytes on the wire; all ranks: sent x world; alone: where nothing hides it. Busiest link: a rank's "
        f"port, {port / 2**30:.2f} GiB a step, {node * port / 2**30:.2f} a node",
    )


def ridges() -> Sheet:
    """FLOP per byte at which memory and links keep up with the chip, of every cluster with a known chip."""
    rows = []
    for name in PRESETS:
        cluster = preset(name, 2)
        try:
            system = system_of(cluster)
        except InputError:
            continue
        peak = float(system.peak_bf16)
        inner, outer = cluster.tiers[0], cluster.tiers[-1]
        near, far = (t.bandwidth_bytes_per_s_per_gpu_per_direction for t in (inner, outer))
        shared = outer.uplink_bandwidth_bytes_per_s_per_direction
        far = min(far, shared / cluster.ranks_per_node) if shared else far
        memory = cluster.device.memory_bandwidth_bytes_per_s
        row = (name, cluster.device.name, peak / 1e12, peak / memory, inner.name, peak / near, outer.name, peak / far)
        rows.append(row)
    return Sheet(
        "ridge points: FLOP per byte",
        columns(
            "cluster",
            "device",
            ("dense TFLOP/s", "count"),
            ("memory", "count"),
            "in the node",
            ("near", "count"),
            "between nodes",
            ("far", "count"),
        ),
        rows,
        "dense 2-byte FLOP/s over bytes/s, links of one GPU in one direction (datasheets: no efficiencies)",
    )


def rooflines(pricing: Pricing, s: Strategy) -> list[Sheet]:
    """Operators of a block in training, and in decoding one token for one sequence and for 64."""
    job = pricing.job
    return [
        _operators(f"training: a forward pass of {s.micro_batch} x {job.seq} tokens", operators.training(pricing, s)),
        *(
            _operators(
                f"decoding: one token for each of {n} sequences with {job.seq} before it",
                operators.decoding(pricing, s, n, job.seq),
            )
            for n in (1, 64)
        ),
    ]


def _operators(title: str, found: list[Operator]) -> Sheet:
    rows = [(o.name, o.shape, o.flops / 1e9, o.bytes_, o.intensity, o.bound, o.seconds) for o in found]
    ridge = found[0].ridge if found else 0.0
    return Sheet(
        title,
        columns(
            "operator",
            "size",
            ("GFLOP", "count"),
            ("moved", "bytes"),
            ("FLOP/byte", "count"),
            "bound by",
            ("takes", "s"),
        ),
        rows,
        f"of one block on one rank; the chip's ridge is {ridge:,.0f} FLOP per byte",
    )
