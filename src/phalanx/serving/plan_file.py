"""serving.json: the deployment of `phalanx serve plan`, from which launch files are made."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.ranges import Count, Name, Natural, Range, Ranks, Seconds, Share, require_ranges

VERSION = 1
Engine = Literal["vllm", "sglang", "trtllm"]
Weights = Literal["bf16", "fp8", "int4", "nvfp4", "mxfp4"]
Cache = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class Workers:
    """Equal workers, each with one copy of the model on tp x attention_dp x pp GPUs."""

    role: Literal["both", "prefill", "decode"]
    """Their role; prefill and decode workers exist together."""
    count: Ranks
    """How many workers."""
    tp: Ranks
    """Tensor parallelism of attention."""
    pp: Ranks
    """Pipeline parallelism."""
    attention_dp: Ranks
    """Groups of tp ranks, each of which computes attention for its own requests; MLPs and experts are split over
    all."""
    moe_tp: Ranks
    """Tensor parallelism inside an expert; of a dense model's MLP, tp x attention_dp."""
    moe_ep: Ranks
    """Expert parallelism; moe_tp x moe_ep = tp x attention_dp."""
    slots: Count
    """The most concurrent requests of a worker."""
    step_tokens: Count
    """The most tokens of an attention group in a step: a chunk of prompts, and one for each decoding sequence."""
    cache_tokens: Count
    """Tokens that a worker's KV cache holds."""
    large_ep: bool = False
    """Whether experts run with the kernels of DeepEP and DeepGEMM, placed by load."""

    def __post_init__(self) -> None:
        require_ranges(self, f"workers.{self.role}")
        if self.moe_tp * self.moe_ep != self.tp * self.attention_dp:
            reason = f"x moe_ep = {self.moe_ep} is not tp x attention_dp = {self.tp} x {self.attention_dp}"
            raise InputError(f"workers.{self.role}.moe_tp", self.moe_tp, reason)

    @property
    def gpus(self) -> int:
        """GPUs of one worker."""
        return self.tp * self.attention_dp * self.pp


@dataclass(frozen=True)
class ServedLoad:
    """The load on the deployment."""

    input: Count
    """Mean tokens of a prompt."""
    output: Count
    """Mean generated tokens of a request."""
    concurrency: Natural
    """Concurrent requests of a closed loop, in the whole deployment; 0: another load."""
    rate: Annotated[float, Range(0, 1e9)]
    """Requests per second of random arrivals; 0: another load."""
    trace: Name
    """File of a trace of requests; empty: another load."""
    reuse: Share
    """Cached share of each prompt."""

    def __post_init__(self) -> None:
        require_ranges(self, "load")


@dataclass(frozen=True)
class LatencyLimits:
    """The service level: limits, in seconds, for `percentile` percent of the requests; None: no limit."""

    ttft_s: Seconds | None
    tpot_s: Seconds | None
    percentile: Literal[50, 90, 99]
    deadline_s: Seconds | None = None
    """Limit of a whole request."""
    survive: Name = ""
    """The nodes, GPUs or copies whose loss it survives; empty: none."""

    def __post_init__(self) -> None:
        require_ranges(self, "limits")


@dataclass(frozen=True)
class ServingPlan:
    """A deployment of a model with its predicted performance."""

    model_name: Name
    """The model's name in the question: a preset or a config.json."""
    model: ModelSpec
    cluster: Name
    """The cluster's name."""
    node_gpus: Ranks
    """GPUs of one of its nodes."""
    gpus: Ranks
    """GPUs that the deployment uses."""
    engine: Engine
    weights: Weights
    cache: Cache
    """Number type of the KV cache."""
    page_tokens: Count
    """Tokens of a page of the cache."""
    longest: Count
    """Tokens of the longest request, prompt and answer."""
    draft_tokens: Natural
    """Tokens drafted per step by speculative decoding; 0: none."""
    adapters: Natural
    """The most LoRA adapters of a batch; 0: none."""
    workers: tuple[Workers, ...]
    load: ServedLoad
    limits: LatencyLimits
    prediction: dict[str, Any]
    """Results of the simulation: quantiles in seconds, rates per second."""

    def __post_init__(self) -> None:
        require_ranges(self, "serving")
        roles = [w.role for w in self.workers]
        if roles not in (["both"], ["prefill", "decode"]):
            raise InputError("workers", ", ".join(roles), "must be both alone, or prefill and then decode")
        used = sum(w.count * w.gpus for w in self.workers)
        if used != self.gpus:
            raise InputError("gpus", self.gpus, f"the workers have {used}")


def write(plan: ServingPlan, path: Path) -> None:
    """Write serving.json, atomically."""
    write_json(path, {"version": VERSION, "kind": "serving", **asdict(plan)})


def read(path: Path) -> ServingPlan:
    """Read a serving.json. Raises InputError for another kind of file, another version, or invalid content."""
    content = read_json(path, "serving plan")
    if not isinstance(content, dict) or content.get("kind") != "serving":
        raise InputError("serving plan", str(path), "is not a serving.json", "phalanx serve plan writes one")
    if content.get("version") != VERSION:
        reason = f"has version {content.get('version')!r}"
        raise InputError("serving plan", str(path), reason, f"this Phalanx reads version {VERSION}")
    tables = {key: value for key, value in content.items() if key not in ("version", "kind")}
    return build(ServingPlan, tables, "serving")
