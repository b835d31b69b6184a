"""Ring all-reduce from sends and receives: a reduce-scatter, then an all-gather, each of N - 1 rounds.

    torchrun --nproc-per-node 4 examples/listings/ring_all_reduce.py

Each rank sends n/N elements a round to its right neighbour: 2 n (N-1)/N in all, whatever N is.

What the usual listing gets wrong: `chunks[i] += received` where `chunks` is the tuple of `tensor.chunk(N)` raises
TypeError, after it has changed the buffer; and where every rank calls a blocking send first, all of them wait for a
receiver once messages outgrow the transport's buffer. So: post the receive, then send, then wait.
"""

import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` (contiguous, any size) over all ranks, in place."""
    rank, world = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world, (rank - 1) % world
    flat = tensor.view(-1)
    edges = [len(flat) * i // world for i in range(world + 1)]
    chunks = [flat[a:b] for a, b in zip(edges, edges[1:])]  # views: what is added to them is added to the tensor

    def pass_on(out: torch.Tensor, into: torch.Tensor) -> None:
        receive = dist.irecv(into, left)
        send = dist.isend(out, right)
        receive.wait()
        send.wait()

    # Reduce-scatter: in round k rank r sends chunk r - k, and adds what it receives to chunk r - k - 1.
    for k in range(world - 1):
        target = chunks[(rank - k - 1) % world]
        received = torch.empty_like(target)
        pass_on(chunks[(rank - k) % world].clone(), received)
        target.add_(received)
    # Now rank r has the sum of chunk r + 1. All-gather: sums travel once around the ring.
    for k in range(world - 1):
        pass_on(chunks[(rank + 1 - k) % world].clone(), chunks[(rank - k) % world])


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for n in (1, 7, 10_000):
        tensors = [torch.arange(n, dtype=torch.float64) * (r + 1) for r in range(world)]
        mine = tensors[rank].clone()
        ring_all_reduce(mine)
        assert torch.equal(mine, sum(tensors))  # small integers: exact in any order


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: the sum is that of one process")
    dist.destroy_process_group()
