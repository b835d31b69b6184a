"""A fake GPU: torch's PrivateUse1 device, with torch.cuda and a program's `cuda` redirected to it.

The CPU build of torch has no autograd for device "cuda", so the fake GPU is a device of its own named `gpu`
(torch.utils.backend_registration: a backend in Python). Like a real one it refuses to mix with the host's tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "gpu"
MEMORY = 80 * 2**30
"""Bytes of a GPU, as on an H100."""


class FakeStream:
    """A stream or an event: nothing runs, so everything has completed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = torch.device(NAME, 0)
        self.stream_id = self.cuda_stream = 0

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def _nothing(self, *args: object) -> None:
        pass

    record = wait = wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: FakeStream | None = None) -> FakeStream:
        return event or FakeStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 1.0


class FakeGenerator(torch.Generator):
    """A GPU's generator of random numbers: its state has a GPU's size, and setting it does nothing."""

    def get_state(self) -> torch.Tensor:
        """Return seed and offset, (16,) uint8."""
        return torch.zeros(16, dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> FakeGenerator:
        """Leave the state unchanged."""
        return self


def _always(value: Any) -> Any:
    """Return a method that returns the value."""
    return lambda self, *args, **kwargs: value


class FakeCuda:
    """The functions of `torch.gpu`, and of `torch.cuda` while a program is observed.

    `waits` is called when the host would wait; `live` returns live bytes.
    """

    Stream = Event = ExternalStream = FakeStream

    def __init__(self) -> None:
        self.count = 8
        self.waits: Callable[[str], None] = lambda _: None
        self.live: Callable[[], int] = lambda: 0

    get_device_name = _always("NVIDIA H100 80GB HBM3")

    def device_count(self) -> int:
        return self.count

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def synchronize(self, device: object = None) -> None:
        self.waits("synchronize")

    def current_stream(self, device: object = None) -> FakeStream:
        return FakeStream()

    default_stream = current_stream

    def stream(self, stream: FakeStream | None) -> FakeStream:
        return stream or FakeStream()

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return FakeGenerator().get_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    def memory_allocated(self, device: object = None) -> int:
        return self.live()

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_cached = memory_allocated

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return Counter()

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        return MEMORY - self.live(), MEMORY

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(
            name=self.get_device_name(), major=9, minor=0, total_memory=MEMORY, multi_processor_count=132
        )


_CONSTANT: dict[str, Any] = {
    "is_initialized": True,
    "is_available": True,
    "is_bf16_supported": True,
    "can_device_access_peer": True,
    "_is_in_bad_fork": False,
    "is_current_stream_capturing": False,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_amp_supported_dtype": [torch.float16, torch.bfloat16],
    **dict.fromkeys(("init", "_lazy_init", "set_device", "set_stream", "set_rng_state", "set_rng_state_all")),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "empty_cache", "ipc_collect")),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "set_per_process_memory_fraction")),
}
"""Functions of torch.cuda with a constant result; those that change the state of a GPU return None."""
for _name, _value in _CONSTANT.items():  # a function each: torch's compiler refuses one under several names
    setattr(FakeCuda, _name, _always(_value))

_module: FakeCuda | None = None


def register() -> FakeCuda:
    """Make the device `gpu` known to torch, once in a process; return its module."""
    global _module
    if _module is None:
        _module = FakeCuda()
        _setup_privateuseone_for_python_backend(NAME, backend_module=_module)
    return _module


def is_cuda(value: object) -> bool:
    """Whether a value names a CUDA device: "cuda", "cuda:3", torch.device("cuda", 3)."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit()))


class Redirect(TorchFunctionMode):
    """Redirects calls for device "cuda" to the fake GPU; calls `redirected` for each."""

    def __init__(self, redirected: Callable[[], None]) -> None:
        super().__init__()
        self.redirected = redirected
        self.device = torch.device(NAME, 0)

    def _here(self, value: Any) -> Any:
        if is_cuda(value) or type(value) is int:  # torch takes an index alone for the accelerator's
            self.redirected()
            return self.device
        if isinstance(value, torch.device) and value.type == NAME:
            return self.device  # whatever its number: a rank has one GPU
        return value

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor) and func not in _TENSOR_FUNCTIONS:
            return func(*args)  # about one tensor, such as its shape: frequent
        kwargs = kwargs or {}
        if func is torch.device:  # redirected where the program uses it
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            self.redirected()
            return args[0].to(self.device)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # libraries compare the name
            return func(*args).replace(f"torch.{NAME}.", "torch.cuda.")
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            args = (_read(args[0]), *args[1:])
        if func is F.scaled_dot_product_attention:
            out = attention(*args, **kwargs)
            return func(*args, **kwargs) if out is None else out
        if func == _SET_DATA and NAME in (args[0].device.type, args[1].device.type):
            return _moved(*args)
        if func is torch.Tensor.pin_memory:
            args[0]._pinned = True
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], self._here(args[1]), *args[2:])
        if any(type(a) in (str, torch.device) for a in args):
            args = tuple(self._here(a) if type(a) in (str, torch.device) else a for a in args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._here(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _read(data: Any) -> Any:
    """Return nested lists with the values of the tensors in them: torch.tensor() reads them below every mode."""
    if isinstance(data, torch.Tensor):
        return data.item() if data.dim() == 0 else data
    if isinstance(data, list | tuple) and any(isinstance(x, list | tuple | torch.Tensor) for x in data):
        return [_read(x) for x in data]
    return data


_TENSOR_FUNCTIONS = (torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.pin_memory, torch.tensor)
"""Functions of one tensor that are redirected."""


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _moved(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Perform `tensor.data = value` as on CUDA: torch refuses it between the host and devices other than CUDA."""
    if tensor.device.type == value.device.type:
        tensor.data = value
        return
    new = value.detach().requires_grad_(tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        new = torch.nn.Parameter(new, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, new)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Return attention by the kernel that CUDA would choose: flash for 16-bit types without a mask, else the
    memory-efficient one; None elsewhere than on the fake GPU.

    Source: torch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (order and conditions of kernels).
    """
    kinds = (torch.Tensor, torch.nn.Parameter, FakeTensor, DTensor)
    if type(query) not in kinds or query.device.type != NAME:
        return None
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    if query.dim() != 4:
        return None
    aten = torch.ops.aten
    if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
    else:
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        out = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
        )
    return out[0]  # type: ignore[no-any-return]
