"""Kubernetes alone: a Deployment of workers that fit a node, or a LeaderWorkerSet of wider ones, and a Service.

The LeaderWorkerSet (leaderworkerset.x-k8s.io/v1) puts the leader's address and each pod's number into its pods
(kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go: LWS_LEADER_ADDRESS, LWS_WORKER_INDEX).
"""

from __future__ import annotations

import json
from typing import Any

from phalanx.serving.launch.launch import Command, Launch, places
from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.errors import InputError

_IMAGE = {"vllm": "vllm/vllm-openai:v{}", "sglang": "lmsysorg/sglang:v{}"}
_OF_PODS = {"$HEAD": "$(LWS_LEADER_ADDRESS)", "$HEAD:5000": "$(LWS_LEADER_ADDRESS):5000"}


def manifest(plan: ServingPlan, line: Launch) -> str:
    """Write the manifests, as YAML, of a plan whose command lines are `line`. Raises InputError for workers that a
    router joins, and for an engine that reads files."""
    if len(plan.workers) > 1 or plan.engine not in _IMAGE:
        apart = len(plan.workers) > 1
        what = "separate prefill, which a router joins" if apart else "TensorRT-LLM, which reads files"
        raise InputError("--for", "kubernetes", f"is not for {what}", "use --for dynamo")
    workers, first = plan.workers[0], places(plan)[0]
    commands = [c for c in line.commands if c.title == first.name]
    image, gpus = _IMAGE[plan.engine].format(line.version), min(workers.gpus, plan.node_gpus)
    name = f"{plan.engine}-worker"
    leader, behind = (_pod(name, commands[i], image, gpus, first.port, i < 0) for i in (0, -1))
    meta: dict[str, Any] = {"name": name}
    labels = {"matchLabels": {"app": name}}
    if first.nodes == 1:
        spec: dict[str, Any] = {"replicas": workers.count, "selector": labels, "template": leader}
        head: dict[str, Any] = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}
    else:
        template = {"size": first.nodes, "restartPolicy": "RecreateGroupOnPodRestart", "leaderTemplate": leader}
        spec = {"replicas": workers.count, "leaderWorkerTemplate": {**template, "workerTemplate": behind}}
        head = {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": meta,
            "spec": spec,
        }
    serves = {"selector": {"app": name, "role": "leader"}, "ports": [{"port": 80, "targetPort": first.port}]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": serves}
    return "---\n".join("\n".join(_yaml(each)) + "\n" for each in (head, service))


def _pod(name: str, command: Command, image: str, gpus: int, port: int, behind: bool) -> dict[str, Any]:
    """Return the template of a pod that runs a command; `behind`: of a node that takes no requests."""
    numbered = list(command.options)
    if "--node-rank" in numbered:
        numbered[numbered.index("--node-rank") + 1] = "$(LWS_WORKER_INDEX)"
    container: dict[str, Any] = {
        "name": "engine",
        "image": image,
        "command": list(command.program),
        "args": [_OF_PODS.get(word, word) for word in numbered],
        "envFrom": [{"secretRef": {"name": "hf-token-secret"}}],
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if command.environment:
        pairs = (each.partition("=") for each in command.environment)
        container["env"] = [{"name": key, "value": value} for key, _, value in pairs]
    if not behind:
        container["ports"] = [{"containerPort": port}]
        container["readinessProbe"] = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10}
    labels = {"app": name, "role": "worker" if behind else "leader"}
    shared = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": shared}}


def _yaml(value: Any, indent: str = "") -> list[str]:
    """Return the lines of a value of tables, lists and words."""
    if isinstance(value, dict):
        lines = []
        for key, each in value.items():
            nested = isinstance(each, dict | list)
            lines += [f"{indent}{key}:", *_yaml(each, indent + "  ")] if nested else [f"{indent}{key}: {_word(each)}"]
        return lines
    lines = []
    for each in value:
        first, *rest = _yaml(each, indent + "  ") if isinstance(each, dict) else [f"{indent}  {_word(each)}"]
        lines += [f"{indent}- {first[len(indent) + 2 :]}", *rest]
    return lines


def _word(value: Any) -> str:
    return str(value) if isinstance(value, int) else json.dumps(value)
