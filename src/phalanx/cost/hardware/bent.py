"""A measured cluster with other rates, for the exact engine: scaled by a calibration, or with slower links."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.spec.cluster.calibration import Calibration
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit, KernelRates, Rates, Tier


def scaled_cluster(cluster: ClusterSpec, by: Calibration) -> ClusterSpec:
    """Return a cluster whose kernels and links take the factors of `by` times as long."""
    inside, *between = cluster.tiers
    return replace(
        cluster,
        tiers=(_tier(inside, by.inside), *(_tier(tier, by.between) for tier in between)),
        kernels=tuple(_kernels(rates, by) for rates in cluster.kernels),
        collectives=tuple(_fit(fit, by.inside if fit.hosts == 1 else by.between) for fit in cluster.collectives),
    )


def cluster_at_shares(cluster: ClusterSpec, shares: Sequence[float]) -> ClusterSpec:
    """Return a cluster whose tiers keep these shares of their rates, and all of their latencies. The part of a
    measured collective's time that grows with its bytes is divided by the least share inside a host, or between
    hosts."""
    tiers = list(zip(shares, cluster.tiers, strict=True))
    inside = min((x for x, t in tiers if t.ranks <= cluster.ranks_per_node), default=1)
    between = min((x for x, t in tiers if t.ranks > cluster.ranks_per_node), default=1)
    return replace(
        cluster,
        tiers=tuple(_with_rates(tier, 1 / share) for share, tier in tiers),
        collectives=tuple(_at_share(fit, inside if fit.hosts == 1 else between) for fit in cluster.collectives),
    )


def _at_share(fit: CollectiveFit, share: float) -> CollectiveFit:
    slower = 1 / share - 1
    return replace(
        fit,
        beta_s_per_byte=fit.beta_s_per_byte / share,
        points=tuple((size, seconds + fit.beta_s_per_byte * size * slower) for size, seconds in fit.points),
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
