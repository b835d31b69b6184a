"""Anti-patterns in an observed program, each with the line of the program, its cost and the remedy.

Collectives carry gradients or parameters if the elements of one operation over one axis in a pass are a whole
multiple of the rank's trained elements (times the group, if these are sharded). Tensor-parallel traffic may be such a
multiple by chance; unlike gradients it is in the forward pass too (Shoeybi et al. 2019, section 3: f and g). Costs
are bytes or seconds of one rank and step; seconds need a cluster, and price each collective alone
(cost/collectives/nccl_model.py).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from phalanx.cost.analytic.chips import system_of
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.cost.hardware.system import System
from phalanx.schedule.observation import STAY_GATHERED, Observation, ObservedEvent, RankObservation
from phalanx.spec.byte_sizes import write_bytes
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import DTYPE_BYTES

_PADDING = 0.02
"""The largest padding of a collective, as a share of the elements that it carries."""
_SMALL, _BUCKET, _LEAST_REDUCTIONS = 2**20, 25 * 2**20, 8
"""Mean bytes below which reductions are small; bytes of a bucket, DDP's default; number of reductions from which
small ones are reported."""
_PASS = {"F": "F", "B": "B", "I": "B", "W": "B", "opt": "opt"}
"""Phases, with the parts of a backward pass merged."""
_SHARE = 0.05
"""Traffic below this share of a step's bytes, and memory below this share of the peak, is not reported."""


