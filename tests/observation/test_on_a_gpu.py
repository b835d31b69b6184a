"""The real step on a fake GPU: no strategy mixes devices or makes the host wait, and what breaks a rule is
named with its line."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fresh_process import in_fresh_process
from support.in_process_cli import phalanx
from support.sizes import examples
from support.strategies import cases
from torch import Tensor
from torch._dynamo import trace_rules

from phalanx.nn.experts import mlp
from phalanx.observation.fake.gpu_rules import _only_views, without_cuda
from phalanx.observation.fake.world import fake_gpus
from phalanx.observation.trainer.step import gpu_device, record_step
from phalanx.observation.trainer.verify import verify
from phalanx.observation.unobservable import Unobservable
from phalanx.runtime.comm.handles import UnissuedHandle
from phalanx.runtime.model_parallel.context import ContextParallel
from phalanx.runtime.tracing import host_values
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

SIZES = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}
MODEL = build(ModelSpec, complete(SIZES), "model")
EXPERTS = {"count": 4, "top_k": 2, "ffn": 16}
WITH_EXPERTS = build(ModelSpec, complete({**SIZES, "experts": EXPERTS}), "model")
SHALLOW = build(ModelSpec, complete({**SIZES, "layers": 1}), "model")
JOB = Job(4, 8, Precision("bfloat16"))
aten = torch.ops.aten
QUICKSTART = Path(__file__).parents[2] / "examples/quickstart.toml"


@examples(2, 100)
def test_no_drawn_strategy_mixes_devices_or_makes_the_host_wait(examples: int) -> None:
    assert in_fresh_process(_drawn, examples, False, patience_s=900) == []


@examples(2, 40)
def test_experts_make_the_host_wait_at_most_twice_a_layer(examples: int) -> None:
    assert in_fresh_process(_drawn, examples, True, patience_s=900) == []


def _drawn(examples: int, experts: bool) -> list[str]:
    """Verify drawn strategies on a fake GPU; return what is wrong."""
    found = []
    ranks = st.sampled_from([1, 4, 8] if experts else [1, 4, 8, 64])

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=HealthCheck
    )
    @given(ranks.flatmap(lambda n: cases(n, small=False, compressed=n < 100 and not experts, experts=experts)))
    def check(case: Any) -> None:
        for v in verify(*case, on_gpu=True):
            waits = 0 if v.recorded is None else sum(v.recorded.waits.values())
            if not v.proved or (waits and not experts and "threshold" not in case[2].compression):
                found.append(f"{case[2]}: {v.failed} {[str(d) for d in v.differences]} {waits} waits")

    check()
    return found


def _after_swiglu(then: Callable[[Tensor], object]) -> Any:
    real = mlp.ACTIVATIONS["swiglu"]

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        out = real(gate, up)
        then(out.detach())
        return out

    return patch.dict(mlp.ACTIVATIONS, swiglu=swiglu)


def _on_the_host_kernel(x: Tensor) -> object:
    heads = x.view(1, 1, -1, 8)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)


def _part_of_statistics(x: Tensor) -> object:
    heads = x.bfloat16().view(1, 1, -1, 8)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    n, seed = heads.shape[2], torch.empty(2, dtype=torch.uint64, device=x.device)
    of_more = torch.zeros(2, 1, 2 * n, device=x.device)
    both = heads.expand(2, -1, -1, -1)
    return kernel(both, both, both, both, both, of_more[:, :, :n], None, None, n, n, 0.0, False, seed, seed)


BROKEN: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda x: x.sum().item(), "reads an element on the host"),
    (lambda x: x.cpu(), "copies a tensor to the host"),
    (lambda x: x.to("cpu", non_blocking=True).float(), ""),
    (lambda x: x.nonzero(), "size of its result depends on values"),
    (lambda x: x[x > 0], "by truth values"),
    (lambda x: x.masked_select(x > 0), "size of its result depends on"),
    (lambda x: x + torch.zeros(x.shape), "mixes tensors on the GPU and on cpu"),
    (lambda x: x[torch.zeros(1, dtype=torch.int64)], "the index is on the host"),
    (
        lambda x: torch.zeros(2)[torch.zeros(1, dtype=torch.int64, device=x.device)],
        "mixes tensors on the GPU and on cpu",
    ),
    (lambda x: torch.tensor([1.0, 2.0], device=x.device), "copies a tensor from the host and waits for it"),
    (lambda x: torch.zeros(3).to(x.device, non_blocking=True), "that is not pinned"),
    (lambda x: x.int().view(-1, 8).mm(x.int().view(8, -1)), "no CUDA kernel for torch.int32"),
    (_on_the_host_kernel, "has no CUDA kernel"),
    (_part_of_statistics, "reads its log-sum-exp, (2, 1, 40), as if it were contiguous"),
]


def _reads_a_table_of_the_host(self: Any, *args: Any, make: Any = ContextParallel.__init__) -> None:
    make(self, *args)
    torch.zeros(JOB.seq)[self.own]


IN_FLIGHT = ("tp=2", "tp=2,sp=1", "dp=2,zero=1", "dp=2,zero=3", "cp=2", "dp=2,compression=int8")


def _right_on_the_host(expected: str) -> bool:
    return any(word in expected for word in ("copies", "mixes", "index", "host;"))


def _said(line: str, device: torch.device) -> str:
    """Why a step on a device cannot be verified; "" if it can."""
    strategy = make_strategy(line)
    assert strategy is not None
    try:
        record_step(SHALLOW, replace(JOB, global_batch=2), strategy, 0, device)
    except Unobservable as error:
        return str(error)
    return ""


def _examined() -> dict[str, Any]:
    """What is said of steps that break a rule, on the GPU and on the host; and of waits."""
    found: dict[str, Any] = {"broken": [], "on the host": [], "in flight": [], "waits": []}
    for then, expected in BROKEN:
        with _after_swiglu(then):
            found["broken"].append(_said("dp=2,zero=2", gpu_device()))
            right = _right_on_the_host(expected)
            found["on the host"].append(_said("dp=2,zero=2", torch.device("cpu")) if right else None)
    found["rings"] = [_said(line, gpu_device()) for line in ("cp=2", "cp=4")]
    with patch.object(ContextParallel, "__init__", _reads_a_table_of_the_host):
        found["made"] = [_said("cp=2", device) for device in (gpu_device(), torch.device("cpu"))]
    with patch.object(UnissuedHandle, "wait", lambda self: None):
        found["in flight"] = [_said(line, gpu_device()) for line in IN_FLIGHT]
    strategy = make_strategy("dp=2,ep=2")
    assert strategy is not None
    for global_batch in (4, 8, 64):
        recorded = record_step(WITH_EXPERTS, Job(global_batch, 8), strategy, 0, gpu_device())
        found["waits"].append((global_batch, dict(recorded.waits)))
    with _after_swiglu(lambda x: host_values.read(x.sum().view(1), [0.0])):
        (checked,) = verify(MODEL, JOB, replace(strategy, ep=1), on_gpu=True)
    found["stated"] = [str(d) for d in checked.differences]
    for name in ("threshold:1e-4", "int8"):
        with nullcontext() if name != "int8" else _after_swiglu(lambda x: host_values.read(x.sum().view(1), [0.0])):
            (checked,) = verify(SHALLOW, Job(2, 8), Strategy(dp=2, compression=name), on_gpu=True)
        found[name] = [d.aspect for d in checked.differences]
    return found


@pytest.fixture(scope="module")
def examined() -> dict[str, Any]:
    """Done in one new process: torch's autograd knows the devices of a process's first backward pass only."""
    return dict(in_fresh_process(_examined))


@pytest.mark.parametrize("i", range(len(BROKEN)))
def test_what_breaks_a_rule_is_named_with_its_line(examined: dict[str, Any], i: int) -> None:
    said, expected = examined["broken"][i], BROKEN[i][1]
    if not expected:  # a copy that does not wait
        assert said == ""
        return
    assert expected in said
    assert "test_on_a_gpu.py:" in said
    assert examined["on the host"][i] == ("" if _right_on_the_host(expected) else None)


def test_mixed_devices_are_found_while_the_model_is_built(examined: dict[str, Any]) -> None:
    on_gpu, on_host = examined["made"]
    assert "aten.index.Tensor mixes tensors on the GPU and on cpu, at " in on_gpu
    assert on_host == ""


def test_a_step_waits_to_count_what_it_sends_and_for_nothing_else(examined: dict[str, Any]) -> None:
    assert examined["threshold:1e-4"] == []
    assert examined["int8"] == ["waits of the host for the GPU in a step"]


def test_rings_keep_the_rules(examined: dict[str, Any]) -> None:
    assert examined["rings"] == ["", ""]


def test_a_buffer_in_flight_is_not_used(examined: dict[str, Any]) -> None:
    for said in examined["in flight"]:
        assert re.search(r"(uses|overwrites) memory that \w+ of .*before a wait for it, at phalanx/", said)


def test_the_waits_of_a_cut_accumulation_are_those_of_the_whole(examined: dict[str, Any]) -> None:
    for global_batch, waits in examined["waits"]:
        (place,) = waits
        assert "expert.py" in place
        assert waits[place] == 2 * global_batch // 2  # once in each of two layers, micro-batch by micro-batch


def test_a_wait_in_a_dense_step_is_not_proved(examined: dict[str, Any]) -> None:
    (said,) = examined["stated"]
    assert said.startswith("waits of the host for the GPU in a step: predicted at most 0, recorded 4 (at ")


def _rules_of_the_compiler() -> int:
    with fake_gpus(1):
        return len(trace_rules.get_torch_obj_rule_map.__wrapped__())


def test_torchs_compiler_can_be_loaded_on_a_fake_gpu() -> None:
    """It lists the functions of torch.cuda, and refuses one that has several names under different rules."""
    assert in_fresh_process(_rules_of_the_compiler) > 1000


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


_TOUCHED: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    *((aten.view.default, ([6],)), (aten.t.default, ()), (aten.detach.default, ()), (aten.slice.Tensor, (0, 1))),
    *((aten.expand.default, ([5, 2, 3],)), (aten.add.Tensor, (1.0,)), (aten.clone.default, ())),
    *((aten.sum.default, ()), (aten.add_.Tensor, (1.0,)), (aten.zero_.default, ())),
)


@pytest.mark.parametrize(("func", "more"), _TOUCHED, ids=[str(func) for func, _ in _TOUCHED])
def test_views_share_the_memory_that_they_do_not_touch(func: Any, more: tuple[Any, ...]) -> None:
    x = torch.ones(2, 3)
    result = func(x, *more)
    shares = result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert _only_views(func) == (shares and x._version == 0)


def _command(folder: Path) -> list[tuple[int, str, str]]:
    line = f"verify {QUICKSTART} --strategy dp=2,zero=3,micro_batch=4 --device"
    return [phalanx(folder, *line.split(), device) for device in ("cuda", "rocm")]


def test_the_command(tmp_path: Path) -> None:
    (code, out, _), (wrong, _, err) = in_fresh_process(_command, tmp_path)
    assert code == 0
    assert "on a fake GPU" in out
    assert "by the steps of" not in out  # a single step is taken
    assert "waits of the host for the GPU in a step: 0" in out
    assert wrong == 2
    assert "is neither cpu nor cuda" in err
