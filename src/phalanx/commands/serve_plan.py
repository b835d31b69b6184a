"""`phalanx serve-plan`: from names and numbers to a question, from its answer to a ServingPlan and launch files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx.cost.analytic.chips import chip_name
from phalanx.cost.serving.adapters import HOST_BYTES_PER_S, adapter_bytes
from phalanx.cost.serving.layout import ServingLayout
from phalanx.cost.serving.roofline import ServingPrice
from phalanx.formats.serving import dynamo, sglang, trtllm, vllm
from phalanx.formats.serving.arguments import refused
from phalanx.formats.serving.launch import Launch
from phalanx.plan import question as questions
from phalanx.plan.serving.neighbours import Neighbour, neighbours
from phalanx.plan.serving.question import OBJECTIVES, Candidate, Question
from phalanx.plan.serving.search import Answer, Search, answer
from phalanx.plan.serving.space import illegal
from phalanx.simulate.serving import trace as traces
from phalanx.simulate.serving.engines import NEEDS, engine, require_types
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.serving import Limits, Load, ServingPlan, Workers

_LAUNCH = {"vllm": vllm.launch, "sglang": sglang.launch, "trtllm": trtllm.launch}
_CHUNKS = (1024, 2048, 4096, 8192, 16384)
MOST_GPUS = 1024
MOST_REPLAYED = 20_000
"""Requests of a trace that are replayed for each candidate, unless said otherwise."""
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1.0}
MODES = {"both": ("aggregated", "disaggregated"), "aggregated": ("aggregated",), "disaggregated": ("disaggregated",)}


def price_of(
    model: str, cluster: str, gpus: int, weights: str, cache: str, engine_name: str = "vllm"
) -> ServingPrice:
    """Return the price of serving a model on a cluster. Raises InputError."""
    spec, _ = questions.model_named(model)
    questions.require_counts(("--gpus", gpus))
    described = questions.cluster_named(cluster)(gpus)
    chip = chip_name(described.device.name)
    require_types(weights, cache, CHIPS[chip].generation, chip)
    if cache not in ("bf16", "fp8"):
        raise InputError("--kv", cache, "is not a type of cache that is priced", "bf16 or fp8")
    return ServingPrice(spec, described, engine(engine_name).name, weights, cache)


def seconds(option: str, text: str | None) -> float | None:
    """Read a time with its unit, such as 1s or 30ms: without one, 30 would be half a minute to us and not to whoever
    wrote it. Raises InputError."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?\d+)?)\s*(s|ms|us|µs|)\s*", text)
    try:
        value = float(match[1]) * _UNITS[match[2]] if match else -1.0
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise InputError(option, text, "is not a time", "write 1s or 30ms")
    if match and not match[2]:
        raise InputError(option, text, "has no unit", f"write {match[1]}s or {match[1]}ms")
    return value


def speculation(text: str | None) -> tuple[int, float]:
    """Read drafted tokens and their acceptance, such as 3:0.7. Raises InputError."""
    if text is None:
        return 0, 0.0
    tokens, _, rate = text.partition(":")
    try:
        drafted, accepted = int(tokens), float(rate)
    except ValueError:
        drafted, accepted = 0, -1.0
    if not (1 <= drafted <= 64 and 0 <= accepted <= 1):
        reason = "is not drafted tokens (1 to 64) and the rate at which they are accepted (0 to 1)"
        raise InputError("--speculate", text, reason, "write 3:0.7")
    return drafted, accepted


def adapters(text: str | None) -> tuple[int, int]:
    """Read how many LoRA adapters are used, and how many of them a batch may hold: 32:4. Raises InputError."""
    if text is None:
        return 0, 0
    count, _, places = text.partition(":")
    try:
        used, held = int(count), int(places or count)
    except ValueError:
        used, held = 0, 0
    if not 1 <= held <= used <= 10**6:
        raise InputError("--adapters", text, "is not adapters and how many of them a batch holds", "write 32:4")
    return used, held


