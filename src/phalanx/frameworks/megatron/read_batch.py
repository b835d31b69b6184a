"""The degrees that Megatron's arguments state, and the batch that they leave to each replica."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.frameworks.megatron import read_slime
from phalanx.frameworks.megatron.patterns import Flag
from phalanx.frameworks.values import count, divided, product


@dataclass(frozen=True)
class StatedBatch:
    """Degrees and batch; None: not stated."""

    world: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    ep: int | None
    ulysses: int | None
    """Megatron-DeepSpeed's degree of sequence parallelism, which is Ulysses alone."""
    micro_batch: int | None
    global_batch: int | None
    seq: int | None
    unknown: bool
    """Whether the global batch is stated without a number: by a variable of the shell, or a schedule of batches."""
    notes: tuple[str, ...]

    @property
    def dp(self) -> int | None:
        """Replicas: the ranks that the other degrees leave."""
        return divided(self.world, product(self.tp, self.pp, self.cp))

    @property
    def sequences(self) -> int | None:
        """Sequences of a step; where they are not stated, one micro-batch for each replica."""
        return self.global_batch or (None if self.unknown else product(self.micro_batch, self.dp))

    @property
    def accumulation(self) -> int | None:
        """Micro-batches of a replica."""
        if self.global_batch:
            return divided(self.global_batch, product(self.micro_batch, self.dp))
        return 1 if self.dp and not self.unknown else None


def batch(flag: Flag, names: Iterable[str], world: int | None, sequences: int) -> StatedBatch:
    """Read degrees and batch. `names`: of all arguments; `sequences`: of one example, 2 of a preference."""
    actor = read_slime.actor(flag, names)
    world = world or (actor.world if actor else None)
    earliest = count(flag("model_parallel_size", "strategy.tp"))  # releases before 2.0
    tp = earliest or _degree(flag, "tensor_model_parallel_size", "strategy.tp")
    pp = _degree(flag, "pipeline_model_parallel_size", "strategy.pp")
    ulysses = count(flag("ds_sequence_parallel_size", "strategy.cp"))
    cp = ulysses or _degree(flag, "context_parallel_size", "strategy.cp")
    ep = _degree(flag, "expert_model_parallel_size", "strategy.ep")
    if pp == 1:
        flag("no_pipeline_parallel", "strategy.pp")
    micro = count(flag("batch_size" if earliest else "micro_batch_size", "strategy.micro_batch"))
    whole = count(flag("global_batch_size", "job.global_batch"))
    micro, whole = product(micro, sequences), product(whole, sequences)
    seq = count(flag("seq_length", "job.seq")) or count(flag("encoder_seq_length", "job.seq"))
    notes: tuple[str, ...] = ()
    if actor is not None:
        actor = replace(actor, whole=whole or actor.whole)
        whole, seq = actor.whole, actor.seq
        micro, filled = actor.micro(micro, cp, divided(world, product(tp, pp, cp)))
        notes = (*actor.notes, *filled)
    schedules = ("global_batch_size", "step_batch_size_schedule")
    unknown = whole is None and any(flag(name, "job.global_batch") is not None for name in schedules)
    return StatedBatch(world, tp, pp, cp, ep, ulysses, micro, whole, seq, unknown, notes)


def _degree(flag: Flag, name: str, meaning: str) -> int | None:
    """Return a degree, 1 by default; None where it is stated without a number."""
    value = flag(name, meaning, 1)
    return None if value is None else count(value)
