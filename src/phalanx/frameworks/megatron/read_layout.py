"""The layout that Megatron's arguments state: a pipeline's chunks, what shards the state, recomputation, Ulysses."""

from typing import Any

from phalanx.frameworks.keys import key_table
from phalanx.frameworks.megatron import layout as pipelines
from phalanx.frameworks.megatron.patterns import Flag, HybridPattern
from phalanx.frameworks.values import count, divided, truth
from phalanx.spec.errors import InputError

KEYS = key_table("megatron")


def chunks(
    flag: Flag, pp: int | None, spread: int | None, hybrid: HybridPattern | None
) -> tuple[int | None, str | None]:
    """Return the chunks of a pipeline rank (None: open) and the blocks of each chunk, as Strategy.layers (None:
    equal). `spread`: blocks that are spread over the chunks, with an embedding or a loss that counts as one."""
    per_stage = count(flag("num_layers_per_virtual_pipeline_stage", "strategy.virtual"))
    stages = count(flag("num_virtual_stages_per_pipeline_rank", "strategy.virtual"))
    stages = stages or count(flag("virtual_pipeline_model_parallel_size", "strategy.virtual"))
    virtual = stages or divided(divided(spread, pp), per_stage) if (stages or per_stage) else 1
    blocks, written = None, flag("pipeline_model_parallel_layout", "strategy.layers")
    if isinstance(written, str):
        try:
            listed, _ = pipelines.read(written.replace("\\", ""))
        except InputError:  # cut short, as a shell left it
            virtual = None
        else:
            virtual, blocks = divided(len(listed), pp), "/".join(map(str, listed))
    if hybrid is not None and hybrid.divided and (of_pattern := divided(len(hybrid.chunks), pp)) is not None:
        virtual = of_pattern
        blocks = "/".join(map(str, hybrid.chunks)) if len(set(hybrid.chunks)) > 1 else None
    return virtual, blocks


def sharding(flag: Flag) -> tuple[int | None, bool]:
    """Return the level of ZeRO without DeepSpeed, and whether an FSDP shards, not the distributed optimizer."""
    strategy = flag("data_parallel_sharding_strategy", "strategy.zero")
    distributed = truth(flag("use_distributed_optimizer", "strategy.zero"))
    fsdp2 = truth(flag("use_torch_fsdp2", "strategy.zero"))
    custom = truth(flag("use_megatron_fsdp", "strategy.zero")) or truth(flag("use_custom_fsdp", "strategy.zero"))
    keeps = truth(flag("torch_fsdp2_no_reshard_after_forward", "strategy.zero"))
    keeps = keeps or truth(flag("torch_fsdp2_reshard_after_forward", "strategy.zero")) is False
    if custom:  # without a word it shards everything
        return KEYS.value("strategy.zero", strategy or "optim_grads_params"), True
    if fsdp2:
        return 2 if keeps else 3, True
    return 1 if distributed else 0, False


def recomputation(flag: Flag) -> tuple[str, str]:
    """Return the kind of recomputation, and what is recomputed as a Strategy writes it."""
    granularity = flag("recompute_granularity", "strategy.recompute")
    selective = truth(flag("recompute_activations", "strategy.recompute"))
    method = flag("recompute_method", "strategy.recompute")
    number = flag("recompute_num_layers", "strategy.recompute")
    if truth(flag("checkpoint_activations", "strategy.recompute")):
        granularity = granularity or "full"
    if earlier := flag("activations_checkpoint_method", "strategy.recompute"):
        granularity, method = granularity or "full", method or earlier
        number = number or flag("activations_checkpoint_num_layers", "strategy.recompute")
    stated = granularity in ("full", "selective")
    kind = str(granularity) if stated else "selective" if selective else "none"
    return kind, _recomputed(kind, method, count(number), flag("recompute_modules", "strategy.recompute"))


def _recomputed(kind: str, method: Any, number: int | None, modules: Any) -> str:
    """Return what is recomputed as a Strategy writes it."""
    if kind == "full" and (method == "block" or (number or 1) > 1):
        return f"{method or 'uniform'}:{number or 1}"
    named = modules if isinstance(modules, list) else str(modules or "").replace(",", " ").split()
    if kind == "selective" and named not in ([], ["core_attn"]):
        return "selective:" + "+".join(map(str, named))
    return kind


def ulysses(flag: Flag, cp: int | None) -> int | None:
    """Return the degree of context parallelism that exchanges tokens for heads; None: not stated."""
    kind, sizes = flag("cp_comm_type", "strategy.ulysses"), flag("hierarchical_context_parallel_sizes", "cp")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    parts = sizes if isinstance(sizes, list) else str(sizes or "").split()
    if kind == "a2a+p2p" and parts:
        return count(parts[0])
    return cp if kind == "a2a" else 1
