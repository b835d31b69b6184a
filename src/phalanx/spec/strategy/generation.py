"""Legality of text generation: fields that split layers, stages, experts and prompts are allowed; fields of training
only are not."""

from dataclasses import fields, replace

from phalanx.spec.errors import InputError
from phalanx.spec.model.modules import require_modules
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import require_split

_USED = ("dp", "tp", "pp", "ep", "etp", "layers", "order")


def require_generation(model: ModelSpec, s: Strategy) -> None:
    """Require that a model generates text under a strategy. Raises InputError naming a field that concerns only
    training, a degree that does not divide the model, or a model whose choices of experts need later tokens."""
    require_modules(model)
    for f in fields(s):
        if f.name not in _USED and getattr(s, f.name) != f.default:
            remedy = f"generation takes {', '.join(_USED)}"
            raise InputError(f"strategy.{f.name}", getattr(s, f.name), "is of training", remedy)
    if s.tp > model.heads:
        reason = f"is more than the model's {model.heads} heads, which are not split"
        raise InputError("strategy.tp", s.tp, reason, "use fewer, and pp or dp for the other ranks")
    require_split(model, s)
    if s.pp > model.layers + 2:
        raise InputError("strategy.pp", s.pp, f"is too many stages for {model.layers} blocks", "use fewer")
    if model.experts is not None and model.experts.chooser == "experts":
        reason = "lets experts choose among all tokens of a text, and generation has no later ones"
        raise InputError("model.experts.chooser", "experts", reason, "train with chooser = tokens to generate")


def serving_model(model: ModelSpec) -> ModelSpec:
    """Return the model for generation: experts drop no tokens, since a capacity depends on the length of the text;
    and there are no auxiliary losses."""
    if model.experts is None:
        return model
    return replace(model, experts=replace(model.experts, capacity=None, balance_loss=0.0, z_loss=0.0))
