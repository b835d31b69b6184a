"""The resolution of a query into a question, which all commands share, so that an argument means the same in each:

    gpus        as given, or the ranks of the plan
    dp          as the strategy's line has it; else what tp, pp and cp leave of the GPUs
    stack       as given; else the plan's own; else MaxText on TPUs; else Megatron-Core
    precision   as given; else the plan's; else bf16, or fp16 where the device has no bf16

What cannot be honoured is refused.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.answers.question.precision import (
    PRECISION_BY_TYPE,
    in_precision,
    precision_on,
    release_named,
    require_precision,
)
from phalanx.answers.question.query import Configured, Query
from phalanx.answers.question.question import Question
from phalanx.answers.question.strategy_line import filling, strategy_on, with_dp
from phalanx.frameworks.caveats import (
    BALANCED,
    COMPILED,
    FITTED_ON_GPUS,
    MAGNITUDES,
    UNMEASURED,
    UNTIMED,
    UNTIMED_ADAPTERS,
    Caveat,
    unadapted,
)
from phalanx.frameworks.registry import DOCUMENTED, STACKS, facts, row_of
from phalanx.frameworks.stated_training import StatedTraining, stated_training
from phalanx.frameworks.writing.source_file import source_of
from phalanx.planning import lookup
from phalanx.planning.explain.exact import subject_of_plan
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import conditions
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster.spec import Device
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import Plan
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import PRECISIONS
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import AS_RELEASED, OPTION_FIELDS, StackOptions
from phalanx.spec.strategy.stack_options import parse as parse_options
from phalanx.validate.intervals import has_runs

OWN_STACK = "phalanx"


def read(query: Query, searched: bool = False, any_stack: bool = False) -> Question:
    """Resolve a query. `searched`: its strategy is to be found; `any_stack`: it is asked of all stacks, some of which
    may lack an option. Raises InputError."""
    notes: tuple[str, ...] = ()
    if query.stack is not None:
        stack, note = release_named(query.stack)
        query, notes = replace(query, stack=stack), (note,) if note else ()
    if query.source is None:
        query = query if query.gpus is not None else replace(query, gpus=lookup.gpus_in(query.cluster))
        return resolve(query, Configured(job=query.job, notes=notes), searched, any_stack)
    from phalanx.answers.question.file_query import query_by
    from phalanx.answers.question.read import is_configuration

    path = Path(query.source)
    if is_configuration(path):
        asked, configured = query_by(path, query)
        configured = replace(configured, notes=(*notes, *configured.notes))
        return replace(resolve(asked, configured, searched, any_stack), about=str(path))
    if query.files:
        reason = f"{path} is not a configuration of another framework, which alone has further files"
        raise InputError("files", " ".join(map(str, query.files)), reason, "name one file")
    return _of_plan(query, path, notes)


def resolve(query: Query, configured: Configured, searched: bool = False, any_stack: bool = False) -> Question:
    """Resolve a query that names model, cluster and numbers. Raises InputError."""
    given = {name: getattr(query, name) for name in ("model", "cluster", "gpus", "batch", "seq")}
    missing = ", ".join(name for name, value in given.items() if value is None)
    if missing:
        file = "a job file" if searched else "a plan.json"
        raise InputError(missing, None, "is missing", f"name {file}, or all of {', '.join(given)}")
    gpus, stack = query.gpus or 0, query.stack or lookup.stack_on(query.cluster)
    lookup.require_counts(("gpus", gpus))
    spec = query.model
    model, notes = (spec, []) if isinstance(spec, ModelSpec) else lookup.model_named(str(spec))
    model = lookup.with_changes(model, query.changes)
    on = lookup.cluster_on(query.cluster, query.calibration)
    precision = precision_on(query.precision, on(gpus))
    larger = lookup.pricing_by_gpus(model, on, query.batch or 0, query.seq or 0, stack)

    wanted, options = conditions(query.where) if query.where else ((), AS_RELEASED)
    if not any_stack:
        _require_options(stack, options)
        if searched:
            require_precision(stack, precision)
    by_condition = {n: getattr(options, n) for n in OPTION_FIELDS if re.search(rf"\b{n}\s*=", query.where or "")}
    options = _with_line(configured.options.changed() | by_condition, query.options, stack)

    def pricing_on(count: int) -> Pricing:
        pricing = replace(in_precision(larger(count), precision), wanted=wanted, extra=options)
        if configured.job is None:
            return pricing
        given = configured.job
        types = {name: getattr(given.precision, name) for name in ("reduce", "accumulate", "master")}
        numbers = replace(pricing.job.precision, **{n: t for n, t in types.items() if t is not None})
        job = replace(pricing.job, optimizer=given.optimizer, clip=given.clip, precision=numbers)
        return replace(pricing, job=job)

    strategy, rule = (None, "dp searched") if searched else strategy_on(query.strategy or "", gpus)
    if strategy is not None and configured.fills and strategy.world == gpus:
        rule = filling(strategy, gpus)
    if strategy is not None:
        pricing = pricing_on(gpus)
        check(strategy, model, pricing.job, None)
    named = " ".join((str(query.model), *query.changes))
    about = f"{model.family} of {model.parameter_count:,}" if spec is model else named
    assumed = _caveats(model, options, strategy, stack, precision, on(gpus).device)
    return Question(
        about,
        pricing_on,
        gpus,
        strategy,
        rule,
        stack,
        precision,
        (*configured.notes, *notes),
        caveats=(*configured.caveats, *assumed),
        training=configured.training,
        void_zero=configured.void_zero,
        void_sp=configured.void_sp,
        followed=configured.followed,
    )


def _caveats(
    model: ModelSpec, options: StackOptions, strategy: Strategy | None, stack: str, precision: str, device: Device
) -> Iterator[Caveat]:
    """Yield what the price of a question assumes or leaves out; of a `strategy`, None while it is searched."""
    experts = model.experts is not None
    if experts and options.routing == "auto" and strategy is not None and strategy.ep > 1:
        yield BALANCED
    if experts and options.lora and options.lora_targets == "linear" and strategy is not None:
        yield unadapted(model, options.lora, strategy)
    if experts and options.lora and options.lora_targets == "experts":
        yield UNTIMED_ADAPTERS
    if strategy is not None:
        if options.lora and options.dora != "none":
            yield MAGNITUDES
        if stack == OWN_STACK and PRECISIONS[precision].narrow:
            yield COMPILED
        if not has_runs(device.name):
            yield UNMEASURED
        if any(facts(model)[name] for name in ("compressed", "streams", "selective")):
            yield UNTIMED
    if device.is_tpu and stack in STACKS and STACKS[stack].framework not in ("maxtext", "pax", "generic"):
        yield FITTED_ON_GPUS


def _of_plan(query: Query, path: Path, notes: tuple[str, ...]) -> Question:
    """Resolve a plan.json or a run's folder, whose strategy, GPUs, stack and precision the query may replace."""
    saved = plans.read(path / "plan.json" if path.is_dir() else path)
    if query.changes:
        raise InputError("set", query.changes[0], "the plan.json has its model already", "make a new plan with it")
    for name in ("model", "cluster", "batch", "seq"):
        if getattr(query, name) is not None:
            remedy = "leave it out, or make a new plan"
            raise InputError(name, getattr(query, name), "is already set by the plan.json", remedy)
    if query.gpus is not None:
        lookup.require_counts(("gpus", query.gpus))
    gpus = query.gpus or saved.strategy.world
    strategy, rule = strategy_on(query.strategy, gpus) if query.strategy else with_dp(saved.strategy, gpus)
    about, planned_stack = str(path), str(saved.choices.get("stack", OWN_STACK))
    if planned_stack == OWN_STACK and "stack" not in saved.choices and query.stack is None:
        if query.precision is not None:
            remedy = "leave it out, or name a stack"
            raise InputError("precision", query.precision, "is the job's in a plan of our own runtime", remedy)
        if query.options is not None:
            raise InputError("options", query.options, "are of a stack, and this price is exact", "name a stack")
        if query.calibration is not None:
            reason = "is of a stack's formulas, and this price is exact"
            raise InputError("calibration", str(query.calibration), reason, "measure the machine, or name a stack")
        exact = subject_of_plan(saved, strategy if query.strategy else None, query.gpus)
        compute = saved.job.precision.compute

        def unpriced(count: int) -> Pricing:
            return Pricing(saved.model, saved.cluster, saved.job, OWN_STACK)

        word = PRECISION_BY_TYPE.get(compute, compute)
        training = _training(saved)
        return Question(
            about, unpriced, gpus, exact.strategy, rule, OWN_STACK, word, (), saved, exact, training=training
        )
    stack = query.stack or planned_stack
    cluster = lookup.with_calibration(saved.cluster, query.calibration)
    larger = lookup.pricing_of_plan(replace(saved, cluster=cluster), stack)
    precision = (
        query.precision or saved.choices.get("precision") or PRECISION_BY_TYPE.get(saved.job.precision.compute)
    )
    if precision is None:
        remedy = f"name a precision: {', '.join(PRECISIONS)}"
        raise InputError("job.precision.compute", saved.job.precision.compute, f"has no price under {stack}", remedy)
    precision = precision_on(str(precision), saved.cluster)

    extra = _with_line(saved.options.changed(), query.options, stack)

    def pricing_on(count: int) -> Pricing:
        return replace(in_precision(larger(count), precision), extra=extra)

    check(strategy, saved.model, saved.job, None)
    training = _training(saved)
    return Question(about, pricing_on, gpus, strategy, rule, stack, precision, notes, saved, training=training)


