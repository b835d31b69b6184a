"""Files of public threads that pre-train, shortened: of Megatron and its kin, NeMo, GPT-NeoX, MaxText, nanotron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of, json_of, text_of

from phalanx.answers.question.read import read as reading_of
from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.lints import lint
from phalanx.frameworks.reading import files
from phalanx.frameworks.registry import STACKS
from phalanx.spec.strategy.spec import Strategy

_MEGATRON = (
    "--tensor-model-parallel-size 2 --micro-batch-size 1 --num-layers 4 --hidden-size 64 --num-attention-heads 4"
)


def _read(tmp_path: Path, text: str, name: str = "run.sh") -> Configuration:
    (tmp_path / name).write_text(text)
    return files.read([tmp_path / name])[0]


def test_the_ranks_of_a_log_are_read(tmp_path: Path) -> None:
    dump = {"world_size": 16, "tensor_model_parallel_size": 2, "num_layers": 4, "hidden_size": 64, "bf16": True}
    dump |= {"micro_batch_size": 1, "seq_length": 64, "num_attention_heads": 4, "lr": 0.1, "swiglu": True}
    lines = "".join(f"  {name} ............ {value}\n" for name, value in dump.items())
    c = _read(
        tmp_path, f"{lines}training ...\n iteration 1/ 10 | elapsed time per iteration (ms): 9.5 |\n", "log.txt"
    )
    assert (c.layout.world, c.layout.dp, c.unknown) == (16, 8, {})


def test_the_log_of_an_early_megatron_is_read_by_its_own_names(tmp_path: Path) -> None:
    dump = {"world_size": 16, "model_parallel_size": 2, "num_layers": 4, "hidden_size": 64, "fp16": True}
    dump |= {"batch_size": 8, "seq_length": 64, "num_attention_heads": 4, "lr": 0.1, "max_position_embeddings": 64}
    text = "".join(f"  {name} ............ {value}\n" for name, value in dump.items())
    c = _read(tmp_path, f"{text} > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)\n", "log.txt")
    assert (c.layout.tp, c.layout.dp, c.layout.micro_batch, c.not_modelled) == (2, 8, 8, {})
    assert c.spec is not None
    assert c.spec.vocab == 50432


@pytest.mark.parametrize(
    ("flags", "vocab"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50257),
        ("--vocab-file v.json --merge-file m.txt", 50257),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B-Instruct", 128256),
        ("--tokenizer-type GPT2BPETokenizer --vocab-size 100", 100),
    ],
)
def test_a_tokenizer_of_one_vocabulary_says_it(tmp_path: Path, flags: str, vocab: int) -> None:
    c = _read(tmp_path, f"torchrun --nproc_per_node 4 pretrain_gpt.py {_MEGATRON} --seq-length 64 {flags}")
    assert c.spec is not None
    assert c.spec.vocab == vocab
    assert any("as that of its tokenizer" in note for note in c.notes) == (vocab != 100)


def test_maxtext_recomputes_unless_it_is_told_otherwise() -> None:
    stated = {"ici_fsdp_parallelism": 4, "per_device_batch_size": 1}
    assert files.READERS["maxtext"](stated, None).layout.recompute == "full"
    assert files.READERS["maxtext"](stated | {"remat_policy": "minimal"}, None).layout.recompute == "minimal"


def test_the_pipeline_engine_takes_no_zero_above_1(tmp_path: Path) -> None:
    """bigscience-workshop/Megatron-DeepSpeed#407."""
    line = f"torchrun --nproc_per_node 4 pretrain_gpt.py {_MEGATRON} --deepspeed --zero-stage"
    for more, named in (("3", True), ("1", False), ("3 --no-pipeline-parallel", False)):
        (tmp_path / "run.sh").write_text(f"{line} {more}")
        c, config = files.read([tmp_path / "run.sh"])
        assert ("pipelined-zero" in {mistake.name for mistake in lint(config, c)}) is named
    (tmp_path / "run.sh").write_text(f"{line} 3 --seq-length 64 --max-position-embeddings 64 --vocab-size 512")
    said = error_of(tmp_path, "predict run.sh --cluster dgx-a100")
    assert "zero-stage: 3 is refused" in said


