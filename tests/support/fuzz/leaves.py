"""Values that programs stumble over: numbers at the ends of their ranges, words that are no words, wrong types."""

from __future__ import annotations

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
_OTHER_TYPES = (None, True, False, [], {}, [1], ["a"], {"a": 1}, [[]])
RAW = (Raw("1" + "0" * 5000), Raw("[" * 1200 + "]" * 1200), Raw("1e999"), Raw("-1e-999"))


def numbers() -> st.SearchStrategy[Any]:
    """A number at the end of a range, or any."""
    return st.sampled_from((*NUMBERS, *NOT_FINITE)) | st.integers(-9, 300) | st.floats()


def words() -> st.SearchStrategy[str]:
    """A word that means nothing, or something else than was asked for."""
    return st.sampled_from(WORDS) | st.text(max_size=12)


def leaves(before: Any) -> st.SearchStrategy[Any]:
    """Replace `before`: often by a value of its own type, at times by one of another."""
    others = words() | st.sampled_from(_OTHER_TYPES) | st.sampled_from(RAW)
    # Half of the mistakes are in the value alone: a wrong type is refused before anything is computed.
    if isinstance(before, bool) or before is None:
        return st.booleans() | numbers() | others
    if isinstance(before, int):
        near = (before + 1, before - 1, before * 2, before * 4, before // 2, before * 1000, 10 * before, -before)
        return st.sampled_from(near) | st.sampled_from(near) | numbers() | others
    if isinstance(before, float):
        near = (before * 2, before / 2, before * 1e6, before * 1e-6, -before, before * 1.5)
        return st.sampled_from(near) | st.sampled_from(near) | numbers() | others
    return words() | words() | numbers() | others
