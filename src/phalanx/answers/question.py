"""One question, read once for every command: model, cluster, GPUs, job, strategy, software stack and precision.

`predict`, `explain`, `lint`, `comm`, `memory`, `roofline`, `plan` and `verify` give what stands on their command line
as an `Asked` and get a `Question`. So one argument means one thing, and each output can say what it is about:

    gpus        of --gpus, or the ranks of the plan
    dp          as the strategy's line has it; else what tp, pp and cp leave of the GPUs
    stack       --stack; else the plan's own; else Megatron-Core
    precision   --precision; else the plan's; else bf16, or fp16 where the device has no bf16

A plan of our own runtime (`phalanx plan JOB.toml`) is priced exactly, as that runtime runs it, unless --stack names
another. What a command cannot honour it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from phalanx.answers.precision import (
    OF_COMPUTE,
    in_precision,
    precision_on,
    require_precision,
    with_products,
)
from phalanx.answers.release import release_named
from phalanx.cost.analytic.estimate import Estimate, estimate, require_modelled
from phalanx.frameworks.registry import DOCUMENTED, facts
from phalanx.planning import question as names
from phalanx.planning.explain.analytic import AnalyticSubject
from phalanx.planning.explain.exact import ExactSubject, subject_of_plan
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import conditions
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import PRECISIONS
from phalanx.spec.strategy import spec as strategies
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, StackOptions
from phalanx.spec.strategy.stack_options import parse as parse_options

DEFAULT_STACK = "megatron-core"
OWN_STACK = "phalanx"


@dataclass(frozen=True)
class Asked:
    """What stands on a command line; None where nothing does."""

    source: Path | None = None
    """A plan.json or a run's folder, in place of a model, a cluster, a batch and a sequence length."""
    model: str | ModelSpec | None = None
    cluster: str | None = None
    gpus: int | None = None
    batch: int | None = None
    seq: int | None = None
    strategy: str | None = None
    """One line, such as tp=8,zero=1."""
    stack: str | None = None
    precision: str | None = None
    where: str | None = None
    """Conditions on the strategies of a search, and options of the stack (plan/search/limits.py)."""
    compared: bool = False
    """Whether it is asked of all stacks, of which some may not have an option."""
    options: StackOptions = AS_RELEASED
    """Options that a configuration sets; those of `where` and `setting` come on top."""
    setting: str | None = None
    """A line of options, such as loss_as_layer=1."""
    job: Job | None = None
    """Optimizer and clipping of a configuration."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """What a command is about."""

    about: str
    """The model as it was named, or the file."""
    pricing_on: Callable[[int], Pricing]
    """The question on any number of GPUs."""
    gpus: int
    strategy: Strategy | None
    """None where it is to be searched."""
    dp_rule: str
    """Where the strategy's dp is from."""
    stack: str
    precision: str
    notes: tuple[str, ...] = ()
    plan: Plan | None = None
    """The plan that was read, if one was."""
    exact: ExactSubject | None = None
    """A strategy of our own runtime with its exact price; None where the formulas of a stack price it."""

    @cached_property
    def pricing(self) -> Pricing:
        """The question on its GPUs."""
        return self.pricing_on(self.gpus)

    @cached_property
    def subject(self) -> AnalyticSubject:
        """The strategy, priced by the formulas of the stack. Raises InputError for fields that have no term there."""
        assert self.strategy is not None
        require_modelled(self.strategy, self.stack)
        if self.strategy.compression != "none":
            reason = "only phalanx predict prices compression"
            raise InputError("strategy.compression", self.strategy.compression, reason, "leave it out")
        return self.lintable

    @cached_property
    def lintable(self) -> AnalyticSubject:
        """The strategy for `lint`, which also reads fields without a term: buckets, compression."""
        assert self.strategy is not None
        return AnalyticSubject(self.pricing_on, self.strategy, self.gpus)

    @cached_property
    def estimate(self) -> Estimate:
        """The price with every term's formula and numbers, its pipeline timed action by action with the blocks that
        it has, as everywhere.

        Compression is priced by the formulas alone. Raises InputError."""
        assert self.strategy is not None
        p, s = self.pricing, self.strategy
        if s.compression == "none":
            s = self.subject.as_cut
        result = estimate(p.model, p.cluster, p.job, s, self.stack, p.number_format, p.extra)
        if s.compression == "none":
            result = replace(result, step=replace(result.step, terms=self.subject.priced.terms))
        return result

    @property
    def shown(self) -> Strategy:
        """The strategy of `estimate` as a page names it: with the blocks of its chunks, where these are not equal."""
        assert self.strategy is not None
        return self.strategy if self.strategy.compression != "none" else self.subject.shown

    @property
    def heading(self) -> str:
        """The line that every output begins with: whose step it is, in which numbers, and where dp is from."""
        how = "exactly, as our own runtime runs it" if self.exact else "by fitted formulas"
        options = f"; {self.pricing.extra}" if self.exact is None and self.pricing.extra.changed() else ""
        peak = (
            " (MFU: of the peak in bf16)"
            if self.precision in PRECISIONS and PRECISIONS[self.precision].narrow
            else ""
        )
        line = f"stack {self.stack}, priced {how}; precision {self.precision}{peak}; {self.dp_rule}{options}"
        return f"{line}\n{self.stack} does not run it: {self.refused}" if self.refused else line

    @cached_property
    def refused(self) -> str:
        """Why the stack's row refuses the strategy that is priced, in one line; "" if it runs it or has no row."""
        row, s = DOCUMENTED.get(self.stack), self.strategy
        if row is None or s is None or self.exact is not None:
            return ""
        p = self.pricing
        options = with_products(p.extra, self.precision, self.stack)
        refusal = row.refusal(s, options, facts(p.model, p.job, s))
        return "" if refusal is None else str(refusal.error(row.name))

    def as_json(self) -> dict[str, Any]:
        """Return the key `question` of every command's JSON."""
        job = self.exact.job if self.exact else self.pricing.job
        cluster = self.exact.cluster if self.exact else self.pricing.cluster
        return {
            "about": self.about,
            "cluster": cluster.name,
            "gpus": self.gpus,
            "global_batch": job.global_batch,
            "seq": job.seq,
            "strategy": None if self.strategy is None else str(self.strategy),
            "dp_rule": self.dp_rule,
            "stack": self.stack,
            "precision": self.precision,
            "options": {} if self.exact else self.pricing.extra.changed(),
            **({"refused": self.refused} if self.refused else {}),
        }


