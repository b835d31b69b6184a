"""The real step on an imagined GPU: no strategy mixes devices or makes the host wait, and what breaks a rule is
named with its line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import phalanx
from support.sizes import examples
from support.strategies import cases
from torch import Tensor

from phalanx.nn import functional
from phalanx.runtime.comm.in_flight import NotIssued
from phalanx.runtime.observe import host_values
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.verify.fake_step import Unverifiable, gpu_device, imagine
from phalanx.verify.gpu_rules import without_cuda
from phalanx.verify.verify import verify

SIZES = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}
MODEL = build(ModelSpec, complete(SIZES), "model")
EXPERTS = {"count": 4, "top_k": 2, "ffn": 16}
WITH_EXPERTS = build(ModelSpec, complete({**SIZES, "experts": EXPERTS}), "model")
JOB = Job(4, 8, Precision("bfloat16"))


@examples(2, 100)
def test_no_drawn_strategy_mixes_devices_or_makes_the_host_wait(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.sampled_from([1, 4, 8, 64]).flatmap(lambda ranks: cases(ranks, small=False, compressed=ranks < 100)))
    def check(case: Any) -> None:
        for found in verify(*case, on_gpu=True):
            assert found.proved, (str(case[2]), found.ranks, found.failed, [str(d) for d in found.differences])
            assert found.recorded is not None
            assert sum(found.recorded.waits.values()) == 0 or "threshold" in case[2].compression

    check()


@examples(2, 40)
def test_experts_make_the_host_wait_at_most_twice_a_layer(examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.sampled_from([1, 4, 8]).flatmap(lambda ranks: cases(ranks, small=False, experts=True)))
    def check(case: Any) -> None:
        for found in verify(*case, on_gpu=True):
            assert found.proved, (str(case[2]), found.ranks, found.failed, [str(d) for d in found.differences])

    check()


def test_the_waits_of_a_cut_accumulation_are_those_of_the_whole() -> None:
    strategy = make_strategy("dp=2,ep=2")
    assert strategy is not None
    for global_batch in (4, 8, 64):
        found = imagine(WITH_EXPERTS, Job(global_batch, 8), strategy, 0, gpu_device())
        (place,) = found.waits
        assert "expert.py" in place
        assert found.waits[place] == 2 * global_batch // 2  # once in each of two layers, micro-batch by micro-batch


def _after_swiglu(then: Callable[[Tensor], object]) -> Any:
    real = functional.swiglu

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        out = real(gate, up)
        then(out.detach())
        return out

    return swiglu


def _on_the_host_kernel(x: Tensor) -> object:
    heads = x.view(1, 1, -1, 8)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)


BROKEN: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda x: x.sum().item(), "reads an element on the host"),
    (lambda x: x.cpu(), "copies a tensor to the host"),
    (lambda x: x.to("cpu", non_blocking=True).float(), ""),
    (lambda x: x.nonzero(), "size of its result depends on what tensors hold"),
    (lambda x: x[x > 0], "by truth values"),
    (lambda x: x.masked_select(x > 0), "size of its result depends on"),
    (lambda x: x + torch.zeros(x.shape), "mixes tensors on the GPU and on cpu"),
    (lambda x: x[torch.zeros(1, dtype=torch.int64)], "the index is on the host"),
    (lambda x: torch.tensor([1.0, 2.0], device=x.device), "copies a tensor from the host and waits for it"),
    (lambda x: torch.zeros(3).to(x.device, non_blocking=True), "that is not pinned"),
    (lambda x: x.int().view(-1, 8).mm(x.int().view(8, -1)), "no CUDA kernel for torch.int32"),
    (_on_the_host_kernel, "has no CUDA kernel"),
]


@pytest.mark.parametrize(("then", "said"), BROKEN)
def test_what_breaks_a_rule_is_named_with_its_line(
    then: Callable[[Tensor], object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = make_strategy("dp=2,zero=2")
    assert strategy is not None
    monkeypatch.setattr(functional, "swiglu", _after_swiglu(then))
    if not said:  # a copy that does not wait
        imagine(MODEL, JOB, strategy, 0, gpu_device())
        return
    with pytest.raises(Unverifiable, match=said) as error:
        imagine(MODEL, JOB, strategy, 0, gpu_device())
    assert "test_on_a_gpu.py:" in str(error.value)
    imagine_on_host = pytest.raises(Unverifiable) if "depends" in said or "truth" in said or "reads" in said else None
    if imagine_on_host is None and then is not _on_the_host_kernel:
        imagine(MODEL, JOB, strategy, 0)  # nothing is wrong with it on the host


@pytest.mark.parametrize("line", ["tp=2", "tp=2,sp=1", "dp=2,zero=1", "dp=2,zero=3", "cp=2", "dp=2,compression=int8"])
def test_a_buffer_in_flight_is_not_used(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make_strategy(line)
    assert strategy is not None
    monkeypatch.setattr(NotIssued, "wait", lambda self: None)
    with pytest.raises(
        Unverifiable, match=r"(uses|overwrites) what \w+ of .*before anyone waited for it, at phalanx/"
    ):
        imagine(MODEL, JOB, strategy, 0, gpu_device())


def test_a_stated_wait_of_a_dense_step_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "swiglu", _after_swiglu(lambda x: host_values.read(x.sum().view(1), [0.0])))
    strategy = make_strategy("dp=2")
    assert strategy is not None
    (found,) = verify(MODEL, JOB, strategy, on_gpu=True)
    (difference,) = found.differences
    assert str(difference).startswith("waits of the host for the GPU in a step: predicted at most 0, recorded 4 (at ")


def test_the_table_of_kernels_is_torchs_own() -> None:
    missing = without_cuda()
    assert "_scaled_dot_product_flash_attention_for_cpu" in missing
    assert not missing & {
        "mm",
        "add.Tensor",
        "_fused_adamw_",
        "_foreach_mul_.Tensor",
        "silu_backward",
        "view",
        "copy_",
    }


def test_the_command(tmp_path: Path) -> None:
    line = "verify --model llama3-8b --cluster dgx-h100 --gpus 8 --strategy dp=8 --batch 64 --seq 128 --device"
    code, out, _ = phalanx(tmp_path, *line.split(), "cuda")
    assert code == 0
    assert "on an imagined GPU" in out
    assert "waits of the host for the GPU in a step: 0" in out
    code, _, err = phalanx(tmp_path, *line.split(), "rocm")
    assert code == 2
    assert "is neither cpu nor cuda" in err
