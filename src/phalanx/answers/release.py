"""Releases of stacks by name: one that is not known is answered by the nearest of the same framework, and said; so is
a framework's name as people say it, by the row that stands for it."""

from __future__ import annotations

import re

from phalanx.frameworks.registry import DOCUMENTED, FRAMEWORKS, STACKS

_AS_SAID = {said: name for framework in FRAMEWORKS.values() for said, name in framework.said.items()}
"""What people call frameworks -> the stack that is meant."""


def release_named(name: str) -> tuple[str, str]:
    """Return (the stack that a name means, what to say about it, "" if it is known).

    `megatron-core-0.13` is the framework `megatron-core` at a release that no row and no constants are of. A name of
    another form, or of no framework that is known, is returned as it is: whoever looks it up says what is near."""
    asked = re.fullmatch(r"([a-z][a-z-]*?)[-_ ]?v?([0-9]{1,9}(?:\.[0-9]{1,9})*)", name)
    if name in _AS_SAID:
        row = DOCUMENTED[_AS_SAID[name]]
        return row.name, f"{name} is taken for {row.name} ({row.title})"
    if name in DOCUMENTED or name in STACKS or asked is None:
        return name, ""
    releases = {
        known: of
        for framework in {asked[1], _AS_SAID.get(asked[1], asked[1])}
        for known in (*DOCUMENTED, *STACKS)
        if (of := _release(known, framework)) is not None
    }
    if not releases:
        return name, ""
    wanted = _number(asked[2])
    nearest = min(releases, key=lambda known: (abs(_number(releases[known]) - wanted), -_number(releases[known])))
    title = f" ({DOCUMENTED[nearest].title})" if nearest in DOCUMENTED else ""
    return nearest, f"{name} is not known: {nearest}{title}, the nearest release, is taken"


def _release(known: str, framework: str) -> str | None:
    """Return the release of a stack if it is of a framework: in its name, or else in the title of its row."""
    inside = re.fullmatch(rf"{re.escape(framework)}-(\d+(?:\.\d+)*)", known)
    if inside is not None:
        return inside[1]
    if known != framework or known not in DOCUMENTED:
        return None
    titled = re.search(r"\d+(?:\.\d+)+", DOCUMENTED[known].title)
    return titled[0] if titled else None


def _number(release: str) -> float:
    """Return a release as one number, so that they can be compared: 0.14 is 14 and 1.2.3 is 10203 / 100."""
    parts = [int(part) for part in release.split(".")[:3]]
    return sum(part * 100.0 ** (1 - i) for i, part in enumerate(parts))
