"""The walks of a block's passes, of drawn sizes: presets alone hide events that are the peak of no preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.sizes import drawn
from support.unit_bytes import compare

from phalanx.cost.memory.attention_core import Core
from phalanx.cost.memory.pass_sizes import PassSizes
from phalanx.cost.memory.passes import BlockWalk
from phalanx.schedule.layers.context import Context
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.families import complete
from phalanx.spec.model.mechanisms import Latent
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import MULTIPLIED
from phalanx.spec.strategy.legality import require_context
from phalanx.spec.strategy.spec import Recompute, Strategy
from phalanx.spec.strategy.split import require_split

LLAMA, DEEPSEEK = (
    replace(make_model({"preset": name}, Path())[0], layers=1, experts=None, window=None)
    for name in ("llama3-8b", "deepseek-v3")
)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Draw a model of one block whose tokens are few and matrices wide, or the reverse."""
    heads = draw(st.sampled_from([4, 8]))
    sizes: dict[str, Any] = {
        "hidden": draw(st.sampled_from([32, 512, 2048])),
        "heads": heads,
        "ffn": draw(st.sampled_from([32, 256, 4096])),
        "norm": draw(st.sampled_from(["rms", "layer"])),
        "residual": draw(st.sampled_from(["serial", "parallel", "parallel_one_norm"])),
    }
    sizes |= {flag: draw(st.booleans()) for flag in ("qkv_bias", "out_bias", "mlp_bias")}
    if draw(st.booleans()):
        nope, rope, value = (draw(st.sampled_from(n)) for n in ([4, 128], [4, 64], [4, 36, 192]))
        latent = Latent(draw(st.sampled_from([16, 256])), nope, rope, value, draw(st.sampled_from([None, 16, 256])))
        sizes["position"] = draw(st.sampled_from(["rotary", "none"]))
        return replace(DEEPSEEK, **sizes, kv_heads=heads, head_dim=nope + rope, latent=latent)
    own = {"kv_heads": draw(st.sampled_from([4, heads])), "head_dim": draw(st.sampled_from([4, 64]))}
    activation = draw(st.sampled_from(["swiglu", "gelu"]))
    return replace(LLAMA, **sizes, **own, qk_norm=draw(st.booleans()), activation=activation)


@st.composite
def walks(draw: st.DrawFn) -> BlockWalk:
    spec, e = draw(models()), draw(st.sampled_from([2, 4]))
    ring, ulysses = draw(st.sampled_from([(1, 1), (2, 1), (1, 4), (2, 2)]))
    tp, seq = draw(st.sampled_from([1, 4])), draw(st.sampled_from([32, 2048]))
    part = Context(seq, ring, ulysses)
    job = Job(8, seq, Precision("bfloat16" if e == 2 else "float32"))
    t = seq // ring // ulysses
    sp = tp > 1 and draw(st.booleans())
    narrow = draw(st.sampled_from([None, *MULTIPLIED])) if e == 2 else None
    sizes = PassSizes(
        t,
        e,
        spec.hidden,
        tp,
        sp,
        draw(st.sampled_from(["none", "selective", "full"])),
        Core(spec, job, t, part, None) if part.parallel else None,
        narrow,
        narrow is not None and draw(st.booleans()),
        sp and narrow is not None and draw(st.booleans()),
        in_place=draw(st.booleans()),
    )
    return BlockWalk(architecture(spec).blocks[0], sizes)


@settings(max_examples=300)
@given(walks())
def test_what_a_block_keeps_comes_and_goes(walk: BlockWalk) -> None:
    """The passes of a block leave nothing, whole or in parts: each walk frees what it and those before allocate."""
    forward, backward = walk.passes()
    assert forward.live + backward.live == 0
    assert forward.live >= walk.p.stream
    parts = walk.parts()
    assert forward.live + parts.inputs.change + parts.weights.change == 0
    assert parts.inputs.highest >= parts.inputs.change


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("repeat", ["none", "full"])
@pytest.mark.parametrize("s", [Strategy(), Strategy(tp=2), Strategy(tp=2, sp=True)], ids=str)
def test_norms_after_gates_and_single_sublayers_are_the_runtime_s(
    s: Strategy, repeat: Recompute, split: bool
) -> None:
    sizes = {"family": "llama", "vocab": 300, "hidden": 256, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 64}
    sizes |= {"ffn": 512, "max_seq": 256, "norms": "both", "output_gate": True, "activation": "geglu"}
    sizes |= {"pattern": ["attention+mlp", "attention", "mlp"]}
    spec = build(ModelSpec, complete(sizes), "model")
    compare((spec, Job(4, 256, Precision("bfloat16")), replace(s, micro_batch=2, recompute=repeat), 0), split)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("repeat", ["none", "full"])
