"""Manifests of serving plans: of the schemas that Kubernetes, LeaderWorkerSet, KServe and llm-d publish, as far as
data/manifest_schemas.json records them, and what their pods find of each other."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.in_process_cli import error_of
from support.openapi import violations
from support.sizes import examples

from phalanx.planning.lookup import model_named
from phalanx.serving import plan_file
from phalanx.serving.answer import launch, manifest
from phalanx.serving.lines.reading import read
from phalanx.serving.plan_file import LatencyLimits, ServedLoad, ServingPlan, Workers
from phalanx.spec.errors import InputError

_SCHEMAS = json.loads((Path(__file__).parent / "data/manifest_schemas.json").read_text())
_DENSE, _EXPERTS = (model_named(name)[0] for name in ("llama3-70b", "deepseek-v3"))
_STARTERS = ("kubernetes", "kserve", "llm-d")


def _plan(engine: str, *groups: Workers, experts: bool = False, **fields: Any) -> ServingPlan:
    plan = ServingPlan(
        model_name="deepseek-v3" if experts else "llama3-70b",
        model=_EXPERTS if experts else _DENSE,
        cluster="dgx-h100",
        node_gpus=8,
        gpus=sum(w.count * w.gpus for w in groups),
        engine=engine,  # type: ignore[arg-type]
        weights="fp8",
        cache="bf16",
        page_tokens=16,
        longest=4500,
        draft_tokens=0,
        adapters=0,
        workers=groups,
        load=ServedLoad(4000, 500, 64, 0.0, "", 0.0),
        limits=LatencyLimits(1.0, None, 90),
        prediction={"tokens_per_s": 1.0},
    )
    return replace(plan, **fields)


def _workers(role: str, count: int, tp: int, pp: int = 1, dp: int = 1, ep: int = 1, large: bool = False) -> Workers:
    return Workers(role, count, tp, pp, dp, tp * dp // ep, ep, 64, 1024, 100_000, large)  # type: ignore[arg-type]


def _drawn(draw: np.random.Generator) -> ServingPlan:
    experts = bool(draw.random() < 0.5)

    def workers(role: str) -> Workers:
        tp, pp = int(draw.choice((1, 2, 4, 8))), int(draw.choice((1, 1, 2)))
        dp = int(draw.choice((1, 8 // tp, 16 // tp))) if experts and pp == 1 else 1
        ep = tp * dp if experts and draw.random() < 0.7 else 1
        return _workers(role, int(draw.integers(1, 4)), tp, pp, dp, ep, large=ep > 1 and dp > 1)

    each = (workers("both"),) if draw.random() < 0.5 else (workers("prefill"), workers("decode"))
    engine = str(draw.choice(("vllm", "vllm", "sglang")))
    drafts = int(draw.choice((0, 3))) if engine == "vllm" else 0
    return _plan(engine, *each, experts=experts, draft_tokens=drafts)


def _documents(plan: ServingPlan, starter: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(manifest(plan, starter)))


def _wrong(document: dict[str, Any]) -> list[str]:
    kind = document.get("kind", "llm-d values")
    return violations(_SCHEMAS[kind]["schema"], document, kind)


def _tables(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all tables in a document, but for maps of one's own names."""
    own = path[-1:] in (("labels",), ("limits",), ("matchLabels",), ("selector",))
    if isinstance(value, dict) and (not own or "matchLabels" in value):
        yield path
    for key, each in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from _tables(each, (*path, key))


@examples(25, 400)
def test_a_manifest_that_is_written_is_read_back(examples: int, tmp_path: Path) -> None:
    """Its engine, layout and GPUs are those of the plan, whichever way it is started."""
    draw, file, count, seen = np.random.default_rng(7), tmp_path / "a.yaml", 0, set[tuple[str, int]]()
    while count < examples:
        plan = _drawn(draw)
        for starter in (*_STARTERS, "dynamo"):
            try:
                file.write_text(manifest(plan, starter))
            except InputError:  # of what a starter does not start: tested below
                continue
            fields = read([file], {"cluster": plan.cluster, "model": plan.model_name}).fields
            got = [dict(pair.split("=") for pair in text.split(",")) for text in _layouts(fields["layout"])]
            degrees = [{"tp": w.tp, "pp": w.pp, "dp": w.attention_dp, "ep": w.moe_ep} for w in plan.workers]
            known = [{name: str(n) for name, n in x.items() if n > 1 or name == "tp"} for x in degrees]
            assert got == known, (starter, plan)
            assert (fields["engine"], fields["gpus"]) == (plan.engine, plan.gpus), (starter, plan)
            if len(known) > 1:
                counts = [int(part.split(" x ")[0]) for part in fields["layout"].split(" + ")]
                assert counts == [w.count for w in plan.workers], (starter, plan)
            seen.add((starter, len(known)))
            count += 1
    assert seen == {(starter, parts) for starter in (*_STARTERS, "dynamo") for parts in (1, 2)}


