"""Software stacks by name: what they fuse, hide, launch and allocate, as physical constants.

A Profile says nothing about hardware (cost/stack/system.py) or about a model. `PROFILES` holds one per stack and
release; a release says only in what it differs from the one that it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from phalanx.cost.stack.columns import Column
from phalanx.spec.errors import InputError, nearest


@dataclass(frozen=True)
class Profile:
    """Constants of one stack and release. Bytes are per element of what they name, of the forward pass; overlaps are
    the share of a transfer that is hidden where there is enough to hide it behind."""

    name: str
    flash: Column = 1.0
    """Whether attention never writes its scores."""
    score_bytes: Column = 0.0
    """Traffic per score of attention that does: masked softmax and dropout, in 2-byte elements."""
    hidden_bytes: Column = 20.0
    """Traffic per token and hidden element of a block beside the products: norms, residuals, rotary, dropout."""
    ffn_bytes: Column = 8.0
    """The same per element inside the MLP: activation, gate, bias."""
    backward_traffic: Column = 1.6
    """Backward over forward, of both."""
    logit_bytes: Column = 14.0
    """Traffic per logit of the loss, forward and backward together."""
    gemm: Column = 1.0
    """Matrix products against the chip's own best."""
    attention: Column = 1.0
    cast_bytes: Column = 6.0
    """Traffic per element that is turned into an 8-bit (or smaller) format."""
    launch_s: Column = 0.6e-3
    """CPU time to launch a block's forward pass; the GPU is never faster than it."""
    launch_backward: Column = 1.5
    """Backward over forward, of launches."""
    tp_overlap: Column = 0.3
    dp_overlap: Column = 0.7
    pp_overlap: Column = 0.0
    ep_overlap: Column = 0.0
    contention: Column = 1.05
    """How much slower compute is while something travels beside it."""
    scatter_gather: Column = 1.0
    """Whether a pipeline's messages are cut over the tp ranks (Narayanan et al. 2021, section 4.1)."""
    gradient_bytes: Column = 4.0
    """Of a gradient that travels."""
    parameter_bytes: Column = 2.0
    """Of a gathered parameter."""
    optimizer_bytes: Column = 30.0
    """Traffic per parameter of norm, clipping and update."""
    bucket_bytes: Column = 160e6
    """Of gradients that travel together."""
    step_s: Column = 0.02
    """Once per step: data, the norm's exchange, logging."""
    token_bytes: Column = 8.0
    """Traffic per routed token and hidden element: permutation there and back."""
    router_s: Column = 1.0e-4
    """Of a layer of experts: routing, and the wait for the counts."""
    jitter: Column = 0.0
    """Loss per doubling of ranks beyond a node: the slowest rank sets the pace."""


PROFILES: dict[str, Profile] = {}


def derived(name: str, base: Profile | None = None, **changes: float) -> Profile:
    """A release: its base with changes. It is entered under its name."""
    made = replace(base or Profile(name), name=name, **changes)
    PROFILES[name] = made
    return made


def profile(name: str) -> Profile:
    """By name. Raises InputError."""
    if name not in PROFILES:
        raise InputError("profile", name, "is not a software stack that Phalanx knows", nearest(name, PROFILES))
    return PROFILES[name]


CONSTANTS = tuple(f.name for f in fields(Profile) if f.name != "name")


_MEGATRON = derived("megatron-core", hidden_bytes=16.0, ffn_bytes=6.0)
_2021 = derived(
    "megatron-2021",
    flash=0.0,
    score_bytes=12.0,
    gradient_bytes=2.0,
    tp_overlap=0.0,
    dp_overlap=0.0,
    launch_s=0.7e-3,
)
derived("megatron-2020", _2021)
derived("megatron-2022", _2021)
derived("megatron-deepspeed-2022", _2021, scatter_gather=0.0)
derived("nanotron", hidden_bytes=30.0, ffn_bytes=10.0, launch_s=1.5e-3)
derived("llm-foundry", hidden_bytes=30.0, ffn_bytes=8.0)
derived("torchtitan-eager", hidden_bytes=34.0, ffn_bytes=12.0)
derived("torchtitan-compiled", hidden_bytes=16.0)
derived("maxtext", hidden_bytes=16.0, launch_s=0.0)
derived("pax", hidden_bytes=16.0, launch_s=0.0)
for _release in ("23.05", "24.03", "24.11", "25.02", "25.04", "25.05"):
    derived(f"nemo-{_release}", _MEGATRON)
for _release in ("25.09", "25.11", "26.02", "26.02.01", "26.04", "26.04.01", "26.06", "26.06.01", "26.08"):
    derived(f"megatron-bridge-{_release}", _MEGATRON)
