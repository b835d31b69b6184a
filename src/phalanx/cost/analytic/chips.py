"""Rates that kernels and NCCL achieve on a chip and its links, as a System. The chips' datasheets are in
spec/cluster/chips.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from phalanx.cost.analytic.fitted_constants import resolve
from phalanx.cost.analytic.kernels import product_s
from phalanx.cost.hardware.system import System, TierRates
from phalanx.spec.cluster.calibration import Calibration
from phalanx.spec.cluster.chips import CHIPS, Chip
from phalanx.spec.cluster.spec import MEASURED_PRODUCT, ClusterSpec
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class Generation:
    """Rates achieved by kernels on chips of one generation, and by NCCL on its links. Field names as in System.
    `nvlink`: share of one direction's rate that an all-gather in a node reaches; `nic`: share of a port's rate. Hops
    between nodes: `net` over InfiniBand or RoCE, `cloud` over a provider's own transport (EFA, TCPXO)."""

    gemm: float = 0.78
    gemm_half: float = 200
    gemm8: float = 0.60
    gemm4: float = 0.45
    misaligned: float = 0.25
    odd: float = 0.4
    attention: float = 0.6
    portable_gemm: float = 1.0
    portable_attention: float = 0.42
    portable_backward: float = 0.79
    attention_narrow: float = 0.3
    attention_backward: float = 0.85
    attention_half: float = 500
    vendor_first: float = 0.0
    memory: float = 0.8
    reduce_gain: float = 1.25
    tree: float = 0.0
    nvlink: float = 0.80
    nic: float = 0.90
    node_hop_s: float = 2.5e-6
    node_bulk_s: float = 10e-6
    net_hop_s: float = 5e-6
    net_bulk_s: float = 14e-6
    cloud_hop_s: float = 30e-6
    cloud_bulk_s: float = 150e-6
    bulk_bytes: float = 0.3e6
    bulk_reduce_bytes: float = 1.5e6
    start_s: float = 0.0


# Whether switches reduce (NVLS, from NVLink 4 on): datasheets. Where they do not, `tree` is what NCCL's tree of two
# nodes carries: half (there and back) of 4 channels, one per port (src/graph/tuning.cc). With 8 ports it is twice
# that, but then a ring is as fast.
_TREE_AMPERE = 4 * 23.6e9 / 2
_TREE_VOLTA = 4 * 18.5e9 / 2
_REDUCING = ("hopper", "blackwell", "blackwell-ultra", "rubin")
"""Generations whose switches reduce. Generations without published runs, other makers' too, are assumed to reach the
average shares of NVIDIA's datasheets, without such switches."""
_FLASH_2 = {"attention": 0.63, "portable_attention": 0.63}
_ATTENTION = dict.fromkeys(("ampere", "ampere-gddr", "ada", "blackwell-gddr"), _FLASH_2) | {
    "hopper": {"attention": 0.60},
    "blackwell": {"attention": 0.54},
    "rubin": {"attention": 0.54},
    "blackwell-ultra": {"attention": 0.65},
}
"""Shares of attention from kernels timed alone: the median of prompts of 2,048 tokens and more with heads of 128, by
the libraries that serve with FlashAttention or cuDNN (validate/data/kernels.csv.xz; tests/validate/test_kernels.py).
FlashAttention 2's instructions (mma.sync) reach tensor cores whole on Ampere, Ada and chips with GDDR. Backward over
forward in FLOP/s (`portable_backward`, `attention_backward`): figures of Dao 2023 (A100) and Shah et al. 2024 (H100)
for causal prompts of 16,384."""
_VENDOR_FIRST = {"hopper": 0.5, "blackwell": 1.0, "blackwell-ultra": 1.0, "rubin": 1.0}
"""Highest value of Profile.portable for which torch itself chooses the vendor's attention, by generation; else 0."""
_PARENTS = {"blackwell-ultra": "blackwell", "rubin": "blackwell"}
_DERIVED = frozenset({"gemm", "gemm8", "gemm4", "attention", "portable_attention"})
"""Shares of a System that the clock scales too."""
_AS_FITTED = tuple(f.name for f in fields(System) if f.name in {g.name for g in fields(Generation)} - _DERIVED)
_DEFAULTS = {f.name: float(f.default) for f in fields(Generation)}  # type: ignore[arg-type]


