"""What each key of a framework changes of a step: the verdicts.toml of its folder.

    [files]                   abbreviations of paths
    [layout] [time] [memory]  keys that have a price: file = "NAME:LINE ...", a line of the framework's source each
    [numbers]                 keys that change what training computes, and not what it costs
    [none]                    keys that change nothing of a step
    [[unmodelled]]            keys that change `changes` (CHANGES) and have no price; `what` they do; `limit`
                              (LIMITS): the part of a price that bounds how far off it may be; `option`: the
                              option of Phalanx that says what the key leaves open
    [unjudged]                keys of a new release

An entry is `NAME[!][=VALUE]:LINE`: `!` stands behind flags that take no value; at VALUE, or at one of several between
`|`, a key changes nothing. A name with dots is a path from any table on, `NAME.*` all of a table. A key that stands
in no list, or in `unjudged`, is not judged.
"""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Effect = Literal["layout", "time", "memory", "numbers", "none", "unmodelled", ""]
"""What a key changes of a step; "": not judged."""
EFFECTS: tuple[Effect, ...] = get_args(Effect)
CHANGES = ("layout", "model", "time", "memory")
"""What a key without a price may change; `model`: the network, or what a step does with it."""
LIMITS = ("", "activations", "state", "hidden", "routing", "logits", "slices")
"""Parts of a price that bound the effect of a key: memory of activations; memory of weights with their gradients and
optimizer; the exchange between replicas that is hidden behind the forward and backward pass; waiting for the rank
whose experts got the most tokens; memory of logits that are made at once, or would be."""
_UNJUDGED = "unjudged"
_ABOUT = ("changes", "what", "limit", "option")
"""Entries of a group that are not lists of keys."""
_OFF = {"false": ("false", "0", "none", "no"), "none": ("none", "null", "", "false"), "true": ("true", "1", "yes")}
"""Words that mean the same as a default."""


@dataclass(frozen=True)
class Verdict:
    """What a key changes. Raises ValueError for an unknown effect, or one without a source."""

    effect: Effect = ""
    source: str = ""
    """file:line of the framework's source."""
    changes: tuple[str, ...] = ()
    """What an unmodelled key may change, of CHANGES."""
    what: str = ""
    """What an unmodelled key does, in a few words."""
    default: str = ""
    """The value at which it changes nothing, or several separated by `|`; "": unknown."""
    switch: bool = False
    """Whether it is a flag that takes no value."""
    limit: str = ""
    """What bounds the change, of LIMITS."""
    option: str = ""
    """The option of Phalanx that says what an unmodelled key leaves open."""

    def __post_init__(self) -> None:
        if self.effect not in EFFECTS or self.limit not in LIMITS or not set(self.changes) <= set(CHANGES):
            raise ValueError(f"{self.effect!r}, {self.changes} is not a verdict")
        if (self.effect == "unmodelled") != bool(self.changes and self.what):
            raise ValueError(f"{self.source}: what is not modelled changes something, and says what it does")
        if self.effect and not self.source:
            raise ValueError("a verdict has a source")

    def is_off(self, value: Any) -> bool:
        """Whether the key changes nothing at a value, or as a table that is not enabled."""
        if isinstance(value, Mapping):
            return not value or value.get("enabled", value.get("enable")) is False
        if not self.default:
            return value is None or value is False or value in ("", [])
        words = {other for word in self.default.lower().split("|") for other in (word, *_OFF.get(word, ()))}
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()
        return text in words or any(_is_number(value, word) for word in words)


def _is_number(value: Any, word: str) -> bool:
    """Whether a number is the one that a word spells."""
    try:
        return not isinstance(value, bool) and float(value) == float(word)
    except (TypeError, ValueError, OverflowError):
        return False


def load(path: Path) -> dict[str, Verdict]:
    """Return the verdicts of a verdicts.toml by name; none where there is no such file. Raises ValueError for a key
    that has two."""
    document = tomllib.loads(path.read_text()) if path.is_file() else {}
    files = document.pop("files", {})
    result: dict[str, Verdict] = {}
    for effect, table in document.items():
        for group in table if isinstance(table, list) else [table]:
            for name, verdict in _verdicts(effect, group, files):
                if name in result:
                    raise ValueError(f"{path}: {name} has two verdicts")
                result[name] = verdict
    return result


def _verdicts(effect: str, group: Mapping[str, Any], files: Mapping[str, str]) -> Iterator[tuple[str, Verdict]]:
    changes, what = tuple(group.get("changes", ())), group.get("what", "")
    limit, option = group.get("limit", ""), group.get("option", "")
    word: Any = "" if effect == _UNJUDGED else effect
    for short, entries in group.items():
        if short in _ABOUT:
            continue
        for entry in entries.split():
            key, _, line = entry.rpartition(":")
            name, _, default = key.partition("=")
            source, switch = f"{files[short]}:{line}", name.endswith("!")
            verdict = Verdict(word, source, changes, what, default, switch, limit, option)
            yield name.rstrip("!"), verdict
