"""Published benchmarks of a number of requests: what is predicted of them, and the range that answers give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.in_process_cli import json_of

from calibration.quantiles import Ratio, fitted
from calibration.serving import FAMILIES, HOLDS, ratios
from phalanx import serve_plan
from phalanx.serving import likely
from phalanx.serving.cost.engines import engine
from phalanx.serving.validation import bursts
from phalanx.validate.records import Row

ROWS = bursts.rows()
_ASK: dict[str, Any] = {"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 1, "layout": "tp=1"}
_ASK |= {"input": 500, "output": 50}
_ALL = ["makespan_s", "tokens_per_s", "ttft_s", "tpot_s"]
SHIPPED = json.loads(likely.FILE.read_text())


def _found(of: list[Row]) -> dict[tuple[str, str], list[Ratio]]:
    found, refused = bursts.bursts(of)
    assert len(refused) <= len(of) / 20, refused
    return ratios(found, [])


def test_rows_are_of_every_engine_several_gpus_and_have_an_address_each() -> None:
    assert len(ROWS) == len({row.name for row in ROWS}) > 300
    assert {row["framework"] for row in ROWS} == {"vllm", "sglang", "trtllm"}
    assert len({row["gpu"] for row in ROWS}) >= 5
    assert len({row["family"] for row in ROWS}) > 50
    for row in ROWS:
        assert row["source"].startswith(("github.com/", "docs.vultr.com/")), row.name
        assert row["framework_version"] or "sgl-cookbook" in row["source"], row.name


def test_a_range_holds_most_of_a_sample_of_the_published_runs() -> None:
    """Every twelfth; all of them are in the next test."""
    holds = []
    for (kind, figure), some in _found(ROWS[::12]).items():
        if known := SHIPPED.get(kind, {}).get(figure):
            holds += [known["low"] <= r.value <= known["high"] for r in some]
    assert len(holds) > 40
    assert np.mean(holds) > 0.7


def test_shipped_ranges_are_those_of_all_runs_and_hold_three_of_four_of_a_family_left_out() -> None:
    for (kind, figure), some in _found(ROWS).items():
        low, high, holds = fitted(some)
        if holds < HOLDS:
            assert figure not in SHIPPED.get(kind, {})
            continue
        known = SHIPPED[kind][figure]
        assert (known["low"], known["high"]) == pytest.approx((low, high), rel=1e-3), (kind, figure)
        assert (known["runs"], known["families"]) == (len(some), len({r.family for r in some}))
        assert known["families"] >= FAMILIES
        assert holds >= (0.75 if known["families"] > 10 else HOLDS), (kind, figure)


def test_a_release_that_parses_templates_for_each_request_is_predicted_so() -> None:
    row = next(
        r for r in ROWS if r["framework_version"] == "0.11.0" and "128 --random-output-len 4 " in r["benchmark"]
    )
    other = Row({**row.cells, "framework_version": "0.12.0"})
    (old, new), _ = bursts.bursts([row, other])
    assert old.predicted["ttft_s"] > new.predicted["ttft_s"] + 5  # of 1,000 requests
    assert old.measured == new.measured


def test_the_first_token_of_a_short_answer_does_not_wait_for_the_prompts_of_a_whole_burst() -> None:
    """1,000 prompts of 128 tokens with answers of 4, before whose second token SGLang computes all other prompts: the
    median first token was said as late as the last."""
    of = [r for r in ROWS if r["framework"] == "sglang" and "128 --random-output-len 4 " in r["benchmark"]]
    found, _ = bursts.bursts(of)
    assert len(found) == 4
    for burst in found:
        assert 0.65 < (burst.ratio("ttft_s") or 0.0) < 1.35, burst.row.name


def test_decoding_beyond_the_graphs_is_as_slow_as_it_was_measured() -> None:
    """Of ShareGPT's 1,000 requests at once more decode than graphs were captured for."""
    of = [r for r in ROWS if r["family"] in ("gpustack deepseek-r1 h200", "gpustack glm-4.x h200") and r["variation"]]
    found, _ = bursts.bursts([r for r in of if r["requests"] == "1000"])
    wide = [Row({**b.row.cells, "server": b.row["server"] + " --cuda-graph-max-bs 1024"}) for b in found]
    captured, _ = bursts.bursts([row for row in wide if row["framework"] == "sglang"])
    eager = {b.row.name: b for b in found}
    assert len(captured) == 6
    for burst in captured:
        assert burst.predicted["tpot_s"] < 0.8 * eager[burst.row.name].predicted["tpot_s"]
    assert 0.85 < np.median([b.ratio("tpot_s") or 0.0 for b in found]) < 1.15


