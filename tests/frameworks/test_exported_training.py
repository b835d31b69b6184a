"""A training's own numbers cross frameworks: an export says them in its own flags, or says which it cannot."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

from phalanx.answers.configurations.export import TARGETS, export
from phalanx.answers.plan import plan_of_configuration
from phalanx.answers.question.query import Query
from phalanx.answers.question.read import Reading, read
from phalanx.frameworks.stated_training import StatedTraining
from phalanx.planning.lookup import model_named
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions

_SOURCES = {
    "run.sh": """torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 64
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8
--group-query-attention --swiglu --seq-length 4096 --max-position-embeddings 8192
--vocab-size 128256 --bf16 --normalization RMSNorm
--position-embedding-type rope --rotary-base 500000 --untie-embeddings-and-output-weights --disable-bias-linear
--use-distributed-optimizer --train-samples 320000 --lr 2.5e-4 --min-lr 2.5e-5 --lr-warmup-samples 44800
--lr-decay-style {schedule} --weight-decay 0.05 --adam-beta1 0.91 --adam-beta2 0.951 --clip-grad 0.7 --seed 4321
--save-interval 250 --data-path /data/my_text --tokenizer-model meta/Llama-3 --save /ckpt
""".replace("\n", " "),
    "job.toml": """[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "meta/Llama-3"
[optimizer]
name = "AdamW"
lr = 2.5e-4
beta1 = 0.91
beta2 = 0.951
weight_decay = 0.05
[lr_scheduler]
warmup_steps = 700
decay_type = "{schedule}"
min_lr_factor = 0.1
[training]
local_batch_size = 1
global_batch_size = 64
seq_len = 4096
steps = 5000
max_norm = 0.7
dataset = "c4"
[debug]
seed = 4321
[parallelism]
data_parallel_shard_degree = 8
[checkpoint]
folder = "/ckpt"
interval = 250
""",
    "hf.sh": """torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta/Llama-3 --dataset_name c4 --bf16 True
--per_device_train_batch_size 1 --gradient_accumulation_steps 8 --learning_rate 2.5e-4 --warmup_ratio 0.14
--lr_scheduler_type {schedule} --max_steps 5000 --weight_decay 0.05 --adam_beta1 0.91 --adam_beta2 0.951
--max_grad_norm 0.7 --seed 4321 --save_steps 250 --output_dir /ckpt --fsdp "full_shard auto_wrap" --block_size 4096
""".replace("\n", " "),
    "ds.json": """{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8,
"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.7,
"optimizer": {"type": "AdamW", "params": {"lr": 2.5e-4, "betas": [0.91, 0.951], "eps": 1e-8, "weight_decay": 0.05}},
"scheduler": {"type": "Warmup{deepspeed}LR", "params": {"total_num_steps": 5000, "warmup_num_steps": 700}}}
""",
    "nano.yaml": """checkpoints: {checkpoint_interval: 250, checkpoints_path: /ckpt}
general: {project: p, run: r, seed: 4321}
model:
  dtype: bfloat16
  model_config: {hidden_size: 4096, intermediate_size: 14336, num_attention_heads: 32, num_hidden_layers: 32,
    num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 8192, tie_word_embeddings: false,
    is_llama_config: true, rope_theta: 500000}
optimizer:
  clip_grad: 0.7
  learning_rate_scheduler: {learning_rate: 0.00025, lr_decay_steps: 4300, lr_decay_style: {schedule},
    lr_warmup_steps: 700, lr_warmup_style: linear, min_decay_lr: 0.000025}
  optimizer_factory: {name: adamW, adam_beta1: 0.91, adam_beta2: 0.951, adam_eps: 1.0e-8}
  weight_decay: 0.05
  zero_stage: 1
parallelism: {dp: 8, pp: 1, tp: 1}
tokenizer: {tokenizer_name_or_path: meta/Llama-3}
tokens: {batch_accumulation_per_replica: 8, micro_batch_size: 1, sequence_length: 4096, train_steps: 5000}
""",
    "mpt.yaml": """max_seq_len: 4096
max_duration: 5000ba
global_train_batch_size: 64
device_train_microbatch_size: 1
precision: amp_bf16
seed: 4321
save_interval: 250ba
save_folder: /ckpt
optimizer: {name: decoupled_adamw, lr: 2.5e-4, betas: [0.91, 0.951], eps: 1.0e-8, weight_decay: 0.05}
scheduler: {name: {composer}_with_warmup, t_warmup: 700ba, alpha_f: 0.1}
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 0.7}}
tokenizer: {name: meta/Llama-3}
model: {name: mpt_causal_lm, d_model: 4096, n_heads: 32, n_layers: 32, vocab_size: 128256, max_seq_len: 4096}
fsdp_config: {sharding_strategy: FULL_SHARD}
""",
    "max.yml": """base_config: base.yml
