"""Reading torch.distributed's operations, as a dispatch mode sees them: operation, group, bytes, peer.

Bytes as in schedule/event.py: all-reduce and broadcast the buffer; all-gather and reduce-scatter the gathered buffer;
all-to-all the send buffer; messages the payload. One call with many tensors (coalesced) is one collective.
Source of the schemas: torch 2.13, torch/csrc/distributed/c10d/Ops.cpp (c10d) and Functional.cpp (_c10d_functional).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from phalanx.observation.recorder.nested import tensors

NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")


@dataclass(frozen=True)
class Collective:
    """One call: an operation over a group. `buffers`: tensors whose sizes count; `peer`: global rank of the other
    end."""

    op: str
    group: ProcessGroup
    buffers: tuple[Tensor, ...]
    peer: int | None = None

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.buffers)

    @property
    def dtype(self) -> torch.dtype:
        return self.buffers[0].dtype if self.buffers else torch.uint8

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.group))


# name: (operation, index of the argument that counts, index of the group)
_C10D = {
    "allreduce_": ("all_reduce", 0, 1),
    "allreduce_coalesced_": ("all_reduce", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
    "reduce_": ("reduce", 0, 1),
    "allgather_": ("all_gather", 0, 2),
    "allgather_coalesced_": ("all_gather", 0, 2),
    "_allgather_base_": ("all_gather", 0, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2),
    "alltoall_": ("all_to_all", 1, 2),
    "alltoall_base_": ("all_to_all", 1, 2),
    "gather_": ("gather", 1, 2),
    "scatter_": ("scatter", 0, 2),
    "send": ("send", 0, 1),
    "recv_": ("recv", 0, 1),
    "recv_any_source_": ("recv", 0, 1),
}
# name: (operation, whether the argument's bytes count once for each rank of the group)
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_": ("all_reduce", False),
    "all_reduce_coalesced": ("all_reduce", False),
    "all_reduce_coalesced_": ("all_reduce", False),
    "broadcast": ("broadcast", False),
    "broadcast_": ("broadcast", False),
    "all_gather_into_tensor": ("all_gather", True),
    "all_gather_into_tensor_out": ("all_gather", True),
    "all_gather_into_tensor_coalesced": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "reduce_scatter_tensor_out": ("reduce_scatter", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "shard_dim_alltoall": ("all_to_all", False),
}


def read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Collective, ...]:
    """Return the collectives that a call of an operation in NAMESPACES issues: none for waits and barriers."""
    name = func._schema.name.split("::")[1]
    if func.namespace == "c10d":
        if name not in _C10D:
            return ()
        op, counts, at = _C10D[name]
        group = _group(args[at])
        peer = None
        if name in ("send", "recv_"):
            peer = dist.get_global_rank(group, args[2])
        return (Collective(op, group, tuple(tensors(args[counts])), peer),)
    given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    if name == "batch_p2p_ops":
        group = _group(given["group_name"])
        return tuple(
            Collective("send" if op == "isend" else "recv", group, (t,), dist.get_global_rank(group, peer))
            for op, peer, t in zip(given["op_list"], given["peer_list"], given["tensors"], strict=True)
        )
    if name in ("isend", "irecv"):
        group = _group(given["group_name"])
        peer = dist.get_global_rank(group, given["dst" if name == "isend" else "src"])
        return (Collective(name[1:], group, (given["tensor"],), peer),)
    if name not in _FUNCTIONAL:
        return ()
    op, gathered = _FUNCTIONAL[name]
    group = _group(given["group_name"])
    buffers = tuple(tensors(given["input"] if "input" in given else given["inputs"]))
    return (Collective(op, group, buffers * (group.size() if gathered else 1)),)


def _group(value: Any) -> ProcessGroup:
    if isinstance(value, str):
        return torch._C._distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
    if isinstance(value, ProcessGroup):
        return value
    return ProcessGroup.unbox(value)
