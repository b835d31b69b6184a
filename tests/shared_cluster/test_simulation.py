"""Jobs on a shared cluster: what must hold of any trace under any policy, and the command."""

from __future__ import annotations

import csv
import itertools
import json
import lzma
import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from support.in_process_cli import error_of, phalanx
from support.sizes import drawn

from phalanx.report.pictures.figure import Heat
from phalanx.shared_cluster.simulation.nodes import Nodes
from phalanx.shared_cluster.simulation.outcome import _gpu_hours, outcome, picture, use_over_time
from phalanx.shared_cluster.simulation.policy import THRESHOLD, SchedulingPolicy
from phalanx.shared_cluster.simulation.replay import _Prices, cluster_of, simulate
from phalanx.shared_cluster.simulation.trace import TraceJob
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.topology import of_leaves

_WAYS = [
    *(
        (name, rule)
        for name in ("fifo", "easy", "smallest")
        for rule in ("first-fit", "best-fit", "topology", "scatter")
    ),
    *((name, rule) for name in ("conservative", "las") for rule in ("first-fit", "best-fit", "topology")),
]


@st.composite
def traces(draw, limits=True, elastic=False, urgent=False):
    sizes = draw(st.sampled_from([(4, 4), (4, 4, 4), (8, 8, 2), (2, 4, 4, 1)]))
    nodes = Nodes(sizes)
    jobs, submit = [], 0.0
    for row in range(draw(st.integers(1, 25))):
        submit += draw(st.sampled_from([0.0, 0.0, 1.0, 10.0, 500.0]))
        duration = draw(st.sampled_from([1.0, 7.0, 100.0, 3000.0, 20_000.0, *([0.0] if limits else [])]))
        limit = duration * draw(st.sampled_from([1.0, 1.0, 2.0, 5.0])) if limits else 0.0
        gpus = draw(st.integers(1, nodes.widest()))
        widths = ((gpus // 2, 0.6),) if elastic and gpus > 1 else ()
        priority = draw(st.sampled_from([0, 0, 1, 5])) if urgent else 0
        jobs.append(TraceJob(row + 2, submit, duration, gpus, limit, widths, priority=priority))
    return jobs, sizes


def _check(jobs, sizes, history, restarts=60.0):
    """Gangs are whole, no GPU is held twice, every job does its work, and losses are what is left of the time."""
    busy = defaultdict(list)
    work = [0.0] * len(jobs)
    for run in history.runs:
        job = jobs[run.job]
        width = sum(bits.bit_count() for _, bits in run.gpus)
        speeds = {job.gpus: 1.0, **dict(job.widths)}
        assert width in speeds
        assert run.start >= job.submit
        work[run.job] += (run.end - run.start) * speeds[width]
        for node, bits in run.gpus:
            assert 0 < bits < 1 << sizes[node]
            for gpu in range(sizes[node]):
                if bits >> gpu & 1:
                    busy[node, gpu].append((run.start, run.end))
    for spans in busy.values():
        spans = sorted(span for span in spans if span[1] > span[0])
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(spans))
    for number, job in enumerate(jobs):
        stops = sum(run.job == number for run in history.runs) - 1
        assert job.duration - 1e-6 <= work[number] <= job.duration + restarts * max(stops, 0) + 1e-6
        assert history.finish[number] >= job.submit + min(job.duration, work[number]) - 1e-6 or job.widths


@drawn(50, 250, traces(), st.sampled_from(_WAYS))
def test_gangs_start_whole_or_not_at_all_and_no_gpu_is_held_twice(trace, way):
    jobs, sizes = trace
    history = simulate(jobs, Nodes(sizes), SchedulingPolicy(*way))
    _check(jobs, sizes, history)
    shape = Nodes(sizes)
    for run in history.runs:
        if way[1] != "scatter":  # one node, or entire nodes and a part of one more
            need = shape.shape(jobs[run.job].gpus)
            parts = sorted((bits.bit_count() for _, bits in run.gpus), reverse=True)
            assert parts == [shape.largest] * need.entire + [need.part] * (need.part > 0)
    figures = outcome(history)
    assert 0 <= figures.gpu_use <= 1 + 1e-9
    use = use_over_time(history, 7)
    drawn_use = picture([history], "c").panels[0]
    assert isinstance(drawn_use, Heat)
    assert len(drawn_use.rows) == len(sizes)
    for (name, shares), of_node in zip(
        drawn_use.rows, use_over_time(history, len(drawn_use.rows[0][1])), strict=True
    ):
        assert shares == pytest.approx(of_node.tolist()), name
    assert use.min() >= -1e-9
    assert use.max() <= 1 + 1e-9
    if history.makespan:
        assert use.mean(axis=1) @ np.array(sizes) / sum(sizes) == pytest.approx(figures.gpu_use, abs=1e-9)


@drawn(
    50,
    250,
    traces(),
    st.sampled_from(["easy", "conservative"]),
    st.sampled_from(["first-fit", "best-fit", "scatter"]),
)
def test_nobody_starves_under_a_reservation(trace, name, rule):
    jobs, sizes = trace
    if name == "conservative" and rule == "scatter":
        rule = "topology"
    history = simulate(jobs, Nodes(sizes), SchedulingPolicy(name, rule))
    _check_promises(history)


@drawn(50, 250, traces(), st.sampled_from(["first-fit", "best-fit", "scatter"]))
def test_nobody_starves_behind_jobs_that_their_placement_slows(trace, rule):
    """A job passes the first in the queue only if, at its speed on the GPUs that it gets, it ends in time."""
    jobs, sizes = [replace(job, plan="p.json") for job in trace[0]], trace[1]

    def speed(job, held):
        return (0.25, 1.0, 0.6)[job.row % 3] / len(held) ** 0.5

    _check_promises(simulate(jobs, Nodes(sizes), SchedulingPolicy("easy", rule), speed))


def _check_promises(history):
    most = max(job.priority for job in history.jobs)
    for number, start in history.promised.items():
        if history.jobs[number].priority == most:  # those below may be passed by jobs that arrive later
            assert min(run.start for run in history.runs if run.job == number) <= start + 1e-6


@drawn(
    30, 150, traces(elastic=True, urgent=True), st.sampled_from(["first-fit", "best-fit", "scatter"]), st.booleans()
)
def test_nobody_of_the_highest_priority_starves_among_elastic_and_preempting_jobs(trace, rule, preempt):
    jobs, sizes = trace
    history = simulate(jobs, Nodes(sizes), SchedulingPolicy("easy", rule, elastic=True, preempt=preempt))
    _check_promises(history)
    _check(jobs, sizes, history)
    most = max(job.priority for job in jobs)
    assert all(not n or job.priority < most for n, job in zip(history.preempted, jobs, strict=True))


@drawn(
    24,
    120,
    traces(limits=False, elastic=True, urgent=True),
    st.sampled_from(["fifo", "smallest", "las"]),
    st.booleans(),
)
def test_priorities_keep_gangs_whole_and_what_is_stopped_ends(trace, name, preempt):
    jobs, sizes = trace
    history = simulate(jobs, Nodes(sizes), SchedulingPolicy(name, elastic=True, preempt=preempt))
    _check(jobs, sizes, history)
    if not preempt and name != "las":
        assert sum(history.preempted) == 0


def test_a_job_of_higher_priority_comes_first_and_stops_others_only_when_asked():
    jobs = [TraceJob(2, 0.0, 1000.0, 4), TraceJob(3, 100.0, 50.0, 4), TraceJob(4, 200.0, 50.0, 4, priority=3)]
    waits = simulate(jobs, Nodes((4,)), SchedulingPolicy("fifo"))
    assert (waits.finish[2], waits.finish[1]) == (1050.0, 1100.0)
    stops = simulate(jobs, Nodes((4,)), SchedulingPolicy("fifo", restart_s=10.0, preempt=True))
    assert stops.waited[2] == 0.0
    assert stops.preempted == [1, 0, 0]
    assert stops.finish[0] == 200 + 50 + 800 + 10


def test_a_reservation_is_made_again_when_a_job_of_higher_priority_has_passed():
    jobs = [
        TraceJob(2, 0.0, 100.0, 3),
        TraceJob(3, 1.0, 50.0, 4, priority=1),
        TraceJob(4, 2.0, 500.0, 1, priority=5),
        TraceJob(5, 101.0, 200.0, 1),
    ]
    history = simulate(jobs, Nodes((4,)), SchedulingPolicy("easy"))
    assert history.promised[1] == 502.0
    assert history.finish[1] == 552.0
    assert history.waited[3] == 0.0  # it ends before the reservation


def test_least_attained_service_stops_nobody_of_a_higher_priority():
    jobs = [TraceJob(2, 0.0, THRESHOLD, 4, priority=1), TraceJob(3, THRESHOLD / 2, 10.0, 4)]
    assert simulate(jobs, Nodes((4,)), SchedulingPolicy("las")).preempted == [0, 0]


def test_an_elastic_job_gives_up_gpus_for_who_waits_and_takes_them_again():
    jobs = [TraceJob(2, 0.0, 1000.0, 4, widths=((1, 0.3), (2, 0.5))), TraceJob(3, 100.0, 200.0, 2)]
    rigid = simulate(jobs, Nodes((4,)), SchedulingPolicy("fifo", restart_s=10.0))
    assert rigid.waited[1] == 900.0
    shared = simulate(jobs, Nodes((4,)), SchedulingPolicy("fifo", elastic=True, restart_s=10.0))
    assert shared.waited[1] == 0.0
    assert shared.resized == [2, 0]
    # 100 s at full speed, 200 s at half, then what is left and two restarts.
    assert shared.finish[0] == pytest.approx(300 + (1000 - 100 - 100 + 20))
    soon = [TraceJob(2, 0.0, 105.0, 4, widths=((2, 0.5),)), jobs[1]]  # ends before it would have started again
    assert simulate(soon, Nodes((4,)), SchedulingPolicy("fifo", elastic=True, restart_s=10.0)).resized == [0, 0]


@drawn(12, 60, traces())
def test_fifo_starts_jobs_in_their_order(trace):
    jobs, sizes = trace
    history = simulate(jobs, Nodes(sizes), SchedulingPolicy("fifo"))
    starts = {run.job: run.start for run in history.runs}
    order = [starts[number] for number in range(len(jobs))]
    assert order == sorted(order)


@drawn(12, 60, traces(limits=False))
def test_conservative_backfilling_delays_nobody_behind_fifo(trace):
    """With run times known, a job never waits longer than if all jobs started in their order."""
    jobs, sizes = trace
    one_node = (sum(sizes),)  # on one node no shape differs, so the theorem holds (Mu'alem and Feitelson 2001)
    conservative = simulate(jobs, Nodes(one_node), SchedulingPolicy("conservative"))
    fifo = simulate(jobs, Nodes(one_node), SchedulingPolicy("fifo"))
    for own, other in zip(conservative.finish, fifo.finish, strict=True):
        assert own <= other + 1e-6


@drawn(24, 120, traces(limits=False, elastic=True), st.sampled_from(["fifo", "easy", "smallest", "las"]))
def test_elastic_jobs_run_at_their_widths_only(trace, name):
    jobs, sizes = trace
    _check(jobs, sizes, simulate(jobs, Nodes(sizes), SchedulingPolicy(name, elastic=True)))


def test_an_elastic_job_starts_narrower_and_widens_when_nobody_waits():
    jobs = [TraceJob(2, 0.0, 100.0, 2), TraceJob(3, 0.0, 1000.0, 4, widths=((2, 0.5),))]
    plain = simulate(jobs, Nodes((4,)), SchedulingPolicy("fifo", restart_s=10.0))
    elastic = simulate(jobs, Nodes((4,)), SchedulingPolicy("fifo", elastic=True, restart_s=10.0))
    assert plain.finish[1] == 1100.0
    # 100 s at half speed, then 950 s of work and the restart.
    assert elastic.finish[1] == pytest.approx(100 + 950 + 10)


def test_least_attained_service_stops_a_long_job_for_a_short_one():
    long = TraceJob(2, 0.0, THRESHOLD, 4)
    short = TraceJob(3, THRESHOLD / 2, 10.0, 4)
    history = simulate([long, short], Nodes((4,)), SchedulingPolicy("las", restart_s=5.0))
    assert history.waited[1] == 0.0
    assert history.preempted == [1, 0]
    assert history.finish[0] == pytest.approx(THRESHOLD + 10 + 5)


def test_what_a_placement_costs_is_counted_before_and_after_a_change_of_queue():
    job = TraceJob(2, 0.0, THRESHOLD, 4, plan="p.json")
    for name in ("fifo", "las"):  # under las it goes to the second queue on its way
        history = simulate([job], Nodes((4,)), SchedulingPolicy(name), lambda job, held: 0.5)
        assert history.finish == [2 * THRESHOLD]
        assert history.placement == pytest.approx(4 * THRESHOLD)


@pytest.mark.parametrize("seed", range(12))
def test_placements_with_as_many_gpus_on_nodes_and_leaves_are_priced_as_one(seed, monkeypatch):
    """By one of them, which has those numbers; at another width a job has the speed that its trace says."""
    draw = np.random.default_rng(seed)
    leaf = np.sort(draw.integers(0, 3, 8))
    leaf -= leaf[0]
    names = [f"n{i}" for i in range(8)]
    cluster, topology = of_leaves(
        preset("dgx-h100", 8), names, tuple(int(n) for n in np.unique(leaf, return_inverse=True)[1])
    )
    prices = _Prices(cluster, topology)
    nodes = draw.permutation(8)[: int(draw.integers(1, 6))]
    parts = [(int(node), int(draw.integers(1, 9))) for node in nodes]

    def counts(gpus):
        """GPUs on each node, by leaf."""
        by_leaf = defaultdict(list)
        for node in {int(gpu) // 8 for gpu in gpus}:
            by_leaf[int(leaf[node])].append(sum(int(gpu) // 8 == node for gpu in gpus))
        return sorted(sorted(own) for own in by_leaf.values())

    held = [node * 8 + i for node, n in parts for i in range(n)]
    chosen = prices._alike(tuple(parts))
    assert len(set(chosen)) == len(chosen) == len(held)
    assert counts(chosen) == counts(held)
    mixed = [parts[i] for i in draw.permutation(len(parts))]
    assert prices._alike(tuple(mixed)) == chosen
    monkeypatch.setattr(_Prices, "step_s", lambda self, plan, gpus: 3.0 if gpus == chosen else 2.0)
    job = TraceJob(1, 0.0, 1.0, len(held))
    bits = tuple((node, (1 << n) - 1) for node, n in parts)
    whole = chosen == tuple(range(64))
    assert prices.speed(job, bits) == (1.0 if whole else pytest.approx(2 / 3))
    assert prices.speed(TraceJob(1, 0.0, 1.0, len(held) + 1), bits) == 1.0


@pytest.mark.parametrize("hours", [0.0, 0.26, 99.94, 100.0, 100.4, 12345.0])
def test_hours_of_gpus_read_back_and_from_100_on_have_no_tenths(hours):
    number, unit = _gpu_hours(3600 * hours).split()
    assert unit == "GPU-h"
    assert float(number.replace(",", "")) == pytest.approx(hours, abs=0.5 if hours >= 100 else 0.051)
    assert ("." in number) == (hours < 100)


def test_the_textbook_s_fragmentation_is_counted():
    """Four nodes with two free GPUs each: eight are free, and a job of four has nowhere to go."""
    jobs = [TraceJob(2, 0.0, 100.0, 2) for _ in range(4)] + [TraceJob(6, 1.0, 50.0, 4)]
    spread = simulate(jobs, Nodes((4,) * 4), SchedulingPolicy("fifo", "first-fit"))
    assert spread.waited[4] == 0.0  # first fit fills two nodes
    half = [TraceJob(2, 0.0, 100.0, 2), TraceJob(2, 0.0, 100.0, 2), TraceJob(3, 0.0, 50.0, 2)] * 2
    jobs = [*half, TraceJob(9, 60.0, 50.0, 4)]
    blocked = simulate(jobs, Nodes((4,) * 3), SchedulingPolicy("fifo", "first-fit"))
    assert blocked.waited[6] in (0.0, 40.0)
    assert blocked.fragmented == 4 * blocked.waited[6]
    scattered = simulate(jobs, Nodes((4,) * 3), SchedulingPolicy("fifo", "scatter"))
    assert scattered.waited[6] == 0.0


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    rows = ["submit,duration,gpus"] + [
        f"{60 * i},{100 + 37 * (i % 50)},{(1, 2, 4, 8, 16)[i % 5]}" for i in range(200)
    ]
    (folder / "jobs.csv").write_text("\n".join(rows) + "\n")
    (folder / "jobs.csv.xz").write_bytes(lzma.compress((folder / "jobs.csv").read_bytes()))
    return folder


def test_the_command_compares_policies(here):
    line = ("cluster", "simulate", "--trace", "jobs.csv.xz", "--cluster", "3x8,2x4", "--json", "--save", "use.svg")
    code, out, _ = phalanx(here, *line)
    answer = json.loads(out)
    assert code == 0
    assert [p["policy"].split(",")[0] for p in answer["policies"]] == [
        "fifo",
        "easy",
        "conservative",
        "smallest",
        "las",
    ]
    assert len({p["jobs"] for p in answer["policies"]}) == 1
    assert "mean queue time" in (here / "use.svg").read_text()
    words = ("--trace", "jobs.csv", "--cluster", "dgx-h100", "--nodes", "3", "--policy", "easy")
    assert "nodes over time" not in phalanx(here, "cluster simulate", *words)[1]
    assert "full height" in phalanx(here, "cluster simulate", *words)[1]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ("submit,duration,gpus\n0,10,1\n5,10,33", "row 3: gpus = 33: is wider than the cluster"),
        ("submit,duration,gpus\n0,-1,1", "row 2: duration = -1.0: ends before it starts"),
        ("submit,end,gpus\n10,5,1", "row 2: duration = -5.0: ends before it starts"),
        ("submit,duration,gpus\n0,ten,1", "row 2: duration = 'ten': is not a number"),
        ("submit,duration,gpus\n0,10,1.5", "row 2: gpus = 1.5"),
        ("submit,duration,gpus\nyesterday,10,1", "is not a time"),
        ("submit,duration,gpus\n0,10,1\n5,,1", "row 3: duration: is missing"),
        ("submit,duration,gpus\n0,10,1,5", "row 2: fields = 4: but the header names 3"),
        ("submit,duration,gpus,steps\n0,10,1,5", "row 2: steps = '5': are of a plan"),
        ("submit,duration,gpus,limit\n0,10,1,5", "is shorter than the duration"),
        ("submit,duration,gpus,widths\n0,10,4,2:1.5", "does not list GPUs and speeds"),
        ("submit,duration,gpus,widths\n0,10,4,2:0.5;4:1", "names 4 GPUs, but the job asks for 4; list narrower"),
        ("submit,duration,gpus,widths\n0,10,4,0:0.5", "lists a width of 0 GPUs"),
        ("submit,duration,gpus,min_gpus\n0,10,4,2", "row 2: min_gpus = 2: needs a plan"),
        ("submit,duration,gpus,min_gpus\n0,10,4,-2", "row 2: min_gpus = -2.0: is not a number of GPUs"),
        ("submit,duration,gpus,widths,min_gpus\n0,10,4,2:0.5,2", "both say how narrow the job can run"),
        ("submit,duration,gpus,priority\n0,10,1,0.5", "row 2: priority = 0.5: is not a whole number"),
        ("submit,duration,gpus\n1e300,10,1", "row 2: submit = '1e300': is more than 1e+11 s"),
        ("submit,gpus\n0,1", "has columns submit, gpus; it needs"),
        ("submit,plan,steps\n0,p.json,10", "needs a cluster with links"),
        (f"submit,duration,gpus\n0,10,{'1' * 2**18}", "trace = 't.csv': is not CSV (field larger than field limit"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, what):
    (tmp_path / "t.csv").write_text(rows + "\n")
    err = error_of(tmp_path, "cluster simulate --trace t.csv --cluster 4x8")
    assert what in err
    assert err.count("\n") == 1


def test_a_ratio_of_uplinks_needs_leaf_switches_and_links(here):
    for cluster in (("4x8", "--leaf", "2"), ("dgx-h100", "--nodes", "4")):
        line = ("cluster", "simulate", "--trace", "jobs.csv", "--oversubscription", "4", "--cluster", *cluster)
        assert "which this cluster has not" in error_of(here, *line)


def test_leaf_switches_join_whole_nodes_in_order():
    leaves = cluster_of("10x8", None, 4).leaf
    assert list(leaves) == sorted(leaves)
    assert sorted(Counter(leaves).values()) == [2, 4, 4]


def test_bad_rows_are_skipped_only_when_asked_and_counted(tmp_path):
    (tmp_path / "t.csv").write_text("submit,duration,gpus\n0,10,1\n1,10,99\n2,-3,1\n")
    line = ("cluster", "simulate", "--trace", "t.csv", "--cluster", "4x8", "--policy", "fifo")
    code, out, err = phalanx(tmp_path, *line, "--skip-bad")
    assert code == 0
    assert "2 bad rows skipped; the first, row 3" in err
    assert "1 job on 4 nodes" in out


def test_plans_run_as_fast_as_their_placement_allows(here):
    plan = "plan --model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 8192 --out p.json"
    assert phalanx(here, *plan.split())[0] == 0
    rows = ["submit,gpus,duration,plan,steps"]
    rows += [f"{i},6,{4000 + i},," for i in range(4)] + ["10,,,p.json,500"]
    (here / "mixed.csv").write_text("\n".join(rows) + "\n")
    line = "cluster simulate --trace mixed.csv --cluster dgx-h100 --nodes 1 --policy fifo"
    assert "row 6: plan = 'p.json': has 16 ranks, and the cluster 8 GPUs" in error_of(here, *line.split())
    wrong = (
        ("gpus", "8", "has 16 ranks"),
        ("duration", "10", "whose steps say"),
        ("min_gpus", "32", "has 16 ranks; name fewer"),
    )
    for column, value, what in wrong:
        (here / "wrong.csv").write_text(f"submit,plan,steps,{column}\n0,p.json,9,{value}\n")
        line = "cluster simulate --trace wrong.csv --cluster dgx-h100 --nodes 4"
        assert what in error_of(here, *line.split())
    # An elastic plan at widths whose speed is given: half of its GPUs are free, and it starts there.
    (here / "elastic.csv").write_text("submit,gpus,duration,plan,steps,widths\n0,8,9999,,,\n1,,,p.json,50,8:0.5\n")
    line = "cluster simulate --trace elastic.csv --cluster dgx-h100 --nodes 2 --policy fifo --json"
    rigid, elastic = (
        json.loads(phalanx(here, *line.split(), *more)[1])["policies"][0] for more in ([], ["--elastic"])
    )
    assert rigid["queue"]["mean"] > 1000
    assert elastic["queue"]["mean"] == 0
    line = "cluster simulate --trace mixed.csv --cluster dgx-h100 --nodes 4 --policy fifo --json"
    code, out, _ = phalanx(here, *line.split(), "--placement", "best-fit", "--placement", "scatter")
    packed, blind = json.loads(out)["policies"]
    assert code == 0
    assert packed["placement"] == 0.0
    assert blind["queue"]["mean"] <= packed["queue"]["mean"]
    assert math.isfinite(packed["tokens_per_s"])
    assert packed["tokens_per_s"] > 0


@pytest.mark.long
def test_the_example_of_gangs_keeps_a_cluster_busy_and_a_blind_scheduler_trains_a_fifth(tmp_path):
    """examples/gangs.csv: what its jobs offer is five sixths of the cluster while they arrive."""
    for gpus, strategy in ((8, "tp=8"), (16, "tp=8,dp=2,zero=1"), (32, "tp=8,dp=4,zero=1")):
        plan = f"plan --model llama3-8b --cluster dgx-h100 --batch 64 --seq 8192 --gpus {gpus} --out p{gpus}.json"
        assert phalanx(tmp_path, *plan.split(), "--strategy", f"{strategy},micro_batch=2")[0] == 0
    example = Path(__file__).parents[2] / "examples" / "gangs.csv"
    line = f"cluster simulate --trace {example} --cluster dgx-h100 --nodes 16 --leaf 4 --oversubscription 4 --json"
    rules = [word for rule in ("best-fit", "topology", "scatter") for word in ("--placement", rule)]
    code, out, _ = phalanx(tmp_path, *line.split(), "--policy", "easy", *rules)
    packed, near, blind = json.loads(out)["policies"]
    assert code == 0
    arrivals = max(float(row["submit"]) for row in csv.DictReader(example.open()))
    held = near["gpu_use"] * near["makespan"] * 128 - near["placement"]
    assert held / (arrivals * 128) == pytest.approx(0.83, abs=0.03)
    assert near["placement"] < packed["placement"] < blind["placement"] / 100
    assert near["queue"]["mean"] < blind["queue"]["mean"] / 100
    assert blind["tokens_per_s"] / near["tokens_per_s"] == pytest.approx(0.22, abs=0.03)
