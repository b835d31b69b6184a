"""Software stacks by name: the stack that each derives from, what is known of its code, what it can run, and its
policy (cost/ledger/policy.py).

`STACKS` holds one entry per stack and release. Fitted numbers are in fitted_constants.json; a stack without one
there inherits that of its parent. `profile` puts the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from phalanx.cost.analytic.fitted_constants import resolve
from phalanx.cost.analytic.profile import FIELDS, Profile
from phalanx.cost.ledger.policy import (
    ACCELERATE,
    COMPOSER,
    DEEPSPEED,
    FSDP,
    JAX,
    MEGATRON,
    MEGATRON_2021,
    NANOTRON,
    PHALANX,
    TORCHTITAN,
    Policy,
)
from phalanx.frameworks.registry import ROWS
from phalanx.frameworks.stack import Stack as Row
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class Stack:
    """A stack or release: `parent`, the stack it derives from, and `built`, the fields known from its code. What is
    None is as the parent has it."""

    parent: str = ""
    built: Mapping[str, float] = field(default_factory=dict)
    policy: Policy | None = None
    zero: tuple[int, ...] | None = None
    """ZeRO levels that it has."""
    zero_in_pipeline: tuple[int, ...] | None = None
    """ZeRO levels that it combines with a pipeline."""
    schedules: tuple[str, ...] | None = None
    """Pipeline schedules that it runs; none: it has no pipeline."""
    ulysses: bool | None = None
    """Whether context parallelism may exchange tokens for heads."""
    without: tuple[str, ...] | None = None
    """What it has not, of _LATER."""


@dataclass(frozen=True)
class Capabilities:
    """What a stack can run: fields as in Stack, resolved."""

    zero: tuple[int, ...]
    zero_in_pipeline: tuple[int, ...]
    schedules: tuple[str, ...]
    ulysses: bool
    without: tuple[str, ...]

    @property
    def conditions(self) -> str:
        """What holds of all strategies that it runs, beside the other fields (spec/strategy/where.py); "" if nothing
        does."""
        return ", ".join(_LATER[name] for name in self.without)

    def refusal(self, s: Strategy) -> tuple[str, object, str, str] | None:
        """Return (field, value, reason, mend) if the stack does not run a strategy, else None."""
        if s.pp > 1 and s.schedule not in self.schedules:
            has = f"has {', '.join(self.schedules)}" if self.schedules else "has no pipeline"
            return "schedule", s.schedule, f"is not in the stack, which {has}", "use one of these, or pp=1"
        if s.ulysses > 1 and not self.ulysses:
            return "ulysses", s.ulysses, "is not in the stack, whose context parallelism is a ring", "leave it out"
        used = {"sp": s.sp, "cp": s.cp > 1, "recompute": s.recompute.startswith("selective")}
        for name in self.without:
            if used[name]:
                return name, getattr(s, name), "is newer than the stack", f"use {_LATER[name]}"
        levels = self.zero if s.pp == 1 else self.zero_in_pipeline
        if s.shards > 1 and s.zero not in levels:
            where = "with a pipeline" if s.pp > 1 and s.zero in self.zero else "at all"
            has = " or ".join(f"zero={level}" for level in levels)
            return "zero", s.zero, f"is not in the stack {where}", f"use {has}"
        return None


_LATER = {"sp": "sp=0", "cp": "cp=1", "recompute": "recompute not in (selective*)"}
"""Ideas younger than some stacks, and what holds of strategies without them: sequence parallelism and selective
recomputation (Korthikanti et al., May 2022; Megatron-LM v3.0), context parallelism (Megatron Core 0.4.0, December
2023, CHANGELOG.md)."""
_SCORES = {"flash": 0.0}
_FP16_GRADIENTS = {"gradient_bytes": 2.0}
_LATE = {"dp_overlap": 0.0, "gather_overlap": 0.0, "tp_overlap": 0.0, "pp_overlap": 0.0}
# NVIDIA's performance recipes: userbuffers for tensor parallelism; parameters in 8 bits (NeMo v2.1.0,
# nemo/collections/llm/recipes/precision/mixed_precision.py:53; Megatron-Bridge v0.4.0,
# src/megatron/bridge/training/mixed_precision.py:223, 256, 294); models without dropout, so without its masks
# (NeMo-Framework-Launcher 26e42fa, launcher_scripts/conf/training/llama/llama3_70b.yaml:73).
_RECIPE = {"tp_split": 1.0, "cast_parameters": 1.0, "kept_hidden": 8.0}
# Gradients accumulated and reduced in the type of parameters, bf16 (Megatron-LM core_v0.14.0,
# megatron/core/distributed/param_and_grad_buffer.py, where grad_reduce_in_fp32 is off): off in NeMo from v2.2 on
# (nemo/collections/llm/recipes/llama3_70b.py:246) and in all of Megatron-Bridge's performance recipes (v0.4.0,
# scripts/performance/configs/llama/llama3_llm_pretrain.py:43).
_BF16_GRADIENTS = {"gradient_bytes": 2.0, "accumulated_bytes": 2.0, "kept_bytes": 4.0, "whole_bytes": 16.0}
# Probabilities multiply inside the experts from core_v0.13 on (megatron/core/transformer/moe/experts.py:246), so that
# their result is not kept.
_PROBABILITIES_INSIDE = {"kept_routed": 2.0}
_APART = {"tp_overlap": 0.0, "dp_overlap": 0.0, "gather_overlap": 0.0}
_PER_OP = {"per_op": 1.0, "kept_logit": 14.0}
_MEGATRON_SCHEDULES = tuple(name for name, facts in SCHEDULES.items() if facts.in_megatron)
# torch.distributed.pipelining's: no idle ranks on purpose, and of zero-bubble ones those in a V.
_TORCH_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v", "dualpipe-v")

STACKS: dict[str, Stack] = {
    "any": Stack(
        policy=MEGATRON,
        zero=(0, 1, 2, 3),
        zero_in_pipeline=(0, 1, 2, 3),
        schedules=_MEGATRON_SCHEDULES,
        ulysses=True,
        without=(),
    ),
    # Megatron-LM before flash attention and before overlap of gradients (Narayanan et al. 2021): fused softmax and
    # bias+GELU, gradients of fp16 reduced in fp16 after the last backward pass.
    # Its distributed optimizer (level 1) is of March 2022 (megatron/optimizer/distrib_optimizer.py, 28b63ec).
    "megatron-2020": Stack(
        "any",
        _SCORES | _FP16_GRADIENTS | _LATE | {"launches": 30.0},
        policy=MEGATRON_2021,
        zero=(0,),
        zero_in_pipeline=(0,),
        ulysses=False,
        without=("sp", "cp", "recompute"),
    ),
    "megatron-2021": Stack("megatron-2020"),
    "megatron-2022": Stack("megatron-2021", zero=(0, 1), zero_in_pipeline=(0, 1), without=("cp",)),
    # vTrain's runs in one node: a rank has vocab // tp logits, as in the model that it profiles (VIA-Research/vTrain
    # f8dda84, src/model/gpt_modeling.py:38).
    "vtrain": Stack("megatron-2022", {"pads_vocab": 0.0, "joined": 1.0}),
    # Forked from Megatron-LM of 2021 (bigscience-workshop/Megatron-DeepSpeed).
    "megatron-deepspeed-2022": Stack(
        "megatron-2021", policy=DEEPSPEED, zero=(0, 1, 2, 3), zero_in_pipeline=(0, 1), schedules=("1f1b",)
    ),
    "megatron-deepspeed-2021": Stack("megatron-deepspeed-2022"),
    # Its bf16 optimizer accumulates gradients in fp32 besides those of the backward pass.
    "megatron-deepspeed-2022-bf16": Stack("megatron-deepspeed-2022"),
    # Megatron-Core on Transformer Engine; NeMo and Megatron-Bridge are recipes over it.
    # Transformer Engine keeps a product's input as it was quantised: transformer_engine/pytorch/module/linear.py:616,
    # layernorm_linear.py:469 (d0067d0).
    # Buckets: max(40e6, 1e6 dp) parameters (Megatron-LM d98e8a6,
    # megatron/core/distributed/distributed_data_parallel.py:134).
    # Levels 2 and 3 are Megatron-FSDP's, which is combined with tp, ep and cp but not with a pipeline
    # (docs/source/api-guide/custom_fsdp.md; NVIDIA/Megatron-LM issue 1455).
    "megatron-core": Stack(
        "any",
        {"kept_cast": 1.0, "rank_bucket_bytes": 4e6, "kept_hidden": 8.0} | _PROBABILITIES_INSIDE,
        zero_in_pipeline=(0, 1),
    ),
    # With dropout, which models of before 2023 and its tests have, and its masks.
    "megatron-core-dropout": Stack("megatron-core", {"kept_hidden": 10.0}),
    # With FlashAttention 2, the fastest until cuDNN 9 (2024).
    "megatron-core-flash2": Stack("megatron-core-dropout", {"portable": 1.0}),
    # Without flash attention.
    "megatron-core-unfused": Stack("megatron-core-dropout", _SCORES),
    "nemo-23.05": Stack("megatron-core-dropout", zero=(0, 1), ulysses=False, without=("cp",)),
    "nemo-24.03": Stack("nemo-24.11"),
    # Megatron-FSDP came with Megatron Core 0.11, of March 2025.
    "nemo-24.11": Stack("megatron-core", _RECIPE | {"kept_routed": 4.0}, zero=(0, 1)),
    # Its largest models reduce gradients in bf16 before its others do (NeMo-Framework-Launcher 26e42fa,
    # launcher_scripts/conf/training/nemotron/nemotron_340b.yaml:167, mixtral/mixtral_8x7b.yaml:153).
    "nemo-24.03-bf16": Stack("nemo-24.03", _BF16_GRADIENTS),
    "nemo-24.11-bf16": Stack("nemo-24.11", _BF16_GRADIENTS),
    "nemo-25.02": Stack("nemo-24.11", _BF16_GRADIENTS, zero=(0, 1, 2, 3)),
    "nemo-25.04": Stack("nemo-25.02"),
    "nemo-25.05": Stack("nemo-25.04"),
    "megatron-bridge-25.09": Stack("megatron-core", _RECIPE | _BF16_GRADIENTS | _PROBABILITIES_INSIDE),
    "megatron-bridge-25.11": Stack("megatron-bridge-25.09"),
    # Tokens are dispatched by DeepEP or HybridEP (Megatron-Bridge 0426418,
    # scripts/performance/configs/deepseek/deepseek_workload_base_configs.py, moe_flex_dispatcher_backend).
    "megatron-bridge-26.02": Stack("megatron-bridge-25.11", {"sends_once": 1.0}),
    "megatron-bridge-26.02.01": Stack("megatron-bridge-26.02"),
    "megatron-bridge-26.04": Stack("megatron-bridge-26.02"),
    "megatron-bridge-26.04.01": Stack("megatron-bridge-26.04"),
    "megatron-bridge-26.06": Stack("megatron-bridge-26.04"),
    "megatron-bridge-26.06.01": Stack("megatron-bridge-26.06"),
    "megatron-bridge-26.08": Stack("megatron-bridge-26.06.01"),
    # Run without overlap (SimuMax, docs/b200/b200_real_repro_guide.md, section 3.3).
    "simumax-b200": Stack("megatron-core", _APART | {"stand_in": 1.0, "kept_hidden": 8.0}),
    # PyTorch FSDP around eager modules, one kernel per operation.
    # At level 2 with a pipeline fully_shard does what it does at 3: parameters stay, and are sharded between steps.
    "eager": Stack(
        "any",
        {"portable": 1.0, "plain": 1.0, "launches": 40.0, "pp_overlap": 0.0},
        policy=FSDP,
        zero_in_pipeline=(0, 1, 3),
        schedules=_TORCH_SCHEDULES,
        ulysses=False,
    ),
    # fully_shard and DDP by hand, around modules of torch: fused norms and attention, a gated MLP of four results, a
    # loss in fp32 (its log-softmax, and two gradients). Held against the library, tensor by tensor
    # (tests/frameworks/test_policies_observed.py).
    "fsdp2": Stack(
        "eager",
        {"kept_hidden": 8.0, "kept_ffn": 4 / 3, "kept_logit": 12.0, "every_tensor": 1.0},
        zero=(0, 2, 3),
        zero_in_pipeline=(0, 3),
    ),
    "accelerate": Stack("fsdp2", policy=ACCELERATE, zero_in_pipeline=(), schedules=()),
    "nanotron": Stack(
        "eager",
        # Gradients are accumulated in fp32 besides those of the backward pass; collectives take lists of tensors.
        {
            "listed": 4.0,
            # Of the ultra-scale benchmark's 1,014 jobs over several nodes that measured their links, 740.
            "held_up": 0.73,
            "balanced": 1.0,
            "whole_bytes": 18.0,
            "replica_bytes": 2.0,
            "kept_bytes": 10.0,
            "shard_bytes": 14.0,
            "buffers": 2.0,
            # The results of both row-wise products, until they are scattered.
            "given": 2.0,
            # NCCL's buffers of groups over three axes: of 79.6 GiB, runs that need more than 76 failed.
            "context_bytes": 3.9e9,
        },
        policy=NANOTRON,
        # Levels: nanotron 2411b02, src/nanotron/helpers.py:409; schedules: parallel/pipeline_parallel/engine.py:175,
        # 235.
        zero=(0, 1),
        zero_in_pipeline=(0, 1),
        schedules=("gpipe", "1f1b"),
    ),
    # DeepSpeed's engine around eager modules. Buckets: 5e8 elements of the gradients' type (DeepSpeed edaa722,
    # deepspeed/runtime/zero/config.py:113); no run of it is in the table, so the rest is as for FSDP.
    "deepspeed": Stack(
        "eager",
        {"bucket_bytes": 1e9},
        policy=DEEPSPEED,
        zero=(0, 1, 2, 3),
        zero_in_pipeline=(0, 1),
        schedules=("1f1b",),
        ulysses=True,
    ),
    # Before its pipeline was fixed: runs that need more than 70 GiB failed.
    "nanotron-early": Stack("nanotron", {"waits": 1.0, "context_bytes": 10.4e9}),
    "llm-foundry": Stack(
        "eager", {"launches": 24.0}, policy=COMPOSER, zero=(0, 2, 3), zero_in_pipeline=(), schedules=()
    ),
    "llm-foundry-pure": Stack("llm-foundry", {"gradient_bytes": 2.0}),
    # Logits in 2 bytes and in 4, their softmax and its gradient. Norms and rotations operation by operation in fp32,
    # where nanotron and llm-foundry call fused kernels: 36 bytes of a norm, 6 of a residual, 20 of a rotation.
    "torchtitan-eager": Stack(
        "eager",
        {"launches": 55.0, "hidden_bytes": 2 * 36.0 + 2 * 6.0 + 1.25 * 20.0, "kept_ffn": 4 / 3} | _PER_OP,
        policy=TORCHTITAN,
        zero=(0, 2, 3),
        zero_in_pipeline=(0, 3),
    ),
    # Compilers that fuse memory-bound operations.
    "compiled": Stack(
        "any", {"plain": 1.0, "launches": 15.0}, policy=JAX, zero=(0, 1, 3), zero_in_pipeline=(0, 1, 3), ulysses=False
    ),
    "torchtitan-compiled": Stack(
        "compiled",
        {"portable": 1.0, "tp_narrow": 1.0} | _PER_OP,
        policy=TORCHTITAN,
        zero=(0, 2, 3),
        zero_in_pipeline=(0, 3),
        schedules=_TORCH_SCHEDULES,
    ),
    # With the loss compiled too: logits and their gradient in 2 bytes.
    "torchtitan-2025-06": Stack("torchtitan-compiled", {"kept_logit": 4.0}),
    # Parameters are gathered in 8 bits.
    "torchtitan-narrow-gather": Stack("torchtitan-2025-06", {"parameter_bytes": 1.0}),
    # Collectives of tensor parallelism apart from the products; "async TP" would cut and overlap them.
    "torchtitan-vanilla-tp": Stack("torchtitan-2025-06", {"tp_overlap": 0.0}),
    "maxtext": Stack("compiled", {"launches": 0.0}),
    "pax": Stack("compiled", {"launches": 0.0}),
    # Our own runtime: eager PyTorch, buckets overlapped. On Hopper torch takes cuDNN's attention (docs/gpu.md); that
    # it takes flash attention 2 on Ampere is not told apart.
    # What its blocks keep is counted tensor by tensor (cost/memory/block.py, moe.py).
    "phalanx": Stack(
        "eager",
        {
            "portable": 0.0,
            "kept_hidden": 8.0,
            "kept_inside": 2 / 3,
            "kept_logit": 2.0,
            "result_again": 1.0,
            "every_tensor": 1.0,
            "unit_buffers": 1.0,
            "by_work": 1.0,
        },
        policy=PHALANX,
        zero_in_pipeline=(0, 1, 2, 3),
        schedules=tuple(SCHEDULES),
        ulysses=True,
    ),
}


def profile(name: str, constants: Mapping[str, float] | None = None) -> Profile:
    """Return the Profile of a stack by name. Raises InputError for an unknown stack."""
    chain = lineage(name)
    built: dict[str, float] = {}
    for link in reversed(chain):
        built |= STACKS[link].built
    return Profile(name=name, policy=_inherited(name, "policy"), **(resolve(FIELDS, chain, constants) | built))


def lineage(name: str) -> list[str]:
    """Return a stack, or the one whose constants price a row of frameworks/, and its ancestors, nearest first. Raises
    InputError for an unknown stack."""
    if name not in STACKS and name in ROWS:
        name = ROWS[name].constants
    if name not in STACKS:
        known = {*STACKS, *ROWS}
        raise InputError("--stack", name, "is not a software stack that Phalanx knows", nearest(name, known))
    chain = [name]
    while STACKS[chain[-1]].parent:
        chain.append(STACKS[chain[-1]].parent)
    return chain


def _inherited(name: str, what: str) -> Any:
    """Return a field of a stack's row, or of its nearest ancestor that has it."""
    return next(value for link in lineage(name) if (value := getattr(STACKS[link], what)) is not None)


