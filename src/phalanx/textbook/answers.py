"""The answers of `phalanx learn`: pictures (listed in pictures.toml, with the function that draws each), exercises, a
job's path through the tree of decisions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.answers.answer import Answer, plain
from phalanx.answers.question.query import Query
from phalanx.planning.explain import decision_tree
from phalanx.planning.lookup import cluster_named, model_named, require_counts
from phalanx.report.pictures.figure import Picture, Rounds, Timeline
from phalanx.report.pictures.files import panel_text, text
from phalanx.report.view import View
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.rows import Rows, record
from phalanx.textbook.exercises import Exercise
from phalanx.textbook.gallery.choosing import decisions

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class PictureEntry:
    """A picture that `phalanx learn draw` knows."""

    what: str
    draw: str
    """The function that draws it, `module:function` in the package; its parameters are the options that it takes."""
    of: str = ""
    """Argument of the function where it returns the function that draws, such as `all_reduce ring`."""
    instead: str = ""
    """The command that draws the same for the user's own question, without `phalanx`."""

    @property
    def drawing(self) -> Callable[..., Picture]:
        """The function that draws it, imported."""
        module, _, name = self.draw.partition(":")
        function: Callable[..., Any] = getattr(import_module(f"phalanx.{module}"), name)
        return function(self.of) if self.of else function


PICTURES = Rows(Path(__file__).with_name("pictures.toml"), record(PictureEntry))
OPTIONS = ("model", "cluster", "gpus", "batch", "seq", "ranks", "params")
"""The options that `phalanx learn draw` passes to pictures."""
_LARGEST_DRAWN = {"seq": 999_999, "ranks": 10**7, "gpus": 10**7, "batch": 10**9}
"""The largest values that are drawn."""


def options_of(name: str) -> list[str]:
    """Return the options that a picture takes."""
    return [f"--{key}" for key in inspect.signature(PICTURES[name].drawing).parameters if key in OPTIONS]


def picture(name: str, options: Mapping[str, Any] | None = None) -> Picture:
    """Draw a picture by name. Raises InputError for an unknown one, or for an option that it does not take."""
    options = options or {}
    if name not in PICTURES:
        raise InputError("picture", name, "is not known", nearest(name, PICTURES))
    takes = options_of(name)
    for key, value in options.items():
        if f"--{key}" not in takes:
            remedy = f"it takes {', '.join(takes) or 'no options'}"
            raise InputError(key, value, f"is nothing that {name} depends on", remedy)
    for key, most in _LARGEST_DRAWN.items():
        if options.get(key, 0) > most:
            raise InputError(key, options[key], "is too much to draw", f"use at most {most:,}")
    require_counts(*((key, options[key]) for key in _LARGEST_DRAWN if key in options))
    return PICTURES[name].drawing(**options)


@dataclass(frozen=True)
class Drawing(Answer):
    """A picture of the textbook."""

    name: str
    picture: Picture


@dataclass(frozen=True)
class ListedPicture:
    """A picture in the list of all."""

    name: str
    what: str
    takes: tuple[str, ...]
    """Its options."""
    of_yours: str
    """The command that draws the same for the user's own question, without `phalanx`; "" if there is none."""


@dataclass(frozen=True)
class PictureList(Answer):
    """The pictures of the textbook."""

    plain_field = "pictures"
    pictures: tuple[ListedPicture, ...]


@dataclass(frozen=True)
class Quiz(Answer):
    """Exercises with their answers."""

    plain_field = "exercises"
    exercises: tuple[Exercise, ...]


@dataclass(frozen=True)
class DecisionPath(Answer):
    """The usual tree of decisions, and the path of a job through it, if one is given."""

    job: str
    """Such as `gpt2 on 8 GPUs of dgx-h100`; "" for the tree alone."""
    facts: decision_tree.Facts | None


@plain.register
def _(value: Drawing) -> dict[str, Any]:
    panels = [{"kind": type(panel).__name__.lower(), **asdict(panel)} for panel in value.picture.panels]
    return {"name": value.name, **asdict(value.picture), "panels": panels}


