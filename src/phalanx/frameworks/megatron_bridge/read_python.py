"""Programs of NeMo 2 and of Megatron-Bridge as tables: a recipe of either with attributes that are set on it, or its
parts (nl.Trainer, nl.MegatronStrategy, llm.pretrain; ConfigContainer)."""

import re
from typing import Any

from phalanx.frameworks.configuration import Partial
from phalanx.frameworks.megatron_bridge.flags import mixed_precision
from phalanx.frameworks.reading.python import FollowedProgram, PythonFile, PythonObject, plain
from phalanx.frameworks.reading.recipes import MODEL, RECIPE, arguments, recipe
from phalanx.frameworks.tables import merge_tables
from phalanx.spec.errors import InputError
from phalanx.spec.model import presets

_NEMO = ("pretrain_recipe", "finetune_recipe")
_BRIDGE = re.compile(r"\w+_(pretrain|sft|peft|finetune)\w*_config|ConfigContainer")
_STARTS = ("pretrain", "finetune", "train")
_SECTIONS = ("trainer", "data", "model", "optim")
_NAMED_CONFIGS = ("get_mixed_precision_config", "default_peft_config")
_RANK = 32
"""Default rank of LoRA (src/megatron/bridge/peft/lora.py:146)."""
_CLASS = re.compile(r"(Llama|Qwen|Mistral|Mixtral|Gemma|DeepSeek)([\w]*?)Config_?(\w+)")


def tables(file: PythonFile) -> dict[str, Any] | None:
    """Return the tables of a program that makes a recipe, a ConfigContainer or a trainer of NeMo; None for others.
    Raises InputError for a program that makes two."""
    program = file.program
    recipes = [m for m in program.objects if m.last in _NEMO or _BRIDGE.fullmatch(m.last)]
    recipes = [m for m in recipes if m.fields] or recipes
    if len(recipes) > 1:
        lines = ", ".join(str(m.line) for m in recipes[:4])
        raise InputError(
            "file", file.name, f"makes {len(recipes)} recipes, in lines {lines}", "keep the one that is run"
        )
    if recipes:
        return _of_recipe(recipes[0], program)
    started = [m for m in program.named(*_STARTS) if isinstance(m.fields.get("trainer"), PythonObject)]
    return _by_hand(started[0], program) if started else None


def _of_recipe(item: PythonObject, program: FollowedProgram) -> dict[str, Any]:
    name = item.name.split(".")[-2] if item.last in _NEMO and "." in item.name else item.last
    own = {n: v for n, v in item.tables().items() if isinstance(v, dict)} | _made_by_name(item)
    own |= _provided_model(item, program)
    if item.last == "ConfigContainer":
        return own
    known = recipe("megatron_bridge", name, item.last.partition("_")[0])
    over = merge_tables(arguments(item.fields), own)
    return Partial({**over, RECIPE: name}) if known is None else merge_tables(known[0], over)


def _provided_model(item: PythonObject, program: FollowedProgram) -> dict[str, Any]:
    """Return the model of `AutoBridge.from_hf_pretrained(NAME).to_megatron_provider()`, where a recipe's is such a
    one."""
    provider = item.fields.get("model")
    if not isinstance(provider, PythonObject) or provider.last != "to_megatron_provider":
        return {}
    names = [m.positional[0] for m in program.named("from_hf_pretrained") if m.positional and m.line <= provider.line]
    return {MODEL: names[-1]} if names and isinstance(names[-1], str) else {}


def _made_by_name(item: PythonObject) -> dict[str, Any]:
    """Return the sections of a recipe that a name means: mixed precision and adapters."""
    precision, peft = item.fields.get("mixed_precision"), item.fields.get("peft")
    sections: dict[str, Any] = {}
    if isinstance(precision, PythonObject):
        known = mixed_precision(_name(precision))
        sections["mixed_precision"] = {**known, **precision.tables()} if known else plain(precision)
    elif isinstance(precision, str):
        sections["mixed_precision"] = precision
    if peft is not None and _name(peft).lower() in ("lora", "canonicallora"):
        sections["peft"] = {"dim": _RANK} | (peft.tables() if isinstance(peft, PythonObject) else {})
    return sections


def _name(item: Any) -> str:
    """Return what a call makes, by its own name or, of get_mixed_precision_config("bf16_mixed"), by its argument."""
    if not isinstance(item, PythonObject):
        return str(item)
    by_name = item.positional and item.last in _NAMED_CONFIGS
    return str(item.positional[0]) if by_name else item.last


def _by_hand(started: PythonObject, program: FollowedProgram) -> dict[str, Any]:
    """Return the arguments of llm.pretrain(...) as tables, with the model that the program configures."""
    result = {n: plain(v) for n, v in started.fields.items() if n in _SECTIONS and isinstance(v, PythonObject)}
    for m in program.objects:
        if (match := _CLASS.fullmatch(m.last)) is not None:
            family, release, size = match[1], match[2].replace("1", ".1"), match[3]
            dashed = f"{family}-{release}-{size}"
            for name in (dashed, f"Meta-{dashed}", f"{family}{release}-{size}"):
                if (known := presets.published(name)) is not None:
                    result[MODEL] = known
    return result
