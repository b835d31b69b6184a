"""The decoder against transformers, and our own backward passes against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.nn import functions
from phalanx.nn.decoder import Cache, Decoder
from phalanx.nn.initial import BLOCK, create, draw, initialise
from phalanx.spec.jobfile import build
from phalanx.spec.model import ModelSpec, Parameter, complete, from_hugging_face, parameters
from phalanx.verify.parity import gradient_errors

CPU = torch.device("cpu")


def _spec_of(config, tmp_path) -> ModelSpec:  # type: ignore[no-untyped-def]
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string(use_diff=False))
    fields, _ = from_hugging_face(path)
    return build(ModelSpec, complete(fields), "model")


def _llama_names(fqn: str) -> str:
    for ours, theirs in (
        ("embed.token", "model.embed_tokens"),
        ("head.norm", "model.norm"),
        ("head.linear", "lm_head"),
        ("blocks.", "model.layers."),
        ("norm1", "input_layernorm"),
        ("norm2", "post_attention_layernorm"),
        ("attention.", "self_attn."),
    ):
        fqn = fqn.replace(ours, theirs)
    for letter in "qkvo":
        fqn = fqn.replace(f"self_attn.{letter}.", f"self_attn.{letter}_proj.")
    for part in ("gate", "up", "down"):
        fqn = fqn.replace(f"mlp.{part}.", f"mlp.{part}_proj.")
    return fqn


def _gpt2_tensor(fqn: str, state: dict[str, Tensor]) -> Tensor:
    for ours, theirs in (
        ("embed.token", "transformer.wte"),
        ("embed.position", "transformer.wpe"),
        ("head.norm", "transformer.ln_f"),
        ("head.linear", "lm_head"),
        ("blocks.", "transformer.h."),
        ("norm1", "ln_1"),
        ("norm2", "ln_2"),
        ("attention.o", "attn.c_proj"),
        ("mlp.up", "mlp.c_fc"),
        ("mlp.down", "mlp.c_proj"),
    ):
        fqn = fqn.replace(ours, theirs)
    for i, letter in enumerate("qkv"):
        if f"attention.{letter}." in fqn:
            return state[fqn.replace(f"attention.{letter}", "attn.c_attn")].chunk(3, dim=-1)[i]
    return state[fqn]


def _compare(spec: ModelSpec, tensor, theirs) -> None:  # type: ignore[no-untyped-def]
    model = create(spec, torch.float32, CPU)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for p in parameters(spec):
            value = tensor(p.fqn)
            # GPT-2 keeps its matrices as (in, out).
            own[p.fqn].copy_(value if value.shape == p.shape and spec.family == "llama" else _turn(value, p))
    tokens = torch.randint(spec.vocab, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, reference = model(tokens), theirs(tokens).logits
    assert (ours - reference).abs().max() <= 1e-5 * max(1.0, float(reference.abs().max()))


def _turn(value: Tensor, p: Parameter) -> Tensor:
    return value.T if p.role in ("column", "row") else value


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_llama_logits_are_those_of_transformers(tmp_path, kv_heads: int, tied: bool, rope: str) -> None:  # type: ignore[no-untyped-def]
    from transformers import LlamaConfig, LlamaForCausalLM

    scaling = {"rope_type": rope, "rope_theta": 1000.0}
    if rope == "llama3":
        scaling |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling |= {"original_max_position_embeddings": 16}
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        attention_bias=kv_heads == 2,
        initializer_range=0.2,
        rope_parameters=scaling,
    )
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(config).eval()
    state = theirs.state_dict()
    spec = _spec_of(config, tmp_path)
    assert spec.parameter_count == sum(p.numel() for p in theirs.parameters())
    _compare(spec, lambda fqn: state[_llama_names(fqn)], theirs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu"])
def test_gpt2_logits_are_those_of_transformers(tmp_path, tied: bool, activation: str) -> None:  # type: ignore[no-untyped-def]
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        activation_function=activation,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(1)
    theirs = GPT2LMHeadModel(config).eval()
    state = theirs.state_dict()
    spec = _spec_of(config, tmp_path)
    assert spec.parameter_count == sum(p.numel() for p in theirs.parameters())
    _compare(spec, lambda fqn: _gpt2_tensor(fqn, state), theirs)


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_of_our_functions() -> None:
    torch.manual_seed(0)
    check = torch.autograd.gradcheck
    assert check(lambda x, w: functions.rms_norm(x, w, 1e-5), (_rand(3, 4, 6), _rand(6)))
    assert check(functions.swiglu, (_rand(5, 7), _rand(5, 7)))
    angles = torch.randn(4, 1, 3, dtype=torch.float64)
    assert check(lambda x: functions.rotary(x, angles.cos(), angles.sin()), (_rand(2, 4, 3, 6),))


@pytest.mark.parametrize("rows", [3, 1000])
def test_cross_entropy_is_torchs(rows: int) -> None:
    logits = torch.randn(rows, 700, requires_grad=True)
    targets = torch.randint(700, (rows,))
    ours = functions.cross_entropy(logits * 1.0, targets)
    (ours_gradient,) = torch.autograd.grad(ours, logits)
    theirs = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (theirs_gradient,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_gradient, theirs_gradient, rtol=1e-4, atol=1e-6)


def test_a_second_backward_through_the_overwritten_logits_is_refused() -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    loss = functions.cross_entropy(logits * 1.0, torch.zeros(4, dtype=torch.int64))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def _small(**fields: object) -> ModelSpec:
    sizes = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 40}
    return build(ModelSpec, complete({**sizes, "max_seq": 32, **fields}), "model")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cache_changes_nothing(family: str) -> None:
    spec = _small(family=family)
    model = Decoder(spec, torch.float64)
    initialise(model, spec, 0)
    tokens = torch.randint(61, (1, 12))
    with torch.no_grad():
        whole = model(tokens)
        cache = Cache()
        parts = [model(tokens[:, :5], cache=cache)] + [model(tokens[:, i : i + 1], cache=cache) for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_separate_documents_are_as_if_alone(family: str, dtype: torch.dtype, bound: float) -> None:
    """Logits, and the gradients of all weights."""
    spec = _small(family=family)
    model = Decoder(spec, dtype)
    initialise(model, spec, 0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)  # so that attention has something to choose
    lengths = [[5, 1, 9, 9], [24], [1, 1, 22]]  # of the documents in each sequence
    tokens = torch.randint(61, (3, 25), generator=torch.Generator().manual_seed(0))
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    documents = [
        pair
        for t, row in zip(tokens, lengths, strict=True)
        for pair in zip(t[:-1].split(row), t[1:].split(row), strict=True)
    ]
    with torch.no_grad():
        packed = model(tokens[:, :-1], positions=places).flatten(0, 1)
        alone = torch.cat([model(d[None])[0] for d, _ in documents])
        largest = float(alone.abs().max())
        assert (packed - alone).abs().max() <= bound * largest
        assert (packed - model(tokens[:, :-1]).flatten(0, 1)).abs().max() > 1e-2 * largest
    model(tokens[:, :-1], tokens[:, 1:], positions=places).backward()
    together = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for d, targets in documents:
        model(d[None], targets[None]).backward()
    each = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert max(error for _, error in gradient_errors(together, each)) <= bound


def test_weights_are_drawn_in_blocks_whatever_the_slice() -> None:
    spec = _small(vocab=70000)
    p = parameters(spec)[0]
    assert p.numel > BLOCK
    whole = draw(spec, p, 7, 0, p.numel)
    for start, stop in ((0, 10), (BLOCK - 3, BLOCK + 5), (BLOCK, p.numel), (5, p.numel - 5)):
        assert np.array_equal(draw(spec, p, 7, start, stop), whole[start:stop])
    assert not np.array_equal(draw(spec, p, 8, 0, 10), whole[:10])
    assert abs(whole.std() - 0.02) < 1e-4
