"""Tokens that sequence parallelism gathers in 8 bits: the numbers of one process to the bit, in half the bytes of
bf16, and as predicted."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.fresh_process import in_fresh_process
from support.narrow_models import FAMILIES, NARROW, SIZES
from support.rank_pool import Pool
from support.sizes import examples
from torch import Tensor

from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict import predict
from phalanx.cost.step.program import StepProgram
from phalanx.observation.parity.parity import gradient_errors
from phalanx.observation.trainer.verify import verify
from phalanx.planning.search.space import all_strategies
from phalanx.planning.search.strategy_columns import Options
from phalanx.runtime.autograd import narrow_product, recompute
from phalanx.runtime.autograd.layer_comm import LayerComm
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.model_parallel import sequence
from phalanx.runtime.model_parallel.sequence import ProductTerm, RankRows
from phalanx.runtime.process.environment import ALONE, World
from phalanx.schedule.event import Event
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.spec.strategy.legality import check
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

CASES = (
    ("llama", "tp=2,sp=1,pp=2,schedule=zb-h1,recompute=selective"),
    ("experts", "tp=2,sp=1,ep=2,dp=2,zero=3"),
    ("gpt2", "tp=2,sp=1,recompute=full"),
    ("palm", "tp=2,sp=1"),
    ("latent", "tp=2,sp=1,recompute=selective"),
    ("experts", "tp=2,sp=1,pp=2,schedule=zb-h1"),
    ("latent", "tp=2,sp=1,pp=2,schedule=zb-h1,recompute=full"),
    ("qwen3", "tp=4,sp=1,dp=2,zero=3,micro_batch=2"),
    ("llama", "tp=2,sp=1,cp=2"),
)


def _case(family: str, line: str, gather: bool = True) -> tuple[ModelSpec, Job, Strategy]:
    s = make_strategy(line)
    assert s is not None
    precision = NARROW if gather else replace(NARROW, gather="compute")
    model = build(ModelSpec, complete(SIZES | FAMILIES[family]), "model")
    return model, Job(2 * s.dp * s.pp * s.micro_batch, 32, precision), s


def _drawn(fault: float | None = None) -> Tensor:
    """All ranks' rows; each is larger than the one before, the last by e^16."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    x *= torch.exp(torch.arange(64) / 4).view(64, 1)
    if fault is not None:
        x[40, 3] = fault
    return x.bfloat16()


def gathered(world: World, dtype: torch.dtype, fault: float | None) -> list[narrow_product.RoundedOperand]:
    """What a rank has after gathering its rows, and after gathering them once more."""
    inner = LayerComm(Comm(world, mesh(Strategy(tp=world.size, sp=True))))
    rows = RankRows(inner, world.size, world.rank, 2, 32)
    own = rows.of(_drawn(fault))
    result: list[narrow_product.RoundedOperand] = []
    for back in (None, 0):
        known = back if back is None else result[0].back
        numbers, arriving = rows.gather_rounded(own, dtype, "blocks.0", "F", known)
        for handle in arriving:
            handle.wait()
        result.append(numbers)
    return result


@pytest.mark.parametrize("dtype", [narrow_product.E4M3, narrow_product.E5M2])
def test_what_arrives_is_what_rounding_all_rows_gives_to_the_bit(pool: Pool, dtype: torch.dtype) -> None:
    whole = narrow_product.round_operand(_drawn(), NUMBER_FORMATS["float8"], dtype == narrow_product.E5M2)
    for ranks in (2, 4):
        for both in pool.run(ranks, gathered, dtype, None):
            for ours in both:
                assert torch.equal(ours.numbers.view(torch.uint8), whole.numbers.view(torch.uint8))
                assert torch.equal(ours.back, whole.back)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(pool: Pool, fault: float) -> None:
    for ours, _ in pool.run(2, gathered, narrow_product.E4M3, fault):
        assert not torch.isfinite(ours.numbers[40].float() * ours.back)[3]


def layers(world: World, rounds: bool) -> dict[str, Tensor]:
    """Of a layer that reads all tokens and one whose results are added up, with the same numbers on every rank, the
    result and gradients that no sum over ranks is part of."""
    inner = LayerComm(Comm(world, mesh(Strategy(tp=world.size, sp=True))))
    rows = RankRows(inner, world.size, world.rank, 2, 32, rounds)
    x, w, g = _drawn(), _drawn()[:48], _drawn()[:, :16].repeat(1, 3)
    own, weight = rows.of(x).clone().requires_grad_(), w.clone().requires_grad_()
    (y,) = sequence.columns(rows, "blocks.0", (), NUMBER_FORMATS["float8"], [None], own, [weight, None])
    y.backward(g.view(y.shape))
    assert weight.grad is not None
    result = {"y": y.detach().view(64, -1), "of weight": weight.grad}
    x, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = sequence.sum_terms(rows, "blocks.0", [ProductTerm((x,), weight, None, operands=NUMBER_FORMATS["float8"])])
    out.backward(rows.of(g))
    assert x.grad is not None
    assert weight.grad is not None
    return result | {"of x": x.grad, "of the second weight": weight.grad}


def _layers_alone() -> dict[str, Tensor]:
    x, w, g = _drawn().requires_grad_(), _drawn()[:48].requires_grad_(), _drawn()[:, :16].repeat(1, 3)
    y = recompute.product(x, w, None, True, NUMBER_FORMATS["float8"])
    y.backward(g)
    assert x.grad is not None
    assert w.grad is not None
    return {"y": y.detach(), "of weight": w.grad, "of x": x.grad, "of the second weight": w.grad}


