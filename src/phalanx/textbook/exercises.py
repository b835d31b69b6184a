"""Exercises with drawn numbers, in three levels; answers are computed by the functions that the commands use.

A seed draws the same exercises again. The words are rows of exercises.toml; the functions here draw the numbers.
Questions of level 4 (questions.toml) have no numbers, and are answered in sentences.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.cost.collectives.closed_form import closed_form
from phalanx.cost.pipeline_time import Costs, price
from phalanx.planning.explain import decision_tree
from phalanx.planning.lookup import model_named
from phalanx.planning.tables import textbook
from phalanx.schedule.collectives.proof import prove
from phalanx.schedule.collectives.reduction import needs
from phalanx.schedule.collectives.registry import build
from phalanx.schedule.pipeline import schedules
from phalanx.spec.cluster.presets import preset
from phalanx.spec.rows import Rows, record
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_Numbers = dict[str, Any]


@dataclass(frozen=True)
class Exercise:
    """One question with its answer."""

    level: int
    topic: str
    question: str
    answer: str
    value: float | None
    """The answer as a number, in the unit of the question; None if it is in words."""
    command: str
    """The command that shows it, without `phalanx`; "" for a teacher's own question."""

    @property
    def kind(self) -> str:
        """Its topic and level, for people."""
        return f"{self.topic}, level {self.level}" if self.level else self.topic


@dataclass(frozen=True)
class ExerciseText:
    """The words of an exercise, with places for its numbers."""

    level: int
    topic: str
    question: str
    answer: str
    command: str


TEXTS: dict[str, ExerciseText] = {
    name: text
    for file in ("exercises.toml", "questions.toml")
    for name, text in Rows(Path(__file__).with_name(file), record(ExerciseText)).items()
}
LEVELS = {
    1: "apply a formula",
    2: "two steps, or a comparison",
    3: "choose, and say why",
    4: "answer in two or three sentences",
}


def exercises(seed: int, level: int | None = None) -> list[Exercise]:
    """Draw one exercise of every kind, or of every kind of one level."""
    return [exercise(name, seed) for name, text in TEXTS.items() if level in (None, 0, text.level)]


def exercise(name: str, seed: float) -> Exercise:
    """Draw an exercise by name; a question of level 4 has no numbers to draw."""
    text = TEXTS[name]
    numbers = _NUMBERS[name](random.Random(f"{seed} _{name}")) if name in _NUMBERS else {}
    question, answer, command = (words.format(**numbers) for words in (text.question, text.answer, text.command))
    return Exercise(text.level, text.topic, question, answer, numbers.get("value"), command)


def right(exercise: Exercise, said: str) -> bool:
    """Return whether a reply is right: numbers within 2 %, with or without units and commas; words exactly."""
    if exercise.value is None:
        return said.strip().lower() == exercise.answer.partition(":")[0].strip().lower()
    number = said.strip().replace(",", "").split(" ")[0].rstrip("%sGBMKib")
    try:
        return math.isclose(float(number), exercise.value, rel_tol=0.02, abs_tol=1e-12)
    except ValueError:
        return False


def _ring(draw: random.Random) -> _Numbers:
    p, size = draw.choice((3, 4, 8, 16)), draw.choice((1, 2, 10))
    return {"p": p, "size": size, "value": prove(build("all_reduce", "ring", p, p)).sent / p * size}


def _rounds(draw: random.Random) -> _Numbers:
    p = draw.choice((4, 8, 16))
    ring, halving = (prove(build("all_reduce", name, p, p)).rounds for name in ("ring", "rabenseifner"))
    return {"p": p, "halving": halving, "value": ring}


def _owner(draw: random.Random) -> _Numbers:
    p = draw.choice((4, 5, 6))
    rank = draw.randrange(p)
    end = build("reduce_scatter", "ring", p, p).end
    owned = int(end.offset[np.flatnonzero(end.rank == rank)[0]])
    return {"p": p, "rank": rank, "other": (rank + 1) % p, "value": owned}


def _state(draw: random.Random) -> _Numbers:
    billions, zero, p = draw.choice((7, 13, 30, 70)), draw.choice((0, 1, 2, 3)), draw.choice((8, 64))
    formula = ("16 N", "4 N + 12 N / P", "2 N + 14 N / P", "16 N / P")[zero]
    value = textbook.zero_bytes(billions * 1e9, zero, p) / 1e9
    return {"billions": billions, "zero": zero, "p": p, "formula": formula, "value": value}


def _cards(draw: random.Random) -> _Numbers:
    billions, card = draw.choice((13, 70, 175, 405)), draw.choice((40, 80, 141))
    count = textbook.cards(16e9 * billions, card * 1e9)
    return {"billions": billions, "card": card, "size": 16 * billions, "value": count}


def _activations(draw: random.Random) -> _Numbers:
    tp, sp = draw.choice((2, 4, 8)), draw.choice((False, True))
    value = textbook.activation_bytes(model_named("gpt3-175b")[0], 1, 2048, tp, sp, "selective") / 1e9
    formula = "34 / t" if sp else "(10 + 24 / t)"
    return {"tp": tp, "sp": "with" if sp else "without", "formula": formula, "value": value}


