"""A campaign: a number of cases from one seed, each held to the rule, and how many ended how."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from phalanx.measure import this_machine
from phalanx.spec.files.cluster_toml import to_toml
from support.fitted_cluster import laptop
from support.fuzz import configurations, evidence, files, listings, trained
from support.fuzz.commands import Case, cases
from support.fuzz.rule import Outcome, verdict
from support.in_process_cli import phalanx
from support.quick_runs import JOB, TEXT

_KEPT = ("done", "refused", "failed")


@dataclass
class Tally:
    """How many cases of each kind ended how."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    broken: list[tuple[str, Case, Outcome]] = field(default_factory=list)
    slowest: float = 0.0

    def add(self, case: Case, outcome: Outcome) -> None:
        how = verdict(case, outcome)
        self.counts[case.kind, how if how in _KEPT else "broken"] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        if how not in _KEPT:
            self.broken.append((how, case, outcome))

    def problems(self) -> str:
        """Return one case of each kind that broke the rule, with what it printed."""
        parts = []
        for how, group in self.alike():
            case, outcome = group[0]
            parts.append(
                f"== {len(group)} x {how} ({outcome.seconds:.1f} s)\n{str(case)[:4000]}\n{outcome.err[-700:]}"
            )
        return "\n\n".join(parts)

    def alike(self) -> list[tuple[str, list[tuple[Case, Outcome]]]]:
        """Group what broke the rule by how and where, most frequent first."""
        groups: dict[str, list[tuple[Case, Outcome]]] = {}
        for how, case, outcome in self.broken:
            groups.setdefault(f"{how}{_place(outcome) if how == 'traceback' else ''}", []).append((case, outcome))
        return sorted(groups.items(), key=lambda item: -len(item[1]))

    @property
    def total(self) -> int:
        return self.counts.total()

    def table(self) -> str:
        """Return the counts as a Markdown table."""
        columns = {
            "done": "exit 0",
            "refused": "refused in one line",
            "failed": "exit 1",
            "broken": "breaks the rule",
        }
        rows = [["input", "cases", *columns.values()]]
        for kind in (*sorted({kind for kind, _ in self.counts}), "total"):
            row = [
                sum(n for (k, h), n in self.counts.items() if kind in (k, "total") and h == how) for how in columns
            ]
            rows.append([kind, str(sum(row)), *map(str, row)])
        rows.insert(1, ["---"] + ["---:"] * (len(columns) + 1))
        text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
        listed = "".join(f"\n  {len(group):4} {how}" for how, group in self.alike())
        return f"{text}\n\nslowest: {self.slowest:.1f} s of CPU time{listed}"


def _place(outcome: Outcome) -> str:
    """The exception of a traceback, and the last of our own lines that it passed."""
    text = outcome.err if "Traceback" in outcome.err else outcome.out
    lines = re.findall(r'phalanx/([\w/]+\.py)", line (\d+)', text)
    ours = ":".join(lines[-1]) if lines else "?"
    return f", {text.strip().splitlines()[-1][:80]}, {ours}"


def prepared(folder: Path, quick: bool) -> Path:
    """Make a folder with the valid files that command lines name; unless `quick`, with a run and its weights."""
    folder.mkdir(parents=True)
    (folder / "cluster.toml").write_text(to_toml(laptop(4)))
    (folder / "job.toml").write_text(JOB.replace("[cluster]\nranks = 2", '[cluster]\nfile = "cluster.toml"'))
    (folder / "text.txt").write_text(TEXT)
    (folder / "schedule.csv").write_bytes(files.SCHEDULE)
    (folder / "runs.csv").write_bytes(files.RUNS)
    (folder / "nccl.txt").write_bytes(files.NCCL)
    for name, content in (
        ("topology.conf", listings.TOPOLOGY),
        ("topo.txt", listings.TOPO),
        ("free.json", files.as_json(listings.FREE)),
        ("jobs.csv", listings.JOBS),
        ("requests.csv", listings.REQUESTS),
        ("served.csv", listings.SERVED),
        ("observed.json", files.as_json(listings.observation())),
        ("serving.json", files.as_json(listings.serving_plan()[0])),
        ("program.py", listings.PROGRAM),
        ("run.sh", configurations.SCRIPT),
        ("serve.sh", configurations.SERVED[0]),
        ("fsdp.yaml", configurations.YAML),
        ("run.log", evidence.LOG),
        ("nccl.log", evidence.NCCL_LOG),
        ("trace.json", files.as_json(evidence.trace())),
        ("snapshot.json", files.as_json(evidence.SNAPSHOT)),
        ("mine.toml", files.as_toml(evidence.CALIBRATION)),
        ("checks.toml", files.as_toml(evidence.CHECKS)),
        ("steps.csv", evidence.STEPS),
        ("failures.csv", evidence.FAILURES),
        ("lengths.txt", evidence.LENGTHS),
    ):
        (folder / name).write_bytes(content)
    for name in ("e", "f", "g"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "metrics.jsonl").write_bytes(listings.METRICS)
    (folder / "config.json").write_bytes(files.as_json({"model_type": "llama", **files.CONFIGS["llama"]}))
    preset = "plan --model gpt2 --cluster dgx-h100 --gpus 8 --batch 32 --seq 1024 --out m.json"
    for line in ("plan job.toml", preset):
        code, _, err = phalanx(folder, *line.split())
        assert code == 0, err
    for name in ("e", "f", "g"):
        shutil.copy(folder / "plan.json", folder / "runs" / name)
    if not quick:
        this_machine.local_cluster(2, "float32", 1)  # as `measured`, kept for the process that trains
        trained.train(folder)
    return folder


def measured(ranks: int, dtype: str, threads: int, quick: bool, kept: Path) -> dict[str, Any]:
    """What a measurement of `ranks` ranks would have found."""
    content = asdict(laptop(ranks))
    kernels = [{**row, "dtype": dtype, "threads": threads} for row in content["kernels"]]
    return {"kernels": kernels, "collectives": content["collectives"], "figures": []}


class _Enough(Exception):
    """Ends a campaign: hypothesis would draw on."""


def campaign(
    folder: Path,
    count: int,
    number: int,
    examine: Callable[[Case, Path], Outcome],
    quick: bool,
    progress: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Examine `count` cases drawn from the seed `number`; `quick`: only commands that take a moment."""
    seen: set[str] = set()
    plans = tuple(json.loads((folder / name).read_text()) for name in ("plan.json", "m.json"))
    run = None if quick else trained.of(folder)
    plans += (run.plan,) if run else ()
    tally = Tally()

    @seed(number)
    @settings(
        max_examples=2 * count,  # hypothesis repeats a quarter of its draws
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(cases(plans, run, quick))
    def one(case: Case) -> None:
        name = str(case)
        if len(seen) == count:
            raise _Enough
        if name not in seen:
            seen.add(name)
            tally.add(case, examine(case, folder))
            progress(tally)

    with suppress(_Enough):
        one()
    return tally
