"""Launch lines of serving engines: accepted by the arguments that each engine publishes, on drawn plans."""

from __future__ import annotations

import itertools
import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.sizes import examples

from phalanx.planning.lookup import model_named
from phalanx.serving import plan_file as serving
from phalanx.serving.answer import launch, manifest
from phalanx.serving.launch.arguments import option_error, published
from phalanx.serving.launch.checkpoints import weights_of
from phalanx.serving.launch.parts import context, overlaps, places
from phalanx.serving.launch.sglang import environment
from phalanx.serving.lines.reading import read
from phalanx.serving.plan_file import LatencyLimits, ServedLoad, ServingPlan, Workers
from phalanx.spec.errors import InputError

_DENSE, _EXPERTS = (model_named(name)[0] for name in ("llama3-70b", "deepseek-v3"))


def _drawn(draw: np.random.Generator) -> ServingPlan:
    def workers(role: str) -> Workers:
        tp, pp = int(draw.choice((1, 2, 4, 8))), int(draw.choice((1, 1, 2)))
        dp = int(draw.choice((1, 8 // tp))) if experts and engine != "trtllm" else 1
        ep = tp * dp if experts and draw.random() < 0.5 else 1
        slots = int(draw.integers(1, 300))
        return Workers(role, int(draw.integers(1, 3)), tp, pp, dp, tp * dp // ep, ep, slots, 8192, 100_000)  # type: ignore[arg-type]

    experts = bool(draw.random() < 0.5)
    engine = str(draw.choice(("vllm", "sglang", "trtllm")))
    groups = (workers("both"),) if draw.random() < 0.5 else (workers("prefill"), workers("decode"))
    return ServingPlan(
        model_name="deepseek-v3" if experts else "llama3-70b",
        model=_EXPERTS if experts else _DENSE,
        cluster="dgx-h100",
        node_gpus=8,
        gpus=sum(w.count * w.gpus for w in groups),
        engine=engine,  # type: ignore[arg-type]
        weights=str(draw.choice(("bf16", "fp8", "int4", "nvfp4"))),  # type: ignore[arg-type]
        cache=str(draw.choice(("bf16", "fp8"))),  # type: ignore[arg-type]
        page_tokens=16,
        longest=4500,
        draft_tokens=int(draw.choice((0, 3))),
        adapters=int(draw.choice((0, 4))),
        workers=groups,
        load=ServedLoad(4000, 500, 64, 0.0, "", float(draw.choice((0.0, 0.5)))),
        limits=LatencyLimits(1.0, None, 90),
        prediction={"tokens_per_s": 1.0},
    )


@examples(60, 2000)
def test_every_line_is_of_published_arguments(examples: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    for _ in range(examples):
        plan = _drawn(draw)
        made = launch(plan)  # raises for an option that the engine does not have
        note = weights_of(plan)[1]
        assert set(made.notes) >= {note} - {""}
        assert all(made.notes)
        for command in made.commands:
            assert all(len(word) > 1 for word in command.program), command  # words, not letters
            if command.checked_by:
                assert option_error(command.checked_by, [*command.options, "--no-such-option"])
                named = {i for i, word in enumerate(command.options) if word.startswith("--")}
                value = next(i + 1 for i in sorted(named) if i + 1 not in named)
                assert option_error(command.checked_by, [w for i, w in enumerate(command.options) if i != value])
        at = [(p.node, gpu) for p in places(plan) for gpu in p.gpus]
        assert len(at) == len(set(at))  # no GPU twice
        for before, after in itertools.pairwise(places(plan)):  # on the same node where there is room
            left = plan.node_gpus - before.gpus[-1] - 1 if before.gpus else 0
            assert after.node - before.node == (0 if after.workers.gpus <= left else before.nodes)
        text = manifest(plan)
        assert text.count("nvidia.com/gpu") == len(plan.workers)
        serving.write(plan, tmp_path / "serving.json")
        assert serving.read(tmp_path / "serving.json") == plan


@examples(40, 400)
def test_a_line_that_is_written_is_read_back(examples: int, tmp_path: Path) -> None:
    """Layout, limits, types and drafts of every engine's line are those of the plan that it serves."""
    draw, script = np.random.default_rng(5), tmp_path / "serve.sh"
    for plan in itertools.islice((p for p in iter(lambda: _drawn(draw), None) if len(p.workers) == 1), examples):
        command, (w,) = launch(plan).commands[0], plan.workers
        script.write_text(shlex.join([*command.program, *command.options]))
        back = read([script], {"cluster": plan.cluster, "input": 4000, "output": 500})
        got = back.fields
        layout = {"tp": w.tp, "pp": w.pp, "dp": w.attention_dp, "ep": w.moe_ep}
        assert dict(pair.split("=") for pair in got["layout"].split(",")) == {
            name: str(n) for name, n in layout.items() if n > 1 or name == "tp"
        }
        assert (got["engine"], got["gpus"], got["chunk"]) == (plan.engine, w.gpus, w.step_tokens)
        assert abs(got["slots"] * w.attention_dp - w.slots) < w.attention_dp  # each group takes its own
        assert back.longest == context(plan, w) or not context(plan, w)
        said = "\n".join(back.caveats)
        if plan.engine == "trtllm":  # the others stand in its file
            settings = yaml.safe_load(launch(plan).files["both.yaml"])
            assert settings["kv_cache_config"]["dtype"] == ("fp8" if plan.cache == "fp8" else "auto")
            drafts = settings.get("speculative_config", {})
            lengths = [drafts[key] for key in ("max_draft_len", "num_nextn_predict_layers") if key in drafts]
            assert lengths == [plan.draft_tokens] * (plan.draft_tokens > 0)
            assert settings.get("lora_config", {}).get("max_loras", 0) == plan.adapters
        else:
            assert got["cache"] == plan.cache
            assert ("drafts tokens" in said) == (plan.draft_tokens > 0)
            assert ("serves adapters" in said) == (plan.adapters > 0)
        if plan.engine == "sglang" and plan.draft_tokens:
            words = dict(itertools.pairwise(command.options))
            own = plan.model_name == "deepseek-v3"  # its modules predict a token each, and the last is verified
            assert words["--speculative-algorithm"] == ("EAGLE" if own else "NGRAM")
            assert int(words["--speculative-num-draft-tokens"]) == plan.draft_tokens + own


def test_degrees_stand_in_the_lines_as_each_engine_counts_them() -> None:
    groups = (Workers("both", 1, 1, 1, 8, 1, 8, 256, 8192, 10**6),)
    draw = np.random.default_rng(0)
    plan = _drawn(draw)
    plan = replace(plan, model=_EXPERTS, model_name="deepseek-v3", workers=groups, gpus=8, weights="fp8", adapters=0)

    def words(engine: str) -> dict[str, str]:
        options = launch(replace(plan, engine=engine)).commands[0].options  # type: ignore[arg-type]
        return {w: options[i + 1] if i + 1 < len(options) else "" for i, w in enumerate(options) if w[:2] == "--"}

    vllm, sglang, trtllm = map(words, ("vllm", "sglang", "trtllm"))
    assert (vllm["--tensor-parallel-size"], vllm["--data-parallel-size"]) == ("1", "8")
    assert "--enable-expert-parallel" in vllm
    assert vllm["--max-num-seqs"] == "32"  # of one of eight engine cores
    assert (sglang["--tp-size"], sglang["--dp-size"], sglang["--ep-size"]) == ("8", "8", "8")
    assert (trtllm["--tp_size"], trtllm["--ep_size"]) == ("8", "8")
    assert "enable_attention_dp: true" in launch(replace(plan, engine="trtllm")).files["both.yaml"]
    assert "--quantization" not in vllm  # DeepSeek-V3 is published in fp8
    plan = replace(plan, draft_tokens=3)
    assert json.loads(words("vllm")["--speculative-config"]) == {"method": "mtp", "num_speculative_tokens": 3}
    plan = replace(plan, model_name="llama3-70b")  # it has no modules that draft
    assert json.loads(words("vllm")["--speculative-config"])["method"] == "ngram"


@pytest.mark.parametrize(("tp", "attention_dp"), [(1, 8), (2, 4), (8, 1), (2, 8), (4, 4), (1, 16), (16, 1)])
def test_halves_of_a_step_overlap_over_a_network_alone(tp: int, attention_dp: int) -> None:
    plan = _drawn(np.random.default_rng(0))
    ranks = tp * attention_dp
    w = Workers("prefill", 1, tp, 1, attention_dp, 1, ranks, 64, 8192, 10**6, large_ep=True)
    assert overlaps(plan, w) == (ranks > plan.node_gpus)


@pytest.mark.parametrize("role", ["both", "prefill", "decode"])
@pytest.mark.parametrize("large_ep", [True, False])
def test_kernels_that_decode_over_many_experts_have_room_for_every_slot(role: str, large_ep: bool) -> None:
    plan = replace(_drawn(np.random.default_rng(0)), draft_tokens=1)
    w = Workers(role, 1, 1, 1, 8, 1, 8, 60, 8192, 10**6, large_ep=large_ep)  # type: ignore[arg-type]
    tokens = [int(name.rpartition("=")[2]) for name in environment(plan, w)]
    assert tokens == [2 * 8] * (large_ep and role != "prefill")


def test_lines_leave_to_the_engine_what_the_plan_does_not_bound() -> None:
    from dataclasses import replace

    limits = ("--max-num-seqs", "--max-running-requests", "--max_batch_size")
    contexts = ("--max-model-len", "--context-length", "--max_seq_len")
    plan = replace(_drawn(np.random.default_rng(0)), model=_DENSE, model_name="llama3-70b", adapters=0)
    for room, bounds_context in ((_DENSE.max_seq, False), (_DENSE.max_seq - 1, True)):
        prefill = Workers("prefill", 1, 4, 1, 1, 4, 1, 2, 4096, room)
        groups = prefill, replace(prefill, role="decode", slots=99)
        for engine in ("vllm", "sglang", "trtllm"):
            made = launch(replace(plan, engine=engine, workers=groups, gpus=8))  # type: ignore[arg-type]
            first, then = (command.options for command in made.commands[:2])
            assert not set(limits) & set(first)
            assert "99" in then
            for options in (first, then):
                assert bool(set(contexts) & set(options)) == bounds_context
                assert not any("disable" in word and "cach" in word for word in options)
            assert "prefix caching is the engine's default" in made.notes[0]


@pytest.mark.parametrize("longest", [1, 63, 64, 65, 4500, 8129, 8192, 9999])
def test_the_longest_request_is_allowed_to_the_next_64_tokens(longest: int) -> None:
    workers = Workers("both", 1, 8, 1, 1, 8, 1, 32, 1024, 5000)
    allowed = context(replace(_drawn(np.random.default_rng(0)), model=_DENSE, longest=longest), workers)
    assert allowed is not None
    assert allowed == _DENSE.max_seq or (allowed % 64 == 0 and 0 <= allowed - longest < 64)
    assert min(longest, _DENSE.max_seq) <= allowed <= _DENSE.max_seq


def test_a_router_of_prefill_and_decode_names_all_their_servers() -> None:
    """TensorRT-LLM's file lists both kinds; where one kind serves all there is no such file."""
    draw = np.random.default_rng(7)
    plans = [p for p in (_drawn(draw) for _ in range(60)) if p.engine == "trtllm"]
    assert {len(p.workers) for p in plans} == {1, 2}
    for p in plans:
        try:
            found = launch(p)
        except InputError:  # of what the engine cannot do
            continue
        text = found.files.get("disaggregated.yaml", "")
        assert bool(text) == (len(p.workers) == 2)
        if text:
            urls = [f"node{place.node}:{place.port}" for place in places(p)]
            settings = yaml.safe_load(text)
            servers = [settings["context_servers"], settings["generation_servers"]]
            assert sorted(url for role in servers for url in role["urls"]) == sorted(urls)
            assert [role["num_instances"] for role in servers] == [len(role["urls"]) for role in servers]


def test_what_an_engine_cannot_do_is_one_line() -> None:
    from dataclasses import replace

    plan = _drawn(np.random.default_rng(1))
    groups = (Workers("both", 1, 2, 1, 4, 8, 1, 64, 8192, 10**6),)
    plan = replace(plan, model=_EXPERTS, model_name="deepseek-v3", workers=groups, gpus=8, engine="trtllm")
    with pytest.raises(InputError, match="attends apart on every rank"):
        launch(plan)
    split = (replace(groups[0], moe_tp=4, moe_ep=2),)
    with pytest.raises(InputError, match="splits experts over all ranks or not at all"):
        launch(replace(plan, workers=split, engine="vllm"))


def test_a_serving_plan_is_read_strictly(tmp_path: Path) -> None:
    file = tmp_path / "serving.json"
    serving.write(_drawn(np.random.default_rng(2)), file)
    good = json.loads(file.read_text())
    for change, message in (
        ({"version": 2}, "has version 2; this Phalanx reads version 1"),
        ({"kind": "plan"}, "is not a serving.json"),
        ({"enginee": 1}, "serving.enginee: no such field"),
        ({"gpus": 3}, "gpus = 3: the workers have"),
        ({"engine": "orca"}, "serving.engine"),
        ({"load": good["load"] | {"reuse": 2.0}}, "load.reuse"),
    ):
        file.write_text(json.dumps(good | change))
        with pytest.raises(InputError, match=message):
            serving.read(file)


def test_the_published_lists_hold_what_they_say() -> None:
    for name in ("vllm", "sglang", "trtllm", "dynamo.vllm", "dynamo.sglang", "dynamo.trtllm"):
        row = published(name)
        assert row.version
        assert not row.flags & row.values
        assert len(row.flags | row.values) > 35
        assert set(row.choices) <= row.values


def test_nodes_behind_a_workers_first_take_no_requests(tmp_path: Path) -> None:
    """vllm serve --headless: without it a second node starts a server of its own, and the first waits for it."""
    plan = _drawn(np.random.default_rng(3))
    workers = (Workers("both", 1, 8, 2, 1, 8, 1, 32, 1024, 100_000),)
    plan = replace(plan, engine="vllm", model=_DENSE, model_name="llama3-70b", workers=workers, gpus=16)
    first, second = launch(plan).commands
    assert (first.node, second.node) == (0, 1)
    assert first.options[-6:] == ("--nnodes", "2", "--node-rank", "0", "--master-addr", "$HEAD")
    assert second.options[-5:] == ("--node-rank", "1", "--master-addr", "$HEAD", "--headless")
    (tmp_path / "run.sh").write_text(f"{first.line()}\n{second.line()}\n")
    assert read([tmp_path / "run.sh"], {"cluster": "dgx-h100", "input": 100, "output": 10}).fields["gpus"] == 16
