"""The examination of this machine's GPUs: part by part, each in a process with a time limit.

Each part's result is a file in the folder, written once the part is complete, so that a second call continues where
the first stopped. Without a GPU, only steps on a fake one are examined. `gpu.json` holds all results, `gpu.md` is the
report, and `cluster.toml` the measured cluster, for `--cluster` and job files.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.sizes import SIZES, TINY, products_of
from phalanx.answers.machine.inventory import look_around
from phalanx.answers.machine.this_machine import Announce
from phalanx.cost.step.predict import predict
from phalanx.runtime.process.environment import SHARE_GPUS
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files.cluster_toml import to_toml
from phalanx.spec.files.job_file import build
from phalanx.spec.files.plan import write_json
from phalanx.spec.strategy.spec import Strategy

VERSION = 1
_ROOT = Path(__file__).parents[2]
"""The checkout, whose `benchmarks` the parts import."""
_EXCEPTION = re.compile(r"[\w.]+(Error|Exception|Unsupported|Failure|Exit\w*): ")
"""The beginning of an exception's line; PyTorch may append advice on further debugging."""
_PARITY_JOB = """[model]
family = "llama"
vocab = 512
hidden = 64
layers = 4
heads = 4
ffn = 128
max_seq = 64
{experts}
[cluster]
preset = "local"
ranks = {ranks}

[job]
global_batch = 8
seq = 64

[train]
data = "austen"
steps = 4
"""
_EXPERTS = "[model.experts]\ncount = 4\ntop_k = 2\nffn = 32\n"
_ALONE = ("dp=1", "dp=1,recompute=full")
_OF_TWO = ("dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3", "dp=2,compression=int8", "tp=2", "tp=2,sp=1", "cp=2")
WHOLE_S = 600
"""Seconds of a call with one GPU, and twice that with more. Parts that have not begun by then wait for the next
call."""
_LEAST_S = 15
"""With less than these seconds left, no part is started."""
_TWO = (*_OF_TWO, "cp=2,ulysses=2", "pp=2", "pp=2,schedule=zb-v")
_SHARED = ("dp=2,zero=3", "tp=2,sp=1", "cp=2", "pp=2,schedule=zb-v")
"""Strategies of two ranks that share one GPU and send through the host: a few, since two GPUs examine more."""

_NATIVE = ("--set", "train.transport=native")
"""NCCL, or Gloo where ranks share a GPU: `auto` measures all transports first, for longer than a part may take."""
_EIGHT_BITS = ("float8", "float8-compiled", "float8-row", "float8-row-compiled")


@dataclass(frozen=True)
class Part:
    """A part of the examination: the command `words` runs for at most `limit_s` seconds. It writes its result to the
    file that replaces the word `{out}`, or without such a word prints it as JSON."""

    name: str
    words: tuple[str, ...]
    limit_s: float
    on_gpu: bool = True


def _phalanx(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "phalanx", *words)


def _module(name: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"benchmarks.gpu.{name}", *words, "{out}")


def parts(folder: Path, gpus: int) -> Iterator[Part]:
    """Yield the parts for a machine with `gpus` GPUs."""
    fake = Part("fake", _module("fake"), 300, on_gpu=False)
    if not gpus:
        yield fake
        return
    yield Part("functions", _module("functions"), 60)
    yield Part("measure", _phalanx("measure", "--quick", "--dtype", "bfloat16", "--json"), 150)
    for way in ("ours", "plain", "ours-compiled", "compiled", "fsdp"):
        yield Part(f"steps {way}", _module("steps", way), 120)
    yield Part("generation", _module("generation"), 120)
    for kind in ("dense", "experts"):
        for line in _ALONE + (_TWO if gpus > 1 else _SHARED) + ("dp=2,ep=2",) * (kind == "experts"):
            job = folder / f"parity-{kind}-{2 if '2' in line else 1}.toml"
            words = _phalanx("parity", str(job), "--strategy", line, "--steps", "4", "--json", *_NATIVE)
            yield Part(f"parity {kind} {line}", words, 60)
    for kind in _EIGHT_BITS:
        yield Part(f"steps ours-{kind}", _module("steps", f"ours-{kind}"), 120)
    yield fake


def _write_jobs(folder: Path) -> None:
    for kind, experts in (("dense", ""), ("experts", _EXPERTS)):
        for ranks in (1, 2):
            text = _PARITY_JOB.format(experts=experts, ranks=ranks)
            (folder / f"parity-{kind}-{ranks}.toml").write_text(text)


