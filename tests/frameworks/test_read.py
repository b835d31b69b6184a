"""Configurations of other frameworks, read: 537 real ones with what follows from each without doubt, 175 argument
sets of Megatron-LM's own tests, and 23 mistakes from issues, each beside its mended form
(data/configurations.json.xz)."""

from __future__ import annotations

import json
import lzma
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of, json_of, phalanx, text_of

from phalanx.answers.question.precision import release_named
from phalanx.answers.question.read import read
from phalanx.answers.question.stated import strategy_of
from phalanx.frameworks.configuration import Configuration, StatedLayout
from phalanx.frameworks.launchers.started import in_script
from phalanx.frameworks.lints import lint, lints
from phalanx.frameworks.reading import files
from phalanx.frameworks.reading.launch_tables import as_tables
from phalanx.frameworks.reading.source import kind_of
from phalanx.spec.errors import InputError

KINDS = tuple(files.READERS)


@cache
def data() -> Any:
    return json.loads(lzma.decompress((Path(__file__).parent / "data" / "configurations.json.xz").read_bytes()))


def fixed(s: StatedLayout) -> dict[str, Any]:
    """What a layout says, by the names of the expectations."""
    same = ("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "global_batch", "precision", "recompute")
    offload = dict(s.offload) if s.offload else None
    return {name: getattr(s, name) for name in same} | {"grad_accum": s.accumulation, "offload": offload}


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_without_doubt_is_read(kind: str) -> None:
    wrong = []
    for row in (r for r in data()["configurations"] if r["kind"] == kind):
        read = files.READERS[kind](row["config"], row["world"])
        found = fixed(read.layout)
        if any("pair of sequences" in note for note in read.notes):  # the file counts pairs
            found |= {name: value // 2 for name in ("micro_batch", "global_batch") if (value := found[name])}
        expected = row["expect"]
        if "activations-checkpoint-method" in row["config"].get("args", {}):  # Megatron-LM 2.6's
            expected = {**expected, "recompute": "full"}
        wrong += [
            (row["id"], name, value, found[name])
            for name, value in expected.items()
            if name in found and found[name] != value
        ]
        taken = {*read.understood, *read.without_effect, *read.not_modelled, *read.unknown}
        assert not [key for key in leaves(row["config"]) if not covered(key, taken)], row["id"]
    # An axolotl file that shards by a file it names only, and whose ZeRO stands in a comment; a teacher's layout,
    # where a base that is not here has the policy's.
    assert [w for w in wrong if w[0] not in ("accelerate-267c2b1a6a", "nemo-217ea7d563")] == []


def leaves(config: Mapping[str, Any], above: str = "") -> list[str]:
    result = []
    for name, value in config.items():
        inside = isinstance(value, dict) and value
        result += leaves(value, f"{above}{name}.") if inside else [f"{above}{name}"]
    return result


def covered(key: str, taken: set[str]) -> bool:
    """Whether a key, or a table that it is in, was listed."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in taken for n in range(1, len(parts) + 1))


def test_a_framework_is_recognised_by_its_keys() -> None:
    rows = data()["configurations"]
    seen = Counter((row["kind"], kind_of(row["config"])) for row in rows)
    right = sum(n for (kind, found), n in seen.items() if kind == found)
    # 13 of Primus have NeMo's form of Megatron's names, and are read by that reader.
    assert (len(rows), right, seen["megatron", "nemo"]) == (537, 521, 13), seen


def test_the_numbers_of_the_page() -> None:
    """docs/reading.md: fields that are compared, those that agree, argument sets, lints, published mistakes."""
    rows = [row for row in data()["configurations"] if row["kind"] in KINDS]
    names = fixed(files.READERS["deepspeed"]({}, 1).layout)
    compared = sum(name in names for row in rows for name in row["expect"])
    assert (compared, compared - 1, len(data()["megatron"])) == (3152, 3151, 175)
    assert (len({rule.name for rule in lints()}), len(data()["traps"])) == (41, 23)


@cache
def derived() -> Any:
    """What validate_args of megatron-core 0.19 made of each set (tests/support/exports/in_megatron_cases.py)."""
    return json.loads((Path(__file__).parent / "data" / "validate_args.json").read_text())


def test_megatrons_own_argument_sets_are_read_as_validate_args_derives_them() -> None:
    refused, wrong = [], []
    for case in data()["megatron"]:
        want = derived()[case["name"]]
        if "refused" in want:
            refused.append(case["name"])
            continue
        args = {name.lstrip("-"): value for name, value in case["args"].items()}
        c = files.READERS["megatron"]({"args": args}, want["world"])
        s = c.layout
        found = {name: getattr(s, name) for name in ("world", "dp", "tp", "pp", "cp", "ep", "etp", "recompute")}
        found |= {"virtual": s.virtual or 1, "sp": bool(s.sp), "global_batch": s.global_batch}
        found |= {"accumulation": s.accumulation, "distributed_optimizer": (s.zero or 0) > 0}
        found |= {"ffn": c.spec.ffn} if c.spec else {}
        wrong += [(case["name"], name, want[name], value) for name, value in found.items() if want[name] != value]
    assert len(refused) == 3, "three are not accepted as they stand"
    # A schedule of batches (three sets) has no batch: validate_args fills in a micro-batch a replica. FSDP2 and
    # layer-wise Muon shard the state without the distributed optimizer.
    assert {(name, field) for name, field, *_ in wrong} == {
        *(
            (f"gpt/gpt3_15b_8t_release{end}", n)
            for end in ("", "_gb200", "_sm")
            for n in ("global_batch", "accumulation")
        ),
        ("gpt/gpt3_mcore_te_tp2_pp1_fsdp2_resume_torch_dist", "distributed_optimizer"),
        ("moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon_param_layout", "distributed_optimizer"),
    }


def in_half(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a Trainer or of accelerate with a half type on, which most reports do not show."""
    if kind == "accelerate":
        return config | {"mixed_precision": "bf16"}
    return config | {"args": config["args"] | {"bf16": True}} if kind == "hf" else config


def test_every_mistake_is_found_and_its_mended_form_is_clean() -> None:
    missed, alarmed = [], []
    for trap in data()["traps"]:
        reader = files.READERS[trap["kind"]]
        if not lint(trap["config"], reader(trap["config"], trap["world"])):
            missed.append(trap["id"])
        mended = in_half(trap["kind"], trap["mended"])
        if lint(mended, reader(mended, trap["world"])):
            alarmed.append(trap["id"])
    assert (missed, alarmed) == ([], [])


SHARDED = "--fsdp 'full_shard auto_wrap'"


def started(text: str) -> dict[str, Any]:
    """Return the tables of what a script starts."""
    return as_tables(in_script(text, lambda name: None, lambda launch: True))


def trainer(line: str, ranks: int = 4) -> dict[str, Any]:
    """Return the tables of a script that starts a Trainer on so many ranks."""
    return started(f"torchrun --nproc_per_node {ranks} train.py --per_device_train_batch_size 1 {line}")


def batch(per_node: int, start: str = "srun torchrun --nnodes 2 --nproc_per_node") -> dict[str, Any]:
    """Return the tables of a batch job of two nodes with eight GPUs, on each of which so many ranks start."""
    asked = "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\n"
    script = f"{asked}{start} {per_node} t.py --bf16 --per_device_train_batch_size 1\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.sbatch"
        path.write_text(script)
        return dict(files.read([path])[1])


def arguments(line: str, env: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a command line as a script's tables."""
    found = started(f"torchrun --nproc_per_node 8 pretrain_gpt.py {line}")
    return found | {"env": env or {}}


ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": 1}
BOTH = {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
LAYERS = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --micro-batch-size 1 --global-batch-size 64"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EIGHT = f"{LAYERS} --num-experts 8 --expert-model-parallel-size"
MISTAKES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "without-bits",
        "hf",
        {"finetuning_type": "lora", "bf16": True, "quantization_method": "bnb"},
        {"finetuning_type": "lora", "bf16": True, "quantization_method": "bnb", "quantization_bit": 4},
    ),
    ("both-halves", "deepspeed", BOTH, BOTH | {"fp16": {"enabled": False}}),
    (
        "offload-without-shards",
        "deepspeed",
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
    (
        "quoted-truth",
        "deepspeed",
        {"fp16": {"enabled": "false"}, "train_micro_batch_size_per_gpu": 1},
        {"fp16": {"enabled": False}, "train_micro_batch_size_per_gpu": 1},
    ),
    (
        "older-sharding",
        "accelerate",
        {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
        {
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False},
        },
    ),
    ("unknown-flag", "megatron", arguments(f"{LAYERS} --recompute-granlarity full"), arguments(LAYERS)),
    ("connections-for-tp", "megatron", arguments(f"{LAYERS} {TP2}"), arguments(f"{LAYERS} {TP2}", ONE_QUEUE)),
    (
        "connections-with-fsdp",
        "megatron",
        arguments(f"{LAYERS} --use-megatron-fsdp", ONE_QUEUE),
        arguments(f"{LAYERS} --use-megatron-fsdp"),
    ),
    (
        "one-queue-idle",
        "megatron",
        arguments(f"{LAYERS} --overlap-grad-reduce", ONE_QUEUE),
        arguments(f"{LAYERS} --overlap-grad-reduce"),
    ),
    (
        "gather-without-reduce",
        "megatron",
        arguments(f"{LAYERS} --use-distributed-optimizer --overlap-param-gather"),
        arguments(f"{LAYERS} --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"),
    ),
    (
        "interleaved-on-two",
        "megatron",
        arguments(
            f"{LAYERS} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4"
            " --no-overlap-p2p-communication"
        ),
        arguments(f"{LAYERS} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4"),
    ),
    (
        "ends-without-pipeline",
        "megatron",
        arguments(f"{LAYERS} --decoder-last-pipeline-num-layers 7"),
        arguments(LAYERS),
    ),
    (
        "experts-on-one-queue",
        "megatron",
        arguments(f"{EIGHT} 8 --overlap-moe-expert-parallel-comm", ONE_QUEUE),
        arguments(f"{EIGHT} 8 --overlap-moe-expert-parallel-comm", {"CUDA_DEVICE_MAX_CONNECTIONS": 32}),
    ),
    (
        "expert-ranks",
        "megatron",
        arguments(f"{EIGHT} 8 {TP2}", ONE_QUEUE),
        arguments(f"{EIGHT} 8 {TP2} --expert-tensor-parallel-size 1", ONE_QUEUE),
    ),
    (
        "experts-without-sp",
        "megatron",
        arguments(f"{EIGHT} 4 --tensor-model-parallel-size 2", ONE_QUEUE),
        arguments(f"{EIGHT} 4 {TP2}", ONE_QUEUE),
    ),
    (
        "uneven-experts",
        "megatron",
        arguments(f"{LAYERS} --num-experts 12 --expert-model-parallel-size 8"),
        arguments(f"{EIGHT} 8"),
    ),
    (
        "uneven-heads",
        "megatron",
        arguments(f"{LAYERS} --group-query-attention --num-query-groups 5"),
        arguments(f"{LAYERS} --group-query-attention --num-query-groups 8"),
    ),
    (
        "groups-alone",
        "megatron",
        arguments(f"{LAYERS} --num-query-groups 8"),
        arguments(f"{LAYERS} --group-query-attention --num-query-groups 8"),
    ),
    (
        "uneven-stages",
        "megatron",
        arguments(LAYERS.replace("32 --hidden", "30 --hidden") + " --pipeline-model-parallel-size 4"),
        arguments(f"{LAYERS} --pipeline-model-parallel-size 4"),
    ),
    ("nothing-to-shard", "hf", trainer(f"--bf16 {SHARDED}", 1), trainer(f"--bf16 {SHARDED}")),
    ("no-half-type", "hf", trainer("--tf32 True"), trainer("--tf32 True --bf16")),
    (
        "no-half-type",
        "accelerate",
        {"distributed_type": "MULTI_GPU", "num_processes": 2},
        {"distributed_type": "MULTI_GPU", "num_processes": 2, "mixed_precision": "fp16"},
    ),
    (
        "types-disagree",
        "hf",
        trainer("--bf16") | {"accelerate": {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}},
        trainer("--bf16") | {"accelerate": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"}},
    ),
    (
        "batches-disagree",
        "hf",
        trainer("--bf16") | {"deepspeed_json": {"train_batch_size": 8, "bf16": {"enabled": "auto"}}},
        trainer("--bf16") | {"deepspeed_json": {"train_batch_size": 4, "bf16": {"enabled": "auto"}}},
    ),
    (
        "batches-disagree",
        "megatron",
        arguments("--micro-batch-size 4") | {"deepspeed_json": {"train_micro_batch_size_per_gpu": 2}},
        arguments("--micro-batch-size 4") | {"deepspeed_json": {"train_micro_batch_size_per_gpu": 4}},
    ),
    ("ranks-vs-job", "hf", batch(4), batch(8)),
    ("no-rank", "hf", batch(8, "srun --ntasks-per-node"), batch(8, "srun --container-image=a --ntasks-per-node")),
    (
        "no-rank",
        "hf",
        batch(8, "export RANKS=1; srun --ntasks-per-node"),
        batch(8, "export LOCAL_RANK=$SLURM_LOCALID; srun --ntasks-per-node"),
    ),
    ("one-unit", "hf", trainer("--bf16 --fsdp full_shard"), trainer(f"--bf16 {SHARDED}")),
    (
        "one-unit",
        "accelerate",
        {"distributed_type": "FSDP", "num_processes": 4, "mixed_precision": "bf16", "fsdp_config": {}},
        {
            "distributed_type": "FSDP",
            "num_processes": 4,
            "mixed_precision": "bf16",
            "fsdp_config": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 10**6},
        },
    ),
    (
        "nothing-to-shard",
        "megatron",
        arguments(f"{LAYERS} --use-distributed-optimizer --tensor-model-parallel-size 8"),
        arguments(f"{LAYERS} --use-distributed-optimizer --tensor-model-parallel-size 4"),
    ),
    (
        "nothing-to-shard",
        "hf",
        trainer("", 1) | {"deepspeed_json": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}},
        trainer("", 1)
        | {
            "deepspeed_json": {
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                "bf16": {"enabled": True},
            }
        },
    ),
    (
        "recompute-halves",
        "megatron",
        arguments(f"{LAYERS} --recompute-granularity full"),
        arguments(f"{LAYERS} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ),
]


@pytest.mark.parametrize(("name", "kind", "wrong", "mended"), MISTAKES, ids=[f"{m[0]}-{m[1]}" for m in MISTAKES])
def test_a_mistake_is_found_and_its_mended_twin_is_clean(
    name: str, kind: str, wrong: dict[str, Any], mended: dict[str, Any]
) -> None:
    reader = files.READERS[kind]
    assert name in [m.name for m in lint(wrong, reader(wrong, None))]
    assert lint(mended, reader(mended, None)) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, "a multiple of 14, such as 266"),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, "a multiple of 14, such as 14"),
    ],
)
def test_a_batch_that_the_ranks_do_not_divide_gets_one_that_they_do(config: dict[str, Any], said: str) -> None:
    """OpenRLHF/OpenRLHF#346: 256 sequences on 7 GPUs, 2 at a time."""
    (mistake,) = lint(config, files.READERS["deepspeed"](config, 7))
    assert mistake.remedy == said


