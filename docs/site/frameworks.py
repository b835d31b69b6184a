"""The page of what each framework can do, from the rows that searches and exports read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phalanx.frameworks.registry import DOCUMENTED
from phalanx.frameworks.stack import FieldFact, Stack
from phalanx.spec.strategy.stack_options import OPTION_FIELDS

ABOUT = """# What each framework can do

For every field of a strategy: its legal values, the flag or key that sets it, and the file and line of the
framework's source at the commit of its row. Then the options that it has beyond a strategy, and the combinations that
it refuses. [Frameworks](stacks.md) says how to search within them."""


def page() -> str:
    """Return the page as Markdown."""
    options = [
        f"| `{name}` | {', '.join(row.name for row in DOCUMENTED.values() if name in row.options)} |"
        for name in OPTION_FIELDS
    ]
    sections = [ABOUT, "\n".join(["## Options, and which frameworks have them", "", "| | |", "|---|---|", *options])]
    return "\n\n".join([*sections, *(_section(row) for row in DOCUMENTED.values())]) + "\n"


def _section(row: Stack) -> str:
    lines = [f"## {row.name}", "", f"{row.title}, {row.repository} `{row.commit[:7]}`.", ""]
    lines += ["| field | values | written | source | note |", "|---|---|---|---|---|"]
    lines += _rows(row.strategy)
    lines += _rows(row.options)
    if row.rules:
        lines += ["", "| refused | why | instead |", "|---|---|---|"]
        lines += [f"| `{rule.when}` | {rule.reason} | {rule.remedy} |" for rule in row.rules]
    return "\n".join(lines)


def _rows(entries: Mapping[str, FieldFact]) -> Iterator[str]:
    for name, entry in entries.items():
        values = "any" if entry.values is None else " ".join(map(str, entry.values))
        yield f"| `{name}` | {values} | {_code(entry.written)} | {_code(entry.source)} | {entry.note} |"


def _code(text: str) -> str:
    return f"`{text.replace('|', '&#124;')}`" if text else ""
