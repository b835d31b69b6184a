"""Dynamo: a DynamoGraphDeployment (nvidia.com/v1beta1) of a frontend, which routes, and the engine's workers.

The manifest follows the templates of Dynamo 1.6.1 (dynamo/profiler/templates/dgd). A worker over several nodes has a
nodeCount.
"""

import json

from phalanx.serving.launch import sglang, trtllm, vllm
from phalanx.serving.launch.arguments import published
from phalanx.serving.launch.checkpoints import weights_of
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
    lines = ["apiVersion: nvidia.com/v1beta1", "kind: DynamoGraphDeployment", "metadata:", f"  name: {name}"]
    lines += ["spec:", "  components:"]
    lines += _component("Frontend", "frontend", 1, image, "dynamo.frontend", [], 0, 1, "")
    first: dict[str, WorkerPlace] = {}
    for place in places(plan):
        first.setdefault(place.workers.role, place)
    for role, place in first.items():
        w = place.workers
        kind = "worker" if role == "both" else role
        config = f"{name}-{role}" if plan.engine == "trtllm" else ""
        command = worker_options(plan, place)
        gpus = min(w.gpus, plan.node_gpus)
        lines += _component(
            "decode" if role == "both" else role,
            kind,
            w.count,
            image,
            f"dynamo.{plan.engine}",
            command,
            gpus,
            place.nodes,
            config,
        )
    out = "\n".join(lines) + "\n"
    for role, place in first.items():
        if plan.engine == "trtllm":
            content = "".join(f"    {line}\n" for line in trtllm.engine_file(plan, place).splitlines())
            out += f"---\napiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}-{role}\n"
            out += f"data:\n  {role}.yaml: |\n{content}"
    return out


def _component(
    name: str,
    kind: str,
    replicas: int,
    image: str,
    module: str,
    options: list[str],
    gpus: int,
    nodes: int,
    config: str,
) -> list[str]:
    lines = [f"  - name: {name}", f"    type: {kind}", f"    replicas: {replicas}"]
    lines += ["    multinode:", f"      nodeCount: {nodes}"] if nodes > 1 else []
    lines += [
        "    podTemplate:",
        "      spec:",
        "        containers:",
        "        - name: main",
        f"          image: {image}",
    ]
    lines += [
        "          command:",
        "          - python3",
        "          args:",
        "          - -m",
        f"          - {module}",
    ]
    lines += [f"          - {json.dumps(word)}" for word in options]
    lines += ["          envFrom:", "          - secretRef:", "              name: hf-token-secret"]
    if gpus:
        lines += ["          resources:", "            limits:", f'              nvidia.com/gpu: "{gpus}"']
    if config:
        lines += ["          volumeMounts:", "          - name: config", "            mountPath: /config"]
        lines += ["        volumes:", "        - name: config", "          configMap:", f"            name: {config}"]
    return lines
