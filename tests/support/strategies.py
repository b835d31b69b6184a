"""Hypothesis strategies for small models, jobs and parallel strategies over everything that is runnable."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

from hypothesis import strategies as st

from phalanx.schedule.pipeline import schedules
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy import compressors
from phalanx.spec.strategy.compressors import parse
from phalanx.spec.strategy.legality import require_context
from phalanx.spec.strategy.spec import AXES, Strategy, divisors
from phalanx.spec.strategy.split import require_split

PRECISIONS = [
    Precision("float32"),
    Precision("float64"),
    Precision("bfloat16"),
    Precision("bfloat16", master="bfloat16"),
    Precision("bfloat16", reduce="bfloat16"),
    Precision("float32", reduce="bfloat16"),
    Precision("float16"),
    Precision("float16", reduce="float16"),
    Precision("float32", accumulate="float64"),
    Precision("float32", master="float64"),
]
_VARIANTS = ["fp16", "bf16", "int8", "int4", "int8:stochastic", "int4:nofeedback"]
_VARIANTS += ["topk:0.1", "topk:0.01:nofeedback", "randk:0.1", "randk:0.3:nofeedback", "threshold:1e-4"]
_VARIANTS += ["powersgd:2", "powersgd:4:nofeedback"]
_VARIED = {c.split(":")[0] for c in _VARIANTS}
COMPRESSORS = [*_VARIANTS, *(compressors.example(name) for name in compressors.COMPRESSORS if name not in _VARIED)]
"""Every row of the table, and variants of those that have them."""
QUANTISERS = [c for c in COMPRESSORS if parse(c).quantised]  # type: ignore[union-attr]
SCHEDULES: list[tuple[Any, int]] = [
    (name, facts.chunks if facts.takes_virtual else 1) for name, facts in schedules.SCHEDULES.items()
]
OPTIMIZERS = st.sampled_from(["sgd", "adamw"])
TRANSPORTS = st.sampled_from(["native", "p2p", "shm"])


@st.composite
def models(draw: st.DrawFn, small: bool = False) -> ModelSpec:
    family = draw(st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox", "palm"]))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([8, 16] if small else [16, 32]))
    sizes: dict[str, Any] = {
        "family": family,
        "vocab": draw(st.sampled_from([61, 300] if small else [300, 1000, 5000])),
        "hidden": draw(st.sampled_from([16, 48] if small else [64, 128, 256])),
        "layers": draw(st.sampled_from([1, 2, 3, 4])),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3])),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": draw(st.sampled_from([40, 96] if small else [64, 256, 700])),
        "max_seq": 64 if small else 256,
        "tied": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "window": draw(st.sampled_from([None, None, 5, 50])),
    }
    # The decoder supports every family's features for all families; None leaves the choice to the family.
    options = {
        "residual": draw(st.sampled_from([None, None, "serial", "parallel", "parallel_one_norm"])),
        "rotary_dim": draw(st.sampled_from([None, None, head_dim // 4 * 2])),
        "qk_norm": draw(st.sampled_from([None, True, False])),
        "window_layers": draw(st.sampled_from([None, [0]])) if sizes["window"] else None,
    }
    if draw(st.sampled_from([False, False, False, True])):
        options |= {"rotary_dim": None, "qk_norm": False, "kv_heads": sizes["heads"]}
        options["position"] = draw(st.sampled_from(["rotary", "none"]))
        options["latent"] = draw(latents(head_dim))
    sizes |= {name: option for name, option in options.items() if option is not None}
    return build(ModelSpec, complete(sizes), "model")


@st.composite
def latents(draw: st.DrawFn, head_dim: int) -> dict[str, Any]:
    rope_dim = draw(st.sampled_from([head_dim // 4, head_dim // 2]))
    return {
        "kv_rank": draw(st.sampled_from([head_dim // 2, 3 * head_dim])),
        "q_rank": draw(st.sampled_from([None, 2 * head_dim])),
        "nope_dim": head_dim - rope_dim,
        "rope_dim": rope_dim,
        "v_dim": draw(st.sampled_from([head_dim // 2, head_dim, head_dim * 3 // 2])),
        "interleaved": draw(st.booleans()),
    }


@st.composite
def with_experts(draw: st.DrawFn, small: bool = False) -> ModelSpec:
    """Draw a model with experts in some of its layers."""
    count = draw(st.sampled_from([4, 6, 8]))
    top_k = draw(st.sampled_from([1, 2, 3]))
    chooser = draw(st.sampled_from(["tokens", "tokens", "experts"]))
    layers = draw(st.sampled_from([1, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2])) if chooser == "tokens" else 1
    experts: dict[str, Any] = {
        "count": count,
        "top_k": min(top_k, count // groups),
        "ffn": draw(st.sampled_from([12, 24] if small else [36, 96])),
        "shared_ffn": draw(st.sampled_from([0, 24])),
        "dense_layers": draw(st.sampled_from([[], [], [0]])) if layers > 1 else [],
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "normalized": draw(st.booleans()) and chooser == "tokens",
        "groups": groups,
        "chooser": chooser,
        "capacity": draw(st.sampled_from([None, None, 0.5, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-3])),
    }
    if chooser == "tokens":
        experts["balance_loss"] = draw(st.sampled_from([0.0, 1e-2]))
        experts["balance_bias"] = draw(st.sampled_from([None, 1e-3]))
    sizes: dict[str, Any] = {
        "family": draw(st.sampled_from(["mixtral", "qwen3_moe"])),
        "vocab": 61 if small else 300,
        "hidden": draw(st.sampled_from([16, 48] if small else [64, 128])),
        "layers": layers,
        "heads": 12,
        "kv_heads": draw(st.sampled_from([2, 6])),
        "head_dim": 8,
        "ffn": 48,
        "max_seq": 64 if small else 256,
        "tied": draw(st.booleans()),
        "experts": experts,
    }
    return build(ModelSpec, complete(sizes), "model")


@st.composite
def mixed(draw: st.DrawFn, small: bool = False) -> ModelSpec:
    """Draw a model of blocks that a pattern lists: recurrences, attention and MLPs, in blocks of one or two."""
    groups, heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([4, 8]))
    mamba = {"kind": "mamba", "name": "mixer", "heads": heads, "groups": groups}
    mamba |= {"head_dim": draw(st.sampled_from([2, 6])), "state": draw(st.sampled_from([3, 8]))}
    mamba |= {"bias": draw(st.booleans()), "conv_bias": draw(st.booleans()), "group_norm": draw(st.booleans())}
    delta = {"kind": "delta", "name": "linear", "key_heads": 4, "value_heads": draw(st.sampled_from([4, 8]))}
    delta |= {"key_dim": draw(st.sampled_from([3, 8])), "value_dim": draw(st.sampled_from([4, 6]))}
    both = {"taps": draw(st.sampled_from([2, 4])), "chunk": draw(st.sampled_from([4, 16]))}
    near = {"kind": "attention", "name": "near", "window": draw(st.sampled_from([5, 50])), "rotary_dim": 0}
    of_heads = {"heads": heads, "head_dim": draw(st.sampled_from([2, 6]))}
    fixed = {"kind": "lightning", "name": "fixed", "chunk": both["chunk"]} | of_heads
    channels = {"kind": "channel_delta", "name": "channels"} | of_heads | both
    short = {"kind": "short_conv", "name": "short", "channels": 8 * heads, "taps": both["taps"]}
    short |= {"bias": draw(st.booleans())}
    few = {"kind": "factorised", "name": "few", "heads": heads, "kv_heads": groups, "head_dim": 8, "q_rank": 12}
    mixers = {str(m["name"]): m for m in (mamba | both, delta | both, fixed, channels, short, near, few)}
    joined = [f"{mixer}+{other}" for mixer in (*mixers, "attention") for other in ("mlp", "mlp", "experts")]
    alone = [*mixers, "attention", "mlp", "experts"]
    pattern = draw(st.lists(st.sampled_from([*alone, *joined]), min_size=1, max_size=4))
    named = {word for words in pattern for word in words.split("+")}
    shared = draw(st.sampled_from([0, 24]))
    routed = {"count": 4, "top_k": draw(st.sampled_from([1, 2])), "ffn": 12, "shared_ffn": shared}
    routed |= {"shared_gate": shared > 0 and draw(st.booleans()), "latent": draw(st.sampled_from([0, 6]))}
    activations = ["swiglu", "relu2"] if "experts" in named else ["swiglu", "geglu", "relu2", "gelu"]
    sizes: dict[str, Any] = {
        "family": draw(st.sampled_from(["llama", "qwen3"])),
        "vocab": 61 if small else 300,
        "hidden": draw(st.sampled_from([16, 48] if small else [64, 128])),
        "layers": draw(st.integers(len(pattern), 4)),
        "heads": 4,
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": 8,
        "ffn": 48,
        "max_seq": 64 if small else 256,
        "tied": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "activation": draw(st.sampled_from(activations)),
        "norms": draw(st.sampled_from(["before", "after", "both"])),
        "qk_norm": draw(st.booleans()),
        "qk_norm_over": draw(st.sampled_from(["head", "all"])),
        "output_gate": draw(st.booleans()),
        "mixers": [mixer for name, mixer in mixers.items() if name in named],
        "pattern": pattern,
    }
    if "experts" in named:
        sizes["experts"] = routed
    if draw(st.sampled_from([False, False, False, True])):  # latent attention, to keys that an index chooses
        sizes |= {"qk_norm": False, "output_gate": False, "kv_heads": 4}
        index = {"heads": 3, "dim": 6, "top": draw(st.sampled_from([4, 50]))}
        sizes["latent"] = draw(latents(8)) | {"q_rank": 12, "index": index}
        sizes["mixers"] = [m for m in sizes["mixers"] if m["kind"] != "attention"]
        of_near = {"near": "attention"}
        sizes["pattern"] = ["+".join(of_near.get(word, word) for word in words.split("+")) for words in pattern]
    return build(ModelSpec, complete(sizes), "model")


def splits(model: ModelSpec, tp: int, ep: int = 1, etp: int = 1) -> bool:
    """Whether a model can be split into this many equal parts."""
    try:
        require_split(model, Strategy(dp=ep * etp, tp=tp, ep=ep, etp=etp))
    except InputError:
        return False
    return True


def shares(model: ModelSpec, seq: int, strategy: Strategy) -> bool:
    """Whether the ranks of a strategy share sequences of this length equally."""
    try:
        require_context(model, seq, strategy)
    except InputError:
        return False
    return True


def pipelines(model: ModelSpec, ranks: int, micro_batches: int) -> list[Strategy]:
    """Draw a pipeline of a model over some of the ranks, or none."""
    found = [Strategy()]
    for pp in divisors(ranks)[1:]:
        for schedule, virtual in SCHEDULES:
            try:
                s = Strategy(pp=pp, schedule=schedule, virtual=virtual)
                check(s, model, Job(global_batch=micro_batches, seq=8), None)
            except InputError:
                continue
            found.append(s)
    return found


ORDERS = ["/".join(order) for order in permutations(AXES)]
"""Every order of the mesh's axes, the default first."""


