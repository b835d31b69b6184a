"""The answer of `phalanx serve plan`: a ServingPlan with its performance and cost, and its launch files."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.answers.answer import DRAWN, Answer
from phalanx.planning.expense.expense import A_MILLION, Expense, expense_of_hours, with_interval
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.planning.lookup import gpus_in
from phalanx.serving.cost.checkpoint import checkpoint_assumption
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.cost.step import state_bytes
from phalanx.serving.launch import dynamo, sglang, trtllm, vllm
from phalanx.serving.launch.arguments import option_error, published
from phalanx.serving.launch.parts import Launch
from phalanx.serving.likely import LikelyRange, capacity_range, edge, likely, slowed
from phalanx.serving.lines.reading import STOPS, LinesRead, read
from phalanx.serving.plan_file import LatencyLimits, ServedLoad, ServingPlan, Workers
from phalanx.serving.question import NamedQuestion, ask
from phalanx.serving.request import ServingRequest
from phalanx.serving.search.answering import ServingAnswer, answer
from phalanx.serving.search.copies import Copy
from phalanx.serving.search.misses import loss_words
from phalanx.serving.search.neighbours import neighbours
from phalanx.serving.search.question import ServingCandidate, ServingQuestion
from phalanx.serving.search.queued import capacity
from phalanx.serving.search.search import Search
from phalanx.serving.starting import not_starting
from phalanx.spec.errors import InputError

_LAUNCH = {"vllm": vllm.launch, "sglang": sglang.launch, "trtllm": trtllm.launch}


@dataclass(frozen=True)
class PlannedDeployment:
    """A deployment in an answer, with its predicted performance."""

    title: str
    gpus: int
    weights: str
    cache: str
    workers: tuple[Workers, ...]
    load: ServedLoad
    prediction: Mapping[str, Any]
    """The prediction in serving.json: quantiles in seconds, rates per second."""


@dataclass(frozen=True)
class RejectedNeighbour:
    """A deployment one change away from the best."""

    change: str
    candidate: PlannedDeployment | None
    """The best one within the limits; None: there is none."""
    reason: str


@dataclass(frozen=True)
class ServingPlanAnswer(Answer):
    """The best deployment of a model on a cluster, and its alternatives."""

    model: str
    cluster: str
    engine: str
    objective: str
    gpus: int
    """GPUs of the best deployment, as all figures up to requests_per_s; times are at the percentile of the limits."""
    ttft_s: float
    """Seconds to the first token."""
    tpot_s: float
    """Seconds per output token after the first."""
    latency_s: float
    """Seconds of a whole request."""
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    requests_per_s: float
    capacity_requests_per_s: float | None
    """Requests per second of an open load that the best deployment answers at most; None: of other loads."""
    capacity_range: tuple[float, float] | None
    """The likely range of that capacity."""
    likely: tuple[LikelyRange, ...]
    """Likely ranges of these figures, by the errors of predictions of published runs."""
    likely_basis: str
    """The runs behind the ranges, or why there are no ranges."""
    expense: Expense
    """Cost of a million generated tokens."""
    rates: ExpenseRates
    """Rates of money, energy and carbon, with their sources."""
    limits: LatencyLimits
    kv_bytes_per_token: float
    """Bytes of KV cache of the whole model."""
    state_bytes_per_request: float
    """Bytes of the states of the whole model's recurrences."""
    requests_that_fit: int
    """Requests of the load whose caches fit at once."""
    memory: str
    """The memory of a GPU for weights and cache, in words."""
    best: PlannedDeployment
    alternatives: tuple[PlannedDeployment, ...]
    """The best deployments of the other families, within the limits."""
    front: tuple[PlannedDeployment, ...]
    """The Pareto front of tokens/s per user and per GPU, whatever the limits."""
    neighbours: tuple[RejectedNeighbour, ...]
    cannot_serve: Mapping[str, str]
    """Layout -> why it cannot serve."""
    evaluated: int
    """Candidates with steady-state prices."""
    simulated: int
    """Candidates whose queue was simulated."""
    plan: ServingPlan = field(repr=False, metadata=DRAWN)
    """The plan that serving.json holds."""
    search: ServingAnswer = field(repr=False, compare=False, metadata=DRAWN)
    caveats: tuple[str, ...] = ()
    """Assumptions and gaps that matter, about the command lines that were read."""
    notes: tuple[str, ...] = field(default=(), repr=False, metadata=DRAWN)

    @property
    def passed(self) -> bool:
        """Whether the server of the command lines starts."""
        return not any(caveat.startswith(STOPS) for caveat in self.caveats)