def test_nemo_rl_reads_the_files_that_it_inherits_from_and_its_enabled_trainer(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "root.yaml").write_text(
        "policy:\n  model_name: Qwen/Qwen2.5-1.5B\n  train_micro_batch_size: 4\n  train_global_batch_size: 64\n"
        "  max_total_sequence_length: 512\n  precision: bfloat16\n"
        "  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, context_parallel_size: 1,"
        " activation_checkpointing: false, lora_cfg: {enabled: true, dim: 16}}\n"
        "  megatron_cfg: {enabled: false, tensor_model_parallel_size: 4, recompute_granularity: full,"
        " activation_checkpointing: false}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    (tmp_path / "deep" / "middle.yaml").write_text("defaults: ../root.yaml\ncluster: {num_nodes: 2}\n")
    c = _read(tmp_path, "defaults: deep/middle.yaml\npolicy: {train_micro_batch_size: 2}\n", "a.yaml")
    assert (c.layout.world, c.layout.tp, c.layout.zero, c.layout.micro_batch) == (16, 1, 3, 2)
    assert (c.stack, c.layout.recompute, c.options["lora"]) == ("nemo-rl", "none", 16)
    other = "defaults: [root.yaml]\npolicy: {dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true}}\n"
    c = _read(tmp_path, other, "b.yaml")
    assert (c.stack, c.layout.tp, c.layout.recompute) == ("megatron-bridge", 4, "none")
    missing = _read(tmp_path, "defaults: [gone.yaml]\npolicy: {train_micro_batch_size: 2}\n", "c.yaml").missing
    assert missing == ("gone.yaml, its base, is not here: give it too",)
    (tmp_path / "d.yaml").write_text("defaults: d.yaml\npolicy: {train_micro_batch_size: 2}\n")
    assert "include itself" in error_of(tmp_path, "read d.yaml")


def test_keys_of_bridge_without_size_or_precision_lie_over_a_recipe(tmp_path: Path) -> None:
    c = _read(
        tmp_path,
        "model: {tensor_model_parallel_size: 2}\ntrain: {micro_batch_size: 1}\noptimizer: {lr: 0.1}\n",
        "a.yaml",
    )
    assert (c.layout.tp, c.layout.precision, c.layout.zero) == (2, None, None)
    assert any("recipe" in note for note in c.notes)


def test_experts_of_nanotron_are_of_its_model(tmp_path: Path) -> None:
    sizes = "hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4, num_attention_heads: 4, vocab_size: 256"
    text = (
        "parallelism: {dp: 2, tp: 1, pp: 1}\ntokens: {micro_batch_size: 1, sequence_length: 32,"
        " batch_accumulation_per_replica: 1}\nmodel:\n  model_config: {is_qwen2_config: true, "
    )
    experts = ", moe_config: {num_experts: 4, top_k: 1, moe_intermediate_size: 32, enable_shared_expert: true,"
    c = _read(tmp_path, f"{text}{sizes}{experts} layers: [1, 2]}}}}\n", "a.yaml")
    assert c.spec is not None
    assert c.spec.experts is not None
    x = c.spec.experts
    assert (x.count, x.top_k, x.ffn, x.shared_ffn, x.shared_gate, x.dense_layers) == (4, 1, 32, 5632, True, (0, 3))


_NEOX = """{
  # sizes
  "pipe_parallel_size": 4,
  "model_parallel_size": 2,
  "num_layers": 44, "hidden_size": 6144, "num_attention_heads": 64,
  "seq_length": 2048, "max_position_embeddings": 2048,
  "pos_emb": "rotary", "rotary_pct": 0.25, "no_weight_tying": true, "gpt_j_residual": true,
}
"""


_NEOX_REST = """{
  "vocab_file": "./20B_checkpoints/20B_tokenizer.json",
  "zero_optimization": {"stage": 1, "overlap_comm": True,}, # of Python
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 32,
  "checkpoint_activations": true, "fp16": {"enabled": true},
  "train_impl": "dpo",
}
"""


def test_files_of_gpt_neox_are_read_together(tmp_path: Path) -> None:
    (tmp_path / "b.yml").write_text(_NEOX_REST)
    alone = _read(tmp_path, _NEOX, "a.yml")
    assert (alone.layout.tp, alone.layout.pp, alone.layout.zero, alone.layout.precision) == (2, 4, None, None)
    assert alone.spec is None
    c = files.read([tmp_path / "a.yml", tmp_path / "b.yml"], world=96)[0]
    assert (c.layout.dp, c.layout.zero, c.layout.micro_batch, c.layout.accumulation) == (12, 1, 4, 32)
    assert (c.stack, c.layout.recompute, c.options["attention"]) == ("megatron-deepspeed-2022", "full", "unfused")
    assert c.spec is not None
    assert c.spec.residual == "parallel"
    assert c.spec.parameter_count == 20_554_567_680  # Black et al. 2022, table 1
    assert c.not_modelled["train_impl"].changes == ("model",)


def test_a_gate_of_gpt_neox_divides_its_width_by_three(tmp_path: Path) -> None:
    text = _NEOX.replace("}\n", '  "norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 55296,\n}\n')
    text = text.replace(
        "}\n", '  "num_kv_heads": 8, "vocab_file": "gpt2-vocab.json", "use_bias_in_attn_linear": false,\n}\n'
    )
    c = _read(tmp_path, text.replace('"gpt_j_residual": true', '"gpt_j_residual": false'), "a.yml")
    assert c.spec is not None
    assert (c.spec.ffn, c.spec.kv_heads, c.spec.activation, c.spec.norm, c.spec.residual) == (
        18432, 8, "swiglu", "rms", "serial",
    )  # fmt: skip
    assert "experts" in _read(tmp_path, text.replace("{\n", '{\n  "moe_num_experts": 4,\n', 1), "b.yml").open_model


def test_flags_as_keys_of_megatron_s_tests_are_read(tmp_path: Path) -> None:
    text = (
        "ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}\nTEST_TYPE: regular\nMODEL_ARGS:\n"
        "  --tensor-model-parallel-size: 2\n"
        "  --bf16: true\n  --sequence-parallel: false\n  --micro-batch-size: 2\n"
    )
    c = _read(tmp_path, text, "model_config.yaml")
    assert (c.kind, c.layout.tp, c.layout.sp, c.layout.precision, c.layout.micro_batch) == (
        "megatron",
        2,
        False,
        "bf16",
        2,
    )


def test_pairs_of_nemo_rl_are_two_sequences(tmp_path: Path) -> None:
    text = (
        "policy: {train_micro_batch_size: 2, train_global_batch_size: 16, dtensor_cfg: {enabled: true,"
        " tensor_parallel_size: 1}}\ncluster: {gpus_per_node: 8, num_nodes: 1}\n"
    )
    for key, micro, whole in (("dpo", 4, 32), ("rm", 4, 32), ("sft", 2, 16)):
        c = _read(tmp_path, f"{text}{key}: {{max_num_steps: 1}}\n", "a.yaml")
        assert (c.layout.micro_batch, c.layout.global_batch) == (micro, whole)


def test_what_a_dump_says_twice_changes_nothing(tmp_path: Path) -> None:
    """Megatron prints what it derives, and the defaults of parts that a model does not have."""
    stated = {
        "world_size": 16, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 4,
        "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64, "micro_batch_size": 1, "bf16": True,
        "padded_vocab_size": 128,
    }  # fmt: skip
    derived = {
        "data_parallel_size": 4, "transformer_pipeline_model_parallel_size": 2, "encoder_num_layers": 4,
        "encoder_seq_length": 64, "virtual_pipeline_model_parallel_size": None, "decoder_seq_length": None,
        "multi_latent_attention": False, "kv_lora_rank": 32, "mamba_state_dim": 128, "mamba_num_groups": 8,
    }  # fmt: skip

    def dump(values: dict[str, Any]) -> Configuration:
        lines = "".join(f"  {name} ............ {value}\n" for name, value in values.items())
        return _read(tmp_path, lines, "log.txt")

    c = dump(stated | derived)
    assert (c.not_modelled, c.layout) == ({}, dump(stated).layout)
    assert c.layout.dp == 4
    assert {key.removeprefix("args.") for key in dump(stated | derived | {"encoder_num_layers": 8}).not_modelled} == {
        "encoder_num_layers"
    }


def test_what_evaluates_has_a_layout_of_its_own() -> None:
    """nanotron's lighteval and NeMo's test_ds name the keys of a step; none of it is refused for them."""
    nanotron = {"parallelism": {"dp": 4, "tp": 2, "pp": 1}, "tokens": {"micro_batch_size": 3, "sequence_length": 32}}
    plain = files.READERS["nanotron"](nanotron, None)
    aside = files.READERS["nanotron"](nanotron | {"lighteval": {"parallelism": {"dp": 1, "tp": 8, "pp": 1}}}, None)
    assert (aside.layout, aside.not_modelled) == (plain.layout, plain.not_modelled)
    assert "lighteval.parallelism.tp" in aside.without_effect
    model = {"micro_batch_size": 1, "global_batch_size": 8, "tensor_model_parallel_size": 2}
    nemo = {"trainer": {"num_nodes": 1, "devices": 8}, "model": model}
    aside = files.READERS["nemo"](nemo | {"model": model | {"data": {"test_ds": {"micro_batch_size": 4}}}}, None)
    assert (aside.layout.micro_batch, aside.not_modelled) == (1, files.READERS["nemo"](nemo, None).not_modelled)


def test_fine_tuning_of_nemo_has_the_batches_of_its_data() -> None:
    """NeMo 1's model.data.train_ds: what the model's table says of batches is replaced."""
    model = {"micro_batch_size": 4, "global_batch_size": 128, "tensor_model_parallel_size": 2}
    own = {"data": {"train_ds": {"micro_batch_size": 1, "global_batch_size": 64}}}
    c = files.READERS["nemo"]({"trainer": {"num_nodes": 1, "devices": 8}, "model": model | own}, None)
    assert (c.layout.micro_batch, c.layout.global_batch, dict(c.not_modelled)) == (1, 64, {})
    named = {"data": {"train_ds": {name: f"${{model.{name}}}" for name in ("micro_batch_size", "global_batch_size")}}}
    c = files.READERS["nemo"]({"trainer": {"num_nodes": 1, "devices": 8}, "model": model | named}, None)
    assert (c.layout.micro_batch, c.layout.global_batch) == (4, 128)


def test_only_the_trainer_that_runs_the_policy_of_nemo_rl_has_the_layout() -> None:
    """One that is off, the critic of ppo and teachers have none of it; FSDP2's has tp with sp (setup.py:465)."""
    off = {"enabled": False, "tensor_parallel_size": 8}
    megatron = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}
    others = {"cluster": {"gpus_per_node": 8, "num_nodes": 1}, "value": {"train_micro_batch_size": 2}}
    c = files.READERS["nemo"](others | {"policy": {"dtensor_cfg": off, "megatron_cfg": megatron}}, None)
    assert (c.layout.tp, c.layout.micro_batch, dict(c.not_modelled)) == (2, None, {})
    assert {"policy.dtensor_cfg", "value"} <= set(c.without_effect)
    sharded = off | {"enabled": True, "sequence_parallel": True}
    c = files.READERS["nemo"](others | {"policy": {"dtensor_cfg": sharded}}, None)
    assert (c.stack, c.layout.sp, c.layout.zero) == ("nemo-rl", True, 3)
    assert STACKS[c.stack].refusal(Strategy(dp=1, tp=8, sp=True)) is None


