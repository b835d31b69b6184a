"""The user's file that a plan improves, as the plan's JSON holds it: its arguments, and the settings to change.

An export to the file's own framework writes the file's arguments with these changes and adds nothing: learning rate,
schedule, data, tokenizer, checkpoints and seeds stay as the file has them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from phalanx.frameworks.keys import key_table
from phalanx.frameworks.stated_training import StatedTraining, arguments_of, table, typed
from phalanx.frameworks.writing.program import Group, Setting, TrainingProgram, Variable
from phalanx.spec.errors import InputError


@dataclass(frozen=True)
class Edit:
    """A setting to change: `old` and `new` as the framework writes them, "" where it is not written."""

    key: str
    old: str
    new: str


@dataclass(frozen=True)
class SourceFile:
    """A user's file: its arguments by name, its environment, and the settings to change."""

    name: str
    kind: str
    """What `read` calls its framework."""
    arguments: Mapping[str, Any]
    environment: Mapping[str, Any]
    edits: tuple[Edit, ...]


def file_entry(name: str, kind: str, config: Mapping[str, Any], edits: Sequence[Edit]) -> dict[str, Any]:
    """Return the entry of a plan's JSON for a file. `config`: its tables."""
    environment = config.get("env")
    env = dict(environment) if isinstance(environment, Mapping) else {}
    return asdict(SourceFile(name, kind, arguments_of(config), env, tuple(edits))) | {"edits": [*map(asdict, edits)]}


def source_of(choices: Mapping[str, Any]) -> SourceFile | None:
    """Return the file that a plan improves; None where it improves none. Raises InputError for a damaged plan."""
    table = choices.get("source")
    if table is None:
        return None
    try:
        edits = tuple(Edit(str(e["key"]), str(e["old"]), str(e["new"])) for e in table["edits"])
        arguments, environment = dict(table["arguments"]), dict(table["environment"])
        return SourceFile(str(table["name"]), str(table["kind"]), arguments, environment, edits)
    except (TypeError, KeyError, ValueError) as error:
        reason = f"is not a file as `phalanx plan --from` records it ({type(error).__name__}: {error})"
        raise InputError("choices.source", None, reason) from None


def plain(key: str) -> str:
    """Return a key's last part in one spelling."""
    return key.lstrip("-").rpartition(".")[2].replace("-", "_")


def as_in_file(program: TrainingProgram, source: SourceFile) -> TrainingProgram:
    """Return a program with the arguments of the file, changed as `source.edits` says, in place of its own."""
    given = {name: value for name, value in source.arguments.items() if value is not None and value is not False}
    own = {plain(name): Setting(f"--{name}", _written(value)) for name, value in given.items()}
    changed = {plain(edit.key) for edit in source.edits}
    for edit in source.edits:
        name = plain(edit.key)
        key = own[name].key if name in own else f"--{edit.key.lstrip('-')}"
        own.pop(name, None)
        if edit.new:
            values = tuple(edit.new.split())
            own[name] = Setting(key, True if edit.new == "on" else values if len(values) > 1 else edit.new)
    left: dict[str, Setting] = dict(own)
    groups: list[Group] = []
    as_it_was = f"As {source.name} has it."
    for group in program.groups:
        kept = tuple(left.pop(plain(s.key)) for s in group.settings if plain(s.key) in left)
        if kept:
            why = group.why if any(plain(s.key) in changed for s in kept) or group.title == "Model" else as_it_was
            groups.append(replace(group, why=why, settings=kept))
    if left:
        groups.append(Group("The rest", as_it_was, tuple(left.values())))
    words: str = " ".join((program.start, *(str(s.value) for g in groups for s in g.settings)))
    needed = tuple(b for b in program.blanks if re.search(rf"\$\{{?{b.name}\b", words))
    needs = {v.name: v for v in program.variables if v.name != _ALLOCATOR}
    variables = (
        *needs.values(),
        *(Variable(n, str(value), as_it_was) for n, value in source.environment.items() if n not in needs),
    )
    changes = [f"{e.key}: {e.old or 'not set'} -> {e.new or 'left out'}" for e in source.edits]
    notes = (*program.notes, f"{source.name} with {len(changes)} settings changed: {'; '.join(changes) or 'none'}.")
    return replace(program, groups=tuple(groups), blanks=needed, variables=variables, notes=notes)


def with_training(program: TrainingProgram, source: SourceFile, t: StatedTraining, to: str) -> TrainingProgram:
    """Return a program whose blanks and TrainingArguments have the values of the file (`t`). Its data are named only
    where the framework `to` reads data of the same form."""
    blanks = {blank: what for what, blank in table()["blanks"].items()}
    stated = {b.name: getattr(t, blanks[b.name]) for b in program.blanks if b.name in blanks}
    if _DATA.get(source.kind) != _DATA.get(to):
        stated.pop("DATA_PATH", None)
    if stated.get("TRAIN_ITERS", 0) is None and t.epochs and _ARGUMENTS in program.files:
        stated["TRAIN_ITERS"] = -1  # which leaves transformers' Trainer num_train_epochs
    known = {
        name: str(value)
        for name, value in stated.items()
        if re.fullmatch(_PLAIN, "" if value is None else str(value))
    }
    filled = tuple(replace(blank, default=known.get(blank.name, blank.default)) for blank in program.blanks)
    files, kept = dict(program.files), sorted(known)
    if source.kind == "hf" and _ARGUMENTS in files:
        own = json.loads(files[_ARGUMENTS])
        more = dict(_of_training(source, own))
        files[_ARGUMENTS] = json.dumps(own | more, indent=2) + "\n"
        kept += sorted(more)
    notes = (*program.notes, *([f"As {source.name} has it: {', '.join(kept)}."] if kept else []))
    return replace(program, blanks=filled, files=files, notes=notes)


def _of_training(source: SourceFile, own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the file's TrainingArguments that have no effect on a step, and of those that the export
    does not set."""
    keys, changed = key_table("hugging_face"), {plain(edit.key) for edit in source.edits}
    for name, value in source.arguments.items():
        key = plain(name)
        verdict = keys.verdict(key)
        if verdict is None or "training_args.py" not in verdict.source or key in changed:
            continue
        if verdict.effect in ("numbers", "none") or (key not in own and not key.startswith(("fsdp", "deepspeed"))):
            yield key, typed(value)


_ARGUMENTS = "training_arguments.json"
_DATA = {
    **dict.fromkeys(("megatron", "nemo", "bridge"), "indexed"),
    **dict.fromkeys(("hf", "accelerate", "deepspeed", "torchtitan"), "hub"),
    **{name: name for name in ("nanotron", "maxtext")},
}
"""Form of the data that a framework reads, by the name that `read` and `export` have for the framework."""
_PLAIN = r"[\w./:+~-]+"
"""Values that need no quotes in a shell."""
_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
"""A variable that every export sets; the file's own value, or none, is kept."""


def _written(value: Any) -> Any:
    return tuple(map(str, value)) if isinstance(value, list) else value
