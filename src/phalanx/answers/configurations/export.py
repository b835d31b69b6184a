"""A plan in a framework's words, with what starts it on every node."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from phalanx.answers.answer import Answer, plain
from phalanx.answers.question.precision import release_named
from phalanx.answers.question.read import is_configuration
from phalanx.answers.question.read import read as configuration
from phalanx.frameworks.launchers.export import launcher, task
from phalanx.frameworks.reading.parts import writer
from phalanx.frameworks.registry import FRAMEWORKS, stack_named
from phalanx.frameworks.stated_training import StatedTraining, stated_training
from phalanx.frameworks.writing.program import TrainingProgram
from phalanx.frameworks.writing.script import train_sh
from phalanx.frameworks.writing.source_file import as_in_file, source_of, with_training
from phalanx.frameworks.writing.subject import Subject, subject
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files import plan as plans
from phalanx.spec.files.plan import Plan, write_text
from phalanx.spec.strategy.stack_options import StackOptions


@dataclass(frozen=True)
class ExportTarget:
    """A framework that plans are written for."""

    stacks: tuple[str, ...]
    """Stacks that it can be; the first where the plan is of none of them."""
    program: Callable[[Subject], TrainingProgram]


TARGETS = {f.writes: ExportTarget(f.stacks, writer(f)) for f in FRAMEWORKS.values() if f.writes}


@dataclass(frozen=True)
class Export(Answer):
    """The files of an export by name, and what they are."""

    program: TrainingProgram
    files: dict[str, str]
    launcher: str
    folder: Path | None = None
    """Where the files were written, if they were."""

    @property
    def blanks(self) -> list[str]:
        """Names of what must be filled in before it runs."""
        return [b.name for b in self.program.blanks if b.default == "FILL-IN"]


@plain.register
def _(value: Export) -> dict[str, Any]:
    p = value.program
    return {
        "to": p.title,
        "launcher": value.launcher,
        "folder": plain(value.folder),
        "files": list(value.files),
        "blanks": value.blanks,
        "settings": {s.key: s.value for g in p.groups for s in g.settings},
        "environment": {v.name: v.value for v in p.variables},
        "notes": list(p.notes),
    }


def export(plan: str | Path | Plan, to: str, launcher: str = "torchrun", out: str | Path | None = None) -> Export:
    """Write a plan as another framework's configuration, with what starts it.

    `plan`: a plan.json, a run's folder, or a Plan; `to`: megatron, torchtitan, deepspeed, ...; `out`: a folder, empty
    or not there yet, for the files. Raises InputError for what framework or launcher cannot express."""
    saved = plan if isinstance(plan, Plan) else _read(Path(plan))
    result = export_plan(saved, to, launcher)
    if out is not None:
        write(result, Path(out))
        result = replace(result, folder=Path(out))
    return result


def _read(path: Path) -> Plan:
    if path.is_file() and is_configuration(path):
        kind = configuration([path]).configuration.kind
        reason = f"is a configuration of {kind}, and an export is of a plan"
        remedy = f"phalanx read {path} --cluster C --out plan.json makes one of it, plan --from {path} a better one"
        raise InputError("plan", str(path), reason, remedy)
    return plans.read(path / "plan.json" if path.is_dir() else path)


_ROUNDS = ("accelerate", "deepspeed", "maxtext")
"""Frameworks that need no switch of torch's for TF32: two have it in TrainingArguments, and JAX rounds by default."""


def _target(to: str) -> ExportTarget:
    """Return the target of a framework, by its name here or by one that --stack takes, such as nemo. Raises
    InputError."""
    if to in TARGETS:
        return TARGETS[to]
    with suppress(InputError):
        stack, _ = release_named(to)
        for target in TARGETS.values():
            if stack in target.stacks:
                return target
    raise InputError("to", to, "is not a framework that Phalanx writes", nearest(to, TARGETS))


def export_plan(plan: Plan, to: str, by: str = "torchrun") -> Export:
    """Return a plan's files for a framework and a launcher. Raises InputError for what either cannot express."""
    target, start = _target(to), launcher(by)
    source = source_of(plan.choices)
    training, kept = None, False
    if source is not None:
        batch = plan.job.global_batch
        training = stated_training(source.arguments, batch, source.environment, source.kind)
    x, p, left = _translate(plan, target, training)
    for name in ("lora", "reference"):  # what a program's own code does, which the written one does not
        entry, value = x.stack.options.get(name), x.options.changed().get(name)
        if value is not None and entry is not None and entry.in_code:
            reason = f"is {entry.written}, and the script that is written trains all of one model"
            remedy = "change the settings that `phalanx plan --from FILE` lists in the file itself"
            raise InputError(f"options.{name}", value, reason, remedy)
    if source is not None and training is not None:
        same = any(f.reads == source.kind and f.writes == to for f in FRAMEWORKS.values())
        kept = p.arguments and same
        p = as_in_file(p, source) if kept else with_training(p, source, training, to)
    if left:
        p = replace(
            p, notes=(*p.notes, f"{left} of the plan has no setting in {p.title}, which does it its own way.")
        )
    if x.plan.strategy.recompute != plan.strategy.recompute:
        note = f"recompute={plan.strategy.recompute} of the plan is not in {p.title}: recompute=full is written"
        p = replace(p, notes=(*p.notes, f"{note}, which takes less memory and more time."))
    if x.rounded and to not in _ROUNDS:
        reason = f"is a switch of torch's, not of a configuration of {to}"
        raise InputError("precision", "tf32", reason, "plan in fp32 and export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1")
    files = {"train.sh": train_sh(p, x.gpus_per_node, x.nodes), **p.files}
    note = "" if kept or source is None or training is None else _changed_training(files, training, source.name)
    if note:
        p = replace(p, notes=(*p.notes, note))
        files["train.sh"] = train_sh(p, x.gpus_per_node, x.nodes)
    return Export(p, files | start(task(x, p, files)), by)