def test_a_batch_that_replicas_do_not_divide_gets_one_that_they_do() -> None:
    config = arguments("--micro-batch-size 4 --global-batch-size 100")
    (mistake,) = lint(config, files.READERS["megatron"](config, 8))
    assert (mistake.name, mistake.remedy) == ("global-batch", "a multiple of 32, such as 128")


def test_a_price_says_what_one_rank_does_not_shard(tmp_path: Path) -> None:
    line = "--model gpt2 --cluster dgx-a100 --seq 512"
    for ranks in (1, 2):
        script = (
            f"torchrun --nproc_per_node {ranks} train.py --per_device_train_batch_size 1 --bf16 --fsdp full_shard"
        )
        (tmp_path / "run.sh").write_text(script)
        _, out, err = phalanx(tmp_path, f"predict run.sh {line}")
        assert ("zero=3 of the file shards nothing over one rank" in out + err) == (ranks == 1)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    _, out, err = phalanx(tmp_path, f"predict ds.json --gpus 1 --batch 1 {line}")
    assert "zero=3" in out  # its engine works as at level 3
    assert "shards nothing" not in out + err


@pytest.mark.parametrize(
    ("script", "precision"),
    [
        ("--fsdp full_shard", "fp32"),
        ("--fsdp full_shard --tf32 True", "tf32"),
        ("--tf32 True --bf16", "bf16"),
        ("--dataset_text_field text", "bf16"),
        ("--tf32 False --fp16 True", "fp16"),
    ],
)
def test_a_trainer_without_a_half_type_computes_in_fp32_or_tf32(tmp_path: Path, script: str, precision: str) -> None:
    (tmp_path / "run.sh").write_text(f"torchrun --nproc_per_node 2 t.py --per_device_train_batch_size 1 {script}")
    line = "predict run.sh --model gpt2 --cluster dgx-a100 --seq 512 --json"
    assert json.loads(text_of(tmp_path, line))["question"]["precision"] == precision


