"""Configurations of other frameworks, read: what follows, and an account of every key."""

import json

import pytest

from phalanx.formats.configuration.reading import Configuration
from phalanx.formats.configuration.shell import Script, flags, launched
from phalanx.formats.deepspeed.read import batches
from phalanx.formats.reader import READERS, load, read
from phalanx.spec.errors import InputError

SCRIPT = r"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${NNODES:-4}
WORLD=$(($GPUS_PER_NODE*$NNODES))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES  # a comment
    --master_addr $(touch /tmp/never)
)
MODEL="--num-layers 32 \
 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096"
TP=4
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    $MODEL --tensor-model-parallel-size $TP --sequence-parallel --pipeline-model-parallel-size 4 \
    --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 --global-batch-size $((WORLD * 4)) --bf16 \
    --use-distributed-optimizer --tensor-model-paralel-size 2 --data-path "$DATA" 2>&1 | tee log
"""


def test_a_launch_script_gives_what_validate_args_derives(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    r = read(path)
    f = r.facts
    assert (f.world, f.tp, f.pp, f.dp, f.virtual) == (32, 4, 4, 2, 2)
    assert (f.micro_batch, f.grad_accum, f.global_batch, f.zero, f.precision) == (1, 64, 128, 1, "bf16")
    assert [(u.key, u.nearest) for u in r.unknown if "paralel_" in u.key] == [
        ("tensor_model_paralel_size", "tensor_model_parallel_size")
    ]
    keys = set(r.understood) | set(r.without_effect) | {u.key for u in r.unknown}
    assert keys == {name.replace("-", "_") for name in load(path).settings}


def test_words_of_a_script():
    s = Script('A=1\nB=(x "y z" $A)\nB+=(w)\nrun --a "${B[@]}" --b ${C:-7} --c \'$A\' --d $E')
    assert s.commands == [["run", "--a", "x", "y z", "1", "w", "--b", "7", "--c", "$A", "--d", "\0"]]
    assert flags(["--x=3", "--y", "1", "2", "--z"]) == {"x": 3, "y": [1, 2], "z": True}
    launch, arguments, program = launched(Script("torchrun --nnodes 2 t.py --lr 1e-3"))
    assert (launch, arguments, program) == ({"nnodes": 2}, {"lr": 1e-3}, "t.py")


@pytest.mark.parametrize(
    ("arguments", "virtual"),
    [
        ({"num-layers": 24, "pipeline-model-parallel-size": 4, "num-layers-per-virtual-pipeline-stage": 3}, 2),
        ({"pipeline-model-parallel-size": 4, "num-virtual-stages-per-pipeline-rank": 5}, 5),
        ({"pipeline-model-parallel-size": 2, "pipeline-model-parallel-layout": "Et|(tt|)*2ttL"}, 2),
        ({"num-layers": 24, "pipeline-model-parallel-size": 4}, 1),
    ],
)
def test_virtual_stages_as_megatron_derives_them(arguments, virtual):
    assert READERS["megatron"](Configuration("megatron", arguments)).facts.virtual == virtual


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        ((32, 4, None), (32, 4, 2)),
        ((32, None, None), (32, 8, 1)),
        ((None, 4, 3), (48, 4, 3)),
        ((32, 4, 2), (32, 4, 2)),
    ],
)
def test_batches_are_completed_as_deepspeed_does(given, completed):
    assert batches(*given, dp=4) == completed


def test_a_misspelt_section_of_deepspeed_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimisation": {"stage": 3}}))
    r = read(path, gpus=8)
    assert r.facts.zero == 0
    assert [(u.key, u.nearest) for u in r.unknown] == [("zero_optimisation.stage", "zero_optimization.stage")]


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        (
            {"tensor-model-parallel-size": 4, "pipeline-model-parallel-size": 2},
            12,
            "is not divisible by tp x pp x cp = 4 x 2 x 1 = 8",
        ),
        (
            {"num-virtual-stages-per-pipeline-rank": 2, "pipeline-model-parallel-layout": "EtL"},
            None,
            "does not go with --pipeline-model-parallel-layout",
        ),
    ],
)
def test_what_megatron_refuses_is_one_line(settings, world, message):
    with pytest.raises(InputError, match=message):
        READERS["megatron"](Configuration("megatron", settings, world=world))


def test_batches_that_do_not_multiply_out():
    with pytest.raises(InputError, match="is not micro batch x accumulation x dp = 3 x 2 x 4"):
        batches(32, 3, None, dp=4)
