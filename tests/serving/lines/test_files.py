"""Lines of manifests, of charts' values and of the files that `--config` names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.in_process_cli import error_of
from support.other_values import changed

from phalanx.frameworks.launchers.gpu_kinds import instance
from phalanx.serving.answer import serve_plan
from phalanx.serving.lines.files import ServerPods, commands_of, script_of
from phalanx.serving.lines.reading import LinesRead, read
from phalanx.spec.cluster.presets import named
from phalanx.spec.errors import InputError

_GIVEN = {"cluster": "dgx-h100", "input": 10, "output": 10}
_8B = "meta-llama/Llama-3.1-8B-Instruct"
_SET = f"""kind: LeaderWorkerSet
apiVersion: leaderworkerset.x-k8s.io/v1
spec:
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
        - {{name: a, command: [sh, -c, "bash m.sh $(N); vllm serve {_8B} -tp 8 -pp 2"]}}
    workerTemplate: {{spec: {{containers: [{{name: c, command: [sh, -c, "bash more.sh worker"]}}]}}}}
"""
_VALUES = f"""servingEngineSpec:
  modelSpec:
  - name: a
    modelURL: {_8B}
    vllmConfig: {{tensorParallelSize: 2, maxModelLen: 2048, enforceEager: true, extraArgs: [--max-num-seqs, "9"]}}
"""
_DEPLOYMENT = """kind: Deployment
spec:
  replicas: 2
  template: {{spec: {{containers: [{{name: a, command: [vllm, serve, {model}, -tp, "4"{more}],
    resources: {{limits: {{cpu: 10, nvidia.com/gpu: "{gpus}"}}}}}}]}}}}
"""
_IMAGE = f'spec: {{containers: [{{name: a, image: "vllm/vllm-openai:v1", args: [--model, {_8B}, -tp, "4"]}}]}}\n'
_COMPOSED = "services: {{a: {{{}, ipc: host}}}}\n"
"""A service of Docker Compose, whose command is the arguments of its image's entry point."""


def _read(path: Path, text: str) -> LinesRead:
    path.write_text(text)
    return read([path], _GIVEN)


@pytest.mark.parametrize(
    ("text", "layout", "slots", "longest"),
    [
        (_SET, "tp=8,pp=2", 1024, 131072),
        (_VALUES, "tp=2", 9, 2048),
        (f"apiVersion: v1\nkind: Pod\n{_IMAGE}", "tp=4", 1024, 131072),
        (
            _COMPOSED.format(f'image: "vllm/vllm-openai:v1", command: [--model, {_8B}, -tp, "4"]'),
            "tp=4",
            1024,
            131072,
        ),
        (_COMPOSED.format(f"image: vllm/vllm-openai, command: {_8B} -tp 2"), "tp=2", 1024, 131072),
        (_COMPOSED.format(f"image: a, entrypoint: vllm serve, command: {_8B} -tp 2"), "tp=2", 1024, 131072),
        (_COMPOSED.format(f"image: vllm/vllm-openai, command: vllm serve {_8B} -tp 2"), "tp=2", 1024, 131072),
    ],
)
def test_a_manifest_and_values_are_read_as_lines(
    tmp_path: Path, text: str, layout: str, slots: int, longest: int
) -> None:
    found = _read(tmp_path / "a.yaml", text)
    assert (found.fields["model"], found.fields["layout"], found.fields["slots"]) == (_8B, layout, slots)
    assert found.longest == longest


def test_a_file_of_flags_stands_below_the_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        f"model: {_8B}\ntensor-parallel-size: 4\nmax-num-seqs: 5\nenforce-eager: false\n"
    )
    found = _read(tmp_path / "a.sh", "vllm serve --config c.yaml --max-num-seqs 7").fields
    assert (found["model"], found["layout"], found["slots"]) == (_8B, "tp=4", 7)
    with pytest.raises(InputError, match="is its --config, and is not here"):
        _read(tmp_path / "a.sh", "vllm serve --config d.yaml")
    assert "d.yaml" in error_of(tmp_path, "serve", "plan", "--from", "a.sh", "--cluster", "dgx-h100")


def test_a_distilled_checkpoint_is_not_in_8_bits(tmp_path: Path) -> None:
    line = "vllm serve deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"
    (tmp_path / "a.sh").write_text(line)
    assert read([tmp_path / "a.sh"], _GIVEN | {"model": "qwen2.5-14b"}).fields["weights"] == "bf16"
    (tmp_path / "a.sh").write_text("vllm serve deepseek-ai/DeepSeek-R1 -tp 8")
    assert read([tmp_path / "a.sh"], _GIVEN).fields["weights"] == "fp8"


