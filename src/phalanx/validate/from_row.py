"""Conversion of a published row into the input of a prediction: model, job, strategy, system and stack; or the reason
why that is not possible."""

import re
from dataclasses import dataclass, replace
from math import prod

from phalanx.cost.analytic.option_effects import extended_shape, layout_with_options
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.model_shape import Shape, shape
from phalanx.cost.ledger.rank_layout import LayoutColumns, layout
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions
from phalanx.validate import stacks, systems
from phalanx.validate.models import Unspecified, depths_of, model_of
from phalanx.validate.records import Row, readable
from phalanx.validate.stacks import PricingStack


@dataclass(frozen=True)
class Case:
    """A row that is specified well enough to be predicted."""

    row: Row
    model: ModelSpec
    job: Job
    strategy: Strategy
    shape: Shape
    """The model's shape for the analytic engine."""
    layout: LayoutColumns
    """Strategy and job as columns for the analytic engine."""
    system: System
    stack: PricingStack
    """The software stack whose constants price the row."""
    measured_s: float | None
    """Seconds of a step; None if the row has only memory, or did not fit."""
    timed: bool
    """Whether the time is meaningful: neither of a small test nor measured before a fix."""
    options: StackOptions = AS_RELEASED
    """Options of the stack that the row states in columns of their own."""

    @property
    def profile(self) -> str:
        """Name of the stack that prices the row."""
        return self.stack.name

    @property
    def generic(self) -> bool:
        """Whether a generic stack substitutes for an unknown framework."""
        return self.stack.generic


_CI_GPUS = 8
"""GPUs of Megatron's functional tests: one node."""
_JAX_SHARD = 128
"""Ranks that shard the model in NVIDIA's JAX recipes, as the rows that state it have; further ranks are replicas."""
_CHUNKS = {
    # Megatron-Bridge's table of 26.02.01 states no chunks; its recipe (scripts/performance/configs/llama,
    # LLAMA3_70B_PRETRAIN_CONFIG_GB300_FP8_MX_V2) and its tables of 26.02 and 26.04 have five.
    ("mbridge/26.02.01", "llama3-70b", "GB300", "fp8-mx"): 5,
}
"""Chunks per pipeline rank that a published table leaves out and its recipe states."""
_FSDP = {"nemotron_3_ultra": 64}
"""Ranks among which Megatron-FSDP shards everything, in recipes whose table says "distributed optimizer"
(Megatron-Bridge 067f987, src/megatron/bridge/perf_recipes/nemotronh/common.py:39, 149)."""
_TP_EXPERTS = re.compile("NeMo|Megatron-Core|Megatron-LM")
"""Frameworks that divide each expert over the tp ranks where nothing else is said, and these are enough
(megatron/core/model_parallel_config.py:506). Megatron-Bridge's recipes all say: over one."""
_SHAPES: dict[ModelSpec, Shape] = {}
"""Shapes already computed, by model."""


_TASKS = ("", "pretrain", "pretrain (resumed)", "sft", "lora", "rl-train", "rl-train lora")
"""Tasks whose step is a training step; in reinforcement learning, the trainer's alone."""


def _unstated_zero(row: Row) -> str:
    """Return the ZeRO level of a row that does not state it. NeMo's recipes shard the optimizer's state:
    mcore_distributed_optim (NeMo-Framework-Launcher 26e42fa,
    launcher_scripts/conf/training/llama/llama2_7b.yaml:150)."""
    if row["framework"] in ("MaxText", "PAX") or "FSDP" in row["sharding"]:
        return "3"
    return "1" if row["framework"].startswith(("NeMo", "Megatron-Bridge")) else "0"


def case(row: Row) -> Case:
    """Turn a row into a Case. Raises Unspecified with the reason if the row is incomplete or contradicts itself."""
    model, stack = model_of(row), stacks.stack_of(row)
    gpus = _gpus(row)
    try:
        strategy, batch, seq = _strategy(row, stack.name, gpus)
        job = Job(batch, seq, Precision("float16" if row["precision"] == "fp16" else "bfloat16"))
    except InputError as error:
        raise Unspecified(str(error)) from None
    if row["task"] not in _TASKS:
        raise Unspecified(f"task {row['task']} is not modelled")
    placed = layout(strategy, job, model.layers, stacks.number_format(row))
    # Tests too small for their time to mean anything, and pipelines run before a fix, count for memory only.
    timed = "MEMORY only" not in row["notes"] and (strategy.pp == 1 or "after_pp_fix=False" not in row["notes"])
    measured_s = row.step_s(gpus, batch) if timed else None
    if model not in _SHAPES:
        try:
            _SHAPES[model] = shape(model)
        except InputError as error:
            raise Unspecified(str(error)) from None
    options = _options(row)
    sizes = extended_shape(_SHAPES[model], replace(options, mtp=depths_of(row)))
    system = systems.system_of_row(row)
    return Case(
        row,
        model,
        job,
        strategy,
        sizes,
        layout_with_options(placed, options),
        system,
        stack,
        measured_s,
        timed,
        options,
    )


