"""The settings that `phalanx export` would write for a strategy, spelt as a user's configuration file spells them.

Where a stack has no export, or cannot express a strategy, changes are named by the options of its row (frameworks/).
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from phalanx.answers.configurations.export import TARGETS
from phalanx.answers.question.question import Question
from phalanx.answers.question.read import Reading
from phalanx.frameworks.configuration import shown
from phalanx.frameworks.keys import key_table
from phalanx.frameworks.registry import row_of
from phalanx.frameworks.writing.program import TrainingProgram
from phalanx.frameworks.writing.source_file import Edit, plain
from phalanx.frameworks.writing.subject import subject
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Train
from phalanx.spec.strategy.spec import Strategy, format_field
from phalanx.spec.strategy.stack_options import StackOptions

_PROGRAM_FIELDS = frozenset(("micro_batch", "recompute"))
"""Fields that programs on top of another framework set by keys of their own."""
_WORDS = frozenset(("none", "selective", "full"))
"""Values of `recompute` that are spelt alike in files and in a Strategy."""
_SWITCHES = frozenset(("", "on", "True", "False", "true", "false"))
"""Values of a key that switches recomputation on or off."""
_RENAMED = {("torchtitan", "shard"), ("torchtitan", "micro_batch")}
"""(framework, field) whose key was renamed in a later release, with the same meaning."""
_TRAINER_ARGUMENTS = {"per_device_train_batch_size": "micro_batch", "gradient_checkpointing": "recompute"}
"""Arguments of transformers' Trainer, which an export writes along with its configuration, and their fields."""


@dataclass(frozen=True)
class FileState:
    """A strategy with its options and price."""

    strategy: Strategy
    options: StackOptions
    seconds: float
    bytes_: float
    fits: bool
    mfu: float
    blocks: tuple[int, ...] = ()
    """Blocks of each chunk of its pipeline."""


def program_of(q: Question, s: Strategy, options: StackOptions, blocks: Sequence[int] = ()) -> TrainingProgram | None:
    """Return what `phalanx export` writes for a strategy with these options and the blocks of each chunk; None where
    the stack has no export, or cannot express it."""
    row = row_of(q.stack)
    target = next((t for t in TARGETS.values() if row.name in t.stacks), None)
    if target is None:
        return None
    p = q.pricing
    choices = {"precision": q.precision, "chunks": {"blocks": list(blocks)}}
    plan = Plan(p.model, p.cluster, p.job, s, Train(), choices, {}, options)
    try:
        return target.program(subject(plan, row))
    except InputError:
        return None


def settings_of(program: TrainingProgram) -> dict[str, str]:
    """Return the settings of a program by key, with their values as text; a flag without a value is "on"."""
    return {setting.key: _text(setting.value) for g in program.groups for setting in g.settings}


