"""serving.json: the deployment that `phalanx serve plan` found, from which launch files are made."""

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
    """Groups of tp ranks that each compute attention for their own requests, and share the layers after it."""
    moe_tp: Ranks
    """Tensor parallelism inside an expert; of a dense model's MLP, tp x attention_dp."""
    moe_ep: Ranks
    """Expert parallelism; moe_tp x moe_ep = tp x attention_dp."""
    slots: Count
    """The most requests at once in a worker."""
    step_tokens: Count
    """The most tokens of an attention group in a step: a chunk of prompts, and one for each sequence that decodes."""
    cache_tokens: Count
    """Tokens that a worker's KV cache holds."""
    large_ep: bool = False
    """Whether experts run with DeepEP's kernels and DeepGEMM, placed by their load."""

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
    """Tokens of a prompt, in the mean."""
    output: Count
    """Tokens generated, in the mean."""
    concurrency: Natural
    """Closed loop: requests under way in the whole deployment; 0 for other loads."""
    rate: Annotated[float, Range(0, 1e9)]
    """Poisson: requests per second; 0 for other loads."""
    trace: Name
    """The file that requests came from; empty for other loads."""
    reuse: Share
    """Share of each prompt that the cache holds already."""

    def __post_init__(self) -> None:
        require_ranges(self, "load")


@dataclass(frozen=True)
class LatencyLimits:
    """The service level: seconds that `percentile` percent of the requests stay under; None: no limit."""

    ttft_s: Seconds | None
    tpot_s: Seconds | None
    percentile: Literal[50, 90, 99]
    deadline_s: Seconds | None = None
    """Of a whole request."""
    survive: Name = ""
    """Nodes, GPUs or copies that may be lost; empty: none."""

    def __post_init__(self) -> None:
        require_ranges(self, "limits")


@dataclass(frozen=True)
class ServingPlan:
    """A deployment of a model with its predicted performance."""

    model_name: Name
    """The model as the user named it: a preset, or a config.json."""
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
    """LoRA adapters that a batch may use; 0: none."""
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
    """Read a serving.json. Raises InputError for other files, other versions, and anything that is not as written."""
    content = read_json(path, "serving plan")
    if not isinstance(content, dict) or content.get("kind") != "serving":
        raise InputError("serving plan", str(path), "is not a serving.json", "phalanx serve plan writes one")
    if content.get("version") != VERSION:
        reason = f"has version {content.get('version')!r}"
        raise InputError("serving plan", str(path), reason, f"this Phalanx reads version {VERSION}")
    tables = {key: value for key, value in content.items() if key not in ("version", "kind")}
    return build(ServingPlan, tables, "serving")
