"""`phalanx read`: what another framework's configuration says, key by key, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Batch, Cluster, Gpus, Json, Model, Seq
from phalanx.cli.show import show_notes
from phalanx.cli.terminal import announce, console, exit_on_error, print_json, require_writable


def read(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="A script, command line, YAML, TOML or JSON; or TrainingArguments and their DeepSpeed JSON.",
            show_default=False,
        ),
    ],
    gpus: Gpus = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            help="Framework, where the content does not tell, such as megatron or hf; another word lists all.",
        ),
    ] = None,
    model: Model = None,
    cluster: Cluster = None,
    batch: Batch = None,
    seq: Seq = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="plan.json", help="Also write it as a plan, priced on --cluster."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read another framework's configuration: its layout, what became of every key, and its mistakes.

    `predict`, `explain`, `lint`, `comm`, `roofline`, `memory`, `compare` and `verify` take such a file too, with
    --cluster, and `plan --from` improves it. Nothing in it is run.
    """
    with exit_on_error():
        from phalanx.answers.read import read as run
        from phalanx.spec.errors import InputError

        reading = run(paths, kind, gpus)
        if out is not None:
            from phalanx.answers.priced_plan import plan_of_configuration
            from phalanx.answers.question import Asked
            from phalanx.spec.files import plan as plans

            require_writable("--out", out)
            read_plan, notes = plan_of_configuration(reading, paths[0], Asked(None, model, cluster, gpus, batch, seq))
            plans.write(read_plan, out)
            announce(f"plan: {out}")
            show_notes(tuple(note for note in notes if note not in reading.notes))
        else:
            given = {"--model": model, "--cluster": cluster, "--batch": batch, "--seq": seq}
            for name, value in given.items():
                if value is not None:
                    raise InputError(name, value, "is for the plan that --out writes", "add --out plan.json")
        if as_json:
            print_json(reading.as_json())
            return

        from phalanx.report.read import keys, layout

        show_notes(reading.notes)
        screen = console()
        screen.print(layout(reading.configuration, " ".join(map(str, paths))))
        screen.print(keys(reading.configuration))
        for m in reading.mistakes:
            screen.print(f"{m.name}: {m.key} {m.problem}; {m.mend} ({m.source})", highlight=False, soft_wrap=True)
