"""A Hugging Face TrainingArguments, as flags or YAML, with its DeepSpeed or FSDP part (transformers,
training_args.py)."""

from phalanx.frameworks.accelerate import read as accelerate
from phalanx.frameworks.accelerate.read import arguments_job, attention, in_shards, reduction
from phalanx.frameworks.configuration import (
    ALL_BLOCKS,
    Config,
    Configuration,
    Keys,
    Partial,
    StatedLayout,
    with_file_keys,
)
from phalanx.frameworks.hugging_face import read_engine
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.trainer_tuning import adapter_options, loss_options, optimizer_options, preference_options
from phalanx.frameworks.values import count, divided, product
from phalanx.spec.number_formats import PRECISIONS

_BF16_UNASKED = ("rl", "dataset_text_field", "num_generations", "max_completion_length", "assistant_only_loss")
"""Arguments of TRL's configurations, which turn bf16 on unless fp16 is (trl/trainer/sft_config.py, __post_init__)."""
_NEXT_TOKEN = (None, "sft", "pt")
"""Stages whose loss is that of the next token."""
_ENGINE_PREFIXES = {
    **dict.fromkeys(("deepspeed_json.", "args.deepspeed.", "deepspeed."), key_table("deepspeed")),
    **dict.fromkeys(("args.fsdp_config.", "fsdp_config."), key_table("accelerate")),
}
"""Paths of the keys that a Trainer hands to its engine."""
_LLAMA_FACTORY_KEYS = ("finetuning_type", "cutoff_len", "template")
"""Keys of LLaMA-Factory, which recomputes every block unless a key says otherwise (prepare_model_for_training of
src/llamafactory/model/model_utils/checkpointing.py)."""
_HALVES = {"float16": "fp16", "fp16": "fp16", "half": "fp16", "bfloat16": "bf16", "bf16": "bf16"}
"""Types that a model is loaded in (torch_dtype of from_pretrained, since transformers 4.56 dtype), as precisions."""
_EXCHANGED = (
    "sequence_parallel_size is all of Ulysses, as ms-swift has it where it divides the key-value heads; else a ring "
    "has the rest: time may differ"
)
"""swift/sequence_parallel/sequence_parallel.py:652, _init_device_mesh."""
_OFFLOADED = (
    "get_peft_model recomputes every block and keeps its inputs on the host, as unsloth's does by itself since July "
    "2025; before, it kept them on the device: memory may differ"
)
"""unsloth/models/llama.py and vision.py, use_gradient_checkpointing: True before 3824a6ad, since "unsloth"."""
_LOADED = ("torch_dtype", "dtype")
_ACTORS = ("actor_num_nodes", "actor_num_gpus_per_node")
"""Nodes, and ranks of each, of the model that OpenRLHF's PPO updates (openrlhf/cli/train_ppo_ray.py)."""
_LENGTHS = (
    *("max_seq_length", "model_max_length", "max_seq_len", "max_length", "cutoff_len", "sequence_len"),
    "block_size",  # run_clm.py of transformers
)
"""Keys of the sequence length, by program."""
_SIDES = (
    ("source_max_len", "target_max_len"),
    ("max_source_length", "max_target_length"),
    ("prompt_max_len", "generate_max_len"),
    ("max_prompt_length", "max_completion_length"),
)
"""Keys of the lengths of prompt and answer: of qlora.py, LLaMA-Factory to 0.1, OpenRLHF's PPO, and TRL's GRPO."""
_UPDATES = "the price is of the actor's updates: generation, the reference and the critic take time of their own"


def _length(keys: Keys, at: str) -> int | None:
    """Return the tokens of a sequence: of one key, or of prompt and answer together; None: not stated."""
    if (whole := keys.take(tuple(f"{at}{name}" for name in _LENGTHS), "job.seq")) is not None:
        return count(whole)
    for sides in _SIDES:
        parts = [keys.count(f"{at}{name}", "job.seq") for name in sides]
        if parts[0] and parts[1]:
            return parts[0] + parts[1]
    return None


def _world(keys: Keys, at: str, world: int | None) -> tuple[int | None, bool]:
    """Return the ranks that are given or that a launcher starts, and whether PPO's actor has them alone."""
    if world is None and at:
        world = keys.launched()
    of_actor = world is None and all(keys.take(f"{at}{name}", "world") is not None for name in _ACTORS)
    if of_actor:
        world = product(*(keys.count(f"{at}{name}", "world") for name in _ACTORS))
    return world or keys.count(f"{at}ray_num_workers", "world"), of_actor


