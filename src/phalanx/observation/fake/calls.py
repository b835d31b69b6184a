"""Replacements of calls that need values, kernels or other ranks, none of which exist here.

torch.compile                  compiled functions run as written (`uncompiled`)
workers of a DataLoader        load in this process
lists, NumPy arrays, files     lists and arrays hold the stated value (values.py); writing to files is skipped
comparisons of ranks           a library's checks compare this rank with itself (`agreeing_ranks`)
"""

import importlib.abc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as checkpoints
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import flex_attention as flex
from torch.utils.data import DataLoader

from phalanx.observation.fake.values import array


@contextmanager
def uncompiled(note: Callable[[str], None]) -> Iterator[None]:
    """Disable torch.compile inside the block; report each kind of skipped call to `note`.

    A compiler needs kernels; an observation needs operations. So `torch.compile` returns its argument. Collectives
    and FLOPs are as in the compiled program, unless its backend reorders or fuses collectives. Live bytes are as in
    the program as written: a compiler may keep fewer activations.

    FlexAttention is an exception: uncompiled, it would write its scores. It is recorded as the fused kernel that it
    becomes: output and logsumexp in memory, FLOPs over the full square as for any attention. A block mask has the
    shapes that the compiled `create_block_mask` returns."""
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


def _deepspeed(module: ModuleType) -> None:
    """ZeRO-3 compares the order of its parameters with rank 0's (0.19: deepspeed/runtime/zero/utils.py:97)."""
    sends = module.get_lst_from_rank0

    def from_rank_0(numbers: list[int]) -> list[int]:
        sends(numbers)
        return numbers

    lengths = module.assert_lst_len_same_as_other_ranks

    def same_length(numbers: list[int]) -> None:
        with suppress(RuntimeError):
            lengths(numbers)

    module.get_lst_from_rank0 = from_rank_0  # type: ignore[attr-defined]
    module.assert_lst_len_same_as_other_ranks = same_length  # type: ignore[attr-defined]


_CHANGES: dict[str, Callable[[ModuleType], None]] = {"deepspeed.runtime.zero.utils": _deepspeed}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules named above as usual, and changes them once they are executed."""

    def __init__(self) -> None:
        self.searching = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _CHANGES or self.searching:
            return None
        self.searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            execute, change = spec.loader.exec_module, _CHANGES[fullname]

            def executed(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


@contextmanager
def agreeing_ranks() -> Iterator[None]:
    """Make checks of libraries that compare ranks find them alike. Such a check reads values from other ranks, which
    do not exist; its collectives are recorded as issued. Modules are changed when they are imported, so that no
    library is imported for this."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


_ADDRESS_BITS = 16
"""Bits by which addresses are shifted, so that addresses of two storages differ by more than most offsets."""


@contextmanager
def stated_answers(answer: Callable[[str, str], None], note: Callable[[str], None]) -> Iterator[None]:
    """Answer tolist(), numpy(), data_ptr() and the like of fake tensors, and skip writing checkpoints. `answer` is
    called with each operation and a description of its answer, `note` with a line about each replaced call."""

    def to_list(tensor: FakeTensor) -> Any:
        answer("tolist", "the stated value")
        return array(tensor).tolist()

    def to_numpy(tensor: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        answer("numpy", "the stated value")
        return array(tensor)

    def to_address(tensor: FakeTensor) -> int:
        answer("data_ptr", "an address of its storage")
        start = _address(tensor.untyped_storage())
        return start and start + int(tensor.storage_offset()) * tensor.element_size()

    real_address = torch.UntypedStorage.data_ptr

    def to_address_of_storage(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return real_address(storage)
        answer("data_ptr of the storage", "an address of it")
        return _address(storage)

    loader = DataLoader.__init__

    def loads_here(self: Any, *args: Any, **kwargs: Any) -> None:
        """Without workers: their processes would make batches of fake tensors, which none can send."""
        given = inspect.signature(loader).bind(self, *args, **kwargs)
        if given.arguments.get("num_workers"):
            note("DataLoader: what its workers load is loaded in this process")
            others = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")
            for name in ("num_workers", *others):
                given.arguments.pop(name, None)
        loader(*given.args, **given.kwargs)

    def formatted(tensor: FakeTensor, how: str) -> str:
        """As torch.Tensor.__format__, which asks only its own type for the value: f"{loss:.4f}"."""
        return format(tensor.item(), how) if tensor.dim() == 0 else object.__format__(tensor, how)

    def without_rejection(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw as nn.init.trunc_normal_ does where no value is out of bounds: with a rejected one it draws again."""
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)

    real_address = torch.UntypedStorage.data_ptr

    def skipped(name: str) -> Callable[..., None]:
        def skip(*args: Any, **kwargs: Any) -> None:
            note(f"{name}: skipped, nothing is written")

        return skip

    with ExitStack() as stack:
        stack.enter_context(patch.object(DataLoader, "__init__", loads_here))
        stack.enter_context(patch.object(FakeTensor, "tolist", to_list, create=True))
        stack.enter_context(patch.object(FakeTensor, "numpy", to_numpy, create=True))
        stack.enter_context(patch.object(FakeTensor, "__array__", to_numpy, create=True))
        stack.enter_context(patch.object(FakeTensor, "__format__", formatted, create=True))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", to_address, create=True))
        stack.enter_context(patch.object(torch.UntypedStorage, "data_ptr", to_address_of_storage))
        stack.enter_context(patch.object(nn.init, "_no_grad_trunc_normal_", without_rejection))
        stack.enter_context(patch.object(torch, "save", skipped("torch.save")))
        for name in ("save", "async_save"):
            stack.enter_context(patch.object(checkpoints, name, skipped(f"torch.distributed.checkpoint.{name}")))
        yield


def _address(storage: torch.UntypedStorage) -> int:
    return int(storage._cdata) << _ADDRESS_BITS if storage.nbytes() else 0
