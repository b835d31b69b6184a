"""The exercises: answers by other ways than they were made, replies judged, commands that run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.in_process_cli import phalanx
from support.sizes import sampled

from phalanx.textbook.exercises import Exercise, exercises, right


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_those_of_the_formulas(seed: int) -> None:
    """By hand where a formula is short: the text of the question is parsed, not the maker's numbers."""
    checked = 0
    for e in (e for e in exercises(seed) if e.level < 4):
        numbers = [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*", e.question)]
        if e.question.startswith("A ring all-reduces") and "GB over" in e.question:
            n, p = numbers[:2]
            assert e.value == pytest.approx(2 * n * (p - 1) / p)
        elif e.question.startswith("1F1B") and "percent" in e.question:
            p, m = numbers[2:4]
            assert e.value == pytest.approx(100 * (p - 1) / (m + p - 1))
        elif "ZeRO-" in e.question:
            n, p, zero = numbers[0], numbers[2], int(e.question.partition("ZeRO-")[2][0])
            if e.question.startswith(f"{n:g} B parameters, bf16"):
                p = float(re.search(r"over (\d+) ranks", e.question)[1])  # type: ignore[index]
            assert e.value == pytest.approx(n * (16, 4 + 12 / p, 2 + 14 / p, 16 / p)[zero])
        elif "State may take" in e.question:
            n, p, card = numbers[:3]
            sizes = (16 * n, (4 + 12 / p) * n, (2 + 14 / p) * n, 16 * n / p)
            assert e.value == [size <= 0.6 * card for size in sizes].index(True)
            assert ("a lower level does not fit" in e.answer) == (e.value > 0)
            assert ("a higher one gains nothing" in e.answer) == (e.value < 3)
        elif "(ring or doubling)" in e.question:
            n, p, alpha, rate = numbers[0] * 1e3, numbers[1], numbers[2] * 1e-6, numbers[3] * 1e9
            ring = 2 * (p - 1) * (alpha + n / p / rate)
            assert e.answer.startswith("ring" if ring < math.log2(p) * (alpha + n / rate) else "doubling")
        elif "between nodes. With many data-parallel ranks" in e.question:
            peak, rate = numbers[:2]
            assert e.value == pytest.approx(peak * 1e12 / (rate * 1e9) / 1.5, rel=0.01)
        elif "GB of activations has a rank" in e.question:
            t, kept = int(re.search(r"tp = (\d)", e.question)[1]), "without sequence" in e.question  # type: ignore[index]
            assert e.value == pytest.approx(96 * 2048 * 12288 * ((10 + 24 / t) if kept else 34 / t) / 1e9)
        elif "cards of" in e.question:
            card, n = numbers[:2]
            assert e.value == -(-16 * n // card)
        elif "How many GPUs?" in e.question:
            dp, tp, pp, _ = numbers
            assert e.value == dp * tp * pp
        elif "100 MB" in e.question:
            _, p, alpha, rate = numbers[:4]
            latency = 2 * (p - 1) * alpha * 1e-3
            assert e.value == pytest.approx(latency + 2 * (p - 1) / p * 100 / rate)
            assert any(float(n) == pytest.approx(latency, rel=6e-3) for n in re.findall(r"\d+\.?\d*", e.answer)[1:])
        else:
            continue
        checked += 1
    assert checked == 10


def test_replies() -> None:
    number = Exercise(1, "", "", "17.5 GB: because", 17.5, "")
    assert [right(number, said) for said in ("17.5", "17.5 GB", "17.6GB", "20", "", "?")] == [True] * 3 + [False] * 3
    word = Exercise(3, "", "", "no: because", None, "")
    assert [right(word, said) for said in ("No", " no ", "yes")] == [True, True, False]


@pytest.mark.parametrize("slow", sampled([False, True], (0,)))
def test_its_commands_run(tmp_path: Path, slow: bool) -> None:
    """That of 256 ranks takes seconds, as plans do."""
    for e in json.loads(phalanx(tmp_path, "learn quiz --json")[1]):
        if "MODULE" not in e["command"] and (e["command"].startswith("plan ") or "256" in e["command"]) == slow:
            assert phalanx(tmp_path, *e["command"].split())[0] == 0, e["command"]


def test_the_command_asks(tmp_path: Path) -> None:
    asked = json.loads(phalanx(tmp_path, "learn quiz --json")[1])
    assert {e["level"] for e in asked} == {1, 2, 3, 4}
    assert len(asked) == 36
    assert phalanx(tmp_path, "learn quiz --level 1 --answers")[1].count("phalanx ") == 6
    assert "phalanx " not in phalanx(tmp_path, "learn quiz --level 1")[1]  # not a terminal: questions alone
    assert "use 1, 2, 3 or 4" in phalanx(tmp_path, "learn quiz --level 5")[2]
    assert phalanx(tmp_path, "learn quiz --seed 2")[1] != phalanx(tmp_path, "learn quiz --seed 3")[1]
    assert phalanx(tmp_path, "learn quiz --seed 0")[1] != phalanx(tmp_path, "learn quiz --seed 1")[1]
    assert phalanx(tmp_path, "learn quiz")[1] == phalanx(tmp_path, "learn quiz --seed 1")[1]


@pytest.mark.parametrize("wrong", [0, 3, 10**6])
def test_a_person_at_a_terminal_is_asked_in_order_and_told_how_many_were_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """The first replies are wrong. What is answered in sentences is compared by the person, and not counted."""
    drawn = [e for e in exercises(5) if e.level < 4]
    checked = [e for e in drawn if e.value is not None or " " not in e.answer.partition(":")[0]]
    asked: list[str] = []

    def reply(question: str) -> str:
        asked.append(question)
        e = drawn[len(asked) - 1]
        if e not in checked[wrong:]:
            return "nothing"
        return e.answer.partition(":")[0] if e.value is None else str(e.value)

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", reply)
    monkeypatch.setattr("phalanx.textbook.exercises.exercises", lambda seed, level: drawn if seed == 5 else [])
    code, out, _ = phalanx(tmp_path, "learn quiz --seed 5")
    assert code == 0
    numbers = [int(question.partition(".")[0]) for question in asked]
    assert numbers == list(range(1, len(drawn) + 1))
    assert all(e.question in question for e, question in zip(drawn, asked, strict=True))
    assert all(e.answer in out for e in drawn)
    kept = max(0, len(checked) - wrong)
    assert f"{kept} of {len(checked)} right; --seed 6 draws others" in out
    assert out.count("   right: ") == kept