def _recomputes(keys: Keys, at: str) -> bool | None:
    """Return whether every block is recomputed; None: not stated."""
    names = ("gradient_checkpointing", "grad_checkpoint", "use_gradient_checkpointing")
    stated = keys.truth(tuple(f"{at}{name}" for name in names), "strategy.recompute")
    if stated is None and any(keys.take(f"{at}{name}", "stack") is not None for name in _LLAMA_FACTORY_KEYS):
        stated = not keys.truth(f"{at}disable_gradient_checkpointing", "strategy.recompute")
        keys.understood[f"{at}disable_gradient_checkpointing"] = "strategy.recompute"  # what turns it off
    return stated


def _engine(
    keys: Keys, at: str, config: Config, type_: str | None, launched: Configuration | None
) -> tuple[read_engine.Engine, Config | None]:
    """Return what shards the state: DeepSpeed by a file or a word, the engine of accelerate's file (`launched`), or
    FSDP by arguments; and DeepSpeed's file, if it is here."""
    path = keys.take(f"{at}deepspeed", "stack")
    named = config.get("deepspeed_json") if at else None
    if isinstance(named, dict):
        return read_engine.of_file(keys, "deepspeed_json", named, type_, launched), named
    if isinstance(path, dict):
        return read_engine.of_file(keys, f"{at}deepspeed", path, type_, launched), path
    if path:
        return read_engine.of_name(keys, at, str(path), type_), None
    if launched is not None:
        return read_engine.of_accelerate(launched, type_), None
    return read_engine.of_fsdp(keys, at, type_), None


