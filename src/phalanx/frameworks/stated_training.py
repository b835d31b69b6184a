"""What a file says of its training that has no effect on a step's cost: learning rate, steps, seed, data.

Frameworks have the same names for these, so one list of keys (stated_training.toml) reads all of them.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.frameworks.values import count, number


@dataclass(frozen=True)
class StatedTraining:
    """Settings of a training; None: the file does not state it."""

    lr: float | None = None
    """Peak learning rate."""
    min_lr: float | None = None
    """Learning rate at the end of its decay."""
    warmup: int | None = None
    """Steps of warm-up."""
    schedule: str | None = None
    """How the learning rate falls: cosine, linear, constant, inverse-sqrt, or a word of the framework's own."""
    save_every: int | None = None
    """Steps between checkpoints."""
    steps: int | None = None
    samples: int | None = None
    """Sequences of the whole training, where the file gives its length so."""
    tokens: int | None = None
    """Tokens of the whole training, likewise."""
    epochs: float | None = None
    seed: int | None = None
    data: str | None = None
    tokenizer: str | None = None
    checkpoints: str | None = None
    counted_by: str = ""
    """The key that states the length in steps, samples or tokens; "": none does."""

    def whole_tokens(self, batch: int, seq: int) -> float | None:
        """Return the tokens of the whole training, with steps of `batch` sequences of `seq` tokens; None where the
        file does not state its length."""
        if self.samples is not None:
            return float(self.samples * seq)
        return float(self.steps * batch * seq) if self.steps is not None else self.tokens and float(self.tokens)


def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's values: the arguments of a command line by name, else the leaves of its tables by dotted
    path."""
    arguments = config.get("args")
    return dict(arguments) if isinstance(arguments, Mapping) else dict(_leaves(config))


def stated_training(
    arguments: Mapping[str, Any],
    batch: int | None = None,
    environment: Mapping[str, Any] | None = None,
    kind: str = "",
) -> StatedTraining:
    """Return the training that a file's values (arguments_of) state. `batch`: sequences of a step, which turn lengths
    in sequences into steps; `environment`: variables of an exported script, in which the user fills its blanks;
    `kind`: what `read` calls the framework."""
    given = {name.lstrip("-"): value for name, value in _leaves(arguments)}
    for what, blank in table()["blanks"].items():
        if (environment or {}).get(blank) is not None:
            given.setdefault(table()["keys"][what][-1], (environment or {})[blank])

    def stated(what: str) -> Any:
        return _key_and_value(given, what)[1]

    def text(what: str) -> str | None:
        value = stated(what)
        return None if value is None or isinstance(value, Mapping | list) else str(value)

    of = {what: _key_and_value(given, what) for what in ("steps", "samples", "tokens")}
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
    """Return the schedule that a framework's word names, as it is where no list has it. `constant`: it decays to the
    learning rate that it begins with."""
    known = (name for name, words in table()["schedules"].items() if word in words)
    return word and ("constant" if constant else next(known, word))


def _steps(value: Any) -> int | None:
    """Return a number of steps, which Composer writes as batches: 100ba."""
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


def _key_and_value(given: Mapping[str, Any], what: str) -> tuple[str, Any]:
    """Return the first key of the list for `what` (stated_training.toml) that the file sets, and its value; ("",
    None) where it sets none."""
    for end in table()["keys"][what]:
        for name, value in given.items():
            plain = name.replace("-", "_")
            if (plain == end or plain.endswith(f".{end}")) and not _is_unset(value):
                return name, typed(value)
    return "", None


def _is_unset(value: Any) -> bool:
    """Whether a value sets nothing: empty, off, or a blank that a shell or a user fills in later."""
    filled_in = isinstance(value, str) and (value.startswith("FILL-IN") or value.startswith("$"))
    return filled_in or value in (None, False, "", "auto", -1, "-1")


def typed(value: Any) -> Any:
    """Return a word of a command line as the JSON value that it spells, a number as a rule; other words unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


@cache
def table() -> Mapping[str, Any]:
    """Return the tables of stated_training.toml."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def _leaves(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every text, number, truth value and null in tables."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        elif isinstance(value, str | int | float | bool | None):
            yield f"{path}{name}", value
