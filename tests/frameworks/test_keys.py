"""Key tables of frameworks: complete, written once, and the same way for reading and for writing."""

from __future__ import annotations

import pytest

from phalanx.frameworks.keys import Key, KeyTable, key_table, optimizer_word
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.spec.errors import InputError
from phalanx.spec.optimizers import OPTIMIZERS

ALL = pytest.mark.parametrize("framework", [f.folder for f in FRAMEWORKS.values() if f.reads])


@ALL
def test_a_framework_lists_the_names_of_its_keys(framework: str) -> None:
    table = key_table(framework)
    assert len(table.names) > 50
    listed = [name for names in table.by_effect.values() for name in names] + list(table.forms)
    assert len(listed) == len(set(listed))  # a name has one effect


@ALL
def test_what_is_written_is_read_back_as_the_same_value(framework: str) -> None:
    table = key_table(framework)
    for key in table.keys:
        for value in key.words.values():
            name, word = table.setting(key.field, value)
            assert name in {k.name for k in table.keys if k.field == key.field}
            assert table.value(key.field, word) == value


def test_a_value_without_a_word_is_refused_and_one_without_words_is_itself() -> None:
    table = key_table("nanotron")
    assert table.write({"strategy.tp": 4, "strategy.schedule": "gpipe", "strategy.recompute": "full"}) == {
        "parallelism.tp": 4,
        "parallelism.pp_engine": "afab",
        "parallelism.recompute_layer": True,
    }
    with pytest.raises(KeyError, match=r"strategy\.schedule.*zb-v"):
        table.write({"strategy.schedule": "zb-v"})
    with pytest.raises(KeyError):
        table["strategy.ulysses"]


def test_a_name_is_judged_by_its_row_before_its_list() -> None:
    rows = (Key("model.dp", "strategy.dp"), Key("--seq-length", effect="memory", source="f.py:1"))
    table = KeyTable(
        rows, {"none": frozenset({"wandb", "seq_length"}), "": frozenset({"port"})}, frozenset({"no_wandb"})
    )
    assert [table.effect(name) for name in ("seq_length", "wandb", "no_wandb", "dp", "port", "other")] == [
        *("memory", "none", "none", "", "", "")
    ]
    assert table.names == {"dp", "seq_length", "wandb", "port"}


def test_an_effect_needs_a_source() -> None:
    assert Key("a", effect="none", source="f.py:1").effect == "none"
    with pytest.raises(ValueError, match="a has an effect and no source"):
        Key("a", effect="layout")
    with pytest.raises(ValueError, match="'much' is not an effect"):
        Key("a", effect="much")  # type: ignore[arg-type]


def test_an_optimizer_without_a_word_is_refused_with_those_that_have_one() -> None:
    assert optimizer_word(key_table("megatron"), "adamw", "Megatron-LM") == "adam"
    with pytest.raises(
        InputError, match=r"job.optimizer.name = .sgd.*is not exported to DeepSpeed.*use adamw or muon"
    ):
        optimizer_word(key_table("deepspeed"), "sgd", "DeepSpeed")


def test_every_optimizer_is_a_word_of_some_framework() -> None:
    words = {
        name for f in FRAMEWORKS.values() if f.writes for name in key_table(f.folder).values("job.optimizer.name")
    }
    assert words == set(OPTIMIZERS)


def test_switches_are_flags_that_take_no_value() -> None:
    switches = key_table("megatron").switches
    assert {"sequence_parallel", "use_flash_attn", "no_gradient_accumulation_fusion", "bf16"} <= switches
    assert not switches & {"num_layers", "tensor_model_parallel_size", "recompute_granularity", "moe_router_topk"}
