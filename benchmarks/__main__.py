"""Check every limit that the project promises, on this machine: `make bench`.

python -m benchmarks            all of them, about a quarter of an hour
python -m benchmarks ddp help   some of them
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.result import Result

ROOT = Path(__file__).parent.parent


def _seconds(command: list[str]) -> float:
    """Return the seconds that a command takes, with Python's compiled files cached as in an installation."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT, env=env)
    return time.perf_counter() - start


def _run_ranks(name: str, ranks: int, **arguments: Any) -> Any:
    """Run a program of this folder on `ranks` ranks and return what they wrote."""
    from phalanx.runtime.process.launch import launch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        launch(f"benchmarks.{name}", json.dumps({"out": str(out), **arguments}), ranks, 1)
        return json.loads(out.read_text())


def bench_help() -> Iterator[Result]:
    """Time `phalanx --help` against a bare interpreter, interleaved."""
    bare, help_s = [], []
    for _ in range(9):
        bare.append(_seconds([sys.executable, "-c", "pass"]))
        help_s.append(_seconds([sys.executable, "-m", "phalanx", "--help"]))
    extra = median(help_s) - median(bare)
    shown = f"{extra:.3f} s (help {median(help_s):.3f}, bare {median(bare):.3f}; best {min(help_s) - min(bare):.3f})"
    yield Result("phalanx --help over a bare interpreter", shown, "0.3 s", extra <= 0.3)


def bench_ui() -> Iterator[Result]:
    """An answer of `phalanx ui`, warm, after a batch or a condition was changed for llama3-70b on 64 GPUs."""
    from phalanx.report.local_page.answers import Planner

    question = {"model": "llama3-70b", "cluster": "dgx-h100", "stack": "megatron-core", "gpus": 64, "seq": 4096}
    question |= {"batch": 512, "headroom": 0.05, "where": ""}
    planner = Planner()
    for batch in (256, 512):
        planner.ask(question | {"id": "warm", "batch": batch})
    changes: list[dict[str, object]] = [{"batch": n} for n in (256, 512, 768, 1024, 2048)]
    changes += [{"where": line} for line in ("tp<=4", "tp=8", "zero=1, pp<=8", "tp*cp<=8", "schedule=1f1b")]
    seconds = []
    for i, change in enumerate(changes):
        start = time.perf_counter()
        assert "plan" in planner.ask(question | change | {"id": str(i)})
        seconds.append(time.perf_counter() - start)
    planner.close()
    for what, times in (("batch", seconds[:5]), ("condition", seconds[5:])):
        slowest = 1e3 * max(times)
        middle = 1e3 * sorted(times)[len(times) // 2]
        yield Result(
            f"ui: another {what}, slowest of {len(times)} (median {middle:.0f} ms)",
            f"{slowest:.0f} ms",
            "300 ms",
            slowest <= 300,
        )


def bench_plan() -> Iterator[Result]:
    """Time the search for the best of all legal strategies, start-up included."""
    for model, cluster, gpus, batch, limit in (
        ("gpt3-175b", "dgx-a100", 1024, 1536, 1.0),
        ("gpt-1t", "dgx-h100", 16384, 4096, 5.0),
        ("deepseek-v3", "dgx-h100", 2048, 8192, 10.0),
    ):
        with tempfile.TemporaryDirectory() as folder:
            words = [
                "--model",
                model,
                "--cluster",
                cluster,
                "--gpus",
                str(gpus),
                "--batch",
                str(batch),
                "--seq",
                "2048",
            ]
            command = [sys.executable, "-m", "phalanx", "plan", *words, "--json", "--out", f"{folder}/plan.json"]
            seconds = median(_seconds(command) for _ in range(5))
        yield Result(f"plan of {model} on {gpus:,} GPUs", f"{seconds:.2f} s", f"{limit:g} s", seconds <= limit)


def bench_serving() -> Iterator[Result]:
    """Time the queue of 100,000 requests, and the search over 8 GPUs with the queue simulated, start-up included."""
    from benchmarks.linear_price import LinearPrice
    from phalanx.schedule.generation import BatchingPolicy
    from phalanx.serving.simulation.deployment import Deployment, WorkerSpec
    from phalanx.serving.simulation.requests import gamma_requests, with_arrivals
    from phalanx.serving.simulation.simulation import simulate

    requests = with_arrivals(gamma_requests(100_000, 4000, 500, 0.5, 32_000, 1), 5.0, 1)
    policy = BatchingPolicy(slots=128, chunk=8192, reserve=False)
    worker = WorkerSpec(LinearPrice(5e-3, 2e-5, 1e-9, 2e-5, 2e-8), policy, 40_000)
    start = time.perf_counter()
    simulate(Deployment((worker,)), requests)
    seconds = time.perf_counter() - start
    yield Result("queue of 100,000 requests", f"{seconds:.2f} s", "20 s", seconds <= 20)
    for model, cluster in (("llama3-70b", "dgx-h100"), ("deepseek-v3", "dgx-h200")):
        with tempfile.TemporaryDirectory() as folder:
            words = ["--model", model, "--cluster", cluster, "--gpus", "8", "--input", "4000", "--output", "500"]
            words += ["--ttft", "2s", "--tpot", "50ms", "--out", f"{folder}/serving.json", "--json"]
            command = [sys.executable, "-m", "phalanx", "serve", "plan", *words]
            seconds = median(_seconds(command) for _ in range(3))
        yield Result(f"serve plan of {model} on 8 GPUs", f"{seconds:.2f} s", "10 s", seconds <= 10)


def bench_mesh() -> Iterator[Result]:
    """Time the coordinates of a rank and its groups over every axis, in a world of 100,000 ranks."""
    from phalanx.spec.strategy.mesh import mesh
    from phalanx.spec.strategy.spec import Strategy

    times = []
    for _ in range(5):
        start = time.perf_counter()
        grid = mesh(Strategy(pp=10, dp=1250, zero=3, shard=125, tp=8, ep=50))
        assert grid.world == 100_000
        for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "edp", "etp", "embed", "world"):
            grid.group_of(99_999, axis)
        grid.coordinates(99_999)
        times.append(time.perf_counter() - start)
    yield Result("mesh of 100,000 ranks", f"{median(times) * 1e3:.1f} ms", "0.5 s", median(times) <= 0.5)


