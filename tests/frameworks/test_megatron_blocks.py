"""Models by block as Megatron's arguments: written and read, the same model; and patterns that are refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.exports import draw

from phalanx.answers.configurations.export import export, write
from phalanx.answers.question.read import read as files_read
from phalanx.answers.question.stated import model_of, strategy_of
from phalanx.frameworks.megatron import patterns, read, write_blocks
from phalanx.frameworks.megatron.write_model import model_settings
from phalanx.frameworks.registry import DOCUMENTED, facts
from phalanx.frameworks.writing.subject import subject
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.model.blocks.attention import AttentionSizes
from phalanx.spec.model.blocks.block import Sublayer
from phalanx.spec.model.blocks.linear_attention import DeltaSizes
from phalanx.spec.model.blocks.lowering import Mixer, architecture
from phalanx.spec.model.blocks.state_space import MambaSizes
from phalanx.spec.model.mechanisms import Experts, Latent, SparseIndex
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


def _model(rng: random.Random, **fields: object) -> ModelSpec:
    heads, width = rng.choice((4, 8, 12)), rng.choice((16, 32, 64))
    plain = {
        "family": "any",
        "vocab": 1000,
        "hidden": 64 * rng.randint(1, 8),
        "heads": heads,
        "kv_heads": rng.choice((1, 2, 4, heads)),
        "head_dim": width,
        "ffn": rng.choice((128, 320)),
        "max_seq": 4096,
        "norm": "rms",
        "norm_eps": 1e-5,
        "position": "rotary",
        "activation": rng.choice(("swiglu", "relu2")),
        "qkv_bias": False,
        "out_bias": False,
        "mlp_bias": False,
        "tied": rng.random() < 0.5,
        "qk_norm": rng.random() < 0.5,
        "output_gate": rng.random() < 0.5,
    }
    return ModelSpec(**plain | fields)  # type: ignore[arg-type]


def _experts(rng: random.Random) -> Experts:
    shared = rng.choice((0, 96))
    gate = bool(shared) and rng.random() < 0.5
    narrow = rng.choice((0, 48))
    return Experts(16, rng.choice((1, 2, 6)), 80, shared, gate, latent=narrow, normalized=True)


def _mixer(rng: random.Random, name: str) -> Mixer:
    groups = rng.choice((1, 2, 4))
    window = 1024 if "window" in name else None
    if name == "mamba":
        return MambaSizes(name, groups * rng.randint(1, 8), rng.choice((32, 64)), groups, rng.choice((16, 128)))
    if name == "delta":
        return DeltaSizes(name, groups, groups * rng.randint(1, 3), 32, rng.choice((32, 64)), rng.choice((2, 4)))
    return AttentionSizes(name, window=window, rotary_dim=0 if "nope" in name else None)


def drawn(rng: random.Random) -> ModelSpec:
    """Return a model of drawn blocks: one sublayer each, or attention or a delta net before an MLP or experts."""
    kinds = ["attention", *rng.sample(("nope", "window", "window_nope"), rng.randint(0, 2)), "delta"]
    more: dict[str, object] = {}
    if rng.random() < 0.3:
        index = SparseIndex(4, 32, 64) if rng.random() < 0.5 else None
        latent = Latent(32, 16, 16, 32, rng.choice((None, 48)), index=index)
        kinds = ["attention"] if index else ["attention", "delta"]
        heads = rng.choice((4, 8))
        more = {"latent": latent, "heads": heads, "kv_heads": heads, "head_dim": 32, "qk_norm": False}
        more |= {"output_gate": False, "rope_scaling": None}
    experts = _experts(rng) if rng.random() < 0.6 else None
    ends = ["mlp", *(["experts"] if experts else [])]
    if rng.random() < 0.5:
        words = ["attention"] * bool(more) + rng.choices([*kinds, "mamba", *ends], k=rng.randint(1, 8))
    else:
        words = ["attention+mlp"] * bool(more)
        words += [f"{rng.choice(kinds)}+{rng.choice(ends)}" for _ in range(rng.randint(1, 6))]
    words = words[: next(n for n in range(1, len(words) + 1) if words[:n] * (len(words) // n) == words)]
    named = {part for word in words for part in word.split("+")}
    order = ("mamba", "delta", "window", "nope", "window_nope")
    mixers = tuple(_mixer(rng, name) for name in order if name in named)
    fields: dict[str, object] = {"layers": len(words) * rng.randint(1, 4), "pattern": tuple(words), "mixers": mixers}
    return _model(rng, **fields | more | {"experts": experts if "experts" in named else None})


def _read(m: ModelSpec) -> ModelSpec:
    args = {s.key.removeprefix("--"): s.value for s in model_settings(m)}
    b = write_blocks.blocks_of(m)
    if b.symbols:
        args["hybrid-layer-pattern"] = patterns.to_text(b.symbols)
    c = read.read(args)
    assert not c.not_modelled
    assert not c.unknown
    assert c.spec is not None, c.open_model
    return c.spec


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_a_model_is_read_as_it_was_written(seed: int) -> None:
    """Up to what has two descriptions: blocks of one softmax attention as a pattern or by lists of layers, a window
    or missing positions of all attention as the model's own or as a mixer's, and Mamba-2 with its MLP as two."""
    m = drawn(random.Random(seed))
    back = _read(m)
    positions = {"position": "rotary"} if back.position == "none" else {}
    assert replace(back, family="any", **positions, layers=1, pattern=None, mixers=(), **_LISTS) == replace(
        m, layers=1, pattern=None, mixers=(), **_LISTS
    )
    assert _sublayers(back) == _sublayers(m)
    two_to_one = any("+" in word for word in m.pattern or ()) and any(x.kind == "mamba" for x in m.mixers)
    assert len(architecture(back).blocks) == m.layers or two_to_one


def _sublayers(m: ModelSpec) -> list[Sublayer]:
    """Return a model's sublayers without their norms' names, which say their place in a block."""
    return [replace(s, norm=None) for block in architecture(m).blocks for s in block.sublayers if s.norm is not None]


_LISTS: dict[str, object] = {"window": None, "window_layers": None, "experts": None}
"""Fields that a pattern may say instead."""


def _plan(m: ModelSpec, stack: str, **strategy: object) -> Plan:
    drawn = draw.plan(DOCUMENTED[stack], random.Random(1), ("llama3-8b",), options=False)
    s = Strategy(**strategy)  # type: ignore[arg-type]
    return replace(drawn, model=m, strategy=s, job=replace(drawn.job, global_batch=4 * s.dp, seq=4096))


NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
"""Nemotron 3 Nano's blocks (nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, config.json)."""


