"""The libraries installed here do what docs/stacks_observed.json says."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.fresh_process import in_fresh_process

ROOT = Path(__file__).parents[2]
CASES: list[dict[str, Any]] = json.loads((ROOT / "docs/stacks_observed.json").read_text())["cases"]
_LIBRARIES = {"torchtitan": "torchtitan", "accelerate": "accelerate", "DeepSpeed": "deepspeed"}
HERE = sorted({c["stack"] for c in CASES if find_spec(_LIBRARIES.get(c["stack"], "torch"))})


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.stacks_observed")


def _observed(stack: str) -> list[dict[str, Any]]:
    observe = importlib.import_module("benchmarks.stacks_observed").observe
    cases = importlib.import_module("benchmarks.stacks_cases").CASES
    return [observe(case) for case in cases if case.stack == stack]


@pytest.mark.long
@pytest.mark.parametrize("stack", HERE)
def test_a_library_does_what_the_data_say(benchmark: ModuleType, stack: str) -> None:
    """Also which line of it decides: a release of torch that does otherwise turns this red."""
    now = {c["option"]: c for c in json.loads(json.dumps(in_fresh_process(_observed, stack)))}
    then = {c["option"]: c for c in CASES if c["stack"] == stack}
    for option, case in then.items():
        assert now[option] == {**case, "version": now[option]["version"]}, option
