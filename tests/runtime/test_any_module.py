"""Any module, any strategy: the same as one process by torch alone."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    awkward_module,
    fault_injection,
    forked_cli,
    listed_module,
    piped_module,
    split_module,
    two_modules,
)
from support.rank_pool import Pool, Where
from support.sizes import combined, examples, sampled
from torch import Tensor, nn

import phalanx
from phalanx.runtime.any_module.batch_norm import _Normalise
from phalanx.runtime.any_module.parallel import Parallel
from phalanx.schedule.gradients.sharding import sharding_of
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.spec import Strategy, parse


def _equal(found: dict[str, Any], truth: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["norms"], truth["norms"], rtol=1e-9)
    assert found["state"].keys() == truth["state"].keys()
    for name, value in truth["state"].items():
        np.testing.assert_allclose(found["state"][name], value, rtol=1e-7, atol=1e-9, err_msg=name)
    np.testing.assert_allclose(found["out"], truth["out"], rtol=1e-7, atol=1e-9)


@examples(2, 40)
@pytest.mark.parametrize("world", sampled([1, 2, 3, 4, 6], (2, 4)))
def test_an_awkward_module_equals_one_process(pool: Pool, world: int, examples: int) -> None:
    shards = [d for d in range(1, world + 1) if world % d == 0]

    @settings(max_examples=examples)
    @given(
        st.sampled_from([0, 1, 2, 3]),
        st.sampled_from(shards),
        st.sampled_from(["", ",bucket=0.0002", ",prefetch=0"]),
        st.sampled_from(list(awkward_module.OPTIMIZERS)),
        st.sampled_from([1, 3]),
        st.sampled_from([0.1, 100.0]),
        st.booleans(),
    )
    def holds(  # type: ignore[no-untyped-def]
        zero, shard, more, optimizer, accumulation, clip, named
    ) -> None:
        line = f"zero={zero}{f',shard={shard}' if zero else ''}{more}"
        args = (optimizer, clip, (0, 4), accumulation)
        truth = awkward_module.oracle(world, *args)
        for found in pool.run(world, awkward_module.parallelized, line, *args, None, named):
            _equal(found, truth)

    holds()


def test_a_module_goes_on_over_any_layout(pool: Pool, tmp_path: Path) -> None:
    """The replicas' share of the batch is theirs by their number, so dp stays; stage and shards change."""
    truth = awkward_module.oracle(4, "adamw", 1.0, (0, 6), 1)
    for line, steps in (("zero=3", (0, 2)), ("zero=0", (2, 3)), ("zero=2,shard=2", (3, 5)), ("zero=1", (5, 6))):
        found = pool.run(4, awkward_module.parallelized, line, "adamw", 1.0, steps, 1, tmp_path)
    np.testing.assert_allclose(found[0]["norms"], truth["norms"][-1:], rtol=1e-9)
    for name, value in truth["state"].items():
        np.testing.assert_allclose(found[3]["state"][name], value, rtol=1e-7, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("depth", sampled([1, 2, 3, 4], (3,)))
def test_weights_are_never_those_of_before(pool: Pool, depth: int) -> None:
    truth = pool.run(2, awkward_module.odd_passes, "zero=0", depth)[0]
    for line in ("zero=1", "zero=2", "zero=3", "zero=3,reshard=step", "zero=3,prefetch=0"):
        for found in pool.run(2, awkward_module.odd_passes, line, depth):
            for name, value in truth.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=f"{line} {name}")


@pytest.mark.parametrize("line", ["zero=1", "zero=2", "zero=3", "recompute=full"])
def test_a_list_of_lists_equals_one_process(pool: Pool, line: str) -> None:
    """`for attention, mlp in blocks`: a ModuleList in a ModuleList is never called, its members are."""
    truth = pool.run(2, listed_module.train, "zero=0", "pairs")[0]
    for found in pool.run(2, listed_module.train, line, "pairs"):
        for name, value in truth.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


