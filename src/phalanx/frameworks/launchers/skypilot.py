"""SkyPilot: a task of several nodes on whichever cloud has them (sky/utils/schemas.py)."""

from __future__ import annotations

import json
import re

from phalanx.frameworks.launchers.task import PORT, Task
from phalanx.frameworks.program import FILL_IN
from phalanx.spec.errors import InputError

_DEVICES = {
    "A100-SXM4-40GB": "A100",
    "A100-SXM4-80GB": "A100-80GB",
    "V100": "V100",
    "L40S": "L40S",
    "L4": "L4",
    "GB200": "GB200",
    "GB300": "GB300",
    "H100": "H100",
    "H200": "H200",
    "B200": "B200",
    "B300": "B300",
    "A100": "A100",
}
"""SkyPilot's names (`sky show-gpus`), by what ours begin with, longer ones first."""


def accelerator(device: str) -> str:
    """Return SkyPilot's name of a GPU. Raises InputError for one that it does not rent."""
    for ours, theirs in _DEVICES.items():
        if re.match(rf"{re.escape(ours)}\b", device):
            return theirs
    raise InputError(
        "cluster.device", device, "is no accelerator that SkyPilot rents", f"known: {', '.join(_DEVICES)}"
    )


def files(t: Task) -> dict[str, str]:
    """Return task.yaml: sky launch task.yaml. Raises InputError for a GPU that SkyPilot does not rent."""
    envs = {b.name: b.default if b.default != FILL_IN else f"FILL-IN-{b.name}" for b in t.blanks}
    tail = ["envs:", *(f"  {name}: {json.dumps(value)}" for name, value in envs.items())] if envs else []
    lines = [
        f"# {t.nodes} nodes of {t.gpus} GPUs.  sky launch task.yaml",
        f"name: {t.name}",
        "workdir: .",
        f"num_nodes: {t.nodes}",
        "resources:",
        f"  accelerators: {accelerator(t.device)}:{t.gpus}",
        "  # The fastest network that the cloud has between these nodes.",
        "  network_tier: best",
        "  image_id: docker:FILL-IN-IMAGE",
        *tail,
        "run: |",
        "  export NNODES=$SKYPILOT_NUM_NODES NODE_RANK=$SKYPILOT_NODE_RANK",
        "  export NPROC_PER_NODE=$SKYPILOT_NUM_GPUS_PER_NODE",
        '  export MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        f"  export MASTER_PORT={PORT}",
        "  exec bash ./train.sh",
    ]
    return {"task.yaml": "\n".join(lines) + "\n"}