@pytest.mark.parametrize(
    ("table", "units"),
    [
        ({}, {"units": "model"}),
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {}),
        ({"fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}, {}),
        ({"min_num_params": 2000}, {"units": "remainder", "unit_size": 2000}),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 0}, {"units": "model"}),
        ({"fsdp_version": 2, "fsdp_min_num_params": 5}, {"units": "module", "unit_size": 5}),
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_min_num_params": 5}, {"units": "model"}),
    ],
)
def test_a_wrapping_policy_is_read_as_units(table: dict[str, Any], units: dict[str, Any]) -> None:
    c = files.READERS["accelerate"]({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": table}, None)
    assert c.options == units


CORES = [
    ("hf", trainer("--bf16 --attn_implementation eager"), "unfused"),
    ("hf", trainer("--bf16 --attn_implementation flash_attention_2"), "flash2"),
    ("hf", trainer("--bf16 --flash_attn disabled"), "unfused"),
    ("hf", trainer("--bf16"), "auto"),
    ("accelerate", {"base_model": "x", "fsdp_config": {}, "flash_attention": True}, "flash"),
    ("megatron", arguments("--attention-backend unfused"), "unfused"),
    ("megatron", arguments("--transformer-impl local"), "unfused"),
    ("megatron", arguments("--transformer-impl local --use-flash-attn"), "flash"),
    ("megatron", arguments("", {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}), "unfused"),
    ("megatron", arguments("", {"NVTE_FLASH_ATTN": "0"}), "auto"),
    ("deepspeed", {"pipe_parallel_size": 1, "num_layers": 2}, "unfused"),
    ("deepspeed", {"pipe_parallel_size": 1, "num_layers": 2, "attention_config": [[["flash"], 2]]}, "flash"),
    ("maxtext", {"attention": "dot_product"}, "unfused"),
    ("maxtext", {"attention": "cudnn_flash_te"}, "flash"),
]


@pytest.mark.parametrize(("kind", "config", "core"), CORES)
def test_attention_is_the_kernel_that_the_file_names(kind: str, config: dict[str, Any], core: str) -> None:
    assert files.READERS[kind](config, None).options.get("attention", "auto") == core


def test_a_price_says_what_a_kernel_that_is_not_named_could_change(tmp_path: Path) -> None:
    line = "predict run.sh --model gpt2-large --cluster dgx-a100 --seq 1024"
    for named, said in (("", True), ("--attn_implementation sdpa", False)):
        (tmp_path / "run.sh").write_text(
            f"torchrun --nproc_per_node 2 t.py --bf16 --per_device_train_batch_size 8 {named}"
        )
        _, out, err = phalanx(tmp_path, line)
        assert ("`eager`, all that older releases have, keeps 28.1 GiB more" in out + err) == said


_8B = {"name": "llama3", "flavor": "8B"}
_IN_EIGHT: dict[str, Any] = {"training": {"compile": True}, "float8": {"enable_fsdp_float8_all_gather": True}}


@pytest.mark.parametrize(
    ("tables", "stack", "options"),
    [
        ({"training": {"compile": False}}, "torchtitan-eager", {}),
        ({"training": {"compile": True}}, "torchtitan-compiled", {}),
        ({"training": {}}, "torchtitan-eager", {}),
        ({"compile": {"enable": True, "components": ["model", "loss"]}}, "torchtitan-2025-06", {}),
        ({"compile": {"enable": True, "components": ["loss"]}}, "torchtitan-eager", {"cross_entropy": "fused"}),
        (
            {
                "training": {"compile": True},
                "float8": {"enable_float8_linear": True, "enable_fsdp_float8_all_gather": True},
            },
            "torchtitan-narrow-gather",
            {"products": "float8"},
        ),
        (
            {"training": {"compile": True}, "float8": {"enable_float8_linear": False}},
            "torchtitan-compiled",
            {},
        ),
        # A converter is listed, or text alone in older releases; without one its table does nothing.
        (_IN_EIGHT | {"model": _8B | {"converters": "float8"}}, "torchtitan-narrow-gather", {"products": "float8"}),
        (_IN_EIGHT | {"model": _8B | {"converters": ["float8"]}}, "torchtitan-narrow-gather", {"products": "float8"}),
        (
            {"training": {"compile": True}, "model": _8B | {"converters": ["quantize.linear.mx"]}},
            "torchtitan-compiled",
            {"products": "mxfp8"},
        ),
        (_IN_EIGHT, "torchtitan-compiled", {}),
    ],
)
def test_torchtitans_release_is_what_the_keys_show(
    tmp_path: Path, tables: dict[str, Any], stack: str, options: dict[str, Any]
) -> None:
    old = {"job": {"dump_folder": "."}, "model": _8B}
    training = {"seq_len": 8192, "batch_size": 1, "data_parallel_degree": -1}
    config = old | tables | {"training": training | tables.get("training", {})}
    c = files.READERS["torchtitan"](config, 32)
    assert (c.stack, dict(c.options)) == (stack, options)
    assert (c.layout.zero, c.layout.dp) == (3, 32)
    assert stack in c.notes[0]
    assert ("[float8] does nothing" in c.notes[-1]) == ("float8" in tables and not options)
    # The price, and what would be better, are of that stack.
    lines = [
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in table.items())
        for name, table in config.items()
    ]
    (tmp_path / "old.toml").write_text("".join(lines))
    line = "--gpus 32 --cluster dgx-h100 --json"
    assert json_of(tmp_path, f"predict old.toml {line}")["question"]["stack"] == stack
    assert json_of(tmp_path, f"plan --from old.toml {line}")["question"]["stack"] == stack


def test_an_open_micro_batch_is_a_replicas_share_of_the_batch_under_accelerate(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\n")
    line = "predict a.yaml --model gpt2 --cluster dgx-a100 --seq 512 --batch 16"
    assert "micro_batch=8" in json_of(tmp_path, f"{line} --json")["question"]["strategy"]
    _, out, err = phalanx(tmp_path, line)
    assert "micro_batch=8: 16 sequences over dp=2, accumulated 1 times" in out + err


def test_every_lint_has_an_issue_and_a_mended_twin() -> None:
    seen = {name for name, *_ in MISTAKES}
    for trap in data()["traps"]:
        seen |= {m.name for m in lint(trap["config"], files.READERS[trap["kind"]](trap["config"], trap["world"]))}
    assert seen == {rule.name for rule in lints()}
    assert len(seen) >= 25
    assert all(re.search(r"^[\w.-]+/[\w.-]+#\d+", rule.issue) for rule in lints())


SCRIPT = """#!/bin/bash
# seventy billion parameters
export CUDA_DEVICE_MAX_CONNECTIONS=1
NODES=${SLURM_NNODES:-8}
touch ran; DATA=$(touch ran)
DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes $NODES
)
SIZE_ARGS="
    --num-layers 80 --hidden-size 8192 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --ffn-hidden-size 28672
    --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --disable-bias-linear
    --untie-embeddings-and-output-weights
"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $SIZE_ARGS --vocab-size 128256 \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --sequence-parallel --seq-length 8192 \\
    --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size $((4 * 128)) --bf16 \\
    --tp-comm-overlap --overlap-grad-reduce --overlap-param-gather \\
    --use-distributed-optimizer --recompute-granularity selective
"""


def test_a_script_is_read_and_not_run() -> None:
    found = started(SCRIPT)
    assert found["launch"] == {"nproc_per_node": 8, "nnodes": 8}
    assert found["env"] == {"CUDA_DEVICE_MAX_CONNECTIONS": 1}
    assert found["args"]["global-batch-size"] == 512
    assert found["args"]["num-layers"] == 80
    read = files.READERS["megatron"](found, None)
    assert str(strategy_of(read, 64)) == "dp=4,zero=1,tp=8,sp=1,pp=2,recompute=selective"


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("W=8\nrun --g $((W * 4)) --h $((W/2+1))", {"g": 32, "h": 5}),
        ('A=(\n --a "x y"\n --b 3\n)\nrun "${A[@]}" --g 5', {"a": "x y", "b": 3, "g": 5}),
        ('A="--a 1"\nA+=" --b 2"\nrun $A --g 1', {"a": 1, "b": 2, "g": 1}),
        ("run --g 5 2>&1 | tee log", {"g": 5}),
        ("run --l 1 2 3 --g ${1:-3} > out.txt", {"l": [1, 2, 3], "g": 3}),
        ("run --g `nproc` --h $(nproc)", {"g": "$(nproc)", "h": "$(nproc)"}),
        ("cat <<'EOF' > f\nit isn't --a 1 --b 2 --c 3\nEOF\nrun --g 5", {"g": 5}),
    ],
)
def test_words_of_a_shell(text: str, args: dict[str, Any]) -> None:
    assert started(text)["args"] == args