def test_gathers_stand_between_the_graphs_of_a_compiled_module(pool: Pool) -> None:
    truth = pool.run(2, listed_module.train, "zero=0", "plain")[0]
    for found in pool.run(2, listed_module.train, "zero=3", "compiled"):
        for name, value in truth.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


def test_units_that_ranks_call_differently_stop(pool: Pool) -> None:
    """Each would compute with a mixture of two units' parameters."""
    for said in pool.run(2, listed_module.refusal, "zero=3,prefetch=0", "routed"):
        assert said.startswith("ranks have called different units, and with zero=3"), said


@pytest.mark.parametrize(
    ("line", "kind"),
    combined(
        ["zero=3", "zero=3,prefetch=0", "zero=3,reshard=step", "zero=2", "zero=3,recompute=full"],
        [*listed_module.ORDERS, "two views", "carried"],
    ),
)
def test_units_are_called_in_any_order(pool: Pool, line: str, kind: str) -> None:
    """A unit that is called again, or out of the order of its list, still has a gradient to come."""
    truth = pool.run(2, listed_module.train, "zero=0", kind)[0]
    for found in pool.run(2, listed_module.train, line, kind):
        for name, value in truth.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("line", ["zero=0", "zero=1", "zero=2", "zero=3", "zero=3,reshard=step"])
def test_a_loss_through_another_model_trains_one_alone(pool: Pool, line: str) -> None:
    truth = two_modules.train_whole(2)
    for found in pool.run(2, two_modules.train, line):
        assert found.keys() == truth.keys()
        for name, value in truth.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-11, err_msg=name)


def _clip_by_hand(layer: nn.Module, of: list[Tensor]) -> None:
    nn.utils.clip_grad_norm_(of, 0.1)


def _clip_by_own_code(layer: nn.Module, of: list[Tensor]) -> None:
    norm = torch.stack([p.grad.square().sum() for p in layer.parameters() if p.grad is not None]).sum().sqrt()
    for p in layer.parameters():
        p.grad = None if p.grad is None else p.grad * (0.1 / norm)


@pytest.mark.parametrize("clip", [_clip_by_hand, _clip_by_own_code])
def test_whole_gradients_are_where_a_program_looks_for_them(clip: Callable[[nn.Module, list[Tensor]], None]) -> None:
    """Unsharded, `.grad` is the gradient, and what a program puts there is what the optimizer takes."""
    plain, layer = nn.Linear(3, 2), nn.Linear(3, 2)
    layer.load_state_dict(plain.state_dict())
    model = phalanx.parallelize(layer, "zero=0")
    held = list(model.parameters())
    pairs = (plain, torch.optim.SGD(plain.parameters(), lr=1.0)), (layer, torch.optim.SGD(held, lr=1.0))
    model.attach(pairs[1][1])
    for x in torch.ones(3, 1, 3).unbind(0):
        plain(x).square().sum().backward()
        model.backward(model(x).square().sum())
        for module, optimizer in pairs:
            clip(module, list(module.parameters()) if module is plain else held)
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("infinite", [False, True])
def test_a_grad_scaler_sees_infinities(infinite: bool) -> None:
    layer = nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    model = phalanx.parallelize(layer, "zero=0")
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model.backward(scaler.scale(model(torch.ones(1, 3)).sum()) * (math.inf if infinite else 1))
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(before - layer.weight, torch.full_like(before, 0.0 if infinite else 1.0))
    assert (scaler.get_scale() < 1024) == infinite


@pytest.mark.parametrize("line", ["zero=1", "zero=3"])
def test_a_part_of_a_gradient_is_not_taken_for_all_of_it(pool: Pool, line: str) -> None:
    """A norm of what one rank holds would clip each rank by another factor, and an infinity would stop one rank
    alone."""
    for said in pool.run(2, listed_module.readings, line):
        assert len(said) == 4
        assert all("not the whole gradient" in one and "use model.clip" in one for one in said), said


