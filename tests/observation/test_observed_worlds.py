"""Worlds that are asked for: what is none is refused, and what is large is no slower for it."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fresh_process import in_fresh_process
from torch.distributed.fsdp._fully_shard import _fsdp_param

from phalanx.observation.fake import device as gpu
from phalanx.observation.fake.world import one_rank
from phalanx.observation.observe import observe as phalanx_observe
from phalanx.observation.program import processes
from phalanx.observation.request import ObservationRequest
from phalanx.observation.unobservable import Unobservable, Unsteady
from phalanx.runtime.any_module.parallelize import parallelize
from phalanx.runtime.any_module.proposal import propose_tp_plan
from phalanx.spec.errors import InputError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": 0}, "world = 0: is not a number of ranks"),
        ({"world": 2.0}, "world = 2.0: is not a number of ranks"),
        ({"world": 10**9}, "from 1 to 10,000,000"),
        ({"world": 4, "mesh": {"dp": 3}}, "mesh = {'dp': 3}: has 3 ranks; world is 4"),
        ({"world": 4, "ranks": [4]}, "ranks = 4: is not a rank"),
        ({"world": 4, "ranks": "all"}, "ranks = 'all': is not a list of ranks"),
        ({"world": 4, "ranks_per_node": 0}, "ranks_per_node = 0: is not a number of ranks"),
    ],
)
def test_an_invalid_world_mesh_or_rank_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        phalanx_observe(lambda: None, **options)


def test_shards_of_ranks_without_rows_are_one_tensor() -> None:
    """fully_shard makes an empty tensor for every such rank: of 16,384, each parameter would take thousands."""
    with one_rank(0, 1, 8, lambda note: None):
        shards = _fsdp_param._chunk_with_empty(torch.ones(6, 2), 16384, 0)
    assert len(shards) == 16384
    assert [len(s) for s in shards[:7]] == [1] * 6 + [0]
    assert len({id(s) for s in shards}) == 7
    assert [s.shape for s in _fsdp_param._chunk_with_empty(torch.ones(6, 2), 8, 0)] == [s.shape for s in shards[:8]]


def test_objects_are_received_from_the_rank_that_is_said() -> None:
    sent: list[Any] = []
    post = SimpleNamespace(send=lambda to, objects: sent.append((to, objects)), receive=lambda sender: [sender])
    with one_rank(1, 4, 4, lambda line: None, post):
        objects = [None]
        assert dist.recv_object_list(objects, src=3) == 3
        assert objects == [3]
        dist.send_object_list(objects, dst=2)
    assert sent == [(2, [3])]


def test_groups_have_the_hosts_backend_for_the_fake_gpu() -> None:
    """Torch knows no backend of a device that was made here: a group's own is asked for the host's in its place."""
    with one_rank(0, 2, 2, lambda note: None):
        group = dist.group.WORLD
        assert group is not None
        asked = SimpleNamespace(type=gpu.NAME)  # only its type: the device need not be registered
        of_gpu, of_host = (group._get_backend(device) for device in (asked, torch.device("cpu")))  # type: ignore[arg-type]
        assert of_gpu is not None
        assert of_gpu.name() == of_host.name() == "fake"
        with pytest.raises(RuntimeError):
            group._get_backend(torch.device("meta"))


def _own(line: str, tp_plan: dict[str, str] | None) -> None:
    layers = [torch.nn.Linear(8, 32, bias=False), torch.nn.ReLU(), torch.nn.Linear(32, 8, bias=False)]
    module = torch.nn.Sequential(*layers)
    model = parallelize(module, line, tp_plan=tp_plan)
    device = next(model.parameters()).device
    optimizer = model.attach(torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        model.step([(torch.ones(4, 8, device=device),) * 2] * 2, torch.nn.functional.mse_loss)
        optimizer.step()


def _sent_by_own(line: str, plan: dict[str, str] | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for observed in phalanx_observe(lambda: _own(line, plan), world=4).ranks[0].communication:
        event = observed.event
        found[event.op] = found.get(event.op, 0) + event.bytes
    return found


@pytest.mark.parametrize(
    ("line", "plan", "sent"),
    [
        # 8 x 32 + 32 x 8 = 512, of 4 bytes; and 8 bytes a parameter: does any rank have a gradient of it?
        ("zero=1", None, {"reduce_scatter": 2048, "all_gather": 2048, "all_reduce": 2 * 8}),
        ("zero=0", None, {"all_reduce": 2048 + 2 * 8}),
        # Parameters are gathered in each pass, gradients reduced in each; 16 bytes a micro-batch compare the calls.
        (
            "zero=3",
            None,
            {"reduce_scatter": 2 * 2048, "all_gather": 2 * (2048 + 1024), "all_reduce": 2 * 8 + 2 * 16},
        ),
        # Two micro-batches: outputs are summed in each (4 x 8 of 4 bytes); its inputs have no gradient.
        ("tp=4", {"0": "colwise", "2": "rowwise"}, {"all_reduce": 2 * 128}),
    ],
)
def test_a_parallelized_module_is_observed(line: str, plan: dict[str, str] | None, sent: dict[str, int]) -> None:
    assert in_fresh_process(_sent_by_own, line, plan) == sent


def test_no_plan_is_proposed_without_values() -> None:
    def program() -> None:
        propose_tp_plan(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)), torch.ones(1, 2))

    with pytest.raises(Unobservable, match="has no values under `phalanx observe`"):
        phalanx_observe(program, world=2)


def test_where_micro_batches_differ_the_same_program_is_observed_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ObservationRequest]] = []

    class Told(AbstractContextManager["Told"]):
        axes, device = {}, "cpu"

        def __init__(self, program: Any, request: ObservationRequest) -> None:
            asked.append((program, request))

        def __exit__(self, *raised: object) -> None:
            return None

        def observe(self, rank: int) -> int:
            if not asked[-1][1].every_micro_batch:
                raise Unsteady
            return rank

    monkeypatch.setattr(processes, "Processes", Told)
    seen = processes.observe_program("name", print, request := ObservationRequest(4, ranks=(1, 3)))
    assert (seen.program, seen.world, seen.ranks) == ("name", 4, (1, 3))
    assert asked == [(print, request), (print, replace(request, every_micro_batch=True))]
