"""`phalanx serve`: plans for serving a model, their launch files, tables of decoding, and proofs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.command import Stated, command
from phalanx.cli.forms import forms
from phalanx.cli.output import Display, Saved, show_view
from phalanx.cli.terminal import FAILED, announce, console, print_json, require_torch, require_writable
from phalanx.serving import request as requests
from phalanx.serving.request import ServingRequest

if TYPE_CHECKING:
    from phalanx.planning.tables.table import Sheet
    from phalanx.serving.answer import ServingPlanAnswer
    from phalanx.serving.cost.roofline import ServingPrice
    from phalanx.serving.plan_file import ServingPlan
    from phalanx.serving.room import ServerRoom
    from phalanx.serving.sweep import ServingSweep

OPTIONS = requests.OPTIONS


@command
def plan(
    shown: Annotated[Display, "json", "strict", "assertions"],
    request: Annotated[Stated, ServingRequest],
    source: list[Path] | None = None,
    launch: str | None = None,
    out: Path = Path("serving.json"),
) -> None:
    """Find how to serve a model: parallelism, replicas, batch and chunk, with the queue simulated.

    phalanx serve plan --model llama3-70b --cluster dgx-h100 --gpus 8 --input 4000 --output 500 --ttft 1s --tpot 30ms

    source --from run.sh: Lines of a server, a benchmark or both, of vLLM, SGLang, TensorRT-LLM, GuideLLM or
        genai-perf; repeatable.
    --launch STARTER: Also print what starts it, as `phalanx serve launch` does.
    --out: File to write the serving plan to.
    """
    from phalanx.planning.lookup import gpus_in
    from phalanx.serving import plan_file as serving
    from phalanx.spec.errors import InputError

    if launch is not None:
        require_starter("--launch", launch)
    if "trace" in request:
        for name in ("input", "output", "variation", "rate", "burstiness", "concurrency"):
            if name in request:
                raise InputError(name, request[name], "does not go with --trace, whose requests say it")
    gpus = request.get("gpus") or gpus_in(request.get("cluster"))
    given = request if gpus is None else {**request, "gpus": gpus}
    if not source and (missing := [name for name in ("model", "cluster", "gpus") if name not in given]):
        raise InputError(missing[0], None, "missing", "or give --from run.sh with the lines that start it")
    require_writable("--out", out)

    from phalanx.serving.answer import serve_plan
    from phalanx.serving.lines.reading import read
    from phalanx.serving.room import server_room
    from phalanx.serving.search.question import SPARING
    from phalanx.serving.sweep import serve_loads

    lines = read(source, request) if source else None
    if lines is not None and not lines.loaded and not {"input", "output"} & request.keys():
        room = server_room(lines)
        _show_lines(room, lambda: print(*room.words(), sep="\n"), "no load is said", shown)
        return
    if lines is not None and lines.sweep:
        if launch is not None:
            raise InputError("--launch", launch, "does not go with several loads", "leave one of them in the file")
        swept = serve_loads(lines)
        _show_lines(swept, lambda: _show_loads(swept), "the file has several loads", shown)
        return
    answer = serve_plan(source=source or (), **request)
    for note in answer.notes:
        announce(f"note: {note}")
    if answer.passed:
        serving.write(answer.plan, out)
        announce(f"serving plan: {out}")
    else:
        launch = None
        announce(f"no serving plan is written to {out}: what the line starts does not start")
    try:
        if shown.json:
            print_json(answer.to_dict() | ({"launch": as_json_of(answer.plan, launch)} if launch else {}))
        else:
            _show(answer, "price" in request or "rates" in request or answer.objective in SPARING)
            if launch:
                show(answer.plan, launch)
    except InputError as error:  # of what `serve launch` calls --for
        field = "launch" if error.field == "for" else error.field
        raise InputError(field, error.value, error.reason, error.remedy) from None
    shown.check(answer)


def _show_lines(answer: ServerRoom | ServingSweep, show: Callable[[], None], reason: str, shown: Display) -> None:
    """Print an answer without a plan. `reason`: why no plan is written."""
    for line in [*(f"note: {note}" for note in answer.notes), f"no serving plan is written: {reason}"]:
        announce(line)
    print_json(answer.to_dict()) if shown.json else show()
    shown.check(answer)


def _show_loads(swept: ServingSweep) -> None:
    from phalanx.serving.report import load_table

    out = console()
    best = next((each.deployment for each in swept.loads if not each.refused), "")
    for line in (*swept.caveats, f"{swept.title}: {best}"):
        out.print(line, highlight=False, soft_wrap=True, markup=False)
    out.print(load_table(swept.loads))
    for each in swept.loads:
        if each.refused:
            out.print(f"not {each.load}: {each.refused}", highlight=False, soft_wrap=True, markup=False)


def _show(answer: ServingPlanAnswer, costs: bool) -> None:
    from phalanx.report.expense import in_words, origins
    from phalanx.report.style import terminal_table
    from phalanx.serving.report import cache, candidate_table, latency_table, likely, lines, neighbour_table

    search, out = answer.search, console()
    for caveat in answer.caveats:
        out.print(caveat, highlight=False, soft_wrap=True, markup=False)
    q, best = search.question, search.best
    cost = f"{answer.expense.of}: {in_words(answer.expense, answer.rates)}" if costs else ""
    held = cache(answer)
    for line in lines(search, likely(answer), held, cost) if answer.passed else held:
        out.print(line, highlight=False, soft_wrap=True)
    if not answer.passed:
        return
    out.print(latency_table(best))
    limited = " within the limits" if q.limits else ""
    out.print(candidate_table(search.finalists[:8], q, f"the best of each layout{limited}", best))
    out.print(candidate_table(search.front, q, "speed for a user against tokens of a GPU, whatever the limits", best))
    out.print(neighbour_table(answer.neighbours))
    if costs:
        out.print(terminal_table(origins(answer.rates)))


@command
def launch(plan: Path, starter: str = "engine", json: bool = False) -> None:
    """Print what starts a serving plan: command lines of its engine, or a manifest.

    plan serving.json: A serving plan, written by `serve plan`.
    starter --for engine|dynamo|kubernetes|kserve|llm-d: The engine's command lines, or a manifest: of NVIDIA Dynamo,
        of Deployments and LeaderWorkerSets, an LLMInferenceService, or values of llm-d's chart.
    """
    from phalanx.serving import plan_file

    require_starter("--for", starter)
    served = plan_file.read(plan)
    if json:
        print_json(as_json_of(served, starter))
    else:
        show(served, starter)


def require_starter(option: str, name: str) -> None:
    """Require a known way to start a plan. Raises InputError."""
    from phalanx.spec.errors import InputError, nearest

    known = ("engine", "dynamo", "kubernetes", "kserve", "llm-d")
    if name not in known:
        raise InputError(option, name, "is not known", nearest(name, known))


def as_json_of(plan: ServingPlan, what: str) -> dict[str, Any]:
    """Return the launch or the manifest of a plan, for JSON. Raises InputError for what its engine cannot do."""
    from phalanx.serving.answer import launch, manifest

    return {"manifest": manifest(plan, what)} if what != "engine" else asdict(launch(plan))


def show(plan: ServingPlan, what: str) -> None:
    """Print the launch or the manifest of a plan. Raises InputError for what its engine cannot do."""
    from phalanx.serving.answer import launch, manifest

    if what != "engine":
        print(manifest(plan, what), end="")
        return
    launch_line = launch(plan)
    for name, content in launch_line.files.items():
        print(f"# {name}\n{content}")
    for each in launch_line.commands:
        print(f"# {each.title}, node {each.node} ({launch_line.engine} {launch_line.version})\n{each.line()}\n")
    for note in launch_line.notes:
        announce(f"note: {note}")


def _tables(
    subject: str, about: str, sheets: Callable[[ServingPrice, int, list[int]], list[Sheet]]
) -> Callable[..., None]:
    """Return a command that tabulates decoding. `sheets`: (price, tokens of context, degrees of parallelism) ->
    tables."""

    def tabulate(
        model: str,
        output: Saved,
        cluster: str = "dgx-h100",
        gpus: int = 16,
        seq: int | None = None,
        weights: str = "bf16",
        cache: str = "bf16",
    ) -> None:
        from phalanx.serving.question import price_of

        _tabulate(subject, sheets, output, price_of(model, cluster, gpus, weights, cache), model, gpus, seq)

    tabulate.__doc__ = f"{about}\n\n--weights bf16|fp8|int4|nvfp4: Type of the weights."
    return command(tabulate)


def _tabulate(
    subject: str,
    sheets: Callable[[ServingPrice, int, list[int]], list[Sheet]],
    output: Saved,
    price: ServingPrice,
    name: str,
    gpus: int,
    seq: int | None,
) -> None:
    from phalanx.answers.tables import Tables
    from phalanx.serving.cost.checkpoint import checkpoint_assumption
    from phalanx.spec.errors import InputError

    if seq is not None and seq < 1:
        raise InputError("seq", seq, "must be at least 1")
    m = price.model
    if (seq or 1) > m.max_seq:
        raise InputError("seq", seq, f"is longer than the model's context, {m.max_seq:,}")
    degrees = [t for t in (1, 2, 4, 8, 16) if t <= gpus and m.heads % t == 0]
    tables = sheets(price, seq or min(m.max_seq, 4096), degrees)
    if taken := checkpoint_assumption(m, name, price.weights):
        announce(taken)
    output.show(Tables(None, tuple(tables)), subject=subject)


@command
def memory(
    model: str,
    output: Saved,
    cluster: str = "dgx-h100",
    gpus: int = 16,
    seq: int | None = None,
    weights: str = "bf16",
    cache: str = "bf16",
    memory: float | None = None,
    engine: str = "vllm",
) -> None:
    """Tabulate a model's KV cache, and the requests that fit under each layout.

    --weights bf16|fp8|int4|nvfp4: Type of weights.
    memory --memory 0.9: Share of a GPU's memory.
    --engine vllm|sglang|trtllm: Engine.
    """
    from phalanx.serving.question import price_of

    price = price_of(model, cluster, gpus, weights, cache, memory, engine)
    _tabulate("memory", _memory, output, price, model, gpus, seq)


def _memory(price: ServingPrice, seq: int, degrees: list[int]) -> list[Sheet]:
    from phalanx.serving import tables
    from phalanx.serving.cost.layout import ServingLayout

    m = price.model
    layouts = [ServingLayout(t, 1, 1, t, 1) for t in degrees]
    layouts += [ServingLayout(1, p) for p in degrees[1:] if p <= m.layers]
    if m.experts is not None:
        layouts += [ServingLayout(1, 1, t, 1, t) for t in degrees[1:] if m.experts.count % t == 0]
    return [tables.cache(m, seq), tables.room(price, seq, layouts)]


def _comm(price: ServingPrice, seq: int, degrees: list[int]) -> list[Sheet]:
    from phalanx.serving import tables

    pays = [tables.collectives(price, degrees[1:]), tables.tensor_pays(price, seq, degrees)] if degrees[1:] else []
    return [*pays, tables.tensor_or_pipeline(price, seq, degrees)]


def _roofline(price: ServingPrice, seq: int, degrees: list[int]) -> list[Sheet]:
    from phalanx.serving import tables

    return [tables.intensity(price, seq)]


@command
def verify(
    model: str,
    strategy: str | None = None,
    requests: int = 16,
    context: int | None = None,
    precision: str | None = None,
    json: bool = False,
) -> None:
    """Run the real prefill and decode of each class of ranks on fake tensors, and compare them with the predicted
    steps.

    requests --batch: Requests of a replica.
    context --seq: Sequence length in tokens.
    """
    require_torch()
    from phalanx.serving.proof import as_json as to_json
    from phalanx.serving.proof import prove, view

    result = prove(model, strategy, requests, context, precision, announce)
    if json:
        print_json(to_json(result))
    else:
        show_view(view(result))
    if not result.proved:
        raise typer.Exit(FAILED)


@command
def validate(runs: Path | None = None, json: bool = False) -> None:
    """Predict every measured run of an engine: seconds per output token (TPOT) and to the first token (TTFT).

    --runs FILE.csv: Your own measured runs, in the columns of the published ones that ship with Phalanx.
    """
    from phalanx.serving.validation import bursts
    from phalanx.serving.validation.predictions import load_runs
    from phalanx.serving.validation.scores import compare, scores

    summary = scores(*compare(load_runs(runs)))
    if runs is None:
        summary["bursts"] = bursts.scores(*bursts.published())
    if json:
        print_json(summary)
        return

    from phalanx.serving.validation import large_ep, report

    out = console()
    out.print(report.parts(summary, "model", "by model: absolute error in percent, mean / median"))
    out.print(report.parts(summary, "gpu", "by GPU: absolute error in percent, mean / median"))
    out.print(report.engines(summary))
    out.print(report.large_ep(large_ep.runs()))
    if runs is None:
        out.print(report.bursts(summary["bursts"]))
    out.print(report.notes(summary), highlight=False)


serve = forms(
    "Serving a trained model: plan, launch, verify, validate.",
    plan=plan,
    launch=launch,
    memory=memory,
    comm=_tables(
        "comm",
        "Tabulate what tensor parallelism sends per step of decoding, and when it or a pipeline pays.",
        _comm,
    ),
    roofline=_tables(
        "roofline",
        "Tabulate the intensity of decoding by batch, and whether memory or computing bounds it.",
        _roofline,
    ),
    verify=verify,
    validate=validate,
)
