"""The fastest placement of a job on free GPUs.

Small cases (few ways to distribute the ranks over blocks of the innermost tier) are tried in full, which is exact:
GPUs of one block are alike, except on rails, where each counts. Otherwise orders of the mesh's axes, as nested blocks
carved from the free GPUs (carve.py), are priced on all free GPUs and on selections of them: an even share of each
host, multiples of the axes on each host and under each switch, the same indices everywhere. Where ranks are few, the
best of these is improved by exchanges (descent.py).
The answer comes with a bound that no placement can beat, from the largest parts that each axis can have.

The bound: if every rank has at least a ranks of its tp group, b of its data-parallel group and c of its pipeline in
its block, the block holds at least a x b x c ranks; blocks with as many free GPUs must hold the world.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

import numpy as np

from phalanx.planning.placement import Placement
from phalanx.shared_cluster.placement import descent
from phalanx.shared_cluster.placement.carve import FreeBlock, carve
from phalanx.shared_cluster.placement.price import Floats, Parts, PlacedJob
from phalanx.spec.cluster.topology import Ints, Topology
from phalanx.spec.errors import InputError

EXACT = 40_000
"""The largest number of distributions of ranks over blocks that are all tried."""
Carvings = dict[tuple[bytes, tuple[int, ...]], Ints | None]
"""(selected free GPUs, sizes of nested blocks) -> GPU of each rank; None if these are too few."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A placement with its price and a bound."""

    placement: Placement
    seconds: float
    """Step time."""
    bound_s: float
    """Step time that no placement on these GPUs can beat."""
    tried: int
    """Placements that were priced."""
    exact: bool
    """Whether all placements were tried."""

    @property
    def gap(self) -> float:
        """The largest possible gain of a better placement, as a share of the bound."""
        return 0.0 if self.exact else self.seconds / self.bound_s - 1


def place(
    job: PlacedJob, topology: Topology, free: Ints, busy: Ints | None = None, carvings: Carvings | None = None
) -> Placed:
    """Place a job on the free GPUs of a topology. `busy`: GPUs in use by others, by default all that are not free;
    `carvings`: a cache of carvings of the same free GPUs. Raises InputError if the job has more ranks than GPUs are
    free."""
    world, s = job.strategy.world, job.strategy
    if len(free) < world:
        raise InputError("free", len(free), f"{s} has {world} ranks, but {len(free)} GPUs are free")
    if busy is None:
        busy = np.setdiff1d(np.arange(topology.gpus), free)

    def price(gpus: Ints) -> Floats:
        return job.seconds(topology, gpus, busy)

    rails = any(tier.wiring == "rails" for tier in job.cluster.tiers)
    blocks = _free_blocks(topology, free, rails)
    dealt = [FreeBlock(b.scopes, b.gpus[i : i + 1]) for b in blocks for i in range(len(b.gpus))] if rails else blocks
    counts = [len(block.gpus) for block in dealt]
    if _deals(counts, world) <= EXACT:
        candidates = _deal_all(dealt, world)
        exact = True
    else:
        sets = list(_on_common_rails(topology, blocks, world)) if rails else []
        candidates = _candidates(job, blocks, sets, price, {} if carvings is None else carvings)
        if world <= descent.RANKS:
            start = candidates[int(np.argmin(price(candidates)))]
            lower = descent.descend(start, np.setdiff1d(free, start), price)
            candidates = np.append(candidates, lower[None], axis=0)
        exact = False
    seconds = price(candidates)
    best = int(np.argmin(seconds))
    bound = seconds[best] if exact else min(float(bound_s(job, topology, free, busy)), seconds[best])
    placement = Placement(s, job.cluster, topology, candidates[best])
    return Placed(placement, float(seconds[best]), float(bound), len(candidates), exact)


def _free_blocks(topology: Topology, free: Ints, rails: bool = False) -> list[FreeBlock]:
    """Return the free GPUs of each block of the innermost tier, the largest blocks first. On rails, indices that are
    free on most hosts come first in a block, so that parts of hosts share rails."""
    inner = topology.blocks[0][free]
    index = topology.index[free]
    order = np.lexsort((-np.bincount(index)[index] if rails else free, inner))
    parts = np.split(free[order], np.flatnonzero(np.diff(inner[order])) + 1)
    scopes = topology.blocks[1:-1][::-1]
    blocks = [FreeBlock(tuple(scopes[:, part[0]].tolist()), part) for part in parts]
    return sorted(blocks, key=lambda block: (-len(block.gpus), block.scopes))


