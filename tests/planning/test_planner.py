"""`phalanx plan --model`: what is said of the best strategy and of the others, and what is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.in_process_cli import error_of, phalanx

from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search import priced, refine, space
from phalanx.planning.search.neighbours import neighbours
from phalanx.planning.search.planner import answer
from phalanx.planning.search.priced import price
from phalanx.planning.search.stack_options import runnable_strategies
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.files import plan as plans
from phalanx.spec.strategy.spec import Strategy, parse

_GPT3 = ("--model", "gpt3-175b", "--cluster", "dgx-a100", "--gpus", "1024", "--batch", "1536", "--seq", "2048")
_LLAMA = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "8192")


def _ask(model: str, cluster: str, gpus: int, batch: int, seq: int, **more):
    return answer(
        pricing_by_gpus(model_named(model)[0], cluster_named(cluster), batch, seq, "megatron-core"), gpus, **more
    )


@pytest.fixture(scope="module")
def gpt3() -> tuple[dict, Path, str]:
    import tempfile

    folder = Path(tempfile.mkdtemp())
    code, out, err = phalanx(folder, "plan", *_GPT3, "--tokens", "300B", "--price", "2", "--json")
    assert code == 0, err
    return json.loads(out), folder, err


def test_the_answer_has_the_stated_keys(gpt3):
    found, _, _ = gpt3
    assert found["strategies_evaluated"] > 1e7
    assert found["search_s"] > 0
    assert {"strategy", "step_time_s"} <= set(found["best"])
    assert len(found["alternatives"]) == 9
    assert all(a["step_time_s"] >= found["best"]["step_time_s"] for a in found["alternatives"])
    assert found["rejected"]


def test_the_best_is_legal_fits_and_is_no_wonder(gpt3):
    found, folder, _ = gpt3
    plan = plans.read(folder / "plan.json")
    assert str(plan.strategy) == found["best"]["strategy"]
    check(plan.strategy, plan.model, plan.job, 1024)
    assert found["best"]["memory_bytes"] <= found["best"]["usable_bytes"]
    assert 0.3 < found["best"]["mfu"] < 0.7
    assert plan.strategy.tp <= 8  # in the node


def test_figures_of_a_strategy_follow_from_its_terms(gpt3):
    for row in (gpt3[0]["best"], *gpt3[0]["alternatives"]):
        seconds, terms = row["step_time_s"], row["terms_s"]
        assert sum(terms.values()) == pytest.approx(seconds)
        assert sum(row["memory_terms"].values()) <= row["memory_bytes"] <= row["usable_bytes"]
        assert row["bubble_share"] == pytest.approx(terms["bubble"] / seconds)
        sent = sum(terms[axis] for axis in ("tp", "cp", "ep", "transfers", "dp"))
        assert row["communication_share"] == pytest.approx(sent / seconds)
        assert row["tokens_per_s"] == pytest.approx(1536 * 2048 / seconds)
        assert row["tokens_per_s_per_gpu"] * 1024 == pytest.approx(row["tokens_per_s"])
        assert row["step_time_low_s"] < seconds < row["step_time_high_s"]


def test_days_hours_and_money_follow_from_the_step(gpt3):
    best = gpt3[0]["best"]
    steps = 300e9 / (1536 * 2048)
    assert best["training"]["steps"] == pytest.approx(steps)
    assert best["training"]["days"] == pytest.approx(steps * best["step_time_s"] / 86400)
    assert best["training"]["gpu_hours"] == pytest.approx(24 * 1024 * best["training"]["days"])
    assert best["expense"]["money"] == pytest.approx(2 * best["training"]["gpu_hours"])


def test_front_is_a_front(gpt3):
    front = [(f["step_time_s"], f["memory_bytes"]) for f in gpt3[0]["front"]]
    assert len(front) > 2
    assert [m for _, m in front] == sorted((m for _, m in front), reverse=True)


def test_reasons_have_their_numbers(gpt3):
    """Each rejected strategy does not fit, or is slower, and says by how much of what."""
    found = gpt3[0]
    kinds = set()
    for r in found["rejected"]:
        kinds.add(r["fits"])
        if r["fits"]:
            assert r["step_time_s"] >= found["best"]["step_time_s"] * 0.999
            assert "%" in r["reason"]
        else:
            whole = found["best"]["usable_bytes"] / 2**30
            usable = f"{whole * (1 - found['headroom']):.1f} GiB ({whole:.1f} less 5%)"
            assert f"needs {r['memory_bytes'] / 2**30:.1f} of {usable}" in r["reason"]
    assert kinds == {True, False}


def test_of_each_family_of_which_nothing_fits_the_smallest_is_said():
    found = _ask("llama3-70b", "dgx-h100", 64, 512, 4096, fewer=False)
    smallest = {r.family: r.priced for r in found.rejected if r.family in ("DDP", "ZeRO", "HSDP")}
    assert list(smallest) == ["DDP", "ZeRO", "HSDP"]
    least = {
        s: price(found.pricing, [Strategy(**parse(f"dp=64,recompute=full{s}"))])[0].bytes_ for s in ("", ",zero=1")
    }
    assert smallest["DDP"].bytes_ == least[""] > least[",zero=1"] == smallest["ZeRO"].bytes_ > found.pricing.usable


def test_a_wide_tensor_group_is_said_to_leave_the_node():
    question = pricing_by_gpus(model_named("gpt3-175b")[0], cluster_named("dgx-a100"), 1536, 2048, "megatron-core")(
        1024
    )
    lines = [parse(f"dp={d},zero=1,tp={t},sp=1,pp=8") for d, t in ((16, 8), (8, 16))]
    eight, sixteen = price(question, [Strategy(**line | {"sp": True}) for line in lines])
    assert "tp=16 leaves the node" in priced.why_not(sixteen, eight, question)


def test_memory_as_objective_takes_less_of_it_and_at_most_ten_percent_more_time():
    fast, small = (_ask("llama3-8b", "dgx-h100", 16, 64, 8192, objective=o) for o in ("throughput", "memory"))
    assert small.ranked[0].priced.bytes_ < fast.ranked[0].priced.bytes_
    assert small.ranked[0].priced.seconds <= 1.1 * fast.ranked[0].priced.seconds * (1 + 1e-9)


def test_mesh_orders_that_cost_the_same_are_one_answer():
    answer = _ask("llama3-70b", "dgx-h100", 64, 512, 8192)
    seen = [(replace(r.strategy, order="pp/dp/cp/tp"), r.seconds, r.priced.bytes_) for r in answer.ranked]
    assert len(seen) == len(set(seen)) == 10


def test_no_strategy_of_an_answer_is_refused_with_the_options_that_others_are_faster_with():
    """Overlapped all-to-alls need virtual stages, which the fastest without them lacks."""
    found = _ask("deepseek-v3", "dgx-h800", 2048, 15360, 4096)
    assert found.pricing.extra.overlap_experts == "on"
    every = [r.strategy for r in (*found.ranked, *found.families, *found.front)]
    assert runnable_strategies(found.pricing, every) == every


def test_a_model_with_an_operator_that_a_stack_lacks_is_not_searched(tmp_path):
    words = (
        "--model qwen3-next-80b-a3b --cluster dgx-h100 --gpus 64 --batch 256 --seq 4096 --stack megatron-core-0.14"
    )
    said = error_of(tmp_path, "plan", *words.split())
    assert "model.pattern: has no gated delta net (megatron-core-0.14, megatron/core/" in said


@pytest.mark.parametrize("stack", ["deepspeed", "accelerate", "maxtext"])
@pytest.mark.parametrize("model", ["llama3-70b", "mixtral-8x7b"])
def test_what_is_planned_for_a_stack_is_exported_to_it(tmp_path, model, stack):
    """Degrees that a program's code sets stay 1, and are searched where a condition names them."""
    words = f"plan --model {model} --cluster dgx-h100 --gpus 128 --batch 256 --seq 4096 --stack {stack}"
    code, _, err = phalanx(tmp_path, *words.split())
    assert code == 0, err
    assert "export would not write it" not in err
    code, out, err = phalanx(tmp_path, "export", "plan.json", "--to", stack, "--out", "out")
    assert code == 0, err
    if stack == "deepspeed" and model == "mixtral-8x7b":
        code, out, err = phalanx(tmp_path, *words.split(), "--strategy", "ep=8")
        assert "strategy.ep = 8: is MoE(ep_size=...) in a program's code" in err
        assert "ep=8" in out


