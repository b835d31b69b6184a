"""Exports: what is written follows from the plan, and what a target cannot express is refused by name."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.exports import draw

from phalanx.answers.configurations.export import TARGETS, Export, export, export_plan, write
from phalanx.frameworks.launchers.export import LAUNCHERS
from phalanx.frameworks.megatron import layout
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.frameworks.writing.subject import PRODUCTS, subject
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Train
from phalanx.spec.strategy.spec import Strategy


def _plan(stack: str, **strategy: object) -> Plan:
    """Return a plan of Llama 3 8B under a stack with a strategy of these fields."""
    rng = random.Random(1)
    drawn = draw.plan(DOCUMENTED[stack], rng, ("llama3-8b",), options=False)
    s = Strategy(**strategy)  # type: ignore[arg-type]
    return replace(drawn, strategy=s, job=replace(drawn.job, global_batch=4 * s.dp * s.micro_batch, seq=4096))


def _settings(e: Export) -> dict[str, object]:
    return {s.key: s.value for g in e.program.groups for s in g.settings}


def test_degrees_of_a_plan_stand_in_megatrons_arguments() -> None:
    flags = _settings(export(_plan("megatron-core", dp=2, zero=1, tp=4, sp=True, pp=2), "megatron"))
    assert flags["--tensor-model-parallel-size"] == 4
    assert flags["--pipeline-model-parallel-size"] == 2
    assert flags["--sequence-parallel"] is True
    assert flags["--use-distributed-optimizer"] is True
    assert "--pipeline-model-parallel-layout" not in flags, "32 blocks divide evenly"


def test_what_megatron_has_not_is_refused_with_field_value_and_mend() -> None:
    with pytest.raises(InputError, match=r"strategy\.zero = 3.*use 0 or 1"):
        export(_plan("megatron-core", dp=8, zero=3), "megatron")


def test_a_plan_of_another_stack_that_a_framework_has_not_is_to_be_planned_for_it() -> None:
    with pytest.raises(InputError) as refused:
        export(_plan("torchtitan", dp=8, zero=3), "nanotron")
    assert refused.value.remedy == "use 0 or 1; or plan it for that stack: phalanx plan --stack nanotron"


def test_a_plan_of_another_stack_becomes_what_the_framework_has() -> None:
    """The first of its stacks that runs the strategy, and whole blocks recomputed where a part of them cannot be."""
    assert export(_plan("torchtitan", dp=8, zero=3), "megatron").program.title.startswith("Megatron-FSDP")
    part = _plan("torchtitan", dp=8, zero=3, recompute="selective")
    said = export(part, "deepspeed")
    assert "recompute=selective of the plan is not in DeepSpeed" in said.program.notes[-1]
    assert '"gradient_checkpointing": true' in said.files["training_arguments.json"]
    with pytest.raises(
        InputError, match=r"strategy\.recompute = 'selective:mlp'"
    ):  # its own stack's is never changed
        export(_plan("deepspeed", dp=8, zero=3, recompute="selective:mlp"), "deepspeed")


@pytest.mark.parametrize("blocks", [(7, 8, 8, 9), (1, 1), (0, 4, 4, 0), (5, 5, 5, 5, 5, 4)])
def test_a_pipeline_layout_is_read_as_it_was_written(blocks: tuple[int, ...]) -> None:
    assert layout.read(layout.to_text(blocks, 1)) == (blocks, 1)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_have_no_syntax_error_and_stop_at_a_blank(launcher: str, tmp_path: Path) -> None:
    e = export(_plan("megatron-core", dp=16), "megatron", launcher)
    scripts = [p for p in write(e, tmp_path / "out") if p.suffix in (".sh", ".sbatch")]
    for path in scripts:
        subprocess.run(["bash", "-n", path], check=True)
    run = subprocess.run(["bash", tmp_path / "out/train.sh"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "is a blank: fill it in" in run.stderr


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"already holds notes\.txt"):
        write(export(_plan("megatron-core", dp=8), "megatron"), tmp_path)


@pytest.mark.parametrize(("to", "stack"), [(to, stack) for to, t in TARGETS.items() for stack in t.stacks])
def test_a_strategy_in_canonical_form_stays_so(to: str, stack: str) -> None:
    rng = random.Random(f"{to} {stack}")
    for _ in range(20):
        drawn = draw.plan(DOCUMENTED[stack], rng)
        if any(getattr(drawn.strategy, name) > 1 for name in DOCUMENTED[stack].fields_in_code):
            continue  # in a program's code
        x = subject(drawn, DOCUMENTED[stack])
        assert subject(replace(x.plan, strategy=x.s), DOCUMENTED[stack]).s == x.s


def test_the_end_of_the_decay_leaves_with_a_plan_that_says_how_to_train() -> None:
    """As a number beside the peak, or as its share; without a job it is 0."""
    plan = _plan("megatron-core", dp=8)
    assert "MIN_LR=${MIN_LR:-0}\n" in export(replace(plan, train=Train()), "megatron").files["train.sh"]
    trained = replace(plan, train=Train(name="run", lr=1e-3, min_lr_ratio=0.2))
    for to in TARGETS:
        text = "".join(export(trained, to).files.values())
        assert {
            "torchtitan": "min_lr_factor=0.2",
            "deepspeed": '"min_lr_rate": 0.2',
            "accelerate": '"min_lr_rate": 0.2',
            "maxtext": "learning_rate_final_fraction: 0.2",
        }.get(to, "MIN_LR=${MIN_LR:-0.0002}") in text, to


def test_a_bridge_plan_has_what_its_scheduler_needs() -> None:
    """Megatron-Bridge's defaults are None, which its OptimizerParamScheduler compares with 0."""
    keys = _settings(export(_plan("megatron-bridge", dp=8), "bridge"))
    assert {"optimizer.min_lr", "scheduler.start_weight_decay", "scheduler.end_weight_decay"} <= set(keys)


