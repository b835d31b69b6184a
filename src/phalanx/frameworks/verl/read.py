"""verl's tables under hydra: the update of the actor, trained by PyTorch's FSDP or by Megatron-Core, or fine-tuning
(verl/trainer/config/ppo_trainer.yaml, sft_trainer.yaml; verl/workers/fsdp_workers.py).

Generation (`rollout`), the reference and the critic have no price here; a note says so."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.megatron import read as megatron
from phalanx.frameworks.values import divided, product, truth

_ROLE, _ACTOR = "actor_rollout_ref", "actor_rollout_ref.actor"
_MINI, _PROMPT, _PER_GPU, _TOKENS = 256, 512, 8, 16384
"""Defaults: prompts of an update, tokens of a prompt and of a response, GPUs of a node, tokens of a micro-batch
(config/actor/actor.yaml:30, data/legacy_data.yaml, ppo_trainer.yaml)."""
_TYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
_DEGREES = {
    "tensor_model_parallel_size": "tensor-model-parallel-size",
    "pipeline_model_parallel_size": "pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_per_virtual_pipeline_stage": "num-layers-per-virtual-pipeline-stage",
    "context_parallel_size": "context-parallel-size",
    "expert_model_parallel_size": "expert-model-parallel-size",
    "expert_tensor_parallel_size": "expert-tensor-parallel-size",
}
_SWITCHES = {name: name.replace("_", "-") for name in ("sequence_parallel", "use_distributed_optimizer")}
"""Switches that are on by default."""
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")

_MEGATRON_TABLES = tuple(f"{at}.megatron.override_transformer_config." for at in (_ACTOR, f"{_ROLE}.ref", "critic"))
"""Tables that hold fields of Megatron-Core's TransformerConfig."""


def read(config: Config, world: int | None = None) -> Configuration:
    """Read the tables of an actor, or of fine-tuning, which has no actor. Keys that are not stated have the values of
    verl's own files, which hydra merges the user's into."""
    keys = Keys(config, key_table("verl"), dict.fromkeys(_MEGATRON_TABLES, key_table("megatron")))
    tuned = _ROLE not in config
    nodes = keys.count("trainer.nnodes", "world", 1)
    each = keys.count("trainer.n_gpus_per_node", "world", None if tuned else _PER_GPU)
    world = world or product(nodes, each)
    named = str(keys.take(("config_name", "config-name"), "stack", "") or "")
    keys.take(("config_path", "config-path"), "file")
    if tuned:
        return _fsdp(keys, world, at="model", whole="data.train_batch_size", repeated=1, length="data.max_length")
    engine = keys.take(f"{_ACTOR}.strategy", "stack")
    repeated = keys.count(f"{_ROLE}.rollout.n", "job.global_batch", 1) or 1
    actor = config[_ROLE].get("actor") if isinstance(config[_ROLE], Mapping) else None
    of_megatron = isinstance(actor, Mapping) and "megatron" in actor
    if engine == "megatron" or "megatron" in named or (of_megatron and engine is None):
        return _megatron(keys, world, repeated)
    return _fsdp(keys, world, at=_ACTOR, whole=f"{_ACTOR}.ppo_mini_batch_size", repeated=repeated)


