"""Prompts continued by a run's model, in this process, on local ranks or under torchrun: `phalanx generate`."""

from dataclasses import dataclass
from pathlib import Path

from phalanx.answers.answer import Answer
from phalanx.answers.machine.this_machine import require_local
from phalanx.cost.memory.state import cache_bytes
from phalanx.cost.step.generation import generation_layout
from phalanx.infer.generate import experts_span_replicas, room_of
from phalanx.infer.sampling import Sampling
from phalanx.infer.text import TextQuery, answer, question
from phalanx.infer.worker import as_rank, over_ranks, text_printer
from phalanx.measure.this_machine import rank_memory_bytes
from phalanx.runtime.process.environment import World
from phalanx.schedule.generation import BatchingPolicy, Scheduler
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.strategy.spec import Strategy, parse

_PROMPT = "It is a truth"
_LARGEST = 64 * 2**20  # bytes of a file of prompts


@dataclass(frozen=True)
class Continuation:
    """A prompt, and the text that begins with it."""

    prompt: str
    text: str


@dataclass(frozen=True)
class CacheUse:
    """The KV cache of a replica: tokens of a page, pages, and the bytes that its largest rank caches."""

    page: int
    pages: int
    bytes_per_rank: int


@dataclass(frozen=True)
class Continuations(Answer):
    """Prompts continued by a model, in their order. `prompt`, `text`: of a single prompt, else None."""

    texts: tuple[Continuation, ...]
    strategy: str
    precision: str
    cache: CacheUse
    prompt: str | None = None
    text: str | None = None


def generate(
    run: Path,
    prompts: list[str],
    file: Path | None,
    how: Sampling,
    policy: BatchingPolicy,
    line: str | None,
    precision: str | None,
    stream: bool,
    world: World | None = None,
) -> Continuations:
    """Continue the prompts and the lines of `file`; with `stream`, print texts as they come.

    `world`: the ranks that torchrun or srun started, of which this is one; None: the ranks are launched here.
    Raises InputError, CheckpointError, RankFailure.
    """
    prompts = [*prompts, *_lines(file)] if file is not None else prompts or [_PROMPT]
    strategy = build(Strategy, parse(line), "strategy") if line else Strategy()
    if world is None:
        require_local(strategy.world, "strategy")
    elif world.size != strategy.world:
        reason = f"takes {strategy.world} ranks, torchrun or srun started {world.size}"
        raise InputError("strategy", str(strategy), reason, "start as many, or change the degrees")
    asked = question(run, prompts, how, strategy, policy, precision)
    pages, most = _cache(asked)
    if world is not None and world.size > 1:
        added = as_rank(world, asked, prompts, stream)
    elif strategy.world == 1:
        added = answer(asked, piece=text_printer(prompts) if stream else lambda request, text, last: None)
    else:
        added = over_ranks(asked, prompts, stream)
    texts = tuple(Continuation(prompt, prompt + text) for prompt, text in zip(prompts, added, strict=True))
    alone = (texts[0].prompt, texts[0].text) if len(texts) == 1 else (None, None)
    return Continuations(texts, str(strategy), asked.dtype, CacheUse(policy.page, pages, most), *alone)


def _cache(asked: TextQuery) -> tuple[int, int]:
    """Return a replica's pages and the bytes that its largest rank caches. Raises InputError if these are more than
    the rank's device or, without a GPU, this machine has."""
    policy, strategy = asked.policy, asked.strategy
    layout = generation_layout(asked.model, strategy, asked.dtype)
    schedulers = [Scheduler(asked.requests[i :: strategy.dp], policy) for i in range(strategy.dp)]
    room = room_of(schedulers, policy, experts_span_replicas(asked.model, layout.mesh))
    pages, most = room.pages, max(cache_bytes(v.local, room, asked.dtype) for v in layout.stage_views())
    if most > (has := rank_memory_bytes()):
        field, value = ("page", policy.page) if policy.pages is None else ("pages", policy.pages)
        reason = f"{pages:,} page{'s' * (pages != 1)} of {policy.page:,} tokens would take {most:,} bytes of {has:,}"
        raise InputError(field, value, reason, "use less")
    return pages, most


def _lines(file: Path) -> list[str]:
    """Read a file of prompts, one on each line. Raises InputError."""
    try:
        if not file.exists():
            raise InputError("prompts", str(file), "no such file", "one prompt on each line")
        if not file.is_file() or file.stat().st_size > _LARGEST:
            raise InputError("prompts", str(file), "is not a text file of 64 MiB at most", "one prompt on each line")
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("prompts", str(file), f"cannot be read as text ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise InputError("prompts", str(file), f"line {number} is empty", "every line is a prompt")
    return lines
