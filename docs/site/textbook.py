"""The textbook's pages, from the rows of docs/textbook/rows_*.toml, and the check of every row.

A row says what is taught, what is right, the command that shows it with what it must print, and the test that holds
it. `python docs/site/textbook.py` runs the command of every row: a row fails if its command prints something else, or
if its test does not exist."""

from __future__ import annotations

import ast
import io
import os
import tomllib
from collections.abc import Iterable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs" / "textbook"
KINDS = {"G": "right", "C": "corrected", "M": "mistake", "T": "taught"}
HEADS = {
    "memory": "Memory",
    "data parallelism": "Data parallelism",
    "collectives": "Collectives",
    "hardware": "Hardware and rooflines",
    "inside layers": "Inside layers",
    "pipelines": "Pipelines",
    "experts": "Experts",
    "compression": "Compression",
    "choosing": "Choosing, scaling, sharing",
    "code": "Listings",
    "claims": "Claims",
}
SHOWN = {
    "memory": "memory",
    "data parallelism": "data-parallelism",
    "collectives": "collectives",
    "hardware": "chips-and-links",
    "inside layers": "inside-layers",
    "pipelines": "pipelines",
    "experts": "experts",
    "compression": "data-parallelism",
    "choosing": "choosing-and-sharing",
    "code": "data-parallelism",
    "claims": "models",
}
"""Where the page of pictures has those of a topic."""


@dataclass(frozen=True)
class Row:
    """One taught item."""

    id: str
    """G: a number that is right, C: one that is corrected, M: a mistake that circulates, T: a term or rule."""
    topic: str
    taught: str
    right: str
    command: str = ""
    """Without `phalanx`."""
    shows: tuple[str, ...] = ()
    """What the command prints, whitespace aside."""
    picture: str = ""
    """The command that draws it, with `--save`, without `phalanx`; empty, where no picture shows the item."""
    test: str = ""
    """file::function, or file:: for all of a file."""


def rows() -> list[Row]:
    """Read all rows. Raises TypeError for an unknown field, ValueError for an unknown topic or a repeated id."""
    found = []
    for path in sorted(ROWS.glob("rows_*.toml")):
        for entry in tomllib.loads(path.read_text())["row"]:
            found.append(Row(**{**entry, "shows": tuple(entry.get("shows", ()))}))
    ids = [row.id for row in found]
    wrong = [row.id for row in found if row.topic not in HEADS or row.id[0] not in KINDS or ids.count(row.id) > 1]
    if wrong:
        raise ValueError(f"rows of no topic, kind or twice: {wrong}")
    return found


@cache
def printed(command: str) -> str:
    """Return what a command prints, in the folder of examples, whitespace squeezed."""
    from phalanx.cli.app import app

    out = io.StringIO()
    wide = patch.dict(os.environ, COLUMNS="200")
    with wide, chdir(ROOT), redirect_stdout(out), redirect_stderr(out), suppress(SystemExit):
        app(command.split())
    return " ".join(out.getvalue().split())


@cache
def drawn(command: str) -> bool:
    """Return whether a command draws a picture."""
    with TemporaryDirectory() as folder:
        printed(f"{command} --save {folder}/picture.svg")
        return Path(folder, "picture.svg").is_file()


@cache
def tests_of(path: str) -> frozenset[str]:
    """Return the names of the test functions of a file."""
    file = ROOT / path
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def failures(row: Row) -> list[str]:
    """Return what of a row does not hold."""
    wrong = []
    if row.command:
        said = printed(row.command)
        wrong += [f"{row.id}: phalanx {row.command}: prints no {text!r}" for text in row.shows if text not in said]
    if row.picture and not drawn(row.picture):
        wrong.append(f"{row.id}: phalanx {row.picture}: draws nothing")
    if row.test:
        path, _, name = row.test.partition("::")
        if not tests_of(path) or (name and name not in tests_of(path)):
            wrong.append(f"{row.id}: there is no test {row.test}")
    elif not row.command:
        wrong += [] if row.topic == "claims" else [f"{row.id}: neither a command nor a test holds it"]
    return wrong


def page(topic: str, found: Sequence[Row]) -> str:
    """Return the page of a topic as Markdown."""
    lines = [f"# {HEADS[topic]}", ""]
    for row in found:
        lines += [f'<a id="{row.id.lower()}"></a>**{row.id}** ({KINDS[row.id[0]]}). {row.taught}.', ""]
        lines += [f"- {'Yes' if row.id[0] == 'G' else 'Right'}: {row.right}."]
        if row.command:
            shown = ", ".join(f"`{text}`" for text in row.shows)
            lines += [f"- `phalanx {row.command}` prints {shown}."]
        of_all = row.picture.startswith("learn draw ")
        shown = f"` ([all pictures](../pictures.md#{SHOWN[topic]}))" if of_all else " --save FILE.svg`"
        lines += [f"- Drawn by `phalanx {row.picture}{shown}."] if row.picture else []
        lines += [f"- Held by {row.test.rstrip(':')}."] if row.test else []
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def counts(found: Sequence[Row]) -> str:
    """Return the table of counts as Markdown."""

    def line(name: str, some: Iterable[Row]) -> str:
        here = list(some)
        numbers = [
            len(here),
            *(sum(bool(getattr(row, field)) for row in here) for field in ("command", "picture", "test")),
            sum(len(row.shows) for row in here),
        ]
        return f"| {name} | {' | '.join(map(str, numbers))} |"

    head = ["| | rows | with a command | a picture | a test | strings held |", "|---|---|---|---|---|---|"]
    kinds = [line(name, (row for row in found if row.id[0] == key)) for key, name in KINDS.items()]
    return "\n".join([*head, *kinds, line("in all", found)])


def pages() -> dict[str, str]:
    """Return the text of every page, by file name."""
    found = rows()
    topics = [topic for topic in HEADS if any(row.topic == topic for row in found)]
    index = [
        "# The textbook's table",
        "",
        "What five kinds of teaching texts say about distributed training, item by item: what is taught, whether it",
        "is right, the right value, the command that shows it, the picture, the test. Numbers that are right are G,",
        "those that are corrected C, mistakes that circulate M (in our own words), terms and rules T. The tables are",
        "made from data; the test suite runs every command, and fails where one prints something else.",
        "",
        counts(found),
        "",
        *(f"- [{HEADS[topic]}]({topic.replace(' ', '_')}.md)" for topic in topics),
        "- [Options of DDP and FSDP, and ours](options.md)",
        "- [Exercises](exercises.md)",
    ]
    texts = {f"{topic.replace(' ', '_')}.md": page(topic, [r for r in found if r.topic == topic]) for topic in topics}
    return {"README.md": "\n".join(index).rstrip() + "\n", **texts, "exercises.md": exercises_page()}


def exercises_page() -> str:
    """Return the exercises of the first seed as Markdown, answers folded."""
    from phalanx.textbook.exercises import LEVELS, exercises

    lines = ["# Exercises", "", "`phalanx learn quiz --seed N` draws other numbers, and checks what you answer.", ""]
    for level, what in LEVELS.items():
        lines += [f"## Level {level}: {what}", ""]
        for e in exercises(1, level):
            folded = f"<details><summary>Answer</summary>{e.answer}. See `phalanx {e.command}`.</details>"
            lines += [f"- {e.question} {folded}"]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Check all rows."""
    wrong = [line for row in rows() for line in failures(row)]
    print("\n".join(wrong) or f"{len(rows())} rows hold")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