def test_a_server_whose_cache_holds_no_longest_request_does_not_start(tmp_path: Path) -> None:
    found = _read(tmp_path / "a.sh", f"vllm serve {_8B} --max-model-len 4096")
    assert found.stopped(4096) == ()
    assert "--max-model-len 3072" in found.stopped(4000)[0]
    assert found.stopped(900)[0].endswith("cache holds 900: more memory")
    assert _read(tmp_path / "a.sh", f"python -m sglang.launch_server --model {_8B}").stopped(1) == ()


def test_each_group_that_attends_apart_holds_the_longest_request_itself(tmp_path: Path) -> None:
    line = "vllm serve Qwen/Qwen3-30B-A3B -dp 2 --enable-expert-parallel --max-model-len 262144"
    (tmp_path / "a.sh").write_text(f"{line} --gpu-memory-utilization 0.55")
    answer = serve_plan(source=[tmp_path / "a.sh"], cluster="dgx-h100", input=1024, output=8, requests=4)
    (workers,) = answer.plan.workers
    assert workers.attention_dp == 2
    assert f"an engine's cache holds {workers.cache_tokens // 2:,}: --max-model-len " in answer.caveats[0]
    (tmp_path / "a.sh").write_text(f"{line} --gpu-memory-utilization 0.94")
    answer = serve_plan(source=[tmp_path / "a.sh"], cluster="dgx-h200", input=1024, output=8, requests=4)
    assert not any("does not start" in caveat for caveat in answer.caveats)


@pytest.mark.parametrize(
    ("text", "gpus", "refused"),
    [
        (_DEPLOYMENT.format(model=_8B, more="", gpus=4), 8, ""),
        (
            _DEPLOYMENT.format(model=_8B, more="", gpus=2),
            8,
            "tp=4 takes 4 GPUs, and a pod has 2: set the",
        ),
        (_DEPLOYMENT.format(model=_8B, more=", --nnodes, 2, --node-rank, $R", gpus=2), 4, ""),
        (_DEPLOYMENT.format(model=_8B, more="", gpus=2).replace("Deployment", "Job"), 4, "takes 4 GPUs, and a pod"),
        (_SET.replace("spec:\n", "spec:\n  replicas: 3\n", 1), 48, ""),
        (
            _SET.replace('-pp 2"]', '-pp 2"], resources: {limits: {amd.com/gpu: 4}}'),
            16,
            "16 GPUs, and 2 pods h",
        ),
        (
            _VALUES.replace("    vllmC", "    replicaCount: 3\n    requestGPU: 1\n    vllmC"),
            6,
            "takes 2 GPUs, and a pod",
        ),
    ],
)
def test_replicas_are_counted_and_a_pod_has_the_gpus_of_its_server(
    tmp_path: Path, text: str, gpus: int, refused: str
) -> None:
    answer = _read(tmp_path / "a.yaml", text)
    assert answer.fields["gpus"] == gpus
    said = [caveat for caveat in answer.caveats if caveat.startswith("does not start")]
    assert len(said) == bool(refused)
    assert refused in "".join(said)


def test_what_stops_a_server_is_said_first_and_then_what_is_not_judged(tmp_path: Path) -> None:
    text = _DEPLOYMENT.format(model=_8B, more=", --monokernel, --no-such-flag, a", gpus=2)
    caveats = _read(tmp_path / "a.yaml", text).caveats
    order = ("does not start", "not judged", "not modelled")
    kinds = [order.index(caveat.partition(":")[0]) for caveat in caveats if caveat.startswith(order)]
    assert set(kinds) == {0, 1, 2}
    assert kinds == sorted(kinds)


_ANY = """kind: Pod
spec:
{pods}
  containers: [{{name: a, image: "vllm/vllm-openai:v1", args: [--model, {model}]}}]
"""
_REQUIRED = """  affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: {{nodeSelectorTerms: [
    {{matchExpressions: [{{key: nvidia.com/gpu.product, operator: {how}, values: [{names}]}}]}}]}}}}}}"""


