"""Mamba-2 and the gated delta rule in chunks against their definition token by token, and against transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.nn.gated_norm import gated_rms_norm, sigmoid_gate
from phalanx.nn.recurrences import chunked
from phalanx.nn.recurrences.channel_delta import ChannelDelta
from phalanx.nn.recurrences.convolution import Filter
from phalanx.nn.recurrences.delta_rule import DeltaRule
from phalanx.nn.recurrences.lightning import Lightning
from phalanx.nn.recurrences.ssd import StateSpace

SPACES = [
    (StateSpace(8, 16, 2, 12, 32), 75, 4, True),
    (StateSpace(4, 8, 1, 6, 16), 16, 3, False),
    (StateSpace(4, 8, 4, 6, 64), 33, 4, True),
    (StateSpace(2, 4, 1, 3, 4), 1, 2, True),
    (StateSpace(2, 4, 2, 3, 2), 9, 5, True),
]
RULES = [
    (DeltaRule(2, 4, 12, 16, 16), 37, 4),
    (DeltaRule(4, 4, 6, 8, 8), 16, 3),
    (DeltaRule(1, 3, 5, 7, 64), 20, 4),
    (DeltaRule(2, 2, 4, 4, 4), 1, 2),
    (DeltaRule(1, 1, 3, 3, 2), 7, 6),
]


KIMI = [
    (ChannelDelta(2, 6, 16), 37, 4),
    (ChannelDelta(1, 5, 64), 20, 4),
    (ChannelDelta(2, 3, 4), 1, 2),
    (ChannelDelta(2, 4, 7), 23, 2),
    (ChannelDelta(3, 8, 2), 9, 3),
]
LIGHTNING = [
    (Lightning(2, 6, 16, 1, 4, 0.7), 37),
    (Lightning(3, 4, 64, 0, 3), 20),
    (Lightning(1, 3, 1, 2, 3, 0.1), 5),
]


def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(shape, dtype=dtype) * scale).requires_grad_()


def of_space(s: StateSpace, seq: int, taps: int, biased: bool) -> dict[str, list[Any]]:
    d, g = s.heads * s.head_dim, s.groups * s.state
    return {
        "parts": [drawn(2, seq, width) for width in (d, g, g, s.heads)],
        "filters": [drawn(width, taps, scale=0.5) for width in (d, g, g)],
        "biases": [drawn(width) if biased else None for width in (d, g, g)],
        "gates": [drawn(s.heads) for _ in range(3)],
    }


def of_rule(s: DeltaRule, seq: int, taps: int) -> dict[str, list[Any]]:
    k, v = s.key_heads * s.key_dim, s.heads * s.value_dim
    return {
        "parts": [drawn(2, seq, width) for width in (k, k, v, s.heads, s.heads)],
        "filters": [drawn(width, taps, scale=0.5) for width in (k, k, v)],
        "gates": [drawn(s.heads) for _ in range(2)],
    }


def of_kimi(s: ChannelDelta, seq: int, taps: int) -> dict[str, list[Any]]:
    w = s.heads * s.head_dim
    return {
        "parts": [drawn(2, seq, width) for width in (w, w, w, s.heads, w)],
        "filters": [drawn(w, taps, scale=0.5) for _ in range(3)],
        "gates": [drawn(w), drawn(s.heads)],
    }


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    taps = weight.shape[1]
    out = F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), weight.unsqueeze(1), bias, groups=len(weight))
    return F.silu(out.transpose(1, 2))


def ssd_by_token(s: StateSpace, parts: Any, filters: Any, biases: Any, gates: Any) -> Tensor:
    x, b, c = (convolved(*given) for given in zip(parts[:3], filters, biases, strict=True))
    dt_bias, a_log, d = gates
    batch, seq = x.shape[:2]
    x = x.view(batch, seq, s.heads, s.head_dim)
    b, c = (t.view(batch, seq, s.groups, -1).repeat_interleave(s.heads // s.groups, 2) for t in (b, c))
    dt = F.softplus(parts[3] + dt_bias)
    state, out = x.new_zeros(batch, s.heads, s.head_dim, s.state), []
    for i in range(seq):
        state = state * (dt[:, i] * -a_log.exp()).exp()[..., None, None]
        state = state + (dt[:, i, :, None] * x[:, i]).unsqueeze(-1) * b[:, i].unsqueeze(-2)
        out.append((state * c[:, i].unsqueeze(-2)).sum(-1) + d.unsqueeze(-1) * x[:, i])
    return torch.stack(out, 1).flatten(2)


def delta_by_token(s: DeltaRule, parts: Any, filters: Any, gates: Any) -> Tensor:
    q, k, v = (convolved(*given) for given in zip(parts[:3], filters, strict=True))
    dt_bias, a_log = gates
    batch, seq = v.shape[:2]
    q, k = (t.view(batch, seq, s.key_heads, -1) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q * 1.0, k))
    q, k = (t.repeat_interleave(s.heads // s.key_heads, 2) for t in (q * s.key_dim**-0.5, k))
    v = v.view(batch, seq, s.heads, -1)
    beta, g = parts[3].sigmoid(), -a_log.exp() * F.softplus(parts[4] + dt_bias)
    state, out = v.new_zeros(batch, s.heads, s.key_dim, s.value_dim), []
    for i in range(seq):
        state = state * g[:, i].exp()[..., None, None]
        seen = (state * k[:, i].unsqueeze(-1)).sum(-2)
        state = state + k[:, i].unsqueeze(-1) * ((v[:, i] - seen) * beta[:, i].unsqueeze(-1)).unsqueeze(-2)
        out.append((state * q[:, i].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1).flatten(2)


def kimi_by_token(s: ChannelDelta, parts: Any, filters: Any, gates: Any) -> Tensor:
    q, k, v = (convolved(*given) for given in zip(parts[:3], filters, strict=True))
    dt_bias, a_log = gates
    batch, seq = v.shape[:2]
    q, k, v, decay = (t.view(batch, seq, s.heads, -1) for t in (q, k, v, parts[4] + dt_bias))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q * 1.0, k))
    q, beta, g = q * s.head_dim**-0.5, parts[3].sigmoid(), -a_log.exp().unsqueeze(-1) * F.softplus(decay)
    state, out = v.new_zeros(batch, s.heads, s.head_dim, s.head_dim), []
    for i in range(seq):
        state = state * g[:, i].exp().unsqueeze(-1)
        seen = (state * k[:, i].unsqueeze(-1)).sum(-2)
        state = state + k[:, i].unsqueeze(-1) * ((v[:, i] - seen) * beta[:, i].unsqueeze(-1)).unsqueeze(-2)
        out.append((state * q[:, i].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1).flatten(2)


def lightning_by_token(s: Lightning, parts: Any) -> Tensor:
    q, k, v = (F.silu(part).unflatten(2, (s.heads, -1)) for part in parts)
    rates = [s.scale * 2 ** (-8 * (s.first + h + 1) / s.all_heads) for h in range(s.heads)]
    kept = torch.tensor(rates, dtype=q.dtype).neg().exp()[:, None, None]
    state, out = q.new_zeros(len(q), s.heads, s.head_dim, s.head_dim), []
    for i in range(q.shape[1]):
        state = state * kept + k[:, i].unsqueeze(-1) * v[:, i].unsqueeze(-2)
        out.append((state * q[:, i].unsqueeze(-1)).sum(-2))
    return torch.stack(out, 1).flatten(2)


def same(ours: Tensor, theirs: Tensor, inputs: Sequence[Tensor | None]) -> None:
    """Results and gradients are equal in fp64."""
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    g, wanted = torch.randn_like(ours), [t for t in inputs if t is not None]
    for a, b in zip(torch.autograd.grad(ours, wanted, g), torch.autograd.grad(theirs, wanted, g), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * float(b.abs().max()) + 1e-12)


@pytest.mark.parametrize(("s", "seq", "taps", "biased"), SPACES)
def test_mamba_in_chunks_is_the_recurrence(s: StateSpace, seq: int, taps: int, biased: bool) -> None:
    torch.manual_seed(0)
    given = of_space(s, seq, taps, biased)
    same(chunked.scan(s, **given), ssd_by_token(s, **given), [t for each in given.values() for t in each])


@pytest.mark.parametrize(("s", "seq", "taps"), RULES)
def test_the_delta_rule_in_chunks_is_the_recurrence(s: DeltaRule, seq: int, taps: int) -> None:
    torch.manual_seed(0)
    given = of_rule(s, seq, taps)
    same(chunked.scan(s, **given), delta_by_token(s, **given), [t for each in given.values() for t in each])


@pytest.mark.parametrize(("s", "seq", "taps"), KIMI)
def test_kimi_delta_attention_in_chunks_is_the_recurrence(s: ChannelDelta, seq: int, taps: int) -> None:
    torch.manual_seed(0)
    given = of_kimi(s, seq, taps)
    same(chunked.scan(s, **given), kimi_by_token(s, **given), [t for each in given.values() for t in each])


@pytest.mark.parametrize(("s", "seq"), LIGHTNING)
def test_lightning_attention_in_chunks_is_the_recurrence(s: Lightning, seq: int) -> None:
    torch.manual_seed(0)
    parts = [drawn(2, seq, s.heads * s.head_dim) for _ in range(3)]
    same(chunked.scan(s, parts), lightning_by_token(s, parts), parts)


def test_decays_of_channels_do_not_overflow() -> None:
    """A chunk over which a channel decays by e^-2000, in fp32."""
    torch.manual_seed(0)
    s = ChannelDelta(2, 8, 64)
    given = of_kimi(s, 64, 2)
    given["gates"][0] = drawn(16, scale=0.0).add(30.0).detach().requires_grad_()
    narrow = {name: [t.detach().float().requires_grad_() for t in each] for name, each in given.items()}
    ours, theirs = chunked.scan(s, **narrow), kimi_by_token(s, **given)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
    assert all(g.isfinite().all() for g in torch.autograd.grad(ours.sum(), narrow["parts"]))


def by_document(lengths: Sequence[Sequence[int]], parts: Sequence[Tensor], scan: Callable[..., Tensor]) -> Tensor:
    """Run each document of each sequence by itself."""
    rows = []
    for row, of_row in enumerate(lengths):
        of_documents = zip(*(part[row : row + 1].split(list(of_row), 1) for part in parts), strict=True)
        rows.append(torch.cat([scan(document) for document in of_documents], 1))
    return torch.cat(rows)


DOCUMENTS = [[1, 9, 2, 5, 3], [16, 4]]
BEGINS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in DOCUMENTS])


@pytest.mark.parametrize("chunk", [1, 4, 7, 32])
def test_recurrences_begin_anew_with_each_document(chunk: int) -> None:
    torch.manual_seed(0)
    s, r = StateSpace(4, 8, 2, 6, chunk), DeltaRule(2, 4, 6, 8, chunk)
    space, rule = of_space(s, 20, 4, True), of_rule(r, 20, 4)
    parts = space.pop("parts")
    theirs = by_document(DOCUMENTS, parts, lambda one: chunked.scan(s, one, **space))
    rest = [t for each in space.values() for t in each]
    same(chunked.scan(s, parts, **space, begins=BEGINS), theirs, [*parts, *rest])
    parts = rule.pop("parts")
    theirs = by_document(DOCUMENTS, parts, lambda one: chunked.scan(r, one, **rule))
    rest = [t for each in rule.values() for t in each]
    same(chunked.scan(r, parts, **rule, begins=BEGINS), theirs, [*parts, *rest])
    c, f = ChannelDelta(2, 6, chunk), Lightning(2, 6, chunk, 0, 2)
    kimi = of_kimi(c, 20, 4)
    parts = kimi.pop("parts")
    theirs = by_document(DOCUMENTS, parts, lambda one: chunked.scan(c, one, **kimi))
    same(chunked.scan(c, parts, **kimi, begins=BEGINS), theirs, [*parts, *(t for of in kimi.values() for t in of)])
    theirs = by_document(DOCUMENTS, parts[:3], lambda one: chunked.scan(f, one))
    same(chunked.scan(f, parts[:3], begins=BEGINS), theirs, parts[:3])


def pieces(past: int, cuts: Sequence[int], step: Callable[[int, int, int, Any], tuple[Tensor, Any]]) -> Tensor:
    """Run a sequence in pieces that end at `cuts`, each with the state of the one before."""
    outs, state, low = [], None, 0
    for high in cuts:
        out, state = step(low, high, min(low, past), state)
        outs.append(out)
        low = high
    return torch.cat(outs, 1)


@torch.no_grad()
def test_a_sequence_in_pieces_takes_the_state_along() -> None:
    torch.manual_seed(0)
    s, taps = StateSpace(4, 8, 2, 6, 8), 4
    given = of_space(s, 30, taps, True)
    x, b, c, dt = given["parts"]
    filters = [Filter.of(*f, torch.float64) for f in zip(given["filters"], given["biases"], strict=True)]
    cuts = (1, 2, 13, 14, 30)

    def space(low: int, high: int, past: int, state: Any) -> tuple[Tensor, Any]:
        seen = (part[:, low - past : high] for part in (x, b, c))
        return s.over([*seen, dt[:, low:high]], filters, given["gates"], past).run(state)

    torch.testing.assert_close(pieces(taps - 1, cuts, space), chunked.scan(s, **given), rtol=1e-12, atol=1e-12)
    r = DeltaRule(2, 4, 6, 8, 8)
    rule = of_rule(r, 30, taps)
    q, k, v, beta, alpha = rule["parts"]
    filters = [Filter.of(f, None, torch.float64) for f in rule["filters"]]

    def delta(low: int, high: int, past: int, state: Any) -> tuple[Tensor, Any]:
        seen = (part[:, low - past : high] for part in (q, k, v))
        gates = beta[:, low:high], alpha[:, low:high]
        return r.over([*seen, *gates], filters, rule["gates"], past).run(state)

    torch.testing.assert_close(pieces(taps - 1, cuts, delta), chunked.scan(r, **rule), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", ["before", "after"])
def test_the_gated_norm_is_its_formula(gate: Any) -> None:
    torch.manual_seed(0)
    y, z = drawn(2, 5, 24), drawn(2, 5, 24)
    weight = drawn(24) if gate == "before" else drawn(6)
    groups = 3 if gate == "before" else 4
    u = (y * F.silu(z) if gate == "before" else y).unflatten(-1, (groups, -1))
    u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-5)
    theirs = u.flatten(-2) * weight if gate == "before" else (u * weight).flatten(-2) * F.silu(z)
    same(gated_rms_norm(y, z, weight, groups, 1e-5, gate), theirs, [y, z, weight])


def test_parts_of_a_group_norm_sum_their_squares() -> None:
    """Two ranks that have half of the one group each, run one after the other by a sum that looks both up."""
    torch.manual_seed(0)
    y, z, weight, g = drawn(2, 5, 24), drawn(2, 5, 24), drawn(24), torch.randn(2, 5, 24, dtype=torch.float64)
    whole = gated_rms_norm(y, z, weight, 1, 1e-5, "before")
    wanted = torch.autograd.grad(whole, [y, z, weight], g)
    u = y * F.silu(z)
    r = torch.rsqrt(u.square().mean(-1, keepdim=True) + 1e-5)
    sums = {"F": u.square().sum(-1, keepdim=True), "B": (g * weight * u * r).sum(-1, keepdim=True)}
    for half in (slice(0, 12), slice(12, 24)):
        parts = [t[..., half].detach().requires_grad_() for t in (y, z, weight)]
        out = gated_rms_norm(*parts, 1, 1e-5, "before", 2, lambda own, phase: sums[phase].clone())
        torch.testing.assert_close(out, whole[..., half])
        for a, b in zip(torch.autograd.grad(out, parts, g[..., half]), wanted, strict=True):
            torch.testing.assert_close(a, b[..., half])


def test_the_sigmoid_gate_is_its_formula() -> None:
    y, gate = drawn(2, 5, 8), drawn(2, 5, 8)
    same(sigmoid_gate(y, gate), y * gate.sigmoid(), [y, gate])


@torch.no_grad()
def test_mamba_equals_that_of_transformers() -> None:
    import transformers
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    torch.manual_seed(0)
    s = StateSpace(8, 16, 2, 12, 32)
    sizes = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 12, "chunk_size": 32}
    config = transformers.NemotronHConfig(
        hidden_size=64, **sizes, conv_kernel=4, layers_block_type=["linear_attention"]
    )
    theirs = NemotronHMamba2Mixer(config, 0).float()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    torch.nn.init.ones_(theirs.dt_bias)  # its steps are at least time_step_min, ours are not bounded
    u, widths = torch.randn(2, 100, 64), [128, 24, 24]
    z, *parts = theirs.in_proj(u).split([128, *widths, 8], -1)
    filters = theirs.conv1d.weight.squeeze(1).split(widths)
    biases = theirs.conv1d.bias.split(widths)
    y = chunked.scan(s, parts, filters, biases, (theirs.dt_bias, theirs.A_log, theirs.D))
    ours = theirs.out_proj(gated_rms_norm(y, z, theirs.norm.weight, 2, config.layer_norm_epsilon, "before"))
    torch.testing.assert_close(ours, theirs(u), rtol=1e-4, atol=1e-5 * float(ours.abs().max()))


@torch.no_grad()
def test_the_delta_net_equals_that_of_transformers() -> None:
    import transformers
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.manual_seed(0)
    s = DeltaRule(2, 4, 12, 16, 64)
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    widths = {"linear_key_head_dim": 12, "linear_value_head_dim": 16}
    config = transformers.Qwen3NextConfig(hidden_size=64, **sizes, **widths, num_hidden_layers=4)
    theirs = Qwen3NextGatedDeltaNet(config, 0).float().eval()
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.3)
    u = torch.randn(2, 100, 64)
    q, k, v, z, beta, alpha = theirs.fix_query_key_value_ordering(theirs.in_proj_qkvz(u), theirs.in_proj_ba(u))
    q, k, v, z = (t.flatten(2) for t in (q, k, v, z))
    filters = theirs.conv1d.weight.squeeze(1).split([24, 24, 64])
    y = chunked.scan(s, (q, k, v, beta, alpha), filters, (), (theirs.dt_bias, theirs.A_log))
    ours = theirs.out_proj(gated_rms_norm(y, z, theirs.norm.weight, 4, config.rms_norm_eps, "after"))
    torch.testing.assert_close(ours, theirs(u), rtol=1e-4, atol=1e-5 * float(ours.abs().max()))
