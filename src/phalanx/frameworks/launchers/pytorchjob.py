"""Kubeflow's PyTorchJob (training-operator v1): a master and workers, one pod a node.

The operator sets MASTER_ADDR, MASTER_PORT, and RANK, the pod's number.
"""

from __future__ import annotations

from typing import Any

from phalanx.frameworks.launchers.kubernetes import QUEUE, config_map, documents, pod, topology
from phalanx.frameworks.launchers.task import Task


def manifest(t: Task) -> dict[str, Any]:
    """Return the PyTorchJob."""
    line = f"export NNODES={t.nodes} NPROC_PER_NODE={t.gpus} NODE_RANK=$RANK;"
    template = {"metadata": {"annotations": topology(t)}, "spec": pod(t, "pytorch", line)}
    del template["spec"]["restartPolicy"]  # the replica's own
    replica = {"restartPolicy": "OnFailure", "template": template}
    replicas: dict[str, Any] = {"Master": {"replicas": 1, **replica}}
    if t.nodes > 1:
        replicas["Worker"] = {"replicas": t.nodes - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": t.name, "labels": QUEUE},
        "spec": {"nprocPerNode": str(t.gpus), "pytorchReplicaSpecs": replicas},
    }


def files(t: Task) -> dict[str, str]:
    """Return pytorchjob.yaml: kubectl apply -f it."""
    return {"pytorchjob.yaml": documents(config_map(t), manifest(t))}
