"""Observe what libraries of parallel training do, option by option, and write docs/stacks_observed.json.

    python -m benchmarks.stacks_observed [DDP fully_shard DTensor pipelining torchtitan accelerate DeepSpeed]

A model of four equal blocks takes a step of two micro-batches on rank 0 of 8, with AdamW (stacks_programs.py). Every
figure is counted in that rank's second step: what is sent, and what is live as each backward pass begins. The line of
the library that decides it is named beside it, and must read as it did when the fact was written. Libraries that are
not installed keep their rows.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import phalanx
from benchmarks.stacks_cases import CASES, Case
from benchmarks.stacks_programs import BLOCK, MICRO_BATCHES, WORLD
from phalanx.schedule.observation import Holder, RankObservation, unit_of

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_NEEDS = {"DeepSpeed": "deepspeed", "accelerate": "accelerate", "torchtitan": "torchtitan"}


def observe(case: Case) -> dict[str, Any]:
    """Return what a case does in a step: operations by phase and micro-batch, their types, and live bytes.

    Raises ValueError where the library's line reads otherwise than when the fact was written.
    """
    _check(case.source, case.text)
    _check(case.keeps.source, case.keeps.text)
    result = phalanx.observe(lambda: case.program(), world=WORLD, ranks=[0]).ranks[0]
    return {
        "stack": case.stack,
        "option": case.option,
        "version": version(_NEEDS.get(case.stack, "torch")),
        "fact": case.fact,
        "source": case.source,
        "gathers": _counts(result, "all_gather"),
        "reductions": _counts(result, "all_reduce") | _counts(result, "reduce_scatter") | _counts(result, "reduce"),
        "other": _counts(result, "send") | _counts(result, "all_to_all") | _counts(result, "broadcast"),
        "peak_bytes": result.peak,
        "peak_phase": result.peak_phase,
        "held_at_peak": _by_kind(result.holders),
        "keeps": case.keeps.fact,
        "keeps_source": case.keeps.source,
        "held_before_backward": [
            {
                "phase": b.phase,
                "micro_batches": list(b.micro_batches),
                "held": _by_kind(b.holders),
                "by_unit": {u: _by_kind(h for h in b.holders if h.module == u) for u in _units(b.holders)},
            }
            for b in result.backward_starts
        ],
        "by_unit": _by_unit(result),
    }


def _by_kind(holders: Iterable[Holder]) -> dict[str, int]:
    held: Counter[str] = Counter()
    for h in holders:
        held[h.kind] += h.bytes
    return dict(held)


def _units(holders: Iterable[Holder]) -> list[str]:
    return sorted({h.module for h in holders if h.module})


def _check(source: str, text: str) -> None:
    """Raise ValueError unless a line of a library that is installed holds a text."""
    library = source.partition("/")[0]
    spec = find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{library} is not installed")
    path, _, number = source.rpartition(":")
    folder = Path(next(iter(spec.submodule_search_locations))).parent
    line = (folder / path).read_text().splitlines()[int(number) - 1]
    if text not in line:
        raise ValueError(f"{source} is {line.strip()!r}, and has no {text!r}")


def _counts(r: RankObservation, op: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for o in r.communication:
        e = o.event
        if e.op == op:
            at = "" if e.micro_batch is None else f", micro-batch {e.micro_batch}"
            key = f"{op} of {e.dtype} over {e.group_size}, {e.phase}{at}"
            counts[key] = counts.get(key, 0) + 1
    return counts


def _by_unit(r: RankObservation) -> dict[str, dict[str, int]]:
    """Count collectives by operation, type, group and phase, and then by the unit that they serve, or by the line of
    the library that issued them outside of all."""
    counts: dict[str, Counter[str]] = {}
    for o in r.communication:
        e = o.event
        line = str(o.site).partition("site-packages/")[2]
        of = unit_of(o.module) or (f"(no module) {line}" if line else "(no module)")
        counts.setdefault(f"{e.op} of {e.dtype} over {e.group_size}, {e.phase}", Counter())[of] += 1
    return {key: dict(of) for key, of in counts.items()}


def _one_case_a_line(cases: list[dict[str, Any]]) -> str:
    about = json.dumps({"world": WORLD, "micro_batches": MICRO_BATCHES, "block_parameters": BLOCK})
    return f'{about[:-1]}, "cases": [\n' + ",\n".join(map(json.dumps, cases)) + "\n]}\n"


def main() -> None:
    """Observe the cases of the stacks that are named, or of all, and write their data after each."""
    file = _DOCS / "stacks_observed.json"
    rows = {(c["stack"], c["option"]): c for c in json.loads(file.read_text())["cases"]}
    cases = list(rows.values())
    for case in CASES:
        if (sys.argv[1:] and case.stack not in sys.argv[1:]) or find_spec(_NEEDS.get(case.stack, "torch")) is None:
            continue
        rows[case.stack, case.option] = observe(case)
        cases = [rows[c.stack, c.option] for c in CASES if (c.stack, c.option) in rows]
        file.write_text(_one_case_a_line(cases))


if __name__ == "__main__":
    main()
