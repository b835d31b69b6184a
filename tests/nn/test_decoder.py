"""The decoder against transformers, and our own backward passes against finite differences."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import mixed, models, with_experts
from torch import Tensor, nn

from phalanx.cost.step.expand import expand
from phalanx.nn import decoder, functional
from phalanx.nn.decoder import Decoder
from phalanx.nn.init import BLOCK, create, draw
from phalanx.observation.parity.parity import gradient_errors
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.runtime.tracing.instrument import instrument
from phalanx.schedule.layers.head import sliced
from phalanx.schedule.layout import Layout
from phalanx.spec.files import job_file
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.job import Precision
from phalanx.spec.model.families import complete, from_hugging_face
from phalanx.spec.model.spec import ModelSpec, Parameter, parameters
from phalanx.spec.strategy.mesh import mesh
from phalanx.training.training_step import Training

CPU = torch.device("cpu")


@torch.no_grad()
def initialise(model: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill a whole single-process model in place, as a run of this seed begins."""
    own = dict(model.named_parameters())
    for p in parameters(spec):
        own[p.fqn].copy_(torch.from_numpy(draw(spec, p, seed, 0, p.numel)).view(p.shape))


def _spec_of(config, tmp_path) -> ModelSpec:  # type: ignore[no-untyped-def]
    path = tmp_path / "config.json"
    path.write_text(config.to_json_string(use_diff=False))
    fields, _ = from_hugging_face(path)
    return build(ModelSpec, complete(fields), "model")


NAMES = {
    "llama": (
        ("embed.token", "model.embed_tokens"),
        ("head.norm", "model.norm"),
        ("head.linear", "lm_head"),
        ("blocks.", "model.layers."),
        ("norm1", "input_layernorm"),
        ("norm2", "post_attention_layernorm"),
        ("attention.", "self_attn."),
        *((f"self_attn.{letter}.", f"self_attn.{letter}_proj.") for letter in "qkvo"),
        *((f"mlp.{part}.", f"mlp.{part}_proj.") for part in ("gate", "up", "down")),
    ),
    "gpt2": (
        ("embed.token", "transformer.wte"),
        ("embed.position", "transformer.wpe"),
        ("head.norm", "transformer.ln_f"),
        ("head.linear", "lm_head"),
        ("blocks.", "transformer.h."),
        ("norm1", "ln_1"),
        ("norm2", "ln_2"),
        ("attention.o", "attn.c_proj"),
        *((f"attention.{letter}.", "attn.c_attn.") for letter in "qkv"),
        ("mlp.up", "mlp.c_fc"),
        ("mlp.down", "mlp.c_proj"),
    ),
    "gpt_neox": (
        ("embed.token", "gpt_neox.embed_in"),
        ("head.norm", "gpt_neox.final_layer_norm"),
        ("head.linear", "lm_head"),
        ("blocks.", "gpt_neox.layers."),
        ("norm1", "input_layernorm"),
        ("norm2", "post_attention_layernorm"),
        ("attention.o.", "attention.dense."),
        *((f"attention.{letter}.", "attention.query_key_value.") for letter in "qkv"),
        ("mlp.up", "mlp.dense_h_to_4h"),
        ("mlp.down", "mlp.dense_4h_to_h"),
    ),
}


def _theirs(spec: ModelSpec, p: Parameter, state: dict[str, Tensor]) -> Tensor:
    """Our parameter out of the state of a model in transformers."""
    name = p.fqn
    for ours, theirs in NAMES.get(spec.family, NAMES["llama"]):
        name = name.replace(ours, theirs)
    value = state["embed_out.weight" if name == "lm_head.weight" and name not in state else name]
    part = "qkv".find(p.fqn.split(".")[-2])
    if spec.family == "gpt2":  # matrices are (in, out), queries, keys and values stand side by side
        value = value.chunk(3, dim=-1)[part] if part >= 0 else value
        return value.T if p.role in ("column", "row") else value
    if spec.family == "gpt_neox" and part >= 0:  # and here within each head
        return value.unflatten(0, (spec.heads, 3, spec.head_dim))[:, part].flatten(0, 1)
    return value


