"""Megatron-Bridge's ConfigContainer as YAML (src/megatron/bridge/training/config.py): sections `model`, `ddp`, ...,
each key of which is a flag of Megatron-LM (flags.toml). It is read as these flags."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, Partial
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.megatron import read as megatron
from phalanx.frameworks.megatron_bridge.flags import DTYPES, INVERTED, KEYS, TARGETS, mixed_precision

_FLAGS = {key: flag.removeprefix("--") for flag, key in KEYS.items()} | {
    "optimizer.use_distributed_optimizer": "use-distributed-optimizer",
    "optimizer.overlap_param_gather": "overlap-param-gather",
}
"""Key -> flag. Two that `ddp` has are the optimizer's too: either turns both on (config.py:2101)."""
_WORDS = {theirs: word for word, theirs in DTYPES.items()}
_OVER = "it lies over a recipe in Python that it does not name: what it leaves out is open"
_LAYOUT, _VIRTUAL = "pipeline-model-parallel-layout", "num-virtual-stages-per-pipeline-rank"


def is_container(config: Config) -> bool:
    """Whether tables are a ConfigContainer: `model` with Megatron's degrees, and at least two other sections."""
    model = config.get("model")
    sections = {"ddp", "dist", "mixed_precision", "optimizer", "train"} & set(config)
    return isinstance(model, Mapping) and "tensor_model_parallel_size" in model and len(sections) > 1


def read(config: Config, world: int | None = None) -> Configuration:
    """Read a ConfigContainer. A key that is not stated has Megatron-LM's default. But a container with neither the
    model's size nor its precision overrides a recipe in Python: keys that it does not state are open."""
    over = "mixed_precision" not in config and "num_layers" not in config["model"]
    named = config.get("mixed_precision")
    if isinstance(named, str) and (precision := mixed_precision(named)) is not None:
        config = {**config, "mixed_precision": precision}
    config = Partial(config) if over else config
    keys = Keys(config)
    args: dict[str, Any] = {}
    for key, flag in _FLAGS.items():
        value = keys.take(key, "")
        if value is not None and value is not False:
            args[flag] = _WORDS.get(value, value) if isinstance(value, str) else value
    if length := keys.count(("dataset.seq_length", "dataset.sequence_length"), "job.seq"):
        args["seq-length"] = length  # the model's has to be the same (config.py:1644)
    for flag, key in INVERTED.items():
        if keys.truth(key, "") is False:
            args[flag.removeprefix("--")] = True
    args |= _with_others(keys)
    if keys.truth("model.should_pad_vocab", "options.vocab_multiple"):
        args["vocab-size"] = args.pop("padded-vocab-size", None)
    if _LAYOUT in args:
        args.pop(_VIRTUAL, None)
    tables = {"launch": config.get("launch", {}), "args": args}
    configuration = megatron.read(Partial(tables) if isinstance(config, Partial) else tables, world)
    options = {**configuration.options, **_options(keys)}
    meanings = {path.removeprefix("args."): meaning for path, meaning in configuration.understood.items()}
    for path in list(keys.understood):
        flag = _FLAGS.get(path, "")
        if meaning := meanings.get(flag):
            keys.understood[path] = meaning
        elif not keys.understood[path]:
            del keys.understood[path]
    quiet, unmodelled, unknown = keys.rest(key_table("megatron_bridge"))
    layout = configuration.layout
    if isinstance(config, Partial):  # what no key says is its recipe's
        said = {meaning.rpartition(".")[2] for meaning in keys.understood.values()}
        open_ = {
            name: None for name in ("zero", "sp", "virtual", "schedule", "recompute", "offload") if name not in said
        }
        layout = replace(layout, **open_, precision=layout.precision if "precision" in said else None)
    if isinstance(config.get("mixed_precision"), str):  # a recipe that is not known, or a run's own
        layout = replace(layout, precision=None)
    return replace(
        configuration,
        layout=layout,
        kind="nemo",
        stack="megatron-bridge",
        understood=keys.understood,
        without_effect=quiet,
        not_modelled=unmodelled,
        unknown={path: near for path, near in unknown.items() if not path.startswith("launch")},
        options=options,
        notes=(_OVER, *configuration.notes) if over else configuration.notes,
    )


def _with_others(keys: Keys) -> dict[str, Any]:
    """Return the flags of Megatron-LM whose keys have another form than the flag."""
    args: dict[str, Any] = {}
    if keys.truth("model.gated_linear_unit", "model.activation"):
        args["swiglu"] = True
    if str(keys.take("model.activation_func", "model.activation")).endswith("squared_relu"):
        args["squared-relu"] = True
    fused = keys.truth("model.bias_activation_fusion", "model.activation")
    if fused is False and "squared-relu" not in args:
        args["no-bias-gelu-fusion"] = True
    if keys.take("model.num_query_groups", "model.kv_heads") is not None:
        args["group-query-attention"] = True
    narrow = keys.truth("mixed_precision.grad_reduce_in_fp32", "options.reduce") is False
    main = keys.take("optimizer.main_grads_dtype", "options.gradients")
    if narrow and main != DTYPES["bf16"] and keys.truth("mixed_precision.bf16", "job.precision"):
        args["grad-reduce-in-bf16"] = True
    return args


def _options(keys: Keys) -> dict[str, Any]:
    """Return the options that Megatron-LM has no flag for."""
    options: dict[str, Any] = {}
    if keys.truth("model.cross_entropy_loss_fusion", "options.cross_entropy") is False:
        options["cross_entropy"] = "plain"
    if rank := keys.count("peft.dim", "options.lora"):
        options["lora"] = rank
        targets = keys.take("peft.target_modules", "options.lora_targets")
        named = [word for word, of in TARGETS.items() if isinstance(targets, list) and set(targets) == set(of)]
        if named and named[0] != "linear":
            options["lora_targets"] = named[0]
        elif keys.truth("peft.share_expert_adapters", "options.lora_targets") is False:
            options["lora_targets"] = "experts"
        types = keys.config.get("mixed_precision")
        narrow = isinstance(types, Mapping) and types.get("fp8_param_gather")
        if narrow and keys.truth("model.disable_parameter_transpose_cache", "options.base"):
            options["base"] = "float8"
    return options
