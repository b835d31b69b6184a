"""`phalanx cluster`: the topology of a shared cluster, jobs placed on it, and a queue of them simulated."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.command import command, require_only
from phalanx.cli.forms import forms
from phalanx.cli.output import require_savable, save_pictures
from phalanx.cli.terminal import announce, console, print_json, require_writable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from phalanx.shared_cluster.placement.answer import PlaceAnswer


@command
def simulate(
    line: typer.Context,
    trace: Path,
    on: str,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes of a preset.")] = None,
    leaf: int | None = None,
    oversubscription: Annotated[
        float, typer.Option(min=1.0, help="GPUs of a leaf that share one uplink to the others.")
    ] = 1.0,
    policy: list[str] | None = None,
    placement: list[str] | None = None,
    elastic: bool = False,
    preempt: bool = False,
    restart_s: float = 60.0,
    skip_bad: bool = False,
    save: list[Path] | None = None,
    json: bool = False,
) -> None:
    """Replay a trace of jobs under scheduling policies: queueing, completion, use, and what fragmentation costs.

    phalanx cluster simulate --trace jobs.csv --cluster 60x8 --policy fifo --policy easy

    --trace JOBS.csv: Jobs, plain or .xz: submit, gpus and duration; or plan and steps. Also priority, limit, widths,
        min_gpus.
    on --cluster NAME|FILE.toml|60x8: A preset, a TOML file, or nodes x GPUs, as 60x8,20x2.
    --leaf NODES: Nodes under each leaf switch.
    --policy: fifo, easy, conservative, smallest or las; may be repeated. By default all.
    --placement: first-fit, best-fit, topology or scatter; may be repeated. By default best-fit.
    --elastic: Let jobs with widths start narrower, give up GPUs for jobs that wait, and widen when no job waits.
    --preempt: Let jobs of higher priority stop jobs of lower ones.
    --restart-s: Seconds that stopping and starting a job again costs.
    --skip-bad: Leave out bad rows of the trace, and count them.
    --save FILE.html|svg|png: Also write it, as the ending of each file says: a page that needs nothing else, a
        picture (png by chromium).
    """
    from phalanx.report.style import count_words
    from phalanx.shared_cluster.simulation.outcome import outcome
    from phalanx.shared_cluster.simulation.replay import cluster_of, default_policies, policies_of, read_trace, run

    if policy and "las" not in policy and not elastic and not preempt:
        alternatives_table = [str(p.name) for p in line.command.params if p.name != "restart_s"]
        reason = f"is not read under {' and '.join(dict.fromkeys(policy))}, where no job is stopped"
        require_only(line, *alternatives_table, reason=reason, remedy="add --preempt, --elastic or --policy las")
    require_savable(save)
    rules = placement or ["best-fit"]
    policies_of(policy or [], rules, elastic, restart_s, preempt)  # before a long trace is read
    shared = cluster_of(on, nodes, leaf)
    jobs, speed_of = read_trace(trace, shared, oversubscription, skip_bad)
    names = policy or [p for p in default_policies(jobs, elastic) if not (preempt and p == "conservative")]
    chosen = policies_of(names, rules, elastic, restart_s, preempt)
    if jobs.skipped:
        row, reason = jobs.skipped[0]
        announce(f"{count_words(len(jobs.skipped), 'bad row')} skipped; the first, row {row}: {reason}")
    histories = []
    for each in chosen:
        start = time.perf_counter()
        histories.append(run(jobs, shared, each, speed_of))
        announce(f"{each.title}: {count_words(len(jobs.jobs), 'job')} in {time.perf_counter() - start:.1f} s")
    outcomes = [outcome(history) for history in histories]
    if save:
        from phalanx.shared_cluster.simulation.outcome import picture

        save_pictures([picture(histories, shared.title)], save)
    if json:
        print_json({"cluster": shared.title, "skipped": len(jobs.skipped), "policies": [asdict(o) for o in outcomes]})
        return

    from phalanx.report.pictures import grids
    from phalanx.shared_cluster.simulation.outcome import ROWS, tables, use

    out = console()
    out.print(f"{count_words(len(jobs.jobs), 'job')} on {shared.title}", highlight=False)
    for table in tables(outcomes):
        out.print(table)
    if len(histories) == 1:
        shares = use(histories[0], max(10, out.width - 14), ROWS)
        print("\n".join(grids.heat_text(shares, out.width)))


@command
def place(
    plan: list[Path],
    free: Path,
    strategy: str | None = None,
    stack: str | None = None,
    search: bool = True,
    partition: str | None = None,
    topology: Path | None = None,
    launcher: str | None = None,
    out: Path | None = None,
    save: list[Path] | None = None,
    json: bool = False,
) -> None:
    """Put the ranks of one plan or of several on free GPUs so that steps are fastest, and compare with an empty
    cluster.

    FREE.json may also list all nodes in physical order ("nodes": "node[0-31]") and the leaf switches that they are
    under ("leaves": {"leaf0": "node[0-15]", ...}, "oversubscription": 2).

    plan PLAN.json...: Plans, or runs' folders; several are placed at once.
    --free FREE.json: The free GPUs: {"free": {"node0": "0-7", "node[1-3]": "0,2-3"}, ...}; or what scontrol -d show
        nodes, sinfo or kubectl describe nodes prints.
    --partition NAME: Only nodes of this partition.
    search --search/--no-search: Also look for strategies that suit these GPUs better.
    --topology FILE: Leaf switches: a Slurm topology.conf, or the output of ibnetdiscover.
    launcher --for NAME: Write files for slurm, torchrun or kueue; needs --out.
    --out DIR: Folder for placement.json and these files; of several plans, a folder of each in it.
    --save FILE.html|svg|png: Also write it, as the ending of each file says: a page that needs nothing else, a
        picture (png by chromium).
    """
    from phalanx.shared_cluster.placement import free_gpus
    from phalanx.shared_cluster.placement.answer import answer, job_of_plan
    from phalanx.shared_cluster.placement.launch import launch_files
    from phalanx.shared_cluster.placement.together import placed_together, require_alike
    from phalanx.shared_cluster.topology.reading import leaves_of
    from phalanx.spec.errors import InputError

    require_savable(save)
    if launcher and not out:
        raise InputError("--out", None, "is missing: --for writes files", "name a folder")
    if out and out.exists() and not out.is_dir():
        raise InputError("--out", str(out), "is a file", "name a folder")
    leaves = leaves_of(topology) if topology else None
    jobs = [job_of_plan(path, strategy, stack) for path in plan]
    require_alike(jobs)
    available = free_gpus.read(free, jobs[0].cluster, leaves, partition)
    for line in available.notes:
        announce(line)
    several = len(plan) > 1
    if several:
        together = placed_together(jobs, available)
        answers: Sequence[PlaceAnswer] = together.answers
    else:
        answers = [answer(jobs[0], available, search)]
    prepared = [launch_files(launcher, a.placed.placement, available.unnumbered) if launcher else {} for a in answers]
    if out:
        folders = [out / f"{i}-{path.stem}" for i, path in enumerate(plan, 1)] if several else [out]
        for folder, each, files in zip(folders, answers, prepared, strict=True):
            _write(folder, each, files)
    if save:
        from phalanx.report.gallery.mesh import nodes

        at = [each.placed.placement for each in answers]
        save_pictures([nodes(p, p.coloured_axis) for p in at], save)
    if json and several:
        listed = [{"plan": str(path), **_as_json(each)} for path, each in zip(plan, answers, strict=True)]
        print_json({"jobs": listed, "shared_uplinks": [asdict(each) for each in together.shared]})
    elif json:
        print_json(_as_json(answers[0]))
    elif several:
        from phalanx.shared_cluster.placement.report import jobs_table, shares

        console().print(jobs_table([str(path) for path in plan], together))
        for line in shares([str(path) for path in plan], together):
            console().print(line, highlight=False, soft_wrap=True)
    else:
        _print(answers[0])


def _write(folder: Path, answer: PlaceAnswer, files: Mapping[str, str]) -> None:
    """Write a job's placement and the files that start it there."""
    from phalanx.spec.files.plan import write_json, write_text

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "placement.json", _as_json(answer))
    for name, text in files.items():
        write_text(folder / name, text)
    announce(f"written: {', '.join(str(folder / name) for name in ('placement.json', *files))}")


