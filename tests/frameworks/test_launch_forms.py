"""A stored configuration in any form in which people start it is read as its parsed keys are."""

from __future__ import annotations

import json
import lzma
import re
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz.configurations import MANIFESTS
from support.in_process_cli import error_of, text_of
from support.launch_forms import Program, forms, words_of
from support.other_values import changed
from support.sizes import drawn

from phalanx.frameworks.configuration import Configuration, Partial
from phalanx.frameworks.deepspeed.shipped import shipped
from phalanx.frameworks.launchers.launch import launch
from phalanx.frameworks.launchers.launcher import Allocation
from phalanx.frameworks.launchers.manifest import is_manifest, manifest
from phalanx.frameworks.reading import files
from phalanx.frameworks.reading.folder import sequence_in
from phalanx.frameworks.shell.scope import unknown
from phalanx.frameworks.tables import tables_of_paths
from phalanx.spec.errors import InputError

_DATA = Path(__file__).parent / "data" / "configurations.json.xz"
ROWS = json.loads(lzma.decompress(_DATA.read_bytes()))["configurations"]
_PROGRAMS = {
    "megatron": "pretrain_gpt.py",
    "hf": "train.py",
    "torchtitan": "torchtitan/train.py",
    "maxtext": "MaxText/train.py",
}


