"""Observed on fake tensors = recorded on real Gloo ranks; what is answered where a program asks for values.

Compared: kind, order, group, bytes, module and line of collectives and messages, FLOPs by module, peak live bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked_observer import Forked
from support.fresh_process import in_fresh_process
from support.in_process_cli import error_of, json_of, phalanx, text_of
from support.observed_programs import PROGRAMS, both
from support.sizes import sampled
from support.toy_model import model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import optimizer

from phalanx.answers import observed as command
from phalanx.cost.step.expand import expand
from phalanx.observation.fake import recorder
from phalanx.observation.observe import observe as phalanx_observe
from phalanx.observation.recorder.step import StepRecorder
from phalanx.observation.unobservable import Unobservable
from phalanx.planning.explain.observed import compare_with_plan
from phalanx.schedule.layout import Layout
from phalanx.schedule.observation import BackwardStart, Observation, ObservedEvent, RankObservation
from phalanx.schedule.observation_file import from_json, to_json
from phalanx.spec.cluster.presets import preset
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job, Train
from phalanx.spec.strategy.spec import Strategy

SAMPLE = ["ddp, small buckets", "ddp, on cpu:0", "tp and sp"]


def _equal(name: str, recorded: RankObservation | str, observed: RankObservation | str) -> None:
    assert isinstance(recorded, RankObservation), f"{name}, real ranks: {recorded}"
    assert isinstance(observed, RankObservation), f"{name}, observed: {observed}"
    ours = [(o.event.identity, o.module, o.site, o.ranks) for o in observed.communication]
    theirs = [(o.event.identity, o.module, o.site, o.ranks) for o in recorded.communication]
    assert theirs, name
    assert ours == theirs, name
    assert observed.flops == recorded.flops, name
    assert observed.micro_batches == recorded.micro_batches, name
    assert abs(observed.peak - recorded.peak) <= 0.01 * recorded.peak, (name, observed.peak, recorded.peak)
    assert observed.backward_starts == recorded.backward_starts, name


def test_observed_steps_equal_recorded_ones() -> None:
    for name, pairs in both(SAMPLE, 2, [1]).items():
        for recorded, observed in pairs:
            _equal(name, recorded, observed)


@pytest.mark.long
@pytest.mark.parametrize(("name", "world"), [(name, n) for name, program in PROGRAMS.items() for n in program[2]])
def test_every_observed_step_equals_its_recorded_one(name: str, world: int) -> None:
    for recorded, observed in both([name], world, list(range(world)))[name]:
        _equal(name, recorded, observed)


SCRIPT = """
import os, sys
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64), nn.Linear(64, 100)).cuda()
for layer in model[1:]:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randint(0, 100, (1000, 32)))
steps = 0
for (x,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data)):
    if steps == int(sys.argv[1]):
        break
    x = x.to("cuda", non_blocking=True)
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    if torch.isnan(loss):
        raise SystemExit("nan")
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    steps += 1
    print("loss", loss.item())
torch.save(model.state_dict(), "model.pt")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observed")
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def answer(script: Path) -> tuple[str, str]:
    """What the observation of the script prints, on stdout and stderr; it is written next to the script."""
    code, out, err = phalanx(script, "observe --world 64 --json --out observed.json -- python train.py 5")
    assert code == 0, err
    return out, err


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observed in a forked process; the whole script above is observed as a user's is, in a new one."""
    monkeypatch.setattr(command.subprocess, "Popen", Forked)


def test_an_unmodified_script_with_cuda_at_64_ranks(script: Path, answer: tuple[str, str]) -> None:
    out, err = answer
    content = json.loads(out)
    written = (script / "observed.json").read_text()
    assert json.loads(json.dumps(to_json(from_json(out)))) == content == json.loads(written)
    assert (content["program"], content["device"], content["world"]) == ("train.py 5", "gpu", 64)
    bytes_of = {(c["op"], c["where"]["phase"], c["bytes"]) for c in content["collectives"]}
    linear = 4 * (64 * 64 + 64)
    assert ("all_gather", "F", linear) in bytes_of
    assert ("reduce_scatter", "B", linear) in bytes_of
    gathers = [c for c in content["collectives"] if (c["op"], c["where"]["phase"]) == ("all_gather", "B")]
    assert ("1", linear) in {
        (c["where"]["module"], c["bytes"]) for c in gathers
    }  # while "2" runs: named by its owner
    assert {c["group_size"] for c in content["collectives"]} == {64}
    assert all(c["where"]["line"].startswith("train.py:") for c in content["collectives"])
    waits = {(w["call"], w["where"]["line"]): w["count"] for w in content["host_synchronisations"]}
    lines = SCRIPT.splitlines()
    calls = {"isnan": "item", "synchronize": "synchronize", "loss.item()": "item"}
    at = {word: next(i for i, x in enumerate(lines, 1) if word in x) for word in calls}
    assert waits == {(call, f"train.py:{at[word]}"): 1 for word, call in calls.items()}
    products = 2 * 4 * 32 * (64 * 64 + 64 * 100)
    assert sum(f["flops"] for f in content["flops"] if f["phase"] == "F") == products
    assert sum(r["count"] for r in content["ranks"]) == 64
    notes = content["ranks"][0]["notes"]
    assert any("redirected" in n for n in notes)
    assert any("False" in n for n in notes)
    assert "loss 1.0" in err
    assert sorted(p.name for p in script.iterdir()) == ["observed.json", "train.py"]