def bench_ddp() -> Iterator[Result]:
    """Compare our engine with DistributedDataParallel and one process, for the quickstart's model on 2 ranks."""
    results = _run_ranks("ddp", 2)
    ours, theirs, alone = (results[key]["tokens_per_s"] for key in ("phalanx", "ddp", "one process"))
    for name, values in results.items():
        cpu = median(values["cpu_s_per_step"])
        shown = f"{median(values['tokens_per_s']):,.0f} tokens/s (best {max(values['tokens_per_s']):,.0f})"
        yield Result(f"  {name}", f"{shown}, {cpu:.3f} CPU-s per step, summed over ranks")
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    shown = f"{median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})"
    yield Result("phalanx / DistributedDataParallel, 2 ranks", shown, "at least 0.97", median(ratios) >= 0.97)
    shares = sorted(a / (2 * b) for a, b in zip(ours, alone, strict=True))
    shown = f"{median(shares):.3f} (rounds {shares[0]:.3f} to {shares[-1]:.3f})"
    yield Result("phalanx, 2 ranks / twice one process", shown)


def bench_zero() -> Iterator[Result]:
    """Compare our ZeRO stages with DistributedDataParallel and fully_shard, over Gloo and over shared memory."""
    for ranks in (2, 4):
        results = _run_ranks("zero", ranks)
        for name, values in results.items():
            speed = f"{median(values['tokens_per_s']):,.0f} tokens/s (best {max(values['tokens_per_s']):,.0f})"
            yield Result(
                f"  {ranks} ranks, {name}", f"{speed}, {median(values['cpu_s_per_step']):.2f} CPU-s per step"
            )
        pairs = [
            ("zero=0, native", "DistributedDataParallel", 0.97, 0.0),
            ("zero=2, native", "fully_shard, keep", 1.0, 0.0),
            ("zero=3, native", "fully_shard, reshard", 1.0, 0.0),
            ("zero=2, shm", "fully_shard, keep", 1.1 if ranks == 2 else 1.15, 0.9),
            ("zero=3, shm", "fully_shard, reshard", 1.1 if ranks == 2 else 1.15, 0.9),
        ]
        for ours, theirs, least, most in pairs:
            both = results[ours], results[theirs]
            ratios = sorted(a / b for a, b in zip(*(b["tokens_per_s"] for b in both), strict=True))
            shown = f"{median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})"
            yield Result(f"{ours} / {theirs}, {ranks} ranks", shown, f"at least {least}", median(ratios) >= least)
            if most:
                share = median(both[0]["cpu_s_per_step"]) / median(both[1]["cpu_s_per_step"])
                yield Result(f"  CPU-seconds of the same, {ranks} ranks", f"{share:.3f}", f"{most}", share <= most)
        if ranks == 2:
            alone = results["one process"]["tokens_per_s"]
            shares = sorted(a / (2 * b) for a, b in zip(results["zero=0, shm"]["tokens_per_s"], alone, strict=True))
            shown = f"{median(shares):.3f} (rounds {shares[0]:.3f} to {shares[-1]:.3f})"
            yield Result("zero=0, shm / twice one process", shown, "at least 0.95", median(shares) >= 0.95)


