"""A search under a stack: nothing that the stack refuses, conditions kept, options never free, plans read again."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.cli.app import app
from phalanx.frameworks.registry import DOCUMENTED, facts
from phalanx.frameworks.stack import of_strategy
from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search import planner, space, variations
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import conditions
from phalanx.planning.search.planner import answer, best_on
from phalanx.planning.search.priced import price
from phalanx.planning.search.refine import refine
from phalanx.planning.search.strategy_columns import ORDERS, Options
from phalanx.planning.search.variations import compare, condition_costs
from phalanx.report.predict import heading
from phalanx.schedule.pipeline.given_layout import given_blocks
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Train
from phalanx.spec.strategy import where
from phalanx.spec.strategy.spec import Strategy, parse
from phalanx.spec.strategy.stack_options import StackOptions
from tests.support.sizes import examples


def pricing(stack: str, model: str = "llama3-8b", gpus: int = 16, line: str = "") -> Pricing:
    found = pricing_by_gpus(model_named(model)[0], cluster_named("dgx-h100"), 64, 4096, stack)(gpus)
    wanted, options = conditions(line) if line else ((), StackOptions())
    return replace(found, wanted=wanted, extra=options)


@pytest.mark.parametrize("stack", DOCUMENTED)
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
@examples(60, 2000)
def test_nothing_is_offered_that_the_stack_refuses(stack: str, model: str, examples: int) -> None:
    p = pricing(stack, model)
    rows = space.all_strategies(p.model, p.job, 16, p.options)
    chosen = np.random.default_rng(7).integers(0, len(rows), examples)
    for s in rows.take(chosen).strategies():
        about = facts(p.model, p.job, s)
        assert DOCUMENTED[stack].refusal(s, p.extra, about) is None, s
        assert p.options.allows(s, s.accumulation(p.job))


@pytest.mark.parametrize("stack", ["megatron-core", "deepspeed", "torchtitan", "maxtext"])
def test_what_is_left_out_is_refused(stack: str) -> None:
    """Of the strategies of any stack, the search under one has exactly those that it does not refuse."""
    p, free = pricing(stack, gpus=8), replace(pricing(stack, gpus=8), free=True, stack="any")
    kinds = p.options.recompute
    options = Options(recompute=kinds, orders=p.options.orders)
    everything = space.all_strategies(free.model, free.job, 8, options)
    offered = set(space.all_strategies(p.model, p.job, 8, p.options).strategies())
    for i in np.random.default_rng(3).integers(0, len(everything), 400):
        s = everything.strategy(int(i))
        refused = DOCUMENTED[stack].refusal(s, None, facts(p.model, p.job, s)) is not None
        assert refused == (s not in offered), s


@pytest.mark.parametrize(
    "line",
    [
        "tp<=2, zero=1",
        "virtual=1, schedule in (1f1b, interleaved)",
        "tp*cp = 4 and pp>1",
        "recompute=block:*, dp%2=0",
        "chunks in (2, 8), virtual>1, tp_cp=2, replicas<8",
    ],
)
def test_conditions_hold_of_all_that_is_found(line: str) -> None:
    p = pricing("megatron-core", line=line)
    rows = space.all_strategies(p.model, p.job, 16, p.options)
    counted = space.size(space.cores(p.model, p.job, 16, p.options), p.model, p.job, p.options).sum()
    assert 0 < len(rows) <= counted
    for s in rows.take(np.random.default_rng(1).integers(0, len(rows), 40)).strategies():
        assert bool(where.holds(p.wanted, of_strategy(s, p.extra))), s
    found = answer(lambda gpus: pricing("megatron-core", gpus=gpus, line=line), 16)
    for r in found.ranked:
        assert bool(where.holds(p.wanted, of_strategy(r.strategy, p.extra)))


def test_a_condition_costs_what_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variations, "_PATIENCE_S", float("inf"))
    line = "tp=8, pp=2"
    found = best_on(pricing("megatron-core", line=line), 16)
    assert found is not None
    whole, each = condition_costs(lambda gpus: pricing("megatron-core", gpus=gpus, line=line), 16, found.seconds)
    free = best_on(pricing("megatron-core"), 16)
    assert free is not None
    assert whole.share == pytest.approx(found.seconds / free.seconds - 1)
    assert whole.share > 0
    assert [c.text for c in each] == ["tp=8", "pp=2"]
    assert all(c.share is not None and 0 <= c.share <= whole.share + 1e-9 for c in each)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("zero=3", "does not have it (megatron/training/arguments.py:2997); use zero=0 or zero=1"),
        ("tp>64", "has no such strategy over 16 ranks: for this model and batch, tp is one of 1, 2, 4, 8, 16; use"),
        ("tp=3", "has no such strategy over 16 ranks: for this model and batch, tp is one of 1, 2, 4, 8, 16; use"),
        ("tp=8, pp=8", "has no such strategy over 16 ranks with all of these; loosen a condition"),
    ],
)
def test_what_the_stack_has_not_is_said(line: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        answer(lambda gpus: pricing("megatron-core", gpus=gpus, line=line), 16)
    assert message in str(caught.value)


def test_fields_that_are_not_searched_are_refused() -> None:
    with pytest.raises(InputError, match="is not searched"):
        conditions("prefetch=1")
    with pytest.raises(InputError, match="an option is set, not searched"):
        conditions("mtp in (1, 2)")
    assert conditions("tp<=8, master=float16")[1] == StackOptions(master="float16")


DENSE = "dp=2,zero=1,tp=4,sp=1,cp=2,pp=4"
MOE = "dp=8,zero=1,tp=2,sp=1,ep=8,pp=4"


def _priced(line: str, model: str, **options: object) -> tuple[float, float]:
    p = pricing_by_gpus(model_named(model)[0], cluster_named("dgx-h100"), 128, 8192, "megatron-core")(64)
    found = price(replace(p, extra=StackOptions(**options)), [Strategy(**parse(line))])[0]  # type: ignore[arg-type]
    return found.seconds, found.bytes_


# What each option saves, "time" or "memory", and what it must not save as well. Narrow types and shorter attention
# save both: precision and context are what they cost.
@pytest.mark.parametrize(
    ("options", "saves", "never"),
    [
        ({"first_moment": "bfloat16"}, "memory", ""),
        ({"second_moment": "float8"}, "memory", ""),
        ({"master": "float16"}, "memory", ""),
        ({"gradients": "bfloat16"}, "memory", ""),
        ({"optimizer_offload": 0.5}, "memory", "time"),
        ({"optimizer_offload": 1.0}, "memory", "time"),
        ({"activation_offload": 4}, "memory", "time"),
        ({"optimizer": "muon"}, "memory", "time"),
        ({"context": "all_gather"}, "time", "memory"),
        ({"reduce": "bfloat16"}, "time", "memory"),
        ({"products": "float8"}, "time", ""),
        ({"document": 512}, "time", "memory"),
        ({"lora": 16}, "memory", ""),
        ({"cross_entropy": "fused"}, "time", ""),
        ({"mtp": 1}, "", "time"),
        ({"tp_overlap": "none"}, "", "time"),
    ],
)
def test_no_option_is_free(options: dict[str, object], saves: str, never: str) -> None:
    plain, with_it = _priced(DENSE, "llama3-70b"), _priced(DENSE, "llama3-70b", **options)
    gains = {"time": with_it[0] < plain[0] * (1 - 1e-12), "memory": with_it[1] < plain[1] * (1 - 1e-12)}
    assert not saves or gains[saves]
    assert not never or not gains[never]
    assert with_it != plain


@pytest.mark.parametrize(
    ("options", "saves", "never"),
    [
        ({"dispatch": "deepep"}, "time", "memory"),
        ({"dispatch": "all_gather"}, "", "time"),
        ({"overlap_experts": "on"}, "time", "memory"),
    ],
)
def test_no_option_of_experts_is_free(options: dict[str, object], saves: str, never: str) -> None:
    plain, with_it = _priced(MOE, "mixtral-8x7b"), _priced(MOE, "mixtral-8x7b", **options)
    gains = {"time": with_it[0] < plain[0], "memory": with_it[1] < plain[1]}
    assert not saves or gains[saves]
    assert not never or not gains[never]


@examples(20, 400)
def test_recomputation_never_saves_both(examples: int) -> None:
    """More of it is slower and keeps less, whatever the strategy."""
    p = pricing("megatron-core", "deepseek-v3", 256)
    options = Options(recompute=("none",), orders=ORDERS[:1], schedules=("1f1b", "interleaved"))
    cores = space.cores(p.model, p.job, 256, options)
    some = cores.take(np.random.default_rng(5).integers(0, len(cores), examples))
    rows = space.pipelines(some, p.model, p.job, options)
    for s in rows.take(np.arange(0, len(rows), max(len(rows) // examples, 1))).strategies():
        kinds = (
            "none",
            "selective:layernorm",
            "selective:layernorm+mla_up_proj",
            "selective:layernorm+mla_up_proj+moe",
        )
        found = price(p, [replace(s, recompute=kind) for kind in kinds])
        assert all(a.seconds <= b.seconds * (1 + 1e-12) for a, b in pairwise(found)), s
        counts = ("none", "block:1", "block:2", "full")
        found = price(p, [replace(s, recompute=kind) for kind in counts])
        assert all(a.seconds <= b.seconds * (1 + 1e-12) for a, b in pairwise(found)), s


@examples(1, 60)
def test_a_family_far_behind_by_the_formulas_is_not_the_best(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--stack all` and fewer GPUs follow families within a quarter of the fastest: all of them lead to no better. In
    the first two questions the fastest family alone is not enough."""
    asked = [
        ("torchtitan", "llama3-8b", "ethernet-a100", 8, 256, 1024),
        ("megatron-fsdp", "qwen3-30b-a3b", "ethernet-a100", 64, 256, 2048),
    ]
    draw = np.random.default_rng(11)
    for _ in range(examples):
        stack = str(draw.choice(["megatron-core", "megatron-bridge", "torchtitan", "deepspeed", "phalanx"]))
        model = str(draw.choice(["llama3-8b", "llama3-70b", "mixtral-8x7b"]))
        asked.append((stack, model, "dgx-h100", int(draw.choice([16, 32, 64])), 64, 4096))
    for question in asked:
        stack, model, cluster, gpus, batch, seq = question
        p = pricing_by_gpus(model_named(model)[0], cluster_named(cluster), batch, seq, stack)(gpus)
        close = best_on(p, gpus)
        with monkeypatch.context() as patch:
            patch.setattr(planner, "_CLOSE", np.inf)
            every = best_on(p, gpus)
        assert (close is None) == (every is None), question
        if close and every:
            assert close.seconds <= every.seconds * (1 + 1e-9), (question, close.strategy, every.strategy)


