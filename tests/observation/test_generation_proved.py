"""Prefill and decode of published models on their layouts, on fake tensors, against their programs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.sizes import sampled
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.infer.replica import Replica
from phalanx.observation.trainer.generation import verify_generation
from phalanx.planning.lookup import model_named
from phalanx.spec.strategy.spec import Strategy

LAYOUTS = [
    ("llama3-405b", Strategy(tp=8, pp=2)),
    ("llama3-405b", Strategy(tp=16)),  # two ranks for each key head
    ("deepseek-v3", Strategy(dp=8, tp=4, ep=32)),
    ("deepseek-v3", Strategy(tp=8, pp=2, ep=8)),
    ("mistral-7b", Strategy(tp=2)),
]


@pytest.mark.parametrize("layers", [4, pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize(("name", "strategy"), sampled(LAYOUTS, (1, 3, 4)))
def test_published_models(name: str, strategy: Strategy, layers: int | None) -> None:
    model, _ = model_named(name)
    model = model if layers is None else replace(model, layers=layers)
    stages = verify_generation(model, strategy, "bfloat16", slots=5, context=6000, chunk=512, page=64)
    assert len(stages) == strategy.pp
    for stage in stages:
        assert stage.failed == ""
        assert [(s.name, s.differences) for s in stage.steps] == [("prefill", ()), ("decode", ()), ("mixed", ())]
        heads = max(1, model.kv_heads // strategy.tp)
        each = 2 * heads * model.head_dim if model.latent is None else 512 + 64
        blocks = sum(e.unit.startswith("blocks") and not e.axis for e in stage.steps[0].program.events)
        pages = 5 * 94 + (strategy.dp > 1 and strategy.ep > strategy.tp)  # one for a replica that idles
        tokens = pages * 64 if model.window is None else 5 * (4096 - 1 + 512)  # a window's last tokens stay
        assert stage.steps[0].cache == 2 * each * blocks * tokens


def test_a_difference_from_the_prediction_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "share", lambda self, chosen, first, total: [0] * total)
    model = replace(model_named("llama3-8b")[0], layers=2)
    (stage,) = verify_generation(model, Strategy(tp=2), "bfloat16", 2, 100, 64, 16)
    assert not stage.proved
    found = [any("predicted all_reduce tokens over world" in str(d) for d in s.differences) for s in stage.steps]
    assert found == [False, True, True]


def test_from_the_command_line() -> None:
    words = ["serve", "verify", "--model", "gpt2", "--strategy", "tp=2", "--batch", "2", "--seq", "40"]
    found = CliRunner().invoke(app, words)
    assert (found.exit_code, found.stdout.count("proved in")) == (0, 1), found.output
    result = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert result["proved"]
    (stage,) = result["classes"]
    assert stage["steps"][1]["cache_bytes"] == dict.fromkeys(("predicted", "recorded"), 2 * 2 * 6 * 64 * 12 * 96)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--strategy tp=2", "--model: is missing; see "),
        ("--model gpt2 --seq 2000", "--seq = 2000: is longer than the model's context, 1024"),
        ("--model gpt2 --strategy tp=24", "strategy.tp = 24: is more than the model's 12 heads"),
        ("--model gpt2 --strategy dp=2,zero=3", "strategy.zero = 3: is of training"),
        ("--model gpt2 --cluster dgx-h100", "--cluster: no such option"),
        ("--model gpt2 --precision fp8", "--precision = 'fp8': is not a type to generate in"),
        ("--model gpt-oss-20b", "attention sinks"),
    ],
)
def test_bad_input(words: str, said: str) -> None:
    found = CliRunner().invoke(app, ["serve", "verify", *words.split()])
    assert (found.exit_code, said in found.output, found.output.count("\n")) == (2, True, 1), found.output