def _bubble(draw: random.Random) -> _Numbers:
    p, m = draw.choice((4, 8)), draw.choice((8, 16, 32))
    return {"p": p, "m": m, "value": 100 * price(schedules.build("1f1b", p, m), Costs.equal(p)).bubble_fraction}


def _in_flight(draw: random.Random) -> _Numbers:
    p, m = draw.choice((4, 8)), draw.choice((8, 16))
    rank = draw.randrange(p)
    return {"p": p, "m": m, "rank": rank, "value": min(p - rank, m)}


def _critical(draw: random.Random) -> _Numbers:
    name = draw.choice(("dgx-a100", "dgx-h100", "ethernet-h100"))
    cluster = preset(name, 2)
    outer = cluster.tiers[-1]
    rate = outer.bandwidth_bytes_per_s_per_gpu_per_direction
    shared = outer.uplink_bandwidth_bytes_per_s_per_direction
    rate = min(rate, shared / cluster.ranks_per_node) if shared else rate
    peak = cluster.device.dense_flops_per_s["bfloat16"]
    return {"cluster": name, "peak": peak / 1e12, "rate": rate / 1e9, "value": peak / rate / 1.5}


def _latency(draw: random.Random) -> _Numbers:
    p, alpha, rate = draw.choice((64, 256, 1024)), draw.choice((2, 5)), draw.choice((25, 50))
    seconds = closed_form("all_reduce", "ring", p, 1e8, alpha * 1e-6, 1 / (rate * 1e9), 0.0) or 0.0
    latency = 2 * (p - 1) * alpha * 1e-6 * 1e3
    return {"p": p, "alpha": alpha, "rate": rate, "latency": latency, "value": seconds * 1e3}


def _reduction(draw: random.Random) -> _Numbers:
    algorithm = draw.choice(("ring", "binomial"))
    needed = needs(build("all_reduce", algorithm, 4, 4))
    possible = "no" if needed.commutative else "yes"
    return {"algorithm": algorithm, "possible": possible, "order": ", ".join(map(str, needed.example))}


def _world(draw: random.Random) -> _Numbers:
    dp, tp, pp, ep = draw.choice((4, 8)), draw.choice((2, 4)), draw.choice((2, 4)), draw.choice((2, 4))
    return {"dp": dp, "tp": tp, "pp": pp, "ep": ep, "value": Strategy(dp=dp, tp=tp, pp=pp, ep=ep).world}


def _rank(draw: random.Random) -> _Numbers:
    s = Strategy(dp=draw.choice((2, 4)), tp=draw.choice((2, 4)), pp=2)
    rank = draw.randrange(s.world)
    stage = int(dict(mesh(s).coordinates(rank))["pp"])
    return {"line": s, "dp": s.dp, "tp": s.tp, "rank": rank, "value": stage}


def _level_of_zero(draw: random.Random) -> _Numbers:
    billions, p, card = draw.choice(((7, 8, 80), (13, 16, 40), (30, 64, 80), (70, 64, 40), (2, 4, 80)))
    room = 0.6 * card
    sizes = [textbook.zero_bytes(billions * 1e9, zero, p) / 1e9 for zero in range(4)]
    level = next(zero for zero, size in enumerate(sizes) if size <= room)
    reasons = ["a lower level does not fit"] if level else []
    reasons += ["a higher one gains nothing that is needed, and 3 sends half as much again"] if level < 3 else []
    listed = ", ".join(f"{size:.4g}" for size in sizes)
    numbers = {"billions": billions, "p": p, "card": card, "room": room, "value": level}
    return {**numbers, "sizes": listed, "why": "; ".join(reasons)}


def _fewer_bytes_or_rounds(draw: random.Random) -> _Numbers:
    p = draw.choice((8, 16, 64))
    alpha, rate, n = 2e-6, 50e9, draw.choice((4e3, 64e3, 1e6, 1e9))
    ring = 2 * (p - 1) * alpha + 2 * (p - 1) / p * n / rate
    doubling = (p.bit_length() - 1) * (alpha + n / rate)
    faster = "ring" if ring < doubling else "doubling"
    return {"p": p, "size": n / 1e3, "faster": faster, "ring": ring * 1e6, "doubling": doubling * 1e6}


def _split(draw: random.Random) -> _Numbers:
    jobs = (
        ("gpt2-xl", 8, 512, 1024),
        ("gpt3-175b", 1024, 1536, 2048),
        ("mixtral-8x7b", 64, 256, 4096),
        ("qwen2-7b", 64, 64, 131072),
        ("llama-13b", 8, 512, 2048),
    )
    name, gpus, batch, seq = draw.choice(jobs)
    facts = decision_tree.facts(model_named(name)[0], preset("dgx-h100", -(-gpus // 8)), gpus, batch, seq)
    sentence = decision_tree.sentence(facts)
    return {"model": name, "gpus": gpus, "batch": batch, "seq": seq, "sentence": sentence}


_DRAWS = (
    *(_ring, _rounds, _owner, _latency, _reduction, _state, _cards, _activations, _critical, _bubble, _in_flight),
    *(_world, _rank, _level_of_zero, _fewer_bytes_or_rounds, _split),
)
_NUMBERS = {draw.__name__.removeprefix("_"): draw for draw in _DRAWS}
"""Exercise -> function that draws the numbers of its text; `value` among them is the answer, if that is a number."""
