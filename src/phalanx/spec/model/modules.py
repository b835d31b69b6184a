"""Which mechanisms of models our runtime (nn/) computes, whether or not their step has a price."""

from collections.abc import Iterator

from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.block import Sublayer, products_of
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Index, Norm, Rotary, Router, Scan
from phalanx.spec.model.spec import ModelSpec

ACTIVATIONS = ("swiglu", "geglu", "gelu", "gelu_tanh", "relu2")
"""Activations of MLPs; experts have the first and the last."""
RECURRENCES = ("ssd", "delta", "channel_delta", "lightning")


def require_modules(spec: ModelSpec, cp: int = 1) -> None:
    """Require that the runtime computes every mechanism of a model, over `cp` ranks that share sequences. Raises
    InputError for those that are only described."""
    x = spec.experts
    for name, missing, what in (
        ("sinks", spec.sinks, "attention sinks"),
        ("activation", spec.activation not in ACTIVATIONS, f"the activation {spec.activation}"),
        ("norm_weights", not spec.norm_weights, "norms without weights"),
        ("embed_norm", spec.embed_norm, "a norm of the embedding"),
        ("head_bias", spec.head_bias, "a bias of the head"),
        ("experts.bias", x is not None and x.bias, "experts with biases"),
        ("qk_norm_over", spec.qk_norm and spec.qk_norm_over not in ("head", "all"), "such a norm over heads"),
        ("streams", spec.streams > 1, "hyper-connections"),
        ("mixers", any(m.kind == "experts" for m in spec.mixers), "experts of several kinds"),
        ("output_gate_over", spec.output_gate_over != "element", "a gate of each head"),
        ("experts.identity", x is not None and x.identity > 0, "experts without weights"),
        ("only_priced", bool(spec.only_priced), ", ".join(spec.only_priced)),
    ):
        if missing:
            _refuse(name, what)
    if cp > 1 and spec.latent is not None and spec.latent.index is not None:
        reason = "cuts sequences, and an index chooses among the keys of all ranks"
        raise InputError("strategy.cp", cp, reason, "use cp=1")
    for block in architecture(spec).kinds:
        for sublayer in block.sublayers:
            for what in _missing(spec, sublayer):
                _refuse("mixers", what)


def _missing(spec: ModelSpec, s: Sublayer) -> Iterator[str]:
    """Yield the mechanisms of a sublayer that no module computes, in words."""
    scan, attend, rotary = s.first(Scan), s.first(Attend), s.first(Rotary)
    if scan is not None and scan.kind not in RECURRENCES:
        yield f"the recurrence {scan.kind}"
    if scan is not None and not any(isinstance(op, Norm) and op.y.name == "o" for op in s.operators):
        yield "a recurrence without a norm of its result"
    if scan is None and attend is None and s.name not in ("mlp", "experts", "conv"):
        yield f"the sublayer {s.name}"
    if s.first(Router) is not None and spec.activation not in (ACTIVATIONS[0], ACTIVATIONS[-1]):
        yield f"experts with the activation {spec.activation}"
    if attend is not None and attend.top is not None and s.first(Index) is None:
        yield "attention to keys that an earlier layer's index chose"
    if s.first(Index) is not None and spec.latent is not None and spec.latent.q_rank is None:
        yield "an index without a latent of queries"
    if s.first(Index) is not None and rotary is None:
        yield "an index without positions"
    if attend is None or spec.latent is not None:
        return
    if attend.weights or attend.compressed or attend.top is not None or attend.value != attend.key:
        yield "attention with sinks, chosen or pooled keys, or values of another width"
    if [out.name for out in products_of(s)[0].y][:3] not in (["q", "k", "v"], ["q_down", "k", "v"]):
        yield "attention without a matrix of values"
    if rotary is not None and rotary.turned != spec.rotary_width:
        yield "positions that turn another width in some blocks"


def _refuse(name: str, what: str) -> None:
    raise InputError(f"model.{name}", None, f"{what}: the runtime has no module for it", "train another model")