def serve_plan(
    request: ServingRequest | None = None, *, source: Sequence[str | Path] = (), **fields: Any
) -> ServingPlanAnswer:
    """Find how to serve a model: parallelism, replicas, batch and chunk, with the queue simulated.

        phalanx.serve_plan(model="llama3-70b", cluster="dgx-h100", gpus=8, input=4000, output=500, ttft="1s")

    `fields`: the fields of a ServingRequest, in place of `request`. `source`: files with the command lines of a
    server and of a benchmark, for what `fields` leave out. Raises InputError."""
    lines = read([Path(each) for each in source], fields) if source else LinesRead(fields, (), ())
    if source and not lines.loaded:
        raise InputError("input, output", None, "missing: the file starts no benchmark", "e.g. 1024 and 128")
    if lines.sweep:
        remedy = "leave one of them, or ask phalanx.serving.sweep.serve_loads"
        raise InputError("from", None, f"the file runs {len(lines.sweep)} benchmarks", remedy)
    query = ask(request if request is not None else as_request(lines.fields))
    search = Search(query.question, query.layout)
    searched = answer(search)
    q = searched.question
    per_token, state, fits = cache_of(searched)
    workers = searched.best.groups[-1]
    ranges, basis = likely(q, searched.best, slowed(q, searched.best, search.copy_of))
    most = capacity(q, searched.best, search.copy_of) if q.open_load and not q.concurrency else None
    taken = checkpoint_assumption(q.model, query.model_name, searched.best.weights)
    copy = search.copy_of(searched.best.weights, workers.layout)

    def listed(c: ServingCandidate) -> PlannedDeployment:
        plan = as_plan(query, c)
        return PlannedDeployment(
            c.title, plan.gpus, plan.weights, plan.cache, plan.workers, plan.load, plan.prediction
        )

    return ServingPlanAnswer(
        model=query.model_name,
        cluster=query.cluster_name,
        engine=q.engine.name,
        objective=q.objective,
        **_figures(searched.best, q),
        capacity_requests_per_s=most,
        capacity_range=None if most is None else capacity_range(q, most),
        likely=ranges,
        likely_basis=basis,
        expense=expense(q, searched.best, ranges),
        rates=q.rates,
        limits=_limits(q),
        kv_bytes_per_token=per_token,
        state_bytes_per_request=state,
        requests_that_fit=fits,
        memory=memory_words(copy),
        best=listed(searched.best),
        alternatives=tuple(map(listed, searched.finalists[1:])),
        front=tuple(map(listed, searched.front)),
        neighbours=tuple(
            RejectedNeighbour(n.change, None if n.candidate is None else listed(n.candidate), n.reason)
            for n in neighbours(search, searched)
        ),
        cannot_serve=searched.cannot,
        evaluated=searched.evaluated,
        simulated=searched.simulated,
        plan=as_plan(query, searched.best),
        search=searched,
        caveats=(
            *not_starting(lines, copy),
            *(edge(q, most) if most else ()),
            *lines.caveats,
            *query.caveats,
            *([taken] if taken else []),
        ),
        notes=(*lines.notes, *query.notes),
    )


def _figures(best: ServingCandidate, q: ServingQuestion) -> dict[str, Any]:
    """Return the figures of the best deployment, as fields of the answer."""
    assert best.outcome is not None
    return {
        "gpus": best.gpus,
        "ttft_s": best.ttft_s(q.percentile),
        "tpot_s": best.tpot_s(q.percentile),
        "latency_s": getattr(best.outcome.latency, f"p{q.percentile}"),
        "tokens_per_s": best.tokens_per_s,
        "tokens_per_s_per_gpu": best.tokens_per_s / best.gpus,
        "requests_per_s": best.outcome.requests_per_s,
    }


def as_request(fields: Mapping[str, Any]) -> ServingRequest:
    """Return fields as a request. Raises InputError for a missing model, cluster or number of GPUs."""
    if fields.get("gpus") is None:
        fields = {**fields, "gpus": gpus_in(fields.get("cluster"))}
    for name in ("model", "cluster", "gpus"):
        if fields.get(name) is None:
            raise InputError(name, None, "missing")
    return ServingRequest(**fields)


def expense(q: ServingQuestion, c: ServingCandidate, ranges: Sequence[LikelyRange] = ()) -> Expense:
    """Return the cost of a million generated tokens, with its range where `ranges` have one of tokens/s."""
    cost = expense_of_hours(c.expense(q), f"{A_MILLION} generated", 1e6 / c.tokens_per_s / 3600)
    rate = next((r for r in ranges if r.figure == "tokens_per_s"), None)
    if rate is None or rate.high is None:
        return cost
    return with_interval(cost, c.tokens_per_s / rate.high, c.tokens_per_s / rate.low)


