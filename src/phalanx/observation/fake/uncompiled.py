"""Programs that call torch.compile: while they are observed, compiled functions run as written.

A compiler needs kernels; an observation needs operations. So `torch.compile` returns its argument, and says so.
Collectives and FLOPs are as in the compiled program, unless its backend reorders or fuses collectives. Live bytes
are as in the program as written: a compiler may keep fewer activations.

FlexAttention is an exception: uncompiled, it would write its scores. It is recorded as the fused kernel that it
becomes: output and logsumexp in memory, FLOPs over the full square as for any attention. A block mask has the shapes
that the compiled `create_block_mask` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex


@contextmanager
def uncompiled(note: Callable[[str], None]) -> Iterator[None]:
    """Disable torch.compile inside the block; report each kind of skipped call to `note`."""
    masks = flex.create_block_mask

    def as_written(model: Any = None, **options: Any) -> Any:
        """Replace `torch.compile`, called with a function or as a decorator with options."""
        if model is None:
            return lambda function: as_written(function, **options)
        note("torch.compile: what is compiled was run as written")
        return _block_mask if model is masks else model

    def compile_module(self: nn.Module, *args: object, **kwargs: object) -> None:
        note("torch.compile: what is compiled was run as written")

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
        note("flex_attention: recorded as one fused kernel, FLOPs over the full square")
        return _fused(query, key, value)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "compile", as_written))
        stack.enter_context(patch.object(nn.Module, "compile", compile_module))
        stack.enter_context(patch.object(flex, "create_block_mask", _block_mask))
        stack.enter_context(patch.object(flex, "flex_attention_hop", attention))
        stack.enter_context(patch.object(flex, "_validate_device", lambda *tensors: None))  # rejects the fake GPU
        yield


def _fused(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of a fused attention kernel: output (batch, heads, queries, width of values), logsumexp and
    largest scores (batch, heads, queries). Heads of keys and values are shared, not repeated."""
    width = value.shape[-1]
    if width != query.shape[-1]:  # flash attention has one width: padded here, cut off below
        value = nn.functional.pad(value, (0, query.shape[-1] - width))
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
    return out[..., :width], logsumexp, logsumexp


def _block_mask(
    mask_mod: Any,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int = 0,
    KV_LEN: int = 0,
    device: Any = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    *args: object,
    **kwargs: object,
) -> flex.BlockMask:
    """Return a block mask without content: it does not say which blocks of queries see which blocks of keys."""
    by_query, by_key = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    rows, columns = -(-Q_LEN // by_query), -(-KV_LEN // by_key)
    shape, where = (B or 1, H or 1, rows), device or "cuda"
    counts = [torch.zeros(shape, dtype=torch.int32, device=where) for _ in range(2)]
    indices = [torch.zeros((*shape, columns), dtype=torch.int32, device=where) for _ in range(2)]
    transposed = [
        torch.zeros(size, dtype=torch.int32, device=where)
        for size in ((*shape[:2], columns), (*shape[:2], columns, rows)) * 2
    ]
    return flex.BlockMask(
        seq_lengths=(Q_LEN, KV_LEN),
        kv_num_blocks=counts[0],
        kv_indices=indices[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=indices[1],
        q_num_blocks=transposed[0],
        q_indices=transposed[1],
        full_q_num_blocks=transposed[2],
        full_q_indices=transposed[3],
        BLOCK_SIZE=(by_query, by_key),
        mask_mod=mask_mod,
    )
