"""What a block of transformers keeps for its backward pass is what the ledger of the stacks around it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.cost.analytic.option_effects import constants, extended_shape, layout_with_options
from phalanx.cost.ledger.live_bytes import live_bytes
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.rank_layout import layout
from phalanx.planning import lookup
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions

transformers = pytest.importorskip("transformers")
SEQ, SIZES = 48, {
    "vocab_size": 112, "hidden_size": 64, "intermediate_size": 160, "tie_word_embeddings": False,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 80},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
TYPES = {"bf16": ("bfloat16", "float32"), "fp32": ("float32", "float32")}


def _config(model_type: str, layers: int, **sizes: int) -> Any:
    return transformers.AutoConfig.for_model(
        model_type, **SIZES | EXPERTS.get(model_type, {}) | sizes, num_hidden_layers=layers
    )


def kept(config: Any, weights: torch.dtype, autocast: bool, prepare: Callable[[torch.nn.Module], object] = id) -> int:
    """Bytes of the storages that a forward pass saves, without parameters and their copies in 16 bits."""
    model = transformers.AutoModelForCausalLM.from_config(config).to(weights).train()
    prepare(model)
    if config.model_type in EXPERTS:
        model.set_experts_implementation("grouped_mm")
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    shapes = {p.shape for p in model.parameters()} | {p.mT.shape for p in model.parameters() if p.ndim > 1}
    seen: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own and t.shape not in shapes:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        held = model(input_ids=torch.zeros(1, SEQ + 1, dtype=torch.long)[:, :SEQ], use_cache=False)  # noqa: F841
    return sum(seen.values())


CASES: dict[str, tuple[Any, str, torch.dtype, bool]] = {
    "sharded": (3, "bf16", torch.bfloat16, False),  # FSDP gathers weights in 16 bits
    "autocast": (0, "bf16", torch.float32, True),
    "fp32": (0, "fp32", torch.float32, False),
}
"""ZeRO's level, types, weights, and whether products are under autocast, which leaves products of experts in fp32."""


@pytest.mark.parametrize(
    ("model_type", "case"),
    [(m, c) for m in ("llama", "qwen2", "qwen3", *EXPERTS) for c in CASES if (m in EXPERTS) <= (c != "autocast")],
)
def test_a_block_keeps_what_the_ledger_says(model_type: str, case: str, tmp_path: Path) -> None:
    zero, types, weights, autocast = CASES[case]
    three, two = (kept(_config(model_type, layers), weights, autocast) for layers in (3, 2))
    _config(model_type, 2).save_pretrained(tmp_path)
    spec, _ = lookup.model_named(str(tmp_path / "config.json"))
    compute, master = TYPES[types]
    job = Job(2, SEQ, Precision(compute, master=master))  # type: ignore[arg-type]
    size, placed = shape(spec), layout(Strategy(dp=2, zero=zero), job, spec.layers)
    by = constants("accelerate", job, size, AS_RELEASED)
    # Places of tokens are counted as our own router's are.
    assert float(live_bytes(size, placed, by).stored) == pytest.approx(
        three - two, rel=0.01 * (model_type in EXPERTS)
    )


@pytest.mark.parametrize(("targets", "bytes_per_token"), [("linear", 5912), ("qkv", 4440)])
def test_adapters_keep_their_inputs_and_frozen_products_none(
    targets: Any, bytes_per_token: int, tmp_path: Path
) -> None:
    """Measured as above with peft 0.21.2: rank 8 without dropout, weights in bf16 under autocast."""
    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 320, "head_dim": 16}
    transformers.AutoConfig.for_model("llama", **sizes, num_hidden_layers=2).save_pretrained(tmp_path)
    spec, _ = lookup.model_named(str(tmp_path / "config.json"))
    job, options = Job(1, SEQ, Precision("bfloat16")), StackOptions(lora=8, lora_targets=targets)
    size = extended_shape(shape(spec), options)
    placed = layout_with_options(layout(Strategy(), job, spec.layers), options)
    by = constants("accelerate", job, size, options)
    assert float(live_bytes(size, placed, by).stored) == bytes_per_token * SEQ


class _Adapted(torch.nn.Module):
    """A frozen weight with adapters in its own type: y = W x + 2 B (A x)."""

    def __init__(self, weight: torch.nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.weight, dtype = weight, weight.weight.dtype
        self.a = torch.nn.Linear(weight.in_features, rank, bias=False, dtype=dtype)
        self.b = torch.nn.Linear(rank, weight.out_features, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.weight(x) + 2 * self.b(self.a(x))
        return y


NAMES = {"qkv": "qkv", "attention": "qkvo", "linear": ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.mark.parametrize("targets", NAMES)
def test_adapters_in_16_bits_share_their_inputs(targets: Any, tmp_path: Path) -> None:
    """A block keeps a result of a norm, or attention's, once for all adapters that read it, and nothing for frozen
    products alone."""

    def adapt(model: torch.nn.Module) -> None:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name in NAMES[targets]:
                if isinstance(weight := getattr(module, f"{name}_proj", None), torch.nn.Linear):
                    setattr(module, f"{name}_proj", _Adapted(weight))

    wide = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 16}
    three, two = (kept(_config("llama", n, **wide), torch.bfloat16, False, adapt) for n in (3, 2))
    _config("llama", 2, **wide).save_pretrained(tmp_path)
    spec, _ = lookup.model_named(str(tmp_path / "config.json"))
    job, options = Job(1, SEQ, Precision("bfloat16")), StackOptions(lora=8, lora_targets=targets)
    size = extended_shape(shape(spec), options)
    placed = layout_with_options(layout(Strategy(), job, spec.layers), options)
    by = replace(constants("accelerate", job, size, options), wide_adapters=0.0)
    assert float(live_bytes(size, placed, by).stored) == three - two
