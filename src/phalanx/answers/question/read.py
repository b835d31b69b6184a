"""A framework's configuration read as a strategy, a job and caveats: what `phalanx read` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.answers.answer import Answer, plain
from phalanx.answers.question.stated import READ_BY, RECOMPUTED, job_of, model_of, options_of, strategy_of
from phalanx.frameworks.caveats import Caveat, assumption, caveats_of
from phalanx.frameworks.configuration import Config, Configuration, Keys, StatedLayout, shown
from phalanx.frameworks.lints import Mistake, lint
from phalanx.frameworks.reading import files
from phalanx.frameworks.reading.folder import FILES
from phalanx.frameworks.reading.source import kind_of, split_function
from phalanx.frameworks.registry import DOCUMENTED, STACKS, facts
from phalanx.frameworks.stated_training import StatedTraining, arguments_of, stated_training
from phalanx.frameworks.values import count, endless
from phalanx.planning import lookup as names
from phalanx.planning.explain.lint_subject import Finding
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.stack_options import STAGE_OPTIONS

UNSET = "only a run knows"
"""Ends the reason of a caveat about a variable."""
_COUNTED = {
    "strategy.micro_batch": "micro_batch", "accumulation": "accumulation", "job.global_batch": "global_batch",
    "options.vocab_multiple": "",
}  # fmt: skip
"""Meaning of a key whose value must be a count -> the field of StatedLayout that a count fills; "" has no field."""
_RANKS = ("rank", "_dim", ".dim", "_r", ".r")
"""Ends of keys for the rank of adapters; other keys of adapters are switches."""
_NO_NUMBER = (None, "", "auto", -1, "-1")
"""Values that leave a count open."""


@dataclass(frozen=True)
class Reading(Answer):
    """A configuration that was read, with its mistakes and what was assumed where it leaves something open."""

    configuration: Configuration
    mistakes: tuple[Mistake, ...]
    config: Config
    """The tables of the file, unchanged."""
    title: str = ""
    """The files that were read."""
    caveats: tuple[Caveat, ...] = ()
    """What matters to a price and is not modelled, not judged, assumed or missing."""

    @property
    def layout(self) -> StatedLayout:
        """The layout that the file states."""
        return self.configuration.layout

    @property
    def training(self) -> StatedTraining:
        """The length and the schedule of the training, as the file states them."""
        environment = self.config.get("env")
        named = environment if isinstance(environment, Mapping) else {}
        c = self.configuration
        return stated_training(arguments_of(self.config), c.layout.global_batch, named, c.kind)


@plain.register
def _(value: Reading) -> dict[str, Any]:
    """Return the plain form; fields that the file leaves open are None."""
    c, s = value.configuration, value.layout
    fields = asdict(s)
    job = {name: fields.pop(name) for name in ("global_batch", "seq", "precision")}
    return {
        "caveats": [asdict(caveat) for caveat in value.caveats],
        "kind": c.kind,
        "stack": c.stack,
        "world": fields.pop("world"),
        "strategy": fields | dict(c.fields),
        "options": dict(c.options),
        "job": job | _plain(c.job),
        "model": c.sizes or c.model_name or None,
        "training": {name: said for name, said in asdict(value.training).items() if said not in (None, "")},
        "from": origins(c),
        "understood": {shown(key): meaning for key, meaning in c.understood.items()},
        "without_effect": [shown(key) for key in c.without_effect],
        "not_modelled": [shown(key) for key in c.not_modelled],
        "unknown": {shown(key): near for key, near in c.unknown.items()},
        "lints": [asdict(m) for m in value.mistakes],
        "notes": list(value.configuration.companions),
    }


def _plain(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return optimizer, clip and types as JSON has them; the compute type stands under `precision`."""
    return {name: value for name, value in job.items() if name != "compute"}


def read(paths: str | Path | Sequence[str | Path], kind: str | None = None, gpus: int | None = None) -> Reading:
    """Read a configuration from a file or a folder, or from several files; `gpus`: its ranks, where it leaves them
    open. Raises InputError."""
    each = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if gpus is not None:
        names.require_counts(("gpus", gpus))
    configuration, config = files.read(each, kind, gpus)
    stated = configuration.layout.world
    if gpus is not None and stated is not None and stated != gpus:
        configuration = files.again(config, configuration, gpus)
    title = " ".join(map(str, each))
    _require_understood(configuration, title)
    _require_numbers(configuration, config)
    job_of(configuration, 1, 1)  # refuses an optimizer out of range, as every command does that prices it
    mistakes = (*_mistakes(configuration), *lint(config, configuration))
    part = [Caveat("not modelled", (), configuration.unpriced, ("time", "memory"))] if configuration.unpriced else []
    blocks = configuration.spec.layers if configuration.spec else count(configuration.sizes.get("num_hidden_layers"))
    caveats = (
        *division_caveats(configuration, blocks),
        *part,
        *caveats_of(configuration),
        *_unset(configuration, config),
        *_assumptions(configuration, config),
    )
    return Reading(configuration, mistakes, config, title, caveats)


