"""Models as tables: those that have a name, and what one is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from rich import box
from rich.table import Table

from phalanx.spec.model.spec import ModelSpec, parameters


def by_role(model: ModelSpec) -> dict[str, int]:
    """How many elements the parameters of each role have, in the order in which a token meets them."""
    found: Counter[str] = Counter()
    for p in parameters(model):
        found[p.role] += p.numel
    return dict(found)


def presets(models: Mapping[str, ModelSpec]) -> Table:
    """One row per model: parameters, those that one token meets, and the sizes that matter most."""
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
    """What the parameters do, and how many they are."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("role", "parameters", "share"):
        table.add_column(name, justify="left" if name == "role" else "right", no_wrap=True)
    for role, count in by_role(model).items():
        table.add_row(role, f"{count:,}", f"{count / model.parameter_count:.1%}")
    return table


def shape(name: str, model: ModelSpec) -> str:
    """A model in a few lines, as a job file would state it."""
    active = f", {model.active_count:,} of them for each token" if model.experts else ""
    stated = [f"{f.name} = {_written(getattr(model, f.name))}" for f in fields(model) if _says(model, f)]
    return f"{name}: {model.parameter_count:,} parameters{active}\n{', '.join(stated)}"


def billions(n: int) -> str:
    return f"{n / 1e9:,.1f} B" if n >= 1e9 else f"{n / 1e6:,.0f} M"


def _says(model: ModelSpec, field: Any) -> bool:
    return bool(getattr(model, field.name) != field.default)


def _written(value: Any) -> str:
    """As in TOML."""
    if is_dataclass(value):
        inner = ", ".join(f"{f.name} = {_written(getattr(value, f.name))}" for f in fields(value) if _says(value, f))  # type: ignore[arg-type]
        return f"{{ {inner} }}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
