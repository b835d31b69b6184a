"""Drawn models whose blocks differ: patterns of every mechanism that has a price."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from phalanx.spec.files.job_file import make_model
from phalanx.spec.model.spec import ModelSpec

_MIXERS: dict[str, dict[str, Any]] = {
    "near": {"kind": "attention", "window": 128},
    "bare": {"kind": "attention", "rotary_dim": 0, "heads": 16},
    "mamba": {"kind": "mamba", "heads": 32, "head_dim": 64, "groups": 8, "state": 64},
    "delta": {"kind": "delta", "key_heads": 8, "value_heads": 16, "key_dim": 64, "value_dim": 128},
    "lightning": {"kind": "lightning", "heads": 16, "head_dim": 64},
    "kda": {"kind": "channel_delta", "heads": 16, "head_dim": 64},
    "scan": {"kind": "selective", "channels": 2048, "state": 16, "step_rank": 64},
    "conv": {"kind": "short_conv", "channels": 1024, "taps": 3},
    "pooled": {
        **{"kind": "compressed", "heads": 16, "head_dim": 128, "q_rank": 256, "rotary_dim": 64, "window": 128},
        **{"result_groups": 8, "result_rank": 128, "ratio": 4, "index": {"heads": 8, "dim": 64, "top": 64}},
    },
    "wide": {"kind": "mlp", "ffn": 8192},
    "few": {"kind": "experts", "of": {"count": 16, "top_k": 2, "ffn": 2048}},
}


WALKED = ("attention", "near", "bare")
"""Mixers whose live bytes are derived, so that a step of ours has a StepProgram."""


def hybrid(seed: int, outer: tuple[str, ...] = ("attention", *_MIXERS)) -> ModelSpec:
    """Return a model of 8 to 16 blocks, drawn by a number: one to four kinds of block, of one sublayer or two, whose
    mixers are among `outer`. With those of WALKED, nothing else that has no StepProgram."""
    draw = Random(seed)
    inner = ["mlp", "wide"]
    fields: dict[str, Any] = {"family": "llama", "vocab": 32000, "hidden": 1024, "heads": 16, "kv_heads": 8}
    fields |= {"ffn": 4096, "max_seq": 65536, "layers": draw.choice((8, 12, 16))}
    if draw.random() < 0.6:
        inner = ["mlp", "experts", "experts", *([] if outer == WALKED else ["few"])]
        shared = draw.choice((0, 512))
        fields["experts"] = {"count": draw.choice((16, 32)), "top_k": 4, "ffn": 512, "shared_ffn": shared}
        fields["experts"]["shared_gate"] = shared > 0 and outer != WALKED and draw.random() < 0.5
    outer_words = [name for name in outer if name not in ("wide", "few")]
    words = []
    for _ in range(draw.randint(1, 4)):
        first = draw.choice(outer_words)
        apart = draw.random() < 0.2
        words += [first, draw.choice(inner)] if apart else [f"{first}+{draw.choice(inner)}"]
    used = {word for words in words for word in words.split("+")}
    fields["mixers"] = [{"name": name, **_MIXERS[name]} for name in _MIXERS if name in used]
    fields["pattern"] = words
    fields["streams"] = 1 if outer == WALKED else draw.choice((1, 1, 1, 4))
    fields["norms"] = draw.choice(("before", "before", "both"))
    if "experts" not in used:
        fields.pop("experts", None)
    return make_model(fields, Path())[0]
