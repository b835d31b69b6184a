"""One question, read once for every command: model, cluster, GPUs, job, strategy, software stack and precision.

Commands and functions give a `Query` and get a `Question`. So one argument means one thing, and each output can say
what it is about:

    gpus        as given, or the ranks of the plan
    dp          as the strategy's line has it; else what tp, pp and cp leave of the GPUs
    stack       as given; else the plan's own; else MaxText on TPUs; else Megatron-Core
    precision   as given; else the plan's; else bf16, or fp16 where the device has no bf16

A plan of our own runtime (`phalanx plan JOB.toml`) is priced exactly, as that runtime runs it, unless a stack is
named. What cannot be honoured is refused.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from phalanx.answers.question.precision import (
    OF_COMPUTE,
    bounded,
    in_precision,
    precision_on,
    release_named,
    require_precision,
    with_products,
)
from phalanx.answers.question.query import Configured, Query
from phalanx.answers.question.strategy_line import filling, fixed, planned, strategy_on
from phalanx.cost.analytic.estimate import Estimate, estimate, require_modelled
from phalanx.frameworks.caveats import (
    BALANCED,
    COMPILED,
    MAGNITUDES,
    OF_GPUS,
    UNMEASURED,
    UNTIMED,
    Caveat,
    unadapted,
)
from phalanx.frameworks.registry import DOCUMENTED, STACKS, facts, row_of
from phalanx.frameworks.stated_training import StatedTraining, stated_training
from phalanx.frameworks.writing.source_file import source_of
from phalanx.planning import lookup
from phalanx.planning.explain.analytic import AnalyticSubject, host_bytes_in
from phalanx.planning.explain.exact import ExactSubject, subject_of_plan
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.limits import conditions
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.cluster.calibration import in_words
from phalanx.spec.cluster.spec import GIB
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

T = TypeVar("T")
OWN_STACK = "phalanx"


@dataclass(frozen=True)
class Premises:
    """What an answer is about: the question as it was understood."""

    about: str
    cluster: str
    gpus: int
    global_batch: int
    seq: int
    strategy: Strategy | None
    dp_rule: str
    stack: str
    engine: Literal["formulas", "exact"]
    """What prices the step: the stack's fitted formulas, or exactly our own runtime's program."""
    precision: str
    options: StackOptions
    refused: str = ""
    """Why the stack does not run the strategy; "" where it does, or has no row of facts."""
    overfull: str = ""
    """What the fullest rank needs of what a device has; "" where that fits, or nothing is priced."""
    host_bytes: float = 0.0
    """Of model state in the memory of each node's host, at least; 0 where none is offloaded."""
    host_memory_bytes: int | None = None
    """Of a node's host, as the cluster says; None: unknown."""
    calibrated: str = ""
    """Whose measured steps calibrate the price; "" where none do."""
    caveats: tuple[Caveat, ...] = ()
    """What matters to the price and is not modelled, not judged, assumed or missing: of a configuration."""


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
    caveats: tuple[Caveat, ...] = ()
    """What matters to the price and is not modelled, not judged, assumed or missing."""
    training: StatedTraining | None = None
    """What the file or the plan says of the whole training."""
    void_zero: int | None = None
    """The ZeRO level of a file whose data parallelism is one rank, which holds as soon as there are more."""
    void_sp: bool = False
    """Whether a file with one rank of tensor parallelism asks for sequence parallelism, likewise."""

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
    def calibrated(self) -> str:
        """Whose measured steps calibrate the price, and how many; "" where none do."""
        if self.exact is not None:
            return str(self.plan.choices.get("calibrated", "")) if self.plan else ""
        own = self.pricing.cluster.calibration
        return in_words(own) if own else ""

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

    @property
    def premises(self) -> Premises:
        """What the answer is about, for every output."""
        job = self.exact.job if self.exact else self.pricing.job
        cluster = self.exact.cluster if self.exact else self.pricing.cluster
        return Premises(
            about=self.about,
            cluster=cluster.name,
            gpus=self.gpus,
            global_batch=job.global_batch,
            seq=job.seq,
            strategy=self.strategy,
            dp_rule=self.dp_rule,
            stack=self.stack,
            engine="formulas" if self.exact is None else "exact",
            precision=self.precision,
            options=AS_RELEASED if self.exact else self.pricing.extra,
            refused=self.refused,
            overfull=self._overfull,
            host_bytes=0.0 if self.exact or self.strategy is None else host_bytes_in(self.pricing, self.strategy),
            host_memory_bytes=cluster.host_memory_bytes,
            calibrated=self.calibrated,
            caveats=self._bounded,
        )

    @property
    def _overfull(self) -> str:
        """What the fullest rank needs of what a device has, where it is more."""
        needs, has = (0.0, 0) if self.exact is None else self.exact.memory
        if self.strategy is not None and self.exact is None:
            with suppress(InputError):  # a question about what this stack does not run
                needs, has = float(self.estimate.memory.reserved), int(self.estimate.allocatable_bytes)
        return f"{needs / GIB:,.1f} of {has / GIB:.1f} GiB" if needs > has else ""

    @property
    def _bounded(self) -> tuple[Caveat, ...]:
        """The caveats, with the bounds that the price gives them, if there is a price."""
        if self.strategy is None or self.exact is not None or not any(c.limit for c in self.caveats):
            return self.caveats
        try:
            return bounded(self.caveats, self.estimate)
        except InputError:  # a question about what this stack does not run
            return self.caveats


