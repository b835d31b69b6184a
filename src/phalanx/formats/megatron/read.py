"""Megatron-LM's arguments, with what its own `validate_args` derives from them.

    dp = world / (tp pp cp)     virtual = layers / pp / layers of a virtual stage     global batch: micro batch x dp

Source: megatron/training/arguments.py, validate_args.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from phalanx.formats.configuration.reading import Configuration, Facts, Keys, Open, Reading
from phalanx.formats.megatron import layout
from phalanx.formats.megatron.flags import FIELDS, WORDS
from phalanx.spec.errors import InputError


@cache
def arguments() -> tuple[frozenset[str], frozenset[str]]:
    """Return (arguments without effect on a step, arguments whose effect is not modelled), with underscores."""
    table = json.loads((files("phalanx.formats.megatron") / "data" / "arguments.json").read_text())
    return frozenset(table["known"]), frozenset(table["unmodelled"])


def read(c: Configuration) -> Reading:
    """Read Megatron-LM's arguments. Raises InputError for what its validate_args refuses."""
    k = Keys({name.lstrip("-").replace("-", "_"): v for name, v in c.settings.items()})
    tp = k.count("tensor_model_parallel_size") or 1
    pp = k.count("pipeline_model_parallel_size") or 1
    cp = k.count("context_parallel_size") or 1
    ep = k.count("expert_model_parallel_size") or 1
    etp = k.count("expert_tensor_parallel_size") or tp
    dp = None
    if c.world is not None:
        if c.world % (tp * pp * cp):
            reason = f"is not divisible by tp x pp x cp = {tp} x {pp} x {cp} = {tp * pp * cp}"
            raise InputError("world size", c.world, reason, "lower a degree, or use another number of GPUs")
        dp = c.world // (tp * pp * cp)
    micro, batch = k.count("micro_batch_size"), k.count("global_batch_size")
    step_schedule = k.take("step_batch_size_schedule")
    ramp = k.take("rampup_batch_size")
    unsure = ("micro_batch_size" in k.taken and micro is None) or ("global_batch_size" in k.taken and batch is None)
    if batch is None and micro and dp and not unsure and step_schedule is None:
        batch = micro * dp
    accumulation = None
    if batch and micro and dp:
        if batch % (micro * dp):
            reason = f"is not divisible by micro batch x dp = {micro} x {dp}"
            raise InputError("global-batch-size", batch, reason, f"use {-(-batch // (micro * dp)) * micro * dp}")
        accumulation = batch // (micro * dp)
    virtual, layers, mtp = _pipeline(k, pp)
    options = _options(k)
    if mtp:
        options.setdefault("mtp", mtp)
    facts = Facts(
        c.world,
        tp,
        pp,
        dp,
        cp,
        ep,
        etp,
        virtual,
        _zero(k),
        _instances(k, dp),
        k.flag("sequence_parallel") and tp > 1,
        _ulysses(k, cp, options),
        "interleaved" if virtual and virtual > 1 else "1f1b",
        layers,
        "dp/pp/cp/tp" if k.flag("use_tp_pp_dp_mapping") else None,
        micro,
        accumulation,
        batch,
        k.count("seq_length", "encoder_seq_length"),
        _precision(k),
        _recompute(k),
        *_offload(k),
    )
    notes = ("--rampup-batch-size: priced at the batch that the ramp ends with",) if ramp else ()
    model = _model(k)
    known, unmodelled = arguments()
    understood, idle, unknown = k.account(known, unmodelled)
    stack = "megatron-fsdp" if k.settings.get("use_megatron_fsdp") is True else "megatron-core"
    return Reading(c, stack, "", facts, options, model, understood, idle, unknown, notes)


