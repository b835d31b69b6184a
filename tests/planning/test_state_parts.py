"""What "state" is made of: parts that add up to what is priced, said in one line wherever its number stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.in_process_cli import json_of, phalanx

from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.cost.analytic.state_parts import StatePerParameter
from phalanx.cost.ledger.live_bytes import state_bytes
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.step import predict as step
from phalanx.planning.explain.analytic import state_in
from phalanx.planning.lookup import model_named
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy, parse

_STACKS = ("megatron-core", "megatron-fsdp", "megatron-bridge", "torchtitan", "deepspeed", "accelerate", "nanotron")
_STRATEGIES = (
    "tp=8",
    "zero=1,tp=2",
    "zero=2",
    "zero=2,micro_batch=2",
    "zero=3,tp=2",
    "zero=3,shard=8",
    "cp=2,zero=1",
)
_OPTIONS = (
    None,
    "first_moment=bfloat16,second_moment=bfloat16",
    "optimizer_offload=0.5",
    "optimizer_offload=1,parameter_offload=1",
    "gradients=bfloat16",
    "lora=16",
    "reference=copy",
)


def _asked(stack: str, strategy: str, options: str | None, precision: str | None = None) -> StatePerParameter | None:
    """Return the state of a strategy after its sum was compared; None where the stack has no such strategy."""
    ask = Query(None, model="llama3-8b", cluster="dgx-h100", gpus=16, batch=64, seq=4096, stack=stack)
    try:
        q = read(Query(**{**vars(ask), "strategy": strategy, "options": options, "precision": precision}))
        e = q.estimate
    except InputError:
        return None
    state = state_in(q.pricing, q.shown)
    of_model = sum(p.bytes_per_parameter / p.shards for p in state.parts if p.of == "model")
    zero = sharding(e.layout, e.profile.policy)
    assert of_model == pytest.approx(float(state_bytes(e.layout, e.profile, zero, max(float(zero.shards), 1.0))))
    assert all(p.bytes_per_parameter > 0 for p in state.parts)
    return state


@pytest.mark.parametrize("stack", _STACKS)
def test_parts_add_up_to_what_is_priced(stack: str) -> None:
    asked = [_asked(stack, s, o) for s in _STRATEGIES for o in _OPTIONS]
    asked += [_asked(stack, s, None, "fp32") for s in _STRATEGIES]
    assert sum(state is not None for state in asked) > 8


_FRESH = [("fsdp2", "gradients=bfloat16"), ("accelerate", "lora=16"), ("fsdp2", None), ("accelerate", None)]
_FRESH += [(stack, "optimizer_offload=1,parameter_offload=1") for stack in ("fsdp2", "accelerate")]


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2,zero=2", "dp=2,zero=3"])
@pytest.mark.parametrize(("stack", "options"), _FRESH)
def test_what_is_missing_at_the_loss_is_gradients(stack: str, strategy: str, options: str | None) -> None:
    """At a single micro-batch's loss a rank holds its state less the gradients that are parts of it."""
    ask = Query(None, "llama3-8b", "dgx-h200", 2, 2, 8192, strategy, stack, options=options)
    parts = state_in((q := read(ask)).pricing, q.shown).parts
    of_model = [p.bytes_per_parameter / p.shards for p in parts if p.of == "model" and p.what != "gradients"]
    least = model_named("llama3-8b")[0].parameter_count * sum(of_model)
    held = [float(read(replace(ask, batch=n)).estimate.memory.terms["state"]) for n in (2, 4)]
    assert least * 0.999 <= held[0] <= held[1]


def _parts(stack: str, strategy: str, options: str | None = None) -> dict[str, tuple[float, int]]:
    state = _asked(stack, strategy, options)
    assert state is not None
    return {f"{p.of} {p.what}": (p.bytes_per_parameter, p.shards) for p in state.parts}


@pytest.mark.parametrize(
    ("stack", "strategy", "options", "whole", "sharded"),
    [
        ("deepspeed", "zero=2", "optimizer_offload=1", 2, 0),
        ("deepspeed", "zero=3", "optimizer_offload=1", 0, 2),
        ("deepspeed", "zero=3", "optimizer_offload=1,parameter_offload=1", 0, 0),
        ("fsdp2", "zero=3", "optimizer_offload=1,parameter_offload=1", 0, 0),
        ("megatron-core", "zero=1", "optimizer_offload=1", 6, 0),
    ],
)
def test_what_offloading_leaves_on_a_gpu(stack: str, strategy: str, options: str, whole: int, sharded: int) -> None:
    """DeepSpeed's own estimates, but for the gathered layer (estimate_zero2_model_states_mem_needs and
    estimate_zero3_model_states_mem_needs). Megatron updates on the host from gradients on the GPU."""
    parts = _parts(stack, strategy, options).values()
    assert sum(n for n, shards in parts if shards == 1) == pytest.approx(whole)
    assert sum(n for n, shards in parts if shards > 1) == pytest.approx(sharded)


def test_parts_are_what_the_frameworks_hold() -> None:
    mixed = {"model weights": (2, 1), "model gradients": (4, 1)}
    assert _parts("megatron-core", "zero=1,tp=2") == mixed | {
        "model master weights": (4, 8),
        "model moments": (8, 8),
    }
    assert _parts("megatron-bridge", "tp=8")["model gradients"] == (2, 1)  # bf16, as its recipes have it
    assert _parts("deepspeed", "zero=2")["model gradients"] == (2, 16)
    fsdp = {"model weights": (4, 16), "model gradients": (4, 16), "model moments": (8, 16)}
    assert _parts("torchtitan", "zero=3") == fsdp
    adapters = _parts("accelerate", "dp=16", "lora=16,base=nf4")
    assert adapters["model frozen weights"][0] == pytest.approx(0.75, abs=0.01)
    assert adapters["adapters master weights and moments"] == (12, 1)