def _translate(
    plan: Plan, target: ExportTarget, training: StatedTraining | None
) -> tuple[Subject, TrainingProgram, str]:
    """Return (the subject of a framework's files, their program, the plan's options without a setting there as text).

    The stack is the plan's own, else the first of the framework's that runs the strategy; whole blocks are recomputed
    where it cannot recompute the plan's part of them. Raises the first stack's InputError where none runs it."""
    own = str(plan.choices.get("stack", ""))
    stacks = (own,) if own in target.stacks else target.stacks
    refused: list[InputError] = []
    for stack in stacks:
        left = () if stack == own else _options_without_setting(plan, stack)
        options = StackOptions(**{n: v for n, v in plan.options.changed().items() if n not in left})
        ways = (plan.strategy.recompute, *(("full",) if stack != own and plan.strategy.recompute != "none" else ()))
        for recompute in dict.fromkeys(ways):
            try:
                strategy = replace(plan.strategy, recompute=recompute)
                x = subject(replace(plan, strategy=strategy, options=options), stack_named(stack), training)
                return x, target.program(x), ", ".join(f"{n}={getattr(plan.options, n)}" for n in left)
            except InputError as error:
                refused.append(error)
                if error.field != "strategy.recompute":
                    break
    first = refused[0]
    if stacks == (own,):
        raise first
    again = "" if first.field == "model" else f"; or plan it for that stack: phalanx plan --stack {stacks[0]}"
    raise InputError(first.field, first.value, first.reason, f"{first.remedy}{again}".removeprefix("; or ")) from None


def _changed_training(files: Mapping[str, str], training: StatedTraining, name: str) -> str:
    """Return a note of the training's numbers in which an export, read back, differs from the file that it improves
    (the framework has no setting for them); "" where nothing differs."""
    with TemporaryDirectory() as folder:
        for file, text in files.items():
            Path(folder, file).write_text(text)
        try:
            here = asdict(configuration([folder]).training)
        except InputError:  # such as blanks that hold what must be a number
            return ""
    differ = [
        f"{what} {said} (here {here[what] if here[what] is not None else 'not set'})"
        for what, said in asdict(training).items()
        if what not in _COUNTS and said not in (None, here[what])
    ]
    return f"Not as {name} has it: {', '.join(differ)}." if differ else ""


_COUNTS = ("samples", "tokens", "epochs", "counted_by")
"""Fields that say the number of steps in another way."""
_TRAINED = ("lora", "lora_targets", "base", "dora", "reference", "optimizer", "mtp", "products", "document")
"""Options that say what is trained, which no other framework may leave out."""


def _options_without_setting(plan: Plan, stack: str) -> tuple[str, ...]:
    """Return a plan's options that a stack has no setting for, and that say how, not what, is trained."""
    changed, row = plan.options.changed(), stack_named(stack)
    return tuple(name for name, value in changed.items() if name not in _TRAINED and not row.has_option(name, value))


def why_not_exported(plan: Plan, stack: str) -> str:
    """Return why a plan for a stack cannot be written as its configuration; "" where it can, or nothing writes it."""
    to = next((name for name, target in TARGETS.items() if stack in target.stacks), None)
    if to is None:
        return ""
    try:
        TARGETS[to].program(subject(plan, stack_named(stack)))
    except InputError as error:
        return str(error)
    return ""


def write(e: Export, folder: Path) -> list[Path]:
    """Write an export's files into a folder, which must not hold other ones. Raises InputError."""
    if folder.exists() and not folder.is_dir():
        raise InputError("out", str(folder), "is a file", "name a folder")
    there = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    others = [name for name in there if name not in e.files]
    if others:
        raise InputError("out", str(folder), f"already holds {', '.join(others[:3])}", "name an empty or new folder")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in e.files.items():
        path = folder / name
        write_text(path, text)
        if name.endswith(".sh"):
            path.chmod(0o755)
        paths.append(path)
    return paths
