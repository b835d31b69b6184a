"""Configurations of other frameworks: trees of real ones, and texts that stress their formats."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from support.fuzz.leaves import words

KINDS = ("torchtitan", "deepspeed", "nanotron", "maxtext", "nemo", "accelerate", "megatron", "hf")
_EACH = 5  # real ones of a kind
_CORPUS = Path(__file__).parents[2] / "frameworks" / "data" / "configurations.json.xz"

SCRIPT = b"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-2}
WORLD_SIZE=$(($GPUS_PER_NODE * $NNODES))
TP=4
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000
)
EXTRA="--bf16 --sequence-parallel"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes=$NNODES \\
    pretrain_gpt.py "${MODEL_ARGS[@]}" $EXTRA --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "Et*15|t*17L" \\
    --micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer > log.txt 2>&1
"""

SERVED = (
    b"""MODEL=meta-llama/Llama-3.1-8B-Instruct
TP=${TP:-2}
CUDA_VISIBLE_DEVICES=0,1 nohup vllm serve $MODEL -tp $TP --max-num-seqs 64 --max-num-batched-tokens 4096 \\
    --gpu-memory-utilization 0.9 --enforce-eager $EXTRA &
vllm bench serve --backend vllm --model $MODEL --dataset-name random --random-input-len 512 --random-output-len 32 \\
    --random-range-ratio 0.5 --num-prompts 40 --request-rate 20 --burstiness 0.7 --max-concurrency 16
""",
    b"""docker run --gpus all lmsysorg/sglang python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B \\
    --tp 2 --dp 2 --mem-fraction-static 0.85 --max-running-requests 64 --chunked-prefill-size 4096
python -m sglang.bench_serving --dataset-name random --random-input 128 --random-output 16 --num-prompt 20
""",
    b"""python prepare_dataset.py token-norm-dist --num-requests 30 --input-mean 128 --output-mean 16 --input-stdev 4
trtllm-bench --model meta-llama/Llama-3.1-8B throughput --dataset data.txt --tp 1 --concurrency 8
""",
    b"""trtllm-serve meta-llama/Llama-3.1-8B --tp_size 2 --max_batch_size 32 --max_num_tokens 2048 &
genai-perf profile -m meta-llama/Llama-3.1-8B --concurrency 4 --synthetic-input-tokens-mean 200 \\
    --synthetic-input-tokens-stddev 20 --output-tokens-mean 20 --request-count 20 -- -v
""",
)

YAML = b"""compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config: &fsdp
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: false
parallelism_config:
  parallelism_config_dp_shard_size: 8
  parallelism_config_tp_size: 2
"""

PYTHON = b"""from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        parallelism=ParallelismConfig(data_parallel_shard_degree=8, tensor_parallel_degree=2),
        activation_checkpoint=SelectiveAC.Config(),
    )
"""

BATCH = rb"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=h100:8
#SBATCH --ntasks-per-node=1
: ${TP:=2}
MODE=large
ARGS=(--num-layers 8 --hidden-size 512 --num-attention-heads 8)
ARGS+=(--seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000)
if [[ $MODE == large && -z "$SMALL" ]]; then
  ARGS+=(--micro-batch-size 1 --global-batch-size $((SLURM_NNODES * 8)))
else
  exit 1
