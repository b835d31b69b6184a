"""A machine whose rates are known, with a clock of its own, for what measures machines.

Its device works as GPUs do: what a program asks of it waits in a queue until the program waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from phalanx.measure import collectives, kernels, links, microbenchmarks

FLOP_S, BYTE_S, CALL_S = 1e9, 1e8, 1e-6
"""FLOP/s, bytes/s and the seconds of an operation that neither multiplies nor copies, all unlike a real machine's."""
_COPIES = {"aten::copy_", "aten::mul_.Scalar", "aten::mul_.Tensor", "aten::linalg_vector_norm", "aten::_fused_adamw_"}


class Machine(TorchDispatchMode):
    """Times all operations by their FLOPs or bytes. `slow`: by how much longer rounds take, one after
    another; `products`: what does not multiply takes next to no time."""

    def __init__(self, slow: Iterable[float] = (), products: bool = False) -> None:
        super().__init__()
        self.products = products
        self.now = self.queued = 0.0
        self.rounds = 0
        self._slow, self._factor = iter(chain(slow, repeat(1.0))), 1.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view or func.namespace != "aten":
            return out
        if func._overloadpacket in flop_registry:
            self.work(flop_registry[func._overloadpacket](*args, **kwargs, out_val=out) / FLOP_S)
        elif func.name() == "aten::_scaled_dot_product_flash_attention_for_cpu":
            q, k, *_ = args
            self.work(4 * q.numel() * k.shape[-2] / FLOP_S)
        else:
            moved = _moved(func, args) if func.name() in _COPIES else 0
            self.work(1e-12 if self.products else moved / BYTE_S if moved else CALL_S)
        return out

    def work(self, seconds: float) -> None:
        """Let the device do something that takes so long where nothing disturbs it."""
        self.queued += seconds * self._factor

    def settle(self, *_: object) -> None:
        """Wait for the device."""
        self.now, self.queued = self.now + self.queued, 0.0

    def barrier(self) -> None:
        """Begin a round: with the others, and not before what was asked of the device is done."""
        self.settle()
        self.rounds += 1
        self._factor = next(self._slow)


def _moved(func: Any, args: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    total = 0
    for argument, given in zip(func._schema.arguments, args, strict=False):
        for t in given if isinstance(given, list | tuple) else [given]:
            if isinstance(t, torch.Tensor) and t.dim():
                writes = argument.alias_info is not None and argument.alias_info.is_write
                writes = writes and argument.name != "grads"  # which is written where there is a scale
                reads = not (writes and "copy_" in func.name())
                total += (writes + reads) * t.numel() * t.element_size()
    return total


def imagined(monkeypatch: pytest.MonkeyPatch, slow: Iterable[float] = (), products: bool = False) -> Machine:
    """Let what measures run on an imagined machine: its clock, its device, small sizes."""
    made = Machine(slow, products)
    for module in (kernels, microbenchmarks, links, collectives):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: made.now))
    for module in (kernels, microbenchmarks):
        monkeypatch.setattr(module, "synchronize", made.settle)
    monkeypatch.setattr(kernels, "_FULL", kernels._SMALL)
    monkeypatch.setattr(kernels, "_QUICK_LADDER", kernels._SMALL.ladder[1:])
    monkeypatch.setattr(microbenchmarks, "_COPIED", {"cpu": 2**20})
    return made
