"""The process groups of a mesh: rank = (pp, dp, tp) in row-major order, the innermost axis on neighbouring ranks.

    torchrun --nproc-per-node 4 examples/listings/mesh_groups.py

What the usual listing gets wrong: each rank makes only the groups that it is in. `new_group` is a collective of ALL
ranks, in the same order, so that hangs, or pairs the wrong groups. And tp as the outermost axis puts the ranks that
talk most on different nodes. (torch.distributed.device_mesh.init_device_mesh does what stands here.)
"""

import itertools

import torch
import torch.distributed as dist


def groups_of(shape: dict[str, int], axis: str) -> list[list[int]]:
    """Return the ranks of every group along an axis: those whose other coordinates are equal."""
    ranks = torch.arange(dist.get_world_size()).view(*shape.values())
    place = list(shape).index(axis)
    return ranks.movedim(place, -1).reshape(-1, shape[axis]).tolist()


def make(shape: dict[str, int]) -> dict[str, dist.ProcessGroup]:
    """Make all groups of all axes, on every rank in the same order; return the ones that this rank is in."""
    mine = {}
    for axis in shape:
        for ranks in groups_of(shape, axis):
            group = dist.new_group(ranks)  # every rank calls this for every group
            if dist.get_rank() in ranks:
                mine[axis] = group
    return mine


def main() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = {"pp": 1, "dp": world // 2, "tp": 2}
    mine = make(shape)
    for axis in shape:
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=mine[axis])
        # One process: the sum of the ranks that differ from this one along the axis alone.
        places = list(itertools.product(*map(range, shape.values())))
        at = list(shape).index(axis)
        same = [r for r, p in enumerate(places) if p[:at] + p[at + 1 :] == places[rank][:at] + places[rank][at + 1 :]]
        assert total.item() == sum(same)
    assert groups_of(shape, "tp")[0] == [0, 1]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    print(f"rank {dist.get_rank()}: sums along every axis are those of its group")
    dist.destroy_process_group()
