"""Latent attention: what transformers computes, alone and over ranks, in any part of a backward pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import rank_cases, unit_bytes
from support.live_tensors import live
from support.rank_pool import Pool
from support.sizes import combined, examples, sampled
from support.split_backward_cases import all_apart, apart
from support.toy_model import model, order_of_gradients

from phalanx.nn import mla
from phalanx.observation.diff import SLACK_BYTES
from phalanx.observation.parity.parity import BOUNDS
from phalanx.observation.trainer.verify import verify
from phalanx.runtime.process.environment import ALONE
from phalanx.schedule.gradients.buckets import backward_order
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

FP64 = Precision("float64")
EXACT = 1e-12


def small(q_rank: int | None = 12, v_dim: int = 6, kv_rank: int = 10, **sizes: Any) -> ModelSpec:
    """The last `rope_dim` = 4 dimensions turn; values are narrower or wider than keys."""
    ranks = {
        "kv_rank": kv_rank,
        "nope_dim": sizes.get("head_dim", 12) - 4,
        "rope_dim": 4,
        "v_dim": v_dim,
        "q_rank": q_rank,
    }
    return model(**{"kv_heads": 4, "head_dim": 12, "latent": ranks} | sizes)


MODELS = [
    small(),
    small(q_rank=None, v_dim=16, qkv_bias=True, out_bias=True),
    small(v_dim=12, qkv_bias=True, window=5),
    small(residual="parallel"),
]


def test_gradients_of_keys_and_values() -> None:
    torch.manual_seed(0)
    up, rope = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 4, 9), (2, 3, 1, 2)))
    for width in (7, 8):
        assert torch.autograd.gradcheck(lambda *given, w=width: mla.keys_and_values(*given, 5, w), (up, rope))


@pytest.mark.parametrize(("number", "mode"), combined(range(4), ["none", "selective", "full"]))
def test_gradients_of_weights_may_come_later(number: int, mode: Any) -> None:
    """And in the order of the engine's buckets."""
    spec = MODELS[number]
    found = apart(ALONE, spec, Job(4, 8, FP64, documents="separate"), Strategy(recompute=mode, micro_batch=2))
    assert max(found["differences"].values()) < EXACT
    assert found["came"] == [p.fqn for p in backward_order(spec)]


@pytest.mark.parametrize("every", sampled([3, 1], (0,)))
def test_so_they_may_on_ranks(pool: Pool, every: int) -> None:
    cases = [
        (spec, Job(4, 8, FP64), Strategy(recompute=mode, micro_batch=2, **over))
        for spec, mode, over in zip(
            MODELS * 2,
            ["none", "selective", "full", "none"] * 2,
            [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}, {"cp": 2, "ulysses": 2}, *[{"tp": 2, "sp": True}] * 4],
            strict=True,
        )
    ]
    for found in pool.run(2, all_apart, cases[::every]):
        for case, one in zip(cases[::every], found, strict=True):
            assert max(one["differences"].values()) < EXACT, (case, one["differences"])


ANY = [
    Strategy(tp=4),
    Strategy(tp=2, sp=True, dp=2, zero=3, recompute="selective"),
    Strategy(cp=4, ulysses=2, zero=2),
    Strategy(tp=2, sp=True, cp=2, recompute="full"),
    Strategy(pp=2, tp=2, schedule="zb-h1"),
]


