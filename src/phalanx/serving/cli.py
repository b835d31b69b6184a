"""`phalanx serve`: how to serve a model on a cluster, what starts it, tables of decoding, and proofs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.command import command, require_only
from phalanx.cli.forms import forms
from phalanx.cli.output import Display, Saved, show_view
from phalanx.cli.terminal import FAILED, announce, console, print_json, require_torch, require_writable

if TYPE_CHECKING:
    from phalanx.planning.tables.table import Sheet
    from phalanx.serving.answer import ServingPlanAnswer
    from phalanx.serving.cost.roofline import ServingPrice
    from phalanx.serving.plan_file import ServingPlan


@command
def plan(
    line: typer.Context,
    shown: Annotated[Display, "json", "strict", "assertions"],
    source: list[Path] | None = None,
    model: str | None = None,
    cluster: str | None = None,
    gpus: int | None = None,
    input: str | None = None,
    output: str | None = None,
    ttft: str | None = None,
    tpot: str | None = None,
    deadline: str | None = None,
    survive: str | None = None,
    percentile: int = 90,
    objective: str = "throughput",
    engine: str = "vllm",
    weights: str = "auto",
    kv: str = "bf16",
    mode: str = "both",
    layout: str | None = None,
    large_ep: str = "auto",
    chunk: int | None = None,
    slots: int | None = None,
    memory: float | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    burstiness: float = 1.0,
    trace: Path | None = None,
    variation: float = 0.0,
    reuse: float = 0.0,
    speculate: str | None = None,
    adapters: str | None = None,
    price: float | None = None,
    rates: str | None = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", min=1, max=10**6, help="Requests in all, with --rate or --concurrency; else to simulate."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, lengths and acceptance.")] = 0,
    launch: str | None = None,
    out: Path = Path("serving.json"),
) -> None:
    """Find how to serve a model: parallelism, replicas, batch and chunk, with the queue simulated.

    phalanx serve plan --model llama3-70b --cluster dgx-h100 --gpus 8 --input 4000 --output 500 --ttft 1s --tpot 30ms

    source --from run.sh: Lines of a server, a benchmark or both, of vLLM, SGLang, TensorRT-LLM or genai-perf;
        repeatable.
    --input 4000|1:1024: Tokens of a prompt, or from : to.
    --output 500|1:512: Tokens generated per request, or from : to.
    --ttft 1s: Limit of the time to the first token, queueing included.
    --tpot 30ms: Limit of the time per token after the first.
    --deadline 20s: Limit of a whole request, to its last token.
    --survive '1 node'|'2 gpus'|'1 copy': What may be lost: the others keep the limits and the load.
    --percentile 50|90|99: Percent of requests that stay under the limits.
    --objective throughput|latency|cost: Most tokens/s; shortest time of a request; or most tokens/s per GPU, which
        may leave GPUs out.
    --engine vllm|sglang|trtllm: Engine that serves.
    --weights bf16,fp8,int4,nvfp4: Types of weights to try; auto: bf16, fp8.
    --kv bf16|fp8: Type of the KV cache.
    --mode both|aggregated|disaggregated: Prefill and decode in the same workers, or apart.
    --layout tp=4,pp=2: The only layout of a copy to consider: tp, pp, dp, ep.
    --large-ep auto|on|off: Experts over many GPUs with DeepEP, DeepGEMM and placement by load; auto: where they span
        nodes.
    --chunk: The only token budget of a step to consider.
    --slots: The most requests at once in a copy, or attention group.
    --memory 0.9: Share of a GPU's memory that the engine uses.
    --concurrency: Requests under way at any time (closed loop).
    --rate 40|inf: Requests per second, arriving at random; inf: all at once.
    --burstiness: Of arrivals: 1 is a Poisson process, less comes in bursts.
    --trace FILE.csv: Requests to replay: arrival (s), input, output (tokens).
    --variation: Standard deviation of the lengths over their mean; 0: all alike.
    --reuse: Share of each prompt that the cache holds already (0 to 0.99).
    --speculate 3:0.7: Drafted tokens per step, and the rate of acceptance.
    --adapters 32:4: LoRA adapters in use, and how many of them a batch holds.
    --price: Price of a GPU-hour, in place of the published one of its chip.
    --launch engine|dynamo: Also print what starts it, as `phalanx serve launch` does.
    --out: File to write the serving plan to.
    """
    from phalanx.serving import plan_file as serving
    from phalanx.spec.errors import InputError

    if launch is not None:
        require_starter("--launch", launch)
    if trace is not None:
        unread = {"input", "output", "variation", "rate", "burstiness", "concurrency"}
        read = [str(p.name) for p in line.command.params if p.name not in unread]
        require_only(line, *read, reason="does not go with --trace, whose requests say it")
    fields = _fields(line)
    if not source:
        if missing := [f"--{name}" for name in ("model", "cluster", "gpus") if name not in fields]:
            raise InputError(missing[0], None, "missing", "or give --from run.sh with the lines that start it")
        if trace is None and (missing := [f"--{name}" for name in ("input", "output") if name not in fields]):
            raise InputError(", ".join(missing), None, "missing", "or give --trace in place of --input and --output")
    require_writable("--out", out)

    from phalanx.serving.answer import serve_plan

    answer = serve_plan(source=source or (), **fields)
    for note in answer.notes:
        announce(f"note: {note}")
    serving.write(answer.plan, out)
    announce(f"serving plan: {out}")
    if shown.json:
        print_json(answer.to_dict() | ({"launch": as_json_of(answer.plan, launch)} if launch else {}))
    else:
        _show(answer, "price" in fields or "rates" in fields)
        if launch:
            show(answer.plan, launch)
    shown.check(answer)


def _fields(line: typer.Context) -> dict[str, Any]:
    """Return the fields of a ServingRequest that stand on the command line."""
    names = {"kv": "cache"}
    apart = {"source", "launch", "out", "strict", "json", "assertions"}
    stated = {n: value for n, value in line.params.items() if n not in apart}
    sources = {n: line.get_parameter_source(n) for n in stated}
    return {
        names.get(n, n): v for n, v in stated.items() if (s := sources[n]) is not None and s.name == "COMMANDLINE"
    }


def _show(answer: ServingPlanAnswer, costs: bool) -> None:
    from phalanx.report.expense import in_words, origins
    from phalanx.report.style import drawn
    from phalanx.serving.report import against, lines, ranked, seen

    search, out = answer.search, console()
    for caveat in answer.caveats:
        out.print(caveat, highlight=False, soft_wrap=True, markup=False)
    q, best = search.question, search.best
    cost = f"{answer.expense.of}: {in_words(answer.expense, answer.rates)}" if costs else ""
    kept = answer.kv_bytes_per_token, answer.state_bytes_per_request, answer.requests_that_fit
    for line in lines(search, kept, cost):
        out.print(line, highlight=False, soft_wrap=True)
    out.print(seen(best))
    out.print(ranked(search.finalists[:8], q, "the best of each layout within the limits", best))
    out.print(ranked(search.front, q, "speed for a user against tokens of a GPU, whatever the limits", best))
    out.print(against(answer.compared))
    if costs:
        out.print(drawn(origins(answer.rates)))


@command
def launch(plan: Path, starter: str = "engine", json: bool = False) -> None:
    """Print what starts a serving plan: command lines of its engine, or a manifest of Dynamo.

    plan serving.json: A serving plan, written by `serve plan`.
    starter --for engine|dynamo: The engine's command lines, or a manifest of NVIDIA Dynamo.
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

    if name not in ("engine", "dynamo"):
        raise InputError(option, name, "is not known", nearest(name, ("engine", "dynamo")))