def test_shorter_ends_keep_less_on_the_first_rank() -> None:
    even = _priced(DENSE, "llama3-70b")
    ends = _priced(DENSE, "llama3-70b", first_stage_layers=19, last_stage_layers=19)
    assert ends[1] < even[1]
    p = pricing("megatron-core", "llama3-70b", 64)
    p = replace(p, extra=StackOptions(first_stage_layers=40, last_stage_layers=40))
    with pytest.raises(InputError, match="leaves 0 of 80 blocks for 2 other ranks"):
        refine(p, [Strategy(**parse(DENSE))])


def test_chunks_without_blocks_are_not_searched() -> None:
    """34 layers, the ends counted; and Megatron-Core has them in equal chunks alone."""
    line = "pp in (2, 8), loss_as_layer=1, embedding_as_layer=1"
    p = pricing("torchtitan", line=line)
    assert 0 not in np.concatenate([_middle(s, p) for s in _some(p)])
    p = pricing("megatron-core", line=line)
    assert {(s.pp, s.virtual) for s in _some(p)} == {(2, 1), (2, 17)}
    answer(lambda gpus: pricing("megatron-core", gpus=gpus, line=line), 16)


def _some(p: Pricing) -> list[Strategy]:
    rows = space.all_strategies(p.model, p.job, 16, replace(p.options, recompute=("none",)))
    return rows.take(np.arange(0, len(rows), max(len(rows) // 300, 1))).strategies()


def _middle(s: Strategy, p: Pricing) -> tuple[int, ...]:
    return (given_blocks(s, p.extra, p.model.layers) or (1, 1, 1))[1:-1]


@pytest.mark.parametrize(
    ("question", "gib"),
    [
        (  # Grattafiori et al. 2024, table 4: 16,384 H100, no recomputation, FSDP that shards gradients
            "--model llama3-405b --cluster dgx-h100 --gpus 16384 --batch 2048 --seq 8192 --stack megatron-fsdp"
            " --strategy tp=8,sp=1,pp=16,virtual=8,schedule=interleaved,zero=2"
            " --options embedding_as_layer=1,loss_as_layer=1",
            74.2,
        ),
        (  # DeepSeek-V3 2024, sections 3.2 and 3.3: norms and up-projections recomputed, moments in bf16, FP8
            "--model deepseek-v3 --cluster dgx-h800 --gpus 2048 --batch 15360 --seq 4096 --stack megatron-bridge"
            " --strategy zero=1,ep=64,pp=16,recompute=selective:layernorm+mla_up_proj+moe_act --options products="
            "float8-block,first_moment=bfloat16,second_moment=bfloat16,mtp=1,dispatch=deepep",
            69.9,
        ),
    ],
    ids=["llama3-405b", "deepseek-v3"],
)
def test_a_published_recipe_fits(question: str, gib: float) -> None:
    done = CliRunner().invoke(app, ["predict", *question.split(), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert not answer["question"]["refused"]
    assert answer["memory_bytes"] / GIB == pytest.approx(gib, abs=0.05)
    assert answer["fits"]


def test_options_of_one_strategy() -> None:
    """`--options` of predict, explain and lint; mistakes are one line."""
    question = "--model llama3-8b --cluster dgx-h100 --gpus 16 --batch 32 --seq 8192 --strategy zero=1,tp=4"
    bytes_ = []
    for line in ("", "first_moment=bfloat16,second_moment=bfloat16"):
        done = CliRunner().invoke(app, ["predict", *question.split(), "--options", line, "--json"])
        bytes_.append(json.loads(done.stdout)["memory_terms"]["state"])
    assert bytes_[0] - bytes_[1] == pytest.approx(4 * 8.03e9 / 16, rel=0.01)  # 2 bytes less of each moment
    for command in ("predict", "explain", "lint"):
        for line, said in (
            ("mster=float16", "did you mean master"),
            (
                "lora=8",
                "does not have it; use the stack megatron-bridge or torchtitan or deepspeed or accelerate",
            ),
            ("lora=8,base=nf4", "use the stack deepspeed or accelerate"),
            ("base=nf4,first_stage_layers=2", "does not have it; use first_stage_layers"),
            ("tp", "="),
        ):
            done = CliRunner().invoke(app, [command, *question.split(), "--options", line])
            assert done.exit_code == 2, done.output
            assert said in done.stderr
            assert len(done.stderr.strip().splitlines()) == 1


def test_options_are_in_the_plan_and_old_plans_are_read(tmp_path: Path) -> None:
    p = pricing("megatron-core", line="first_moment=bfloat16, optimizer_offload=0.5, loss_as_layer=1")
    choices = {"cluster": {"preset": "dgx-h100", "nodes": 2}, "stack": "megatron-core", "tokens": ""}
    choices |= {"transport": "auto", "peak_flops_per_s": 989e12}
    prediction = {"step_time_s": 1.0, "memory_bytes": 1}
    plan = Plan(p.model, p.cluster, p.job, Strategy(dp=16), Train(), choices, prediction, p.extra)
    plans.write(plan, tmp_path / "plan.json")
    assert plans.read(tmp_path / "plan.json").options == p.extra
    plain = plans.to_dict(replace(plan, options=StackOptions()))
    assert "options" not in plain
    assert plans.from_dict(plain, "plan.json").options == StackOptions()
    with pytest.raises(InputError, match="no such field"):
        plans.from_dict(plain | {"options": {"mastr": "float16"}}, "plan.json")


def test_stacks_side_by_side_are_what_each_finds_alone() -> None:
    asked = pricing("megatron-core", line="tp<=2, zero<=1, pp<=2")
    found = {f.name: f for f in compare(lambda name: replace(asked, stack=name), 16)}
    assert set(found) == set(DOCUMENTED)
    for name in ("megatron-core", "megatron-core-0.14", "megatron-bridge", "fsdp2"):
        alone = best_on(replace(asked, stack=name), 16)
        assert alone is not None
        assert (found[name].best, found[name].seconds, found[name].mfu) == (alone.priced, alone.seconds, alone.mfu)


@pytest.mark.parametrize(("strategy", "says"), [("zero=3,tp=2", "strategy.zero = 3"), ("zero=1,tp=2", "")])
def test_a_price_says_where_the_stack_does_not_run_the_strategy(strategy: str, says: str) -> None:
    asked = Query(None, "llama3-8b", "dgx-h100", 16, 64, 4096, strategy, "megatron-core")
    question = read(asked)
    assert question.refused.startswith(says)
    assert bool(question.refused) == bool(says) == ("does not run it" in heading(question.premises))


def test_a_release_that_refuses_more_searches_for_itself() -> None:
    """Megatron-Core 0.14 needs a key head for each tensor-parallel rank; 0.19 does not. Qwen3 30B has four."""
    wanted, _ = conditions("tp>=8")
    base = pricing_by_gpus(model_named("qwen3-30b-a3b")[0], cluster_named("dgx-h100"), 64, 4096, "megatron-core")(16)
    answers = {a.name: a for a in compare(lambda name: replace(base, stack=name, wanted=wanted), 16)}
    assert answers["megatron-core"].best is not None
    assert answers["megatron-core-0.14"].best is None
    assert answers["megatron-core-0.14"].reason == "nothing that it runs fits"


@pytest.mark.parametrize(
    "stack", ["megatron-core", "megatron-core-0.14", "megatron-bridge", "torchtitan", "nanotron"]
)
def test_a_plan_is_exported_or_says_why_not(stack: str, tmp_path: Path) -> None:
    """The search sets no option that stands in a program's code."""
    out = tmp_path / "plan.json"
    question = f"--model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 8192 --stack {stack} --out {out}"
    done = CliRunner().invoke(app, ["plan", *question.split()])
    assert done.exit_code == 0, done.output
    assert "would not write it" not in done.stderr
    to = {"megatron-core-0.14": "megatron", "megatron-core": "megatron", "megatron-bridge": "bridge"}.get(
        stack, stack
    )
    assert CliRunner().invoke(app, ["export", str(out), "--to", to, "--out", str(tmp_path / to)]).exit_code == 0


def test_a_plan_that_no_configuration_holds_says_so(tmp_path: Path) -> None:
    """DeepSpeed's pipeline stages stand in the model's code."""
    question = (
        "--model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 8192 --stack deepspeed --strategy pp=2"
    )
    done = CliRunner().invoke(app, ["plan", *question.split(), "--out", str(tmp_path / "plan.json")])
    assert done.exit_code == 0, done.output
    assert "phalanx export would not write it: strategy.pp = 2: " in done.stderr
    assert "in no configuration of DeepSpeed 0.19; use pp=1" in " ".join(done.stderr.split())