_FLASH = re.compile(r"\bFA-?([23])\b|flash-?attn-?([23])\b", re.IGNORECASE)
"""FlashAttention by version, in a row's words."""
_PACKED = re.compile(r"(?:offline|in_batch)(?::(\d+))?$")
"""Documents packed into sequences, in the column `packing`, and their mean tokens."""
_RANK = re.compile(r"\b(?:rank|dim):? (\d+)")
"""An adapter's rank in the column `peft`; 16 where it is not stated, which hardly matters."""
_BASE = re.compile(r"\bbase (nf4-double|nf4|int8|gptq|float8)\b")
"""Format of the frozen weights, in the same column."""
_BUCKET = re.compile(r"\breduce_bucket_size (\d+)")
"""DeepSpeed's bucket, in a row's words."""
_TARGETS = re.compile(r"target_modules: \[([^]]*)\]")
_MLP_MODULES = re.compile(r"fc|mlp|gate|up_|down_|all")
_QKV_MODULES = re.compile(r"(\s*(linear_qkv|attention_qkv|[qkv]_proj)\s*,?)+")
_QKV_ALONE = ("llama3-70b",)
"""Models with adapters on `linear_qkv` alone, which Megatron-Bridge's recipes say and its tables leave out (573cd8b,
scripts/performance/configs/llama/llama3_llm_finetune.py, llama3_70b_lora_config_h100)."""


def _gpus(row: Row) -> int:
    gpus = row.count("gpus")
    if row.group == "megatron-ci-golden/small":
        gpus = gpus or _CI_GPUS
    if not gpus:
        raise Unspecified("the number of GPUs is not stated")
    return gpus


def _strategy(row: Row, stack: str, gpus: int) -> tuple[Strategy, int, int]:
    """Return a row's strategy, global batch and sequence length. Raises Unspecified, and InputError for a strategy
    that cannot be."""
    tp, pp, cp, dp = _degrees(row, gpus)
    batch, seq, micro = _batch(row, dp, pp)
    zero = row["zero_stage"] or _unstated_zero(row)
    shard = row.count("fsdp_shard") or _FSDP.get(row["model"].lower())
    if zero not in ("0", "1", "2", "3") or row["model"].lower() in _FSDP:
        zero = "3"
    if shard is None and row["framework"] in ("MaxText", "PAX"):
        shard = _JAX_SHARD
    ep = row.count("ep", 1) or 1
    over_tp = row.moe and _TP_EXPERTS.match(row["framework"]) and dp * cp % ep == 0
    chunks = row.count("vpp") or _CHUNKS.get((row.group, row["model"], row["gpu"], row["precision"]), 1)
    strategy = Strategy(
        dp=dp,
        zero=int(zero) if dp > 1 or cp > 1 or stack == "deepspeed" else 0,  # type: ignore[arg-type]
        shard=shard if shard and dp % shard == 0 and dp > 1 and zero != "0" else None,
        tp=tp,
        sp=tp > 1 and (row["sp"] in ("1", "on") or (row["sp"] == "" and "nemo" in stack)),
        cp=cp,
        ulysses=cp if stack == "deepspeed" or row["cp_comm"].startswith(_HEAD_EXCHANGES) else 1,
        ep=ep,
        etp=row.count("etp", tp if over_tp else 1) or 1,
        pp=pp,
        virtual=chunks if pp > 1 else 1,
        micro_batch=micro,
        recompute=stacks.named_modules(row) or stacks.recomputation(row),
    )
    return strategy, batch, seq


def _degrees(row: Row, gpus: int) -> tuple[int, int, int, int]:
    """Return tp, pp, cp and dp. Raises Unspecified if their product is not the number of GPUs."""
    degrees = {name: row.count(name) for name in ("tp", "pp", "cp", "dp")}
    stated = prod(1 if degree is None else degree for degree in degrees.values())
    if degrees["dp"] is None and stated and gpus % stated == 0 and degrees["tp"]:
        degrees["dp"], stated = gpus // stated, gpus
    if stated != gpus and not any(degrees.values()):
        raise Unspecified("the degrees tp, pp, cp and dp are not stated")
    if stated != gpus:
        factors = " x ".join(f"{name}={'?' if d is None else d}" for name, d in degrees.items())
        raise Unspecified(f"{factors} is not gpus={gpus}")
    tp, pp, cp, dp = (degrees[name] or 1 for name in ("tp", "pp", "cp", "dp"))
    return tp, pp, cp, dp