def _print(a: PlaceAnswer) -> None:
    """Print one job's placement, with the strategies that suit these GPUs better."""
    from phalanx.report import mesh as drawing
    from phalanx.report.style import terminal_table
    from phalanx.shared_cluster.placement.report import alternatives_table, better, lines

    screen, p = console(), a.placed.placement
    for line in lines(a.job, a.placed, a.empty):
        screen.print(line, highlight=False, soft_wrap=True)
    if a.others:
        screen.print(better(a.job, a.placed, a.others), highlight=False, soft_wrap=True)
    screen.print()
    screen.print(drawing.nodes(p, p.coloured_axis, screen.width))
    screen.print(terminal_table(drawing.axes(p)))
    if a.others:
        screen.print(alternatives_table(a.placed, a.others))
    elif a.no_others:
        screen.print(f"no other strategy: {a.no_others}", highlight=False, soft_wrap=True)


def _as_json(a: PlaceAnswer) -> dict[str, Any]:
    from phalanx.planning.placement import axis_groups

    p = a.placed.placement
    t = p.topology
    return {
        "strategy": str(p.strategy),
        "free_gpus": len(a.free.free),
        "step_time_s": a.placed.seconds,
        "tokens_per_s": a.tokens_per_s,
        "bound_s": a.placed.bound_s,
        "exact": a.placed.exact,
        "tried": a.placed.tried,
        "empty_cluster_s": a.empty.seconds,
        "axes": [asdict(row) for row in axis_groups(p)],
        "others": [
            {"strategy": str(o.job.strategy), "options": o.job.options.changed(), "step_time_s": o.placed.seconds}
            for o in a.others
        ],
        "ranks": [
            {"rank": rank, "node": t.hosts[int(t.host[gpu])], "gpu": int(t.index[gpu])}
            for rank, gpu in enumerate(p.gpu.tolist())
        ],
    }


