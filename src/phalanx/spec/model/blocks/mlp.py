"""The MLP: dense or gated (Shazeer 2020), whole or as one of many experts with a router (Shazeer et al. 2017), with
shared experts (DeepSeek-V2), and experts in a narrower latent space (Nemotron 3)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.mixer import MixerSizes
from phalanx.spec.model.blocks.operators import (
    GATED,
    Activate,
    Combine,
    Dim,
    Dispatch,
    Linear,
    Norm,
    Operator,
    Output,
    Role,
    Router,
    Rows,
    Weight,
    added,
    linear,
    whole,
)
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.ranges import Range


@dataclass(frozen=True)
class MlpSizes(MixerSizes):
    """A dense MLP that differs from the model's own."""

    ffn: Annotated[int, Range(1, 10**7)]
    """Width inside it."""
    divided: ClassVar = ("ffn",)
    kind: Literal["mlp"] = "mlp"
    """The mechanism."""


@dataclass(frozen=True)
class ExpertsSizes(MixerSizes):
    """Experts that differ from the model's own."""

    of: Experts
    """Their sizes."""
    kind: Literal["experts"] = "experts"
    """The mechanism."""


def _mlp(
    h: Dim,
    ffn: Dim,
    activation: str,
    bias: bool,
    prefix: str = "",
    x: str = "n",
    rows: Rows = "all",
    experts: Dim | None = None,
) -> list[Operator]:
    parts = ("gate", "up") if activation in GATED else ("up",)
    names = tuple(f"{prefix}{part}" for part in parts)
    role_in: Role | Literal[""] = "expert_column" if experts else ""
    role_out: Role | Literal[""] = "expert_row" if experts else ""
    last = added(h.size, "own" if rows == "all" else rows)
    return [
        linear(x, h, tuple(Output(name, ffn, rows) for name in names), names, bias, role_in, experts),
        Activate(activation, names, Output("a", ffn, rows)),
        linear("a", ffn, (last,), (f"{prefix}down",), bias, role_out, experts),
    ]


def mlp(
    hidden: int, ffn: int, activation: str, norm: Norm | None, *, bias: bool = False, after: Norm | None = None
) -> Sublayer:
    """Return a dense MLP of width `ffn`."""
    return Sublayer("mlp", norm, tuple(_mlp(whole(hidden), Dim(ffn, 1, "tp", of="ffn"), activation, bias)), after)


def experts(
    hidden: int, sizes: Experts, activation: str, norm: Norm | None, *, bias: bool = False, after: Norm | None = None
) -> Sublayer:
    """Return a mixture of experts. `bias`: of the shared expert's matrices."""
    h, inner = whole(hidden), whole(sizes.latent or hidden)
    choices = whole(sizes.count + sizes.identity)
    router = [Weight("router.weight", (choices, h), "router")]
    router += [Weight("router.bias", (choices,), "router_bias")] if sizes.router_bias else []
    ops: list[Operator] = [Linear("n", h, (Output("logits", choices, "routed"),), tuple(router))]
    route = (sizes.count, sizes.top_k, sizes.chooser, sizes.capacity, sizes.identity)
    ops.append(Router(*route, sizes.balance_loss, sizes.z_loss))
    if sizes.latent:
        ops.append(linear("n", h, (Output("narrow", inner, "routed"),), ("narrow",)))
    ops.append(Dispatch(inner.size))
    # Buckets fill from the end: backward finishes the experts first, then the shared expert (while the gradients of
    # the experts' rows travel), and last the router.
    if sizes.shared_ffn:
        ops += _mlp(h, Dim(sizes.shared_ffn, 1, "tp", of="experts.shared_ffn"), activation, bias, "shared.")
        if sizes.shared_gate:
            ops.append(linear("n", h, (Output("shared.scale", whole(1), "own"),), ("shared.scale",)))
            ops.append(Activate("sigmoid_gate", ("y", "shared.scale"), added(hidden)))
    count, width = Dim(sizes.here, 1, "ep", of="experts.count"), Dim(sizes.ffn, 1, "etp", of="experts.ffn")
    ops += _mlp(inner, width, activation, sizes.bias, "experts.", "rows", "received", count)
    ops.append(Combine(inner.size, sizes.top_k))
    if sizes.latent:
        ops.append(linear("y", inner, (Output("y", h, "routed"),), ("wide",)))
    return Sublayer("mlp", norm, tuple(ops), after, leaves="complete", shared=sizes.shared_ffn > 0)