def test_a_row_that_cannot_be_read_is_listed_with_its_reason() -> None:
    good = ROWS[0].cells
    bad = [
        Row({**good, "id": "model", "server": "vllm serve nobody/Nothing-7B"}),
        Row({**good, "id": "small", "server": "vllm serve deepseek-ai/DeepSeek-R1-0528"}),
    ]
    found, refused = bursts.bursts([ROWS[0], *bad])
    assert [b.row.name for b in found] == [ROWS[0].name]
    reasons = {row.name: why for row, why in refused}
    assert "not a model" in reasons["model"]
    assert "weights take" in reasons["small"]
    scored = bursts.scores(found, refused)
    assert scored["predicted"] == 1
    assert set(scored["skipped"]) == {"model", "small"}


@pytest.mark.parametrize(
    ("more", "kind", "figures"),
    [
        ({"requests": 300, "rate": float("inf")}, "vllm, all at once", _ALL),
        ({"requests": 300, "rate": 9e5}, "vllm, at a rate", _ALL),
        ({"requests": 90, "concurrency": 8}, "vllm, a number at once", _ALL),
        ({"concurrency": 8}, "vllm, aggregated", ["ttft_s", "tpot_s"]),
        ({"requests": 90, "concurrency": 8, "engine": "trtllm"}, "", []),
        ({"requests": 40, "rate": 1.0}, "vllm, at a rate", _ALL),
        ({"rate": 1.0}, "vllm, at a rate", ["ttft_s", "tpot_s"]),
        ({"rate": 1.0, "engine": "trtllm"}, "", []),
        ({"requests": 90, "concurrency": 8, "speculate": "3:0.7"}, "", []),
        ({"requests": 90, "concurrency": 8, "adapters": "9:3"}, "", []),
        ({"requests": 90, "concurrency": 8, "reuse": 0.5}, "", []),
    ],
)
def test_an_answer_says_where_its_figures_lie_or_that_nobody_knows(
    more: dict[str, Any], kind: str, figures: list[str]
) -> None:
    a = serve_plan(**_ASK, **more, mode="aggregated", weights="bf16")
    assert [r.figure for r in a.likely] == figures
    plain = a.to_dict()
    assert plain["likely_basis"].startswith("80% of" if kind else "missing: ")
    assert kind in plain["likely_basis"]
    said = likely.words(a.likely, a.likely_basis, likely.has_medians(a.search.question), lambda s: f"{s:.3g} s")
    assert said.startswith("likely: " if kind else "how far off these figures may be is missing: ")
    for r in a.likely:
        assert r.high is not None
        assert r.low < r.high
        ends = f"{r.low:,.0f} to {r.high:,.0f} tok" if "tok" in r.figure else f" {r.low:.3g} s to {r.high:.3g} s"
        assert ends in said
    if "makespan_s" in figures:
        by = {r.figure: r for r in a.likely}
        tokens = 50 * more["requests"]
        assert by["tokens_per_s"].low == pytest.approx(tokens / by["makespan_s"].high)
        assert by["tokens_per_s"].high == pytest.approx(tokens / by["makespan_s"].low)


def test_a_benchmark_is_of_a_server_that_sends_every_token() -> None:
    """Closed loops without end were measured on servers that hand tokens out in intervals."""
    ask = {**_ASK, "output": 200, "mode": "aggregated", "weights": "bf16", "engine": "sglang", "concurrency": 1}
    sent, kept = (serve_plan(**ask, **more) for more in ({"requests": 40}, {}))
    constants = engine("sglang")
    steps = float(constants.first_steps) - float(constants.overlap_steps)
    later = kept.ttft_s - sent.ttft_s + float(constants.accept_s)
    assert later == pytest.approx(steps * sent.tpot_s, rel=0.02)


def test_a_trace_and_a_candidate_that_was_not_simulated_have_no_range(tmp_path: Path) -> None:
    rows = [f"{i / 9:.3f},200,20" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["arrival,input,output", *rows]) + "\n")
    line = "serve plan --model llama3-8b --cluster dgx-h100 --gpus 1 --layout tp=1 --trace t.csv --json"
    assert json_of(tmp_path, line)["likely_basis"] == "missing: no published run has a trace"
    best = serve_plan(**_ASK, concurrency=4, mode="aggregated", weights="bf16").search
    assert likely.likely(best.question, replace(best.best, outcome=None), lambda _: {})[0] == ()