def test_a_file_that_only_inherits_is_of_its_base_s_framework(tmp_path: Path) -> None:
    """As NeMo-RL's recipes are; num_layers_in_first_pipeline_stage gives the ends of the pipeline their blocks."""
    megatron = "{enabled: true, pipeline_model_parallel_size: 4, num_layers_in_first_pipeline_stage: 7"
    (tmp_path / "base.yaml").write_text(
        "policy:\n  model_name: moonshotai/Moonlight-16B-A3B\n  train_micro_batch_size: 1\n"
        "  train_global_batch_size: 64\n  max_total_sequence_length: 4096\n  precision: bfloat16\n"
        f"  megatron_cfg: {megatron}, num_layers_in_last_pipeline_stage: 6}}\n"
        "cluster: {gpus_per_node: 8, num_nodes: 2}\n"
    )
    c = _read(tmp_path, "defaults: ./base.yaml\ncluster: {gpus_per_node: 4}\n", "a.yaml")
    assert (c.kind, c.layout.world, c.layout.pp, dict(c.not_modelled)) == ("nemo", 8, 4, {})
    assert (c.options["first_stage_layers"], c.options["last_stage_layers"]) == (7, 6)
    assert not any("pipeline chunks" in caveat.reason for caveat in reading_of([tmp_path / "a.yaml"]).caveats)


