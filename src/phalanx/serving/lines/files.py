"""The commands of a script, of a manifest's containers, or of the values of a chart.

A container without a command starts its image's entry point, and so does a service of Docker Compose, whose `command`
is the arguments and whose `entrypoint` is what Kubernetes calls command (compose-spec, 05-services.md); of KServe's
LLMInferenceService, its InferenceService of Hugging Face's models and llm-d's chart, vLLM with the model that stands
outside of it, as of KAITO's presets.
Values are also of vLLM's production-stack (helm/values.yaml), whose `vllmConfig` has flags in camel case. A file of
`--config FILE` has flags too; flags of the command line override them (vllm/utils/argparse_utils.py:
`_pull_args_from_config`).
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.frameworks.companions import LARGEST, Companions
from phalanx.frameworks.launchers.gpu_kinds import gpu_of_pod, instance
from phalanx.frameworks.reading.source import DATA
from phalanx.frameworks.tables import documents
from phalanx.frameworks.values import tables_of, words_of
from phalanx.spec.documents import read_text

_COPIES = ("Deployment", "ReplicaSet", "StatefulSet", "LeaderWorkerSet")
"""Kinds of objects whose `replicas` are copies of a server."""


@dataclass(frozen=True)
class ServerPods:
    """The pods on which a manifest starts a command."""

    copies: int = 1
    size: int = 1
    """Pods of a copy."""
    gpus: int | None = None
    """GPUs of a pod; None: the manifest does not say."""
    gpu: str = ""
    """The GPU of the nodes that the manifest selects, as the label has it; empty: it selects none."""
    part: str = ""
    """prefill or decode, where a service has both apart; empty: the manifest does not say."""
    assumption: str = ""
    """What the manifest leaves to the controller that starts the command; empty: nothing."""


def script_of(path: Path) -> tuple[str, dict[int, ServerPods]]:
    """Return a file as a script, and line of a command -> the pods on which a manifest starts it. Raises InputError
    for an unreadable file."""
    text = read_text(path, "from", LARGEST)
    if path.suffix.lower() not in DATA:
        return text, {}
    script, pods = "", dict[int, ServerPods]()
    for document in documents(text, path.suffix.lower(), path.name):
        for line, where in commands_of(document, ServerPods()):
            pods[script.count("\n") + 1] = where
            script += f"{line}\n"
    return script, pods


def commands_of(value: Any, pods: ServerPods, start: Sequence[str] = ()) -> Iterator[tuple[str, ServerPods]]:
    """Yield (command line, its pods) for each container, and each model of a chart, at any depth. `start`: what a
    container without a command starts, where that is not its image's entry point."""
    if isinstance(value, list):
        for inner in value:
            yield from commands_of(inner, pods, start)
    if not isinstance(value, Mapping):
        return
    pods = replace(pods, gpu=gpu_of_pod(value) or pods.gpu)
    if (workers := _workers(value)) is not None:
        for start, part, worker in workers:
            copies = _count(worker.get("replicas", worker.get("minReplicas"))) or 1
            yield from commands_of(worker, replace(pods, copies=copies, part=part), start)
        return
    kind = value.get("subComponentType", value.get("componentType", value.get("type")))  # of NVIDIA Dynamo
    if kind in ("worker", *_PARTS):
        pods = replace(pods, copies=_count(value.get("replicas")) or 1, part=kind if kind in _PARTS else "")
    if value.get("kind") in _COPIES and isinstance(spec := value.get("spec"), Mapping):
        group = spec.get("leaderWorkerTemplate")
        size = _count(group.get("size")) if isinstance(group, Mapping) else None
        pods = replace(pods, copies=_count(spec.get("replicas")) or 1, size=size or 1, part=_role(value))
    if isinstance(value.get("vllmConfig"), Mapping) and value.get("modelURL"):
        line = shlex.join(["vllm", "serve", str(value["modelURL"]), *_flags(value["vllmConfig"])])
        yield line, ServerPods(_count(value.get("replicaCount")) or 1, 1, _count(value.get("requestGPU")), pods.gpu)
        return
    if str(value.get("apiVersion")).startswith("kubeai.org/") and isinstance(spec := value.get("spec"), Mapping):
        yield from _of_kubeai(spec)
        return
    if str(value.get("apiVersion")).startswith("kaito.sh/"):
        yield from _of_kaito(value)
    composed = "image" in value and "name" not in value and "args" not in value
    instead = value.get("entrypoint" if composed else "command")  # of the image's entry point
    words = [*words_of(instead), *words_of(value.get("command" if composed else "args"))]
    if (words or (start and "resources" in value)) and (
        "image" in value or "name" in value or "modelFormat" in value
    ):
        entry = [] if instead else start or [str(value.get("image", ""))]
        if start:
            words = [word for word in words if not word.startswith(_KSERVE_WORDS)]
            words += words_of(_values(value.get("env")).get("VLLM_ADDITIONAL_ARGS"))
        line = shlex.join(filter(None, [*entry, *(_expanded(word, value.get("env")) for word in words)]))
        yield line, replace(pods, gpus=_gpus(value.get("resources")))
        return
    for inner in value.values():
        yield from commands_of(inner, pods, start)