def bench_tensor() -> Iterator[Result]:
    """Compare tensor and sequence parallelism, over Gloo and shared memory, with DTensor's parallelize_module."""
    for ranks in (2, 4):
        results = _run_ranks("tensor", ranks)
        for name, values in results.items():
            speed, cpu = values["tokens_per_s"], median(values["cpu_s_per_step"])
            shown = f"{median(speed):,.0f} tokens/s (best {max(speed):,.0f}), {cpu:.2f} CPU-s per step"
            yield Result(f"  {ranks} ranks, {name}", shown)
        for name, theirs, least, most in (
            ("tp, native", "parallelize_module", 0.0, 0.0),
            ("tp, shm", "parallelize_module", 1.3, 0.8),
            ("sp, native", "parallelize_module, sp", 0.0, 0.0),
            ("sp, shm", "parallelize_module, sp", 1.4, 0.0),
        ):
            both = results[name], results[theirs]
            ratios = sorted(a / b for a, b in zip(*(b["tokens_per_s"] for b in both), strict=True))
            shown = f"{median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})"
            limit = f"at least {least}" if least else ""
            yield Result(f"{name} / {theirs}, {ranks} ranks", shown, limit, median(ratios) >= least)
            share = median(both[0]["cpu_s_per_step"]) / median(both[1]["cpu_s_per_step"])
            limit = f"{most}" if most else ""
            yield Result(
                f"  CPU-seconds of the same, {ranks} ranks", f"{share:.3f}", limit, not most or share <= most
            )


def bench_pipeline() -> Iterator[Result]:
    """Compare our pipeline executor with torch.distributed.pipelining: same model, partition and schedule."""
    from benchmarks.pipeline import CASES, MICRO_BATCHES

    for ranks in (2, 4):
        results = _run_ranks("pipeline", ranks)
        alone = ranks <= (os.cpu_count() or 1)  # every rank has a core of its own
        for case in CASES:
            name = f"{case}, {ranks} ranks, M = {MICRO_BATCHES}"
            both = results[f"{case}, ours"], results[f"{case}, torch"]
            for who, figures in zip(("ours", "torch"), both, strict=True):
                speed, cpu = figures["tokens_per_s"], median(figures["cpu_s_per_step"])
                shown = f"{median(speed):,.0f} tokens/s (best {max(speed):,.0f}), {cpu:.2f} CPU-s per step"
                yield Result(f"  {name}, {who}", shown)
            ratios = sorted(a / b for a, b in zip(*(b["tokens_per_s"] for b in both), strict=True))
            shown = f"{median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})"
            yield Result(f"phalanx / torch's pipelining, {name}", shown, "at least 1.05", median(ratios) >= 1.05)
            shares = sorted(a / b for a, b in zip(*(b["cpu_s_per_step"] for b in both), strict=True))
            shown = f"{median(shares):.3f} (rounds {shares[0]:.3f} to {shares[-1]:.3f})"
            yield Result(f"  CPU-seconds of the same, {name}", shown)
            own, theirs = results[f"{case}, peak"]
            shown = f"{own:,} of {theirs:,} B, {own / theirs:.3f}"
            yield Result(f"  peak memory of the fullest rank, {name}", shown, "no more", own <= theirs)
            share = results[f"{case}, idle"]
            causes = (
                f"{share['expected']:.1%} by the schedule, {share['uneven']:.1%} with passes as long as they were, "
                f"{share['messages']:.1%} with the time of messages, {share['between']:.1%} lies between passes"
            )
            shown = f"{share['measured']:.1%}; {causes}"
            kept = not alone or abs(share["measured"] - share["expected"]) <= 0.05
            yield Result(f"  idle share of ours, {name}", shown, "5 points from the schedule's" * alone, kept)


