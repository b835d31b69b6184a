"""`phalanx cluster place`: the best placement of a plan's ranks on the free GPUs of a shared cluster, and its
cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.command import command
from phalanx.cli.output import require_savable, save_pictures
from phalanx.cli.terminal import announce, console, print_json

if TYPE_CHECKING:
    from phalanx.shared_cluster.placement.answer import PlaceAnswer


@command
def place(
    plan: Path,
    free: Path,
    strategy: str | None = None,
    stack: str | None = None,
    search: bool = True,
    topology: Path | None = None,
    launcher: str | None = None,
    out: Path | None = None,
    save: list[Path] | None = None,
    json: bool = False,
) -> None:
    """Put a plan's ranks on free GPUs so that its step is fastest, and compare with an empty cluster.

    FREE.json may also list all nodes in physical order ("nodes": "node[0-31]") and the leaf switches that they are
    under ("leaves": {"leaf0": "node[0-15]", ...}, "oversubscription": 2).

    plan PLAN.json: A plan, or a run's folder.
    --free FREE.json: The free GPUs: {"free": {"node0": "0-7", "node[1-3]": "0,2-3"}, ...}.
    search --search/--no-search: Also look for strategies that suit these GPUs better.
    --topology FILE: Leaf switches: a Slurm topology.conf, or the output of ibnetdiscover.
    launcher --for NAME: Write files for slurm, torchrun or kueue; needs --out.
    --out DIR: Folder for placement.json and these files.
    --save FILE.html|svg|png: Also write it, as the ending of each file says: a page that needs nothing else, a
        picture (png by chromium).
    """
    from phalanx.shared_cluster.placement.answer import answer, job_of_plan, launch_files
    from phalanx.shared_cluster.topology.reading import leaves_of
    from phalanx.spec.errors import InputError
    from phalanx.spec.files.plan import write_json, write_text

    require_savable(save)
    if launcher and not out:
        raise InputError("--out", None, "is missing: --for writes files", "name a folder")
    if out and out.exists() and not out.is_dir():
        raise InputError("--out", str(out), "is a file", "name a folder")
    leaves = leaves_of(topology) if topology else None
    a = answer(job_of_plan(plan, strategy, stack), free, leaves, search)
    if out:
        files = launch_files(launcher, a.placed.placement) if launcher else {}
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "placement.json", _as_json(a))
        for name, text in files.items():
            write_text(out / name, text)
        announce(f"written: {', '.join(str(out / name) for name in ('placement.json', *files))}")
    if save:
        from phalanx.report.gallery.mesh import nodes

        at = a.placed.placement
        save_pictures([nodes(at, at.coloured_axis)], save)
    if json:
        print_json(_as_json(a))
        return

    from phalanx.report import mesh as drawing
    from phalanx.report.style import drawn
    from phalanx.shared_cluster.placement.report import better, lines, others

    screen, p = console(), a.placed.placement
    for line in lines(a.job, a.placed, a.empty):
        screen.print(line, highlight=False, soft_wrap=True)
    if a.others:
        screen.print(better(a.job, a.placed, a.others), highlight=False, soft_wrap=True)
    screen.print()
    screen.print(drawing.nodes(p, p.coloured_axis, screen.width))
    screen.print(drawn(drawing.axes(p)))
    if a.others:
        screen.print(others(a.placed, a.others))
    elif a.no_others:
        screen.print(f"no other strategy: {a.no_others}", highlight=False, soft_wrap=True)


def _as_json(a: PlaceAnswer) -> dict[str, Any]:
    from dataclasses import asdict

    from phalanx.planning.placement import axis_groups

    p = a.placed.placement
    t = p.topology
    return {
        "strategy": str(p.strategy),
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
