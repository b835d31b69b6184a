"""Write fitted constants to the data files that ship."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calibration.links import KEYS
from phalanx.cost.analytic import fitted_constants
from phalanx.validate import prediction_error

# The published runs that determine an owner's constants.
ORIGINS = {
    "links": "nccl-tests of collectives.csv",
    "nvidia": "all families on NVIDIA's chips",
    "ampere": "vtrain, llm-foundry, megatron-sc21, bigscience-bloom on A100",
    "hopper": "nvidia-dgxc-benchmarking, hf-ultrascale, llm-foundry, nemo-megatron-bridge on H100",
    "blackwell": "simumax-b200, nemo-megatron-bridge on B200 and GB200",
    "blackwell-ultra": "nemo-megatron-bridge on B300 and GB300",
    "H100-500W": "torchtitan, torchao",
    "GB200": "nemo-megatron-bridge, against B200",
    "GB300": "nemo-megatron-bridge, against B300",
    "any": "all families",
    "eager": "hf-ultrascale, llm-foundry, torchtitan without compiling",
    "compiled": "torchtitan, MaxText and PAX of nvidia-dgxc-benchmarking",
    "megatron-core": "nvidia-dgxc-benchmarking, nemo-megatron-bridge, simumax-b200; memory: Megatron's own tests",
    "megatron-core-unfused": "Megatron's own tests",
    "megatron-2020": "vtrain, megatron-sc21, megatron-2020-tp, bigscience-bloom",
    "megatron-2021": "megatron-sc21",
    "megatron-2022": "vtrain over several nodes",
    "vtrain": "vtrain in one node",
    "megatron-deepspeed-2022": "bigscience-bloom",
    "megatron-deepspeed-2022-bf16": "bigscience-bloom in bf16",
    "nanotron": "hf-ultrascale",
    "llm-foundry": "llm-foundry",
    "torchtitan-compiled": "torchtitan, torchao",
    "torchtitan-eager": "torchtitan, torchao",
    "simumax-b200": "simumax-b200",
    "maxtext": "MaxText of nvidia-dgxc-benchmarking",
    "pax": "PAX of nvidia-dgxc-benchmarking",
    "nemo-24.03": "nemo-longseq",
    "nemo-24.11": "NeMo of nvidia-dgxc-benchmarking",
    "nemo-25.04": "NeMo 25.04 of nvidia-dgxc-benchmarking",
    "nemo-25.05": "NeMo 25.05 of nvidia-dgxc-benchmarking",
}


def rounded(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return constants, or tables of them, with four digits."""
    return {k: rounded(v) if isinstance(v, Mapping) else float(f"{v:.4g}") for k, v in table.items()}


def save(path: Path, content: object) -> None:
    """Write a data file that ships."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def write(constants: Mapping[str, float]) -> None:
    """Write the constants that ship, owner by owner, with the runs that determine each."""
    groups: dict[str, dict[str, float]] = {"links": {key: constants[key] for key in KEYS}}
    for key, value in constants.items():
        if key not in KEYS:
            groups.setdefault(key.rsplit(".", 1)[0], {})[key] = value
    save(
        fitted_constants.FILE,
        [{"name": name, "fitted_on": _origin(name), "constants": rounded(group)} for name, group in groups.items()],
    )


def _origin(owner: str) -> str:
    return ORIGINS.get(owner, owner.replace("megatron-bridge-", "nemo-megatron-bridge of release "))


def write_left_out(name: str, kinds: Sequence[str], constants: Mapping[str, float]) -> None:
    """Replace one entry of `phalanx.validate.prediction_error`: the constants fitted without these kinds of runs, as
    far as they differ from those that ship, with four digits each."""
    shipped = fitted_constants.fitted_constants()
    changed = {key: value for key, value in rounded(constants).items() if shipped.get(key) != value}
    known = json.loads(prediction_error.FILE.read_text()) if prediction_error.FILE.exists() else {}
    known[name] = {"kinds": list(kinds), "constants": changed}
    prediction_error.FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