def bench_experts() -> Iterator[Result]:
    """Compare experts over 4 ranks with replicated experts, and grouped products with a dense one."""
    reply = _run_ranks("experts", 4)
    for name, pairs in reply["products"].items():
        ratios = sorted(one / other for one, other in pairs)
        shown = f"{median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})"
        yield Result(f"8 experts' {name} / one product", shown, "1.2", median(ratios) <= 1.2)
    results = reply["steps"]
    for name, values in results.items():
        speed, cpu = values["tokens_per_s"], median(values["cpu_s_per_step"])
        yield Result(f"  {name}", f"{median(speed):,.0f} tokens/s (best {max(speed):,.0f}), {cpu:.2f} CPU-s per step")
    for transport in ("native", "shm"):
        both = results[f"ep=4, {transport}"], results[f"replicated, {transport}"]
        ratios = sorted(a / b for a, b in zip(*(b["tokens_per_s"] for b in both), strict=True))
        shown = f"{median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})"
        yield Result(f"ep=4 / replicated, {transport}", shown, "at least 1", median(ratios) >= 1)
        share = median(both[0]["cpu_s_per_step"]) / median(both[1]["cpu_s_per_step"])
        yield Result("  CPU-seconds of the same", f"{share:.3f}")


def bench_context() -> Iterator[Result]:
    """Compare ring attention, Ulysses and both over 4 ranks with one process, on one sequence of 16 k tokens."""
    results = _run_ranks("context", 4)
    alone = results["one process"]
    for name, values in results.items():
        cpu, held = median(values["cpu_s_per_step"]), max(values["activation_bytes"])
        yield Result(f"  {name}", f"{cpu:.2f} CPU-s per step, summed over ranks; activations {held / 2**20:.1f} MiB")
        if name == "one process":
            continue
        ratios = sorted(a / b for a, b in zip(values["cpu_s_per_step"], alone["cpu_s_per_step"], strict=True))
        shown = f"{median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f})"
        share = held / alone["activation_bytes"][0]
        ring = name == "ring"
        kept = not ring or median(ratios) <= 1.25
        yield Result(f"{name}, 4 ranks: CPU-seconds / one process's", shown, "1.25" * ring, kept)
        kept = not ring or abs(4 * share - 1) <= 0.05
        yield Result(
            f"{name}, 4 ranks: activations of a rank / one process's", f"{share:.4f}", "1/4, 5%" * ring, kept
        )


def bench_bound() -> Iterator[Result]:
    """Compare our stages 0 and 1 with DistributedDataParallel, in a step that is mostly communication."""
    theirs = "DistributedDataParallel"
    results = _run_ranks("bound", 2)
    best = 0.0
    for name, values in results.items():
        speed, cpu = values["tokens_per_s"], median(values["cpu_s_per_step"])
        yield Result(f"  {name}", f"{median(speed):,.0f} tokens/s (best {max(speed):,.0f}), {cpu:.2f} CPU-s per step")
        if name != theirs:
            ratios = sorted(a / b for a, b in zip(speed, results[theirs]["tokens_per_s"], strict=True))
            best = max(best, median(ratios))
            share = cpu / median(results[theirs]["cpu_s_per_step"])
            shown = f"{median(ratios):.2f} (rounds {ratios[0]:.2f} to {ratios[-1]:.2f}), CPU-seconds {share:.2f}"
            yield Result(f"{name} / {theirs}, bound by communication", shown)
    yield Result(f"the better of ours / {theirs}", f"{best:.2f}", "at least 1.5", best >= 1.5)


