"""Any torch program observed in another process: its price on a cluster, findings, and differences from a plan."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from phalanx.answers.answer import Answer, plain
from phalanx.answers.question.query import Query
from phalanx.answers.search.model_plan import ModelPlan, model_plan
from phalanx.answers.search.wishes import Wishes
from phalanx.observation.request import ObservationRequest
from phalanx.planning.explain import observed, observed_lint
from phalanx.planning.explain.observed import ObservedFlow as ObservedFlow
from phalanx.planning.explain.observed import ObservedStep as ObservedStep
from phalanx.planning.explain.observed import PlanDifference as PlanDifference
from phalanx.planning.explain.observed_lint import ProgramFinding
from phalanx.planning.lookup import cluster_on
from phalanx.schedule.observation import Observation
from phalanx.schedule.observation_file import from_json, to_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans

_PYTHONS = ("python", "python3")
plain.register(Observation, to_json)


@dataclass(frozen=True)
class ProgramCommand:
    """A user's program: the Python that runs it, its script or module, and its arguments."""

    python: str
    script: str
    module: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.script or self.module


def program(words: Sequence[str]) -> ProgramCommand:
    """Read a command line such as `python train.py ARGS`, `python -m module ARGS` or `train.py ARGS`.

    `python` and `python3` mean the Python that runs Phalanx; another is named by its path. Raises InputError.
    """
    if not words:
        raise InputError("program", None, "is missing", "phalanx observe --world 64 -- python train.py")
    python, rest = sys.executable, list(words)
    name = Path(rest[0]).name
    if name in ("torchrun", "accelerate", "deepspeed", "mpirun", "srun"):
        remedy = "name the program itself: -- python train.py ARGS"
        raise InputError("program", rest[0], "starts many processes", remedy)
    if name.startswith("python"):
        if rest[0] not in _PYTHONS:
            python = shutil.which(rest[0]) or ""
            if not python:
                raise InputError("program", rest[0], "is not a program on this machine")
        rest = rest[1:]
    while rest and rest[0] in ("-u", "-O", "-B"):
        rest = rest[1:]
    if not rest:
        raise InputError("program", words[0], "names no script", "phalanx observe --world 64 -- python train.py")
    if rest[0] == "-m":
        if len(rest) == 1:
            raise InputError("program", "-m", "names no module")
        return ProgramCommand(python, "", rest[1], tuple(rest[2:]))
    if rest[0].startswith("-"):
        reason = "is an option of Python that is not supported"
        raise InputError("program", rest[0], reason, "name a script or -m MODULE")
    if not Path(rest[0]).is_file():
        raise InputError("program", rest[0], "is not a file")
    return ProgramCommand(python, rest[0], "", tuple(rest[1:]))


def request(
    world: int,
    ranks: str,
    mesh: str | None,
    per_node: int,
    step: int,
    every_micro_batch: bool,
    branches: str | None = None,
) -> ObservationRequest:
    """Parse a request: `ranks` is `classes`, `all` or a list such as "0,8"; `mesh` a list of axes, outermost first,
    such as "pp=8,dp=8,tp=8"; `branches` a list of lines and answers, "train.py:41=true". Raises InputError."""
    axes: dict[str, int] = {}
    for part in mesh.split(",") if mesh else ():
        name, equals, size = part.partition("=")
        if not equals or not re.fullmatch("[0-9]{1,9}", size) or not name:
            raise InputError("mesh", mesh, "is not a list of axes", "write it as pp=8,dp=8,tp=8, outermost first")
        axes[name.strip()] = int(size)
    taken: dict[str, bool] = {}
    for part in branches.split(",") if branches else ():
        place, _, answer = part.strip().rpartition("=")
        if not re.fullmatch(r".+:\d+", place) or answer not in ("true", "false"):
            raise InputError("branches", part, "is not a line and an answer", "write it as train.py:41=true")
        taken[place] = answer == "true"
    everything = ObservationRequest(world, per_node, axes, None, step, every_micro_batch, taken)
    if ranks == "classes":
        return everything
    try:
        numbers = range(world) if ranks == "all" else dict.fromkeys(int(part) for part in ranks.split(","))
    except ValueError:
        raise InputError("ranks", ranks, "is neither `classes`, `all` nor a list of ranks such as 0,8") from None
    return replace(everything, ranks=tuple(numbers))


