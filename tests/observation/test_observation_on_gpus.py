"""Programs written for GPUs, observed on ones that do not exist: checkpoints, torch.compile and FlexAttention,
experts, pipelines. Each was a program that ended the process, or could not be observed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.fresh_process import in_fresh_process
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from phalanx.observation.observe import observe
from phalanx.schedule.observation import Observation

SEQ, HEADS, WIDTH, EXPERTS, CHOICES = 256, 4, 16, 8, 2


def _trained(forward: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[], None]:
    """A program that trains a linear layer of 64 features on a sequence, through `forward`."""

    def program() -> None:
        layer = nn.Linear(64, 64, dtype=torch.bfloat16).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(3):
            x = torch.randn(1, SEQ, 64, device="cuda", dtype=torch.bfloat16)
            forward(layer, x).sum().backward()
            optimizer.step()

    return program


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def _grouped(layer: nn.Module, x: Tensor) -> Tensor:
    q = _heads(layer(x))
    kv = q[:, :2]
    return F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)


def _causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


def _flexible(layer: nn.Module, x: Tensor) -> Tensor:
    mask = torch.compile(create_block_mask)(_causal, 1, None, SEQ, SEQ, "cuda")
    q = _heads(layer(x))
    kv = q[:, :2]
    out: Tensor = torch.compile(flex_attention)(q, kv, kv, block_mask=mask, enable_gqa=True)
    return out


def _experts() -> None:
    """Dropless experts: counts of a routing map, exchanged and read by the host, are the splits of an all-to-all."""
    ranks = dist.get_world_size()
    router, expert = nn.Linear(64, EXPERTS).cuda(), nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD([*router.parameters(), *expert.parameters()], 0.1)
    for _ in range(3):
        x = torch.randn(SEQ, 64, device="cuda")
        chosen = router(x).topk(CHOICES).indices
        routed = torch.zeros(SEQ, EXPERTS, dtype=torch.bool, device="cuda").scatter(1, chosen, True)
        counts = routed.sum(0)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(ranks, -1).sum(1).tolist()
        rows = x.repeat_interleave(CHOICES, 0)
        received = torch.empty(sum(sent), 64, device="cuda")
        dist.all_to_all_single(received, rows, sent, sent)
        (expert(received).sum() + router(x).sum()).backward()
        optimizer.step()


def _pipeline() -> None:
    rank = dist.get_rank()
    part = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(part.parameters(), 0.1)
    stage = PipelineStage(part, rank, 2, torch.device("cuda"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, target: F.mse_loss(y, target))
    for _ in range(3):
        x = torch.randn(8, 64, device="cuda")
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x)
        optimizer.step()


def _zero_bubble() -> None:
    """Two stages on one rank of two, in a V; gradients of inputs and weights are computed apart."""
    rank = dist.get_rank()
    parts = [nn.Linear(64, 64).cuda() for _ in range(2)]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], 0.1)
    stages = [PipelineStage(p, i, 4, torch.device("cuda")) for p, i in zip(parts, (rank, 3 - rank), strict=True)]
    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=lambda y, target: F.mse_loss(y, target))
    for _ in range(3):
        x = torch.randn(8, 64, device="cuda")
        if rank == 0:
            schedule.step(x, target=x, losses=[])
        else:
            schedule.step()
        optimizer.step()


def _unused() -> None:
    """DDP that looks for unused parameters (pinned memory), with the hook that it has on CUDA alone."""
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "unused": nn.Linear(64, 64)}).cuda()
    model.forward = model["used"].forward  # type: ignore[method-assign]
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for _ in range(3):
        ddp(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()


def _skips_what_is_infinite() -> None:
    """A step that is skipped if a gradient is not finite, as loss scaling does, by flags summed in place."""
    layer = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        layer(torch.ones(2, 64, device="cuda")).sum().backward()
        wrong = torch.zeros(1, device="cuda")
        for p in layer.parameters():
            assert p.grad is not None
            p.grad.record_stream(torch.cuda.current_stream())  # type: ignore[no-untyped-call]
            wrong += torch.isfinite(p.grad.amax()).logical_not()
        dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
        if not wrong.bool().item():
            optimizer.step()


def _numbered() -> None:
    """The idiom of PyTorch's tutorials: a device is the rank's number, of tensors and modules alike."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x = torch.ones(2, 64).to(rank) + torch.zeros(64, device=rank) + torch.ones(64).cuda(rank)
        model(x).sum().backward()
        optimizer.step()