@pytest.mark.parametrize(
    ("pods", "cluster"),
    [
        ("  nodeSelector: {cloud.google.com/gke-accelerator: nvidia-l4}", "pcie-l4"),
        ("  nodeSelector: {cloud.google.com/gke-accelerator: nvidia-tesla-a100}", "dgx-a100-40gb"),
        ("  nodeSelector: {nvidia.com/gpu.product: NVIDIA-A10G}", "pcie-a10g"),
        (_REQUIRED.format(how="In", names="NVIDIA-GeForce-RTX-4090"), "pcie-rtx4090"),
        (_REQUIRED.format(how="NotIn", names="Tesla-T4"), None),
        (_REQUIRED.format(how="In", names="NVIDIA-L4, NVIDIA-A10"), None),
        ("  nodeSelector: {nvidia.com/gpu.product: NVIDIA-Unknown-1}", None),
        ("  nodeSelector: {disk: ssd}", None),
        ("  nodeSelector: many", None),
    ],
)
def test_the_gpu_that_a_manifest_selects_is_the_clusters(tmp_path: Path, pods: str, cluster: str | None) -> None:
    (tmp_path / "a.yaml").write_text(_ANY.format(pods=pods, model=_8B))
    found = read([tmp_path / "a.yaml"], {"input": 10, "output": 10})
    assert found.fields.get("cluster") == cluster
    assert ("the manifest selects" in "".join(found.caveats)) == (cluster is not None)
    other = read([tmp_path / "a.yaml"], _GIVEN)
    assert other.fields["cluster"] == _GIVEN["cluster"]
    assert not any("the manifest selects" in caveat for caveat in other.caveats)


_PREDICTOR = """kind: InferenceService
spec:
  predictor:
    minReplicas: 3
    model:
      modelFormat: {name: huggingface}
      args: [--model_name=a, "--model_id=%s", --max-num-seqs=9]
      resources: {limits: {nvidia.com/gpu: "1"}}
"""
_LLM_SERVICE = """kind: LLMInferenceService
spec:
  model: {uri: "hf://%s"}
  replicas: 2
  parallelism: {tensor: 4}
  template: {containers: [{name: main, env: [{name: VLLM_ADDITIONAL_ARGS, value: "--max-num-seqs 9"}],
    resources: {limits: {nvidia.com/gpu: "4"}}}]}
"""
_GRAPH = """kind: DynamoGraphDeployment
spec:
  services:
    Frontend: {componentType: frontend, replicas: 5,
      extraPodSpec: {mainContainer: {image: a, args: [-m, dynamo.frontend]}}}
    Worker: {componentType: worker, replicas: 2, extraPodSpec: {mainContainer: {image: a,
      command: [python3, -m, dynamo.vllm], args: [--model, %s, --max-num-seqs, "9", --tensor-parallel-size, "2"]}}}
"""


@pytest.mark.parametrize(
    ("text", "layout", "gpus"), [(_PREDICTOR, "tp=1", 3), (_LLM_SERVICE, "tp=4", 8), (_GRAPH, "tp=2", 4)]
)
def test_a_service_starts_its_model(tmp_path: Path, text: str, layout: str, gpus: int) -> None:
    found = _read(tmp_path / "a.yaml", text.replace("%s", _8B))
    assert found.fields["model"] == _8B
    fields = {"engine": "vllm", "layout": layout, "gpus": gpus, "slots": 9}
    assert {name: found.fields[name] for name in fields} == fields
    assert not any(caveat.startswith(("not judged", "does not start")) for caveat in found.caveats)


def test_a_service_says_its_degrees(tmp_path: Path) -> None:
    text = _LLM_SERVICE.replace("%s", "Qwen/Qwen3-30B-A3B").replace("tensor: 4", "data: 4, expert: true")
    found = _read(tmp_path / "a.yaml", text)
    assert (found.fields["layout"], found.fields["gpus"]) == ("tp=1,dp=4,ep=4", 8)


_KUBEAI = """apiVersion: kubeai.org/v1
kind: Model
metadata: {{name: a}}
spec:
  url: hf://{model}
  engine: {engine}
  args: [--tensor-parallel-size=2, --max-num-seqs=7]
  resourceProfile: {profile}
  minReplicas: 3
"""


@pytest.mark.parametrize(
    ("profile", "cluster", "stops"), [("nvidia-gpu-h100:2", "h100", False), ("amd-gpu-mi300x:1", "mi300x", True)]
)
def test_a_model_of_kubeai_has_its_server_s_flags_and_its_profile_s_gpus(
    tmp_path: Path, profile: str, cluster: str, stops: bool
) -> None:
    text = _KUBEAI.format(model=_8B, engine="VLLM", profile=profile)
    (tmp_path / "a.yaml").write_text(text)
    answer = read([tmp_path / "a.yaml"], {})
    got = answer.fields
    assert (got["layout"], got["slots"], got["gpus"]) == ("tp=2", 7, 6)
    assert cluster in got["cluster"]
    assert any(caveat.startswith("does not start") for caveat in answer.caveats) == stops
    (tmp_path / "a.yaml").write_text(text.replace("VLLM", "OLlama"))
    with pytest.raises(InputError, match="starts no server"):
        read([tmp_path / "a.yaml"], {})


