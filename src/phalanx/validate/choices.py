"""Published runs as choices: sweeps, which measured many strategies for one question, and expert-tuned recipes.

A question is a model, its job (batch, sequence length, number format), a number of GPUs of one kind, and a software
stack. Its answer is the fastest strategy that fits: a prediction is as good as the choice it leads to.

Options of recipes beyond their layout (what they recompute, offload and overlap): tables of performance leave these
out; NVIDIA's are in the recipes' own sources, Megatron-Bridge v0.5.0 (release 26.06),
scripts/performance/configs/*/*workload_base_configs.py, whose lines are named here. A recipe of another release is
priced with the same options.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.spec.rows import Rows, record
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions
from phalanx.validate.from_row import Case
from phalanx.validate.records import Row
from phalanx.validate.stacks import named_modules
from phalanx.validate.systems import Benched, benchmarks_of

MODULES = "recomputation by module"
SOME_BLOCKS = "recomputation of some blocks"
OFFLOAD = "offloading"


@dataclass(frozen=True)
class _Recipes:
    """Recipes of one framework with the same options. An empty field matches any row; a row takes the first match."""

    framework: str
    """How the framework's name begins."""
    model: str
    """How the model's name begins, in small letters."""
    line: str
    """Where the recipe stands: file:line."""
    recompute: str = ""
    """The `recompute` of its strategy; empty: as the row says."""
    options: StackOptions = AS_RELEASED
    chips: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    sharding: str = ""
    """A word in the row's column `sharding`."""
    unknown: str = ""
    """The option that it is known to use, where its value is not known."""

    def has(self, row: Row) -> bool:
        """Whether a row is one of these recipes."""
        return (
            row["framework"].startswith(self.framework)
            and row["model"].lower().startswith(self.model)
            and (not self.chips or row["gpu"].split("-")[0] in self.chips)
            and (not self.formats or row["precision"] in self.formats)
            and self.sharding in row["sharding"]
        )


_RECIPES = Rows(Path(__file__).with_name("recipe_options.toml"), record(_Recipes, "line"))


def options_of(row: Row, s: Strategy) -> tuple[Strategy, StackOptions]:
    """Return a row's strategy with its recipe's recomputation, and the recipe's other options, as far as known."""
    if named := named_modules(row):
        return replace(s, recompute=named), AS_RELEASED
    recipe = _recipe(row)
    if recipe is None:
        return s, AS_RELEASED
    return (replace(s, recompute=recipe.recompute) if recipe.recompute else s), recipe.options


def memory_option(row: Row) -> str:
    """Name the option that a recipe uses beyond its layout to save memory; empty if there is none, or none that is
    known."""
    if row["act_ckpt"].startswith("selective:"):
        return MODULES
    if "offload" in f"{row['options']} {row['notes']}".lower().replace("recompute/offload not in table", ""):
        return OFFLOAD
    recipe = _recipe(row)
    if recipe is None:
        return ""
    if recipe.options.activation_offload:
        return OFFLOAD
    return recipe.unknown or (MODULES if recipe.recompute.startswith("selective") else SOME_BLOCKS)


def _recipe(row: Row) -> _Recipes | None:
    return next((recipes for recipes in _RECIPES.values() if recipes.has(row)), None)


def overlaps_experts(row: Row) -> bool:
    """Whether a recipe overlaps the exchange of tokens with another micro-batch's compute: as its row states, or its
    source (Megatron-Bridge, scripts/performance/configs: 0132842, deepseek/deepseek_llm_pretrain.py:167 and 195, of
    release 25.09; v0.5.0, deepseek/deepseek_workload_base_configs.py:251). Constants of releases from 26.06 on, whose
    recipes do so too, are fitted on runs that do."""
    if "EP overlap" in row["options"]:
        return True
    if row["framework"] != "Megatron-Bridge" or row["model"] != "deepseek-v3":
        return False
    layout = (row["framework_version"], row["gpu"].split("-")[0], row["ep"])
    return layout in (("NeMo 25.09", "H100", "64"), ("NeMo 26.04.01", "B200", "32"))


SWEEP_SIZE = 5
"""Minimum number of strategies measured for a question to count as a sweep."""
_STUDIES = {
    "vtrain": "layouts were enumerated, not tuned",
    "bigscience-bloom": "layouts were varied to study one machine, not tuned",
    "bigscience-v100": "layouts were varied to study one machine, not tuned",
    "hf-ultrascale": "layouts were enumerated, not tuned",
    "simumax-b200": "layouts were chosen to check a simulator",
    "megatron-2020-tp": "a study of tensor parallelism alone",
    "megatron-ci-golden": "a test's layout",
}
"""Families with untuned layouts, with the reason why they do not count as recipes."""
_TUNED = ("NeMo", "Megatron")
"""Name prefixes of frameworks that offer every kind of parallelism."""


