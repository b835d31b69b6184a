"""slime's flags of a step in addition to Megatron's: the ranks of the actor, and micro-batches by their tokens
(THUDM/slime 624b824a, slime/utils/arguments.py, slime/backends/megatron_utils/arguments.py)."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.frameworks.values import count, divided, product

Flag = Callable[[str, str], Any]

_ROLLOUT_FLAGS = re.compile(r"sglang_\w+|colocate|(no_)?offload(_\w+)?")
"""Flags of the engine that generates, and of what leaves the GPUs between generation and training."""
_GENERATION = (
    "the price is of the actor's updates: generation, log-probabilities and the reference take time of their own"
)


@dataclass(frozen=True)
class Actor:
    """The model that is trained; None: not stated. `world`: its ranks; `whole`: sequences of a step; `seq`: tokens of
    the longest sequence."""

    world: int | None
    whole: int | None
    seq: int | None
    most_tokens: int | None
    """Tokens of a rank's micro-batch at most, where micro-batches are filled by tokens; None: they are not."""
    notes: tuple[str, ...]

    def micro(self, given: int | None, cp: int | None, dp: int | None) -> tuple[int | None, tuple[str, ...]]:
        """Return the sequences of a micro-batch, and what is assumed of them. `given`: --micro-batch-size, which has
        no effect where micro-batches are filled by tokens."""
        if self.most_tokens is None:
            return given or 1, ()
        tokens, own = self.most_tokens * (cp or 1), divided(self.whole, dp)
        if self.seq is None:
            return None, (
                f"micro-batches are filled up to {tokens:,} tokens: --seq and --batch say of which sequences",
            )
        fits = max(1, tokens // self.seq)
        micro = next(n for n in range(fits, 0, -1) if not own or own % n == 0)
        return micro, (f"micro-batches are filled up to {tokens:,} tokens, of sequences of the longest kind",)


def actor(flag: Flag, names: Iterable[str]) -> Actor | None:
    """Return the actor that slime's flags state; None for flags of another program. `names`: of all flags."""
    nodes, per_node = count(flag("actor_num_nodes", "world")), count(flag("actor_num_gpus_per_node", "world"))
    if not (nodes and per_node):
        return None
    for name in names:
        if _ROLLOUT_FLAGS.fullmatch(name.replace("-", "_")):
            flag(name, "rollout")
    prompts, samples = (
        count(flag("rollout_batch_size", "job.global_batch")),
        flag("n_samples_per_prompt", "job.global_batch"),
    )
    steps = count(flag("num_steps_per_rollout", "job.global_batch")) or 1
    whole = divided(product(prompts, count(samples) or 1), steps)
    longest = [count(flag(f"rollout_max_{part}_len", "job.seq")) for part in ("context", "prompt", "response")]
    context, prompt, response = longest
    seq = context or (response + (prompt or 0) if response else None)
    notes = [f"every sequence is as long as it may be, {seq:,} tokens: measured ones are shorter"] if seq else []
    flag("seq_length", "job.seq")  # a placeholder
    if flag("loss_type", "numbers") != "sft_loss":
        notes.append(_GENERATION)
    tokens = count(flag("max_tokens_per_gpu", "strategy.micro_batch"))
    filled = flag("use_dynamic_batch_size", "strategy.micro_batch") not in (None, False)
    return Actor(product(nodes, per_node), whole, seq, tokens if filled else None, tuple(notes))