@dataclass(frozen=True)
class ProgramFinding:
    """One anti-pattern of a program. `where`: "file:line"; `bytes`: sent or stored needlessly by a rank in a step, 0
    if the loss is of another kind; `seconds`: communication time lost in a step, None without a cluster."""

    name: str
    where: str
    problem: str
    remedy: str
    bytes: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class StateFlow:
    """The collectives of one operation over one axis in one phase that carry all gradients or all parameters,
    `rounds` times in a step."""

    rounds: int
    events: tuple[ObservedEvent, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all events."""
        return sum(o.event.bytes for o in self.events)


class LintedRank:
    """One observed rank, the cluster that it would run on, if known, and other ranks of the same world."""

    def __init__(
        self, rank: RankObservation, cluster: ClusterSpec | None, others: Sequence[RankObservation] = ()
    ) -> None:
        self.rank, self.cluster, self.others = rank, cluster, others
        self.system: System | None = system_of(cluster) if cluster else None
        self.elements = sum(t.elements for t in rank.trained)
        self.gradients = [
            flow for op in ("all_reduce", "reduce_scatter") for flow in self._flows(op, "B", limit=rank.micro_batches)
        ]
        self.parameters = self._flows("all_gather", "F", limit=2 * rank.micro_batches)

    def _flows(self, op: str, phase: str, limit: int) -> list[StateFlow]:
        groups: dict[tuple[str, int], list[ObservedEvent]] = defaultdict(list)
        forward = [o.event for o in self.rank.communication if _PASS[o.event.phase] == "F"]
        activations = {(e.op, e.axis, e.bytes) for e in forward if e.op in ("all_reduce", "reduce_scatter")}
        split = {axis for reduction, axis, _ in activations if reduction == "reduce_scatter"}  # sequence parallelism
        for o in self.rank.communication:
            e = o.event
            if e.axis in split or (e.op, e.axis, e.bytes) in activations:
                continue
            if e.op == op and _PASS[e.phase] == phase and e.group_size > 1:
                groups[e.axis, e.group_size].append(o)
        result = []
        for (_, size), events in groups.items():
            once = self.elements * (1 if op == "all_reduce" else size)
            carried = sum(o.event.bytes // DTYPE_BYTES.get(o.event.dtype, 4) for o in events)
            rounds = round(carried / once) if once else 0
            if 1 <= rounds <= limit and -1e-9 <= carried / (rounds * once) - 1 <= _PADDING:
                result.append(StateFlow(rounds, tuple(events)))
        return result

    def seconds(self, events: Iterable[ObservedEvent], share: float = 1.0) -> float | None:
        """Return `share` of the seconds of some collectives, one after the other; None without a cluster."""
        if self.system is None:
            return None
        return share * sum(_price(o, o.event.bytes, self.system) for o in events)

    def fits(self, extra: int) -> bool:
        """Whether the device has room for `extra` bytes on top of the peak; assumed without a cluster."""
        return self.system is None or self.rank.peak + extra <= float(np.asarray(self.system.memory_bytes))


def _price(o: ObservedEvent, n: int, system: System, stride: int | None = None) -> float:
    stride = o.ranks[1] - o.ranks[0] if stride is None else stride
    return float(np.asarray(collective_s(o.event.op, n, o.event.group_size, stride, system)))


def lint(o: Observation, cluster: ClusterSpec | None = None) -> list[ProgramFinding]:
    """Return the findings of every lint, each once for all ranks. Raises InputError if the cluster is too small."""
    if cluster is not None and cluster.ranks < o.world:
        raise InputError("cluster", cluster.name, f"has {cluster.ranks} ranks, the program {o.world}")
    results: dict[tuple[str, str], ProgramFinding] = {}
    for i, r in enumerate(o.ranks):
        subject = LintedRank(r, cluster, o.ranks[i + 1 :])
        for finds in LINTS.values():
            for finding in finds(subject):
                results.setdefault((finding.name, finding.where), finding)
    return list(results.values())


def _commonest_site(events: Iterable[ObservedEvent]) -> str:
    return Counter(str(o.site) for o in events).most_common(1)[0][0]


_INSTEAD = {
    "item": "keep it on the device, and read it once every many steps",
    "copy to the host": "copy it with non_blocking=True, or once every many steps",
    "synchronize": "leave it out of the step",
}


def _synchronisation(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report that the host waits for the device in the middle of a step, so that it cannot queue work ahead."""
    counts: Counter[tuple[str, str]] = Counter()
    for s in x.rank.synchronisations:
        if s.site in x.rank.rebuilt_at:
            continue
        counts[s.call, str(s.site)] += s.count
    for (call, where), n in counts.items():
        yield ProgramFinding(
            "host-synchronisation",
            where,
            f"{call}: the host waits for the device {n} time{'s' * (n > 1)} a step, and queues nothing meanwhile",
            _INSTEAD.get(call, "use torch.where or a shape that does not depend on values"),
        )


def _repeated_gathers(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report parameters gathered several times in a step, although memory has room for them."""
    for flow in x.parameters:
        axis = flow.events[0].event.axis
        again = [
            o
            for o in x.rank.communication
            if o.event.op == "all_gather" and _PASS[o.event.phase] == "B" and o.event.axis == axis
        ]
        once = flow.bytes // flow.rounds
        in_vain = flow.bytes - once + sum(o.event.bytes for o in again)
        if in_vain and (flow.rounds > 1 or x.cluster) and x.fits(once):
            yield ProgramFinding(
                "repeated-gathers",
                _commonest_site(flow.events),
                f"parameters are gathered over {axis} in {flow.rounds} forward pass{'es' * (flow.rounds > 1)}"
                f"{' and again in backward' if again else ''}: {write_bytes(in_vain)} a step more than once needs",
                f"reshard_after_forward=False, and set_reshard_after_backward(False) before all but the last "
                f"micro-batch, keep them for {write_bytes(once)} of memory",
                in_vain,
                x.seconds((*flow.events, *again), in_vain / (flow.bytes + sum(o.event.bytes for o in again))),
            )


def _repeated_reductions(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report gradients reduced in every micro-batch, though only their sum is needed."""
    for flow in x.gradients:
        if flow.rounds > 1:
            in_vain = flow.bytes - flow.bytes // flow.rounds
            e = flow.events[0].event
            yield ProgramFinding(
                "repeated-reductions",
                _commonest_site(flow.events),
                f"gradients are reduced over {e.axis} in each of {flow.rounds} micro-batches: {write_bytes(in_vain)} "
                "a step more than once needs",
                "all but the last micro-batch under no_sync() (DDP), or set_requires_gradient_sync(False) "
                "(fully_shard), which keeps unsharded gradients",
                in_vain,
                x.seconds(flow.events, 1 - 1 / flow.rounds),
            )


def _lost_gradients(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report gradients lost by a zero-bubble schedule on a sharded chunk. When I begins, torch notes the parameters
    whose gradients W will compute (torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_input).
    Those that fully_shard gathers within I are other tensors, so the micro-batch adds nothing to their gradients."""
    late: dict[str, list[ObservedEvent]] = defaultdict(list)
    for o in x.rank.communication:
        if o.event.op == "all_gather" and o.event.phase == "I" and o.op_name.startswith("c10d."):  # except DTensor's
            late[o.event.axis].append(o)
    for axis, events in late.items():
        yield ProgramFinding(
            "lost-gradients",
            _commonest_site(events),
            f"parameters are gathered over {axis} {len(events)} time{'s' * (len(events) > 1)} within passes that "
            "compute gradients of inputs alone: their own gradients of that micro-batch are lost, without an error",
            "fully_shard(..., reshard_after_forward=False), or a schedule that does not split backward",
        )


def _replicated_state(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report an axis on which every rank holds the full optimizer state."""
    state, whole = x.rank.start.get("optimizer state", 0), all(t.elements == t.all_elements for t in x.rank.trained)
    for flow in x.gradients:
        e = flow.events[0].event
        if e.op != "all_reduce" or not whole or state < 3 * x.elements or state < 2 * _SHARE * x.rank.peak:
            continue
        if x.system is not None and x.rank.peak < 0.5 * float(np.asarray(x.system.memory_bytes)):
            continue
        saved = state - state // e.group_size
        yield ProgramFinding(
            "replicated-state",
            _commonest_site(flow.events),
            f"each of {e.group_size} ranks of {e.axis} holds all of the optimizer's state: {write_bytes(saved)} of "
            f"the peak of {write_bytes(x.rank.peak)} could lie on other ranks",
            "fully_shard (parameters and gradients too), or ZeroRedundancyOptimizer",
            saved,
        )


def _kept_activations(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report activations that stay alive after the step, in the graph of a result without a backward pass."""
    by_place: Counter[str] = Counter()
    modules: dict[str, str] = {}
    for k in x.rank.kept:
        by_place[str(k.site)] += k.bytes
        modules.setdefault(str(k.site), k.module)
    for where, n in by_place.items():
        if n > _SHARE * x.rank.peak:
            yield ProgramFinding(
                "kept-by-autograd",
                where,
                f"{write_bytes(n)} of {modules[where]} are alive when the step has ended, held by the graph of "
                "something that has no backward pass",
                "leave it out, or compute it under torch.no_grad()",
                n,
            )


def _stays_gathered(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report parameters that a forward pass without a backward pass gathered, and that stay gathered."""
    for a in x.rank.allocations:
        if a.kind == STAY_GATHERED and a.peak_bytes > _SHARE * x.rank.peak:
            model, units = a.model or "model", ", ".join(a.units) or "the root"
            yield ProgramFinding(
                "stays-gathered",
                str(a.site),
                f"{write_bytes(a.peak_bytes)} of {units}, gathered in an earlier step, are "
                "never freed: FSDP frees a root's in the backward pass, and there is none",
                f"fully_shard(..., reshard_after_forward=True) for the root, or {model}.reshard() after its call",
                a.peak_bytes,
            )


def _straddling(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report a group that fits on one node but spans several, or is divided unevenly among nodes."""
    if x.cluster is None or x.system is None:
        return
    node = x.cluster.ranks_per_node
    groups: dict[tuple[int, ...], list[ObservedEvent]] = defaultdict(list)
    for o in x.rank.communication:
        if o.event.kind == "collective" and len(o.ranks) > 1:
            groups[o.ranks].append(o)
    by_node = {ranks: _ranks_by_node(ranks, node) for ranks in groups}
    inside = [sum(o.event.bytes for o in events) for ranks, events in groups.items() if len(by_node[ranks]) == 1]
    for ranks, events in groups.items():
        counts = by_node[ranks]
        e, sent = events[0].event, sum(o.event.bytes for o in events)
        uneven = max(counts) > min(counts)
        if len(ranks) > node or len(counts) == 1 or not (uneven or any(n < sent for n in inside)):
            continue
        lost = sum(_price(o, o.event.bytes, x.system) - _price(o, o.event.bytes, x.system, 1) for o in events)
        yield ProgramFinding(
            "straddling-groups",
            _commonest_site(events),
            f"groups of {e.axis} ({len(ranks)} ranks) lie on {len(counts)} nodes of {node} and send "
            f"{write_bytes(sent)} a step",
            f"make {e.axis} {f'a divisor of {node}' if uneven else 'the innermost axis of the DeviceMesh'}",
            0,
            lost,
        )


def _ranks_by_node(ranks: tuple[int, ...], node: int) -> list[int]:
    """Return the number of a group's ranks on each of its nodes, which have `node` ranks."""
    return list(Counter(r // node for r in ranks).values())


def _small_buckets(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report gradients sent in many small collectives, each of which pays the latency of its links."""
    for flow in x.gradients:
        count = len(flow.events) // flow.rounds
        mean = flow.bytes // len(flow.events)
        if count < _LEAST_REDUCTIONS or mean >= _SMALL:
            continue
        merged = -(-flow.bytes // flow.rounds // _BUCKET)
        now = x.seconds(flow.events)
        lost = None
        if now is not None and x.system is not None:
            each = flow.bytes // flow.rounds // merged
            lost = now - flow.rounds * merged * _price(flow.events[0], each, x.system)
        e = flow.events[0].event
        how = "a larger bucket_cap_mb" if e.op == "all_reduce" else "fully_shard of larger modules"
        yield ProgramFinding(
            "small-buckets",
            _commonest_site(flow.events),
            f"gradients travel over {e.axis} in {count} collectives of {write_bytes(mean)} on average",
            f"{how}: {merged} would do",
            0,
            lost,
        )


def _wide_traffic(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report a program that computes in 16 bits, but sends parameters or activations in 32."""
    types = x.rank.flops_by_type
    if sum(n for t, n in types.items() if t in ("bfloat16", "float16")) < 0.9 * sum(types.values()) or not types:
        return
    gradients = {id(o) for flow in x.gradients for o in flow.events}
    everything = sum(o.event.bytes for o in x.rank.communication)
    wide: dict[tuple[str, str], list[ObservedEvent]] = defaultdict(list)
    for o in x.rank.communication:
        if o.event.dtype == "float32" and o.event.phase != "opt" and id(o) not in gradients:
            wide[o.event.op, o.event.axis].append(o)
    for (op, axis), events in wide.items():
        n = sum(o.event.bytes for o in events)
        if n >= _SHARE * everything:
            yield ProgramFinding(
                "fp32-traffic",
                _commonest_site(events),
                f"{op} over {axis} sends {write_bytes(n)} a step in float32, while the products are in 16 bits",
                "MixedPrecisionPolicy(param_dtype=torch.bfloat16) for parameters, a cast before it for activations",
                n // 2,
                x.seconds([o for o in events if o.event.kind == "collective"], 0.5),
            )


def _unmatched(x: LintedRank) -> Iterator[ProgramFinding]:
    """Report the first collective of a group in which two of its ranks differ, so that the group waits forever."""
    for other in x.others:
        groups = {o.ranks for o in (*x.rank.communication, *other.communication) if o.event.kind == "collective"}
        for group in sorted(group for group in groups if {x.rank.rank, other.rank} <= set(group)):
            ours, theirs = ([o for o in r.communication if o.ranks == group] for r in (x.rank, other))
            for one, two in zip_longest(ours, theirs):
                if one is None or two is None or _signature(one) != _signature(two):
                    said = [f"rank {r.rank} {_issued(o)}" for r, o in ((x.rank, one), (other, two))]
                    yield ProgramFinding(
                        "unmatched-collectives",
                        _commonest_site([o for o in (one, two) if o is not None]),
                        f"over {len(group)} ranks {said[0]}, {said[1]}: the step never ends, or mixes up buffers",
                        "call it on every rank of the group, outside of what only some of them do",
                    )
                    break


_EQUAL = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Collectives whose buffers are equally large on every rank."""


def _signature(o: ObservedEvent) -> tuple[str, int]:
    """Return what all ranks of a group must have in common: the operation, and its bytes if these must be equal."""
    return o.event.op, o.event.bytes if o.event.op in _EQUAL else 0


def _issued(o: ObservedEvent | None) -> str:
    return "issues nothing more" if o is None else f"issues {o.event.op} of {write_bytes(o.event.bytes)} ({o.site})"


LINTS: dict[str, Callable[[LintedRank], Iterator[ProgramFinding]]] = {
    "unmatched-collectives": _unmatched,
    "host-synchronisation": _synchronisation,
    "repeated-gathers": _repeated_gathers,
    "repeated-reductions": _repeated_reductions,
    "lost-gradients": _lost_gradients,
    "replicated-state": _replicated_state,
    "kept-by-autograd": _kept_activations,
    "stays-gathered": _stays_gathered,
    "straddling-groups": _straddling,
    "small-buckets": _small_buckets,
    "fp32-traffic": _wide_traffic,
}
