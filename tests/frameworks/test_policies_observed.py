"""The policies of torch's own libraries against what the library that is installed does: a release of torch that does
otherwise turns this red.

A draw is a small decoder under DDP, `fully_shard` (both levels, HSDP, gradients reduced in either type, reduced in
every micro-batch or once), DTensor's tensor parallelism, or a pipeline of torch.distributed.pipelining. It is
observed without content, and the ledger is held against it:

    operations, bytes   by axis and operation, of one rank of every pipeline stage together: equal
    state               parameters and optimizer when the step begins, gradients at the peak: equal
    activations         what a block keeps for its backward pass: equal

By design they differ in this alone: DDP closes a bucket with the parameter that fills it, so it has as many buckets
as bytes ask for, or fewer. The program has LayerNorms without biases in place of RMSNorms, whose fused kernel torch
has on GPUs only; they keep one more number per token.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from support.fresh_process import in_fresh_process
from support.stack_programs import Program

from phalanx.cost.analytic.option_effects import with_number_types
from phalanx.cost.analytic.profile import Profile, profile
from phalanx.cost.ledger.flow import UnitCount, totals, whole_model
from phalanx.cost.ledger.gradient_flows import Types, gradient_flows, parameters_of, summed_copies
from phalanx.cost.ledger.layer_flows import boundaries, layer_flows, messages
from phalanx.cost.ledger.live_bytes import live_bytes, state_bytes
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.policy import sharding
from phalanx.cost.ledger.rank_layout import layout
from phalanx.observation.observe import observe
from phalanx.schedule.observation import RankObservation
from phalanx.schedule.pipeline.stages import rank_of
from phalanx.spec.files.job_file import build
from phalanx.spec.job import DTYPE_BYTES, Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

KINDS = ("fully_shard", "hsdp", "tensor parallel", "pipeline", "ddp", "activations")
MIB = 2**20


def drawn(seed: int) -> Program:
    """Draw a program; seeds take the kinds in turn."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    heads = rng.choice([4, 8])
    sizes = {
        "family": "llama",
        "vocab": rng.choice([64, 256]),
        "hidden": rng.choice([64, 96]),
        "heads": heads,
        "kv_heads": rng.choice([2, 4]),
        "head_dim": rng.choice([8, 16]),
        "ffn": rng.choice([64, 160]),
        "layers": rng.choice([1, 2, 3]),
        "max_seq": 512,
        "tied": False,
    }
    m, seq, bucket_mb = rng.choice([1, 2, 3]), rng.choice([16, 32]), rng.choice([0.05, 25.0])
    s = Strategy(dp=rng.choice([2, 4]), zero=rng.choice([2, 3]), micro_batch=rng.choice([1, 2]))
    s = replace(s, recompute=rng.choice(["none", "full"]))
    if kind == "hsdp":
        s = replace(s, dp=4, shard=2)
    elif kind == "tensor parallel":
        s = replace(s, dp=2, tp=2, sp=rng.random() < 0.7)
    elif kind == "ddp":
        s, m = replace(s, zero=0), rng.choice([2, 3])
    elif kind == "pipeline":
        name = rng.choice(["gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v"])
        virtual = rng.choice([2, 3]) if name == "interleaved" else 1
        s = replace(s, pp=2, schedule=name, virtual=virtual, zero=3, recompute="none")
        m, sizes["layers"] = rng.choice([4, 6]), rng.choice([6, 7])
    elif kind == "activations":  # enough of them that most is live when the first backward pass begins
        sizes |= {"kv_heads": heads, "layers": 3}
        tp = rng.choice([1, 2])
        s, seq = replace(s, tp=tp, sp=tp > 1, micro_batch=1), 512
    precision = Precision("bfloat16", reduce=rng.choice(["bfloat16", "float32"])) if s.zero else Precision("float32")
    job = Job(s.dp * s.micro_batch * m, seq, precision)
    once = s.pp == 1 and rng.random() < 0.4
    return Program(build(ModelSpec, complete(sizes), "model"), job, s, once, bucket_mb)


