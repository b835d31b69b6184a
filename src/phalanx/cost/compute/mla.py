"""What latent attention computes in place of projections of queries, keys and values (nn/latent.py)."""

from __future__ import annotations

from phalanx.cost.compute.work import Column, Work, memory
from phalanx.spec.model.mechanisms import Latent
from phalanx.spec.model.spec import ModelSpec


def linears(spec: ModelSpec, a: Latent) -> tuple[tuple[int, int], ...]:
    """(out, in) of the matrix products."""
    h, q, down = spec.hidden, spec.q_width, (a.kv_rank + a.rope_dim, spec.hidden)
    queries = ((q, h),) if a.q_rank is None else ((a.q_rank, h), (q, a.q_rank))
    return (*queries, down, (_up(spec, a), a.kv_rank))


def forward(spec: ModelSpec, a: Latent, t: Column, e: int) -> Work:
    """All else but the core and rotary positions: norms of the latents; keys and values laid out; queries made as
    wide as those are, results as narrow as values."""
    ranks, norms = _ranks(a)
    elements = 5 * ranks + _up(spec, a) + a.rope_dim + 2 * spec.heads * spec.core_dim
    between = (2 * a.v_dim if a.v_dim < spec.core_dim else 0) + _wider(spec, spec.head_dim)
    return memory(t * (elements + spec.heads * between), e, 7 * norms + 3 + (between > 0))


def input_grad(spec: ModelSpec, a: Latent, t: Column, e: int) -> Work:
    """The same of a backward pass, where gradients of keys, of values and of the latent come together."""
    ranks, norms = _ranks(a)
    elements = 16 * ranks + _up(spec, a) + 3 * a.rope_dim + 2 * a.kv_rank + 2 * spec.heads * spec.core_dim
    between = (2 * spec.head_dim if spec.head_dim < spec.core_dim else 0) + _wider(spec, a.v_dim)
    return memory(t * (elements + spec.heads * between), e, 12 * norms + 3 + (between > 0))


def _ranks(a: Latent) -> tuple[int, int]:
    """Of all latents that are normed together, and how many they are."""
    return a.kv_rank + (a.q_rank or 0), 1 + (a.q_rank is not None)


def _up(spec: ModelSpec, a: Latent) -> int:
    return spec.heads * (a.nope_dim + a.v_dim)


def _wider(spec: ModelSpec, width: int) -> int:
    """What is read and written where a head is filled up with zeros."""
    return width + spec.core_dim if width < spec.core_dim else 0
