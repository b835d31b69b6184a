"""Drawn exports against what the frameworks and launchers publish: recorded keys, flags, choices and schemas.

stack_schemas.json is recorded from the installed frameworks; their own parsers (`make stacks`) say more: that values
go together. launcher_schemas.json: CRDs trimmed to the fields that exports use; other fields stand there by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.exports.cases import cases
from support.openapi import violations

from phalanx.answers.configurations.export import TARGETS
from phalanx.frameworks.launchers.export import LAUNCHERS, Task, manifests
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.frameworks.writing.program import Blank

_STACKS = json.loads((Path(__file__).parent / "stack_schemas.json").read_text())
_LAUNCHERS = json.loads((Path(__file__).parent / "launcher_schemas.json").read_text())
_TASK = Task("llama-16", 2, 8, "H100-SXM5-80GB", 1, (Blank("LR", "Rate."),), {"train.sh": "true\n"})


def _flat(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and key not in ("optimizer.params",):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    else:
        yield key, value


@pytest.mark.parametrize(("to", "stack"), [(to, stack) for to, t in TARGETS.items() for stack in t.stacks])
def test_drawn_exports_have_keys_and_choices_that_the_framework_has(to: str, stack: str) -> None:
    schema = _STACKS[stack if stack in _STACKS else to]
    flags, keys = set(schema["flags"].split()), set(schema["keys"].split())
    _, subjects, _ = cases(to, DOCUMENTED[stack], 6, 2)
    for x in subjects:
        for group in TARGETS[to].program(x).groups:
            for setting in group.settings:
                for key, value in _flat(setting.key, setting.value):
                    assert key in (flags if value is True and flags else keys), f"{key} = {value}"
                    choices = schema["choices"].get(key)
                    assert choices is None or str(value) in map(str, choices), f"{key} = {value}"


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob", "jobset"])
def test_manifests_follow_the_published_schemas(kind: str) -> None:
    _, document = manifests(kind, _TASK)
    schema = _LAUNCHERS[document["kind"]]["schema"]
    assert violations(schema, document) == []
    document["spec"]["nproc"] = 8
    assert violations(schema, document) == [".spec.nproc is unknown"]


def _skypilot(document: dict[str, Any]) -> list[str]:
    sky = _LAUNCHERS["SkyPilot"]
    return violations(sky["task"], document) + violations(sky["resources"], document["resources"], ".resources")


@pytest.mark.parametrize("device", ["H100-SXM5-80GB", "A100-SXM4-40GB", "GB200"])
def test_a_skypilot_task_follows_its_schemas(device: str) -> None:
    """`sky.Task.from_yaml` of 0.14.0 also accepted one for every device that is named there."""
    document = yaml.safe_load(LAUNCHERS["skypilot"](replace(_TASK, device=device))["task.yaml"])
    assert _skypilot(document) == []
    assert document["resources"]["network_tier"] in ("standard", "best")  # sky/utils/resources_utils.py NetworkTier


def test_the_schemas_of_skypilot_find_mistakes() -> None:
    def with_(table: str, **changes: Any) -> list[str]:
        document = yaml.safe_load(LAUNCHERS["skypilot"](_TASK)["task.yaml"])
        (document if table == "task" else document[table]).update(changes)
        return _skypilot(document)

    assert with_("task", num_nodes="2") == [".num_nodes is no integer"]
    assert with_("task", nodes=2) == [".nodes is unknown"]
    assert with_("task", workdir={"ref": "main"}) == [".workdir is no string"]
    assert with_("envs", LR=1e-4) == [".envs.LR is no string or null"]
    assert with_("envs", **{"MY-RATE": "1"}) == [".envs.MY-RATE is unknown"]
    assert with_("resources", accelerator="H100:8") == [".resources.accelerator is unknown"]
    assert with_("resources", accelerators=8) == [".resources.accelerators is no string"]
