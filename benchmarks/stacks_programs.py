"""Programs of the facts page (stacks_observed.py), of torch, torchtitan, accelerate and DeepSpeed.

All train the same four blocks, but for torchtitan's, which trains torchtitan's debug model.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

WORLD, MICRO_BATCHES, BLOCKS, WIDTH = 8, 2, 4, 512
BLOCK = 2 * (WIDTH * WIDTH + WIDTH)
"""Parameters of a block."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def train(model: nn.Module, inside: Callable[[int], Any], tokens: int = 16) -> None:
    """Take three steps; `inside(m)` is the context of a micro-batch."""
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        for m in range(MICRO_BATCHES):
            with inside(m):
                model(torch.randn(tokens, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(no_sync: bool = False, **options: Any) -> None:
    """DistributedDataParallel, with no_sync() in all micro-batches but the last, if asked for."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda(), **options)
    train(model, lambda m: model.no_sync() if no_sync and m < MICRO_BATCHES - 1 else nullcontext())


def sharded(
    mesh: tuple[int, ...] = (WORLD,),
    synchronised_once: bool = False,
    mixed: bool = False,
    recomputed: bool = False,
    **o: Any,
) -> None:
    """fully_shard of every block and the root; `recomputed`: blocks under torch's checkpoint wrapper."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    o["mesh"] = init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard")[-len(mesh) :])
    if mixed:
        o["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda()
    for i, block in enumerate(model):
        if recomputed:
            block = model[i] = checkpoint_wrapper(block)
        fully_shard(block, **o)
    fully_shard(model, **o)
    assert isinstance(model, FSDPModule)

    def inside(m: int) -> Any:
        if synchronised_once:
            model.set_requires_gradient_sync(m == MICRO_BATCHES - 1)
        return nullcontext()

    train(model, inside)


def tensor_parallel(sequence: bool = False, dp: int = 1) -> None:
    """DTensor's styles for an MLP, with activations split over tokens between blocks, or whole."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (dp, WORLD // dp), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda()
    between = Shard(0) if sequence else Replicate()
    for block in model:
        plan = {"up": ColwiseParallel(input_layouts=between), "down": RowwiseParallel(output_layouts=between)}
        parallelize_module(block, mesh["tp"], plan)
        if dp > 1:
            fully_shard(block, mesh=mesh["dp"])
    if dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    train(model, lambda m: nullcontext(), tokens=16 // (WORLD // dp) if sequence else 16)


def pipelined(schedule: str, ddp: bool = False, **o: Any) -> None:
    """Two pipeline ranks of four data-parallel ones each, under fully_shard or DDP; four micro-batches."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, schedules

    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2, WORLD // 2), mesh_dim_names=("pp", "dp"))
    place, kind = mesh.get_local_rank("pp"), schedules.get_schedule_class(schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    mine = ([place, 3 - place] if "ZBV" in schedule else [place, place + 2]) if several else [place]
    stages: list[PipelineStage] = []
    parts: list[nn.Module] = []  # a module that held them would name their blocks
    for index in mine:
        part = nn.Sequential(*(Block() for _ in range(BLOCKS // 2 // len(mine)))).cuda()
        for block in part if not ddp else ():
            fully_shard(block, mesh=mesh["dp"], **o)
        whole = nn.parallel.DistributedDataParallel(part, process_group=mesh.get_group("dp")) if ddp else part
        if not ddp:
            fully_shard(part, mesh=mesh["dp"], **o)
        parts.append(whole)
        stages.append(PipelineStage(whole, index, 2 * len(mine), torch.device("cuda"), group=mesh.get_group("pp")))

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).square().mean()

    run = kind(stages if several else stages[0], 4, loss_fn=loss)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()])
    x = torch.randn(64, WIDTH, device="cuda")
    for _ in range(3):
        run.step(*(x,) * (0 in mine), **{"target": x} if 2 * len(mine) - 1 in mine else {})
        optimizer.step()
        optimizer.zero_grad()


def accelerated(fsdp: bool, recomputed: bool = False) -> None:
    """accelerate with bf16 and two micro-batches, under FSDP2 or DDP."""
    from accelerate import (  # type: ignore[import-not-found]
        Accelerator,
        FullyShardedDataParallelPlugin,
    )

    options: dict[str, Any] = {"mixed_precision": "bf16", "gradient_accumulation_steps": MICRO_BATCHES}
    if fsdp:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            activation_checkpointing=recomputed,
        )
    accelerator = Accelerator(**options)
    model: nn.Module = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3 * MICRO_BATCHES):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(16, WIDTH, device="cuda")).sum())
            optimizer.step()
            optimizer.zero_grad()


def sped(zero: int) -> None:
    """DeepSpeed with bf16 and two micro-batches, at a level of ZeRO."""
    import deepspeed  # type: ignore[import-not-found]

    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(3 * MICRO_BATCHES):
        engine.backward(engine(torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)).sum())
        engine.step()


def titan(*arguments: str) -> None:
    """torchtitan's own trainer and debug model (six blocks), on a text and a tokenizer made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    with tempfile.TemporaryDirectory() as folder:
        data, words = Path(folder, "data"), Path(folder, "words")
        data.mkdir()
        words.mkdir()
        text = "the quick brown fox jumps over the lazy dog. " * 40
        Path(data, "data.json").write_text("\n".join([json.dumps({"text": text})] * 2000))
        tokenizer = Tokenizer(models.BPE())
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|begin_of_text|>", "<|end_of_text|>"]
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
        tokenizer.train_from_iterator([text], trainer)
        tokenizer.save(str(Path(words, "tokenizer.json")))
        names = {"bos_token": special[0], "eos_token": special[1]}
        Path(words, "tokenizer_config.json").write_text(json.dumps(names))
        sys.argv = [
            *("torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel"),
            *("--training.disable_cuda_graphs", "--parallelism.spmd_backend", "partial_dtensor"),
            *("--hf_assets_path", str(words), "--dataloader.dataset_path", str(data), "--dump_folder", folder),
            *arguments,
        ]
        runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