fi
case $MODE in small|tiny) TP=1 ;; *) ;; esac
train() { srun bash -c "torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 pretrain_gpt.py $*"; }
for x in 1; do train "${ARGS[@]}" --bf16 --tensor-model-parallel-size $(expr $TP \* 1); done
"""
LINE = (
    rb"CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --num_processes 4 --use_deepspeed --zero_stage 2 train.py "
    rb"--per_device_train_batch_size 2 --gradient_accumulation_steps=4 --bf16 True --max_seq_length 2048 $EXTRA"
)
WORDS = (
    rb"python -m MaxText.train base.yml model_name=llama2-7b ici_fsdp_parallelism=-1 per_device_batch_size=2 "
    rb"max_target_length=2048 remat_policy=full +x=1 ~y"
)
FLAGS = (
    rb"torchrun --nnodes=2 --nproc_per_node=8 -m torchtitan.train --job.config_file t.toml --training.seq_len 2048 "
    rb"--training.local_batch_size=1 --parallelism.tensor_parallel_degree 2"
)
LOG = b"[rank0] using world size: 16\n" + b"".join(
    b"  %s %s %s\n" % (name, b"." * (48 - len(name)), value)
    for name, value in (
        *((b"num_layers", b"8"), (b"hidden_size", b"512"), (b"num_attention_heads", b"8"), (b"bf16", b"True")),
        *((b"seq_length", b"1024"), (b"micro_batch_size", b"1"), (b"global_batch_size", b"64"), (b"load", b"None")),
        *((b"max_position_embeddings", b"1024"), (b"padded_vocab_size", b"32000"), (b"lr", b"1e-4")),
        *((b"tensor_model_parallel_size", b"2"), (b"pipeline_model_parallel_size", b"1")),
    )
)
STARTED = (BATCH, LINE, WORDS, FLAGS, LOG)
"""What people start a training with, and what it prints."""
_CONTAINER = {
    "name": "train",
    "command": ["torchrun", "--nnodes=2", "--nproc_per_node=8"],
    "args": LINE.decode().partition("train.py")[2].split()[:-1],
    "env": [{"name": "A", "value": "1"}],
    "resources": {"limits": {"nvidia.com/gpu": 8}},
}
_POD = {"spec": {"containers": [_CONTAINER | {"args": ["train.py", *_CONTAINER["args"]]}]}}
MANIFESTS = tuple(
    {"apiVersion": "v1", "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    for kind, spec in (
        ("PyTorchJob", {"nprocPerNode": "8", "pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": _POD}}}),
        ("JobSet", {"replicatedJobs": [{"name": "w", "template": {"spec": {"parallelism": 2, "template": _POD}}}]}),
        ("LeaderWorkerSet", {"leaderWorkerTemplate": {"size": 2, "workerTemplate": _POD}}),
        (
            "MPIJob",
            {"mpiReplicaSpecs": {"Launcher": {"template": _POD}, "Worker": {"replicas": 2, "template": _POD}}},
        ),
        ("TrainJob", {"trainer": {"numNodes": 2, "command": ["bash", "-c", "torchrun train.py --bf16 True"]}}),
        ("RayJob", {"entrypoint": LINE.decode(), "rayClusterSpec": {"workerGroupSpecs": [{"template": _POD}]}}),
    )
)

_HOSTILE_PYTHON = (
    b"def a() -> Trainer.Config:\n    c = Trainer.Config(x=1)\n    c.c = c\n    c.d = c\n    return c\n",
    b"def f0():\n    return [1] \n"
    + b"".join(b"def f%d():\n    return [%s]\n" % (i, b",".join([b"f%d()" % (i - 1)] * 9)) for i in range(1, 12))
    + b"def a() -> Trainer.Config:\n    return Trainer.Config(x=f11())\n",
    b"def a() -> Trainer.Config:\n    b = [1]\n"
    + b"".join(b"    b = [%s]\n" % b",".join([b"b"] * 9) for _ in range(12))
    + b"    return Trainer.Config(training=TrainingConfig(steps=b))\n",
    b"def a() -> Trainer.Config:\n    return a()\n",
    b"def a() -> Trainer.Config:\n    return Trainer.Config(training=TrainingConfig(steps=0x" + b"f" * 5000 + b"))\n",
    b"def a() -> Trainer.Config:\n    return Trainer.Config(training=TrainingConfig(steps=b'x', y=1j, z=...))\n",
    b"x = " + b"(" * 5000 + b"1" + b")" * 5000 + b"\n",
    b"x = " + b"-" * 50_000 + b"1\n",
    b"x = '\\d'\n",
    b"__import__('os').system('touch ran')\n",
)
_HOSTILE_YAML = (
    b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (n, n, b",".join([b"*%c" % (n - 1)] * 9)) for n in range(ord("b"), ord("j"))),
    b"a: &a [*a]\n",
    b"m: &m {x: 1}\n"
    + b"".join(
        b"n%d: &n%d {<<: [%s]}\n" % (i, i, b",".join([b"*m" if not i else b"*n%d" % (i - 1)] * 9)) for i in range(9)
    ),
    b"x: !!python/object/apply:os.system ['true']\n",
    b"x: !!timestamp no\n",
    b"x: !!int ''\n",
    b"x: !!float ''\n",
    b"? [a, b]\n: 1\n",
    b"x: 2024-99-99\n",
    b"x: 1:30:99\n",
    b"1: 2\nnull: 3\n2024-01-01: 4\n",
    b"x: 0x" + b"f" * 5000 + b"\n",
    b"<<: 3\n",
    b"--- a\n--- b\n",
)
_HOSTILE_SHELL = (
    b"A=xxxxxxxxxx\n" + b"A=$A$A\n" * 40,
    b"A=(x x)\n" + b'A+=("${A[@]}")\n' * 40,
    b"X=$(( " + b"(" * 150 + b"1" + b")" * 150 + b" ))\n",
    b"X=${A:-" * 2000 + b"\n",
    b'X="' + b"$(" * 3000 + b"\n",
    b"X=$((9**9**9))\n",
    b"torchrun x.py --num-layers \xc2\xb2\n",
    b"torchrun x.py --num-layers " + b"9" * 5000 + b"\n",
    b"torchrun x.py --tensor-model-parallel-size 0 --micro-batch-size -1\n",
    b"torchrun x.py --pipeline-model-parallel-layout 'E(t|)*99999999999L'\n",
    b"torchrun x.py --pipeline-model-parallel-layout 'E((t*99999)*99999)L'\n",
    b"torchrun x.py --\x1b[31m 1 --[/red] 2\n",
)


@cache
def _corpus() -> dict[str, list[Any]]:
    rows = json.loads(lzma.decompress(_CORPUS.read_bytes()))["configurations"]
    result = {}
    for kind in KINDS:
        own = [row["config"] for row in rows if row["kind"] == kind]
        result[kind] = own[:: max(1, len(own) // _EACH)][:_EACH]
    return result


def trees(kind: str) -> st.SearchStrategy[Any]:
    """Real configurations of a framework."""
    return st.sampled_from(_corpus()[kind])


def hostile(content: bytes) -> st.SearchStrategy[bytes]:
    """Put lines that stress YAML or a shell before or behind a text."""
    lines = st.sampled_from({YAML: _HOSTILE_YAML, PYTHON: _HOSTILE_PYTHON}.get(content, _HOSTILE_SHELL))
    named = words().map(lambda w: f"{w.strip()}: {w}\n".encode("utf-8", "replace"))
    return (lines | lines | named).flatmap(lambda line: st.sampled_from((content + line, line + content, line)))
