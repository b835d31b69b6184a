"""What `phalanx train` does: prepare the data, plan, launch the ranks, and compare the run with its plan."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.answers.answer import DRAWN, Answer
from phalanx.answers.machine.this_machine import Announce, require_this_machine
from phalanx.answers.plan import Decision, decide
from phalanx.answers.runs.experts import MeasuredQuantity
from phalanx.cost.step.expand import expand
from phalanx.observation.diff import differences
from phalanx.planning.explain.program_traffic import bytes_sent
from phalanx.runs.folder import RUNS, open_run
from phalanx.runs.initial_weights import companion_files, start_from_weights
from phalanx.runs.resume import job_for_ranks, resume_point, resumed_job, was_started_by
from phalanx.runtime.process.folder import cache_folder
from phalanx.schedule.event import Event
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.job_file import JobFile
from phalanx.spec.model.modules import require_modules
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.spec import Strategy

if TYPE_CHECKING:
    from phalanx.runtime.process.environment import World
    from phalanx.training.data import TokenSet

_SILENT_S = 10.0  # where a step takes longer, this is announced: a step's line is printed only when it is done


@dataclass(frozen=True)
class Outcome(Answer):
    """How a run ended, and how it compares with its plan.

    `run`: its folder, relative to the working folder. `unigram_entropy`: of the training tokens, in nat per token.
    `comparison`: measured figures with their predictions. `differences`: events that differ from the plan's, as text.
    `timeline`: seconds of a step by kind of work. `sample`: a text by the model, "" if none was asked for.
    `recorded`: content of recorded.json. `routed`: whether the model has experts, whose load the plan assumes even.
    """

    run: str
    interrupted: bool
    last_step: int
    eval_loss: float | None
    unigram_entropy: float
    comparison: tuple[MeasuredQuantity, ...]
    differences: tuple[str, ...]
    timeline: dict[str, Any] | None
    folder: Path = field(metadata=DRAWN)
    recorded: dict[str, Any] = field(metadata=DRAWN)
    routed: bool = field(default=False, metadata=DRAWN)
    sample: str = ""


def prepare_data(file: JobFile, announce: Announce) -> TokenSet:
    """Read, encode and cache the tokens of a job, before any rank starts. Raises InputError."""
    from phalanx.training import tensorboard
    from phalanx.training.data import batches, prepare, require_documents

    if file.train.tensorboard:
        tensorboard.require()
    tokens = prepare(file.train, file.model.vocab, cache_folder(), announce)
    if file.job.batch_rows > 1:
        require_documents(tokens, file.job.documents)
    batches(tokens.training(), tokens.training_starts, file.job, file.train.seed)
    return tokens


def train(
    job: str | Path | JobFile | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    max_restarts: int = 0,
    announce: Announce = lambda _: None,
) -> Outcome:
    """Plan a job, train it on ranks of this machine, and compare the run with its plan.

    `job`: a job file or a plan of one; with `resume` the run to continue, None for the one that was active last.
    `overrides`: fields of the job, such as "job.seq=128" or "strategy=dp=2". `max_restarts`: the most restarts after
    failures. Needs torch. Raises InputError, RankFailure."""
    if isinstance(job, JobFile):
        file = job
    elif resume:
        file = resumed_job(None if job is None else Path(job), list(overrides))
    elif job is None:
        raise InputError("job", None, "is missing", "name a job file or a plan, or resume a run")
    else:
        file = plan.job_of(Path(job), list(overrides))
    result = run_training(file, resume, None, lambda _: None, announce, max_restarts)
    assert result is not None
    return result


def run_training(
    file: JobFile,
    resume: bool,
    world: World | None,
    show: Callable[[Decision], None],
    announce: Announce,
    max_restarts: int = 0,
) -> Outcome | None:
    """Plan a job, train it, and compare the run with the plan.

    With `world` None the ranks are launched here, and restarted at most `max_restarts` times after a failure.
    Otherwise this is one rank of a `world` that torchrun or srun started, and only rank 0 returns an outcome. `show`
    is called with the decision before training starts. Raises InputError, RankFailure.
    """
    if world is not None:
        return _train_rank(file, resume, world, show, announce)
    from phalanx.runtime.checkpoint.leftovers import sweep
    from phalanx.runtime.process.launch import launch

    require_this_machine(file)
    decision, tokens = _begin(file, resume, None, announce)
    show(decision)
    _announce_long_steps(decision, announce)
    with open_run(decision.plan, tokens.tokenizer, resume, companion_files(decision.plan.train)) as folder:
        argument = json.dumps({"folder": str(folder), "resume": resume})
        try:
            launch(
                "phalanx.training.worker",
                argument,
                decision.plan.strategy.world,
                decision.plan.train.threads,
                lambda: announce("stopping after this step; Ctrl-C again to end at once"),
                decision.plan.train.timeout_s,
                max_restarts,
                lambda number, failure: announce(
                    f"restart {number} of {max_restarts}: {failure}; {resume_point(folder)}"
                ),
            )
        finally:
            sweep(folder / "checkpoint")
        return outcome(folder, tokens.unigram_entropy)


def _begin(file: JobFile, resume: bool, world: World | None, announce: Announce) -> tuple[Decision, TokenSet]:
    """Check the job, prepare its data and decide on the plan: all that can fail before ranks start. Raises
    InputError."""
    require_modules(file.model, 1 if file.strategy is None else file.strategy.cp)
    if file.strategy is not None:
        require_runnable(file.strategy, file.job)
        check(file.strategy, file.model, file.job, world.size if world else None)
        _require_compilable(file, file.strategy)
    if file.train.weights and not resume:
        file = start_from_weights(file, announce)
    tokens = prepare_data(file, announce)
    decision = decide(file, world, tokens.digest, announce)
    if decision.chosen.reason:
        raise InputError("strategy", str(decision.plan.strategy), decision.chosen.reason, "use a smaller micro_batch")
    _require_compilable(file, decision.plan.strategy)
    if resume:
        old = plan.read(RUNS / file.train.name / "plan.json")
        if old.choices["tokens"] != tokens.digest:
            raise InputError("train.data", file.train.data, "has changed since the run began", "start a new run")
        if old.choices["transport"] == file.train.transport and old.cluster.ranks == decision.plan.cluster.ranks:
            # The same ranks keep their transports, so losses stay bit-identical whatever a new measurement says.
            decision.plan.choices["collectives"] = old.choices.get("collectives", [])
        if decision.plan.strategy == old.strategy and old.choices.get("bucket"):
            decision.plan.choices["bucket"] = old.choices["bucket"]  # with the reason of the old size
    return decision, tokens


def _announce_long_steps(decision: Decision, announce: Announce) -> None:
    """Announce how long the first step will take, where that is longer than ten seconds."""
    seconds = decision.plan.prediction["step_time_s"]
    if seconds > _SILENT_S:
        announce(f"training: each step is predicted to take {seconds:.0f} s; the first is said when it is done")


def _require_compilable(file: JobFile, strategy: Strategy) -> None:
    if file.train.compile == "none":
        return
    import torch

    from phalanx.training.compiled_blocks import require_compilable

    require_compilable(file.model, strategy, "cuda" if torch.cuda.is_available() else "cpu")


def _train_rank(
    file: JobFile, resume: bool, world: World, show: Callable[[Decision], None], announce: Announce
) -> Outcome | None:
    """Train as one rank of a world. Rank 0 plans and broadcasts the run's folder, which all ranks can read."""
    from phalanx.runtime.checkpoint.store import intact_steps
    from phalanx.runtime.process import world as worlds
    from phalanx.runtime.process.rank import StopFlag, naming_rank
    from phalanx.training import worker

    with naming_rank(world):
        worlds.join(world, file.train.timeout_s)
        launchers = worlds.launchers()
    if world.rank:
        message = worlds.broadcast_words([None, None, None])
        if message[0] != "folder":
            raise InputError("rank 0", None, f"gave up: {message[1]}")
        with naming_rank(world):
            worker.train_rank(world, Path(str(message[1])), bool(message[2]), StopFlag())
        return None
    with ExitStack() as stack:
        try:
            restarted = was_started_by(launchers, file.train.name)
            if restarted and intact_steps(RUNS / file.train.name / "checkpoint"):
                file, resume = job_for_ranks(file, world.size), True
                announce(f"note: the ranks were started again; the run goes on with {world.size}: {file.strategy}")
            decision, tokens = _begin(file, resume, world, announce)
            decision.plan.choices["launchers"] = launchers
            show(decision)
            _announce_long_steps(decision, announce)
            small_files = companion_files(decision.plan.train)
            folder = stack.enter_context(open_run(decision.plan, tokens.tokenizer, resume or restarted, small_files))
        except Exception as error:
            worlds.broadcast_words(["error", str(error), None])
            raise
        worlds.broadcast_words(["folder", str(folder), "resume" if resume else ""])
        with naming_rank(world):
            worker.train_rank(world, folder, resume, StopFlag())
        return outcome(folder, tokens.unigram_entropy)


