"""Key tables of frameworks: complete, written once, and the same way for reading and for writing."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.frameworks import verdicts
from phalanx.frameworks.configuration import Keys, _nearest
from phalanx.frameworks.keys import Key, KeyTable, key_table, optimizer_word
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.frameworks.verdicts import Verdict
from phalanx.spec.errors import InputError
from phalanx.spec.optimizers import OPTIMIZERS

FOLDERS = [f.folder for f in FRAMEWORKS.values() if f.reads]
ALL = pytest.mark.parametrize("framework", FOLDERS)
_FEW = {"picotron": 42}
"""Keys of a template that is short."""


@ALL
def test_every_key_of_a_framework_has_a_verdict_with_the_line_that_shows_it(framework: str) -> None:
    table = key_table(framework)
    assert len(table.verdicts) > _FEW.get(framework, 100)
    assert not [name for name, verdict in table.verdicts.items() if not verdict.effect]
    assert all(verdict.source.rpartition(":")[2].isdigit() for verdict in table.verdicts.values())


@ALL
def test_a_key_that_no_list_knows_is_not_judged(framework: str) -> None:
    table = key_table(framework)
    for name in ("tensor_parallel_of_tomorrow", "training.tensor_parallel_of_tomorrow"):
        assert table.verdict(name) is None


@ALL
def test_a_key_with_a_price_that_no_reader_took_is_never_without_effect(framework: str) -> None:
    table = key_table(framework)

    def rest(name: str, value: object) -> tuple[tuple[str, ...], dict[str, Verdict]]:
        tables = value
        for part in reversed(name.split(".")):
            tables = {part: tables}
        assert isinstance(tables, dict)
        quiet, open_, unknown = Keys(tables, table).rest(table)
        assert not unknown
        return quiet, open_

    priced = [(n, v) for n, v in table.verdicts.items() if v.effect in ("layout", "time", "memory") and "*" not in n]
    assert priced
    for name, verdict in priced:
        if "_kwargs." in name:  # tables of whatever torch's checkpoint() takes
            continue
        quiet, open_ = rest(name, "another value")
        assert not quiet, name
        assert all(v.effect == "unmodelled" and v.changes and v.what for v in open_.values())
        assert name not in open_ or open_[name].changes == (verdict.effect,)
        if name not in open_:  # of a table that is not modelled as a whole
            continue
        for off in ("auto", "${a.b}", None, verdict.default.partition("|")[0]):
            assert not rest(name, off)[1], (name, off)


def test_what_is_said_with_an_open_model_is_not_said_again() -> None:
    table = key_table("megatron")
    config = {"args": {"normalization": "RMSNorm", "data_parallel_size": 4}}
    assert list(Keys(config, table).rest(table)[1]) == ["args.normalization", "args.data_parallel_size"]
    assert list(Keys(config, table).rest(table, open_model=True)[1]) == ["args.data_parallel_size"]


def test_another_place_with_the_same_value_is_understood_too() -> None:
    for second, understood in ((2, ["a", "b"]), (4, ["a"])):
        keys = Keys({"a": 2, "b": second})
        assert keys.take(("a", "b"), "strategy.tp") == 2
        assert list(keys.understood) == understood


@pytest.mark.parametrize("framework", [f for f in FOLDERS if any(k.words for k in key_table(f).keys)])
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


def test_the_longest_end_of_a_path_that_has_a_verdict_counts() -> None:
    none, time = Verdict("none", "f.py:1"), Verdict("time", "f.py:2")
    table = KeyTable((Key("model.dp", "strategy.dp"),), {"enable": none, "compile.enable": time, "new": Verdict()})
    asked = ("profiling.enable", "model.compile.enable", "compile.enable", "new", "other")
    assert [table.verdict(name) for name in asked] == [none, time, time, None, None]
    assert table.names == {"dp", "enable", "new"}


def test_a_verdict_says_where_it_is_shown_and_what_a_key_without_a_price_changes() -> None:
    with pytest.raises(ValueError, match="a verdict has a source"):
        Verdict("none")
    with pytest.raises(ValueError, match="is not a verdict"):
        Verdict("much", "f.py:1")  # type: ignore[arg-type]
    for parts in ({"changes": ("time",)}, {"what": "fuses kernels"}, {}):
        with pytest.raises(ValueError, match="says what it does"):
            Verdict("unmodelled", "f.py:1", **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("default", "off", "on"),
    [
        ("False", (False, "false", 0, None), (True, "true", 1)),
        ("True|False", (True, False), ("always",)),
        ("None", (None, "null"), ("dsa", 8)),
        ("0|0.0", (0, 0.0, "0"), (0.1, "0.1")),
        ("", (None, False, {"enabled": False}, {}), (True, 0.5, {"block": 16}, {"enabled": True})),
    ],
)
def test_a_key_changes_nothing_at_its_default(default: str, off: tuple[object, ...], on: tuple[object, ...]) -> None:
    verdict = Verdict("unmodelled", "f.py:1", ("time",), "fuses kernels", default)
    assert [verdict.is_off(value) for value in off] == [True] * len(off)
    assert [verdict.is_off(value) for value in on] == [False] * len(on)


def test_a_name_with_two_verdicts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.toml"
    path.write_text('[files]\na = "a.py"\n[none]\na = "x:1"\n[time]\na = "y!=2:3 x:1"\n')
    with pytest.raises(ValueError, match="x has two verdicts"):
        verdicts.load(path)


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


def test_every_variable_of_the_libraries_underneath_has_a_verdict() -> None:
    variables = verdicts.load(Path(verdicts.__file__).parent / "environment" / "verdicts.toml")
    assert len(variables) > 300
    assert not [name for name, verdict in variables.items() if not verdict.effect]
    assert variables["NCCL_DEBUG"].effect == "none"
    assert variables["CUDA_LAUNCH_BLOCKING"].is_off("0")
    assert not variables["NCCL_IB_DISABLE"].is_off(1)


@settings(max_examples=25)
@given(st.data())
def test_a_slip_of_one_letter_is_known_again(data: st.DataObject) -> None:
    """A letter that is left out, doubled or wrong, the first one too; or a key that is as near."""
    table = key_table(data.draw(st.sampled_from(FOLDERS)))
    name = data.draw(st.sampled_from(sorted(n for n in table.names if len(n) > 7)))
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from(("", 2 * name[at], "x")))
    slip = name[:at] + letter + name[at + 1 :]
    found = _nearest(slip, table)
    assert SequenceMatcher(None, found, slip).ratio() >= SequenceMatcher(None, name, slip).ratio() - 1e-9
    short = name[: -len(name) // 3]
    assert len(short) < 6 or _nearest(short, table)


def test_a_name_of_other_words_is_no_slip() -> None:
    assert _nearest("zzyzx_quux", key_table("megatron")) == ""
