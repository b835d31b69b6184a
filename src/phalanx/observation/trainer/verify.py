"""Verify a strategy: compare the real step of one rank of each class, on fake tensors, with its StepProgram."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.cost.step.expand import expand
from phalanx.cost.step.program import StepProgram
from phalanx.observation.diff import (
    PASSES,
    Difference,
    differences,
    identical,
    largest_deviation,
    memory_differences,
    unawaited_collectives,
)
from phalanx.observation.rank_classes import RankClass, classes
from phalanx.observation.trainer.step import HOST, RecordedStep, error_line, gpu_device, record_step
from phalanx.observation.unobservable import Unobservable, engine_has_run
from phalanx.schedule.layout import Layout, RankView
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.spec import Strategy

BLOCKS = 512
"""The most blocks of a rank whose step is executed: more take minutes, and equal blocks prove nothing new."""


@dataclass(frozen=True)
class ProvedClass:
    """The result for a class of ranks. `failed`: why its step did not finish, "" if it did; a failed step has no
    record. `deviation`: the largest difference of live bytes, None where passes differ. `seconds`: the time that this
    took."""

    ranks: RankClass
    program: StepProgram
    recorded: RecordedStep | None
    differences: tuple[Difference, ...]
    deviation: int | None
    seconds: float
    failed: str = ""

    @property
    def proved(self) -> bool:
        """Whether the step finished and equals its StepProgram."""
        return not self.failed and not self.differences


def verify(
    spec: ModelSpec,
    job: Job,
    strategy: Strategy,
    begins: Callable[[RankClass], None] = lambda _: None,
    on_gpu: bool = False,
) -> tuple[ProvedClass, ...]:
    """Verify every class of a strategy's ranks in turn; `begins` is called before each. `on_gpu`: on a fake GPU,
    whose rules the step then has to keep as well (gpu_rules.py). Raises InputError for more than BLOCKS on a rank."""
    results = []
    layout = Layout(spec, job, strategy)
    blocks = max(len(view.stage.held_blocks) for view in layout.stage_views())
    if blocks > BLOCKS:
        why = f"a rank would execute {blocks:,} blocks, {BLOCKS} at most"
        raise InputError("model.layers", spec.layers, why, "verify fewer layers, or a longer pipeline")
    for ranks in classes(layout):
        begins(ranks)
        results.append(_verify_class(layout.rank_view(ranks.rank), ranks, on_gpu))
    return tuple(results)


def _verify_class(view: RankView, ranks: RankClass, on_gpu: bool) -> ProvedClass:
    start = time.perf_counter()
    program = expand(view)
    try:
        recorded = record_step(view.model, view.job, view.strategy, ranks.rank, gpu_device() if on_gpu else HOST)
    except Unobservable as error:
        return ProvedClass(ranks, program, None, (), None, time.perf_counter() - start, str(error))
    except Exception as error:  # a real run would end with it too
        gc.collect()  # tensors of the failed step would count in the next one
        if engine_has_run(error):
            why = "a backward pass has run in this process before torch knew the fake GPU"
            raise InputError("device", "cuda", why, "verify in another process") from None
        why = error_line(error)
        return ProvedClass(ranks, program, None, (), None, time.perf_counter() - start, why)
    # Fake gradients send the most that compression may send, so that bytes must agree identical.
    results = list(differences(program.events, recorded.events, identical))
    if on_gpu and view.strategy.cp > 1:
        # Without a flash kernel for its type or mask, a ring computes its logits twice.
        results = [d for d in results if not d.aspect.startswith("FLOPs")]
    if not results:
        results += unawaited_collectives(recorded.unawaited)
    if on_gpu:
        results += _waits(view, recorded)
    deviation = None
    if not any(d.aspect == PASSES for d in results):
        if not on_gpu:  # while they run, kernels of a GPU need other memory
            results += memory_differences(program, recorded.events, recorded.memory)
        deviation = largest_deviation(program, recorded.events, recorded.memory)
    return ProvedClass(ranks, program, recorded, tuple(results), deviation, time.perf_counter() - start)


WAITS_PER_LAYER = 2
"""How often the host may wait for the GPU in the forward pass of a layer with experts: it has to know how many rows
leave for every rank, and how many come."""


def _waits(view: RankView, recorded: RecordedStep) -> Iterator[Difference]:
    """Yield a difference if the host waits for the GPU more often than it must: never in dense models, except for
    compression by threshold, which reads how many elements it sends."""
    s, times = view.strategy, sum(recorded.waits.values())
    compressor = s.compressor
    if compressor is not None and compressor.name == "threshold":
        return
    experts = view.local.experts
    layers = view.local.layers - len(experts.dense_layers) if experts is not None else 0
    allowed = WAITS_PER_LAYER * layers * s.accumulation(view.job)
    if times > allowed:
        where = max(recorded.waits, key=lambda place: recorded.waits[place])
        yield Difference(
            "waits of the host for the GPU in a step", f"at most {allowed:,}", f"{times:,}", f"at {where}"
        )
