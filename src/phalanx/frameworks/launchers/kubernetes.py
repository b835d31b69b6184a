"""What the launchers on Kubernetes share: the folder as a ConfigMap, and a pod that runs train.sh.

Manifests are JSON documents, which YAML contains, so that no quoting can go wrong. Blanks are entries of `env`.
"""

from __future__ import annotations

import json
from typing import Any

from phalanx.frameworks.launchers.task import Task
from phalanx.frameworks.program import FILL_IN

LEAF_LABEL = "cloud.provider.com/topology-rack"
"""The label of nodes under one leaf switch, as Kueue's topologies name it."""
QUEUE = {"kueue.x-k8s.io/queue-name": "FILL-IN-LOCAL-QUEUE"}
FOLDER = "/phalanx"


def config_map(t: Task) -> dict[str, Any]:
    """Return the folder's files as a ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{t.name}-files"}, "data": t.files}


def topology(t: Task) -> dict[str, str]:
    """Return the annotations by which Kueue places the pods: under one leaf switch if they all fit there."""
    relation = "required" if t.leaves == 1 else "preferred"
    return {f"kueue.x-k8s.io/podset-{relation}-topology": LEAF_LABEL}


def environment(t: Task, **more: str) -> list[dict[str, str]]:
    """Return the blanks, and what the launcher sets, as a container's `env`."""
    given = {b.name: b.default if b.default != FILL_IN else f"FILL-IN-{b.name}" for b in t.blanks}
    return [{"name": name, "value": value} for name, value in (given | more).items()]


def command(line: str) -> list[str]:
    """Return a container's command that sets what train.sh reads, and runs it."""
    return ["bash", "-c", f"{line} exec bash {FOLDER}/train.sh"]


def resources(t: Task) -> dict[str, Any]:
    """Return a node's GPUs as a container's resources."""
    return {"limits": {"nvidia.com/gpu": t.gpus}, "requests": {"nvidia.com/gpu": t.gpus}}


MOUNT = {"name": "files", "mountPath": FOLDER}
SHARED_MEMORY = {"name": "shm", "mountPath": "/dev/shm"}


def volumes(t: Task) -> list[dict[str, Any]]:
    """Return the ConfigMap, and shared memory for data loaders and NCCL."""
    return [
        {"name": "files", "configMap": {"name": f"{t.name}-files"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def pod(t: Task, name: str, line: str, **more: str) -> dict[str, Any]:
    """Return a pod's spec: one container that runs train.sh on all of a node's GPUs."""
    return {
        "restartPolicy": "Never",
        "nodeSelector": {"nvidia.com/gpu.product": "FILL-IN-GPU-PRODUCT-LABEL"},
        "containers": [
            {
                "name": name,
                "image": "FILL-IN-IMAGE",
                "command": command(line),
                "env": environment(t, **more),
                "resources": resources(t),
                "volumeMounts": [MOUNT, SHARED_MEMORY],
            }
        ],
        "volumes": volumes(t),
    }


def documents(*parts: dict[str, Any]) -> str:
    """Write documents of one YAML file."""
    return "---\n".join(json.dumps(part, indent=2) + "\n" for part in parts)
