"""Values that programs stumble over: numbers at the ends of their ranges, words that are no words, wrong types."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Raw:
    """Text that stands in a file as it is: what no writer of TOML or JSON would write."""

    text: str


NUMBERS = (0, -1, 1, 2, 3, 7, 10**4, 10**7, 2**31, 2**53 + 1, 2**63, 2**70, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e308)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))
WORDS = (
    "",
    " ",
    "auto",
    "none",
    "x" * 5000,
    "a\0b",
    "a\nb",
    "[red]a[/red]",
    "[/]",
    "ä€😀",
    "\u202e",
    "../x",
    "/dev/zero",
    "/",
    "1",
    "1e9",
    "nan",
    "inf",
    "-1",
    "1_000",
    "٣",
    "9" * 5000,
    "every:0",
    "every:99",
    "topk:nan",
    "1/0",
    "=",
    ",",
)
OTHER_TYPES = (None, True, False, [], {}, [1], ["a"], {"a": 1}, [[]])
RAW = (Raw("1" + "0" * 5000), Raw("[" * 1200 + "]" * 1200), Raw("1e999"), Raw("-1e-999"))


def numbers() -> st.SearchStrategy[Any]:
    """A number at the end of a range, or any."""
    return st.sampled_from((*NUMBERS, *NOT_FINITE)) | st.integers(-9, 300) | st.floats()


def words() -> st.SearchStrategy[str]:
    """A word that means nothing, or something else than was asked for."""
    return st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def near(before: float) -> st.SearchStrategy[Any]:
    """Change a number to one that may well be legal, and disagree with others."""
    if isinstance(before, int):
        ways: tuple[Any, ...] = (
            before + 1,
            before - 1,
            before * 2,
            before * 4,
            before // 2,
            1000 * before,
            10 * before,
        )
        return st.sampled_from((*ways, -before, 0, 1, 2, 4, 8))
    return st.sampled_from((before * 2, before / 2, before * 1e6, before * 1e-6, -before, before * 1.5, 1.0))


def leaves(before: Any) -> st.SearchStrategy[Any]:
    """Replace `before`: often by a value of its own type, at times by one of another, which the caller may change."""
    others = words() | st.sampled_from(OTHER_TYPES).map(copy.deepcopy) | st.sampled_from(RAW)
    if isinstance(before, bool) or before is None:
        return st.booleans() | numbers() | others
    if isinstance(before, int | float):
        return near(before) | numbers() | others
    return words() | words() | numbers() | others