@pytest.mark.parametrize("line", ["zero=0", "zero=1", "zero=3"])
def test_gradients_are_not_lost_where_every_micro_batch_is_called_the_last(line: str) -> None:
    model = phalanx.parallelize(nn.Linear(2, 2), line)
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match=r"neither used by optimizer.step\(\) nor dropped .* last=True"):
        model.backward(model(torch.ones(1, 2)).sum())
    optimizer.zero_grad()
    model.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()


def test_units_called_unequally_often_end_in_a_line() -> None:
    """One rank gathers a unit while the other is at its backward pass."""
    alone = Pool(Where(2, 2))  # whose connections are of no use afterwards
    try:
        said = alone.run(2, listed_module.refusal, "zero=3,prefetch=0", "more", 2.0)
    finally:
        alone.stop()
    assert all(line.endswith("with zero=3, call the same units equally often") for line in said), said
    assert sorted(re.search(r"failed during (\S+ of \w+)", line)[1] for line in said) == [  # type: ignore[index]
        "all_gather of blocks",
        "all_reduce of calls",
    ]


def test_a_hook_that_gets_gradients_before_their_sum_is_said() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.warns(UserWarning, match=r"^bias: a hook on an accumulated gradient .* before any sum"):
        phalanx.parallelize(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        phalanx.parallelize(nn.Linear(2, 2))


def test_parameters_are_frozen_between_steps() -> None:
    model = phalanx.parallelize(nn.Linear(2, 2))
    model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    model.backward(model(torch.ones(1, 2)).sum(), last=False)
    with pytest.raises(RuntimeError, match="frozen between steps"):
        model.requires_grad_(False)
    assert next(model.parameters()).requires_grad


@pytest.mark.parametrize("line", ["zero=1", "zero=3"])
def test_a_unit_whose_parts_are_called_alone_is_refused(pool: Pool, line: str) -> None:
    """Its weights would be NaN with zero=3, and with zero=1 and 2 perhaps those of the step before."""
    for said in pool.run(2, listed_module.refusal, line, "parts"):
        assert said.startswith("units = 'blocks.0': is not called itself, but its a is"), said
    with pytest.raises(InputError, match=r"units = 'blocks.0': is a ModuleList without a forward pass"):
        phalanx.parallelize(module := listed_module.Listed("pairs"), "zero=0", units=[module.blocks[0]])


@pytest.mark.parametrize("line", ["zero=1", "zero=2"])
@pytest.mark.parametrize("depth", [1, 2])
def test_weights_that_come_late_do_not_meet_the_next_ones(pool: Pool, line: str, depth: int) -> None:
    """A pass that skips all layers of a bucket waits for none of its weights, and then they are updated."""
    truth = pool.run(2, awkward_module.odd_passes, "zero=0", depth)[0]
    for found in pool.run(2, fault_injection.odd_passes_while_weights_travel, line, depth):
        for name, value in truth.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


def test_a_state_dict_of_another_module_is_refused() -> None:
    model = phalanx.parallelize(nn.Linear(4, 6))
    for state, words in (
        ({"weight": torch.zeros(8, 4), "bias": torch.zeros(6)}, "has the shape"),
        ({"weight": torch.zeros(6, 4)}, "is missing"),
        ({"weight": torch.zeros(6, 4), "bias": torch.zeros(6), "more": torch.zeros(1)}, "is not in the module"),
    ):
        with pytest.raises(InputError, match=words):
            model.load_state_dict(state)


def test_a_failed_step_is_not_gone_on_from() -> None:
    model = phalanx.parallelize(nn.Linear(2, 2))
    model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(1, 2, requires_grad=True)
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.backward(model(x).sum())
    with pytest.raises(RuntimeError, match="start again"):
        model.backward(model(torch.ones(1, 2)).sum())


def test_what_the_engine_would_get_wrong_is_refused() -> None:
    def module(**parameters: nn.Parameter) -> nn.Module:
        found = nn.Module()
        for name, p in parameters.items():
            found.register_parameter(name, p)
        return found

    memory = torch.zeros(4)
    shared = module(a=nn.Parameter(memory[:3]), b=nn.Parameter(memory[2:]))
    with pytest.raises(InputError, match="shares memory with a"):
        phalanx.parallelize(shared)
    phalanx.parallelize(module(a=nn.Parameter(memory[:2]), b=nn.Parameter(memory[2:])))
    with pytest.raises(InputError, match="complex64"):
        phalanx.parallelize(module(a=nn.Parameter(torch.zeros(2, dtype=torch.complex64))))
    with pytest.raises(InputError, match="meta"):
        phalanx.parallelize(nn.Linear(2, 2, device="meta"))
    twice = nn.Linear(2, 2)
    model = phalanx.parallelize(twice)
    with pytest.raises(InputError, match="already"):
        phalanx.parallelize(twice)
    with pytest.raises(RuntimeError, match="not announced"):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(InputError, match="does not hold all"):
        model.attach(torch.optim.SGD([next(model.parameters())], lr=0.1))
    model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match="second one"):
        model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    twice.register_parameter("late", nn.Parameter(torch.zeros(1)))
    model.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match="cannot be trained now"):
        model._optimizer.step()  # type: ignore[union-attr]