@command
def read(
    file: Path,
    like: str | None = None,
    device: str | None = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="How many hosts like this one the cluster has.")] = None,
    port_gbit: float | None = None,
    partition: str | None = None,
    slurm: Path | None = None,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Read the topology of a real cluster from what its tools print, and write it as a cluster for the planner.

    phalanx cluster read topology.conf --like dgx-h100 --out cluster.toml

    file FILE: Slurm's topology.conf or .yaml, or what scontrol, sinfo, kubectl describe nodes, ibnetdiscover,
        iblinkinfo, nvidia-smi topo -m, rocm-smi --showtopo or NCCL_TOPO_DUMP_FILE write.
    --like NAME: Preset whose nodes the hosts are like, for switches.
    --device CHIP: The GPUs of the host, such as H100.
    --port-gbit: Gb/s of each of its NICs, for several hosts.
    --partition NAME: Only nodes of this partition.
    --slurm FILE: Write the switches as a topology.conf.
    --out FILE.toml: Write the cluster, for --cluster.
    """
    from phalanx.shared_cluster.topology import reading
    from phalanx.shared_cluster.topology.gpus import gpus_of_host
    from phalanx.shared_cluster.topology.scheduled_nodes import counts, sums
    from phalanx.shared_cluster.topology.slurm import write_topology
    from phalanx.spec.cluster.presets import preset
    from phalanx.spec.cluster.topology import SwitchTree
    from phalanx.spec.errors import InputError
    from phalanx.spec.files.cluster_toml import to_toml

    require_writable("--slurm", slurm)
    require_writable("--out", out)
    content = reading.read_topology(file, partition=partition)
    listed, notes = reading.nodes_and_notes(file, partition)
    size = gpus_of_host(preset(like, 1)) if like and listed else None
    if slurm:
        if not isinstance(content, SwitchTree):
            raise InputError("--slurm", str(slurm), "nvidia-smi knows one host, and no switches")
        slurm.write_text(write_topology(content))
    if out:
        if nodes is None and not isinstance(content, SwitchTree):
            announce("note: a cluster of this one host is written: --nodes says how many there are")
        spec = reading.cluster_of(content, like, device, nodes or 1, port_gbit, out.stem)
        out.write_text(to_toml(spec, f"from {file.name}"))
    for line in notes:
        announce(f"note: {line}")
    if json:
        free = {"free_gpus": [asdict(each) for each in counts(listed, size)]} if listed else {}
        print_json(asdict(content) | free)
        return
    for line in (*sums(listed, size), *reading.summary(content, device, nodes or 1)):
        print(line)


@command
def validate(json: bool = False) -> None:
    """Predict what it costs to have a job's GPUs on two nodes: measured steps of small models on three machines, from
    the time of one GPU and the links' published rates."""
    from phalanx.shared_cluster.validation.placements import scores

    scored = scores()
    if json:
        print_json([asdict(on) | {"ratios": [asdict(r) | {"error": r.error} for r in rows]} for on, rows in scored])
        return

    from phalanx.shared_cluster.validation.placements import machine

    out = console()
    out.print("step on two nodes over one on as many GPUs of one node, measured and predicted", highlight=False)
    for on, rows in scored:
        out.print(machine(on, rows))


cluster = forms(
    "Shared clusters: read their topology, place a job, simulate a queue.",
    simulate=simulate,
    place=place,
    read=read,
    validate=validate,
)
