"""Measured kernels beside the kernel model, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from phalanx.report.style import empty_table

_SAYS = {
    "product": "matrix products, 16 to 4 bits",
    "prompt attention": "attention of prompts",
    "decode attention": "attention in decoding",
    "mla prompt": "latent attention of prompts",
    "mla decode": "latent attention in decoding",
    "experts": "routed experts",
    "all-reduce": "all-reduce in a node",
}


def _rows(table: Table, rows: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> Table:
    for name, e in rows.items():
        left = e["left_out"]
        table.add_row(
            names.get(name, name),
            f"{e['n']:,}",
            f"{e['median']:.1f}",
            f"{e['p90']:.0f}",
            f"{left['median']:.1f}",
            f"{left['p90']:.0f}",
        )
    return table


def _table(title: str, first: str) -> Table:
    table = empty_table(title)
    table.add_column(first)
    for name in ("measured", "median", "90 %", "left out: median", "90 %"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def kinds(scores: Mapping[str, Any]) -> Table:
    """Tabulate errors by kind of kernel."""
    return _rows(_table("kernels: absolute error in percent", "kind"), scores["by_kind"], _SAYS)


def chips(scores: Mapping[str, Any]) -> Table:
    """Tabulate errors by chip, all-reduces aside."""
    rows = {**scores["by_gpu"], "all of them": scores["kernels"]}
    return _rows(_table("by chip, without all-reduces", "chip"), rows, {})


def notes(scores: Mapping[str, Any]) -> str:
    """Say what was left out, and what is not modelled."""
    return (
        "left out: by constants fitted without the chip: from its datasheet and other generations where no other\n"
        "chip of its own was measured (A100, RTX PRO 6000, L40S).\n"
        f"Not modelled: {scores['not_modelled']:,} rows in other integer types"
    )
