"""The tables of docs/cases.md, from `phalanx cases --json` and `phalanx cases --rules --json`.

cd tests && python -m support.case_tables      # a minute: writes them again after a change of prices
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from phalanx.spec.strategy.spec import parse

PAGE = Path(__file__).parents[2] / "docs" / "cases.md"
HEADS = {
    "cases": "| training | used | measured | predicted | chosen | predicted | because |",
    "cases --rules": "| rule | on | as the rule has it | step | chosen | step | costs |",
}


def _short(line: str) -> str:
    """Write a strategy as the page does: pp=16 x 6 for 6 interleaved chunks per rank, values that name themselves."""
    if "=" not in line:
        return line
    table = {name: str(value) for name, value in parse(line).items()}
    if virtual := table.pop("virtual", ""):
        table["pp"] += f" x {virtual}"
        table.pop("schedule")
    if schedule := table.pop("schedule", ""):
        table["pp"] += f" {schedule}"
    return ", ".join(
        value if name == "recompute" else "sp" if name == "sp" else f"{name}={value}" for name, value in table.items()
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _named(text: str) -> str:
    for name in ("a100", "h100", "h800"):
        text = text.replace(f" x dgx-{name}", f" {name.upper()}").replace(f" of dgx-{name}", f" {name.upper()}")
    return text


def table(command: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the table's rows in Markdown."""
    found = [HEADS[command], "|" + "---|" * (HEADS[command].count("|") - 1)]
    for row in rows:
        because = row["because"].partition(", ")[0] if "as used" in row["because"] else row["because"]
        if command == "cases":
            published = row["predicted_s"] is not None
            cells = [
                _named(row["training"]),
                _short(row["used"]),
                _seconds(row["measured_s"]),
                _seconds(row["predicted_s"]),
                _short(row["chosen"]),
                _seconds(row["chosen_predicted_s"]),
                because.replace("%", " %") if published else "",
            ]
        else:
            needs = because.replace("as used it ", "").replace("it ", "", 1)
            costs = "" if row["costs"] is None else f"{100 * row['costs']:.0f} %"
            cells = [
                row["rule"],
                _named(row["on"]),
                _short(row["as_the_rule_has_it"]),
                needs if row["step_s"] is None else _seconds(row["step_s"]),
                _short(row["chosen"]),
                _seconds(row["chosen_step_s"]),
                costs,
            ]
        found.append("| " + " | ".join(cells) + " |")
    return found


def shown(command: str) -> list[str]:
    """Return the rows that the page has."""
    lines = PAGE.read_text().splitlines()
    start = lines.index(HEADS[command])
    end = next(i for i in range(start, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
    return lines[start:end]


def main() -> None:
    for command in HEADS:
        words = [sys.executable, "-m", "phalanx", *command.split(), "--json"]
        out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        page, old = PAGE.read_text(), "\n".join(shown(command))
        PAGE.write_text(page.replace(old, "\n".join(table(command, json.loads(out)[0]["rows"]))))


if __name__ == "__main__":
    main()
