"""Rules of thumb, tested: each leaf of the usual decision tree on the GPUs that it names, compared with a search; and
criteria in numbers for when an axis of parallelism pays, which rules of thumb leave out.

T tokens of a rank and micro-batch, h the model's width, s the sequence, M micro-batches, P ranks of the axis. A ridge
is a chip's FLOP/s over the bytes/s of its memory, or of the link in one direction (`phalanx tables roofline`):

    tp    (T, h) by (h, h/tp) in 2 bytes: 2 T h h/tp FLOP over 2 (T h + h h/tp + T h/tp) bytes, h/(tp+1) for large T
    pp    (P-1)/(M+P-1) <= 1/5 if M >= 4 (P-1)
    cp    a ring's step: 4 (s/cp)² h FLOP of attention over 4 (s/cp) h_kv bytes of keys and values
    dp    6 N T FLOP over 4 N bytes of an all-reduce; ZeRO-3: over 6 N, all-gathered twice and reduce-scattered
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.planning.tables.table import Sheet, columns
from phalanx.spec.rows import Rows, record
from phalanx.textbook.case_studies import CaseResult, CaseStudy, study


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


@dataclass(frozen=True)
class Criterion:
    """When an axis pays."""

    axis: str
    pays: str
    holds: str
    """The criterion, in numbers."""
    lints: tuple[str, ...]
    """The lints of `phalanx lint` for jobs that do not meet it."""


CRITERIA = tuple(Rows(Path(__file__).with_name("criteria.toml"), record(Criterion, "axis")).values())


def criteria() -> Sheet:
    """Tabulate the criteria."""
    return Sheet(
        "criteria: when an axis pays",
        columns("axis", "asked for when", "pays if", "lint"),
        [(c.axis, c.pays, c.holds, ", ".join(c.lints)) for c in CRITERIA],
        "T: tokens of a rank and micro-batch, h: width; ridges: `phalanx tables roofline`; "
        "lint: what says that it does not",
        charted=False,
    )