def _nano() -> ModelSpec:
    words = {"M": "mamba", "E": "experts", "*": "attention"}
    mixers = (MambaSizes("mamba", 64, 64, 8, 128),)
    experts = Experts(128, 6, 1856, 3712, score="sigmoid", normalized=True, scale=2.5, balance_bias=1e-3)
    sizes = {"vocab": 131072, "hidden": 2688, "heads": 32, "kv_heads": 2, "head_dim": 128, "ffn": 1856}
    pattern = tuple(words[symbol] for symbol in NEMOTRON)
    plain = {
        "layers": len(NEMOTRON),
        "pattern": pattern,
        "mixers": mixers,
        "experts": experts,
        "activation": "relu2",
        "position": "none",
    }
    named = {"family": "llama", "qk_norm": False, "output_gate": False, "tied": False, "max_seq": 4096}
    return _model(random.Random(1), **sizes, **plain, **named)


def test_nano_has_the_published_parameters() -> None:
    assert _nano().parameter_count == 31_577_937_344


@pytest.mark.parametrize(("to", "stack"), [("megatron", "megatron-core"), ("bridge", "megatron-bridge")])
@pytest.mark.parametrize(
    "strategy",
    [
        {"dp": 8, "ep": 8},
        {"dp": 2, "tp": 2, "sp": True, "pp": 2, "layers": "20/32"},
        {"dp": 1, "pp": 2, "virtual": 2, "schedule": "interleaved"},
    ],
)
def test_a_hybrid_plan_is_read_as_it_was_exported(
    to: str, stack: str, strategy: dict[str, object], tmp_path: Path
) -> None:
    """Chunks of the pipeline stand in the pattern, which also says the number of blocks."""
    plan = _plan(_nano(), stack, **strategy)
    files = export(plan, to)
    write(files, tmp_path / "out")
    c = files_read([tmp_path / "out"]).configuration
    assert c.layout.world is not None
    assert strategy_of(c, c.layout.world) == subject(plan, DOCUMENTED[stack]).s
    read_back = model_of(c, None)[0]
    assert read_back.family == "nemotron_h"
    assert replace(read_back, family="llama", max_seq=4096) == plan.model
    assert not c.unknown
    assert "pretrain_hybrid.py" in "".join(files.files.values()) or to == "bridge"


