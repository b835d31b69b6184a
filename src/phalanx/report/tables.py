"""Tables as they are, and the pictures of what they are about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from phalanx.answers.tables import Tables
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.tables.table import Sheet
from phalanx.report.pictures.figure import Picture
from phalanx.report.predict import heading
from phalanx.report.view import View
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


def view(t: Tables, subject: str = "") -> View:
    """Show the tables under the line that says what they are about; `subject`: the command that prints them."""
    lines = [] if t.question is None else [heading(t.question)]
    pictures = None
    if t.subject:
        kind, *of = t.subject
        pictures = partial(_PICTURES[kind], t.tables, *of)
    return View([*lines, *t.tables], subject and f"tables {subject}", pictures)


def _state(sheets: Sequence[Sheet], count: float, bytes_per_parameter: int) -> list[Picture]:
    from phalanx.report.gallery.memory import memory_wall, parameter_bytes
    from phalanx.report.plots import picture

    return [parameter_bytes(f"{count:.6g}", policy=bytes_per_parameter), memory_wall(), picture(sheets[:1], "memory")]


def _model(
    sheets: Sequence[Sheet],
    count: float,
    bytes_per_parameter: int,
    model: ModelSpec,
    name: str,
    micro_batch: int,
    seq: int,
) -> list[Picture]:
    from phalanx.report.gallery.memory import activations_of

    return [*_state(sheets, count, bytes_per_parameter), activations_of(model, name, micro_batch, seq)]


def _roofline(sheets: Sequence[Sheet], p: Pricing, s: Strategy) -> list[Picture]:
    from phalanx.planning.explain.operators import training
    from phalanx.report.gallery.hardware import compute_roofline, job_roofline

    return [job_roofline(p.cluster, f"{s} on {p.cluster.name}", training(p, s)), compute_roofline()]


def _chips(sheets: Sequence[Sheet]) -> list[Picture]:
    from phalanx.report.gallery.hardware import compute_roofline

    return [compute_roofline()]


def _links(sheets: Sequence[Sheet], cluster: str) -> list[Picture]:
    from phalanx.report.gallery.hardware import comm_roofline, staircase

    return [comm_roofline(cluster), staircase(cluster)]


def _scaling(sheets: Sequence[Sheet], title: str) -> list[Picture]:
    from phalanx.report.gallery.scaling import scaling_of

    return [scaling_of(sheets[:3], title)]


_PICTURES: dict[str, Callable[..., list[Picture]]] = {
    "chips": _chips,
    "links": _links,
    "model": _model,
    "roofline": _roofline,
    "scaling": _scaling,
    "state": _state,
}
