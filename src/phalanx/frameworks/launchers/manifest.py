"""Manifests of jobs: the command of the training's container, its nodes and its GPUs.

Kubernetes' Pod, Job, StatefulSet and ConfigMap; PyTorchJob and MPIJob (kubeflow/training-operator v1), TrainJob
(kubeflow/trainer v2), JobSet and LeaderWorkerSet (kubernetes-sigs), RayJob (ray-project/kuberay), Volcano's Job; and
SkyPilot's tasks. A manifest is data: what its command would do is read by shell/.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.frameworks.launchers.gpu_kinds import gpu_of_pod, instance
from phalanx.frameworks.launchers.launcher import Allocation
from phalanx.frameworks.values import tables_of, words_of
from phalanx.spec.errors import InputError

Table = Mapping[str, Any]
_GPU = re.compile(r"(nvidia|amd)\.com/(gpu|mig-.+)$|^gpu$")
_MOST_PODS = 10**6
_MOST_HOSTS = 4096
"""Host names at most that a task which counts its hosts is given."""


@dataclass(frozen=True)
class Pods:
    """The pods of a job, which are equal: a node each."""

    command: str
    """As a shell line."""
    nodes: int
    gpus: int | None
    """Of a pod; None: it asks for none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of ConfigMaps, by name."""
    kind: str = ""
    """What its GPUs are called; "": not stated."""

    def given(self, kind: str, per_node: int | None) -> tuple[Allocation, dict[str, str]]:
        """Return the nodes and GPUs that the job gives its launcher, and the variables that operators set."""
        each = per_node or self.gpus
        given = Allocation(self.nodes, per_node, None, self.gpus, None, self.kind, kind)
        counts = ("NNODES", "PET_NNODES", "SKYPILOT_NUM_NODES", "NUM_NODES", "JOB_COMPLETIONS", "LWS_GROUP_SIZE")
        names: dict[str, int | str] = dict.fromkeys(counts, self.nodes)
        if each:
            names |= {"PET_NPROC_PER_NODE": each, "SKYPILOT_NUM_GPUS_PER_NODE": each}
        names |= {"SKYPILOT_NODE_IPS": "\n".join(f"node{i}" for i in range(min(self.nodes, _MOST_HOSTS)))}
        if kind == "PyTorchJob":  # pods, until torchrun sets its own (pytorch.org/docs/stable/elastic/run.html)
            names |= {"WORLD_SIZE": self.nodes}
        return given, {name: str(value) for name, value in names.items()} | dict(self.environment)


@dataclass(frozen=True)
class Manifest:
    """A job of a manifest. `per_node`: ranks of a pod, where the job says so."""

    kind: str
    pods: Pods
    per_node: int | None = None


def is_manifest(documents: Sequence[Any]) -> bool:
    """Whether documents of a YAML file are a manifest, a SkyPilot task or a Compose file."""
    return any(_kind(document) for document in documents)


def _kind(document: Any) -> str:
    if not isinstance(document, Mapping):
        return ""
    kind = document.get("kind")
    if isinstance(kind, str) and isinstance(document.get("apiVersion"), str):
        return kind
    services = document.get("services")
    if isinstance(services, Mapping) and services and all(isinstance(s, Mapping) for s in services.values()):
        return "compose" if any("image" in s or "build" in s for s in services.values()) else ""
    task = isinstance(document.get("run"), str) and ("resources" in document or "num_nodes" in document)
    return "task" if task else ""


_SERVICES = ("Deployment", "StatefulSet", "Pod")
"""Kinds that also run services which a training needs."""


def manifest(documents: Sequence[Any]) -> Manifest:
    """Return the training job of a manifest. Raises InputError where it has none, or more than one."""
    jobs: list[Manifest] = []
    kinds, files = [], dict[str, str]()
    for document in documents:
        kind = _kind(document)
        kinds += [kind] if kind else []
        if kind == "ConfigMap":
            files |= {str(k): str(v) for k, v in _table(document, "data").items()}
        elif kind == "List":
            items = document.get("items")
            return manifest(items if isinstance(items, list) else [])
        elif kind in _JOBS:
            jobs.append(_JOBS[kind](document))
    if not jobs:
        reason = f"is a manifest of {', '.join(dict.fromkeys(kinds))} and starts no training"
        raise InputError("file", None, reason, f"give the one of the job: {', '.join(_JOBS)}")
    jobs = [job for job in jobs if job.kind not in _SERVICES] or jobs
    if len(jobs) > 1:
        names = ", ".join(f"{job.kind} of {job.pods.nodes} nodes" for job in jobs)
        raise InputError("file", None, f"has {len(jobs)} jobs: {names}", "give one of them alone")
    return replace(jobs[0], pods=replace(jobs[0].pods, files=files))


def _table(value: Any, *path: str) -> Table:
    """Return the table at a path; an empty one where there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _count(value: Any, default: int = 1) -> int:
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}", value):
        value = int(value)
    if isinstance(value, str) and re.search(r"\$\{?\w|\{\{", value):
        reason = f"is a template, whose count is {value.strip()[:40]}"
        raise InputError(
            "file", None, reason, "give what it is rendered to, as `envsubst < FILE` and `helm template` do"
        )
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_PODS else default