def test_a_stack_gets_the_schedules_that_it_has():
    """torchtitan has zb-v, Megatron the distributed optimizer and Ulysses; and neither what the other has."""
    question = model_named("llama3-8b")[0], cluster_named("dgx-h100"), 64, 8192
    titan, megatron = (pricing_by_gpus(*question, stack)(16) for stack in ("torchtitan-compiled", "megatron-core"))
    for pricing, line, other in (
        (titan, "dp=4,pp=4,schedule=zb-v", megatron),
        (megatron, "dp=16,zero=1", titan),
        (megatron, "dp=8,cp=2,ulysses=2", titan),
    ):
        s = Strategy(**parse(line))
        rows = space.all_strategies(pricing.model, pricing.job, 16, pricing.options)
        assert s in rows.take((rows.pp == s.pp) & (rows.cp == s.cp) & (rows.dp == s.dp)).strategies()
        assert not other.options.allows(s, s.accumulation(other.job))


def test_the_fewest_gpu_hours(tmp_path):
    words = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--batch", "64", "--seq", "4096", "--tokens", "1T")
    spent = {}
    for n in (32, 16, 8, 4):  # on 2 nothing fits
        found = json.loads(phalanx(tmp_path, "plan", *words, "--gpus", str(n), "--json")[1])
        spent[n] = found["best"]["training"]["gpu_hours"]
    out, err = phalanx(tmp_path, "plan", *words, "--gpus", "32", "--objective", "gpu-hours", "--json")[1:]
    found = json.loads(out)
    assert found["best"]["training"]["gpu_hours"] == pytest.approx(min(spent.values()), rel=0.01)
    assert f"{found['gpus']} GPUs take the fewest GPU-hours, of 32 and its halves" in err


