"""Parameters that ZeRO-3 gathers in 8 bits: the same step to the bit, in half the bytes of bf16, and as predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fresh_process import in_fresh_process
from support.in_process_cli import error_of, phalanx
from support.narrow_models import FAMILIES, NARROW, SIZES
from support.rank_pool import Pool
from support.sizes import examples
from torch import Tensor

from phalanx.cost.step.expand import expand
from phalanx.cost.step.predict import predict
from phalanx.observation.trainer.verify import verify
from phalanx.planning.search.space import all_strategies
from phalanx.planning.search.strategy_columns import Options
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import World
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.legality import check, require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.training_step import Training

CASES = (
    ("experts", "dp=3,zero=3"),
    ("gpt2", "dp=2,zero=3,micro_batch=2,recompute=full"),
    ("experts", "dp=4,ep=2,zero=3"),
    ("llama", "dp=4,shard=2,zero=3,prefetch=0"),
    ("qwen3", "tp=2,dp=2,zero=3,micro_batch=2"),
    ("latent", "dp=2,cp=2,zero=3,compression=int8"),
    ("experts", "dp=2,pp=2,zero=3,schedule=zb-h1"),
    ("llama", "cp=2,zero=3,recompute=selective"),
)


def _case(family: str, line: str, gather: bool) -> tuple[ModelSpec, Job, Strategy]:
    s = make_strategy(line)
    assert s is not None
    precision = NARROW if gather else replace(NARROW, gather="compute")
    model = build(ModelSpec, complete(SIZES | FAMILIES[family]), "model")
    return model, Job(2 * s.dp * s.micro_batch, 32, precision), s


def steps(world: World, *case: Any) -> tuple[list[tuple[float, float]], list[Tensor], dict[str, Tensor]]:
    """Of three steps: (loss, gradient norm) of each; and this rank's masters and gradients after them."""
    model, job, s = case
    training = Training(model, job, s, Comm(world, mesh(s)), seed=0)
    tokens = torch.randint(64, (job.global_batch, 33), generator=torch.Generator().manual_seed(0))
    own = list(tokens[world.rank // s.tp % s.dp :: s.dp].split(s.micro_batch))
    results = [training.step(own, 3e-3) for _ in range(3)]
    masters = [master.clone() for _, master, _ in training.engine.pieces()]
    return [(r.loss, r.grad_norm) for r in results], masters, training.gradients()


@examples(1, 6)
def test_a_step_is_the_same_to_the_bit(pool: Pool, examples: int) -> None:
    for family, line in [case for case in CASES if "cp" not in case[1]][:examples]:
        narrow, plain = (_case(family, line, gather) for gather in (True, False))
        world = narrow[2].world
        for ours, theirs in zip(pool.run(world, steps, *narrow), pool.run(world, steps, *plain), strict=True):
            assert ours[0] == theirs[0], (family, line)
            assert ours[0][2][0] < ours[0][0][0]  # it learns
            assert all(map(torch.equal, ours[1], theirs[1])), (family, line)
            assert ours[2].keys() == theirs[2].keys()
            assert all(torch.equal(ours[2][name], theirs[2][name]) for name in ours[2]), (family, line)


def _unproved(examples: int, on_gpu: bool) -> list[str]:
    found = []
    for family, line in CASES[-examples:] if on_gpu else CASES[:examples]:
        for v in verify(*_case(family, line, True), on_gpu=on_gpu):
            if not v.proved:
                found.append(f"{family} {line}: {v.failed} {[str(d) for d in v.differences]}")
            elif not on_gpu and v.deviation > 4096:
                found.append(f"{family} {line}: live bytes off by {v.deviation}")
    return found


@examples(1, len(CASES))
def test_events_flops_and_live_bytes_are_the_programs(examples: int) -> None:
    assert _unproved(examples, on_gpu=False) == []


@examples(1, len(CASES))
def test_the_step_keeps_the_rules_of_a_gpu(examples: int) -> None:
    assert in_fresh_process(_unproved, examples, True, patience_s=900) == []


def test_the_program_gathers_blocks_in_half_the_bytes_and_reduces_their_scales_once() -> None:
    narrow, plain = (expand(Layout(*_case("llama", "dp=4,zero=3", gather)).rank_view(0)) for gather in (True, False))
    ours, theirs = (
        [e for e in step.events if e.op == "all_gather" and e.unit.startswith("blocks")] for step in (narrow, plain)
    )
    assert [(e.unit, e.phase, 2 * e.bytes) for e in ours] == [(e.unit, e.phase, e.bytes) for e in theirs]
    assert {e.dtype for e in ours} == {"uint8"}
    rest = [e for e in narrow.events if e.kind == "collective" and e not in ours]
    assert [e for e in rest if e.unit != "scales"] == [
        e for e in plain.events if e.kind == "collective" and e not in theirs
    ]
    # Seven matrices and two norms of each block, in fp32.
    assert [(e.op, e.bytes) for e in rest if e.unit == "scales"] == [("all_reduce", 2 * (7 + 2 * 64) * 4)]


REFUSED = (
    ("dp=2,zero=3", Precision("bfloat16", gather="float8"), "needs job.precision.products = float8, for compute"),
    ("dp=2,zero=3", replace(NARROW, products="float8-row"), "has scales of rows, and of columns backward"),
    ("dp=2,zero=2", NARROW, "zero=2 over 2 ranks without sp gathers nothing"),
    ("tp=2,zero=3", NARROW, "zero=3 over 1 rank without sp gathers nothing"),
)


@pytest.mark.parametrize(("line", "precision", "expected"), REFUSED)
def test_what_it_is_not_made_for_is_refused(line: str, precision: Precision, expected: str) -> None:
    model, job, s = _case("llama", line, True)
    job = replace(job, precision=precision)

    def required() -> None:
        require_runnable(s, job)
        check(s, model, job, None)

    with pytest.raises(InputError, match=expected) as caught:
        required()
    assert caught.value.field == "job.precision.gather"


def test_the_search_has_what_gathers() -> None:
    model, job, _ = _case("llama", "dp=4,zero=3", True)
    rows = all_strategies(model, job, 4, Options())
    assert len(rows)
    assert set(rows.zero[rows.sp == 0].tolist()) == {3}
    for s in rows.strategies():
        check(s, model, job, 4)


def test_the_price_knows_what_is_not_sent() -> None:
    sizes = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14336, "max_seq": 4096}
    model = build(ModelSpec, complete(SIZES | {"family": "llama"} | sizes), "model")
    cluster, s = preset("dgx-h100", 8), Strategy(dp=64, zero=3)
    narrow, plain = (
        predict(model, cluster, Job(64, 2048, replace(NARROW, gather=gather)), s) for gather in ("float8", "compute")
    )
    assert narrow.communication_s < plain.communication_s
    assert narrow.step_time_s < 0.95 * plain.step_time_s  # weights are rounded once a step, and not in every pass
    kept = plain.memory_bytes - narrow.memory_bytes
    of_a_block, of_a_shard = model.parameter_count / 32, model.parameter_count / 64
    assert kept == pytest.approx(2 * of_a_block - of_a_shard, rel=0.2)  # of two blocks a byte less an element


def test_the_command_verifies_it(tmp_path: Path) -> None:
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 320, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    line = "verify --model config.json --cluster dgx-h100 --gpus 2 --strategy dp=2,zero=3 --batch 2 --seq 32"
    line += " --precision fp8 --set"
    code, out, err = phalanx(tmp_path, *line.split(), "job.precision.gather=float8")
    assert (code, err) == (0, err)
    assert "proved" in out
    for wrong, expected in (
        ("job.precision.gather=float9", "should be 'compute' or 'float8'"),
        ("train.lr=1", "sets a field of a job file"),
        ("job.seq=16", "sets a field of a job file"),
    ):
        assert expected in error_of(tmp_path, *line.split(), wrong)