def outcome(folder: Path, unigram_entropy: float) -> Outcome:
    """Compare what a finished run recorded with its plan."""
    saved = plan.read(folder / "plan.json")
    recorded = json.loads((folder / "recorded.json").read_text())
    events = tuple(Event(**event) for event in recorded["events"])
    ended = Outcome(
        run=os.path.relpath(folder),
        interrupted=recorded["interrupted"],
        last_step=recorded["last_step"],
        eval_loss=recorded["eval_loss"],
        unigram_entropy=unigram_entropy,
        comparison=(),
        differences=(),
        timeline=recorded["timeline"],
        folder=folder,
        recorded=recorded,
    )
    if not events:  # e.g. the ranks were restarted after the last step
        return ended
    predicted = saved.prediction
    program = expand(Layout(saved.model, saved.job, saved.strategy).stage_view())
    planned, sent = bytes_sent(program.events), bytes_sent(events)
    rows = [
        MeasuredQuantity("step time (median)", predicted["step_time_s"], recorded["step_time_s"], "s"),
        *(
            MeasuredQuantity(f"sent over {axis}", planned.get(axis, 0.0), sent.get(axis, 0.0), "bytes")
            for axis in dict.fromkeys((*planned, *sent))
        ),
        MeasuredQuantity("peak memory", predicted["memory_bytes"], recorded["memory_bytes"], "memory"),
    ]
    differing = tuple(map(str, differences(program.events, events)))
    routed = any(e.routed for e in program.events)
    return replace(ended, comparison=tuple(rows), differences=differing, routed=routed)


def sample(folder: Path) -> str:
    """Generate a few lines with the trained model; empty if train.sample_tokens is 0. Raises InputError."""
    from phalanx.infer.sampling import Sampling
    from phalanx.infer.text import answer, model_of, question, tokenizer_of

    train = plan.read(folder / "plan.json").train
    if not train.sample_tokens:
        return ""
    model = model_of(folder)
    room = model.max_seq - len(tokenizer_of(folder, model).encode(train.prompt).ids)
    how = Sampling(max(1, min(train.sample_tokens, room)))
    return train.prompt + answer(question(folder, [train.prompt], how))[0]
