"""Compares two answers to one question, with what changes/*.toml says of it."""

from __future__ import annotations

import bisect
import math
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from net.answering import HERE, PAGES, Answer, numbers

_CLOSE = 1e-9
MASKED = "(masked)"
_SHOWN = 12  # differences of a question
_COMMENT = re.compile(r"\s*(#|//)")


@cache
def _entries(kind: str) -> tuple[dict[str, Any], ...]:
    files = sorted((HERE / "changes").glob("*.toml"))
    return tuple(entry for file in files for entry in tomllib.loads(file.read_text()).get(kind, ()))


def _about(kind: str, question: str) -> list[dict[str, Any]]:
    return [entry for entry in _entries(kind) if re.search(entry.get("question", ""), question)]


def as_typed_today(question: str) -> str:
    """Return a question with the names that its commands and options have now."""
    steps = question.split(" && ")
    for entry in _entries("command"):
        steps = [re.sub(entry["old"], entry["new"], step) for step in steps]
    return " && ".join(steps)


def masked(question: str, found: Answer) -> Answer:
    """Replace what depends on the machine, the moment or the version."""
    entries = _about("masked", question)
    patterns = [entry["path"] for entry in entries if "path" in entry]

    def at(path: str, value: Any) -> Any:
        if _matches(patterns, path):
            return MASKED
        if isinstance(value, str):
            for entry in entries:
                value = re.sub(entry["text"], MASKED, value) if "text" in entry else value
            return value
        if isinstance(value, dict):
            return {key: at(f"{path}.{key}" if path else key, inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [at(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
        return value

    files = {name: at(f"file {name}:", content) for name, content in found["files"].items()}
    return {"code": found["code"], "answer": at("", found["answer"]), "files": files}


def differences(question: str, old: Answer, new: Answer) -> list[str]:
    """Return a line for each difference that no table explains."""
    old = masked(question, old)
    if old["code"] != new["code"]:
        if _excused(question, "code"):
            return []
        return [f"exit code: {old['code']} before, {new['code']} now: {str(new['answer'])[:400]}"]
    if restructured := _about("numbers", question):
        without = [pattern for entry in restructured for pattern in entry.get("without", ())]
        units = [1.0, *(unit for entry in restructured for unit in entry.get("times", ()))]
        before = {path: value for path, value in leaves(old, prose=True).items() if not _matches(without, path)}
        return _lost(before, _numbers(leaves(new, prose=True).values()), units)
    lost = {path: line for path, line in _prose(old).items() if not _excused(question, path)}
    return _unequal(question, leaves(old), leaves(new)) + _lost(lost, _numbers(_prose(new).values()), [1.0])


def _excused(question: str, path: str) -> bool:
    return any(re.search(entry["path"], path) for kind in ("gone", "changed") for entry in _about(kind, question))


def _unequal(question: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    keys = _about("key", question)
    lines = []
    for before, value in old.items():
        path, times = before, 1.0
        for entry in keys:
            path, hits = re.subn(entry["old"], entry["new"], path)
            times *= entry.get("times", 1.0) if hits else 1.0
        if value == MASKED or _excused(question, before) or (path.endswith("[]") and path not in new):
            continue
        if value is None and path not in new:
            continue
        if path not in new:
            lines.append(f"{before}{'' if path == before else f' (now {path})'}: {value!r} before, now missing")
        elif not _same(value, new[path], times):
            lines.append(f"{before}: {value!r} before, {new[path]!r} now")
    return lines


def _lost(old: dict[str, Any], new: list[float], units: list[float]) -> list[str]:
    lines = []
    for path, value in old.items():
        lost = [n for n in _numbers([value]) if not any(_occurs(n * unit, new) for unit in units)]
        lines += [f"{path}: {value!r} before; {n!r} occurs nowhere now" for n in lost]
    return lines


def _occurs(number: float, among: list[float]) -> bool:
    at = bisect.bisect_left(among, number - abs(number) * _CLOSE)
    return at < len(among) and math.isclose(among[at], number, rel_tol=_CLOSE)


def _numbers(values: Iterable[Any]) -> list[float]:
    """Return the distinct numbers among values and in their words, in order."""
    result: set[float] = set()
    for value in values:
        if isinstance(value, str):
            result.update(numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            result.add(float(value))
    return sorted(result)


def _same(old: Any, new: Any, times: float) -> bool:
    if isinstance(old, bool) or isinstance(new, bool) or old is None:
        return old is new
    if isinstance(old, int | float) and isinstance(new, int | float):
        return math.isclose(old * times, new, rel_tol=_CLOSE) or (old != old and new != new)
    if isinstance(old, str) and isinstance(new, str) and " " in old:
        return not _lost({"": old}, _numbers([new]), [1.0])
    return bool(old == new)


def _matches(patterns: list[str], path: str) -> bool:
    return any(re.search(pattern, path) for pattern in patterns)


def leaves(found: Answer, prose: bool = False) -> dict[str, Any]:
    """Return an answer's values by path, with the length of each list under `path[]`; prose only on demand."""
    parts = {"": found["answer"], **{f"file {name}:": content for name, content in found["files"].items()}}
    result: dict[str, Any] = {}
    for path, content in parts.items():
        if not _is_text(content):
            result |= dict(_leaves(path, content))
        elif path and not path.endswith((".md:", *(f"{page}:" for page in PAGES))):
            result |= dict(_leaves(path, [line for line in content if line.strip() and not _COMMENT.match(line)]))
    return result | (_prose(found) if prose else {})


def _prose(found: Answer) -> dict[str, Any]:
    """Return the lines that a person reads, by path: of terminal text, refusals, pages and comments."""
    parts = {"line ": found["answer"], **{f"file {name} line ": content for name, content in found["files"].items()}}
    return {
        f"{path}{i + 1}": line
        for path, content in parts.items()
        if _is_text(content)
        for i, line in enumerate(content)
    }


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, inner)
    elif isinstance(value, list):
        yield f"{path}[]", len(value)
        for i, inner in enumerate(value):
            yield from _leaves(f"{path}[{i}]", inner)
    else:
        yield path, value


def _is_text(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(isinstance(line, str) for line in content)


def readable(question: str, asked: str, lines: list[str]) -> str:
    """Write differences for a person."""
    more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    now = [f"  now typed: phalanx {asked}"] if asked != question else []
    return "\n".join([f"phalanx {question}", *now, *(f"  {line}" for line in [*lines[:_SHOWN], *more])])
