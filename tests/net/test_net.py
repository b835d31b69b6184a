"""Every recorded question is answered as it was, but for what changes/*.toml says (how: see this package)."""

from __future__ import annotations

import functools

import pytest

from net.answering import answer, questions
from net.comparing import as_typed_today, differences, readable
from net.record import recorded

_recorded = functools.cache(recorded)


@pytest.mark.parametrize("question", questions(), ids=lambda question: question.replace(" && ", " then ")[:150])
def test_answer_is_as_recorded(question: str) -> None:
    asked = as_typed_today(question)
    lines = differences(question, _recorded()[question], answer(asked))
    assert not lines, readable(question, asked, lines)