def as_json_of(plan: ServingPlan, what: str) -> dict[str, Any]:
    """Return what starts a plan. Raises InputError for what its engine cannot do."""
    from phalanx.serving.answer import launch, manifest

    return {"manifest": manifest(plan)} if what == "dynamo" else asdict(launch(plan))


def show(plan: ServingPlan, what: str) -> None:
    """Print what starts a plan. Raises InputError for what its engine cannot do."""
    from phalanx.serving.answer import launch, manifest

    if what == "dynamo":
        print(manifest(plan), end="")
        return
    launch_line = launch(plan)
    for name, content in launch_line.files.items():
        print(f"# {name}\n{content}")
    for each in launch_line.commands:
        print(f"# {each.title}, node {each.node} ({launch_line.engine} {launch_line.version})\n{each.line()}\n")
    for note in launch_line.notes:
        announce(f"note: {note}")


OPTIONS = """
--weights bf16|fp8|int4|nvfp4: Type of the weights.
--kv bf16|fp8: Type of the KV cache.
"""


def _tables(
    subject: str, about: str, sheets: Callable[[ServingPrice, int, list[int]], list[Sheet]]
) -> Callable[..., None]:
    """Return a command that tabulates decoding. `sheets`: of its price, the length of its context, and the degrees of
    parallelism to tabulate."""

    def tabulate(
        model: str,
        output: Saved,
        cluster: str = "dgx-h100",
        gpus: int = 16,
        seq: int | None = None,
        weights: str = "bf16",
        kv: str = "bf16",
    ) -> None:
        from phalanx.answers.tables import Tables
        from phalanx.serving.question import price_of
        from phalanx.spec.errors import InputError

        if seq is not None and not 1 <= seq <= 10**8:
            raise InputError("seq", seq, "must be at least 1")
        price = price_of(model, cluster, gpus, weights, kv)
        m = price.model
        if (seq or 1) > m.max_seq:
            raise InputError("seq", seq, f"is longer than the model's context, {m.max_seq:,}")
        degrees = [t for t in (1, 2, 4, 8, 16) if t <= gpus and m.heads % t == 0]
        tables = sheets(price, seq or min(m.max_seq, 4096), degrees)
        output.show(Tables(None, tuple(tables)), subject=subject)

    tabulate.__doc__ = about
    return command(tabulate)


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
    from phalanx.serving.proof.proof import as_json as to_json
    from phalanx.serving.proof.proof import prove
    from phalanx.serving.proof.report import view

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
    from phalanx.serving.validation.predictions import loaded
    from phalanx.serving.validation.scores import compare, scores

    summary = scores(*compare(loaded(runs)))
    if json:
        print_json(summary)
        return

    from phalanx.serving.validation import large_ep, report

    out = console()
    out.print(report.parts(summary, "model", "by model: absolute error in percent, mean / median"))
    out.print(report.parts(summary, "gpu", "by GPU: absolute error in percent, mean / median"))
    out.print(report.engines(summary))
    out.print(report.large_ep(large_ep.runs()))
    out.print(report.notes(summary), highlight=False)


serve = forms(
    "Serving a trained model: plan, launch, verify, validate.",
    plan=plan,
    launch=launch,
    memory=_tables(
        "memory", "Tabulate the KV cache of a model, and the requests that fit under each layout.", _memory
    ),
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
