"""Attention with queries from a latent (Step 3): as the formula has it, and as one process in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import rank_cases
from support.rank_pool import Pool

from phalanx.cost.ledger.flops import forward_per_token
from phalanx.cost.ledger.model_shape import shape
from phalanx.nn.init import create
from phalanx.observation.parity.parity import BOUNDS
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job
from phalanx.spec.model.spec import parameters
from phalanx.spec.strategy.spec import Strategy, parse

STEP3 = {
    **{"model_type": "step3_text", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64},
    **{
        "num_attention_groups": 1,
        "num_hidden_layers": 61,
        "vocab_size": 128815,
        "share_q_dim": 2048,
        "head_dim": 256,
    },
    **{"moe_intermediate_size": 5120, "moe_num_experts": 48, "moe_top_k": 3, "share_expert_dim": 5120},
    "moe_layers_enum": ",".join(map(str, range(4, 60))),
}
SMALL = {
    **{"family": "step3_text", "vocab": 300, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 1, "head_dim": 8},
    **{"ffn": 48, "max_seq": 64, "experts": {"count": 4, "top_k": 2, "ffn": 12}},
    "mixers": [{"name": "few", "kind": "factorised", "heads": 4, "head_dim": 8, "q_rank": 12}],
    "pattern": ["few+mlp", "few+experts"],
}


def test_parameters_and_flops_are_those_published(tmp_path: Path) -> None:
    """316B of the language model, 38B of them active (StepFun 2025, "Step-3 is large yet affordable", table 1)."""
    (tmp_path / "config.json").write_text(json.dumps(STEP3))
    model = make_model({"config": str(tmp_path / "config.json")}, tmp_path)[0]
    assert model.parameter_count == pytest.approx(316e9, rel=5e-3)
    by_hand = 7168 * (2048 + 2 * 256) + 2048 * 64 * 256 + 64 * 256 * 7168
    mlp, experts = 3 * 7168 * 18432, 7168 * 48 + 4 * 3 * 7168 * 5120
    core = 2 * 2 * 64 * 256 * 4096
    blocks, _ = forward_per_token(shape(model), 4096)
    assert float(blocks) == 61 * (2 * by_hand + core) + 2 * (5 * mlp + 56 * experts)


def test_queries_come_from_the_normed_latent() -> None:
    spec = make_model(SMALL, Path())[0]
    a = create(spec, torch.float64, torch.device("cpu")).blocks["0"].attention
    torch.manual_seed(0)
    for p in a.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(2, 6, 64, dtype=torch.float64)
    unturned = (torch.ones(6, 1, 4, dtype=torch.float64), torch.zeros(6, 1, 4, dtype=torch.float64))
    down = a.q_down(x)
    normed = down * (down.square().mean(-1, keepdim=True) + spec.norm_eps).rsqrt() * a.q_norm.weight
    q, k, v = (t.view(2, 6, -1, 8).transpose(1, 2) for t in (a.q_up(normed), a.k(x), a.v(x)))
    out = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
    expected = a.o(out.transpose(1, 2).flatten(2))
    assert torch.allclose(a(x, unturned, None, None, True), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("line", ["tp=2", "tp=2,sp=1", "cp=2", "dp=2,zero=3", "pp=2"])
def test_every_layout_computes_the_same(pool: Pool, line: str) -> None:
    case = (make_model(SMALL, Path())[0], Job(4, 16), Strategy(**parse(line)))
    for found in pool.run(2, rank_cases.examine, *case, "float64", 3)[0]:
        assert found.loss_rel_max <= BOUNDS["float64"], found
        assert found.grad_rel_max <= BOUNDS["float64"], found


@pytest.mark.parametrize("biases", [{"qkv_bias": True}, {"out_bias": True}, {"qkv_bias": True, "out_bias": True}])
def test_a_module_has_the_parameters_of_its_description(biases: dict[str, bool]) -> None:
    """One that the description lacks would keep the random values of its construction."""
    spec = make_model(SMALL | biases, Path())[0]
    module = create(spec, torch.float64, torch.device("cpu"))
    assert {name for name, _ in module.named_parameters()} == {p.fqn for p in parameters(spec)}