@st.composite
def dense(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A small config of a family that is run, as arguments of its class in transformers."""

    def some(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    given = {"vocab_size": 97, "tie_word_embeddings": some(True, False), "initializer_range": 0.2}
    if family == "gpt2":
        return given | {"n_embd": 32, "n_layer": 3, "n_head": 4, "activation_function": some("gelu_new", "gelu")}
    given |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    given |= {"max_position_embeddings": 64, "attention_bias": some(True, False)}
    rope = {"rope_type": some("default", "linear", "llama3", "yarn"), "rope_theta": some(100.0, 1000.0)}
    if rope["rope_type"] != "default":
        rope |= {"factor": some(4.0, 8.0)}
    if rope["rope_type"] == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    if rope["rope_type"] == "yarn":
        rope |= {"original_max_position_embeddings": some(8, 16), "truncate": some(True, False)}
        rope |= some({}, {"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_factor": 1.1}, {"beta_fast": 4.0})
    if family == "gpt_neox":
        rope["partial_rotary_factor"] = some(0.25, 0.5, 1.0)
        given["hidden_act"] = some("gelu", "gelu_fast")
        return given | {"rope_parameters": rope, "use_parallel_residual": some(True, False)}
    given |= {"rope_parameters": rope, "num_key_value_heads": some(1, 2, 4), "head_dim": some(8, 16)}
    if family == "llama":
        return given | {"mlp_bias": some(True, False)}
    return given | {"sliding_window": some(5, 40), "use_sliding_window": some(True, False), "max_window_layers": 1}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox"])
def test_logits_are_those_of_transformers(tmp_path, family: str) -> None:  # type: ignore[no-untyped-def]
    from transformers import AutoConfig, AutoModelForCausalLM

    @settings(max_examples=8)
    @given(dense(family))
    def equal(arguments: dict[str, Any]) -> None:
        config = AutoConfig.for_model(family, **arguments)
        torch.manual_seed(1)
        theirs = AutoModelForCausalLM.from_config(config).eval()
        for p in theirs.parameters():  # biases and norms too
            torch.nn.init.normal_(p, mean=float(p.dim() == 1), std=0.2)
        state = theirs.state_dict()
        spec = _spec_of(config, tmp_path)
        model = create(spec, torch.float32, CPU)
        own = dict(model.named_parameters())
        tokens = torch.randint(spec.vocab, (2, 24), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for p in parameters(spec):
                own[p.fqn].copy_(_theirs(spec, p, state))
            ours, reference = model(tokens), theirs(tokens).logits
        assert (ours - reference).abs().max() <= 1e-5 * max(1.0, float(reference.abs().max()))

    equal()


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_of_our_functions() -> None:
    torch.manual_seed(0)
    check = torch.autograd.gradcheck
    assert check(lambda x, w: functional.rms_norm(x, w, 1e-5), (_rand(3, 4, 6), _rand(6)))
    assert check(functional.swiglu, (_rand(5, 7), _rand(5, 7)))
    angles = torch.randn(4, 1, 3, dtype=torch.float64)
    for width in (6, 10):
        for which in ((0, False), (width - 6, True)):
            turn = partial(functional.rotary, cos=angles.cos(), sin=angles.sin())
            assert check(lambda x, w=which, turn=turn: turn(x, start=w[0], neighbours=w[1]), (_rand(2, 4, 3, width),))


@pytest.mark.parametrize("rows", [3, 1000])
def test_cross_entropy_is_torchs(rows: int) -> None:
    logits = torch.randn(rows, 700, requires_grad=True)
    targets = torch.randint(700, (rows,))
    ours = functional.cross_entropy(logits * 1.0, targets)
    (ours_gradient,) = torch.autograd.grad(ours, logits)
    theirs = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    (theirs_gradient,) = torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_gradient, theirs_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rows", [100, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_head_in_slices_is_the_whole_one(rows: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 16, dtype=dtype), torch.randn(700, 16, dtype=dtype) / 4
    targets = torch.randint(700, (rows,))
    found = []
    for of in (functional.linear_cross_entropy, lambda a, b, t: functional.cross_entropy(a @ b.t(), t)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = of(a, b, targets)
        (loss / rows).backward()
        assert a.grad is not None
        assert b.grad is not None
        found.append((loss.double(), a.grad.double(), b.grad.double()))
    near = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for ours, theirs in zip(*found, strict=True):
        assert float((ours - theirs).detach().norm() / theirs.detach().norm()) < near
    with torch.no_grad():
        assert float(functional.linear_cross_entropy(x, weight, targets)) == pytest.approx(float(found[0][0]))


def test_a_head_in_slices_never_holds_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickstart's head: gradients in fp64 and FLOPs are those of all logits at once; memory is not, and is as
    predicted."""
    file = job_file.load(Path(__file__).parents[2] / "examples/quickstart.toml", ["job.global_batch=12"])
    strategy = make_strategy("micro_batch=12")
    assert strategy is not None
    job, sizes = replace(file.job, precision=Precision("float64")), replace(file.model, layers=1)
    found = []
    for slices in (True, False):
        monkeypatch.setattr(decoder, "sliced", sliced if slices else lambda *sizes: False)
        state = Training(sizes, job, strategy, Comm(ALONE, mesh(strategy)), 0)
        batch = torch.randint(0, 2048, (12, 129), generator=torch.Generator().manual_seed(1))
        with instrument(state.model.units(), state.comm.recorder, lambda state=state: state.current) as tracker:
            state.step([batch], 1e-3)
        flops = [sum(e.flops for e in state.comm.recorder.events if e.unit == "head" and e.phase == p) for p in "FB"]
        found.append((dict(state.gradients()), tracker.peak, flops))
    (ours, peak, flops), (theirs, before, whole) = found
    assert max(error for _, error in gradient_errors(ours, theirs)) < 1e-12
    assert flops == [sum(whole), 0]
    logits = 12 * 128 * 2048 * 8
    assert peak < before - logits // 4
    assert peak == pytest.approx(expand(Layout(sizes, job, strategy).rank_view(0)).peak_bytes, abs=2**14, rel=1e-5)


def test_a_second_backward_through_the_overwritten_logits_is_refused() -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    loss = functional.cross_entropy(logits * 1.0, torch.zeros(4, dtype=torch.int64))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def _small(**fields: object) -> ModelSpec:
    sizes = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 40}
    return build(ModelSpec, complete({**sizes, "max_seq": 32, **fields}), "model")


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


