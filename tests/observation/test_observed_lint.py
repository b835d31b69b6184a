"""Lints of observed programs: each finds its anti-pattern in a bad program, at the right line, and nothing in the
mended one."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fresh_process import in_fresh_process
from support.in_process_cli import error_of, json_of, phalanx
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

from phalanx.observation.observe import observe
from phalanx.planning.explain.observed_lint import LINTS, ProgramFinding, lint
from phalanx.planning.lookup import cluster_named
from phalanx.report.observation import tables
from phalanx.schedule.observation import Observation, Synchronisation
from phalanx.schedule.observation_file import from_json, to_json

WIDTH, LAYERS, MICRO_BATCHES, WORLD = 64, 6, 2, 16
PARAMETERS = LAYERS * (WIDTH + 1) * WIDTH


class Linear(nn.Linear):
    """Multiplies in bf16, whatever the type of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return nn.functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.second = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        for layer in self.layers:
            x = layer(x)  # a layer
        return x, self.second(x) if self.extra else None  # a second output

    extra = False


def sharded(
    gathers: str = "once", reads: bool = False, extra: bool = False, wide: bool = False, shard_outermost: bool = False
) -> None:
    """fully_shard over 2 nodes of 8; each option is a mistake."""
    dist.init_process_group("nccl")
    ranks = torch.arange(WORLD).view(8, 2).t() if shard_outermost else torch.arange(WORLD).view(2, 8)
    policy = MixedPrecisionPolicy() if wide else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options: dict[str, Any] = {
        "mesh": DeviceMesh("cuda", ranks, mesh_dim_names=("replicate", "shard")),
        "mp_policy": policy,
        "reshard_after_forward": gathers == "always",
    }
    model = Model().cuda()
    model.extra = extra
    for layer in model.layers:
        fully_shard(layer, **options)
    root = fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for m in range(MICRO_BATCHES):
            root.set_requires_gradient_sync(m == MICRO_BATCHES - 1)
            root.set_reshard_after_backward(gathers == "always" or m == MICRO_BATCHES - 1)
            x = torch.randn(256, WIDTH, device="cuda")
            y, _second = model(x)
            loss = y.square().mean()
            loss.backward()
            if reads:
                loss.item()  # read
        optimizer.step()
        optimizer.zero_grad()


def replicated(no_sync: bool = True, bucket: float = 25) -> None:
    """DDP; each option is a mistake, and that all ranks hold all state is another."""
    model = DistributedDataParallel(Model(), bucket_cap_mb=bucket)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for m in range(MICRO_BATCHES):
            with model.no_sync() if no_sync and m < MICRO_BATCHES - 1 else nullcontext():
                model(torch.randn(4, WIDTH))[0].square().mean().backward()  # backward
        optimizer.step()
        optimizer.zero_grad()


class Summed(torch.autograd.Function):
    """Megatron's g: all-reduced forward, as it is backward; and f: the other way round (Shoeybi et al. 2019)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, in_forward: bool) -> Tensor:
        ctx.group, ctx.in_forward = group, in_forward
        if in_forward:
            dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        if not ctx.in_forward:
            dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None, None


def split(tp: int = 8) -> None:
    """An MLP over tp ranks, with as many tokens as make its activations as large as its parameters."""
    dist.init_process_group("gloo")
    ranks = torch.arange(WORLD).view(WORLD // tp, tp)
    group = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")).get_group("tp")
    a = nn.Linear(WIDTH, 4 * WIDTH // tp, bias=False)
    b = nn.Linear(4 * WIDTH // tp, WIDTH, bias=False)
    tokens = sum(p.numel() for m in (a, b) for p in m.parameters()) // WIDTH
    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()])
    for _ in range(3):
        for _ in range(MICRO_BATCHES):
            x = torch.randn(tokens, WIDTH, requires_grad=True)
            y = Summed.apply(b(a(Summed.apply(x, group, False)).relu()), group, True)
            y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def zero_bubble(kept: bool) -> None:
    """Two pipeline ranks with two chunks each, under fully_shard over 2, which reshards after forward or keeps."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh.get_local_rank("pp")
    mine, chunks, stages = [place, 3 - place], nn.ModuleList(), []
    for index in mine:
        chunk = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))).cuda()
        fully_shard(chunk[0], mesh=mesh["dp"], reshard_after_forward=not kept)
        chunks.append(fully_shard(chunk, mesh=mesh["dp"]))
        stages.append(PipelineStage(chunk, index, 4, torch.device("cuda"), group=mesh.get_group("pp")))

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean()

    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=loss)
    optimizer = torch.optim.AdamW(chunks.parameters())
    x = torch.randn(16, 8, device="cuda")
    for _ in range(3):
        schedule.step(*(x,) * (0 in mine), **{"target": x} if 3 in mine else {})  # a schedule
        optimizer.step()
        optimizer.zero_grad()


