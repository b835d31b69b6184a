"""Measured kernels beside the kernel model, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.answers.validate import KernelScores
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View

_SAYS = {
    "product": "matrix products, 16 to 4 bits",
    "prompt attention": "attention of prompts",
    "decode attention": "attention in decoding",
    "mla prompt": "latent attention of prompts",
    "mla decode": "latent attention in decoding",
    "experts": "routed experts",
    "all-reduce": "all-reduce in a node",
}


def view(a: KernelScores) -> View:
    """Show errors by kind of kernel and by chip, and what is left out."""
    chips = {**a.scores["by_gpu"], "all of them": a.scores["kernels"]}
    kinds = {_SAYS.get(name, name): e for name, e in a.scores["by_kind"].items()}
    parts = [_table("kernels: absolute error", "kind", kinds), _table("by chip, without all-reduces", "chip", chips)]
    return View([*parts, notes(a.scores)], "validate")


def _table(title: str, first: str, scores: Mapping[str, Mapping[str, Any]]) -> Sheet:
    rows = []
    for name, e in scores.items():
        errors = (e["median"], e["p90"], e["left_out"]["median"], e["left_out"]["p90"])
        rows.append((name, e["n"], *(value / 100 for value in errors)))
    names = columns(
        *(first, ("measured", "count"), ("median", "share"), ("90 %", "share")),
        *(("left out: median", "share"), ("left out: 90 %", "share")),
    )
    return Sheet(title, names, rows, charted=False)


def notes(scores: Mapping[str, Any]) -> str:
    """Say what was left out, and what is not modelled."""
    return (
        "left out: by constants fitted without the chip: from its datasheet and other generations where no other\n"
        "chip of its own was measured (A100, RTX PRO 6000, L40S).\n"
        f"Not modelled: {scores['not_modelled']:,} rows in other integer types"
    )