def _flags(config: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return tables as flags with dots."""
    result: dict[str, Any] = {}
    for name, value in config.items():
        result |= _flags(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return result


def _typed(value: Any) -> bool:
    """Whether a value is one that words can say: no empty text, no text of a number, no nested list."""
    if isinstance(value, list):
        return bool(value) and len(value) > 1 and all(_typed(v) and not isinstance(v, list | bool) for v in value)
    if isinstance(value, str):
        ordinary = value.isprintable() and value.strip() == value and not value.startswith("-")
        return bool(value) and ordinary and "$" not in value and "=" not in value and not _is_number(value)
    return isinstance(value, int | float) and not (isinstance(value, float) and "e" in str(value))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false")
    return True


def _started(row: dict[str, Any]) -> tuple[str, dict[str, Any], bool] | None:
    """Return (kind, flags, whether they are `key=value`) of a row that is started by flags."""
    kind, config = row["kind"], row["config"]
    if kind in ("megatron", "hf") and isinstance(config.get("args"), dict):
        args = {n: v for n, v in config["args"].items() if _typed(v) and v is not False and "." not in n}
        args = {n: v for n, v in args.items() if shipped(str(v)) is None}  # read where it is not here
        return (kind, args, False) if args else None
    if kind in ("torchtitan", "maxtext"):
        flags = {n: v for n, v in _flags(config).items() if _typed(v) and not isinstance(v, bool | list)}
        marked = ("parallelism.", "training.") if kind == "torchtitan" else ("ici_", "dcn_")
        if any(name.startswith(marked) for name in flags):
            return kind, flags, kind == "maxtext"
    return None


STARTED = [found for row in ROWS if (found := _started(row))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, dict[str, Any], Program, str, str]:
    kind, args, assigned = draw(st.sampled_from(STARTED))
    program = Program(
        _PROGRAMS[kind], words_of(args, assigned), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 4, 8]))
    )
    text, name = draw(forms(program))
    return kind, args, program, text, name


def parsed(kind: str, args: dict[str, Any], world: int) -> Configuration | str:
    """Return the configuration of parsed keys, or why it is none."""
    config = (
        {"args": args}
        if kind in ("megatron", "hf")
        else Partial(tables_of_paths(args))
        if kind == "torchtitan"
        else tables_of_paths(args)
    )
    try:
        return files.READERS[kind](config, world)
    except InputError as error:
        return str(error.reason)


@drawn(60, 2000, cases())
def test_every_form_is_read_as_its_parsed_keys(case: tuple[str, dict[str, Any], Program, str, str]) -> None:
    kind, args, program, text, name = case
    want = parsed(kind, args, program.world)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text)
        if isinstance(want, str):
            with pytest.raises(InputError, match=re.escape(want)):
                files.read([path])
            return
        c, _ = files.read([path])
    assert (c.kind, c.layout) == (kind, want.layout), text
    assert (c.options, c.fields, c.job, c.sizes) == (want.options, want.fields, want.job, want.sizes), text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "two.sh",
            "torchrun a.py --num-layers 1\ntorchrun a.py --num-layers 2\n",
            "starts 2 trainings, in lines 1, 2",
        ),
        ("none.sh", "echo hello\n", "is not a configuration of a known framework, and starts no training"),
        ("other.sh", "torchrun mine.py --depth 3\n", "starts mine.py with --depth, which is of no framework"),
        ("own.sh", "srun -N 3 torchrun --nnodes 3 --nproc-per-node 8 mine.py\n", "starts 24 ranks of mine.py, which"),
        (
            "job.yaml",
            "kind: PyTorchJob\napiVersion: kubeflow.org/v1\nspec:\n  pytorchReplicaSpecs:\n    Worker:\n"
            "      replicas: 2\n      template: {spec: {containers: [{name: a, command: [sh, -c, 'python -m "
            "torch.distributed.launch --nnodes=2 --nproc_per_node=8 mine.py']}]}}\n",
            "phalanx observe --world 16 -- python mine.py shows its step",
        ),
        (
            "own.sh",
            "torchrun train.py --num_layers 32 --hidden_width 4096 --num_heads 32 --max_width 8 --offload 0\n",
            "has keys of megatron, but 4 of its 5 are none: hidden_width, num_heads, max_width, offload",
        ),
        ("cut.sh", "torchrun a.py --num-layers 'x\n", "line 1: has a quote that does not end"),
        (
            "pods.yaml",
            "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n"
            "  - {name: a, command: [x]}\n  - {name: b, command: [y]}\n",
            "has two containers with a command: a and b",
        ),
        (
            "service.yaml",
            "apiVersion: v1\nkind: Service\nspec: {}\n",
            "is a manifest of Service and starts no training",
        ),
        ("empty.yaml", "apiVersion: v1\nkind: Job\nspec: {}\n", "a Job without a command"),
        (
            "lws.yaml",
            "kind: LeaderWorkerSet\napiVersion: leaderworkerset.x-k8s.io/v1\nspec:\n  leaderWorkerTemplate:\n"
            "    size: 2\n    workerTemplate: {spec: {containers: [{name: a, command: [sh, -c, 'bash /w/examples/"
            "multi-node-serving.sh worker; vllm serve m']}]}}\n",
            "serves a model, and trains none; phalanx serve plan --from",
        ),
        (
            "values.yaml",
            "workload: {gpus: 128}\nnetwork: {}\nqueue:\nvolumes: {}\n",
            "values of a Helm chart, and not",
        ),
        ("itself.yaml", "base_config: itself.yaml\nici_fsdp_parallelism: 4\n", "is the base of a base"),
        ("log.txt", "x" * (2**20 + 1), "is larger than 1 MiB"),
    ],
)
def test_what_starts_no_one_training_gets_one_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    assert said in error_of(tmp_path, "read", name)


def test_files_that_are_named_are_found_where_they_lie(tmp_path: Path) -> None:
    engine = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds.json").write_text(json.dumps(engine))
    script = tmp_path / "scripts" / "run.sh"
    script.parent.mkdir()
    script.write_text(
        "torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 1 --deepspeed configs/ds.json --bf16 True"
    )
    c, _ = files.read([script])
    assert (c.layout.zero, c.layout.world, c.stack) == (3, 4, "deepspeed")
    (tmp_path / "configs" / "ds.json").rename(tmp_path / "ds.json")
    (tmp_path / "configs").rmdir()
    (tmp_path / "ds.json").rename(tmp_path / "elsewhere.json")
    c, _ = files.read([script])
    assert c.layout.zero is None
    assert c.missing[0] == "configs/ds.json, its deepspeed, is not here: give it too"
    (tmp_path / "elsewhere.json").rename(tmp_path / "ds.json")
    c, _ = files.read([script, tmp_path / "ds.json"])
    assert c.layout.zero == 3
    asked = ("--cluster", "dgx-a100", "--model", "gpt2-large", "--seq", "1024")
    for named in (("scripts/run.sh", "ds.json"), ("ds.json", "scripts/run.sh")):
        assert "dp=4,zero=3" in text_of(tmp_path, "predict", *named, *asked)
        from_ = [word for name in named for word in ("--from", name)]
        assert "now: dp=4,zero=3" in text_of(tmp_path, "plan", *from_, *asked)
    assert "is none that belongs to it" in error_of(tmp_path, "read", "scripts/run.sh", "plan.json")


def test_a_slip_of_a_key_that_sets_the_layout_is_not_priced_as_its_default(tmp_path: Path) -> None:
    sizes = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    line = f"torchrun --nproc_per_node 8 pretrain_gpt.py {sizes} --micro-batch-size 1 --vocab-size 9 --bf16 "
    (tmp_path / "run.sh").write_text(line + "--global-batch-size 8 --tensor-model-paralel-size 8")
    refused = error_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100")
    assert "tensor-model-paralel-size: is not a key of the framework" in refused
    assert "did you mean --tensor-model-parallel-size?" in refused
    (tmp_path / "run.sh").write_text(line + "--global-batch-size 8 --tensor-model-parallel-size 8 --my-own-flag 3")
    assert "tp=8" in text_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100")


@pytest.mark.parametrize(
    ("slip", "name"),
    [
        ("tensor_paralell_degree = 8", "parallelism.tensor_parallel_degree"),
        ("context_parallel_degre = 8", "parallelism.context_parallel_degree"),
        ("[training]\nseq_lem = 512", "training.seq_len"),
        ("[paralelism]\ntensor_parallel_degree = 8", "parallelism"),
        ("[inference]\nlocal_batch_size = 8", ""),  # another table's key of that name
    ],
)
def test_a_slip_in_torchtitans_tables_is_refused(slip: str, name: str, tmp_path: Path) -> None:
    shape = '[model]\nname = "llama3"\nflavor = "8B"\n'
    (tmp_path / "t.toml").write_text(f"{shape}[parallelism]\npipeline_parallel_degree = 1\n{slip}\n")
    line = ("predict", "t.toml", "--cluster", "dgx-h100", "--gpus", "8", "--seq", "512")
    if name:
        assert f"did you mean {name}?" in error_of(tmp_path, *line)
    else:
        assert "dp=8" in text_of(tmp_path, *line)


def test_a_slip_in_a_file_that_a_line_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stge": 3}}')
    line = "torchrun --nproc_per_node 4 t.py --per_device_train_batch_size 1 --bf16 --deepspeed ds.json"
    (tmp_path / "run.sh").write_text(line)
    asked = ("--cluster", "dgx-a100", "--model", "gpt2-large", "--seq", "64")
    assert "did you mean zero_optimization.stage?" in error_of(tmp_path, "predict", "run.sh", *asked)


def test_auto_is_what_an_integration_fills_in(tmp_path: Path) -> None:
    engine = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": "auto"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(engine))
    asked = ("--cluster", "dgx-a100", "--model", "gpt2-large", "--seq", "1024")
    refused = error_of(tmp_path, "predict", "ds.json", "--gpus", "4", *asked)
    assert "train_micro_batch_size_per_gpu = 'auto': is what transformers or accelerate fills in" in refused
    line = "torchrun --nproc_per_node 4 t.py --per_device_train_batch_size 2 --bf16 --deepspeed ds.json"
    (tmp_path / "run.sh").write_text(line)
    assert "dp=4,zero=2,micro_batch=2" in text_of(tmp_path, "predict", "run.sh", *asked)


def test_what_a_missing_file_would_say_is_open(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file t.toml "
    line += "--parallelism.tensor_parallel_degree 2"
    (tmp_path / "run.sh").write_text(line)
    c, _ = files.read([tmp_path / "run.sh"])
    assert (c.layout.tp, c.layout.pp, c.layout.cp, c.layout.dp) == (2, None, None, None)
    (tmp_path / "t.toml").write_text("[parallelism]\npipeline_parallel_degree = 2\n[training]\nseq_len = 1024\n")
    c, _ = files.read([tmp_path / "run.sh"])
    assert (c.layout.tp, c.layout.pp, c.layout.cp, c.layout.dp, c.layout.seq) == (2, 2, 1, 2, 1024)


def test_hydras_and_maxtexts_words_are_laid_over_their_file(tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(
        "trainer: {devices: 1}\nmodel: {tensor_model_parallel_size: 1, encoder_seq_length: 2048, optim: {lr: 1}}\n"
    )
    line = "python megatron_gpt_pretraining.py --config-path=/conf --config-name=gpt trainer.devices=8 "
    line += "trainer.num_nodes=2 model.tensor_model_parallel_size=4 +model.micro_batch_size=2 ~model.optim"
    (tmp_path / "nemo.sh").write_text(line)
    c, config = files.read([tmp_path / "nemo.sh"])
    s = c.layout
    assert (s.world, s.tp, s.dp, s.micro_batch, s.seq, c.unknown) == (16, 4, 4, 2, 2048, {})
    assert "optim" not in config["model"]
    (tmp_path / "max.yml").write_text("per_device_batch_size: 1\nici_tensor_parallelism: 2\nmax_target_length: 512\n")
    (tmp_path / "max.sh").write_text(
        "python -m MaxText.train max.yml ici_fsdp_parallelism=-1 per_device_batch_size=2"
    )
    s = files.read([tmp_path / "max.sh"], None, 8)[0].layout
    assert (s.tp, s.dp, s.micro_batch, s.seq) == (2, 4, 4, 512)


def test_a_flag_in_front_of_an_open_word_is_set(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 "
        "--micro-batch-size 1 --global-batch-size 8 --use-distributed-optimizer $EXTRA_ARGS"
    )
    c, _ = files.read([tmp_path / "run.sh"])
    assert c.layout.zero == 1
    assert c.notes == ("$EXTRA_ARGS of the environment could bring flags: taken as unset",)


def test_the_log_of_a_training_is_read(tmp_path: Path) -> None:
    args = {
        "num_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "micro_batch_size": 2,
        "seq_length": 1024,
    }
    args |= {
        "global_batch_size": 64,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "bf16": True,
    }
    args |= {"sequence_parallel": False, "use_distributed_optimizer": True, "load": None}
    lines = "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in args.items())
    log = "[rank0] using world size: 8\n------ arguments ------\n" + lines + "---- end of arguments ----\n"
    (tmp_path / "train.log").write_text(log)
    c, _ = files.read([tmp_path / "train.log"], None, 8)
    assert (c.kind, c.layout.tp, c.layout.zero, c.layout.micro_batch, c.layout.dp) == ("megatron", 2, 1, 2, 4)
    (tmp_path / "config.yaml").write_text(
        "_wandb: {value: {}}\n"
        + "".join(f"{name}: {{desc: null, value: {json.dumps(value)}}}\n" for name, value in args.items())
    )
    c, _ = files.read([tmp_path / "config.yaml"], None, 8)
    assert (c.kind, c.layout.tp, c.layout.zero) == ("megatron", 2, 1)


_SIZES = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --micro-batch-size 1 --global-batch-size 64"
_RUN = f"pretrain_gpt.py --tensor-model-parallel-size 2 {_SIZES}"


@pytest.mark.parametrize(
    ("name", "text", "world", "note"),
    [
        # A shell of another host, of a terminal, of a cluster's tool.
        ("run.sh", f'H=(a b)\nfor i in 0 1; do ssh ${{H[$i]}} "cd $PWD && torchrun --nnodes ${{#H[@]}} '
         f'--nproc_per_node 8 --node_rank $i {_RUN}" & done', 16, ""),
        ("run.sh", f'tmux new-session -d -s t "torchrun --nproc_per_node 8 {_RUN}"', 8, ""),
        ("run.sh", f"screen -dmS t bash -c 'torchrun --nproc_per_node 8 {_RUN}; exec bash'", 8, ""),
        ("run.sh", f"xpk.py workload create --workload w --command 'torchrun --nproc_per_node 8 {_RUN}'", 8, ""),
        # Launchers with options that look like launchers, and options in a variable.
        ("run.sh", f"uv run --with deepspeed torchrun --nproc_per_node 8 {_RUN}", 8, ""),
        ("run.sh", f"conda run -n base --no-capture-output torchrun --nproc_per_node 8 {_RUN}", 8, ""),
        ("run.sh", f"torchrun $DISTRIBUTED_ARGS {_RUN}", None, "$DISTRIBUTED_ARGS brings options of its launcher"),
        ("run.sh", f"torchrun --nnodes 2 $ARGS -m {_RUN}", None, "$ARGS brings options of its launcher"),
        ("run.sh", f"jsrun -n 6 -a 2 -c 7 -g 1 python {_RUN}", 12, ""),
        ("run.sh", f"for i in 0 1; do RANK=$i WORLD_SIZE=2 LOCAL_RANK=$i python {_RUN} & done", 2, ""),
        # A batch job of components, hosts counted, a launcher in open text that a second shell reads.
        ("run.sbatch", "#!/bin/bash\n#SBATCH --nodes=2 --gpus-per-node=8 --ntasks-per-node=1\n#SBATCH hetjob\n"
         "#SBATCH --nodes=1 --gpus-per-node=4\n"
         f"srun --het-group=0 torchrun --nnodes 2 --nproc_per_node 8 {_RUN} : --het-group=1 python serve.py", 16, ""),
        ("run.sbatch", "#!/bin/bash\n#SBATCH -N 4\nnodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )\n"
         f"srun torchrun --nnodes ${{#nodes[@]}} --nproc_per_node 8 --rdzv_endpoint ${{nodes[0]}}:1 {_RUN}", 32, ""),
        ("run.sbatch", "#!/bin/bash\n#SBATCH -N 4\nHEAD=$(scontrol show job $ID | head -n 1)\n"
         'L="python -m torch.distributed.run --nproc_per_node 8 --nnodes $SLURM_NNODES --rdzv_endpoint $HEAD:6"\n'
         f'srun --wait=60 bash -c "$L --node_rank \\$SLURM_PROCID {_RUN}" 2>&1 | tee log', 32, ""),
        # What people paste, and what they write wrongly.
        ("README.md", f"# Train\n\nDon't forget `pip`:\n\n```bash\ntorchrun --nproc_per_node 8 {_RUN}\n```\n", 8, ""),
        ("run.sh", f"torchrun --nproc_per_node 8 {_RUN} \\\n  # --pipeline-model-parallel-size 2 \\\n  --fp16\n", 8,
         "line 3 begins with --fp16: the command above it has ended"),
        ("run.sh", f"sh train.sh 8 {_RUN}", None, "train.sh, which it runs, is not here: give it too"),
        ("run.sh", f"GPUS=$1\nif [ -z \"$GPUS\" ]; then GPUS=8; fi\n"
         f"f() {{ torchrun --nproc_per_node $GPUS {_RUN} $1; }}\nf", 8,
         "line 2: $1 of the command line decides, taken as unset: GPUS is 8"),
        ("run.sh", f"./train.sh {_RUN}", None, "./train.sh, which it runs, is not here: give it too"),
        # Associative arrays.
        ("run.sh", "declare -A N=([7b]=1 [13b]=2)\nN[70b]=8\nS=70b\n"
         f"torchrun --nproc_per_node ${{N[$S]}} {_RUN}", 8, ""),
        # SkyPilot and Compose.
        ("task.yaml", "resources: {accelerators: {H100: 8}}\nnum_nodes: 2\nrun: |\n"
         '  n=`echo "$SKYPILOT_NODE_IPS" | wc -l`\n'
         f"  torchrun --nnodes=$n --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE {_RUN}\n", 16, ""),
        ("compose.yaml", f"services:\n  t:\n    image: x\n    environment: [N=8]\n"
         f"    command: torchrun --nproc_per_node 8 {_RUN}\n", 8, ""),
    ],
)  # fmt: skip
def test_commands_as_people_write_them(tmp_path: Path, name: str, text: str, world: int | None, note: str) -> None:
    (tmp_path / name).write_text(text)
    c, _ = files.read([tmp_path / name])
    assert (c.kind, c.layout.world, c.layout.tp, c.unknown) == ("megatron", world, 2, {})
    said = (*c.notes, *c.missing)
    assert said[0].startswith(note) if note else not said


def test_programs_that_launch_themselves(tmp_path: Path) -> None:
    trainer = "--model_name_or_path gpt2 --per_device_train_batch_size 2 --bf16"
    for line, world in (
        (f"CUDA_VISIBLE_DEVICES=0,1,2,3 llamafactory-cli train {trainer}", 4),
        (f"NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train {trainer}", 16),
        (f"llamafactory-cli train {trainer}", None),
        (f"trl sft --num_processes 8 {trainer}", 8),
    ):
        (tmp_path / "run.sh").write_text(line)
        assert files.read([tmp_path / "run.sh"])[0].layout.world == world, line


def test_a_file_that_cannot_be_read_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(" " * (2**20 + 1))
    line = "torchrun --nproc_per_node 4 t.py --per_device_train_batch_size 2 --deepspeed ds.json"
    (tmp_path / "run.sh").write_text(line)
    c, _ = files.read([tmp_path / "run.sh"])
    assert c.missing[0] == "ds.json, its deepspeed, is larger than 1 MiB: give one that can be read"
    (tmp_path / "run.sh").write_text("cd $(dirname $0)\nsh pretrain.sh dsw 8B 1\n")
    said = error_of(tmp_path, "read", "run.sh")
    assert "starts no training that is known by itself; pretrain.sh, which it runs, is not here: give it too" in said


def test_a_file_that_the_script_writes_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        'C="./ds.$JOB.json"\ncat <<E > $C\n{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}\nE\n'
        "deepspeed --num_gpus 4 t.py --per_device_train_batch_size 2 --bf16 --deepspeed $C\n"
    )
    c, _ = files.read([tmp_path / "run.sh"])
    assert (c.layout.zero, c.layout.world) == (2, 4)


def test_a_script_alone_leaves_its_arguments_open(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size ${{2}} {_SIZES}"
    )
    c, _ = files.read([tmp_path / "run.sh"])
    assert (c.kind, c.layout.tp, c.layout.dp, c.layout.micro_batch) == ("megatron", None, None, 1)
    said = error_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100", "--seq", "2048")
    assert (
        "tensor-model-parallel-size: is $2, which only a run knows; give a file with the line that calls it" in said
    )
    (tmp_path / "call.sh").write_text("sh run.sh dsw 4")
    assert files.read([tmp_path / "call.sh"])[0].layout.tp == 4


def test_a_layout_that_a_variable_leaves_open_is_said_and_never_priced(tmp_path: Path) -> None:
    line = f"torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $TP {_SIZES} --seq-length 1024"
    line += " --max-position-embeddings 1024 --vocab-size 32000 --bf16"
    (tmp_path / "run.sh").write_text(line)
    asked = ("run.sh", "--cluster", "dgx-h100")
    assert "missing: tensor-model-parallel-size is $TP, which only a run knows" in text_of(tmp_path, "read", "run.sh")
    for command in ("predict", "lint"):
        assert "run.sh: tensor-model-parallel-size: is $TP, which only a run knows" in error_of(
            tmp_path, command, *asked
        )
    (tmp_path / "run.sh").write_text(f"TP=2\n{line}")
    assert "dp=4,tp=2" in text_of(tmp_path, "predict", *asked)


def test_a_script_that_names_its_settings_alone_asks_for_them_in_every_command(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config x")
    for command in ("read", "predict", "lint"):
        asked = ("--cluster", "dgx-h100") if command != "read" else ()
        assert "torchtitan/models/llama3/config_registry.py::x, its base configuration, is not here" in error_of(
            tmp_path, command, "run.sh", *asked
        )


def test_deepspeeds_file_of_accelerate_and_of_axolotl_is_read(tmp_path: Path) -> None:
    engine = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(engine))
    own = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    (tmp_path / "accelerate.yaml").write_text(own)
    (tmp_path / "axolotl.yaml").write_text(
        "base_model: x\nmicro_batch_size: 1\ndeepspeed: ds.json\nsequence_len: 8\n"
    )
    for name in ("accelerate.yaml", "axolotl.yaml"):
        c, _ = files.read([tmp_path / name])
        assert (c.layout.zero, c.layout.precision, c.stack, c.unknown) == (3, "bf16", "deepspeed", {})
        assert c.options["parameter_offload"] is True


def test_a_comma_that_is_missing_is_said_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "neox.yml").write_text('{\n  # sizes\n  "num-layers": 36\n  "hidden-size": 5120,\n}\n')
    assert "a comma or } is missing before line 4" in error_of(tmp_path, "read", "neox.yml")


def test_a_template_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("apiVersion: v1\nkind: Job\nmetadata: {name: {{ .Release.Name }}}\n")
    assert "it is a template ({{ }}): give what it is rendered to" in error_of(tmp_path, "read", "job.yaml")


def test_commands_take_a_manifest(tmp_path: Path) -> None:
    sizes = {
        "num-layers": 8,
        "hidden-size": 512,
        "num-attention-heads": 8,
        "micro-batch-size": 1,
        "vocab-size": 32000,
    }
    sizes |= {"global-batch-size": 64, "seq-length": 1024, "max-position-embeddings": 1024}
    words = ["pretrain_gpt.py", *words_of(sizes), "--bf16"]
    container = {"name": "t", "command": ["torchrun", "--nproc_per_node=8"], "args": words}
    worker = {"replicas": 2, "template": {"spec": {"containers": [container]}}}
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "spec": {"pytorchReplicaSpecs": {"Worker": worker}}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert "dp=16" in text_of(tmp_path, "predict", "job.yaml", "--cluster", "dgx-h100")


@settings(max_examples=30)
@given(*[st.none() | st.integers(1, 9)] * 3)
def test_a_job_has_the_ranks_that_are_said_or_those_of_its_nodes(
    nodes: int | None, gpus: int | None, every: int | None
) -> None:
    known = every is not None or (nodes is not None and gpus is not None)
    assert Allocation(nodes=nodes, gpus=gpus, all_gpus=every).ranks == (
        (every or (nodes or 0) * (gpus or 0)) if known else None
    )


_TRAINED = (
    "train.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 1 --bf16 True"
    " --fsdp 'full_shard auto_wrap' --gradient_checkpointing True --max_seq_length 2048"
)


def _job(pod: dict[str, Any]) -> str:
    limits = {"limits": {"nvidia.com/gpu": 4}}
    command = ["sh", "-c", f"torchrun --nproc_per_node=4 {_TRAINED}"]
    container = {"name": "t", "command": command, "resources": limits}
    pod = {"containers": [container], **pod}
    return json.dumps({"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": pod}}})


@pytest.mark.parametrize(
    ("name", "text", "cluster"),
    [
        ("a.sbatch", "#SBATCH --nodes=1 --gres=gpu:a100:4\n", "dgx-a100"),
        ("a.sbatch", "#SBATCH --nodes=1\n#SBATCH --gpus-per-node=h100:4\n", "dgx-h100"),
        ("a.sbatch", "#SBATCH --nodes=1 --gres=gpu:4 --constraint=l40s\n", "pcie-l40s"),
        ("a.sbatch", "#SBATCH --nodes=1 --gres=gpu:4\n", ""),
        ("a.sbatch", "#SBATCH --nodes=1 --gres=gpu:4 --constraint=gpu80\n", ""),
        ("a.pbs", "#PBS -l select=1:ncpus=32:ngpus=4:gpu_type=a100\n", "dgx-a100"),
        ("a.json", _job({"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}}), "dgx-h100"),
        ("a.json", _job({"nodeSelector": {"node.kubernetes.io/instance-type": "g6.24xlarge"}}), "pcie-l4"),
        ("a.json", _job({}), ""),
        ("a.yaml", "resources: {accelerators: 'H200:4'}\nrun: |\n  ", "dgx-h200"),
        ("a.yaml", "resources: {instance_type: g6e.24xlarge}\nrun: |\n  ", "pcie-l40s"),
    ],
)
def test_what_a_job_calls_its_gpus_is_the_cluster_that_nothing_else_names(
    tmp_path: Path, name: str, text: str, cluster: str
) -> None:
    whole = text if name.endswith(".json") else f"{text}torchrun --nproc_per_node=4 {_TRAINED}\n"
    (tmp_path / name).write_text(whole)
    if not cluster:
        assert "--cluster: is missing" in error_of(tmp_path, f"predict {name}")
        return
    said = text_of(tmp_path, "predict", name)
    assert f"on 4 ranks of {cluster}" in said
    assert f"names the GPUs: nodes and links are taken from {cluster}" in " ".join(said.split())
    stated = text_of(tmp_path, "predict", name, "--cluster", "dgx-b200")
    assert "on 4 ranks of dgx-b200" in stated
    assert "names the GPUs" not in stated


def test_an_open_word_at_the_end_of_a_line_is_no_program_and_no_error() -> None:
    started = launch(("torchrun", "--nproc-per-node", "8", unknown("ARGS")))
    assert (started.per_node, started.words) == (8, ())


@pytest.mark.parametrize(
    ("program", "seq"),
    [("SEQ = 7\nSEQ = 8", 7), ("SEQ = '7'", None), ("STEPS = 7", None), ("SEQ = LEN = 7", None), ("SEQ, = 7,", None)],
)
def test_a_sequence_length_is_the_number_of_that_name(program: str, seq: int | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    assert sequence_in(tmp_path) == seq


_OWN = "deepspeed --hostfile /etc/mpi/hostfile train.py --deepspeed_config ds.json"
_WORKER = "{replicas: 2, template: {spec: {containers: [{name: w, resources: {limits: {nvidia.com/gpu: 4}}}]}}}"
_LAUNCHER = f"{{template: {{spec: {{containers: [{{name: l, command: [sh, -c, '{_OWN}']}}]}}}}}}"


@pytest.mark.parametrize(
    ("name", "text", "world"),
    [
        ("job.yaml", "kind: MPIJob\napiVersion: kubeflow.org/v2beta1\nspec:\n  slotsPerWorker: 4\n"
         f"  mpiReplicaSpecs:\n    Launcher: {_LAUNCHER}\n    Worker: {_WORKER}\n", 8),
        ("run.sbatch", f"#!/bin/bash\n#SBATCH -N 4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n{_OWN}\n", 32),
    ],
)  # fmt: skip
def test_a_list_of_hosts_that_the_job_writes_has_its_hosts(name: str, text: str, world: int, tmp_path: Path) -> None:
    """The operator of an MPIJob writes /etc/mpi/hostfile; a batch script makes one of its allocation."""
    (tmp_path / name).write_text(text)
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}')
    c, _ = files.read([tmp_path / name])
    assert (c.kind, c.layout.world) == ("deepspeed", world)


_COMPOSE = {
    "services": {
        "x": {
            **{"image": "i", "entrypoint": ["torchrun"], "command": "train.py --bf16 True", "environment": ["A=1"]},
            "deploy": {"resources": {"reservations": {"devices": [{"count": 8}]}}},
        }
    }
}
_SKY = {"resources": {"accelerators": {"H100": 8}}, "num_nodes": 2, "envs": {"A": "1"}, "run": "torchrun train.py"}


@pytest.mark.parametrize("document", [*MANIFESTS, _COMPOSE, _SKY], ids=lambda d: d.get("kind", next(iter(d))))
def test_any_value_of_a_manifest_may_be_of_another_type(document: dict[str, Any]) -> None:
    """It is read without it, or refused in a line."""
    assert manifest([document]).pods.command
    for other in changed(document):
        if is_manifest([other]):
            with suppress(InputError):
                manifest([other])