def _zero_bubble(kept: bool) -> Observation:
    return observe(lambda: zero_bubble(kept), world=4, ranks=[0])


@cache
def observed(program: str, *options: tuple[str, object]) -> Observation:
    return in_fresh_process(_observed, program, options)


def _observed(program: str, options: tuple[tuple[str, object], ...]) -> Observation:
    function = {"sharded": sharded, "replicated": replicated, "split": split}[program]
    return observe(lambda: function(**dict(options)), world=WORLD, ranks=[0])  # type: ignore[operator]


def findings(o: Observation) -> dict[str, ProgramFinding]:
    return {f.name: f for f in lint(o, cluster_named("dgx-h100")(WORLD))} | {f.name: f for f in lint(o)}


def line_of(mark: str) -> str:
    """Return "file:line" of the line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    path = Path(__file__)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{number}"


CASES = {
    "host-synchronisation": ("sharded", ("reads", True), "read"),
    "repeated-gathers": ("sharded", ("gathers", "always"), "a layer"),
    "kept-by-autograd": ("sharded", ("extra", True), "a second output"),
    "fp32-traffic": ("sharded", ("wide", True), "a layer"),
    "straddling-groups": ("sharded", ("shard_outermost", True), "a layer"),
    "repeated-reductions": ("replicated", ("no_sync", False), "backward"),
    "small-buckets": ("replicated", ("bucket", 0.0001), "backward"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_lint_finds_the_mistake_and_not_the_fixed_program(name: str) -> None:
    program, mistake, mark = CASES[name]
    mended = findings(observed(program))
    bad = lint(observed(program, mistake), cluster_named("dgx-h100")(WORLD)) + lint(observed(program, mistake))
    assert {f.name for f in bad} == {name, *mended}
    assert name not in mended
    assert {f.where for f in bad if f.name == name} == {line_of(mark)}


def test_replicated_state_is_gone_under_fully_shard() -> None:
    assert set(findings(observed("replicated"))) == {"replicated-state"}
    assert not findings(observed("sharded"))
    state = PARAMETERS * 8  # two moments in fp32
    assert findings(observed("replicated"))["replicated-state"].bytes == pytest.approx(state * 15 / 16, rel=0.001)


def test_what_ddp_does_once_is_not_said_of_every_step() -> None:
    """As its second step begins DDP sends the new order of its buckets, through the host on a GPU."""
    o = observed("replicated")
    (rank,) = o.ranks
    (site,) = rank.rebuilt_at
    copies = (Synchronisation("copy to the host", "F", "", site, 2),)
    assert set(findings(replace(o, ranks=(replace(rank, synchronisations=copies),)))) == {"replicated-state"}
    later = replace(rank, synchronisations=copies, step=3)
    assert not later.rebuilt_at
    assert "host-synchronisation" in findings(replace(o, ranks=(later,)))
    assert any("of that step alone; --step 3" in getattr(part, "note", "") for part in tables(o))


def test_gradients_that_a_split_backward_pass_loses() -> None:
    """Of both chunks where none is resharded; else the optimizer has no gradient of the last chunk."""
    kept, lost = (in_fresh_process(_zero_bubble, kept) for kept in (True, False))
    assert "lost-gradients" not in {f.name for f in lint(kept)}
    (finding,) = [f for f in lint(lost) if f.name == "lost-gradients"]
    assert finding.where == line_of("a schedule")
    whole = sum(t.all_elements for t in kept.ranks[0].trained)
    assert sum(t.all_elements for t in lost.ranks[0].trained) == whole / 2


def _logged(on: tuple[int, ...]) -> Observation:
    """DDP, whose loss is averaged by some ranks of the world."""

    def program() -> None:
        model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            loss.backward()
            if dist.get_rank() in on:
                dist.all_reduce(loss.detach().clone())  # of some
            optimizer.step()
            optimizer.zero_grad()

    def initialised() -> None:
        dist.init_process_group("gloo")
        program()

    return observe(initialised, world=4, ranks=[0, 3])


def test_a_collective_of_some_ranks_of_its_group_is_found() -> None:
    (finding,) = [f for f in lint(in_fresh_process(_logged, (0,))) if f.name == "unmatched-collectives"]
    assert finding.where == line_of("of some")
    assert "rank 0 issues all_reduce of 4 B" in finding.problem
    assert "rank 3 issues nothing more" in finding.problem
    assert "unmatched-collectives" not in {f.name for f in lint(in_fresh_process(_logged, (0, 1, 2, 3)))}


def test_tensor_parallelism_is_no_reduction_of_gradients() -> None:
    """Though each micro-batch's backward pass reduces as many elements as the rank has parameters."""
    o = observed("split")
    reduced = [c.event for c in o.ranks[0].communication if c.event.op == "all_reduce" and c.event.phase == "B"]
    trained = sum(t.elements for t in o.ranks[0].trained)
    assert [e.bytes // 4 for e in reduced] == [trained] * MICRO_BATCHES
    assert not findings(o)


def test_what_is_lost_is_counted() -> None:
    gathers = findings(observed("sharded", ("gathers", "always")))["repeated-gathers"]
    # Four gathers in bf16 (two micro-batches, forward and backward) where one would do.
    assert gathers.bytes == 3 * PARAMETERS * 2
    reductions = findings(observed("replicated", ("no_sync", False)))["repeated-reductions"]
    assert reductions.bytes == PARAMETERS * 4
    wide = findings(observed("sharded", ("wide", True)))["fp32-traffic"]
    assert wide.bytes == PARAMETERS * 2
    kept = findings(observed("sharded", ("extra", True)))["kept-by-autograd"]
    assert kept.bytes == 2 * 256 * WIDTH * 2  # of the three activations; the program's variable holds the third


def test_seconds_need_a_cluster() -> None:
    o = observed("replicated", ("bucket", 0.0001))
    (without,) = [f for f in lint(o) if f.name == "small-buckets"]
    (with_,) = [f for f in lint(o, cluster_named("dgx-h100")(WORLD)) if f.name == "small-buckets"]
    assert without.seconds is None
    assert with_.seconds is not None
    assert with_.seconds > 0


def test_every_lint_has_a_case() -> None:
    assert {*CASES, "replicated-state", "lost-gradients", "stays-gathered", "unmatched-collectives"} == set(LINTS)
    assert from_json(json.dumps(to_json(observed("sharded")))) == observed("sharded")


def test_the_command(tmp_path: Path) -> None:
    for program, mistake, code in (("sharded", (), 0), ("sharded", (("reads", True),), 1)):
        (tmp_path / "observed.json").write_text(json.dumps(to_json(observed(program, *mistake))))
        answered, out, err = phalanx(tmp_path, "lint observed.json --cluster dgx-h100")
        assert answered == code, err
        assert ("nothing found" if code == 0 else "1 finding") in out
    assert f"{line_of('read')}: host-synchronisation: item" in out
    assert "--batch" in error_of(tmp_path, "lint observed.json --batch 8")


def test_improve_names_a_faster_strategy_of_the_program(tmp_path: Path) -> None:
    """plan --from: the program's lints with their costs, and with a model the best strategy of its ranks."""
    (tmp_path / "observed.json").write_text(json.dumps(to_json(observed("replicated", ("no_sync", False)))))
    words = ("plan", "--from", "observed.json", "--cluster", "dgx-h100", "--json")
    found = json_of(tmp_path, *words)
    (reductions,) = [f for f in found["findings"] if f["name"] == "repeated-reductions"]
    assert reductions["seconds"] > 0
    assert found["better"] is None
    assert (
        json_of(tmp_path, *words, "--model", "llama3-8b", "--batch", "64", "--seq", "2048")["better"]["question"][
            "stack"
        ]
        == "fsdp2"
    )
    plan = json.loads((tmp_path / "plan.json").read_text())
    world = 1
    for axis in ("pp", "dp", "cp", "tp"):
        world *= plan["strategy"][axis]
    assert world == WORLD
    assert "--batch: is missing" in error_of(tmp_path, *words, "--model", "llama3-8b")