def _fsdp(keys: Keys, world: int | None, at: str, whole: str, repeated: int, length: str = "") -> Configuration:
    """Read a training by FSDP. `at`: the table with fsdp_config; `whole`: the key of the prompts of an update, each
    of which makes `repeated` sequences; `length`: the key of a sequence's tokens, "" where it is a prompt and its
    response."""
    model = "model" if at == "model" else f"{_ROLE}.model"
    table = f"{at}.fsdp_config"
    ulysses = (f"{place}ulysses_sequence_parallel_size" for place in (f"{at}.", f"{table}.", "", "engine."))
    sp = keys.count(tuple(ulysses), "strategy.cp", 1)
    dp = divided(world, sp)
    size = keys.count((f"{table}.fsdp_size", "engine.fsdp_size"), "strategy.shard")
    reshards = keys.truth((f"{table}.reshard_after_forward", "engine.reshard_after_forward"), "strategy.zero")
    seq, notes = _sequence(keys, length)
    batch = product(keys.count(whole, "job.global_batch", _MINI), repeated)
    micro = _micro(keys, at, dp, batch, seq, sp or 1, notes)
    type_ = str(keys.take((f"{table}.model_dtype", "engine.model_dtype"), "job.precision", "fp32"))
    again = keys.truth(f"{model}.enable_gradient_checkpointing", "strategy.recompute", True)
    hosts = (f"{table}.offload_policy", f"{table}.offload_params", f"{table}.cpu_offload", "engine.offload_policy")
    on_host = any(keys.truth(name, "offload") for name in hosts)
    options: dict[str, Any] = {"parameter_offload": True, "optimizer_offload": 1.0} if on_host else {}
    rank = keys.count((f"{model}.lora_rank", f"{model}.lora.rank"), "options.lora")
    options |= {"lora": rank} if rank else {}
    keys.take(f"{model}.target_modules", "options.lora_targets")
    job = _job(keys, "optim" if at == "model" else f"{at}.optim", f"{at}.grad_clip")
    if half := _TYPES.get(type_):
        job["types"] = {"master": half}
    layout = StatedLayout(
        world=world,
        dp=dp,
        tp=1,
        pp=1,
        cp=sp,
        ulysses=sp,
        zero=2 if reshards is False else 3,
        shard=None if size is None or size == world else size,
        micro_batch=micro,
        accumulation=divided(batch, product(micro, dp)),
        global_batch=batch,
        seq=seq,
        precision="bf16",
        recompute="full" if again else "none",
        offload={"param": "cpu", "optimizer": "cpu"} if on_host else None,
    )
    return keys.configuration(
        "verl",
        "verl",
        layout,
        model_name=_model(keys, model),
        options=options,
        job=job,
        notes=(*notes, *_unpriced_roles(keys)),
    )


def _megatron(keys: Keys, world: int | None, repeated: int) -> Configuration:
    """Read a training by Megatron-Core, as its flags. Sequence parallelism and the distributed optimizer are on by
    default. `repeated`: sequences of a prompt."""
    at = f"{_ACTOR}.megatron"
    args: dict[str, Any] = {"bf16": True}
    for name, flag in _DEGREES.items():
        if (value := keys.count(f"{at}.{name}", "strategy")) is not None:
            args[flag] = value
    for name, flag in _SWITCHES.items():
        args[flag] = keys.truth(f"{at}.{name}", "strategy", True)
    for name in _RECOMPUTATION:
        old = f"{_ROLE}.model.gradient_checkpointing_kwargs.{name.replace('recompute', 'activations_checkpoint')}"
        value = keys.take((f"{at}.override_transformer_config.{name}", old), "strategy.recompute")
        if value not in (None, "null"):
            args[name.replace("_", "-")] = value
    if args.get("recompute-granularity") is None:
        args.pop("recompute-modules", None)
    keys.take(f"{_ROLE}.model.enable_gradient_checkpointing", "strategy.recompute")
    keys.take(f"{at}.override_transformer_config.attention_backend", "options.attention")
    c = megatron.read({"args": args}, world)
    for name, flag in (_DEGREES | _SWITCHES).items():
        if f"{at}.{name}" in keys.understood:
            keys.understood[f"{at}.{name}"] = c.understood.get(f"args.{flag}", "strategy")
    seq, notes = _sequence(keys, "")
    batch = product(keys.count(f"{_ACTOR}.ppo_mini_batch_size", "job.global_batch", _MINI), repeated)
    micro = _micro(keys, _ACTOR, c.layout.dp, batch, seq, c.layout.cp or 1, notes)
    layout = replace(
        c.layout,
        micro_batch=micro,
        global_batch=batch,
        accumulation=divided(batch, product(micro, c.layout.dp)),
        seq=seq,
    )
    return keys.configuration(
        "verl",
        "megatron-core",
        layout,
        model_name=_model(keys, f"{_ROLE}.model"),
        options=c.options,
        fields=c.fields,
        job=_job(keys, f"{_ACTOR}.optim", f"{_ACTOR}.grad_clip"),
        notes=(*notes, *_unpriced_roles(keys)),
    )


