"""What makes an observation quick changes nothing of it: results that are remembered, ranks that are not followed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.fresh_process import in_fresh_process
from support.sizes import sampled
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from phalanx.observation.fake import calls
from phalanx.observation.fake.calls import stated_answers, uncompiled
from phalanx.observation.fake.result_cache import ResultCache
from phalanx.observation.fake.values import _as_numbers
from phalanx.observation.fake.values import half_selected as half
from phalanx.observation.observe import observe
from phalanx.observation.program import pipelines
from phalanx.observation.program.processes import Processes
from phalanx.observation.rank_classes import END, SECOND_MICRO_BATCH, WANTED_STEP
from phalanx.observation.recorder.repetition import Log
from phalanx.observation.recorder.summary import _kept_storages
from phalanx.observation.request import ObservationRequest
from phalanx.observation.steady_state import SteadyState
from phalanx.schedule.observation import Observation, RankObservation, Site

aten = torch.ops.aten


def _two(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.empty(shape), torch.empty(shape)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "a product": (aten.mm.default, lambda: (torch.empty(3, 4), torch.empty(4, 5))),
    "an integer added": (aten.add.Tensor, lambda: (torch.empty(3, dtype=torch.int64), 1)),
    "a truth value added": (aten.add.Tensor, lambda: (torch.empty(3, dtype=torch.int64), True)),
    "a float added": (aten.add.Tensor, lambda: (torch.empty(3, dtype=torch.int64), 1.0)),
    "a view": (aten.view.default, lambda: (torch.empty(4, 6), [6, 4])),
    "a transposed view": (aten.t.default, lambda: (torch.empty(4, 6)[1:],)),
    "a view that autograd does not follow": (aten._unsafe_view.default, lambda: (torch.empty(4, 6), [24])),
    "parts": (aten.split.Tensor, lambda: (torch.empty(7, 2), 3)),
    "in place": (aten.mul_.Tensor, lambda: (torch.empty(3), torch.empty(3))),
    "two results": (aten.topk.default, lambda: (torch.empty(3, 9), 2)),
    "a result that may be none": (
        aten.native_layer_norm_backward.default,
        lambda: (*_two((2, 3)), [3], *_two((2, 1)), None, None, [True, False, False]),
    ),
    "numbers among the results": (
        aten._scaled_dot_product_flash_attention.default,
        lambda: tuple(torch.empty(1, 2, 4, 8, dtype=torch.float16) for _ in range(3)),
    ),
    "in place, of many": (aten._foreach_add_.Scalar, lambda: ([torch.empty(3), torch.empty(2)], 1.0)),
    "a shape changed in place": (aten.t_.default, lambda: (torch.empty(3, 2),)),
}


def _described(out: Any, args: tuple[Any, ...]) -> Any:
    """Return all that a program can see of a result."""
    if isinstance(out, list | tuple):
        return type(out), [_described(x, args) for x in out]
    if not isinstance(out, Tensor):
        return out
    assert isinstance(out, FakeTensor)
    given = [x for a in args for x in (a if isinstance(a, list) else [a]) if isinstance(x, Tensor)]
    storage = out.untyped_storage()
    return (
        (out.shape, out.stride(), out.storage_offset(), out.dtype, out.device, out.requires_grad, storage.nbytes()),
        [out is x for x in given],
        [storage._cdata == x.untyped_storage()._cdata for x in given],
        torch._C._dispatch_keys(out).raw_repr(),
        {k: v for k, v in out.__dict__.items() if k != "fake_mode"},
    )


def test_remembered_results_equal_those_of_torch() -> None:
    with FakeTensorMode() as fake:
        remembered = ResultCache(fake)
        remembered.recipes.clear()  # of other steps in this process
        for (name, (func, arguments)), _ in itertools.product(CALLS.items(), range(3)):
            args, others = arguments(), arguments()
            tensors = [x for a in args for x in (a if isinstance(a, list) else [a]) if isinstance(x, Tensor)]
            torchs = _described(func(*others), others)
            assert _described(remembered.run(func, args, {}, tensors), args) == torchs, name
    built = {key[0] for key, recipe in remembered.recipes.items() if recipe is not None}
    assert built == {func for func, _ in CALLS.values()} - {aten.t_.default}


def _staged(log: str, smaller: int | None, micro_batches: int) -> None:
    """Two stages, each on two ranks that reduce their gradients; rank `smaller` holds less."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, peer = rank // 2, (rank + 2) % 4
    width = 4 if rank == smaller else 6
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        with Path(log).open("a") as file:
            file.write(f"{rank} {step + 1}\n")
        for _ in range(micro_batches):
            x = torch.zeros(4, 8, device="cuda", requires_grad=True)
            if stage:
                dist.recv(x.data, peer)
            y = model(x)
            if not stage:
                dist.send(y.detach(), peer)
                dist.recv(gradient := torch.zeros_like(y), peer)
                y.backward(gradient)
            else:
                y.sum().backward()
                assert x.grad is not None
                dist.send(x.grad, peer)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()