@pytest.mark.parametrize("stack", ["megatron-bridge", "nemo-25.04"])
def test_a_frozen_base_in_8_bits_is_one_byte_a_weight(stack: str) -> None:
    ask = Query(None, "llama3-8b", "dgx-b200", 8, 64, 4096, "dp=8", stack, "fp8", options="lora=16")
    wide, narrow = read(ask).estimate, read(replace(ask, options="lora=16,base=float8")).estimate
    model = model_named("llama3-8b")[0]
    of_blocks = model.parameter_count - 2 * model.vocab * model.hidden
    saved = wide.memory.terms["state"] - narrow.memory.terms["state"]
    assert saved == pytest.approx(of_blocks, rel=1e-3)  # one of two bytes
    assert narrow.step.seconds == wide.step.seconds  # products read it as it is
    with pytest.raises(InputError, match="8 bits"):
        _ = read(replace(ask, precision="bf16", options="lora=16,base=float8")).estimate


@pytest.mark.parametrize("line", ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"])
def test_the_exact_engine_holds_what_is_said(line: str) -> None:
    model, cluster, s = model_named("gpt2-medium")[0], preset("dgx-h100", 1), Strategy(**parse(line))
    job = Job(16, 512, Precision("bfloat16", master="float32"))
    state = state_in(Pricing(model, cluster, job, "phalanx"), s)
    each = sum(part.bytes_per_parameter / part.shards for part in state.parts)
    held = step.predict(model, cluster, job, s).state_bytes / model.parameter_count
    # Buffers, which the line names: of a bucket or two, or at level 3 of the head and two blocks.
    assert each * 0.98 < held < each * (2 if "zero=3" in line else 1.2)
    assert state.line.endswith("and buffers of buckets and units, tables, the batch")


def test_it_is_said_wherever_the_number_stands(tmp_path: Path) -> None:
    ask = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "4096"]
    line = "weights 2, gradients 4 whole; master weights 4, moments 8 over 8 ranks (dp, ZeRO-1)"
    for words in (("predict",), ("explain",), ("tables", "memory")):
        shown = phalanx(tmp_path, *words, *ask, "--strategy", "tp=2,zero=1")[1]
        assert line in " ".join(shown.split()), words
    assert line in json_of(tmp_path, "predict", *ask, "--strategy", "tp=2,zero=1", "--json")["state"]["line"]
    shown = " ".join(phalanx(tmp_path, "compare", "tp=2,zero=1", "zero=3", *ask)[1].split())
    assert f"A: state, bytes a parameter on a rank: {line}; B: state" in shown
    shown = phalanx(tmp_path, "plan", *ask, "--where", "tp=2, zero=1, pp=1, cp=1")[1]
    assert line in " ".join(shown.split())


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("stack", ["megatron-core", "megatron-bridge"])
def test_offloading_takes_no_more_than_there_is(stack: str, zero: int) -> None:
    """In fp32 the weights are their own masters: 8 bytes of moments go to the host, not 12."""
    ask = Query(None, "llama3-8b", "dgx-a100", 8, 64, 2048, f"zero={zero}", stack, "fp32")
    here = read(ask).estimate.memory.terms["state"]
    there = read(replace(ask, options="optimizer_offload=1")).estimate.memory.terms["state"]
    params = model_named("llama3-8b")[0].parameter_count
    assert float(here - there) == pytest.approx(8 * params / (8 if zero else 1), rel=1e-3)
    kept = _parts_of(replace(ask, options="optimizer_offload=1"))
    assert kept == {name: n for name, n in _parts_of(ask).items() if name != "moments"}


def _parts_of(ask: Query) -> dict[str, float]:
    q = read(ask)
    return {p.what: p.bytes_per_parameter for p in state_in(q.pricing, q.shown).parts}


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ep=16", 1 / 48),  # a block of 48
        (
            "ep=8,pp=2,virtual=2,schedule=interleaved",
            1 / 5,
        ),  # a chunk: 2 (pp - 1) + pp (virtual - 1) + 1 are in flight
    ],
)
def test_overlapped_exchanges_hold_what_runs_ahead(strategy: str, more: float) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#3880 measured 62.0 GB of 80 with the overlap on, without a pipeline."""
    ask = Query(None, "qwen3-30b-a3b", "dgx-h100", 16, 1024, 4096, f"zero=1,{strategy}", "megatron-core")
    off, on = (read(replace(ask, options=f"overlap_experts={word}")).estimate for word in ("off", "on"))
    assert float(on.memory.terms["activations"] / off.memory.terms["activations"]) == pytest.approx(
        1 + more, rel=2e-3
    )
    assert on.fits or "pp" in strategy


def test_deepspeed_keeps_shards_of_16_bits_apart_from_their_masters() -> None:
    """stage3.py: fp16 partitions, a flat buffer of gradients, fp32 masters. FSDP's shards are the masters."""
    held = {name.removeprefix("model "): n for name, (n, _) in _parts("deepspeed", "zero=3").items()}
    assert held == {"weights": 2, "gradients": 2, "master weights": 4, "moments": 8}
    sharded = _parts("torchtitan", "zero=3")
    assert {name.removeprefix("model "): n for name, (n, _) in sharded.items()} == {
        "weights": 4, "gradients": 4, "moments": 8,
    }  # fmt: skip
