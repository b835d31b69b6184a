"""A sweep of loads: each is answered as it is alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import error_of, phalanx

from phalanx.serving.answer import serve_plan
from phalanx.serving.lines.reading import read
from phalanx.serving.sweep import serve_loads
from phalanx.spec.errors import InputError

_SERVER = "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 4096\n"
_LOOP = """for C in 1 4 16; do
  vllm bench serve --random-input-len 300 --random-output-len 40 --num-prompts $((C*3)) --max-concurrency $C
done
"""


def test_each_load_is_answered_as_alone(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(_SERVER + _LOOP)
    lines = read([tmp_path / "run.sh"], {"cluster": "dgx-h100"})
    swept = serve_loads(lines)
    assert [x.load for x in swept.loads] == ["1 request at once", "4 requests at once", "16 requests at once"]
    for got, fields in zip(swept.loads, lines.sweep, strict=True):
        alone = serve_plan(**fields)
        outcome = alone.search.best.outcome
        assert outcome is not None
        figures = (got.tokens_per_s, got.ttft_p50_s, got.tpot_p99_s, got.latency_p50_s)
        assert figures == (alone.tokens_per_s, outcome.ttft.p50, outcome.tpot.p99, outcome.latency.p50)
        assert got.likely == alone.likely
    rates = [x.tokens_per_s or 0.0 for x in swept.loads]
    assert rates == sorted(rates)


def test_an_option_says_which_load(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(_SERVER + _LOOP)
    given = {"cluster": "dgx-h100", "concurrency": 4, "requests": 12}
    assert read([tmp_path / "run.sh"], given).sweep == ()
    with pytest.raises(InputError, match="runs 3 benchmarks"):
        serve_plan(source=[tmp_path / "run.sh"], cluster="dgx-h100")
    err = error_of(tmp_path, "serve plan --from run.sh --cluster dgx-h100 --launch engine")
    assert "does not go with several loads" in err


def test_a_sweep_tries_rates_between_one_request_and_all(tmp_path: Path) -> None:
    bench = "guidellm benchmark --profile sweep --rate 4 --max-requests 40 --data prompt_tokens=300,output_tokens=40"
    (tmp_path / "run.sh").write_text(_SERVER + bench)
    code, out, err = phalanx(tmp_path, "serve", "plan", "--from", "run.sh", "--cluster", "dgx-h100", "--json")
    assert code == 0
    assert "no serving plan is written: the file has several loads" in err
    assert not (tmp_path / "serving.json").exists()
    loads = json.loads(out)["loads"]
    alone, most, *between = (x["requests_per_s"] for x in loads)
    assert between[-1] == pytest.approx(most, rel=0.05)
    steps = [b - a for a, b in zip([alone, *between], between, strict=False)]
    assert steps == pytest.approx([(most - alone) / 2] * 2, rel=0.05)


def test_a_load_that_cannot_be_kept_up_with_is_refused_alone(tmp_path: Path) -> None:
    bench = "guidellm benchmark --profile poisson --rate 1,9000 --data prompt_tokens=300,output_tokens=40\n"
    (tmp_path / "run.sh").write_text(_SERVER + bench)
    code, out, _ = phalanx(tmp_path, "serve", "plan", "--from", "run.sh", "--cluster", "dgx-h100")
    assert code == 0
    assert "not 9,000 requests/s: " in out


def test_lengths_are_shown_where_they_differ(tmp_path: Path) -> None:
    for second, shown in ((40, False), (90, True)):
        bench = "vllm bench serve --random-input-len 300 --num-prompts 4 --random-output-len"
        runs = (f"{bench} {n} --max-concurrency {c}" for n, c in ((40, 2), (second, 3)))
        (tmp_path / "run.sh").write_text(_SERVER + "\n".join(runs))
        _, out, _ = phalanx(tmp_path, "serve", "plan", "--from", "run.sh", "--cluster", "dgx-h100")
        assert ("300 + 40" in out) == shown
