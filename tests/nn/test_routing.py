"""Which experts tokens go to: every function against what its paper says, written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.toy_model import model
from torch import Tensor

from phalanx.nn.experts import routing
from phalanx.nn.experts.routing import Losses
from phalanx.observation.parity.parity import first_flip, near_ties
from phalanx.schedule.layers.routing import balanced_choices, expert_capacity
from phalanx.spec.errors import InputError
from phalanx.spec.model.mechanisms import Experts
from phalanx.training.expert_load import OVER, LayerLoad, LoadWatch, summary


@st.composite
def experts(draw: Any) -> Experts:
    groups = draw(st.sampled_from([1, 2, 4]))
    within = draw(st.integers(2, 4))
    top_groups = draw(st.integers(1, groups))
    return Experts(
        groups * within,
        draw(st.integers(1, min(4, top_groups * within))),
        8,
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalized=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2"])),
        z_loss=draw(st.sampled_from([0.0, 0.1])),
    )


def logits(x: Experts, seed: int, tokens: int = 12) -> Tensor:
    return torch.randn(tokens, x.count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(experts(), st.integers(0, 9), st.booleans())
def test_tokens_choose_the_best_of_their_best_groups(x: Experts, seed: int, biased: bool) -> None:
    p = routing.scores(logits(x, seed), x)
    bias = torch.linspace(-0.3, 0.3, x.count, dtype=torch.float64) if biased else None
    chosen = routing.choose(p, x, bias)
    for row, got in zip(p if bias is None else p + bias, chosen, strict=True):
        groups = row.view(x.groups, -1)
        best = groups.max(1).values if x.group_score == "max" else groups.sort(1).values[:, -2:].sum(1)
        kept = set(best.argsort(descending=True)[: x.top_groups].tolist())
        within = x.count // x.groups
        legal = [e for e in range(x.count) if x.groups == 1 or e // within in kept]
        wanted = sorted(legal, key=lambda e: -float(row[e]))[: x.top_k]
        assert sorted(got.tolist()) == sorted(wanted)


@given(experts(), st.integers(0, 9), st.booleans())
def test_gradients_of_weights_and_losses_are_those_of_their_formulas(x: Experts, seed: int, even: bool) -> None:
    z = logits(x, seed).requires_grad_()
    share = torch.rand(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(seed)) if even else None
    p = routing.scores(z.detach(), x)
    chosen = routing.choose(p, x, None)
    g = torch.randn(chosen.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(seed + 1))
    weights = routing.weights(z, p, chosen, x, Losses(share, x.z_loss, 0.5))
    weights.backward(g)
    ours, z.grad = z.grad, None
    q = routing.scores(z, x)
    expected = q.gather(-1, chosen)
    if x.normalized:
        expected = expected / expected.sum(-1, keepdim=True)
    expected = expected * x.scale
    loss = (expected * g).sum() + 0.5 * x.z_loss * z.logsumexp(-1).square().sum()
    if share is not None:
        loss = loss + 0.5 * (share * q / q.sum(-1, keepdim=True)).sum()
    loss.backward()
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, z.grad, rtol=1e-9, atol=1e-12)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), st.integers(0, 9))
def test_the_first_tokens_of_a_sequence_fit(batch: int, seq: int, most: int, seed: int) -> None:
    x = Experts(4, 2, 8)
    chosen = routing.choose(logits(x, seed, batch * seq), x, None).view(batch, seq, 2)
    fits = routing.within_capacity(chosen, x.count, most)
    for sequence, kept in zip(chosen.tolist(), fits.tolist(), strict=True):
        room = [most] * x.count
        for experts, got in zip(sequence, kept, strict=True):
            for e, fit in zip(experts, got, strict=True):
                assert fit == (room[e] > 0)
                room[e] -= fit


def test_experts_take_their_best_tokens_of_each_sequence() -> None:
    p = logits(Experts(4, 2, 8), 0, 10).view(2, 5, 4)
    taken = routing.take_tokens(p, 2)
    assert (taken.sum(1) == 2).all()
    for sequence, of in zip(p, taken, strict=True):
        for e in range(4):
            assert set(of[:, e].nonzero().flatten().tolist()) == set(
                sequence[:, e].argsort(descending=True)[:2].tolist()
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.integers(1, 12), st.integers(0, 9))
def test_of_equal_tokens_experts_take_the_first_however_they_are_rounded(
    dtype: torch.dtype, most: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.randint(0, 4, (2, 12, 3), generator=generator).to(dtype) / 4  # a few values, 0 among them
    eps = torch.finfo(dtype).eps
    rounded = p * (1 + 4 * eps * (2 * torch.rand(p.shape, generator=generator, dtype=dtype) - 1))
    best = p.argsort(dim=1, descending=True, stable=True)[:, :most]
    wanted = torch.zeros_like(p, dtype=torch.bool).scatter_(1, best, True)
    assert torch.equal(routing.take_tokens(p, most), wanted)
    assert torch.equal(routing.take_tokens(rounded, most), wanted)


@pytest.mark.parametrize("capacity", [None, 0.5, 1.0, 1.25])
@pytest.mark.parametrize("tokens", [1, 7, 24])
def test_even_choices_are_as_many_as_counted(tokens: int, capacity: float | None) -> None:
    x = Experts(5, 2, 8, capacity=capacity)
    chosen = routing.even_token_choices(tokens, x, torch.device("cpu"))
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    limit = expert_capacity(x, tokens)
    kept = (
        torch.ones_like(chosen, dtype=torch.bool)
        if limit is None
        else routing.within_capacity(chosen[None], 5, limit)[0]
    )
    assert torch.bincount(chosen[kept], minlength=5).tolist() == balanced_choices(tokens, x)
    by_experts = Experts(5, 2, 8, capacity=capacity, chooser="experts")
    assert routing.even_expert_choices(tokens, by_experts, torch.device("cpu")).sum(0).tolist() == balanced_choices(
        tokens, by_experts
    )


def test_a_flip_is_a_near_tie_where_a_score_hangs_on_little() -> None:
    x = Experts(4, 2, 8)
    p = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.4, 0.25, 0.25 * (1 + 1e-7), 0.1]])
    assert near_ties(p, x, None) == 1
    assert near_ties(p, x, torch.tensor([0.0, 0.1, 0.0, 0.0])) == 0
    truth, ours = LayerLoad(3, (2, 1, 1, 0), 0, 0.0, 0.0), LayerLoad(3, (2, 2, 0, 0), 0, 0.0, 0.0)
    assert "1 choice in block 3" in first_flip([ours], [truth], {3: [(p, None)]}, x)
    assert not first_flip([truth], [truth], {3: [(p, None)]}, x)
    assert not first_flip([ours], [truth], {3: [(p[:1], None)]}, x)  # nothing hangs on little there: an error


def test_a_bad_balance_is_told_with_its_numbers() -> None:
    spec = model(family="mixtral", experts={"count": 4, "top_k": 1, "ffn": 8, "capacity": 1.0, "balance_loss": 0.01})
    busy, well = LayerLoad(1, (60, 4, 0, 0), 32, 0.1, 0.0), LayerLoad(0, (16, 16, 16, 16), 0, 0.1, 0.0)
    watch = LoadWatch(spec)
    told = [watch.step([well, busy]) for _ in range(2 * OVER)]
    assert [bool(line) for line in told] == ([False] * (OVER - 1) + [True]) * 2
    line = told[-1]
    assert "expert 0 of block 1 has 3.8 times the mean load, 2 of 4 are not chosen at all" in line
    assert "25% of all choices were dropped, capacity = 1" in line
    assert "balance_loss = 0.01" in line
    assert not any(LoadWatch(spec).step([well, well]) for _ in range(OVER))
    said = summary([well, busy])
    assert said["expert_busiest"] == 3.75
    assert said["expert_dropped"] == 0.25
    assert said["balance_loss"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("balance", "remedy"),
    [
        ({}, "set balance_loss = 0.01"),
        ({"balance_loss": 0.002}, "raise model.experts.balance_loss = 0.002"),
        ({"balance_bias": 0.001}, "raise model.experts.balance_bias = 0.001"),
    ],
)
def test_a_bad_balance_is_remedied_by_what_balances_it(balance: dict[str, float], remedy: str) -> None:
    watch = LoadWatch(model(family="mixtral", experts={"count": 4, "top_k": 1, "ffn": 8, **balance}))
    *_, line = [watch.step([LayerLoad(0, (60, 4, 0, 0), 0, 0.1, 0.0)]) for _ in range(OVER)]
    assert line.endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"top_k": 9}, "is more than count = 8"),
        ({"groups": 3}, "does not divide count = 8"),
        ({"groups": 4, "top_groups": 5}, "is not between"),
        ({"groups": 8, "top_groups": 2, "group_score": "top2"}, "needs two experts in a group"),
        ({"capacity": 0.0}, "must be positive"),
        ({"balance_loss": -1.0}, "must not be negative"),
        ({"chooser": "experts", "balance_bias": 0.1}, "is for chooser = tokens"),
    ],
)
def test_what_cannot_be_routed_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Experts(**{"count": 8, "top_k": 2, "ffn": 4} | fields)


@pytest.mark.parametrize("residual", ["parallel", "parallel_one_norm"])
def test_experts_beside_attention_are_refused(residual: str) -> None:
    """They come after attention's sum over tp, which a parallel residual takes of both together."""
    with pytest.raises(InputError, match=r"model.residual = .*: experts need a serial residual; use serial"):
        model(residual=residual, family="mixtral", experts={"count": 4, "top_k": 2, "ffn": 8})
