"""torch.autocast on the fake GPU: the casts of CUDA's autocast.

Source of the lists: torch 2.13, aten/src/ATen/autocast_mode.h (AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_FP32,
AT_FORALL_FP32_SET_OPT_DTYPE), without recurrent cells, upsampling and AT_FORALL_PROMOTE. A parameter's cast is kept
until the outermost context ends, as cached_cast does there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from phalanx.observation.fake.device import NAME

_KEY = "AutocastPrivateUse1"


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_LOWER = _names("""
    _convolution conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    conv_tbc prelu addmm addmv addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    linalg_vecdot scaled_dot_product_attention
""")
_FULL = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm
    binary_cross_entropy_with_logits nll_loss nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div
    poisson_nll_loss cosine_embedding_loss triplet_margin_loss margin_ranking_loss cosine_similarity dist cdist
    renorm logsumexp
""")
_RESULT = _names("""
    prod cumprod cumsum sum sum.dim_IntList softmax.int log_softmax.int linalg_vector_norm
""")
_libraries: list[Library] = []
_cast: dict[int, tuple[Any, Tensor]] = {}


def _to(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        if not value.is_floating_point() or value.dtype in (dtype, torch.float64) or value.device.type != NAME:
            return value
        keeps = dtype != torch.float32 and value.requires_grad and value.is_leaf and value.dtype == torch.float32
        if not keeps or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        known = _cast.get(id(value))
        if known is None:
            known = _cast[id(value)] = (value, value.to(dtype))
        return known[1]
    if isinstance(value, list | tuple):
        return type(value)(_to(v, dtype) for v in value)
    return value


def _kernel(op: Any, lower: bool) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = torch.get_autocast_dtype(NAME) if lower else torch.float32
            return op(*(_to(a, dtype) for a in args), **{k: _to(v, dtype) for k, v in kwargs.items()})

    return run


def register() -> None:
    """Give the fake GPU its autocast, once in a process."""
    if _libraries:
        return
    everything = Library("_", "IMPL")
    everything.fallback(fallthrough_kernel, _KEY)
    aten = Library("aten", "IMPL", _KEY)
    _libraries.extend((everything, aten))
    for names, lower in ((_LOWER, True), (_FULL + _RESULT, False)):
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(name, _kernel(op, lower))


@contextmanager
def autocast_cache() -> Iterator[None]:
    """Inside the block, forget the casts of parameters whenever torch clears its cache of them, and at the end."""
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        _cast.clear()
        clear()

    with patch.object(torch, "clear_autocast_cache", cleared):
        try:
            yield
        finally:
            _cast.clear()
