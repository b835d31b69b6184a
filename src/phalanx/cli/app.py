"""The command line: every command parses its options, calls `phalanx.answers` and renders the result.

Nothing heavy is imported before a command runs, so that `--help` is quick.

Exit codes: 0 done; 1 a check or a rank failed; 2 the input was wrong; 130 interrupted, state saved.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from phalanx.cli.lazy import Entry
from phalanx.cli.root import OneLineErrors
from phalanx.cli.terminal import INTERRUPTED, Screened

_PLAN, _PROVE, _RUN, _MEASURE = "Plan", "Prove", "Run", "Measure"
_LEARN, _SERVE, _CLUSTERS = "Learn", "Serve", "Clusters"
COMMANDS = (
    Entry("plan", _PLAN, "phalanx.cli.plan:plan", "Find the fastest strategy for a model on a cluster."),
    Entry("predict", _PLAN, "phalanx.cli.predict:predict", "Predict the time and the memory of a strategy's step."),
    Entry(
        "explain", _PLAN, "phalanx.cli.explain:explain", "Show where time and memory go, and what to change first."
    ),
    Entry("lint", _PLAN, "phalanx.cli.explain:lint", "Find anti-patterns in a strategy; exit code 1 if any."),
    Entry("compare", _PLAN, "phalanx.cli.compare:compare", "Compare plans, configurations or strategies."),
    Entry("tables", _PLAN, "phalanx.cli.tables:tables", "Tabulate memory, communication, rooflines or scaling."),
    Entry("mesh", _PLAN, "phalanx.cli.mesh:mesh", "Show which rank is on which GPU, and who talks to whom."),
    Entry("presets", _PLAN, "phalanx.cli.presets:presets", "List the models and clusters that ship, or show one."),
    Entry("read", _PLAN, "phalanx.cli.read:read", "Read another framework's configuration."),
    Entry("export", _PLAN, "phalanx.cli.export:export", "Write a plan as another framework's configuration."),
    Entry("verify", _PROVE, "phalanx.cli.verify:verify", "Compare a real step, on fake tensors, with the plan."),
    Entry("observe", _PROVE, "phalanx.cli.observe:observe", "Show what one step of any torch program does."),
    Entry("parity", _PROVE, "phalanx.cli.parity:parity", "Compare losses and gradients with those of one process."),
    Entry(
        "collectives", _PROVE, "phalanx.cli.collectives:collectives", "Show, prove and compare collective algorithms."
    ),
    Entry("pipeline", _PROVE, "phalanx.cli.pipeline:pipeline", "Draw, compare and prove pipeline schedules."),
    Entry("train", _RUN, "phalanx.cli.train:train", "Train a job or a plan, and compare the run with the plan."),
    Entry(
        "generate", _RUN, "phalanx.cli.generate:generate", "Continue texts with a checkpoint or Hugging Face weights."
    ),
    Entry("report", _RUN, "phalanx.cli.report:report", "Write a run's report, or show the load of its experts."),
    Entry("weights", _RUN, "phalanx.cli.weights:weights", "Import Hugging Face weights, or export a checkpoint."),
    Entry("ui", _RUN, "phalanx.cli.ui:ui", "Serve a page on this machine: plans that change, and runs."),
    Entry("measure", _MEASURE, "phalanx.cli.measure:measure", "Measure kernels, links and collectives here."),
    Entry(
        "validate", _MEASURE, "phalanx.cli.validate:validate", "Predict published runs, and show how far off it is."
    ),
    Entry("doctor", _MEASURE, "phalanx.cli.doctor:doctor", "Say what this machine has, and what is missing."),
    Entry("learn", _LEARN, "phalanx.textbook.cli:learn", "Pictures, exercises and published trainings."),
    Entry("serve", _SERVE, "phalanx.serving.cli.group:serve", "Plan, launch and prove the serving of a model."),
    Entry(
        "cluster",
        _CLUSTERS,
        "phalanx.shared_cluster.cli.group:cluster",
        "Place and simulate jobs of a shared cluster.",
    ),
)
"""The commands by panel. Those of the verticals are named here and not imported: a common room does not know them."""


class _Root(OneLineErrors):
    entries = COMMANDS


app = typer.Typer(
    cls=_Root,
    help="Plan, prove, run and measure the parallel training of large models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # this list is plain: rich takes as long to import as all else here
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from phalanx import __version__

        print(f"phalanx {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. Interrupted, the process ends without the seconds that the teardown of torch may take."""
    # Imported modules live to the end; rescanning them at every collection costs a quick command a fifth of its time.
    gc.set_threshold(50_000)
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout = Screened(sys.stdout)
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # the reader is gone
                    stream.flush()
            os._exit(INTERRUPTED)
        raise