@pytest.mark.parametrize(
    ("args", "fixed"),
    [
        ({"pipeline-model-parallel-size": 2, "pipeline-model-parallel-layout": "Et|(tt|)*2tL"}, {"virtual": 2}),
        (
            {
                "num-layers": 30,
                "pipeline-model-parallel-size": 4,
                "num-layers-per-virtual-pipeline-stage": 4,
                "account-for-embedding-in-pipeline-split": True,
                "account-for-loss-in-pipeline-split": True,
            },
            {"virtual": 2},
        ),
        ({"use-megatron-fsdp": True}, {"zero": 3}),
        ({"use-torch-fsdp2": True, "torch-fsdp2-no-reshard-after-forward": True}, {"zero": 2}),
        ({"use-distributed-optimizer": True, "num-distributed-optimizer-instances": 2}, {"zero": 1, "shard": 4}),
        ({"context-parallel-size": 4, "cp-comm-type": "a2a"}, {"ulysses": 4}),
        (
            {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 3},
            {"recompute": "full", "recomputed": "block:3"},
        ),
        ({"micro-batch-size": 1, "global-batch-size": "$GBS"}, {"global_batch": None, "accumulation": None}),
        ({"micro-batch-size": 4, "step-batch-size-schedule": "0:384 200B:768"}, {"global_batch": None}),
        ({"micro-batch-size": 4}, {"global_batch": 32, "accumulation": 1}),
    ],
)
def test_megatron_layouts_follow_validate_args(args: dict[str, Any], fixed: dict[str, Any]) -> None:
    s = files.READERS["megatron"]({"args": args}, 8).layout
    assert {name: getattr(s, name) for name in fixed} == fixed