def _gpus(container: Table) -> int | None:
    for part in ("limits", "requests"):
        for name, value in _table(container, "resources", part).items():
            if _GPU.search(str(name)):
                return _count(value) or None
    return None


def _words(container: Table) -> list[str]:
    return [word for name in ("command", "args") for word in words_of(container.get(name))]


def _pods(pod: Table, nodes: int, where: str) -> Pods | None:
    """Return `nodes` pods of a template, described by the container that trains; None where none has a command."""
    containers = tables_of(pod, "containers")
    with_gpus = [c for c in containers if _gpus(c)] or containers
    trained = [c for c in with_gpus if _words(c)]
    if len(trained) > 1:
        names = " and ".join(str(c.get("name", "?")) for c in trained[:2])
        raise InputError(
            "file", None, f"{where} has two containers with a command: {names}", "keep the one that trains"
        )
    if not trained:
        return None
    chosen = trained[0]
    environment = {
        str(e["name"]): str(e["value"])
        for e in tables_of(chosen, "env")
        if "name" in e and e.get("value") is not None
    }
    words = [re.sub(r"\$\((\w+)\)", lambda m: environment.get(m[1], f"${m[1]}"), word) for word in _words(chosen)]
    line = " ".join(word if re.fullmatch(r"\$\w+", word) else shlex.quote(word) for word in words)
    return Pods(line, nodes, _gpus(chosen), environment, kind=gpu_of_pod(pod))


def _job(kind: str, pods: Iterator[Pods | None], per_node: int | None = None, nodes: int | None = None) -> Manifest:
    """Return a job of several groups of pods, which run the same command."""
    groups = [group for group in pods if group is not None]
    if not groups:
        raise InputError("file", None, f"a {kind} without a command in its containers", "say what its image runs")
    last = groups[-1]
    total = nodes or sum(group.nodes for group in groups)
    gpus = next((group.gpus for group in groups if group.gpus), None)
    named = next((group.kind for group in groups if group.kind), "")
    return Manifest(kind, Pods(last.command, total, gpus, last.environment, kind=named), per_node)


def _pytorch_job(document: Table) -> Manifest:
    spec = _table(document, "spec")
    listed = spec.get("replicaSpecs")  # HyperPod's are a list
    named = {str(_table(group).get("name")): group for group in listed} if isinstance(listed, list) else {}
    groups = named or _table(spec, "pytorchReplicaSpecs")
    each = spec.get("nprocPerNode")
    pods = (
        _pods(_table(group, "template", "spec"), _count(_table(group).get("replicas")), f"its {name}")
        for name, group in groups.items()
    )
    return _job("PyTorchJob", pods, _count(each) if each is not None and str(each).isdigit() else None)


def _mpi_job(document: Table) -> Manifest:
    spec = _table(document, "spec")
    groups = _table(spec, "mpiReplicaSpecs")
    worker = _table(groups, "Worker")
    gpus = next((g for c in tables_of(_table(worker, "template", "spec"), "containers") if (g := _gpus(c))), None)
    nodes = _count(worker.get("replicas"))
    launcher = _pods(_table(groups, "Launcher", "template", "spec"), nodes, "its Launcher")
    job = _job("MPIJob", iter([launcher]), nodes=nodes)
    each = spec.get("slotsPerWorker")
    named = gpu_of_pod(_table(worker, "template", "spec")) or job.pods.kind
    pods = Pods(job.pods.command, nodes, gpus or job.pods.gpus, job.pods.environment, kind=named)
    return Manifest("MPIJob", pods, _count(each) if each is not None else None)


def _train_job(document: Table) -> Manifest:
    trainer = _table(document, "spec", "trainer")
    container = {**trainer, "name": "trainer", "resources": trainer.get("resourcesPerNode") or {}}
    each = trainer.get("numProcPerNode")
    pods = _pods({"containers": [container]}, _count(trainer.get("numNodes")), "its trainer")
    return _job("TrainJob", iter([pods]), _count(each) if str(each).isdigit() else None)


