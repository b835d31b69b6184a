"""What a Trainer's configuration trains (the whole model, or adapters over a frozen base), with which loss, against
which reference, by which optimizer: as options of a stack.

Names differ by program: TRL (`use_peft`, `lora_r`: trl/trainer/model_config.py), LLaMA-Factory (`finetuning_type`,
`lora_rank`, `quantization_bit`: src/llamafactory/hparams/{finetuning,model}_args.py), axolotl (`adapter`,
`lora_target_linear`: src/axolotl/utils/schemas/peft.py), LLaVA and FastChat (`lora_enable`, `bits`).
"""

import re
from collections.abc import Mapping
from typing import Any

from phalanx.frameworks.configuration import Keys
from phalanx.frameworks.values import count, number, truth
from phalanx.spec.errors import InputError

_HUB = {
    "kernels-community/vllm-flash-attn3": "flash3",
    "kernels-community/flash-attn3": "flash3",
    "kernels-community/flash-attn2": "flash2",
    "kernels-community/flash-attn": "flash2",
}
"""Kernels of Hugging Face's hub, as attention's kernels."""
ATTENTION = {"eager": "unfused", "sdpa": "flash", "flash_attention_2": "flash2", "flash_attention_3": "flash3"} | _HUB
"""Values of transformers' attn_implementation -> attention's kernel."""
_METHOD = ("finetuning_type", "adapter", "peft_type", "peft_method")
_SWITCHES = ("use_peft", "use_lora", "lora_enable", "enable_lora", "lora", "peft")
_RANKS = ("lora_rank", "lora_r", "lora_dim", "peft_lora_r", "r")
_TARGETS = ("lora_target", "lora_target_modules", "lora_modules", "target_modules")
_MAGNITUDES = ("use_dora", "peft_use_dora")
_DROPOUT = 0.05
"""Default of TRL's adapters (trl/trainer/model_config.py: lora_dropout); other programs have none."""
_LORA_METHODS = {"lora", "qlora", "dora", "pissa"}
_WHOLE = {"full", "none", ""}
_UPDATES = {name: {"update": "foreach"} for name in ("adamw_torch", "adamw_hf")} | {
    name: {"first_moment": "float8", "second_moment": "float8"}
    for name in ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
}
"""TrainingArguments' names of optimizers -> options: AdamW that torch runs as single operations rather than as one
kernel, and AdamW with moments in 8 bits (transformers, trainer_optimizer.py; bitsandbytes, optim/adamw.py)."""
_UPDATED = "job.optimizer.name"
_PREFERRED = "options.reference"
_KL = ("kto",)
"""Methods that learn from single examples, and estimate a divergence from answers to other prompts (TRL,
kto_trainer.py; LLaMA-Factory, src/llamafactory/train/kto/trainer.py; ms-swift,
swift/trainers/rlhf_trainer/kto_trainer.py)."""
_PAIRED = {"dpo": True, "ipo": True, "orpo": False, "simpo": False, "cpo": False}
"""Methods whose examples are pairs, and whether a reference scores them (TRL, dpo_trainer.py, cpo_trainer.py; LLaMA-
Factory, finetuning_args.py: use_ref_model; axolotl, core/builders/rl.py)."""
_UNNAMED = (
    "no optimizer is named: AdamW updates tensor by tensor, as with torch before 2.8; fused, memory may be less"
)
_LOSS = "options.cross_entropy"
_LIGER = ("use_liger_kernel", "enable_liger_kernel", "use_liger")
_UNFUSED = "of Liger's kernels the loss has a price: its norms, rotation and MLP keep less memory than is said"
_SMALLER = ("liger_rms_norm", "liger_layer_norm", "liger_glu_activation", "liger_swiglu", "liger_rope")
"""Liger's other kernels, by axolotl's keys (src/axolotl/integrations/liger/args.py:31)."""
_RANK = 8
"""Rank of adapters where the file has none (peft's LoraConfig; LLaMA-Factory's)."""
_ATTENTION = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "query_key_value"),
    *("c_attn", "wq", "wk", "wv", "wo", "Wqkv", "out_proj"),
}
_NAMED = ("model_name_or_path", "base_model", "model")
_GPTQ = re.compile(r"-(gptq(?!.*int8)|int4$)", re.IGNORECASE)
"""Names of checkpoints whose weights are in GPTQ's 4 bits."""
_AFTER = {"o_proj", "wo", "out_proj"}
"""Attention's product behind its core."""