def chain(name: str) -> tuple[str, ...]:
    """Return a generation, then the owners from which it inherits constants, nearest first."""
    if name == "nvidia":
        return (name,)
    return (name, *((_PARENTS[name],) if name in _PARENTS else ()), "nvidia")


def generation(name: str, constants: Mapping[str, float] | None = None) -> Generation:
    """Return a Generation by name."""
    ring = {"reduce_gain": 1.0, "tree": _TREE_VOLTA if name == "volta" else _TREE_AMPERE}
    built = ({} if name in _REDUCING else ring) | _ATTENTION.get(name, {})
    built["vendor_first"] = _VENDOR_FIRST.get(name, 0.0)
    return Generation(**(resolve(_DEFAULTS, chain(name), constants) | built))


def shares(chip: Chip, constants: Mapping[str, float] | None = None) -> Generation:
    """Return the rates that kernels reach on a chip: its generation's fitted ones. No training on other makers' chips
    was fitted, and power keeps clocks below the datasheet's: their products and attention reach the H100's shares,
    times the best measured product over the H100's, each as a share of its datasheet."""
    g, known = generation(chip.generation, constants), CHIPS["H100"]
    if not chip.product or chip.generation == known.generation:
        return g
    ratio, hopper = chip.product / chip.half / (known.product / known.half), generation("hopper", constants)
    return replace(g, **{name: getattr(hopper, name) * ratio for name in _DERIVED})


def system(
    name: str, node: int, nic: float, cloud: bool = False, constants: Mapping[str, float] | None = None
) -> System:
    """Return the System of a chip in nodes (NVLink domains) of `node` ranks, each rank with `nic` bytes/s in one
    direction to other nodes; `cloud`: over a provider's own transport."""
    # Datasheet rates times the generation's achieved shares; a chip's clock scales what runs on its processors.
    chip = CHIPS[name]
    g = shares(chip, constants)
    hop, bulk = (g.cloud_hop_s, g.cloud_bulk_s) if cloud else (g.net_hop_s, g.net_bulk_s)
    as_fitted = {name: getattr(g, name) for name in _AS_FITTED}
    clock = resolve({"clock": chip.clock}, (name,), constants)["clock"]
    portable = g.portable_attention
    if g.vendor_first == 1:
        # Kernels with older instructions: a multiprocessor is as fast with them as one of Hopper.
        old, rate = CHIPS["H100"], generation("hopper", constants).portable_attention
        portable = rate * old.half / old.processors * chip.processors / chip.half
    return System(
        **as_fitted,
        peak_bf16=chip.half,
        peak_fp8=chip.fp8,
        peak_fp4=chip.fp4,
        peak_fp32=chip.single or chip.half,
        peak_tf32=chip.tf32,
        peak_fp64=chip.double or chip.single or chip.half,
        memory_bytes_per_s=chip.bandwidth_bytes_per_s,
        memory_bytes=chip.memory_bytes,
        processors=chip.processors,
        gemm=g.gemm * clock,
        gemm8=g.gemm8 * clock,
        gemm4=g.gemm4 * clock,
        attention=g.attention * clock,
        portable_attention=portable * clock,
        reduce_across=1.0,
        observed=0.0,
        held_up=0.0,
        cut_off=0.0,
        tiers=(
            TierRates(node, chip.link_bytes_per_s * g.nvlink, g.node_hop_s, g.node_bulk_s, g.node_bulk_s),
            TierRates(1 << 30, nic * g.nic, hop, bulk, bulk),
        ),
        host_bytes_per_s=chip.host_bytes_per_s,
        host_memory_bytes_per_s=chip.host_memory_bytes_per_s,
        host_sharers=chip.host_sharers,
    )


def chip_name(device: str) -> str:
    """Return the chip of a device's name, the longest match. Raises InputError if none is known."""
    name = re.sub(r"^(NVIDIA |Tesla |GeForce )+", "", device)
    name = name.replace("SXM4-", "").replace("SXM5-", "").replace("RTX ", "RTX-").replace("PRO ", "PRO-")
    name = name.replace("6000 Ada", "6000-Ada")  # a Quadro RTX 6000 is another
    matches = [known for known in CHIPS if re.match(rf"{known}(?!\w)", name)]  # an A10G is no A10
    if not matches:
        raise InputError(
            "cluster.device", device, "is not a chip with known kernel rates", f"known: {', '.join(CHIPS)}"
        )
    return max(matches, key=len)


