"""Products of 8-bit floats: what they compute, what a step with them holds and does, and where they are refused."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fresh_process import in_fresh_process
from support.in_process_cli import error_of, phalanx
from support.rank_pool import Pool
from support.sizes import examples
from torch import Tensor

from phalanx.cost.step.predict import predict
from phalanx.observation.parity.parity import gradient_errors
from phalanx.observation.trainer.step import gpu_device, record_step
from phalanx.observation.trainer.verify import verify
from phalanx.observation.unobservable import Unobservable
from phalanx.planning.search.space import cores, experts
from phalanx.planning.search.strategy_columns import Options
from phalanx.runtime.autograd import narrow_product, recompute
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, World
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision, Products
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NUMBER_FORMATS, NumberFormat
from phalanx.spec.strategy.legality import check, require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

KINDS: tuple[Products, ...] = ("float8", "float8-row")
BLOCKS: tuple[Products, ...] = ("mxfp8", "nvfp4")
"""Formats whose blocks of a row share a scale (test_narrow_blocks.py has their numbers)."""
NEAR = {"float8": 0.08, "float8-row": 0.08, "mxfp8": 0.06, "nvfp4": 0.2}
"""How far a product is from that of the compute type, of its norm."""
SIZES = {"vocab": 512, "hidden": 64, "layers": 2, "heads": 4, "ffn": 192, "max_seq": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", **SIZES, "kv_heads": 2},
    "gpt2": {"family": "gpt2", **SIZES},
    "qwen3": {"family": "qwen3", **SIZES},
    "palm": {"family": "palm", **SIZES},
    "experts": {
        "family": "llama",
        **SIZES,
        "kv_heads": 2,
        "experts": {"count": 6, "top_k": 2, "ffn": 64, "shared_ffn": 64, "dense_layers": [1]},
    },
    "latent": {
        "family": "llama",
        **SIZES,
        "latent": {"q_rank": 48, "kv_rank": 32, "rope_dim": 16, "nope_dim": 16, "v_dim": 32},
    },
}
WIDER: dict[str, Any] = {"hidden": 128, "ffn": 256}
"""Sizes whose shards are multiples of 32."""
WIDER_PARTS: dict[str, dict[str, Any]] = {
    "latent": {"latent": {"q_rank": 64, "kv_rank": 32, "rope_dim": 32, "nope_dim": 32, "v_dim": 32}},
    "experts": {"experts": {**FAMILIES["experts"]["experts"], "ffn": 128, "shared_ffn": 128}},
}
STRATEGIES = (
    "dp=1",
    "dp=2,zero=3",
    "dp=1,recompute=full",
    "dp=2,zero=2,recompute=selective",
    "dp=4,zero=1,shard=2",
    "tp=2",
    "tp=2,dp=2,zero=3,recompute=full",
    "tp=4,recompute=selective",
    "cp=2",
    "dp=2,cp=2,ulysses=2,zero=3,recompute=full",
    "pp=2",
    "pp=2,dp=2,zero=2,schedule=zb-h1,recompute=full",
    "tp=2,sp=1",
    "tp=2,sp=1,recompute=full",
    "tp=2,sp=1,pp=2,schedule=zb-h1,recompute=selective",
)
EXPERTS = ("dp=2,ep=2", "tp=2,sp=1,ep=2,zero=2", "dp=2,pp=2,ep=2,etp=1,schedule=zb-h1")
SAMPLE: tuple[tuple[str, str, Products], ...] = (
    ("llama", "tp=2,sp=1,pp=2,schedule=zb-h1,recompute=selective", "float8"),
    ("experts", "dp=2,ep=2", "float8-row"),
    ("latent", "tp=2,sp=1,pp=2,schedule=zb-h1,recompute=selective", "mxfp8"),
    ("experts", "tp=2,sp=1,ep=2,zero=2", "nvfp4"),
    ("gpt2", "tp=2,dp=2,zero=3,recompute=full", "mxfp8"),
    ("gpt2", "tp=2,dp=2,zero=3,recompute=full", "float8"),
)
"""The cases of the suite: (family, strategy, products)."""


def _model(family: str = "llama", **fields: object) -> ModelSpec:
    return build(ModelSpec, complete(FAMILIES[family] | fields), "model")


def _drawn(rows: int, columns: int, seed: int, spread: float) -> Tensor:
    """Numbers of very different sizes: rows differ by up to e^spread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp(torch.rand(rows, 1, generator=generator) * spread)).bfloat16()


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 99),
    st.floats(0, 9),
    st.sampled_from(KINDS),
)
@settings(max_examples=40, deadline=None)
def test_a_product_is_that_of_the_rounded_operands(
    m: int, n: int, k: int, seed: int, spread: float, kind: str
) -> None:
    operands = NUMBER_FORMATS[kind]
    a, b = _drawn(16 * m, 16 * k, seed, spread), _drawn(16 * n, 16 * k, seed + 1, spread)
    narrow_a, of_a, _ = narrow_product.round_operand(a, operands)
    narrow_b, of_b, _ = narrow_product.round_operand(b, operands)
    exact = (narrow_a.double() * of_a) @ (narrow_b.double() * of_b).t()
    size = (narrow_a.double() * of_a).abs() @ (narrow_b.double() * of_b).abs().t()
    out = narrow_product.product(a, b, operands)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-18 * size).all()  # bf16; sums in fp32


