"""Findings of `lint`, a line each."""

from __future__ import annotations

from phalanx.answers.findings import Findings
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.html.sheets import report
from phalanx.report.predict import heading
from phalanx.report.style import counted
from phalanx.report.view import View


def view(f: Findings) -> View:
    """Show each finding with its remedy, and how many there are."""
    lines = [caveat.line for caveat in f.caveats] if f.question is None else [heading(f.question)]
    lines += [f"{x.name}: {x.problem}; {x.remedy}" for x in f.findings]
    count = counted(len(f.findings), "finding") if f.findings else "nothing found"
    if f.strategy is not None:
        lines.append(f"{f.strategy}: {count}")
    elif not f.findings:
        lines.append("nothing found in the file; --cluster looks at the strategy too")
    rows = [(x.name, x.problem, x.remedy) for x in f.findings]
    sheet = Sheet("findings", columns("name", "problem", "remedy"), rows)
    return View(lines, html=lambda: report([sheet]))