def observed(program: Program) -> list[RankObservation]:
    """Return what a program does on one rank of each pipeline stage."""
    s = program.strategy
    return list(observe(program, world=s.world, ranks=[i * s.world // s.pp for i in range(s.pp)]).ranks)


def _observed(seeds: list[int]) -> list[list[RankObservation]]:
    return [observed(drawn(seed)) for seed in seeds]


def sent(ranks: list[RankObservation]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return operations and bytes by (axis, operation), of these ranks together."""
    counts: Counter[tuple[str, str]] = Counter()
    bytes_: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        for o in rank.communication:
            e = o.event
            if e.op in ("recv", "broadcast"):  # DDP broadcasts the order of its buckets as its second step begins
                continue
            key = ("dp" if e.axis == "replicate" else e.axis, e.op)
            counts[key] += 1
            bytes_[key] += e.bytes
    return {key: (counts[key], bytes_[key]) for key in counts}


def policy_of(program: Program) -> Profile:
    """Return the constants of the stack that runs a program: accelerate's accumulation reduces once."""
    return with_number_types(profile("accelerate" if program.once else "fsdp2"), program.job)


def ledger(program: Program) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the same as `sent` by the ledger."""
    model, p = program.model, program.job.precision
    policy, size, how = policy_of(program).policy, shape(model), layout(program.strategy, program.job, model.layers)
    held = whole_model(size.kinds)
    types = Types(*(DTYPE_BYTES[t] for t in (p.reduce_dtype, p.compute, p.reduce_dtype)))
    sharded = sharding(how, policy)
    flows = [
        *layer_flows(size, how, policy),
        messages(size, how, policy, boundaries(how)),
        *gradient_flows(size, how, sharded, types, held, 1.0, program.bucket_mb * MIB),
        summed_copies(size, how, policy, sharded, types, held),
    ]
    of = totals(flows, held, how.micro_batches)
    return {key: (float(t.count), float(t.bytes)) for key, t in of.items() if float(t.count)}


def traffic_agrees(program: Program, ranks: list[RankObservation]) -> None:
    """Hold operations and bytes."""
    of_library, of_ledger = sent(ranks), ledger(program)
    if program.strategy.zero == 0 and ("dp", "all_reduce") in of_library:
        (count, bytes_), (most, wanted) = (x.pop(("dp", "all_reduce")) for x in (of_library, of_ledger))
        assert bytes_ == wanted
        first = program.strategy.accumulation(program.job) if not program.once else 1  # of 1 MiB at most
        assert count <= most + first
        assert count == most or program.bucket_mb < 1
    assert set(of_library) == set(of_ledger)
    for key, counted in of_library.items():
        assert counted == pytest.approx(of_ledger[key], rel=1e-12), key


def state_agrees(program: Program, ranks: list[RankObservation]) -> None:
    """Hold bytes of a parameter times parameters: what is there when the step begins, and what is not, gradients."""
    s, size, by = program.strategy, shape(program.model), policy_of(program)
    how = layout(s, program.job, program.model.layers)
    sharded = sharding(how, by.policy)
    shards, chunks = float(sharded.shards), program.blocks()
    each, gradient = float(state_bytes(how, by, sharded, shards)), float(by.accumulated_bytes) / shards
    # Of a gradient that waits for its reduction:
    whole = each - float(by.full_shard_bytes) / shards if s.zero else 0.0
    for place, rank in enumerate(ranks):
        mine = [i for i, of in enumerate(rank_of(s)) if of == place]
        ends = (1.0 * (0 in mine), 1.0 * (len(chunks) - 1 in mine))
        of = parameters_of(size, how, UnitCount((float(sum(len(chunks[i]) for i in mine)),), *ends))
        params = float(of.dense)
        start = rank.start["parameters"] + rank.start["optimizer state"]
        assert start == pytest.approx(params * (each - whole - gradient)), place
        m = s.accumulation(program.job)
        if program.once and s.zero and m > 1 and s.tp == 1 and rank.peak_phase == "F":
            assert sum(h.bytes for h in rank.holders if h.kind == "tensors of the backward pass") == params * whole
        if rank.peak_phase == "opt":
            held = sum(h.bytes for h in rank.holders if h.kind == "gradients")
            assert held == pytest.approx(params * gradient)


def activations_agree(program: Program, rank: RankObservation) -> None:
    """Hold what a block in the middle keeps as the first backward pass begins."""
    s, size = program.strategy, shape(program.model)
    how = layout(s, program.job, program.model.layers)
    kept = sum(
        h.bytes
        for h in rank.backward_starts[0].holders
        if h.module.startswith("blocks.1") and h.kind in ("activations", "buffers of all_gather")
    )
    # Its blocks are torch's, whatever accumulates: under accelerate they would be those of transformers.
    block = live_bytes(size, how, with_number_types(profile("fsdp2"), program.job))
    means = 4 * 2 * float(how.tokens) / s.tp if s.recompute == "none" else 0.0
    seeds = 24 if s.recompute == "none" else 0  # of dropout, attention's
    assert kept - means - seeds == float(block.stored)


DRAWS = [range(3), *(pytest.param(range(first, first + 24), marks=pytest.mark.long) for first in range(0, 120, 24))]


@pytest.mark.parametrize("seeds", DRAWS, ids=str)
def test_policies_are_what_the_library_does(seeds: range) -> None:
    for seed, ranks in zip(seeds, in_fresh_process(_observed, list(seeds), patience_s=200), strict=True):
        program = drawn(seed)
        traffic_agrees(program, ranks)
        state_agrees(program, ranks)
        if KINDS[seed % len(KINDS)] == "activations":
            activations_agree(program, ranks[0])