def test_shares_of_blocks_are_the_pattern_that_megatron_makes_of_them() -> None:
    """As of nvidia/mamba2-hybrid-8b-3t-128k: 56 blocks, 8 % attention, half MLPs."""
    made = "M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
    assert patterns.from_shares(56, 0.08, 0.5) == made


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("M*Q", "'Q' is not a symbol"),
        ("M*+", "attention .* along with latent attention"),
        ("", "names no block"),
        ("M*|M-/MM/M*", "depths of multi-token prediction that differ"),
        ("M*/M|M", "is not a symbol"),
    ],
)
def test_a_pattern_that_megatron_refuses_is_refused_in_one_line(pattern: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        patterns.parse(pattern)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"norms": "both"}, "norms are before"),
        ({"mixers": (MambaSizes("mamba", 64, 64, 8, 128, chunk=256),)}, "chunk"),
        ({"streams": 4}, "hyper-connections"),
        ({"only_priced": ("a softcap of logits",)}, "only_priced"),
        ({"activation": "xielu"}, "activation"),
        ({"activation": "geglu"}, "activation"),
    ],
)
def test_what_has_no_argument_is_refused_by_name(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        export(_plan(replace(_nano(), **changed), "megatron-core", dp=8), "megatron")


def _qwen3_next() -> ModelSpec:
    """Return a model of Qwen3-Next's kind: three gated delta nets to an attention."""
    pattern = ("delta+experts",) * 3 + ("attention+experts",)
    mixers = (DeltaSizes("delta", 16, 32, 128, 128),)
    return _model(random.Random(1), layers=8, pattern=pattern, mixers=mixers, experts=Experts(16, 2, 64))


@pytest.mark.parametrize(
    ("stack", "model", "strategy", "reason"),
    [
        ("megatron-core", _nano, {"dp": 1, "tp": 16}, "groups of Mamba-2 of its own"),
        ("megatron-core", _nano, {"cp": 3}, "divide the heads of Mamba-2"),
        ("megatron-core", _qwen3_next, {"tp": 4, "cp": 8}, "divide the key heads of gated delta nets"),
        ("megatron-core", _qwen3_next, {"tp": 4, "sp": True}, ""),
        ("megatron-core-0.14", _qwen3_next, {"dp": 8}, "has no gated delta net"),
        ("megatron-bridge", _nano, {"dp": 8, "ep": 8}, ""),
        ("torchtitan", _nano, {"dp": 8, "zero": 3}, "has no Mamba-2"),
        ("torchtitan", _qwen3_next, {"dp": 8, "zero": 3}, ""),
        ("torchtitan", _qwen3_next, {"dp": 4, "zero": 3, "cp": 2}, "whole sequences"),
        ("fsdp2", _nano, {"dp": 8, "zero": 3}, ""),
        ("accelerate", _qwen3_next, {"dp": 4, "zero": 3, "tp": 2}, "leaves recurrences whole"),
        ("deepspeed", _nano, {"dp": 4, "tp": 2}, "AutoTP"),
        ("nanotron", _nano, {"dp": 8}, "has no Mamba-2"),
        ("maxtext", _qwen3_next, {"dp": 8, "zero": 3}, ""),
        ("maxtext", _nano, {"dp": 8, "zero": 3}, "has no Mamba-2"),
    ],
)
def test_what_a_stack_does_not_run_is_refused_with_its_line(
    stack: str, model: Callable[[], ModelSpec], strategy: dict[str, object], reason: str
) -> None:
    refusal = DOCUMENTED[stack].refusal(Strategy(**strategy), None, facts(model()))  # type: ignore[arg-type]
    if not reason:
        assert refusal is None
        return
    assert refusal is not None
    assert reason in refusal.reason
    assert re.search(r"\.py:\d+$", refusal.source)


def test_the_refusal_of_an_operator_is_about_the_model() -> None:
    refusal = DOCUMENTED["torchtitan"].refusal(Strategy(), None, facts(_nano()))
    assert refusal is not None
    assert str(refusal.error("torchtitan")).startswith(
        "model.pattern: has no Mamba-2 (torchtitan, torchtitan/models/"
    )
