"""What stacks do differently within a step, as data: one Policy each, from the stack's public source.

ZeRO's levels fix what is sharded between steps. They do not fix when gradients reduce, nor how long gathered
parameters stay: a level of one stack takes m times the traffic of the same level of another, or keeps unsharded
gradients instead. Each policy names the file and the line that it was read from.

Fields are 0 or 1, so that stacks can be gathered into columns. What a stack *can* do (levels, schedules) is in its
row of cost/analytic/stacks.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phalanx.cost.hardware.columns import Column


@dataclass(frozen=True)
class Policy:
    """When a stack reduces gradients and gathers parameters, by ZeRO level, without and with a pipeline.

    `reduces`: 1 if gradients are reduced after every micro-batch, and their shards accumulated; 0 if unsharded
    gradients are accumulated and reduced once a step. `gathers`: 1 if parameters are gathered for every micro-batch;
    0 if once a step. ZeRO-1 does both once."""

    zero0_reduces: Column = 0.0
    """At level 0 without a pipeline, whole gradients."""
    zero2_reduces: Column = 1.0
    zero2_reduces_in_pipeline: Column = 1.0
    zero2_gathers: Column = 0.0
    """1: parameters are sharded between micro-batches at level 2 too, and stay gathered from the forward to the
    backward pass, as FSDP has it."""
    zero2_gathers_in_pipeline: Column = 0.0
    zero3_reduces: Column = 1.0
    zero3_reduces_in_pipeline: Column = 1.0
    zero3_gathers: Column = 1.0
    """At level 3 the backward pass gathers again."""
    zero3_gathers_in_pipeline: Column = 1.0
    replicas_each: Column = 0.0
    """1: where shards are reduced after every micro-batch, they are summed over their replicas then too; 0: once."""
    repeats_last: Column = 1.0
    """1: recomputing a block repeats its last collective too, whose result nothing reads."""
    scatters_messages: Column = 0.0
    """1: each tp rank sends its part of a pipeline message, which the receivers gather, without sequence parallelism
    too."""
    halves_stream: Column = 0.0
    """1: collectives of sequence parallelism run in two halves, where each rank has equally many tokens of both."""
    keeps_gathered: Column = 0.0
    """1: under sequence parallelism gathered inputs stay for their weights' gradients; 0: these are gathered
    again."""
    copies_each: Column = 0.0
    """1: gradients of which tp ranks have parts are summed parameter by parameter whenever gradients are reduced; 0:
    together and once."""
    loss_apart: Column = 0.0
    """1: the two last numbers of the loss over tp ranks travel apart."""
    sends_copies: Column = 0.0
    """1: a token goes to all etp ranks of its expert; 0: to one, and they gather."""
    equal_rounds: Column = 0.0
    """1: interleaved stages take micro-batches in equal rounds of at least as many as ranks; 0: of as many."""
    pads_core: Column = 0.0
    """1: where values are narrower than keys, or wider, attention's core computes both at the wider width."""
    sends_counts: Column = 0.0
    """1: ranks tell each other in an all-to-all how many tokens come; and gather the choices of a sequence's tokens
    where one depends on others."""
    slices_head: Column = 0.0
    """1: unless the schedule splits backward passes, the head goes through its tokens in slices where it keeps less
    (schedule/layers/head.py), tp ranks in equal ones, of which each sends the numbers of its own loss."""


PHALANX = Policy(
    zero3_gathers_in_pipeline=0.0,
    repeats_last=0.0,
    halves_stream=1.0,
    sends_copies=1.0,
    sends_counts=1.0,
    pads_core=1.0,
    equal_rounds=1.0,
    slices_head=1.0,
)
"""Our runtime: gradients after every micro-batch at 2 and 3 (runtime/data_parallel/engine.py); with a pipeline,
parameters once a step (schedule/gradients/sharding.py, `sharding_of`). What layers send:
schedule/layers/collectives.py."""

