"""Fusion, overlap, launches and allocation of a software stack, as physical constants.

A Profile says nothing about hardware (cost/hardware/system.py) or about a model. Its values describe one stack and
release: counted in the stack's code (frameworks/*/facts.toml), or fitted on published runs (fitted_constants.json); a
stack without its own number inherits its parent's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from phalanx.cost.analytic.fitted_constants import resolve
from phalanx.cost.hardware.columns import Column
from phalanx.cost.ledger.live_bytes import Keeps
from phalanx.cost.ledger.policy import Policy
from phalanx.frameworks.registry import priced_stack


@dataclass(frozen=True)
class Profile(Keeps):
    """Constants of one stack and release, in addition to Keeps. Bytes are per element of the named tensor, in the
    forward pass; overlaps are the share of a transfer that is hidden where there is enough compute to hide it."""

    name: str = ""
    score_bytes: Column = 10.0
    """Traffic per score of attention that writes scores: masked softmax and dropout, in 2-byte elements."""
    hidden_bytes: Column = 20.0
    """Traffic per token and hidden element of a block outside of products: norms, residuals, rotary, dropout."""
    ffn_bytes: Column = 8.0
    """The same per element inside the MLP: activation, gate, bias."""
    backward_traffic: Column = 1.6
    """Backward over forward traffic, of blocks and MLPs."""
    logit_bytes: Column = 14.0
    """Traffic per logit of the loss, forward and backward together."""
    pads_vocab: Column = 1.0
    """1: a rank's part of the vocabulary is rounded up so that its products are aligned (Megatron-LM,
    --make-vocab-size-divisible-by 128)."""
    vocab_multiple: Column = 0.0
    """The rows of a rank's part of the vocabulary are rounded up to a multiple of this; 0: they are not rounded."""
    gemm: Column = 1.0
    """Rate of matrix products relative to the chip's best."""
    gemm8: Column = 1.0
    """The same for products in 8 bits or less, on top of `gemm`."""
    grouped: Column = 0.8
    """Rate of grouped products of experts relative to plain ones."""
    portable: Column = 0.0
    """Kind of flash attention. 0: cuDNN's, or FlashAttention 3; 2: FlashAttention 2; 3: FlexAttention; 1: torch's
    choice, which is FlashAttention 2 except on Blackwell (torchtitan b5bcd76, torchtitan/models/attention.py,
    `_init_backend`: cuDNN first), where it takes keys and values of one width alone (pytorch/torchtitan#1610); 0.5:
    since torch 2.10 with cuDNN 9.15, which takes its own on Hopper too (pytorch/pytorch 001f694,
    aten/src/ATen/native/transformers/ cuda/sdp_utils.cpp:75)."""
    plain: Column = 0.0
    """1: products are plain library calls, not tuned for the chip's generation."""
    attention: Column = 1.0
    """Rate of flash attention relative to other stacks with the same kind of kernel."""
    cast_bytes: Column = 6.0
    """Traffic per element cast to an 8-bit (or smaller) format."""
    fine_cast: Column = 1.5
    """The same with a scale per row or per 32 elements, relative to a scale per tensor."""
    recasts: Column = 0.0
    """1: weights are cast anew in both passes of every micro-batch (torchao 36027d8, float8_linear.py:73,
    131); 0: once a step (TransformerEngine, module/base.py, get_weight_workspace), which is not priced."""
    launches: Column = 30.0
    """Kernels of a block's forward pass that the CPU launches one by one, counted in the stack's code; 0 if the step
    is one program. The GPU is never faster than its launches."""
    captured: Column = 0.0
    """1: a graph launches all kernels of a sublayer. Experts' are counted as published recipes capture them."""
    unfused_launches: Column = 8.0
    """Further launches of a block's forward pass if attention's masked softmax is not a single kernel."""
    packed_launches: Column = 0.0
    """Further launches of an attention block's forward pass where documents are packed into sequences."""
    launch_s: Column = 20e-6
    """CPU time of a launch, Python and autograd included."""
    hook_s: Column = 0.0
    """CPU time around a module that runs, where ZeRO-3 fetches and releases by hooks of every module."""
    launch_backward: Column = 1.5
    """Backward over forward, of launches."""
    listed: Column = 0.0
    """Collectives per pass of a block that take a list of tensors, one per rank."""
    list_s: Column = 3e-4
    """Seconds by which each of these delays later launches, in jobs delayed by their CPUs; and for which nothing runs
    around a `joined` collective."""
    held_up: Column = 0.0
    """Share of multi-node jobs delayed by their CPUs, assumed if a job's collectives were not observed."""
    stalled_s: Column = 1e-3
    """Delay of each pipeline message where the ranks of a node do not reach each other over NVLink."""
    joined: Column = 0.0
    """1: launches are barely ahead of a small model's kernels, so that nothing runs for `list_s` around a collective
    of tensor parallelism: its stream takes over, and its ranks wait for the last one."""
    launch_sync: Column = 0.05
    """Slowdown of launches over 8 or more tp ranks, proportionally less over fewer: collectives wait for the slowest
    CPU."""
    tp_split: Column = 0.0
    """1: products are cut into one part per tp rank, and each overlaps the exchange of the next part's rows
    (Transformer Engine's ring exchange)."""
    tp_narrow: Column = 0.0
    """1: all-gathers of tensor parallelism carry 8 bits where products read them with one scale per tensor."""
    tp_overlap: Column = 0.3
    tp_async: Column = 0.0
    """1: where nothing else overlaps (`tp_overlap` 0), the collective of an input's gradient still travels during the
    product of its weight's gradient, so that only the others wait."""
    tp_copies: Column = 0.0
    """1: the gathers and reduce-scatters of a stream that is split by its tokens copy the whole stream, since they
    join and split tensors in their first dimension, which is the batch; not if they overlap (`tp_overlap`)."""
    dp_overlap: Column = 0.7
    gather_overlap: Column = 0.6
    """Overlap of the gather after the update (ZeRO-1, 2) with the next forward pass."""
    pp_overlap: Column = 0.5
    """Overlap of pipeline messages with the next chunk's compute, where ranks have several chunks."""
    ep_overlap: Column = 0.0
    ring_bytes: Column = 24.0
    """Traffic per element of attention's result and step of a context-parallel ring, in each pass: partial results
    are weighted and summed in fp32."""
    by_matrix: Column = 0.0
    """1: parameters are gathered and gradients reduced matrix by matrix, as a compiler that partitions each product
    does, in place of whole units."""
    copies_units: Column = 0.0
    """1: a unit's gathered buffer is copied into its parameters, and its gradients into a buffer to be reduced, on
    the stream of its kernels (torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:489, 603)."""
    contention: Column = 1.13
    """Slowdown of compute that overlaps communication: near 1.13 as measured for Galvatron (Miao et al. 2022); fitted
    for stacks with runs at ZeRO-3."""
    parameter_bytes: Column = 2.0
    """Bytes per gathered parameter element."""
    dequantised_bytes: Column = 0.0
    """Traffic per frozen parameter of a block each time that it is converted into a 16-bit weight."""
    adapter_state_bytes: Column = 12.0
    """Master weight and moments of an adapter's parameter."""
    optimizer_bytes: Column = 30.0
    """Traffic per parameter of norm, clipping and update."""
    bucket_bytes: Column = 160e6
    """Bytes of gradients per bucket."""
    rank_bucket_bytes: Column = 0.0
    """The same per data-parallel rank, where buckets grow with their number."""
    step_s: Column = 0.01
    """Fixed seconds per step: data, the norm's all-reduce, logging."""
    token_bytes: Column = 8.0
    """Traffic per routed token and hidden element: permutation there and back."""
    router_s: Column = 1.0e-4
    """Seconds per layer with experts: routing, and waiting for the counts."""
    expert_s: Column = 1e-5
    """Seconds per pass of each of a rank's experts in addition to its products' FLOPs, twice that backward: their
    products are launched, and their rows quantised, one expert after another."""
    imbalance: Column = 0.1
    """Share of the experts' products that a rank waits for the one whose experts got the most tokens, where routing
    is balanced."""
    spread: Column = 0.0
    """Standard deviation of an expert's tokens over their mean."""
    expert_launches: Column = 30.0
    """Kernels that a block with experts launches beyond an MLP's: router, permutation, exchange."""
    balanced: Column = 0.0
    """1: pipeline ranks have equal work (the head counted), not equal numbers of blocks."""
    by_work: Column = 0.0
    """1: the same by our own partition, for memory (times assume equal chunks until a strategy is timed action by
    action)."""
    idle_bytes: Column = 0.0
    """Bytes per parameter of the state that are not allocated at the peak of activations, but by the update."""
    update_bytes: Column = 0.0
    """Bytes of temporaries of the update per element that it updates, beyond the state."""
    cast_gradient: Column = 0.0
    """Bytes of a sharded gradient in the masters' type, if the update casts gradients of another type; 0: it does
    not."""
    update_elements: Column = np.inf
    """Most elements that are updated at a time at level 3."""
    kept_logit: Column = 8.0
    """Bytes per logit at the loss."""
    unit_buffers: Column = 0.0
    """1: from ZeRO-2 on, units take turns in permanent buffers to be gathered and reduced."""
    buffers: Column = 0.0
    """Unsharded hidden states that tensor parallelism gathers into, kept from step to step."""
    stand_in: Column = 0.0
    """1: products that accumulate their weights' gradients in place return a placeholder gradient (Transformer Engine
    2 and later), kept from step to step."""
    given: Column = 0.0
    """Unsharded hidden states that a block passes to tensor-parallel collectives and frees while these still read
    them."""
    waits: Column = 0.0
    """1: the CPU waits for each message of a pipeline's warm-up, so that it is not ahead of the GPU there."""
    constant_bytes: Column = 0.1e9
    """Bytes that do not depend on the model: tables, workspaces, scratch."""
    fragments: Column = 0.06
    """Memory reserved by the allocator beyond the peak, as a share of the bytes above the model state."""
    context_bytes: Column = 1.5e9
    """Bytes that the driver shows beyond those reserved by the allocator: context, NCCL, libraries."""
    jitter: Column = 0.0
    """Relative slowdown per doubling of ranks beyond 8: the slowest rank sets the pace."""
    on_host: Column = 0.0
    """Share of the optimizer's state, and of its update, on the host."""
    offloads_gradients: Column = 0.0
    """1: shards of gradients lie on the host too, next to the optimizer's state there."""
    parameters_on_host: Column = 0.0
    """1: sharded parameters are on the host between their uses."""
    offloaded_blocks: Column = 0.0
    """Blocks of a rank whose kept activations go to the host and back."""
    orthogonal: Column = 0.0
    """1: the update of matrices is orthogonalised (Muon), by five iterations of three products."""
    scored: Column = 0.0
    """Additional forward passes of each micro-batch, which score it (by a reference)."""
    overlaps_experts: Column = 0.0
    """1: exchanges of tokens overlap the compute of another micro-batch."""
    sends_once: Column = 0.0
    """1: a token goes once to each node that has one of its experts (DeepEP), not once to each expert."""
    gathers_tokens: Column = 0.0
    """1: every rank of an expert-parallel group gets all of its tokens."""


FIELDS = {f.name: float(f.default) for f in fields(Profile) if f.name not in ("name", "policy")}  # type: ignore[arg-type]
"""Name of each constant -> its default."""


def profile(name: str, constants: Mapping[str, float] | None = None) -> Profile:
    """Return the Profile of a stack by name, with these fitted constants in place of the shipped ones. Raises
    InputError for an unknown stack."""
    stack = priced_stack(name)
    values = resolve(FIELDS, stack.lineage, constants) | dict(stack.constants)
    return Profile(name=name, policy=Policy(**stack.policy), **values)
