# mypy: ignore-errors
"""Runs an exported train.py in the environment of transformers, up to where it would train.

The arguments and the model's configuration are transformers' own; the tokenizer, the data, the weights and the
Trainer are pretended, and as many ranks with a GPU as the plan has.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


def arguments_of(world: int) -> Any:
    """Return the TrainingArguments with which train.py of this folder would train on so many ranks."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments, training_args
    from transformers.integrations import deepspeed

    given = []

    def trainer(model, arguments, **_):
        given.append((model, arguments))
        return MagicMock()

    def built(config):
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(f"AutoModelForCausalLM builds no {type(config).__name__}")
        return MagicMock(config=config)

    datasets = ModuleType("datasets")
    datasets.load_dataset = MagicMock(name="load_dataset")
    sys.modules["datasets"] = datasets
    transformers.Trainer = trainer
    AutoTokenizer.from_pretrained = MagicMock(name="tokenizer")
    AutoModelForCausalLM.from_config = built
    training_args.is_torch_bf16_gpu_available = lambda: True
    training_args.is_torch_tf32_available = lambda: True
    TrainingArguments.world_size = property(lambda _: world)
    TrainingArguments._setup_devices = torch.device("cpu")
    deepspeed.is_deepspeed_available = lambda: True
    os.environ["RANK"] = "1"  # not the first, which has more to build
    try:
        runpy.run_path("train.py", run_name="__main__")
    finally:
        deepspeed.unset_hf_deepspeed_config()
    ((model, arguments),) = given
    if arguments.hf_deepspeed_config if arguments.deepspeed else None:
        arguments.hf_deepspeed_config.trainer_config_finalize(arguments, model, arguments.max_steps)
    for name, value in (("learning_rate", float(os.environ["LR"])), ("max_steps", int(os.environ["TRAIN_ITERS"]))):
        if getattr(arguments, name) != value:
            raise ValueError(f"{name} is {getattr(arguments, name)}, not {value}")
    return arguments
