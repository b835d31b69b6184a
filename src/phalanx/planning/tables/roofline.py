"""Rooflines: what bounds compute and communication."""

from phalanx.cost.analytic.chips import chip_name, system_of
from phalanx.planning.explain import operators
from phalanx.planning.explain.operators import Operator
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.presets import PRESETS, preset
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy


def ridges() -> Sheet:
    """Tabulate the FLOP per byte from which compute, not memory or links, is the bound, for each preset of known
    rates."""
    rows = []
    for name in PRESETS:
        cluster = preset(name, 2)
        try:
            system = system_of(cluster)
        except InputError:
            continue
        peak = float(system.peak_bf16)
        inner, outer = cluster.tiers[0], cluster.tiers[-1]
        # Between nodes, ranks may share an uplink.
        near, far = (t.bandwidth_bytes_per_s_per_gpu_per_direction for t in (inner, outer))
        shared = outer.uplink_bandwidth_bytes_per_s_per_direction
        far = min(far, shared / cluster.ranks_per_node) if shared else far
        memory = cluster.device.memory_bandwidth_bytes_per_s
        row = (name, cluster.device.name, peak / 1e12, peak / memory, inner.name, peak / near, outer.name, peak / far)
        rows.append(row)
    return Sheet(
        "ridge points: FLOP per byte",
        columns(
            "cluster | device | dense TFLOP/s [count] | memory [count] | in the node | near [count] "
            "| between nodes | far [count]"
        ),
        rows,
        "dense 2-byte FLOP/s over bytes/s, links of one GPU in one direction (datasheets: no efficiencies)",
    )


def rooflines(pricing: Pricing, s: Strategy) -> list[Sheet]:
    """Tabulate the operators of a block in training, and in decoding one token for one sequence and for 64."""
    job, levels = pricing.job, levels_of(pricing.cluster)
    return [
        _operators(
            f"training: a forward pass of {s.micro_batch} x {job.seq} tokens", operators.training(pricing, s), levels
        ),
        *(
            _operators(
                f"decoding: one token for each of {n} sequences with {job.seq} before it",
                operators.decoding(pricing, s, n, job.seq),
                levels,
            )
            for n in (1, 64)
        ),
        memory_levels(pricing.cluster),
    ]


def memory_levels(cluster: ClusterSpec) -> Sheet:
    """Tabulate the contents of each level of a chip's memory. Raises InputError for an unknown chip."""
    return Sheet(
        f"memory of {cluster.device.name}, inside out",
        columns("level | holds [bytes] | whose"),
        levels_of(cluster),
        "whitepapers and drivers; fused kernels (attention, norms) live by what fits the inner levels",
    )


def levels_of(cluster: ClusterSpec) -> list[tuple[str, float, str]]:
    """Return (name, bytes on the chip, whose) of each level, innermost first. Raises InputError."""
    chip = CHIPS[chip_name(cluster.device.name)]
    processors = int(float(system_of(cluster).processors))
    each, l1 = f"{processors} multiprocessors", chip.l1_bytes_per_processor
    return [
        ("registers", processors * 256 * 1024.0, f"256 KiB in each of {each}"),
        ("L1", processors * l1, f"{l1 / 1024:g} KiB in each of {each}"),
        ("L2", chip.l2_bytes, "of the chip"),
        ("HBM", chip.memory_bytes, "of the device"),
    ]


def level_of(size: float, levels: list[tuple[str, float, str]]) -> str:
    """Return the innermost level that holds `size` bytes."""
    return next((name for name, room, _ in levels if size <= room), levels[-1][0])


def _operators(title: str, operators_: list[Operator], levels: list[tuple[str, float, str]]) -> Sheet:
    rows = [
        (
            o.name,
            o.shape,
            o.flops / 1e9,
            o.bytes_,
            o.intensity,
            o.bound,
            o.seconds,
            o.flops / o.seconds / 1e12,
            level_of(o.bytes_, levels),
        )
        for o in operators_
    ]
    ridge = operators_[0].ridge if operators_ else 0.0
    return Sheet(
        title,
        columns(
            "operator | size | GFLOP [count] | moved [bytes] | FLOP/byte [count] | bound by | takes [s] "
            "| TFLOP/s [count] | held in"
        ),
        rows,
        f"of one block on one rank; the chip's ridge is {ridge:,.0f} FLOP per byte; held in: the innermost memory "
        "with room for all that is moved",
    )
