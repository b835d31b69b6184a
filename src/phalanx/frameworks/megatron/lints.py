"""Mistakes in Megatron-LM's arguments: what validate_args refuses late or not at all, and what costs time in silence.

Each sees the file's tables and what was read from them, and yields (key, problem, remedy).
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher

from phalanx.frameworks.configuration import Config, Configuration, count, product, truth
from phalanx.frameworks.mistakes import Found, Lint, arg, inner_axes, inner_ranks

_ALIKE = 0.9
"""How alike an unknown flag is to the one that was meant."""


def _queues(c: Config) -> int | None:
    """Return CUDA_DEVICE_MAX_CONNECTIONS of a script, None where it sets none."""
    env = c.get("env")
    return count(env.get("CUDA_DEVICE_MAX_CONNECTIONS")) if isinstance(env, Mapping) else None


def unknown_flag(c: Config, x: Configuration) -> Found:
    """An unknown flag, one letter or two from one that Megatron-LM has: forks have flags of their own."""
    for key, near in x.unknown.items():
        name, other = (text.rpartition(".")[2].lstrip("-").replace("_", "-") for text in (key, near))
        if x.kind == "megatron" and key.startswith("args.") and SequenceMatcher(None, name, other).ratio() > _ALIKE:
            yield name, "is no flag of Megatron-LM, which stops at it", f"--{other}"


def sp_alone(c: Config, x: Configuration) -> Found:
    """Sequence parallelism without tensor parallelism."""
    if x.kind in ("megatron", "nemo") and x.layout.tp == 1 and truth(arg(c, "sequence_parallel")):
        yield (
            "sequence-parallel",
            "needs tensor parallelism: with 1 rank it is turned off, or refused",
            "leave it out, or tp over 1",
        )


def connections(c: Config, x: Configuration) -> Found:
    """One hardware queue under FSDP."""
    env = c.get("env")
    value = count(env.get("CUDA_DEVICE_MAX_CONNECTIONS")) if isinstance(env, Mapping) else None
    if x.stack == "megatron-fsdp" and value == 1:
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1 lets FSDP's gathers wait behind compute, and Megatron refuses it",
            "leave it out",
        )


def connections_for_tp(c: Config, x: Configuration) -> Found:
    """Several hardware queues under sequence parallelism (GPUs before Blackwell)."""
    env, s = c.get("env"), x.layout
    given = isinstance(env, Mapping) and "CUDA_DEVICE_MAX_CONNECTIONS" in env
    overlapping = (s.tp or 1) > 1 and bool(truth(arg(c, "sequence_parallel")))
    if (
        x.kind == "megatron"
        and x.stack == "megatron-core"
        and "args" in c
        and overlapping
        and not given
        and c.get("launch")
    ):
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "is not 1: collectives of tensor parallelism may start after the products they overlap",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        )


def stages_of_layers(c: Config, x: Configuration) -> Found:
    """Blocks that do not divide over a pipeline."""
    layers, s = count(arg(c, "num_layers")), x.layout
    chunks = (s.pp or 1) * (s.virtual or 1)
    uneven = any(
        arg(c, n)
        for n in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    )
    if x.kind == "megatron" and layers and (s.pp or 1) > 1 and layers % chunks and not uneven:
        yield (
            "num-layers",
            f"{layers} do not divide into {chunks} chunks of the pipeline",
            "a multiple, or --pipeline-model-parallel-layout",
        )


def heads(c: Config, x: Configuration) -> Found:
    """Heads, or groups of them, that tensor parallelism does not divide."""
    many, groups, tp = count(arg(c, "num_attention_heads")), count(arg(c, "num_query_groups")), x.layout.tp or 1
    if x.kind != "megatron" or not many:
        return
    if many % tp:
        yield "tensor-model-parallel-size", f"{tp} does not divide {many} attention heads", "a divisor of the heads"
    if groups and truth(arg(c, "group_query_attention")):
        if many % groups:
            yield "num-query-groups", f"{groups} does not divide {many} attention heads", "a divisor of the heads"
        elif groups % tp and tp % groups:
            yield "num-query-groups", f"{groups} is neither a multiple nor a divisor of tp {tp}", "smaller tp"


def experts(c: Config, x: Configuration) -> Found:
    """Experts that their ranks do not divide."""
    experts, ep = count(arg(c, "num_experts")), x.layout.ep or 1
    if x.kind == "megatron" and ep > 1 and experts and experts % ep:
        yield "expert-model-parallel-size", f"{ep} does not divide {experts} experts", "a divisor of the experts"


def experts_without_sp(c: Config, x: Configuration) -> Found:
    """Experts under tensor parallelism alone."""
    experts = count(arg(c, "num_experts"))
    if x.kind == "megatron" and experts and (x.layout.tp or 1) > 1 and not truth(arg(c, "sequence_parallel")):
        yield (
            "sequence-parallel",
            "is required by experts under tensor parallelism in training",
            "--sequence-parallel",
        )


def recompute_halves(c: Config, x: Configuration) -> Found:
    """A granularity of recomputation without, or with another one's, method."""
    if x.kind == "megatron" and arg(c, "recompute_method") and arg(c, "recompute_granularity") == "selective":
        yield (
            "recompute-method",
            "is for full granularity; selective recomputation is refused with it",
            "leave it out",
        )
    if x.kind == "megatron" and arg(c, "recompute_granularity") == "full" and not arg(c, "recompute_method"):
        yield (
            "recompute-granularity",
            "full needs a --recompute-method",
            "--recompute-method uniform --recompute-num-layers 1",
        )