@pytest.mark.parametrize(("number", "strategy"), sampled(list(enumerate(ANY)), (2, 5)), ids=map(str, ANY))
def test_any_strategy_equals_one_process(pool: Pool, number: int, strategy: Strategy) -> None:
    """Two models each, so that every model meets two strategies or three."""
    for i in (number % 4, (number + 2) % 4):
        spec = MODELS[i]
        dtype: Any = ("float64", "float32")[i // 2]
        job = Job(2 * strategy.dp * 2, 16)
        under = (("sgd",), ("adamw",))[number % 2]
        for found in pool.run(4, rank_cases.examine, spec, job, strategy, dtype, 3, "shm", under)[0]:
            assert found.loss_rel_max <= BOUNDS[dtype], (spec, found)
            assert found.grad_rel_max <= BOUNDS[dtype], (spec, found)


@pytest.mark.parametrize(("sp", "mode"), sampled(list(product([False, True], ["none", "selective", "full"])), (2, 4)))
@pytest.mark.parametrize("spec", sampled(MODELS, (2,)), ids=range(4))
def test_gradients_come_in_the_order_of_one_process(spec: ModelSpec, sp: bool, mode: Any) -> None:
    spec = replace(spec, layers=1)
    split = Strategy(dp=2, tp=2, sp=sp, zero=2, recompute=mode)
    assert order_of_gradients(spec, split) == _order_of_one_process(spec)


@cache
def _order_of_one_process(spec: ModelSpec) -> list[str]:
    return order_of_gradients(spec, Strategy(dp=2, zero=2))


@st.composite
def priced(draw: st.DrawFn) -> tuple[tuple[ModelSpec, Job, Strategy, int], bool]:
    """And whether its backward pass is in two parts."""
    split, biased, heads = draw(st.booleans()), draw(st.booleans()), draw(st.sampled_from([4, 8]))
    spec = small(
        draw(st.sampled_from([None, 48, 700])),
        draw(st.sampled_from([2, 8, 24, 100])),
        draw(st.sampled_from([8, 40, 600])),
        hidden=draw(st.sampled_from([32, 256])),
        heads=heads,
        kv_heads=heads,
        head_dim=24,
        ffn=draw(st.sampled_from([32, 512])),
        max_seq=256,
        residual=draw(st.sampled_from(["serial", "parallel", "parallel_one_norm"])),
        window=draw(st.sampled_from([None, 50])),
        qkv_bias=biased,
        out_bias=biased,
    )
    precision = Precision(draw(st.sampled_from(["float32", "bfloat16", "float64"])))
    job = Job(4, 256, precision, documents=draw(st.sampled_from(["packed", "separate"])))
    repeat = draw(st.sampled_from(["none", "selective", "full"]))
    s = replace(
        draw(st.sampled_from(unit_bytes.LAYOUTS)), micro_batch=draw(st.sampled_from([1, 2])), recompute=repeat
    )
    return (spec, job, s, draw(st.integers(0, s.world - 1))), split


@examples(3, 100)
def test_bytes_and_flops_are_predicted(examples: int) -> None:
    @settings(max_examples=examples)
    @given(priced())
    def holds(case: tuple[Any, bool]) -> None:
        unit_bytes.compare(*case)

    holds()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", [Strategy(), Strategy(tp=2, sp=True), Strategy(cp=2)], ids=str)
def test_rotary_angles_outlive_the_mask_of_documents(layout: Strategy, split: bool) -> None:
    """Where the latent is wide, its norm's backward pass is the peak, and the queries are yet to be rotated back."""
    spec = small(None, 2, 600, hidden=32, heads=4, head_dim=24, ffn=32, max_seq=256)
    job = Job(4, 256, Precision("float64"), documents="separate")
    unit_bytes.compare((spec, job, replace(layout, micro_batch=2), 0), split)


def test_what_stands_with_a_star_is_kept_and_nothing_else() -> None:
    """The table of nn/mla.py, by a block more in the same model."""
    job, tokens = Job(2, 128), 256
    for spec in (small(max_seq=128), small(q_rank=None, v_dim=16, max_seq=128), small(v_dim=12, max_seq=128)):
        found = {}
        for mode in ("none", "selective"):
            s = Strategy(micro_batch=2, recompute=mode)  # type: ignore[arg-type]
            one, two = (live(replace(spec, layers=n), job, s, lambda part, loss: loss) for n in (1, 2))
            found[mode] = two - one
        a = spec.latent
        assert a is not None
        heads, width = spec.heads, max(spec.head_dim, a.v_dim)
        into = spec.hidden + (2 * a.q_rank + 1 if a.q_rank else 0)  # x, down, normed q; numbers of norms
        into += a.kv_rank + a.rope_dim + 1 + a.kv_rank
        core = 4 * heads * width + heads + (heads * a.v_dim if a.v_dim < width else 0)
        others = 2 * (spec.hidden + 1) + spec.hidden + 3 * spec.ffn  # both norms and the MLP
        assert found["none"] == 4 * tokens * (into + core + others)
        assert found["selective"] == 4 * tokens * (into + 3 * heads * width + others)


@pytest.mark.parametrize(
    "strategy",
    sampled(
        [
            Strategy(tp=2, sp=True, dp=2, ep=4, zero=1),
            Strategy(tp=2, dp=2, ep=2, etp=2, zero=3, recompute="selective"),
            Strategy(cp=2, tp=2, ep=4, sp=True, recompute="full"),
            Strategy(pp=2, tp=2, ep=2, schedule="zb-h1", micro_batch=2),
        ],
        (1, 3),
    ),
    ids=str,
)
def test_so_does_all_of_deepseek_v3(pool: Pool, strategy: Strategy) -> None:
    """With its experts, chosen in groups by sigmoids and balance biases."""
    routed = {"count": 8, "top_k": 3, "ffn": 24, "shared_ffn": 16, "dense_layers": [0], "balance_loss": 0.01}
    groups = {"groups": 4, "top_groups": 2, "scale": 2.5}
    spec = small(family="deepseek_v3", layers=3, experts=routed | groups)
    job = Job(2 * strategy.dp * strategy.micro_batch, 16)
    for found in pool.run(4, rank_cases.examine, spec, job, strategy, "float64", 3, "shm", ("adamw",))[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    sampled(
        [
            (Strategy(recompute="selective"), {"v_dim": 24}),
            (Strategy(tp=2, sp=True, recompute="selective"), {}),
            (Strategy(tp=2, dp=4, zero=3, recompute="full"), {"q_rank": None, "qkv_bias": True}),
            (Strategy(cp=4, ulysses=2, zero=2), {}),
            (Strategy(pp=2, tp=2, sp=True, schedule="zb-h1"), {"v_dim": 24}),
        ],
        (2, 3, 4),
    ),
    ids=str,
)
def test_a_step_is_proved_event_for_event_and_in_live_bytes(strategy: Strategy, sizes: dict[str, Any]) -> None:
    spec = small(**{"vocab": 1021, "hidden": 96, "heads": 8, "kv_heads": 8, "ffn": 256, "max_seq": 256} | sizes)
    for found in verify(spec, Job(strategy.dp * 2, 128), strategy):
        assert not found.failed
        assert found.differences == ()
        assert found.deviation is not None
        assert found.deviation < SLACK_BYTES
