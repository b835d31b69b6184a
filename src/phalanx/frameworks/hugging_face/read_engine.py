"""What shards a Trainer's state: DeepSpeed by its file or by a name, accelerate's file, or FSDP by arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.frameworks.accelerate.read import on_host, sharding, table_recompute, within_node, wrapping
from phalanx.frameworks.configuration import Config, Configuration, Keys
from phalanx.frameworks.deepspeed import read as deepspeed
from phalanx.frameworks.values import truth, zero_level
from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

_WORDS = {"full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0}
_IMPLIED = {"auto_wrap", "offload"}
"""Words that name no strategy, and turn FSDP on with accelerate's default, FULL_SHARD (accelerate 1.10,
utils/dataclasses.py:1784; transformers 5.23, training_args.py:2861)."""
_BUILT_IN = re.compile(r"(?:default-)?zero_?([0-3])([_-]offload)?")
"""DeepSpeed configurations that a program names without a file (ms-swift: swift/arguments/sft_args.py:260, and before
3.0 swift/llm/utils/argument.py)."""


@dataclass(frozen=True)
class Engine:
    """What shards the state and steps. `precision`: None where nothing states one. `shard`: ranks that share the
    parameters, None: all replicas, or under `within_node` the ranks of a node. `ring`: context parallelism is a ring
    of keys and values, where DeepSpeed's exchanges heads. `fields` are of the strategy."""

    stack: str
    precision: str | None
    zero: int | None = None
    offload: dict[str, str | None] | None = None
    tp: int = 1
    cp: int = 1
    ring: bool = False
    shard: int | None = None
    within_node: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recompute: str | None = None
    """Of FSDP's table; None: not stated."""


def of_file(keys: Keys, base: str, file: Config, stated: str | None, launched: Configuration | None) -> Engine:
    """Read DeepSpeed's file, whose keys are noted under `base`. `stated`: the precision of the arguments.
    `launched`: accelerate's file, which fills in `auto`."""
    part = Keys(file)
    tp = part.count("tensor_parallel.autotp_size", "strategy.tp") or 1
    cp = part.count("sequence_parallel_size", "strategy.cp") or 1
    options, fields, job = deepspeed.engine_settings(part)
    shard, zero, offload = deepspeed.shard(part), deepspeed.stage(part), deepspeed.offloaded(part)
    half = deepspeed.precision(part) or (launched.layout.precision if launched is not None else None)
    part.take(deepspeed.KEYS["strategy.micro_batch"], "strategy.micro_batch")  # as the Trainer's, or refused
    part.take(deepspeed.KEYS["accumulation"], "accumulation")
    part.take(deepspeed.KEYS["job.global_batch"], "job.global_batch")
    for name, meaning in part.understood.items():
        keys.understood[f"{base}.{name}"] = meaning
    precision = half if half in ("bf16", "fp16") and stated in (None, "tf32") else stated
    return Engine("deepspeed", precision, zero, offload, tp, cp, False, shard, False, options, fields, job)


def of_name(keys: Keys, at: str, name: str, stated: str | None) -> Engine:
    """Read arguments by which a program makes DeepSpeed's configuration itself, or chooses one of its own."""
    precision, notes = stated, tuple[str, ...]()
    options: dict[str, Any] = {}
    offload: dict[str, str | None] | None = None
    zero = zero_level(keys.take(f"{at}zero_stage", "strategy.zero"))
    if zero is None and (built_in := _BUILT_IN.fullmatch(name)):
        zero, device = int(built_in[1]), "cpu" if built_in[2] else "none"
        offload = {"optimizer": device, "param": device if ZERO_LEVELS[zero].parameters else "none"}
        options |= {"optimizer_offload": 1.0} if built_in[2] else {}
        keys.understood[f"{at}deepspeed"] = "strategy.zero"
    if keys.truth(f"{at}adam_offload", "offload"):
        offload, options = {"optimizer": "cpu", "param": "none"}, options | {"optimizer_offload": 1.0}
    if zero is not None and f"{at}zero_stage" in keys.understood and stated is None:
        written = keys.take(f"{at}dtype", "job.precision")
        precision = "bf16" if written == "bf16" else "fp16"
        notes = () if written else ("fp16, as DeepSpeed-Chat trains where no --dtype says otherwise",)
    if zero is not None and keys.truth(f"{at}offload", "offload"):  # DeepSpeed-Chat's, of both (ds_utils.py:27)
        of_parameters = {"parameter_offload": True} if ZERO_LEVELS[zero].parameters else {}
        offload = {"optimizer": "cpu", "param": "cpu" if of_parameters else "none"}
        options |= {"optimizer_offload": 1.0} | of_parameters
    return Engine("deepspeed", precision, zero, offload, options=options, notes=notes)


def of_accelerate(launched: Configuration, stated: str | None) -> Engine:
    """Return the engine of accelerate's file."""
    s = launched.layout
    return Engine(
        launched.stack,
        stated or s.precision,
        s.zero,
        None if s.offload is None else dict(s.offload),
        s.tp or 1,
        s.cp or 1,
        launched.stack == "accelerate",
        s.shard,
        options=launched.options,
        fields=launched.fields,
        recompute=s.recompute,
    )


def of_fsdp(keys: Keys, at: str, precision: str | None) -> Engine:
    """Read the Trainer's --fsdp: words, or true with its settings in fsdp_config."""
    zero: int | None = None
    offload: dict[str, str | None] | None = None
    recompute: str | None = None
    options: dict[str, Any] = {}
    words, in_node = keys.take(f"{at}fsdp", "strategy.zero"), False
    text = " ".join(words) if isinstance(words, list) else str(words or "")
    stated = text.replace(",", " ").split()
    levels = [_WORDS[word] for word in stated if word in _WORDS]
    if levels or _IMPLIED.intersection(stated):
        zero, in_node = levels[0] if levels else 3, "hybrid" in text
        device = "cpu" if "offload" in text else "none"  # FSDP's optimizer is where its parameters are
        offload = {"param": device, "optimizer": device}
        by_class = "TRANSFORMER_BASED_WRAP" if "auto_wrap" in text else "NO_WRAP"
        options = wrapping(keys, f"{at}fsdp_config", by_class)
        if isinstance(keys.take(f"{at}fsdp_config", "options.units"), dict):  # not the name of a file alone
            del keys.understood[f"{at}fsdp_config"]
        recompute = table_recompute(keys, f"{at}fsdp_config")
    elif truth(words):
        zero, offload, recompute = sharding(keys, f"{at}fsdp_config")
        in_node = within_node(keys, f"{at}fsdp_config")
    options |= on_host(offload)
    return Engine("accelerate", precision, zero, offload, within_node=in_node, recompute=recompute, options=options)