@dataclass(frozen=True)
class PublishedSweep:
    """All runs of one question, out of memory ones included, of at least SWEEP_SIZE strategies that were timed."""

    runs: tuple[Case, ...]

    @property
    def name(self) -> str:
        """The question, for people."""
        return question_name(self.runs[0])

    @property
    def family(self) -> str:
        """The source family."""
        return self.runs[0].row.family

    def benchmarks(self) -> list[Benched]:
        """Return the microbenchmarks run along with each run by its own job; for jobs without, the median of the
        question's other jobs; empty if there are none."""
        own = [benchmarks_of(c.row) for c in self.runs]
        known = [b for b in own if np.any(b.ranks)]
        if not known:
            return own
        typical = Benched(**{name: float(np.median([getattr(b, name) for b in known])) for name in vars(known[0])})
        return [b if np.any(b.ranks) else typical for b in own]


def is_timed(case: Case) -> bool:
    """Whether a run completed and its time counts."""
    return case.measured_s is not None and case.row.completed


def question_name(case: Case) -> str:
    """Name a case's question for people: model, GPUs, batch x sequence length, number format."""
    row = case.row
    where = f"{row['gpus']} {row['gpu'].split('-')[0]}"
    return f"{row['model']}, {where}, {row['gbs']} x {row['seq_len']} {row['precision']}"


def sweeps(cases: Iterable[Case]) -> list[PublishedSweep]:
    """Group runs into sweeps."""
    questions: dict[Any, list[Case]] = defaultdict(list)
    for c in cases:
        questions[_question(c)].append(c)
    groups = (runs for runs in questions.values() if len({c.strategy for c in runs if is_timed(c)}) >= SWEEP_SIZE)
    return [PublishedSweep(tuple(runs)) for runs in groups]


def recipes(cases: Iterable[Case]) -> tuple[list[Case], list[tuple[Row, str]]]:
    """Return the runs whose strategy experts tuned, one for each question, and the rows of all others with the reason
    why they do not count. A layout run at several scales or releases counts once, at the smallest scale."""
    by_question: dict[Any, Case] = {}
    rejected: list[tuple[Row, str]] = []
    cases = list(cases)
    in_sweeps = {id(c) for sweep in sweeps(cases) for c in sweep.runs}
    for c in sorted((c for c in cases if is_timed(c)), key=lambda c: (c.strategy.world, c.measured_s or 0.0)):
        reason = "one of a sweep" if id(c) in in_sweeps else _not_tuned(c)
        question, scaled = _question(c), _scaled(c)
        if not reason and question in by_question:
            reason = "a slower strategy of the same question"
        elif not reason and scaled in by_question:
            reason = "a recipe at another scale or release"
        if reason:
            rejected.append((c.row, reason))
        else:
            by_question[question] = by_question[scaled] = c
    kept = {id(c): c for c in by_question.values()}
    return list(kept.values()), rejected


def _question(c: Case) -> tuple[Any, ...]:
    """Return a key that is equal for runs of one question."""
    row = c.row
    source = tuple(row[name] for name in ("source_family", "framework", "framework_version", "task"))
    return (*source, c.model, row["gpu"], row["gpus"], row["precision"], c.job)


def _scaled(c: Case) -> tuple[Any, ...]:
    """Return a key that is equal for recipes that differ only in release, GPUs, replicas and global batch."""
    s, row = c.strategy, c.row
    source = tuple(row[name] for name in ("source_family", "framework", "task", "model"))
    degrees = (s.tp, s.cp, s.pp, s.virtual, s.ep, s.etp, s.micro_batch, s.recompute, s.zero)
    return (*source, row["gpu"], row["precision"], c.job.seq, *degrees)


def _not_tuned(c: Case) -> str:
    """Return why a run is not an expert-tuned recipe; empty if it is one."""
    row = c.row
    if row.family in _STUDIES:
        return _STUDIES[row.family]
    if "proxy" in f"{row['model']} {row['table']} {row['notes']}".lower():
        return "a proxy of fewer layers in the layout of the full model"
    if row["task"] == "lora":
        return "only adapters are trained"
    recipe = _recipe(row)
    if recipe is not None and "offloading" in recipe.unknown:
        return "its recipe offloads activations that no option names"
    if c.generic or not row["framework"].startswith(_TUNED):
        return "its stack has one layout, or is not known"
    return ""


def canonical_strategy(c: Case) -> Strategy:
    """Return a recipe's strategy as a search writes it: 1F1B with several chunks per rank is `interleaved`."""
    s = c.strategy
    return replace(s, schedule="interleaved") if s.virtual > 1 and s.schedule == "1f1b" else s


def differences(best: Strategy, other: Strategy) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two strategies differ, as (best's, other's). `dp` is left out, as it follows from
    the rest."""
    names = [name for name in vars(best) if name not in ("dp", "layers", "bucket", "prefetch")]
    pairs: Mapping[str, tuple[Any, Any]] = {name: (getattr(best, name), getattr(other, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def median_by_strategy(sweep: PublishedSweep, values: Sequence[float]) -> dict[Strategy, float]:
    """Return the median of `values`, one per run, over the completed runs of each strategy."""
    groups: dict[Strategy, list[float]] = defaultdict(list)
    for c, value in zip(sweep.runs, values, strict=True):
        if is_timed(c):
            groups[c.strategy].append(value)
    return {s: float(np.median(group)) for s, group in groups.items()}
