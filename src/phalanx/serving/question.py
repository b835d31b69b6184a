"""The question of `phalanx serve plan`, read from a user's names and numbers."""

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from phalanx.cost.analytic.chips import chip_name
from phalanx.planning import lookup as questions
from phalanx.planning.expense.rates import rates_on, read_rates, require_counted
from phalanx.serving.cost.adapters import HOST_BYTES_PER_S, adapter_bytes
from phalanx.serving.cost.checkpoint import BLOCKWISE, of_checkpoint, published_note, published_weights, scale_block
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import LARGE_EP, LargeEp, ServingPrice
from phalanx.serving.cost.shape import shape_of
from phalanx.serving.cost.step import BYTES
from phalanx.serving.request import ServingRequest
from phalanx.serving.search.question import MOST_GPUS, OBJECTIVES, Objective, ServingQuestion
from phalanx.serving.search.space import layout_error, layouts
from phalanx.serving.simulation import trace as traces
from phalanx.serving.simulation.engines import NEEDS, EngineRow, engine, page_tokens, require_types, supports
from phalanx.serving.simulation.requests import Requests
from phalanx.spec.byte_sizes import parse_count
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.presets import of_longer_context
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.ranges import require_seed

_CHUNKS = (1024, 2048, 4096, 8192, 16384)
MOST_REPLAYED = 20_000
"""The most requests of a trace that are replayed for each candidate, by default."""
MOST_SIMULATED = 1_000_000
"""The most requests of a finite load."""
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "": 1.0}
MODES = {"both": ("aggregated", "disaggregated"), "aggregated": ("aggregated",), "disaggregated": ("disaggregated",)}


def price_of(
    model: str, cluster: str, gpus: int, weights: str, cache: str, memory: float | None = None, name: str = "vllm"
) -> ServingPrice:
    """Return the price of serving a model on a cluster, under the engine `name`. `memory`: its share of a GPU's
    memory; None: its default. Raises InputError."""
    _require_share(memory)
    spec = of_checkpoint(questions.model_named(model)[0], model)
    questions.require_counts(("gpus", gpus))
    described = questions.cluster_named(cluster)(gpus)
    chip = chip_name(described.device.name)
    require_types(weights, cache, CHIPS[chip].generation, chip, engine(name))
    return ServingPrice(spec, described, engine(name).name, weights, cache, memory_share=memory)


def _require_share(memory: float | None) -> None:
    if memory is not None and not 0.05 <= memory <= 1:
        raise InputError("memory", memory, "must be a share of the GPU's memory, from 0.05 to 1")


def seconds(option: str, text: str | None) -> float | None:
    """Parse a time with its unit, such as 1s or 30ms. Raises InputError for other text and for a number without a
    unit."""
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
    """Parse (number of drafted tokens, their rate of acceptance), such as 3:0.7. Raises InputError."""
    if text is None:
        return 0, 0.0
    tokens, _, rate = text.partition(":")
    try:
        drafted, accepted = int(tokens), float(rate)
    except ValueError:
        drafted, accepted = 0, -1.0
    if not (1 <= drafted <= 64 and 0 <= accepted <= 1):
        reason = "is not drafted tokens (1 to 64) and the rate at which they are accepted (0 to 1)"
        raise InputError("speculate", text, reason, "write 3:0.7")
    return drafted, accepted


def survive(text: str | None) -> tuple[int, str]:
    """Parse (number, kind) of a loss to survive, such as 1 node, 2 gpus or 1 copy. Raises InputError."""
    if text is None:
        return 0, "node"
    match = re.fullmatch(r"\s*([0-9]{1,3})\s*(node|gpu|cop(?:y|ie)|replica)s?\s*", text.lower())
    if match is None or not int(match[1]):
        raise InputError("survive", text, "is not what may be lost", "write '1 node', '2 gpus' or '1 copy'")
    return int(match[1]), {"node": "node", "gpu": "gpu"}.get(match[2], "copy")


def adapters(text: str | None) -> tuple[int, int]:
    """Parse (number of LoRA adapters in use, most of a batch), such as 32:4. Raises InputError."""
    if text is None:
        return 0, 0
    count, _, places = text.partition(":")
    try:
        used, in_batch = int(count), int(places or count)
    except ValueError:
        used, in_batch = 0, 0
    if not 1 <= in_batch <= used <= 10**6:
        raise InputError("adapters", text, "is not adapters and how many of them a batch holds", "write 32:4")
    return used, in_batch


