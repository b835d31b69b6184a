"""Blocks of fp8 weights that share a scale, which engines do not cut: a checkpoint's `weight_block_size`.

vLLM and SGLang stop as they load experts of which a rank would hold a part of a block: vllm-project/vllm#17569,
#54178, fp8.py, `Fp8MoEMethod.create_weights`; sgl-project/sglang#10852, fp8.py:557. Weights that an engine quantises
as it loads them have one scale a tensor, and are cut anywhere.
"""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.serving.cost.layout import ServingLayout
from phalanx.spec.documents import read_json
from phalanx.spec.model.spec import ModelSpec

BLOCKWISE = ("vllm", "sglang")
"""Engines that are known to stop."""
_BLOCK = 128
_PUBLISHED = re.compile(r"qwen3.*-fp8|deepseek-(v3|r1)(?!.*distill)|minimax-m2")
"""Checkpoints whose config.json has blocks of 128 x 128."""


def scale_block(name: str) -> int:
    """Return the rows of a block of a model's published fp8 weights, or of a config.json's; 0: no blocks. Raises
    InputError for a file that cannot be read."""
    if not name.endswith(".json") and not Path(name).is_dir():
        return _BLOCK if _PUBLISHED.search(name.lower()) else 0
    path = Path(name) if name.endswith(".json") else Path(name) / "config.json"
    config = read_json(path, "model")
    table = config.get("quantization_config") if isinstance(config, dict) else None
    sizes = table.get("weight_block_size") if isinstance(table, dict) else None
    rows = sizes[0] if isinstance(sizes, list) and sizes else 0
    return rows if isinstance(rows, int) and rows > 0 else 0


def cut_block(model: ModelSpec, x: ServingLayout, block: int) -> str:
    """Return which matrix a layout cuts inside a block, and what to do; empty if none."""
    e = model.experts
    widths = (("experts'", e.ffn, x.moe_tp), ("shared expert's", e.shared_ffn, x.tp)) if e else ()
    for of, width, ranks in (*widths, ("MLP's", 0 if e and not e.dense_layers else model.ffn, x.tp)):
        if block and ranks > 1 and width % (block * ranks):
            part = f"{width // ranks} of the {of} width {width} on a rank are no whole blocks of {block}"
            wide = f"ep={ranks}, or " if of == "experts'" else ""
            why = "which share a scale in this fp8 checkpoint: the engine stops as it loads them"
            return f"{part}, {why}; use {wide}a smaller tp"
    return ""