def _job_set(document: Table) -> Manifest:
    def groups() -> Iterator[Pods | None]:
        jobs = _table(document, "spec").get("replicatedJobs")
        for job in jobs if isinstance(jobs, list) else []:
            inner = _table(job, "template", "spec")
            pods = _count(inner.get("completions"), _count(inner.get("parallelism")))
            nodes = _count(_table(job).get("replicas")) * pods
            yield _pods(_table(inner, "template", "spec"), nodes, f"job {_table(job).get('name', '')}")

    return _job("JobSet", groups())


def _leader_worker_set(document: Table) -> Manifest:
    spec = _table(document, "spec", "leaderWorkerTemplate")
    size = _count(spec.get("size"))
    worker = _table(spec, "workerTemplate", "spec")
    leader = _table(spec, "leaderTemplate", "spec") or worker
    pods = [_pods(pod, size, where) for pod, where in ((worker, "its worker"), (leader, "its leader"))]
    return _job("LeaderWorkerSet", iter(pods), nodes=size)


def _ray_job(document: Table) -> Manifest:
    spec = _table(document, "spec")
    cluster = _table(spec, "rayClusterSpec")
    groups = cluster.get("workerGroupSpecs")
    nodes, gpus = 0, None
    for group in [*(groups if isinstance(groups, list) else []), {**_table(cluster, "headGroupSpec"), "replicas": 1}]:
        each = next((g for c in tables_of(_table(group, "template", "spec"), "containers") if (g := _gpus(c))), None)
        if each:
            nodes, gpus = nodes + _count(group.get("replicas")), each
    command = str(spec.get("entrypoint") or "")
    if not command:
        raise InputError("file", None, "is a RayJob without an entrypoint", "say what it runs")
    return Manifest("RayJob", Pods(command, nodes or 1, gpus))


def _plain_job(document: Table) -> Manifest:
    spec = _table(document, "spec")
    nodes = _count(spec.get("completions"), _count(spec.get("parallelism"), _count(spec.get("replicas"))))
    return _job(_kind(document), iter([_pods(_table(spec, "template", "spec") or spec, nodes, "its pod")]))


def _volcano_or_plain(document: Table) -> Manifest:
    tasks = _table(document, "spec").get("tasks")
    if not isinstance(tasks, list):
        return _plain_job(document)
    pods = (
        _pods(_table(t, "template", "spec"), _count(_table(t).get("replicas")), f"task {_table(t).get('name', '')}")
        for t in tasks
    )
    return _job("Job", pods)


def _sky_task(document: Table) -> Manifest:
    asked = _table(document, "resources").get("accelerators")
    choices = [f"{name}:{n}" for name, n in asked.items()] if isinstance(asked, Mapping) else asked
    asked = next(iter(choices), "") if isinstance(choices, list) else str(choices or "")
    number = re.search(r":(\d{1,3})(?:\.0)?$", str(asked))
    environment = {str(k): str(v) for k, v in _table(document, "envs").items() if v is not None}
    nodes, gpus = _count(document.get("num_nodes")), int(number[1]) if number else 1 if asked else None
    rented = instance(str(_table(document, "resources").get("instance_type", "")))
    kind, gpus = (re.sub(r":[\d.]+$", "", str(asked)), gpus) if asked else rented or ("", gpus)
    return Manifest("task", Pods(str(document.get("run")), nodes, gpus, environment, kind=kind))


def _compose(document: Table) -> Manifest:
    """Return the one service of a Docker Compose file whose command trains, on one host."""

    def container(name: str, service: Table) -> dict[str, Any]:
        command, args = (words_of(service.get(word)) for word in ("entrypoint", "command"))
        asked = _table(service, "deploy", "resources", "reservations").get("devices")
        gpus = [_count(_table(device).get("count"), 0) for device in asked] if isinstance(asked, list) else []
        env = service.get("environment")
        lines = env if isinstance(env, list) else []
        pairs = env.items() if isinstance(env, Mapping) else (str(line).partition("=")[::2] for line in lines)
        limits = {"limits": {"gpu": sum(gpus)}} if sum(gpus) else {}
        given = [{"name": str(k), "value": str(v)} for k, v in pairs if v is not None]
        return {"name": name, "command": command, "args": args, "env": given, "resources": limits}

    containers = [container(str(name), _table(x)) for name, x in _table(document, "services").items()]
    return _job("compose", iter([_pods({"containers": containers}, 1, "it")]))


_JOBS = {
    "PyTorchJob": _pytorch_job,
    "HyperPodPyTorchJob": _pytorch_job,
    "MPIJob": _mpi_job,
    "TrainJob": _train_job,
    "JobSet": _job_set,
    "LeaderWorkerSet": _leader_worker_set,
    "RayJob": _ray_job,
    "Job": _volcano_or_plain,
    "Pod": _plain_job,
    "StatefulSet": _plain_job,
    "Deployment": _plain_job,
    "task": _sky_task,
    "compose": _compose,
}
