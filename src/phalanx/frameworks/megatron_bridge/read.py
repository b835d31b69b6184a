"""YAML of NeMo, Megatron-Bridge and NeMo-RL: keys with Megatron's names, in tables that differ by release."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, Partial, StatedLayout
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.megatron import read_options as beyond
from phalanx.frameworks.megatron_bridge import read_container as bridge
from phalanx.frameworks.tables import without_entry
from phalanx.frameworks.values import count, divided, product, truth

_PLACES = (
    *("policy.megatron_cfg.", "policy.dtensor_cfg.", "policy.", "model.data.train_ds.", "", "model.", "train."),
    *("trainer.", "trainer.strategy.", "trainer.plugins.", "optim.config.", "strategy.", "data.", "dataset."),
    *("parallelism.", "distributed_strategy.", "args."),
    *("model.distributed_strategy.", "model.data.", "recipe.", "log.", "config."),
)
_TYPES = {
    "bf16": "bf16", "bf16-mixed": "bf16", "bf16_mixed": "bf16", "bfloat16": "bf16", "16": "fp16", "16-mixed": "fp16",
    "fp16": "fp16", "float16": "fp16", "32": "fp32", "fp32": "fp32", "float32": "fp32",
}  # fmt: skip


_WIDTHS = {
    "fp8_ds": "float8-delayed",
    "fp8_cs": "float8",
    "fp8_sc": "float8-block",
    "fp8_mx": "mxfp8",
    "nvfp4": "nvfp4",
}
"""`--compute_dtype` of the performance scripts (scripts/performance/argument_parser.py)."""
_FIELDS_OF = {
    f"decoder_{end}_pipeline_num_layers": (f"num_layers_in_{end}_pipeline_stage",) for end in ("first", "last")
}
"""Argument of Megatron-LM -> fields of TransformerConfig that these files have in its place."""
_TRAINERS = ("megatron_cfg", "dtensor_cfg")
_SWAPPED = (
    "each example is a pair of sequences, which a reference scores too; its weights come from the host and the"
    " policy's return from there once a step, which is not priced"
)
"""A note about DPO (nemo_rl/algorithms/dpo.py:336; nemo_rl/models/policy/workers/megatron_policy_worker.py:1971,
dtensor_policy_worker_v2.py:1007: use_reference_model)."""
_RANK = 32
"""Default rank of LoRA (nemo/collections/llm/peft/lora.py, src/megatron/bridge/peft/lora.py)."""


def _adapters(keys: Keys) -> dict[str, Any]:
    """Return the options of NeMo's adapters; `peft=lora` of NeMo 2 puts them on every linear layer of a block."""
    first = "model.peft.lora_tuning"  # of NeMo 1 (conf/megatron_gpt_finetuning_config.yaml)
    if keys.take("model.peft.peft_scheme", "options.lora") == "lora":
        targets = keys.take(f"{first}.target_modules", "options.lora_targets", ["attention_qkv"])
        rank = keys.count(f"{first}.adapter_dim", "options.lora")
        wide = any(str(name) == "all" or str(name).startswith("mlp") for name in targets or ())
        where = "linear" if wide else "qkv" if targets == ["attention_qkv"] else "attention"
        return {"lora": rank or _RANK, "lora_targets": where}
    named = keys.config.get("peft")
    if str(named).lower() != "lora" and not isinstance(named, Mapping):
        return {}
    rank = keys.count("peft.dim", "options.lora") if isinstance(named, Mapping) else None
    keys.take("peft", "options.lora") if not isinstance(named, Mapping) else None
    return {"lora": rank or _RANK}


def _release(keys: Keys) -> tuple[str, tuple[str, ...]]:
    """Return the stack of a configuration with the reason: files of NeMo 2 have the degrees in trainer.strategy."""
    trainer = keys.config.get("trainer")
    if not isinstance(trainer, Mapping) or not isinstance(trainer.get("strategy"), Mapping):
        return "megatron-bridge", ()
    paths = ("trainer.plugins.grad_reduce_in_fp32", "trainer.strategy.ddp.grad_reduce_in_fp32")
    narrow = keys.truth(paths, "options.gradients") is False
    stack = "nemo-25.05" if narrow else "nemo-24.11"
    types = "bf16" if narrow else "fp32"
    return stack, (f"trainer.strategy is of NeMo 2, with gradients in {types}: priced as {stack}",)


def _trainer(config: Config) -> str:
    """Return which of NeMo-RL's two trainers a file enables (nemo_rl/models/policy/lm_policy.py:118); "": neither."""
    policy = config.get("policy")
    tables = {name: policy.get(name) for name in _TRAINERS} if isinstance(policy, Mapping) else {}
    return next((name for name, t in tables.items() if isinstance(t, Mapping) and truth(t.get("enabled"))), "")


