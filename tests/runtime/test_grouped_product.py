"""Products of experts' rows as a GPU takes them, all experts at once: here on the CPU, by torch's loop over groups,
and in the step on a fake GPU."""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.fresh_process import in_fresh_process
from torch import Tensor, nn

from phalanx.nn.experts import expert_mlps
from phalanx.observation.trainer.verify import verify
from phalanx.runtime.autograd import grouped_product
from phalanx.runtime.autograd.deferred_weight_grads import GroupedProduct
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec


def _as_on_a_gpu(counts: Sequence[int], *operands: Tensor) -> grouped_product.RowEnds | None:
    return grouped_product.send_counts(counts, operands[0].device) if any(counts) else None


COUNTS = [(13, 0, 27), (1, 2, 37), (0, 0, 40)]
"""Rows of three experts."""


def _swiglu(counts: tuple[int, ...], at_once: bool) -> list[Tensor]:
    """Return the result of three experts' MLPs in bf16, and the gradients of their rows and weights."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((40, 16), (3, 24, 16), (3, 24, 16), (3, 16, 24))
    x, *weights = (torch.randn(s, generator=draw).bfloat16() for s in shapes)
    x.requires_grad_()
    gate, up, down = (nn.Parameter(w) for w in weights)
    with patch.object(grouped_product, "row_ends", _as_on_a_gpu if at_once else lambda *_: None):
        y = expert_mlps.swiglu(x, counts, gate, up, down)
        y.float().square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, gate, up, down) if t.grad is not None)]


@pytest.mark.parametrize("counts", COUNTS)
def test_all_at_once_is_one_after_the_other(counts: tuple[int, ...]) -> None:
    found, expected = _swiglu(counts, True), _swiglu(counts, False)
    assert len(found) == 5
    for a, b in zip(found, expected, strict=True):
        # The rows' gradient is a sum of two products, of which the second is rounded before it is added too.
        torch.testing.assert_close(a, b, rtol=0, atol=2**-7 * float(b.abs().max()))
    assert all(torch.equal(a, b) for a, b in zip(found[2:], expected[2:], strict=True))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("add", [False, True])
def test_gradients_of_weights_are_put_into_wider_memory(counts: tuple[int, ...], add: bool) -> None:
    g, x = torch.randn(40, 24).bfloat16(), torch.randn(40, 16).bfloat16()
    places = []
    for at_once in (True, False):
        place = torch.ones(3, 24, 16)
        GroupedProduct(g, x, counts, where=_as_on_a_gpu(counts, x) if at_once else None).write(place, add)
        places.append(place)
    assert torch.equal(*places)


def test_the_kernel_takes_aligned_matrices_in_bf16_off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.empty(4, 16, dtype=torch.bfloat16, device="meta")
    begins_later = torch.empty(80, dtype=torch.bfloat16, device="meta")[4:68].view(4, 16)
    assert grouped_product.fits(wide)
    monkeypatch.setattr(grouped_product, "send_counts", lambda *_: "sent")
    assert grouped_product.row_ends((3, 1), wide, wide) == "sent"
    for other in (wide.float(), wide[:, :12].clone(), begins_later):
        assert not grouped_product.fits(other)
        assert grouped_product.row_ends((3, 1), wide, other) is None
    assert grouped_product.row_ends((0, 0), wide) is None
    assert grouped_product.row_ends((1,) * 1024, wide) is None
    assert grouped_product.row_ends((3, 1), torch.empty(4, 16, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("line", ["dp=2,ep=2,micro_batch=1", "dp=2,zero=1", "dp=2,zero=3", "pp=2,schedule=zb-h1"])
def test_the_step_on_a_gpu_takes_them_and_has_the_flops_of_the_plan(line: str) -> None:
    proved, calls = in_fresh_process(_verified, line, False)
    assert proved
    assert calls["multiply_all"] >= 2 * 5  # gate, up, down; and backward to the rows of down and gate, in two layers
    assert calls["multiply_expert"] >= 2  # backward to the rows of up
    assert calls["expert_weight_gradient" if "zb" in line else "weight_gradients"] >= 2 * 3


def test_weights_that_begin_where_the_kernel_takes_none_go_one_by_one() -> None:
    """ZeRO-1 lays parameters out one after the other: behind a router's bias of four numbers."""
    proved, calls = in_fresh_process(_verified, "dp=2,zero=1", True)
    assert proved  # the fake GPU refuses operands that the kernel would refuse
    assert calls["multiply_all"]


def _verified(line: str, router_bias: bool) -> tuple[bool, Counter[str]]:
    """Take a step with two layers of experts on a fake GPU; return whether it is the plan's, and the calls."""
    sizes = {"family": "llama", "vocab": 61, "hidden": 64, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}
    experts = {"count": 4, "top_k": 2, "ffn": 32, "router_bias": router_bias}
    model = build(ModelSpec, complete({**sizes, "experts": experts}), "model")
    strategy = make_strategy(line)
    assert strategy is not None
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        real = getattr(grouped_product, name)

        def call(*args: Any) -> Any:
            calls[name] += 1
            return real(*args)

        return patch.object(grouped_product, name, call)

    with (
        counted("multiply_all"),
        counted("weight_gradients"),
        counted("multiply_expert"),
        counted("expert_weight_gradient"),
    ):
        found = list(verify(model, Job(4, 16, Precision("bfloat16")), strategy, on_gpu=True))
    return all(v.proved for v in found), calls
