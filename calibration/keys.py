"""List the keys of a framework from its own source, and bring its verdicts.toml up to date.

python -m calibration.keys FRAMEWORK CHECKOUT ...            what is new, and what is not judged
python -m calibration.keys FRAMEWORK CHECKOUT ... --write    also write src/phalanx/frameworks/FRAMEWORK/verdicts.toml

A CHECKOUT is a git repository, in the order of the framework's rows in keys.toml, which say in which releases and
files its parsers and dataclasses stand. A key keeps its verdict; a new one is `unjudged` until somebody judges it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from calibration import parsers
from calibration.parsers import Declared
from phalanx.frameworks import verdicts
from phalanx.frameworks.verdicts import EFFECTS, Verdict
from phalanx.spec.rows import record

_RECIPES = Path(__file__).with_name("keys.toml")
_FOLDERS = Path(verdicts.__file__).parent


@dataclass(frozen=True)
class Listing:
    """Where the keys of some releases stand; the newest release is named last."""

    repository: str
    commits: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    """Files whose parsers are listed, as patterns."""
    fields: tuple[str, ...] = ()
    """Files of whose classes every field is listed, as patterns."""
    roots: Mapping[str, str] = field(default_factory=dict)
    """Classes whose fields are listed by paths, with the path above them."""
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Files and names of functions."""
    constants: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    """YAML files, as patterns."""
    reads: tuple[str, ...] = ()
    """Files that ask their tables for keys, `cfg.get("name")`, as patterns."""
    variables: tuple[str, ...] = ()
    """Files that read environment variables, as patterns."""
    context: tuple[str, ...] = ()
    """Further files that hold classes."""
    without: str = "(?!)"
    """An expression of names that no configuration states."""


def listings(framework: str) -> list[Listing]:
    """Return the listings of a framework. Raises KeyError for one that has none."""
    make, rows = record(Listing, "repository"), tomllib.loads(_RECIPES.read_text())[framework]
    return [make(row.pop("repository"), row) for row in rows]


def declared(x: Listing, checkout: Path) -> dict[str, Declared]:
    """Return the keys of a listing by name, where its newest release declares it; `commit:file` in older ones."""
    result: dict[str, Declared] = {}
    for commit in x.commits:
        newest = commit == x.commits[-1]
        named = parsers.unique(_of_release(x, checkout, commit))
        for name, key in ((name, key) for name, key in named.items() if not re.fullmatch(x.without, name)):
            place = key if newest else replace(key, file=f"{commit}:{key.file}")
            earlier = result.get(name)
            result[name] = replace(place, switch=key.switch or (earlier is not None and earlier.switch))
    return result


def _of_release(x: Listing, checkout: Path, commit: str) -> Iterator[Declared]:
    paths = _git(checkout, "ls-tree", "-r", "--name-only", commit).split("\n")
    patterns = (*x.arguments, *x.fields, *x.constants, *x.parameters, *x.context)
    chosen = [path for path in paths if path.endswith(".py") and _fits(path, patterns)]
    sources = parsers.parsed({path: _git(checkout, "show", f"{commit}:{path}") for path in chosen})
    for path in chosen:
        if _fits(path, x.arguments):
            yield from parsers.arguments(sources, path)
        if _fits(path, x.constants):
            yield from parsers.constants(sources, path)
        if path in x.parameters:
            yield from parsers.parameters(sources, path, x.parameters[path])
    for name, above in x.roots.items():
        yield from parsers.fields(sources, name, above)
    for name, (path, _) in sources.classes.items():
        if _fits(path, x.fields) and parsers.is_record(sources, name):
            yield from parsers.fields(sources, name, depth=99)
    for path in paths:
        if _fits(path, x.variables):
            yield from parsers.variables(path, _git(checkout, "show", f"{commit}:{path}"))
        if _fits(path, x.reads):
            yield from parsers.read_keys(path, _git(checkout, "show", f"{commit}:{path}"))
        if _fits(path, x.tables):
            yield from parsers.tables(path, _git(checkout, "show", f"{commit}:{path}"))