def _pipeline(k: Keys, pp: int) -> tuple[int | None, str | None, int]:
    """Return (virtual stages, blocks of each chunk, depths of multi-token prediction)."""
    per = k.count("num_layers_per_virtual_pipeline_stage")
    stages = k.count("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    text = k.take("pipeline_model_parallel_layout")
    given = [
        n
        for n, v in (
            ("num-layers-per-virtual-pipeline-stage", per),
            ("num-virtual-stages-per-pipeline-rank", stages),
            ("pipeline-model-parallel-layout", text),
        )
        if v is not None
    ]
    if len(given) > 1:
        raise InputError(f"--{given[0]}", None, f"does not go with --{given[1]}", "leave one of them out")
    if text is not None:
        blocks, mtp = layout.read(str(text).replace("\\", ""))
        if len(blocks) % pp:
            reason = f"has {len(blocks)} chunks, which do not divide over {pp} pipeline ranks"
            raise InputError("--pipeline-model-parallel-layout", text, reason)
        return len(blocks) // pp, "/".join(map(str, blocks)), mtp
    if stages:
        return stages, None, 0
    if per:
        layers = k.count("num_layers")
        if layers is None:
            return None, None, 0
        layers += k.flag("account_for_embedding_in_pipeline_split") + k.flag("account_for_loss_in_pipeline_split")
        if layers % pp or layers // pp % per:
            reason = f"{layers} blocks do not divide over {pp} stages of chunks of {per}"
            raise InputError("--num-layers-per-virtual-pipeline-stage", per, reason)
        return layers // pp // per, None, 0
    return 1, None, 0


def _zero(k: Keys) -> int:
    fsdp, fsdp2 = k.flag("use_megatron_fsdp", "use_custom_fsdp"), k.flag("use_torch_fsdp2")
    word = k.take("data_parallel_sharding_strategy")
    distributed, keep = k.flag("use_distributed_optimizer"), k.flag("torch_fsdp2_no_reshard_after_forward")
    if k.take("torch_fsdp2_reshard_after_forward") is False:
        keep = True
    level = k.count("zero_stage", least=0)  # Megatron-DeepSpeed
    if fsdp:
        return int(WORDS["--data-parallel-sharding-strategy"][1].get(str(word or "optim_grads_params"), "3"))
    if fsdp2:
        return 2 if keep else 3
    return level if level is not None else int(distributed)


def _instances(k: Keys, dp: int | None) -> int | None:
    copies = k.count("num_distributed_optimizer_instances") or 1
    return dp // copies if dp and copies > 1 and dp % copies == 0 else None


def _ulysses(k: Keys, cp: int, options: dict[str, Any]) -> int:
    kinds, sizes = k.take("cp_comm_type"), k.take("hierarchical_context_parallel_sizes")
    kind = (kinds[0] if isinstance(kinds, list) else kinds) or "p2p"
    if cp == 1:
        return 1
    if kind == "a2a":
        return cp
    if kind == "a2a+p2p" and isinstance(sizes, list):
        return int(sizes[0])
    if kind == "all_gather" or kind == "allgather":
        options["context"] = "all_gather"
    return 1


def _precision(k: Keys) -> str | None:
    bf16, fp16, eight, four = k.flag("bf16"), k.flag("fp16"), k.take("fp8_format", "fp8"), k.take("fp4_format", "fp4")
    if any(isinstance(k.settings.get(n), Open) for n in ("bf16", "fp16", "fp8", "fp8_format")):
        return None
    if four:
        return "fp4"
    if eight:
        return "fp8"
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _recompute(k: Keys) -> str | None:
    how, method = (
        k.take("recompute_granularity", "activations_checkpoint_granularity"),
        k.take("recompute_method", "activations_checkpoint_method"),
    )
    count, modules = k.count("recompute_num_layers", "checkpoint_num_layers"), k.take("recompute_modules")
    if k.flag("recompute_activations"):
        how = "selective"
    if k.flag("checkpoint_activations"):
        how, method = "full", method or "uniform"
    if isinstance(k.settings.get("recompute_granularity"), Open):
        return None
    if how == "full":
        return "full" if method != "block" and (count or 1) == 1 else f"{method or 'uniform'}:{count or 1}"
    if how == "selective":
        names = modules if isinstance(modules, list) else str(modules).replace(",", " ").split() if modules else []
        return "selective" if names in ([], ["core_attn"]) else "selective:" + "+".join(map(str, names))
    return "none"


def _offload(k: Keys) -> tuple[float, bool]:
    offload, share = k.flag("optimizer_cpu_offload", "cpu_optimizer"), k.take("optimizer_offload_fraction")
    return (float(1.0 if share is None else share) if offload else 0.0), False


def _options(k: Keys) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for flag, field in FIELDS.items():
        table, _, name = field.partition(".")
        if table == "options" and name != "optimizer_offload":
            value = k.take(flag[2:].replace("-", "_"))
            if value is not None and value is not False:
                options[name] = value
    for flag, (field, words) in WORDS.items():
        table, _, name = field.partition(".")
        if table == "options":
            word = k.take(flag[2:].replace("-", "_"))
            if word is not None and str(word) in words:
                options[name] = words[str(word)]
    eight = k.settings.get("fp8_format") or k.settings.get("fp8")
    if "products" in options and not eight:
        del options["products"]
    elif eight and "products" not in options:
        options["products"] = "float8-delayed"
    if options.get("dispatch") in ("deepep", "hybridep") and k.settings.get("moe_token_dispatcher_type") != "flex":
        del options["dispatch"]
    if k.flag("tp_comm_overlap"):
        options["tp_overlap"] = "userbuffers"
    if k.flag("cross_entropy_loss_fusion"):
        options["cross_entropy"] = "fused"
    if k.flag("overlap_moe_expert_parallel_comm"):
        options["overlap_experts"] = "on"
    if k.flag("fp8_param_gather"):
        options["narrow_parameters"] = "on"
    if k.take("optimizer") == "muon":
        options["optimizer"] = "muon"
    if k.flag("grad_reduce_in_bf16"):
        options["reduce"] = "bfloat16"
    k.take("accumulate_allreduce_grads_in_fp32", "use_precision_aware_optimizer", "overlap_grad_reduce")
    k.take("overlap_param_gather")
    return options


def _model(k: Keys) -> dict[str, Any]:
    model: dict[str, Any] = {}
    for flag, field in FIELDS.items():
        table, _, name = field.partition(".")
        if table in ("model", "job"):
            value = k.take(flag[2:].replace("-", "_"))
            if table == "model" and value is not None:
                model[name] = value
    for name in ("swiglu", "squared_relu", "disable_bias_linear", "add_qkv_bias", "group_query_attention"):
        model[name] = k.flag(name)
    for name in ("position_embedding_type", "normalization", "rotary_percent", "moe_layer_freq", "vocab_size"):
        value = k.take(name)
        if value is not None:
            model[name] = value
    model["tied"] = not k.flag("untie_embeddings_and_output_weights")
    model["multi_latent_attention"] = k.flag("multi_latent_attention")
    return model