def _training(saved: Plan) -> StatedTraining | None:
    """Return the training that a plan's source file or job file states; None where neither does."""
    if (source := source_of(saved.choices)) is not None:
        return stated_training(source.arguments, saved.job.global_batch)
    return StatedTraining(steps=saved.train.steps, counted_by="train.steps") if saved.train.name else None


def options_in(line: str | None, stack: str) -> StackOptions:
    """Return the options of a line, which the stack must have. Raises InputError."""
    if line is None:
        return AS_RELEASED
    options = build(StackOptions, parse_options(line), "options")
    _require_options(stack, options, "options")
    return options


def _with_line(table: dict[str, Any], line: str | None, stack: str) -> StackOptions:
    """Return a table's options, replaced by those that a line names, even with their defaults. Raises InputError."""
    named = options_in(line, stack)
    return StackOptions(**table | {name: getattr(named, name) for name in parse_options(line or "")})


def _require_options(stack: str, options: StackOptions, field: str = "where") -> None:
    """Require that a stack has the options that are set. Raises InputError."""
    if not options.changed():
        return
    row = row_of(stack)
    if not row.documented:
        reason = f"{stack} has no row that says which options it has"
        raise InputError(field, str(options), reason, f"use a stack that has: {', '.join(DOCUMENTED)}")
    for name, value in options.changed().items():
        if not row.has_option(name, value):
            others = [
                k for k, its in DOCUMENTED.items() if all(its.has_option(*o) for o in options.changed().items())
            ]
            entry = row.options.get(name)
            has = ", ".join(row.options) if entry is None else " or ".join(map(str, entry.values or ()))
            remedy = f"use the stack {' or '.join(others)}" if others else f"use {has}"
            raise InputError(f"{field} {name}", value, f"{row.title} does not have it", remedy)