def _batch(row: Row, dp: int, pp: int) -> tuple[int, int, int]:
    """Return the global batch, the sequence length and the micro-batch. Raises Unspecified."""
    batch, seq, micro, steps = (row.count(name) for name in ("gbs", "seq_len", "mbs", "grad_accum"))
    if not seq:
        raise Unspecified("the sequence length is not stated")
    if not batch and micro and pp == 1:
        batch = micro * dp * (steps or 1)  # a rate per GPU hardly depends on the accumulation
    if not batch:
        raise Unspecified("the global batch is not stated")
    if not micro and dp and steps:
        micro = batch // (dp * steps)
    if not micro:
        raise Unspecified("the micro-batch is not stated")
    if row.family == "torchtitan" and pp > 1:
        micro = 1
    accumulation = steps or batch // (micro * dp)
    if micro * accumulation * dp != batch:
        raise Unspecified(f"mbs={micro} x grad_accum={accumulation} x dp={dp} is not gbs={batch}")
    return batch, seq, micro


_OVERLAPPED = re.compile("overlap_moe_expert_parallel_comm|1f1b EP overlap", re.IGNORECASE)
"""Exchanges of tokens during another micro-batch's compute, in a row's words."""


_HEAD_EXCHANGES = ("a2a", "all-to-all")
"""Beginnings of the column `cp_comm` where context parallelism exchanges heads; DeepSpeed's always does."""
_DISPATCH = {"alltoall": "all_to_all", "allgather": "all_gather", "deepep": "deepep", "hybridep": "hybridep"}
"""Transports of tokens to their experts, in the column `dispatcher`."""
_REDUCED = {"bf16": "bfloat16", "fp32": "float32"}
"""Types of gradients over the data axis, in the column `grad_reduce_dtype`."""
_HOST_SHARE = re.compile(r"\boptimizer (\d+)%")
"""Share of the optimizer on the host, in the column `offload`."""
_PRIME_RL = "prime-rl"
"""A framework whose trainer of policies computes head and loss in slices of 8,192 tokens, and whose adapters are on
experts too (PrimeIntellect-ai/prime-rl 0081765, src/prime_rl/configs/trainer.py, `fused_lm_head_chunk_size` and
`LoRAConfig.target_modules`); its finetuning writes all logits."""


def _targets(row: Row) -> str:
    """Return the modules that have adapters: `qkv`, `attention`, `experts` or `linear`, the default."""
    named = _TARGETS.search(row["peft"])
    if named is None and row["framework"].startswith(_PRIME_RL):
        return "experts"
    if named is None:
        alone = row["framework"] == "Megatron-Bridge" and row["model"] in _QKV_ALONE
        return "qkv" if alone else "linear"
    if _QKV_MODULES.fullmatch(named[1]):
        return "qkv"
    return "linear" if _MLP_MODULES.search(named[1]) else "attention"


def _options(row: Row) -> StackOptions:
    """Return the options stated in a row's columns `routing`, `dispatcher`, `cuda_graphs`, `offload`,
    `grad_reduce_dtype`, `options`, `packing`, `task` and `peft`.
    If `routing` is blank, a benchmark's pretraining is taken to balance its experts, other tasks to use a learned
    router. Packed documents fill a sequence each where `packing` does not say their mean length."""
    trains = row["routing"] == "real router" or (not row["routing"] and not row["task"].startswith("pretrain"))
    captured = row["cuda_graphs"]
    graphs = "full" if "full_iteration" in captured else "modules" if captured not in ("", "none") else captured
    flash = _FLASH.search(row["options"])
    bucket = _BUCKET.search(row["options"])
    rank, base = _RANK.search(row["peft"]), _BASE.search(row["peft"])
    on_host = _HOST_SHARE.search(row["offload"])
    packed, adapters = _PACKED.match(row["packing"]), row["task"].endswith("lora")
    return StackOptions(
        overlap_experts="on" if _OVERLAPPED.search(row["options"]) else "auto",
        lora=(int(rank[1]) if rank else 16) if adapters else 0,
        lora_targets=_targets(row) if adapters else "linear",  # type: ignore[arg-type]
        base=base[1] if base else "auto",  # type: ignore[arg-type]
        bucket_elements=int(bucket[1]) if bucket else 0,
        document=int(packed[1] or row.count("seq_len") or 0) if packed else 0,
        attention=f"flash{flash[1] or flash[2]}" if flash else "auto",  # type: ignore[arg-type]
        routing="learned" if row.moe and trains else "auto",
        graphs=graphs or "auto",  # type: ignore[arg-type]
        dispatch=_DISPATCH.get(row["dispatcher"], "auto"),  # type: ignore[arg-type]
        reduce=_REDUCED.get(row["grad_reduce_dtype"], "auto"),  # type: ignore[arg-type]
        optimizer_offload=int(on_host[1]) / 100 if on_host else 0.0,
        cross_entropy="linear" if row["framework"].startswith(_PRIME_RL) and "rl" in row["task"] else "auto",
        activation_offload=(row.count("layers") or 0) if row["offload"] == "activations to CPU" else 0,
    )


def cases(rows: list[Row]) -> tuple[list[Case], list[tuple[Row, str]]]:
    """Split rows into those that can be predicted, and the others with the reason."""
    return readable(rows, case, Unspecified)
