"""Manifests for KServe and llm-d, whose charts start `vllm serve` with the model, a port and degrees of parallelism,
and llm-d's routing sidecar, which sends a prompt to prefill first.

KServe: an LLMInferenceService (serving.kserve.io/v1alpha2). A container's args are appended through the `eval` of a
shell (kserve/kserve, config/llmisvcconfig/config-llm-template.yaml). Several nodes join by data parallelism alone,
with the manifest's degrees (config-llm-worker-data-parallel.yaml).

llm-d: the values of its chart llm-d-modelservice, for workers of one node (llm-d-incubation/llm-d-modelservice
v0.4.12, charts/llm-d-modelservice/templates/_helpers.tpl: vllmServeModelCommand, routingProxy). All pods of a
LeaderWorkerSet get one command, but the commands of vLLM differ by node, so wider workers are refused.
"""

import math
import shlex
from typing import Any

from phalanx.frameworks.writing.yaml import stream
from phalanx.serving.launch.checkpoints import weights_of
from phalanx.serving.launch.kubernetes import SECRET, ServerGroup, drop_options, groups, label, variables
from phalanx.serving.launch.parts import Launch
from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError

_KSERVE_OPTIONS = ("--port", "--nnodes", "--node-rank", "--master-addr", "--headless")
_MULTINODE_OPTIONS = ("--tensor-parallel-size", "--data-parallel-size", "--enable-expert-parallel")
"""Options that KServe's templates set: always, and in addition for several nodes."""
_LLM_D_OPTIONS = ("--port", "--tensor-parallel-size", "--data-parallel-size")
_PORT, _BEHIND_SIDECAR = 8000, 8200
_REMEDY = "kubernetes or dynamo start it"


def _groups(plan: ServingPlan, line: Launch, starter: str) -> tuple[ServerGroup | None, ServerGroup]:
    """Return (workers of separate prefill or None, the other workers). Raises InputError for another engine than
    vLLM."""
    if plan.engine != "vllm":
        raise InputError("for", starter, f"starts vLLM, and this plan is of {plan.engine}", "plan it for vllm")
    *before, serving = groups(plan, line)
    return next(iter(before), None), serving


def kserve(plan: ServingPlan, line: Launch) -> str:
    """Return KServe's manifest, as YAML, of a plan with the launch `line`. Raises InputError for a plan that its
    templates cannot start."""
    before, serving = _groups(plan, line, "kserve")
    where, note = weights_of(plan)
    spec = {"model": {"uri": f"hf://{where}", "name": where}, **_workload(serving, plan)}
    spec["router"] = {"scheduler": {}, "route": {}, "gateway": {}}
    spec |= {before.name: _workload(before, plan)} if before else {}
    document: dict[str, Any] = {"apiVersion": "serving.kserve.io/v1alpha2", "kind": "LLMInferenceService"}
    document |= {"metadata": {"name": label(where)}, "spec": spec}
    release = f"options as vLLM {line.version} has them: KServe's image has its own release"
    return stream([document], [release, note])


def _workload(g: ServerGroup, plan: ServingPlan) -> dict[str, Any]:
    w, nodes = g.place.workers, g.place.nodes
    args = drop_options(g.commands[0].options, (*_KSERVE_OPTIONS, *(_MULTINODE_OPTIONS if nodes > 1 else ())))
    quoted = [shlex.quote(word) for word in args]  # for the shell's `eval`
    container = {"name": "main", "args": quoted, "resources": _limits(g), **variables(g)}
    spec: dict[str, Any] = {"replicas": w.count, "template": {"containers": [container]}}
    if nodes == 1:
        return spec
    if w.pp > 1 or w.tp > plan.node_gpus or w.attention_dp % nodes:
        reason = f"joins nodes by data parallelism alone, and a worker is tp={w.tp}, pp={w.pp}, dp={w.attention_dp}"
        raise InputError("for", "kserve", f"{reason} over {nodes} nodes", _REMEDY)
    degrees = {"data": w.attention_dp, "dataLocal": w.attention_dp // nodes, "tensor": w.tp, "expert": w.moe_ep > 1}
    return {**spec, "parallelism": degrees, "worker": {"containers": [container]}}


def _limits(g: ServerGroup) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(g.gpus)}}


def llm_d(plan: ServingPlan, line: Launch) -> str:
    """Return the values of llm-d's chart, as YAML, of a plan with the launch `line`. Raises InputError for a plan
    that the chart cannot start."""
    before, serving = _groups(plan, line, "llm-d")
    if wide := next((g for g in (before, serving) if g and g.place.nodes > 1), None):
        reason = f"gives all pods of a worker one command, and a worker takes {wide.place.nodes} nodes"
        raise InputError("for", "llm-d", reason, _REMEDY)
    where, note = weights_of(plan)
    room = math.ceil(2.2 * plan.model.parameter_count / GIB)  # of weights in 16 bits, and a tenth
    labels = {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": label(where)}
    artifacts = {
        "name": where,
        "uri": f"hf://{where}",
        "size": f"{room}Gi",
        "authSecretName": SECRET,
        "labels": labels,
    }
    proxy = {"enabled": before is not None, "targetPort": _BEHIND_SIDECAR, "connector": "nixlv2"}
    image = f"vllm/vllm-openai:v{line.version}"
    values = {
        "multinode": False,
        "modelArtifacts": artifacts,
        "routing": {"servicePort": _PORT, "proxy": proxy},
        "decode": _pods(serving, image, _BEHIND_SIDECAR if before else _PORT),
        "prefill": _pods(before, image, _PORT) if before else {"create": False},
    }
    chart = "--repo https://llm-d-incubation.github.io/llm-d-modelservice -f FILE"
    arrival = "requests arrive through an InferencePool that selects these labels"
    return stream([values], [f"helm install NAME llm-d-modelservice {chart}", arrival, note])


def _pods(g: ServerGroup, image: str, port: int) -> dict[str, Any]:
    w = g.place.workers
    container = {
        "name": "vllm",
        "image": image,
        "modelCommand": "vllmServe",
        "args": drop_options(g.commands[0].options, _LLM_D_OPTIONS),
        "ports": [{"containerPort": port}],
        "resources": _limits(g),
        "mountModelVolume": True,
        **variables(g),
    }
    degrees = {"tensor": w.tp, "data": w.attention_dp, "dataLocal": w.attention_dp, "workers": 1}
    return {"create": True, "replicas": w.count, "parallelism": degrees, "containers": [container]}
