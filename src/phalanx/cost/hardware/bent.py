"""A measured cluster whose rates are bent by a calibration, for the exact engine, which prices by them alone."""

from __future__ import annotations

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
    uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
    return replace(
        tier,
        latency_s=tier.latency_s * factor,
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
