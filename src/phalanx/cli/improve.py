"""`phalanx plan --from FILE`: what to change in a configuration, and what each change brings."""

from __future__ import annotations

from pathlib import Path

from phalanx.cli.observed import observation_in
from phalanx.cli.show import show_notes
from phalanx.cli.terminal import announce, console, print_json, require_writable


def improve(
    source: Path,
    model: str | None,
    cluster: str | None,
    gpus: int | None,
    batch: int | None,
    seq: int | None,
    strategy: str | None,
    stack: str | None,
    precision: str | None,
    where: str | None,
    headroom: float,
    out: Path,
    as_json: bool,
) -> None:
    """Find what to change in a configuration, or in an observed program, and print it. Raises InputError."""
    from phalanx.spec.errors import InputError

    if cluster is None:
        raise InputError("--cluster", None, "is missing: what a change brings depends on it", "e.g. dgx-h100")
    from phalanx.answers.question import Asked, fixed, read

    limits = ", ".join(filter(None, (fixed(strategy), where))) or None
    if (seen := observation_in(source)) is not None:
        from phalanx.cli.observed import show_better

        if gpus is not None:
            raise InputError("--gpus", gpus, f"the program was observed on {seen.world} ranks", "leave it out")
        asked = Asked(None, model, cluster, seen.world, batch, seq, None, stack, precision, limits)
        show_better(seen, asked, headroom, out, as_json)
        return
    from phalanx.answers.improve import as_json as to_json
    from phalanx.answers.improve import improve as run
    from phalanx.answers.read import is_configuration
    from phalanx.answers.read import read as configuration

    require_writable("--out", out)
    if source.exists() and not is_configuration(source):
        configuration([source])  # says why it cannot be read
        raise InputError("--from", str(source), "is no configuration of a known framework", "phalanx read says which")
    reading = configuration([source], None, gpus)
    own = reading.configuration.stack
    if stack not in (None, own):
        remedy = f"phalanx plan --model ... --stack {stack} plans for it"
        raise InputError("--stack", stack, f"{source} is a configuration of {own}", remedy)
    asked = Asked(source, model, cluster, gpus, batch, seq, None, None, precision, limits)
    question = read(asked)
    result = run(reading, question, headroom, cluster)
    if result.plan is not None:
        from phalanx.spec.files import plan as plans

        plans.write(result.plan, out)
        announce(f"plan: {out}")
    if as_json:
        print_json({"question": question.as_json(), **to_json(result)})
        return
    from phalanx.report.improve import changes, reasons, state

    show_notes(question.notes)
    screen = console()
    screen.print(question.heading, highlight=False, soft_wrap=True)
    screen.print(state("now", result.now), highlight=False, soft_wrap=True)
    if result.refused:
        screen.print(f"{own} refuses it: {result.refused}", highlight=False, soft_wrap=True)
    if not result.changes:
        print(f"nothing to change: none of {result.evaluated:,} strategies of {own} is faster by 0.2 % or more")
        return
    screen.print(state("better", result.better), highlight=False, soft_wrap=True)
    screen.print(changes(result.now, result.changes))
    for line in reasons(result.changes):
        screen.print(line, highlight=False, soft_wrap=True)
    print("alone: the file with this change only; together: with all changes above; phalanx export writes the whole")