def _of_kubeai(spec: Mapping[str, Any]) -> Iterator[tuple[str, ServerPods]]:
    """Yield the command line of a model of KubeAI under vLLM; its profile has the GPU and their number, as in
    `nvidia-gpu-h100:2` (kubeai-project/kubeai, charts/kubeai/values.yaml, resourceProfiles)."""
    if str(spec.get("engine", "VLLM")) == "VLLM" and spec.get("url"):
        profile, _, gpus = str(spec.get("resourceProfile", "")).partition(":")
        line = ["vllm", "serve", str(spec["url"]).removeprefix("hf://"), *words_of(spec.get("args"))]
        gpu = re.sub("^(nvidia|amd)-gpu-", "", profile)
        yield shlex.join(line), ServerPods(_count(spec.get("minReplicas")) or 1, 1, _count(gpus), gpu)


def _of_kaito(value: Mapping[str, Any]) -> Iterator[tuple[str, ServerPods]]:
    """Yield the command line of each part of a preset of KAITO: a Workspace, an InferenceSet or a MultiRoleInference
    (kaito-project/kaito, api/v1beta1, api/v1alpha1)."""
    spec = _table(value, "spec")
    each = _table(spec, "template") or value
    inference, resource = _table(each, "inference"), _table(each, "resource")
    name = _table(inference, "preset").get("name") or _table(spec, "model").get("name")
    roles = tables_of(spec, "roles") or [{**resource, "replicas": spec.get("replicas")}]
    for role in roles if name else ():
        kind = str(role.get("instanceType", ""))
        gpu, gpus = instance(kind) or ("", 1)
        nodes = _count(role.get("count")) or 1
        several = ["--pipeline-parallel-size", str(nodes)] if nodes > 1 else []
        line = ["vllm", "serve", str(name), "--tensor-parallel-size", str(gpus), *several]
        config = inference.get("config")
        doubts = [
            f"KAITO starts vLLM over all {gpus} GPUs of an instance" if gpus > 1 else "",
            f"instances of {kind or 'no said type'} have one GPU" if not gpu else "",
            f"the ConfigMap {config} has no flags that change an answer" if config else "",
        ]
        assumed = "; ".join(filter(None, doubts))
        part = str(role.get("type", ""))
        copies = _count(role.get("replicas")) or 1
        where = part if part in _PARTS else ""
        pods = ServerPods(copies, nodes, gpus, gpu, where, f"assumed: {assumed}" * bool(assumed))
        yield shlex.join(line), pods


