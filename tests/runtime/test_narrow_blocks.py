"""Operands whose blocks share a scale (MXFP8, NVFP4): their numbers, products over ranks, prices and exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import error_of, phalanx
from support.rank_pool import Pool
from torch import Tensor

from phalanx.cost.step.predict import predict
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.frameworks.writing.subject import subject
from phalanx.runtime.autograd import narrow_product
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, World
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job, Precision, Products, Train
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.spec.strategy.legality import check, require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

KINDS: tuple[Products, ...] = ("mxfp8", "nvfp4")
LEVELS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIZES = {"vocab": 64, "hidden": 128, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 128, "max_seq": 64}


def _drawn(rows: int, columns: int, seed: int, spread: float) -> Tensor:
    """Numbers of very different sizes: blocks of 8 columns differ by up to e^spread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    sizes = torch.exp(torch.rand(rows, -(-columns // 8), generator=generator) * spread)
    return (x * sizes.repeat_interleave(8, 1)[:, :columns]).bfloat16()


def _by_hand(x: Tensor, kind: str) -> np.ndarray:
    """Round one number at a time, as the formats' papers define it; zeros fill up the last block."""
    size, wide = NUMBER_FORMATS[kind].values_per_scale, x.double().numpy()
    whole = 2.0 ** np.floor(np.log2(6 * 448 / np.abs(wide).max()))
    out = np.zeros_like(wide)
    for row, begin in np.ndindex(len(wide), -(-wide.shape[1] // size)):
        block = wide[row, begin * size : (begin + 1) * size]
        largest = np.abs(block).max()
        if kind == "mxfp8":
            scale = 2.0 ** np.floor(np.log2(448 / largest)) if largest else 1.0
            codes = torch.tensor(block * scale).to(torch.float8_e4m3fn).double().numpy()
            out[row, begin * size : (begin + 1) * size] = codes / scale
            continue
        scale = max(float(torch.tensor(largest * whole / 6).to(torch.float8_e4m3fn)), 2.0**-9)
        for i, value in enumerate(block * whole / scale):
            distance = np.abs(LEVELS - abs(value))
            near = np.flatnonzero(distance == distance.min())
            level = LEVELS[next((k for k in near if k % 2 == 0), near[0])]  # of two as near, the even code
            out[row, begin * size + i] = np.copysign(level, value) * scale / whole
    return out


@given(st.integers(1, 3), st.integers(1, 90), st.integers(0, 99), st.floats(0, 9), st.sampled_from(KINDS))
@settings(max_examples=40, deadline=None)
def test_numbers_are_rounded_as_the_formats_define(rows: int, n: int, seed: int, spread: float, kind: str) -> None:
    x, operands = _drawn(rows, n, seed, spread), NUMBER_FORMATS[kind]
    for lies in (x, x.t().contiguous().t()):
        numbers, scales, whole = narrow_product.to_blocks(lies, kind)
        held = numbers.nbytes + scales.nbytes
        width = n + -n % operands.multiple
        assert held == rows * operands.bytes_of(width) == rows * width * operands.bytes_per_value
        values = narrow_product.values(numbers, scales, whole)
        assert np.array_equal(values[:, :n].double().numpy(), _by_hand(x, kind))
        assert not values[:, n:].any()


def test_a_number_between_two_levels_gets_the_even_code() -> None:
    middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    rounded = narrow_product.values(*narrow_product.to_blocks(torch.tensor([middles * 2]), "nvfp4"))
    assert rounded[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 99), st.sampled_from(KINDS))
@settings(max_examples=30, deadline=None)
def test_a_product_is_that_of_the_rounded_operands(m: int, n: int, k: int, seed: int, kind: str) -> None:
    operands = NUMBER_FORMATS[kind]
    a, b = _drawn(16 * m, 16 * k, seed, 3), _drawn(16 * n, 16 * k, seed + 1, 3)
    exact = torch.tensor(_by_hand(a, kind)) @ torch.tensor(_by_hand(b, kind)).t()
    size = torch.tensor(_by_hand(a, kind)).abs() @ torch.tensor(_by_hand(b, kind)).abs().t()
    out = narrow_product.product(a, b, operands)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= 2**-8 * exact.abs() + 2**-18 * size).all()  # bf16; sums in fp32
    into = torch.full_like(out, 3.0)
    assert narrow_product.product(a, b, operands, out=into) is into
    assert torch.equal(into, out)
    narrow_product.product(a, b, operands, out=into, add=True)
    assert torch.equal(into, out + out)


def test_scales_lie_as_tensor_cores_read_them() -> None:
    """cuBLAS: a tile of 128 x 4 scales; row r of column c is at (r % 32) x 16 + (r / 32) x 4 + c."""
    rows, blocks = 200, 6
    scales = torch.arange(rows * blocks, dtype=torch.int64).remainder(251).to(torch.uint8).view(rows, blocks)
    laid = narrow_product.tile_scales(scales)
    assert len(laid) == 256 * 8
    for r, c in np.ndindex(rows, blocks):
        tile = (r // 128) * 2 + c // 4
        assert laid[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] == scales[r, c]


OVER_RANKS = (
    ("tp=2,micro_batch=4", {}),
    ("tp=2,sp=1,micro_batch=4", {}),
    ("dp=2,zero=3,micro_batch=2", {}),
    ("pp=2,micro_batch=2,schedule=zb-h1", {}),
    ("dp=2,ep=2,micro_batch=2", {"experts": {"count": 4, "top_k": 4, "ffn": 64, "shared_ffn": 64}}),
)


def gradients(
    world: World, kind: Products, lines: tuple[tuple[str, dict[str, object]], ...]
) -> list[dict[str, Tensor]]:
    """Of one step under each strategy: gradients of every logical parameter."""
    result = []
    for line, fields in lines:
        s = make_strategy(line)
        assert s is not None
        model = build(ModelSpec, complete({"family": "llama", **SIZES, **fields}), "model")
        job = Job(4, 32, Precision("bfloat16", products=kind))
        training = Training(model, job, s, Comm(world, mesh(s)), seed=0)
        tokens = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
        own = tokens[world.rank // s.tp % s.dp :: s.dp]
        training.step(list(own.split(s.micro_batch)), 0.0)
        result.append(training.gradients())
    return result


@pytest.mark.parametrize(("kind", "bound"), [("mxfp8", 0.03), ("nvfp4", 0.12)])
def test_gradients_over_ranks_are_near_those_of_one_process_in_the_same_format(
    pool: Pool, kind: Products, bound: float
) -> None:
    """A rank's blocks of 32 numbers are blocks of the whole; the tensor of which nvfp4 has a scale is the rank's."""
    alone = gradients(ALONE, kind, tuple(("micro_batch=4", fields) for _, fields in OVER_RANKS))
    over = list(zip(*pool.run(2, gradients, kind, OVER_RANKS), strict=True))
    for (line, _), exact, ranks in zip(OVER_RANKS, alone, over, strict=True):
        ours = {name: gradient for of_rank in ranks for name, gradient in of_rank.items()}
        assert ours.keys() == exact.keys(), line
        whole = torch.cat([(ours[name] - exact[name]).flatten().float() for name in exact]).norm()
        assert whole <= bound * torch.cat([g.flatten().float() for g in exact.values()]).norm(), line


REFUSED = [
    ("dp=1", {"ffn": 112}, Precision("bfloat16", products="mxfp8"), "takes multiples of 32, and model.ffn = 112"),
    ("tp=8", {"heads": 8, "kv_heads": 8}, Precision("bfloat16", products="nvfp4"), "over 8 ranks = 16"),
    ("dp=1", {}, Precision("float32", products="nvfp4"), "needs job.precision.compute = bfloat16"),
    ("dp=2,zero=3", {}, Precision("bfloat16", products="mxfp8", gather="float8"), "has scales of blocks"),
]


@pytest.mark.parametrize(("line", "fields", "precision", "said"), REFUSED)
def test_what_it_is_not_made_for_is_refused(
    line: str, fields: dict[str, object], precision: Precision, said: str
) -> None:
    s = make_strategy(line)
    assert s is not None
    model, job = build(ModelSpec, complete({"family": "llama", **SIZES, **fields}), "model"), Job(8, 64, precision)

    def required() -> None:
        require_runnable(s, job)
        check(s, model, job, None)

    with pytest.raises(InputError, match=said):
        required()


def test_the_price_is_that_of_the_formats_row() -> None:
    """On Blackwell MXFP8 takes as long as FP8 but for its scales, NVFP4 is shorter; Hopper has no tensor cores."""
    large = {"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "max_seq": 4096, "layers": 4}
    model = build(ModelSpec, complete({"family": "llama", **SIZES, **large}), "model")
    s, job = Strategy(dp=8, micro_batch=4), Job(32, 4096, Precision("bfloat16"))

    def price(cluster: str, kind: Products) -> tuple[float, int]:
        p = predict(model, preset(cluster, 1), replace(job, precision=Precision("bfloat16", products=kind)), s)
        return p.step_time_s, p.memory_bytes

    seconds, memory = zip(*(price("dgx-b200", kind) for kind in ("compute", "float8", "mxfp8", "nvfp4")), strict=True)
    assert seconds[3] < seconds[1] < seconds[0]
    assert 1 < seconds[2] / seconds[1] < 1.01
    assert memory[3] <= memory[1] <= memory[2]
    for kind, title in (("mxfp8", "MXFP8"), ("nvfp4", "NVFP4")):
        with pytest.raises(InputError, match=rf"job\.precision\.products = '{kind}': has no rate on H100.* {title}"):
            price("dgx-h100", kind)  # type: ignore[arg-type]


def test_commands_refuse_it_on_chips_without_such_tensor_cores(tmp_path: Path) -> None:
    asked = (
        "predict --model llama3-8b --gpus 8 --batch 64 --seq 2048 --strategy zero=3 --stack megatron-core --cluster"
    )
    for word in ("mxfp8", "nvfp4"):
        assert phalanx(tmp_path, *asked.split(), "dgx-b200", "--precision", word)[0] == 0
        err = error_of(tmp_path, *asked.split(), "dgx-h100", "--precision", word)
        assert f"--precision = '{word}': is a type that H100" in err
        assert err.rstrip().endswith("use bf16 or fp8 or fp8-block")


@pytest.mark.parametrize(
    ("stack", "kind", "expected"),
    [
        ("megatron-core", "mxfp8", "mxfp8"),
        ("megatron-core", "nvfp4", "nvfp4"),
        ("torchtitan", "mxfp8", "mxfp8"),
        ("torchtitan", "nvfp4", None),
        ("fsdp2", "mxfp8", None),
        ("megatron-core", "float8-row", None),
    ],
)
def test_an_export_multiplies_what_the_job_does_or_is_refused(
    stack: str, kind: Products, expected: str | None
) -> None:
    model = build(ModelSpec, complete({"family": "llama", **SIZES}), "model")
    job = Job(8, 64, Precision("bfloat16", products=kind))
    s = Strategy(dp=8, zero=1 if stack == "megatron-core" else 3)
    plan = Plan(model, preset("dgx-b200", 1), job, s, Train(), {}, {})
    if expected is None:
        with pytest.raises(InputError, match="products"):
            subject(plan, DOCUMENTED[stack])
    else:
        assert subject(plan, DOCUMENTED[stack]).options.products == expected
