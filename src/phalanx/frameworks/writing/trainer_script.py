"""The training script that DeepSpeed and accelerate start: transformers' Trainer on a model of a config.json.

train.py                  builds the model from model/config.json, reads the arguments, trains
training_arguments.json   TrainingArguments: batch, recomputation, optimizer
config.json               the model (spec/model/families.py)
"""

import json
from pathlib import Path
from typing import Any

from phalanx.frameworks.trainer_tuning import ATTENTION
from phalanx.frameworks.writing.script import TEMPLATES, filled
from phalanx.frameworks.writing.subject import Subject
from phalanx.spec.errors import InputError
from phalanx.spec.model.families import complete, family_of, to_hugging_face
from phalanx.spec.model.hugging_face.reader import read
from phalanx.spec.model.hugging_face.reading import Config
from phalanx.spec.model.spec import MODEL_FIELDS


def arguments(x: Subject, **more: Any) -> dict[str, Any]:
    """Return TrainingArguments of a plan, `more` among them, and attn_implementation, which train.py hands to the
    model. Raises InputError for recomputation of some of the blocks."""
    s, a, t = x.s, x.job.optimizer, x.training
    kernels = [word for word, kernel in ATTENTION.items() if kernel == x.options.attention]
    if s.recompute not in ("none", "full", "uniform:1"):
        reason = "transformers recomputes every block or none"
        raise InputError("strategy.recompute", s.recompute, reason, "use full or none")
    return {
        "per_device_train_batch_size": s.micro_batch,
        "gradient_accumulation_steps": x.micro_batches,
        "gradient_checkpointing": s.recompute != "none",
        "bf16": x.compute == "bf16",
        "fp16": x.compute == "fp16",
        **({"tf32": True} if x.rounded else {}),
        "adam_beta1": a.betas[0],
        "adam_beta2": a.betas[1],
        "adam_epsilon": a.eps,
        "weight_decay": a.weight_decay,
        "max_grad_norm": x.job.clip,
        **_decay(x),
        "warmup_steps": t.warmup or 0,
        "logging_steps": 1,
        **({"seed": t.seed} if t.seed else {}),
        **({"save_steps": t.save_every} if t.save_every else {}),
        **_LOSSES.get(x.options.cross_entropy, {}),
        **({"attn_implementation": kernels[0]} if kernels else {}),
        **more,
    }


_LOSSES: dict[str, dict[str, Any]] = {
    "linear": {"use_liger_kernel": True},
    "fused": {
        "use_liger_kernel": True,
        "liger_kernel_config": {"cross_entropy": True, "fused_linear_cross_entropy": False},
    },
}
"""Arguments that turn a loss on (transformers, integrations/liger.py)."""


def _decay(x: Subject) -> dict[str, Any]:
    """Return the schedule of the learning rate: a linear one that ends above 0 is a polynomial of power 1."""
    words = {"linear": "linear", "constant": "constant_with_warmup", "inverse-sqrt": "inverse_sqrt"}
    word, share = x.schedule_in(words, "cosine"), x.final_lr_share
    if word not in ("cosine", "linear") or share == 0:
        return {"lr_scheduler_type": word}
    if word == "linear":
        kwargs = {"lr_end": x.training.min_lr, "power": 1.0}
        return {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": kwargs}
    return {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": share}}


_CONFIG = 'AutoConfig.from_pretrained("config.json")'
_FROM_FIRST_RANK = """# FSDP hands out the initial weights of the first rank; the others hold none.
with nullcontext() if os.environ.get("RANK", "0") == "0" else init_empty_weights():
    """


def files(x: Subject, given: dict[str, Any], more: str = "", from_first_rank: bool = False) -> dict[str, str]:
    """Return train.py, its arguments and config.json. `more`: lines that add to the arguments; `from_first_rank`:
    whether other ranks than the first build the model without weights.

    Raises InputError for a model that transformers does not have."""
    config = to_hugging_face(x.model)
    _require_whole(x, config)
    kernel = ""
    if "attn_implementation" in given:
        more += 'attention = given.pop("attn_implementation")\n'
        kernel = ", attn_implementation=attention"
    model = f"model = AutoModelForCausalLM.from_config({_CONFIG}{kernel})"
    return {
        "train.py": filled(
            TEMPLATES / "train.py.template",
            seq=x.job.seq,
            more=more,
            imports="from contextlib import nullcontext\n" if from_first_rank else "",
            packages="from accelerate import init_empty_weights\n" if from_first_rank else "",
            model=_FROM_FIRST_RANK + model if from_first_rank else model,
        ),
        "training_arguments.json": json.dumps(given, indent=2) + "\n",
        "config.json": json.dumps(config, indent=2) + "\n",
    }


def _require_whole(x: Subject, config: dict[str, Any]) -> None:
    """Require that config.json describes the whole model: read back, it gives the same fields. Raises InputError."""
    row = family_of(x.model.family)
    back = complete({"family": x.model.family, **read(row, Config(config, Path("config.json")))})
    for name in MODEL_FIELDS:
        nested = name in ("experts", "latent", "rope_scaling")
        if name in back and not nested and back[name] != getattr(x.model, name):
            reason = f"transformers' {x.model.family} has {back[name]}"
            raise InputError(f"model.{name}", getattr(x.model, name), reason, "use another family")


DATA = "a dataset that datasets.load_dataset reads, with a column `text`"