def bench_peak() -> Iterator[Result]:
    """Compare peak live tensor bytes of a warm step of ours and of torch's, each in processes of its own."""
    from benchmarks.peak import PAIRS

    def peak(program: str) -> int:
        return int(_run_ranks("peak", 2, program=program))

    for ours, theirs in PAIRS:
        most = peak(theirs)
        for transport in ("shm", "native"):
            own = peak(f"{ours}, {transport}")
            shown = f"{own:,} of {most:,} B, {own / most:.3f}"
            yield Result(f"peak memory, {ours}, {transport} / {theirs}", shown, "no more", own <= most)


def bench_saving() -> Iterator[Result]:
    """Measure what a checkpoint costs when it is written during the next steps, and when they wait for it."""
    from benchmarks.saving import STEPS

    saved = _run_ranks("saving", 2)
    results, mib = saved["figures"], saved["bytes"] / 2**20
    for name in ("beside", "waited for"):
        both = results[name], results["nothing"]
        ratios = sorted(b / a for a, b in zip(*(f["tokens_per_s"] for f in both), strict=True))
        share = median(both[0]["cpu_s_per_step"]) / median(both[1]["cpu_s_per_step"])
        shown = f"{median(ratios):.3f} (rounds {ratios[0]:.3f} to {ratios[-1]:.3f}), CPU-seconds {share:.3f}"
        yield Result(f"{STEPS} steps, {mib:.0f} MiB saved {name} / nothing saved, seconds", shown)


def bench_memory() -> Iterator[Result]:
    """Compare the peak memory of real steps as predicted, as verified without content, and as measured."""
    from benchmarks.memory import CASES, PRECISIONS, job_of, model, strategy_of
    from phalanx.cost.step.expand import expand
    from phalanx.observation.trainer.step import record_step
    from phalanx.schedule.layout import Layout

    precisions = {p.compute: p for p in PRECISIONS}
    for ranks in CASES:
        for line, compute, measured in _run_ranks("memory", ranks):
            job, strategy = job_of(precisions[compute]), strategy_of(line)
            predicted = expand(Layout(model(), job, strategy).stage_view()).peak_bytes
            verified = record_step(model(), job, strategy, 0).memory.peak
            off = [x / measured - 1 for x in (predicted, verified)]
            shown = f"{predicted:,} / {verified:,} / {measured:,} B ({off[0]:+.3%}, {off[1]:+.3%})"
            kept = max(map(abs, off)) <= 0.03
            yield Result(f"peak of {line}, {compute}: predicted / verified / measured", shown, "3 %", kept)


