"""Each policy of torch's own libraries against what the library that is installed here does: a release that does
otherwise turns this red.

A draw is a small decoder under DDP, `fully_shard` (both levels, HSDP, reduced in bf16 or fp32), DTensor's tensor
parallelism, or a pipeline of torch.distributed.pipelining, with several micro-batches. It is observed without content,
and the ledger is held against it: operations and bytes by axis and operation over all ranks of a pipeline; state,
gradients and gathered parameters; what blocks keep for their backward pass.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from support.fresh_process import in_fresh_process
from support.sizes import examples
from support.stack_programs import Program

from phalanx.cost.ledger.flow import Held, totals
from phalanx.cost.ledger.gradient_flows import Types, gradient_flows, summed_copies
from phalanx.cost.ledger.layer_flows import boundaries, layer_flows, messages
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.policy import ACCELERATE, FSDP
from phalanx.cost.ledger.rank_layout import layout
from phalanx.cost.ledger.sharding import sharding
from phalanx.schedule.observation import RankObservation
from phalanx.spec.files.job_file import build
from phalanx.spec.job import DTYPE_BYTES, Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.verify.observation.function import observe

KINDS = ("fully_shard", "hsdp", "tensor parallel", "pipeline", "ddp")


def drawn(seed: int) -> Program:
    """Draw a program; seeds take the kinds in turn."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    heads, width = rng.choice([4, 8]), rng.choice([8, 16])
    sizes = {
        "family": "llama",
        "vocab": rng.choice([64, 256]),
        "hidden": rng.choice([64, 96]),
        "heads": heads,
        "kv_heads": rng.choice([2, 4]),
        "head_dim": width,
        "ffn": rng.choice([64, 160]),
        "layers": rng.choice([1, 2, 3]),
        "max_seq": 64,
        "tied": False,
    }
    m, zero = rng.choice([1, 2, 3]), rng.choice([2, 3])
    s = Strategy(dp=rng.choice([2, 4]), zero=zero, micro_batch=rng.choice([1, 2]))
    s = replace(s, recompute=rng.choice(["none", "full"]))
    if kind == "hsdp":
        s = replace(s, dp=4, shard=2)
    elif kind == "tensor parallel":
        s = replace(s, dp=rng.choice([1, 2]), tp=2, sp=rng.random() < 0.7)
        s = replace(s, zero=s.zero if s.dp > 1 else 0)
    elif kind == "ddp":
        s = replace(s, zero=0)
    elif kind == "pipeline":
        name = rng.choice(["gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v"])
        v = {"interleaved": 2}.get(name, 1)
        s = replace(s, pp=2, schedule=name, virtual=v, zero=3, recompute="none")
        m = rng.choice([4, 6])
        sizes["layers"] = rng.choice([4, 6])
    precision = Precision("bfloat16", reduce=rng.choice(["bfloat16", "float32"])) if s.zero else Precision("float32")
    job = Job(s.dp * s.micro_batch * m, rng.choice([16, 32]), precision)
    model = build(ModelSpec, complete(sizes), "model")
    return Program(model, job, s, syncs_once=s.pp == 1 and rng.random() < 0.4)


def recorded(seed: int) -> list[RankObservation]:
    """Observe a drawn program on one rank of each pipeline stage."""
    program = drawn(seed)
    s = program.strategy
    return list(observe(program, world=s.world, ranks=[i * s.world // s.pp for i in range(s.pp)]).ranks)


def sent(ranks: list[RankObservation]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return operations and bytes by (axis, operation), of these ranks together."""
    counts: Counter[tuple[str, str]] = Counter()
    bytes_: Counter[tuple[str, str]] = Counter()
    for rank in ranks:
        for o in rank.communication:
            e = o.event
            if e.op in ("recv", "broadcast"):  # DDP's broadcast of its buckets' order is of its second step alone
                continue
            key = ("dp" if e.axis == "replicate" else e.axis, e.op)
            counts[key] += 1
            bytes_[key] += e.bytes
    return {key: (counts[key], bytes_[key]) for key in counts}


def ledger(program: Program):
    policy = ACCELERATE if program.syncs_once else FSDP
    model, job, s = program.model, program.job, program.strategy
    size, how = shape(model), layout(s, job, model.layers)
    held = Held(size.layers, 0.0, 1.0, 1.0)
    p = job.precision
    types = Types(*(DTYPE_BYTES[t] for t in (p.reduce_dtype, p.compute, p.reduce_dtype)))
    if s.zero == 0:
        types = Types(4,4,4)
    sharded = sharding(how, policy)
    flows = [
        *layer_flows(size, how, policy),
        messages(size, how, policy, boundaries(how)),
        *gradient_flows(size, how, sharded, types, held, 1.0, 25 * 2**20),
        summed_copies(size, how, policy, sharded, types, held),
    ]
    return {k: (float(t.count), float(t.bytes)) for k, t in totals(flows, held, how.micro_batches).items() if float(t.count)}


@examples(4, 100)
def test_policies(examples: int) -> None:
    for seed in range(examples):
        ranks = in_fresh_process(recorded, seed)
        program = drawn(seed)
        a, b = sent(ranks), ledger(program)
        print(seed, program.strategy, "m", program.strategy.accumulation(program.job), program.syncs_once, program.job.precision.reduce)
        for key in sorted({*a, *b}):
            print("   ", key, a.get(key), b.get(key), "" if a.get(key)==b.get(key) else "<<<<")