def adapter_options(keys: Keys, at: str = "") -> tuple[dict[str, Any], str]:
    """Return the options of adapters and their base, empty where the whole model is trained; and why the training has
    no price, "" where it has one. `at`: the table of the keys, with its dot."""

    def of(names: tuple[str, ...], field: str) -> Any:
        return keys.take(tuple(f"{at}{name}" for name in names), field)

    method = str(of(_METHOD, "options.lora") or "").lower()
    switch = of(_SWITCHES, "options.lora")
    stated = of(_RANKS, "options.lora")
    rank = count(stated)
    trains = method in _LORA_METHODS or truth(switch) is True or (not method and switch is None and rank is not None)
    if method not in _LORA_METHODS | _WHOLE:
        return {}, f"{method} trains another part of the model than all of it or adapters"
    base = _base(keys, at, of, method)
    if not trains:
        return {}, "a quantised model is trained without adapters" if base else ""
    if rank is None and stated not in (None, ""):
        raise InputError(f"{at}rank of adapters", stated, "is no count", "write a positive whole number")
    options: dict[str, Any] = {"lora": rank or _RANK}
    targets, linear = of(_TARGETS, "options.lora_targets"), of(("lora_target_linear",), "options.lora_targets")
    if not truth(linear) and (of_attention := _on_attention_alone(targets)):
        options["lora_targets"] = of_attention
    if truth(of(_MAGNITUDES, "options.dora")) or method == "dora":
        by_default = _DROPOUT if truth(switch) else 0.0
        dropped = number(of(("lora_dropout",), "options.dora"), by_default) > 0
        options["dora"] = "dropout" if dropped else "on"
    return options | ({"base": base} if base else {}), ""


def preference_options(
    keys: Keys, at: str, adapters: bool, skips: tuple[str, ...] = ("reference_free", "precompute_ref_log_probs")
) -> tuple[dict[str, Any], int, tuple[str, ...]]:
    """Return the options of learning from preferences, the sequences of an example, and what is assumed.

    DPO's example is a pair, which a reference scores too: a frozen copy of the model, or under adapters the model
    without them. Other methods of reinforcement learning are left to the verdicts of their keys. `skips`: switches
    that leave out the reference of a pair."""

    def of(*names: str) -> str:
        return str(keys.take(tuple(f"{at}{name}" for name in names), _PREFERRED) or "").lower()

    method = of("rl", "rlhf_type", "stage")
    if method not in (*_PAIRED, *_KL):
        keys.understood = {key: meaning for key, meaning in keys.understood.items() if meaning != _PREFERRED}
        return {}, 1, ()
    of("beta")
    reference, named = ("base", "the model without adapters") if adapters else ("copy", "a frozen copy of the model")
    loss = {of("pref_loss"), of("loss_type")}
    if method in _KL:
        if of("precompute_ref_log_probs") == "true":
            return {"reference": "base"}, 1, ("the model scores another prompt's answer for each example",)
        if "apo_zero_unpaired" in loss or keys.truth(f"{at}calculate_KL", _PREFERRED) is False:
            return {"reference": reference}, 1, (f"each example is a sequence, which {named} scores too",)
        note = f"{named} scores each sequence and one for the divergence, as the model does"
        return {"reference": f"{reference}-kl"}, 1, (note,)
    without = [of(name) == "true" for name in skips]
    if _PAIRED[method] and not any(without) and not loss & _PAIRED.keys() - {"ipo"}:
        return {"reference": reference}, 2, (f"each example is a pair of sequences, which {named} scores too",)
    return {}, 2, ("each example is a pair of sequences",)


_UNSLOTH = "of unsloth's kernels the loss has a price, its others have none: time and memory may be lower"
SLICED = (
    "unsloth's loss makes logits in slices, as since December 2024 of over 1,024 tokens; before, it made them all"
)
"""unsloth/models/llama.py, CausalLM_fast_forward: RETURN_LOGITS, fused_linear_cross_entropy; the release that made
its loss one of slices: unsloth.ai/blog/llama3-3."""
WHOLE_LOGITS = "all logits are made, as by TRL's SFTTrainer before 1.7; since, its loss_type is chunked_nll"
"""huggingface/trl#5846."""
_SFT_ARGUMENTS = (
    *("dataset_text_field", "assistant_only_loss", "completion_only_loss", "pad_to_multiple_of"),
    *("eval_packing", "packing_strategy"),
)
"""Arguments of TRL's SFTConfig (trl/trainer/sft_config.py)."""


