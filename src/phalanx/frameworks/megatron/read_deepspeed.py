"""The layout that DeepSpeed derives from Megatron-DeepSpeed's arguments: blocks of each stage, and ZeRO's level."""

from typing import Any

from phalanx.spec.strategy.zero_levels import ZERO_LEVELS

SHARDED = "bf16 under ZeRO 0 as level 1: DeepSpeed's BF16_Optimizer shards masters and moments over dp"


def level(zero: int | None, precision: str | None) -> int | None:
    """Return the level of ZeRO that takes effect: in bf16 the optimizer of level 0 shards its state, as of level 1.

    deepspeedai/DeepSpeed v0.6 to v0.15, runtime/engine.py, `_do_optimizer_sanity_check` (BFLOAT16), and
    runtime/bf16_optimizer.py, BF16_Optimizer, which keeps a partition of the fp32 groups for each data-parallel rank.
    """
    unsharded = zero is not None and precision == "bf16" and not ZERO_LEVELS[zero].state
    return 1 if unsharded else zero


def stage_blocks(method: Any, blocks: int | None, pp: int | None) -> str | None:
    """Return the blocks of each stage under --pp-partition-method, as Strategy.layers; None: equal or unknown.

    `type:transformer|embedding` counts embedding and head as a block each (bigscience-workshop/Megatron-DeepSpeed
    8387ae17, megatron/model/gpt_model.py:300).
    """
    if not isinstance(method, str) or "embedding" not in method or not blocks or not pp or pp < 2:
        return None
    each, left = divmod(blocks + 2, pp)
    return None if left or each < 2 else "/".join(map(str, (each - 1, *[each] * (pp - 2), each - 1)))
