"""Models as tables: the presets, and the parameters of one model by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rich import box
from rich.table import Table

from phalanx.spec.model.spec import ModelSpec, parameters


def by_role(model: ModelSpec) -> dict[str, int]:
    """Count parameters by role, in the order in which a token meets them."""
    count: Counter[str] = Counter()
    for p in parameters(model):
        count[p.role] += p.numel
    return dict(count)


def presets(models: Mapping[str, ModelSpec]) -> Table:
    """Tabulate models: parameters, active parameters, and the main sizes."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "family", "parameters", "active", "layers", "hidden", "heads", "ffn", "vocab", "max seq"):
        table.add_column(name, justify="left" if name in ("model", "family") else "right", no_wrap=True)
    for name, m in models.items():
        heads = str(m.heads) if m.heads == m.kv_heads else f"{m.heads}/{m.kv_heads}"
        ffn = str(m.ffn) if m.experts is None else f"{m.experts.top_k} of {m.experts.count} x {m.experts.ffn}"
        active = "" if m.active_count == m.parameter_count else billions(m.active_count)
        table.add_row(
            name,
            m.family,
            billions(m.parameter_count),
            active,
            str(m.layers),
            str(m.hidden),
            heads,
            ffn,
            str(m.vocab),
            str(m.max_seq),
        )
    table.caption = "heads: of queries / of keys and values; active: parameters that one token meets"
    return table


def parts(model: ModelSpec) -> Table:
    """Tabulate a model's parameters by role."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("role", "parameters", "share"):
        table.add_column(name, justify="left" if name == "role" else "right", no_wrap=True)
    for role, count in by_role(model).items():
        table.add_row(role, f"{count:,}", f"{count / model.parameter_count:.1%}")
    return table


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
