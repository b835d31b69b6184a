"""Sublayers of one model that differ in their experts, norms or gates; what is described without a price."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.cost.ledger.model_shape import shape
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.blocks.gemma3n import AltUpSizes
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.mlp import ExpertsSizes
from phalanx.spec.model.blocks.routed_attention import RoutedAttentionSizes
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import parameters

_SIZES = {"family": "llama", "vocab": 1000, "hidden": 64, "layers": 2, "heads": 4, "ffn": 128, "max_seq": 4096}
BASE = make_model(_SIZES, Path())[0]


def test_experts_of_two_kinds_in_one_model() -> None:
    """Each kind counts what a token uses of it, and is priced as a kind of block."""
    of = Experts(count=4, top_k=1, ffn=32)
    own = Experts(count=8, top_k=2, ffn=16)
    two = replace(
        BASE, experts=own, mixers=(ExpertsSizes("few", of),), pattern=("attention+experts", "attention+few")
    )
    routed = {8: 3 * 8 * 16 * 64, 4: 3 * 4 * 32 * 64}
    assert two.parameter_count - two.active_count == sum(routed.values()) - routed[8] * 2 // 8 - routed[4] // 4
    assert [(k.experts, k.top_k) for k in shape(two).kinds] == [(8, 2), (4, 1)]


def test_experts_without_weights_take_rows_and_no_parameters() -> None:
    """LongCat-Flash: a token's 12 choices of 768, of which 512 have weights, are 8 on average."""
    spec = replace(BASE, experts=Experts(count=512, top_k=12, ffn=16, identity=256))
    router = next(p for p in parameters(spec) if p.fqn.endswith("router.weight"))
    assert router.shape[0] == 768
    assert {k.top_k for k in shape(spec).kinds} == {8}
    with pytest.raises(InputError, match="is more than count"):
        Experts(count=2, top_k=4, ffn=16, identity=1)


def test_a_word_of_a_pattern_says_where_its_norms_are() -> None:
    spec = replace(BASE, norms="after", pattern=("attention:before+mlp", "attention+mlp:both"))
    first, second = architecture(spec).blocks[:2]
    assert [(s.norm is not None, s.after is not None) for s in first.sublayers] == [(True, False), (False, True)]
    assert [(s.norm is not None, s.after is not None) for s in second.sublayers] == [(False, True), (True, True)]
    with pytest.raises(InputError, match="says no place of norms"):
        replace(BASE, pattern=("attention:behind+mlp",))


def test_a_gate_of_each_head() -> None:
    gate = next(p for p in parameters(replace(BASE, output_gate=True, output_gate_over="head")) if ".gate." in p.fqn)
    assert gate.shape == (BASE.heads, BASE.hidden)


def test_what_is_read_and_has_no_price_is_refused_by_name() -> None:
    routed = RoutedAttentionSizes("routed", count=4, top_k=2, kv_heads=2, head_dim=16)
    for mixer, words in ((routed, "experts of queries"), (AltUpSizes("altup", 4), "is a sublayer without a price")):
        spec = replace(BASE, mixers=(mixer,), pattern=(f"{mixer.name}+mlp",))
        assert spec.parameter_count > 0
        with pytest.raises(InputError, match=words):
            shape(spec)
