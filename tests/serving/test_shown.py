"""What is shown of a proof is what `--json` has of it, and what is shown of a plan follows from its outcome."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phalanx import serve_plan
from phalanx.observation.diff import Difference
from phalanx.planning.tables.table import Sheet
from phalanx.serving.proof import as_json, prove, view
from phalanx.serving.report import cache, likely, lines

_MODEL = Path(__file__).parents[1] / "net" / "inputs" / "models" / "llama.json"


def test_a_proof_is_shown_as_its_json_has_it() -> None:
    said: list[str] = []
    proof = prove(str(_MODEL), "tp=2", 2, 32, None, said.append)
    (found,) = as_json(proof)["classes"]
    head, covered, steps, sent, held, verdict = view(proof).parts
    assert isinstance(steps, Sheet)
    assert isinstance(sent, Sheet)
    assert isinstance(held, Sheet)
    assert "2 ranks, 1 x 2 requests of 32 tokens" in str(head)
    assert covered == "\nrank 0 represents all 2 ranks"
    assert [(row[0], row[1], row[2], row[5]) for row in steps.rows] == [
        (step["step"], step["requests"], step["tokens"], step["flops"]) for step in found["steps"]
    ]
    passes = [sum(e.kind == "compute" for e in step.program.events) for step in proof.stages[0].steps]
    assert [row[3] for row in steps.rows] == passes
    assert [row[4] for row in steps.rows] == [sum(c["count"] for c in s["collectives"]) for s in found["steps"]]
    shown = {(row[0], n): cell for row in sent.rows for n, cell in enumerate(row[1:]) if cell}
    assert shown == {
        (f"{c['op']} over {c['axis']}", n): f"{c['count']:,}: {c['bytes']:,}"
        for n, step in enumerate(found["steps"])
        for c in step["collectives"]
    }
    total = sum(row[4] for row in steps.rows), sum(passes)
    assert f": {total[0]:,} collectives and {total[1]:,} passes in order" in str(verdict)
    stage = proof.stages[0]
    wrong = replace(stage.steps[0], differences=(Difference("order", "a", "b"),))
    broken = replace(proof, stages=(replace(stage, steps=(wrong, *stage.steps[1:])),))
    assert str(view(broken).parts[-1]) == f"NOT proved: {wrong.name}: order: predicted a, recorded b"
    failed = replace(proof, stages=(replace(stage, failed="it reads a value"),))
    assert view(failed).parts[2:] == ["NOT proved: it reads a value"]


def test_a_plan_says_what_its_outcome_has() -> None:
    a = serve_plan(
        **{"model": "llama3-8b", "cluster": "dgx-h100", "gpus": 2, "input": 500, "output": 50, "weights": "fp8"},  # type: ignore[arg-type]
        **{"concurrency": 8, "requests": 60, "layout": "tp=1", "mode": "aggregated"},  # type: ignore[arg-type]
    )
    search, best = a.search, a.search.best
    outcome = best.outcome
    assert outcome is not None
    for preempted, gpus in ((0, 2), (7, 5)):
        changed = replace(best, outcome=replace(outcome, preemptions=preempted))
        other = replace(search, best=changed, question=replace(search.question, gpus=gpus))
        held = cache(replace(a, search=other, kv_bytes_per_token=9.0, requests_that_fit=3))
        told = lines(other, [], held, "")
        (kept,) = (line for line in told if line.startswith("KV cache: 9 bytes per token; "))
        assert kept.endswith("3 requests of 500 + 50 tokens fit" + "; 7 preemptions" * bool(preempted))
        assert (f"{gpus - best.gpus} of {gpus} GPUs are left over" in told) == (best.gpus < gpus)
    told = lines(search, likely(a), cache(replace(a, state_bytes_per_request=5.0)), "it costs")
    assert set(likely(a)) <= set(told)
    assert "it costs" in told
    assert any(" and 5 of states per request; " in line for line in told)
