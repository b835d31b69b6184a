"""The settings of a framework that write a strategy, spelt as a configuration file spells them.

Those are the settings that `phalanx export` would write. Where a stack has no export, or cannot express a strategy,
changes are named by the options of its row (frameworks/).
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

_OWN = frozenset(("micro_batch", "recompute"))
"""Fields that programs over another's stack say by keys of their own."""
_WORDS = frozenset(("none", "selective", "full"))
"""Words for what is recomputed that a file and a Strategy share."""
_RENAMED = {("torchtitan", "shard"), ("torchtitan", "micro_batch")}
"""Fields of a framework whose keys changed their names alone."""
_OF_A_TRAINER = {"per_device_train_batch_size": "micro_batch", "gradient_checkpointing": "recompute"}
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


def written(program: TrainingProgram) -> dict[str, str]:
    """Return the settings of a program by key, their values as text: "on" of a flag without one."""
    return {setting.key: _text(setting.value) for g in program.groups for setting in g.settings}


class FileSettings:
    """The settings of a framework for a strategy, spelt as a file spells them."""

    def __init__(self, reading: Reading, q: Question) -> None:
        self.q, self.c = q, reading.configuration
        self.places: dict[str, list[tuple[str, tuple[str, str]]]] = {}
        """Plain name of a key -> (its path, (the key as in the file, its value)), of each place that has it."""
        self.first: dict[str, str] = {}
        """The settings of the file's own strategy."""
        self.again: dict[str, list[tuple[str, str]]] = {}
        """Where files that belong together say the same number once more, by the plain name of its key."""
        for path, value in _leaves(reading.config):
            place = (shown(path), _text(value))
            alike = self.places.setdefault(plain(path), [])
            if alike and alike[0][1] != place and place[1].isdigit():
                self.again.setdefault(plain(path), []).append(place)
            alike.append((path, place))

    def _own(self, key: str) -> tuple[str, str] | None:
        """Return a setting's key as in the file, and its value: of several with its last name, the one whose tables
        have the same names too. None where the file has none."""
        alike = self.places.get(plain(key), ())
        return max(alike, key=lambda place: _names_shared(place[0], key))[1] if alike else None

    def of(self, x: FileState) -> dict[str, str] | None:
        """Return every setting of a strategy; None where the stack has no export, or cannot express it."""
        program = program_of(self.q, x.strategy, x.options, x.blocks)
        if program is None:
            return None
        settings = written(program)
        given = program.files.get("training_arguments.json")
        more = json.loads(given) if given and self.c.kind != "deepspeed" else {}  # which has its own of these
        return settings | {name: _text(value) for name, value in more.items() if name not in settings}

    def edits(self, before: FileState, after: FileState, changed: Mapping[str, Any]) -> tuple[Edit, ...]:
        """Return the settings that differ between two states; by fields where they cannot be written."""
        old, new = self.of(before), self.of(after)
        differ = {
            plain(key) for key in {**(old or {}), **(new or {})} if (old or {}).get(key) != (new or {}).get(key)
        }
        moved = {plain(key) for key, value in self.first.items() if (old or {}).get(key) != value}
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
        old = old or {}
        self.first = self.first or old
        result = []
        said = {plain(edit.key) for edits in own_words.values() for edit in edits}
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
                or plain(key) in said
            ):
                continue
            name, own = self._own(key) or self._earlier(name, old, new) or (self._spelt(key.lstrip("-")), "")
            if own == "auto" or (not own and key not in new):  # follows another setting; is not in the file
                continue
            spelt = f"--{name}" if key.startswith("--") else name
            edit = Edit(spelt, self.now(key, own, old), new.get(key, ""))
            result += [edit] if edit.old != edit.new else []
        result += [edit for edits in own_words.values() for edit in edits]
        result += self._left_over(old, new, {n: value for n, value in changed.items() if n not in own_words})
        for edit in tuple(result):
            others = self.again.get(plain(edit.key), ())
            result += [
                Edit(key, value, edit.new) for key, value in others if value == (self._own(edit.key) or ("", ""))[1]
            ]
        return tuple(dict.fromkeys(result))

    def resized(self, after: FileState) -> tuple[Edit, ...]:
        """Return the edits of an ep that does not divide the ranks on which the file is planned."""
        paths, new = self._own_paths("strategy.ep"), str(after.strategy.ep)
        places = ((path, *(self._own(path) or (shown(path), ""))) for path in paths)
        return tuple(
            Edit(f"--{key}" if path.startswith("args.") else key, old, new)
            for path, key, old in places
            if old.isdigit() and old != new
        )

    def _no_longer_followed(self, before: Strategy, after: Strategy) -> Container[str]:
        """Return the fields that the file leaves to follow another one, and that no longer do: they must be said."""
        return {
            name
            for name, other in self.q.followed.items()
            if getattr(before, name) == getattr(before, other) and getattr(after, name) != getattr(after, other)
        }

    def _earlier(self, field: str, old: Mapping[str, str], new: Mapping[str, str]) -> tuple[str, str] | None:
        """Return the key, and its value, by which the file says a field that the export says by another: that of an
        earlier release, in the same units. None where there is no such key, or several."""
        if (self.c.kind, field) not in _RENAMED:
            return None
        written = {plain(key) for key in (*old, *new)}
        paths = [path for path in self._own_paths(f"strategy.{field}") if plain(path) not in written]
        return self._own(paths[0]) if len(paths) == 1 else None

    def _spelt(self, key: str) -> str:
        """Return a key that the file has not, as it would have it: arguments of a command line have no tables."""
        return key.rpartition(".")[2] if self.c.kind == "megatron" else key

    def _field_of(self, key: str) -> str:
        """Return the field of a Strategy that a setting of the export says; "" for others."""
        keys = key_table(row_of(self.q.stack).framework).keys
        fields = (k.field for k in keys if plain(k.name) == plain(key) and k.field.startswith("strategy."))
        return _OF_A_TRAINER.get(plain(key)) or next(fields, "").removeprefix("strategy.")

    def _in_own_words(
        self, after: FileState, changed: Mapping[str, Any], differ: Container[str], moved: Container[str]
    ) -> dict[str, tuple[Edit, ...]]:
        """Return the edits of fields that the file says by a key that is not among those which `differ` in the export
        of its stack, nor was `moved` to another by an earlier change: a number, or whether blocks are recomputed. A
        micro-batch comes with the accumulation that keeps
        the global batch."""
        result: dict[str, tuple[Edit, ...]] = {}
        for name in _OWN.intersection(changed):
            paths = self._own_paths(f"strategy.{name}")
            if name == "recompute" and changed[name][1] in _WORDS:
                said = [path for path in paths if (self._own(path) or ("", ""))[1] in _WORDS]
                paths = said if len(said) == 1 else paths
            if len(paths) != 1 or plain(paths[0]) in differ or plain(paths[0]) in moved:
                continue
            key, value = self._own(paths[0]) or (shown(paths[0]), "")
            new = changed[name][1]
            if name == "recompute" and value in _WORDS and new in _WORDS:
                result[name] = (Edit(key, value, new),)
                continue
            if (
                name == "recompute"
                and new in ("none", "full")
                and value in ("", "on", "True", "False", "true", "false")
            ):
                new = str((new == "full") is not plain(paths[0]).startswith("disable"))
            elif name != "micro_batch" or not value.isdigit():
                continue
            again = [
                p for p, meaning in self.c.understood.items() if meaning == f"strategy.{name}" and p not in paths
            ]
            engines = (self._own(path) or (shown(path), "") for path in again)
            result[name] = (Edit(key, value, new), *(Edit(k, v, new) for k, v in engines if v.isdigit() and v != new))
            steps = self._own_paths("accumulation")
            if name == "micro_batch" and len(steps) == 1:
                key, value = self._own(steps[0]) or (shown(steps[0]), "")
                count = str(after.strategy.accumulation(self.q.pricing.job))
                result[name] += (Edit(key, value, count),) if value != count else ()
        return result

    def _own_paths(self, what: str) -> list[str]:
        """Return the keys that say something, where the engine's file repeats it the trainer's own."""
        paths = [path for path, meaning in self.c.understood.items() if meaning == what]
        return [path for path in paths if not path.startswith("deepspeed_json.")] or paths

    def now(self, key: str, own: str, old: Mapping[str, str]) -> str:
        """Return a setting as the file has it, or as an earlier change left it."""
        before = self.first.get(key)
        if before is None:  # where an earlier change brought it, as that one left it
            return old.get(key, own)
        return own if before == old.get(key) else old.get(key, "")

    def _left_over(
        self, old: Mapping[str, str], new: Mapping[str, str], changed: Mapping[str, Any]
    ) -> Iterator[Edit]:
        """Yield settings of the file that say a changed field in words that the export has not."""
        written = {plain(key) for key in (*old, *new)}
        for path, meaning in self.c.understood.items():
            table, _, name = meaning.partition(".")
            if table in ("strategy", "options") and name in changed and plain(path) not in written:
                key, value = self._own(path) or (shown(path), "")
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
