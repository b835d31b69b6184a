"""`phalanx serve plan`: how to serve a model on a cluster, how long its users will wait, and the launch lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.command import command
from phalanx.cli.terminal import announce, console, print_json, require_writable
from phalanx.cli.unread import require_only
from phalanx.serving.cli.launch import as_json_of, require_starter, show

if TYPE_CHECKING:
    from phalanx.serving.answer import ServingPlanAnswer


@command
def plan(
    line: typer.Context,
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
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", min=1, max=10**6, help="Requests in all, with --rate or --concurrency; else to simulate."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, lengths and acceptance.")] = 0,
    launch: str | None = None,
    out: Path = Path("serving.json"),
    strict: bool = False,
    json: bool = False,
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
    --price: Price of a GPU-hour.
    --launch engine|dynamo: Also print what starts it, as `phalanx serve launch` does.
    --out: File to write the serving plan to.
    --strict: Exit with 1 if anything that matters is assumed, missing or not modelled.
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
    if json:
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
    apart = {"source", "launch", "out", "strict", "json"}
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