def read(asked: Asked, searched: bool = False) -> Question:
    """Read a question from options or a plan; `searched`: its strategy is to be found. Raises InputError."""
    if asked.stack is not None:
        stack, note = release_named(asked.stack)
        asked = replace(asked, stack=stack, notes=(*asked.notes, *([note] if note else [])))
    if asked.source is None:
        return _of_options(asked, searched)
    from phalanx.answers import read as configurations

    if configurations.is_configuration(asked.source):
        about = _of_options(configurations.asked_by(asked.source, asked), searched)
        return replace(about, about=str(asked.source))
    return _of_plan(asked)


def _of_options(asked: Asked, searched: bool) -> Question:
    """Read model, cluster and numbers that options name."""
    given = {
        "--model": asked.model,
        "--cluster": asked.cluster,
        "--gpus": asked.gpus,
        "--batch": asked.batch,
        "--seq": asked.seq,
    }
    missing = ", ".join(name for name, value in given.items() if value is None)
    if missing:
        file = "a job file" if searched else "a plan.json"
        raise InputError(missing, None, "is missing", f"name {file}, or all of {', '.join(given)}")
    gpus, stack = asked.gpus or 0, asked.stack or DEFAULT_STACK
    names.require_counts(("--gpus", gpus))
    spec = asked.model
    model, notes = (spec, []) if isinstance(spec, ModelSpec) else names.model_named(str(spec))
    on = names.cluster_named(str(asked.cluster))
    precision = precision_on(asked.precision, on(gpus))
    larger = names.pricing_by_gpus(model, on, asked.batch or 0, asked.seq or 0, stack)

    wanted, options = conditions(asked.where) if asked.where else ((), AS_RELEASED)
    if not asked.compared:
        _require_options(stack, options)
        if searched:
            require_precision(stack, precision)
    own = options_in(asked.setting, stack)
    options = StackOptions(**asked.options.changed() | options.changed() | own.changed())

    def pricing_on(count: int) -> Pricing:
        pricing = replace(in_precision(larger(count), precision), wanted=wanted, extra=options)
        if asked.job is None:
            return pricing
        job = replace(pricing.job, optimizer=asked.job.optimizer, clip=asked.job.clip)
        return replace(pricing, job=job)

    strategy, rule = (None, "dp searched") if searched else strategy_on(asked.strategy or "", gpus)
    if strategy is not None:
        pricing = pricing_on(gpus)
        check(strategy, model, pricing.job, None)
    return Question(str(asked.model), pricing_on, gpus, strategy, rule, stack, precision, (*asked.notes, *notes))


