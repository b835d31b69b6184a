"""phalanx plan --from: what to change in a configuration, each change priced; and what else takes one."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.in_process_cli import error_of, json_of, phalanx, text_of

from phalanx.answers.configurations.improve import Improvement, _with_fields, improve
from phalanx.answers.question.query import Configured, Query
from phalanx.answers.question.read import read as configuration
from phalanx.answers.question.resolution import read, resolve
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.report.read import improvement
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.strategy.stack_options import StackOptions

LLAMA = """torchrun --nnodes 8 --nproc_per_node 8 pretrain_gpt.py --num-layers 80 --hidden-size 8192
 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --ffn-hidden-size 28672 --swiglu
 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
 --padded-vocab-size 128256 --max-position-embeddings 8192 --seq-length 8192 --global-batch-size 512 --bf16
 --use-distributed-optimizer --micro-batch-size 1 --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap"""
SLOW = f"""{LLAMA} --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
 --num-layers-per-virtual-pipeline-stage 5 --recompute-granularity full --recompute-method uniform
 --recompute-num-layers 1"""

EXPERTS = """torchrun --nnodes 4 --nproc_per_node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096
 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu
 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
 --vocab-size 32000 --max-position-embeddings 32768 --seq-length 4096 --global-batch-size 256 --micro-batch-size 1
 --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --bf16 --use-distributed-optimizer
 --overlap-grad-reduce --overlap-param-gather --tensor-model-parallel-size 2 --sequence-parallel
 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --expert-model-parallel-size 4"""


_FLOWING = f"""{LLAMA} --tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4
 --num-layers-per-virtual-pipeline-stage 5""".replace("--global-batch-size 512", "--global-batch-size 4")


def script(folder: Path, words: str) -> Path:
    path = folder / "run.sh"
    path.write_text(words.replace("\n", " \\\n"))
    return path


@cache
def improved(words: str) -> Improvement:
    with tempfile.TemporaryDirectory() as folder:
        path = script(Path(folder), words)
        return improve(configuration([path]), read(Query(path, cluster="dgx-h100")), 0.05, "dgx-h100")


def applied(words: str, changes: list[tuple[str, str, str]]) -> str:
    """Edit a command line as a user would, setting by setting."""
    tokens = shlex.split(words)
    for key, old, new in changes:
        if key in tokens:
            at = tokens.index(key)
            end = at + 1
            while end < len(tokens) and not tokens[end].startswith("--"):
                end += 1
            assert (" ".join(tokens[at + 1 : end]) or "on") == old, key
            tokens[at:end] = [] if not new else [key] if new == "on" else [key, *new.split()]
        else:
            assert not old, key
            tokens += [key] if new == "on" else [key, *shlex.split(new)]
    return " ".join(map(shlex.quote, tokens))


@pytest.mark.parametrize("words", [SLOW, EXPERTS])
def test_the_file_with_its_settings_changed_is_the_better_plan(words: str, tmp_path: Path) -> None:
    """A user edits the printed settings into the script: reading it gives the better strategy and its price. Among
    them is what the file leaves to follow another setting (tensor parallelism of experts follows tp)."""
    x = improved(words)
    assert x.better.step_time_s < 0.9 * x.now.step_time_s
    assert x.better.fits
    edits = [(e.key, e.old, e.new) for c in x.changes for e in c.settings]
    asked = Query(script(tmp_path, applied(words, edits)), cluster="dgx-h100")
    again = read(asked)
    assert again.strategy is not None
    assert replace(again.strategy, layers="auto") == x.better.strategy
    settled = {} if again.strategy.tp > 1 else {"tp_overlap": "none"}  # of nothing, where tp is 1
    assert replace(again.pricing.extra, **settled) == replace(x.better.options, **settled)
    assert again.subject.priced.seconds == pytest.approx(x.better.step_time_s, rel=0.002)


def test_each_change_is_priced_alone_and_together(tmp_path: Path) -> None:
    x = improved(SLOW)
    assert x.changes[-1].together == x.better
    times = [x.now.step_time_s, *(c.together.step_time_s for c in x.changes)]
    assert times == sorted(times, reverse=True), "each change brings something"
    first = x.changes[0]
    assert first.alone is not None
    assert first.alone.step_time_s == first.together.step_time_s
    assert first.fields == {"recompute": ("full", "none")}
    for c in x.changes:
        about = ("llama3-70b", "dgx-h100", 64, 512, 8192, str(c.together.strategy))
        q = resolve(Query(None, *about), Configured(c.together.options))
        assert q.subject.priced.seconds == pytest.approx(c.together.step_time_s, rel=1e-9)
    assert DOCUMENTED["megatron-core"].refusal(x.better.strategy, x.better.options) is None


def test_the_best_has_nothing_to_change(tmp_path: Path) -> None:
    x = improved(SLOW)
    edits = [(e.key, e.old, e.new) for c in x.changes for e in c.settings]
    best = improved(applied(SLOW, edits))
    assert best.changes == ()
    assert best.plan is None


def test_plan_from_writes_the_plan_and_prints_the_settings(tmp_path: Path) -> None:
    script(tmp_path, SLOW)
    found = json_of(tmp_path, "plan --from run.sh --cluster dgx-h100 --json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["prediction"]["stack"] == "megatron-core"
    assert plan["prediction"]["step_time_s"] == pytest.approx(found["better"]["step_time_s"])
    assert [e["new"] for c in found["changes"] for e in c["settings"] if "granularity" in e["key"]] == [""]
    assert json_of(tmp_path, "compare run.sh plan.json --json")["settings_that_differ"][
        "--recompute-granularity"
    ] == ["full", ""]


def test_the_settings_are_a_table() -> None:
    (sheet,) = improvement(improved(SLOW)).sheets
    assert "--recompute-granularity" in sheet.as_csv()
    assert "leave out" in sheet.as_csv()


def test_conditions_hold_and_other_spellings_are_kept(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(NANOTRON)
    limits = ("--where", "tp<=4")
    words = ("plan", "--from", "config.yaml", "--cluster", "dgx-h100", "--json")
    found = json_of(tmp_path, *words, *limits)
    keys = [e["key"] for c in found["changes"] for e in c["settings"]]
    assert "parallelism.tp" in keys
    assert "tp=8" not in found["better"]["strategy"]


NANOTRON = """
parallelism: {dp: 4, pp: 2, pp_engine: afab, tp: 8, tp_mode: ALL_REDUCE, recompute_layer: true}
tokens: {sequence_length: 4096, micro_batch_size: 1, batch_accumulation_per_replica: 32, train_steps: 10}
optimizer: {zero_stage: 0, accumulate_grad_in_fp32: true}
model:
  dtype: bfloat16
  model_config: {is_llama_config: true, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32,
    num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 8192}
