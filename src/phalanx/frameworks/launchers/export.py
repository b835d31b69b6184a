"""Files that start train.sh once on every node, with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT, by launcher.

torchrun      launch.sh, which each of plain nodes runs, and which finds its own number by its host name
slurm         job.sbatch: a batch script with one task a node (sbatch(1), srun(1)). `--switches=N` asks for nodes
              under at most N leaf switches, where the cluster says how many GPUs a leaf has; `--distribution=block`
              numbers nodes in the order of the list, which topology/tree keeps by switch
pytorchjob    Kubeflow's training-operator v1: a master and workers, one pod a node. The operator sets MASTER_ADDR,
              MASTER_PORT, and RANK, the pod's number
trainjob      Kubeflow Trainer v2: a TrainJob under the runtime torch-distributed, whose torch plugin sets PET_*
jobset        an indexed Job with a pod a node; the first pod's stable host name is the rendezvous
skypilot      task.yaml, of several nodes on whichever cloud has them (sky/utils/schemas.py)

The files are templates/. Manifests of Kubernetes (kubectl apply -f) are JSON documents, which YAML contains, so that
no quoting can go wrong: a ConfigMap of the folder, and pods that run train.sh. Blanks are entries of `env`.
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from phalanx.frameworks.writing.program import FILL_IN, Blank, TrainingProgram
from phalanx.frameworks.writing.script import TEMPLATES, comment, filled
from phalanx.frameworks.writing.subject import Subject
from phalanx.spec.errors import InputError, nearest

PORT = 29500
LEAF_LABEL = "cloud.provider.com/topology-rack"
"""The label of nodes under one leaf switch, as Kueue's topologies name it."""


@dataclass(frozen=True)
class Task:
    """A job of equal nodes."""

    name: str
    """Of letters, digits and dashes, as Kubernetes takes it."""
    nodes: int
    gpus: int
    """Of a node."""
    device: str
    """The cluster's name for the GPU."""
    leaves: int
    """The fewest leaf switches that the nodes can be under; 0 where the cluster does not say."""
    blanks: tuple[Blank, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    """Files that every node needs in one folder, by name: train.sh among them."""

    @property
    def numbers(self) -> dict[str, Any]:
        """Values that every template may name."""
        return {"name": self.name, "nodes": self.nodes, "gpus": self.gpus, "port": PORT}

    @property
    def environment(self) -> dict[str, str]:
        """Blanks by name, with their default where the plan knows one, else FILL-IN-NAME."""
        return {b.name: b.default if b.default != FILL_IN else f"FILL-IN-{b.name}" for b in self.blanks}


def task(x: Subject, p: TrainingProgram, files: dict[str, str]) -> Task:
    """Return the job of a program."""
    name = f"{x.model.family.replace('_', '-')}-{x.s.world}"
    size = x.cluster.ranks_per_node
    switch = [t.ranks for t in x.cluster.tiers if size < t.ranks < x.cluster.ranks]
    leaves = math.ceil(x.s.world / switch[0]) if switch else 0
    return Task(name, x.nodes, x.gpus_per_node, x.cluster.device.name, leaves, p.blanks, files)


def launcher(name: str) -> Callable[[Task], dict[str, str]]:
    """Return the function that writes a launcher's files: job -> text by name. Raises InputError for an unknown
    name."""
    if name not in LAUNCHERS:
        raise InputError("--launcher", name, "is not a launcher that Phalanx knows", nearest(name, LAUNCHERS))
    return LAUNCHERS[name]


def _torchrun(t: Task) -> dict[str, str]:
    about = (
        f"Run this on each of the {t.nodes} nodes of {t.gpus} GPUs (pdsh, clush, ssh). Neighbours in HOSTS are "
        "neighbours in the mesh: list nodes of one switch in a row."
    )
    file = "launch.sh" if t.nodes > 1 else "launch-one.sh"
    return {"launch.sh": filled(TEMPLATES / f"{file}.template", **t.numbers, about=comment(about))}


def _slurm(t: Task) -> dict[str, str]:
    switches = (
        "# As few leaf switches as the nodes fit under, so that inner mesh axes stay below one; 1 h at most.\n"
        f"#SBATCH --switches={t.leaves}@01:00:00\n"
    )
    file = TEMPLATES / "job.sbatch.template"
    return {"job.sbatch": filled(file, **t.numbers, switches=switches if t.leaves else "")}


def accelerator(device: str) -> str:
    """Return SkyPilot's name of a GPU. Raises InputError for one that it does not rent."""
    names = tomllib.loads((TEMPLATES / "accelerators.toml").read_text())
    for ours, theirs in names.items():
        if re.match(rf"{re.escape(ours)}\b", device):
            return str(theirs)
    raise InputError(
        "cluster.device", device, "is not an accelerator that SkyPilot rents", f"known: {', '.join(names)}"
    )


def _skypilot(t: Task) -> dict[str, str]:
    envs = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in t.environment.items())
    values = {"accelerator": accelerator(t.device), "envs": f"envs:\n{envs}" if envs else ""}
    return {"task.yaml": filled(TEMPLATES / "task.yaml.template", **t.numbers, **values)}


def _kubernetes(kind: str, t: Task) -> dict[str, str]:
    return {f"{kind}.yaml": documents(*manifests(kind, t))}


def manifests(kind: str, t: Task) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap of the folder and the job of a launcher on Kubernetes."""
    parts = json.loads((TEMPLATES / "kubernetes.json").read_text())
    launch = parts[kind]
    # Kueue places the pods under one leaf switch if they all fit there.
    values: dict[str, Any] = {**t.numbers, "files": t.files, "leaf": LEAF_LABEL, "workers": t.nodes - 1}
    values |= {"relation": "required" if t.leaves == 1 else "preferred"}
    values |= {"gpus_as_text": str(t.gpus), "port_as_text": str(PORT), "container": launch["container"]}
    values["line"] = _with_values(launch["line"], values)
    environment = t.environment | _with_values(launch["env"], values)
    values["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    for name in ("command", "resources", "volumes", "pod"):
        values[name] = _with_values(parts[name], values)
    job = _with_values(launch["manifest"], values)
    if kind == "pytorchjob" and t.nodes == 1:
        del job["spec"]["pytorchReplicaSpecs"]["Worker"]
    return _with_values(parts["config_map"], values), job


def _with_values(template: Any, values: Mapping[str, Any]) -> Any:
    """Return a template with values in place of `{{ name }}`. A text that is one such name becomes the value itself,
    of whatever type; the entries of a table under the key `...` are moved into the table around it."""
    if isinstance(template, dict):
        result: dict[str, Any] = {}
        for key, inner in template.items():
            value = _with_values(inner, values)
            result |= value if key == "..." else {_with_values(key, values): value}
        return result
    if isinstance(template, list):
        return [_with_values(inner, values) for inner in template]
    if not isinstance(template, str):
        return template
    whole = re.fullmatch(r"\{\{ (\w+) \}\}", template)
    return values[whole[1]] if whole else re.sub(r"\{\{ (\w+) \}\}", lambda m: str(values[m[1]]), template)


def documents(*parts: dict[str, Any]) -> str:
    """Write documents of one YAML file."""
    return "---\n".join(json.dumps(part, indent=2) + "\n" for part in parts)


LAUNCHERS: dict[str, Callable[[Task], dict[str, str]]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    **{kind: partial(_kubernetes, kind) for kind in ("pytorchjob", "trainjob", "jobset")},
    "skypilot": _skypilot,
}
"""Writers of files by launcher."""