def _table(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a table inside of a table; empty for anything else."""
    inner = value.get(name)
    return inner if isinstance(inner, Mapping) else {}


_KSERVE_WORDS = ("--model_id=", "--model_name=", "--backend=")
"""Words of Hugging Face's server in KServe that are not vLLM's (kserve/kserve, python/huggingfaceserver)."""
_PARALLELISM = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
}


_PARTS = ("prefill", "decode")


def _role(value: Mapping[str, Any]) -> str:
    """Return which part of a service an object is by its name; empty: its name does not say."""
    named = value.get("metadata")
    words = re.split(r"[^a-z]", str(named.get("name") if isinstance(named, Mapping) else ""))
    return next((part for part in _PARTS if part in words), "")


def _workers(value: Mapping[str, Any]) -> list[tuple[list[str], str, Mapping[str, Any]]] | None:
    """Return (what its containers start, its name of two, its table) for each part of a service whose model stands
    outside of its containers; None for any other table."""
    inner = value.get("spec")
    spec: Mapping[str, Any] = inner if isinstance(inner, Mapping) else {}
    if value.get("kind") == "LLMInferenceService":
        model, parts = spec.get("model"), [spec, spec.get("prefill")]
        parts[0] = {name: each for name, each in spec.items() if name not in ("model", "prefill")}
    elif value.get("kind") == "InferenceService":
        parts = [spec.get("predictor")]
        model = parts[0].get("model") if isinstance(parts[0], Mapping) else None
        if not isinstance(model, Mapping) or "huggingface" not in str(model.get("modelFormat")):
            return None
    elif isinstance(model := value.get("modelArtifacts"), Mapping):
        parts = [value.get(name) for name in ("decode", "prefill")]
    else:
        return None
    named = model if isinstance(model, Mapping) else {}
    flags = dict(word.lstrip("-").partition("=")[::2] for word in words_of(named.get("args")))
    name = flags.get("model_id") or named.get("name") or str(named.get("uri", "")).removeprefix("hf://")
    tables = [x for x in parts if isinstance(x, Mapping) and x.get("create") is not False and x.get("replicas") != 0]
    parted = ("decode", "prefill") if len(tables) > 1 else ("",)
    starts = [["vllm", "serve", str(name), *_degrees(x.get("parallelism"))] for x in tables]
    return list(zip(starts, parted, tables, strict=False))


def _degrees(parallelism: Any) -> Iterator[str]:
    """Yield the flags of the degrees of parallelism in a manifest."""
    degrees = parallelism if isinstance(parallelism, Mapping) else {}
    for name, flag in _PARALLELISM.items():
        if name in degrees:
            yield from (flag, str(degrees[name]))
    if degrees.get("expert") is True:
        yield "--enable-expert-parallel"


def _count(value: Any) -> int | None:
    """Return a positive whole number in a manifest or a template; None for anything else."""
    return int(str(value)) if re.fullmatch("[1-9][0-9]{0,5}", str(value)) else None


def _gpus(resources: Any) -> int | None:
    """Return the GPUs of a container; None: it does not say."""
    tables = [resources.get(part) for part in ("limits", "requests")] if isinstance(resources, Mapping) else []
    stated = [
        v for t in tables if isinstance(t, Mapping) for k, v in t.items() if re.fullmatch(r".*\.com/gpu", str(k))
    ]
    return _count(stated[0]) if stated else None


def _expanded(word: str, env: Any) -> str:
    """Return a word with each `$(NAME)` replaced by its value in the container's environment."""
    values = _values(env)
    return re.sub(r"\$\((\w+)\)", lambda m: str(values.get(m[1]) or f"${m[1]}"), word)


def _values(env: Any) -> dict[str, Any]:
    """Return the variables of a container."""
    return (
        {str(e.get("name")): e.get("value") for e in env if isinstance(e, Mapping)} if isinstance(env, list) else {}
    )


def _flags(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a table's flags: `--tensor-parallel-size=2` of `tensorParallelSize: 2`."""
    for name, value in config.items():
        if name == "extraArgs":
            yield from words_of(value)
        elif value is not None and value is not False and not isinstance(value, Mapping | list):
            flag = re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name).lower().replace("_", "-")
            yield f"--{flag}" if value is True else f"--{flag}={value}"


def under_config(words: list[str], files: Companions) -> tuple[list[str], str]:
    """Return (a line's words with the flags of its `--config` file after them, name of that file if it is missing).
    Flags that the line has itself are left out of the file's."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != "--config":
            continue
        file = value if equals else "".join(words[place + 1 : place + 2])
        text = files.text(file) if file.endswith((".yaml", ".yml")) else None
        if text is None:
            return words, file
        tables = documents(text, ".yaml", file)
        table = tables[0] if tables and isinstance(tables[0], dict) else {}
        others = [*words[:place], *words[place + (1 if equals else 2) :]]
        stated = {other.partition("=")[0].replace("_", "-") for other in others}
        below = [flag for flag in _flags(table) if flag.partition("=")[0] not in stated]
        return [*others, *below], ""
    return words, ""