def test_a_state_dict_comes_back() -> None:
    module = awkward_module.seeded(3)
    model = phalanx.parallelize(module)
    state = model.state_dict()
    assert state.keys() == module.state_dict().keys()
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    model.load_state_dict(state)
    assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())


def test_a_loaded_state_is_that_of_the_copy_to_compare_with_too() -> None:
    module, other = awkward_module.seeded(3), awkward_module.seeded(4)
    copies = [awkward_module.seeded(3) for _ in range(2)]
    model = phalanx.parallelize(module)
    model._unsplit.append((copies[0], None))  # type: ignore[arg-type]
    model._first_step.append(SimpleNamespace(whole=copies[1]))  # type: ignore[arg-type]
    model.load_state_dict(other.state_dict())
    for whole in copies:
        assert all(torch.equal(t, whole.state_dict()[name]) for name, t in other.state_dict().items())


def test_masters_are_finer_than_weights() -> None:
    """bf16 weights, fp32 masters: steps too small for bf16 add up."""
    model = phalanx.parallelize(nn.Linear(4, 4).bfloat16())
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=2**-12))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    before = model.module.weight.detach().clone()
    for _ in range(64):
        model.backward(model(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
        optimizer.step()
    assert not torch.equal(before, model.module.weight)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("zero=5", "strategy.zero"),
        ("dp=2", "there are 1; leave dp out, or start as many"),
        ("zerro=1", "did you mean"),
        ("tp=2", "for 2 ranks, but there are 1; start as many: torchrun --nproc-per-node 2 SCRIPT"),
        ("pp=2", "for 2 ranks, but there are 1; start as many: torchrun --nproc-per-node 2 SCRIPT"),
        ("virtual=2", "applies to pipelines only"),
        ("micro_batch=2", "what your loop hands"),
        ("recompute=full", "the module has none; say units"),
        ("recompute=selective", "use recompute=full, of whole units"),
    ],
)
def test_wrong_strategies_are_one_line(line: str, words: str) -> None:
    with pytest.raises(InputError, match="strategy") as error:
        phalanx.parallelize(nn.Linear(2, 2), line)
    assert words in str(error.value)


def test_units_run_again_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), nn.Tanh())
    calls = [0]
    module[1][0].register_forward_hook(lambda *_: calls.append(0))
    model = phalanx.parallelize(module, "recompute=full")
    model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(2, 3)
    model.backward(model(x).sum())
    assert len(calls) == 3
    with pytest.raises(InputError, match=r"strategy.recompute = 'full': runs units twice, and 0.1 would count each"):
        phalanx.parallelize(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))), "recompute=full")


