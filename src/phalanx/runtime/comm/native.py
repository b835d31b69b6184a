"""Transport native: torch.distributed's own collectives (Gloo on CPU, NCCL on CUDA)."""

from functools import partial

import torch.distributed as dist
from torch import Tensor

from phalanx.runtime.comm.transport import Call, Handle, Watch
from phalanx.runtime.process.world import group
from phalanx.schedule.event import Reduction

_REDUCE: dict[Reduction, dist.ReduceOp.RedOpType] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _OwnPart:
    """The handle of a reduce-scatter that runs as an all-reduce; `wait` copies this rank's part to the target."""

    def __init__(self, work: dist.Work, part: Tensor, target: Tensor) -> None:
        self._work, self._part, self._target = work, part, target

    def wait(self) -> None:
        self._work.wait()
        if self._part.data_ptr() != self._target.data_ptr():
            self._target.copy_(self._part)


_TAG = 8  # for exchanges; exchanges between two ranks arrive in the order in which they were sent
FREE_TAG = 16  # single messages use tags from here on


class _Messages:
    """The handle of sends and receives under way."""

    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []  # release the tensors that were sent


def exchange(
    ranks: tuple[int, ...], to: int, source_index: int, source: Tensor, target: Tensor, watch: Watch | None
) -> Handle:
    """Issue a send of `source` to the rank at index `to` of the group `ranks`, and a receive of `target` from the
    one at `source_index`."""
    if watch is not None:
        watch.begins("native")
    over = group(ranks)
    if not source.is_cuda:
        # Gloo needs receives to be posted before sends.
        receive = over.recv([target], source_index, _TAG)
        return _Messages([receive, over.send([source], to, _TAG)])
    return _Messages(
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, target, group=over, group_peer=source_index),
                dist.P2POp(dist.isend, source, group=over, group_peer=to),
            ]
        )
    )


def message(ranks: tuple[int, ...], peer: int, tensor: Tensor, sends: bool, tag: int, watch: Watch | None) -> Handle:
    """Issue one send (if `sends`) or receive of `tensor`; `peer` is an index in the group `ranks`. CUDA has no tags:
    both ends of a pair of ranks must issue their messages in the same order."""
    if watch is not None:
        watch.begins("native")
    over = group(ranks)
    if not tensor.is_cuda:
        return _Messages([(over.send if sends else over.recv)([tensor], peer, tag)])
    send, receive = partial(dist.isend, group_dst=peer), partial(dist.irecv, group_src=peer)
    work = (send if sends else receive)(tensor, group=over)
    assert work is not None  # None is for ranks outside the group
    return _Messages([work])


def start(call: Call) -> Handle:
    """Issue a collective. On CUDA, `wait` blocks the stream, not the host."""
    if call.watch is not None:
        call.watch.begins("native")
    work = _issue(call)
    if call.watch is not None:
        over = call.watch.over
        work.get_future().add_done_callback(lambda _: over())
    if call.op == "reduce_scatter" and call.source.device.type == "cpu":
        n = call.target.numel()
        return _OwnPart(work, call.source[call.me * n : (call.me + 1) * n], call.target)
    return work


def _issue(call: Call) -> dist.Work:
    over, reduction = group(call.ranks), _REDUCE[call.reduction]
    work: dist.Work
    if call.op == "all_reduce":
        work = dist.all_reduce(call.target, reduction, group=over, async_op=True)
    elif call.op == "all_gather":
        work = _all_gather(call.target, call.source, group=over, async_op=True)
    elif call.op == "reduce_scatter" and call.source.device.type == "cpu":
        # Gloo has no reduce-scatter. torch's substitute all-reduces a copy of the source and does not tell when it is
        # complete; here the source itself may be overwritten.
        work = dist.all_reduce(call.source, reduction, group=over, async_op=True)
    elif call.op == "reduce_scatter":
        work = _reduce_scatter(call.target, call.source, reduction, group=over, async_op=True)
    elif call.op == "all_to_all":
        sends, receives = list(call.sends) or None, list(call.receives) or None
        work = dist.all_to_all_single(call.target, call.source, receives, sends, group=over, async_op=True)
    else:
        work = dist.broadcast(call.target, group=over, group_src=0, async_op=True)
    return work