class FileSettings:
    """The settings of a framework for a strategy, spelt as a file spells them."""

    def __init__(self, reading: Reading, q: Question) -> None:
        self.q, self.c = q, reading.configuration
        self.places: dict[str, list[tuple[str, tuple[str, str]]]] = {}
        """Plain name of a key -> (its path, (the key as in the file, its value)) for each place that has it."""
        self.original: dict[str, str] = {}
        """The settings that an export writes for the file's own strategy."""
        self.duplicates: dict[str, list[tuple[str, str]]] = {}
        """Plain name of a key -> (key, value) where files that belong together repeat its number under other keys."""
        for path, value in _leaves(reading.config):
            place = (shown(path), _text(value))
            alike = self.places.setdefault(plain(path), [])
            if alike and alike[0][1] != place and place[1].isdigit():
                self.duplicates.setdefault(plain(path), []).append(place)
            alike.append((path, place))

    def _entry(self, key: str) -> tuple[str, str] | None:
        """Return (key as in the file, value) of a setting; of several keys with the same last name, the one whose
        tables match best. None where the file does not set it."""
        alike = self.places.get(plain(key), ())
        return max(alike, key=lambda place: _names_shared(place[0], key))[1] if alike else None

    def settings(self, x: FileState) -> dict[str, str] | None:
        """Return every setting of a strategy; None where the stack has no export, or cannot express it."""
        program = program_of(self.q, x.strategy, x.options, x.blocks)
        if program is None:
            return None
        settings = settings_of(program)
        given = program.files.get("training_arguments.json")
        more = json.loads(given) if given and self.c.kind != "deepspeed" else {}  # DeepSpeed's file has its own
        return settings | {name: _text(value) for name, value in more.items() if name not in settings}

    def edits(self, before: FileState, after: FileState, changed: Mapping[str, Any]) -> tuple[Edit, ...]:
        """Return the settings that differ between two states; `changed`: field -> (before, after), which name the
        changes where the state `after` cannot be written."""
        old, new = self.settings(before) or {}, self.settings(after)
        differ = {plain(key) for key in {**old, **(new or {})} if old.get(key) != (new or {}).get(key)}
        moved = {plain(key) for key, value in self.original.items() if old.get(key) != value}
        own_words = self._in_own_words(after, changed, differ, moved)
        if new is None:
            row = row_of(self.q.stack)
            entries = {**row.strategy, **row.options}
            return tuple(
                edit
                for n, (a, b) in changed.items()
                if n in entries
                for edit in own_words.get(n) or (Edit(entries[n].written or n, a, b),)
            )
        self.original = self.original or old
        result = []
        stated_keys = {plain(edit.key) for edits in own_words.values() for edit in edits}
        s, left = after.strategy, self._no_longer_followed(before.strategy, after.strategy)
        along = {n for n, other in self.q.followed.items() if getattr(s, n) == getattr(s, other)}
        for key in dict.fromkeys((*old, *new)):
            name = self._field_of(key)
            alone = after.strategy.dp * after.strategy.cp == 1 and not after.options.state_on_host
            if name in ("zero", "shard") and alone:  # shards nothing, as it stands
                continue
            if (
                name in along
                or (old.get(key) == new.get(key) and name not in left)
                or name in own_words
                or plain(key) in stated_keys
            ):
                continue
            name, value = self._entry(key) or self._earlier(name, old, new) or (self._spelt(key.lstrip("-")), "")
            if value == "auto" or (not value and key not in new):  # follows another setting; is not in the file
                continue
            spelt = f"--{name}" if key.startswith("--") else name
            edit = Edit(spelt, self._current_value(key, value, old), new.get(key, ""))
            result += [edit] if edit.old != edit.new else []
        result += [edit for edits in own_words.values() for edit in edits]
        result += self._left_over(old, new, {n: value for n, value in changed.items() if n not in own_words})
        for edit in tuple(result):
            value = (self._entry(edit.key) or ("", ""))[1]
            others = self.duplicates.get(plain(edit.key), ())
            result += [Edit(key, other, edit.new) for key, other in others if other == value]
        return tuple(dict.fromkeys(result))

    def resized(self, after: FileState) -> tuple[Edit, ...]:
        """Return the edits of the file's ep, which does not divide the ranks that are planned, to that of a state."""
        paths, new = self._own_paths("strategy.ep"), str(after.strategy.ep)
        places = ((path, *self._place(path)) for path in paths)
        return tuple(
            Edit(f"--{key}" if path.startswith("args.") else key, old, new)
            for path, key, old in places
            if old.isdigit() and old != new
        )

    def _place(self, path: str) -> tuple[str, str]:
        """Return (key, value) of a path that the file has, with the value "" where nothing is set."""
        return self._entry(path) or (shown(path), "")

    def _no_longer_followed(self, before: Strategy, after: Strategy) -> Container[str]:
        """Return the fields that follow another field in the file and no longer do: they need a setting now."""
        return {
            name
            for name, other in self.q.followed.items()
            if getattr(before, name) == getattr(before, other) and getattr(after, name) != getattr(after, other)
        }

    def _earlier(self, field: str, old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, str] | None:
        """Return (key, value) by which the file sets a field for which the export has another key: that of an earlier
        release, in the same units. None where there is no such key, or several."""
        if (self.c.kind, field) not in _RENAMED:
            return None
        written = {plain(key) for key in (*old, *new)}
        paths = [path for path in self._own_paths(f"strategy.{field}") if plain(path) not in written]
        return self._entry(paths[0]) if len(paths) == 1 else None

    def _spelt(self, key: str) -> str:
        """Return a key that the file lacks, as it would spell it: arguments of a command line have no tables."""
        return key.rpartition(".")[2] if self.c.kind == "megatron" else key

    def _field_of(self, key: str) -> str:
        """Return the field of a Strategy that a setting of the export sets; "" for other settings."""
        keys = key_table(row_of(self.q.stack).framework).keys
        fields = (k.field for k in keys if plain(k.name) == plain(key) and k.field.startswith("strategy."))
        return _TRAINER_ARGUMENTS.get(plain(key)) or next(fields, "").removeprefix("strategy.")

    def _in_own_words(
        self, after: FileState, changed: Mapping[str, Any], differ: Container[str], moved: Container[str]
    ) -> dict[str, tuple[Edit, ...]]:
        """Return field -> edits, for fields that the file sets by a key that neither is among those which `differ` in
        the export of its stack nor was `moved` by an earlier change: the micro-batch (with the accumulation that
        keeps the global batch), or whether blocks are recomputed."""
        result: dict[str, tuple[Edit, ...]] = {}
        for name in _PROGRAM_FIELDS.intersection(changed):
            paths = self._own_paths(f"strategy.{name}")
            if name == "recompute" and changed[name][1] in _WORDS:
                said = [path for path in paths if self._place(path)[1] in _WORDS]
                paths = said if len(said) == 1 else paths
            if len(paths) != 1 or plain(paths[0]) in differ or plain(paths[0]) in moved:
                continue
            key, value = self._place(paths[0])
            new = changed[name][1]
            if name == "recompute" and value in _WORDS and new in _WORDS:
                result[name] = (Edit(key, value, new),)
                continue
            if name == "recompute" and new in ("none", "full") and value in _SWITCHES:
                new = str((new == "full") is not plain(paths[0]).startswith("disable"))
            elif name != "micro_batch" or not value.isdigit():
                continue
            engines = (self._place(path) for path in self._paths(f"strategy.{name}") if path not in paths)
            result[name] = (Edit(key, value, new), *(Edit(k, v, new) for k, v in engines if v.isdigit() and v != new))
            steps = self._own_paths("accumulation")
            if name == "micro_batch" and len(steps) == 1:
                key, value = self._place(steps[0])
                count = str(after.strategy.accumulation(self.q.pricing.job))
                result[name] += (Edit(key, value, count),) if value != count else ()
        return result

    def _paths(self, meaning: str) -> list[str]:
        """Return the paths of the keys with a meaning, such as `strategy.tp` or `accumulation`."""
        return [path for path, understood in self.c.understood.items() if understood == meaning]

    def _own_paths(self, meaning: str) -> list[str]:
        """Return the paths of the keys with a meaning, without DeepSpeed's where the trainer has one too."""
        paths = self._paths(meaning)
        return [path for path in paths if not path.startswith("deepspeed_json.")] or paths

    def _current_value(self, key: str, in_file: str, old: Mapping[str, str]) -> str:
        """Return the value of a setting as the file has it, or as an earlier change left it."""
        original = self.original.get(key)
        if original is None:  # where an earlier change brought it, as that one left it
            return old.get(key, in_file)
        return in_file if original == old.get(key) else old.get(key, "")

    def _left_over(
        self, old: Mapping[str, str], new: Mapping[str, str], changed: Mapping[str, Any]
    ) -> Iterator[Edit]:
        """Yield the removal of the file's settings for a changed field whose keys the export does not have."""
        written = {plain(key) for key in (*old, *new)}
        for path, meaning in self.c.understood.items():
            table, _, name = meaning.partition(".")
            if table in ("strategy", "options") and name in changed and plain(path) not in written:
                key, value = self._place(path)
                if value not in ("", "auto"):
                    yield Edit(f"--{key}" if path.startswith("args.") else key, value, "")


def _names_shared(path: str, key: str) -> int:
    """Return how many names two dotted paths have in common at their ends."""
    pairs = zip(reversed(path.split(".")), reversed(key.lstrip("-").split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: plain(pair[0]) == plain(pair[1]), pairs))


def _text(value: Any) -> str:
    if value is True:
        return "on"
    if isinstance(value, tuple | list):
        return " ".join(map(str, value)) if not any(isinstance(v, list | dict) for v in value) else json.dumps(value)
    return format_field(value) if isinstance(value, float) else str(value)


def _leaves(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
