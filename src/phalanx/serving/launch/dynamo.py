"""Dynamo: a DynamoGraphDeployment (nvidia.com/v1beta1) of a frontend, which routes, and the engine's workers.

The manifest follows the templates of Dynamo 1.6.1 (dynamo/profiler/templates/dgd). A worker over several nodes has a
nodeCount.
"""

import json
from typing import Any

from phalanx.frameworks.writing.yaml import stream
from phalanx.serving.launch import sglang, trtllm, vllm
from phalanx.serving.launch.arguments import published
from phalanx.serving.launch.checkpoints import weights_of
from phalanx.serving.launch.kubernetes import SECRET
from phalanx.serving.launch.parts import WorkerPlace, context, most_requests, places
from phalanx.serving.plan_file import ServingPlan

_IMAGE = {"vllm": "vllm-runtime", "sglang": "sglang-runtime", "trtllm": "tensorrtllm-runtime"}


def worker_options(plan: ServingPlan, place: WorkerPlace) -> list[str]:
    """Return the options of a worker: of `python3 -m dynamo.ENGINE`, and of the engine, to which it passes them."""
    model_path, _ = weights_of(plan)
    w = place.workers
    if plan.engine == "sglang":
        return ["--model-path", model_path, "--served-model-name", model_path, *sglang.options(plan, place)]
    mode = [] if w.role == "both" else ["--disaggregation-mode", w.role]
    if plan.engine == "vllm":
        out = ["--model", model_path, *vllm.options(plan, place), *mode]
        if w.role != "both":
            role = "kv_producer" if w.role == "prefill" else "kv_consumer"
            connector = {"kv_connector": "NixlConnector", "kv_role": role}
            out += ["--kv-transfer-config", json.dumps(connector, separators=(",", ":"))]
        return out
    trtllm.require_possible(place)
    out = ["--model-path", model_path, "--served-model-name", model_path, *mode]
    out += ["--tensor-parallel-size", str(w.tp * w.attention_dp), "--pipeline-parallel-size", str(w.pp)]
    out += ["--expert-parallel-size", str(w.moe_ep)] if w.moe_ep > 1 else []
    out += ["--enable-attention-dp"] if w.attention_dp > 1 else []
    if most := most_requests(w, w.attention_dp):
        out += ["--max-batch-size", str(most)]
    out += ["--max-num-tokens", str(w.step_tokens)]
    if tokens := context(plan, w):
        out += ["--max-seq-len", str(tokens)]
    return [*out, "--kv-block-size", str(plan.page_tokens), "--extra-engine-args", f"/config/{w.role}.yaml"]


def manifest(plan: ServingPlan) -> str:
    """Return the manifest, as YAML. Raises InputError for what the engine cannot do."""
    version = published(f"dynamo.{plan.engine}").version
    image = f"nvcr.io/nvidia/ai-dynamo/{_IMAGE[plan.engine]}:{version}"
    name = f"{plan.engine}-{'agg' if len(plan.workers) == 1 else 'disagg'}"
    first = {place.workers.role: place for place in reversed(places(plan))}
    components = [
        {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": _pod(image, "dynamo.frontend", [])},
        *(_worker(plan, first[w.role], image, name) for w in plan.workers),
    ]
    graph = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment", "metadata": {"name": name}}
    documents: list[dict[str, Any]] = [{**graph, "spec": {"components": components}}]
    for w in plan.workers if plan.engine == "trtllm" else ():
        data = {f"{w.role}.yaml": trtllm.engine_file(plan, first[w.role])}
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-{w.role}"}}
        documents.append({**config, "data": data})
    return stream(documents)


def _worker(plan: ServingPlan, place: WorkerPlace, image: str, graph: str) -> dict[str, Any]:
    """Return the component of the workers of one role. TensorRT-LLM reads a file, from the role's ConfigMap."""
    w = place.workers
    gpus = min(w.gpus, plan.node_gpus)
    pod = _pod(image, f"dynamo.{plan.engine}", worker_options(plan, place))
    (container,) = pod["spec"]["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    if plan.engine == "trtllm":
        container["volumeMounts"] = [{"name": "config", "mountPath": "/config"}]
        pod["spec"]["volumes"] = [{"name": "config", "configMap": {"name": f"{graph}-{w.role}"}}]
    name, kind = ("decode", "worker") if w.role == "both" else (w.role, w.role)
    nodes = {"multinode": {"nodeCount": place.nodes}} if place.nodes > 1 else {}
    return {"name": name, "type": kind, "replicas": w.count, **nodes, "podTemplate": pod}


def _pod(image: str, module: str, options: list[str]) -> dict[str, Any]:
    """Return the template of a pod that runs a Python module."""
    container = {
        "name": "main",
        "image": image,
        "command": ["python3"],
        "args": ["-m", module, *options],
        "envFrom": [{"secretRef": {"name": SECRET}}],
    }
    return {"spec": {"containers": [container]}}
