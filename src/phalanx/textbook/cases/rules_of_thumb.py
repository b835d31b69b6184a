"""Rules of thumb, tested: each leaf of the usual decision tree on the GPUs that it names, compared with a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.rows import Rows, record
from phalanx.textbook.cases.case_studies import CaseResult, CaseStudy, study


def _rule(name: str, row: Mapping[str, Any]) -> CaseStudy:
    """Return a rule as a case that no source has measured, priced under Megatron-Core."""
    return record(CaseStudy, "name")(name, {**row, "stack": "megatron-core", "measured_s": False, "source": "taught"})


RULES = tuple(Rows(Path(__file__).with_suffix(".toml"), _rule).values())


def sheet(rules: Iterable[CaseStudy] = RULES) -> Sheet:
    """Tabulate rules: what each costs, and what a search chooses instead."""
    return Sheet(
        "taught rules: what following them costs",
        columns(
            "rule",
            "on",
            "as the rule has it",
            ("step", "s"),
            "chosen",
            ("chosen step", "s"),
            ("costs", "share"),
            "because",
        ),
        [_row(study(case)) for case in rules],
        "costs: the rule's step over the chosen one's, less 1; none where the rule's strategy does not fit",
    )


def _row(x: CaseResult) -> tuple[object, ...]:
    c = x.case
    on = f"{c.model}, {c.gpus:,} of {c.cluster}, {c.batch:,} x {c.seq:,}"
    if x.chosen is None or x.chosen_s is None:
        return (c.name, on, c.used, x.used_s, "none", None, None, x.why)
    step = x.used_s if x.used and x.used.fits else None
    costs = step / x.chosen_s - 1 if step else None
    return (c.name, on, c.used, step, str(x.chosen.strategy), x.chosen_s, costs, x.why)