def test_products_are_those_of_one_process_to_the_bit(pool: Pool) -> None:
    """A chunk that is rounded by itself has another scale, and with numbers of very different sizes other results."""
    exact = _layers_alone()
    for ranks in (2, 4):
        for ours in pool.run(ranks, layers, True):
            assert ours.keys() == exact.keys()
            assert all(torch.equal(ours[name], exact[name]) for name in exact)
    assert not torch.equal(pool.run(2, layers, False)[0]["y"], exact["y"])


OVER_RANKS = (("llama", "tp=2,sp=1,micro_batch=2"), ("latent", "tp=2,sp=1,micro_batch=2,recompute=selective"))


def gradients(world: World, precision: Precision, cases: tuple[tuple[str, str], ...]) -> list[dict[str, Tensor]]:
    """Of one step of each (family, strategy): gradients of every logical parameter."""
    result = []
    for family, line in cases:
        model, job, s = _case(family, line)
        training = Training(model, replace(job, precision=precision), s, Comm(world, mesh(s)), seed=0)
        tokens = torch.randint(64, (job.global_batch, 33), generator=torch.Generator().manual_seed(0))
        training.step(list(tokens.split(s.micro_batch)), 0.0)
        result.append(training.gradients())
    return result


def test_gradients_of_a_model_are_near_those_of_one_process(pool: Pool) -> None:
    alone = tuple((family, "micro_batch=2") for family, _ in OVER_RANKS)
    exact = gradients(ALONE, Precision("bfloat16"), alone)
    over = list(zip(*pool.run(2, gradients, NARROW, OVER_RANKS), strict=True))
    for case, theirs, ranks in zip(OVER_RANKS, exact, over, strict=True):
        ours = {name: gradient for of_rank in ranks for name, gradient in of_rank.items()}
        assert ours.keys() == theirs.keys(), case
        errors = dict(gradient_errors(ours, theirs))
        assert 1e-3 < max(errors.values()) < 0.15, (case, errors)


def _unproved(examples: int, on_gpu: bool) -> list[str]:
    found = []
    for family, line in CASES[:examples]:
        for v in verify(*_case(family, line), on_gpu=on_gpu):
            if not v.proved:
                found.append(f"{family} {line}: {v.failed} {[str(d) for d in v.differences]}")
            elif not on_gpu and v.deviation > 4096:
                found.append(f"{family} {line}: live bytes off by {v.deviation}")
    return found


@examples(1, len(CASES))
def test_events_flops_and_live_bytes_are_the_programs(examples: int) -> None:
    assert _unproved(examples, on_gpu=False) == []


@pytest.mark.long
def test_the_step_keeps_the_rules_of_a_gpu() -> None:
    assert in_fresh_process(_unproved, len(CASES), True, patience_s=900) == []


def test_the_program_gathers_tokens_in_half_the_bytes_after_a_reduction_of_their_scale() -> None:
    narrow, plain = (expand(Layout(*_case("llama", "tp=2,sp=1", gather)).rank_view(0)) for gather in (True, False))

    def of_blocks(step: StepProgram, op: str) -> list[Event]:
        return [e for e in step.events if e.op == op and e.axis == "tp" and e.unit.startswith("blocks")]

    ours, theirs = of_blocks(narrow, "all_gather"), of_blocks(plain, "all_gather")
    assert [(e.unit, e.phase, 2 * e.bytes) for e in ours] == [(e.unit, e.phase, e.bytes) for e in theirs]
    assert {e.dtype for e in ours} == {"uint8"}
    # Of two blocks and two micro-batches: what attention and the MLP read, and the gradients of what they add.
    reduced = [(e.phase, e.dtype, e.bytes) for e in of_blocks(narrow, "all_reduce")]
    assert reduced.count(("F", "float32", 4)) == reduced.count(("B", "float32", 4)) == 2 * 2 * 2
    assert len(reduced) == 16
    assert of_blocks(plain, "all_reduce") == []


def test_the_search_has_what_gathers() -> None:
    model, job, _ = _case("llama", "tp=2,sp=1,dp=2")
    rows = all_strategies(model, job, 4, Options())
    every = all_strategies(model, replace(job, precision=replace(NARROW, gather="compute")), 4, Options())

    def gathers(s: Strategy) -> bool:
        return s.sp or sharding_of(s).parameters

    assert sorted(map(str, rows.strategies())) == sorted(str(s) for s in every.strategies() if gathers(s))
    assert {0, 1, 3} <= set(rows.zero.tolist())
    for s in rows.strategies():
        check(s, model, job, 4)


def test_the_price_knows_what_is_not_sent_and_what_scales_cost() -> None:
    """So that it pays with many tokens only."""
    sizes = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "max_seq": 4096}
    model = build(ModelSpec, complete(SIZES | {"family": "llama"} | sizes), "model")
    cluster, s = preset("dgx-h100", 1), Strategy(tp=8, sp=True, micro_batch=2)

    def faster(seq: int) -> float:
        narrow, plain = (
            predict(model, cluster, Job(2, seq, replace(NARROW, gather=gather)), s)
            for gather in ("float8", "compute")
        )
        assert narrow.bytes_per_axis["tp"] < 0.75 * plain.bytes_per_axis["tp"]
        assert narrow.memory_bytes < plain.memory_bytes
        return plain.communication_s / narrow.communication_s

    assert faster(4096) > 1.05 > 1 > faster(64)
