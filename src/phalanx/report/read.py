"""What a configuration fixes, what became of its keys, and its mistakes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from phalanx.answers.read import Reading, origins
from phalanx.frameworks.configuration import Configuration, shown
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View

_SHOWN = 12
"""Keys of one kind that are listed by name; --json has all."""


def view(r: Reading) -> View:
    """Show the layout, the keys and the mistakes of a configuration."""
    mistakes = [f"{m.name}: {m.key} {m.problem}; {m.remedy} ({m.source})" for m in r.mistakes]
    caveats = [caveat.line for caveat in r.caveats]
    return View([*caveats, _layout(r.configuration, r.title), _keys(r.configuration), *mistakes])


def _layout(c: Configuration, title: str) -> Sheet:
    """Tabulate what the configuration fixes, and which key said it."""
    rows, where = [], origins(c)
    for name, value in {**_strategy(c), **c.options}.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        rows.append((name, text, where[name]))
    named = f", named {c.model_name}" if c.model_name else ""
    model = f"{c.spec.family}, {c.spec.parameter_count:,} parameters" if c.spec else f"open{named}: name it"
    rows.append(("model", model, c.open_model))
    return Sheet(f"{title}: {c.kind}, priced as {c.stack}", columns("field", "value", "from"), rows)


def _strategy(c: Configuration) -> dict[str, Any]:
    """Return the fields that the file fixes, each once: a local batch that a pipeline cuts as its micro-batches."""
    fields = {name: value for name, value in asdict(c.layout).items() if value is not None}
    if recomputed := fields.pop("recomputed", None):
        fields["recompute"] = recomputed
    micro, local, steps = c.fields.get("micro_batch"), c.layout.micro_batch, c.layout.accumulation
    if micro and local and steps:
        fields["accumulation"] = steps * local // micro
    return fields | dict(c.fields)


def _keys(c: Configuration) -> Sheet:
    """Tabulate how many keys were understood, are without effect, are not modelled, and are not judged."""
    unknown = [f"{shown(key)} (did you mean {near}?)" if near else shown(key) for key, near in c.unknown.items()]
    kinds = {
        "understood": [shown(key) for key in c.understood],
        "without effect": [shown(key) for key in c.without_effect],
        "not modelled": [shown(key) for key in c.not_modelled],
        "not judged": unknown,
    }
    rows = [(kind, len(names), _listed(names)) for kind, names in kinds.items()]
    return Sheet("its keys", columns("keys", ("count", "count"), "which"), rows)


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
