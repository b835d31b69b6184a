"""`phalanx serve plan`: how to serve a model on a cluster, how long its users will wait, and the launch lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.options import Json
from phalanx.cli.terminal import announce, console, exit_on_error, print_json, require_writable
from phalanx.cli.unread import require_only
from phalanx.serving.cli.launch import as_json_of, require_starter, show
from phalanx.serving.cli.options import Cluster, Model

if TYPE_CHECKING:
    from phalanx.serving.answer import ServingPlanAnswer


def plan(
    line: typer.Context,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="run.sh",
            help="Lines of a server, a benchmark or both, of vLLM, SGLang, TensorRT-LLM or genai-perf; repeatable.",
        ),
    ] = None,
    model: Model | None = None,
    cluster: Cluster | None = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Number of GPUs.")] = None,
    input: Annotated[
        str | None, typer.Option("--input", metavar="4000|1:1024", help="Tokens of a prompt, or from : to.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", metavar="500|1:512", help="Tokens generated per request, or from : to.")
    ] = None,
    ttft: Annotated[
        str | None,
        typer.Option("--ttft", metavar="1s", help="Limit of the time to the first token, queueing included."),
    ] = None,
    tpot: Annotated[
        str | None, typer.Option("--tpot", metavar="30ms", help="Limit of the time per token after the first.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option("--deadline", metavar="20s", help="Limit of a whole request, to its last token.")
    ] = None,
    survive: Annotated[
        str | None,
        typer.Option(
            "--survive",
            metavar="'1 node'|'2 gpus'|'1 copy'",
            help="What may be lost: the others keep the limits and the load.",
        ),
    ] = None,
    percentile: Annotated[
        int, typer.Option("--percentile", metavar="50|90|99", help="Percent of requests that stay under the limits.")
    ] = 90,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            metavar="throughput|latency|cost",
            help="Most tokens/s; shortest time of a request; or most tokens/s per GPU, which may leave GPUs out.",
        ),
    ] = "throughput",
    engine: Annotated[
        str, typer.Option("--engine", metavar="vllm|sglang|trtllm", help="Engine that serves.")
    ] = "vllm",
    weights: Annotated[
        str,
        typer.Option("--weights", metavar="bf16,fp8,int4,nvfp4", help="Types of weights to try; auto: bf16, fp8."),
    ] = "auto",
    kv: Annotated[str, typer.Option("--kv", metavar="bf16|fp8", help="Type of the KV cache.")] = "bf16",
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="both|aggregated|disaggregated",
            help="Prefill and decode in the same workers, or apart.",
        ),
    ] = "both",
    layout: Annotated[
        str | None,
        typer.Option("--layout", metavar="tp=4,pp=2", help="The only layout of a copy to consider: tp, pp, dp, ep."),
    ] = None,
    large_ep: Annotated[
        str,
        typer.Option(
            "--large-ep",
            metavar="auto|on|off",
            help="Experts over many GPUs with DeepEP, DeepGEMM and placement by load; auto: where they span nodes.",
        ),
    ] = "auto",
    chunk: Annotated[int | None, typer.Option("--chunk", help="The only token budget of a step to consider.")] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", help="The most requests at once in a copy, or attention group.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="0.9", help="Share of a GPU's memory that the engine uses.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Requests under way at any time (closed loop).")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="40|inf", help="Requests per second, arriving at random; inf: all at once."),
    ] = None,
    burstiness: Annotated[
        float, typer.Option("--burstiness", help="Of arrivals: 1 is a Poisson process, less comes in bursts.")
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.csv", help="Requests to replay: arrival (s), input, output (tokens)."),
    ] = None,
    variation: Annotated[
        float, typer.Option("--variation", help="Standard deviation of the lengths over their mean; 0: all alike.")
    ] = 0.0,
    reuse: Annotated[
        float, typer.Option("--reuse", help="Share of each prompt that the cache holds already (0 to 0.99).")
    ] = 0.0,
    speculate: Annotated[
        str | None,
        typer.Option("--speculate", metavar="3:0.7", help="Drafted tokens per step, and the rate of acceptance."),
    ] = None,
    adapters: Annotated[
        str | None,
        typer.Option("--adapters", metavar="32:4", help="LoRA adapters in use, and how many of them a batch holds."),
    ] = None,
    price: Annotated[float | None, typer.Option("--price", help="Price of a GPU-hour.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", min=1, max=10**6, help="Requests in all, with --rate or --concurrency; else to simulate."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, lengths and acceptance.")] = 0,
    launch: Annotated[
        str | None,
        typer.Option(
            "--launch",
            metavar="engine|dynamo",
            help="Also print what starts it, as `phalanx serve launch` does.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="File to write the serving plan to.")] = Path("serving.json"),
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with 1 if anything that matters is assumed, missing or not modelled."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Find how to serve a model: parallelism, replicas, batch and chunk, with the queue simulated.

    phalanx serve plan --model llama3-70b --cluster dgx-h100 --gpus 8 --input 4000 --output 500 --ttft 1s --tpot 30ms
    """
    with exit_on_error():
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
                raise InputError(
                    ", ".join(missing), None, "missing", "or give --trace in place of --input and --output"
                )
        require_writable("--out", out)

        from phalanx.serving.answer import serve_plan

        answer = serve_plan(source=source or (), **fields)
        for note in answer.notes:
            announce(f"note: {note}")
        serving.write(answer.plan, out)
        announce(f"serving plan: {out}")
        if as_json:
            print_json(answer.to_dict() | ({"launch": as_json_of(answer.plan, launch)} if launch else {}))
        else:
            _show(answer)
            if launch:
                show(answer.plan, launch)
        if strict and answer.caveats:
            raise typer.Exit(1)


def _fields(line: typer.Context) -> dict[str, Any]:
    """Return the fields of a ServingRequest that stand on the command line."""
    names = {"kv": "cache"}
    apart = {"source", "launch", "out", "strict", "as_json"}
    stated = {n: value for n, value in line.params.items() if n not in apart}
    sources = {n: line.get_parameter_source(n) for n in stated}
    return {
        names.get(n, n): v for n, v in stated.items() if (s := sources[n]) is not None and s.name == "COMMANDLINE"
    }


def _show(answer: ServingPlanAnswer) -> None:
    from phalanx.serving.answer import money
    from phalanx.serving.report import against, lines, ranked, seen

    search, out = answer.search, console()
    for caveat in answer.caveats:
        out.print(caveat, highlight=False, soft_wrap=True, markup=False)
    q, best = search.question, search.best
    cost = None if q.price is None else money(best, q.price)
    kept = answer.kv_bytes_per_token, answer.state_bytes_per_request, answer.requests_that_fit
    for line in lines(search, kept, cost):
        out.print(line, highlight=False, soft_wrap=True)
    out.print(seen(best))
    out.print(ranked(search.finalists[:8], q, "the best of each layout within the limits", best))
    out.print(ranked(search.front, q, "speed for a user against tokens of a GPU, whatever the limits", best))
    out.print(against(answer.compared))
