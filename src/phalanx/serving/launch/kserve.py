"""KServe: an LLMInferenceService (serving.kserve.io/v1alpha2), with prefill apart if the plan has it.

KServe's own templates start `vllm serve` with the model's folder, a port and, between prefill and decode, llm-d's
routing sidecar; a container's args are appended, through the `eval` of a shell (kserve/kserve,
config/llmisvcconfig/config-llm-template.yaml). Several nodes join by data parallelism alone, whose degrees are the
manifest's (config-llm-worker-data-parallel.yaml).
"""

from __future__ import annotations

import shlex
from typing import Any

from phalanx.serving.launch.checkpoints import weights_of
from phalanx.serving.launch.groups import ServerGroup, groups, label, variables, without, yaml
from phalanx.serving.launch.launch import Launch
from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.errors import InputError

_OWN = ("--port", "--nnodes", "--node-rank", "--master-addr", "--headless")
_OF_DATA = ("--tensor-parallel-size", "--data-parallel-size", "--enable-expert-parallel")
"""What the templates set: of one node, and of several."""


def manifest(plan: ServingPlan, line: Launch) -> str:
    """Write the manifest, as YAML, of a plan whose command lines are `line`. Raises InputError for what KServe's
    templates do not start."""
    if plan.engine != "vllm":
        raise InputError("for", "kserve", f"starts vLLM, and this plan is of {plan.engine}", "plan it for vllm")
    where, note = weights_of(plan)
    *before, serving = groups(plan, line)
    spec = {"model": {"uri": f"hf://{where}", "name": where}, **_workload(serving, plan)}
    spec["router"] = {"scheduler": {}, "route": {}, "gateway": {}}
    spec |= {g.name: _workload(g, plan) for g in before}
    document: dict[str, Any] = {"apiVersion": "serving.kserve.io/v1alpha2", "kind": "LLMInferenceService"}
    document |= {"metadata": {"name": label(where)}, "spec": spec}
    said = [
        f"options as vLLM {line.version} has them: KServe's image has its own release",
        *([note] if note else []),
    ]
    return yaml([document], said)


def _workload(g: ServerGroup, plan: ServingPlan) -> dict[str, Any]:
    w, nodes = g.place.workers, g.place.nodes
    drop = (*_OWN, *(_OF_DATA if nodes > 1 else ()))
    container: dict[str, Any] = {
        "name": "main",
        "args": [shlex.quote(word) for word in without(g.commands[0].options, drop)],
        "resources": {"limits": {"nvidia.com/gpu": str(g.gpus)}},
    }
    if env := variables(g):
        container["env"] = env
    spec: dict[str, Any] = {"replicas": w.count, "template": {"containers": [container]}}
    if nodes == 1:
        return spec
    if w.pp > 1 or w.tp > plan.node_gpus or w.attention_dp % nodes:
        reason = f"joins nodes by data parallelism alone, and a worker is tp={w.tp}, pp={w.pp}, dp={w.attention_dp}"
        raise InputError("for", "kserve", f"{reason} over {nodes} nodes", "kubernetes or dynamo start it")
    degrees = {"data": w.attention_dp, "dataLocal": w.attention_dp // nodes, "tensor": w.tp, "expert": w.moe_ep > 1}
    return {**spec, "parallelism": degrees, "worker": {"containers": [container]}}
