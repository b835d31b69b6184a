"""Megatron-LM's arguments that are neither layout nor model: options of the stack, the optimizer, the mesh's order.

The inverse of frameworks/megatron/write.py. An option that a flag states is set even at the release's default."""

from typing import Any

from phalanx.frameworks.keys import key_table
from phalanx.frameworks.megatron.patterns import Flag
from phalanx.frameworks.values import count, truth

KEYS = key_table("megatron")
_MIB = 2**20
_FLASH = ("", "_v1", "_v2", "_triton", "_builder")
"""Kernels of FlashAttention, each a flag of Megatron-DeepSpeed (deepspeedai 4efb479d, megatron/arguments.py:927)."""


def options(flag: Flag, experts: bool, cp: int | None) -> dict[str, Any]:
    """Return the fields of StackOptions that the arguments set. `experts`: whether the model has any."""
    result: dict[str, Any] = {
        "first_stage_layers": count(flag("decoder_first_pipeline_num_layers", "options.first_stage_layers")),
        "last_stage_layers": count(flag("decoder_last_pipeline_num_layers", "options.last_stage_layers")),
        "activation_offload": count(flag("cpu_offloading_num_layers", "options.activation_offload")),
        "mtp": count(flag("mtp_num_layers", "options.mtp")),
    }
    for end in ("embedding", "loss"):
        named = f"account_for_{end}_in_pipeline_split"
        result[f"{end}_as_layer"] = truth(flag(named, f"options.{end}_as_layer"))
    result |= _products(flag) | _state(flag)
    if cp and cp > 1 and _first(flag("cp_comm_type", "options.context")) in ("all_gather", "allgather"):
        result["context"] = "all_gather"
    backend = KEYS.value("options.attention", flag("attention_backend", "options.attention"))
    local = flag("transformer_impl", "options.attention") == "local"
    fast = any([truth(flag(f"use_flash_attn{kind}", "options.attention")) for kind in _FLASH])
    result["attention"] = backend or ("flash" if fast else "unfused" if local else None)
    if truth(flag("cross_entropy_loss_fusion", "options.cross_entropy")):
        impl = flag("cross_entropy_fusion_impl", "options.cross_entropy", "native")
        result["cross_entropy"] = KEYS.value("options.cross_entropy", impl)
    if truth(flag("tp_comm_overlap", "options.tp_overlap")):
        result["tp_overlap"] = "userbuffers"
    result["graphs"] = _graphs(flag, experts)
    result |= _dispatch(flag) if experts else {}
    return {name: value for name, value in result.items() if value}


def with_exposed(
    options: dict[str, Any], flag: Flag, sequence_parallel: bool, replicas: int | None, zero: int | None
) -> dict[str, Any]:
    """Return options with the communication that the arguments do not overlap with computing: the price of a release
    overlaps it by default."""
    reduces = flag("overlap_grad_reduce", "options.dp_overlap", False)
    gathers = flag("overlap_param_gather", "options.dp_overlap", False)
    products = flag("tp_comm_overlap", "options.tp_overlap", False)
    result = dict(options)
    if sequence_parallel and products is not None:
        result.pop("tp_overlap", None)
        result |= {} if truth(products) else {"tp_overlap": "none"}
    if (replicas or 2) > 1 and reduces is not None and gathers is not None:
        if not truth(reduces):
            result["dp_overlap"] = "none"
        elif zero and not truth(gathers):
            result["dp_overlap"] = "reduce"
    return result


def _first(value: Any) -> Any:
    """Return a value, or the first of a list: context parallelism may name a kind for each block."""
    return value[0] if isinstance(value, list) and value else value


def _products(flag: Flag) -> dict[str, Any]:
    """Return the format of matrix products: --fp8-format with its recipe (delayed where none is named), or fp4."""
    eight = flag("fp8_format", "options.products") or flag("fp8", "options.products")
    four = flag("fp4_format", "options.products")
    recipe = str(flag("fp8_recipe", "options.products", "delayed"))
    narrow = truth(flag("fp8_param_gather", "options.narrow_parameters"))
    narrow = narrow or truth(flag("fp4_param_gather", "options.narrow_parameters"))
    if not eight and not four:
        return {}
    return {
        "products": "nvfp4" if four else KEYS.value("options.products", recipe) or "float8",
        "narrow_parameters": "on" if narrow else None,
    }


