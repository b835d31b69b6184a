"""Models as tables: the presets, and the parameters of one model by role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from phalanx.answers.presets import ModelShape, PresetModels
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View
from phalanx.spec.model.spec import ModelSpec


def view(a: PresetModels | ModelShape) -> View:
    """Show the models that ship, or the shape and the parameters of one."""
    if isinstance(a, PresetModels):
        return View([presets(a.models)], "models")
    rows = [(role, count, count / a.model.parameter_count) for role, count in a.roles.items()]
    return View(
        [shape(a.name, a.model), Sheet("", columns("role", ("parameters", "count"), ("share", "share")), rows)]
    )


def presets(models: Mapping[str, ModelSpec]) -> Sheet:
    """Tabulate models: parameters, active parameters, and the main sizes."""
    rows = []
    for name, m in models.items():
        heads = str(m.heads) if m.heads == m.kv_heads else f"{m.heads}/{m.kv_heads}"
        ffn = str(m.ffn) if m.experts is None else f"{m.experts.top_k} of {m.experts.count} x {m.experts.ffn}"
        active = None if m.active_count == m.parameter_count else billions(m.active_count)
        rows.append(
            (name, m.family, billions(m.parameter_count), active, m.layers, m.hidden, heads, ffn, m.vocab, m.max_seq)
        )
    names = columns(
        *("model", "family", "parameters", "active", ("layers", "count"), ("hidden", "count")),
        *("heads", "ffn", ("vocab", "count"), ("max seq", "count")),
    )
    note = "heads: of queries / of keys and values; active: parameters that one token meets"
    return Sheet("", names, rows, note, charted=False)


def shape(name: str, model: ModelSpec) -> str:
    """Describe a model in two lines: parameters, and the fields that a job file would set."""
    active = f", {model.active_count:,} of them for each token" if model.experts else ""
    stated = [f"{f.name} = {_written(getattr(model, f.name))}" for f in fields(model) if _is_set(model, f)]
    return f"{name}: {model.parameter_count:,} parameters{active}\n{', '.join(stated)}"


def billions(n: int) -> str:
    """Write a number of parameters in billions (B) or millions (M)."""
    return f"{n / 1e9:,.1f} B" if n >= 1e9 else f"{n / 1e6:,.0f} M"


def _is_set(model: Any, field: Any) -> bool:
    return bool(getattr(model, field.name) != field.default)


def _written(value: Any) -> str:
    """Write a value as in TOML."""
    if is_dataclass(value):
        shown = [f for f in fields(value) if _is_set(value, f)]
        inner = ", ".join(f"{f.name} = {_written(getattr(value, f.name))}" for f in shown)
        return f"{{ {inner} }}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
