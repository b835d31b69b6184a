"""Experts over many GPUs: prompts of all groups at once, published throughputs, and what launch lines then say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.planning.lookup import cluster_named, model_named
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.question import ask
from phalanx.serving.request import ServingRequest
from phalanx.serving.search.answering import answer
from phalanx.serving.search.pairs import prompts_together
from phalanx.serving.search.search import Search
from phalanx.serving.validation.large_ep import runs

_WIDE = ServingLayout(1, 1, 16, 1, 16)
_ASK = ServingRequest(
    model="deepseek-v3",
    cluster="dgx-h200",
    gpus=32,
    input=2000,
    output=200,
    engine="sglang",
    weights="fp8",
    layout="dp=16,ep=16",
    concurrency=256,
    requests=600,
)


def test_prompts_of_all_groups_take_little_longer_than_one() -> None:
    """A worker whose groups attend apart computes a prompt in each at once: its rate is that of all of them."""
    search = Search(ask(_ASK).question, _WIDE)
    copy = search.copy_of("fp8", _WIDE)
    one, all_groups = copy.prefill_s(2048), copy.prefill_s(2048, 16)
    assert one < all_groups < 4 * one
    rate, _ = prompts_together(search.q, copy, 2048)
    assert rate > 4 / one
    fast = replace(search.q, ttft_s=1.2 * one)
    assert prompts_together(fast, Search(fast, _WIDE).copy_of("fp8", _WIDE), 2048)[0] < rate


def test_prefill_apart_is_not_slower_by_kinds() -> None:
    """512 requests at once on two copies: 188 tokens/s apart against 4,012 together, before prompts were batched."""
    yields = {}
    for mode in ("aggregated", "disaggregated"):
        named = ask(replace(_ASK, mode=mode))
        yields[mode] = answer(Search(named.question, named.layout)).best
    apart, together = yields["disaggregated"], yields["aggregated"]
    assert apart.tokens_per_s > 0.8 * together.tokens_per_s
    assert apart.groups[0].slots > 100  # no limit that would hold prompts back
    assert apart.tpot_s(50) < 0.1


def test_published_throughputs() -> None:
    """On Hopper and InfiniBand all are within 25 %; so are most of the others."""
    scored = runs()
    over_network = [r for r in scored if r.row["gpu"] in ("H100", "H800", "H200")]
    assert len(over_network) == 9
    assert all(abs(r.error) < 0.25 for r in over_network)
    assert np.median([abs(r.error) for r in scored]) < 0.15


def test_experts_over_nodes_are_run_so_by_themselves() -> None:
    model, cluster = model_named("deepseek-v3")[0], cluster_named("dgx-h100")(64)
    q = replace(ask(_ASK).question, model=model, cluster=cluster, gpus=64)
    auto, off = Search(q), Search(replace(q, large_ep="off"))
    one_node = ServingLayout(1, 1, 8, 1, 8)
    for x, large in ((_WIDE, True), (one_node, False)):
        price = auto.copy_of("fp8", x).pricing
        assert price.is_large(x) is large
        others = off.copy_of("fp8", x).pricing
        seconds = [float(p.seconds(x, 0, 0, 16 * 64, 16 * 64 * 2000)) for p in (price, others)]
        assert (seconds[0] < 0.9 * seconds[1]) is large
    assert auto.copy_of("fp8", _WIDE).pricing.weight_bytes(_WIDE) > off.copy_of("fp8", _WIDE).pricing.weight_bytes(
        _WIDE
    )


def test_two_half_batches_hide_what_travels_over_a_network() -> None:
    price = Search(ask(_ASK).question).copy_of("fp8", _WIDE).pricing
    few, many = (price.parts(_WIDE, 0, 0, 16 * n, 16 * n * 2000) for n in (127, 128))
    assert float(many["collectives"]) < 0.9 * float(few["collectives"])


def test_the_fewest_gpus_do_not_depend_on_the_offer() -> None:
    """And what is found keeps its limits ten times as long, with as many requests as shall be beyond doubt."""
    request = ServingRequest(
        **{"model": "llama3-8b", "cluster": "dgx-h100", "input": 1000, "output": 100, "weights": "bf16"},
        **{"ttft": "500ms", "tpot": "20ms", "rate": 30.0, "objective": "cost", "mode": "aggregated"},
        gpus=16,
    )
    best = answer(Search(ask(request).question)).best
    for gpus in (4, 8):
        fewer = answer(Search(ask(replace(request, gpus=gpus)).question)).best
        assert (fewer.gpus, fewer.title) == (best.gpus, best.title)
    assert best.outcome is not None
    assert best.outcome.requests > 20_000
    assert best.outcome.requests_per_s == pytest.approx(30, rel=0.02)
    assert all(k.share - k.margin >= 0.9 for k in best.outcome.kept)
    spare = answer(Search(ask(replace(request, survive="1 copy")).question)).best
    assert spare.gpus > best.gpus