"""


def test_a_configuration_becomes_a_plan(tmp_path: Path) -> None:
    script(tmp_path, SLOW)
    text_of(tmp_path, "read run.sh --cluster dgx-h100 --out mine.json")
    _, out, _ = phalanx(tmp_path, "predict mine.json --json")
    _, same, _ = phalanx(tmp_path, "predict run.sh --cluster dgx-h100 --json")
    assert json.loads(out)["step_time_s"] == json.loads(same)["step_time_s"]
    _ = error_of(tmp_path, "read run.sh --out mine.json")


def test_options_of_a_file_are_priced(tmp_path: Path) -> None:
    """Moments in bf16, an optimizer on the host and fp8 products change memory and time of the same strategy."""
    script(tmp_path, SLOW)

    def predicted(*more: str) -> tuple[float, float]:
        script(tmp_path, " ".join((SLOW, *more)))
        found = json_of(tmp_path, "predict run.sh --cluster dgx-h100 --json")
        return found["step_time_s"], found["memory_bytes"]

    plain = predicted()
    moments = predicted("--use-precision-aware-optimizer", "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16")
    assert moments[1] < plain[1]
    offloaded = predicted("--optimizer-cpu-offload", "--use-precision-aware-optimizer")
    assert offloaded[0] > plain[0]
    assert offloaded[1] < plain[1]
    assert predicted("--fp8-format hybrid")[0] < plain[0]
    script(tmp_path, f"{SLOW} --fp8-format hybrid --fp8-recipe blockwise")
    _, out, _ = phalanx(tmp_path, "read run.sh --json")
    assert json.loads(out)["options"] == {"products": "float8-block"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan", "--from", "run.sh"), "--cluster: is missing"),
        (("plan", "--from", "none.sh", "--cluster", "dgx-h100"), "no such file"),
        (("plan", "--from", "none.sh"), "no such file"),
        (("plan", "--from", "run.sh", "--cluster", "dgx-h100", "--stack", "maxtext"), "is a configuration of"),
        (("plan", "--from", "run.sh", "--cluster", "dgx-h100", "--deadline", "1"), "--deadline: no such option"),
        (("plan", "--from", "notes.txt", "--cluster", "dgx-h100"), "is not a configuration"),
        (("read", "run.sh", "--batch", "8"), "is for the plan that --out writes"),
    ],
)
def test_wrong_questions_get_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    script(tmp_path, SLOW)
    (tmp_path / "notes.txt").write_text("mine")
    code, out, err = phalanx(tmp_path, *words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err


def test_what_the_stack_refuses_is_said(tmp_path: Path) -> None:
    """Interleaving with fewer micro-batches than stages is priced, and refused by the row."""
    few = SLOW.replace("--global-batch-size 512", "--global-batch-size 4")
    x = improved(few)
    assert "micro-batch for each pipeline rank" in x.refused


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="multiple of 32"):
        read(Query(script(tmp_path, SLOW), cluster="dgx-h100", gpus=48))


def test_lint_and_read_say_of_a_file_alone_what_predict_refuses(tmp_path: Path) -> None:
    """Two micro-batches on four interleaved ranks: Megatron-LM stops, with or without a cluster to price it on."""
    path = script(tmp_path, _FLOWING)
    why = "interleaving needs a micro-batch for each pipeline rank"
    assert why in text_of(tmp_path, "predict", path.name, "--cluster", "dgx-h100")
    for words in (["lint", path.name], ["lint", path.name, "--cluster", "dgx-h100"], ["read", path.name]):
        said = [line for line in phalanx(tmp_path, *words)[1].splitlines() if why in line]
        assert len(said) == 1, words
        assert said[0].startswith("refused: pipeline-model-parallel-size = 4: megatron-core does not run it: ")
    assert "refused" not in phalanx(tmp_path, "lint", script(tmp_path, SLOW).name)[1]


def test_what_is_not_shared_out_is_not_kept_sharded() -> None:
    """Where the best layout has one replica, no level of ZeRO is named that the settings then take back."""
    words = LLAMA.replace("--nnodes 8", "--nnodes 3").replace("--global-batch-size 512", "--global-batch-size 48")
    words += " --tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2"
    better = improved(words).better
    assert better is not None
    assert (better.strategy.dp, better.strategy.cp, better.strategy.zero) == (1, 1, 0)


def test_a_schedule_of_batches_is_named_where_one_number_is_needed(tmp_path: Path) -> None:
    words = LLAMA.replace("--global-batch-size 512", '--step-batch-size-schedule "0:256 100B:512"')
    path = script(tmp_path, f"{words} --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4")
    said = error_of(tmp_path, "predict", path.name, "--cluster", "dgx-h100")
    assert "--batch: is missing: run.sh says step-batch-size-schedule = 0:256 100B:512, which is no number" in said


def test_explain_says_which_of_its_two_rows_repeated_communication_is_in(tmp_path: Path) -> None:
    """Exposed on an axis, and the term of the same name, differ by what recomputation sends again."""
    flat = " ".join(text_of(tmp_path, "explain", script(tmp_path, SLOW).name, "--cluster", "dgx-h100").split())
    assert re.search(r"; [0-9.]+ s of what tp exposes is sent again for recomputation, and stands in its row", flat)
    words = SLOW.partition(" --recompute-granularity")[0]
    assert "sent again" not in text_of(tmp_path, "explain", script(tmp_path, words).name, "--cluster", "dgx-h100")


def test_zero_of_a_file_holds_as_soon_as_there_are_replicas(tmp_path: Path) -> None:
    """With tp=8 and pp=4 on 32 GPUs the optimizer's state has one rank to lie on; a change that leaves two shards it,
    without a line of its own."""
    file = str(script(tmp_path, SLOW.replace("--nnodes 8", "--nnodes 4")))
    asked = ("plan", "--from", file, "--cluster", "dgx-h100", "--json")
    tried = json_of(tmp_path, *asked, "--try", "tp=4")
    assert "zero" not in tried["now"]["strategy"]
    assert "dp=2,zero=1" in tried["changes"][0]["strategy"]
    changes = json_of(tmp_path, *asked)["changes"]
    alone = [change["alone"]["strategy"] for change in changes if change["alone"]]
    sharded = [line for line in alone if "dp=" in line]
    assert sharded
    assert all("zero=1" in line for line in sharded)
    edits = [edit for change in changes for edit in change["settings"]]
    assert all(edit["old"] != edit["new"] for edit in edits)
    assert not any("distributed-optimizer" in edit["key"] for edit in edits)


@pytest.mark.parametrize(("seq", "fits"), [(512, True), (131_072, False)])
def test_what_fits_only_with_its_state_on_the_host_is_answered_by_that(seq: int, fits: bool, tmp_path: Path) -> None:
    """Not by degrees that a program's code alone sets, nor are these in the reason where nothing fits."""
    (tmp_path / "a.yml").write_text(
        "base_model: meta-llama/Llama-3.1-70B\nadapter: qlora\nload_in_4bit: true\nlora_r: 32\n"
        f"lora_target_linear: true\nsequence_len: {seq}\nmicro_batch_size: 1\ngradient_accumulation_steps: 4\n"
        "bf16: true\noptimizer: adamw_torch\ngradient_checkpointing: true\nfsdp: [full_shard, auto_wrap]\n"
        "fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"
    )
    asked = ("plan", "--from", "a.yml", "--cluster", "rtx4090", "--gpus", "2")
    said = text_of(tmp_path, *asked) if fits else error_of(tmp_path, *asked)
    assert ("fsdp_offload_params" if fits else "nothing fits") in said
    assert "tp=" not in said


