"""`phalanx read` and `phalanx export`: plans in the words of other frameworks."""

from pathlib import Path
from typing import Annotated

from phalanx.answers.question.query import Query
from phalanx.cli.command import command
from phalanx.cli.output import Display, Printed, show_notes
from phalanx.cli.terminal import announce, require_writable


@command
def read(
    paths: list[Path],
    query: Annotated[Query, "gpus", "model", "cluster", "batch", "seq", "changes"],
    output: Annotated[Display, "json", "save", "strict"],
    kind: str | None = None,
    out: Path | None = None,
) -> None:
    """Read another framework's configuration: its layout, what became of every key, and its mistakes.

    `predict`, `explain`, `lint`, `tables`, `compare` and `verify` take such a file too, with
    --cluster, and `plan --from` improves it. Nothing in it is run.

    paths FILE...: A script, command line, YAML, TOML or JSON; or TrainingArguments and their DeepSpeed JSON.
    --kind: Framework, where the content does not tell, such as megatron or hf; another word lists all.
    --out plan.json: Also write it as a plan, priced on --cluster.
    """
    from phalanx.answers.question.read import read as run
    from phalanx.spec.errors import InputError

    reading = run(paths, kind, query.gpus)
    show_notes(reading.configuration.companions)
    if out is not None:
        from phalanx.answers.plan import plan_of_configuration
        from phalanx.spec.files import plan as plans

        require_writable("--out", out)
        read_plan, notes = plan_of_configuration(reading, paths[0], query)
        plans.write(read_plan, out)
        announce(f"plan: {out}")
        show_notes(tuple(note for note in notes if note not in reading.configuration.companions))
    else:
        for name in ("model", "cluster", "batch", "seq", "changes"):
            if value := getattr(query, name):
                name = "set" if name == "changes" else name
                raise InputError(name, value, "is for the plan that --out writes", "add --out plan.json")
    output.show(reading)


@command
def export(plan: Path, to: str, output: Printed, out: Path, launcher: str = "torchrun") -> None:
    """Write a plan as another framework's configuration, ready to run once its blanks are filled in.

    What the framework cannot express is an error that names the field; nothing is left out.

    plan PLAN.json: A plan, or a run's folder.
    --to FRAMEWORK: Framework, such as megatron or torchtitan; another word lists all that plans are written for.
    --out DIR: Folder to write; empty, or not there yet.
    --launcher NAME: What starts the nodes: torchrun, slurm, pytorchjob, trainjob, jobset or skypilot.
    """
    from phalanx.answers.configurations.export import export as run

    output.show(run(plan, to, launcher, out))
