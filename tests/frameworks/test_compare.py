"""phalanx compare: each side is priced as predict prices it; what differs is named, and nothing else."""

from __future__ import annotations

import pytest

from phalanx.answers.compare import differing, sides
from phalanx.answers.query import Query
from phalanx.answers.question import read
from phalanx.spec.errors import InputError

_ASKED = Query(None, "llama3-8b", "dgx-h100", 64, 128, 8192)


def test_sides_have_the_price_of_predict_and_their_own_flags() -> None:
    a, b = sides(["tp=2,sp=1,zero=1", "tp=4,sp=1,zero=1"], _ASKED)
    asked = Query(None, "llama3-8b", "dgx-h100", 64, 128, 8192, "tp=4,sp=1,zero=1")
    assert b.step_time_s == read(asked).subject.priced.seconds
    assert sum(a.terms_s.values()) == pytest.approx(a.step_time_s)
    assert differing([a.settings, b.settings]) == [("--tensor-model-parallel-size", ("2", "4"))]


def test_one_thing_is_not_compared() -> None:
    with pytest.raises(InputError, match="two or three"):
        sides(["tp=2"], _ASKED)