@pytest.mark.parametrize(
    ("kind", "config", "strategy", "options"),
    [
        (
            "maxtext",
            {
                "ici_fsdp_parallelism": -1,
                "ici_tensor_parallelism": 4,
                "per_device_batch_size": 0.5,
                "remat_policy": "full",
                "quantization": "te_fp8_currentscaling",
                "optimizer_memory_host_offload": True,
                "mu_dtype": "bfloat16",
            },
            "dp=16,zero=3,tp=4,sp=1,micro_batch=2,recompute=full",
            {"products": "float8", "first_moment": "bfloat16", "optimizer_offload": 1.0},
        ),
        (
            "nemo",
            {
                "model": {
                    "tensor_model_parallel_size": 2,
                    "context_parallel_size": 2,
                    "cp_comm_type": ["all_gather", "p2p"],
                    "num_moe_experts": 8,
                    "moe_token_dispatcher_type": "flex",
                    "cross_entropy_loss_fusion": True,
                    "micro_batch_size": 2,
                }
            },
            "dp=16,zero=1,tp=2,cp=2,etp=2,micro_batch=2",
            {"context": "all_gather", "dispatch": "deepep", "cross_entropy": "native"},
        ),
        (
            "deepspeed",
            {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
                "communication_data_type": "bf16",
            },
            "dp=64,zero=3,micro_batch=4",
            {"optimizer_offload": 0.5, "reduce": "bfloat16"},
        ),
    ],
)
def test_options_beyond_the_strategy(
    kind: str, config: dict[str, Any], strategy: str, options: dict[str, Any]
) -> None:
    c = files.READERS[kind](config, 64)
    assert (str(strategy_of(c, 64)), dict(c.options)) == (strategy, options)