def _deals(counts: Sequence[int], world: int) -> int:
    """Count the distributions of `world` ranks over blocks with room for `counts` ranks each; at most EXACT + 1."""
    ways = [1] + [0] * world  # ways[n]: distributions of n given ranks over the blocks so far
    for room in counts:
        ways = [sum(math.comb(n, k) * ways[n - k] for k in range(min(room, n) + 1)) for n in range(world + 1)]
        if world > 64 or ways[-1] > EXACT:
            return EXACT + 1
    return ways[-1]


def _deal_all(blocks: Sequence[FreeBlock], world: int) -> Ints:
    """Return the GPUs of all distributions of ranks over blocks, (ways, world); in a block, ranks take GPUs in
    ascending order."""
    rows: list[Ints] = []
    room = [len(block.gpus) for block in blocks]
    chosen = np.zeros(world, dtype=np.int64)
    used = [0] * len(blocks)

    def deal(rank: int) -> None:
        if rank == world:
            rows.append(chosen.copy())
            return
        for i, block in enumerate(blocks):
            if used[i] < room[i]:
                chosen[rank] = block.gpus[used[i]]
                used[i] += 1
                deal(rank + 1)
                used[i] -= 1

    deal(0)
    return np.array(rows)


def _candidates(
    job: PlacedJob,
    blocks: Sequence[FreeBlock],
    sets: Sequence[list[FreeBlock]],
    price: Callable[[Ints], Floats],
    carvings: Carvings,
) -> Ints:
    """Return placements by orders of the axes on selections of the free GPUs, (placements, world): every order on all
    free GPUs, the best orders on every selection (`sets` among them), promising orders on the best selections."""
    axes = [(name, size) for name, size in job.mesh.axes if size > 1]
    orders = list(permutations(range(len(axes))))
    selections = [*_selections(blocks, job.strategy.world, [size for _, size in axes]), *sets]
    priced_pairs: dict[tuple[int, int], tuple[Ints, float]] = {}

    @cache
    def name(which: int) -> bytes:
        """Return a key of a selection, of all its GPUs: on rails, blocks may have the same first GPU and length."""
        return np.concatenate([block.gpus for block in selections[which]]).tobytes()

    def placed(order: Sequence[int], which: int) -> Ints | None:
        """Return the GPUs of the ranks of a mesh whose axes are nested in an order, carved from a selection."""
        sizes = _nested_sizes(
            [axes[i][1] for i in reversed(order)]
        )  # the same for many orders: all, of powers of two
        key = (name(which), sizes)
        if key not in carvings:
            carvings[key] = carve(selections[which], sizes)
        gpus = carvings[key]
        if gpus is None:
            return None
        places = np.arange(len(gpus)).reshape([size for _, size in axes])
        result = np.empty_like(gpus)
        result[places.transpose(order).reshape(-1)] = gpus  # the ranks in the order of the nested blocks
        return result

    def carved(pairs: Iterable[tuple[int, int]]) -> None:
        """Carve and price pairs of (order, selection) that are not priced yet."""
        new = [pair for pair in dict.fromkeys(pairs) if pair not in priced_pairs]
        gpus = [placed(orders[order], which) for order, which in new]
        able = [k for k, each in enumerate(gpus) if each is not None]
        if able:
            prices = price(np.array([gpus[k] for k in able])).tolist()
            priced_pairs.update({new[k]: (gpus[k], seconds) for k, seconds in zip(able, prices, strict=True)})  # type: ignore[misc]

    def fastest(which: int, count: int) -> list[int]:
        """Return the fastest orders (0) or selections (1) priced so far."""
        ranked = sorted(priced_pairs, key=lambda pair: (priced_pairs[pair][1], pair))
        return list(dict.fromkeys(pair[which] for pair in ranked))[:count]

    carved((order, 0) for order in range(len(orders)))
    promising = fastest(0, _ORDERS)
    carved((order, which) for order in promising[:_BEST] for which in range(len(selections)))
    carved((order, which) for which in fastest(1, _BEST) for order in promising)
    distinct = {gpus.tobytes(): gpus for gpus, _ in priced_pairs.values()}
    return np.array(list(distinct.values()))


_BEST = 2
"""Number of orders to try on every selection, and of selections to try with promising orders."""
_ORDERS = 24
"""Number of promising orders, the fastest on all free GPUs: all orders of four axes, a fifth of the orders of
five."""


def _on_common_rails(topology: Topology, blocks: Sequence[FreeBlock], world: int) -> Iterator[list[FreeBlock]]:
    """Yield selections of the GPUs at the same indices of every host, for the indices that are free on some host."""
    weight: Counter[tuple[int, ...]] = Counter()
    for block in blocks:
        weight[tuple(sorted(topology.index[block.gpus].tolist()))] += len(block.gpus)
    for indices, _ in weight.most_common(_RAIL_SETS):
        kept = [FreeBlock(b.scopes, b.gpus[np.isin(topology.index[b.gpus], indices)]) for b in blocks]
        selection = sorted((b for b in kept if len(b.gpus)), key=lambda b: -len(b.gpus))
        if sum(len(b.gpus) for b in selection) >= world:
            yield selection


