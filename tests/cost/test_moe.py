"""What experts cost: rows, bytes and live memory of layers with experts, as they are predicted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import sampled
from support.strategies import cases

from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.cost.memory.passes import BlockWalk
from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict import predict
from phalanx.observation.diff import differences, identical, memory_differences
from phalanx.observation.trainer.step import record_step
from phalanx.schedule.event import Event
from phalanx.schedule.layers.routing import balanced_choices, expert_capacity, expert_traffic
from phalanx.schedule.layout import Layout, repeat_of
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.files.job_file import build, make_model
from phalanx.spec.job import DTYPE_BYTES, Job, Precision
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.families import complete
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec, expert_layers
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import local_model

BF16 = Precision("bfloat16")
MIXTRAL, _ = make_model({"preset": "mixtral-8x7b"}, Path())


def sent_by_experts(events: tuple[Event, ...]) -> list[Event]:
    return [e for e in events if e.op == "all_to_all" and e.axis.startswith("ep") and e.dtype != "int64"]


@pytest.mark.parametrize(("ep", "cp"), [(2, 1), (4, 2), (8, 1)])
def test_dispatch_and_combine_move_what_the_formula_says(ep: int, cp: int) -> None:
    """4 k B S H (ep - 1) / ep elements per layer and step: there and back, forward and backward."""
    model, seq = MIXTRAL, 4096
    s = Strategy(dp=8, cp=cp, ep=ep)
    job = Job(global_batch=16, seq=seq, precision=BF16)
    tokens = job.global_batch // s.dp * seq // cp
    assert model.experts is not None
    wire = sum(e.bytes for e in sent_by_experts(expand(Layout(model, job, s).stage_view()).events)) * (ep - 1) / ep
    assert wire == model.layers * 4 * model.experts.top_k * tokens * model.hidden * (ep - 1) / ep * 2


def test_mixtral_over_eight_ranks_moves_235_megabytes_per_layer() -> None:
    """Of 4,096 tokens, in bf16: 4 x 2 x 4,096 x 4,096 x 7/8 elements."""
    model = MIXTRAL
    job = Job(global_batch=8, seq=4096, precision=BF16)
    events = expand(Layout(model, job, Strategy(dp=8, ep=8)).stage_view()).events
    of_layer = [e.bytes for e in sent_by_experts(events) if e.unit == "blocks.3"]
    assert sum(of_layer) * 7 / 8 / 1e6 == pytest.approx(234.9, abs=0.05)


@given(
    st.integers(1, 500), st.integers(2, 16), st.integers(1, 4), st.sampled_from([None, 0.5, 1.0, 2.0]), st.booleans()
)
def test_balanced_rows_are_all_there_are(
    tokens: int, count: int, k: int, capacity: float | None, chooses: bool
) -> None:
    x = Experts(count, min(k, count), 8, capacity=capacity, chooser="experts" if chooses else "tokens")
    rows, limit = balanced_choices(tokens, x), expert_capacity(x, tokens)
    assert len(rows) == count
    assert max(rows) - min(rows) <= 1
    if limit is None:
        assert sum(rows) == tokens * x.top_k
    else:
        assert max(rows) <= limit


@given(st.integers(1, 100), st.sampled_from([(1, 2, 2), (2, 2, 1), (4, 2, 2), (3, 6, 1), (2, 4, 1)]))
def test_what_leaves_comes(tokens: int, degrees: tuple[int, int, int]) -> None:
    """Of any number of tokens, and whatever parts of them the ranks of tp have."""
    tp, ep, etp = degrees
    s = Strategy(dp=2 * ep * etp, tp=tp, ep=ep, etp=etp)
    x = Experts(12, 2, 8)
    found = [expert_traffic(x, s, tokens, rank) for rank in range(s.world)]
    assert sum(r.rows * r.copies for r in found) == sum(r.received for r in found)
    assert max(r.received for r in found) == found[0].received


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 4, 8]).flatmap(lambda ranks: cases(ranks, small=False, experts=True)))
def test_what_is_kept_comes_and_goes(case: tuple[ModelSpec, Job, Strategy]) -> None:
    """The passes of a block leave nothing: each walk gives what it takes."""
    model, job, s = case
    held, t = local_model(model, s), s.micro_batch * job.seq // s.cp
    assert model.experts is not None
    rows = expert_traffic(model.experts, s, t)
    for i in expert_layers(model):
        e, repeat = DTYPE_BYTES[job.precision.compute], repeat_of(s, f"blocks.{i}")
        sizes = PassSizes(t, e, held.hidden, s.tp, s.sp, repeat, experts=held.experts, rows=rows)
        block = architecture(held).blocks[i]
        split = BlockWalk(block, replace(sizes, in_place=job.seq == 32))
        for walk in (BlockWalk(block, sizes), split):
            there, back = walk.passes()
            assert there.live + back.live == 0
        parts = split.parts()
        assert split.passes()[0].live + parts.inputs.change + parts.weights.change == 0


EXAMPLES = {
    "mixtral": {"family": "mixtral"},
    "shared": {"family": "mixtral", "experts": {"shared_ffn": 48, "dense_layers": [0], "score": "sigmoid"}},
    "deepseek": {
        "family": "deepseek_v3",
        "head_dim": 24,
        "kv_heads": 8,
        "latent": {"kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "v_dim": 16, "q_rank": 48},
        "experts": {"shared_ffn": 48, "dense_layers": [0], "score": "sigmoid", "groups": 2, "balance_bias": 0.001},
    },
    "dropping": {"family": "mixtral", "experts": {"capacity": 1.0, "balance_loss": 0.01, "z_loss": 0.001}},
}


def example(name: str, layers: int = 4) -> ModelSpec:
    given_ = EXAMPLES[name]
    sizes: dict[str, Any] = {"vocab": 300, "hidden": 128, "layers": layers, "heads": 8, "kv_heads": 4, "head_dim": 16}
    experts = {"count": 8, "top_k": 2, "ffn": 96} | given_.get("experts", {})
    return build(ModelSpec, complete(sizes | {"ffn": 256, "max_seq": 512} | given_ | {"experts": experts}), "model")


@pytest.mark.parametrize(
    ("name", "strategy"),
    sampled(
        [
            ("mixtral", Strategy(dp=4, ep=4)),
            ("shared", Strategy(dp=2, tp=2, ep=2, zero=1, recompute="full")),
            ("shared", Strategy(tp=4, sp=True, ep=2, etp=2)),
            ("dropping", Strategy(cp=2, tp=2, sp=True, ep=4, zero=3, recompute="selective")),
            ("dropping", Strategy(dp=2, tp=3, ep=2, etp=3, zero=2)),
            ("shared", Strategy(dp=2, pp=2, ep=2, schedule="zb-h1")),
            ("deepseek", Strategy(dp=2, tp=2, sp=True, ep=4, recompute="every:2")),
            ("deepseek", Strategy(dp=2, tp=2, ep=2, pp=2, schedule="zb-h1", zero=1)),
            ("mixtral", Strategy(tp=2, sp=True, pp=2, etp=2, schedule="1f1b", recompute="full")),
        ],
        (4, 7),
    ),
    ids=str,
)
def test_steps_are_as_predicted(name: str, strategy: Strategy) -> None:
    """Every event, FLOPs and live bytes, on ranks that nobody has started."""
    model = example(name, layers=4 if strategy.recompute == "every:2" else strategy.pp + 1)
    if strategy.tp == 3:
        model = replace(model, heads=6, kv_heads=3, ffn=252, experts=replace(model.experts, ffn=96))  # type: ignore[type-var]
    job = Job(global_batch=2 * strategy.pp * strategy.dp, seq=128)
    for rank in {0, strategy.world - 1}:
        program, recorded = (
            expand(Layout(model, job, strategy).rank_view(rank)),
            record_step(model, job, strategy, rank),
        )
        assert list(map(str, differences(program.events, recorded.events, identical))) == []
        assert list(map(str, memory_differences(program, recorded.events, recorded.memory))) == []
        assert recorded.unawaited == ()


def test_mixtral_on_many_ranks_is_as_predicted() -> None:
    model = replace(MIXTRAL, layers=4)  # all of its 32 take a minute
    job = Job(global_batch=128, seq=4096, precision=BF16)
    s = Strategy(dp=16, tp=4, sp=True, ep=8, zero=1, recompute="every:2")
    program, recorded = expand(Layout(model, job, s).rank_view(0)), record_step(model, job, s, 0)
    assert list(differences(program.events, recorded.events, identical)) == []
    assert list(memory_differences(program, recorded.events, recorded.memory)) == []


def test_rows_travel_beside_what_all_tokens_share() -> None:
    """A shared expert costs less than its own time where communication has an engine of its own."""
    job, s, cluster = Job(global_batch=32, seq=512), Strategy(dp=8, ep=8), clusters.preset("dgx-a100", nodes=1)
    model = example("mixtral")
    assert model.experts is not None
    plain, shared = (
        predict(replace(model, experts=replace(model.experts, shared_ffn=f)), cluster, job, s) for f in (0, 512)
    )
    assert shared.exposed_communication_s < plain.exposed_communication_s
