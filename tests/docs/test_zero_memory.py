"""The table of docs/data_parallel.md that says why a higher level of ZeRO may take more memory."""

from __future__ import annotations

import re
from pathlib import Path

from phalanx.cost.step.expand import expand
from phalanx.schedule.layout import Layout
from phalanx.spec.files import job_file

ROOT = Path(__file__).parents[2]


def test_the_table_is_what_the_terms_say() -> None:
    page = (ROOT / "docs" / "data_parallel.md").read_text()
    table = page.partition("## Where a higher level takes more memory")[2].partition("## Buckets")[0]
    rows = [[float(x) for x in line.split("|")[1:-1]] for line in re.findall(r"^\| \d .*$", table, re.MULTILINE)]
    file = job_file.load(ROOT / "examples" / "quickstart.toml")
    assert len(rows) == 4
    for zero, *figures in rows:
        s = job_file.make_strategy(f"dp=2,zero={int(zero)},micro_batch=12,bucket=7.7")
        assert s is not None
        program = expand(Layout(file.model, file.job, s).rank_view(0))
        parts = program.state
        bytes_ = (parts.parameters, parts.master, parts.gradients, parts.optimizer, parts.buffers, parts.total)
        assert figures == [round(n / 2**20, 2) for n in (*bytes_, program.peak_bytes)]