_RAIL_SETS = 16
"""Number of sets of indices to try on rails, those with the most free GPUs first."""


def _nested_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return cumulative sizes of nested blocks, innermost first, with each axis in steps of its prime factors."""
    result, n = [], 1
    for size in sizes:
        factor = 2
        while size > 1:
            while size % factor == 0:
                n *= factor
                result.append(n)
                size //= factor
            factor += 1
    return tuple(result) or (1,)


def _selections(blocks: Sequence[FreeBlock], world: int, sizes: Sequence[int]) -> Iterator[list[FreeBlock]]:
    """Yield selections of the free GPUs: all; and for each tier, a multiple of an axis in each block, or an even
    share in the fewest blocks that suffice, and in one and two more."""
    yield list(blocks)
    units = sorted({a * b for a, b in product([1, *sizes], repeat=2)})
    yielded = {_selection_key(blocks, world)}
    for depth in range(len(blocks[0].scopes) + 1):
        # Blocks of one tier, those with the most free GPUs first; their inner blocks likewise.
        members: dict[tuple[int, ...], list[FreeBlock]] = {}
        for i, block in enumerate(blocks):
            key = block.scopes[: depth + 1] if depth < len(block.scopes) else (*block.scopes, i)
            members.setdefault(key, []).append(block)
        tier = sorted(members.values(), key=lambda inner: -sum(len(block.gpus) for block in inner))
        counts = np.array([sum(len(block.gpus) for block in inner) for inner in tier])
        for cap in _caps(counts, world, units):
            selection = [kept for inner, n in zip(tier, cap.tolist(), strict=True) for kept in _first(inner, n)]
            key_of = _selection_key(selection, world)
            if cap.sum() >= world and key_of not in yielded:
                yielded.add(key_of)
                yield selection
    if len(blocks[0].scopes):
        inner = {n for size in sizes for n in _nested_sizes([size]) if n <= len(blocks[0].gpus)}
        for near, far in product(sorted(inner), [unit for unit in units if unit <= _UNDER]):
            if far > near and far % near == 0:
                selection = _in_multiples(blocks, near, far)
                key_of = _selection_key(selection, world)
                if sum(count for _, count in key_of) >= world and key_of not in yielded:
                    yielded.add(key_of)
                    yield selection


def _selection_key(selection: Sequence[FreeBlock], world: int) -> tuple[tuple[int, int], ...]:
    """Return a key of a selection: the number of GPUs in each block, and for few ranks also the first of them. For
    many ranks, selections with equal numbers count as one, because each takes long to price."""
    few = world <= descent.RANKS
    return tuple((int(block.gpus[0]) if few else 0, len(block.gpus)) for block in selection)


_UNDER = 256
"""The largest multiple of GPUs to try under a switch."""


def _in_multiples(blocks: Sequence[FreeBlock], near: int, far: int) -> list[FreeBlock]:
    """Return a multiple of `near` GPUs of every block, and of `far` (a multiple of `near`) under each switch above;
    the excess is left out of the blocks with the fewest GPUs."""
    under: dict[tuple[int, ...], list[FreeBlock]] = {}
    for block in blocks:
        kept = len(block.gpus) // near * near
        if kept:
            under.setdefault(block.scopes, []).append(FreeBlock(block.scopes, block.gpus[:kept]))
    result: list[FreeBlock] = []
    for inside in under.values():
        total = sum(len(block.gpus) for block in inside)
        result += _first(sorted(inside, key=lambda block: -len(block.gpus)), total // far * far)
    return sorted(result, key=lambda block: -len(block.gpus))


def _first(blocks: Sequence[FreeBlock], count: int) -> Iterator[FreeBlock]:
    """Yield the first `count` GPUs of some blocks, block by block."""
    for block in blocks:
        if count <= 0:
            return
        yield block if count >= len(block.gpus) else FreeBlock(block.scopes, block.gpus[:count])
        count -= len(block.gpus)


def _caps(counts: Ints, world: int, units: Sequence[int]) -> Iterator[Ints]:
    """Yield numbers of GPUs to use in each block, (blocks,), at most `counts`, which descend."""
    fewest = int(np.searchsorted(np.cumsum(counts), world)) + 1
    for used in range(fewest, min(fewest + 3, len(counts) + 1)):
        for extra in (0, 1):
            yield np.where(np.arange(len(counts)) < used, np.minimum(counts, -(-world // used) + extra), 0)
    for unit in units:
        yield counts // unit * unit
        yield np.minimum(counts, -(-world // (fewest * unit)) * unit)
    for some in sorted(set(counts.tolist())):
        yield np.minimum(counts, some)
        yield np.where(counts >= some, some, 0)
        yield np.where(counts >= some, counts, 0)
        if world <= descent.RANKS:
            yield np.where(counts <= some, counts, 0)


def bound_s(job: PlacedJob, topology: Topology, free: Ints, busy: Ints) -> float:
    """Return a step time that no placement on the free GPUs can beat."""
    counts = [np.bincount(blocks[free]) for blocks in topology.blocks]
    best = {axis: [_most_together(job, axis, tier) for tier in counts] for axis in job.groups}
    rows: dict[str, list[list[int]]] = {axis: [] for axis in job.groups}
    outermost: dict[str, int] = {}
    for joint in product(*(_joint_parts(job, tier) for tier in counts[:-1]), [outermost]):
        for axis, row in rows.items():
            row.append([min(most, at.get(axis, most)) for most, at in zip(best[axis], joint, strict=True)])
    shares = _best_shares(job, topology, free, busy)
    parts: Parts = {axis: np.array(columns).T for axis, columns in rows.items()}
    width = len(next(iter(rows.values()), [0]))
    return float(np.min(job.priced(parts, np.repeat(shares, width, axis=1))))


def _most_together(job: PlacedJob, axis: str, counts: Ints) -> int:
    """Return the largest size that the smallest part of an axis can have in blocks with these numbers of free
    GPUs."""
    world, size = job.strategy.world, int(job.groups[axis].shape[1])
    chain = {"pp": job.strategy.pp, "ring": job.strategy.ring}.get(axis, size)
    if np.sum(counts // chain) * chain >= world:
        return size
    return next((part for part in range(size // 2, 1, -1) if _room(counts, size, part) >= world), 1)


def _room(counts: Ints, size: int, part: int) -> int:
    """Return the most ranks that blocks with these free GPUs hold if every group of `size` has at least `part` ranks
    in each of its blocks. A block then has all ranks of a group, or from `part` to `size - part` of them; k such
    parts are from k x part to k x (size - part) ranks."""
    if part >= size:
        return int(np.sum(counts // size) * size)
    return int(np.minimum(counts, counts // part * (size - part)).sum())


def _joint_parts(job: PlacedJob, counts: Ints) -> Iterator[dict[str, int]]:
    """Yield axis -> smallest part, for parts that tp, data and pp can have at once in blocks with these numbers of
    free GPUs: the largest of data for each of tp and pp."""
    tp, data = (job.groups[axis].shape[1] if axis in job.groups else 1 for axis in ("tp", "data"))
    for stages, part in product({1, job.strategy.pp}, _parts_of(tp)):
        capacity = _capacity(counts, tp, part, job.strategy.world)
        rest = max((m for m in _parts_of(data) if m * part * stages <= capacity), default=0)
        if rest:
            yield {"tp": part, "data": rest, "pp": 2 if stages > 1 else 1}


def _capacity(counts: Ints, size: int, part: int, world: int) -> int:
    """Return the largest n such that blocks with at least n free GPUs hold all ranks, with parts of groups of `size`
    no smaller than `part`; 0 if there is none."""
    for n in sorted({*counts.tolist()}, reverse=True):
        if (enough := counts[counts >= n]).sum() >= world and _room(enough, size, part) >= world:
            return int(n)
    return 0


def _parts_of(size: int) -> list[int]:
    """Return the sizes that the smallest part of a group can have: all of the group, or at most half."""
    return [*range(1, size // 2 + 1), size]


def _best_shares(job: PlacedJob, topology: Topology, free: Ints, busy: Ints) -> Floats:
    """Return the best rate of each tier under any placement, (tiers, 1): an even share of every uplink."""
    tiers, factors = job.cluster.tiers, np.ones((len(job.cluster.tiers), 1))
    for i, tier in enumerate(tiers):
        uplink = tier.uplink_bandwidth_bytes_per_s_per_direction
        if uplink is None or i == 0:
            continue
        below, rate = tiers[i - 1].ranks, tier.bandwidth_bytes_per_s_per_gpu_per_direction
        blocks = topology.blocks[i - 1]
        others = np.bincount(blocks[busy], minlength=int(blocks.max()) + 1)
        room = np.bincount(blocks[free], minlength=len(others))
        users = next(
            n
            for n in range(1, int((others + room).max()) + 1)
            if np.minimum(room, np.maximum(n - others, 0)).sum() >= job.strategy.world
        )
        factors[i] = np.minimum(rate, uplink / users) / min(rate, uplink / below)
    return factors