def test_misuse_is_said() -> None:
    model = phalanx.parallelize(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"make it for model\.parameters"):
        model.attach(torch.optim.SGD([torch.zeros(2)], lr=0.1))
    optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="before backward"):
        optimizer.step()
    model.backward(model(torch.ones(1, 2)).sum(), last=False)
    with pytest.raises(RuntimeError, match="before backward"):
        model.clip(1.0)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    with pytest.raises(InputError, match="several types"):
        phalanx.parallelize(mixed)
    with pytest.raises(InputError, match="no parameter"):
        phalanx.parallelize(nn.ReLU())
    with pytest.raises(InputError, match=r"not a torch\.nn\.Module"):
        phalanx.parallelize(nn.functional.relu)  # type: ignore[arg-type]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(InputError, match="do not nest"):
        phalanx.parallelize(nested, units=[nested[0], nested[0][0]])
    with pytest.raises(InputError, match="not a part"):
        phalanx.parallelize(nn.Linear(2, 2), units=[nn.Linear(2, 2)])


def test_planning_needs_no_torch_for_the_package() -> None:
    with pytest.raises(AttributeError, match="parallelise"):
        phalanx.parallelise  # noqa: B018


@pytest.mark.parametrize("words", [("pp=2", "3"), pytest.param(("zero=3",), marks=pytest.mark.long)])
def test_the_example_runs_under_torchrun(tmp_path: Path, words: tuple[str, ...]) -> None:
    example = Path(__file__).parents[2] / "examples" / "any_module.py"
    options = ("--nproc-per-node", "2", "--standalone")
    code, out, err = forked_cli.phalanx(tmp_path, str(example), *words, torchrun=options)
    assert code == 0, err
    losses = [float(line.split()[3]) for line in out.splitlines() if line.startswith("step")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("kind", "world", "lines"),
    sampled(
        [
            ("own", 2, ["tp=2", "tp=2,zero=1"]),
            ("own", 4, ["tp=2", "tp=2,zero=1", "tp=2,zero=2", "tp=2,zero=3", "tp=4"]),
            ("llama", 2, ["tp=2"]),
            ("qwen3", 4, ["tp=2,zero=1"]),  # with norms of heads, whose gradients are summed, and a tied head
        ],
        (1, 2),
    ),
)
def test_layers_split_by_a_plan_equal_one_process(pool: Pool, kind: str, world: int, lines: list[str]) -> None:
    for line in lines:
        truth = split_module.whole(kind, world // int(line[3]), 3)
        for found in pool.run(world, split_module.split, kind, line, 3):
            np.testing.assert_allclose(found["norms"], truth["norms"], rtol=1e-9)
            assert found["state"].keys() == truth["state"].keys()
            for name, value in truth["state"].items():
                np.testing.assert_allclose(
                    found["state"][name], value, rtol=1e-7, atol=1e-9, err_msg=f"{line} {name}"
                )


@pytest.mark.parametrize("line", ["tp=2", "tp=2,zero=3"])
def test_a_split_that_changes_the_function_is_refused_with_its_layers(pool: Pool, line: str) -> None:
    """In the first forward pass; a module of the same shapes without packed matrices trains, dropout and all."""
    for said in pool.run(2, split_module.packed, True, line, True):
        assert said.startswith(
            "tp_plan = '1.down, 1.gate_and_up, 1.up': makes 1 compute another function than unsplit"
        )
    assert pool.run(2, split_module.packed, False, line, True) == ["", ""]
    assert pool.run(2, split_module.packed, True, line, False) == ["", ""]


@pytest.mark.parametrize("buffers", ["rank 0", "average"])
def test_buffers_follow_rank_0_or_are_averaged(pool: Pool, tmp_path: Path, buffers: str) -> None:
    found = pool.run(2, split_module.statistics, buffers, str(tmp_path / "checkpoint"))
    each = [rank["alone"] for rank in found]
    expected = each[0] if buffers == "rank 0" else (each[0] + each[1]) / 2
    for rank in found:
        np.testing.assert_allclose(rank["mean"], expected, rtol=1e-5, atol=1e-7)
        np.testing.assert_array_equal(rank["back"], rank["mean"])


@pytest.mark.parametrize(
    ("world", "line"), sampled([(2, "zero=0"), (2, "zero=3"), (4, "zero=1,shard=2"), (4, "dp=2,pp=2")], (1, 3))
)
def test_batch_norm_equals_one_process_in_three_meanings(pool: Pool, world: int, line: str) -> None:
    replicas = 2 if "pp" in line else world
    truth = {meaning: split_module.BATCH_NORM.one_process(meaning, replicas) for meaning in ("rank 0", "synchronise")}
    truth["average"] = split_module.BATCH_NORM.one_process("average", replicas)
    for meaning, expected in truth.items():
        for found in pool.run(world, split_module.batch_norms, line, meaning):
            state = {name: torch.from_numpy(value) for name, value in found.items()}
            off, name = split_module.BATCH_NORM.largest_difference(state, expected)
            assert off < 1e-9, f"{meaning} {name}"
            others = [truth[other] for other in truth if other != meaning]
            assert all(split_module.BATCH_NORM.largest_difference(state, other)[0] > 1e-3 for other in others)


def test_a_meaning_of_buffers_that_is_none_is_one_line() -> None:
    with pytest.raises(InputError, match="'rank 0', 'average' or 'synchronise'"):
        phalanx.parallelize(nn.Linear(2, 2), buffers="sync")  # type: ignore[arg-type]


def test_a_plan_of_wrong_names_is_one_line(pool: Pool) -> None:
    for plan, words in (
        ({"blocks.*.upp": "colwise"}, "is the name of no layer; did you mean blocks."),
        ({"blocks.*.up": "columns"}, "is not a style"),
        ({"blocks.*.norm": "colwise"}, "splits nn.Linear"),
        (None, "has no published plan"),
    ):
        assert words in pool.run(2, split_module.refused, plan)[0]
    with pytest.raises(InputError, match="tp is 1"):
        phalanx.parallelize(nn.Linear(2, 2), tp_plan={"": "colwise"})


def test_an_optimizer_that_is_not_attached_is_said_at_once() -> None:
    model = phalanx.parallelize(nn.Linear(2, 2))
    torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="no optimizer is attached"):
        model.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match=r"call model\.backward\(loss\), not loss\.backward"):
        model(torch.ones(1, 2)).sum().backward()


