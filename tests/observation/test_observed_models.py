"""Programs with several models: modules of the same name are told apart, what stays gathered is a holder of memory by
itself, and whatever holds memory has the line that allocated it and the operation that keeps it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fresh_process import in_fresh_process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from phalanx.observation.observe import observe
from phalanx.planning.explain.observed_lint import lint
from phalanx.planning.tables.table import Sheet
from phalanx.report.observation import memory_rows, tables
from phalanx.schedule.observation import STAY_GATHERED, Allocation, Observation, RankObservation, unit_of

WORLD, WIDTH, BATCH, VOCABULARY, MICRO_BATCHES = 4, 32, 8, 256, 2
LAYER, HEAD, LOGITS = 4 * WIDTH * WIDTH, 4 * WIDTH * VOCABULARY, 4 * BATCH * VOCABULARY
"""Bytes of a layer's weight, of the head's, and of a batch of logits."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.up(x))


class Model(nn.Module):
    def __init__(self, layers: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x).log_softmax(-1)  # log-probabilities


def sharded(model: Model, nested: bool = False, **root: Any) -> Model:
    for layer in model.layers:
        if nested:
            fully_shard(layer.up)
        fully_shard(layer)
    fully_shard(model, **root)
    return model


def train(model: nn.Module, loss: Callable[[Tensor], Tensor], after: Callable[[], object] = lambda: None) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for _ in range(MICRO_BATCHES):
            loss(torch.randn(BATCH, WIDTH, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def one_model(recompute: bool = False) -> None:
    model = Model(recompute=recompute).cuda()
    train(model, lambda x: model(x).mean())


def policy_and_reference(nested: bool = False, **root: Any) -> None:
    policy = Model().cuda()
    reference = sharded(copy.deepcopy(policy).requires_grad_(False), nested, **root)
    policy = sharded(policy, nested)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            base = reference(x)
        return (policy(x) - base).mean()

    train(policy, loss)


class Trainer:
    """Three models that are attributes, called through one function."""

    def __init__(self) -> None:
        self.policy = DistributedDataParallel(Model().cuda())
        self.reference, self.critics = Model().cuda(), [Model().cuda(), Model().cuda()]

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    def loss(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            values = [self.call(critic, x).mean() for critic in self.critics]
            base = self.call(self.reference, x)
        return (self.call(self.policy, x) - base).mean() * values[0]


def many_models() -> None:
    trainer = Trainer()
    train(trainer.policy, trainer.loss)


def teacher_and_student() -> None:
    """Distillation: the teacher's probabilities are kept for the student's backward pass."""
    teacher = Model(3).cuda()
    student = DistributedDataParallel(Model().cuda())

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x)
        return -(student(x) * target).mean()

    train(student, loss)


def wrapped_policy_and_reference() -> None:
    """The same under FSDP1, whose wrappers add parts to the names of modules."""
    wrap = partial(FullyShardedDataParallel, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True)
    device = torch.cuda.current_device()
    inner = Model()
    reference = wrap(copy.deepcopy(inner).requires_grad_(False), device_id=device)
    policy = wrap(inner, device_id=device)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            base = reference(x)
        return (policy(x) - base).mean()

    train(policy, loss)


def adversaries() -> None:
    """Two optimizers, each after a backward pass of its own."""
    generator, critic = Model().cuda(), nn.Linear(VOCABULARY, 1).cuda()
    first, second = torch.optim.Adam(critic.parameters()), torch.optim.Adam(generator.parameters())
    for _ in range(5):
        made = generator(torch.randn(BATCH, WIDTH, device="cuda"))
        (critic(made.detach()) - critic(torch.randn_like(made))).mean().backward()
        first.step()
        critic(made).mean().backward()
        second.step()
        first.zero_grad()
        second.zero_grad()


def one_step() -> None:
    model = Model().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(BATCH, WIDTH, device="cuda")).mean().backward()
    optimizer.step()


def convolutions(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    model = nn.Sequential(kind(WIDTH, WIDTH, 1), kind(WIDTH, WIDTH, 3, groups=groups)).cuda()
    train(model, lambda x: model(x[..., None].expand(-1, -1, 16)).mean())


def averaged() -> None:
    model = Model().cuda()
    ema = AveragedModel(model)
    train(model, lambda x: model(x).mean(), lambda: ema.update_parameters(model))


def two_parts_called_by_themselves() -> None:
    """A model of which only parts are called: their names are those in the model."""
    model = Model().cuda()
    train(model, lambda x: model.head(model.layers[1](model.layers[0](x))).mean())


def _observation(program: Callable[..., None], options: dict[str, Any]) -> Observation:
    def run() -> None:
        dist.init_process_group("nccl")
        init_device_mesh("cuda", (dist.get_world_size(),))
        program(**options)

    return observe(run, world=WORLD)


@cache
def observed(program: Callable[..., None], **options: Any) -> RankObservation:
    (rank,) = in_fresh_process(_observation, program, options).ranks
    return rank


def of_one_class(r: RankObservation) -> Observation:
    return Observation("train.py", WORLD, {}, "gpu", "", (r,))


def units(r: RankObservation, op: str, phase: str) -> list[str]:
    """The units of the collectives of the first micro-batch."""
    found = [o for o in r.communication if (o.event.op, o.event.phase) == (op, phase)]
    return [unit_of(o.module) for o in found[: len(found) // MICRO_BATCHES]]


def calls(r: RankObservation) -> dict[str, set[str]]:
    """The units that compute products, by pass."""
    return {phase: {unit_of(m) for p, m in r.flops if p == phase} for phase in ("F", "B")}


def held(r: RankObservation, kind: str) -> dict[str, int]:
    """Bytes at the peak by unit or model."""
    return {h.module: h.bytes for h in r.holders if h.kind == kind}


def allocated(r: RankObservation, kind: str, operation: str) -> list[Allocation]:
    return [a for a in r.allocations if (a.kind, a.operation) == (kind, operation)]


def line(text: str) -> str:
    with open(__file__) as file:
        return str(next(n for n, content in enumerate(file, 1) if text in content))


@pytest.mark.parametrize("nested", [False, True])
def test_units_of_two_models_with_the_same_names_are_two(nested: bool) -> None:
    rank = observed(policy_and_reference, nested=nested)
    layers = {model: [f"{model}.layers.{n}" for n in range(2)] for model in ("reference", "policy")}
    assert rank.models == ("reference", "policy")
    assert units(rank, "all_gather", "F") == [*layers["reference"], "policy", *layers["policy"]]
    assert set(units(rank, "reduce_scatter", "B")) == {*layers["policy"], "policy"}
    assert calls(rank) == {
        "F": {*layers["reference"], *layers["policy"], "reference.head", "policy.head"},
        "B": {*layers["policy"], "policy.head"},
    }
    (collectives,) = [t for t in tables(of_one_class(rank)) if isinstance(t, Sheet) and "collectives" in t.title]
    gathers = [row[-1] for row in collectives.rows if row[0] == "all_gather" and row[5] == "F"]
    assert gathers == ["reference.layers.0, reference.layers.1", "policy", "policy.layers.0, policy.layers.1"]
    assert rank.micro_batches == MICRO_BATCHES  # those of the policy


def test_what_stays_gathered_is_a_holder_by_itself() -> None:
    kept, freed = observed(policy_and_reference), observed(policy_and_reference, reshard_after_forward=True)
    assert held(kept, STAY_GATHERED) == {"reference": HEAD}
    assert held(freed, STAY_GATHERED) == {}
    shards = (2 * LAYER + HEAD) // WORLD
    for rank in (kept, freed):
        assert held(rank, "parameters") == {"reference": shards, "policy": shards}
        assert held(rank, "optimizer state").keys() == {"policy"}
    rows = {(row.kind, row.units): row for row in memory_rows(kept)}
    row = rows[STAY_GATHERED, "reference"]
    assert row.peak_bytes == HEAD
    assert row.made_by.startswith("all_gather at ")
    assert row.made_by.endswith(f":{line('base = reference(x)')}")
    (finding,) = [f for f in lint(of_one_class(kept)) if f.name == "stays-gathered"]
    assert (finding.bytes, finding.where) == (HEAD, row.made_by.removeprefix("all_gather at "))
    assert "reference.reshard()" in finding.remedy
    assert not [f for f in lint(of_one_class(freed)) if f.name == "stays-gathered"]


def test_models_in_wrappers_are_told_apart() -> None:
    rank = observed(wrapped_policy_and_reference)
    layers = {model: [f"{model}.layers.{n}" for n in range(2)] for model in ("reference", "policy")}
    assert units(rank, "all_gather", "F") == [*layers["reference"], "policy", *layers["policy"]]
    assert units(rank, "reduce_scatter", "B") == [*reversed(layers["policy"]), "policy"]
    assert held(rank, STAY_GATHERED) == {"reference": HEAD}
    assert {h.module for h in rank.holders if h.kind == "parameters"} == {"reference", "policy"}


def by_its_number() -> None:
    """FSDP1 as people start it: its device is the number of the rank, of a type or alone."""
    rank = dist.get_rank()
    _ = FullyShardedDataParallel(Model().cuda(rank), device_id=torch.device("cuda", rank))
    model = FullyShardedDataParallel(Model().cuda(rank), device_id=rank, use_orig_params=True)
    train(model, lambda x: model(x.to(rank)).mean())


def test_fsdp1_finds_its_device_on_every_rank() -> None:
    assert observed(by_its_number).communication


def test_a_step_has_the_steps_of_all_optimizers() -> None:
    rank = observed(adversaries)
    assert rank.models == ("generator", "critic")
    generator = {"generator.layers.0", "generator.layers.1", "generator.head"}
    assert calls(rank) == {"F": {*generator, "critic"}, "B": {*generator, "critic"}}
    product = 2 * BATCH * VOCABULARY
    assert rank.flops["F", "critic"] == 3 * product
    assert sum(n for (phase, module), n in rank.flops.items() if phase == "F" and module == "generator.head") == (
        product * WIDTH
    )
    assert held(rank, "optimizer state").keys() == {"generator", "critic"}


def test_holders_of_a_program_of_one_step() -> None:
    """Its objects are gone when it ends."""
    rank = observed(one_step)
    assert rank.micro_batches == 1
    assert held(rank, "parameters") == {"": 2 * LAYER + HEAD}
    assert held(rank, "optimizer state") == {"": 2 * (2 * LAYER + HEAD)}


def test_models_are_named_by_the_variables_that_hold_them() -> None:
    rank = observed(many_models)
    assert rank.models == ("critics[0]", "critics[1]", "reference", "policy")
    assert "critics[1].layers.1" in calls(rank)["F"]
    assert calls(rank)["B"] == {"policy.layers.0", "policy.layers.1", "policy.head"}
    assert set(units(rank, "all_reduce", "B")) <= {"policy", *calls(rank)["B"]}


def test_the_outputs_of_a_teacher_are_its_own() -> None:
    rank = observed(teacher_and_student)
    assert rank.models == ("teacher", "student")
    (of_teacher,) = [a for a in allocated(rank, "activations", "log_softmax") if a.model == "teacher"]
    assert of_teacher.backward_bytes == LOGITS
    assert of_teacher.site.line == int(line("# log-probabilities"))
    assert of_teacher.saved_for == ("mul",)


def test_the_largest_holder_has_a_name() -> None:
    rank = observed(one_model)
    assert not rank.models
    (kept,) = allocated(rank, "activations", "log_softmax")
    assert kept.backward_bytes == LOGITS
    assert kept.saved_for == ("log_softmax",)
    assert kept.site.line == int(line("# log-probabilities"))
    (of_layers,) = [a for a in allocated(rank, "activations", "mm") if "silu" in a.saved_for]
    assert (of_layers.units, of_layers.count) == (("layers.0", "layers.1"), 2)
    for rows, total in (("peak_bytes", rank.peak), ("backward_bytes", rank.fullest_backward_start.bytes)):
        assert sum(getattr(row, rows) for row in memory_rows(rank)) == total


def test_what_recomputation_keeps_is_found_without_running_it() -> None:
    plain, recomputed = observed(one_model), observed(one_model, recompute=True)
    assert not any("silu" in a.saved_for for a in recomputed.allocations)
    assert sum(recomputed.flops.values()) == sum(plain.flops.values()) + MICRO_BATCHES * 2 * 2 * BATCH * WIDTH**2


def test_a_copy_that_is_never_called_owns_its_parameters() -> None:
    rank = observed(averaged)
    assert not rank.models
    assert calls(rank)["F"] == {"layers.0", "layers.1", "head"}
    parameters = 2 * LAYER + HEAD
    assert held(rank, "parameters") == {"model": parameters, "ema": parameters}


def test_parts_that_are_called_by_themselves_have_their_names_in_the_model() -> None:
    rank = observed(two_parts_called_by_themselves)
    assert not rank.models
    assert calls(rank)["F"] == {"layers.0", "layers.1", "head"}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 4, WIDTH])
def test_a_backward_pass_of_grouped_convolutions_takes_twice_the_forward_pass(groups: int, transposed: bool) -> None:
    flops = observed(convolutions, groups=groups, transposed=transposed).flops
    positions = 16 if transposed else 14
    assert flops["F", "1"] == MICRO_BATCHES * 2 * BATCH * positions * 3 * WIDTH * WIDTH // groups
    assert flops["B", "1"] == 2 * flops["F", "1"]
