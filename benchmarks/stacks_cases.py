"""The cases of the facts page (stacks_observed.py): each an option of a stack, with what it does and the lines of the
library that decide it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.stacks_programs import (
    accelerated,
    ddp,
    pipelined,
    sharded,
    sped,
    tensor_parallel,
    titan,
)

_FSDP = "torch/distributed/fsdp/_fully_shard/"
_DDP = "torch/nn/parallel/distributed.py"
_STYLE = "torch/distributed/tensor/parallel/style.py"
_STAGE = "torch/distributed/pipelining/stage.py"
_SCHEDULES = "torch/distributed/pipelining/schedules.py"
_AC = "torchtitan/distributed/activation_checkpoint.py"
_LOSS = "torchtitan/components/loss.py"


@dataclass(frozen=True)
class Keeps:
    """What is kept for the backward pass, and the line of the library that decides it with its text."""

    fact: str
    source: str
    text: str


_ACTIVATIONS_AND_GRADIENTS = Keeps(
    "activations, and whole gradients from the second micro-batch on; the buckets, as large, are there all the time",
    f"{_DDP}:1437",
    "self.reducer = dist.Reducer(",
)
_SHARDED = Keeps(
    "activations and sharded gradients; nothing that was gathered",
    f"{_FSDP}_fsdp_param_group.py:509",
    "self._to_sharded()",
)
_GATHERED = Keeps(
    "what forward gathered, whole, beside activations and sharded gradients",
    f"{_FSDP}_fsdp_param_group.py:501",
    "if not self._reshard_after_forward:",
)
_WAITING = Keeps(
    "activations, and gradients whole from the second micro-batch on, until they are reduced",
    f"{_FSDP}_fsdp_param_group.py:607",
    "if not self.reduce_grads:",
)
_SELECTED = Keeps(
    "of a block its input, attention, and the results of every second product; logits of one of eight chunks",
    f"{_AC}:271",
    "if func in mm_ops and meta[mm_count_key] % 2 == 0:",
)
_INPUTS = Keeps(
    "of a block its input alone: the rest is computed again", "torch/utils/checkpoint.py:1155", "def pack_hook(x):"
)
_WHOLE_INPUT = Keeps(
    "the input of a column-wise product whole, what follows until the row-wise one split over tp",
    f"{_STYLE}:95",
    "self.desired_input_layouts = (Replicate(),)",
)


@dataclass(frozen=True)
class Case:
    """One option of a stack: its program, what it does, and the line of the library that decides it with its text."""

    stack: str
    option: str
    program: Callable[[], None]
    fact: str
    source: str
    text: str
    keeps: Keeps


CASES = (
    Case(
        "DDP",
        "default",
        ddp,
        "reduces in every micro-batch, in the parameters' type",
        f"{_DDP}:1754",
        "self.require_backward_grad_sync",
        _ACTIVATIONS_AND_GRADIENTS,
    ),
    Case(
        "DDP",
        "no_sync() but for the last micro-batch",
        partial(ddp, no_sync=True),
        "reduces once",
        f"{_DDP}:1754",
        "self.require_backward_grad_sync",
        _ACTIVATIONS_AND_GRADIENTS,
    ),
    Case(
        "DDP",
        "bucket_cap_mb=4",
        partial(ddp, bucket_cap_mb=4),
        "a bucket closes with the parameter that fills it",
        f"{_DDP}:104",
        "bucket_bytes_cap = int(",
        _ACTIVATIONS_AND_GRADIENTS,
    ),
    Case(
        "DDP",
        "gradient_as_bucket_view",
        partial(ddp, gradient_as_bucket_view=True),
        "gradients are views of the buckets: one copy less",
        f"{_DDP}:1284",
        "self.gradient_as_bucket_view",
        Keeps(
            "activations; the buckets are the gradients, and there all the time",
            f"{_DDP}:1450",
            "self.gradient_as_bucket_view,",
        ),
    ),
    Case(
        "fully_shard",
        "default",
        sharded,
        "gathers forward and backward, reduces in every micro-batch",
        f"{_FSDP}_fsdp_param_group.py:607",
        "if not self.reduce_grads:",
        _SHARDED,
    ),
    Case(
        "fully_shard",
        "reshard_after_forward=False",
        partial(sharded, reshard_after_forward=False),
        "keeps what forward gathered until its backward",
        f"{_FSDP}_fsdp_param_group.py:501",
        "if not self._reshard_after_forward:",
        _GATHERED,
    ),
    Case(
        "fully_shard",
        "reshard_after_forward=4",
        partial(sharded, reshard_after_forward=4),
        "gathers again over 4 ranks alone",
        f"{_FSDP}_fully_shard.py:180",
        "reshard_after_forward (Optional[Union[bool, int]])",
        Keeps(
            "shards over 4 ranks of what forward gathered, beside activations and sharded gradients",
            f"{_FSDP}_fsdp_param_group.py:504",
            "self._to_sharded_post_forward()",
        ),
    ),
    Case(
        "fully_shard",
        "set_requires_gradient_sync(last)",
        partial(sharded, synchronised_once=True),
        "reduces once; gradients wait whole",
        f"{_FSDP}_fsdp_param_group.py:607",
        "if not self.reduce_grads:",
        _WAITING,
    ),
    Case(
        "fully_shard",
        "bf16, reduced in fp32",
        partial(sharded, mixed=True),
        "gathers in bf16, reduces in fp32",
        f"{_FSDP}_fsdp_collectives.py:560",
        "reduce_dtype = reduce_dtype or grad_dtype",
        _SHARDED,
    ),
    Case(
        "fully_shard",
        "mesh of 2 x 4 (HSDP)",
        partial(sharded, mesh=(2, 4)),
        "sums replicas in every micro-batch too",
        f"{_FSDP}_fsdp_param_group.py:709",
        "self.all_reduce_grads,",
        _SHARDED,
    ),
    Case(
        "fully_shard",
        "blocks under checkpoint_wrapper",
        partial(sharded, recomputed=True),
        "gathers a block once more backward, for its forward pass and its gradients together",
        f"{_FSDP}_fsdp_param_group.py:509",
        "self._to_sharded()",
        _INPUTS,
    ),
    Case(
        "fully_shard",
        "the same, reshard_after_forward=False",
        partial(sharded, recomputed=True, reshard_after_forward=False),
        "gathers forward alone",
        f"{_FSDP}_fsdp_param_group.py:501",
        "if not self._reshard_after_forward:",
        Keeps(
            "of a block its input, and all that forward gathered",
            f"{_FSDP}_fsdp_param_group.py:501",
            "if not self._reshard_after_forward:",
        ),
    ),
    Case(
        "DTensor",
        "ColwiseParallel, RowwiseParallel",
        tensor_parallel,
        "sums the result of a row-wise product forward, the gradient of the input of a column-wise one backward",
        f"{_STYLE}:298",
        "outputs = outputs.redistribute(placements=output_layouts",
        _WHOLE_INPUT,
    ),
    Case(
        "DTensor",
        "the same, activations split over tokens",
        partial(tensor_parallel, sequence=True),
        "gathers inputs and scatters results, backward their gradients the other way; no input is gathered again",
        f"{_STYLE}:116",
        "input_tensor = input_tensor.redistribute(",
        Keeps(
            "the gathered input of a column-wise product (buffers of all_gather), what follows split over tp",
            f"{_STYLE}:116",
            "input_tensor = input_tensor.redistribute(",
        ),
    ),
    Case(
        "DTensor",
        "tp=4 under fully_shard over 2",
        partial(tensor_parallel, dp=2),
        "fully_shard gathers and reduces what a tp rank holds",
        f"{_FSDP}_fsdp_param.py:353",
        "if self.is_dtensor:",
        _WHOLE_INPUT,
    ),
    *(
        Case(
            "pipelining",
            f"{name}, fully_shard over 4, 4 micro-batches",
            partial(pipelined, name),
            "a backward pass leaves its parameters gathered, a forward pass does not; reduces once, after the last",
            f"{_STAGE}:846",
            "self.submod.set_reshard_after_backward(False)",
            Keeps(*keeps),
        )
        for name, keeps in (
            (
                "GPipe",
                ("activations of all micro-batches", f"{_SCHEDULES}:850", "for i in range(self._n_microbatches):"),
            ),
            (
                "1F1B",
                (
                    "activations of as many micro-batches as stages follow, and of one; gradients whole",
                    f"{_SCHEDULES}:1052",
                    "warmup_chunks = min(",
                ),
            ),
            (
                "Interleaved1F1B",
                (
                    "activations of more micro-batches than 1F1B: those of both chunks; gradients whole",
                    f"{_SCHEDULES}:2790",
                    "This is the last step in the warmup phase",
                ),
            ),
        )
    ),
    Case(
        "pipelining",
        "ZBVZeroBubble, fully_shard over 4 (kept after forward), 4 micro-batches",
        partial(pipelined, "ZBVZeroBubble", reshard_after_forward=False),
        "computes gradients of weights apart (W); reduces once, after the last",
        f"{_STAGE}:846",
        "self.submod.set_reshard_after_backward(False)",
        Keeps(
            "until W what weights' gradients need: activations, and gradients of the results of products",
            "torch/distributed/pipelining/_backward.py:228",
            'intermediates = list(param_group["intermediates"])',
        ),
    ),
    Case(
        "pipelining",
        "1F1B, DDP over 4, 4 micro-batches",
        partial(pipelined, "1F1B", ddp=True),
        "reduces in the backward pass of the last micro-batch",
        f"{_STAGE}:840",
        "with self.submod.no_sync():",
        Keeps(
            "activations of as many micro-batches as stages follow, and of one; buckets and gradients whole",
            f"{_SCHEDULES}:1052",
            "warmup_chunks = min(",
        ),
    ),
    Case(
        "torchtitan",
        "llama3_debugmodel (6 blocks, selective recomputation)",
        titan,
        "gathers eight units in bf16, forward and backward, that of norm and head once more for the loss, which goes "
        "by chunks; reduces in fp32 in every micro-batch; clips",
        f"{_LOSS}:739",
        "lm_head.unshard()",
        _SELECTED,
    ),
    Case(
        "torchtitan",
        "the same, activation-checkpoint:full",
        partial(titan, "activation-checkpoint:full"),
        "the same",
        f"{_LOSS}:739",
        "lm_head.unshard()",
        Keeps(
            "of a block its input alone: the rest is computed again", f"{_AC}:176", "return ptd_checkpoint_wrapper("
        ),
    ),
    Case(
        "torchtitan",
        "the same, activation-checkpoint:none",
        partial(titan, "activation-checkpoint:none"),
        "the same",
        f"{_LOSS}:739",
        "lm_head.unshard()",
        Keeps("all activations", "torchtitan/models/llama3/parallelize.py:58", "if ac_config is not None:"),
    ),
    Case(
        "torchtitan",
        "2 steps of accumulation",
        partial(titan, "--training.global_batch_size", "128"),
        "gathers and reduces in every micro-batch: nothing turns the reduction off",
        "torchtitan/trainer.py:828",
        "loss.backward()",
        _SELECTED,
    ),
    Case(
        "torchtitan",
        "fsdp_reshard_after_forward never",
        partial(titan, "--parallelism.fsdp_reshard_after_forward", "never"),
        "gathers forward alone, but for norm and head: the loss reshards them",
        f"{_LOSS}:772",
        "lm_head.reshard()",
        Keeps(
            "the same, and the blocks and the embedding that forward gathered",
            "torchtitan/distributed/fsdp.py:70",
            "return False",
        ),
    ),
    Case(
        "torchtitan",
        "data_parallel_replicate_degree 2",
        partial(titan, "--parallelism.data_parallel_replicate_degree", "2"),
        "sums replicas in fp32",
        f"{_FSDP}_fsdp_param_group.py:709",
        "self.all_reduce_grads,",
        _SELECTED,
    ),
    Case(
        "torchtitan",
        "tensor_parallel_degree 2",
        partial(titan, "--parallelism.tensor_parallel_degree", "2"),
        "activations are split over tokens between blocks; the loss takes a maximum and two sums over tp in fp32 "
        "for each of its eight chunks",
        f"{_LOSS}:151",
        "local_max = funcol.all_reduce(",
        Keeps(
            "the same of one tp rank, and scattered results (buffers of reduce_scatter), but no gathered input",
            f"{_AC}:62",
            "torch.ops._c10d_functional.reduce_scatter_tensor.default,",
        ),
    ),
    Case(
        "accelerate",
        "FSDP2, bf16",
        partial(accelerated, True),
        "reduces once a step in bf16; until then gradients wait whole; gathers in every micro-batch",
        "accelerate/accelerator.py:1167",
        "model.set_requires_gradient_sync(False)",
        Keeps(
            "activations, and gradients whole in bf16 from the second micro-batch on",
            "accelerate/accelerator.py:1167",
            "model.set_requires_gradient_sync(False)",
        ),
    ),
    Case(
        "accelerate",
        "FSDP2, bf16, activation_checkpointing",
        partial(accelerated, True, recomputed=True),
        "the same",
        "accelerate/accelerator.py:1167",
        "model.set_requires_gradient_sync(False)",
        Keeps(
            "of a block its input alone, and gradients whole in bf16 from the second micro-batch on",
            "accelerate/accelerator.py:1697",
            "if self.state.fsdp_plugin.activation_checkpointing:",
        ),
    ),
    Case(
        "accelerate",
        "DDP, bf16",
        partial(accelerated, False),
        "reduces once a step in fp32: parameters stay fp32 under autocast",
        "accelerate/accelerator.py:1176",
        'getattr(model, "no_sync", context)',
        Keeps(
            "activations, casts of weights to bf16 that autocast made, whole gradients, and buckets",
            "accelerate/accelerator.py:1833",
            "new_forward = autocast_context(model_forward_func)",
        ),
    ),
    *(
        Case("DeepSpeed", f"ZeRO {zero}, bf16", partial(sped, zero), fact, source, text, Keeps(*keeps))
        for zero, fact, source, text, keeps in (
            (
                0,
                "reduces once a step, in bf16, all in one buffer",
                "deepspeed/runtime/engine.py:3816",
                "dist.all_reduce(",
                (
                    "activations, and whole gradients in bf16 from the second micro-batch on",
                    "deepspeed/runtime/engine.py:3816",
                    "dist.all_reduce(",
                ),
            ),
            (
                1,
                "reduces once a step: an all-reduce; buckets of 500M elements live whole",
                "deepspeed/runtime/zero/stage_1_and_2.py:2384",
                "dist.all_reduce(",
                (
                    "activations; from the second micro-batch on whole gradients, and a bucket of 500M elements",
                    "deepspeed/runtime/zero/stage_1_and_2.py:1455",
                    "new_grad_tensor = bucket.buffer[",
                ),
            ),
            (
                2,
                "reduces in every micro-batch: an all-reduce; buckets of 500M elements",
                "deepspeed/runtime/zero/stage_1_and_2.py:2384",
                "dist.all_reduce(",
                (
                    "activations, and a shard of gradients from the second micro-batch on",
                    "deepspeed/runtime/zero/stage_1_and_2.py:1036",
                    "self.averaged_gradients[i] = ",
                ),
            ),
            (
                3,
                "reduces in every micro-batch: a reduce-scatter; gathers forward, keeps 1G elements",
                "deepspeed/runtime/zero/stage3.py:1931",
                "reduce_scatter_coalesced(",
                (
                    "activations, what forward gathered (among them), and a bucket of 500M elements all the time",
                    "deepspeed/runtime/zero/stage3.py:782",
                    "bucket.buffer = torch.empty(",
                ),
            ),
        )
    ),
)
