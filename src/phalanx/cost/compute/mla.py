"""The work of latent attention in place of plain projections of queries, keys and values (nn/mla.py)."""

from __future__ import annotations

from phalanx.cost.compute.work import Column, Work, memory, rms_norm, rms_norm_grad
from phalanx.spec.model.mechanisms import Latent
from phalanx.spec.model.spec import ModelSpec


def linears(spec: ModelSpec, a: Latent) -> tuple[tuple[int, int], ...]:
    """Return (out, in) of its matrix products."""
    h, q, down = spec.hidden, spec.q_width, (a.kv_rank + a.rope_dim, spec.hidden)
    queries = ((q, h),) if a.q_rank is None else ((a.q_rank, h), (q, a.q_rank))
    return (*queries, down, (_up(spec, a), a.kv_rank))


def forward(spec: ModelSpec, a: Latent, t: Column, e: int) -> Work:
    """Return the forward work except products, core and rotary positions: norms of the latents; laying out keys and
    values; padding queries to the width of the core, and narrowing results to that of values."""
    ranks, norms = _ranks(a)
    elements = _up(spec, a) + a.rope_dim + 2 * spec.heads * spec.core_dim
    between = (2 * a.v_dim if a.v_dim < spec.core_dim else 0) + _wider(spec, spec.head_dim)
    return rms_norm(t * ranks, e, norms) + memory(t * (elements + spec.heads * between), e, 3 + (between > 0))


def input_grad(spec: ModelSpec, a: Latent, t: Column, e: int) -> Work:
    """Return the backward work except products, core and rotary positions; the gradients of keys, values and the
    latent are joined."""
    ranks, norms = _ranks(a)
    elements = _up(spec, a) + 3 * a.rope_dim + 2 * a.kv_rank + 2 * spec.heads * spec.core_dim
    between = (2 * spec.head_dim if spec.head_dim < spec.core_dim else 0) + _wider(spec, a.v_dim)
    return rms_norm_grad(t * ranks, e, norms) + memory(t * (elements + spec.heads * between), e, 3 + (between > 0))


def _ranks(a: Latent) -> tuple[int, int]:
    """Return the total width of the normed latents, and their number."""
    return a.kv_rank + (a.q_rank or 0), 1 + (a.q_rank is not None)


def _up(spec: ModelSpec, a: Latent) -> int:
    """Return the width of the product that expands the latent to keys and values of all heads."""
    return spec.heads * (a.nope_dim + a.v_dim)


def _wider(spec: ModelSpec, width: int) -> int:
    """Return elements read and written per head to pad it with zeros to the core's width."""
    return width + spec.core_dim if width < spec.core_dim else 0
