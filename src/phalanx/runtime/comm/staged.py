"""Transport of ranks that share a GPU: messages go through the host, over Gloo, since NCCL supports only one process
per GPU.

A call runs on copies of its tensors in host memory, over any CPU transport, and `wait` copies the result to the GPU.
Correct but slow: for trying strategies on one GPU (`shares_gpu`, process/gpus.py).
"""

from dataclasses import replace

import torch
from torch import Tensor

from phalanx.runtime.comm import native
from phalanx.runtime.comm.transport import Call, Handle, Watch, same_place


class StagedHandle:
    """The handle of an operation on host copies; the first `wait` also copies `here`, the received data, to its place
    on the device, `there`."""

    def __init__(self, handle: Handle, here: Tensor, there: Tensor) -> None:
        self._handle = handle
        self._copy: tuple[Tensor, Tensor] | None = (here, there)

    def wait(self) -> None:
        self._handle.wait()
        if self._copy is not None:
            here, there = self._copy
            self._copy = None
            there.copy_(here)


def on_host(call: Call) -> Call:
    """Return the call on copies in host memory, once the device has computed the data to send."""
    source = call.source.to("cpu", copy=True)
    in_place = same_place(call.source, call.target) and call.source.numel() == call.target.numel()
    target = source if in_place else torch.empty_like(call.target, device="cpu")
    return replace(call, source=source, target=target)


def exchange(
    ranks: tuple[int, ...], to: int, source_index: int, source: Tensor, target: Tensor, watch: Watch | None
) -> Handle:
    """Issue a send of `source` to the rank at index `to` of the group `ranks`, and a receive of `target` from the
    one at `source_index`."""
    here = torch.empty_like(target, device="cpu")
    sent = source.to("cpu", copy=True)
    return StagedHandle(native.exchange(ranks, to, source_index, sent, here, watch), here, target)


def message(ranks: tuple[int, ...], peer: int, tensor: Tensor, sends: bool, tag: int, watch: Watch | None) -> Handle:
    """Issue one send (if `sends`) or receive of `tensor`; `peer` is an index in the group `ranks`."""
    if sends:
        return native.message(ranks, peer, tensor.to("cpu", copy=True), sends, tag, watch)
    here = torch.empty_like(tensor, device="cpu")
    return StagedHandle(native.message(ranks, peer, here, sends, tag, watch), here, tensor)
