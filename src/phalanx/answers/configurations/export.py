"""A plan in a framework's words, with what starts it on every node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.answers.answer import Answer, plain
from phalanx.answers.question.precision import release_named
from phalanx.frameworks.launchers.export import launcher, task
from phalanx.frameworks.reading.parts import writer
from phalanx.frameworks.registry import FRAMEWORKS, stack_named
from phalanx.frameworks.writing.program import TrainingProgram
from phalanx.frameworks.writing.script import train_sh
from phalanx.frameworks.writing.source_file import as_in_file, as_trained, source_of, with_training
from phalanx.frameworks.writing.subject import Subject, subject
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files import plan as plans
from phalanx.spec.files.plan import Plan, write_text


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
    result = exported(saved, to, launcher)
    if out is not None:
        write(result, Path(out))
        result = replace(result, folder=Path(out))
    return result


def _read(path: Path) -> Plan:
    return plans.read(path / "plan.json" if path.is_dir() else path)


_ROUNDS = ("accelerate", "deepspeed", "maxtext")
"""What has TF32 in its configuration: TrainingArguments, and JAX, which rounds fp32 by default."""


def _target(to: str) -> ExportTarget:
    """Return what a framework's files are written by: its name here, or a name that --stack takes, such as nemo.
    Raises InputError."""
    if to in TARGETS:
        return TARGETS[to]
    with suppress(InputError):
        stack, _ = release_named(to)
        for target in TARGETS.values():
            if stack in target.stacks:
                return target
    raise InputError("to", to, "is not a framework that Phalanx writes", nearest(to, TARGETS))


def exported(plan: Plan, to: str, by: str = "torchrun") -> Export:
    """Return a plan's files for a framework and a launcher. Raises InputError for what either cannot express."""
    target, start = _target(to), launcher(by)
    own = str(plan.choices.get("stack", ""))
    source = source_of(plan.choices)
    trained = plan if source is None else replace(plan, train=as_trained(plan.train, source, plan.job.global_batch))
    stack = own if own in target.stacks else target.stacks[0]
    try:
        x = subject(trained, stack_named(stack))
        p = target.program(x)
    except InputError as error:
        if stack == own:
            raise
        remedy = f"{error.remedy}; or plan it for that stack: phalanx plan --stack {stack}".removeprefix("; or ")
        raise InputError(error.field, error.value, error.reason, remedy) from None
    for name in ("lora", "reference"):  # what a program's own code does, which the written one does not
        entry, value = x.stack.options.get(name), x.options.changed().get(name)
        if value is not None and entry is not None and entry.in_code:
            reason = f"is {entry.written}, and the script that is written trains all of one model"
            remedy = "change the settings that `phalanx plan --from FILE` lists in the file itself"
            raise InputError(f"options.{name}", value, reason, remedy)
    if source is not None:
        same = any(f.reads == source.kind and f.writes == to for f in FRAMEWORKS.values())
        p = as_in_file(p, source) if p.arguments and same else with_training(p, source)
    if x.rounded and to not in _ROUNDS:
        reason = f"is a switch of torch's, not of a configuration of {to}"
        raise InputError("precision", "tf32", reason, "plan in fp32 and export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1")
    files = {"train.sh": train_sh(p, x.gpus_per_node, x.nodes), **p.files}
    return Export(p, files | start(task(x, p, files)), by)


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
