"""Drawn agreement: what the ledger says that our own stack sends and computes equals the totals of its StepPrograms.

By design they differ in these alone, each held by its own assertion:

    padding        buckets are padded to equal parts of whole cache lines: the program sends at most that much more
    buckets        how many collectives a level below 3 takes follows the bucket size, which the ledger gets as bytes
    scales         of 8-bit gathers are reduced by every pipeline rank, the ledger's flows are of all ranks in one
    copies         where gradients are sharded, the shard with the most partial gradients sets the buffer's size
    routing        where tp does not divide tokens, a program's first rank routes one more than the average
    every:k        repeats the same share of blocks with and without experts in the ledger
    ring           FLOPs count the whole square of attention; the program computes the rectangles under the mask
    metrics        the all-reduces of the loss and the stop flag, a few numbers a step
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hybrids import WALKED, hybrid
from support.sizes import examples
from support.strategies import cases, evenly

from phalanx.cost.analytic.profile import profile
from phalanx.cost.ledger.flops import hardware_flops, model_flops, rank_flops
from phalanx.cost.ledger.flow import Flow, UnitCount, totals, whole_model
from phalanx.cost.ledger.gradient_flows import Types, gradient_flows, outer_flows, summed_copies, tied_embedding
from phalanx.cost.ledger.layer_flows import boundaries, layer_flows, messages
from phalanx.cost.ledger.model_shape import Shape, shape
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import LayoutColumns, layout
from phalanx.cost.step.terms import OUTER_METRICS, terms
from phalanx.schedule.event import INSIDE
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.schedule.layers.context import keys_per_query
from phalanx.schedule.layout import Layout as StepLayout
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import DTYPE_BYTES, Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy, parse

PHALANX = profile("phalanx").policy

Case = tuple[ModelSpec, Job, Strategy]
Totals = dict[tuple[str, str], tuple[float, float]]
DENSE = st.sampled_from([2, 4, 8, 12]).flatmap(lambda ranks: cases(ranks, small=False))
EIGHT = Precision("bfloat16", products="float8", gather="float8")
APART = ("copies", "scales")
"""Operations that are compared by themselves, by what they send."""
EXPERTS = st.sampled_from([2, 4, 8]).flatmap(lambda ranks: cases(ranks, small=False, experts=True))


def ledger(case: Case) -> tuple[list[Flow], Shape, LayoutColumns, UnitCount]:
    """The flows of a whole pipeline, each of its units once."""
    model, job, s = case
    sizes, how = shape(model), layout(s, job, model.layers)
    held = whole_model(sizes.kinds)
    p = job.precision
    types = Types(*(DTYPE_BYTES[t] for t in (p.reduce_dtype, p.compute, p.accumulate_dtype)))
    sharded = sharding(how, PHALANX)
    flows = [
        *layer_flows(sizes, how, PHALANX),
        messages(sizes, how, PHALANX, boundaries(how)),
        *gradient_flows(sizes, how, sharded, types, held, 1.0, 25 * 2**20),
        summed_copies(sizes, how, PHALANX, sharded, types, held),
        tied_embedding(sizes, how, sharded, types),
        *outer_flows(sizes, how, sharded, types, held, 25 * 2**20),
    ]
    return flows, sizes, how, held


def program(case: Case) -> Totals:
    """Operations and bytes by (axis, operation), of one rank of every pipeline stage together. Axes over which dense
    gradients reduce are called dp."""
    model, job, s = case
    result: Totals = {}
    for view in StepLayout(model, job, s).stage_views():
        for t in terms(view):
            e = t.event
            if e.kind == "compute" or not t.count or e.op == "recv":
                continue
            axis = e.axis if e.axis in (*INSIDE, "pp", "edp", "embed") else "dp"
            axis = "metrics" if e.unit == "metrics" else axis
            if e.unit == OUTER_METRICS:
                continue
            apart = next((what for what in APART if e.unit.startswith(what)), None)
            op = apart if apart is not None and e.phase == "opt" else e.op
            count, bytes_ = result.get((axis, op), (0.0, 0.0))
            result[axis, op] = count + t.count, bytes_ + t.bytes
    return result


def flops_agree(case: Case) -> None:
    """Hold products and attention against the program's: a rank of every stage together."""
    model, job, s = case
    _, sizes, how, held = ledger(case)
    counted = rank_flops(sizes, how, PHALANX, held)
    work = [t.work for view in StepLayout(model, job, s).stage_views() for t in terms(view)]
    assert sum(w.gemm_flops for w in work) == pytest.approx(float(counted.products), rel=1e-12)
    # Of a ring's rectangles, only those under the causal mask are computed.
    computed = keys_per_query(job.seq, s.ring) / job.seq
    assert sum(w.attention_flops for w in work) == pytest.approx(float(counted.attention) * computed, rel=1e-12)
    if s.tp == 1 and not model.latent and not model.experts:  # of experts the first rank has the most rows
        whole = float(model_flops(sizes, how))
        repeated = float(hardware_flops(sizes, how, PHALANX))
        if s.recompute == "none":
            assert repeated == pytest.approx(whole, rel=1e-9)
        assert repeated >= whole * (1 - 1e-9)  # nothing is left out


