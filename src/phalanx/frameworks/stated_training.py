"""What a file says of its training beyond what a step computes: learning rate and its schedule, steps, seed, data.

Frameworks spell these alike, so that one list of keys reads all of them (stated_training.toml).
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.frameworks.configuration import count, number


@dataclass(frozen=True)
class StatedTraining:
    """A training's own numbers; None for what a file leaves open."""

    lr: float | None = None
    """At its peak."""
    min_lr: float | None = None
    """At the end of its decay."""
    warmup: int | None = None
    """Steps of it."""
    schedule: str | None = None
    """How the learning rate falls: cosine, linear, constant, inverse-sqrt, or a word of the framework's own."""
    save_every: int | None = None
    """Steps between checkpoints."""
    steps: int | None = None
    samples: int | None = None
    """Sequences, where the file counts these in place of steps."""
    tokens: int | None = None
    """Likewise."""
    epochs: float | None = None
    seed: int | None = None
    data: str | None = None
    tokenizer: str | None = None
    checkpoints: str | None = None
    counted_by: str = ""
    """The key that says how long it is; "" where none does, or in epochs of data that are not known."""

    def whole_tokens(self, batch: int, seq: int) -> float | None:
        """Tokens of the whole training with steps of `batch` sequences; None where the file does not say."""
        if self.samples is not None:
            return float(self.samples * seq)
        return float(self.steps * batch * seq) if self.steps is not None else self.tokens and float(self.tokens)


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's values by name: arguments of a command line, else the leaves of its tables by dotted path."""
    arguments = config.get("args")
    return dict(arguments) if isinstance(arguments, Mapping) else dict(_leaves(config))


def stated_training(
    arguments: Mapping[str, Any],
    batch: int | None = None,
    environment: Mapping[str, Any] | None = None,
    kind: str = "",
) -> StatedTraining:
    """Return what a file's values by name say. `batch`: sequences of a step, for what it counts in sequences;
    `environment`: of a script, where an export has its blanks; `kind`: what `read` calls the framework."""
    given = {name.lstrip("-"): value for name, value in _leaves(arguments)}
    for what, blank in table()["blanks"].items():
        if (environment or {}).get(blank) is not None:
            given.setdefault(table()["keys"][what][-1], (environment or {})[blank])

    def stated(what: str) -> Any:
        return _first(given, what)[1]

    def text(what: str) -> str | None:
        value = stated(what)
        return None if value is None or isinstance(value, Mapping | list) else str(value)

    of = {what: _first(given, what) for what in ("steps", "samples", "tokens")}
    counted = {what: _steps(value) if what == "steps" else count(value) for what, (_, value) in of.items()}
    lr, steps = _positive(stated("lr")), counted["steps"]
    if steps is None and batch and counted["samples"]:
        steps = counted["steps"] = counted["samples"] // batch
    least = _final(lr, stated("min_lr"), stated("min_lr_ratio"))
    schedule = _schedule(text("schedule"), least is not None and least == lr)
    schedule = schedule or (table()["schedule_of"].get(kind) if lr else None)
    return StatedTraining(
        lr,
        lr if schedule == "constant" else least,
        _warmup(steps, batch, {what: stated(what) for what in ("warmup", "warmup_samples", "warmup_ratio")}),
        schedule=schedule,
        save_every=_steps(stated("save_every")),
        **counted,
        epochs=_positive(stated("epochs")),
        seed=seed if type(seed := stated("seed")) is int and seed >= 0 else None,
        data=text("data"),
        tokenizer=text("tokenizer"),
        checkpoints=text("checkpoints"),
        counted_by=next((key for what, (key, _) in of.items() if key and counted[what] is not None), ""),
    )


def _schedule(word: str | None, constant: bool) -> str | None:
    """Return the schedule that a framework's word names; a decay to where it begins is none."""
    known = (name for name, words in table()["schedules"].items() if word in words)
    return word and ("constant" if constant else next(known, word))


def _steps(value: Any) -> int | None:
    """Return a number of steps, also as Composer writes batches: 100ba."""
    batches = re.fullmatch(r"(\d+)ba", value) if isinstance(value, str) else None
    return count(batches[1] if batches else value)


def _warmup(steps: int | None, batch: int | None, of: Mapping[str, Any]) -> int | None:
    if (stated := _steps(of["warmup"])) is not None:
        return stated
    if batch and (samples := count(of["warmup_samples"])) is not None:
        return samples // batch
    share = number(of["warmup_ratio"], 0.0) or number(of["warmup"], 0.0)  # transformers: steps below 1 are a share
    return int(share * steps) if steps and 0 < share < 1 else None


def _final(lr: float | None, least: Any, share: Any) -> float | None:
    if least is not None:
        return number(least, -1.0) if number(least, -1.0) >= 0 else None
    return None if lr is None or share is None else lr * number(share, 0.0)


def _positive(value: Any) -> float | None:
    stated = number(value, 0.0)
    return stated if stated > 0 else None


def _first(given: Mapping[str, Any], what: str) -> tuple[str, Any]:
    """Return the key that says something (stated_training.toml) with its value; ("", None) without."""
    for end in table()["keys"][what]:
        for name, value in given.items():
            plain = name.replace("-", "_")
            if (plain == end or plain.endswith(f".{end}")) and not _open(value):
                return name, typed(value)
    return "", None


def _open(value: Any) -> bool:
    """Whether a value says nothing: what a shell or an export fills in later."""
    filled_in = isinstance(value, str) and (value.startswith("FILL-IN") or value.startswith("$"))
    return filled_in or value in (None, False, "", "auto", -1, "-1")


def typed(value: Any) -> Any:
    """Return the number that a word of a command line spells."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


@cache
def table() -> Mapping[str, Any]:
    """Return the tables of stated_training.toml."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of tables by dotted path that JSON has too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        elif isinstance(value, str | int | float | bool | None):
            yield f"{path}{name}", value
