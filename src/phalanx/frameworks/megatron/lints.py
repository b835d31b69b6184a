"""Mistakes in Megatron-LM's arguments: what validate_args refuses late or not at all, and what costs time in silence.

Each sees the file's tables and what was read from them, and yields (key, problem, mend); lints.py has their issues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from phalanx.frameworks.configuration import Config, Configuration, Keys, count, product, truth

Found = Iterator[tuple[str, str, str]]
_ALIKE = 0.9
"""How alike an unknown flag is to the one that was meant."""


def arguments(config: Config) -> Mapping[str, Any]:
    """Return the arguments of a program: of a command line, or the tables themselves."""
    args = config.get("args")
    return args if isinstance(args, Mapping) else config


def arg(config: Config, name: str) -> Any:
    """Return an argument, however it is spelt; None where it is not there."""
    return Keys(arguments(config)).take(name, "")


def _queues(c: Config) -> int | None:
    """Return CUDA_DEVICE_MAX_CONNECTIONS of a script, None where it sets none."""
    env = c.get("env")
    return count(env.get("CUDA_DEVICE_MAX_CONNECTIONS")) if isinstance(env, Mapping) else None


def unknown_flag(c: Config, x: Configuration) -> Found:
    """A flag that Megatron-LM has not, one letter or two from one that it has: forks have flags of their own."""
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
    """All-to-alls that one hardware queue keeps from running beside compute."""
    if x.kind == "megatron" and truth(arg(c, "overlap_moe_expert_parallel_comm")) and _queues(c) == 1:
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1 leaves little of --overlap-moe-expert-parallel-comm: all-to-alls wait for compute",
            "32",
        )