def agree(case: Case, eight: bool, alone: bool) -> None:
    """Hold the ledger against the program. `eight`: where anything can be gathered in 8 bits, it is; `alone`:
    replicas step alone, where they can."""
    model, job, s = case
    s = replace(s, grad_sync=None, reshard=None)
    with contextlib.suppress(InputError):  # the step that synchronises, where replicas can step alone
        s = replace(s, local=int(alone))
    flops_agree((model, job, s))
    if eight and (s.sp or sharding_of(s).parameters):
        job = replace(job, precision=EIGHT)
    case = model, job, s
    flows, _, how, held = ledger(case)
    of_ledger = totals([f for f in flows if f.what not in APART], held, how.micro_batches)
    for what in APART:
        apart = totals([f for f in flows if f.what == what], held, how.micro_batches)
        of_ledger |= {(axis, what): total for (axis, _), total in apart.items()}
    of_program = program(case)
    metrics = of_program.pop(("metrics", "all_reduce"), (0, 0))
    assert metrics[0] == s.pp * (s.world > s.dp_local)
    sent = {key for key, total in of_ledger.items() if float(total.bytes)}
    assert sent == {key for key, total in of_program.items() if total[1]}
    cut = [b for view in StepLayout(model, job, s).stage_views() for b in view.buckets]
    pads = sum(16 * b.parts(s) for b in cut)
    for key in sent:
        axis, op = key
        count, bytes_ = of_program[key]
        of = of_ledger[key]
        if axis == "embed":  # on the first and on the last rank
            count, bytes_ = count / 2, bytes_ / 2
        if op == "scales":
            assert bytes_ == of.bytes, key
            assert 1 == of.count <= count <= s.pp, key
        elif op == "copies":
            exact = s.shards == 1
            assert bytes_ == of.bytes if exact else bytes_ >= of.bytes * (1 - 1e-9), key
        elif axis in ("dp", "edp", "embed"):
            m = s.accumulation(job)
            most, whole = pads * 8 * (m * 2 + 1), round(float(of.bytes))  # a sum over kinds of blocks, in floats
            assert 0 <= bytes_ - whole <= most, (key, bytes_, of.bytes)
            if s.shards == 1:
                assert bytes_ == whole, key
            if s.zero == 3 and s.shards > 1:
                assert count == of.count, key
        else:
            # Exactly, but for the rounding of the share of blocks that are recomputed.
            assert (count, bytes_) == pytest.approx((float(of.count), float(of.bytes)), rel=1e-12), key


@examples(70, 1400)
def test_dense_models(examples: int) -> None:
    settings(max_examples=examples)(given(DENSE, st.booleans(), st.booleans())(agree))()


@examples(30, 600)
def test_models_with_experts(examples: int) -> None:
    settings(max_examples=examples)(given(EXPERTS.filter(evenly), st.booleans(), st.booleans())(agree))()


_LINES = (
    *("dp=4", "dp=4,zero=1", "dp=4,zero=2,recompute=selective", "dp=4,recompute=full", "dp=2,zero=3,tp=2", "tp=4"),
    *("tp=4,recompute=full", "dp=2,tp=2,sp=1,recompute=full", "cp=2,dp=2", "cp=4", "cp=2,ulysses=2,tp=2"),
    *("pp=2,dp=2,zero=1", "pp=2,tp=2,sp=1,recompute=full", "pp=2,virtual=2,dp=2,schedule=interleaved"),
)


def test_changes_of_experts_are_cut_by_their_own_units() -> None:
    """Three blocks with experts, in a model of five units, reduce apart from the rest of replicas that step alone."""
    sizes = {"vocab": 300, "hidden": 128, "layers": 3, "heads": 12, "kv_heads": 6, "head_dim": 8, "ffn": 48}
    experts = {"count": 4, "top_k": 1, "ffn": 96}
    table = {"family": "mixtral", **sizes, "max_seq": 256, "tied": True, "experts": experts}
    model = build(ModelSpec, complete(table), "model")
    strategy = Strategy(dp=4, zero=3, shard=2, etp=2, micro_batch=1)
    agree((model, Job(4, 32, Precision("bfloat16")), strategy), eight=False, alone=True)


_SPREAD = ("ep=4,dp=4", "ep=2,dp=2,tp=2,sp=1,recompute=full", "etp=2,ep=2,dp=4,zero=1")
"""Strategies with experts on several ranks."""


@examples(24, 600)
def test_models_whose_blocks_differ(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.integers(0, 10**6), st.sampled_from((*_LINES, *_SPREAD)), st.booleans())
    def hold(seed: int, line: str, eight: bool) -> None:
        model = hybrid(seed, WALKED)
        line = line if model.experts or line not in _SPREAD else _LINES[seed % len(_LINES)]
        agree((model, Job(16, 256, Precision("bfloat16")), Strategy(**parse(line))), eight, seed % 3 == 0)

    hold()
