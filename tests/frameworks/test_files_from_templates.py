"""Files that a script makes of templates next to it, and files that hydra names by folder and name."""

import json
import tomllib
from pathlib import Path

import pytest

import phalanx
from phalanx.answers.question.read import origins
from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files, recipes
from phalanx.frameworks.reading.source import framework_named
from phalanx.spec.errors import InputError

_TEMPLATE = (
    '{"train_batch_size": GLOBAL, "train_micro_batch_size_per_gpu": MICRO,\n "zero_optimization": {"stage": STAGE}}'
)
_TRAIN = "deepspeed --num_gpus 8 train.py --deepspeed --deepspeed_config ds.json"
_ACTOR = "actor_rollout_ref.actor"
_VERL = (
    f"data.train_batch_size=64 actor_rollout_ref.model.path=Qwen/Qwen3-8B {_ACTOR}.ppo_mini_batch_size=64 "
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=8 trainer.nnodes=1 "
)


def _read(tmp_path: Path, script: str, **others: str) -> Configuration:
    for name, text in {"run.sh": script, **others}.items():
        (tmp_path / name.replace("__", "/").replace("_json", ".json").replace("_yaml", ".yaml")).write_text(text)
    return files.read([tmp_path / "run.sh"])[0]


@pytest.mark.parametrize(
    "made",
    [
        'sed "s/GLOBAL/${G}/" t.json | sed "s/MICRO/${M}/" | sed "s/STAGE/2/" > ds.json',
        'sed -e "s/GLOBAL/$G/" -e "s/MICRO/$M/" -e "s/STAGE/2/g" t.json > ds.json',
        'cat t.json | sed "s#GLOBAL#$G#; s#MICRO#$M#; s#STAGE#2#" > ds.json',
        'sed "s/GLOBAL/$G/;s/MICRO/$M/" < t.json > ds.json\nsed -i "s/STAGE/2/" ds.json',
        'sed "s/GLOBAL/\\$G/;s/MICRO/\\${M}/;s/STAGE/2/" t.json > u.json; export G M; envsubst < u.json > ds.json',
    ],
)
def test_a_file_that_a_script_makes_of_a_template_is_read(tmp_path: Path, made: str) -> None:
    c = _read(tmp_path, f"G=64\nM=4\n{made}\n{_TRAIN}\n", t_json=_TEMPLATE)
    assert (c.layout.global_batch, c.layout.micro_batch, c.layout.zero) == (64, 4, 2)
    assert not c.missing


def test_a_template_with_an_open_value_is_asked_for(tmp_path: Path) -> None:
    script = f'sed "s/GLOBAL/$G/;s/MICRO/4/;s/STAGE/2/" t.json > ds.json\n{_TRAIN}\n'
    with pytest.raises(InputError, match=r"hands ds\.json to DeepSpeed, which is not here; give it too"):
        _read(tmp_path, script, t_json=_TEMPLATE)


def test_a_file_below_the_folder_where_a_script_runs_is_the_one_below_it(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    actor = {"strategy": "megatron", "megatron": {"tensor_model_parallel_size": 4}}
    base = json.dumps({"defaults": ["ppo_megatron_trainer", "_self_"], "actor_rollout_ref": {"actor": actor}})
    line = f"python3 -m verl.trainer.main_ppo --config-path=$D/config --config-name=mine {_VERL}"
    for folder in ("$(pwd)", "`pwd`"):
        c = _read(tmp_path, f'D="{folder}"\n{line}\n', config__mine_yaml=base)
        assert (c.stack, c.layout.tp, c.missing, c.unknown) == ("megatron-core", 4, (), {})


def test_the_base_that_a_file_of_verl_names_says_who_trains(tmp_path: Path) -> None:
    for base, stack in (("ppo_megatron_trainer", "megatron-core"), ("ppo_trainer", "verl")):
        (tmp_path / "mine.yaml").write_text(
            f"hydra:\n  searchpath: [file://verl/trainer/config]\ndefaults: [{base}, _self_]\n"
            "actor_rollout_ref:\n  actor: {ppo_mini_batch_size: 64}\n"
        )
        assert files.read([tmp_path / "mine.yaml"])[0].stack == stack


def test_sequences_divided_by_verl_are_priced(tmp_path: Path) -> None:
    line = f"python3 -m verl.trainer.main_ppo {_VERL} {_ACTOR}.ulysses_sequence_parallel_size=4"
    (tmp_path / "run.sh").write_text(line)
    p = phalanx.predict(str(tmp_path / "run.sh"), cluster="dgx-h100")
    assert (p.strategy.cp, p.strategy.ulysses) == (4, 4)


@pytest.mark.parametrize(
    ("flags", "stays"),
    [
        ("", "weights and moments"),
        (f"{_ACTOR}.fsdp_config.param_offload=True", "moments"),
        (f"{_ACTOR}.fsdp_config.param_offload=True {_ACTOR}.fsdp_config.optimizer_offload=True", ""),
        ("actor_rollout_ref.hybrid_engine=False", ""),
    ],
)
def test_what_stays_on_the_gpus_while_an_engine_generates_is_said(tmp_path: Path, flags: str, stays: str) -> None:
    """verl-project/verl#855: 0.8 of 80 GB for the engine, and fp32 weights and moments of 14B over 8 GPUs."""
    rollout = "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.8"
    notes = _read(tmp_path, f"python3 -m verl.trainer.main_ppo {_VERL} {rollout} {flags}\n").notes
    said = [note for note in notes if "stay on the GPUs while vllm generates" in note]
    assert [f"the actor's {stays} stay" in note and "0.8 of the memory" in note for note in said] == [True] * bool(
        stays
    )


@pytest.mark.parametrize("folder", ["megatron_bridge"])
def test_every_recipe_has_tables(folder: str) -> None:
    text = (Path(recipes.__file__).parents[1] / folder / "recipes.toml").read_text()
    for dialect, rows in tomllib.loads(text).items():
        for name in rows:
            made = recipes.recipe(folder, name, "pretrain")
            assert made is not None, (dialect, name)
    tables = recipes.recipe("megatron_bridge", "qwen3_600m_sft_config")
    assert tables is not None
    assert tables[0]["train"] == {"global_batch_size": 8, "micro_batch_size": 1}


def test_a_table_of_datasets_is_one_key(tmp_path: Path) -> None:
    """As open-instruct's and alignment-handbook's recipes have it: more datasets make no other framework's file."""
    mixed = "".join(f"  org/data-{i}: {i}\n" for i in range(40))
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B\nper_device_train_batch_size: 1\nmax_seq_length: 4096\n"
        f"gradient_accumulation_steps: 2\nlearning_rate: 5.0e-06\nmy_sets:\n{mixed}"
    )
    c = files.read([tmp_path / "a.yaml"])[0]
    assert (c.kind, c.layout.accumulation, list(c.unknown)) == ("hf", 2, ["my_sets"])