def test_experts_of_a_named_model_are_sent_as_the_file_says() -> None:
    """NeMo-RL's files have ep, and the model's own configuration the number of experts."""
    at = {"enabled": True, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    sent = at | {"expert_model_parallel_size": 4, "moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
    policies = ({"policy": {"model_name": "Qwen/Qwen3-30B-A3B", "megatron_cfg": table}} for table in (sent, at))
    whole, dense = (files.READERS["nemo"](policy, 8) for policy in policies)
    assert (whole.options["dispatch"], dict(whole.not_modelled)) == ("deepep", {})
    assert "dispatch" not in dense.options


def test_a_run_of_bigsciences_fork_is_read_whole(tmp_path: Path) -> None:
    """BLOOM-176B: layout, model and sharding of its published run (train/tr11-176B-ml/tr11-176B-ml.slurm)."""
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}')
    line = (
        "torchrun --nproc_per_node 8 --nnodes 48 pretrain_gpt.py --num-layers 70 --hidden-size 14336"
        " --num-attention-heads 112 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2"
        " --global-batch-size 2048 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 {}"
        " --position-embedding-type alibi --embed-layernorm --checkpoint-activations --pad-vocab-size-to 250880"
        " --pp-partition-method 'type:transformer|embedding' --kill-switch-path k --tokenizer-name-or-path t"
        " --deepspeed --deepspeed_config ds.json --zero-stage 0"
    )
    (tmp_path / "run.sh").write_text(line.format("--bf16"))
    c, config = files.read([tmp_path / "run.sh"])
    assert (c.layout.zero, c.layout.layers) == (1, "5/6/6/6/6/6/6/6/6/6/6/5")
    assert c.spec is not None
    assert (c.spec.parameter_count, c.spec.family) == (176_247_271_424, "bloom")
    assert not c.unknown
    assert not {"uneven-stages", "unknown-flag"} & {mistake.name for mistake in lint(config, c)}
    (tmp_path / "run.sh").write_text(line.format("--fp16"))
    assert files.read([tmp_path / "run.sh"])[0].layout.zero == 0  # FP16_Optimizer shards nothing


def test_torchtitan_in_bf16_alone_has_state_of_8_bytes(tmp_path: Path) -> None:
    """Llama 3 70B on 8 B200: the model is made in training.dtype, and positions reach training.seq_len."""
    text = (
        '[job]\ndescription = "x"\n[model]\nname = "llama3"\nflavor = "70B"\n[training]\nlocal_batch_size = 3\n'
        'seq_len = 16384\ndtype = "{}"\nmixed_precision_reduce = "{}"\n'
        '[parallelism]\ndata_parallel_shard_degree = 8\n[activation_checkpoint]\nmode = "full"\n'
        '[compile]\nenable = true\ncomponents = ["model", "loss"]\n'
    )
    (tmp_path / "a.toml").write_text(text.format("bfloat16", "bfloat16"))
    half = json_of(tmp_path, "predict a.toml --cluster dgx-b200 --json")
    (tmp_path / "a.toml").write_text(text.format("float32", "float32"))
    full = json_of(tmp_path, "predict a.toml --cluster dgx-b200 --json")
    assert (half["fits"], full["fits"]) == (True, False)
    saved = full["memory_bytes"] - half["memory_bytes"]
    assert saved == pytest.approx(8 * 70_553_706_496 / 8, rel=0.01)
    (tmp_path / "a.toml").write_text(text.format("float16", "float32"))
    assert "not modelled: training.dtype" in text_of(tmp_path, "read a.toml")


def test_heads_of_megatron_deepspeed_are_exchanged(tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed issue 5305: sequences over 4 ranks keep a quarter of the activations, and its
    FlashAttention no scores."""
    line = (
        "deepspeed --num_gpus 8 pretrain_gpt.py --num-layers 4 --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 16384 --max-position-embeddings 16384 --micro-batch-size 1 --global-batch-size 16 --fp16 "
        "--vocab-size 50257 --deepspeed --deepspeed_config ds.json --zero-stage 2 --no-pipeline-parallel"
    )
    found = {}
    for more in ("", " --use-flash-attn-v2", " --use-flash-attn-v2 --ds-sequence-parallel-size 4"):
        (tmp_path / "run.sh").write_text(line + more)
        found[more] = json_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-a100", "--json")
    eager, fast, spread = found.values()
    strategy = spread["question"]["strategy"]
    assert "dp=2" in strategy
    assert "cp=4,ulysses=4" in strategy
    assert spread["memory_bytes"] < fast["memory_bytes"] < eager["memory_bytes"]
    assert not any("flash" in caveat["keys"] for caveat in spread["question"]["caveats"])
