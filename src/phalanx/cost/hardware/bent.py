"""A measured cluster with other rates, for the exact engine, which prices by them alone: bent by a calibration, or
with links that are slower."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.spec.cluster.calibration import Calibration
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit, KernelRates, Rates, Tier


def bent(cluster: ClusterSpec, by: Calibration) -> ClusterSpec:
    """Return a cluster whose kernels and links take the factors of `by` times as long."""
    inside, *between = cluster.tiers
    return replace(
        cluster,
        tiers=(_tier(inside, by.inside), *(_tier(tier, by.between) for tier in between)),
        kernels=tuple(_kernels(rates, by) for rates in cluster.kernels),
        collectives=tuple(_fit(fit, by.inside if fit.hosts == 1 else by.between) for fit in cluster.collectives),
    )


def at_shares(cluster: ClusterSpec, shares: Sequence[float]) -> ClusterSpec:
    """Return a cluster whose tiers have a share each of their rates; latencies stay. A collective measured between
    hosts takes all that grows with its bytes from the slowest of the tiers between them."""
    inside = min(
        (x for x, t in zip(shares, cluster.tiers, strict=True) if t.ranks <= cluster.ranks_per_node), default=1
    )
    between = min(
        (x for x, t in zip(shares, cluster.tiers, strict=True) if t.ranks > cluster.ranks_per_node), default=1
    )
    return replace(
        cluster,
        tiers=tuple(_with_rates(tier, 1 / share) for tier, share in zip(cluster.tiers, shares, strict=True)),
        collectives=tuple(_at_share(fit, inside if fit.hosts == 1 else between) for fit in cluster.collectives),
    )


def _at_share(fit: CollectiveFit, share: float) -> CollectiveFit:
    def seconds(size: float, measured: float) -> float:
        return measured + fit.beta_s_per_byte * size * (1 / share - 1)

    return replace(
        fit,
        beta_s_per_byte=fit.beta_s_per_byte / share,
        points=tuple((size, seconds(size, measured)) for size, measured in fit.points),
    )


def _kernels(rates: KernelRates, by: Calibration) -> KernelRates:
    return replace(
        rates,
        forward=_rates(rates.forward, by),
        backward=_rates(rates.backward, by),
        optimizer_per_byte=rates.optimizer_per_byte * by.memory,
    )


def _rates(rates: Rates, by: Calibration) -> Rates:
    return replace(
        rates,
        per_gemm_flop=rates.per_gemm_flop * by.products,
        per_attention_flop=rates.per_attention_flop * by.attention,
        per_byte=rates.per_byte * by.memory,
        per_kernel=rates.per_kernel * by.host,
        per_narrow_flop={name: seconds * by.products for name, seconds in rates.per_narrow_flop.items()},
    )


def _tier(tier: Tier, factor: float) -> Tier:
    return replace(_with_rates(tier, factor), latency_s=tier.latency_s * factor)


def _with_rates(tier: Tier, factor: float) -> Tier:
    uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
    return replace(
        tier,
        bandwidth_bytes_per_s_per_gpu_per_direction=tier.bandwidth_bytes_per_s_per_gpu_per_direction / factor,
        uplink_bandwidth_bytes_per_s_per_direction=None if uplink is None else uplink / factor,
    )


def _fit(fit: CollectiveFit, factor: float) -> CollectiveFit:
    return replace(
        fit,
        alpha_s=fit.alpha_s * factor,
        beta_s_per_byte=fit.beta_s_per_byte * factor,
        points=tuple((size, seconds * factor) for size, seconds in fit.points),
    )