@pytest.mark.usefixtures("answer")
def test_an_observation_is_priced_and_compared(script: Path) -> None:
    rank = json_of(script, "predict observed.json --cluster dgx-h100 --json")["ranks"][0]
    observed = json.loads((script / "observed.json").read_text())
    assert rank["flops"] == sum(f["flops"] for f in observed["flops"])
    assert sum(c["count"] for c in rank["collectives"]) == sum(c["count"] for c in observed["collectives"])
    assert {c["links"] for c in rank["collectives"]} != {"nvlink"}  # 64 ranks span nodes
    assert rank["all_hidden_s"] < rank["none_hidden_s"] == rank["compute_s"] + rank["communication_s"]
    out = text_of(script, "tables comm observed.json --cluster dgx-h100")
    assert "reduce_scatter" in out
    for words, message in (
        (["predict", "observed.json"], "--cluster: is missing"),
        (["predict", "train.py", "--cluster", "dgx-h100"], "is Python, which is not run"),
        (["compare", "train.py", "plan.json"], "file = 'train.py': is Python, which is not run"),
    ):
        code, out, err = phalanx(script, *words)
        assert (code, out) == (2, ""), err
        assert message in err, err


def test_a_program_is_compared_with_a_plan() -> None:
    """What a plan says of itself is equal to it; one reduce-scatter more is shown."""
    spec, job, strategy = model(), Job(4, 16), Strategy(dp=2, micro_batch=1, zero=3, grad_sync="step")
    plan = Plan(spec, preset("dgx-h100", 1), job, strategy, Train(), {}, {})
    program = expand(Layout(spec, job, strategy).rank_view(0))
    flops = {("F", ""): 0, ("B", ""): 0}
    for e in program.events:
        if e.kind == "compute" and e.phase != "opt":
            flops[e.phase, ""] += e.flops
    events = [ObservedEvent(e) for e in program.events]
    scatter = next(o for o in events if o.event.op == "reduce_scatter")

    def seen(*more: ObservedEvent) -> Observation:
        """Two classes: rank 0 does what the plan says, rank 1 more."""

        def rank(number: int, *more: ObservedEvent) -> RankObservation:
            of = (
                number,
                1,
                "",
                2,
                (*events, *more),
                flops,
                {},
                expand(Layout(spec, job, strategy).rank_view(number)).peak_bytes,
                "B",
                "",
                (),
                0,
                (),
                2,
                ("AdamW",),
            )
            return RankObservation(*of, {}, (), ())

        return Observation("train.py", 2, {}, "cpu", "2.13", (rank(0), rank(1, *more)))

    assert not any(d.differs for d in compare_with_plan(seen(), plan))
    (difference,) = [d for d in compare_with_plan(seen(scatter), plan) if d.differs]
    assert difference.rank == 1
    assert difference.what == "reduce_scatter of 2 ranks, backward"
    assert difference.program_count == difference.plan_count + 1
    assert difference.program_total == difference.plan_total + scatter.event.bytes


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "python", "train.py", "0"], "the program ended before its first step"),
        (["--", "python", "trian.py"], "is not a file"),
        (["--", "python", "-m", "trian"], "trian: No module named trian"),
        (["--ranks", "99", "--", "train.py"], "is not a rank"),
        (
            ["--ranks", "all", "--world", "1000000000", "--", "train.py"],
            "world = 1000000000: is not a number of ranks, from 1 to 10,000,000",
        ),
        (
            ["--node", "1000000000", "--", "train.py"],
            "ranks_per_node = 1000000000: is not a number of ranks, from 1 to 10,000,000",
        ),
        (["--mesh", "pp=3", "--", "train.py"], "has 3 ranks"),
        (["--", "torchrun", "train.py"], "starts many processes"),
        (
            ["--", "python", "train.py", "nine"],
            "ValueError: invalid literal for int() with base 10: 'nine', at train.py:",
        ),
    ],
)
def test_what_cannot_be_observed_gets_one_line(script: Path, words: list[str], message: str) -> None:
    code, out, err = phalanx(script, "observe --world 4 --ranks 0", *words)
    assert (code, out) == (2, ""), err
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.usefixtures("forked")
def test_a_kernel_without_a_gpu_and_an_address_without_content(tmp_path: Path) -> None:
    """The launch of a Triton kernel, which finds no driver, is named with its line; data_ptr() tells
    storages apart (accelerate finds the parameters of an optimizer by it)."""
    (tmp_path / "stub" / "triton").mkdir(parents=True)
    (tmp_path / "stub" / "triton" / "__init__.py").write_text(
        "class Kernel:\n    def __getitem__(self, grid):\n        raise RuntimeError('0 active drivers')\n"
    )
    launch = "    import sys; sys.path.insert(0, 'stub'); import triton; triton.Kernel()[(1,)](y)\n"
    address = (
        "    assert m.weight.data_ptr() == m.weight[0].data_ptr() == m.weight[1].data_ptr() - 16\n"
        "    assert m.weight.data_ptr() != m.bias.data_ptr()\n"
    )
    for name, line in (("kernel.py", launch), ("address.py", address)):
        (tmp_path / name).write_text(
            "import torch\nm = torch.nn.Linear(4, 4)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
            f"for _ in range(3):\n    y = m(torch.randn(2, 4))\n{line}"
            "    y.sum().backward(); o.step(); o.zero_grad()\n"
        )
    assert error_of(tmp_path, "observe --world 2 --ranks 0 -- kernel.py").startswith(
        "error: kernel.py: a Triton kernel at kernel.py:6 runs on a GPU alone: "
    )
    code, _, err = phalanx(tmp_path, "observe --world 2 --ranks 0 -- address.py")
    assert code == 0, err
    said = "note: data_ptr of a fake tensor: an address of its storage (6 x, address.py:6)"
    assert said in err.splitlines()
    assert "Warning" not in err


