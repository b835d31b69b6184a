"""Constants of serving engines, fitted on measured runs: shares of a chip's rates, and overheads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from phalanx.cost.hardware.columns import Column
from phalanx.spec.errors import InputError, nearest


@dataclass(frozen=True)
class EngineConstants:
    """Constants of an engine. Shares are relative to the datasheet's rate."""

    host_s: Column = 1.0e-3
    """Seconds that the GPU waits in each step, for scheduling, sampling and preparing inputs."""
    sequence_s: Column = 5e-6
    """Seconds of a step for each sequence, for scheduling and sampling it."""
    layer_s: Column = 30e-6
    """Seconds of a layer's launches and small kernels under CUDA graphs."""
    expert_layer_s: Column = 15e-6
    """The same, added by routing and by permuting tokens."""
    shared_layer_s: Column = 10e-6
    """The same, added by a shared expert."""
    latent_layer_s: Column = 15e-6
    """The same, added by latent attention's extra products."""
    linear_layer_s: Column = 15e-6
    """The same, added by linear attention."""
    quantized_layer_s: Column = 10e-6
    """The same, added by quantising inputs to 8 or 4 bits before products."""
    index_layer_s: Column = 60e-6
    """The same, added by choosing tokens for sparse attention."""
    eager_layer_s: Column = 250e-6
    """Seconds that the CPU needs to launch a layer without graphs."""
    latent_eager_s: Column = 1e-3
    """The same, added by latent attention, whose prompts take some twenty kernels more."""
    eager_decode_s: Column = 1.8e-3
    """The same of a layer where more sequences decode than graphs were captured for (cost/workspace.py), which is
    slow enough for batches to stay there (sgl-project/sglang#33483). Fitted on bursts of 1,000 requests: 1.6 to
    2.0 ms without any one of 14 families."""
    uncaptured_s: Column = 0.7e-3
    """The same of every layer of a server that captures no graphs at all: 0.5 ms of Qwen3-14B-AWQ on an A100
    (vllm-project/vllm#20469), 0.8 of Qwen2.5-Omni's thinker and talker on an A800 (vllm-project/vllm-omni#7960), 1.1
    of gpt-oss-120b on a DGX Spark (conselara.dev, dgx-spark-benchmarks). It is the host's, so it is not fitted."""
    hop_s: Column = 3e-6
    """Seconds of a small all-reduce in an NVLink domain, per doubling of its ranks."""
    net_hop_s: Column = 9e-6
    """The same across a network."""
    memory: Column = 0.8
    """Share of the memory bandwidth at which weights are read."""
    cache: Column = 0.9
    """Share of `memory` at which the cache is read."""
    expert_memory: Column = 0.8
    """Share of `memory` at which experts are read."""
    gemm: Column = 0.75
    """Share of FLOP/s that long 16-bit products reach."""
    gemm8: Column = 0.55
    """The same of 8-bit products, with the quantisation of their inputs."""
    gemm4: Column = 0.4
    """The same of 4-bit products."""
    expert_gemm: Column = 0.7
    """Share of these rates that products grouped by experts reach."""
    inner_half: Column = 150.0
    """Width of a rank's part of a matrix at which a product reaches half of the rate."""
    expert_rows: Column = 32.0
    """Rows of an expert at which its product reaches half of the rate."""
    attention: Column = 0.45
    """Share of 16-bit FLOP/s that attention reaches."""
    sharpness: Column = 2.0
    """Exponent by which reads and products add up: 1: one runs after the other; large: the longer hides the
    other."""
    reach: Column = 0.95
    """Exponent of the number of tokens in the number of experts that they reach; below 1, as tokens choose alike."""
    imbalance: Column = 1.3
    """Load of the busiest of many ranks of experts, over the mean."""
    balanced: Column = 1.18
    """The same where experts are placed by their load: 59,337 against 50,302 tokens/s (lmsys.org/blog,
    2025-05-05-large-scale-ep)."""
    two_batches: Column = 0.46
    """Share of the shorter of computing and sending that two half batches hide: 25.5 % more tokens/s in decoding
    (the same)."""
    link: Column = 0.8
    """Share of a link's rate that collectives reach."""
    first_s: Column = 10e-3
    """Seconds before a request's first step: parsing, tokenising, the HTTP response."""
    token_s: Column = 3e-6
    """Seconds per token of a prompt before its first step: tokenising, hashing the blocks of its cache."""
    accept_s: Column = 1e-3
    """Seconds of the server's single process for a request, one after the other: published bursts of 1,000 prompts of
    128 tokens begin 0.4 to 1.5 s later than their steps take (validation/data/bursts.csv)."""
    balance_steps: Column = 5.0
    """Decoding steps that a prompt waits for prompts of other groups, where attention is data parallel."""
    first_steps: Column = 5.0
    """Decoding steps before the first token leaves the server, where tokens are sent in intervals, as in the measured
    loops."""
    overlap_steps: Column = 2.0
    """The same where each token is sent, the default of servers: a step's tokens are handled during the next step,
    and a new prompt waits for the end of the running step (SGLang, srt/managers/scheduler.py, event_loop_overlap;
    vLLM's asynchronous scheduling)."""
    burst: Column = 0.05
    """Share of all concurrent prompts that the mean prompt waits for where lengths differ, because all clients start
    at once."""
    wave: Column = 0.15
    """The same where all requests have one length: they end together, and clients return in waves."""

    def way(self, input: float, attention_dp: int, each: bool = False) -> tuple[float, float]:
        """Return (seconds, decoding steps) from sending a prompt to receiving its first token, without the steps of
        the prompt and of prompts queued before it. `each`: whether the server sends every token by itself."""
        steps = (self.overlap_steps if each else self.first_steps) + (self.balance_steps if attention_dp > 1 else 0.0)
        return float(self.first_s + self.token_s * input), float(steps)