def test_transformers_knows_the_learning_rate_before_deepspeed_is_configured() -> None:
    """`lr: auto` is filled in when TrainingArguments are made; a batch must count all ranks as replicas."""
    e = export(_plan("deepspeed", dp=2, zero=1, tp=4), "deepspeed")
    script = e.files["train.py"]
    assert script.index('"learning_rate": float') < script.index("parse_dict(given)")
    assert "train_batch_size" not in _settings(e)
    assert "train_batch_size" in _settings(export(_plan("deepspeed", dp=8, zero=1), "deepspeed"))


def test_accelerate_holds_initial_weights_once_and_splits_no_layer() -> None:
    script = export(_plan("accelerate", dp=8, zero=3), "accelerate").files["train.py"]
    assert 'nullcontext() if os.environ.get("RANK", "0") == "0" else init_empty_weights()' in script
    with pytest.raises(InputError, match=r"strategy\.tp = 2: is from_pretrained"):
        export(_plan("accelerate", dp=4, zero=3, tp=2), "accelerate")


@pytest.mark.parametrize("launcher", ["jobset", "skypilot"])
def test_a_blank_that_a_launcher_passes_on_is_a_blank(launcher: str, tmp_path: Path) -> None:
    """Manifests name theirs FILL-IN-LR and so on: train.sh stops at these too."""
    plan = replace(_plan("torchtitan", dp=8, zero=3), train=Train())
    write(export(plan, "torchtitan", launcher), tmp_path)
    blanks = {name: f"FILL-IN-{name}" for name in ("DATA_PATH", "TOKENIZER", "CHECKPOINTS", "LR", "TRAIN_ITERS")}
    assert all(value in "".join(p.read_text() for p in tmp_path.iterdir()) for value in blanks.values())
    run = subprocess.run(
        ["bash", "train.sh"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", **blanks}, capture_output=True, text=True
    )
    assert (run.returncode, "DATA_PATH is a blank" in run.stderr) == (2, True)


@pytest.mark.parametrize("to", TARGETS)
def test_checkpoints_leave_the_folder_of_the_export(to: str) -> None:
    """It is read-only in a pod, and on one node's disk elsewhere."""
    e = export(_plan(TARGETS[to].stacks[0], dp=8), to)
    assert "CHECKPOINTS" in [b.name for b in e.program.blanks]
    assert any("CHECKPOINTS" in text.split("done\n", 1)[-1] for text in e.files.values())


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
def test_a_manifest_has_a_pod_for_each_node_and_one_leader(kind: str, nodes: int) -> None:
    e = export(_plan("torchtitan", dp=8 * nodes, zero=3), "torchtitan", kind)
    job = list(yaml.safe_load_all(e.files[f"{kind}.yaml"]))[-1]["spec"]
    if kind == "pytorchjob":
        replicas = {name: each["replicas"] for name, each in job["pytorchReplicaSpecs"].items()}
        assert (replicas.pop("Master"), sum(replicas.values())) == (1, nodes - 1)
    elif kind == "trainjob":
        assert job["trainer"]["numNodes"] == nodes
    else:
        jobs = [(each["replicas"], each["template"]["spec"]) for each in job["replicatedJobs"]]
        assert sum(n * pods["parallelism"] for n, pods in jobs) == nodes
        assert all(pods["completions"] == pods["parallelism"] for _, pods in jobs)


@pytest.mark.parametrize("to", TARGETS)
def test_blanks_of_numbers_are_numbers_where_they_are_read(to: str) -> None:
    """OmegaConf's `oc.env` is a text, which a learning rate is not; a shell's variables are written as they are."""
    e = export(replace(_plan(TARGETS[to].stacks[0], dp=8), train=Train()), to)
    texts = {key: v for key, v in _settings(e).items() if isinstance(v, str) and "${oc.env:" in v}
    numbers = {key for key, v in texts.items() if any(f":{name}}}" in v for name in ("LR", "MIN_LR", "TRAIN_ITERS"))}
    assert all(texts[key].startswith("${oc.decode:") == (key in numbers) for key in texts)
    assert len(numbers) >= 3 * (to == "bridge")


@pytest.mark.parametrize("word", ["fp8", "bf16", "fp16", None])
def test_a_plan_is_exported_in_its_precision(word: str | None) -> None:
    """As it was asked for or, in a file without that, as its job computes."""
    plan = _plan("megatron-core", dp=8, zero=1)
    assert plan.job.precision.compute == "float32"
    choices = {name: value for name, value in plan.choices.items() if name != "precision"}
    x = subject(replace(plan, choices=choices | ({"precision": word} if word else {})), DOCUMENTED["megatron-core"])
    assert x.compute == (word if word in ("bf16", "fp16") else "fp32")
    assert x.options.products == PRODUCTS.get(str(word), "auto")


@pytest.mark.parametrize(
    ("asked", "target"), [("nemo", "bridge"), ("megatron-core", "megatron"), ("megatron-bridge", "bridge")]
)
def test_an_export_takes_the_names_that_a_stack_has(asked: str, target: str) -> None:
    """`plan --stack nemo` plans: what it plans is written by the same name."""
    plan = _plan(TARGETS[target].stacks[0], dp=8)
    assert export_plan(plan, asked).files == export_plan(plan, target).files
    with pytest.raises(InputError, match="'neo': is not a framework that Phalanx writes"):
        export_plan(plan, "neo")
