"""Models as patterns of sublayers: published sizes, splits over ranks, and what a pattern may say."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.blocks.lowering import architecture
from phalanx.spec.model.blocks.operators import Attend, Scan
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.strategy.split import Split, require_split

_DELTA = {"name": "delta", "kind": "delta", "key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
_QWEN3_NEXT: dict[str, Any] = {
    "family": "qwen3_moe",
    "vocab": 151936,
    "hidden": 2048,
    "layers": 48,
    "heads": 16,
    "kv_heads": 2,
    "head_dim": 256,
    "ffn": 5120,
    "max_seq": 262144,
    "rotary_dim": 64,
    "output_gate": True,
    "experts": {"count": 512, "top_k": 10, "ffn": 512, "shared_ffn": 512, "shared_gate": True},
    "mixers": [_DELTA],
    "pattern": ["delta+experts"] * 3 + ["attention+experts"],
}
_SYMBOLS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}
_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


def _model(table: dict[str, Any]) -> ModelSpec:
    return make_model(table, Path())[0]


def _nano() -> ModelSpec:
    """Nemotron 3 Nano 30B-A3B (nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, config.json)."""
    mamba = {"name": "mamba", "kind": "mamba", "heads": 64, "head_dim": 64, "groups": 8, "state": 128}
    return _model(
        {
            "family": "llama",
            "vocab": 131072,
            "hidden": 2688,
            "layers": len(_NANO),
            "heads": 32,
            "kv_heads": 2,
            "head_dim": 128,
            "ffn": 1856,
            "max_seq": 262144,
            "activation": "relu2",
            "experts": {"count": 128, "top_k": 6, "ffn": 1856, "shared_ffn": 3712},
            "mixers": [mamba],
            "pattern": [_SYMBOLS[s] for s in _NANO],
        }
    )


def test_hybrids_have_their_published_sizes() -> None:
    """Counted by transformers on the meta device: Qwen3-Next-80B-A3B and Nemotron 3 Nano, total and active."""
    m = _model(_QWEN3_NEXT)
    assert (m.parameter_count, m.active_count) == (79_674_391_296, 3_874_929_408)
    nano = _nano()
    assert (nano.parameter_count, nano.active_count) == (31_577_937_344, 3_580_073_408)


def test_equal_blocks_are_one_kind() -> None:
    kinds = architecture(_model(_QWEN3_NEXT)).kinds
    assert {block.label: n for block, n in kinds.items()} == {
        "gated delta net + experts": 36,
        "attention + experts": 12,
    }
    assert all((block.first(Scan) is None) != (block.first(Attend) is None) for block in kinds)


@settings(max_examples=40)
@given(tp=st.sampled_from([1, 2, 4, 8, 16]), ep=st.sampled_from([1, 2, 8]), nano=st.booleans())
def test_boxes_of_all_ranks_are_the_parameters(tp: int, ep: int, nano: bool) -> None:
    """Every element is on some rank, as often as its box has copies, in recurrences too."""
    m = _nano() if nano else _model(_QWEN3_NEXT)
    m = replace(m, layers=8, pattern=(m.pattern or ())[:8])
    split = Split(m, tp=tp, ep=ep)
    require_split(m, split)
    ranks = [replace(split, index=i).at_experts(x).boxes for i in range(tp) for x in range(ep)]
    for p in parameters(m):
        held = sum(boxes[p.fqn].numel for boxes in ranks)
        copies = ranks[0][p.fqn].copies
        assert held == p.numel * (copies * ep if not p.of_experts else tp), p.fqn
        assert all(math.prod(b[p.fqn].shape) >= b[p.fqn].numel for b in ranks)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pattern": ["delta"] * 49}, "model.pattern: has 49 blocks, more than layers = 48"),
        ({"pattern": ["delta+experts", "lstm"]}, "model.pattern.1 = 'lstm': is not a sublayer of this model"),
        ({"pattern": []}, "model.pattern = '()': has no block"),
        ({"mixers": []}, "model.pattern.0 = 'delta': is not a sublayer of this model"),
        ({"pattern": ["attention+experts"]}, "model.mixers = 'delta': is in no block of the pattern"),
        (
            {"mixers": [_DELTA | {"kind": "gru"}]},
            "model.mixers.0.kind = 'gru': is not a mechanism; known: altup, ",
        ),
        ({"mixers": [_DELTA | {"taps": 0}]}, "model.mixers.delta.taps = 0: must be at least 1"),
        ({"mixers": [_DELTA | {"value_heads": 24}]}, "value_heads = 24: is not a multiple of key_heads = 16"),
        ({"mixers": [_DELTA, _DELTA]}, "model.mixers.1.name = 'delta': is used twice"),
        (
            {"mixers": [{"name": "w", "kind": "attention", "window": 0}]},
            "model.mixers.w.window = 0: must be at least",
        ),
        ({"mixers": [_DELTA | {"key_haeds": 2}]}, "model.mixers.0.key_haeds: no such field; did you mean key_heads"),
    ],
)
def test_a_wrong_pattern_is_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        _model(_QWEN3_NEXT | changes)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_heads_of_a_recurrence_are_divided_whole() -> None:
    m = _model(_QWEN3_NEXT | {"heads": 96, "kv_heads": 2})
    with pytest.raises(InputError, match=r"tp = 3: does not divide model\.mixers\.delta\.key_heads = 16"):
        require_split(m, Split(m, tp=3))