def capabilities(name: str) -> Capabilities:
    """Return what a stack can run. Raises InputError for an unknown stack."""
    return Capabilities(**{f.name: _inherited(name, f.name) for f in fields(Capabilities)})


def capabilities_of(row: Row) -> Capabilities:
    """Return the same of a row of frameworks/, which also has rules about combinations."""
    zero = row.strategy["zero"].values or (0, 1, 2, 3)
    has_pipeline = row.strategy["pp"].allows(2)
    schedules = row.strategy["schedule"].values
    names = (tuple(SCHEDULES) if schedules is None else schedules) if has_pipeline else ()
    piped = [z for z in zero if names and _runs_in_pipeline(row, z, names[0])]
    return Capabilities(tuple(zero), tuple(piped), names, row.strategy["ulysses"].allows(2), ())


def _runs_in_pipeline(row: Row, zero: int, schedule: str) -> bool:
    """Whether a row has a ZeRO level together with a pipeline."""
    return row.refusal(Strategy(dp=2, pp=2, zero=zero, schedule=schedule)) is None  # type: ignore[arg-type]


def require_runnable(name: str, s: Strategy) -> None:
    """Require that a stack can run a strategy: by its constants' policy, or by its row, which may have more, such as
    Megatron-FSDP's levels in a pipeline. Raises InputError naming the field that it cannot."""
    wrong = capabilities(name).refusal(s)
    if wrong and not (name in ROWS and capabilities_of(ROWS[name]).refusal(s) is None):
        field_name, value, reason, mend = wrong
        raise InputError(f"strategy.{field_name}", value, reason.replace("the stack", name), mend)