def test_the_wrapper_is_a_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model = phalanx.parallelize(module)
    assert isinstance(model, nn.Module)
    assert not model.eval().training
    assert not module[1].training
    assert model.train() is model
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    assert list(model.state_dict(prefix="inner.")) == ["inner.0.weight", "inner.0.bias"]
    for wrong in (model.half, lambda: model.to("cpu"), lambda: copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="before"):
            wrong()


@pytest.mark.parametrize(
    ("world", "line", "cuts", "count"),
    sampled(
        [
            (2, "pp=2", [5], 3),
            (2, "pp=2,schedule=gpipe", ["7"], 2),
            (2, "pp=2,schedule=interleaved,virtual=2", [2, 5, 8], 4),
            (3, "pp=3,schedule=naive", [2, 7], 2),
            (4, "pp=2", [5], 3),
            (4, "pp=2,zero=1", [5], 3),
            (4, "pp=2,zero=2,schedule=interleaved,virtual=2", [2, 5, 8], 2),
            (4, "pp=2,zero=3", [5], 3),
            (4, "pp=2,zero=3,order=dp/pp/cp/tp", [5], 1),
        ],
        (1, 3, 5, 6, 8),
    ),
)
def test_a_pipeline_of_a_sequential_equals_one_process(
    pool: Pool, world: int, line: str, cuts: list[int | str], count: int
) -> None:
    dp = world // int(line[3])
    truth = piped_module.whole(dp, count, 3)
    for found in pool.run(world, piped_module.piped, line, cuts, count, (0, 3)):
        mine = [of_step[found["replica"]] for of_step in truth["losses"]]
        np.testing.assert_allclose(found["losses"], mine, rtol=1e-9)
        _same_end(found, truth, line)
        assert found["held"] < sum(p.numel() for p in piped_module.make(0).parameters())