@plain.register
def _(value: DecisionPath) -> dict[str, Any]:
    return decision_tree.as_json(value.facts)


def drawing(name: str, options: Mapping[str, Any], moving: bool = False) -> Drawing:
    """Draw a picture by name. Raises InputError for an unknown one, or an option that it does not take."""
    drawing = picture(name, options)
    return Drawing(name, animated(drawing, name) if moving else drawing)


def has_steps(drawing: Picture) -> bool:
    """Return whether a picture has rounds, or blocks over time."""
    return any(isinstance(panel, Rounds | Timeline) for panel in drawing.panels)


def animated(drawing: Picture, name: str) -> Picture:
    """Return a picture whose steps appear one after another. Raises InputError for one without steps."""
    if not has_steps(drawing):
        raise InputError("moving", name, "has no steps", "name one of rounds or over time, such as ring-all-reduce")
    return replace(drawing, moving=True)


def pictures(options: Mapping[str, Any]) -> PictureList:
    """List all pictures. Raises InputError for options, which belong to a picture."""
    for key, value in options.items():
        raise InputError(key, value, "is an option of a picture", "name one, from this list without it")
    return PictureList(
        tuple(ListedPicture(name, e.what, tuple(options_of(name)), e.instead) for name, e in PICTURES.items())
    )


def decision_path(query: Query) -> DecisionPath:
    """Return the tree of decisions with a job's path, if one is given. Raises InputError for half a job."""
    numbers = {"gpus": query.gpus, "batch": query.batch, "seq": query.seq}
    job = {"model": query.model, "cluster": query.cluster, **numbers}
    if all(value is None for value in job.values()):
        return DecisionPath("", None)
    if missing := next((name for name, value in job.items() if value is None), None):
        raise InputError(missing, None, "is missing", "a path needs a model, a cluster, gpus, batch and seq")
    gpus, batch, seq = (value or 0 for value in numbers.values())
    require_counts(("gpus", gpus), ("batch", batch), ("seq", seq))
    model, cluster = model_named(str(query.model))[0], cluster_named(str(query.cluster))(gpus)
    facts = decision_tree.facts(model, cluster, gpus, batch, seq)
    return DecisionPath(f"{query.model} on {gpus} GPUs of {query.cluster}", facts)


def drawing_view(answer: Drawing) -> View:
    """Show a picture."""
    return View([partial(_lines_as_text, text(answer.picture))], pictures=lambda: [answer.picture])


def picture_list(answer: PictureList) -> View:
    """List the pictures."""
    return View(list(_picture_lines(answer)), pictures=lambda: [picture(name) for name in PICTURES])


def quiz(answer: Quiz, answers: bool = False) -> View:
    """Show exercises; `answers`: whether to show their answers too."""
    lines = []
    for number, e in enumerate(answer.exercises, 1):
        lines.append(f"{number}. [{e.kind}] {e.question}")
        lines += [f"   {e.answer}", f"   phalanx {e.command}\n" if e.command else ""] if answers else []
    return View(lines)


def path(answer: DecisionPath) -> View:
    """Show the tree, with the path of a job."""
    path = None if answer.facts is None else decision_tree.walk(answer.facts)[0]
    tree = decisions(path, answer.job)
    return View([partial(_lines_as_text, panel_text(panel)) for panel in tree.panels], pictures=lambda: [tree])


def _lines_as_text(lines: list[str], width: int) -> Text:
    """Return the lines of a drawing; `width` is that of the terminal, and has no effect."""
    from rich.text import Text

    return Text("\n".join(lines))


def _picture_lines(answer: PictureList) -> Iterator[str]:
    for entry in answer.pictures:
        yield f"{entry.name:<24}{entry.what}"
        if entry.takes:
            yield f"    takes {', '.join(entry.takes)}"
        if entry.of_yours:
            yield f"    of yours: phalanx {entry.of_yours}"