MEGATRON = Policy()
"""Megatron-FSDP, the only one of Megatron's that shards gradients: `optim_grads` reduce-scatters on all
micro-batches, `optim_grads_params` also gathers on all (Megatron-LM d98e8a6,
megatron/core/distributed/fsdp/mcore_fsdp_adapter.py:167-169; fsdp/src/megatron_fsdp/megatron_fsdp.py:879-882,
`grad_reduce_every_bprop`), whatever the pipeline. Its DistributedOptimizer is level 1. A checkpointed
block runs again as a whole (megatron/core/tensor_parallel/random.py:591, CheckpointFunction); a pipeline message is a
rank's part of the tokens only under sequence parallelism (megatron/core/pipeline_parallel/schedules.py:2140)."""

MEGATRON_2021 = Policy(scatters_messages=1.0)
"""Before Megatron-Core: scatter/gather of pipeline messages (Narayanan et al. 2021, section 4.1)."""

DEEPSPEED = Policy(scatters_messages=1.0)
"""Level 2 reduces in every backward pass (DeepSpeed edaa722, deepspeed/runtime/zero/stage_1_and_2.py:1768,
`partition_gradients or is_gradient_accumulation_boundary`), level 3 too (stage3.py); with a pipeline both are refused
(deepspeed/runtime/pipe/engine.py:77). Messages are scattered over tp ranks (engine.py:143, `is_pipe_partitioned`)."""

FSDP = Policy(
    zero0_reduces=1.0,
    zero2_gathers=1.0,
    zero2_reduces_in_pipeline=0.0,
    zero3_reduces_in_pipeline=0.0,
    zero3_gathers_in_pipeline=0.0,
    replicas_each=1.0,
    repeats_last=0.0,
    equal_rounds=1.0,
    keeps_gathered=1.0,
    copies_each=1.0,
    loss_apart=1.0,
)
"""PyTorch's own parallelisms, compared with the installed library (tests/frameworks/test_policies_observed.py).
DDP is level 0: every backward pass reduces (torch 2.13, torch/nn/parallel/distributed.py:1754). fully_shard is level
3: every unit is gathered in the forward and in the backward pass, every backward pass reduces, over shards and then
over their replicas (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:560). Checkpoints stop where the last
tensor that is read has been computed again (torch/utils/checkpoint.py, `early_stop`). DTensor keeps what it gathered,
and sums each norm's gradient over tp ranks as it comes; its loss sends three times (`loss_parallel`). Level 2 is
`reshard_after_forward=False`: gathered once per micro-batch. With a pipeline parameters stay
(torchtitan/distributed/fsdp.py:127-132) and stages turn off reduction and resharding until their last backward pass
(torch 2.13, torch/distributed/pipelining/stage.py:845-847), so that unsharded gradients accumulate in the reduced
type (torch/distributed/fsdp/_fully_shard/_fsdp_param.py:802-820). Interleaved stages: rounds of m / max(1, m // p)
micro-batches (torch/distributed/pipelining/schedules.py:2935)."""

TORCHTITAN = replace(FSDP, repeats_last=1.0)
"""torchtitan turns no reduction off for accumulation (b5bcd76, torchtitan/trainer.py:882), and its checkpoints do not
stop early (torchtitan/distributed/activation_checkpoint.py:180)."""

COMPOSER = replace(FSDP, zero0_reduces=0.0)
"""Composer turns reductions off for accumulation under DDP only (6405188, composer/trainer/trainer.py:2897, a null
context unless DDP)."""

ACCELERATE = replace(FSDP, zero0_reduces=0.0, zero2_reduces=0.0, zero3_reduces=0.0)
"""accelerate accumulates under no_sync(), which calls set_requires_gradient_sync(False) (16cb6eb,
src/accelerate/accelerator.py:1165): unsharded gradients stay until the last micro-batch."""

NANOTRON = Policy()
"""DDP under no_sync() but for the last micro-batch (nanotron 2411b02,
src/nanotron/parallel/pipeline_parallel/engine.py); inputs are gathered again (`tp_recompute_allgather`)."""

JAX = Policy(zero2_gathers=1.0)
"""MaxText's accumulated gradients have the shardings of the parameters, in the carry of a scan over micro-batches
(maxtext e591f30, src/maxtext/utils/gradient_accumulation.py:73-130), so that each micro-batch's are reduced into
shards. PAX is taken to do the same."""