def _layouts(text: str) -> list[str]:
    """Return the layouts of workers that prefill and that decode, or the only one."""
    return [part.split(" x ")[-1] for part in text.split(" + ")]


@examples(60, 2000)
def test_every_manifest_is_of_the_published_schemas(examples: int) -> None:
    draw = np.random.default_rng(5)
    seen: dict[str, dict[str, Any]] = {}
    for _ in range(examples):
        plan = _drawn(draw)
        for starter in _STARTERS:
            documents = []
            with suppress(InputError):  # of what a starter does not start: tested below
                documents = _documents(plan, starter)
            for document in documents:
                assert not _wrong(document), (plan, document)
                kind = document.get("kind", "llm-d values")
                if len(json.dumps(document)) > len(json.dumps(seen.get(kind, {}))):
                    seen[kind] = document
    assert set(seen) == set(_SCHEMAS)
    for kind, document in seen.items():  # and the schemas refuse what they do not have, wherever it stands
        for path in _tables(document):
            other = copy.deepcopy(document)
            table = other
            for step in path:
                table = table[step]
            table["colour"] = "red"
            assert _wrong(other), (kind, path)
    deployment = copy.deepcopy(seen["Deployment"])
    del deployment["spec"]["selector"]
    assert _wrong(deployment) == ["Deployment.spec.selector is missing"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("pp", [1, 2])
def test_pods_of_a_node_and_of_several(engine: str, pp: int) -> None:
    head, service = _documents(_plan(engine, _workers("both", 3, 8, pp)), "kubernetes")
    assert (head["kind"], head["spec"]["replicas"]) == ("LeaderWorkerSet" if pp > 1 else "Deployment", 3)
    if pp == 1:
        (leader,) = head["spec"]["template"]["spec"]["containers"]
        labels = head["spec"]["template"]["metadata"]["labels"]
        assert head["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert "--nnodes" not in leader["args"]
    else:
        group = head["spec"]["leaderWorkerTemplate"]
        assert group["size"] == 2
        (leader,), (behind,) = (group[f"{of}Template"]["spec"]["containers"] for of in ("leader", "worker"))
        labels = group["leaderTemplate"]["metadata"]["labels"]
        assert group["workerTemplate"]["metadata"]["labels"]["role"] != labels["role"]  # it takes no requests
        for container in (leader, behind):
            assert container["args"][container["args"].index("--node-rank") + 1] == "$(LWS_WORKER_INDEX)"
            assert any("$(LWS_LEADER_ADDRESS)" in word for word in container["args"])
        assert ("readinessProbe" in leader, "readinessProbe" in behind) == (True, False)
        assert ("--headless" in behind["args"]) == (engine == "vllm")
    assert leader["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert ("--host" in leader["args"]) == (engine == "sglang")  # which listens on 127.0.0.1 alone
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["ports"][0]["targetPort"] == leader["ports"][0]["containerPort"]
    # A Service of the set's own name would stand in the place of the headless one that gives pods their addresses.
    assert service["metadata"]["name"] != head["metadata"]["name"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_router_is_told_the_address_of_every_worker(engine: str) -> None:
    groups = (_workers("prefill", 2, 4), _workers("decode", 3, 8, 2))
    prefill, decode, router, service = _documents(_plan(engine, *groups), "kubernetes")
    (container,) = router["spec"]["template"]["spec"]["containers"]
    words = container["args"][0].split()
    for role, head, count, size in (("prefill", prefill, 2, 1), ("decode", decode, 3, 2)):
        name, group = head["metadata"]["name"], head["spec"]["leaderWorkerTemplate"]
        assert (head["kind"], head["spec"]["replicas"], group["size"]) == ("LeaderWorkerSet", count, size)
        (leader,) = group.get("leaderTemplate", group["workerTemplate"])["spec"]["containers"]
        port = leader["ports"][0]["containerPort"]
        assert leader["args"][leader["args"].index("--port") + 1] == str(port)
        told = [words[i + 1] for i, word in enumerate(words) if word == f"--{role}"]
        assert told == [f"http://{name}-{i}.{name}:{port}" for i in range(count)]
        if engine == "vllm":
            host = next(e for e in leader["env"] if e["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST")
            assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        elif role == "prefill":
            bootstrap = leader["args"][leader["args"].index("--disaggregation-bootstrap-port") + 1]
            assert words[words.index(told[0]) + 1] == bootstrap
    assert service["spec"]["selector"] == router["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"]


def test_kserve_appends_what_its_templates_leave_to_the_user() -> None:
    """`eval "exec vllm serve ... $@"` of the templates, run by the shell that they run it in."""
    plan = _plan("vllm", _workers("prefill", 2, 1, dp=8, ep=8), _workers("decode", 1, 1, dp=16, ep=16, large=True))
    (service,) = _documents(replace(plan, model_name="deepseek-v3", model=_EXPERTS, draft_tokens=3), "kserve")
    spec = service["spec"]
    assert spec["model"] == {"uri": "hf://deepseek-ai/DeepSeek-V3", "name": "deepseek-ai/DeepSeek-V3"}
    assert (spec["replicas"], spec["prefill"]["replicas"]) == (1, 2)
    assert spec["parallelism"] == {"data": 16, "dataLocal": 8, "tensor": 1, "expert": True}
    assert "parallelism" not in spec["prefill"]
    (leader,), (behind,) = (spec[of]["containers"] for of in ("template", "worker"))
    assert leader == behind
    assert leader["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert not {"--data-parallel-size", "--tensor-parallel-size", "--enable-expert-parallel"} & set(leader["args"])
    assert "--data-parallel-size" in spec["prefill"]["template"]["containers"][0]["args"]
    command = launch(replace(plan, model_name="deepseek-v3", model=_EXPERTS, draft_tokens=3)).commands[-1]
    shell = ["bash", "-c", 'eval "printf %s\\\\\\\\n $@"', "--", *leader["args"]]
    heard = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    assert [word for word in heard if word.startswith("{")] == [w for w in command.options if w.startswith("{")]
    assert all(word in command.options for word in heard)


@pytest.mark.parametrize(("tp", "dp", "ep", "pp"), [(4, 1, 1, 2), (1, 8, 8, 1), (2, 1, 2, 1)])
def test_dynamo_s_workers_of_trtllm_have_the_degrees_of_the_plan(tp: int, dp: int, ep: int, pp: int) -> None:
    group = _workers("both", 3, tp, pp, dp, ep)
    plan = _plan("trtllm", group, experts=ep > 1)
    documents = list(yaml.safe_load_all(manifest(plan, "dynamo")))
    frontend, worker = documents[0]["spec"]["components"]
    (container,) = worker["podTemplate"]["spec"]["containers"]
    words = container["args"]
    values = dict(zip(words, [*words[1:], ""], strict=True))
    assert values["--tensor-parallel-size"] == str(tp * dp)
    assert values["--pipeline-parallel-size"] == str(pp)
    assert values.get("--expert-parallel-size") == (str(ep) if ep > 1 else None)
    assert ("--enable-attention-dp" in words) == (dp > 1)
    assert (values["--max-num-tokens"], values["--kv-block-size"]) == ("1024", "16")
    assert (values["--max-batch-size"], values["--extra-engine-args"]) == (str(64 // dp), "/config/both.yaml")
    assert (worker["replicas"], frontend["replicas"]) == (3, 1)
    for part in (frontend, worker):
        (one,) = part["podTemplate"]["spec"]["containers"]
        assert one["envFrom"] == [{"secretRef": {"name": "hf-token-secret"}}]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(tp * dp * pp)
    assert "resources" not in frontend["podTemplate"]["spec"]["containers"][0]
    assert documents[1]["kind"] == "ConfigMap"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_dynamo_s_workers_that_prefill_and_decode_know_which_they_are(engine: str) -> None:
    plan = _plan(engine, _workers("prefill", 2, 4), _workers("decode", 3, 8, 2))
    graph, *configs = yaml.safe_load_all(manifest(plan, "dynamo"))
    assert graph["metadata"]["name"] == f"{engine}-disagg"
    frontend, *workers = graph["spec"]["components"]
    assert (frontend["name"], frontend["type"]) == ("Frontend", "frontend")
    names = [f"{engine}-disagg-{role}" for role in ("prefill", "decode")]
    assert [c["metadata"]["name"] for c in configs] == (names if engine == "trtllm" else [])
    for part, role, count, nodes, config in zip(workers, ("prefill", "decode"), (2, 3), (1, 2), names, strict=True):
        assert (part["name"], part["type"], part["replicas"]) == (role, role, count)
        assert part.get("multinode", {"nodeCount": 1}) == {"nodeCount": nodes}
        spec = part["podTemplate"]["spec"]
        (container,) = spec["containers"]
        words = container["args"]
        values = dict(zip(words, [*words[1:], ""], strict=True))
        assert values["-m"] == f"dynamo.{engine}"
        assert values["--disaggregation-mode"] == role
        if engine == "vllm":
            kv = {"kv_connector": "NixlConnector", "kv_role": f"kv_{'producer' if role == 'prefill' else 'consumer'}"}
            assert json.loads(values["--kv-transfer-config"]) == kv
        volumes = [volume["configMap"]["name"] for volume in spec.get("volumes", [])]
        assert volumes == ([config] if engine == "trtllm" else [])


def test_llm_d_has_what_its_chart_does_not_set() -> None:
    (values,) = _documents(_plan("vllm", _workers("prefill", 2, 4), _workers("decode", 3, 2)), "llm-d")
    assert (values["routing"]["proxy"]["enabled"], values["multinode"]) == (True, False)
    for role, count, tp, port in (("prefill", 2, 4, 8000), ("decode", 3, 2, 8200)):
        pods = values[role]
        (container,) = pods["containers"]
        degrees = {"tensor": tp, "data": 1, "dataLocal": 1, "workers": 1}
        assert (pods["create"], pods["replicas"], pods["parallelism"]) == (True, count, degrees)
        assert (container["name"], container["modelCommand"]) == ("vllm", "vllmServe")
        assert container["mountModelVolume"] is True
        assert container["resources"]["limits"] == {"nvidia.com/gpu": str(tp)}
        assert container["ports"] == [{"containerPort": port}]  # behind the sidecar: its targetPort
        assert not {"--port", "--tensor-parallel-size", "--data-parallel-size"} & set(container["args"])
        assert "--kv-transfer-config" in container["args"]
    (values,) = _documents(_plan("vllm", _workers("both", 1, 8)), "llm-d")
    assert (values["prefill"], values["routing"]["proxy"]["enabled"]) == ({"create": False}, False)
    assert values["decode"]["containers"][0]["ports"] == [{"containerPort": 8000}]


@pytest.mark.parametrize(
    ("engine", "pp", "starter", "why"),
    [
        ("trtllm", 1, "kubernetes", "is not for TensorRT-LLM, which reads files; dynamo has them"),
        ("sglang", 1, "kserve", "starts vLLM, and this plan is of sglang; plan it for vllm"),
        ("sglang", 1, "llm-d", "starts vLLM, and this plan is of sglang; plan it for vllm"),
        ("vllm", 2, "kserve", "joins nodes by data parallelism alone, and a worker is tp=8, pp=2, dp=1 over 2 nodes"),
        ("vllm", 2, "llm-d", "gives all pods of a worker one command, and a worker takes 2 nodes; kubernetes or"),
        ("vllm", 1, "helm", "is not known; known: dynamo, engine, kserve, kubernetes, llm-d"),
    ],
)
def test_what_a_starter_does_not_start_is_refused(
    tmp_path: Path, engine: str, pp: int, starter: str, why: str
) -> None:
    plan_file.write(_plan(engine, _workers("both", 1, 8, pp)), tmp_path / "serving.json")
    assert f"error: --for = '{starter}': {why}" in error_of(
        tmp_path, "serve", "launch", "serving.json", "--for", starter
    )


@pytest.mark.parametrize("starter", _STARTERS)
def test_a_name_of_two_lines_adds_no_key(starter: str) -> None:
    plan = _plan("vllm", _workers("both", 1, 8))
    hostile = _documents(replace(plan, model_name="x\nsecond: injected\u2028third: injected"), starter)
    assert [each.keys() for each in hostile] == [each.keys() for each in _documents(plan, starter)]
