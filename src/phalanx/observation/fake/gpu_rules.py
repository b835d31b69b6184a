"""The rules of a GPU, checked at every operation of a real step on fake tensors of the fake GPU.

    place    no operation mixes tensors of the host and of the GPU (torch itself refuses most)
    wait     nothing makes the host wait for the GPU: reading an element, a result whose size depends on values, a
             blocking copy between the two. host_values.read is the one way to wait openly; its calls are counted
    kernel   every operation has a CUDA implementation (torch's own table of kernels, which its wheel contains)
    dtype    matrix products and attention kernels are in types that CUDA has kernels for
    stream   a buffer that a collective under way reads or writes is not used before its handle was waited for: NCCL
             works on a stream of its own, and only `wait` makes this one follow it

A buffer that a collective still needs is kept alive by its handle, so record_stream would add nothing.
"""

import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phalanx.observation.recorder.operations import tensors, wait_of
from phalanx.runtime.comm.handles import ByteRange, UnissuedHandle

_aten = torch.ops.aten
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_PRODUCTS = {_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.mv.default, _aten.mm.out}
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


class AgainstTheRules(Exception):
    """An operation that a GPU would not run, or for which the host would wait; the message leaves out the line."""


def returns_nothing(func: Any) -> bool:
    """Whether an operation for which fake tensors have no kernel changes its arguments and returns nothing."""
    return func is _aten._fused_sgd_.default


def require(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise AgainstTheRules for an operation on tensors of the fake GPU that breaks a rule of place, wait, kernel
    or type."""
    operands = [t for t in tensors(args, kwargs) if t.device == device]
    _require_no_copy(func, args, kwargs, device)
    if not operands:
        return
    if func is _aten._local_scalar_dense.default:
        raise AgainstTheRules("reads an element on the host, which waits for the GPU")
    if wait_of(func, kwargs):
        raise AgainstTheRules(f"{func}: the size of its result depends on values, so the host waits")
    if func in _INDEXED:
        index = [t for t in args[1] if t is not None]
        if any(t.dtype in (torch.bool, torch.uint8) for t in index):
            raise AgainstTheRules(f"{func} by truth values looks for those that hold, so the host waits")
        if any(t.device != device for t in index):
            raise AgainstTheRules(f"{func}: the index is on the host; copying it waits for the GPU")
    require_one_place(func, args, kwargs, device)
    _require_kernel(func, operands)


def require_one_place(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise AgainstTheRules for an operation on tensors of both the fake GPU and the host. An index may be on the
    host while its tensor is on the GPU, but not the other way round."""
    if func in (_aten.copy_.default, _aten._to_copy.default):
        return
    operands = tensors(args, kwargs)
    if func in _INDEXED and args[0].device == device:
        operands = [t for t in operands if all(t is not index for index in args[1])]
    elsewhere = [t for t in operands if t.device != device and t.dim()]
    if elsewhere and len(elsewhere) < len(operands):
        raise AgainstTheRules(f"{func} mixes tensors on the GPU and on {elsewhere[0].device}")


def _require_no_copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> None:
    """Raise AgainstTheRules for a blocking copy between the host and the GPU."""
    if func is _aten._to_copy.default:
        source, to = args[0].device, kwargs.get("device") or args[0].device
        free = kwargs.get("non_blocking", False)
        pinned = args[0] if source.type == "cpu" else None
    elif func is _aten.copy_.default:
        source, to = args[1].device, args[0].device
        free = (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)) or (
            source.type == "cpu" and not args[1].dim() and to.type != "cpu"
        )
        pinned = args[1] if source.type == "cpu" else args[0]
    else:
        return
    if source.type == torch.device(to).type or device.type not in (source.type, torch.device(to).type):
        return
    way = "from the host" if source.type == "cpu" else "to the host"
    if not free:
        raise AgainstTheRules(f"copies a tensor {way} and waits for it; pin it, and copy with non_blocking=True")
    if pinned is not None and pinned.dim() and not getattr(pinned, "_pinned", False):
        raise AgainstTheRules(f"copies a tensor {way} that is not pinned, so the host waits")


def _require_kernel(func: Any, here: Sequence[Tensor]) -> None:
    name = func.name().removeprefix("aten::")
    if name in without_cuda():
        raise AgainstTheRules(f"{func} has no CUDA kernel")
    dtypes = {t.dtype for t in here}
    if func in _PRODUCTS and any(not d.is_floating_point or d in _EIGHT_BITS for d in dtypes):
        wrong = next(d for d in dtypes if not d.is_floating_point or d in _EIGHT_BITS)
        raise AgainstTheRules(f"{func} has no CUDA kernel for {wrong}")
    if func in (_aten._scaled_mm.default, _aten._scaled_mm.out):
        _require_float8_layout(*here[:4])
    if func is _aten._grouped_mm.default:
        _require_grouped_layout(*here[:2])
    if "flash_attention" in name and any(t.dtype not in _SIXTEEN_BITS for t in here[:3]):
        raise AgainstTheRules(f"{func} takes float16 and bfloat16 only, and this is {here[0].dtype}")
    if name == "_scaled_dot_product_flash_attention_backward" and not here[5].is_contiguous():
        # The kernel reads it by sizes alone (aten/src/ATen/native/transformers/cuda/attention_backward.cu).
        raise AgainstTheRules(f"{func} reads its log-sum-exp, {tuple(here[5].shape)}, as if it were contiguous")