def read(query: Query, searched: bool = False, any_stack: bool = False) -> Question:
    """Resolve a query. `searched`: its strategy is to be found; `any_stack`: it is asked of all stacks, of which some
    may not have an option. Raises InputError."""
    notes: tuple[str, ...] = ()
    if query.stack is not None:
        stack, note = release_named(query.stack)
        query, notes = replace(query, stack=stack), (note,) if note else ()
    if query.source is None:
        return resolve(query, Configured(job=query.job, notes=notes), searched, any_stack)
    from phalanx.answers.question import read as configurations

    path = Path(query.source)
    if configurations.is_configuration(path):
        asked, configured = configurations.query_by(path, query)
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
    model = lookup.changed(model, query.changes)
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
        return replace(
            pricing, job=replace(pricing.job, optimizer=given.optimizer, clip=given.clip, precision=numbers)
        )

    strategy, rule = (None, "dp searched") if searched else strategy_on(query.strategy or "", gpus)
    if strategy is not None and configured.fills and strategy.world == gpus:
        rule = filling(strategy, gpus)
    if strategy is not None:
        pricing = pricing_on(gpus)
        check(strategy, model, pricing.job, None)
    about = (
        f"{model.family} of {model.parameter_count:,}"
        if spec is model
        else " ".join((str(query.model), *query.changes))
    )
    said, caveats = (*configured.notes, *notes), configured.caveats
    if model.experts is not None and options.routing == "auto" and strategy is not None and strategy.ep > 1:
        caveats = (*caveats, BALANCED)
    if model.experts is not None and options.lora and options.lora_targets == "linear" and strategy is not None:
        caveats = (*caveats, unadapted(model, options.lora, strategy))
    if options.lora and options.dora != "none" and strategy is not None:
        caveats = (*caveats, MAGNITUDES)
    if strategy is not None and stack == OWN_STACK and PRECISIONS[precision].narrow:
        caveats = (*caveats, COMPILED)
    if strategy is not None and not has_runs(on(gpus).device.name):
        caveats = (*caveats, UNMEASURED)
    if strategy is not None and any(facts(model)[name] for name in ("compressed", "streams", "selective")):
        caveats = (*caveats, UNTIMED)
    if on(gpus).device.is_tpu and stack in STACKS and STACKS[stack].framework not in ("maxtext", "pax", "generic"):
        caveats = (*caveats, OF_GPUS)
    return Question(
        about,
        pricing_on,
        gpus,
        strategy,
        rule,
        stack,
        precision,
        said,
        caveats=caveats,
        training=configured.training,
        void_zero=configured.void_zero,
        void_sp=configured.void_sp,
    )


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
    strategy, rule = strategy_on(query.strategy, gpus) if query.strategy else planned(saved.strategy, gpus)
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

        return Question(
            about,
            unpriced,
            gpus,
            exact.strategy,
            rule,
            OWN_STACK,
            OF_COMPUTE.get(compute, compute),
            (),
            saved,
            exact,
            training=_trained(saved),
        )
    stack = query.stack or planned_stack
    larger = lookup.pricing_of_plan(
        replace(saved, cluster=lookup.calibrated(saved.cluster, query.calibration)), stack
    )
    precision = query.precision or saved.choices.get("precision") or OF_COMPUTE.get(saved.job.precision.compute)
    if precision is None:
        remedy = f"name a precision: {', '.join(PRECISIONS)}"
        raise InputError("job.precision.compute", saved.job.precision.compute, f"has no price under {stack}", remedy)
    precision = precision_on(str(precision), saved.cluster)

    extra = _with_line(saved.options.changed(), query.options, stack)

    def pricing_on(count: int) -> Pricing:
        return replace(in_precision(larger(count), precision), extra=extra)

    check(strategy, saved.model, saved.job, None)
    training = _trained(saved)
    return Question(about, pricing_on, gpus, strategy, rule, stack, precision, notes, saved, training=training)


