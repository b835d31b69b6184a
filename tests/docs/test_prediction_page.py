"""What docs/prediction.md says of the code's own constants, of what was measured beside runs, and of choices.

tests/validate/test_published_runs.py holds its errors, test_engines_table.py its comparison of engines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.answers.choices import score
from phalanx.cli.terminal import console
from phalanx.cost.analytic import chips, memory, step
from phalanx.cost.analytic.fitted_constants import fitted_constants
from phalanx.cost.analytic.kernels import _TILES
from phalanx.cost.analytic.stacks import STACKS, profile
from phalanx.planning import search
from phalanx.planning.search import refine
from phalanx.report.choices import options, recipes, sweeps
from phalanx.spec.cluster.chips import CHIPS
from phalanx.validate import models, records, systems

PAGE = (Path(__file__).parents[2] / "docs" / "prediction.md").read_text()
PROSE = " ".join(PAGE.split())


def test_limits_of_the_search() -> None:
    assert f"shorten the step by {100 * refine.GAIN} % and leave {100 * search.HEADROOM:.0f} % of the memory" in PROSE


def test_constants_of_chips() -> None:
    ampere = chips.generation("ampere")
    assert f"over which products reach {ampere.odd:.2f} of their rate" in PROSE
    assert f"on A100s a large message starts {1e6 * ampere.start_s:.0f} µs late" in PROSE.replace(
        "On A100s a", "on A100s a"
    )
    assert f"at most {2 * ampere.tree / 4 / 1e9:.1f} GB/s on A100s" in PROSE
    assert ampere.misaligned == pytest.approx(1 / 8, rel=0.05)
    assert "at an eighth of the rate if it is not one of 8" in PROSE
    assert step._UNEVEN / 4 == 1 / 8
    assert "each waits for the other, up to an eighth of the pass" in PROSE
    assert len(_TILES) == 4
    (machine,) = systems._MACHINES.values()
    assert f"products reach {float(machine.product_flops_per_s) / CHIPS['B200'].half:.2f} of a B200's peak" in PROSE


def test_constants_of_stacks() -> None:
    nanotron, megatron, vtrain = (profile(name) for name in ("nanotron", "megatron-core", "vtrain"))
    titan = sorted(float(profile(f"torchtitan-{kind}").contention) for kind in ("compiled", "eager"))
    assert f"slower meanwhile, on torchtitan {titan[0]:.1f} to {titan[1]:.1f} times" in PROSE
    assert f"experts takes {1e6 * float(megatron.expert_s):.0f} µs a pass" in PROSE
    assert f"is taken to be {float(profile('any').contention)} times slower" in PROSE
    assert f"more than {1e3 * systems._CPU_S} ms for each rank beyond a node" in PROSE
    assert f"lists of tensors cost {1e3 * float(nanotron.list_s):.1f} ms per rank" in PROSE
    assert f"each message of a pipeline waits {float(nanotron.stalled_s):.2f} s" in PROSE
    assert f"nothing runs for {1e3 * float(vtrain.join_s):.1f} ms" in PROSE
    assert f"GPT-2's {models._VOCABULARIES['vtrain/single-node']:,}, not padded" in PROSE
    blocks = memory.QUEUE / float(nanotron.launches)
    assert f"queue of {memory.QUEUE:,} launches, or {blocks:.0f} blocks of nanotron's" in PROSE
    state = [
        f"{float(p.whole_bytes + p.replica_bytes):.0f}, or {float(p.kept_bytes):.0f} + {float(p.shard_bytes):.0f}/dp"
        for p in (megatron, nanotron)
    ]
    assert f"(Megatron {state[0]}; nanotron {state[1]})" in PROSE
    early, late = (CHIPS["H100"].memory_bytes - profile(n).context_bytes for n in ("nanotron-early", "nanotron"))
    assert f"from {float(early) / 2**30:.0f} GiB on, later ones from {float(late) / 2**30:.0f}" in PROSE


def test_releases_with_constants_of_their_own() -> None:
    once = {name: bool(profile(f"megatron-bridge-{name}").sends_once) for name in ("25.11", "26.02", "26.08")}
    assert once == {"25.11": False, "26.02": True, "26.08": True}
    routed = {
        owner for owner, _, field in (key.rpartition(".") for key in fitted_constants()) if field == "token_bytes"
    }
    later = {f"megatron-bridge-26.{release}" for release in ("04", "06", "06.01")}
    assert routed == {"any", "nemo-24.11", "nemo-25.05", *later}
    parents = [STACKS[name].parent for name in ("nemo-25.04", "nemo-25.02", "nemo-24.11")]
    assert parents == ["nemo-25.02", "nemo-24.11", "megatron-core"]


def test_chips_that_no_published_run_used() -> None:
    rows = records.load(records.RUNS) + records.load(records.SMALL_RUNS)
    assert not [r for r in rows if re.search(r"A10\b|L4\b|4090", r["gpu"])]


@pytest.fixture(scope="module")
def chosen() -> dict[str, Any]:
    return score(records.load(records.RUNS) + records.load(records.SMALL_RUNS))


def _lines(text: str) -> set[str]:
    """Return the lines that have numbers, without spaces."""
    return {re.sub(r"\s+", "", line) for line in text.splitlines() if re.search(r"\d", line)}


@pytest.mark.long
def test_the_page_has_the_tables_of_choices(
    chosen: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "116")
    for shown in (sweeps(chosen), recipes(chosen), options(chosen)):
        console().print(shown)
    assert not _lines(capsys.readouterr().out) - _lines(PAGE)


@pytest.mark.long
def test_the_prose_about_sweeps(chosen: dict[str, Any]) -> None:
    each = [s for s in chosen["sweeps"]["each"]["datasheet"] if s["family"] == "hf-ultrascale"]
    *others, most = sorted(100 * s["regret"] for s in each)
    assert len(each) == 15
    assert f"has a regret of {most:.0f} %, the others of {np.ceil(others[-1]):.0f} % and less" in PROSE


@pytest.mark.long
def test_the_prose_about_recipes(chosen: dict[str, Any]) -> None:
    dense, moe = (chosen["recipes"][kind]["each"] for kind in ("dense", "moe"))
    near, nearer = (sum(r["ratio"] >= least for r in dense) for least in (0.90, 0.95))
    assert f"Of the {len(dense)} dense recipes {near} are at 0.90 or more, {nearer} at 0.95." in PROSE
    below = [r for r in dense if r["ratio"] < 0.90]
    *table, last = (f"{r['ratio']:.2f}" for r in sorted(below, key=lambda r: r["family"]))
    assert f"| {' | '.join(table)} |" in PAGE
    assert f"530B on 2,240 ({last})" in PROSE
    off = 100 * np.median([abs(r["expert_error"]) for r in below])
    assert f"what these eight experts ran is off by {off:.1f} % in the median" in PROSE
    near = sum(r["ratio"] >= 0.90 for r in moe)
    assert f"Of the {len(moe)} recipes with experts {near} are at 0.90 or more. For three of the six below" in PROSE
    assert len(moe) - near == 6