def _branches() -> None:
    """Experts that are left out without a token: any of several truth values holds, all do not."""
    gate, experts = nn.Linear(64, 4).cuda(), nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).cuda()
    optimizer = torch.optim.SGD([*gate.parameters(), *experts.parameters()], 0.1)
    for _ in range(3):
        x = torch.ones(32, 64, device="cuda")
        weight, chosen = gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(experts):
            mask = chosen == i
            if mask.any():
                out[mask] = expert(x[mask]) * weight[mask, None]
            if mask.all() or out.isnan().any():
                raise AssertionError("not taken")
        out.sum().backward()
        optimizer.step()


def _observed() -> dict[str, Observation]:
    def recomputed(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(_grouped, layer, x, use_reentrant=False)
        return out

    return {
        "plain": observe(_trained(_grouped), world=1),
        "recomputed": observe(_trained(recomputed), world=1),
        "flexible": observe(_trained(_flexible), world=1),
        "experts": observe(_experts, world=4, ranks=[0]),
        "pipeline": observe(_pipeline, world=2),
        "zero bubble": observe(_zero_bubble, world=2, ranks=[1]),
        "unused": observe(_unused, world=2, ranks=[0]),
        "finite": observe(_skips_what_is_infinite, world=2, ranks=[1]),
        "numbered": observe(_numbered, world=8, ranks=[3]),
        "branches": observe(_branches, world=1),
    }


def test_programs_for_gpus_are_observed_without_one() -> None:
    seen = in_fresh_process(_observed)
    flops = {name: sum(one.ranks[0].flops.values()) for name, one in seen.items()}
    product, scores = 2 * SEQ * 64 * 64, 4 * HEADS * SEQ * SEQ * WIDTH
    assert flops["plain"] == 2 * product + 3 * scores  # nobody needs the gradient of the input
    assert flops["recomputed"] == flops["plain"] + product + scores
    # FlexAttention is one kernel: no FLOPs of its own, and its scores are never in memory.
    assert flops["flexible"] == flops["plain"]
    assert seen["flexible"].ranks[0].peak < seen["plain"].ranks[0].peak + 2 * HEADS * SEQ * SEQ
    assert any("torch.compile" in note for note in seen["flexible"].ranks[0].notes)
    # Tokens choose experts evenly: each rank gets as many rows as it sends.
    moved = [o.event.bytes for o in seen["experts"].ranks[0].communication if o.event.op == "all_to_all"]
    assert moved == [EXPERTS * 8, SEQ * CHOICES * 64 * 4]
    bubble = seen["zero bubble"].ranks[0]
    by_phase = {phase: sum(n for (p, _), n in bubble.flops.items() if p == phase) for phase in "FBIW"}
    assert by_phase["F"] == 4 * 2 * 2 * 2 * 64 * 64  # 4 micro-batches of 2 rows through 2 layers
    assert by_phase["I"] == by_phase["W"] > 0
    assert by_phase["I"] + by_phase["W"] + by_phase["B"] == 2 * by_phase["F"]
    assert {o.event.op for o in bubble.events if o.event.phase == "W"} == {"weight_grad"}
    sent = [(o.event.op, o.event.bytes, o.event.dtype) for o in seen["unused"].ranks[0].communication]
    assert sent == [("all_reduce", 2 * 2 * (64 * 64 + 64), "bfloat16"), ("all_reduce", 4 * 4, "int32")]
    assert [w.call for w in seen["finite"].ranks[0].synchronisations] == ["item"]
    assert [o.event.bytes for o in seen["numbered"].ranks[0].communication if o.event.phase == "B"] == [4 * 65 * 64]
    # Each of four experts gets half of the rows.
    rows = {unit: n for (phase, unit), n in seen["branches"].ranks[0].flops.items() if phase == "F"}
    assert sum(rows.values()) == 2 * 64 * (32 * 4 + 4 * 16 * 64)
    messages = [o.event.op for o in seen["pipeline"].ranks[0].communication]
    assert sorted(messages) == ["recv"] * 4 + ["send"] * 4
