"""Adapters over a frozen base, as several programs configure them, and what they save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from support.in_process_cli import error_of, json_of, text_of
from support.sizes import drawn

from phalanx import predict
from phalanx.cost.analytic.option_effects import BASE_BYTES
from phalanx.frameworks.reading import files
from phalanx.spec.errors import InputError

HF = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": True, "max_seq_length": 1024}
QWEN = "Qwen/Qwen2.5-7B-Instruct"
AXOLOTL = {
    "base_model": "x",
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "bf16": True,
    "sequence_len": 1024,
}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (HF | {"finetuning_type": "lora", "lora_rank": 16, "lora_target": "all"}, {"lora": 16}),
        (HF | {"finetuning_type": "lora", "lora_target": "q_proj,v_proj"}, {"lora": 8, "lora_targets": "qkv"}),
        (HF | {"finetuning_type": "lora", "quantization_bit": 4}, {"lora": 8, "base": "nf4-double"}),
        (HF | {"finetuning_type": "full"}, {}),
        (HF | {"use_peft": True, "lora_r": 32, "load_in_4bit": True}, {"lora": 32, "base": "nf4"}),
        (HF | {"use_peft": True, "lora_target_modules": ["q_proj", "up_proj"]}, {"lora": 8}),
        (HF | {"use_peft": True, "load_in_8bit": True}, {"lora": 8, "base": "int8"}),
        (HF | {"use_peft": False, "lora_r": 32}, {}),
        (HF | {"lora_enable": False, "lora_r": 128}, {}),
        (HF | {"lora_r": 64}, {"lora": 64}),
        (AXOLOTL | {"adapter": "qlora", "lora_r": 32, "lora_target_linear": 1}, {"lora": 32, "base": "nf4-double"}),
        (AXOLOTL | {"adapter": "lora", "lora_r": 8, "load_in_8bit": True}, {"lora": 8, "base": "int8"}),
        (AXOLOTL | {"adapter": "lora", "lora_r": 8, "gptq": True}, {"lora": 8, "base": "gptq"}),
        (HF | {"use_peft": True, "model_name_or_path": f"{QWEN}-GPTQ-Int4"}, {"lora": 8, "base": "gptq"}),
        (HF | {"use_peft": True, "q_lora": True, "model_name_or_path": f"{QWEN}-Int4"}, {"lora": 8, "base": "gptq"}),
        (HF | {"use_peft": True, "model_name_or_path": f"{QWEN}-GPTQ-Int8"}, {"lora": 8}),
        (AXOLOTL, {}),
    ],
)  # fmt: skip
def test_adapters_are_read_in_the_words_of_each_program(config: dict[str, Any], options: dict[str, Any]) -> None:
    kind = "hf" if "per_device_train_batch_size" in config else "accelerate"
    found = files.READERS[kind](config, 8)
    kept = ("lora", "lora_targets", "base")
    assert {name: value for name, value in found.options.items() if name in kept} == options
    assert found.unpriced == ""


@pytest.mark.parametrize(
    ("builder", "more", "options"),
    [
        ("llama3_8b", {}, {}),
        ("lora_llama3_8b", {}, {"lora": 8, "lora_targets": "attention"}),
        ("lora_llama3_8b", {"quantize_base": True}, {"lora": 8, "lora_targets": "attention", "base": "nf4-double"}),
        ("qlora_llama3_8b", {"apply_lora_to_mlp": True}, {"lora": 8, "lora_targets": "linear", "base": "nf4-double"}),
        ("lora_llama3_8b", {"lora_rank": 64}, {"lora": 64, "lora_targets": "attention"}),
    ],
)
def test_adapters_of_torchtune_are_those_of_its_builder_and_its_keys(
    builder: str, more: dict[str, Any], options: dict[str, Any]
) -> None:
    model = {"_component_": f"torchtune.models.llama3.{builder}", **more}
    found = files.READERS["torchtune"]({"model": model, "batch_size": 1}, 8)
    assert {n: v for n, v in found.options.items() if n in ("lora", "lora_targets", "base")} == options


@pytest.mark.parametrize(
    ("loss", "compiled", "option"),
    [
        ("LinearCrossEntropyLoss", False, "linear"),
        ("CEWithChunkedOutputLoss", True, "fused"),
        ("CEWithChunkedOutputLoss", False, None),
        ("ForwardKLWithChunkedOutputLoss", True, None),
    ],
)
def test_the_loss_of_torchtune_keeps_what_its_chunks_need(loss: str, compiled: bool, option: str | None) -> None:
    """Chunks of logits stay in 16 bits if the cast to fp32 is compiled with the loss."""
    config = {"loss": {"_component_": f"torchtune.modules.loss.{loss}"}, "compile": compiled, "batch_size": 1}
    assert files.READERS["torchtune"](config, 1).options.get("cross_entropy") == option


def test_what_has_no_price_is_not_priced(tmp_path: Path) -> None:
    asked = ("--gpus", "1", "--cluster", "pcie-rtx4090", "--model", "llama3-8b")
    for more, said in (
        ({"finetuning_type": "freeze"}, "freeze trains another part"),
        ({"load_in_4bit": True}, "without adapters"),
    ):
        (tmp_path / "c.json").write_text(json.dumps(HF | more))
        assert said in error_of(tmp_path, "predict", "c.json", *asked)


def test_llama_factory_recomputes_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    lora = HF | {"finetuning_type": "lora"}
    assert files.READERS["hf"](lora, 1).layout.recompute == "full"
    assert files.READERS["hf"](lora | {"disable_gradient_checkpointing": True}, 1).layout.recompute is None
    assert files.READERS["hf"](HF, 1).layout.recompute is None


def test_an_8b_with_adapters_fits_a_card_of_24_gb(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(HF | {"finetuning_type": "lora", "lora_rank": 8, "cutoff_len": 1024}))
    asked = ("--gpus", "1", "--cluster", "pcie-rtx4090", "--model", "llama3-8b", "--json")
    memory = [json_of(tmp_path, "predict", "c.json", *asked)["memory_bytes"]]
    for bits in (8, 4):
        (tmp_path / "c.json").write_text(
            json.dumps(HF | {"finetuning_type": "lora", "lora_rank": 8, "quantization_bit": bits})
        )
        memory.append(json_of(tmp_path, "predict", "c.json", *asked)["memory_bytes"])
    assert 16e9 < memory[0] < 20e9
    assert memory == sorted(memory, reverse=True)


@drawn(
    20,
    72,
    st.sampled_from([4, 16, 64]),
    st.sampled_from(["qkv", "attention", "linear"]),
    st.sampled_from(
        sorted(BASE_BYTES.keys() - {"gptq", "float8"})
    ),  # 16-bit weights wait for gradients; products in 8
    st.sampled_from(["dp=8", "dp=8,zero=3", "tp=2,dp=4,zero=3"]),
)
def test_less_is_trained_with_less(rank: int, targets: str, base: str, strategy: str) -> None:
    question: dict[str, Any] = dict(
        model="llama3-8b", cluster="dgx-h100", gpus=8, batch=16, seq=2048, stack="accelerate"
    )
    question["strategy"] = strategy
    whole = predict(**question)
    line = f"lora={rank},lora_targets={targets}"
    some, more = (predict(**question, options=f"lora={r},lora_targets={targets}") for r in (rank, 2 * rank))
    quantised = predict(**question, options=f"{line},base={base}")
    assert quantised.memory_bytes <= some.memory_bytes <= more.memory_bytes < whole.memory_bytes
    # Launches apart: adapters have more kernels, and a short micro-batch waits for them.
    of_whole, of_some, of_more, of_quantised = (
        p.step_time_s - p.terms_s.get("launch", 0.0) for p in (whole, some, more, quantised)
    )
    assert of_some <= of_more < of_whole
    if "zero" not in strategy:  # weights are made 16-bit ones, but where they are sharded fewer bytes are gathered
        assert (of_some < of_quantised) == (base != "auto")
    assert some.model_flops is not None
    assert whole.model_flops is not None
    assert 2 / 3 * whole.model_flops <= some.model_flops < whole.model_flops


@pytest.mark.parametrize(("strategy", "shards"), [("dp=8,zero=2", 1), ("dp=8,zero=3", 8), ("dp=8", 1)])
def test_a_reference_takes_a_forward_pass_and_a_copy_its_weights(strategy: str, shards: int) -> None:
    question: dict[str, Any] = dict(model="llama3-8b", cluster="dgx-h100", gpus=8, batch=16, seq=8192)
    question |= {"stack": "deepspeed", "strategy": f"{strategy},recompute=full"}
    plain, copied = (predict(**question, options=options) for options in ("", "reference=copy"))
    weights = 2 * 8_030_261_248 / shards
    assert copied.memory_bytes - plain.memory_bytes == pytest.approx(weights, rel=0.06)
    # Full recomputation repeats the blocks' forward pass; the reference has the head's too.
    again = plain.terms_s["recompute"]
    assert again < copied.terms_s["reference"] < 1.2 * again
    assert (copied.terms_s["dp"] > plain.terms_s["dp"]) == (shards > 1)
    adapted, scored = (predict(**question, options=f"lora=8{more}") for more in ("", ",reference=base"))
    assert scored.memory_bytes == adapted.memory_bytes
    assert scored.step_time_s > 1.2 * adapted.step_time_s


def test_frozen_weights_that_are_sharded_are_gathered_as_they_are_stored() -> None:
    question: dict[str, Any] = dict(
        model="llama3-8b", cluster="pcie-rtx4090", gpus=8, batch=8, seq=64, stack="accelerate"
    )
    whole, sharded, quantised, away = (
        predict(**question, strategy=strategy, options=f"lora=8{more}")
        for strategy, more in (
            ("dp=8", ""),
            ("dp=8,zero=3", ""),
            ("dp=8,zero=3", ",base=nf4"),
            ("dp=8,zero=3", ",parameter_offload=1"),
        )
    )
    full = predict(**question, strategy="dp=8,zero=3")
    assert whole.terms_s["dp"] == 0 < quantised.terms_s["dp"] < sharded.terms_s["dp"] / 2 < full.terms_s["dp"] / 2
    assert away.memory_bytes < sharded.memory_bytes - 1.5e9 < whole.memory_bytes - 1.5e9
    assert quantised.memory_bytes < sharded.memory_bytes - 1.5e9


@pytest.mark.parametrize(
    ("strategy", "options", "each"),
    [
        ("dp=8", "", 18),
        ("dp=8,zero=1", "", 2 + 4 + 12 / 8),
        ("dp=8,zero=3", "", 18 / 8),
        ("dp=8,zero=1", "optimizer_offload=1", 2 + 4),
        ("dp=8,zero=3", "optimizer_offload=1,parameter_offload=1", 0),
    ],
)
def test_adapters_are_sharded_and_offloaded_as_a_whole_model_is(strategy: str, options: str, each: float) -> None:
    """By the parameters between ranks 128 and 256 on every product of an 8B."""
    question: dict[str, Any] = dict(model="llama3-8b", cluster="dgx-h100", gpus=8, batch=8, seq=64, stack="deepspeed")
    state = [
        predict(**question, strategy=strategy, options=f"lora={rank},{options}".rstrip(",")).memory_terms["state"]
        for rank in (256, 128)
    ]
    parameters = 32 * 128 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert state[0] - state[1] == pytest.approx(each * parameters, rel=1e-6, abs=1)


def test_experts_without_adapters_are_said(tmp_path: Path) -> None:
    """With one on each, 48 layers of 128 experts have 8 x 3 (2048 + 768) parameters each, 18 bytes of state each."""
    (tmp_path / "c.json").write_text(json.dumps(HF | {"use_peft": True, "lora_r": 8}))
    asked = ("--gpus", "1", "--cluster", "dgx-h100", "--model")
    more = 18 * 48 * 128 * 8 * 3 * (2048 + 768) / 2**30
    assert f"memory by at most {more:.1f} GiB more" in text_of(tmp_path, "predict", "c.json", *asked, "qwen3-30b-a3b")
    assert "GiB more" not in text_of(tmp_path, "predict", "c.json", *asked, "llama3-8b")


def test_a_stack_without_quantised_bases_refuses_them() -> None:
    with pytest.raises(InputError, match="does not have it"):
        predict(
            model="llama3-8b",
            cluster="dgx-h100",
            gpus=8,
            batch=16,
            seq=2048,
            strategy="dp=8",
            options="lora=8,base=nf4",
        )


@pytest.mark.parametrize(("config", "key"), [(HF, "optim"), (AXOLOTL, "optimizer")])
def test_an_optimizer_that_no_file_names_is_said_to_be_assumed(config: dict[str, Any], key: str) -> None:
    """It decides whether a tight card holds the update."""

    def read(**more: str) -> Any:
        return files.READERS["hf" if config is HF else "accelerate"](config | more, 8)

    said = "no optimizer is named"
    assert any(said in note for note in read().notes)
    assert read().options["update"] == "foreach"
    for named, update in (("adamw_torch", "foreach"), ("adamw_torch_fused", None)):
        found = read(**{key: named})
        assert not any(said in note for note in found.notes)
        assert found.options.get("update") == update
    assert not any(
        said in note for note in read(**{"adapter" if config is AXOLOTL else "finetuning_type": "lora"}).notes
    )


@pytest.mark.parametrize("named", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"])
@pytest.mark.parametrize("adapter", ["", "lora", "qlora"])
def test_an_optimizer_in_8_bits_keeps_moments_of_8_bits(named: str, adapter: str, tmp_path: Path) -> None:
    for key, config, tuning in (("optim", HF, "finetuning_type"), ("optimizer", AXOLOTL, "adapter")):
        kind = "hf" if config is HF else "accelerate"
        kept = dict(config | {key: named} | ({tuning: adapter} if adapter else {}))
        options = files.READERS[kind](kept, 8).options
        assert (options.get("first_moment"), options.get("second_moment")) == ("float8", "float8")
    (tmp_path / "a.json").write_text(json.dumps(kept))
    asked = "--model llama3-8b --cluster dgx-h100 --gpus 1 --strategy dp=1"
    state = "".join(text_of(tmp_path, f"predict a.json {asked}").split("state, bytes a parameter")[1].split())
    assert ("moments6whole" if adapter else "gradients2,moments2whole") in state  # of adapters with a master of 4


@pytest.mark.parametrize(("kept", "each"), [("bf16", 4), ("pure_bf16", 2)])
def test_roots_of_moments_are_of_their_type(tmp_path: Path, kept: str, each: int) -> None:
    (tmp_path / "a.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-4B\nfinetuning_type: full\nper_device_train_batch_size: 1\n"
        f"cutoff_len: 64\n{kept}: true\n"
    )
    answer = json_of(tmp_path, "predict a.yaml --cluster dgx-h100 --gpus 1 --json")
    assert answer["memory_terms"]["update"] == each * 4_022_468_096


@pytest.mark.parametrize(
    ("key", "dtype", "half"), [("torch_dtype", "float16", "fp16"), ("dtype", "bfloat16", "bf16")]
)
def test_a_model_that_is_loaded_in_a_half_type_computes_in_it(key: str, dtype: str, half: str) -> None:
    read = files.READERS["hf"]
    full = read(HF | {"bf16": None, key: dtype}, 8)
    assert (full.layout.precision, full.job["compute"]) == (half, half)
    assert set(full.job["types"].items()) == {(kept, dtype) for kept in ("reduce", "accumulate", "master")}
    assert any(f"loaded in {dtype}" in note for note in full.notes)
    assert full.understood[key] == "job.precision"
    adapters = read(HF | {"bf16": None, key: dtype, "use_peft": True}, 8)  # which peft makes float32
    assert (adapters.layout.precision, adapters.job.get("types")) == (half, None)
    # A type of its own, a type that says nothing, and DeepSpeed's engine, whose file says it.
    assert read(HF | {"bf16": True, key: dtype}, 8).layout.precision == "bf16"
    assert read(HF | {"bf16": None, key: "auto"}, 8).job["compute"] == "fp32"
    engine = {"args": HF | {"bf16": None, key: dtype}, "deepspeed_json": {"zero_optimization": {"stage": 2}}}
    assert read(engine, 8).job["compute"] == "fp32"


def test_magnitudes_are_read_in_the_words_of_each_program(tmp_path: Path) -> None:
    trl, factory = HF | {"use_peft": True}, HF | {"finetuning_type": "lora"}
    for config, dora in (
        (trl | {"use_dora": True}, "dropout"),
        (trl | {"use_dora": True, "lora_dropout": 0.0}, "on"),
        (trl | {"use_dora": False}, None),
        (factory | {"use_dora": True}, "on"),
        (factory | {"use_dora": True, "lora_dropout": 0.1}, "dropout"),
        (AXOLOTL | {"adapter": "lora", "peft_use_dora": True}, "on"),
        (HF | {"finetuning_type": "full", "use_dora": True}, None),
    ):
        kind = "hf" if "per_device_train_batch_size" in config else "accelerate"
        assert files.READERS[kind](config, 8).options.get("dora") == dora, config
    for builder, more, dora in (("lora", {}, None), ("lora", {"use_dora": True}, "on"), ("qdora", {}, "on")):
        model = {"_component_": f"torchtune.models.llama3.{builder}_llama3_8b", "lora_rank": 8, **more}
        c = files.READERS["torchtune"]({"model": model, "batch_size": 1}, 8)
        assert (c.options.get("dora"), [key for key in c.not_modelled if "dora" in key]) == (dora, [])


@pytest.mark.parametrize("rank", [0, -3, 2.5, "eight", [8]])
def test_a_rank_of_adapters_that_is_no_count_is_no_default(tmp_path: Path, rank: object) -> None:
    (tmp_path / "c.json").write_text(json.dumps(HF | {"finetuning_type": "lora", "lora_rank": rank}))
    with pytest.raises(InputError, match=r"rank of adapters = .* is no count"):
        files.read([tmp_path / "c.json"])
    (tmp_path / "c.json").write_text(json.dumps(HF | {"finetuning_type": "full", "lora_rank": rank}))
    assert "lora" not in files.read([tmp_path / "c.json"])[0].options  # it trains none


_UNSLOTH = """from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Qwen3-14B", max_seq_length=2048, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(
    model, r=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    use_gradient_checkpointing={}, lora_dropout=0,
)
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=data,
    args=SFTConfig(dataset_text_field="text", per_device_train_batch_size=2, gradient_accumulation_steps=4,
        max_steps=30, optim="adamw_8bit"),
)
trainer.train()
"""


@pytest.mark.parametrize(("checkpoints", "blocks"), [('"unsloth"', 40), ("True", 0)])
def test_unsloths_notebook_fits_the_card_that_it_is_for(tmp_path: Path, checkpoints: str, blocks: int) -> None:
    """Its Qwen3-14B runs on a free T4: fp16 by itself, the loss in slices, checkpoints on the host; said to be so."""
    (tmp_path / "train.py").write_text(_UNSLOTH.format(checkpoints))
    p = json_of(tmp_path, "predict train.py --cluster cloud-t4 --gpus 1 --json")
    assert p["question"]["precision"] == "fp16"
    assert p["question"]["options"].get("activation_offload", 0) == blocks
    assert p["question"]["options"]["cross_entropy"] == "linear"
    assert p["question"]["options"]["base"] == "nf4-double"
    assert p["question"]["refused"] == ""
    assert any("unsloth" in caveat["reason"] for caveat in p["question"]["caveats"])
    assert p["fits"] or not blocks
    on_ampere = json_of(tmp_path, "predict train.py --cluster dgx-a100 --gpus 1 --json")
    assert on_ampere["question"]["precision"] == "bf16"


def test_unsloth_recomputes_by_itself(tmp_path: Path) -> None:
    """unslothai/unsloth issue 2366 leaves it to get_peft_model, which recomputes by default in every release."""
    found = {}
    for told in ('"unsloth"', "False", ""):
        text = _UNSLOTH.format(told) if told else _UNSLOTH.replace("use_gradient_checkpointing={}, ", "")
        (tmp_path / "train.py").write_text(text)
        p = json_of(tmp_path, "predict train.py --cluster dgx-h100 --gpus 1 --json")
        since = any("since July 2025" in caveat["reason"] for caveat in p["question"]["caveats"])
        found[told] = (p["memory_bytes"], since)
    assert found[""] == (found['"unsloth"'][0], True)
    assert found[""][0] < found["False"][0]
    assert not found['"unsloth"'][1]


def test_llama_factory_under_unsloth_keeps_checkpoints_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: meta-llama/Llama-3.1-8B-Instruct\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
        "lora_target: all\ntemplate: llama3\nuse_unsloth: true\ndataset: x\ncutoff_len: 4096\noutput_dir: o\n"
        "per_device_train_batch_size: 1\ngradient_accumulation_steps: 4\nfp16: true\n"
    )
    p = json_of(tmp_path, "predict sft.yaml --cluster pcie-l40s --gpus 1 --json")
    options = p["question"]["options"]
    assert (options["cross_entropy"], options["activation_offload"]) == ("linear", 32)
    assert not any("use_unsloth" in caveat["keys"] for caveat in p["question"]["caveats"])