def test_idle_gpus_are_said():
    """A tiny model on many GPUs waits for links; one that fills them does not."""
    found = _ask("gpt2-xl", "ethernet-h100", 32, 32, 1024)
    assert found.fewer is not None
    assert found.fewer.gpus < 32
    assert found.fewer.seconds <= found.best.seconds
    alone = _ask("gpt2-xl", "ethernet-h100", found.fewer.gpus, 32, 1024)
    assert alone.best.seconds <= found.fewer.seconds * (1 + 1e-9)
    assert _ask("llama3-8b", "dgx-h100", 16, 64, 8192).fewer is None


def test_nothing_that_is_shown_beats_the_best():
    """Few micro-batches on a stack with zero-bubble schedules: there the first pass errs most."""
    found = answer(pricing_by_gpus(model_named("llama3-8b")[0], cluster_named("dgx-a100"), 16, 512, "phalanx"), 16)
    best = found.best
    near = refine.refine(found.pricing, [s for _, s in neighbours(best.strategy, found.pricing)])
    assert len(near) > 10
    others = [*found.ranked, *found.families, *found.front]
    assert best.seconds == min([r.seconds for r in others] + [p.seconds for p, _ in near if p.fits])
    assert all(r.priced.fits for r in others)
    assert {r.family: r.seconds for r in found.families}[best.family] == best.seconds
    bytes_ = [r.priced.bytes_ for r in found.front]
    assert found.front[0] == best
    assert bytes_ == sorted(bytes_, reverse=True)
    # What takes the time sums to it, and `explain` says the same, of the best and of its neighbours.
    x = AnalyticSubject(lambda gpus: found.pricing, best.strategy, 16)
    assert x.seconds == best.seconds == pytest.approx(sum(best.priced.terms.values()), rel=1e-9)
    assert min(best.priced.terms.values()) >= 0
    assert {p.strategy: p.seconds for _, p in x.neighbours} == {p.strategy: p.seconds for p, _ in near}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--gpus": "8"}, "48 of them would do"),
        ({"--gpus": "1021"}, "no split of 1021 ranks divides global_batch = 1536 and the model's sizes"),
        ({"--model": "gpt4"}, "did you mean gpt2"),
        ({"--cluster": "dgx-a10"}, "did you mean dgx-a100"),
        ({"--seq": "4096"}, "longer than model.max_seq = 2048"),
        ({"--batch": "0"}, "--batch = 0"),
        ({"--tokens": "many"}, "write 300B"),
        ({"--objective": "speed"}, "known: carbon, days, energy, gpu-hours, memory, money, throughput"),
        ({"--out": "no/where.json"}, "make its folder first"),
        ({"--gpus": "9" * 10}, "is more than any cluster has; at most 10,000,000"),
        ({"--gpus": "9" * 21}, "is a number of more than 63 bits"),
        ({"--batch": "9" * 12}, "is more than any cluster has; at most 1,000,000,000"),
        ({"--cluster": "local"}, "plan a job on it with phalanx plan JOB.toml"),
        ({"--price": "-2", "--tokens": "300B"}, "--price = -2.0: must be a price"),
        ({"--price": "nan", "--tokens": "300B"}, "--price = nan: must be a price"),
        ({"--rates": "prise=2"}, "did you mean price"),
        ({"--objective": "days"}, "--tokens: is missing"),
        ({"--objective": "energy", "--tokens": "3B", "--cluster": "tpu-v5p"}, "watts: is missing: none is published"),
        ({"--stack": "megatron-cor"}, "did you mean"),
    ],
)
def test_bad_questions_get_one_line(tmp_path, changes, said):
    words = dict(zip(_GPT3[::2], _GPT3[1::2], strict=True)) | changes
    code, out, err = phalanx(tmp_path, "plan", *(word for pair in words.items() for word in pair))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


