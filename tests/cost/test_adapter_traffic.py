"""What adapters move and launch beside the frozen weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx import predict
from phalanx.cost.analytic.option_effects import extended_shape
from phalanx.cost.ledger.magnitudes import AdaptedWeights
from phalanx.cost.ledger.model_shape import shape
from phalanx.planning.lookup import model_named
from phalanx.spec.strategy.stack_options import StackOptions
from phalanx.validate.prediction_error import compare
from phalanx.validate.records import RUNS_OWN, load

ASKED: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-a100", "gpus": 1, "batch": 8, "seq": 4096}
HIDDEN, KEYS, WIDE = 4096, 1024, 14336


@pytest.mark.parametrize(
    ("targets", "number", "inputs", "shared", "outputs"),
    [
        ("qkv", 3, 3 * HIDDEN, 2 * HIDDEN, HIDDEN + 2 * KEYS),
        ("attention", 4, 4 * HIDDEN, 2 * HIDDEN, 2 * HIDDEN + 2 * KEYS),
        ("linear", 7, 6 * HIDDEN + WIDE, 3 * HIDDEN, 3 * HIDDEN + 2 * KEYS + 2 * WIDE),
    ],
)
def test_sizes_are_of_the_weights_that_have_adapters(
    targets: Any, number: int, inputs: int, shared: int, outputs: int
) -> None:
    sizes = shape(model_named("llama3-8b")[0])
    adapted = extended_shape(sizes, StackOptions(lora=8, lora_targets=targets)).adapted
    assert (adapted.number, adapted.inputs, adapted.shared, adapted.outputs) == (number, inputs, shared, outputs)
    assert extended_shape(sizes, StackOptions()).adapted == AdaptedWeights()


def test_bytes_by_hand() -> None:
    """In fp32 x is cast there and back. In 16 bits A reads x; B A x is written, scaled (2 + 2), added (4 + 2)."""
    both = AdaptedWeights(number=2, inputs=20, shared=10, outputs=7)
    assert both.traffic(1.0) == (14 * 20 + 12 * 7, 22 * 20 + 8 * 7)
    assert both.traffic(0.0) == (2 * 10 + 12 * 7, 10 * 10 + 8 * 7)


def test_adapters_are_a_term_of_their_own() -> None:
    """They were part of recomputation, of which this step has none."""
    strategy = {"strategy": "dp=1", "stack": "accelerate"}
    p = predict(**ASKED, **strategy, options="lora=8")
    assert p.terms_s["recompute"] == 0
    few = predict(**ASKED, **strategy, options="lora=8,lora_targets=qkv").terms_s["adapters"]
    assert 0 < few < p.terms_s["adapters"] / 2
    assert "adapters" not in predict(**ASKED, **strategy).terms_s
    # 4,096 tokens in 8 micro-batches, and 32 blocks; of 2,039 GB/s a share is reached.
    forward, backward = extended_shape(shape(model_named("llama3-8b")[0]), StackOptions(lora=8)).adapted.traffic(1.0)
    least = 8 * 4096 * 32 * (forward + backward) / 2.039e12
    assert least < p.terms_s["adapters"] < 1.5 * least


def test_a_module_that_zero_3_visits_takes_its_host_time() -> None:
    """Of 32 blocks 13 modules run, and 4 more for each of 7 adapters, in 3 passes: 0.25 ms each."""
    asked = ASKED | {"gpus": 8, "seq": 64, "stack": "deepspeed"}
    by = {
        (zero, options): predict(**asked, strategy=f"dp=8,zero={zero},recompute=full", options=options).step_time_s
        for zero in (2, 3)
        for options in ("", "lora=8")
    }
    for options, modules in (("", 13), ("lora=8", 13 + 4 * 7)):
        more = by[3, options] - by[2, options]
        assert more == pytest.approx(32 * 3 * modules * 0.25e-3, rel=0.25)


def test_hooks_of_a_rank_alone_gather_nothing_but_run() -> None:
    """QwenLM/Qwen, README.md: 1.8 billion parameters under ZeRO-3 on one A100. Of 256 tokens a step lasted 1.94 times
    as long as was said."""
    asked = ASKED | {"batch": 1, "seq": 64, "stack": "deepspeed"}
    three, none = (predict(**asked, strategy=f"dp=1,zero={zero},recompute=full").step_time_s for zero in (3, 0))
    assert three - none == pytest.approx(32 * 3 * 13 * 0.125e-3, rel=0.25)
    rows = [row for row in load(RUNS_OWN) if row["table"] == "1.8B full"]
    errors = [pair.predicted / pair.measured - 1 for pair in compare(rows).time]
    assert len(errors) == 6
    assert max(map(abs, errors)) < 0.1


@pytest.mark.parametrize(("model", "more"), [("qwen-7b", 0.183), ("qwen-14b", 0.351)])
def test_a_base_in_nf4_is_looked_up(model: str, more: float, tmp_path: Any) -> None:
    """modelscope/ms-swift, docs/source_en/LLM/Benchmark.md: samples a second of LoRA, 4.31 and 2.60, and of QLoRA,
    2.41 and 1.36. A sixth of the difference was said; two thirds are, as cards of 24 GB show less of it."""
    layers, hidden, ffn = {"qwen-7b": (32, 4096, 11008), "qwen-14b": (40, 5120, 13696)}[model]
    sizes = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn}
    sizes |= {"num_attention_heads": hidden // 128, "vocab_size": 152064, "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    asked = ASKED | {"model": str(tmp_path / "config.json"), "batch": 1, "seq": 2048, "stack": "accelerate"}
    plain, nf4 = (
        predict(**asked, strategy="dp=1,recompute=full", options=f"lora=8,lora_targets=qkv{base}").step_time_s
        for base in ("", ",base=nf4")
    )
    assert nf4 - plain == pytest.approx(more, rel=0.35)


def test_a_base_in_gptq_is_made_16_bits_wide_by_torch_and_kept() -> None:
    """QwenLM/Qwen, README.md: steps of 1.8 to 72 billion parameters in Int4 on an A100, of 2,048 tokens to
    8,192. They were 7 to 58 % longer than said, as if weights were in 16 bits."""
    rows = [row for row in load(RUNS_OWN) if row["peft"].endswith("base gptq") and int(row["seq_len"]) >= 2048]
    errors = [pair.predicted / pair.measured - 1 for pair in compare(rows).time]
    assert len(errors) == 12
    assert max(map(abs, errors)) < 0.1
    # A block's 16-bit weights last until its backward pass: of all blocks, unless they are computed again.
    asked = ASKED | {"batch": 1, "seq": 512, "stack": "accelerate"}
    kept = {
        (base, again): predict(
            **asked, strategy=f"dp=1,recompute={again}", options=f"lora=8,base={base}"
        ).memory_bytes
        for base in ("nf4", "gptq")
        for again in ("none", "full")
    }
    more = {again: kept["gptq", again] - kept["nf4", again] for again in ("none", "full")}
    block = HIDDEN * (2 * HIDDEN + 2 * KEYS + 3 * WIDE)
    assert more["none"] == pytest.approx(32 * 2 * block, rel=0.1)
    assert more["full"] < 2 * block