def gpus_here() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def examine(folder: Path, announce: Announce) -> dict[str, Any]:
    """Run every part that has no result yet; return the content of gpu.json. Raises InputError."""
    gpus = gpus_here()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_jobs(folder)
    except OSError as error:
        raise InputError(
            "--out", str(folder), f"cannot be written ({error.strerror})", "name another folder"
        ) from None
    if not gpus:
        announce("no GPU that torch can use: the step on a fake GPU is examined, and nothing else")
    results: dict[str, Any] = {}
    ends = time.monotonic() + WHOLE_S * (1 + (gpus > 1))
    for part in parts(folder, gpus):
        if part.on_gpu and not gpus:
            continue
        results[part.name] = _result(part, folder, announce, ends - time.monotonic())
        write_json(folder / "gpu.json", _content(gpus, results))
    content = _content(gpus, results)
    (folder / "gpu.md").write_text(as_text(content))
    if cluster := _cluster(content):
        (folder / "cluster.toml").write_text(to_toml(cluster, f"{cluster.name}, as measured"))
    return content


def _result(part: Part, folder: Path, announce: Announce, left_s: float) -> dict[str, Any]:
    """Return the result of a part, from this call or an earlier one. `left_s`: seconds until the call must end."""
    complete = folder / f"{part.name.replace(' ', '-').replace(',', '+')}.part.json"
    if complete.exists():
        announce(f"{part.name}: there already")
        return dict(read_json(complete, "part"))
    if left_s < _LEAST_S < part.limit_s:
        announce(f"{part.name}: left for the next call")
        return {"state": "left for the next call", "result": None, "error": "the time is over", "seconds": 0.0}
    limit_s = min(part.limit_s, left_s)
    announce(f"{part.name}: up to {limit_s:.0f} s")
    out = folder / f"{complete.stem}.out.json"
    begin = time.monotonic()
    words = [str(out) if word == "{out}" else word for word in part.words]
    result: dict[str, Any] = {"state": "done", "result": None, "error": None}
    try:
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        env = os.environ | {SHARE_GPUS: "1", "PYTHONPATH": path}
        ran = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=limit_s, check=False)
        if ran.returncode:
            result |= {"state": "failed", "error": _reason(ran.stderr.strip() or ran.stdout.strip())}
        text = out.read_text() if str(out) in words and out.exists() else ran.stdout
    except subprocess.TimeoutExpired:
        result |= {"state": "over its time limit", "error": f"{limit_s:.0f} s"}
        text = out.read_text() if out.exists() else ""
    try:
        result["result"] = json.loads(text) if text.strip() else None
    except json.JSONDecodeError:
        result |= {"state": "failed", "error": result["error"] or "printed no JSON"}
    out.unlink(missing_ok=True)
    result["seconds"] = time.monotonic() - begin
    if result["state"] == "done":
        write_json(complete, result)  # the others run again in the next call
    return result


def _reason(text: str) -> str:
    """Return the reason of a failure from the output of a process: its exception's line, or else its last line."""
    lines = text.splitlines() or ["no message"]
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1])


def _content(gpus: int, results: dict[str, Any]) -> dict[str, Any]:
    machine = [asdict(looked) for looked in look_around().checks]
    cluster = (results.get("measure") or {}).get("result")
    return {"version": VERSION, "gpus": gpus, "machine": machine, "parts": results, "cluster": cluster}


def _cluster(content: dict[str, Any]) -> ClusterSpec | None:
    """Return the measured cluster, or None where that part did not finish."""
    return build(ClusterSpec, content["cluster"], "cluster") if content.get("cluster") else None


def failed(content: dict[str, Any]) -> Sequence[str]:
    """Return a line for every part that did not succeed, or found something wrong."""
    lines = [f"{name}: {p['state']} ({p['error']})" for name, p in content["parts"].items() if p["state"] != "done"]
    for row in _fake_steps(content):
        where = f"fake {row['family']} {row['strategy']} {row['precision']}"
        lines += [f"{where}: {line}" for line in row["failed"]]
    for row in (content["parts"].get("functions") or {}).get("result") or ():
        if not row["error"] <= row["bound"]:
            lines.append(f"{row['what']} in {row['dtype']}: off by {row['error']:.1e}, more than {row['bound']:.0e}")
    return lines