def groups_alone(c: Config, x: Configuration) -> Found:
    """A number of query groups that nothing reads."""
    stated, flag = arg(c, "num_query_groups"), arg(c, "group_query_attention")
    if (
        x.kind == "megatron"
        and count(stated)
        and truth(flag) is not True
        and count(stated) != count(arg(c, "num_attention_heads"))
    ):
        yield (
            "num-query-groups",
            "has no effect without --group-query-attention: every head has keys and values of its own",
            "--group-query-attention",
        )


def expert_mesh(c: Config, x: Configuration) -> Found:
    """Ranks that experts do not fill: inside an expert, tensor parallelism goes on unless it is set."""
    s = x.layout
    if x.kind != "megatron" or not s.world or (s.ep or 1) == 1:
        return
    etp = s.etp or s.tp or 1
    inner = product(etp, s.ep, s.pp or 1) or 1
    if s.world % inner:
        said = "tensor parallelism" if s.etp in (None, s.tp) else "expert tensor parallelism"
        yield (
            "expert-model-parallel-size",
            f"{said} {etp} x experts {s.ep} x pipeline {s.pp or 1} = {inner} does not divide {s.world} ranks",
            "--expert-tensor-parallel-size 1, or fewer",
        )


def one_queue_idle(c: Config, x: Configuration) -> Found:
    """Without tp and cp nothing needs one hardware queue, and in it collectives of the data axis wait for compute."""
    alone = (x.layout.tp or 1) == 1 and (x.layout.cp or 1) == 1
    overlapped = [n for n in ("overlap_grad_reduce", "overlap_param_gather") if truth(arg(c, n))]
    if x.kind == "megatron" and x.stack == "megatron-core" and alone and overlapped and _queues(c) == 1:
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            f"1 keeps --{overlapped[0].replace('_', '-')} from overlapping anything",
            "leave it out where tp and cp are 1",
        )


def gather_without_reduce(c: Config, x: Configuration) -> Found:
    """Parameters gathered in the background, and gradients not."""
    if x.kind == "megatron" and truth(arg(c, "overlap_param_gather")):
        if not truth(arg(c, "overlap_grad_reduce")):
            yield "overlap-param-gather", "needs overlapped gradients, and is refused alone", "--overlap-grad-reduce"
        elif x.layout.level and not x.layout.level.state and "args" in c:  # a YAML file may inherit the optimizer
            yield "overlap-param-gather", "has nothing to gather", "--use-distributed-optimizer"


