"""Initial weights that do not depend on the layout, and the model's creation on a device.

Each logical parameter is drawn in fixed blocks of 2^20 elements seeded by (seed, name, block). A rank draws only the
blocks that its slice touches, and every layout starts from the same numbers.
"""

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from phalanx.nn.decoder import Decoder
from phalanx.nn.functional import accumulate_dtype
from phalanx.nn.rotary import rotary_table
from phalanx.nn.weight_source import Weights
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.model_parallel.expert import ExpertParallel
from phalanx.runtime.model_parallel.tensor import TensorParallel
from phalanx.runtime.model_parallel.token_sharding import SequenceTokens
from phalanx.spec.model.spec import ModelSpec, Parameter, buffers
from phalanx.spec.strategy.split import ParameterBox, Split

BLOCK = 2**20
STD = 0.02  # Radford et al. 2019

Initial = Callable[[Parameter, int, int], Tensor]
"""(parameter, start, stop) -> its elements start..stop, flat, on the CPU, in any type."""


def initial_source(spec: ModelSpec, seed: int, weights: Weights | None) -> Initial:
    """Return the source of initial values: `weights`, or draws from `seed`."""
    if weights is not None:
        return lambda p, start, stop: weights.slice(p.fqn, start, stop)
    return lambda p, start, stop: torch.from_numpy(draw(spec, p, seed, start, stop))


@torch.no_grad()
def fill_buffers(model: Decoder, weights: Weights) -> None:
    """Fill the buffers that a model learns without gradients from stored weights, if they contain them."""
    for b in (b for b in buffers(model.spec) if weights.has(b.fqn)):
        model.get_buffer(b.fqn).copy_(weights.slice(b.fqn, 0, b.numel))


def restrict_to_rank(first: Initial, split: Split) -> Initial:
    """Restrict a source of logical tensors to the boxes of one rank of tp, ep and etp, flattened; padding beyond a
    box's elements is zero."""
    if split.unsplit:
        return first
    return lambda p, start, stop: _box_values(first, split.box(p.fqn), start, stop)


def _box_values(first: Initial, box: ParameterBox, start: int, stop: int) -> Tensor:
    p, inside = box.parameter, min(stop, box.numel)
    if start >= inside:
        return torch.zeros(stop - start)
    if box.sizes[1:] == p.shape[1:]:  # full rows, contiguous in the logical tensor too
        begins = box.offsets[0] * math.prod(p.shape[1:])
        values = first(p, begins + start, begins + inside)
    elif box.sizes[2:] == p.shape[2:] and len(p.shape) == 3:  # some rows of each expert
        row, whole = math.prod(box.sizes[1:]), math.prod(p.shape[1:])
        parts = []
        for k in range(start // row, -(-inside // row)):
            begins = (box.offsets[0] + k) * whole + box.offsets[1] * p.shape[2]
            low, high = max(start - k * row, 0), min(inside - k * row, row)
            parts.append(first(p, begins + low, begins + high))
        values = torch.cat(parts)
    else:
        row, whole = math.prod(box.sizes[1:]), math.prod(p.shape[1:])
        low, high = start // row, -(-inside // row)
        at = box.offsets[0] + low
        drawn = first(p, at * whole, (at + high - low) * whole).view(high - low, *p.shape[1:])
        for dim in range(1, len(p.shape)):
            drawn = drawn.narrow(dim, box.offsets[dim], box.sizes[dim])
        values = drawn.reshape(-1)[start - low * row : inside - low * row]
    return torch.cat([values, values.new_zeros(stop - inside)]) if inside < stop else values


def draw(spec: ModelSpec, p: Parameter, seed: int, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Draw elements start..stop of the flattened logical parameter, fp32.

    Norm weights are one, biases zero; matrices are normal with standard deviation 0.02, or 0.02 / sqrt(2 layers) if
    they write into the residual stream (GPT-2); convolutions have torch's variance, 1 / (3 taps). Gates of
    recurrences are as in Mamba-2 (state-spaces/mamba, mamba_ssm/modules/mamba2.py): steps log-uniform in [0.001,
    0.1], decays uniform in [1, 16], skips one.
    """
    # Constants.
    name = p.fqn.rpartition(".")[2]
    of_norm = p.role in ("norm", "head_norm") or (p.role == "index" and len(p.shape) == 1)
    if of_norm or (p.role == "gate" and name == "d"):
        return np.full(stop - start, 0.0 if name == "bias" else 1.0, dtype=np.float32)
    if p.role.endswith("_bias"):
        return np.zeros(stop - start, dtype=np.float32)
    std = STD / (2 * spec.layers) ** 0.5 if p.role in ("row", "expert_row") else STD
    if p.role == "conv":
        std = (3 * p.shape[1]) ** -0.5
    out = np.empty(stop - start, dtype=np.float32)

    # Matrices, block by block, so that any slice has the same values under every layout.
    def fill(block: int) -> None:
        key = hashlib.sha256(f"{seed}/{p.fqn}/{block}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
        size = min(BLOCK, p.numel - block * BLOCK)
        if p.role == "gate":
            values = _gate(name, generator.random(size))
        else:
            values = generator.standard_normal(size, dtype=np.float32) * np.float32(std)
        low, high = max(start, block * BLOCK), min(stop, block * BLOCK + size)
        out[low - start : high - start] = values[low - block * BLOCK : high - block * BLOCK]

    blocks = range(start // BLOCK, -(-stop // BLOCK))
    threads = min(torch.get_num_threads(), len(blocks))
    if threads > 1:  # numpy draws without the interpreter's lock
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, blocks))
    else:
        for block in blocks:
            fill(block)
    return out


def _gate(name: str, uniform: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return initial values of the gate `name` of a recurrence, from uniform draws in [0, 1)."""
    if name == "a_log":
        return np.log(1 + 15 * uniform).astype(np.float32)
    step = np.exp(math.log(0.001) + uniform * math.log(0.1 / 0.001))
    return np.log(np.expm1(step)).astype(np.float32)  # softplus of it is the step


def create(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    parameters: bool = True,
    tp: TensorParallel | None = None,
    cp: ContextParallel | None = None,
    ep: ExpertParallel | None = None,
    tokens: SequenceTokens | None = None,
) -> Decoder:
    """Create a Decoder on a device: parameters allocated but not filled, buffers filled. Without `parameters`,
    parameters have shapes but no memory. `spec`: this rank's part of the model; with `cp` on packed sequences, rotary
    angles are for this rank's positions."""
    with torch.device("meta"):
        model = Decoder(spec, tp=tp, cp=cp, ep=ep, tokens=tokens)
    created: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter has several users
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if p not in created:
                memory = torch.empty(p.shape if parameters else 1, dtype=dtype, device=device)
                created[p] = nn.Parameter(memory if parameters else memory.expand(p.shape))
            setattr(module, name, created[p])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name == "balance":  # a router's bias is a sum of many small steps
                setattr(module, name, torch.zeros(buffer.shape, dtype=accumulate_dtype(dtype), device=device))
            else:
                setattr(module, name, torch.empty(buffer.shape, dtype=dtype, device=device))
    if spec.position == "rotary":
        cos, sin = rotary_table(spec)
        if cp is not None and cp.packed:  # they differ between ranks, and buffers are broadcast: plain attributes
            del model.cos, model.sin
            model.cos, model.sin = (table.to(device, dtype)[cp.own] for table in (cos, sin))
            return model
        model.cos.copy_(cos)
        model.sin.copy_(sin)
    return model
