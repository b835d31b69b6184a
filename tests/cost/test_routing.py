"""Experts under a learned router, and what CUDA graphs save: options of a stack that change a price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import phalanx
from phalanx.cost.analytic.expert_parallel import most_loaded
from phalanx.cost.analytic.profile import profile
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.rank_layout import layout
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

MODEL = build(ModelSpec, complete(preset("qwen3-30b-a3b")), "model")
EXPERTS = 128


def price(options: str, micro_batch: int = 1, seq: int = 4096, ep: int = 16, pp: int = 1) -> phalanx.Prediction:
    return phalanx.predict(
        model="qwen3-30b-a3b",
        cluster="dgx-h100",
        gpus=16,
        batch=1024,
        seq=seq,
        strategy=f"dp={16 // pp},pp={pp},ep={ep},zero=1,micro_batch={micro_batch}",
        options=options,
    )


@pytest.mark.parametrize("ep", [2, 8, 16, 64])
def test_the_fullest_rank_is_that_of_drawn_loads(ep: int) -> None:
    spread = 0.5
    kind = shape(MODEL).kinds[-1]
    placed = layout(Strategy(dp=64, ep=ep, zero=1), Job(64, 4096), MODEL.layers)
    predicted = float(most_loaded(kind, placed, replace(profile("megatron-core"), spread=spread)))
    loads = np.random.default_rng(0).normal(1.0, spread, (20_000, ep, EXPERTS // ep))
    drawn = float(loads.mean(axis=2).max(axis=1).mean()) - 1
    assert predicted == pytest.approx(drawn, rel=0.05)


def test_a_learned_router_waits_more_with_more_ranks() -> None:
    def more(ep: int) -> float:
        return price("routing=learned", ep=ep).step_time_s / price("routing=balanced", ep=ep).step_time_s

    assert more(1) == 1.0
    assert 1.0 < more(4) < more(8) < more(16) < 1.6


def test_the_default_is_balanced_and_says_so_with_its_bound() -> None:
    assumed, learned = price(""), price("routing=learned")
    assert assumed.step_time_s == price("routing=balanced").step_time_s
    (caveat,) = [c for c in assumed.question.caveats if c.limit == "routing"]
    stated = float(caveat.bound.removeprefix("time by about ").split(" s")[0])
    assert stated == pytest.approx(learned.step_time_s - assumed.step_time_s, rel=0.01)
    assert not [c for c in learned.question.caveats if c.limit == "routing"]
    assert not [c for c in price("", ep=1).question.caveats if c.limit == "routing"]


def test_the_bound_of_a_learned_router_is_of_the_same_pipeline() -> None:
    """Stages of other blocks, whose pipeline is timed action by action in a price."""
    ends = "first_stage_layers=9,last_stage_layers=9"
    assumed, learned = (price(f"routing={name}{ends}", seq=512, ep=4, pp=4) for name in ("auto,", "learned,"))
    (caveat,) = [c for c in assumed.question.caveats if c.limit == "routing"]
    stated = float(caveat.bound.removeprefix("time by about ").split(" s")[0])
    assert stated == pytest.approx(learned.step_time_s - assumed.step_time_s, rel=0.05)


def test_graphs_remove_launches() -> None:
    none, release, full = (price(line, seq=2048).step_time_s for line in ("graphs=none", "", "graphs=full"))
    assert full < release < none
    assert price("graphs=full", seq=2048).terms_s["launch"] == 0
    # Where the GPU is busy longer than the host launches, nothing is saved.
    busy = [price(line, micro_batch=4).step_time_s for line in ("", "graphs=full")]
    assert busy[1] == pytest.approx(busy[0], rel=0.02)


@pytest.mark.parametrize(
    ("flags", "routing", "graphs"),
    [
        ("", "learned", "none"),
        ("--moe-router-force-load-balancing", "balanced", "none"),
        ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router", "learned", "modules"),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", "learned", "full"),
        ("--enable-cuda-graph", "learned", "modules"),
    ],
)
def test_a_megatron_script_states_both(tmp_path: Path, flags: str, routing: str, graphs: str) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 24 --hidden-size 2048"
        " --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1"
        " --global-batch-size 256 --vocab-size 128256 --bf16 --swiglu --num-experts 16 --moe-router-topk 2"
        f" --expert-model-parallel-size 8 --use-distributed-optimizer {flags}\n"
    )
    predicted = phalanx.predict(str(script), cluster="dgx-h100")
    assert (predicted.question.options.routing, predicted.question.options.graphs) == (routing, graphs)