def test_experts_are_never_priced_as_a_dense_model(tmp_path: Path) -> None:
    experts = files.READERS["megatron"](started(SCRIPT.replace("--bf16", "--bf16 --num-experts 8")), None).spec
    assert experts is not None
    assert experts.experts is not None
    assert (experts.experts.count, experts.experts.top_k, experts.experts.ffn) == (8, 2, 28672)
    (tmp_path / "run.sh").write_text(SCRIPT.replace("--swiglu", "--num-experts 8"))
    assert "experts need a gated activation" in error_of(tmp_path, "predict run.sh --cluster dgx-h100")


@pytest.mark.parametrize("frequency", ["2", "([0]*1+[1]*1)"])
def test_more_layers_than_a_model_may_have_are_not_enumerated(tmp_path: Path, frequency: str) -> None:
    script = tmp_path / "train.sh"
    sizes = "--hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 64 --num-experts 4"
    script.write_text(f"pretrain_gpt.py --num-layers {10**14} {sizes} --moe-layer-freq {frequency!r}\n")
    assert phalanx(tmp_path, "read", script.name)[0] == 0


def test_more_dense_layers_than_a_model_may_have_are_not_enumerated(tmp_path: Path) -> None:
    sizes = {"base_emb_dim": 64, "base_mlp_dim": 128, "base_moe_mlp_dim": 64, "base_num_decoder_layers": 4}
    heads = {"base_num_query_heads": 4, "base_num_kv_heads": 4, "vocab_size": 256, "attention_type": "mla"}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "first_num_dense_layers": 10**12}
    config = {"decoder_block": "deepseek", "max_target_length": 64, **sizes, **heads, **latent, **experts}
    (tmp_path / "x.yml").write_text("".join(f"{key}: {value}\n" for key, value in config.items()))
    assert phalanx(tmp_path, "read x.yml")[0] == 0


def test_a_job_file_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[job]\nglobal_batch = 8\nseq = 64\n[train]\nsteps = 3\n")
    _, _, err = phalanx(tmp_path, "explain job.toml")
    assert "a plan is JSON; phalanx plan job.toml writes its plan.json" in err


def test_commands_take_a_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    out = text_of(tmp_path, "read run.sh --json")
    assert not (tmp_path / "ran").exists()
    found = json.loads(out)
    assert found["strategy"]["tp"] == 8
    assert found["understood"]["tensor-model-parallel-size"] == "strategy.tp"
    out = text_of(tmp_path, "predict run.sh --cluster dgx-h100 --json")
    question = json.loads(out)["question"]
    line = "dp=4,zero=1,tp=8,sp=1,pp=2,layers=40/40,recompute=selective"
    assert (question["gpus"], question["strategy"]) == (64, line)
    named = ("--model", "llama3-70b", "--cluster", "dgx-h100", "--gpus", "64", "--batch", "512", "--seq", "8192")
    _, same, _ = phalanx(tmp_path, "predict", *named, "--strategy", question["strategy"], "--json")
    assert json.loads(out)["step_time_s"] == pytest.approx(json.loads(same)["step_time_s"], rel=0.01)
    code, out, err = phalanx(tmp_path, "lint run.sh")
    assert (code, out, err) == (0, "nothing found in the file; --cluster looks at the strategy too\n", "")
    (tmp_path / "ds.json").write_text('{"zero_optimisation": {"stage": 2}, "train_batch_size": 8}')
    code, out, _ = phalanx(tmp_path, "lint ds.json")
    assert code == 1
    assert "zero_optimisation is not a key" in out
    assert "did you mean zero_optimization" in out