def _same_end(found: dict[str, Any], truth: dict[str, Any], what: str) -> None:
    np.testing.assert_allclose(found["norms"], truth["norms"][-len(found["norms"]) :], rtol=1e-9)
    np.testing.assert_allclose(found["after"], truth["after"], rtol=1e-9)
    assert list(found["state"]) == list(truth["state"])
    for name, value in truth["state"].items():
        np.testing.assert_allclose(found["state"][name], value, rtol=1e-7, atol=1e-9, err_msg=f"{what} {name}")


def test_a_tied_pair_inside_a_chunk_equals_one_process(pool: Pool) -> None:
    truth = piped_module.whole(2, 2, 2, tied=True)
    for found in pool.run(4, piped_module.piped, "pp=2,zero=1", [5], 2, (0, 2), None, True):
        _same_end(found, truth, "tied")


def test_a_pipeline_goes_on_over_any_layout(pool: Pool, tmp_path: Path) -> None:
    """The number of replicas stays, since each has its share of the batch."""
    truth = piped_module.whole(2, 2, 6)
    cut: Any = [2, 5, 8]
    for world, line, cuts, steps in (
        (4, "pp=2,zero=3", [5], (0, 2)),
        (2, "zero=1", None, (2, 3)),
        (4, "pp=2,zero=1,schedule=interleaved,virtual=2", cut, (3, 5)),
        (2, "", None, (5, 6)),
    ):
        found = pool.run(world, piped_module.piped, line, cuts, 2, steps, tmp_path)
    for rank in found:
        _same_end(rank, truth, "at last")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no cuts", "for example cuts=[7], which balances parameters"),
        ("descending", "must ascend"),
        ("name", "is not the number or the name of a child"),
        ("tied", "is the same parameter as 8.weight in chunk 0"),
        ("frozen", "chunk 0 (0) has no parameter that is trained"),
        ("schedule", "use 1f1b, interleaved, gpipe or naive"),
        ("module", "nn.Sequential(embedding, *blocks, head)"),
        ("tp", "use dp and pp, or dp and tp"),
        ("call", "use model.step or model.evaluate"),
        ("ragged", "must have one shape of input"),
    ],
)
def test_a_pipeline_that_cannot_be_is_one_line(pool: Pool, case: str, words: str) -> None:
    for message in pool.run(2, piped_module.refused, case):
        assert words in message
        assert "\n" not in message


@pytest.mark.parametrize(("kind", "first", "then"), [("own", "tp=2,zero=1", "tp=4"), ("llama", "tp=2", "zero=3")])
def test_split_layers_go_on_over_any_layout(pool: Pool, tmp_path: Path, kind: str, first: str, then: str) -> None:
    world = 4 if kind == "own" else 2
    dp = {"own": (2, 1), "llama": (1, 2)}[kind]
    truth = split_module.whole(kind, dp, 2)
    pool.run(world, split_module.split, kind, first, 2, tmp_path)
    for found in pool.run(world, split_module.split, kind, then, 4, tmp_path):
        np.testing.assert_allclose(found["norms"], truth["norms"][2:], rtol=1e-9)
        for name, value in truth["state"].items():
            np.testing.assert_allclose(found["state"][name], value, rtol=1e-7, atol=1e-9, err_msg=f"{kind} {name}")


@pytest.mark.parametrize("line", ["dp=2,zero=1", "tp=2"])
@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_an_optimizer_of_whole_tensors_is_refused_where_these_are_divided(line: str, name: str) -> None:
    s = Strategy(**parse(line))
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    model = SimpleNamespace(strategy=s, _engine=SimpleNamespace(sharding=sharding_of(s)), parameters=lambda: [weight])
    with pytest.raises(InputError, match=rf"{name}.*looks at whole tensors, and (zero=1|tp=2) divides them"):
        Parallel.attach(model, getattr(torch.optim, name)([weight]))  # type: ignore[arg-type]


def test_statistics_of_a_batch_without_elements_are_refused() -> None:
    """Before anything is sent: the mean of nothing would be no number on every rank."""
    for empty in (torch.empty(0, 3), torch.empty(2, 3, 0)):
        with pytest.raises(ValueError, match=r"norm: BatchNorm .* without elements"):
            _Normalise.apply(empty, None, "dp", "norm", 1e-5)