LAUNCHES = {"cdna3": 3.0}
"""Generation -> how long a layer's launches and small kernels take over those on NVIDIA's GPUs. An MI300X, on which
graphs of HIP keep kernels further apart and fewer are fused, takes 2.4 to 5 times as long with Ministral 3 of 3, 8
and 14 B, Qwen3-8B and Mistral Medium 3.5 on one GPU (vllm-project/recipes#431, #443, #476, #490), and 3.2 times with
MiniMax-M2.7 and one request (sgl-project/sglang#31044). The one run on an MI355X is as fast without it
(vllm-project/vllm#25135)."""
FIELDS = tuple(f.name for f in fields(EngineConstants))
FITTED_FILE = Path(__file__).with_name("fitted_engines.json")
"""Written by `python -m calibration.serving`."""


@cache
def fitted() -> Mapping[str, Mapping[str, float]]:
    """Return engine -> its fitted constants. Raises ValueError for one that is not a positive number."""
    table: dict[str, dict[str, float]] = json.loads(FITTED_FILE.read_text())
    for name, constants in table.items():
        if wrong := [c for c, value in constants.items() if c not in FIELDS or not 0 < value < float("inf")]:
            raise ValueError(f"constants of {name}: {', '.join(wrong)}")
    return table


def engine(name: str, table: Mapping[str, Mapping[str, float]] | None = None) -> EngineConstants:
    """Return an engine's constants, by default the shipped ones. Raises InputError for an unknown engine."""
    table = fitted() if table is None else table
    if name not in table:
        raise InputError("engine", name, "is not a serving engine that Phalanx knows", nearest(name, table))
    return replace(EngineConstants(), **table[name])


def release_of(name: str, version: str) -> str:
    """Return the row of constants of an engine's version: some releases have their own."""
    return "trtllm 1.0" if name == "trtllm" and version.startswith("1.0.") else name