def _fits(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path fits a pattern: `*` stays inside a folder, `**` does not."""
    return any(re.fullmatch(_expression(pattern), path) for pattern in patterns)


@cache
def _expression(pattern: str) -> str:
    return "".join({"**": ".*", "*": "[^/]*"}.get(part, re.escape(part)) for part in re.split(r"(\*+)", pattern))


def _git(checkout: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(checkout), *words], capture_output=True, text=True, check=True).stdout


def judged(keys: Mapping[str, Declared], known: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Return the verdict of every key: the one that it has, at its line of today; a new one is not judged."""
    result = {}
    for name, key in keys.items():
        before = known.get(name, Verdict())
        source = f"{key.file}:{key.line}"
        if whole := known.get(f"{name}.*"):
            result[f"{name}.*"] = replace(whole, source=source)
        result[name] = replace(before, source=source, switch=key.switch, default=before.default or key.default)
    return result


def written(rows: Mapping[str, Verdict], about: str) -> str:
    """Write a verdicts.toml: a table for each effect, a line of files in it, their keys with the lines."""
    files = dict.fromkeys(row.source.rpartition(":")[0] for _, row in sorted(rows.items()))
    short = {file: f"f{number}" for number, file in enumerate(sorted(files), 1)}
    parts = [about.rstrip() + "\n", "[files]\n" + "".join(f'{short[f]} = "{f}"\n' for f in sorted(files))]
    for effect in EFFECTS:
        groups: dict[tuple[tuple[str, ...], str, str], dict[str, Verdict]] = {}
        for name, row in rows.items():
            if row.effect == effect:
                groups.setdefault((row.changes, row.what, row.limit), {})[name] = row
        for _, group in sorted(groups.items()):
            parts.append(_group(effect, group, short))
    return "\n".join(parts)


def _group(effect: str, group: Mapping[str, Verdict], short: Mapping[str, str]) -> str:
    lines = [f"[[{effect}]]\n" if effect == "unmodelled" else f"[{effect or 'unjudged'}]\n"]
    if effect == "unmodelled":
        row = next(iter(group.values()))
        named = ", ".join(f'"{change}"' for change in row.changes)
        lines += [f"changes = [{named}]\n", f'what = "{row.what}"\n']
        lines += [f'limit = "{row.limit}"\n'] if row.limit else []
    by_file: dict[str, list[tuple[int, str]]] = {}
    for name, row in group.items():
        file, _, line = row.source.rpartition(":")
        default = f"={row.default}" if effect == "unmodelled" and row.default else ""
        by_file.setdefault(short[file], []).append((int(line), f"{name}{'!' if row.switch else ''}{default}:{line}"))
    for file, entries in sorted(by_file.items()):
        text = textwrap.fill(
            " ".join(word for _, word in sorted(entries)), 116, break_long_words=False, break_on_hyphens=False
        )
        lines.append(f'{file} = """\n{text}\n"""\n')
    return "".join(lines)


def main(arguments: Sequence[str]) -> None:
    """List, compare and write."""
    framework, *checkouts = [word for word in arguments if not word.startswith("--")]
    every: dict[str, Declared] = {}
    rows = listings(framework)
    for row, checkout in zip(rows, [*checkouts, *checkouts[-1:] * len(rows)], strict=False):
        prefix = "" if row.repository == rows[0].repository else f"{row.repository} "
        for name, key in declared(row, Path(checkout)).items():
            every.setdefault(name, replace(key, file=f"{prefix}{key.file}"))
    path = _FOLDERS / framework / "verdicts.toml"
    known = verdicts.load(path)
    result = judged(every, known)
    new = sorted(name for name, row in result.items() if not row.effect)
    print(f"{framework}: {len(result)} keys, {len(new)} not judged, {len(set(known) - set(result))} gone")
    print(textwrap.fill(" ".join(new), 116))
    if "--write" in arguments:
        releases = "; ".join(f"{row.repository} {', '.join(row.commits)}" for row in rows)
        path.write_text(written(result, _ABOUT.format(releases=textwrap.fill(releases, 116, subsequent_indent="# "))))


_ABOUT = """\
# What each key changes of a step, with the line that declares it; made by `python -m calibration.keys`, judged by
# people. NAME:LINE in a file of the newest release, or of the older one before its colon; NAME! is a flag without a
# value; NAME=VALUE changes nothing at that value. frameworks/verdicts.py says what the tables mean.
# {releases}
"""

if __name__ == "__main__":
    main(sys.argv[1:])
