"""Kubernetes alone: a Deployment of workers that fit a node, or a LeaderWorkerSet of wider ones, and a Service.
Separate prefill and decode are two LeaderWorkerSets, and the engine's router gets the addresses of their pods. Also
the parts of other manifests: groups of servers, whose workers have one pod, or one on each node.

The LeaderWorkerSet (leaderworkerset.x-k8s.io/v1) sets variables in its pods: the leader's address and the pod's
number (kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go: LWS_LEADER_ADDRESS, LWS_WORKER_INDEX).
Its controller makes a headless Service with the set's name, unless there is one of that name already
(pkg/utils/controller/controller_utils.go:33), so the Service for clients has a different name.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.frameworks.writing.yaml import stream
from phalanx.serving.launch.parts import Command, Launch, WorkerPlace, places
from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.errors import InputError

SECRET = "hf-token-secret"
"""The name of the secret with HF_TOKEN, as in Dynamo's templates."""


@dataclass(frozen=True)
class ServerGroup:
    """The equal workers of one role."""

    place: WorkerPlace
    """The place of its first worker."""
    commands: tuple[Command, ...]
    """Commands of the pods of a worker; the first pod takes requests."""
    gpus: int
    """GPUs of a pod."""

    @property
    def name(self) -> str:
        """Its role: worker, prefill or decode."""
        return self.place.name.removesuffix("-0")


def groups(plan: ServingPlan, line: Launch) -> tuple[ServerGroup, ...]:
    """Return the groups of a plan with the launch `line`, prefill before decode."""
    first = {place.workers.role: place for place in reversed(places(plan))}
    return tuple(
        ServerGroup(
            first[w.role],
            tuple(c for c in line.commands if c.title == first[w.role].name),
            min(w.gpus, plan.node_gpus),
        )
        for w in plan.workers
    )