def interleaved_on_two(c: Config, x: Configuration) -> Found:
    """Virtual stages without a pipeline, or on two ranks without overlapped sends."""
    s = x.layout
    if x.kind != "megatron" or (s.virtual or 1) == 1:
        return
    if s.pp == 1:
        yield "pipeline-model-parallel-size", "1 has no pipeline to interleave: refused", "2 or more"
    elif s.pp == 2 and truth(arg(c, "no_overlap_p2p_communication")):
        yield (
            "no-overlap-p2p-communication",
            "with 2 stages both neighbours are one rank, and virtual stages are refused",
            "leave it out, or 4 stages",
        )


def ends_without_pipeline(c: Config, x: Configuration) -> Found:
    """Blocks of a first or last stage where there is one stage."""
    for end in ("first", "last"):
        name = f"decoder_{end}_pipeline_num_layers"
        given, layers = count(arg(c, name)), count(arg(c, "num_layers"))
        if x.kind == "megatron" and (x.layout.pp or 1) == 1 and given and layers and given != layers:
            yield (
                name.replace("_", "-"),
                f"without a pipeline the model silently has {given} blocks, not {layers}",
                "leave it out",
            )


def experts_on_one_queue(c: Config, x: Configuration) -> Found:
    """All-to-alls that one hardware queue keeps from overlapping compute."""
    if x.kind == "megatron" and truth(arg(c, "overlap_moe_expert_parallel_comm")) and _queues(c) == 1:
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1 leaves little of --overlap-moe-expert-parallel-comm: all-to-alls wait for compute",
            "32",
        )


def mesh(c: Config, x: Configuration) -> Found:
    """Degrees that do not divide the world."""
    world, inner = x.layout.world, inner_ranks(x.layout)
    if x.kind in ("megatron", "nemo") and world and world % inner:
        shown = f"{inner_axes(x.layout)} = {inner}"
        yield "tensor-model-parallel-size", f"{shown} does not divide the {world} ranks", "smaller degrees"


def global_batch(c: Config, x: Configuration) -> Found:
    """A step that is no whole number of micro-batches."""
    s = x.layout
    each = product(s.micro_batch, s.dp)
    if x.kind in ("nemo", "megatron") and s.global_batch and each and s.global_batch % each:
        yield (
            "global_batch_size",
            f"{s.global_batch} is no multiple of micro-batch {s.micro_batch} x {s.dp} replicas",
            "one that is",
        )


LINTS = (
    Lint("unknown-flag", "NVIDIA/Megatron-LM#394", unknown_flag),
    Lint("sp-without-tp", "NVIDIA/Megatron-LM#5768", sp_alone),
    Lint("connections-with-fsdp", "ROCm/Megatron-LM#91", connections),
    Lint("connections-for-tp", "NVIDIA/Megatron-LM#533", connections_for_tp),
    Lint("uneven-stages", "NVIDIA/Megatron-LM#1304, #468", stages_of_layers),
    Lint("uneven-heads", "NVIDIA/Megatron-LM#5755, modelscope/ms-swift#8219", heads),
    Lint("uneven-experts", "pytorch/torchtitan#4258", experts),
    Lint("experts-without-sp", "NVIDIA/Megatron-LM#1587", experts_without_sp),
    Lint("recompute-halves", "NVIDIA/Megatron-LM#1487", recompute_halves),
    Lint("groups-alone", "NVIDIA/Megatron-LM#1401", groups_alone),
    Lint("expert-ranks", "NVIDIA-NeMo/Megatron-Bridge#546, NVIDIA-NeMo/Speech#14838", expert_mesh),
    Lint("one-queue-idle", "NVIDIA/Megatron-LM#1468", one_queue_idle),
    Lint("gather-without-reduce", "NVIDIA/Megatron-LM#646", gather_without_reduce),
    Lint("interleaved-on-two", "NVIDIA/Megatron-LM#750", interleaved_on_two),
    Lint("ends-without-pipeline", "NVIDIA/Megatron-LM#1778", ends_without_pipeline),
    Lint("experts-on-one-queue", "NVIDIA/Megatron-LM#2180", experts_on_one_queue),
    Lint("mesh-vs-world", "huggingface/nanotron#250, pytorch/torchtitan#1184, deepspeedai/DeepSpeed#2925", mesh),
    Lint("global-batch", "NVIDIA/cloudai#415", global_batch),
)