def layout(text: str) -> ServingLayout:
    """Read the layout of one copy, such as tp=4,pp=2 or tp=1,dp=8,ep=8. Raises InputError."""
    degrees = {"tp": 1, "pp": 1, "dp": 1, "ep": 1}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in degrees:
            raise InputError("--layout", text, f"{name!r} is not a degree", nearest(name, degrees))
        if not re.fullmatch("[0-9]{1,9}", value) or not 1 <= int(value) <= 10**6:
            raise InputError("--layout", text, f"{name} must be a whole number, at least 1")
        degrees[name] = int(value)
    width = degrees["tp"] * degrees["dp"]
    if width % degrees["ep"]:
        raise InputError("--layout", text, f"ep = {degrees['ep']} does not divide tp x dp = {width}")
    return ServingLayout(degrees["tp"], degrees["pp"], degrees["dp"], width // degrees["ep"], degrees["ep"])


@dataclass(frozen=True)
class Asked:
    """A question with the names that it was asked with."""

    question: Question
    model_name: str
    cluster_name: str
    trace: str
    layout: ServingLayout | None
    notes: tuple[str, ...]


def ask(
    model: str,
    cluster: str,
    gpus: int,
    input: int,
    output: int,
    options: Mapping[str, Any],
) -> Asked:
    """Turn the command's options into a question. Raises InputError."""
    spec, named_notes = questions.model_named(model)
    notes = list(named_notes)
    questions.require_counts(("--gpus", gpus))
    if gpus > MOST_GPUS:
        reason = f"is more than is searched, {MOST_GPUS:,}"
        raise InputError("--gpus", gpus, reason, "plan a part of them: what serves more users is more of the same")
    described = questions.cluster_named(cluster)(gpus)
    chip = chip_name(described.device.name)
    row = engine(options["engine"])
    requests = traces.read(Path(options["trace"])) if options["trace"] else None
    if requests is not None:
        most = options["requests"] or MOST_REPLAYED
        if len(requests) > most:
            notes.append(f"the first {most:,} of {len(requests):,} requests are replayed; --requests says how many")
            requests = requests.first(most)
        input, output = round(float(requests.input.mean())), max(1, round(float(requests.output.mean())))
        longest = int((requests.input + requests.output).max())
        named = f"--trace: the longest request has {longest:,} tokens"
    else:
        questions.require_counts(("--input", input), ("--output", output))
        spread = 1 if not options["variation"] else 4
        longest = min(spec.max_seq, spread * (input + output)) if input + output <= spec.max_seq else input + output
        named = f"--input + --output = {longest:,} tokens"
    if longest > spec.max_seq:
        reason = f"is longer than the model's context, {spec.max_seq:,}"
        raise InputError(named, None, reason, "shorten them, or choose a model with a longer context")
    generation = CHIPS[chip].generation
    if options["weights"] == "auto":
        types: tuple[str, ...] = tuple(t for t in ("bf16", "fp8") if generation in NEEDS[t]) or ("bf16",)
    else:
        types = tuple(t.strip() for t in options["weights"].split(","))
    for each in types:
        require_types(each, options["kv"], generation, chip)
    if options["kv"] not in ("bf16", "fp8"):
        raise InputError("--kv", options["kv"], "is not a type of cache that is priced", "bf16 or fp8")
    for name, known in (("objective", OBJECTIVES), ("mode", MODES)):
        if options[name] not in known:
            raise InputError(f"--{name}", options[name], "is not known", nearest(options[name], known))
    if options["percentile"] not in (50, 90, 99):
        raise InputError("--percentile", options["percentile"], "is not reported", "50, 90 or 99")
    for name, low, high in (("reuse", 0.0, 0.99), ("variation", 0.0, 3.0)):
        if not low <= options[name] <= high:
            raise InputError(f"--{name}", options[name], f"must be from {low:g} to {high:g}")
    if options["rate"] is not None and not 0 < options["rate"] < 1e6:
        raise InputError("--rate", options["rate"], "must be positive: requests per second")
    if options["price"] is not None and not 0 <= options["price"] < 1e6:
        raise InputError("--price", options["price"], "is not the price of a GPU-hour", "e.g. 2.5")
    loads = [n for n in ("trace", "rate", "concurrency") if options[n]]
    if len(loads) > 1:
        raise InputError(f"--{loads[0]}", options[loads[0]], f"excludes --{loads[1]}", "choose one load")
    if options["concurrency"] is not None:
        questions.require_counts(("--concurrency", options["concurrency"]))
    if options["chunk"] is not None:
        questions.require_counts(("--chunk", options["chunk"]))
    drafted, accepted = speculation(options["speculate"])
    used, held = adapters(options["adapters"])
    chosen = layout(options["layout"]) if options["layout"] else None
    if chosen is not None:
        reason = illegal(spec, chosen, row)
        if not reason and chosen.gpus > gpus:
            reason = f"takes {chosen.gpus} GPUs of {gpus}"
        if reason:
            raise InputError("--layout", options["layout"], reason)
    q = Question(
        model=spec,
        cluster=described,
        gpus=gpus,
        engine=row,
        input=input,
        output=output,
        longest=longest,
        objective=options["objective"],
        ttft_s=seconds("--ttft", options["ttft"]),
        tpot_s=seconds("--tpot", options["tpot"]),
        percentile=options["percentile"],
        weights=types,
        cache=options["kv"],
        page_tokens=row.page_tokens,
        chunks=(options["chunk"],) if options["chunk"] else _CHUNKS,
        modes=MODES[options["mode"]],
        variation=options["variation"],
        concurrency=options["concurrency"] or 0,
        rate=options["rate"] or 0.0,
        trace=requests,
        reuse=options["reuse"],
        draft_tokens=drafted,
        acceptance=accepted,
        adapters=used,
        adapter_slots=held,
        adapter_load_s=adapter_bytes(spec) / HOST_BYTES_PER_S,
        requests=options["requests"] or 0,
        seed=options["seed"],
        price=options["price"],
    )
    return Asked(q, model, cluster, options["trace"] or "", chosen, tuple(notes))


def decide(asked: Asked) -> tuple[Answer, list[Neighbour]]:
    """Search, and judge the neighbours of the best. Raises InputError."""
    search = Search(asked.question, asked.layout)
    answered = answer(search)
    return answered, neighbours(search, answered)


def money(c: Candidate, price: float) -> float:
    """Return what a million generated tokens cost at this price of a GPU-hour."""
    return price * c.gpus / 3600 / c.tokens_per_s * 1e6


def cache_of(answered: Answer) -> tuple[float, int]:
    """Return (bytes of KV cache per token of the whole model, requests of the load whose caches fit at once)."""
    q, best = answered.question, answered.best
    group = best.groups[-1]
    per_token = ServingPrice(q.model, q.cluster, q.engine.name, best.weights, q.cache).cache_bytes_per_token
    return per_token, group.count * (group.cache_tokens // (q.input + q.output))


def as_plan(asked: Asked, c: Candidate) -> ServingPlan:
    """Return a candidate as serving.json keeps it."""
    q = asked.question
    assert c.outcome is not None
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
        )
        for g in c.groups
    )
    prediction: dict[str, Any] = {
        **asdict(c.outcome),
        "tokens_per_s_per_gpu": c.tokens_per_s / c.gpus,
        "tokens_per_s_per_user": 1 / c.outcome.tpot.p50 if c.outcome.tpot.p50 else None,
        "steady": asdict(c.steady),
        "origin": "simulated on estimated prices of steps",
    }
    if q.price is not None:
        prediction["money_per_million_tokens"] = money(c, q.price)
    return ServingPlan(
        model_name=asked.model_name,
        model=q.model,
        cluster=asked.cluster_name,
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
        load=Load(q.input, q.output, 0 if q.open_load else c.users, q.rate, asked.trace, q.reuse),
        limits=Limits(q.ttft_s, q.tpot_s, q.percentile),  # type: ignore[arg-type]
        prediction=prediction,
    )


def launch(plan: ServingPlan) -> Launch:
    """Return what starts a plan, checked against the arguments that the engine publishes. Raises InputError."""
    line = _LAUNCH[plan.engine](plan)
    for command in line.commands:
        if command.checked_by and (problem := refused(command.checked_by, command.options)):
            raise InputError("launch", command.title, problem)
    return line


def manifest(plan: ServingPlan) -> str:
    """Return Dynamo's manifest of a plan, checked likewise. Raises InputError."""
    from phalanx.formats.serving.launch import places

    for place in places(plan):
        options = dynamo.worker_options(plan, place)
        owners = (f"dynamo.{plan.engine}", plan.engine) if plan.engine != "trtllm" else ("dynamo.trtllm",)
        if problem := refused(owners, options):
            raise InputError("launch", place.name, problem)
    return dynamo.manifest(plan)