def _quiet(config: Config, trainer: str) -> Iterator[str]:
    """Yield the paths of tables without effect on the policy's step: of trainers that do not run it, and of models
    that train on other ranks or in other steps (nemo_rl/algorithms/ppo.py, on_policy_distillation.py)."""
    policy = config.get("policy")
    if not isinstance(policy, Mapping):
        return
    for name in _TRAINERS:
        table = policy.get(name)
        off = isinstance(table, Mapping) and table.get("enabled") is not None and not truth(table["enabled"])
        if name in policy and (off or trainer not in ("", name)):
            yield f"policy.{name}"
    yield from (name for name in ("value", "on_policy_distillation") if isinstance(config.get(name), Mapping))


def read(config: Config, world: int | None = None) -> Configuration:
    """Read a file of NeMo, Megatron-Bridge or NeMo-RL: each key is looked for in the tables of every release. A
    degree that is not stated is 1, unless the file overrides a recipe that is missing."""
    if bridge.is_container(config):
        return bridge.read(config, world)
    trainer = _trainer(config)
    quiet = tuple(_quiet(config, trainer))
    for path in quiet:
        config = without_entry(config, path)
    keys = Keys(config)

    def of(meaning: str, *names: str) -> Any:
        value = keys.take(tuple(place + name for name in names for place in _PLACES), meaning)
        other = re.fullmatch(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else None
        return keys.take(other[1], meaning) if other else value  # another key's, as OmegaConf has it

    def degree(meaning: str, *names: str) -> int | None:
        return count(of(meaning, *names))

    # Degrees, and the batch.
    reinforced = isinstance(config.get("policy"), Mapping)
    nodes = keys.count(("trainer.num_nodes", "cluster.num_nodes", "num_nodes"), "world")
    each = keys.count(("trainer.devices", "cluster.gpus_per_node", "devices"), "world")
    nodes, each = _of_policy(keys, nodes, each) if reinforced else (nodes, each)
    world = world or product(nodes, each) or keys.count("num_gpus", "world")
    # A file may inherit what it lacks (NeMo-RL's `defaults`), so degrees have no default.
    tp = degree("strategy.tp", "tensor_model_parallel_size", "tensor_parallel_size")
    pp = degree("strategy.pp", "pipeline_model_parallel_size", "pipeline_parallel_size")
    cp = degree("strategy.cp", "context_parallel_size")
    ep = degree("strategy.ep", "expert_model_parallel_size", "expert_parallel_size")
    etp = degree("strategy.etp", "expert_tensor_parallel_size")
    wrapped = "policy.megatron_cfg.distributed_data_parallel_config"
    if keys.truth(f"{wrapped}.use_custom_fsdp", "strategy.zero") is False:
        keys.take(f"{wrapped}.data_parallel_sharding_strategy", "strategy.zero")
    of("messages", "pipeline_dtype")
    of("model.max_seq", "max_position_embeddings")
    micro = degree("strategy.micro_batch", "micro_batch_size", "train_micro_batch_size")
    whole = degree("job.global_batch", "global_batch_size", "train_global_batch_size")
    for name in ("micro_batch_size", "global_batch_size"):
        if f"model.data.train_ds.{name}" in keys.understood:  # fine-tuning of NeMo 1: the data's own stands
            keys.take(f"model.{name}", "replaced by model.data.train_ds")
    paired = next((name for name in ("dpo", "rm") if reinforced and name in config), "")
    if paired:  # nemo_rl/algorithms/dpo.py:602, rm.py:542
        micro, whole = product(micro, 2), product(whole, 2)
    precision, computed = _precision(keys, of)
    recompute = _recomputation(keys, of, reinforced)
    distributed = truth(of("strategy.zero", "use_distributed_optimizer", "zero1"))
    degrees = product(tp, pp, cp) if isinstance(config, Partial) else product(tp or 1, pp or 1, cp or 1)
    dp = divided(world, degrees) if tp or pp else None
    virtual = degree("strategy.virtual", "virtual_pipeline_model_parallel_size", "virtual_pipeline_parallel_size")
    experts = degree("model.experts", "num_moe_experts", "num_experts")
    if max(experts or 1, ep or 1) > 1 and trainer != "dtensor_cfg" and not isinstance(config, Partial):
        etp = etp or tp  # Megatron-LM, megatron/core/parallel_state.py: expert_tensor_parallel_size is None
    layout = StatedLayout(
        world=world,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        zero=3 if trainer == "dtensor_cfg" else 1 if distributed else None,
        sp=truth(of("strategy.sp", "sequence_parallel")),
        virtual=virtual,
        micro_batch=micro,
        accumulation=None if reinforced else divided(whole, product(micro, dp)),
        global_batch=whole,
        seq=degree(
            "job.seq", "seq_length", "encoder_seq_length", "max_total_sequence_length", "data.train_ds.max_seq_length"
        ),
        precision=precision,
        recompute=recompute,
    )

    # Options, sizes of the model, and the stack of the release.
    def flag(name: str, meaning: str, default: Any = None) -> Any:
        value = of(meaning, name, *_FIELDS_OF.get(name, ()))
        return default if value is None else value

    options = beyond.options(flag, experts is not None or (ep or 1) > 1, cp) | _adapters(keys)
    for name, key in (
        ("products", "fp8_recipe"),
        ("dispatch", "moe_token_dispatcher_type"),
        ("graphs", "cuda_graph_impl"),
        ("routing", "moe_router_force_load_balancing"),
    ):
        if of(f"options.{name}", key) is None:  # the release's own, or inherited
            options.pop(name, None)
    if every := degree("options.vocab_multiple", "make_vocab_size_divisible_by"):
        options["vocab_multiple"] = every
    if width := _WIDTHS.get(computed):
        options["products"] = width
    model = {
        theirs: of(f"model.{theirs}", ours)
        for ours, theirs in (
            ("num_layers", "num_hidden_layers"),
            ("hidden_size", "hidden_size"),
            ("ffn_hidden_size", "intermediate_size"),
            ("num_attention_heads", "num_attention_heads"),
            ("num_query_groups", "num_key_value_heads"),
        )
    }
    sizes = {name: value for name, value in model.items() if value is not None}
    stack, notes = _release(keys)
    if trainer == "dtensor_cfg":
        options, stack = _sharded(keys), "nemo-rl"
        notes = ("policy.dtensor_cfg is FSDP2 around transformers' modules, priced with accelerate's constants",)
    if paired == "dpo":  # The reference's weights are on the host, and copied over the policy's for its pass.
        options["reference"] = "base"
        notes += (_SWAPPED,)
    notes += ("each example is a pair of sequences",) if paired == "rm" else ()
    if reinforced and (isinstance(config["policy"].get("generation"), Mapping) or "value" in quiet):
        others = "what generates, what scores and a critic take time of their own"
        notes += (f"the price is of the policy's updates: {others}",)
    result = keys.configuration(
        "nemo",
        stack,
        layout,
        key_table("megatron_bridge"),
        model=sizes,
        model_name=str(keys.take("policy.model_name", "model", "") or ""),
        options=options,
        notes=notes,
    )
    return replace(result, without_effect=(*result.without_effect, *quiet))


def _precision(keys: Keys, of: Callable[..., Any]) -> tuple[str | None, str]:
    """Return the precision (None: not stated), and the narrow format of products as its keys write it, or ""."""
    named = keys.take("trainer.precision", "job.precision") or of("job.precision", "precision", "precision_config")
    computed, scaled = (str(keys.take(name, "job.precision", "")) for name in ("compute_dtype", "fp8_recipe"))
    computed = f"fp8_{scaled}" if computed == "fp8" and scaled else computed
    named = named or computed or None
    fp8 = of("options.products", "fp8")
    if isinstance(fp8, str) or truth(fp8) or computed.startswith(("fp8", "nvfp4")):
        return "fp8", computed
    return None if named is None else _TYPES.get(str(named).lower()), computed


def _recomputation(keys: Keys, of: Callable[..., Any], reinforced: bool) -> str | None:
    """Return the kind of recomputation; None: not stated."""
    granularity = of("strategy.recompute", "activations_checkpoint_granularity", "recompute_granularity")
    checkpointing = truth(of("strategy.recompute", "activation_checkpointing"))
    kind = str(granularity) if granularity in ("full", "selective") else None
    stated = any(p.rpartition(".")[2] == "activations_checkpoint_granularity" for p in keys.understood)
    if stated and granularity is None:
        kind = "none"
    if checkpointing is not None and (kind is None or reinforced):  # NeMo-RL's granularity is of that alone
        kind = (kind or "full") if checkpointing else "none"
    return kind


def _of_policy(keys: Keys, nodes: int | None, each: int | None) -> tuple[int | None, int | None]:
    """Return the nodes of NeMo-RL's cluster that train and the GPUs of each: `nodes` and `each` without those that
    servers and teachers have for themselves (nemo_rl/algorithms/grpo.py:782-910)."""
    teachers, place = "on_policy_distillation", "policy.generation.colocated"
    if nodes and keys.truth(f"{teachers}.non_colocated_teachers.enabled", "world"):
        models = keys.take(f"{teachers}.teacher_model_by_agent_name", "world")
        own = keys.count(f"{teachers}.non_colocated_teachers.default_teacher_cfg.num_nodes", "world")
        number = len({*models.values()}) if isinstance(models, Mapping) else 0
        nodes = max(0, nodes - number * (own or 0)) or None
    if nodes and each and keys.truth(f"{place}.enabled", "world") is False:
        served, of_node = (
            keys.count(f"{place}.resources.{name}", "world") for name in ("num_nodes", "gpus_per_node")
        )
        if nodes == 1:
            each = max(0, each - (of_node or 0)) or None
        else:
            nodes = max(0, nodes - (served or 0)) or None
    return nodes, each


def _sharded(keys: Keys) -> dict[str, Any]:
    """Return the options of NeMo-RL's trainer on FSDP2 (nemo_rl/models/automodel/setup.py:484)."""
    at = "policy.dtensor_cfg"
    options: dict[str, Any] = {"reduce": "float32"}
    if keys.truth(f"{at}.cpu_offload", "options.parameter_offload"):
        options |= {"parameter_offload": True, "optimizer_offload": 1.0}
    if keys.truth(f"{at}.lora_cfg.enabled", "options.lora"):
        options["lora"] = keys.count(f"{at}.lora_cfg.dim", "options.lora", 8)
    return options
