"""A training script under transformers' Trainer as flags: its TrainingArguments, and the configurations of peft and
bitsandbytes that it makes."""

import re
from typing import Any

from phalanx.frameworks.reading.python import FollowedProgram, PythonFile, PythonObject, plain

_ARGUMENTS = (
    *("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig", "KTOConfig"),
    *("ORPOConfig", "CPOConfig", "RewardConfig", "RLOOConfig", "UnslothTrainingArguments"),
)
_PREFERENCES = ("dpo", "kto", "orpo", "cpo", "reward")
_LORA = ("LoraConfig", "get_peft_model")
_PREPARED = ("prepare_model_for_kbit_training", "prepare_model_for_int8_training")
"""Functions of peft that turn recomputation on unless use_gradient_checkpointing is false (huggingface/peft
src/peft/utils/other.py)."""
_LOADED = ("from_pretrained", "from_config")
_UNSLOTH = re.compile(r"Fast\w*Model")
"""Classes of unsloth that load models."""
_CLASSES = ("Model", "LM", "LMHeadModel")


def tables(file: PythonFile) -> dict[str, Any] | None:
    """Return {args} of a program that makes TrainingArguments; None of one that does not."""
    program = file.program
    configurations = program.named(*_ARGUMENTS)
    if not configurations:
        return None
    arguments = max(configurations, key=lambda m: len(m.fields))
    args = arguments.tables() | _adapters(program) | _loaded(program)
    if arguments.last not in ("TrainingArguments", "Seq2SeqTrainingArguments"):
        args.setdefault("num_generations" if arguments.last == "GRPOConfig" else "dataset_text_field", "text")
    if (learns := arguments.last.removesuffix("Config").lower()) in _PREFERENCES:
        args["rl"] = learns
    for trainer in program.named("*Trainer"):
        args |= {n: v for n, v in trainer.fields.items() if n in ("max_seq_length", "packing") and n not in args}
        if isinstance(model := trainer.fields.get("model"), str) and model[:1] != "$":
            args.setdefault("model_name_or_path", model)
    return {"args": args}


def _adapters(program: FollowedProgram) -> dict[str, Any]:
    """Return the flags of TRL for the adapters that a program makes."""
    args: dict[str, Any] = {}
    if any(item.fields.get("use_gradient_checkpointing", True) is True for item in program.named(*_PREPARED)):
        args["gradient_checkpointing"] = True
    for item in program.named(*_LORA):
        rank = item.fields.get("r")
        if item.last == "LoraConfig" or rank is not None:
            args |= {"use_peft": True, "lora_r": rank if rank is not None else 8}
            if (targets := item.fields.get("target_modules")) is not None:
                args["lora_target_modules"] = plain(targets)
            if item.fields.get("use_dora") is True:
                args["use_dora"] = True
            stated = item.fields.get("use_gradient_checkpointing", True)
            if stated and item.last == "get_peft_model":  # unsloth's, which recomputes by itself
                args["gradient_checkpointing"] = True
                if "use_gradient_checkpointing" in item.fields:
                    args["use_unsloth_gc"] = stated == "unsloth"
    return args


def _loaded(program: FollowedProgram) -> dict[str, Any]:
    """Return flags for the model that a program loads: its name, types and quantisation."""
    args: dict[str, Any] = {}
    for item in program.named(*_LOADED):
        owner = item.name.rpartition(".")[0]
        if not (any(owner.endswith(end) for end in _CLASSES) or "Model" in owner):
            continue
        name = item.fields.get("model_name", item.fields.get("pretrained_model_name_or_path"))
        name = name if name is not None else item.positional[0] if item.positional else None
        if isinstance(name, str) and "model_name_or_path" not in args:
            args["model_name_or_path"] = name
        quantised = item.fields.get("quantization_config")
        fields = {**item.fields, **(quantised.fields if isinstance(quantised, PythonObject) else {})}
        for theirs, ours in (
            ("load_in_4bit", "load_in_4bit"),
            ("load_in_8bit", "load_in_8bit"),
            ("bnb_4bit_use_double_quant", "use_bnb_nested_quant"),
            ("max_seq_length", "max_seq_length"),
            ("attn_implementation", "attn_implementation"),
            ("torch_dtype", "torch_dtype"),
            ("dtype", "torch_dtype"),
        ):
            if (value := fields.get(theirs)) is not None:
                args[ours] = value.removeprefix("torch.") if isinstance(value, str) else plain(value)
        if _UNSLOTH.fullmatch(owner.rpartition(".")[2]):
            args["use_unsloth"] = True
            if args.get("load_in_4bit"):  # its quantisation always is (unsloth/models/llama.py, from_pretrained)
                args["use_bnb_nested_quant"] = True
    return args
