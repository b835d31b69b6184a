"""What texts teach of collectives, on the command line: compositions, duals, the bound, formulas, own reductions."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.in_process_cli import phalanx

from phalanx.cost.collectives.closed_form import FORMULAS, closed_form
from phalanx.runtime.comm.reductions import reduction_by_name
from phalanx.schedule.collectives.compositions import COMPOSITIONS, DUALS, compose_operations
from phalanx.schedule.collectives.gossip import fewest_messages
from phalanx.schedule.collectives.proof import prove
from phalanx.schedule.collectives.reduction import examine, needs, operands
from phalanx.schedule.collectives.registry import ALGORITHMS, build
from phalanx.spec.errors import InputError, Unproved


def value(text: str, p: int, n: float, m: int) -> float:
    """Evaluate a formula as a reader would: `lg` rounds up, and what stands side by side is multiplied."""
    text = text.replace("lg p", "lg")
    text = re.sub(r"(?<=[\d\w)]) (?=[\w(])", " * ", text)
    text = text.replace(" * % * ", " % ").replace("% 2", "% 2")
    names = {"p": p, "n": n, "m": m, "lg": math.ceil(math.log2(p))}
    return float(eval(text, {"__builtins__": {}}, names))  # noqa: S307


@given(st.sampled_from(sorted(FORMULAS)), st.integers(2, 6), st.floats(1.0, 1e9), st.integers(2, 64), st.data())
def test_a_formula_in_symbols_is_the_one_that_prices(
    name: tuple[str, str], lg: int, n: float, m: int, data: st.DataObject
) -> None:
    formula = FORMULAS[name]
    p = 2**lg if formula.condition else data.draw(st.integers(2, 64))
    alpha, beta, gamma = 3e-6, 2e-10, 7e-11
    symbols = sum(
        value(text, p, n, m) * factor
        for text, factor in ((formula.latency, alpha), (formula.sent, beta), (formula.reduced, gamma))
    )
    priced = closed_form(*name, p, n, alpha, beta, gamma, m)
    assert priced == pytest.approx(symbols), name


def test_every_algorithm_with_a_formula_is_in_the_table(tmp_path: Path) -> None:
    (sheet,) = json.loads(phalanx(tmp_path, "collectives formulas --json")[1])["tables"]
    shown = {(row["operation"], row["algorithm"]) for row in sheet["rows"]}
    assert shown == {
        (op, name) for op, names in ALGORITHMS.items() for name in names if closed_form(op, name, 8, 64, 1, 1, 1)
    }


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_all_reduce_sends_less_than_a_ring(ranks: int, tmp_path: Path) -> None:
    bound = fewest_messages(ranks)
    ring = prove(build("all_reduce", "ring", ranks, ranks))
    assert bound.messages == 2 * (ranks - 1)
    assert ring.sent == bound.sent_share * ranks
    for algorithm in ALGORITHMS["all_reduce"]:
        assert prove(build("all_reduce", algorithm, ranks, ranks)).sent >= ring.sent
    shown = json.loads(phalanx(tmp_path, "collectives bound --ranks", str(ranks), "--json")[1])
    assert shown["messages"] == bound.messages
    assert "use 2 to 5" in phalanx(tmp_path, "collectives bound --ranks 6")[2]


@pytest.mark.parametrize("op", [*COMPOSITIONS, *DUALS])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_collective_as_others(op: str, ranks: int) -> None:
    ways = [*map("+".join, COMPOSITIONS.get(op, ()))]
    ways += [f"dual:{name}" for name in ALGORITHMS[DUALS[op]]] if op in DUALS else []
    for way in ways:
        twice = way == "dual:scatter_all_gather" or (way == "dual:doubling" and ranks == 3)
        if twice and ranks > 1:  # a piece arrives twice at a rank, so backwards it would be added twice
            with pytest.raises(InputError, match="a second time"):
                compose_operations(op, way, ranks, 3 * ranks + 1, root=ranks - 1)
        else:
            prove(compose_operations(op, way, ranks, 3 * ranks + 1, root=ranks - 1))


def test_show_as_says_what_it_proves(tmp_path: Path) -> None:
    said = phalanx(tmp_path, "collectives show --as reduce_scatter:halving+all_gather --ranks 4")[1]
    assert (
        "proved: all_reduce by halving reduce_scatter + ring all_gather; 5 rounds, 20 messages, at most 1.5" in said
    )
    said = phalanx(tmp_path, "collectives show --op gather --as dual:binomial")[1]
    assert "proved: gather by binomial scatter, backwards" in said
    for words, mend in (
        (("--as", "reduce_scatter"), "did you mean reduce_scatter+all_gather"),
        (("--op", "all_to_all", "--as", "dual"), "all_to_all has no dual"),
        ((), "give an algorithm, or --as"),
        (("ring", "--as", "dual"), "give an algorithm, or --as"),
    ):
        assert mend in phalanx(tmp_path, "collectives show", *words)[2]


@given(st.sampled_from(ALGORITHMS["all_reduce"]), st.integers(2, 8), st.integers(0, 99))
def test_an_order_of_operands_is_what_a_run_computes(algorithm: str, ranks: int, seed: int) -> None:
    """Strings joined in the order that `operands` says: a run of the schedule ends with just those."""
    schedule = build("all_reduce", algorithm, ranks, ranks, tiers=(ranks,), segments=2)
    held = [[chr(65 + r)] * schedule.size for r in range(ranks)]
    for number in range(schedule.rounds):
        before = [list(row) for row in held]
        for i in np.flatnonzero(schedule.round == number):
            low, source, to = int(schedule.offset[i]), int(schedule.source[i]), int(schedule.destination[i])
            for e in range(low, low + int(schedule.length[i])):
                held[to][e] = held[to][e] + before[source][e] if schedule.reduces[i] else before[source][e]
    ended = {"".join(chr(65 + r) for r in order) for order in operands(schedule)}
    assert ended == {text for row in held for text in row}


def test_what_a_reduction_must_be() -> None:
    ring, tree = needs(build("all_reduce", "ring", 3, 3)), needs(build("reduce", "binomial", 4, 4))
    assert (ring.commutative, tree.commutative) == (True, False)
    examine(np.maximum, ring)
    examine(lambda a, b: b, tree)  # the last one wins: associative, not commutative
    with pytest.raises(Unproved, match="not commutative: f"):
        examine(lambda a, b: b, ring)
    with pytest.raises(Unproved, match="not associative: f"):
        examine(lambda a, b: a - b, tree)


def test_a_reduction_of_ones_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_only.py").write_text(
        "import torch\ndef f(a, b):\n    return torch.where(a.abs() > b.abs(), a, b)\n"
    )
    monkeypatch.chdir(tmp_path)
    said = phalanx(tmp_path, "collectives reduce ring --with mine_only:f --ranks 2")[1]
    assert "not commutative" in said  # of 3 and -3 the second stays
    (tmp_path / "mine_too.py").write_text("import torch\ndef f(a, b):\n    return torch.gcd(a, b)\n")
    said = phalanx(tmp_path, "collectives reduce ring --with mine_too:f --ranks 2")[1]
    assert "run on 2 ranks: 0 of 2,000 elements differ from one process" in said
    with pytest.raises(InputError, match="did you mean max"):
        reduction_by_name("maxx")
    (tmp_path / "mine_broken.py").write_text("def f(:\n")
    with pytest.raises(InputError, match="cannot be imported: invalid syntax"):
        reduction_by_name("mine_broken:f")