def _mistakes(c: Configuration) -> Iterator[Mistake]:
    """Yield the mistake that the stack refuses the file's strategy, where the file states all that its rules need."""
    row, stated = DOCUMENTED.get(c.stack), c.layout
    if row is None or not (stated.world and stated.global_batch and stated.seq):
        return
    try:
        s, (model, _) = strategy_of(c, stated.world), model_of(c, None)
        rules = facts(model, job_of(c, stated.global_batch, stated.seq), s)
        refusal = row.refusal(s, options_of(c, s), rules)
    except InputError:  # something is left open: the price asks for it
        return
    if refusal is not None:
        by = [shown(key) for key, meaning in c.understood.items() if meaning.rpartition(".")[2] == refusal.field]
        problem = f"= {refusal.value}: {c.stack} does not run it: {refusal.reason}"
        yield Mistake("refused", ", ".join(by) or refusal.field, problem, refusal.remedy, refusal.source)


def _unset(c: Configuration, config: Config) -> Iterator[Caveat]:
    """Yield a caveat for each field of the layout whose value is a variable that the file does not set."""
    for key, meaning in c.understood.items():
        value = Keys(config).take(key, "") if meaning.startswith(("strategy.", "job.")) else None
        if isinstance(value, str) and value.startswith("$"):
            yield Caveat("missing", (shown(key),), f"is {value}, which {UNSET}", ("layout", "time", "memory"))


def _require_numbers(c: Configuration, config: Config) -> None:
    """Require that numbers are finite, and that values of the batch and the vocabulary's padding which the reader did
    not take are no other words: a price would silently take the default. Raises InputError."""
    for key, meaning in c.understood.items():
        value, field = Keys(config).take(key, meaning), _COUNTED.get(meaning)
        if endless(value):
            raise InputError(shown(key), value, "is no finite number", "write one, or leave it out")
        rank = meaning == "options.lora" and key.endswith(_RANKS) and value not in (0, "0")  # which is without
        if not rank and (field is None or (field and getattr(c.layout, field) is not None)):
            continue
        if c.kind == "megatron" and field == "global_batch":  # may be a schedule: asked for where it is needed
            continue
        open_ = isinstance(value, bool) or value in _NO_NUMBER or str(value).startswith("$")
        if not open_ and count(value) is None:
            raise InputError(shown(key), value, "is no count", "write a positive whole number, or leave it out")


def _require_understood(c: Configuration, title: str) -> None:
    """Require that a reader understood a key other than the launcher's. Raises InputError."""
    if any(not key.startswith(("launch.", "env.")) for key in c.understood):
        return
    every = (*c.not_modelled, *c.unknown, *c.without_effect)
    others = [shown(key) for key in every if not key.startswith(("env", "launch")) and key != "args"]
    listed = f"{', '.join(others[:4])}{', ...' if len(others) > 4 else ''}"
    none = f"none of its {len(others)} keys is understood ({listed})" if others else "has no settings"
    reason = f"seems to be of {READ_BY[c.kind].reads}, and {none}"
    remedy = "name the file with the layout, such as the configuration that it loads; or --kind, if it is of another"
    remedy = "; ".join(c.missing[:3]) or remedy
    raise InputError("file", title, reason, remedy)


def _assumptions(c: Configuration, config: Config) -> tuple[Caveat, ...]:
    """Return caveats of the values that a price takes where the file leaves them open, and of what is missing."""
    s = c.layout
    assumed = list(c.notes)
    if s.zero is None and not c.missing and (zero := READ_BY[c.kind].zero) is not None:
        assumed.append(f"zero={zero}, which is what {c.stack} does by itself")
    for key in _at_minus_one(c, config, "strategy.micro_batch"):
        assumed.append(f"{shown(key)} = -1 is no number: micro_batch=1 is taken")
    if s.recomputed is None and s.recompute not in (None, *RECOMPUTED):
        assumed.append(f"recompute={s.recompute} is the framework's own: it is priced as full")
    missing = [f"the number of ranks: {open_ranks(c, config)}"] if s.world is None else []
    return (
        *map(assumption, assumed),
        *(Caveat("missing", (), text, ("layout", "time", "memory")) for text in c.missing),
        *(Caveat("missing", (), text) for text in missing),
    )


def _at_minus_one(c: Configuration, config: Config, meaning: str) -> list[str]:
    """Return the keys of a meaning whose value is -1, which leaves it open."""
    named = (key for key, what in c.understood.items() if what.startswith(meaning))
    return [key for key in named if Keys(config).take(key, "") in (-1, "-1")]


