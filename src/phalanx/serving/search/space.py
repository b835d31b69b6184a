"""The legal layouts of a copy of a model over GPUs, under a serving engine."""

from collections.abc import Iterator
from functools import cache

from phalanx.cost.memory.cache import layer_cache
from phalanx.serving.cost.checkpoint import cut_block_error
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.simulation.engines import EngineRow
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Dim
from phalanx.spec.model.spec import ModelSpec


@cache
def _split_dims(model: ModelSpec, mixing: bool) -> tuple[Dim, ...]:
    """Return the dimensions that tensor parallelism splits; `mixing`: of sublayers that mix tokens, or of the
    others."""
    distinct: dict[tuple[Dim, str], Dim] = {}
    for block in architecture(model).kinds:
        for s in block.sublayers:
            if (layer_cache(s) is not None) == mixing:
                dims = [dim for _, w in s.weights() for dim in w.shape if dim.axis == "tp"]
                distinct |= {(dim, dim.of): dim for dim in dims}
    return tuple(distinct.values())


def _undivided(dims: tuple[Dim, ...], tp: int) -> str:
    """Return which dimension `tp` ranks cannot split evenly, and why; empty: none."""
    for dim in dims:
        if not dim.copies and tp > dim.count:
            return f"tp = {tp} is more than {dim.of} = {dim.count}"
        if dim.count % tp and not (dim.copies and tp % dim.count == 0):
            nor = "neither divides" if dim.copies else "does not divide"
            return f"tp = {tp} {nor} {dim.of} = {dim.count}{' nor is a multiple of it' if dim.copies else ''}"
    return ""


def layout_error(model: ModelSpec, x: ServingLayout, engine: EngineRow, block: int = 0) -> str:
    """Return why a layout is illegal for a model; empty: it is legal. `block`: rows of a block of weights that share
    a scale."""
    if reason := _undivided(_split_dims(model, True), x.tp):
        return reason
    if x.pp > model.layers:
        return f"pp = {x.pp} is more than {model.layers} layers"
    width = x.tp * x.attention_dp
    if x.moe_tp * x.moe_ep != width:
        return f"moe_tp x moe_ep = {x.moe_tp} x {x.moe_ep} is not tp x attention_dp = {width}"
    if reason := _undivided(_split_dims(model, False), x.tp):
        return reason
    if reason := cut_block_error(model, x, block):
        return reason
    if model.experts is None:
        if x.moe_ep > 1:
            return "the model has no experts to split by ep"
        return "attention data parallelism is for models with experts: use replicas" if x.attention_dp > 1 else ""
    if model.experts.count % x.moe_ep:
        return f"ep = {x.moe_ep} does not divide {model.experts.count} experts"
    if model.experts.ffn % x.moe_tp:
        return f"moe_tp = {x.moe_tp} does not divide the experts' width {model.experts.ffn}"
    if engine.experts == "all" and x.moe_ep > 1 and x.moe_tp > 1:
        return f"{engine.title} splits experts over all ranks or not at all"
    if engine.attention_dp == "all" and x.attention_dp > 1 and x.tp > 1:
        return f"{engine.title} attends apart on every rank, not on groups of tp = {x.tp}"
    return ""


def layouts(
    model: ModelSpec, gpus: int, engine: EngineRow, node: int, divisors: bool = True, block: int = 0
) -> Iterator[ServingLayout]:
    """Yield the legal layouts of a copy on at most `gpus` GPUs. Degrees are powers of two and, with `divisors`, the
    divisors of `gpus`; a stage stays within a node of `node` GPUs, or fills several nodes."""
    degrees = [d for d in range(1, gpus + 1) if (divisors and gpus % d == 0) or d & (d - 1) == 0]
    for pp in degrees:
        for tp in degrees:
            for attention_dp in degrees if model.experts else (1,):
                width = tp * attention_dp
                if width * pp > gpus or (width > node and width % node):
                    continue
                splits = {(width, 1), (1, width)} if model.experts else {(width, 1)}
                for moe_tp, moe_ep in sorted(splits):
                    x = ServingLayout(tp, pp, attention_dp, moe_tp, moe_ep)
                    if not layout_error(model, x, engine, block):
                        yield x