def _of_plan(asked: Asked) -> Question:
    """Read a plan.json or a run's folder, whose strategy, GPUs, stack and precision options may replace."""
    assert asked.source is not None
    saved = plans.read(asked.source / "plan.json" if asked.source.is_dir() else asked.source)
    others = {"--model": asked.model, "--cluster": asked.cluster, "--batch": asked.batch, "--seq": asked.seq}
    for name, value in others.items():
        if value is not None:
            raise InputError(name, value, "is already set by the plan.json", "leave it out, or make a new plan")
    if asked.gpus is not None:
        names.require_counts(("--gpus", asked.gpus))
    gpus = asked.gpus or saved.strategy.world
    strategy, rule = strategy_on(asked.strategy, gpus) if asked.strategy else _planned(saved.strategy, gpus)
    about, own = str(asked.source), str(saved.choices.get("stack", OWN_STACK))
    if own == OWN_STACK and "stack" not in saved.choices and asked.stack is None:
        if asked.precision is not None:
            remedy = "leave it out, or name a --stack"
            raise InputError("--precision", asked.precision, "is the job's in a plan of our own runtime", remedy)
        if asked.setting is not None:
            raise InputError("--options", asked.setting, "are of a stack, and this price is exact", "name a --stack")
        exact = subject_of_plan(saved, strategy if asked.strategy else None, asked.gpus)
        compute = saved.job.precision.compute

        def unpriced(count: int) -> Pricing:
            return Pricing(saved.model, saved.cluster, saved.job, OWN_STACK)

        return Question(
            about, unpriced, gpus, exact.strategy, rule, OWN_STACK, OF_COMPUTE.get(compute, compute), (), saved, exact
        )
    stack = asked.stack or own
    larger = names.pricing_of_plan(saved, stack)
    precision = asked.precision or saved.choices.get("precision") or OF_COMPUTE.get(saved.job.precision.compute)
    if precision is None:
        remedy = f"name one with --precision: {', '.join(PRECISIONS)}"
        raise InputError("job.precision.compute", saved.job.precision.compute, f"has no price under {stack}", remedy)
    precision = precision_on(str(precision), saved.cluster)

    extra = StackOptions(**saved.options.changed() | options_in(asked.setting, stack).changed())

    def pricing_on(count: int) -> Pricing:
        return replace(in_precision(larger(count), precision), extra=extra)

    check(strategy, saved.model, saved.job, None)
    return Question(about, pricing_on, gpus, strategy, rule, stack, precision, asked.notes, saved)


