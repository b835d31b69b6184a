"""What tables, operators and kernels derive beside the ledger is what the ledger says, drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples
from support.strategies import cases, evenly

from phalanx.cost.analytic import kernels
from phalanx.cost.analytic.chips import system_of
from phalanx.cost.analytic.kernels import Passes, Products
from phalanx.cost.ledger.flops import rank_flops
from phalanx.cost.ledger.flow import UnitCount, totals, whole_model
from phalanx.cost.ledger.gradient_flows import Types, gradient_flows
from phalanx.cost.ledger.live_bytes import Keeps, state_bytes
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.policy import Policy, sharding
from phalanx.cost.ledger.rank_layout import layout
from phalanx.planning.explain import operators
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.tables import textbook
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

Case = tuple[ModelSpec, Job, Strategy]
ANY = st.sampled_from([1, 2, 4, 8]).flatmap(
    lambda ranks: st.one_of(cases(ranks, small=False), cases(ranks, small=False, experts=True))
)
CLUSTER = preset("dgx-h100", 1)


@dataclass(frozen=True)
class Counting(Products):
    """FLOPs of products in place of their seconds."""

    def linear(self, m, n, k, batch=1.0, back=False):  # type: ignore[no-untyped-def]
        flops = 2.0 * m * n * k * batch
        return Passes(flops, 2 * flops)


@examples(20, 400)
def test_products_are_those_of_the_ledger(examples: int) -> None:
    """The analytic engine's kernels and the operators on the roofline multiply what the ledger counts."""
    settings(max_examples=examples)(given(ANY.filter(evenly))(_products))()


def _products(case: Case) -> None:
    model, job, s = case
    s = replace(s, recompute="none", compression="none")
    sizes, how = shape(model), layout(s, job, model.layers)
    pricing = Pricing(model, CLUSTER, job, "megatron-core")
    ops = {o.name: o.flops for o in operators.training(pricing, s)}
    elsewhere = ("norm", "activation", "attention", "head, once a model")
    inside = {"mlp in", "mlp out"}, {n for n in ops if "expert" in n or n == "router"}
    none = (0.0,) * len(sizes.kinds)
    around = sum(f for name, f in ops.items() if name not in (*elsewhere, *inside[0], *inside[1]))
    by = Counting(system_of(CLUSTER), 1.0, 1.0)
    for place, kind in enumerate(sizes.kinds):
        moe = bool(kind.experts)
        router = 2 * float(how.tokens) * kind.hidden * kind.experts / s.tp  # the router's time is a constant
        flops = rank_flops(sizes, how, Policy(), UnitCount((*none[:place], 1.0, *none[place + 1 :])))
        m = float(how.micro_batches)
        assert around + sum(ops[name] for name in inside[moe]) == pytest.approx(float(flops.products) / 3 / m)
        parts = [kernels.projections(kind, how, by)]
        parts += [kernels.experts(kind, how, by)] if moe else [kernels.mlp(kind, how, kind.ffn, by)]
        parts.append(kernels.mlp(kind, how, kind.shared_ffn, by))
        for passes, share in (("forward", 1), ("backward", 2)):
            timed = sum(float(getattr(part, passes)) for part in parts) + moe * share * router
            assert timed == pytest.approx(share * float(flops.products) / 3 / m)
        if s.ring == 1 and not model.latent:  # causal: half of the square
            assert 2 * ops["attention"] == pytest.approx(float(flops.attention) / 3 / m)


@pytest.mark.parametrize("policy", textbook.POLICIES)
@pytest.mark.parametrize("zero", range(4))
def test_the_textbook_s_state_is_the_ledger_s(policy: int, zero: int) -> None:
    weight, gradient, rest = textbook.POLICIES[policy].kinds
    keeps = Keeps(
        whole_bytes=policy,
        kept_bytes=weight + gradient,
        accumulated_bytes=gradient,
        shard_bytes=rest,
        full_shard_bytes=policy,
    )
    for ranks in (2, 8, 64):
        how = layout(Strategy(dp=ranks, zero=zero), Job(64, 128), 1)
        of_ledger = state_bytes(how, keeps, sharding(how, Policy()), ranks)
        assert textbook.zero_bytes(1.0, zero, ranks, policy) == pytest.approx(float(of_ledger))


def test_the_textbook_s_traffic_is_the_ledger_s() -> None:
    """A ring's bytes at ZeRO-0; at ZeRO-3 of one micro-batch two all-gathers and a reduce-scatter, of which the head
    needs one gather less."""
    model, ranks = make_model({"preset": "gpt3-175b"}, Path())[0], 64
    sizes = shape(model)
    held = whole_model(sizes.kinds)
    (row,) = textbook.gradient_traffic(float(sizes.params), [ranks], 1.0).rows
    for zero, of_table in ((0, row[2]), (3, row[5])):
        how = layout(Strategy(dp=ranks, zero=zero), Job(ranks, 2048), model.layers)
        flows = gradient_flows(sizes, how, sharding(how, Policy()), Types(2, 2), held, 1.0, 1e9)
        sent = totals(flows, held, how.micro_batches)
        passes = sum(float(t.bytes) * (1 + (op == "all_reduce")) for (_, op), t in sent.items())
        kept = 2 * float(np.max(sizes.head_params)) if zero else 0.0
        tied = 2 * float(sizes.vocab * sizes.hidden) * bool(zero) * float(sizes.tied)
        assert (passes + kept + tied) * (1 - 1 / ranks) / 1e9 == pytest.approx(of_table)
