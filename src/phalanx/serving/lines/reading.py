"""The command lines of a server and its benchmarks as one question: model, layout, types and limits are the server's,
the loads are the benchmarks'.

Options of Phalanx's command line override both. Assumptions and gaps are caveats.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cost.analytic.chips import chip_name
from phalanx.frameworks.companions import Companions
from phalanx.planning.lookup import cluster_named, model_named
from phalanx.serving.cost.checkpoint import by_method, published_note, served_weights
from phalanx.serving.cost.shape import shape_of
from phalanx.serving.cost.workspace import prompt_tokens, step_limits
from phalanx.serving.launch.arguments import published as arguments_of
from phalanx.serving.lines.drafts import FIXING, fixed_acceptance
from phalanx.serving.lines.files import script_of
from phalanx.serving.lines.loads import loads
from phalanx.serving.lines.programs import Line, lines, single_line
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.presets import named
from phalanx.spec.errors import InputError
from phalanx.spec.model.presets import PRESETS, published

_SHORT_CACHE = re.compile(r"(^|/)nvidia/[^/]*-(nv)?fp[48]|-fp8-kv\b")
"""Checkpoints whose hf_quant_config.json or config.json asks for keys and values in 8 bits, which engines follow if
--kv-cache-dtype is auto (NVIDIA/TensorRT-LLM#6294)."""
STOPS = "does not start"
"""The first words of a caveat on why a server does not start."""
_MOST_LOADS = 32
"""Loads of a sweep at most: each is searched and simulated."""
_PARTS = frozenset(
    ("nnodes", "node_rank", "headless", *(f"data_parallel_{x}" for x in ("rank", "start_rank", "size_local")))
)
"""Flags of a server with parts on several pods."""
_ROLES = re.compile(r"(prefill|true|kv_producer)|(decode|kv_consumer)")
_ROLE_FLAGS = ("disaggregation_mode", "is_prefill_worker", "kv_transfer_config")
"""Flags of a server that only prefills or only decodes."""


@dataclass(frozen=True)
class LinesRead:
    """The fields of a ServingRequest that are in files, and their caveats."""

    fields: Mapping[str, Any]
    caveats: tuple[str, ...]
    notes: tuple[str, ...]
    longest: int = 0
    """Tokens of the longest request that the server accepts."""
    checked: bool = False
    """Whether the server needs room for one such request to start."""
    sweep: tuple[Mapping[str, Any], ...] = ()
    """The fields with each load, where the files have several; `fields` has the first."""
    rates: int = 0
    """Rates that a sweep also tries, evenly from what the first load is answered at to what the second one is."""

    @property
    def loaded(self) -> bool:
        """Whether the lengths of requests are known."""
        return "trace" in self.fields or {"input", "output"} <= self.fields.keys()

    def stopped(self, room: int) -> tuple[str, ...]:
        """Return a caveat if the server does not start, because the cache of an attention group, of `room` tokens,
        cannot hold the longest request."""
        if self.longest <= room or not self.checked:
            return ()
        reason = f"a request may have {self.longest:,} tokens, and an engine's cache holds {room:,}"
        shorter = f"--max-model-len {room // 1024 * 1024}, or " if room >= 1024 else ""
        return (f"{STOPS}: {reason}: {shorter}more memory",)


def read(paths: Sequence[Path], given: Mapping[str, Any]) -> LinesRead:
    """Read the lines of files; the `given` fields override them. Raises InputError for no server or benchmark,
    several servers, too many loads, and a missing model or lengths."""
    servers_and_benchmarks = [
        line
        for path in paths
        for script, pods in [script_of(path)]
        for line in lines(script, path.name, Companions(path.parent, paths), pods)
    ]
    if not servers_and_benchmarks:
        names = "vllm serve, sglang.launch_server, trtllm-serve or one of their benchmarks"
        raise InputError(
            "from", ", ".join(map(str, paths)), "starts no server and no benchmark", f"give a line of {names}"
        )
    return read_lines(servers_and_benchmarks, given)


def read_lines(servers_and_benchmarks: Sequence[Line], given: Mapping[str, Any]) -> LinesRead:
    """Read the lines of a script, as `read` does. Raises InputError."""
    servers = [x for x in servers_and_benchmarks if x.program.role == "server"]
    # vLLM's headless nodes are parts of the first node's server.
    servers = [x for x in servers if x.flags.get("headless") is not True] or servers
    prefill, others = _prefill_and_others(servers)
    server = single_line(others, "servers")
    benches = [x for x in servers_and_benchmarks if x.program.role in ("benchmark", "both")]
    bench = (
        single_line(benches, "benchmarks")
        if any(x.program.role == "both" for x in benches)
        else next(iter(benches), None)
    )
    drawn = single_line([x for x in servers_and_benchmarks if x.program.role == "lengths"], "data sets")
    if server is None and bench is not None and bench.program.role == "both":
        server = bench
    cluster, taken = _selected(server, given)
    given = {**cluster, **given}
    fields, caveats = _served(server, bench, given)
    if prefill is not None and server is not None:
        fields, caveats = _paired(prefill, server, given, fields, caveats)
        given = {**given, "mode": "disaggregated"}
    loads_read = [load for each in benches for load in loads(each, drawn, given)] or [({}, [])]
    sweep = list({str(sorted({**load, **given}.items())): load for load, _ in loads_read}.values())
    if len(sweep) > _MOST_LOADS:
        raise InputError("from", len(sweep), f"are more loads than are answered, {_MOST_LOADS}", "leave some of them")
    parts = [x for x in (prefill, server, drawn, *(each for each in benches if each is not server)) if x is not None]
    drafts, drafting = fixed_acceptance(server) if server is not None and "speculate" not in given else ({}, "")
    fields, caveats = {**fields, **drafts}, [*caveats, *filter(None, [drafting])]
    judged = [caveat for line in parts for caveat in line.caveats({**given, **drafts}, FIXING if drafts else ())]
    judged += [*taken, *(line.pods.assumption for line in parts if line.pods.assumption)]
    judged += [_unread(x) for x in servers_and_benchmarks if x.program.role == "unread"]
    judged.sort(key=lambda caveat: not caveat.startswith("not judged"))
    points = [{**fields, **load, **given} for load in sweep]
    merged = points[0]
    notes = dict.fromkeys(
        f"line {x.number}: {x.program.names[0]} {' '.join(x.program.words)}".rstrip()
        + (f", {x.pods.copies} replicas" if x.pods.copies > 1 else "")
        for x in sorted(parts, key=lambda x: x.number)
    )
    stated, most = (server.fields.get("context") if server else None), model_named(str(merged["model"]))[0].max_seq
    longest = stated if isinstance(stated, int) and stated > 0 else most
    checked = server is not None and server.program.engine == "vllm"  # vllm/v1/core/kv_cache_utils.py
    doubts = dict.fromkeys((*judged, *caveats, *(doubt for _, some in loads_read for doubt in some)))
    everything = sorted(doubts, key=lambda caveat: not caveat.startswith(STOPS))
    rates = 0 if bench is None or len(points) < 2 else max(0, int(bench.fields.get("sweep", 2)) - 2)
    several = tuple(points) if len(points) > 1 else ()
    return LinesRead(merged, tuple(everything), tuple(notes), longest, checked, several, min(rates, _MOST_LOADS))


# The server


def _prefill_and_others(servers: Sequence[Line]) -> tuple[Line | None, Sequence[Line]]:
    """Return the line of servers that only prefill, and the lines of the others. Raises InputError where their part
    is not said."""
    if len(servers) < 2 or not all(map(_role, servers)):
        return None, servers
    first, then = ([x for x in servers if (role := _ROLES.search(_role(x))) and role[group]] for group in (1, 2))
    if len(servers) != 2 or not (len(first) == len(then) == 1):
        reason = f"in lines {', '.join(str(x.number) for x in servers[:6])} prefill and decode apart"
        remedy = "leave one line of each part, with its --disaggregation-mode, or kv_producer and kv_consumer"
        raise InputError("from", None, f"the servers {reason}, and are not read as two parts", remedy)
    return first[0], then


def _role(server: Line) -> str:
    """Return the words that say whether a server prefills or decodes; empty: it does both."""
    said = [str(server.flags[flag]).lower() for flag in _ROLE_FLAGS if flag in server.flags]
    return " ".join((*said, server.pods.part)).strip()


def _paired(
    prefill: Line, decode: Line, given: Mapping[str, Any], fields: dict[str, Any], caveats: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of servers that prefill and decode apart, with their caveats; `fields`, `caveats`: of those
    that decode. Raises InputError for two models or engines."""
    first, joint_caveats = _served(prefill, None, given)
    for name in ("model", "engine", "weights", "cache"):
        if first[name] != fields[name]:
            raise InputError(
                "from", None, f"the servers of lines {prefill.number} and {decode.number} differ in {name}"
            )
    both = [(x.places * x.pods.copies, part["layout"]) for x, part in ((prefill, first), (decode, fields))]
    text = " + ".join(f"{count} x {layout}" for count, layout in both)
    gpus = sum(part["gpus"] * x.places for x, part in ((prefill, first), (decode, fields)))
    if first.get("memory") != fields.get("memory"):
        joint_caveats.append(
            f"assumed: both take the share of memory of the server that decodes, in line {decode.number}"
        )
    chunk = {"chunk": first["chunk"]} if "chunk" in first else {}
    joined = {**fields, **chunk, "mode": "disaggregated", "layout": text, "gpus": gpus}
    return joined, list(dict.fromkeys((*joint_caveats, *caveats)))


def _selected(server: Line | None, given: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Return the cluster of the GPU whose nodes a manifest selects, with its caveat; nothing where one is given."""
    gpu = server.pods.gpu if server is not None else ""
    cluster = named(gpu) if gpu and not given.get("cluster") else None
    if cluster is None:
        return {}, []
    return {"cluster": cluster}, [f"assumed: nodes of {cluster}, as the manifest selects {gpu}: --cluster for others"]


def _served(server: Line | None, bench: Line | None, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of model, layout and limits, with their caveats."""
    caveats: list[str] = []
    stated = server.fields if server is not None else {}
    name = str(stated.get("model") or (bench.fields.get("model", "") if bench is not None else ""))
    fields: dict[str, Any] = {"model": given.get("model") or _model(name)}
    engine = (server or bench).program.engine if server or bench else ""  # type: ignore[union-attr]
    if engine:
        fields["engine"] = engine
    if server is None:
        return fields, ["assumed: the file starts no server: layout, batch and types are the best of the search"]
    caveats += _older(server)
    fields |= {"mode": "aggregated"} | _layout(server, stated, str(fields["model"]))
    if server.pods.size > 1 or not _PARTS & server.flags.keys():
        caveats += _too_few(server, fields["layout"], fields["gpus"])
        fields["gpus"] *= server.pods.copies
    quantization = stated.get("quantization")
    fields["weights"] = served_weights(quantization, name)
    if "weights" not in given and not by_method(quantization):
        if quantization and fields["weights"] == "bf16":
            caveats.append(f"not modelled: --quantization {quantization}: weights of 16 bits are taken")
        caveats += published_note(name)
    cache = str(stated.get("cache", "auto"))
    short = cache == "auto" and (_SHORT_CACHE.search(name.lower()) is not None or _has_short_index(fields, given))
    fields["cache"] = "fp8" if cache.startswith("fp8") or short else "bf16"
    if short and "cache" not in given:
        caveats.append(
            "assumed: the cache is in 8 bits, as its checkpoint or engine has it by itself: --kv bf16 else"
        )
    for field, flag in (("slots", "slots"), ("chunk", "chunk"), ("graphs", "graphs")):
        value = stated.get(flag, server.program.defaults.get(flag))
        if isinstance(value, int) and value > 0:
            fields[field] = value
    if stated.get("eager") is True:
        fields["graphs"] = 0
        caveats.append(_EAGER)
    if isinstance(memory := stated.get("memory", server.program.defaults.get("memory")), float | int):
        fields["memory"] = float(memory)
    _add_defaults(fields, given, server)
    if server.program.engine == "sglang" and stated.get("shared") and "dp" in stated:
        for field in {"slots", "chunk"} & fields.keys():  # limits that its groups share
            fields[field] = max(1, fields[field] // max(1, int(stated["dp"])))
    if "chunk" not in {**fields, **given}:
        caveats.append(
            "assumed: the tokens of a step, which the line leaves to the engine, are the best of those tried"
        )
    return fields, caveats


_EAGER = (
    "assumed: without CUDA graphs a layer takes its host at least 0.7 ms, of published runs 0.5 to 1.1 ms: time may "
    "differ"
)
_V1 = (0, 8)
"""The release of vLLM from which its v1 engine is the default (vllm-project/vllm, releases, v0.8.0): before, prompts
have steps of their own, whole up to 32,768 tokens of context, and 256 requests are under way at most."""


def _older(server: Line) -> Iterator[str]:
    """Yield whose defaults are taken of a server that is pinned to an older release."""
    engine, known = server.program.engine, arguments_of(server.program.engine).version
    pinned, latest = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (server.release, known))
    if pinned and pinned < latest:
        old = ", whose prompts have steps of their own" if engine == "vllm" and pinned < _V1 else ""
        yield f"assumed: the defaults of {engine} {known}, where the script has {server.release}{old}"


def _layout(server: Line, stated: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the layout of a copy, and the GPUs of all copies. Raises InputError for impossible degrees."""
    degree = {name: _degree(server, stated, name) for name in ("tp", "pp", "dp", "experts")}
    tp, pp, dp = degree["tp"], degree["pp"], degree["dp"]
    gpus = tp * pp * dp
    has_experts = model_named(model)[0].experts is not None
    experts = degree["experts"]
    if server.program.engine == "sglang":
        shared = bool(stated.get("shared")) and dp > 1
        if shared:  # dp groups within tp
            if tp % dp:
                raise InputError("from", f"dp {dp}", f"does not divide tp {tp}, within which it attends apart")
            tp, gpus = tp // dp, tp * pp
        copies = 1 if shared else dp
    else:
        copies = 1 if has_experts else dp
        experts = tp * dp if stated.get("ep") is True and has_experts else experts
    parts = [f"tp={tp}", *([f"pp={pp}"] if pp > 1 else [])]
    parts += [f"dp={dp}"] if copies == 1 and dp > 1 else []
    parts += [f"ep={experts}"] if experts > 1 else []
    return {"layout": ",".join(parts), "gpus": gpus}


def _too_few(server: Line, layout: str, gpus: int) -> Iterator[str]:
    """Yield a caveat if the pods of a server have fewer GPUs than it needs, by the manifest."""
    each, size = server.pods.gpus, server.pods.size
    if each is not None and each * size < gpus:
        have = f"a pod has {each}" if size == 1 else f"{size} pods have {each} each"
        remedy = f"set the container's limit to {-(-gpus // size)}"
        yield f"{STOPS}: {layout} takes {gpus} GPUs, and {have}: {remedy}"


def _degree(server: Line, stated: Mapping[str, Any], name: str) -> int:
    value = stated.get(name, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**6:
        raise InputError("from", value, f"line {server.number}: {name} must be a whole number, at least 1")
    return value


def _has_short_index(fields: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether SGLang caches latents with an index in 8 bits by default: on Blackwell (sgl-project/sglang#11309)."""
    if fields.get("engine") != "sglang" or not given.get("cluster"):
        return False
    chip = CHIPS[chip_name(cluster_named(str(given["cluster"]))(1).device.name)]
    return chip.generation.startswith("blackwell") and shape_of(model_named(fields["model"])[0]).index_cache > 0


def _add_defaults(fields: dict[str, Any], given: Mapping[str, Any], server: Line) -> None:
    """Add the engine's default token budget and limit of requests, which depend on the GPU."""
    if not given.get("cluster"):
        return
    device = cluster_named(str(given["cluster"]))(1).device
    if server.program.engine == "vllm":
        chunk, slots = step_limits(device, offline=server.program.role == "both")
        fields.setdefault("chunk", chunk)
        fields.setdefault("slots", slots)
    elif server.program.engine == "sglang":
        fields.setdefault("chunk", prompt_tokens(device))


def _model(name: str) -> str:
    """Return the preset or config.json of a checkpoint's name. Raises InputError if there is none."""
    if not name:
        raise InputError("model", None, "missing: the file does not say it", "a preset, or a config.json")
    for path in (Path(name) / "config.json", Path(name)):
        if path.name.endswith(".json") and len(name) < 1000 and path.is_file():
            return str(path)
    if name.lower() in PRESETS or published(name) is not None:
        return name.lower() if name.lower() in PRESETS else name
    raise InputError("model", None, f"{name} is not a model that is known", "give its config.json")


def _unread(bench: Line) -> str:
    """Return the caveat on a benchmark whose flags are not read."""
    load = "its load is not read: --input, --output, --requests, and --rate or --concurrency say it"
    return f"not judged: line {bench.number} starts {bench.program.names[0]}: {load}"