def options_in(line: str | None, stack: str) -> StackOptions:
    """Return the options of a line, which the stack must have. Raises InputError."""
    if line is None:
        return AS_RELEASED
    options = build(StackOptions, parse_options(line), "options")
    _require_options(stack, options, "--options")
    return options


def _require_options(stack: str, options: StackOptions, field: str = "--where") -> None:
    """Require that a stack has the options that are set. Raises InputError."""
    if not options.changed():
        return
    if stack not in DOCUMENTED:
        reason = f"{stack} has no row that says which options it has"
        raise InputError(field, str(options), reason, f"use a stack that has: {', '.join(DOCUMENTED)}")
    row = DOCUMENTED[stack]
    for name, value in options.changed().items():
        entry = row.options.get(name)
        if entry is None or not entry.allows(value):
            has = ", ".join(row.options) if entry is None else " or ".join(map(str, entry.values or ()))
            raise InputError(f"{field} {name}", value, f"{row.title} does not have it", f"use {has}")


def _planned(strategy: Strategy, gpus: int) -> tuple[Strategy, str]:
    _require_ranks(strategy, gpus)
    return strategy, f"dp={strategy.dp} of the plan{_idle(strategy, gpus)}"


def strategy_on(line: str, gpus: int) -> tuple[Strategy, str]:
    """Return the strategy of a line on so many GPUs, and where its dp is from. Raises InputError."""
    table = strategies.parse(line)
    if "dp" in table:
        chosen = make_strategy(table)
        assert chosen is not None
        _require_ranks(chosen, gpus)
        return chosen, f"dp={chosen.dp} as given{_idle(chosen, gpus)}"
    alone = build(Strategy, {axis: table[axis] for axis in ("tp", "pp", "cp") if axis in table}, "strategy")
    split = " x ".join(f"{axis}={getattr(alone, axis)}" for axis in ("tp", "pp", "cp") if axis in table)
    if gpus % alone.world:
        below, above = gpus // alone.world * alone.world, -(-gpus // alone.world) * alone.world
        remedy = f"use {below} or {above} GPUs" if below else f"use {above} GPUs"
        reason = f"{split} = {alone.world} ranks do not divide {gpus} GPUs, so that no dp fills them"
        raise InputError("strategy", line, reason, f"{remedy}, or name dp")
    chosen = make_strategy(table | {"dp": gpus // alone.world})
    assert chosen is not None
    return chosen, f"dp={chosen.dp} fills {gpus} GPUs" + (f" over {split}" if split else "")


def fixed(line: str | None) -> str:
    """Return the conditions that fix the fields of a strategy's line in a search; `pp=*` leaves one open. Raises
    InputError."""
    table = strategies.parse(line or "")
    return ", ".join(f"{name}={strategies.format_field(value)}" for name, value in table.items() if value != "*")


def as_given(error: InputError, line: str | None, options: str | None = None) -> InputError:
    """Return an error about a search's conditions as one about the options that they were given by: those that
    `fixed` made of a strategy's line are not from `--where`, which names options of the stack too, as `--options`."""
    if error.field == "--options" and not options:
        return InputError("--where", error.value, error.reason, error.remedy)
    if error.field != "--where":
        return error
    of_line, about = fixed(line).split(", "), str(error.value).split(", ")
    count = sum(condition in of_line for condition in about)
    name = "--strategy" if count == len(about) else "--strategy and --where" if count else "--where"
    return InputError(name, error.value, error.reason, error.remedy)


def _require_ranks(s: Strategy, gpus: int) -> None:
    if s.world > gpus:
        factors = " x ".join(f"{axis}={getattr(s, axis)}" for axis in strategies.AXES)
        raise InputError("strategy", str(s), f"{factors} = {s.world} ranks, but there are {gpus}", "lower a degree")


def _idle(s: Strategy, gpus: int) -> str:
    return f" ({gpus - s.world} of {gpus} GPUs are idle)" if s.world < gpus else ""