def _state(flag: Flag) -> dict[str, Any]:
    """Return the options of the types of gradients and of the optimizer's state, and of state on the host. Narrow
    types of state take effect with --use-precision-aware-optimizer alone."""
    result: dict[str, Any] = {}
    aware = truth(flag("use_precision_aware_optimizer", "options.first_moment"))
    for name in ("first_moment", "second_moment", "master", "gradients"):
        key, _ = KEYS.setting(f"options.{name}", "float32")
        word = flag(key.removeprefix("--").replace("-", "_"), f"options.{name}")
        if word is not None and (aware or name == "gradients" or word == "fp32"):
            result[name] = KEYS.value(f"options.{name}", word)
    if truth(flag("grad_reduce_in_bf16", "options.reduce")):
        result["reduce"] = "bfloat16"
    flag("accumulate_allreduce_grads_in_fp32", "options.gradients")  # what bf16 does by itself
    offloads = truth(flag("optimizer_cpu_offload", "options.optimizer_offload"))
    share = flag("optimizer_offload_fraction", "options.optimizer_offload", 1.0)
    if offloads and isinstance(share, int | float):
        result["optimizer_offload"] = float(share)
    if str(flag("optimizer", "job.optimizer", "adam")) in ("muon", "dist_muon"):
        result["optimizer"] = "muon"
    return result


def _dispatch(flag: Flag) -> dict[str, Any]:
    """Return the options of how tokens reach their experts; Megatron's default is allgather."""
    kind = str(flag("moe_token_dispatcher_type", "options.dispatch", "allgather"))
    backend = str(flag("moe_flex_dispatcher_backend", "options.dispatch", "deepep"))
    flag("moe_enable_deepep", "options.dispatch")
    overlapped = truth(flag("overlap_moe_expert_parallel_comm", "options.overlap_experts"))
    words = {"allgather": "all_gather", "flex": backend if backend in ("deepep", "hybridep") else "deepep"}
    balanced = truth(flag("moe_router_force_load_balancing", "options.routing"))
    return {
        "dispatch": words.get(kind),
        "overlap_experts": "on" if overlapped else None,
        "routing": "balanced" if balanced else "learned",
    }


def stated_dispatch(flag: Flag) -> dict[str, Any]:
    """Return how tokens reach the experts of a model that is described elsewhere: what the file's own keys say."""
    keys = {
        "dispatch": "moe_token_dispatcher_type",
        "overlap_experts": "overlap_moe_expert_parallel_comm",
        "routing": "moe_router_force_load_balancing",
    }
    options = {name: value for name, value in _dispatch(flag).items() if value}
    return {name: value for name, value in options.items() if flag(keys[name], f"options.{name}") is not None}


def _graphs(flag: Flag, experts: bool) -> str | None:
    """Return options.graphs; None where no flag states it and the model has no experts, whose price depends on it."""
    stated = flag("cuda_graph_impl", "options.graphs")
    impl = str(stated or "none")
    scopes = [str(flag(f"cuda_graph_{name}", "options.graphs", "")) for name in ("modules", "scope")]
    older = [truth(flag(name, "options.graphs")) for name in ("enable_cuda_graph", "external_cuda_graph")]
    if impl == "none" and not any(older):
        return "none" if experts or stated else None
    return "full" if any("full_iteration" in word for word in (impl, *scopes)) else "modules"


def fields(flag: Flag, gradient_bytes: int) -> dict[str, Any]:
    """Return fields of Strategy that a StatedLayout does not have: the mesh's order and the size of buckets, MiB."""
    result: dict[str, Any] = {}
    if truth(flag("use_tp_pp_dp_mapping", "strategy.order")):
        result["order"] = "dp/pp/cp/tp"
    if size := count(flag("ddp_bucket_size", "strategy.bucket")):
        result["bucket"] = size * gradient_bytes / _MIB
    return result


def job(flag: Flag) -> dict[str, Any]:
    """Return the job's optimizer and clipping, with Megatron's defaults; {} where one is a variable of the shell."""
    name = str(flag("optimizer", "job.optimizer", "adam"))
    sgd = name == "sgd"
    first = flag("sgd_momentum", "job.optimizer.betas", 0.9)
    betas = [flag(f"adam_beta{i}", "job.optimizer.betas", d) for i, d in ((1, 0.9), (2, 0.999))]
    eps, decay = flag("adam_eps", "job.optimizer.eps", 1e-8), flag("weight_decay", "job.optimizer.weight_decay", 0.01)
    clip = flag("clip_grad", "job.clip", 1.0)
    numbers = (first, *betas, eps, decay, clip)
    if not all(isinstance(n, int | float) for n in numbers):  # variables of the shell
        return {}
    optimizer: dict[str, Any] = {"name": "sgd" if sgd else "adamw", "weight_decay": float(decay)}
    optimizer |= {} if sgd else {"eps": float(eps)}
    optimizer["betas"] = (float(first), 0.95) if sgd else tuple(map(float, betas))
    return {"optimizer": optimizer, "clip": float(clip)}
