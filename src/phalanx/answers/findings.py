"""Anti-patterns of a strategy and mistakes of a configuration, each with numbers and a remedy: `lint`."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from phalanx.answers.answer import Answer
from phalanx.answers.question.query import QueryFields, Source, query_of
from phalanx.answers.question.question import Premises, Question
from phalanx.answers.question.read import findings_in, is_configuration
from phalanx.answers.question.read import read as configuration
from phalanx.answers.question.resolution import read
from phalanx.frameworks.caveats import Caveat
from phalanx.frameworks.registry import row_of
from phalanx.planning.explain.lint import lint as findings_of
from phalanx.planning.explain.lint_subject import Finding
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Findings(Answer):
    """The mistakes and anti-patterns of a configuration or strategy; true if there is one."""

    rows_of = "findings"
    question: Premises | None
    """None where a configuration was read without a cluster to price it on."""
    strategy: Strategy | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    caveats: tuple[Caveat, ...] = ()
    """What matters to a price of the file and is not modelled, not judged, assumed or missing."""

    def __bool__(self) -> bool:
        return bool(self.findings)


def lint(source: Source = None, **fields: Unpack[QueryFields]) -> Findings:
    """Find anti-patterns in a strategy, and mistakes in the configuration that it comes from.

    Without a cluster, only a configuration's own mistakes are found. `source`: a plan.json, a run's folder, another
    framework's configuration, or a Query. Raises InputError."""
    query = query_of(source, fields)
    path = None if query.source is None else Path(query.source)
    reading = (
        configuration([path, *query.files], None, query.gpus) if path is not None and is_configuration(path) else None
    )
    mistakes = () if reading is None else findings_in(reading)
    if reading is not None and query.cluster is None:
        return Findings(None, None, mistakes, caveats=reading.caveats)
    question: Question = read(query)
    subject = question.exact or question.lintable
    named = any(m.name == "refused" for m in mistakes)
    refused = (Finding("refused", f"{question.stack} does not run it", question.refused),) if question.refused else ()
    patterns = list(findings_of(subject))
    if reading is not None:
        patterns = [_in_its_keys(f, question.stack) for f in patterns]
    findings = (*mistakes, *patterns, *(() if named else refused))
    return Findings(question.premises, subject.strategy, findings, question.notes, question.caveats)


def _in_its_keys(f: Finding, stack: str) -> Finding:
    """Return a finding whose remedy names the keys of a file's framework for the fields that it changes."""
    row = row_of(stack)
    fields = dict.fromkeys(re.findall(r"\b([a-z_]+)=", f.remedy))
    keys = [f"{n}: {row.strategy[n].written}" for n in fields if n in row.strategy and n not in row.fields_in_code]
    return replace(f, remedy=f"{f.remedy} ({', '.join(keys)})") if keys else f
