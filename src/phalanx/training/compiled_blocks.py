"""Blocks through torch.compile: one graph a block, without breaks, so that its elementwise operations are fused.

Only what a block computes is compiled. Hooks of units (gathers, records) stay outside, parameters are inputs of the
graph, and their gradients reach the data-parallel engine as ever. Blocks of the same shapes share one compiled graph,
which is made when a block first runs; recomputed ones have a second, of the pass that is repeated without its last
product (runtime/autograd/recompute.py). The norms, activation and rotation of nn/functional.py then are plain
formulas, and what is kept for the backward pass is the compiler's choice: so the step that is recorded and compared
with its program, evaluations and the search for non-finite numbers run uncompiled.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from phalanx.nn.decoder import Decoder, DecoderBlock
from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

_OPTION = "train.compile"


def require_compilable(model: ModelSpec, s: Strategy, device: str) -> None:
    """Raise InputError for a model or a strategy whose blocks cannot be compiled, or if there is no compiler.
    `device`: cpu or cuda."""
    reason = ""
    if model.experts is not None:
        reason = "cannot compile experts, whose rows depend on the router"
    elif axis := next((axis for axis in ("tp", "cp", "pp") if getattr(s, axis) > 1), ""):
        reason = f"cannot compile blocks that communicate or defer gradients ({axis} = {getattr(s, axis)})"
    elif s.recompute == "selective":
        reason = "cannot compile blocks of which a part is recomputed (recompute = selective)"
    if reason:
        raise InputError(_OPTION, "blocks", reason, "leave it out, or use dp and zero, with recompute = full or none")
    if device == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise InputError(_OPTION, "blocks", f"needs a C++ compiler ({compiler})", "install g++, or set CXX")
    elif importlib.util.find_spec("triton") is None:
        raise InputError(_OPTION, "blocks", "needs Triton", "install torch for CUDA, which brings it")


def compile_blocks(model: Decoder, backend: str = "inductor") -> None:
    """Make every block of a model compile when it first runs, and again for each new shape of its input: one graph
    for all shapes would be slower, and attention refuses an `is_causal` that depends on a symbolic shape."""
    for block in model.blocks.values():
        compute = cast(DecoderBlock, block).compute
        block.__dict__["compute"] = torch.compile(compute, backend=backend, fullgraph=True, dynamic=False)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Disable compilation of a model's blocks inside the context."""
    blocks = list(getattr(model, "blocks", nn.ModuleDict()).values())
    kept = [block.__dict__.pop("compute", None) for block in blocks]
    try:
        yield
    finally:
        for block, compute in zip(blocks, kept, strict=True):
            if compute is not None:
                block.__dict__["compute"] = compute
