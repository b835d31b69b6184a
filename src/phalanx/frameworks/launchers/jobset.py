"""JobSet: an indexed Job with a pod a node; the first pod's stable host name is the rendezvous."""

from __future__ import annotations

from typing import Any

from phalanx.frameworks.launchers.kubernetes import QUEUE, config_map, documents, pod, topology
from phalanx.frameworks.launchers.task import PORT, Task


def manifest(t: Task) -> dict[str, Any]:
    """Return the JobSet."""
    line = f"export NNODES={t.nodes} NPROC_PER_NODE={t.gpus} NODE_RANK=$JOB_COMPLETION_INDEX;"
    first = f"{t.name}-node-0-0.{t.name}"
    job = {
        "parallelism": t.nodes,
        "completions": t.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {
            "metadata": {"annotations": topology(t)},
            "spec": pod(t, "node", line, MASTER_ADDR=first, MASTER_PORT=str(PORT)),
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": t.name, "labels": QUEUE},
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def files(t: Task) -> dict[str, str]:
    """Return jobset.yaml: kubectl apply -f it."""
    return {"jobset.yaml": documents(config_map(t), manifest(t))}