@pytest.mark.parametrize(
    ("content", "words", "said"),
    [
        ("", ("read", "none.sh"), "no such file"),
        ("{", ("read", "x.json"), "cannot be parsed"),
        ("[1]", ("read", "x.json"), "is not a table of settings"),
        ("a: 1", ("read", "x.yaml"), "is not a configuration of a known framework"),
        ("import os", ("read", "x.py"), "is Python, which is not run"),
        ("!!python/object/apply:os.system ['true']", ("read", "x.yaml"), "cannot be parsed"),
        ("a: 1", ("read", "x.yaml", "--kind", "megatrn"), "did you mean megatron"),
        ('{"train_batch_size": 8, "fp16": {}}', ("predict", "x.json", "--cluster", "dgx-h100"), "--gpus: is missing"),
        ('{"train_batch_size": 8, "fp16": {}}', ("read", "x.json", "--gpus", "0"), "--gpus = 0: must be at least 1"),
    ],
)
def test_bad_files_get_one_line(tmp_path: Path, content: str, words: tuple[str, ...], said: str) -> None:
    if words[1] != "none.sh":
        (tmp_path / words[1]).write_text(content)
    code, out, err = phalanx(tmp_path, *words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("run --num-layers 32 --hidden-size", ("read",), "--hidden-size: has no value"),
        ("run --num-layers 32 --hidden-size", ("predict",), "--hidden-size: has no value"),
        ("run --num-layers 32 --hidden-size 'abc", ("lint",), "line 1: has a quote that does not end"),
        ("run --num-layers 32 --hidden-size 'abc", ("read",), "line 1: has a quote that does not end"),
        (SCRIPT + " --fp16", ("predict",), "and fp16 are both on"),
        (
            SCRIPT + " --num-layers-per-virtual-pipeline-stage 5 --num-virtual-stages-per-pipeline-rank 2",
            ("read",),
            "both say how many chunks",
        ),
        (SCRIPT.replace("--vocab-size 128256", ""), ("predict",), "the file leaves --padded-vocab-size open"),
        (
            "NPROC_PER_NODE=4 swift sft --model mine/unheard-of-7B --max_length 4096 --deepspeed zero3",
            ("predict",),
            "the file names mine/unheard-of-7B and leaves its sizes open; name a preset",
        ),
        (SCRIPT.replace("--nnodes $NODES", "--nnodes $MORE"), ("predict",), "--gpus: is missing"),
        (SCRIPT, ("predict", "--stack", "megatronn-0.3"), "is not a software stack"),
        (SCRIPT, ("verify", "--set", "job.seq=8"), "is about a job file"),
    ],
)
def test_half_and_contradicting_command_lines_get_one_line(
    tmp_path: Path, script: str, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "run.sh").write_text(script.rstrip("\n").replace("selective\n ", "selective "))
    more = ("--cluster", "dgx-h100") if words[0] == "predict" else ()
    code, out, err = phalanx(tmp_path, words[0], "run.sh", *words[1:], *more)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert said in err


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("megatron-core-0.13", "megatron-core-0.14"),
        ("megatron-core-0.20", "megatron-core"),
        ("torchtitan-0.2.1", "torchtitan"),
        ("nemo-24.09", "nemo-24.11"),
        ("megatron-bridge-25.10", "megatron-bridge-25.11"),
        ("megatron-0.15", "megatron-core-0.14"),
    ],
)
def test_the_nearest_release_is_taken_and_said(name: str, taken: str) -> None:
    stack, said = release_named(name)
    assert stack == taken
    assert "the nearest release, is taken" in said
    for known in (taken, "phalanx", "nobody-1.2"):
        assert release_named(known) == (known, "")


@pytest.mark.parametrize(("name", "taken"), [("megatron", "megatron-core"), ("nemo", "megatron-bridge")])
def test_a_framework_as_people_say_it_is_taken_for_its_row_and_said(name: str, taken: str) -> None:
    stack, said = release_named(name)
    assert stack == taken
    assert said.startswith(f"{name} is taken for {taken}")


REGISTRY = """
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

def llama3_70b() -> Trainer.Config:
    spec = model_registry("70B")
    open("ran", "w")
    return Trainer.Config(
        model_spec=spec, training=TrainingConfig(local_batch_size=2 * 4, global_batch_size=64, seq_len=8192),
        parallelism=ParallelismConfig(tensor_parallel_degree=8), activation_checkpoint=FullAC.Config())

def longer() -> Trainer.Config:
    config = llama3_70b()
    config.training.seq_len = 4096
    config.parallelism.data_parallel_replicate_degree = 2
    config.model_spec = model_registry("70B", converters=[Float8LinearConverter.Config(recipe_name="rowwise")])
    return config

def elsewhere() -> Trainer.Config:
    config = made(llama3_70b())
    config.training.seq_len = 4096
    return config
"""


def test_torchtitans_python_is_read_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "registry.py").write_text(REGISTRY)
    c = read([tmp_path / "registry.py::llama3_70b"], None, 64).configuration
    assert str(strategy_of(c, 64)) == "dp=8,zero=3,tp=8,sp=1,micro_batch=8,recompute=full"
    c = read([tmp_path / "registry.py::longer"], None, 64).configuration
    assert str(strategy_of(c, 64)) == "dp=8,zero=3,shard=4,tp=8,sp=1,micro_batch=8,recompute=full"
    assert (c.layout.seq, dict(c.options)) == (4096, {"products": "float8-block"})
    assert c.spec is not None
    assert c.spec.layers == 80
    assert json_of(tmp_path, "predict registry.py::longer --gpus 64 --cluster dgx-h100 --json")["question"][
        "options"
    ] == {"products": "float8-block"}
    wrong = (
        ("registry.py", "has 3 configurations"),
        ("registry.py::longr", "did you mean longer"),
        ("registry.py::elsewhere", "starts from made(...), which the file does not hold"),
    )
    for name, said in wrong:
        assert said in error_of(tmp_path, "read", name)
    assert not (tmp_path / "ran").exists()


