"""Tables of a configuration that was read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from phalanx.frameworks.configuration import Configuration, shown
from phalanx.report.style import table

_SHOWN = 12
"""Keys of one kind that are listed by name; --json has all."""


def layout(c: Configuration, title: str) -> Table:
    """Return what the configuration fixes, and which key said it."""
    by_field: dict[str, list[str]] = {}
    for key, meaning in c.understood.items():
        by_field.setdefault(meaning.rpartition(".")[2], []).append(shown(key))
    result = table(
        f"{title}: {c.kind}, priced as {c.stack}", "field", "value", "from", left=("field", "value", "from")
    )
    for name, value in {**_strategy(c), **c.options}.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        result.add_row(name, text, ", ".join(by_field.get(name, ())) or "what follows, or the default")
    named = f", named {c.model_name}" if c.model_name else ""
    said = (
        f"{c.spec.family}, {c.spec.parameter_count:,} parameters" if c.spec else f"open{named}: name it with --model"
    )
    result.add_row("model", said, c.open_model)
    return result


def _strategy(c: Configuration) -> dict[str, Any]:
    """Return the fields that the file fixes, each once: a local batch that a pipeline cuts as its micro-batches."""
    fields = {name: value for name, value in asdict(c.layout).items() if value is not None}
    if recomputed := fields.pop("recomputed", None):
        fields["recompute"] = recomputed
    micro, local, steps = c.fields.get("micro_batch"), c.layout.micro_batch, c.layout.accumulation
    if micro and local and steps:
        fields["accumulation"] = steps * local // micro
    return fields | dict(c.fields)


def keys(c: Configuration) -> Table:
    """Return how many keys were understood, are without effect, are not modelled, and are unknown."""
    result = table("its keys", "keys", "count", "which", left=("which",))

    def listed(names: list[str]) -> str:
        more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more

    unknown = [f"{shown(key)} (did you mean {near}?)" if near else shown(key) for key, near in c.unknown.items()]
    for kind, names in (
        ("understood", [shown(key) for key in c.understood]),
        ("without effect", [shown(key) for key in c.without_effect]),
        ("not modelled", [shown(key) for key in c.not_modelled]),
        ("unknown", unknown),
    ):
        result.add_row(kind, str(len(names)), listed(names))
    return result
