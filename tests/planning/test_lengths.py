"""Steps of unequal sequences: equal ones are the predicted step, parts add up, packing loses no document."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import error_of, phalanx

from phalanx import simulate
from phalanx.cost.ledger.pipeline_formulas import rounds
from phalanx.frameworks.stack import of_strategy
from phalanx.planning.lengths.distribution import _in_file, parse_lengths
from phalanx.planning.lengths.dynamic import CONDITIONS
from phalanx.planning.lengths.steps import UnevenSteps
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import conditions
from phalanx.planning.search.refine import refine
from phalanx.schedule.packing import deal, first_fit, spread
from phalanx.schedule.pipeline.given_layout import write_layers
from phalanx.spec.errors import InputError
from phalanx.spec.strategy import where
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

LINES = (
    Strategy(dp=16, zero=1),
    Strategy(dp=4, tp=2, cp=2, zero=1),
    Strategy(dp=4, tp=2, pp=2, zero=1, micro_batch=2),
    Strategy(dp=4, pp=4, virtual=2, schedule="interleaved", zero=1),
    Strategy(dp=16, zero=3),
)
WORDS = "--model llama3.1-8b --cluster dgx-h100 --gpus 16 --batch 128 --seq 8192 --strategy"


def _pricing(stack: str = "megatron-core", batch: int = 128, seq: int = 8192) -> Pricing:
    return pricing_by_gpus(model_named("llama3.1-8b")[0], cluster_named("dgx-h100"), batch, seq, stack)(16)


def _steps(s: Strategy, line: str, **of: int) -> UnevenSteps:
    return UnevenSteps(_pricing("fsdp2" if s.zero == 3 else "megatron-core", **of), s, parse_lengths(line))


@pytest.mark.parametrize("s", LINES, ids=str)
def test_full_sequences_take_the_predicted_step(s: Strategy) -> None:
    for way in ("padded", "longest", "packed"):
        steps = _steps(s, f"lognormal:8192,0+{way}")
        for by_cost in (False, True):
            step = steps.step(way, by_cost)  # type: ignore[arg-type]
            assert step.step_s == pytest.approx(steps.priced.seconds, rel=1e-9)
            # Of no rounding either: nothing in an answer is below zero.
            assert (step.waiting_share, step.meeting_s, step.turns_s, step.replicas_s) == (0, 0, 0, 0)
            assert (step.tokens, step.padding_share) == (128 * 8192, pytest.approx(0, abs=1e-12))


@pytest.mark.parametrize("s", LINES, ids=str)
def test_equal_documents_take_the_step_of_their_length(s: Strategy, tmp_path: Path) -> None:
    """Packed eight to a sequence they are the option document=1024; alone they are sequences of that length."""
    file = tmp_path / "lengths.txt"
    file.write_text("length\n1024\n")
    steps = _steps(s, f"{file}+packed")
    packed = steps.step("packed", False)
    assert packed.step_s == pytest.approx(steps.priced.seconds, rel=2e-3)  # between priced lengths
    assert (packed.padding_share, packed.documents) == (0.0, 8 * 128)
    length = int(steps.grid[9])
    file.write_text(f"{length}\n")
    steps = _steps(s, f"{file}+longest")
    cut = replace(s, layers=write_layers(steps.blocks)) if s.pp > 1 else s
    short = refine(_pricing("fsdp2" if s.zero == 3 else "megatron-core", seq=length), [cut])[0][0].seconds
    assert steps.step("longest", False).step_s == pytest.approx(short, rel=1e-9)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(LINES), st.floats(200, 4000), st.floats(0.1, 2), st.booleans(), st.integers(0, 9))
def test_parts_add_up(s: Strategy, mean: float, sigma: float, by_cost: bool, seed: int) -> None:
    line = f"lognormal:{mean:.0f},{sigma:.2f}+packed"
    steps = UnevenSteps(_pricing("fsdp2" if s.zero == 3 else "megatron-core"), s, parse_lengths(line), seed)
    step = steps.step("packed", by_cost)
    assert step.even_s + step.meeting_s + step.turns_s + step.replicas_s == pytest.approx(step.step_s, rel=1e-9)
    assert step.replicas_s >= 0
    assert step.meeting_s >= -1e-9 * step.step_s
    assert step.tokens_per_s > steps.step("padded", False).tokens_per_s  # though its attention is more kernels
    assert step.attention_ratio >= 1


@pytest.mark.parametrize("s", [LINES[0], LINES[4]], ids=str)
def test_dealing_by_cost_helps(s: Strategy) -> None:
    """The more so where ranks meet in every micro-batch."""
    steps = _steps(s, "lognormal:1000,1.3+packed")
    before, after = steps.step("packed", False), steps.step("packed", True)
    assert after.waiting_share < 0.5 * before.waiting_share
    assert before.waiting_share > 0.02


@pytest.mark.parametrize(("seq", "published"), [(2048, 0.9930), (8192, 0.9970), (32768, 0.9997)])
@pytest.mark.parametrize(("mean", "sigma"), [(400, 0.9), (600, 1.0), (800, 1.1)])
def test_packing_fills_as_many_slots_as_published(seq: int, published: float, mean: float, sigma: float) -> None:
    """Tulu 3 SFT, packed offline (NVIDIA-NeMo/Megatron-Bridge examples/model_verification_cards/qwen3-8b and
    moonlight-16b-a3b, card.yaml, 067f987d): within a point, whatever lengths of chats are assumed."""
    lengths = np.minimum(parse_lengths(f"lognormal:{mean},{sigma}").draw(np.random.default_rng(1), 20_000), seq)
    packed = first_fit(lengths, seq)
    assert lengths.sum() / (seq * (int(packed.max()) + 1)) == pytest.approx(published, abs=0.01)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200))
def test_packing_is_first_fit(lengths: list[int]) -> None:
    place = first_fit(np.array(lengths), 100)
    free: list[int] = []
    for length, at in zip(lengths, place.tolist(), strict=True):
        first = next((i for i, room in enumerate(free) if room >= length), len(free))
        assert at == first
        if first == len(free):
            free.append(100)
        free[first] -= length


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 99))
def test_dealing_loses_no_micro_batch(ranks: int, turns: int, seed: int) -> None:
    costs = np.random.default_rng(seed).lognormal(size=(3, ranks * turns))
    for by_cost in (False, True):
        dealt = deal(costs, ranks, by_cost)
        assert dealt.shape == (3, turns, ranks)
        np.testing.assert_array_equal(np.sort(dealt.reshape(3, -1)), np.tile(np.arange(ranks * turns), (3, 1)))
    groups = np.take_along_axis(costs, deal(costs, ranks, True).reshape(3, -1), axis=1).reshape(3, turns, ranks)
    assert (groups.min(axis=2)[:, :-1] >= groups.max(axis=2)[:, 1:]).all()


@given(st.integers(0, 99), st.sampled_from((1, 2, 8, 12)), st.integers(1, 30))
def test_groups_of_ranks_lose_no_document_and_end_near_each_other(seed: int, ranks: int, count: int) -> None:
    random = np.random.default_rng(seed)
    widths = np.array([w for w in (1, 2, 4) if ranks % w == 0 and w < ranks] + [ranks])
    costs = random.lognormal(size=(count, 1)) / widths**0.9  # wider is faster, and dearer in all
    least = random.integers(len(widths), size=count)
    load, taken, begins = spread(costs, widths, least, ranks)
    work = costs[np.arange(count), taken]
    assert (taken >= least).all()
    assert (begins % widths[taken] == 0).all()
    shares = [work[(begins <= r) & (r < begins + widths[taken])].sum() for r in range(ranks)]
    assert load.max() >= max(shares) - 1e-9
    assert (load >= np.array(shares) - 1e-9).all()  # seconds of a rank are its documents' and its waits
    assert load.sum() >= (work * widths[taken]).sum() - 1e-9  # waits of a group's ranks for each other are in it
    assert load.max() <= (work * widths[taken]).sum() + 1e-9
    for i in np.flatnonzero(taken > least):  # widened only where one alone was longer than all shared equally
        assert costs[i, taken[i] - 1] > (costs[np.arange(count), least] * widths[least]).sum() / ranks
    if set(taken.tolist()) == {0} and widths[0] == 1:
        assert load.max() - load.min() <= work.max() + 1e-9


@pytest.mark.parametrize("s", [Strategy(dp=4, cp=4, zero=1), Strategy(dp=16), Strategy(cp=16, zero=1)], ids=str)
def test_documents_as_long_as_a_sequence_take_groups_as_wide_as_cp(s: Strategy) -> None:
    """And the step of full sequences; shorter ones that a rank holds send nothing."""
    step = _steps(s, "dynamic:8k" if s.cp == 1 else f"dynamic:{8192 // s.cp}").step("dynamic", False)
    assert step.step_s == pytest.approx(_steps(s, "packed:8k").priced.seconds, rel=1e-6)
    assert step.attention_ratio == pytest.approx(1)
    short = _steps(s, "lognormal:300,0.2+dynamic:512").step("dynamic", False)
    assert short.tokens == pytest.approx(128 * 8192, rel=0.05)
    alone = _steps(replace(s, dp=s.dp * s.cp, cp=1), "lognormal:300,0.2+dynamic:512").step("dynamic", False)
    assert short.step_s - short.other_s == pytest.approx(alone.step_s - alone.other_s, rel=0.02)


@pytest.mark.parametrize(
    ("strategy", "stack", "line", "said"),
    [
        ("tp=2,pp=2,zero=1", "megatron-core", "dynamic", "does not go with a pipeline"),
        ("zero=1,micro_batch=2", "megatron-core", "dynamic", "use micro_batch=1"),
        ("zero=3", "fsdp2", "dynamic", "is not in PyTorch"),
        ("zero=1", "megatron-core", "dynamic:64", "tokens a rank on 16 ranks do not hold 8,192; allow 512"),
        ("zero=1", "megatron-core", "dynamic+balanced", "share documents by cost anyway"),
    ],
)
def test_what_cannot_vary_its_groups_says_so(tmp_path: Path, strategy: str, stack: str, line: str, said: str) -> None:
    words = ("predict", *WORDS.split(), strategy, "--stack", stack, "--lengths", f"lognormal:1000,1+{line}")
    assert said in error_of(tmp_path, *words)


@pytest.mark.parametrize(
    ("line", "groups"),
    [
        *(({"dp": 16, "zero": zero}, zero < 2) for zero in range(4)),
        ({"dp": 4, "cp": 4, "zero": 1}, True),
        ({"dp": 16, "zero": 1, "shard": 4}, True),
        ({"dp": 16, "zero": 1, "ep": 4}, False),
        ({"dp": 8, "pp": 2, "zero": 1}, False),
        ({"dp": 8, "tp": 2, "micro_batch": 2}, False),
        ({"tp": 16, "sp": True}, False),
    ],
    ids=str,
)
def test_a_search_offers_what_can_form_groups_and_nothing_else(line: dict[str, Any], groups: bool) -> None:
    """The conditions of a search and the refusals of one strategy are one rule."""
    s = Strategy(**line)
    model, _ = model_named("mixtral-8x7b" if s.ep > 1 else "llama3.1-8b")
    pricing = pricing_by_gpus(model, cluster_named("dgx-h100"), 32, 8192, "megatron-core")(16)
    offered = where.holds(conditions(CONDITIONS)[0], of_strategy(s, StackOptions()))
    assert (bool(offered), UnevenSteps(pricing, s, parse_lengths("packed:8k")).alone is None) == (groups, groups)


def test_a_plan_with_groups_by_document_is_exported_with_its_flags(tmp_path: Path) -> None:
    words = "plan --model llama3.1-8b --cluster dgx-h100 --gpus 16 --batch 32 --seq 32768 --lengths"
    code, _, err = phalanx(tmp_path, *words.split(), "lognormal:3000,1.5+dynamic")
    assert code == 0, err
    assert phalanx(tmp_path, "export", "plan.json", "--to", "megatron", "--out", "out")[0] == 0
    script = (tmp_path / "out" / "train.sh").read_text()
    s = json.loads((tmp_path / "plan.json").read_text())["strategy"]
    assert (s.get("pp", 1), s.get("ep", 1)) == (1, 1)
    assert f"--max-seqlen-per-dp-cp-rank {32768 // s.get('cp', 1)}" in script
    for flag in ("--hybrid-context-parallel", "--calculate-per-token-loss", "--dataloader-type single", "--sft"):
        assert flag in script
    said = error_of(tmp_path, "export", "plan.json", "--to", "bridge", "--out", "other")
    assert "has no context parallelism of changing width" in said
    assert "a search chooses" in error_of(tmp_path, *words.split(), "lognormal:3000,1.5+dynamic:8k")


@given(st.integers(0, 99))
def test_a_pipeline_of_unequal_micro_batches_is_run_action_by_action(seed: int) -> None:
    random = np.random.default_rng(seed)
    actions = rounds("1f1b", 4, 6, None)
    seconds, weights = random.random((16, 3)), random.random((2, 6, 3))
    for weight, end in zip(weights, actions.uneven_makespans(seconds, weights), strict=True):
        assert end == pytest.approx(_one_by_one(seconds.reshape(4, 4, 3), weight))


def _one_by_one(seconds: np.ndarray, weights: np.ndarray) -> float:  # type: ignore[type-arg]
    from phalanx.schedule.pipeline.schedules import build

    s = build("1f1b", 4, 6)
    free, done = [0.0] * 4, {}
    left = [list(actions) for actions in s.actions]
    while any(left):
        for rank in range(4):
            while left[rank]:
                a = left[rank][0]
                needs = (a.kind, a.chunk + (-1 if a.kind == "F" else 1), a.micro_batch)
                if 0 <= needs[1] < 4 and needs not in done:
                    break
                start = max(free[rank], done.get(needs, 0.0))
                took = float(seconds["FIWB".index(a.kind), a.chunk] @ weights[a.micro_batch])
                free[rank] = done[a.kind, a.chunk, a.micro_batch] = start + took
                left[rank].pop(0)
    return max(free)


def test_predict_and_simulate_say_the_same(tmp_path: Path) -> None:
    line = "lognormal:1000,1.2+packed+balanced"
    code, out, err = phalanx(tmp_path, "predict", *WORDS.split(), "tp=2,zero=1", "--lengths", line, "--json")
    assert code == 0, err
    p = json.loads(out)
    asked = p["lengths"]["asked"]
    assert p["step_time_s"] == pytest.approx(sum(p["terms_s"].values()))
    assert p["step_time_s"] == asked["step_s"]
    assert p["tokens_per_s"] == pytest.approx(asked["tokens"] / asked["step_s"])
    ways = {way["way"]: way["tokens_per_s"] for way in p["lengths"]["ways"]}
    assert ways["padded"] < ways["longest"] < ways["packed"] < ways["packed, balanced"]
    run = json.loads(phalanx(tmp_path, "simulate", *WORDS.split(), "tp=2,zero=1", "--lengths", line, "--json")[1])
    assert run["step_time_s"] == pytest.approx(p["step_time_s"], rel=0.02)
    assert sum(w["gpu_s"] for w in run["waits"]) == pytest.approx(run["lost_gpu_s"], abs=1e-6)
    asked_of_us = {"model": "llama3.1-8b", "cluster": "dgx-h100", "gpus": 16, "batch": 128, "seq": 8192}
    own = simulate(**asked_of_us, strategy="tp=2,zero=1", lengths=line)
    assert own.step_time_s == pytest.approx(run["step_time_s"])
    with pytest.raises(InputError, match="seed = -1: must be from 0"):
        simulate(**asked_of_us, strategy="tp=2,zero=1", lengths=line, seed=-1)
    text = phalanx(tmp_path, "simulate", *WORDS.split(), "tp=2,zero=1", "--lengths", line)[1]
    assert "every micro-batch takes as long as the mean one" in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("packed", "names no documents"),
        ("packed:4k", "packs into other sequences than 8,192 tokens; ask for seq 4096"),
        ("lognormal:5", "is no mean and sigma"),
        ("lognormal:500,9", "sigma up to 5"),
        ("nowhere.txt+packed", "no such file"),
        ("lognormal:500,1+pakced", "did you mean packed"),
        ("lognormal:500,1+balanced", "cost alike"),
        ("bad.txt", "is no number of tokens, in line 3"),
        ("none.txt", "must list 1 to"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "bad.txt").write_text("length\n5\nsix\n")
    (tmp_path / "none.txt").write_text("length\n0\n")
    for command in ("predict", "simulate"):
        assert said in error_of(tmp_path, command, *WORDS.split(), "tp=2,zero=1", "--lengths", line)


def test_lengths_and_slow_ranks_are_asked_alone(tmp_path: Path) -> None:
    words = ("simulate", *WORDS.split(), "tp=2,zero=1", "--lengths", "packed:8k", "--slow", "rank=1:2")
    assert "is simulated alone" in error_of(tmp_path, *words)


def test_a_search_weighs_by_tokens_that_are_trained(tmp_path: Path) -> None:
    words = "plan --model llama3.1-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 32768 --tokens 1T --json"
    code, out, err = phalanx(tmp_path, *words.split(), "--lengths", "lognormal:3000,1.5+packed")
    assert code == 0, err
    plan = json.loads(out)
    best = plan["best"]
    rates = [p["lengths"]["tokens_per_s"] for p in (best, *plan["alternatives"]) if p["lengths"]]
    assert best["lengths"]["tokens_per_s"] >= 0.999 * max(rates)
    assert plan["options"]["document"] > 3000
    days = 1e12 / best["lengths"]["tokens_per_s"] / 86_400
    assert best["training"]["days"] == pytest.approx(days, rel=1e-9)
    text = phalanx(tmp_path, *words.removesuffix(" --json").split(), "--lengths", "lognormal:3000,1.5+packed")[1]
    assert "waiting for longer sequences" in text
    assert "is no mean and sigma" in error_of(tmp_path, *words.split(), "--lengths", "lognormal:x")


def test_sequences_of_a_few_tokens_have_one_priced_length() -> None:
    with warnings.catch_warnings(action="error"):
        steps = _steps(LINES[0], "lognormal:10,1+packed", seq=16)
        found = [steps.step(way, by_cost) for way, by_cost in steps.ways]
    assert all(np.isfinite((step.step_s, step.tokens_per_s)).all() for step in found)


@pytest.mark.parametrize(
    ("rows", "known"),
    [
        ("100000000\n5", (100_000_000, 5)),
        ("length\n7", (7,)),
        ("100000001\n5", None),
        ("5\n9999999999", None),
        ("5\n0", None),
        ("5\nfive", None),
        ("length", None),
    ],
)
def test_no_length_of_a_file_is_left_out(tmp_path: Path, rows: str, known: tuple[int, ...] | None) -> None:
    (tmp_path / "lengths.txt").write_text(rows)
    if known is None:
        with pytest.raises(InputError, match=r"is no number of tokens|must list 1 to"):
            _in_file(tmp_path / "lengths.txt")
    else:
        assert _in_file(tmp_path / "lengths.txt") == known