def system_of(cluster: ClusterSpec) -> System:
    """Return the System of a described cluster: its tiers and its chip's rates. Measurements recorded by `phalanx
    measure` are used unchanged: rates and latencies of links, and the best product, which scales the chip relative to
    its generation. Raises InputError for an unknown chip."""
    device = cluster.device
    name = chip_name(device.name)
    base, g = system(name, cluster.ranks_per_node, 1.0), generation(CHIPS[name].generation)
    tiers, ranks_below = [], 1
    for i, tier in enumerate(cluster.tiers):
        rate = tier.bandwidth_bytes_per_s_per_gpu_per_direction
        if tier.uplink_bandwidth_bytes_per_s_per_direction is not None:
            rate = min(rate, tier.uplink_bandwidth_bytes_per_s_per_direction / ranks_below)
        share, hop, bulk = (g.nvlink, g.node_hop_s, g.node_bulk_s) if i == 0 else (g.nic, g.net_hop_s, g.net_bulk_s)
        if tier.origin == "measured":
            share, hop = 1.0, tier.latency_s
        bulk = max(bulk, tier.latency_s)
        tiers.append(TierRates(tier.ranks, rate * share, hop, bulk, bulk))
        ranks_below = tier.ranks
    observed = float(cluster.tiers[-1].origin == "measured")
    result = replace(base, memory_bytes=device.usable_bytes, tiers=tuple(tiers), observed=observed)
    if device.origin == "measured":
        return with_calibration(_as_measured(result, cluster), cluster.calibration)
    half = device.dense_flops_per_s.get("bfloat16", base.peak_bf16)
    result = replace(
        result,
        memory_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        peak_bf16=half,
        peak_tf32=base.peak_tf32 * half / base.peak_bf16,
        peak_fp32=device.dense_flops_per_s.get("float32", base.peak_fp32),
        peak_fp64=device.dense_flops_per_s.get("float64", base.peak_fp64),
    )
    return with_calibration(result, cluster.calibration)


def with_calibration(nominal: System, by: Calibration | None) -> System:
    """Return `nominal` with its rates divided by the factors of a calibration."""
    if by is None:
        return nominal
    inside, *between = nominal.tiers
    return replace(
        nominal,
        gemm=nominal.gemm / by.products,
        gemm8=nominal.gemm8 / by.products,
        gemm4=nominal.gemm4 / by.products,
        attention=nominal.attention / by.attention,
        portable_attention=nominal.portable_attention / by.attention,
        memory=nominal.memory / by.memory,
        host=nominal.host * by.host,
        tree=nominal.tree / by.between,
        tiers=(_slower(inside, by.inside), *(_slower(tier, by.between) for tier in between)),
    )


def _slower(tier: TierRates, factor: float) -> TierRates:
    """Return a tier whose messages take `factor` times as long."""
    return TierRates(
        tier.ranks,
        tier.bytes_per_s_per_gpu_per_direction / factor,
        tier.hop_s * factor,
        tier.bulk_hop_s * factor,
        tier.bulk_reduce_hop_s * factor,
    )


def _as_measured(nominal: System, cluster: ClusterSpec) -> System:
    """Return `nominal` scaled so that its products reach the measured rate, attention in proportion. If the links in
    a node were measured, their rate is that of an all-reduce, so no gain by switches is added."""
    result = nominal
    rates = [k.peak_flops_per_s for k in cluster.kernels if k.dtype in ("bfloat16", "float16")]
    if rates:
        n = float(MEASURED_PRODUCT)
        predicted = 2 * n**3 / float(product_s(n, n, n, nominal, nominal.peak_bf16 * nominal.gemm, 2))
        clock = max(rates) / predicted
        shares = ("gemm", "gemm8", "gemm4", "attention", "portable_attention")
        result = replace(result, **{name: getattr(nominal, name) * clock for name in shares})
    inside = cluster.tiers[0]
    return replace(result, reduce_gain=1.0) if inside.origin == "measured" else result