@pytest.mark.usefixtures("forked")
def test_an_extension_for_cuda_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch.utils import cpp_extension\ncpp_extension.CUDA_HOME = None  # as on a machine without nvcc\n"
        "cpp_extension.CUDAExtension('own', ['own.cu'])\n"
    )
    err = error_of(tmp_path, "observe --world 2 --ranks 0 -- own.py")
    assert err.splitlines()[-1].startswith(
        "error: own.py: an extension is built for CUDA at own.py:3, and here is no "
    )


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("call", sampled(['init_process_group("mine")', 'new_group([0], backend="mine")'], (1,)))
def test_a_custom_backend_is_refused_with_its_line(tmp_path: Path, call: str) -> None:
    (tmp_path / "own.py").write_text(f"import torch.distributed as dist\ndist.{call}\n")
    err = error_of(tmp_path, "observe --world 2 --ranks 0 -- own.py")
    name = call.partition("(")[0]
    assert err.splitlines()[-1] == (
        f"error: own.py: {name} = 'mine': is a backend that sends by itself (at own.py:2); "
        "observe the program with nccl or gloo"
    )


def test_observing_leaves_torch_unchanged() -> None:
    assert not torch.distributed.is_initialized()
    assert not torch.cuda.is_available()


def test_a_recorder_leaves_no_hooks_behind() -> None:
    hooks = {**optimizer._global_optimizer_pre_hooks}, {**optimizer._global_optimizer_post_hooks}
    with StepRecorder(lambda step: None).recording():
        assert optimizer._global_optimizer_pre_hooks != hooks[0]
    assert (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks) == hooks


def test_autocast_casts_as_on_cuda() -> None:
    """Products in bf16, losses in fp32."""

    assert set(in_fresh_process(_autocast).ranks[0].flops_by_type) == {"bfloat16"}


def test_generators_are_those_of_a_gpu() -> None:
    """DTensor reads the offset in a generator's state (torchtitan); Megatron keeps states and sets them again."""
    rank = in_fresh_process(_generators).ranks[0]
    assert rank.flops[("F", "")] == 2 * 8 * 8 * 8


def _generators() -> Observation:
    def program() -> None:
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("shard",))
        model = torch.nn.Linear(8, 8, device="cuda")
        fully_shard(model, mesh=mesh)
        torch.nn.init.normal_(model.weight)
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        torch.cuda.default_generators[0].set_state(torch.cuda.get_rng_state())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            model(torch.randn(8, 8, device="cuda")).sum().backward()
            optimizer.step()

    return phalanx_observe(program, world=4, ranks=[0])