def drop_options(options: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the options of a command line without `names` and their values."""
    left: list[str] = []
    dropped = False
    for word in options:
        dropped = word in names if word.startswith("--") else dropped
        left += [] if dropped else [word]
    return left


def variables(group: ServerGroup) -> dict[str, Any]:
    """Return the environment of a group's containers, for their spec; empty: none. NIXL publishes the address of its
    side channel by it (vLLM's docs/features/nixl_connector_usage.md)."""
    pairs = (pair.partition("=") for pair in group.commands[0].environment)
    env: list[dict[str, Any]] = [{"name": key, "value": value} for key, _, value in pairs]
    if "--kv-transfer-config" in group.commands[0].options:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        env.append({"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": address})
    return {"env": env} if env else {}


def label(text: str) -> str:
    """Return a model's name as the name of a Kubernetes object: at most 50 letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.rpartition("/")[2].lower())[:50].strip("-") or "model"


_IMAGE = {"vllm": "vllm/vllm-openai:v{}", "sglang": "lmsysorg/sglang:v{}"}
_LEADER = {"$HEAD": "$(LWS_LEADER_ADDRESS)", "$HEAD:5000": "$(LWS_LEADER_ADDRESS):5000"}
"""Placeholder of the first node's address -> variable of a LeaderWorkerSet's pods."""
_ROUTER = {
    "vllm": ("vllm-router", "vllm-router --vllm-pd-disaggregation"),
    "sglang": ("sglang-router", "python3 -m sglang_router.launch_router --pd-disaggregation"),
}
"""Engine -> (package of its router, command for separate prefill) (README.md of vllm-project/router, a fork of
sgl-project/sglang, sgl-model-gateway)."""
_PORT = 8000
_EVERYWHERE = ("--host", "0.0.0.0")  # noqa: S104  a pod's own addresses
_SEPARATE_PREFILL = (
    "the cache moves between pods over NIXL: give them the RDMA devices of your cluster, or it takes TCP",
    "the router's pod installs the newest release of its package: pin the one that you have tried",
)


def manifest(plan: ServingPlan, line: Launch) -> str:
    """Return the manifests, as YAML, of a plan with the launch `line`. Raises InputError for an engine that reads
    files."""
    if plan.engine not in _IMAGE:
        raise InputError("for", "kubernetes", "is not for TensorRT-LLM, which reads files", "dynamo has them")
    servers, engine = groups(plan, line), plan.engine
    separate = len(servers) > 1
    image = _IMAGE[engine].format(line.version)
    documents = [_workload(f"{engine}-{g.name}", g, image, engine, separate) for g in servers]
    if separate:
        documents.append(_router(engine, servers))
        serves, port = {"app": f"{engine}-router"}, _PORT
    else:
        serves, port = {"app": f"{engine}-{servers[0].name}", "role": "leader"}, servers[0].place.port
    spec = {"selector": serves, "ports": [{"port": 80, "targetPort": port}]}
    documents.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": engine}, "spec": spec})
    return stream(documents, _SEPARATE_PREFILL if separate else ())


def _workload(name: str, g: ServerGroup, image: str, engine: str, routed: bool) -> dict[str, Any]:
    """Return the Deployment or LeaderWorkerSet of a group. `routed`: a router addresses its pods by name."""
    leader, behind = (_pod(name, g, g.commands[i], image, engine, i < 0) for i in (0, -1))
    meta, count = {"name": name}, g.place.workers.count
    if g.place.nodes == 1 and not routed:
        spec: dict[str, Any] = {"replicas": count, "selector": {"matchLabels": {"app": name}}, "template": leader}
        return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}
    template = {"size": g.place.nodes, "restartPolicy": "RecreateGroupOnPodRestart"}
    pods = {"workerTemplate": leader} if g.place.nodes == 1 else {"leaderTemplate": leader, "workerTemplate": behind}
    spec = {"replicas": count, "leaderWorkerTemplate": {**template, **pods}}
    version = "leaderworkerset.x-k8s.io/v1"
    return {"apiVersion": version, "kind": "LeaderWorkerSet", "metadata": meta, "spec": spec}


def _pod(name: str, g: ServerGroup, command: Command, image: str, engine: str, behind: bool) -> dict[str, Any]:
    """Return the template of a pod that runs a command. `behind`: the pod takes no requests."""
    numbered = [_LEADER.get(word, word) for word in command.options]
    if "--node-rank" in numbered:
        numbered[numbered.index("--node-rank") + 1] = "$(LWS_WORKER_INDEX)"
    if engine == "sglang":  # which listens on 127.0.0.1 by itself (server_args.py)
        numbered += _EVERYWHERE
    container: dict[str, Any] = {
        "name": "engine",
        "image": image,
        "command": list(command.program),
        "args": numbered,
        "envFrom": [{"secretRef": {"name": SECRET}}],
        "resources": {"limits": {"nvidia.com/gpu": str(g.gpus)}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        **variables(g),
    }
    if not behind:
        container["ports"] = [{"containerPort": g.place.port}]
        container["readinessProbe"] = {"httpGet": {"path": "/health", "port": g.place.port}, "periodSeconds": 10}
    labels = {"app": name, "role": "worker" if behind else "leader"}
    shared = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": shared}}


def _router(engine: str, servers: tuple[ServerGroup, ...]) -> dict[str, Any]:
    """Return the Deployment of a router with all addresses, which sends requests to prefill and then to decode."""
    package, words = _ROUTER[engine]
    command = words.split()
    for g in servers:
        for i in range(g.place.workers.count):
            url = f"http://{engine}-{g.name}-{i}.{engine}-{g.name}:{g.place.port}"
            joins = [str(g.place.port + 1000)] if engine == "sglang" and g.name == "prefill" else []
            command += [f"--{g.name}", url, *joins]
    command += [*_EVERYWHERE, "--port", str(_PORT)]
    container = {
        "name": "router",
        "image": "python:3.12-slim",
        "command": ["/bin/sh", "-c"],
        "args": [f"pip install {package} && exec {shlex.join(command)}"],
        "ports": [{"containerPort": _PORT}],
    }
    name = {"app": f"{engine}-router"}
    template = {"metadata": {"labels": name}, "spec": {"containers": [container]}}
    spec = {"replicas": 1, "selector": {"matchLabels": name}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": f"{engine}-router"}, "spec": spec}
