"""Kubeflow Trainer v2: a TrainJob under the runtime torch-distributed, whose torch plugin sets PET_* for torchrun."""

from __future__ import annotations

from typing import Any

from phalanx.frameworks.launchers.kubernetes import (
    MOUNT,
    QUEUE,
    SHARED_MEMORY,
    command,
    config_map,
    documents,
    environment,
    resources,
    topology,
    volumes,
)
from phalanx.frameworks.launchers.task import Task

_LINE = (
    "export NNODES=$PET_NNODES NODE_RANK=$PET_NODE_RANK NPROC_PER_NODE=$PET_NPROC_PER_NODE "
    "MASTER_ADDR=$PET_MASTER_ADDR MASTER_PORT=$PET_MASTER_PORT;"
)


def manifest(t: Task) -> dict[str, Any]:
    """Return the TrainJob."""
    pod = {
        "nodeSelector": {"nvidia.com/gpu.product": "FILL-IN-GPU-PRODUCT-LABEL"},
        "containers": [{"name": "node", "volumeMounts": [MOUNT, SHARED_MEMORY]}],
        "volumes": volumes(t),
    }
    template = {"metadata": {"annotations": topology(t)}, "spec": pod}
    patch = {
        "manager": "phalanx.dev/export",
        "trainingRuntimeSpec": {
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": template}}}]}}
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": t.name, "labels": QUEUE},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": "FILL-IN-IMAGE",
                "command": command(_LINE),
                "env": environment(t),
                "numNodes": t.nodes,
                "numProcPerNode": t.gpus,
                "resourcesPerNode": resources(t),
            },
            "runtimePatches": [patch],
        },
    }


def files(t: Task) -> dict[str, str]:
    """Return trainjob.yaml: kubectl apply -f it."""
    return {"trainjob.yaml": documents(config_map(t), manifest(t))}
