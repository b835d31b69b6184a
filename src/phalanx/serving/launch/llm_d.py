"""llm-d: the values of its chart llm-d-modelservice, for workers of one node, with prefill apart if the plan has it.

The chart starts `vllm serve` with the model, its port and its degrees, and before decode pods the routing sidecar,
which sends a prompt to prefill first (llm-d-incubation/llm-d-modelservice v0.4.12, charts/llm-d-modelservice/
templates/_helpers.tpl: vllmServeModelCommand, routingProxy). It gives all pods of a LeaderWorkerSet one command, and
vLLM's differ by node: wider workers are refused.
"""

from __future__ import annotations

import math
from typing import Any

from phalanx.serving.launch.checkpoints import weights_of
from phalanx.serving.launch.groups import SECRET, ServerGroup, groups, label, variables, without, yaml
from phalanx.serving.launch.launch import Launch
from phalanx.serving.plan_file import ServingPlan
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.errors import InputError

_IMAGE = "vllm/vllm-openai:v{}"
_OWN = ("--port", "--tensor-parallel-size", "--data-parallel-size")
_PORT, _BEHIND_SIDECAR = 8000, 8200


def manifest(plan: ServingPlan, line: Launch) -> str:
    """Write the chart's values, as YAML, of a plan whose command lines are `line`. Raises InputError for what it does
    not start."""
    each = groups(plan, line)
    if plan.engine != "vllm":
        raise InputError("for", "llm-d", f"starts vLLM, and this plan is of {plan.engine}", "plan it for vllm")
    if wide := [g for g in each if g.place.nodes > 1]:
        reason = f"gives all pods of a worker one command, and a worker takes {wide[0].place.nodes} nodes"
        raise InputError("for", "llm-d", reason, "kubernetes or dynamo start it")
    where, note = weights_of(plan)
    *before, serving = each
    room = math.ceil(2.2 * plan.model.parameter_count / GIB)  # of weights in 16 bits, and a tenth
    labels = {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": label(where)}
    proxy = {"enabled": bool(before), "targetPort": _BEHIND_SIDECAR, "connector": "nixlv2"}
    image = _IMAGE.format(line.version)
    values = {
        "multinode": False,
        "modelArtifacts": {
            "name": where,
            "uri": f"hf://{where}",
            "size": f"{room}Gi",
            "authSecretName": SECRET,
            "labels": labels,
        },
        "routing": {"servicePort": _PORT, "proxy": proxy},
        "decode": _pods(serving, image, _BEHIND_SIDECAR if before else _PORT),
        "prefill": _pods(before[0], image, _PORT) if before else {"create": False},
    }
    said = [
        "helm install NAME llm-d-modelservice --repo https://llm-d-incubation.github.io/llm-d-modelservice -f FILE",
        "requests arrive through an InferencePool that selects these labels",
    ]
    return yaml([values], [*said, *([note] if note else [])])


def _pods(g: ServerGroup, image: str, port: int) -> dict[str, Any]:
    w = g.place.workers
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image,
        "modelCommand": "vllmServe",
        "args": without(g.commands[0].options, _OWN),
        "ports": [{"containerPort": port}],
        "resources": {"limits": {"nvidia.com/gpu": str(g.gpus)}},
        "mountModelVolume": True,
    }
    if env := variables(g):
        container["env"] = env
    degrees = {"tensor": w.tp, "data": w.attention_dp, "dataLocal": w.attention_dp, "workers": 1}
    return {"create": True, "replicas": w.count, "parallelism": degrees, "containers": [container]}