def test_weights_are_drawn_in_blocks_whatever_the_slice_and_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _small(vocab=70000)
    p = parameters(spec)[0]
    assert p.numel > BLOCK
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    whole = draw(spec, p, 7, 0, p.numel)
    for start, stop in ((0, 10), (BLOCK - 3, BLOCK + 5), (BLOCK, p.numel), (5, p.numel - 5)):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=start % 3 + 1: n)
        assert np.array_equal(draw(spec, p, 7, start, stop), whole[start:stop])
    assert not np.array_equal(draw(spec, p, 8, 0, 10), whole[:10])
    assert abs(whole.std() - 0.02) < 1e-4


@given(st.one_of(models(small=True), with_experts(small=True), mixed(small=True)))
@settings(max_examples=40)
def test_a_module_has_the_parameters_of_its_description(spec: ModelSpec) -> None:
    """One that the description lacks would keep the random values of its construction."""
    module = create(spec, torch.float64, torch.device("cpu"))
    assert {name for name, _ in module.named_parameters()} == {p.fqn for p in parameters(spec)}


def test_layers_that_do_not_rotate_know_no_places() -> None:
    """Beside others that do, in one model: their queries and keys are the same wherever a token stands."""
    sizes = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 40}
    mixers = [{"kind": "attention", "name": "placeless", "rotary_dim": 0}]
    pattern = {"mixers": mixers, "pattern": ["placeless+mlp", "attention+mlp"]}
    model = create(build(ModelSpec, complete(sizes | pattern | {"max_seq": 32}), "model"), torch.float32, CPU)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    x, angles = torch.randn(1, 8, 16), (model.cos[:8, None], model.sin[:8, None])
    found = {}
    for name in ("0", "1"):
        (attention,) = (m for m in model.blocks[name].modules() if hasattr(m, "rotates"))
        turned, plain = (attention.heads(x, given)[:2] for given in (angles, None))
        found[name] = [torch.equal(a, b) for a, b in zip(turned, plain, strict=True)]
    assert found == {"0": [True, True], "1": [False, False]}