def test_a_configuration_is_verified_as_our_own_program(tmp_path: Path) -> None:
    small = {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "is_llama_config": True,
    }  # fmt: skip
    config = {
        "parallelism": {"dp": 2, "pp": 1, "tp": 2, "tp_mode": "REDUCE_SCATTER"},
        "tokens": {"sequence_length": 32, "micro_batch_size": 1, "batch_accumulation_per_replica": 2},
        "optimizer": {"zero_stage": 1, "accumulate_grad_in_fp32": False},
        "model": {"model_config": small, "dtype": "bfloat16"},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    found = json_of(tmp_path, "verify config.yaml --json")
    assert found["proved"]
    assert found["strategy"] == "dp=2,zero=1,tp=2,sp=1"
    assert "nanotron's own program is not run" in found["about"]
    assert "gradients=bfloat16" in " ".join(found["notes"])


@pytest.mark.parametrize(("option", "recompute"), [("2", "every:2"), ("1", "full"), ("op", "selective")])
def test_torchtitan_recomputes_every_nth_block_or_operators(option: str, recompute: str) -> None:
    """`selective_ac_option` of releases to 0.2."""
    config = {
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": option},
        "optimizer": {"lr": 3e-4},
        "training": {"local_batch_size": 1, "seq_len": 4096},
    }
    read = files.READERS["torchtitan"](config, 8)
    assert strategy_of(read, 8).recompute == recompute
    assert read.unknown == {}


@pytest.mark.parametrize(
    ("sizes", "tp", "dp"), [({"cp": 2, "dp_shard": 2}, 1, 4), ({"tp": 4}, 4, 2), ({"tp": "auto"}, None, None)]
)
def test_an_axis_that_accelerates_mesh_does_not_name_has_one_rank(
    sizes: dict[str, Any], tp: int | None, dp: int | None
) -> None:
    mesh = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    c = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "parallelism_config": mesh}
    layout = files.READERS["accelerate"](c, 8).layout
    assert (layout.tp, layout.dp, layout.cp) == (tp, dp, sizes.get("cp", 1))


def test_what_does_not_divide_the_ranks_is_refused() -> None:
    read = files.READERS["nanotron"]({"parallelism": {"dp": 1, "pp": 2, "tp": 4}}, None)
    with pytest.raises(InputError, match="use a multiple of 8"):
        strategy_of(read, 12)


_SIZES = {
    "nanotron": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    "maxtext": ("base_emb_dim", "base_mlp_dim", "base_num_decoder_layers", "base_num_query_heads", "vocab_size"),
}


@pytest.mark.parametrize("kind", _SIZES)
def test_a_size_of_another_type_leaves_the_model_open(kind: str) -> None:
    def read_with(sizes: dict[str, Any]) -> Configuration:
        config = {"model": {"model_config": sizes}} if kind == "nanotron" else {"base_num_kv_heads": 4, **sizes}
        return files.READERS[kind](config, 1)

    sizes = dict.fromkeys(_SIZES[kind], 64) | {_SIZES[kind][3]: 4}
    assert read_with(sizes).spec is not None
    for key, wrong in product(sizes, ([2], "2", 2.5, {}, True)):
        found = read_with(sizes | {key: wrong})
        assert (found.spec, "cannot be read: model." in found.open_model) == (None, True), (key, wrong)


@pytest.mark.parametrize("priced", [(), ("--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8")])
def test_an_optimizer_out_of_range_is_refused_by_all_who_read_it(tmp_path: Path, priced: tuple[str, ...]) -> None:
    (tmp_path / "c.toml").write_text("""
        optimizer = { name = "AdamW", eps = -1e-8 }
        training = { local_batch_size = 6, seq_len = 4096 }
        parallelism = { data_parallel_replicate_degree = 2, data_parallel_shard_degree = -1 }
    """)
    command = "predict" if priced else "read"
    code, out, err = phalanx(tmp_path, command, "c.toml", *priced)
    assert (code, out, err) == (2, "", "error: job.optimizer.eps = -1e-08: must be in [1e-30, 1]\n")


def test_a_level_of_zero_that_does_not_exist_is_left_open() -> None:
    config = {"parallelism": {"dp": 2, "pp": 1, "tp": 4}, "optimizer": {"zero_stage": 5}}
    assert files.READERS["nanotron"](config, None).layout.zero is None


@pytest.mark.parametrize(
    ("of", "multiple"),
    [
        ("--vocab-size 128256", 128),
        ("--vocab-size 128256 --make-vocab-size-divisible-by 64", 64),
        ("--padded-vocab-size 128256 --make-vocab-size-divisible-by 64", 0),
        ("--padded-vocab-size 128256", 0),
    ],
)
def test_megatron_pads_a_vocabulary_of_which_it_is_not_told_all_rows(tmp_path: Path, of: str, multiple: int) -> None:
    """megatron/core/tokenizers/utils/build_tokenizer.py: vocab_size_with_padding."""
    (tmp_path / "run.sh").write_text(SCRIPT.replace("--vocab-size 128256", of))
    c = read((str(tmp_path / "run.sh"),)).configuration
    assert c.options.get("vocab_multiple", 0) == multiple
    assert not any("vocab" in key for key in c.not_modelled)
    assert c.spec is not None
    assert c.spec.vocab == 128256


@pytest.mark.parametrize("flag", ["--make-vocab-size-divisible-by 0", "--micro-batch-size 0", "--adam-eps nan"])
def test_a_number_that_megatron_does_not_take_is_no_default(tmp_path: Path, flag: str) -> None:
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py --vocab-size 128256 {flag}")
    name, value = flag.removeprefix("--").split()
    with pytest.raises(InputError, match=rf"{name} = '?{value}'?: is no "):
        read((str(tmp_path / "run.sh"),))


def test_plain_sgd_has_a_momentum_alone(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("torchrun pretrain_gpt.py --optimizer sgd --sgd-momentum 0.8 --lr 1e-3")
    optimizer = files.read([tmp_path / "run.sh"])[0].job["optimizer"]
    assert (optimizer["name"], optimizer["betas"][0]) == ("sgd", 0.8)
    assert all(0 <= beta < 1 for beta in optimizer["betas"])
    assert "eps" not in optimizer
