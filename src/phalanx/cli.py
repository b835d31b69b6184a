"""The command line: parses, calls session, renders. Nothing heavy is imported before a command runs.

Exit codes: 0 done; 1 a check or a rank failed; 2 the input was wrong; 130 interrupted, state saved.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from phalanx.session import Decision, Outcome

app = typer.Typer(
    help="Plan, prove, run and measure the parallel training of large models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Job = Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]
OptionalJob = Annotated[Path | None, typer.Argument(metavar="JOB.toml", help="The job file.", show_default=False)]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="TABLE.FIELD=VALUE", help="Override a field; may be repeated.")
]
StrategyLine = Annotated[
    str | None, typer.Option("--strategy", metavar="LINE", help="A strategy such as dp=2,micro_batch=4.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")]

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from phalanx import __version__

        print(f"phalanx {__version__}")
        raise typer.Exit


@app.command()
def plan(job: Job, strategy: StrategyLine = None, overrides: Set = None, as_json: Json = False) -> None:
    """Price the strategies of a job on its cluster; nothing is run."""
    from phalanx import session
    from phalanx.spec import jobfile

    with _mistakes():
        file = session.with_overrides(jobfile.load(job, overrides or ()), strategy)
        _notes(file.notes)
        decision = session.decide(file, announce=_announce)
        if as_json:
            _print_json(
                {
                    "best": {"strategy": str(decision.plan.strategy), **decision.plan.prediction},
                    "alternatives": [
                        {
                            "strategy": str(c.strategy),
                            "step_time_s": float(c.prediction.step_time_s),
                            "memory_bytes": int(c.prediction.memory_bytes),
                            "rejected": c.reason,
                        }
                        for c in decision.candidates
                    ],
                }
            )
        else:
            _show_decision(decision, rows=16)


@app.command()
def train(
    job: OptionalJob = None,
    strategy: StrategyLine = None,
    overrides: Set = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint of the run.")] = False,
    as_json: Json = False,
) -> None:
    """Plan a job, train it, and hold the run against the plan. With --resume alone: the run that was active last."""
    from phalanx import session
    from phalanx.spec import jobfile
    from phalanx.spec.errors import InputError

    with _mistakes():
        overrides = list(overrides or ()) + ([f"strategy={strategy}"] if strategy else [])
        _require_torch()
        from phalanx.runtime import world as worlds

        world = worlds.external()
        if resume:
            file = session.resumed(job, overrides)
        elif job is None:
            raise InputError("JOB.toml", None, "is missing", "name a job file, or give --resume")
        else:
            file = jobfile.load(job, overrides)
        if world is not None and world.rank:
            session.train(file, resume, world, lambda _: None, lambda _: None)
            _end(DONE)
        _notes(file.notes)

        def show(decision: Decision) -> None:
            if not as_json:
                _show_decision(decision, rows=10)
                _announce_batch(decision)

        outcome = session.train(file, resume, world, show, _announce)
        assert outcome is not None
        interrupted = outcome.recorded["interrupted"]
        sample = ""
        if not as_json:
            _show_outcome(outcome)
        if not interrupted:
            try:
                sample = session.sample(outcome.folder)
            except InputError as error:
                _announce(f"note: no sample of text, {error}")
        if as_json:
            _print_json(_outcome_json(outcome, sample))
        elif sample:
            print(f"\n{sample}\n")
        code = FAILED if outcome.differences else DONE
        if interrupted:
            step = outcome.recorded["last_step"]
            _announce(f"interrupted after step {step}, state saved; continue with: phalanx train --resume")
            code = INTERRUPTED
        if world is not None:
            _end(code)
        raise typer.Exit(code)


def _end(code: int) -> NoReturn:
    """End a rank that torchrun or srun started without torch's teardown, which now and then aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@app.command()
def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "It is a truth",
    tokens: Annotated[int, typer.Option(help="How many tokens to add.")] = 80,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from the k likeliest tokens; 0: from all.")] = 50,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Continue a text with the newest checkpoint of a run."""
    with _mistakes():
        _require_torch()
        from phalanx.infer.generate import Sampling
        from phalanx.infer.generate import generate as continue_text

        text = continue_text(run, prompt, Sampling(tokens, temperature, top_k, seed))
        if as_json:
            _print_json({"prompt": prompt, "text": text})
        else:
            print(text)


