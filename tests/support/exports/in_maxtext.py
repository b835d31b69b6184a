# mypy: ignore-errors
"""Runs beside MaxText's sources: its MaxTextConfig, as maxtext.trainers.pre_train.train builds it.

What its configuration imports and does not call (Cloud storage, Pathways, checkpoints) is pretended, and the devices
are as many as the plan's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from protocol import answer, pretend

pretend(
    "google",
    "orbax",
    "pathwaysutils",
    "flax",
    "tensorboardX",
    "absl",
    "optax",
    "grain",
    "datasets",
    "etils",
    "psutil",
)


def derive(case: dict[str, Any]) -> dict[str, Any]:
    """Merge the file over base.yml, validate; return what MaxText derives of the mesh and the batch."""
    import jax
    import yaml
    from maxtext.configs import types

    jax.devices = lambda *_: [object()] * case["world"]
    jax.local_device_count = lambda *_: min(8, case["world"])
    configs = Path(types.__file__).parent
    table = yaml.safe_load((configs / "base.yml").read_text())
    ours = yaml.safe_load(Path("config.yml").read_text())
    if ours.pop("base_config") != "base.yml":
        raise ValueError("another base")
    unknown = sorted(set(ours) - set(types.MaxTextConfig.model_fields))
    if unknown:
        raise ValueError(f"MaxText has no {', '.join(unknown)}")
    blanks = {"run_name": "phalanx", "learning_rate": 1e-4, "steps": 100, "tokenizer_path": "tokenizer"}
    table |= {**ours, **blanks, "base_output_directory": "/tmp", "hf_train_files": "data"}
    c = types.MaxTextConfig(**{k: None if v == "None" else v for k, v in table.items()})  # as pyconfig reads it

    def degree(*axes: str) -> int:
        return math.prod(getattr(c, f"{side}_{axis}_parallelism") for axis in axes for side in ("ici", "dcn"))

    tp, pp, cp = degree("tensor", "tensor_sequence"), degree("pipeline"), degree("context")
    dp = degree("data", "fsdp", "expert")
    micro_batches = c.num_pipeline_microbatches if pp > 1 else c.gradient_accumulation_steps
    return {
        "world": dp * tp * pp * cp,
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "micro_batches": micro_batches,
        "micro_batch": c.global_batch_size_to_train_on // (micro_batches * dp),
    }


def schema() -> dict[str, Any]:
    """Return every key of MaxTextConfig, and the words of those that are enumerations."""
    from enum import Enum
    from typing import get_args

    from maxtext.configs import types

    fields = types.MaxTextConfig.model_fields
    choices: dict[str, list[Any]] = {}
    for name, f in fields.items():
        for kind in (f.annotation, *get_args(f.annotation)):
            if isinstance(kind, type) and issubclass(kind, Enum) and name != "custom_mesh_and_rule":
                choices[name] = [e.value for e in kind]
    keys = sorted((*fields, "base_config"))
    return {"version": "maxtext e591f30", "flags": [], "keys": keys, "choices": choices}


if __name__ == "__main__":
    answer(derive, schema)
