"""Every number in the prose and tables of the pages has what holds it, in tests/docs/numbers.toml.

The file has a table for each page, with lists of quotes of it, whitespace aside; a quote that begins with # stands
for the table below that heading.

    run        {says, run, values}: a command whose `--json` has `values`: [path, format, unit], a path ending in #
    being
               a length; each, formatted, is in the quote. Without values every number of the quote is in what the
               command prints. `long`: only in `make long`
    test       [quote, file::function]: a test whose source has every number of the quote; a file alone reads the page
    rows       [heading, function, ...]: of each row of a table, the test (of test_handbook.py) whose source has the
               numbers of its second cell, those in brackets left out, which are what is taught
    page       [quote, page]: another page, which has every number of the quote
    measured   [quote, by, numbers]: what measured it, and what it gave: the quote has these numbers and no others, so
               that neither is changed alone
    given      quotes that nothing measures or computes: an input, a definition, a limit in the code, another's figure

What is left of a page, without code, names, years and counts below ten, has no digit."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import phalanx

ROOT = Path(__file__).parents[2]
HELD: dict[str, dict[str, list[Any]]] = tomllib.loads((Path(__file__).parent / "numbers.toml").read_text())
_WRITTEN = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/guides").glob("*.md")]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in _WRITTEN)]
_NAMES = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\b(19|20)\d\d\b(?=[);,:]| *\))"  # code, links, papers
    r"|\b(Llama|LLaMA|GPT|DeepSeek|Mixtral|PaLM|MT-NLG|Qwen)[- ]?[\dV.]*( \d+(\.\d+)?[BT]\b|( |-)?\d+x?\d*B)?"
    r"|\b\d+(\.\d+)?[BT]\b|\bZeRO[- ]\d((, \d)*( and| to) \d|-\d)?|\b1F1B\b|\b(MTU|SHA-|x86-)\d+|2-core"
    r"|\b(torch|torchtitan|nanotron|accelerate|transformers|DeepSpeed\w*|[Cc]ore|Bridge|MaxText|Trainer|Apache-)"
    r"[- ]?\d+(\.\d+)+\b"
)
_NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_UNIT = r"%|s\b|ms|µs|h\b|d\b|min|[kKMGT]i?B|times|FLOP|B\b"
_COUNT = re.compile(rf"(?<![\w.,/(-])\d(?![\d,.]*\d)(?! ?({_UNIT}))(?![\w/])")
"""A single digit without a unit: a number of ranks, an exit code, a level."""


@cache
def _lines(page: str) -> list[str]:
    """Return the lines of a page without blocks of code, whose outputs test_outputs.py compares."""
    lines, fenced = [], False
    for line in (ROOT / page).read_text().splitlines():
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith("    ") and not line.lstrip().startswith("```"):
            lines.append(line)
    return lines


def text_of(page: str) -> str:
    """Return a page without blocks of code and headings, in single spaces."""
    return _squeezed("\n".join(line for line in _lines(page) if not line.startswith("#")))


def rows(page: str, heading: str) -> list[str]:
    """Return the rows of the tables below a heading."""
    lines = _lines(page)
    assert heading in lines, f"{page} has no heading {heading}"
    below = lines[lines.index(heading) + 1 :]
    end = next((i for i, line in enumerate(below) if line.startswith("#")), len(below))
    return [line for line in below[:end] if line.startswith("|")]


def quote(page: str, says: str) -> str:
    """Return the piece of a page that an entry is about."""
    return _squeezed("\n".join(rows(page, says)) if says.startswith("#") else says)


def quotes(page: str) -> Iterator[str]:
    """Yield all pieces of a page that something holds."""
    for kind, entries in HELD.get(page, {}).items():
        for entry in entries:
            says = entry if kind == "given" else entry["says"] if kind == "run" else entry[0]
            yield from map(_squeezed, rows(page, says)) if says.startswith("#") else [says]


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def numbers(text: str) -> list[str]:
    """Return the numbers of a text, names and counts below ten left out, without separators of thousands."""
    return [n.rstrip(",").replace(",", "") for n in _NUMBER.findall(_COUNT.sub(" ", _NAMES.sub(" ", text)))]


def unheld(page: str) -> list[str]:
    """Return the pieces of a page that have a number and no entry."""
    text = text_of(page)
    for piece in sorted(quotes(page), key=len, reverse=True):
        text = text.replace(piece, " ¶ ")
    return [piece.strip() for piece in re.split(r"¶|(?<=[.:;|]) ", text) if numbers(piece)]


@pytest.mark.parametrize("page", PAGES)
def test_every_number_is_held(page: str) -> None:
    text = text_of(page)
    gone = [piece for piece in quotes(page) if piece not in text]
    assert not gone, f"{page} does not say: {gone}"
    left = unheld(page)
    assert not left, f"{page}: nothing in tests/docs/numbers.toml holds\n" + "\n".join(left)


def _entries(kind: str) -> list[Any]:
    entries = []
    for page, kinds in HELD.items():
        assert page in PAGES
        assert kinds.keys() <= {"run", "test", "rows", "page", "measured", "given"}, page
        for number, entry in enumerate(kinds.get(kind, [])):
            marks = [pytest.mark.long] if kind == "run" and entry.get("long") else []
            entries.append(pytest.param(page, entry, id=f"{page}-{number}", marks=marks))
    return entries


@cache
def _here(tmp: Path) -> Path:
    shutil.copytree(ROOT / "examples", tmp / "examples")
    return tmp


@cache
def _output(here: Path, command: str) -> str:
    code, out, err = phalanx(here, *command.split())
    assert code in (0, 1), f"{command}: {err}"
    return f"{out}\n{err}" if "--json" not in command else out


def _at(found: Any, path: str) -> Any:
    for key in path.split("."):
        found = len(found) if key == "#" else found[int(key)] if isinstance(found, list) else found[key]
    return found


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _here(tmp_path_factory.mktemp("numbers"))


@pytest.mark.parametrize(("page", "entry"), _entries("run"))
def test_a_command_gives_the_number(here: Path, page: str, entry: dict[str, Any]) -> None:
    says = quote(page, entry["says"])
    if "values" not in entry:
        printed = _plain(_output(here, entry["run"]))
        missing = [n for n in numbers(says) if n not in printed]
        assert not missing, f"`phalanx {entry['run']}` does not print {missing} of: {says}"
        return
    found = json.loads(_output(here, f"{entry['run']} --json"))
    for path, form, *unit in entry["values"]:
        value = _at(found, path)
        shown = format(value / unit[0] if unit else value, form)
        assert re.search(rf"(?<![\d.,]){re.escape(shown)}(?![\d]|[.,]\d)", says), f"{shown} is not in: {says}"


def _source(test: str) -> set[str]:
    """Return the numbers in the source of a test, its parameters among them."""
    file, _, name = test.partition("::")
    before, found, after = (ROOT / file).read_text().partition(f"def {name}(")
    assert found, f"{test} does not exist"
    source = before[before.rfind("\n\n\n") :] + re.split(r"\n\n\n", after)[0]
    return {n.replace("_", "") for n in re.findall(r"\d[\d_]*(?:\.\d+)?(?:e-\d+)?", source)} | {
        n.replace("_", "") for n in re.findall(r"\d[\d_]*(?:\.\d+)?", source)
    }


@pytest.mark.parametrize(("page", "entry"), _entries("test"))
def test_a_test_has_the_number(page: str, entry: list[str]) -> None:
    assert (ROOT / entry[1].partition("::")[0]).exists()
    if "::" not in entry[1]:
        return
    has = _source(entry[1])
    missing = [n for n in numbers(quote(page, entry[0])) if n not in has]
    assert not missing, f"{entry[1]} does not have {missing} of: {entry[0]}"


@pytest.mark.parametrize(("page", "entry"), _entries("rows"))
def test_a_test_has_the_numbers_of_each_row(page: str, entry: list[str]) -> None:
    heading, *tests = entry
    table = [row for row in rows(page, heading)[2:]]
    assert len(table) == len(tests), f"{page}, {heading}: {len(table)} rows, {len(tests)} tests"
    for row, test in zip(table, tests, strict=True):
        file, _, name = test.rpartition("::")
        has = _source(f"{file or 'tests/docs/test_handbook.py'}::{name}")
        second = re.sub(r"\([^)]*\)", " ", row.split("|")[2])
        missing = [n for n in _plain(second) if n not in has]
        assert not missing, f"{name} does not have {missing} of: {row}"


@pytest.mark.parametrize(("page", "entry"), _entries("page"))
def test_another_page_has_the_number(page: str, entry: list[str]) -> None:
    has = _plain((ROOT / entry[1]).read_text())
    missing = [n for n in numbers(quote(page, entry[0])) if n not in has]
    assert not missing, f"{entry[1]} does not have {missing} of: {entry[0]}"


def _plain(text: str) -> list[str]:
    return [n.rstrip(",").replace(",", "") for n in _NUMBER.findall(text)]


@pytest.mark.parametrize(("page", "entry"), _entries("measured"))
def test_measured_numbers_are_those_recorded(page: str, entry: list[str]) -> None:
    says, by, gave = entry
    assert numbers(quote(page, says)) == gave.split(), f"{page}: measure again by {by}"
