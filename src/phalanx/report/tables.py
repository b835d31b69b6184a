"""Views of tables, and the pictures of their subjects."""

from collections.abc import Callable
from functools import partial

from phalanx.answers.tables import Tables
from phalanx.planning.explain.operators import training
from phalanx.report.gallery import hardware, memory
from phalanx.report.gallery.scaling import scaling_of
from phalanx.report.pictures.figure import Picture
from phalanx.report.plots import picture
from phalanx.report.predict import heading
from phalanx.report.view import View


def view(t: Tables, subject: str = "") -> View:
    """Show the tables under the heading of their question; `subject`: the command that prints them."""
    lines = [] if t.question is None else [heading(t.question)]
    pictures = partial(_PICTURES[t.subject[0]], t.tables, *t.subject[1:]) if t.subject else None
    return View([*lines, *t.tables], subject and f"tables {subject}", pictures)


_PICTURES: dict[str, Callable[..., list[Picture]]] = {
    "chips": lambda sheets: [hardware.compute_roofline()],
    "links": lambda sheets, cluster: [hardware.comm_roofline(cluster), hardware.staircase(cluster)],
    "state": lambda sheets, count, each: [
        memory.parameter_bytes(f"{count:.6g}", policy=each),
        memory.memory_wall(),
        picture(sheets[:1], "memory"),
    ],
    "model": lambda sheets, count, each, model, name, micro_batch, seq: [
        *_PICTURES["state"](sheets, count, each),
        memory.activations_of(model, name, micro_batch, seq),
    ],
    "roofline": lambda sheets, p, s: [
        hardware.job_roofline(p.cluster, f"{s} on {p.cluster.name}", training(p, s)),
        hardware.compute_roofline(),
    ],
    "scaling": lambda sheets, title: [scaling_of(sheets[:3], title)],
}
"""Kind of subject (answers/tables.py) -> function from the tables and the subject's arguments to pictures."""