def open_ranks(c: Configuration, config: Config) -> str:
    """Return in words how to give the number of ranks: an example where a key of -1 takes the remaining ranks."""
    for key in _at_minus_one(c, config, "strategy."):
        if not key.endswith(("batch_size", "batch_size_per_gpu")):
            inner = (c.layout.tp or 1) * (c.layout.pp or 1) * (c.layout.cp or 1)
            gpus = inner * max(1, 8 // inner)
            return f"{shown(key)} = -1 takes the ranks that are left: {gpus // inner} with --gpus {gpus}"
    return "--gpus says it"


_FOLLOWED = {"etp": "tp"}
"""A field that a file may leave out -> the field whose value it then has."""
_PARTS = {"param": "parameter"}
"""A part of the model's state in keys -> in the names of options."""


def value_sources(c: Configuration) -> dict[str, str]:
    """Return field left open -> the field whose value its reader took, such as etp -> tp."""
    s, stated = c.layout, {meaning.rpartition(".")[2] for meaning in c.understood.values()}
    return {
        name: other
        for name, other in _FOLLOWED.items()
        if name not in stated and getattr(s, name) is not None and getattr(s, name) == getattr(s, other)
    }


def origins(c: Configuration) -> dict[str, str]:
    """Return field of a layout -> words for its origin: the keys that set it, a formula, or whose default it is."""
    by_field: dict[str, list[str]] = {}
    for key, meaning in c.understood.items():
        table, _, name = meaning.rpartition(".")
        fields = ("offload", f"{_PARTS.get(name, name)}_offload") if table == "offload" else (name,)
        for field in fields:
            by_field.setdefault(field, []).append(shown(key))
    s = c.layout
    if "cpu" in (s.offload or {}).values():  # no default: a key of its own says so, or the one that shards
        said = by_field.get("offload") or by_field.get("zero", [])
        for name in ("offload", "parameter_offload", "optimizer_offload"):
            by_field.setdefault(name, said)
    if c.within_node:
        by_field.setdefault("shard", by_field.get("zero", []))
    micro = int(c.fields.get("micro_batch") or s.micro_batch or 0)
    inner = (s.tp or 1) * (s.pp or 1) * (s.cp or 1)
    of_another = c.kind in STACKS and STACKS[c.kind].framework != STACKS[c.stack].framework  # verl's Megatron
    whose = c.kind if of_another else c.stack
    default = f"default of {STACKS[whose].title or whose}"
    three = "world" not in by_field and {"micro_batch", "accumulation", "global_batch"} <= by_field.keys()
    filled = (s.dp or 0) * inner == s.world
    of_batch = ("global_batch / (micro_batch x accumulation)", True)
    derived = {
        "dp": of_batch if three else ("world / (tp x pp x cp)", filled),
        "world": ("dp x tp x pp x cp", filled),
        "accumulation": ("global_batch / (micro_batch x dp)", bool(by_field.get("global_batch"))),
        "global_batch": ("micro_batch x accumulation x dp", bool(micro)),
        "micro_batch": ("global_batch / (accumulation x dp)", bool(by_field.get("global_batch"))),
        "schedule": ("pp and virtual", s.pp is not None),
        **{name: (other, getattr(s, name) == getattr(s, other)) for name, other in _FOLLOWED.items()},
    }
    result = {}
    for name in (*asdict(s), *c.fields, *c.options):
        formula, holds = derived.get(name, ("", False))
        result[name] = ", ".join(by_field.get(name, ())) or (f"derived: {formula}" if holds else default)
    return result


def findings_in(reading: Reading) -> tuple[Finding, ...]:
    """Return the mistakes of a configuration as findings of `lint`."""
    return tuple(Finding(m.name, f"{m.key} {m.problem}", f"{m.remedy} ({m.source})") for m in reading.mistakes)


def is_configuration(path: Path) -> bool:
    """Return whether a file or folder is another framework's configuration, rather than a plan, a run's folder or an
    observation. Raises InputError for a script, YAML or Python that cannot be read: it can be nothing else."""
    data = split_function(path)[0].suffix.lower() in (".json", ".toml")
    if path.is_dir():
        return not (path / "plan.json").exists() and any((path / name).is_file() for name in FILES)
    try:
        config = files.document(path)
    except InputError:
        if path.is_file() and not data:
            raise
        return False
    if "version" in config and ("strategy" in config or "ranks" in config):
        return False
    if path.suffix.lower() == ".toml" and kind_of(config) != "torchtitan":  # a job file of ours
        return False
    return not data or kind_of(config) is not None


def left_even(c: Configuration) -> bool:
    """Return whether the framework divides the blocks of a pipeline evenly, because the file lists none."""
    even = READ_BY[c.kind].equal_chunks and (c.layout.pp or 1) > 1 and c.layout.layers in (None, "auto")
    return even and not any(c.options.get(name) for name in STAGE_OPTIONS)


def division_caveats(c: Configuration, blocks: int | None) -> tuple[Caveat, ...]:
    """Return the caveat that the framework stops at its start because its blocks cannot be divided evenly."""
    chunks = (c.layout.pp or 1) * (c.layout.virtual or 1)
    other = any("layout" in verdict.changes for verdict in c.not_modelled.values())  # a key that may list them
    balanced = c.stack.startswith("megatron-deepspeed")  # DeepSpeed's PipelineModule deals out any number
    if not blocks or blocks % chunks == 0 or other or balanced or not left_even(c):
        return ()
    reason = f"a list of the blocks of {chunks} pipeline chunks, over which {blocks} do not divide: without one "
    reason += f"{c.stack} stops at its start, and a price is of chunks that differ by a block"
    return (Caveat("missing", (), reason, ("layout", "time", "memory")),)
