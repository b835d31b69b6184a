"""Verify generation: steps of one rank of each pipeline stage, on fake tensors, compared with their StepPrograms.

    decode    every slot computes a token over its cached ones
    prefill   one prompt, all of it
    mixed     every slot but one decodes, together with a chunk of a partly cached prompt

Ranks of a stage issue the same events, with other peers; where experts make them uneven, the first of a stage
represents them, since no rank exceeds it. The program is that of infer/replica.py; step.py says what is replaced.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from phalanx.cost.step.generation import generation_layout, generation_step
from phalanx.cost.step.program import StepProgram
from phalanx.infer.generate import experts_span_replicas
from phalanx.infer.replica import Replica
from phalanx.observation.diff import Difference, differences, identical, unawaited_collectives
from phalanx.observation.rank_classes import RankClass
from phalanx.observation.trainer.step import (
    HOST,
    Building,
    FakeRank,
    FakeTracker,
    FakeWeights,
    error_line,
    fake_tensors,
)
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.recorder import RunningPass
from phalanx.runtime.tracing.instrument import instrument
from phalanx.schedule.generation import Batch, CacheSeat, Room, Slot
from phalanx.schedule.layout import RankView
from phalanx.spec.job import DType
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class ProvedStep:
    """One step of a rank. `cache`, `state`: recorded bytes of its KV cache, and of all that stays between steps."""

    name: str
    batch: Batch
    program: StepProgram
    cache: int
    state: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class ProvedStage:
    """The steps of one class of ranks. `failed`: why they did not finish, "" if they did."""

    ranks: RankClass
    steps: tuple[ProvedStep, ...]
    seconds: float
    failed: str = ""

    @property
    def proved(self) -> bool:
        """Whether all steps finished and equal their programs."""
        return not self.failed and not any(s.differences for s in self.steps)


def batches(slots: int, context: int, chunk: int) -> dict[str, Batch]:
    """Return the batches to verify: contexts of `context` tokens when a step is over, prompts in chunks of at most
    `chunk`."""
    chunk = min(chunk, context)
    decoding = tuple(Slot(i, context - 1, 1, True) for i in range(slots)) if context > 1 else ()
    prompt = Slot(slots - 1, context - chunk, chunk, True)
    steps = {"prefill": Batch((Slot(0, 0, chunk, chunk == context),))}
    if decoding:
        steps["decode"] = Batch(decoding)
    if slots > 1 and 1 < chunk < context:
        steps["mixed"] = Batch.of((*decoding[:-1], prompt))
    return steps


def verify_generation(
    model: ModelSpec,
    strategy: Strategy,
    dtype: DType,
    slots: int,
    context: int,
    chunk: int,
    page: int,
    begins: Callable[[RankClass], None] = lambda _: None,
) -> tuple[ProvedStage, ...]:
    """Verify the steps of `batches` on every pipeline stage, every replica with the same batch, and a cache that
    holds `slots` contexts. Raises InputError."""
    layout = generation_layout(model, strategy, dtype)
    spare = experts_span_replicas(model, layout.mesh)
    room = Room(slots * -(-context // page) + spare, page, slots + spare, min(chunk, context))
    stages = []
    for place in range(strategy.pp):
        rank = layout.mesh.group_of(0, "pp")[place]
        words = f"pp {place}" if strategy.pp > 1 else "alike"
        ranks = RankClass(rank, strategy.world // strategy.pp, words)
        begins(ranks)
        start, failed, steps = time.perf_counter(), "", []
        try:
            view = layout.rank_view(rank)
            steps = _steps(view, batches(slots, context, chunk), room)
        except Exception as error:  # a real step would end with it too
            failed = error_line(error)
        stages.append(ProvedStage(ranks, tuple(steps), time.perf_counter() - start, failed))
    return tuple(stages)


def _steps(view: RankView, named: dict[str, Batch], room: Room) -> list[ProvedStep]:
    """Take the steps as one rank, and compare each with its program."""
    steps, s = [], view.strategy
    assert view.rank is not None
    with fake_tensors(2):
        comm = Comm(FakeRank(view.rank, s.world, 0, 1), view.mesh, null=True)
        with Building(HOST):
            replica = Replica(view, comm, FakeWeights(), room)
        for name, batch in named.items():
            sampled = batch.samples * s.dp
            program = generation_step(view, batch, sampled, room)
            each = -(-max(slot.context for slot in batch.slots) // room.page)
            held = {i: CacheSeat(tuple(range(i * each, (i + 1) * each)), i) for i in (s.request for s in batch.slots)}
            with instrument(
                replica.model.units(), comm.recorder, lambda: RunningPass(0, "F"), FakeTracker
            ) as tracked:
                logits = replica.step(batch, [0] * batch.tokens, held)
                replica.share((), 0, sampled)
            del logits
            differing = list(differences(program.events, comm.recorder.events, identical))
            differing += unawaited_collectives([handle.name for handle in comm.unawaited.values()])
            comm.unawaited.clear()
            for aspect, ours, theirs in (
                ("bytes of the KV cache", program.state.cache, replica.cache.nbytes),
                ("live bytes when the step begins", program.state.total, tracked.start),
            ):
                if ours != theirs:
                    differing.append(Difference(aspect, f"{ours:,}", f"{theirs:,}"))
            steps.append(ProvedStep(name, batch, program, replica.cache.nbytes, tracked.start, tuple(differing)))
    return steps