_OF_2021 = """#SBATCH <SLURM OPTIONS> --nodes=128 --ntasks-per-node=8
options=" --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288
 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
 --global-batch-size 1536 --vocab-file <PATH TO gpt-vocab.json> --save <your-folder> --tensorboard-dir <DIRECTORY>
 --fp16 --activations-checkpoint-method uniform"
srun -l sh -c "python -u pretrain_gpt.py $@ ${options}"
"""


def test_places_to_fill_in_are_no_redirections_and_flags_tell_the_release(tmp_path: Path) -> None:
    """Megatron-LM's own example of 2021, which reached 140 TFLOP/s a GPU (Narayanan et al. 2021, table 1)."""
    c = _read(tmp_path, _OF_2021.replace("\n --", " --").replace("\n -", " -"))
    assert (c.stack, c.layout.world, c.layout.precision, c.layout.recompute) == (
        "megatron-2021",
        1024,
        "fp16",
        "full",
    )
    assert "megatron-2021" in " ".join(c.notes)
    sharded = _OF_2021.replace("--fp16", "--fp16 --use-distributed-optimizer")
    assert _read(tmp_path, sharded.replace("\n --", " --")).stack == "megatron-core"


def test_a_file_that_is_read_is_no_place_to_fill_in(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --micro-batch-size 1"
    for redirected in ("<in.txt >out.txt", "<in.txt>out.txt", "< in.txt > out.txt", "<in> out"):
        c = _read(tmp_path, f"{line} {redirected} --tensor-model-parallel-size 2\n")
        assert c.layout.tp == 2, redirected


@pytest.mark.parametrize("rank", ["SKYPILOT_NODE_RANK", "SLURM_PROCID", "NODE_RANK", "OMPI_COMM_WORLD_RANK"])
@pytest.mark.parametrize("test", ['[ "$R" == "0" ]', "[[ $R == 0 ]]", "[ ${R} = 0 ]", '[ "$R" -eq 0 ]'])
def test_the_first_process_is_followed(tmp_path: Path, rank: str, test: str) -> None:
    train = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --tensor-model-parallel-size 2"
    script = f"if {test.replace('R', rank)}; then\n  {train}\nelse\n  ray start --address $HEAD:6379\nfi\n"
    assert _read(tmp_path, script).layout.tp == 2


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("verl.trainer.sft_trainer", "verl"),
        ("verl.experimental.fully_async_policy.fully_async_main", "verl"),
        ("verl.experimental.vla.main_ppo", "verl"),
        ("main_ppo_split.py", "verl"),
    ],
)
def test_a_program_is_of_the_framework_that_most_of_its_name_tells(program: str, kind: str) -> None:
    framework = framework_named(program)
    assert framework is not None
    assert framework.reads == kind


def test_degrees_under_verl_are_from_its_keys(tmp_path: Path) -> None:
    megatron = f"{_ACTOR}.megatron.tensor_model_parallel_size=2 {_ACTOR}.megatron.use_distributed_optimizer=False"
    c = _read(tmp_path, f"python3 -m verl.trainer.main_ppo {_VERL} {_ACTOR}.strategy=megatron {megatron}\n")
    origin = origins(c)
    assert origin["tp"] == f"{_ACTOR}.megatron.tensor_model_parallel_size"
    assert origin["zero"] == f"{_ACTOR}.megatron.use_distributed_optimizer"
    assert origin["sp"] == "default of verl"