model_name: llama3-8b
per_device_batch_size: 8
max_target_length: 4096
ici_fsdp_parallelism: 8
steps: 5000
learning_rate: 2.5e-4
learning_rate_final_fraction: 0.1
warmup_steps_fraction: 0.14
lr_schedule_type: cosine
adam_b1: 0.91
adam_b2: 0.951
adam_weight_decay: 0.05
gradient_clipping_threshold: 0.7
data_shuffle_seed: 4321
checkpoint_period: 250
tokenizer_path: meta/Llama-3
base_output_directory: /ckpt
dataset_path: gs://data
""",
    "bridge.yaml": """model: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, num_layers: 32,
  hidden_size: 4096, ffn_hidden_size: 14336, num_attention_heads: 32, num_query_groups: 8, seq_length: 4096,
  vocab_size: 128256}
train: {train_iters: 5000, micro_batch_size: 1, global_batch_size: 64}
optimizer: {optimizer: adam, lr: 2.5e-4, min_lr: 2.5e-5, weight_decay: 0.05, adam_beta1: 0.91, adam_beta2: 0.951,
  clip_grad: 0.7}
scheduler: {lr_decay_style: {schedule}, lr_warmup_iters: 700}
ddp: {use_distributed_optimizer: true}
dataset: {random_seed: 4321}
checkpoint: {save: /ckpt, save_interval: 250}
tokenizer: {tokenizer_model: meta/Llama-3}
""",
}
_SAYS = StatedTraining(
    lr=2.5e-4, min_lr=2.5e-5, warmup=700, save_every=250, steps=5000, seed=4321, tokenizer="meta/Llama-3",
    checkpoints="/ckpt",
)  # fmt: skip
_WORDS = {
    "linear": {"schedule": "linear", "deepspeed": "Decay", "composer": "linear_decay"},
    "cosine": {"schedule": "cosine", "deepspeed": "Cosine", "composer": "cosine"},
}
_LACK = {"hf.sh": {"min_lr"}, "ds.json": {"min_lr", "save_every", "seed", "tokenizer", "checkpoints"}}
"""What the files leave out: transformers' and DeepSpeed's linear schedules end at 0."""
_ZERO = {"megatron": 1, "bridge": 1, "nanotron": 1}


@cache
def _planned(name: str, schedule: str) -> tuple[Reading, Plan]:
    """Return a source and its plan, on 8 ranks without shards, which every target has."""
    folder = Path(_HERE, schedule)
    folder.mkdir(exist_ok=True)
    text = _SOURCES[name]
    for word, value in _WORDS[schedule].items():
        text = text.replace(f"{{{word}}}", value)
    (folder / name).write_text(text)
    reading = read(folder / name, None, 8)
    model = None if reading.configuration.spec or reading.configuration.sizes.get("hidden_size") else "llama3-8b"
    seq = None if reading.layout.seq else 4096
    asked = Query(folder / name, cluster="dgx-h100", gpus=8, model=model, seq=seq, strategy="dp=8")
    plan = plan_of_configuration(reading, folder / name, asked)[0]
    return reading, replace(plan, model=model_named("llama3-8b")[0], options=AS_RELEASED)


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global _HERE
    _HERE = str(tmp_path_factory.mktemp("sources"))


_HERE = ""


@pytest.mark.parametrize("schedule", _WORDS)
@pytest.mark.parametrize("name", _SOURCES)
def test_every_dialect_says_the_same_training(name: str, schedule: str) -> None:
    said = _planned(name, schedule)[0].training
    for what, value in asdict(_SAYS).items():
        if what not in (*_LACK.get(name, ()), "data") and value not in (None, ""):
            assert getattr(said, what) == pytest.approx(value), what
    assert said.schedule == ("cosine" if name == "max.yml" else schedule)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("name", _SOURCES)
def test_what_was_read_is_in_what_an_export_reads(name: str, to: str, tmp_path: Path) -> None:
    for schedule in _WORDS:
        source, plan = _planned(name, schedule)
        plan = replace(plan, strategy=Strategy(dp=8, zero=_ZERO.get(to, 3)))
        written = export(plan, to, out=tmp_path / schedule)
        here = read(tmp_path / schedule, None, 8)
        notes, said, back = " ".join(written.program.notes), asdict(source.training), asdict(here.training)
        other = {what for what, value in said.items() if value is not None and back[what] != value}
        other -= {"samples", "counted_by"}
        lost = {"data"} if said["data"] else set()
        lost |= {"schedule"} if to == "maxtext" and said["schedule"] == "linear" else set()
        assert other <= lost, f"{schedule}: {other}"
        assert all(f" {what} {said[what]} (here " in notes for what in other), notes
        job = [r.configuration.job for r in (source, here)]
        assert job[0]["clip"] == job[1]["clip"]
        assert all(job[0]["optimizer"][n] == job[1]["optimizer"][n] for n in ("betas", "weight_decay", "eps"))


def test_a_constant_rate_stays_constant(tmp_path: Path) -> None:
    plan = _planned("run.sh", "linear")[1]
    arguments = {**plan.choices["source"]["arguments"], "lr-decay-style": "constant"}
    constant = replace(plan, choices={**plan.choices, "source": {**plan.choices["source"], "arguments": arguments}})
    for to in TARGETS:
        plan = replace(constant, strategy=Strategy(dp=8, zero=_ZERO.get(to, 3)))
        export(plan, to, out=tmp_path / to)
        assert read(tmp_path / to, None, 8).training.schedule == "constant", to


def test_a_schedule_that_no_key_names_is_the_frameworks_own(tmp_path: Path) -> None:
    """Megatron-LM, transformers and torchtitan decay linearly by themselves, and an export wrote a cosine."""
    (tmp_path / "x.sh").write_text(_SOURCES["hf.sh"].replace("--lr_scheduler_type {schedule} ", ""))
    assert read(tmp_path / "x.sh", None, 8).training.schedule == "linear"


def test_options_that_say_how_and_not_what_stay_behind(tmp_path: Path) -> None:
    """A plan of any file is exported: what no other framework has a setting for is said, not refused."""
    plan = _planned("run.sh", "linear")[1]
    fast = StackOptions(reduce="bfloat16", update="foreach")
    written = export(replace(plan, strategy=Strategy(dp=8, zero=3), options=fast), "torchtitan")
    left = next(note for note in written.program.notes if "has no setting in torchtitan" in note)
    assert all(word in left for word in ("reduce=bfloat16", "update=foreach"))
    with pytest.raises(InputError, match="lora"):
        export(replace(plan, options=StackOptions(lora=16)), "torchtitan")


_NEMO = """trainer: {devices: 8, num_nodes: 1, precision: bf16, max_steps: 1000}
model:
  tensor_model_parallel_size: 2
  micro_batch_size: 1
  global_batch_size: 128
  encoder_seq_length: 4096
  seed: 77
  optim: {name: distributed_fused_adam, lr: 2e-4, sched: {name: CosineAnnealing, warmup_steps: 500, min_lr: 2e-5}}
  tokenizer: {library: huggingface, type: meta/Llama-2}
exp_manager: {checkpoint_callback_params: {every_n_train_steps: 200}}
"""
_TUNE = """model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
batch_size: 2
seed: 77
optimizer: {_component_: torch.optim.AdamW, lr: 2e-4}
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 500
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
dtype: bf16
"""


@pytest.mark.parametrize(("name", "text"), [("nemo.yaml", _NEMO), ("tune.yaml", _TUNE)])
def test_dialects_without_an_export_say_it_too(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    said = read(tmp_path / name, None, 8).training
    assert (said.lr, said.warmup, said.schedule, said.seed) == (2e-4, 500, "cosine", 77)
    if name == "nemo.yaml":
        assert (said.min_lr, said.steps, said.save_every, said.tokenizer) == (2e-5, 1000, 200, "meta/Llama-2")