def test_what_brings_little_as_things_are_waits_for_the_change_that_makes_it_matter() -> None:
    """No row is without a setting (an order of ranks without a pipeline) or without a gain or loss."""
    words = EXPERTS.replace("--nnodes 4", "--nnodes 2").replace("--seq-length 4096", "--seq-length 2048")
    words = words.replace("--global-batch-size 256", "--global-batch-size 128").replace("alltoall", "allgather")
    words = words.replace("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4", "")
    for overlaps in (" --overlap-grad-reduce --overlap-param-gather", " --tensor-model-parallel-size 2"):
        words = words.replace(overlaps, "")
    x = improved(f"{words} --tensor-model-parallel-size 4")
    assert len(x.changes) > 3
    before = x.now
    for change in x.changes:
        assert change.settings, change.fields
        assert abs(change.together.step_time_s / before.step_time_s - 1) > 0.001, change.fields
        before = change.together


def test_settings_that_one_change_moves_and_another_ends_are_those_of_the_export(tmp_path: Path) -> None:
    """FSDP recomputes by a key of its own, which a later change without recomputation turns off."""
    (tmp_path / "a.sh").write_text(
        "torchrun --nproc_per_node 4 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True"
        " --per_device_train_batch_size 16 --gradient_accumulation_steps 1 --model_max_length 2048"
        " --gradient_checkpointing True --output_dir out"
    )
    ask = "plan --from a.sh --model llama2-7b --cluster dgx-a100 --out p.json --json"
    changes = json_of(tmp_path, ask)["changes"]
    text_of(tmp_path, "export p.json --to accelerate --out out")
    written = yaml.safe_load((tmp_path / "out/accelerate.yaml").read_text())["fsdp_config"]
    edits = [e for change in changes for e in change["settings"] if e["key"].startswith("fsdp_config.")]
    left = {e["key"].removeprefix("fsdp_config."): str(e["new"]) for e in edits}
    on = {"True": "on"}
    assert left == {key: on.get(str(value), str(value)) for key, value in written.items()}
    assert len(changes) > 1


@pytest.mark.parametrize(
    ("names", "layers"),
    [((), "10/22"), (("pp",), "auto"), (("pp", "layers"), "8/8/8/8"), (("micro_batch",), "10/22")],
)
def test_stages_are_dealt_anew_where_their_number_alone_is_of_the_better_plan(
    names: tuple[str, ...], layers: str
) -> None:
    """And the ranks that are left are of dp."""
    prices: Any = SimpleNamespace(q=SimpleNamespace(followed={}, void_zero=None), price=lambda s, options, legal: s)
    state, better = (
        SimpleNamespace(strategy=make_strategy(line), options=StackOptions())
        for line in ("dp=8,tp=2,pp=2,layers=10/22", "dp=8,pp=4,layers=8/8/8/8,micro_batch=2")
    )
    made: Any = _with_fields(prices, state, better, names)  # type: ignore[arg-type]
    assert (made.layers, made.world, made.tp) == (layers, 32, 2)
    assert made.pp == (4 if "pp" in names else 2)
