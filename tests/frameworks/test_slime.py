"""slime's scripts: Megatron's flags under Ray, with the actor's ranks and micro-batches that tokens fill."""

from __future__ import annotations

from pathlib import Path

from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files

_SCRIPT = """
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/small.sh"
ROLLOUT_ARGS=(--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --balance-data)
PERF_ARGS=(--tensor-model-parallel-size 4 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 20480)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" -- python3 train.py \\
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --hf-checkpoint /root/Qwen3-4B ${MODEL_ARGS[@]} \\
   ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]} --sglang-mem-fraction-static 0.7 ${EVAL_ARGS[@]}
"""
_MODEL = 'MODEL_ARGS=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --rotary-base "${BASE:-1000000}")\n'


def _read(tmp_path: Path, text: str) -> Configuration:
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "small.sh").write_text(_MODEL)
    (tmp_path / "run.sh").write_text(text)
    return files.read([tmp_path / "run.sh"])[0]


def test_the_actor_is_read_with_what_slime_sets_itself(tmp_path: Path) -> None:
    c = _read(tmp_path, _SCRIPT)
    x = c.layout
    assert (x.world, x.tp, x.dp, x.zero, x.precision, x.seq) == (16, 4, 4, 1, "bf16", 8192)
    assert (x.micro_batch, x.accumulation, x.global_batch) == (2, 32, 256)
    assert c.model["num_hidden_layers"] == 4  # of the file that lies beside the script
    assert not c.unknown


def test_micro_batches_that_tokens_fill_are_open_without_a_length(tmp_path: Path) -> None:
    c = _read(tmp_path, _SCRIPT.replace("--rollout-max-response-len 8192", "--loss-type sft_loss"))
    assert (c.layout.seq, c.layout.micro_batch, c.layout.global_batch) == (None, None, 256)
    assert not any("generation" in note for note in c.notes)
    fixed = _SCRIPT.replace("--use-dynamic-batch-size --max-tokens-per-gpu 20480", "--global-batch-size 64")
    assert (_read(tmp_path, fixed).layout.micro_batch, _read(tmp_path, fixed).layout.accumulation) == (1, 16)


def test_megatrons_own_program_of_that_name_is_no_slime(tmp_path: Path) -> None:
    c = _read(
        tmp_path,
        "torchrun --nproc_per_node 2 train.py --micro-batch-size 1 --num-layers 4 --hidden-size 64 "
        "--num-attention-heads 4 --tensor-model-parallel-size 2 --seq-length 128",
    )
    assert (c.layout.zero, c.layout.precision, c.layout.seq) == (0, "fp32", 128)