def bench_verify() -> Iterator[Result]:
    """Time the verification of large worlds on this machine, start-up included."""
    job = "examples/llama3_8b.toml"
    gpt3 = ["--set", "model.preset=gpt3-175b", "--set", "job.seq=2048", "--set", "job.global_batch=8192"]
    for name, arguments, limit in (
        ("llama3-8b, dp=64,zero=3", [job], 10),
        ("gpt3-175b, dp=1024,zero=3,shard=256", [job, *gpt3, "--strategy", "dp=1024,zero=3,shard=256"], 60),
    ):
        times, used = [], 0
        for _ in range(3):
            start = time.perf_counter()
            process = subprocess.Popen(
                [sys.executable, "-m", "phalanx", "verify", *arguments],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            times.append(time.perf_counter() - start)
            used = max(used, usage.ru_maxrss)
        shown = f"{median(times):.1f} s ({min(times):.1f} to {max(times):.1f}), {used / 2**10:.0f} MiB of memory"
        yield Result(f"verify {name}", shown, f"{limit} s", median(times) <= limit)


def bench_collectives() -> Iterator[Result]:
    """Compare shared memory with Gloo and with memory bandwidth, and the choice of `auto` with the best."""
    from benchmarks.collectives import LARGE, ORDINARY, SIZES
    from phalanx.measure.collectives import OPS
    from phalanx.measure.this_machine import local_cluster
    from phalanx.planning.auto.transport import choose
    from phalanx.spec.cluster.collective_choice import pick

    for ranks, asked in ((2, 5.0), (4, 3.0)):
        chosen = choose(local_cluster(ranks, "float32", 1).collectives)
        results = _run_ranks("collectives", ranks)
        for op in OPS:
            for size in SIZES:
                times = results[f"{op} {size}"]
                name = f"{op}, {size >> 10} KiB, {ranks} ranks"
                for way, least in (("shm", asked), (ORDINARY, 1.2 if ranks == 2 else 0.0)):
                    ratios = sorted(a / b for a, b in zip(times["native"], times[way], strict=True))
                    ratio = median(times["native"]) / median(times[way])
                    shown = f"{ratio:.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}), {median(times[way]) * 1e6:.0f} µs"
                    limit = f"at least {least}" if least else ""
                    yield Result(f"Gloo / {way}: {name}", shown, limit, not least or ratio >= least)
                choice = pick(chosen, op, ranks, size)
                way = choice.way
                best = min((w for w in times if w != ORDINARY), key=lambda w: median(times[w]))
                share = median(times[best]) / median(times[way])
                yield Result(f"auto ({way}) / best ({best}): {name}", f"{share:.2f}", "at least 0.95", share >= 0.95)
        if ranks == 2:
            limit_s = 4 * LARGE / median(results["copy"])
            over = median(results[f"all_reduce {LARGE}"]["shm"]) / limit_s
            shown = f"{over:.2f} x {limit_s * 1e3:.1f} ms, at {median(results['copy']) / 1e9:.0f} GB/s of copying"
            yield Result("shm all_reduce of 64 MiB, 2 ranks, over 4 S bytes", shown, "2.5", over <= 2.5)


def bench_restart() -> Iterator[Result]:
    """Time a second start up to its first step, when machine and corpus are cached, and check the prediction."""
    folder = Path(tempfile.mkdtemp())
    try:
        job = str(ROOT / "examples" / "quickstart.toml")
        short = ["--set", "train.steps=80", "--set", "train.eval_every=0", "--set", "train.sample_tokens=0"]
        command = [sys.executable, "-m", "phalanx", "train", job, *short, "--json"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        plan = folder / "runs" / "quickstart" / "metrics.jsonl"
        old = plan.stat().st_ino
        while not plan.exists() or plan.stat().st_ino == old or not plan.read_text():
            time.sleep(0.02)
        first = time.perf_counter() - start
        result = json.loads(process.communicate()[0])
    finally:
        shutil.rmtree(folder)
    yield Result("second start to the end of the first step", f"{first:.1f} s", "10 s", first <= 10)
    limits = {"step time (median)": 0.15, "peak memory": 0.03}
    for row in result["comparison"]:
        limit = limits.get(row["name"], 0.0)
        shown = f"predicted {row['predicted']:.6g}, measured {row['measured']:.6g}, error {row['error']:+.1%}"
        yield Result(f"quickstart {row['name']}", shown, f"{limit:.0%}", abs(row["error"]) <= limit)


def bench_cold() -> Iterator[Result]:
    """Time `make run` from a fresh clone with empty caches, and check that the model learns the corpus."""
    folder = Path(tempfile.mkdtemp())
    environment = os.environ | {"PHALANX_CACHE": str(folder / "cache")}
    try:
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "clone")], check=True)
        start = time.perf_counter()
        run = {"cwd": folder / "clone", "env": environment, "check": True, "capture_output": True, "text": True}
        out = subprocess.run(["make", "run"], **run).stdout  # type: ignore[call-overload]
        seconds = time.perf_counter() - start
        yield Result("make run from a cold clone", f"{seconds:.0f} s", "360 s", seconds <= 360)
        line = next(text for text in out.splitlines() if text.startswith("validation loss"))
        words = line.replace(";", "").split()
        loss, entropy = float(words[2]), float(words[words.index("tokens") + 1])
        better = entropy - loss
        yield Result("validation loss below unigram entropy", f"{better:.3f} nat", "at least 1.0", better >= 1.0)
    finally:
        shutil.rmtree(folder)


