"""What replicas that step alone cost in learning, and what they save: a small job trained between the lab's two hosts
under each strategy, compared after as many tokens and after as many seconds."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

from benchmarks.lab import hosts as lab
from benchmarks.lab.hosts import Lab
from benchmarks.result import Result
from benchmarks.shaped import run_ranks

RATE = "100mbit"
PLAIN = "dp=2,micro_batch=8"
MEAN = ("job.outer.lr=1", "job.outer.momentum=0")
"""Local SGD: replicas go on from the mean of their parameters. The default is DiLoCo's."""
WAYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ()),
    (",compression=int4", ()),
    *((f",local={h}", outer) for h in (4, 16, 64) for outer in ((), MEAN)),
    (",local=16,compression=int4", MEAN),
)
"""What is added to plain data parallelism, and fields of the job."""
STEPS, EVERY = 384, 16
"""Steps of a run, and between evaluations."""
# The quickstart's data and optimizer, a model of 0.25 M parameters, and a constant learning rate: under a cosine the
# run that ends first would be ahead at any time.
SMALL = (
    *("model.vocab=512", "model.hidden=96", "model.layers=2", "model.heads=4", "model.ffn=256", "model.max_seq=64"),
    *("job.global_batch=16", "job.seq=64", "train.lr=8e-3", "train.min_lr_ratio=1", "train.warmup=32"),
    *(f"train.steps={STEPS}", "train.eval_batches=16", "train.sample_tokens=0", "train.save_every=0"),
)
JOB = Path(__file__).parent.parent / "examples" / "quickstart.toml"


@dataclass(frozen=True)
class Run:
    """A training: mean seconds of a step, and held-out losses by the step after which they were measured."""

    seconds: float
    losses: dict[int, float]

    def after(self, seconds: float) -> tuple[int, float]:
        """Return the last measured step within this time, and its loss."""
        steps = sorted(self.losses)
        step = steps[bisect_right(steps, seconds / self.seconds + 1e-9) - 1]
        return step, self.losses[step]


def read(file: Path, period: int) -> Run:
    """Read metrics.jsonl. The lower quartile over periods of `period` steps but the first: what else a machine runs
    only adds."""
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    seconds = [step["step_time_s"] for step in steps]
    periods = [sum(seconds[i : i + period]) for i in range(period, len(seconds), period)]
    return Run(quantiles(periods)[0] / period, {s["step"]: s["eval_loss"] for s in steps if "eval_loss" in s})


def trained(network: Lab, folder: Path, line: str, outer: Sequence[str], cluster: str) -> Run:
    """Train the job under a strategy on the lab's hosts."""
    period = int(line.partition("local=")[2].partition(",")[0] or 1)
    job = folder / "job.toml"
    job.write_text(re.sub(r'preset = "local".*', f'file = "{cluster}"', JOB.read_text()))
    fields = (*SMALL, *outer, f"train.eval_every={max(EVERY, period)}")
    words = [word for field in fields for word in ("--set", field)]
    with contextlib.chdir(folder):
        shutil.rmtree("runs", ignore_errors=True)
        code = lab.run(network, 1, ["-m", "phalanx", "train", str(job), "--strategy", line, *words])
        assert code == 0, f"{line} in the lab ended with {code}"
        return read(Path("runs/job/metrics.jsonl"), period)


def bench() -> Iterator[Result]:
    """Compare held-out losses after as many tokens, and within the time of the fastest run."""
    why = lab.unavailable()
    if why:
        yield Result("the lab", why)
        return
    runs: dict[str, Run] = {}
    with Lab(2, lab.bytes_per_s(RATE)) as network, tempfile.TemporaryDirectory() as folder:
        cluster = str(Path(folder) / "cluster.toml")
        run_ranks(network, 1, what="measure", cluster=cluster)
        for way, outer in WAYS:
            name = f"{PLAIN}{way}{', means' if outer else ''}"
            runs[name] = trained(network, Path(folder), PLAIN + way, outer, cluster)
    shortest = STEPS * min(run.seconds for run in runs.values())
    for name, run in runs.items():
        step, loss = run.after(shortest)
        shown = f"{run.losses[STEPS]:.3f} after {STEPS} steps of {run.seconds * 1e3:.0f} ms; "
        yield Result(f"held-out loss, {name}, {RATE}", shown + f"{loss:.3f} after {step}, within {shortest:.1f} s")