def read(config: Config, world: int | None = None) -> Configuration:
    """Read {launch, args, deepspeed_json} or the arguments alone. A value that is `auto` in DeepSpeed's file is that
    of the argument."""
    nested = isinstance(config.get("args"), dict)
    if nested and isinstance(table := config.get("fsdp_json"), dict):  # that of the file which --fsdp_config names
        tables = {n: value for n, value in config.items() if n != "fsdp_json"}
        tables["args"] = {**config["args"], "fsdp_config": table}
        config = Partial(tables) if isinstance(config, Partial) else tables
    keys, at = Keys(config), "args." if nested else ""
    world, of_actor = _world(keys, at, world)
    micro_paths = (f"{at}per_device_train_batch_size", f"{at}per_gpu_train_batch_size")
    micro = keys.count(micro_paths, "strategy.micro_batch")
    written = keys.take(f"{at}gradient_accumulation_steps", "accumulation", 1)
    steps = count(written)
    bf16, fp16 = (keys.truth(f"{at}{name}", "job.precision") for name in ("bf16", "fp16"))
    pure = keys.truth(f"{at}pure_bf16", "job.precision")  # LLaMA-Factory's, of everything that is kept
    bf16 = bf16 or pure
    of_trl = any(keys.take(f"{at}{name}", "stack") is not None for name in _BF16_UNASKED)
    rounded = keys.truth(f"{at}tf32", "job.precision")
    type_ = "bf16" if bf16 else "fp16" if fp16 else "tf32" if rounded and not of_trl else None
    again = _recomputes(keys, at)

    # What shards the state.
    accelerated = config.get("accelerate") if nested else None
    launched = accelerate.read(accelerated, world) if isinstance(accelerated, dict) else None
    job = arguments_job(keys, at)
    engine, inner = _engine(keys, at, config, type_, launched)
    if launched is not None:
        world = world or launched.layout.world
        of_deepspeed = inner is not None or keys.take(f"{at}deepspeed", "stack")
        if not of_deepspeed and f"{at}gradient_accumulation_steps" not in keys.understood:
            steps = launched.layout.accumulation or steps
    again = again or engine.recompute == "full"
    stack, zero, tp, cp, type_ = engine.stack, engine.zero, engine.tp, engine.cp, engine.precision
    options, typed, job = dict(engine.options), engine.notes, {**job, **engine.job}
    heads = keys.count(f"{at}sequence_parallel_size", "strategy.cp", 1) or 1
    if heads > 1:
        cp, typed = heads, (*typed, _EXCHANGED)

    # Its number types. A file that says them too and is not here: DeepSpeed's, accelerate's, or one of arguments.
    unread = inner is None and zero is None and bool(keys.take(f"{at}deepspeed", "stack"))
    unread = unread or isinstance(config, Partial) or isinstance(accelerated, Partial)
    own_type = keys.truth(f"{at}use_unsloth", "job.precision")  # of the device: bf16, else fp16
    unstated = None if own_type or unread else "bf16" if of_trl and bf16 is None else "fp32"
    trained, unpriced = adapter_options(keys, at)
    if type_ in (None, "fp32", "tf32") and unstated == "fp32" and inner is None:
        paths = tuple(f"{at}{name}" for name in _LOADED)
        half = _HALVES.get(str(Keys(config).take(paths, "")).removeprefix("torch."))
        if half and (stack == "accelerate" or (stack == "deepspeed" and launched is None)):
            keys.take(paths, "job.precision")
            type_, word = half, PRECISIONS[half].compute
            follows = stack == "accelerate" and not trained  # DeepSpeed's master and peft's adapters are of 32 bits
            job |= {"types": dict.fromkeys(("reduce", "accumulate", "master"), word)} if follows else {}
            state = ", and the optimizer's state is of it" if follows else ""
            typed = (f"the model is loaded in {word} and no mixed precision is set: it computes in it{state}",)
    if pure and stack == "accelerate":  # DeepSpeed's master weights are of 32 bits (zero/stage3.py:1031)
        job |= {"types": dict.fromkeys(("reduce", "accumulate", "master"), "bfloat16")}

    # Options, the batch, what an adapter and a preference loss change.
    if stack == "accelerate" and zero and launched is None:
        options |= reduction(type_)
    options |= attention(keys, at)
    if stack == "accelerate":  # under DeepSpeed it is the engine's own
        options |= in_shards(keys, at)
    replicas = divided(world, tp * cp)
    whole = keys.count(f"{at}train_batch_size", "job.global_batch")
    if whole and f"{at}gradient_accumulation_steps" not in keys.understood:
        steps = divided(whole, product(micro, replicas))
    scored, sequences, preferred = preference_options(keys, at, bool(trained))
    micro = product(micro, sequences)
    layout = StatedLayout(
        world=world,
        dp=replicas,
        tp=tp if tp > 1 else None,
        cp=cp if cp > 1 else None,
        ulysses=1 if engine.ring and heads == 1 else cp,
        shard=engine.shard,
        zero=zero,
        micro_batch=micro,
        accumulation=steps,
        global_batch=product(micro, steps, replicas),
        seq=_length(keys, at),
        precision=type_,
        recompute="full" if again else None,
        offload=engine.offload,
    )
    name = str(keys.take((f"{at}model_name_or_path", f"{at}model_name"), "model", "") or "")
    notes: tuple[str, ...] = (*preferred, *typed, *((_UPDATES,) if of_actor else ()))
    if not (inner and inner.get("optimizer")):  # DeepSpeed's comes first
        update, assumed = optimizer_options(keys, f"{at}optim", bool(trained))
        options, notes = update | options, notes + assumed
    args = config["args"] if nested else config
    sampled = "num_generations" in args or any(args.get(name) not in _NEXT_TOKEN for name in ("rlhf_type", "stage"))
    parts, unfused = loss_options(keys, at, plain=not (scored or sequences > 1 or sampled))
    options |= trained | scored | parts
    moved = keys.truth(f"{at}use_unsloth_gc", "options.activation_offload")
    of_factory = any(f"{at}{name}" in keys.understood for name in _LLAMA_FACTORY_KEYS)  # model_utils/unsloth.py:77
    if again and (moved or (moved is None and own_type)):
        options["activation_offload"] = ALL_BLOCKS
        notes += () if moved or of_factory else (_OFFLOADED,)
    notes += unfused
    own = Keys({n: value for n, value in config.items() if n != "accelerate"}, others=_ENGINE_PREFIXES)
    own.understood = keys.understood
    c = own.configuration(
        "hf",
        stack,
        layout,
        key_table("hugging_face"),
        model_name=name,
        options=options,
        fields=engine.fields,
        job=job | {"compute": type_ or unstated},
        within_node=engine.within_node,
        unpriced=unpriced,
        notes=notes,
    )
    return c if launched is None else with_file_keys(c, launched, "accelerate")