_CLUSTER = """
name = "ours"
ranks_per_node = 8
nodes = 2
kernels = []
[device]
name = "H100-SXM5-80GB"
kind = "cuda"
memory_bytes = 85000000000
usable_bytes = 83000000000
memory_bandwidth_bytes_per_s = 3.35e12
dense_flops_per_s = {{ bfloat16 = 989.4e12 }}
own_communication_engine = true
origin = "published"
source = "datasheet"
[[tiers]]
name = "nvlink"
ranks = 8
latency_s = 5e-6
bandwidth_bytes_per_s_per_gpu_per_direction = {inside}
origin = "published"
source = "datasheet"
[[tiers]]
name = "network"
ranks = 16
latency_s = 1.5e-5
bandwidth_bytes_per_s_per_gpu_per_direction = {outside}
origin = "published"
source = "datasheet"
"""


@pytest.mark.parametrize(
    ("inside", "outside", "said"),
    [
        ("450e9", "50e9", ""),
        ("900e9", "50e9", "does it count both directions? halve it"),
        ("450e9", "400e9", "is it in bits? divide by 8"),
        ("450e9", "0.0", "must be at least 1"),
    ],
)
def test_links_that_no_device_has_are_refused(tmp_path, inside, outside, said):
    (tmp_path / "ours.toml").write_text(_CLUSTER.format(inside=inside, outside=outside))
    words = dict(zip(_LLAMA[::2], _LLAMA[1::2], strict=True)) | {"--cluster": "ours.toml"}
    code, _, err = phalanx(tmp_path, "plan", *(word for pair in words.items() for word in pair), "--json")
    assert (code, said in err) == (2 if said else 0, True), err