def _observed(log: str, smaller: int | None, micro_batches: int, shortcuts: bool) -> Observation:
    def in_full(self: Processes, rank: int, like: int | None = None) -> RankObservation:
        return self.observe(rank)

    def run(
        self: ResultCache, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        return func(*args, **kwargs)

    if shortcuts:
        return observe(lambda: _staged(log, smaller, micro_batches), world=4)
    with patch.object(Processes, "observe_or_match", in_full), patch.object(ResultCache, "run", run):
        return observe(lambda: _staged(log, smaller, micro_batches), world=4)


@pytest.mark.parametrize(
    ("smaller", "micro_batches", "reached"),
    sampled(
        [
            # A rank's second step ends as its third begins; that of a rank that pauses, as its second does, or in its
            # first if it has a second micro-batch and the last rank was like another.
            (None, 1, {0: 3, 1: 2, 2: 3, 3: 2}),
            (None, 2, {0: 3, 1: 1, 2: 3, 3: 2}),
            (3, 2, {0: 3, 1: 2, 2: 3, 3: 3}),
            (1, 2, {0: 3, 1: 3, 2: 3, 3: 2}),
        ],
        (1, 2),
    ),
)
def test_shortcuts_change_nothing(
    tmp_path: Path, smaller: int | None, micro_batches: int, reached: dict[int, int]
) -> None:
    logs = [tmp_path / "with", tmp_path / "without"]
    quick, slow = (in_fresh_process(_observed, str(log), smaller, micro_batches, log.name == "with") for log in logs)
    assert quick == slow
    assert len(quick.ranks) == (2 if smaller is None else 3)
    quickly, slowly = ({rank: max(steps) for rank, steps in _steps(log).items()} for log in logs)
    assert slowly == {0: 3, 1: 3, 2: 3, 3: 3}
    assert quickly == reached


def _steps(log: Path) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for line in log.read_text().splitlines():
        rank, step = map(int, line.split())
        steps.setdefault(rank, []).append(step)
    return steps


WIDTH = 8


class _Stage(nn.Module):
    """A product; two where the micro-batch is a heavy one."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, heavy: Tensor) -> Tensor:
        out: Tensor = self.product(x).relu()
        return out if not heavy.item() else self.product(out)


def _pipelined(
    kind: str, heavy: list[int], sharded: bool | None, odd_loss: bool, ranks: int, every: bool
) -> Observation:
    """A pipeline of `ranks`, under fully_shard where `sharded` says if it reshards after forward."""

    def program() -> None:
        mesh = init_device_mesh("cuda", (ranks, 1 if sharded is None else 2), mesh_dim_names=("pp", "dp"))
        place = mesh.get_local_rank("pp")
        model = _Stage().cuda()
        if sharded is not None:
            fully_shard(model, mesh=mesh["dp"], reshard_after_forward=sharded)
        stage = PipelineStage(model, place, ranks, torch.device("cuda"), group=mesh.get_group("pp"))

        def loss(out: Tensor, target: Tensor) -> Tensor:
            error = (out - target).square()
            last = odd_loss and len(schedule._internal_losses) == len(heavy) - 1
            return (error * error).mean() if last else error.mean()

        schedule = getattr(schedules, kind)(stage, len(heavy), loss_fn=loss)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(4 * len(heavy), WIDTH, device="cuda")
        for _ in range(3):
            schedule.step(
                *(x,) * (place == 0), **({"target": x} if place == ranks - 1 else {}), heavy=torch.tensor(heavy)
            )
            optimizer.step()
            optimizer.zero_grad()

    return observe(program, world=ranks * (1 if sharded is None else 2), every_micro_batch=every)


def _with_and_without(*case: Any) -> tuple[Observation, Observation]:
    return _pipelined(*case, True), _pipelined(*case, False)


CASES = {
    "1F1B": ("Schedule1F1B", [0] * 8, None, False, 2),
    "1F1B of six ranks": ("Schedule1F1B", [0] * 10, None, False, 6),
    "GPipe": ("ScheduleGPipe", [0] * 8, None, False, 2),
    "kept by fully_shard": ("Schedule1F1B", [0] * 8, False, False, 2),
    "resharded by fully_shard": ("Schedule1F1B", [0] * 8, True, False, 2),
    "resharded in GPipe": ("ScheduleGPipe", [0] * 8, True, False, 2),
    "a micro-batch that does more": ("Schedule1F1B", [0, 0, 0, 0, 0, 1, 0, 0, 0], None, False, 2),
    "kinds that alternate": ("Schedule1F1B", [0, 1] * 5, None, False, 2),
    "a last loss of its own": ("Schedule1F1B", [0] * 8, None, True, 2),
}
NOT_REPEATED = {"a last loss of its own", "resharded by fully_shard"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("1F1B", "a last loss of its own") else pytest.mark.long)
        for name in CASES
    ],
)
def test_repeated_micro_batches_equal_executed_ones_of_a_program(name: str) -> None:
    """Event by event, and all else but the note; one that turns out to differ is found, and all are run."""
    in_full, quick = in_fresh_process(_with_and_without, *CASES[name])
    assert [any("repeated" in note for note in r.notes) for r in quick.ranks] == [name not in NOT_REPEATED] * len(
        quick.ranks
    )
    for a, b in zip(in_full.ranks, quick.ranks, strict=True):
        assert a.events == b.events
        assert replace(a, notes=()) == replace(b, notes=())


@pytest.mark.parametrize("spec", [None, ModuleSpec("absent", None)])
def test_a_library_that_is_not_there_is_found_by_nobody(
    monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None
) -> None:
    """Or has no loader, as a folder without files of Python: nothing of it is changed."""
    monkeypatch.setattr(calls, "find_spec", lambda name: spec)
    (name,) = calls._CHANGES
    assert calls._Finder().find_spec(name, None) is spec


def test_of_what_values_select_there_is_half_rounded_up() -> None:
    with FakeTensorMode():
        few = torch.empty(7, dtype=torch.int64)
        mask, table = few > 2, torch.empty(7, 3)
        selected = [
            half(aten.nonzero.default, (mask,), {}),
            half(aten.masked_select.default, (few, mask), {}),
        ]
        selected += [
            half(aten.index.Tensor, (table, [mask]), {}),
            *half(aten._unique2.default, (few,), {}),
        ]
        assert [tuple(t.shape) for t in selected] == [(4, 1), (4,), (4, 3), (4,), (7,), (4,)]
        counts = [half(aten.bincount.default, (few, None, least), {}) for least in (0, 5)]
        counts += [
            half(aten.bincount.default, (few,), {"minlength": 6}),
            half(aten.bincount.default, (few,), {}),
        ]
        assert [len(t) for t in counts] == [1, 5, 6, 1]
        assert half(aten.mm.default, (table, table), {}) is NotImplemented


def test_of_steady_micro_batches_the_first_and_the_last_are_executed() -> None:
    """Those between are repeated; micro-batches that never do the same are all executed."""
    for steady, executed in ((True, [0, 1, 2, 7]), (False, list(range(8)))):
        stage = SimpleNamespace(submod="stage")
        recorder = SimpleNamespace(position=SimpleNamespace(calls=dict))
        step = pipelines._Step(recorder, stage, 8, lambda: None)  # type: ignore[arg-type]
        step._steady = SteadyState(lambda a, b, steady=steady: steady)
        for chunk in range(8):
            step.begin(chunk, ("F", 0))
            if step.batches[chunk].executed:
                step._steady.add(("F", 0), pipelines._Pass.__new__(pipelines._Pass))
        assert [chunk for chunk, batch in step.batches.items() if batch.executed] == executed


def test_micro_batches_that_free_a_temporary_at_other_moments_are_not_the_same() -> None:
    """Their peaks differ. Results die when the schedule lets them go, wherever that is."""

    def record(*entries: tuple[str, str, int]) -> pipelines._Pass:
        return pipelines._Pass(Log(0, "F", [*entries]), (), (), None, {}, False, frozenset({("F", 1)}), True)

    operation, of_temporary, of_result = ("birth", "F", 2), ("death", "F", 0), ("death", "F", 1)
    early, late = record(of_temporary, operation), record(operation, of_temporary)
    assert early.same(record(of_temporary, of_result, operation))
    assert not early.same(late)
    assert early.matches(late)


def test_a_rank_that_others_wait_for_goes_on_to_its_next_place() -> None:
    """Neither past it, nor from a place that it has not reached."""
    processes = Processes(lambda: None, ObservationRequest(world=2))
    processes._waiting, processes._until = {0: 1}, {1: SECOND_MICRO_BATCH}
    processes._deliver()
    assert processes._until == {1: SECOND_MICRO_BATCH}
    for place, after in ((SECOND_MICRO_BATCH, WANTED_STEP), (WANTED_STEP, END)):
        processes._reached[1, place] = ("", ())
        processes._deliver()
        assert processes._until == {1: after}


def test_a_mask_among_indices_is_half_of_its_elements() -> None:
    x, rows, columns = torch.zeros(4, 6, 3), torch.arange(12), torch.arange(3)
    numbers = _as_numbers([rows[:4] > 1, columns.new_zeros(2)])
    assert [n.shape for n in numbers] == [(2,), (2,)]
    assert x[tuple(n.clamp(0, 3) for n in numbers)].shape == (2, 3)
    assert len(_as_numbers([torch.zeros(4, 6, dtype=torch.bool), None])) == 3


def test_what_only_a_graph_keeps_is_told_from_what_a_program_holds() -> None:
    with FakeTensorMode():
        w = torch.zeros(4, requires_grad=True)
        given_up, held = w * 2, w * 3
        y = given_up.sin() + held.sin()
    of: Any = {"phase": "F", "module": "m", "kind": "", "device": "cpu", "bytes": 16}
    known = {
        x.untyped_storage()._cdata: SimpleNamespace(site=Site("a.py", line, "f"), **of)
        for line, x in enumerate((given_up, held))
    }
    del given_up
    names = SimpleNamespace(plain=str)
    recorder: Any = SimpleNamespace(known=known, device="cpu", position=SimpleNamespace(names=names))
    assert [kept.site.line for kept in _kept_storages(recorder)] == [0]
    del y, held


def test_what_is_compiled_is_run_as_written() -> None:
    notes: list[str] = []
    module = nn.Linear(2, 2)
    with uncompiled(notes.append):
        assert torch.compile(_staged) is torch.compile(dynamic=True)(_staged) is _staged  # type: ignore[comparison-overlap]
        module.compile()
    assert module._compiled_call_impl is None
    assert len(notes) == 3


def test_a_tensor_without_content_answers_and_says_so(tmp_path: Path) -> None:
    answers: list[tuple[str, str]] = []
    notes: list[str] = []
    with FakeTensorMode(), stated_answers(lambda *said: answers.append(said), notes.append):
        x = torch.ones(2, 3)
        assert (x.tolist(), x.numpy().tolist()) == ([[1.0] * 3] * 2,) * 2
        assert x[1].data_ptr() == x.data_ptr() + 12 == x.untyped_storage().data_ptr() + 12 > 12
        assert torch.empty(0).data_ptr() == 0 < x.data_ptr()
        torch.save(x, tmp_path / "x")
        torch.distributed.checkpoint.save({"x": x})
        torch.distributed.checkpoint.async_save({"x": x})
    address = ("data_ptr", "an address of its storage")
    assert answers[:2] == [("tolist", "the stated value"), ("numpy", "the stated value")]
    assert answers[2:5] == [address, address, ("data_ptr of the storage", "an address of it")]
    names = ("torch.save", "torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save")
    assert notes == [f"{name}: skipped, nothing is written" for name in names]
    assert not list(tmp_path.iterdir())
    assert torch.ones(2).untyped_storage().data_ptr() > 0
