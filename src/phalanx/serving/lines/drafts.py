"""Drafted tokens of a server whose acceptance its line fixes, as benchmarks do for weights that draft nothing useful.

SGLANG_SIMULATE_ACC_LEN and vLLM's `synthetic_acceptance_length` are mean tokens that a step yields, the model's own
among them (SGLang, srt/speculative/spec_utils.py; vLLM, vllm/config/speculative.py).
Both accept the first ones of a step.
"""

import json
from collections.abc import Mapping
from typing import Any

from phalanx.serving.lines.programs import Line

_SGLANG = "SGLANG_SIMULATE_ACC_LEN"
FIXING = (_SGLANG, "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_SIMULATE_ACC_TOKEN_MODE")
"""Variables that fix the acceptance; the others of them how it varies around its mean."""


def fixed_acceptance(server: Line) -> tuple[dict[str, str], str]:
    """Return the field `speculate` of a server whose acceptance is fixed, with its caveat; empty where it is not."""
    drafted, length, said = (_of_vllm if server.program.engine == "vllm" else _of_sglang)(server)
    if not isinstance(drafted, int) or isinstance(drafted, bool) or not 1 <= drafted <= 64:
        return {}, ""
    try:
        mean = float(length)
    except (TypeError, ValueError):
        return {}, ""
    if not 1 <= mean <= drafted + 1:
        return {}, ""
    caveat = f"assumed: {mean:g} tokens of a step that drafts {drafted}, as {said} fixes: real answers accept others"
    return {"speculate": f"{drafted}:{acceptance(drafted, mean):.6f}"}, caveat


def acceptance(drafted: int, mean: float) -> float:
    """Return the rate at which each drafted token is accepted if the one before was, by the mean tokens of a step:
    1 + a + ... + a^drafted = mean."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafted + 1)) < mean else (low, middle)
    return high


def _of_sglang(server: Line) -> tuple[Any, Any, str]:
    steps = server.flags.get("speculative_num_steps")
    tokens = server.flags.get("speculative_num_draft_tokens")  # with the model's own
    drafted = steps if steps is not None or not isinstance(tokens, int) else tokens - 1
    return drafted, server.variables.get(_SGLANG), _SGLANG


def _of_vllm(server: Line) -> tuple[Any, Any, str]:
    try:
        table = json.loads(str(server.flags.get("speculative_config")))
    except ValueError:
        table = None
    config: Mapping[str, Any] = table if isinstance(table, dict) else {}
    name = "synthetic_acceptance_length"
    if config.get("rejection_sample_method", "synthetic") != "synthetic":
        return None, None, name
    return config.get("num_speculative_tokens"), config.get(name), name