def bench_suite() -> Iterator[Result]:
    """Time the whole test suite as `make test` runs it, without its coverage."""
    seconds = _seconds([sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"])
    yield Result("the whole test suite", f"{seconds:.0f} s", "480 s", seconds <= 480)


def bench_scaling() -> Iterator[Result]:
    """Measure strong and weak scaling of the quickstart's model, and show what the time is lost to."""
    from benchmarks.scaling import RANKS
    from phalanx.measure.this_machine import local_cluster

    local_cluster(max(RANKS), "float32", 1, anew=True)  # what is cached may be of a busy hour
    for ranks in RANKS:
        for name, results in _run_ranks("scaling", ranks, most=max(RANKS)).items():
            m = {key: median(v) for key, v in results.items() if isinstance(v, list)}
            share = 1 if name == "weak" else ranks  # ranks share the work of one process
            ratios = sorted(a / share / b for a, b in zip(results["alone"], results["step"], strict=True))
            predicted = results["predicted alone"] / share / results["predicted"]
            slower = m["compute"] - m["alone"] / share
            parts = {"slower compute": slower} | {key: m[key] for key in ("imbalance", "bubble", "exposed")}
            lost = ", ".join(f"{key} {value / m['step']:+.1%}" for key, value in parts.items())
            shown = (
                f"efficiency {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), predicted {predicted:.2f}"
            )
            shown += f"; step {m['step'] * 1e3:.0f} ms, predicted {results['predicted'] * 1e3:.0f}; of it {lost}"
            yield Result(f"{name} scaling, {ranks} rank{'s' * (ranks > 1)}", shown)


def bench_lab() -> Iterator[Result]:
    """Measure collectives and training on hosts with links of 1 Gbit/s; needs root and iproute2."""
    from benchmarks.shaped import bench_lab as bench

    yield from bench()


def bench_truth() -> Iterator[Result]:
    """Compare predicted with measured steps of strategies that differ, on 1, 2 and 4 ranks."""
    from benchmarks.predicted import truth
    from phalanx.measure.this_machine import local_cluster

    # What is cached may be of a busy hour.
    yield from truth(_run_ranks, lambda: local_cluster(4, "float32", 1, anew=True))


def bench_slowed() -> Iterator[Result]:
    """Compare what a slowed rank costs with its simulation."""
    from benchmarks.predicted import slowed
    from phalanx.measure.this_machine import local_cluster

    # What is cached may be of a busy hour.
    yield from slowed(_run_ranks, lambda: local_cluster(2, "float32", 1, anew=True))


def bench_local() -> Iterator[Result]:
    """Measure replicas that step alone on hosts with links of 0.1, 1 and 10 Gbit/s; needs root and iproute2."""
    from benchmarks.shaped import bench_local as bench

    yield from bench()


def bench_disturbed() -> Iterator[Result]:
    """Slow a rank, a link and storage, and run a second job, on two hosts; needs root and iproute2."""
    from benchmarks.disturbed import bench

    yield from bench()


def bench_learning() -> Iterator[Result]:
    """Train a small job between two hosts under strategies that send less, and compare losses."""
    from benchmarks.learning import bench

    yield from bench()


def bench_mixers() -> Iterator[Result]:
    """Compare recurrences and windows with transformers' torch implementations, on one thread."""
    from benchmarks.mixers import bench

    yield from bench()


BENCHES: dict[str, Callable[[], Iterator[Result]]] = {
    "help": bench_help,
    "mesh": bench_mesh,
    "plan": bench_plan,
    "ui": bench_ui,
    "serving": bench_serving,
    "ddp": bench_ddp,
    "zero": bench_zero,
    "tensor": bench_tensor,
    "pipeline": bench_pipeline,
    "experts": bench_experts,
    "context": bench_context,
    "mixers": bench_mixers,
    "bound": bench_bound,
    "peak": bench_peak,
    "saving": bench_saving,
    "memory": bench_memory,
    "verify": bench_verify,
    "collectives": bench_collectives,
    "scaling": bench_scaling,
    "truth": bench_truth,
    "slowed": bench_slowed,
    "lab": bench_lab,
    "local": bench_local,
    "disturbed": bench_disturbed,
    "learning": bench_learning,
    "restart": bench_restart,
    "cold": bench_cold,
    "suite": bench_suite,
}


def main() -> None:
    """Run the named benchmarks, or all, and exit with 1 if a limit is not kept."""
    names = sys.argv[1:] or list(BENCHES)
    unknown = [n for n in names if n not in BENCHES]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; known: {', '.join(BENCHES)}")
    table = Table("", "measured", "limit", "kept")
    failed = False
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        for result in BENCHES[name]():
            failed |= not result.kept
            kept = ("yes" if result.kept else "NO") * bool(result.limit)
            table.add_row(result.name, result.shown, result.limit, kept)
            print("   ", result.name, "|", result.shown, "|", result.limit, kept, file=sys.stderr, flush=True)
    Console(width=160).print(table)
    sys.exit(failed)


if __name__ == "__main__":
    main()