@app.command()
def parity(
    job: Job,
    strategy: StrategyLine = None,
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 10,
    dtype: Annotated[str, typer.Option(help="float64 or float32.")] = "float64",
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Hold a strategy against one process: losses, gradients and gradient norms, under SGD and AdamW."""
    from phalanx import session
    from phalanx.spec import jobfile

    with _mistakes():
        _require_torch()
        file = session.with_overrides(jobfile.load(job, overrides or ()), strategy)
        _notes(file.notes)
        result = session.parity(file, steps, dtype)
        if as_json:
            _print_json(result)
        else:
            for found in result["optimizers"]:
                worst = f"  ({found['worst']})" if found["worst"] else ""
                print(
                    f"{found['optimizer']:5}  loss {found['loss_rel_max']:.1e}"
                    f"  gradients {found['grad_rel_max']:.1e}{worst}"
                )
            verdict = "holds" if result["passed"] else "DOES NOT HOLD"
            figures = ", ".join(f"{key} {result[key]:.1e}" for key in ("loss_rel_max", "grad_rel_max", "bound"))
            print(f"parity of {result['strategy']} in {dtype} over {steps} steps {verdict}: {figures}")
        if not result["passed"]:
            raise typer.Exit(FAILED)


@app.command()
def measure(
    ranks: Annotated[int | None, typer.Option(help="Local ranks; default one per GPU or core.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute type of the kernels.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads per rank.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure this machine anew: kernel rates, α and β. `train` and `plan` use the result."""
    from dataclasses import asdict

    from phalanx import session

    with _mistakes():
        _require_torch()
        cluster = session.measure(ranks, dtype, threads, _announce)
        if as_json:
            _print_json(asdict(cluster))
            return
        from rich.console import Console

        from phalanx.report.tables import rates

        for table in rates(cluster):
            Console().print(table)


collectives = typer.Typer(no_args_is_help=True, help="Collective algorithms: shown step by step, proved, compared.")
app.add_typer(collectives, name="collectives")

Operation = Annotated[str, typer.Option("--op", help="all_reduce, all_gather, reduce_scatter, broadcast, ...")]


@collectives.command("show")
def collectives_show(
    algorithm: Annotated[str, typer.Argument(help="ring, rabenseifner, binomial, bruck, ...")],
    op: Operation = "all_reduce",
    ranks: Annotated[int, typer.Option(help="At most 26: contributions are letters.")] = 4,
    root: Annotated[int, typer.Option(help="Of broadcast, reduce, scatter, gather.")] = 0,
) -> None:
    """Step through an algorithm: who sends which chunk to whom, and what each rank then holds."""
    from phalanx.schedule.collectives import build
    from phalanx.spec.errors import InputError

    with _mistakes():
        schedule = build(op, algorithm, ranks, ranks, root, tiers=_square(ranks))
        from rich.console import Console

        from phalanx.report.collectives import drawable, steps

        if not drawable(schedule):
            raise InputError("--ranks", ranks, "is too many to draw", "use at most 26")
        console = Console()
        for title, table in steps(schedule):
            console.print(title, highlight=False)
            console.print(table)


@collectives.command("prove")
def collectives_prove(
    max_ranks: Annotated[int, typer.Option(help="Worlds of 1 to this many ranks.")] = 33,
    as_json: Json = False,
) -> None:
    """Prove every algorithm: each rank ends with each contribution exactly once, and nothing deadlocks."""
    from phalanx.schedule.sweep import sweep
    from phalanx.spec.errors import InputError

    with _mistakes():
        if max_ranks < 1:
            raise InputError("--max-ranks", max_ranks, "must be at least 1")
        found = list(sweep(max_ranks))
        refused = [line for line in found if line is not None]
        if as_json:
            _print_json({"schedules": len(found), "refused": refused, "passed": not refused})
        else:
            for line in refused:
                print(line)
            print(f"{len(found) - len(refused)} of {len(found)} schedules proved, 1 to {max_ranks} ranks")
        if refused:
            raise typer.Exit(FAILED)


@collectives.command("table")
def collectives_table(
    op: Operation = "all_reduce",
    size: Annotated[str, typer.Option("--bytes", help="Of the buffer, such as 100MB or 64KiB.")] = "100MB",
    ranks: Annotated[int, typer.Option(help="Ranks of the group.")] = 8,
    cluster: Annotated[str, typer.Option(help="dgx-a100 or dgx-h100.")] = "dgx-h100",
    as_json: Json = False,
) -> None:
    """Compare all algorithms of an operation on a cluster: rounds, bytes, time, distance from the bound."""
    from dataclasses import asdict

    with _mistakes():
        from phalanx.plan.collectives import compare
        from phalanx.spec import cluster as clusters
        from phalanx.spec.quantity import parse_bytes

        spec = clusters.preset(cluster, nodes=max(1, -(-ranks // 8)))
        found = compare(op, parse_bytes(size), ranks, spec)
        if as_json:
            _print_json(asdict(found))
            return
        from rich.console import Console

        from phalanx.report.collectives import comparison, winners

        console = Console()
        console.print(comparison(found, f"{op} of {size} over {ranks} ranks of {cluster}"))
        console.print("fastest, by size of the buffer:", highlight=False)
        for line in winners(found):
            console.print(f"  {line}", highlight=False)


def _square(p: int) -> tuple[int, ...]:
    """Two tiers for a picture of the hierarchical algorithm."""
    inner = next(d for d in range(2, p + 1) if p % d == 0) if p > 1 else 1
    return (inner, p // inner)


def _require_torch() -> None:
    import importlib.util

    from phalanx.spec.errors import InputError

    for name in ("torch", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            raise InputError("installation", None, f"{name} is not installed", "pip install 'phalanx[train]'")


@contextmanager
def _mistakes() -> Iterator[None]:
    """Turn what can go wrong into one line and an exit code."""
    from phalanx.spec.errors import InputError

    try:
        yield
    except InputError as error:
        _announce(f"error: {error}")
        raise typer.Exit(WRONG_INPUT) from None
    except KeyboardInterrupt:
        _announce("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except OSError as error:
        _announce(f"error: {error}")
        raise typer.Exit(FAILED) from None
    except RuntimeError as error:
        # RankFailure and CheckpointError speak for themselves; anything else is our own fault and shows its trace.
        if type(error).__name__ not in ("RankFailure", "CheckpointError"):
            raise
        _announce(f"error: {error}")
        raise typer.Exit(FAILED) from None


def _announce(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _notes(notes: tuple[str, ...]) -> None:
    for note in notes:
        _announce(f"note: {note}")


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=1))


def _show_decision(decision: Decision, rows: int) -> None:
    from rich.console import Console

    from phalanx.report.tables import alternatives

    console = Console()
    p = decision.plan
    origin = p.choices["rates_origin"]
    console.print(
        f"{p.model.family} decoder, {p.model.parameter_count:,} parameters; {p.cluster.name}: "
        f"{p.cluster.ranks} x {p.cluster.device.name}, rates {origin}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(alternatives(decision.candidates, decision.chosen, p.job, rows))


def _announce_batch(decision: Decision) -> None:
    s, job, train = decision.plan.strategy, decision.plan.job, decision.plan.train
    print(
        f"effective batch {job.global_batch} = micro-batch {s.micro_batch} x accumulation {s.accumulation(job)}"
        f" x dp {s.dp} sequences of {job.seq} tokens; peak lr {train.scaled_lr(job.global_batch):g}"
        f" (lr_scaling = {train.lr_scaling})",
        flush=True,
    )


def _outcome_json(outcome: Outcome, sample: str) -> dict[str, Any]:
    return {
        "run": os.path.relpath(outcome.folder),
        "interrupted": outcome.recorded["interrupted"],
        "last_step": outcome.recorded["last_step"],
        "eval_loss": outcome.recorded["eval_loss"],
        "unigram_entropy": outcome.unigram_entropy,
        "sample": sample,
        "comparison": [
            {"name": c.name, "predicted": c.predicted, "measured": c.measured, "error": c.error}
            for c in outcome.comparisons
        ],
        "differences": list(outcome.differences),
    }


def _show_outcome(outcome: Outcome) -> None:
    from rich.console import Console

    from phalanx.report.tables import comparison

    console = Console()
    loss, entropy = outcome.recorded["eval_loss"], outcome.unigram_entropy
    if loss is not None:
        console.print(
            f"validation loss {loss:.3f} nat per token; unigram entropy of the training tokens {entropy:.3f} "
            f"({entropy - loss:.3f} better)",
            highlight=False,
            soft_wrap=True,
        )
    console.print(comparison(outcome.comparisons))
    count = len(outcome.recorded["events"])
    if outcome.differences:
        for line in outcome.differences:
            console.print(f"recorded step differs from the plan: {line}", highlight=False)
    else:
        console.print(f"the recorded step equals the plan: {count} events, FLOPs of every unit", highlight=False)
    console.print(f"run: {os.path.relpath(outcome.folder)}/", highlight=False, soft_wrap=True)


def main() -> None:
    app()