def _trained(saved: Plan) -> StatedTraining | None:
    """Return how long a plan trains: as the file that it improves does, or as its job file says."""
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
    """Return options with those that a line names in their place, defaults among them. Raises InputError."""
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
        entry = row.options.get(name)
        if entry is None or not entry.allows(value):
            has = ", ".join(row.options) if entry is None else " or ".join(map(str, entry.values or ()))
            raise InputError(f"{field} {name}", value, f"{row.title} does not have it", f"use {has}")


def search_of(query: Query, any_stack: bool = False) -> Question:
    """Resolve a query whose strategy is searched: the fields that its strategy names become conditions. Raises
    InputError."""
    return read(replace(query, strategy=None, where=_said(query) or None), searched=True, any_stack=any_stack)


def searches_of(query: Query, stack: str, layout: object = None) -> Iterator[Question]:
    """Yield the question of a search in which degrees that a program's code sets, and no configuration of the stack,
    are 1 unless the query names them or they are larger in the `layout` of the file that it is about; and, for what
    fits no other way, the questions with gradients that add up in shards, where the stack has that, with state on the
    host, where the stack has that and there is a file, and without these conditions. Raises InputError."""
    said, row = _said(query), row_of(stack) if stack in STACKS else None
    degrees = [n for n in (row.coded if row else ()) if getattr(layout, n, None) in (None, 1)]
    coded = [f"{n}=1" for n in degrees if not re.search(rf"\b{n}\b", said)]
    limited, degrees_at_1 = ", ".join(filter(None, (said, *coded))), ", ".join(coded)
    named, has = f"{said} {query.options}", row.options if row else {}
    notes = {limited: ""}
    if coded:
        only = f"only a program's code sets more, no configuration of {stack}"
        notes[limited] = f"{degrees_at_1}: {only}; --where names them"
        if "accumulate" in has and "accumulate" not in named:
            shards = f"{degrees_at_1}, accumulate=sharded"
            notes[f"{limited}, accumulate=sharded"] = f"{shards}: whole gradients of several micro-batches do not fit"
    if layout is not None and has.keys() >= _ON_HOST and not any(name in named for name in _ON_HOST):
        line = ", ".join(f"{name}=1" for name in sorted(_ON_HOST))
        line += "" if stack in DOCUMENTED else ", zero=3"  # which a documented stack's rules ask for
        notes[", ".join(filter(None, (limited, line)))] = f"{line}: nothing fits without"
    notes.setdefault(
        said, f"no answer with {degrees_at_1}: more is set by a program's code, by no configuration of {stack}"
    )
    for where, note in notes.items():
        question = read(replace(query, strategy=None, where=where or None), searched=layout is None)
        yield replace(question, notes=(*question.notes, note)) if note else question


_ON_HOST = {"optimizer_offload", "parameter_offload"}
"""Options that leave a device the least state."""


def first_answer(questions: Iterable[Question], answer: Callable[[Question], T], of_first: bool = False) -> T:
    """Return the answer to the first question that has one. Raises the InputError of the last, or `of_first`."""
    errors = []
    for question in questions:
        try:
            return answer(question)
        except InputError as refused:
            errors.append(refused)
    raise errors[0 if of_first else -1]


def _said(query: Query) -> str:
    return ", ".join(filter(None, (fixed(query.strategy), query.where)))
