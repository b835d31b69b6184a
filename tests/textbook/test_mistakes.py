"""Published listings and pictures that are wrong, each shown to fail: by our provers, or by running what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from phalanx.measure.fit import robust_line
from phalanx.schedule.collectives.ir import Round, compose, intervals
from phalanx.schedule.collectives.proof import prove as prove_collective
from phalanx.schedule.collectives.registry import build as collective
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.schedule.pipeline.proof import prove
from phalanx.schedule.pipeline.schedules import build
from phalanx.schedule.pipeline.simulate import insert_sends
from phalanx.spec.errors import Unproved


def _without(s: PipelineSchedule, rank: int, kind: str) -> PipelineSchedule:
    kept = tuple(a for a in s.actions[rank] if a.kind != kind)
    return replace(s, actions=(*s.actions[:rank], kept, *s.actions[rank + 1 :]))


def test_the_listing_of_1f1b() -> None:
    """Five mistakes: `if prev_rank` takes rank 0 for none; the output's gradient is sent back, not the input's; no
    loss; sends that block (tests/schedule/test_pipeline.py); M - (P - 1 - s) passes of the steady phase."""
    with_sends = insert_sends(build("1f1b", 2, 2))
    with pytest.raises(Unproved, match="RECV_F0 is missing"):
        prove(_without(with_sends, 1, "RECV_F"))  # `if prev_rank:` of rank 1, whose predecessor is 0

    weight = torch.ones(3, 3, requires_grad=True)
    received = torch.ones(2, 3, requires_grad=True)
    output = received @ weight
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        output.backward()  # the last stage without a loss
    output.sum().backward()
    with pytest.warns(UserWarning, match="not a leaf"):
        assert output.grad is None  # what the listing sends
    assert received.grad is not None  # what the previous stage waits for

    stages, micro_batches = 4, 2
    steady = [micro_batches - (stages - 1 - s) for s in range(stages)]
    assert min(steady) < 0  # stage 0 warms up with three of two micro-batches
    more = tuple(Action("F", 0, i) for i in range(3)) + tuple(Action("B", 0, i) for i in range(3))
    s = build("1f1b", stages, micro_batches)
    with pytest.raises(Unproved, match="rank 0: 0F2 is of no chunk or micro-batch"):
        prove(replace(s, actions=(more, *s.actions[1:])))


def test_chunk_gives_fewer_parts_than_ranks() -> None:
    """5 elements in 4 parts: three, so that the ring's fourth index fails; ours are cut at i n // P, and proved."""
    assert [len(part) for part in torch.arange(5).chunk(4)] == [2, 2, 1]
    assert len(torch.arange(9).chunk(4)) == 3
    parts = [len(part) for part in torch.arange(5).chunk(4)] + [0]
    low = np.cumsum([0, *parts])[:-1]
    # A ring over chunk()'s parts that names the last part by its index, n - 1: rank 3 has no such part.
    rounds = [Round(np.arange(4), (np.arange(4) + 1) % 4, low[(np.arange(4) - 1) % 4], np.array(parts), True)]
    with pytest.raises(Unproved):
        prove_collective(
            compose(
                "reduce_scatter", "chunk()", 4, 5, rounds, intervals(range(4), 0, 5), intervals(range(4), low, parts)
            )
        )
    for size in (5, 9):
        prove_collective(collective("all_reduce", "ring", 4, size))


def test_top_k_into_a_copy_is_lost() -> None:
    """`grad.flatten()[i] += x` of what is not contiguous adds into a copy."""
    gradient = torch.zeros(4, 4).t()[:, :2]
    assert not gradient.is_contiguous()
    gradient.flatten()[torch.tensor([0, 3])] += 1.0
    assert gradient.sum() == 0
    values, places = torch.ones(2), torch.tensor([0, 3])
    gradient.view_as(gradient).copy_(gradient.reshape(-1).scatter_add(0, places, values).view(gradient.shape))
    assert gradient.sum() == 2  # back in its shape


def test_forward_prefetch_is_an_argument() -> None:
    import inspect

    import torch.distributed.fsdp as fsdp

    assert not hasattr(fsdp, "ForwardPrefetch")
    assert "forward_prefetch" in inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters


def test_a_plain_line_loses_alpha() -> None:
    """20 sizes from 1 KiB to 512 MiB over 8 ranks, times with an error of 5 %: least squares lets the large ones
    decide, and its intercept is noise, now and then negative; relative errors find it. The taught slope and intercept
    are 2 (P-1)/P of beta and 2 (P-1) alpha, so that 1 / slope is algbw and no link's rate."""
    alpha, beta, p = 2e-6, 1 / 25e9, 8
    sizes, latency, slope = 2.0 ** np.arange(10, 30), 2 * (p - 1) * alpha, 2 * (p - 1) / p * beta
    taught, ours = [], []
    for seed in range(20):
        seconds = (latency + slope * sizes) * (1 + 0.05 * np.random.default_rng(seed).standard_normal(20))
        taught.append(np.polyfit(sizes, seconds, 1)[1] / latency)
        line = robust_line(sizes, seconds)
        ours.append(line.alpha / latency)
        assert line.beta == pytest.approx(1.75 * beta, rel=0.1)
    assert min(taught) < 0
    assert np.median(np.abs(np.array(taught) - 1)) > 0.5
    assert np.max(np.abs(np.array(ours) - 1)) < 0.1


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_balance_loss_is_one_when_balanced(k: int) -> None:
    """E sum f P with a mask of k ones gives k for perfect balance; divided by k, as ours is, 1."""
    experts, tokens = 8, 64
    probabilities = torch.full((tokens, experts), 1 / experts)
    mask = torch.zeros(tokens, experts)
    for t in range(tokens):
        mask[t, [(t * k + j) % experts for j in range(k)]] = 1
    taught = experts * float((mask.mean(0) * probabilities.mean(0)).sum())
    assert taught == pytest.approx(k)
    assert taught / k == pytest.approx(1.0)


def test_torch_has_the_names_of_the_options_page() -> None:
    """Every name in the first column of docs/textbook/options.md that is torch's is there, and no other is taught."""
    import inspect
    import re
    from pathlib import Path

    import torch.distributed as dist
    import torch.distributed.fsdp as fsdp
    from torch.nn.parallel import DistributedDataParallel

    text = (Path(__file__).parents[2] / "docs" / "textbook" / "options.md").read_text()
    ddp, sharded, _, names = (part.partition("\n")[2] for part in text.split("\n## ")[1:])
    first = [re.findall(r"`(\w+)", line.split("|")[1]) for line in ddp.splitlines() if line.startswith("| `")]
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters) | {"no_sync"}
    assert {name for row in first for name in row} <= known
    own = set(inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters)
    own |= set(inspect.signature(fsdp.fully_shard).parameters) | set(fsdp.MixedPrecision.__dataclass_fields__)
    own |= {"fully_shard", "CPUOffloadPolicy", "ignored_params", "True"}
    taught = [re.findall(r"`(\w+)", line.split("|")[1]) for line in sharded.splitlines() if line.startswith("| `")]
    assert {name for row in taught for name in row} <= own
    assert {"BACKWARD_PRE", "BACKWARD_POST"} <= set(fsdp.BackwardPrefetch.__members__)
    for line in names.splitlines()[3:]:
        for name in re.findall(r"`(\w+)`", line):
            assert hasattr(dist, name), name


def test_autocast_leaves_gradients_in_fp32() -> None:
    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        product = layer(torch.ones(2, 4))
    product.float().sum().backward()
    assert product.dtype == torch.bfloat16
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}


def test_adding_into_a_tuple_of_chunks_raises_after_the_sum() -> None:
    buffer = torch.zeros(4)
    chunks = buffer.chunk(2)
    with pytest.raises(TypeError, match="does not support item assignment"):
        chunks[1] += torch.ones(2)  # type: ignore[index]
    assert buffer.tolist() == [0, 0, 1, 1]
    chunks[1].add_(torch.ones(2))
    assert buffer.tolist() == [0, 0, 2, 2]


def test_small_gradients_are_zero_in_float16() -> None:
    gradient = torch.tensor(2e-8)
    assert gradient.half() == 0
    assert gradient.bfloat16() != 0
    assert (2**16 * gradient).half().float() / 2**16 == pytest.approx(2e-8, rel=1e-3)
