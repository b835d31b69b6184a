"""Hugging Face weights: every tensor in its place, any slice of it, and the numbers that transformers computes."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import rank_cases
from support.hf_configs import configs
from support.rank_pool import Pool
from support.saved_models import ROUTED, TINY, logits, save, spec_of
from support.sizes import sampled
from torch import Tensor

from phalanx.nn.hugging_face import container, files
from phalanx.nn.hugging_face.names import is_buffer, plain_name, sources
from phalanx.nn.init import create, fill_buffers, initial_source, restrict_to_rank
from phalanx.nn.weight_files import open_weights
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import parameters
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import Split


@pytest.mark.parametrize("family", [f for f in TINY if f not in ROUTED])  # whose files have more tensors
def test_every_tensor_of_transformers_is_covered_once(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    @settings(max_examples=6)
    @given(configs(family))
    def covered(arguments: dict[str, Any]) -> None:
        config = AutoConfig.for_model(family, **arguments)
        with torch.device("meta"):
            state = AutoModelForCausalLM.from_config(config).state_dict()
        (tmp_path / "config.json").write_text(config.to_json_string())
        spec = spec_of(tmp_path)
        state = {plain_name(family, name): t for name, t in state.items()}
        state = {name: t for name, t in state.items() if not is_buffer(spec, name)}
        places = {fqn: replace(s, tensor=plain_name(family, s.tensor)) for fqn, (s,) in sources(spec).items()}
        rows: dict[str, list[int]] = {name: [] for name in state}
        shapes = {p.fqn: p.shape for p in parameters(spec)}
        for fqn, s in places.items():
            assert tuple(state[s.tensor].shape) == s.shape
            out = shapes[fqn][0]
            rows[s.tensor] += [s.first + r // s.run * s.stride + r % s.run for r in range(out)]
            assert math.prod(s.shape) * out == math.prod(shapes[fqn]) * s.shape[-1 if s.transposed else 0]
        for name, t in state.items():
            axis = next(-1 if s.transposed else 0 for s in places.values() if s.tensor == name)
            assert sorted(rows[name]) == list(range(t.shape[axis]))

    covered()


@pytest.mark.parametrize("family", TINY)
def test_our_logits_are_those_of_transformers(family: str, theirs) -> None:  # type: ignore[no-untyped-def]
    folder = theirs(family)
    spec = spec_of(folder)
    weights = open_weights(folder, spec)
    model = create(spec, torch.float32, torch.device("cpu"))
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights.slice(name, 0, p.numel()).view(p.shape))
        fill_buffers(model, weights)
        ours, reference = model(tokens), logits(folder, tokens)
    assert (ours - reference).abs().max() <= 1e-5 * max(1.0, float(reference.abs().max()))


@pytest.mark.parametrize(
    "strategy",
    sampled(
        [
            Strategy(tp=2),
            Strategy(tp=2, sp=True, ep=2),
            Strategy(dp=2, ep=2),
            Strategy(dp=2, etp=2),
            Strategy(dp=2, tp=2, ep=2, etp=2),
            Strategy(dp=2, tp=2, sp=True, ep=2),
        ],
        (0, 4, 5),
    ),
    ids=str,
)
def test_so_they_are_where_ranks_share_layers_and_experts(strategy: Strategy, theirs, pool: Pool) -> None:  # type: ignore[no-untyped-def]
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
    for family in ROUTED:
        reference = logits(theirs(family), tokens).view(strategy.dp, -1, *tokens.shape[1:], 97)
        for rank, ours in enumerate(pool.run(strategy.world, rank_cases.logits_of, theirs(family), strategy, tokens)):
            wanted = reference[rank // strategy.tp]
            assert (ours - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max())), family


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "mixtral", "deepseek_v3"])
def test_a_slice_is_that_of_the_whole_and_reads_no_more(  # type: ignore[no-untyped-def]
    family: str, theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(theirs(family))
    weights = files.read(theirs(family), spec)
    wholes = {p.fqn: weights.slice(p.fqn, 0, p.numel) for p in parameters(spec)}
    fill, counted = container._fill, [0]

    def counting(descriptor: int, memory: Any, offset: int, stored: container.FileTensor) -> None:
        counted[0] += len(memory)
        fill(descriptor, memory, offset, stored)

    monkeypatch.setattr(container, "_fill", counting)

    @settings(max_examples=60)
    @given(st.sampled_from(parameters(spec)), st.data())
    def equal(p: Any, data: st.DataObject) -> None:
        stop = data.draw(st.integers(0, p.numel))
        start = data.draw(st.integers(0, stop))
        counted[0] = 0
        assert torch.equal(weights.slice(p.fqn, start, stop), wholes[p.fqn][start:stop])
        into = math.prod(p.shape[1:])
        rows = -(-stop // into) - start // into if stop > start else 0
        turned = weights.places[p.fqn][0][0].transposed
        assert counted[0] == 4 * (rows * into if turned else stop - start)

    equal()


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (2, 2)])
def test_a_rank_reads_its_own_experts_alone(ep: int, etp: int, theirs, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """But of what is split by columns, as with any matrix, whole rows."""
    spec = spec_of(theirs("mixtral"))
    weights = files.read(theirs("mixtral"), spec)
    fill, counted = container._fill, [0]

    def counting(descriptor: int, memory: Any, *place: Any) -> None:
        counted[0] += len(memory)
        fill(descriptor, memory, *place)

    monkeypatch.setattr(container, "_fill", counting)
    for p in (p for p in parameters(spec) if p.of_experts):
        whole = weights.slice(p.fqn, 0, p.numel).view(p.shape)
        for place in range(ep * etp):
            split = Split(spec, ep=ep, etp=etp).at_experts(place)
            held, first = split.box(p.fqn), restrict_to_rank(initial_source(spec, 0, weights), split)
            counted[0] = 0
            mine = first(p, 0, held.numel)
            assert counted[0] == 4 * held.numel * (etp if p.role == "expert_row" else 1)
            box = whole[tuple(slice(o, o + n) for o, n in zip(held.offsets, held.sizes, strict=True))].flatten()
            assert mine.equal(box)
            for start, stop in ((3, 5), (held.numel // 2 - 7, held.numel - 1)):
                assert first(p, start, stop).equal(box[start:stop])


@pytest.mark.parametrize(
    ("family", "strategy"),
    [
        ("gpt2", Strategy(dp=2)),
        ("gpt_neox", Strategy(dp=2, zero=3)),
        ("gpt2", Strategy(tp=2)),
        ("llama", Strategy(dp=2, tp=2, zero=3)),
        ("deepseek_v3", Strategy(dp=2, tp=2, ep=2, zero=3)),
        ("mixtral", Strategy(dp=2, etp=2, zero=1)),
    ],
)
def test_ranks_start_at_the_loss_of_transformers(  # type: ignore[no-untyped-def]
    family: str, strategy: Strategy, theirs, pool: Pool
) -> None:
    folder = theirs(family)
    tokens = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(2))
    found = pool.run(strategy.world, rank_cases.first_loss, spec_of(folder), Job(2, 32), strategy, folder, tokens)
    flat = logits(folder, tokens[:, :-1]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(flat.double(), tokens[:, 1:].flatten())
    assert found == pytest.approx([float(expected)] * strategy.world, rel=1e-5)


def test_older_files_are_read_the_same(theirs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """No prefix, buffers beside weights, a second copy of the tied head: as the hub has GPT-2 and GPT-NeoX."""
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    scalar = torch.tensor(-1e9)

    def old_gpt2(t: dict[str, Tensor]) -> dict[str, Tensor]:
        bare = {name.removeprefix("transformer."): value for name, value in t.items()}
        head = {"lm_head.weight": bare["wte.weight"].clone()}
        return bare | head | {"h.0.attn.bias": mask, "h.1.attn.masked_bias": scalar}

    def old_neox(t: dict[str, Tensor]) -> dict[str, Tensor]:
        a = "gpt_neox.layers.0.attention"
        return t | {f"{a}.bias": mask.bool(), f"{a}.masked_bias": scalar, f"{a}.rotary_emb.inv_freq": torch.ones(4)}

    for family, change in (("gpt2", old_gpt2), ("gpt_neox", old_neox)):
        new = theirs(family)
        spec = spec_of(new)
        old = files.read(save(tmp_path / family, new, change), spec)
        one = files.read(tmp_path / family / "model.safetensors", spec)
        for p in parameters(spec):
            whole = files.read(new, spec).slice(p.fqn, 0, p.numel)
            assert torch.equal(old.slice(p.fqn, 0, p.numel), whole)
            assert torch.equal(one.slice(p.fqn, 0, p.numel), whole)


@pytest.mark.parametrize(("shape", "size"), [([2, 3], 20), ([2, 3], 28), ([-2, -3], 24), ([2, 3, 0], 24)])
def test_a_tensor_has_as_many_bytes_as_its_shape_needs(tmp_path: Path, shape: list[int], size: int) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(InputError, match=rf"weight has {size} bytes, its shape {re.escape(str(shape))} in F32 needs"):
        container.contents(file)