def layout(text: str) -> ServingLayout:
    """Parse the layout of a copy, such as tp=4,pp=2 or tp=1,dp=8,ep=8. Raises InputError."""
    degrees = {"tp": 1, "pp": 1, "dp": 1, "ep": 1}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in degrees:
            raise InputError("layout", text, f"{name!r} is not a degree", nearest(name, degrees))
        if not re.fullmatch("[0-9]{1,9}", value) or not 1 <= int(value) <= 10**6:
            raise InputError("layout", text, f"{name} must be a whole number, at least 1")
        degrees[name] = int(value)
    width = degrees["tp"] * degrees["dp"]
    if width % degrees["ep"]:
        raise InputError("layout", text, f"ep = {degrees['ep']} does not divide tp x dp = {width}")
    return ServingLayout(degrees["tp"], degrees["pp"], degrees["dp"], width // degrees["ep"], degrees["ep"])


_WORKERS = re.compile(r"(?:([0-9]{1,6}) *x +)?(\S.*)")


def pair_of(text: str) -> tuple[tuple[int, ServingLayout], ...]:
    """Parse the workers that prefill and that decode, such as 2 x tp=4 + 1 x tp=8; empty: there is no `+`. Raises
    InputError."""
    if "+" not in text:
        return ()
    parts = [_WORKERS.fullmatch(part.strip()) for part in text.split("+")]
    workers = [(int(part[1] or 1), layout(part[2])) for part in parts if part is not None]
    if len(workers) != 2 or len(parts) != 2 or not all(count for count, _ in workers):
        remedy = "write 2 x tp=4 + 1 x tp=8"
        raise InputError("layout", text, "is not one layout that prefills and one that decodes", remedy)
    return tuple(workers)


def lengths(option: str, given: int | str | None) -> tuple[int, int]:
    """Parse (fewest, most) tokens, such as 4000 or 8k, or 1:1024 for uniform lengths. Raises InputError."""
    bounds = [parse_count(part) for part in str(given).split(":")]
    low, high = bounds[0], bounds[-1]
    if low is None or high is None or len(bounds) > 2:
        raise InputError(
            option, given, "is not a number of tokens", "write 4000 or 4k, or 1:1024 for lengths between"
        )
    questions.require_counts((option, low))
    if low > high:
        raise InputError(option, given, "goes from the larger to the smaller", f"write {high}:{low}")
    return low, high


@dataclass(frozen=True)
class NamedQuestion:
    """A question with the names of its model and cluster."""

    question: ServingQuestion
    model_name: str
    cluster_name: str
    trace: str
    layout: ServingLayout | None
    notes: tuple[str, ...]
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Load:
    """The lengths of requests."""

    input: int
    """Mean tokens of a prompt."""
    output: int
    """Mean generated tokens."""
    longest: int
    """Tokens of the longest request, prompt and answer."""
    ranges: tuple[tuple[int, int], tuple[int, int]] | None = None
    """Ranges of uniform lengths, of prompts and of answers."""
    trace: Requests | None = None
    notes: tuple[str, ...] = ()


def _load(spec: ModelSpec, request: ServingRequest) -> _Load:
    """Return the load of a request's trace, or of its input and output. Raises InputError for requests longer than
    the model's context."""
    if request.trace:
        load, fields = _traced(request.trace, request.requests or MOST_REPLAYED), "trace"
    else:
        if missing := [name for name in ("input", "output") if getattr(request, name) is None]:
            raise InputError(", ".join(missing), None, "missing", "or give a trace in place of input and output")
        ranges = lengths("input", request.input), lengths("output", request.output)
        input, output = (round((low + high) / 2) for low, high in ranges)
        most = ranges[0][1] + ranges[1][1]
        between = ranges if any(low < high for low, high in ranges) else None
        if between and request.variation:
            raise InputError(
                "variation", request.variation, "does not go with a range of lengths", "give one of them"
            )
        longest = max(most, min(spec.max_seq, 4 * most)) if request.variation else most
        load, fields = _Load(input, output, longest, between), "input, output"
    if load.longest > spec.max_seq:
        reason = f"a request of {load.longest:,} tokens is longer than the model's context, {spec.max_seq:,}"
        other = of_longer_context(asdict(spec), load.longest) or "a model with a longer context"
        raise InputError(fields, None, reason, f"shorten it, or choose {other}")
    return load


def _traced(path: Path, most: int) -> _Load:
    """Return the load of a trace's first `most` requests. Raises InputError."""
    requests = traces.read(path)
    notes: tuple[str, ...] = ()
    if len(requests) > most:
        notes = (f"the first {most:,} of {len(requests):,} requests are replayed; --requests says how many",)
        requests = requests.first(most)
    longest = int((requests.input + requests.output).max())
    means = round(float(requests.input.mean())), max(1, round(float(requests.output.mean())))
    return _Load(*means, longest, None, requests, notes)


def _weights(
    request: ServingRequest, generation: str, chip: str, row: EngineRow
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (types of weights to try on a chip, caveats). Raises InputError for a type that the chip does not
    support."""
    caveats: tuple[str, ...] = ()
    if request.weights != "auto":
        types = tuple(t.strip() for t in request.weights.split(","))
    elif (kind := published_weights(request.model)) != "bf16" and supports(kind, generation, row):
        types, caveats = (kind,), published_note(request.model)
    else:
        types = tuple(t for t in ("bf16", "fp8") if generation in NEEDS[t]) or ("bf16",)
        if kind != "bf16":
            caveats = (f"assumed: weights in {types[0]}: {chip} has no tensor cores for the checkpoint's {kind}",)
    for each in types:
        require_types(each, request.cache, generation, chip, row)
    return types, caveats


def _fixed_layout(
    text: str | None, spec: ModelSpec, row: EngineRow, gpus: int, block: int, node: int
) -> ServingLayout | None:
    """Return the layout that --layout fixes; None: no layout is fixed. Raises InputError for a layout that the engine
    cannot run, with legal layouts on as many GPUs."""
    if not text:
        return None
    chosen = layout(text)
    reason = layout_error(spec, chosen, row, block)
    if not reason and chosen.gpus > gpus:
        reason = f"takes {chosen.gpus} GPUs of {gpus}"
    if reason:
        legal = [x for x in layouts(spec, min(chosen.gpus, gpus), row, node, block=block) if x.gpus <= gpus]
        most = max((x.gpus for x in legal), default=0)
        best = sorted((x for x in legal if x.gpus == most), key=lambda x: (-x.tp, x.pp))[:3]
        parted = [f",dp={x.attention_dp},ep={x.moe_ep}" if spec.experts else "" for x in best]
        lines = [f"tp={x.tp},pp={x.pp}{rest}" for x, rest in zip(best, parted, strict=True)]
        raise InputError("layout", text, reason, f"on {most} GPUs use {' or '.join(lines)}" if best else "")
    return chosen


def _require_known(request: ServingRequest) -> None:
    """Require that all other options are known and in range, and that there is one load. Raises InputError."""
    for name, word, known in (
        ("objective", request.objective, OBJECTIVES),
        ("mode", request.mode, MODES),
        ("large-ep", request.large_ep, LARGE_EP),
    ):
        if word not in known:
            raise InputError(f"--{name}", word, "is not known", nearest(word, known))
    if request.percentile not in (50, 90, 99):
        raise InputError("percentile", request.percentile, "is not reported", "50, 90 or 99")
    for name, value, high in (("reuse", request.reuse, 0.99), ("variation", request.variation, 3.0)):
        if not 0 <= value <= high:
            raise InputError(f"--{name}", value, f"must be from 0 to {high:g}")
    if request.rate is not None and request.rate != math.inf and not 1e-6 <= request.rate <= 1e6:
        reason = "must be from 1e-6 to 1,000,000 requests per second, or inf"
        raise InputError("rate", request.rate, reason)
    if request.rate == math.inf and request.requests is None:
        raise InputError("rate", "inf", "would never end", "say how many requests come at once: --requests 600")
    if not request.burstiness > 0:
        raise InputError("burstiness", request.burstiness, "must be positive; 1 is a Poisson process")
    loads = [n for n in ("trace", "rate", "concurrency") if getattr(request, n)]
    limited = loads == ["rate", "concurrency"] and request.requests is not None
    if len(loads) > 1 and not limited:
        raise InputError(f"--{loads[0]}", getattr(request, loads[0]), f"excludes --{loads[1]}", "choose one load")
    if request.concurrency is not None:
        questions.require_counts(("concurrency", request.concurrency))
    for name in ("chunk", "slots", "graphs", "requests"):
        if (count := getattr(request, name)) is not None and (name, count) != ("graphs", 0):
            questions.require_counts((name, count))
    if (request.requests or 0) > MOST_SIMULATED:
        reason = f"must be at most {MOST_SIMULATED:,}: each is simulated"
        raise InputError("requests", request.requests, reason, "leave it out for a load without end")
    require_seed(request.seed)
    _require_share(request.memory)


def _of_graphs(most: int | None) -> tuple[str, ...]:
    if most is None:
        return ()
    priced = f"CUDA graphs are priced for up to {most} sequences that decode" if most else "no CUDA graphs are priced"
    return (f"{priced}: a plan's launch leaves them to the engine",)


def ask(request: ServingRequest) -> NamedQuestion:
    """Return the question of a request. Raises InputError."""
    gpus = request.gpus
    named, named_notes = questions.model_named(request.model)
    spec = of_checkpoint(named, request.model)
    questions.require_counts(("gpus", gpus))
    if gpus > MOST_GPUS:
        reason = f"is more than is searched, {MOST_GPUS:,}"
        raise InputError("gpus", gpus, reason, "plan a part of them: what serves more users is more of the same")
    described = questions.cluster_named(request.cluster)(gpus)
    chip = chip_name(described.device.name)
    row = engine(request.engine)
    load = _load(spec, request)
    types, caveats = _weights(request, CHIPS[chip].generation, chip, row)
    _require_known(request)
    drafted, accepted = speculation(request.speculate)
    used, slots = adapters(request.adapters)
    block = scale_block(request.model) if row.name in BLOCKWISE else 0
    whole = block if types == ("fp8",) else 0
    pair = pair_of(request.layout or "")
    if pair and request.mode == "aggregated":
        raise InputError("layout", request.layout, "prefills and decodes apart", "leave out --mode aggregated")
    if (taken := sum(count * x.gpus for count, x in pair)) > gpus:
        raise InputError("layout", request.layout, f"takes {taken} GPUs of {gpus}")
    for text in (f"tp={x.tp},pp={x.pp},dp={x.attention_dp},ep={x.moe_ep}" for _, x in pair):
        _fixed_layout(text, spec, row, gpus, whole, described.ranks_per_node)
    fixed = None if pair else _fixed_layout(request.layout, spec, row, gpus, whole, described.ranks_per_node)
    # Requests that come all at once are a closed loop, with as many users as there may be concurrent requests.
    at_once = request.rate == math.inf
    requests = request.requests or 0
    concurrency = request.concurrency or at_once * requests
    rates = rates_on(described.device.name, read_rates(request.rates, request.price), ("serving", "decode"))
    require_counted(rates, request.objective)
    q = ServingQuestion(
        model=spec,
        cluster=described,
        gpus=gpus,
        engine=row,
        input=load.input,
        output=load.output,
        longest=load.longest,
        objective=cast(Objective, request.objective),
        ttft_s=seconds("ttft", request.ttft),
        tpot_s=seconds("tpot", request.tpot),
        deadline_s=seconds("deadline", request.deadline),
        lost=survive(request.survive),
        large_ep=cast(LargeEp, request.large_ep),
        percentile=request.percentile,
        weights=types,
        cache=request.cache,
        page_tokens=page_tokens(row, spec, BYTES[request.cache]),
        slots=request.slots or 0,
        graphs=request.graphs,
        memory_share=request.memory,
        step_tokens=request.chunk,
        scale_block=block,
        chunks=(request.chunk,) if request.chunk else _CHUNKS,
        modes=MODES["disaggregated" if pair else request.mode],
        pair=pair,
        variation=request.variation,
        ranges=load.ranges,
        concurrency=min(concurrency, requests or concurrency),
        rate=0.0 if at_once else request.rate or 0.0,
        burstiness=request.burstiness,
        trace=load.trace,
        reuse=request.reuse,
        draft_tokens=drafted,
        acceptance=accepted,
        adapters=used,
        adapter_slots=slots,
        adapter_load_s=adapter_bytes(spec) / HOST_BYTES_PER_S,
        requests=requests,
        seed=request.seed,
        rates=rates,
    )
    reuse = (row.state_reuse,) if request.reuse and shape_of(spec).state else ()
    notes = (*named_notes, *load.notes, *reuse, *_of_graphs(request.graphs))
    return NamedQuestion(q, request.model, request.cluster, str(request.trace or ""), fixed, notes, caveats)