@given(st.integers(1, 5), st.integers(0, 99), st.floats(0, 9), st.sampled_from(KINDS), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_number_is_rounded_once_at_the_largest_scale_that_fits(
    m: int, seed: int, spread: float, kind: str, gradient: bool, turned: bool
) -> None:
    operands, by_row = NUMBER_FORMATS[kind], NUMBER_FORMATS[kind].scales == "row"
    dtype = narrow_product.dtype_of(operands, gradient)
    digits, least = (2, -16) if dtype == narrow_product.E5M2 else (3, -9)
    x = _drawn(16 * m, 32, seed, spread)
    x = x.t() if turned else x
    narrow, back, _ = narrow_product.round_operand(x, operands, gradient)
    assert narrow.is_contiguous()
    assert back.shape == ((len(x), 1) if by_row else ())
    assert torch.equal(back, torch.exp2(back.log2().round()))  # powers of two, so that scaling is exact
    largest = x.abs().float().amax(1, keepdim=True) if by_row else x.abs().float().amax()
    most = torch.finfo(dtype).max
    assert (largest / back <= most).all()
    assert (2 * largest / back > most).all()
    error = (narrow.double() * back - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2.0 ** -(digits + 1), back.double() * 2.0 ** (least - 1))).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", NEAR)
def test_what_is_not_finite_stays_so(value: float, kind: str) -> None:
    operands = NUMBER_FORMATS[kind]
    a, b = torch.zeros(16, 32).bfloat16(), torch.ones(16, 32).bfloat16()
    assert not narrow_product.product(a, b, operands).any()  # zeros have no scale, and are no fault
    a[3, 5] = value
    assert not torch.isfinite(narrow_product.product(a, b, operands)[3]).any()


@pytest.mark.parametrize("kind", NEAR)
def test_a_layer_and_its_gradients_are_near_those_of_the_compute_type(kind: str) -> None:
    x, w, b = _drawn(64, 128, 1, 2).view(2, 32, 128), _drawn(96, 128, 2, 2), _drawn(1, 96, 3, 0)[0]
    g = _drawn(64, 96, 4, 2).view(2, 32, 96)
    results = []
    for of in (lambda *t: recompute.product(*t, True, NUMBER_FORMATS[kind]), torch.nn.functional.linear):
        given = [t.clone().requires_grad_() for t in (x, w, b)]
        out = of(*given)
        results.append([out.detach(), *torch.autograd.grad(out, given, g)])
    for ours, exact in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - exact).float().norm() <= NEAR[kind] * exact.float().norm()


@cache
def _steps(products: Products, n: int) -> list[float]:
    model, s = _model(), Strategy(micro_batch=4)
    job = Job(4, 32, Precision("bfloat16", products=products))
    training = Training(model, job, s, Comm(ALONE, mesh(s)), seed=0)
    tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    return [training.step([tokens], 3e-3).loss for _ in range(n)]


@pytest.mark.parametrize("products", NEAR)
def test_a_model_learns_as_with_products_of_the_compute_type(products: Products) -> None:
    plain, ours = _steps("compute", 8), _steps(products, 8)
    assert ours != plain
    assert ours[-1] < ours[0] - 1
    assert all(abs(a - b) < 0.05 * b for a, b in zip(ours, plain, strict=True))


OVER_RANKS = (
    ("llama", "tp=2,micro_batch=4"),
    ("llama", "dp=2,zero=3,micro_batch=2"),
    ("llama", "tp=2,sp=1,micro_batch=4"),
    ("llama", "pp=2,micro_batch=2"),
    ("llama", "pp=2,micro_batch=2,schedule=zb-h1"),
    ("latent", "tp=2,sp=1,micro_batch=4,recompute=selective"),
    ("experts", "dp=2,ep=2,micro_batch=2"),
    ("experts", "pp=2,micro_batch=2,schedule=zb-h1"),
)