def observe(target: ProgramCommand, question: ObservationRequest) -> Observation:
    """Observe a program; its output goes to stderr. Raises InputError if it cannot be observed."""
    reads, writes = os.pipe()
    task = {
        "script": target.script,
        "module": target.module,
        "arguments": target.arguments,
        "request": asdict(question),
        "parent": os.getpid(),
        "result": writes,
    }
    source = str(Path(__file__).parents[2])
    own = target.python == sys.executable  # another Python has to be shown where Phalanx is
    path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), "" if own else source) if p)
    command = [target.python, "-m", "phalanx.observation.program.worker", json.dumps(task)]
    child = subprocess.Popen(
        command, pass_fds=[writes], stdout=sys.stderr.fileno(), env={**os.environ, "PYTHONPATH": path}
    )
    os.close(writes)
    try:
        with os.fdopen(reads) as file:
            text = file.read()
        code = child.wait()
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
    if not text:
        if code in (-2, 130):
            raise KeyboardInterrupt
        raise InputError(target.name, None, f"the process that observed it ended with code {code}")
    content: dict[str, Any] = json.loads(text)
    if "error" in content:
        raise InputError(target.name, None, content["error"])
    return from_json(text)


@dataclass(frozen=True)
class ObservedPrice(Answer):
    """The priced step of an observed program, on each rank observed."""

    program: str
    cluster: str
    world: int
    ranks: tuple[ObservedStep, ...]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each observed rank."""
        return [{**plain(r), "collectives": len(r.collectives)} for r in self.ranks]


@dataclass(frozen=True)
class ObservedFindings(Answer):
    """The mistakes and anti-patterns of an observed program."""

    program: str
    findings: tuple[ProgramFinding, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanDifferences(Answer):
    """Where an observed program's step differs from a plan."""

    differences: tuple[PlanDifference, ...]

    def __bool__(self) -> bool:
        return any(d.differs for d in self.differences)


@dataclass(frozen=True)
class ObservedImprovement(Answer):
    """Changes that would make an observed program faster."""

    program: str
    axes: Mapping[str, int]
    now: tuple[ObservedStep, ...]
    findings: tuple[ProgramFinding, ...]
    better: ModelPlan | None
    """The best strategy of a stack on the program's ranks; None without a model, a batch and a length."""


def observation_of(query: Query) -> Observation | None:
    """Return the observation in the file that a query names as its source; None where that is another file. Raises
    InputError for fields that belong to a strategy."""
    seen = None if query.source is None else observed.read(Path(query.source))
    if seen is not None:
        for field in fields(query):
            value = getattr(query, field.name)
            if value not in (None, ()) and field.name not in ("source", "cluster"):
                reason = "belongs to a strategy, not to an observed program"
                raise InputError(field.name, value, reason, "leave it out")
    return seen


def price(o: Observation, query: Query) -> ObservedPrice:
    """Price an observed step on the query's cluster. Raises InputError."""
    if query.cluster is None:
        raise InputError("cluster", None, "is missing", "an observation is priced on one, such as dgx-h100")
    cluster = cluster_on(query.cluster, query.calibration)(o.world)
    return ObservedPrice(o.program, str(query.cluster), o.world, observed.price_observation(o, cluster))


def findings(o: Observation, query: Query) -> ObservedFindings:
    """Find what is wrong with an observed program; in seconds too, where the query names a cluster. Raises
    InputError."""
    cluster = cluster_on(query.cluster, query.calibration)(o.world) if query.cluster is not None else None
    return ObservedFindings(o.program, tuple(observed_lint.lint(o, cluster)))


def compare(o: Observation, plan: Path) -> PlanDifferences:
    """Compare an observed program's step with a plan. Raises InputError."""
    saved = plans.read(plan / "plan.json" if plan.is_dir() else plan)
    return PlanDifferences(observed.compare_with_plan(o, saved))


def improve(o: Observation, query: Query, wishes: Wishes) -> ObservedImprovement:
    """Find what to change in an observed program; with a model, a batch and a length also the best strategy of a
    stack (by default FSDP2 by hand) on its ranks. Raises InputError."""
    if query.gpus is not None:
        raise InputError("gpus", query.gpus, f"the program was observed on {o.world} ranks", "leave it out")
    named = ("model", "batch", "seq")
    missing = [name for name in named if getattr(query, name) is None]
    if 0 < len(missing) < len(named):
        raise InputError(missing[0], None, "is missing", f"name all of {', '.join(named)}, or none")
    cluster = cluster_on(query.cluster, query.calibration)(o.world)
    search = replace(query, source=None, gpus=o.world, stack=query.stack or "fsdp2")
    return ObservedImprovement(
        program=o.program,
        axes=dict(o.axes),
        now=observed.price_observation(o, cluster),
        findings=tuple(observed_lint.lint(o, cluster)),
        better=None if missing else model_plan(search, wishes),
    )