_KAITO = """apiVersion: kaito.sh/v1beta1
kind: {kind}
metadata: {{name: a}}
"""
_WORKSPACE = (
    _KAITO.format(kind="Workspace")
    + """resource: {instanceType: %s, count: 2}
inference: {preset: {name: phi-4-mini-instruct}, config: b}
"""
)
_INFERENCE_SET = (
    _KAITO.format(kind="InferenceSet")
    + """spec:
  replicas: 3
  template:
    resource: {instanceType: %s}
    inference: {preset: {name: Qwen/Qwen3-0.6B}}
"""
)
_ROLES = (
    _KAITO.format(kind="MultiRoleInference")
    + """spec:
  model: {name: llama-3.1-8b-instruct}
  roles:
  - {type: prefill, replicas: 2, instanceType: %s}
  - {type: decode, replicas: 1, instanceType: %s}
"""
)


@pytest.mark.parametrize(
    ("text", "kind", "layout", "gpus", "cluster"),
    [
        (_WORKSPACE, "Standard_NC80adis_H100_v5", "tp=2,pp=2", 4, "pcie-h100-nvl"),
        (_INFERENCE_SET, "g6.12xlarge", "tp=4", 12, "pcie-l4"),
        (_ROLES, "Standard_NC24ads_A100_v4", "2 x tp=1 + 1 x tp=1", 3, "pcie-a100"),
        (_ROLES, "Standard_NV6ads_A10_v5", "2 x tp=1 + 1 x tp=1", 3, ""),
    ],
)
def test_a_preset_of_kaito_is_served_by_the_gpus_of_its_instances(
    tmp_path: Path, text: str, kind: str, layout: str, gpus: int, cluster: str
) -> None:
    (tmp_path / "a.yaml").write_text(text.replace("%s", kind))
    found = read([tmp_path / "a.yaml"], {})
    got = found.fields
    assert (got["layout"], got["gpus"], got.get("cluster", "")) == (layout, gpus, cluster)
    said = " ".join(found.caveats)
    assert ("all 2 GPUs" in said, "ConfigMap b" in said) == (text == _WORKSPACE, text == _WORKSPACE)
    assert (f"instances of {kind} have one GPU" in said) == (not cluster)


def test_instances_of_clouds_have_gpus_that_are_known() -> None:
    """Sizes of one GPU, of several, and of a whole node."""
    found = {
        "Standard_NC24ads_A100_v4": ("a100-pcie", 1),
        "Standard_ND96asr_v4": ("a100-40gb", 8),
        "g5.12xlarge": ("a10g", 4),
        "g6e.xlarge": ("l40s", 1),
        "g4dn.metal": ("t4", 8),
        "a2-highgpu-4g": ("a100-40gb", 4),
        "g2-standard-24": ("l4", 2),
        "p5en.48xlarge": ("h200", 8),
    }
    assert {name: instance(name) for name in found} == found
    assert all(named(gpu) for gpu, _ in found.values())
    assert instance("m5.large") is None


def test_nodes_are_selected_by_their_type(tmp_path: Path) -> None:
    pod = {"image": "vllm/vllm-openai", "name": "a", "args": ["--model", _8B]}
    spec = {"nodeSelector": {"node.kubernetes.io/instance-type": "g6e.xlarge"}, "containers": [pod]}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"kind": "Pod", "spec": spec}))
    assert read([tmp_path / "a.yaml"], {}).fields["cluster"] == "pcie-l40s"


@pytest.mark.parametrize(
    "text",
    [
        _SET,
        _VALUES,
        _IMAGE,
        *(t.replace("%s", _8B) for t in (_PREDICTOR, _LLM_SERVICE, _GRAPH, _WORKSPACE, _INFERENCE_SET, _ROLES)),
    ],
)
def test_any_value_may_be_of_another_type(tmp_path: Path, text: str) -> None:
    """Its commands are read without it."""
    file = tmp_path / "served.yaml"
    file.write_text(text)
    assert script_of(file)[0]
    document = yaml.safe_load(text)
    for other in changed(document):
        assert all("\n" not in line for line, _ in commands_of(other, ServerPods()))