def loss_options(keys: Keys, at: str, plain: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the option of the loss's kernel (cross_entropy: one kernel, or one with the head's product that makes
    logits in parts), and what is assumed of other kernels that come with it. `plain`: whether the loss is that of the
    next token; others need all logits.

    Liger's is on with `use_liger_kernel` (transformers, integrations/liger.py; liger_kernel/transformers/
    monkey_patch.py), axolotl's by a key or a plugin (src/axolotl/integrations/cut_cross_entropy/args.py)."""
    if not plain:
        return {}, ()
    if keys.truth(f"{at}use_unsloth", _LOSS):
        return {"cross_entropy": "linear"}, (SLICED, _UNSLOTH)
    config = keys.config.get(at.removesuffix("."), {}) if at else keys.config
    named = config.get("plugins") if isinstance(config, Mapping) else None
    plugged = any(str(name).endswith("CutCrossEntropyPlugin") for name in (named if isinstance(named, list) else ()))
    alone = keys.truth(f"{at}liger_fused_linear_cross_entropy", _LOSS)
    cut = keys.truth(f"{at}cut_cross_entropy", _LOSS, plugged)
    whole = keys.truth(tuple(f"{at}{name}" for name in _LIGER), _LOSS)
    some = f"{at}liger_kernel_config."
    if whole and keys.truth(f"{some}fused_linear_cross_entropy", _LOSS) is not False:
        return {"cross_entropy": "linear"}, (_UNFUSED,)
    if alone or cut:
        smaller = isinstance(config, Mapping) and any(truth(config.get(name)) for name in _SMALLER)
        return {"cross_entropy": "linear"}, (_UNFUSED,) if smaller else ()
    named = keys.take(f"{at}loss_type", _PREFERRED)
    if named == "chunked_nll":  # TRL's (trl/trainer/sft_config.py:306)
        keys.understood[f"{at}loss_type"] = _LOSS
        return {"cross_entropy": "linear"}, ()
    fused = keys.truth(f"{at}liger_cross_entropy", _LOSS) or (whole and keys.truth(f"{some}cross_entropy", _LOSS))
    if not fused and named is None and isinstance(config, Mapping) and not config.keys().isdisjoint(_SFT_ARGUMENTS):
        return {}, (WHOLE_LOGITS,)
    return ({"cross_entropy": "fused"} if fused else {}), ()


def optimizer_options(keys: Keys, name: str, adapters: bool) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the options of the optimizer that a key names, and what is assumed where none is named: torch's AdamW,
    which transformers fuses since torch 2.8. With `adapters` only the type of the moments counts: torch's single
    operations need extra memory for the few parameters of adapters alone."""
    given = keys.take(name, _UPDATED)
    named = str(given or "adamw_torch")
    if named not in (*_UPDATES, "adamw_torch_fused", "adamw_apex_fused"):  # another, which has its verdict
        keys.understood = {key: meaning for key, meaning in keys.understood.items() if meaning != _UPDATED}
    options = _UPDATES.get(named, {})
    if adapters:
        return {option: value for option, value in options.items() if option != "update"}, ()
    return dict(options), () if given else (_UNNAMED,)


def _base(keys: Keys, at: str, of: Any, method: str) -> str:
    """Return the number format of the frozen weights, "" for 16 bits."""
    bits = count(of(("quantization_bit", "bits"), "options.base"))
    four = truth(of(("load_in_4bit", "q_lora", "use_4bit", "use_qlora"), "options.base"))
    eight = truth(of(("load_in_8bit", "use_8bit"), "options.base"))
    table = keys.config.get("quantization_config") if not at else None
    if isinstance(table, Mapping):
        four, eight = four or truth(table.get("load_in_4bit")), eight or truth(table.get("load_in_8bit"))
    named = (str(keys.config.get(f"{at}{name}", "")) for name in _NAMED)
    if truth(of(("gptq",), "options.base")) or any(map(_GPTQ.search, named)):
        return "gptq"
    twice = truth(of(("double_quantization", "double_quant", "use_bnb_nested_quant"), "options.base"))
    if bits == 4 or four or method == "qlora":
        # LLaMA-Factory, QLoRA's own script and axolotl quantise the scales too; TRL does where a key says so.
        return "nf4" if twice is False or (twice is None and four and method != "qlora") else "nf4-double"
    return "int8" if bits == 8 or eight else ""


def _on_attention_alone(targets: Any) -> str:
    """Return options.lora_targets of adapters on attention's products alone: `qkv`, or `attention` with the product
    behind its core; "" where none is named or others have adapters too."""
    words = targets if isinstance(targets, list) else re.split(r"[\s,\[\]'\"]+", str(targets or ""))
    named = {str(word) for word in words} - {""}
    return "" if not named or not named <= _ATTENTION else "attention" if named & _AFTER else "qkv"