def _sequence(keys: Keys, length: str) -> tuple[int | None, list[str]]:
    """Return the tokens of a sequence, and the note that all are as long as allowed. `length`: as in _fsdp."""
    if length:
        return keys.count(length, "job.seq", 1024), ["every sequence has max_length tokens: padded, or as long"]
    parts = [keys.count(f"data.max_{part}_length", "job.seq", _PROMPT) for part in ("prompt", "response")]
    seq = sum(part for part in parts if part) if all(parts) else None
    return seq, [f"every sequence is as long as it may be, {seq:,} tokens: measured ones are shorter"] if seq else []


def _micro(
    keys: Keys, at: str, dp: int | None, batch: int | None, seq: int | None, sp: int, notes: list[str]
) -> int | None:
    """Return the sequences of a replica's micro-batch. Where micro-batches are filled by tokens, it is the largest
    number that fits and divides a replica's sequences, as verl balances them; `notes` gets a line about that."""
    table, start = ("data", "") if at == "model" else (at, "ppo_")
    own = keys.count(f"{table}.{start}micro_batch_size_per_gpu", "strategy.micro_batch")
    every = keys.count(f"{table}.{start}micro_batch_size", "strategy.micro_batch")
    own = own or divided(every, dp)
    tokens = keys.count(f"{table}.{start}max_token_len_per_gpu", "strategy.micro_batch", _TOKENS)
    if not keys.truth(f"{table}.use_dynamic_bsz", "strategy.micro_batch") or not tokens or not seq:
        return own
    notes.append(f"micro-batches are filled up to {tokens * sp:,} tokens, of sequences of the longest kind")
    most, own = max(1, tokens * sp // seq), divided(batch, dp)
    return next(n for n in range(most, 0, -1) if not own or own % n == 0)


def _job(keys: Keys, table: str, clip: str) -> dict[str, Any]:
    """Return optimizer and clipping, with verl's defaults (config/optim/fsdp.yaml)."""
    optimizer = {
        "betas": keys.betas(f"{table}.betas", (0.9, 0.999)),
        "weight_decay": keys.number(f"{table}.weight_decay", "job.optimizer", 0.01),
    }
    clipped = keys.number((clip, f"{table}.clip_grad"), "job.clip", 1.0)
    return {"optimizer": optimizer, "clip": clipped, "compute": "bf16"}


def _model(keys: Keys, table: str) -> str:
    return str(keys.take((f"{table}.path", f"{table}.partial_pretrain"), "model", "") or "")


def _unpriced_roles(keys: Keys) -> tuple[str, ...]:
    """Return notes about the parts of a step that have no price: generation, the reference and the critic."""
    role = keys.config.get(_ROLE)
    if not isinstance(role, Mapping):
        return ()
    at = f"{_ROLE}.rollout"
    keys.take("data.train_batch_size", "rollout")  # prompts of several updates
    name = keys.take(f"{at}.name", "rollout") or "an engine"
    tp = keys.count(f"{at}.tensor_model_parallel_size", "rollout", 2)
    share = keys.take(f"{at}.gpu_memory_utilization", "rollout", 0.5)
    algorithm = str(keys.take("algorithm.adv_estimator", "critic", "gae"))
    critic = "; the critic's, too" if algorithm == "gae" else ""
    price = (
        f"the price is of the actor's updates: generation by {name} (tp={tp}, {share} of the memory while it runs) "
        f"and log-probabilities take time of their own (phalanx serve plan){critic}"
    )
    stays = _resident(role.get("actor"))
    if not stays or truth(role.get("hybrid_engine")) is False:
        return (price,)
    return price, (
        f"the actor's {stays} stay on the GPUs while {name} generates there; whether they fit next to its {share} of "
        f"the memory is not said: if not, lower gpu_memory_utilization, or set {' and '.join(_OFFLOADS)}"
    )


_OFFLOADS = {"param_offload": "weights", "optimizer_offload": "moments"}
"""Switch -> state that it moves off the GPUs while an engine generates (config/engine/fsdp.yaml:30, megatron.yaml:31;
verl-project/verl#284: with both the engine may have 0.9 of the memory)."""


def _resident(actor: Any) -> str:
    """Return the state of an actor that stays on the GPUs while an engine generates: "weights and moments",
    "weights", "moments" or ""."""
    tables = [actor.get(name) for name in ("fsdp_config", "megatron")] if isinstance(actor, Mapping) else []
    own = [table for table in tables if isinstance(table, Mapping)]
    return " and ".join(what for switch, what in _OFFLOADS.items() if not any(truth(t.get(switch)) for t in own))