def gradients(
    world: World, products: Products, cases: tuple[tuple[str, str], ...]
) -> list[tuple[dict[str, Tensor], float]]:
    """Of one step of each (family, strategy): gradients of every logical parameter, and their norm."""
    result = []
    for family, line in cases:
        s = make_strategy(line)
        assert s is not None
        job = Job(4, 32, Precision("bfloat16", products=products))
        fields: dict[str, object] = {} if family == "latent" else {"kv_heads": 4}
        if (
            family == "experts"
        ):  # all: where a router has near ties, rounding makes other choices, and other gradients
            fields["experts"] = FAMILIES["experts"]["experts"] | {"top_k": 6}
        training = Training(_model(family, ffn=128, vocab=64, **fields), job, s, Comm(world, mesh(s)), seed=0)
        tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
        own = tokens[world.rank // s.tp % s.dp :: s.dp]
        norm = training.step(list(own.split(s.micro_batch)), 0.0).grad_norm
        result.append((training.gradients(), norm))
    return result


def test_gradients_over_ranks_are_near_those_of_one_process(pool: Pool) -> None:
    alone = tuple((family, "micro_batch=4") for family in ("llama", "latent", "experts"))
    exact = dict(zip(("llama", "latent", "experts"), gradients(ALONE, "compute", alone), strict=True))
    over = list(zip(*pool.run(2, gradients, "float8", OVER_RANKS), strict=True))
    for (family, line), ranks in zip(OVER_RANKS, over, strict=True):
        theirs, norm = exact[family]
        ours = {name: gradient for gradients_, _ in ranks for name, gradient in gradients_.items()}
        assert ours.keys() == theirs.keys(), line
        errors = dict(gradient_errors(ours, theirs))
        assert 1e-3 < max(errors.values()) < 0.15, (family, line, errors)
        assert all(abs(n / norm - 1) < 0.02 for _, n in ranks), (family, line)


def _unproved(examples: int, on_gpu: bool) -> list[str]:
    found = []
    kinds = (*KINDS, *BLOCKS)
    every = [(family, line, kind) for kind in kinds for line in STRATEGIES for family in FAMILIES]
    every += [("experts", line, kind) for kind in kinds for line in EXPERTS]
    cases = SAMPLE if examples <= len(SAMPLE) else every[:: max(1, len(every) // examples)]
    for family, line, kind in cases[-examples:] if on_gpu else cases[:examples]:
        s = make_strategy(line)
        assert s is not None
        job = Job(2 * s.dp * s.pp, 64, Precision("bfloat16", products=kind))
        model = _model(family)
        if kind in BLOCKS:
            model = _model(family, **WIDER, **WIDER_PARTS.get(family, {}))
        check(s, model, job, None)
        for v in verify(model, job, s, on_gpu=on_gpu):
            if not v.proved:
                found.append(f"{family} {line} {kind}: {v.failed} {[str(d) for d in v.differences]}")
            elif not on_gpu and v.deviation > 4096:
                found.append(f"{family} {line} {kind}: live bytes off by {v.deviation}")
    return found


@examples(4, 160)
def test_events_flops_and_live_bytes_are_the_programs(examples: int) -> None:
    assert _unproved(examples, on_gpu=False) == []


@examples(1, 80)
def test_the_step_keeps_the_rules_of_a_gpu_and_what_breaks_one_is_named_with_its_line(examples: int) -> None:
    unproved, said = in_fresh_process(_on_gpu, examples, patience_s=900)
    assert unproved == []
    assert "each contiguous, at phalanx/runtime/autograd/narrow_product.py:" in said


def _on_gpu(examples: int) -> tuple[list[str], str]:
    return _unproved(examples, on_gpu=True), _turned("float8")


def _turned(products: Products) -> str:
    """What is said of operands in the layout that tensor cores do not take."""
    real = narrow_product.round_operand

    def as_it_lies(x: Tensor, operands: NumberFormat, gradient: bool = False) -> narrow_product.RoundedOperand:
        narrow, back, _ = real(x, operands, gradient)
        return narrow_product.RoundedOperand(narrow.t().contiguous().t(), back)

    narrow_product.round_operand = as_it_lies
    try:
        record_step(_model(), Job(2, 64, Precision("bfloat16", products=products)), Strategy(), 0, gpu_device())
    except Unobservable as error:
        return str(error)
    finally:
        narrow_product.round_operand = real
    return ""


REFUSED: list[tuple[dict[str, object], str, Precision, str]] = [
    ({}, "dp=1", Precision("float32", products="float8"), "needs job.precision.compute = bfloat16, not float32"),
    ({"ffn": 176}, "tp=2", Precision("bfloat16", products="float8"), "model.ffn over 2 ranks = 88"),
    ({"ffn": 100}, "dp=1", Precision("bfloat16", products="float8"), "takes multiples of 16, and model.ffn = 100"),
    (
        {"experts": {"count": 4, "top_k": 2, "ffn": 48}},
        "tp=2,etp=2",
        Precision("bfloat16", products="float8"),
        "model.experts.ffn over 2 ranks = 24",
    ),
    (
        {"latent": {"kv_rank": 24, "rope_dim": 8, "nope_dim": 8, "v_dim": 16}, "kv_heads": 4},
        "dp=1",
        Precision("bfloat16", products="float8"),
        "model.latent.kv_rank = 24",
    ),
    ({}, "cp=8", Precision("bfloat16", products="float8"), "and tokens of a micro-batch on a rank = 8"),
]


@pytest.mark.parametrize(("fields", "line", "precision", "expected"), REFUSED)
def test_what_it_is_not_made_for_is_refused(
    fields: dict[str, object], line: str, precision: Precision, expected: str
) -> None:
    s = make_strategy(line)
    assert s is not None
    job = Job(2 * s.dp, 64, precision)

    def required() -> None:
        require_runnable(s, job)
        check(s, _model(**fields), job, None)

    with pytest.raises(InputError) as caught:
        required()
    assert caught.value.field == "job.precision.products"
    assert expected in str(caught.value)


def test_ranks_that_share_a_head_of_keys_hold_all_of_it() -> None:
    """Palm has one head, of 16 numbers, which two ranks do not split."""
    s = make_strategy("tp=2")
    assert s is not None
    check(s, _model("palm"), Job(2, 64, Precision("bfloat16", products="float8")), None)


@pytest.mark.parametrize("mixture", [None, {"count": 4, "top_k": 2, "ffn": 96}])
def test_the_search_has_what_runs(mixture: dict[str, int] | None) -> None:
    model = _model(hidden=256, ffn=512, heads=8, experts=mixture) if mixture else _model(hidden=256, ffn=512, heads=8)
    plain, eight = (Job(8, 64, Precision("bfloat16", products=kind)) for kind in ("compute", "float8"))
    rows, every = (experts(cores(model, job, 8), model, job, Options()) for job in (eight, plain))
    assert 0 < len(rows) < len(every)
    assert {2, 4} <= set(rows.tp.tolist())
    assert {0, 1} == set(rows.sp.tolist())

    def runs(s: Strategy) -> bool:
        try:
            check(s, model, eight, 8)
        except InputError:
            return False
        return True

    assert sorted(map(str, rows.strategies())) == sorted(str(s) for s in every.strategies() if runs(s))


def test_the_price_knows_the_rate_of_8_bit_products() -> None:
    """And that rounding costs passes over memory, so that it pays with many tokens only."""
    model = _model(hidden=4096, ffn=14336, heads=32, kv_heads=8, max_seq=4096)
    h100, a100, s = preset("dgx-h100", 1), preset("dgx-a100", 1), Strategy(dp=8, micro_batch=4)

    def faster(seq: int) -> float:
        plain, eight = (
            predict(model, h100, Job(32, seq, Precision("bfloat16", products=kind)), s)
            for kind in ("compute", "float8")
        )
        assert plain.flops == eight.flops
        return plain.step_time_s / eight.step_time_s

    assert faster(4096) > 1.05 > faster(16)
    eight = Job(32, 4096, Precision("bfloat16", products="float8"))
    with pytest.raises(InputError, match=r"has no rate on A100.*no products of FP8"):
        predict(model, a100, eight, s)


def test_the_command_verifies_them(tmp_path: Any) -> None:
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 320, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    line = "verify --model config.json --cluster {} --gpus 2 --strategy tp=2,sp=1 --batch 2 --seq 128 --precision fp8"
    code, out, err = phalanx(tmp_path, *line.format("dgx-h100").split())
    assert (code, err) == (0, err)
    assert "proved" in out
    assert "is a type that A100-SXM4-80GB lacks" in error_of(tmp_path, *line.format("dgx-a100").split())
