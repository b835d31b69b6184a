"""Exercises with drawn numbers, in three levels; every answer is computed by what the commands run.

Level 1: apply a formula. Level 2: two steps, or a comparison. Level 3: choose and give the reason. A seed draws the
same exercises again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

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
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy


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
    """The command that shows it, without `phalanx`."""


def exercises(seed: int, level: int | None = None) -> list[Exercise]:
    """Draw one exercise of every kind, or of every kind of one level."""
    return [e for make in _KINDS if (e := make(random.Random(f"{seed} {make.__name__}"))).level == level or not level]


def right(exercise: Exercise, said: str) -> bool:
    """Whether a reply is right: numbers to 2 %, with or without units and commas; words exactly."""
    if exercise.value is None:
        return said.strip().lower() == exercise.answer.partition(":")[0].strip().lower()
    number = said.strip().replace(",", "").split(" ")[0].rstrip("%sGBMKib")
    try:
        return math.isclose(float(number), exercise.value, rel_tol=0.02, abs_tol=1e-12)
    except ValueError:
        return False


def _ring(draw: random.Random) -> Exercise:
    p, size = draw.choice((3, 4, 8, 16)), draw.choice((1, 2, 10))
    sent = prove(build("all_reduce", "ring", p, p)).sent / p * size
    return Exercise(
        1,
        "collectives",
        f"A ring all-reduces {size} GB over {p} ranks. How many GB does each rank send?",
        f"{sent:.4g} GB: 2 n (p-1)/p, a reduce-scatter and an all-gather",
        sent,
        f"collectives table --bytes {size}GB --ranks {p}",
    )


def _rounds(draw: random.Random) -> Exercise:
    p = draw.choice((4, 8, 16))
    ring, halving = (prove(build("all_reduce", name, p, p)).rounds for name in ("ring", "rabenseifner"))
    return Exercise(
        1,
        "collectives",
        f"Draw a ring all-reduce of {p} ranks. After how many rounds does every rank have the sum?",
        f"{ring}: 2 (p-1); halving and doubling takes {halving}, 2 lg p",
        ring,
        f"collectives show ring --ranks {p}",
    )


def _owner(draw: random.Random) -> Exercise:
    p = draw.choice((4, 5, 6))
    rank = draw.randrange(p)
    owned = _chunk_after_reduce_scatter(p, rank)
    return Exercise(
        2,
        "collectives",
        f"In round 1 of a ring reduce-scatter over {p} ranks, rank i sends chunk i - 1 to rank i + 1, then what it "
        f"has just added to. Which chunk does rank {rank} own at the end?",
        f"{owned}: its own; had it started with chunk i, it would own chunk {(rank + 1) % p}",
        owned,
        f"collectives show ring --op reduce_scatter --ranks {p}",
    )


def _chunk_after_reduce_scatter(p: int, rank: int) -> int:
    s = build("reduce_scatter", "ring", p, p)
    return int(s.end.offset[np.flatnonzero(s.end.rank == rank)[0]])


def _state(draw: random.Random) -> Exercise:
    billions, zero, p = draw.choice((7, 13, 30, 70)), draw.choice((0, 1, 2, 3)), draw.choice((8, 64))
    held = textbook.zero_bytes(billions * 1e9, zero, p) / 1e9
    return Exercise(
        1,
        "memory",
        f"{billions} B parameters, bf16 with a master copy and Adam, over {p} ranks under ZeRO-{zero}. How many GB "
        "of state has a rank?",
        f"{held:.4g} GB: {('16 N', '4 N + 12 N / P', '2 N + 14 N / P', '16 N / P')[zero]}",
        held,
        f"tables memory --params {billions}B",
    )


def _cards(draw: random.Random) -> Exercise:
    billions, card = draw.choice((13, 70, 175, 405)), draw.choice((40, 80, 141))
    count = textbook.cards(16e9 * billions, card * 1e9)
    return Exercise(
        1,
        "memory",
        f"How many cards of {card} GB hold the state of {billions} B parameters, 16 bytes each, before activations?",
        f"{count}: {16 * billions:,} GB over {card} GB, rounded up",
        count,
        f"tables memory --params {billions}B --card {card}",
    )


def _activations(draw: random.Random) -> Exercise:
    tp, sp = draw.choice((2, 4, 8)), draw.choice((False, True))
    held = textbook.activation_bytes(model_named("gpt3-175b")[0], 1, 2048, tp, sp, "selective") / 1e9
    return Exercise(
        2,
        "memory",
        f"GPT-3 (96 blocks, h = 12,288), one sequence of 2,048, tp = {tp} {'with' if sp else 'without'} sequence "
        "parallelism, attention's core repeated. How many GB of activations has a rank?",
        f"{held:.4g} GB: L s b h {'34 / t' if sp else '(10 + 24 / t)'}",
        held,
        "tables memory --model gpt3-175b",
    )


def _bubble(draw: random.Random) -> Exercise:
    p, m = draw.choice((4, 8)), draw.choice((8, 16, 32))
    run = price(schedules.build("1f1b", p, m), Costs.equal(p))
    share = 100 * run.bubble_fraction
    return Exercise(
        1,
        "pipelines",
        f"1F1B over {p} ranks with {m} micro-batches. Which share of the step is bubble, in percent?",
        f"{share:.4g} %: (P-1)/(M+P-1)",
        share,
        f"pipeline table --ranks {p} --micro-batches {m}",
    )


def _in_flight(draw: random.Random) -> Exercise:
    p, m = draw.choice((4, 8)), draw.choice((8, 16))
    rank = draw.randrange(p)
    live = min(p - rank, m)
    return Exercise(
        2,
        "pipelines",
        f"1F1B over {p} ranks with {m} micro-batches. For how many micro-batches does rank {rank} hold activations "
        "at most?",
        f"{live}: min(P - s, M); GPipe holds {m}",
        live,
        f"pipeline show 1f1b --ranks {p} --micro-batches {m}",
    )


def _critical(draw: random.Random) -> Exercise:
    name = draw.choice(("dgx-a100", "dgx-h100", "ethernet-h100"))
    cluster = preset(name, 2)
    outer = cluster.tiers[-1]
    rate = outer.bandwidth_bytes_per_s_per_gpu_per_direction
    shared = outer.uplink_bandwidth_bytes_per_s_per_direction
    rate = min(rate, shared / cluster.ranks_per_node) if shared else rate
    peak = cluster.device.dense_flops_per_s["bfloat16"]
    tokens = peak / rate / 1.5
    return Exercise(
        2,
        "data parallelism",
        f"{peak / 1e12:g} TFLOP/s, {rate / 1e9:g} GB/s between nodes. From how many tokens a GPU on does data "
        "parallelism over many ranks compute as long as it sends (bf16 gradients)?",
        f"{tokens:,.0f}: 6 N T FLOP over 4 N bytes is 1.5 T, against peak over rate; whatever the model",
        tokens,
        f"tables roofline --params 7B --cluster {name}",
    )


def _latency(draw: random.Random) -> Exercise:
    p, alpha, rate = draw.choice((64, 256, 1024)), draw.choice((2, 5)), draw.choice((25, 50))
    seconds = closed_form("all_reduce", "ring", p, 1e8, alpha * 1e-6, 1 / (rate * 1e9), 0.0) or 0.0
    latency = 2 * (p - 1) * alpha * 1e-6
    return Exercise(
        2,
        "collectives",
        f"A ring all-reduces 100 MB over {p} ranks, {alpha} µs a message, {rate} GB/s. How many ms does it take?",
        f"{seconds * 1e3:.4g} ms, {latency * 1e3:.4g} of them latency: it is not independent of p",
        seconds * 1e3,
        f"collectives table --bytes 100MB --ranks {p}",
    )


def _reduction(draw: random.Random) -> Exercise:
    algorithm = draw.choice(("ring", "binomial"))
    needed = needs(build("all_reduce", algorithm, 4, 4))
    order = ", ".join(map(str, needed.example))
    return Exercise(
        3,
        "collectives",
        f"A reduction keeps the later of two contributions: associative, not commutative. May a {algorithm} "
        "all-reduce of 4 ranks use it (yes or no)?",
        f"{'no' if needed.commutative else 'yes'}: it combines ranks in the order {order}",
        None,
        f"collectives reduce {algorithm} --with MODULE:FUNCTION --ranks 4",
    )


def _world(draw: random.Random) -> Exercise:
    dp, tp, pp, ep = draw.choice((4, 8)), draw.choice((2, 4)), draw.choice((2, 4)), draw.choice((2, 4))
    world = Strategy(dp=dp, tp=tp, pp=pp, ep=ep).world
    return Exercise(
        2,
        "experts",
        f"dp = {dp}, tp = {tp}, pp = {pp}, ep = {ep}. How many GPUs?",
        f"{world}: ep folds over the ranks of dp x cp x tp",
        world,
        f"mesh --strategy dp={dp},tp={tp},pp={pp},ep={ep} --cluster dgx-h100",
    )


def _rank(draw: random.Random) -> Exercise:
    s = Strategy(dp=draw.choice((2, 4)), tp=draw.choice((2, 4)), pp=2)
    rank = draw.randrange(s.world)
    grid = mesh(s)
    stage = int(dict(grid.coordinates(rank))["pp"])
    return Exercise(
        1,
        "choosing",
        f"{s} in the order pp, dp, tp, the last innermost. On which pipeline rank is rank {rank}?",
        f"{stage}: {rank} // ({s.dp} x {s.tp})",
        stage,
        f"mesh --strategy {s} --cluster dgx-h100 --rank {rank}",
    )


def _level_of_zero(draw: random.Random) -> Exercise:
    billions, p, card = draw.choice(((7, 8, 80), (13, 16, 40), (30, 64, 80), (70, 64, 40), (2, 4, 80)))
    room = 0.6 * card
    sizes = [textbook.zero_bytes(billions * 1e9, zero, p) / 1e9 for zero in range(4)]
    level = next(zero for zero, size in enumerate(sizes) if size <= room)
    held = ", ".join(f"{size:.4g}" for size in sizes)
    why = "" if level == 0 else "a lower level does not fit"
    if level < 3:
        why += ("; " if why else "") + "a higher one gains nothing that is needed, and 3 sends half as much again"
    return Exercise(
        3,
        "memory",
        f"{billions} B parameters with Adam, {p} cards of {card} GB, data parallelism alone. State may take 60 % of "
        "a card. Which level of ZeRO do you choose, and why not another?",
        f"{level}: state takes {held} GB at levels 0 to 3, and {room:.4g} are free; {why}",
        level,
        f"tables memory --params {billions}B --card {card}",
    )


def _fewer_bytes_or_rounds(draw: random.Random) -> Exercise:
    p = draw.choice((8, 16, 64))
    alpha, rate, n = 2e-6, 50e9, draw.choice((4e3, 64e3, 1e6, 1e9))
    rounds = p.bit_length() - 1
    ring = 2 * (p - 1) * alpha + 2 * (p - 1) / p * n / rate
    doubling = rounds * (alpha + n / rate)
    return Exercise(
        3,
        "collectives",
        f"An all-reduce of {n / 1e3:,.0f} kB over {p} ranks, 2 µs a message, 50 GB/s. Ring or recursive doubling "
        "(ring or doubling), and why?",
        f"{'ring' if ring < doubling else 'doubling'}: a ring takes {ring * 1e6:,.1f} µs, 2 (p-1) rounds for "
        f"2 n (p-1)/p bytes; doubling {doubling * 1e6:,.1f} µs, lg p rounds of n",
        None,
        f"collectives table --bytes {n / 1e3:.0f}kB --ranks {p}",
    )


def _split(draw: random.Random) -> Exercise:
    name, gpus, batch, seq = draw.choice(
        (
            ("gpt2-xl", 8, 512, 1024),
            ("gpt3-175b", 1024, 1536, 2048),
            ("mixtral-8x7b", 64, 256, 4096),
            ("qwen2-7b", 64, 64, 131072),
            ("llama-13b", 8, 512, 2048),
        )
    )
    f = decision_tree.facts(model_named(name)[0], preset("dgx-h100", -(-gpus // 8)), gpus, batch, seq)
    job = f"--model {name} --cluster dgx-h100 --gpus {gpus} --batch {batch} --seq {seq}"
    return Exercise(
        3,
        "choosing",
        f"Choose a split for {name} on {gpus} H100, {batch} sequences of {seq:,} tokens. Which rule does the usual "
        "tree end in, and why? Then compare with the search.",
        decision_tree.sentence(f),
        None,
        f"plan {job}",
    )


_KINDS: tuple[Callable[[random.Random], Exercise], ...] = (
    _ring,
    _rounds,
    _owner,
    _latency,
    _reduction,
    _state,
    _cards,
    _activations,
    _critical,
    _bubble,
    _in_flight,
    _world,
    _rank,
    _level_of_zero,
    _fewer_bytes_or_rounds,
    _split,
)
