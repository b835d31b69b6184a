"""Exporters refuse what they cannot express, and nothing else: each value that a stack takes, alone in a plain plan,
and each preset of a model is written, or stands in data/refused_alone.toml, by the field that the refusal names."""

from __future__ import annotations

import random
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.exports import draw

from phalanx.answers.configurations.export import TARGETS
from phalanx.frameworks.registry import DOCUMENTED, facts
from phalanx.frameworks.stack import Stack
from phalanx.frameworks.writing.subject import subject
from phalanx.planning.lookup import model_named
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import Plan
from phalanx.spec.model.presets import PRESETS
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

TABLE = tomllib.loads((Path(__file__).parent / "data/refused_alone.toml").read_text())
PAIRS = [(to, stack) for to, target in TARGETS.items() for stack in target.stacks]
_WITH = {
    "dp": {"dp": 1},
    "tp": {"dp": 4},
    "cp": {"dp": 4},
    "pp": {"dp": 4},
    "sp": {"dp": 4, "tp": 2},
    "etp": {"dp": 4, "tp": 2},
    "ulysses": {"dp": 4, "cp": 2},
    "shard": {"zero": 3},
    "virtual": {"dp": 4, "pp": 2, "schedule": "interleaved"},
    "schedule": {"dp": 4, "pp": 2},
}
"""What a field goes with, in a world of 8."""
_OPTIONS_WITH = {"dora": {"lora": 8}}


def _plain(stack: Stack) -> Plan:
    plan = draw.plan(stack, random.Random(1), ("llama3-8b",), options=False)
    return replace(plan, strategy=Strategy(dp=8), job=replace(plan.job, global_batch=32, seq=4096))


def _plans(stack: Stack) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of plans in which one thing is not as in the plain one."""
    plain = _plain(stack)
    yield "plain", plain
    for name in PRESETS:
        model, _ = model_named(name)
        yield name, replace(plain, model=model, job=replace(plain.job, seq=min(4096, model.max_seq)))
    experts, _ = model_named("mixtral-8x7b")
    degrees = dict.fromkeys(("tp", "cp", "pp", "ep", "etp", "ulysses", "shard"), (2,))
    for name, values in {"dp": (1,), **degrees, "sp": (True,), **draw._VALUES}.items():
        for value in dict.fromkeys(values):
            with_it = {"dp": 8, **_WITH.get(name, {}), name: value}
            if with_it.get("schedule") == "interleaved":
                with_it["virtual"] = max(2, with_it.get("virtual", 1))
            plan = replace(plain, strategy=Strategy(**with_it))
            yield f"{name}={value}", replace(plan, model=experts) if name in ("ep", "etp") else plan
    for name, fact in stack.options.items():
        for value in draw._legal(name):
            options = StackOptions(**{**_OPTIONS_WITH.get(name, {}), name: value})
            if fact.allows(value) and options.changed():
                yield f"{name}={value}", replace(plain, options=options)


@pytest.mark.parametrize(("to", "stack"), PAIRS)
def test_what_is_refused_alone_is_listed(to: str, stack: str) -> None:
    rules = DOCUMENTED[stack]
    refused = defaultdict(list)
    for name, plan in _plans(rules):
        sharded = replace(plan, strategy=replace(plan.strategy, zero=3))  # some stacks want it with tp or cp
        for p in (plan, sharded):
            if rules.refusal(p.strategy, p.options, facts(p.model, p.job, p.strategy)) is None:
                try:
                    TARGETS[to].program(subject(p, rules))
                except InputError as error:
                    refused[error.field].append(name)
                break
    assert refused == TABLE[stack]
