"""The options of `phalanx serve plan`, in Python and on the command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ServingRequest:
    """A user's question: names, numbers, and texts with units, as in OPTIONS."""

    model: str
    cluster: str
    gpus: int
    input: int | str | None = None
    output: int | str | None = None
    ttft: str | None = None
    tpot: str | None = None
    deadline: str | None = None
    survive: str | None = None
    percentile: int = 90
    objective: str = "throughput"
    engine: str = "vllm"
    weights: str = "auto"
    cache: str = "bf16"
    mode: str = "both"
    layout: str | None = None
    large_ep: str = "auto"
    chunk: int | None = None
    slots: int | None = None
    graphs: int | None = None
    memory: float | None = None
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    trace: Path | None = None
    variation: float = 0.0
    reuse: float = 0.0
    speculate: str | None = None
    adapters: str | None = None
    price: float | None = None
    rates: str | None = None
    requests: int | None = None
    seed: int = 0


OPTIONS = """
--input 4000|1:1024: Tokens of a prompt, or from : to.
--output 500|1:512: Tokens generated per request, or from : to.
--ttft 1s: Limit of the time to the first token, queueing included.
--tpot 30ms: Limit of the time per token after the first.
--deadline 20s: Limit of a whole request, to its last token.
--survive '1 node'|'2 gpus'|'1 copy': What may be lost: the others keep the limits and the load.
--percentile 50|90|99: Percent of requests that stay under the limits.
--objective throughput|latency|cost|energy|carbon: Most tokens/s; shortest time of a request; or most tokens per
    GPU-hour, kWh or kg CO2e, which may leave GPUs out.
--engine vllm|sglang|trtllm: Engine that serves.
--weights bf16,fp8,int4,nvfp4: Types of weights to try; auto: as published.
cache --kv bf16|fp8: Type of the KV cache.
--mode both|aggregated|disaggregated: Prefill and decode in the same workers, or apart.
--layout tp=4,pp=2: The only layout: tp, pp, dp, ep; tp=4 + tp=8: prefill, decode.
--large-ep auto|on|off: Experts over many GPUs with DeepEP, DeepGEMM and placement by load; auto: where they span
    nodes.
--chunk: The only token budget of a step.
--slots: The most requests at once in an attention group.
--graphs: The largest batch of CUDA graphs in decoding; 0: none.
--memory 0.9: Share of a GPU's memory that the engine uses.
--concurrency: Requests under way at any time (closed loop).
--rate 40|inf: Requests per second, arriving at random; inf: all at once.
--burstiness: Of arrivals: 1 is a Poisson process, less comes in bursts.
--trace FILE.csv: Requests to replay: arrival (s), input, output (tokens).
--variation: Standard deviation of the lengths over their mean; 0: all alike.
--reuse: Share of each prompt that the cache holds already (0 to 0.99).
--speculate 3:0.7: Drafted tokens per step, and the rate of acceptance.
--adapters 32:4: LoRA adapters in use, and how many of them a batch holds.
--price: Price of a GPU-hour, in place of the published one of its chip.
--requests: Requests in all; else to simulate.
--seed: Of arrivals, lengths and acceptance.
"""
"""The fields, as entries of a command's options."""