@st.composite
def cases(
    draw: st.DrawFn,
    ranks: int,
    small: bool = True,
    compressed: bool = False,
    experts: bool = False,
    patterns: bool = False,
) -> tuple[ModelSpec, Job, Strategy]:
    """Draw a model, a job and a strategy of `ranks` ranks that fit each other."""
    kind = with_experts if experts else mixed if patterns else models
    model = draw(kind(small=small))
    micro_batch = draw(st.sampled_from([1, 2, 3]))
    accumulation = draw(st.sampled_from([1, 2, 3, 4]))
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    # There are more schedules than other ways to use ranks.
    pipeline = draw(st.one_of(st.just(Strategy()), st.sampled_from(pipelines(model, ranks, accumulation))))
    world, ranks = ranks, ranks // pipeline.pp
    tp = draw(st.sampled_from([n for n in divisors(ranks) if splits(model, n)]))
    seq = draw(st.sampled_from([8, 32] if small else [32, 128, 256]))
    # A ring of many ranks has as many steps in every block, all alike.
    indexed = model.latent is not None and model.latent.index is not None
    parts = [Strategy(tp=tp, cp=cp, ulysses=u) for cp in divisors(ranks // tp) for u in divisors(cp) if cp // u <= 4]
    context = draw(st.sampled_from([s for s in parts if shares(model, seq, s) and not (indexed and s.cp > 1)]))
    cp = context.cp
    dp = ranks // tp // cp
    inside = [(ep, etp) for ep in divisors(ranks) for etp in divisors(ranks // ep) if splits(model, tp, ep, etp)]
    ep, etp = draw(st.sampled_from(inside)) if model.experts else (1, 1)
    precision = draw(st.sampled_from(PRECISIONS))
    usable = QUANTISERS if zero == 3 else COMPRESSORS
    coarse = precision.accumulate_dtype not in ("float32", "float64")
    strategy = replace(
        pipeline,
        dp=dp,
        tp=tp,
        sp=draw(st.booleans()) and tp > 1 and micro_batch * seq // cp % tp == 0,
        cp=cp,
        ulysses=context.ulysses,
        ep=ep,
        etp=etp,
        zero=zero,
        shard=draw(st.sampled_from([None, *divisors(dp)])) if zero else None,
        micro_batch=micro_batch,
        grad_sync=draw(st.sampled_from([None, "step"])) if zero == 2 else None,
        reshard=draw(st.sampled_from([None, "step"] + ["action"] * (pipeline.pp == 1))) if zero == 3 else None,
        prefetch=draw(st.sampled_from([0, 1])),
        recompute=draw(st.sampled_from(["none", "selective", "full", *["every:2"] * (model.layers > 1)])),
        bucket=draw(st.sampled_from([0.002, 0.02, 0.5, "auto"])),
        order=draw(st.sampled_from(ORDERS)),
        compression=draw(st.sampled_from(usable))
        if compressed and tp == pipeline.pp == ep * etp == 1 and not coarse
        else "none",
    )
    job = Job(
        global_batch=micro_batch * accumulation * dp,
        seq=seq,
        precision=precision,
        optimizer=Optimizer(name=draw(st.sampled_from(["adamw", "sgd"]))),
        clip=draw(st.sampled_from([0.0, 0.5, 1.0])),
        documents=draw(st.sampled_from(["packed", "separate"])),
    )
    check(strategy, model, job, world)
    return model, job, strategy


def evenly(case: tuple[ModelSpec, Job, Strategy]) -> bool:
    """Whether every tp rank routes as many tokens (where not, the program's rank 0 routes the most), and blocks with
    and without experts are recomputed alike (every:k may repeat more of one kind)."""
    model, job, s = case
    alike = not (model.experts and model.experts.dense_layers and s.recompute.startswith("every"))
    return alike and s.micro_batch * job.seq // s.cp % s.tp == 0
