"""Kueue's topology-aware scheduling: a Topology, a ResourceFlavor with it, and the annotations of a job's pods.

Schemas: kubernetes-sigs/kueue, config/components/crd/bases/kueue.x-k8s.io_{topologies,resourceflavors}.yaml, version
v1beta2, at ff69552e79ad of August 2026 (v1beta1 is deprecated there, v1alpha1 is not served). Kueue
places pods, not ranks: one pod takes a node's GPUs. `required` topology: all pods in one domain of that level;
`preferred`: if there is one with room. Written as JSON documents, which YAML contains, so that no quoting can go
wrong.
"""

from __future__ import annotations

from typing import Any

from phalanx.frameworks.launchers.export import LEAF_LABEL

HOST_LABEL = "kubernetes.io/hostname"


def topology(name: str) -> dict[str, Any]:
    """Return a Topology of leaf switches and hosts."""
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Topology",
        "metadata": {"name": name},
        "spec": {"levels": [{"nodeLabel": LEAF_LABEL}, {"nodeLabel": HOST_LABEL}]},
    }


def resource_flavor(name: str, device: str) -> dict[str, Any]:
    """Return a ResourceFlavor of the nodes with a device, whose topology Kueue then follows."""
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ResourceFlavor",
        "metadata": {"name": name},
        "spec": {"nodeLabels": {"nvidia.com/gpu.product": device}, "topologyName": name},
    }


def job(name: str, pods: int, gpus: int, leaves: int) -> dict[str, Any]:
    """Return a Job of `pods` pods of `gpus` GPUs each, that asks for one leaf where the placement has one.

    The image and the command are blanks to fill in.
    """
    relation = "required" if leaves == 1 else "preferred"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "FILL-IN-LOCAL-QUEUE"}},
        "spec": {
            "parallelism": pods,
            "completions": pods,
            "completionMode": "Indexed",
            "suspend": True,
            "template": {
                "metadata": {"annotations": {f"kueue.x-k8s.io/podset-{relation}-topology": LEAF_LABEL}},
                "spec": {
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "rank",
                            "image": "FILL-IN-IMAGE",
                            "command": ["FILL-IN-COMMAND"],
                            "resources": {"limits": {"nvidia.com/gpu": gpus}},
                        }
                    ],
                },
            },
        },
    }