def _fake_steps(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the steps on a fake GPU."""
    part = content["parts"].get("fake") or {}
    return list(part.get("result") or ())


def _examined(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a row of the table of steps on a fake GPU for every family and precision."""
    kinds = [(row["family"], row["precision"]) for row in rows]
    for kind in dict.fromkeys(kinds):
        steps = [row for row, its_kind in zip(rows, kinds, strict=True) if its_kind == kind]
        good, waits = sum(not row["failed"] for row in steps), max(row["waits"] for row in steps)
        yield f"| {kind[0]} | {kind[1]} | {len(steps)} | {good} | {waits} |"


def as_text(content: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    lines = ["# GPUs of this machine", "", "| what | state |", "|---|---|"]
    lines += [f"| {row['what']} | {row['state']} |" for row in content["machine"]]
    lines += ["", "## Parts", "", "| part | state | seconds |", "|---|---|---|"]
    lines += [f"| {name} | {p['state']} | {p['seconds']:.1f} |" for name, p in content["parts"].items()]
    rows = _fake_steps(content)
    if rows:
        good = sum(not row["failed"] for row in rows)
        dense = max((row["waits"] for row in rows if row["family"] != "mixtral"), default=0)
        lines += [
            "",
            f"On a fake GPU {good} of {len(rows)} steps keep its rules; the host waits at most {dense} ",
        ]
        lines[-1] += "times in a step of a dense model."
        lines += ["", "| family | precision | steps | keep the rules | waits at most |", "|---|---|---|---|---|"]
        lines += _examined(rows)
    functions = (content["parts"].get("functions") or {}).get("result") or ()
    if functions:
        good = sum(row["error"] <= row["bound"] for row in functions)
        lines += ["", f"Of {len(functions)} operations on the device, {good} are those of the CPU in fp64."]
    steps = [row for name, p in content["parts"].items() if name.startswith("steps") for row in p["result"] or ()]
    if steps:
        cluster = _cluster(content)
        lines += [
            "",
            "## Steps of one GPU, bf16; blocks' products in 8 bits where a way says so. MFU is of bf16's peak",
            "",
            "| size | way | tokens/s | TFLOP/s | MFU | step ms | predicted ms | peak GiB | predicted GiB |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|", *(_step_row(row, cluster) for row in steps)]
    texts = (content["parts"].get("generation") or {}).get("result") or ()
    if texts:
        lines += [
            "",
            "## Generation on one GPU, bf16",
            "",
            "| size | prompts | first token ms | token ms | tokens/s |",
        ]
        lines += ["|---|---|---|---|---|", *map(_text_row, texts)]
    problems = failed(content)
    if problems:
        lines += ["", "## What failed", "", *(f"- {line}" for line in problems)]
    return "\n".join(lines) + "\n"


def _step_row(row: dict[str, Any], cluster: ClusterSpec | None) -> str:
    """Return a row of the table of steps. Our step is predicted on the measured cluster; MFU is relative to its
    peak."""
    if "left_out" in row:
        return f"| {row['size']} | {row['way']} | {row['left_out']} |" + " |" * 6
    own = row["way"].startswith("ours") and not row["way"].endswith("compiled")
    peak = f"{row['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in row else ""
    predicted = f"{row['predicted_peak_bytes'] / 2**30:.2f}" if own else ""
    flops = row["model_flops_per_s"]
    most = cluster.device.dense_flops_per_s.get("bfloat16") if cluster is not None else None
    mfu = f"{flops / most:.1%}" if most else ""
    cells = [f"{row['tokens_per_s']:,.0f}", f"{flops / 1e12:.1f}", mfu, f"{row['step_s'] * 1e3:.1f}"]
    cells += [predicted_ms(row["size"], cluster, row["way"]) if own and cluster is not None else "", peak, predicted]
    return f"| {row['size']} | {row['way']} | {' | '.join(cells)} |"


def predicted_ms(name: str, cluster: ClusterSpec, way: str = "ours") -> str:
    """Return the predicted milliseconds of our step at a size on a measured cluster; "" if the cluster has no
    rates."""
    (size,) = (size for size in (*SIZES, TINY) if size.name == name)
    try:
        one = Strategy(micro_batch=size.micro_batch)
        return f"{predict(size.model, cluster, size.of(products_of(way)), one).step_time_s * 1e3:.1f}"
    except InputError:
        return ""


def _text_row(row: dict[str, Any]) -> str:
    if "left_out" in row:
        return f"| {row['size']} | {row['left_out']} | | | |"
    first, each = row["first_token_s"] * 1e3, row["token_s"] * 1e3
    return f"| {row['size']} | {row['prompts']} | {first:.1f} | {each:.2f} | {row['tokens_per_s']:,.0f} |"