def cache_of(answered: ServingAnswer) -> tuple[float, float, int]:
    """Return (bytes of the whole model's KV cache per token, bytes of its states per request, requests of the load
    whose caches fit at once in the best deployment)."""
    q, best = answered.question, answered.best
    group = best.groups[-1]
    price = ServingPrice(q.model, q.cluster, q.engine.name, best.weights, q.cache)
    state = float(state_bytes(price.shape, price.split(ServingLayout())))
    replicas = group.count * group.layout.attention_dp
    each = group.cache_tokens // group.layout.attention_dp
    return price.cache_bytes_per_token, state, replicas * (each // (q.input + q.output))


def memory_words(copy: Copy) -> str:
    """Describe the memory of a GPU for weights and cache, and the engine's release if the share is its default."""
    room, q = copy.pricing.room(copy.layout), copy.question
    if q.memory_share is not None:
        return room
    release = f"{q.engine.title} {published(q.engine.name).version}"
    return f"{room}, by the default of {release}: --memory for another"


def _limits(q: ServingQuestion) -> LatencyLimits:
    return LatencyLimits(
        q.ttft_s,
        q.tpot_s,
        q.percentile,  # type: ignore[arg-type]
        q.deadline_s,
        loss_words(q) if q.lost[0] else "",
    )


def as_plan(query: NamedQuestion, c: ServingCandidate) -> ServingPlan:
    """Return the plan of a candidate."""
    q = query.question
    assert c.outcome is not None
    price = ServingPrice(q.model, q.cluster, q.engine.name, c.weights, q.cache, large_ep=q.large_ep)
    workers = tuple(
        Workers(
            g.role,
            g.count,
            g.layout.tp,
            g.layout.pp,
            g.layout.attention_dp,
            g.layout.moe_tp,
            g.layout.moe_ep,
            g.slots,
            g.step_tokens,
            g.cache_tokens,
            price.is_large(g.layout),
        )
        for g in c.groups
    )
    prediction: dict[str, Any] = {
        **asdict(c.outcome) | {"kept": [asdict(share) for share in c.outcome.kept]},
        "tokens_per_s_per_gpu": c.tokens_per_s / c.gpus,
        "tokens_per_s_per_user": 1 / c.outcome.tpot.p50 if c.outcome.tpot.p50 else None,
        "steady": asdict(c.steady),
        "origin": "simulated on estimated prices of steps",
        "expense": asdict(expense(q, c)),
    }
    return ServingPlan(
        model_name=query.model_name,
        model=q.model,
        cluster=query.cluster_name,
        node_gpus=q.cluster.ranks_per_node,
        gpus=c.gpus,
        engine=q.engine.name,  # type: ignore[arg-type]
        weights=c.weights,  # type: ignore[arg-type]
        cache=q.cache,  # type: ignore[arg-type]
        page_tokens=q.page_tokens,
        longest=q.longest,
        draft_tokens=q.draft_tokens,
        adapters=q.adapter_slots,
        workers=workers,
        load=ServedLoad(q.input, q.output, 0 if q.open_load else c.users, q.rate, query.trace, q.reuse),
        limits=_limits(q),
        prediction=prediction,
    )


def launch(plan: ServingPlan) -> Launch:
    """Return the commands and files that start a plan, checked against the engine's published arguments. Raises
    InputError."""
    line = _LAUNCH[plan.engine](plan)
    for command in line.commands:
        if command.checked_by and (problem := option_error(command.checked_by, command.options)):
            raise InputError("launch", command.title, problem)
    return line


def manifest(plan: ServingPlan, starter: str = "dynamo") -> str:
    """Return a plan's manifest for Dynamo, Kubernetes alone, KServe or llm-d, checked against the published arguments
    of its workers. Raises InputError."""
    from phalanx.serving.launch import charts, kubernetes
    from phalanx.serving.launch.parts import places

    writers = {"kubernetes": kubernetes.manifest, "kserve": charts.kserve, "llm-d": charts.llm_d}
    if starter in writers:
        return writers[starter](plan, launch(plan))
    for place in places(plan):
        options = dynamo.worker_options(plan, place)
        owners = (f"dynamo.{plan.engine}", plan.engine) if plan.engine != "trtllm" else ("dynamo.trtllm",)
        if problem := option_error(owners, options):
            raise InputError("launch", place.name, problem)
    return dynamo.manifest(plan)