def _require_grouped_layout(a: Tensor, b: Tensor) -> None:
    """Raise AgainstTheRules for operands that a grouped product does not take (aten/.../native/GroupedMMUtils.h)."""
    if any(t.dtype != torch.bfloat16 for t in (a, b)):
        raise AgainstTheRules(f"_grouped_mm takes bfloat16 only, and this is {a.dtype} times {b.dtype}")
    for t in (a, b):
        strides = [stride for stride in t.stride()[-2:] if stride != 1]
        if any(n * t.element_size() % 16 for n in (t.storage_offset(), *strides)):
            raise AgainstTheRules(
                f"_grouped_mm takes matrices and rows that begin at multiples of 16 bytes: {t.shape}"
            )


def _require_float8_layout(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> None:
    """Raise AgainstTheRules for operands of 8-bit products that tensor cores of Hopper do not take
    (aten/src/ATen/native/cuda/ScaledBlas.cpp)."""
    if a.dtype not in _EIGHT_BITS or b.dtype not in _EIGHT_BITS or a.dtype == b.dtype == torch.float8_e5m2:
        raise AgainstTheRules(f"_scaled_mm has no CUDA kernel for {a.dtype} times {b.dtype}")
    if not a.is_contiguous() or not b.t().is_contiguous():
        raise AgainstTheRules("_scaled_mm takes rows on the left and columns on the right, each contiguous")
    if a.shape[1] % 16 or b.shape[1] % 16:
        raise AgainstTheRules(f"_scaled_mm takes multiples of 16, and this is {tuple(a.shape)} x {tuple(b.shape)}")
    scales = (of_a, of_b)
    rows = of_a.shape == (len(a), 1) and of_b.shape == (1, b.shape[1])
    if any(s.dtype != torch.float32 for s in scales) or not (rows or all(s.numel() == 1 for s in scales)):
        raise AgainstTheRules("_scaled_mm takes one fp32 scale of each operand, or one of each row and column")


def require_free(func: Any, args: Sequence[Any], kwargs: dict[str, Any], flights: Iterable[UnissuedHandle]) -> None:
    """Raise AgainstTheRules for an operation that uses memory which a collective under way writes, or writes memory
    which it reads."""
    under_way = list(flights)
    if not under_way or _only_views(func):
        return
    for values, writes in _arguments(func, args, kwargs):
        for tensor in tensors(values):
            used = ByteRange.of(tensor)
            for flight in under_way:
                if any(used.meets(b) for b in flight.writes):
                    raise AgainstTheRules(f"{func} uses memory that {flight.name} writes, before a wait for it")
                if writes and any(used.meets(b) for b in flight.reads):
                    raise AgainstTheRules(f"{func} overwrites memory that {flight.name} reads, before a wait for it")


def _arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each argument, and whether the operation writes to it."""
    for i, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if i >= len(args) else args[i]
        if value is not None:
            yield value, argument.alias_info is not None and argument.alias_info.is_write


@cache
def _only_views(func: Any) -> bool:
    """Whether an operation returns views and touches no memory."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(a is not None and not a.is_write for a in returned)


@cache
def without_cuda() -> frozenset[str]:
    """Return the names of torch's operations that have a kernel for the CPU and none for CUDA.

    Source: native_functions.yaml of the torch that is installed, from which its dispatcher is generated.
    """
    spec = importlib.util.find_spec("torchgen")
    if spec is None or spec.origin is None:
        return frozenset()
    text = (Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    kernels: dict[str, set[str]] = {}
    delegates: dict[str, str] = {}
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        name = entry.split("(", 1)[0]
        delegate = re.search(r"^  structured_delegate: (\S+)", entry, re.MULTILINE)
        if delegate is not None:
            delegates[name] = delegate[1]
        dispatch = re.search(r"^  dispatch:\n((?:    .*\n|\s*#.*\n)+)", entry, re.MULTILINE)
        keys = re.findall(r"^    ([\w, ]+):", dispatch[1], re.MULTILINE) if dispatch is not None else ()
        kernels[name] = {key.strip() for line in keys for key in line.split(",")}
    kinds = ("Explicit", "Implicit")
    general = {"CUDA", "CompositeExplicitAutogradNonFunctional", *(f"Composite{kind}Autograd" for kind in kinds)}
    rows = ((name, kernels[delegates.get(name, name)]) for name in kernels)
    return frozenset(name for name, keys in rows if "CPU" in keys and not keys & general)