def _autocast() -> Observation:
    def program() -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            x = torch.ones(4, device="cuda", dtype=torch.long)
            with torch.autocast("cuda", torch.bfloat16):
                y = model(x) + model(x)
                loss = torch.nn.functional.cross_entropy(y, x)
            loss.backward()
            assert (y.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
            optimizer.step()

    return phalanx_observe(program, world=1)


def _kept_for_backward(reshard: bool) -> Observation:
    """Three products of 8 x 8 under fully_shard on 2 ranks, then a head that is called by itself, in two parts."""

    def program() -> None:
        mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("shard",))
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4))).cuda()
        for layer in model[:3]:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        model.forward = lambda x: model[2](model[1](model[0](x)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            for _ in range(2):
                hidden = model(torch.randn(4, 8, device="cuda"))
                leaf = hidden.detach().requires_grad_()
                for part in leaf.chunk(2):
                    model[3](part).sum().backward()
                hidden.backward(leaf.grad)
            optimizer.step()
            optimizer.zero_grad()

    return phalanx_observe(program, world=2, ranks=[0])


@pytest.mark.parametrize("reshard", [True, False])
def test_holders_at_the_start_of_backward_passes(reshard: bool) -> None:
    """By kind and unit as each backward pass begins; a part of the model that is called by itself is of its
    micro-batch."""
    rank = in_fresh_process(_kept_for_backward, reshard).ranks[0]
    assert rank.micro_batches == 2
    assert [b.micro_batches for b in rank.backward_starts] == [(0,), (0,), (0,), (1,), (1,), (1,)]
    weight, part = 4 * 8 * 8, 4 * 2 * 8
    for start, batch, of_pass in zip(rank.backward_starts, (0, 0, 0, 1, 1, 1), (0, 1, 2) * 2, strict=True):
        held = {(h.kind, h.module): h.bytes for h in start.holders}
        for unit in ("0", "1", "2"):
            assert held.get(("gathered parameters", unit), 0) == (0 if reshard else weight)
            assert held.get(("gradients", unit), 0) == (weight // 2 if batch else 0)
        assert held["activations", "0"] == held["activations", "1"] == 2 * part  # inputs of what follows
        assert held.get(("gradients", "3"), 0) == (weight if batch or of_pass else 0)
        assert start == BackwardStart("B", start.micro_batches, start.holders)
    assert rank.fullest_backward_start in rank.backward_starts[3:]


def test_a_process_that_ran_a_backward_pass_is_refused() -> None:
    """torch's autograd engine knows the devices of its first backward pass only."""
    with pytest.raises(Unobservable, match="before any backward pass"):
        in_fresh_process(_after_a_backward_pass)


def _after_a_backward_pass() -> Observation:
    torch.ones(1, requires_grad=True).sum().backward()
    return _autocast()


_BRANCHES = """import torch
from torch import nn
model, more = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD([*model.parameters(), *more.parameters()], 0.1)
for _ in range(3):
    y = model(torch.randn(4, 8, device="cuda"))
    if (y > 0).any():
        y = y + more(y)
    if y.sum() > 3:
        y = y + more(y)
    y.sum().backward()
    optimizer.step()
"""


def test_a_branch_that_depends_on_data_is_taken_as_named(tmp_path: Path) -> None:
    """A layer has 2 x 4 x 8 x 8 FLOP. By itself the first branch would be taken and the second not."""
    (tmp_path / "branches.py").write_text(_BRANCHES)
    named = "branches.py:7=true,branches.py:9=true,branches.py:8=true"
    _, shown, said = phalanx(tmp_path, f"observe --branches {named} -- branches.py")
    assert re.search(r"^ all +1,536 ", shown, re.MULTILINE), shown
    assert "nothing is asked of a tensor at branches.py:8" in said
    assert "write it as train.py:41=true" in error_of(tmp_path, "observe --branches branches.py=yes -- branches.py")


def test_a_loop_may_ask_the_same_so_often_in_a_row_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that take turns may ask for ever."""
    monkeypatch.setattr(recorder, "_MOST_TRUTH_VALUES", 5)
    loop: Any = SimpleNamespace(asked=("", 0))
    for place in ["a.py:1", "b.py:2"] * 20 + ["a.py:1"] * 5 + ["b.py:2"] * 5:
        recorder.FakeStepRecorder._require_end(loop, place, True)
    with pytest.raises(
        Unobservable, match=r"^b.py:2 asks the same 5 times, and is answered True: .* b.py:2=false ends"
    ):
        recorder.FakeStepRecorder._require_end(loop, "b.py:2", True)