def test_latents_without_positions_are_the_runtime_s(repeat: Recompute, split: bool) -> None:
    """The keys' shared part is a view of the latent there, which lives until keys are laid out."""
    sizes = {"family": "llama", "vocab": 300, "hidden": 64, "layers": 1, "heads": 4, "kv_heads": 4, "head_dim": 96}
    sizes |= {"ffn": 64, "max_seq": 256, "position": "none"}
    sizes["latent"] = {"kv_rank": 256, "nope_dim": 64, "rope_dim": 32, "v_dim": 100}
    spec = build(ModelSpec, complete(sizes), "model")
    compare((spec, Job(4, 128), Strategy(micro_batch=2, recompute=repeat), 0), split)


LAYOUTS = [Strategy(), Strategy(tp=2), Strategy(tp=4), Strategy(tp=2, sp=True), Strategy(cp=2)]
LAYOUTS += [Strategy(cp=2, ulysses=2), Strategy(cp=4, ulysses=2), Strategy(tp=2, sp=True, cp=2)]


@st.composite
def recurrent(draw: st.DrawFn) -> ModelSpec:
    """Draw a model of one block with a recurrence, of any of whose sizes there is much or little."""
    mamba = {"kind": "mamba", "name": "r", "heads": draw(st.sampled_from([4, 8]))}
    mamba |= {"head_dim": draw(st.sampled_from([8, 64])), "state": draw(st.sampled_from([4, 64]))}
    mamba |= {"groups": draw(st.sampled_from([1, 4])), "conv_bias": draw(st.booleans())}
    mamba |= {"group_norm": draw(st.booleans())}
    delta = {"kind": "delta", "name": "r", "key_heads": 4, "value_heads": draw(st.sampled_from([4, 8]))}
    delta |= {"key_dim": draw(st.sampled_from([4, 64])), "value_dim": draw(st.sampled_from([8, 64]))}
    taps, chunk = {"taps": draw(st.sampled_from([2, 4]))}, {"chunk": draw(st.sampled_from([16, 64, 256]))}
    of_heads = {"heads": draw(st.sampled_from([4, 8])), "head_dim": draw(st.sampled_from([4, 32]))}
    channels = {"channels": draw(st.sampled_from([8, 256])), "bias": draw(st.booleans())}
    lightning, kimi, conv = ({"kind": kind, "name": "r"} for kind in ("lightning", "channel_delta", "short_conv"))
    mixers = [mamba | taps | chunk, delta | taps | chunk, lightning | of_heads | chunk]
    mixer = draw(st.sampled_from([*mixers, kimi | of_heads | taps | chunk, conv | channels | taps]))
    sizes = {"family": "llama", "vocab": 300, "layers": 1, "heads": 4, "kv_heads": 4, "head_dim": 8, "max_seq": 256}
    sizes |= {"hidden": draw(st.sampled_from([32, 256])), "ffn": draw(st.sampled_from([16, 256]))}
    sizes |= {"mixers": [mixer], "pattern": [draw(st.sampled_from(["r", "r+mlp"]))]}
    return build(ModelSpec, complete(sizes), "model")


@drawn(
    6,
    200,
    recurrent(),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([1, 3]),
    st.sampled_from([48, 256]),
    st.sampled_from(["float32", "float64", "bfloat16"]),
    st.sampled_from(["packed", "separate"]),
    st.booleans(),
)
def test_recurrences_are_the_runtime_s(
    spec: ModelSpec, s: Strategy, repeat: str, sequences: int, seq: int, dtype: str, documents: str, split: bool
) -> None:
    try:
        require_split(spec, s)
        require_context(spec, seq, s)
    except InputError:
        assume(False)
    job = Job(4, seq, Precision(dtype), documents=documents)  # type: ignore[arg-type]
    compare((spec, job, replace(s, micro_batch=sequences, recompute=repeat), 0), split)


def test_what_the_walks_do_not_know_is_refused_by_name() -> None:
    sizes = {"family": "llama", "vocab": 300, "hidden": 256, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 64}
    mixer = {"kind": "mamba", "name": "m", "heads": 8, "head_dim": 64, "groups": 1, "state": 16, "norm": False}
    spec = build(
        ModelSpec, complete(sizes | {"ffn": 512, "max_seq": 64, "mixers": [mixer], "pattern": ["m"]}), "model"
    )
    with pytest.raises(InputError, match="Activate of mamba"):
        BlockWalk(architecture(spec).blocks[0], PassSizes(64, 2, spec.hidden))
