"""Rows of stacks: complete, readable, and the same answer for one strategy as for columns."""

import re
from dataclasses import replace

import pytest

from phalanx.frameworks.registry import DOCUMENTED, stack_named
from phalanx.frameworks.stack import WORDS
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy import where
from phalanx.spec.strategy.spec import FIELDS, Strategy
from phalanx.spec.strategy.stack_options import OPTION_FIELDS, StackOptions, parse

ALL = pytest.mark.parametrize("stack", DOCUMENTED.values(), ids=DOCUMENTED)


@ALL
def test_every_fact_has_a_line_of_a_file_at_a_commit(stack):
    assert re.fullmatch(r"[0-9a-f]{40}", stack.commit)
    sources = [e.source for e in (*stack.strategy.values(), *stack.options.values())] + [
        r.source for r in stack.rules
    ]
    for source in sources:
        assert re.fullmatch(r"[\w./-]+:\d+", source), source
    assert set(stack.strategy) == set(FIELDS)
    assert len(stack.conditions) == len(stack.rules)  # every rule can be read


def test_a_row_that_misses_a_fact_is_refused():
    row = DOCUMENTED["megatron-core"]
    without = {name: entry for name, entry in row.strategy.items() if name != "tp"}
    with pytest.raises(ValueError, match="says nothing about tp"):
        replace(row, strategy=without)


@ALL
def test_one_process_is_legal_everywhere(stack):
    assert stack.refusal(Strategy()) is None


def test_a_refusal_names_the_field_the_reason_and_the_source():
    row = stack_named("megatron-core")
    refusal = row.refusal(Strategy(dp=4, zero=2))
    assert (refusal.field, refusal.value) == ("zero", 2)
    assert str(refusal.error("megatron-core")).startswith("strategy.zero = 2: is not in the stack (megatron-core, ")
    titan = stack_named("torchtitan")
    assert [titan.refusal(Strategy(dp=4, zero=1, pp=pp)).remedy for pp in (1, 2)] == ["use 0 or 2 or 3", "use 0 or 3"]
    both = Strategy(dp=4, zero=1, recompute="selective:moe+layernorm", ep=2)
    assert row.refusal(both, StackOptions(overlap_experts="on")).field == "overlap_experts"
    assert row.refusal(both, about={"experts": 8}) is None
    assert row.refusal(Strategy(tp=2, ep=2), about={"experts": 8}).remedy == "use sp=1"
    assert row.refusal(Strategy(tp=2)) is None  # without the model the rule says nothing


def test_an_unknown_stack_is_named_with_the_nearest():
    with pytest.raises(InputError, match=r"'megatron-cor': is not a stack .* did you mean megatron-core"):
        stack_named("megatron-cor")


KNOWN = (*FIELDS, *OPTION_FIELDS)


def conditions(line):
    return where.parse(line, KNOWN, WORDS, "--where")


@pytest.mark.parametrize(
    ("line", "values", "expected"),
    [
        ("tp<=8", {"tp": 8}, True),
        ("2<=tp<8", {"tp": 8}, False),
        ("tp*cp + 1 = 9", {"tp": 4, "cp": 2}, True),
        ("dp % 3 != 0 and zero=1", {"dp": 6, "zero": 1}, False),
        ("schedule in (1f1b, zb-v), virtual not in (2, 4)", {"schedule": "zb-v", "virtual": 3}, True),
        ("recompute=block:*", {"recompute": "block:4"}, True),
        ("order!=pp/dp/cp/tp", {"order": "pp/dp/cp/tp"}, False),
    ],
)
def test_conditions_hold_of_one_strategy(line, values, expected):
    assert bool(where.holds(conditions(line), values)) is expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tpp<=8", "'tpp' is not a field; did you mean tp"),
        ("schedule=1f1", "'1f1' is not a value of schedule; did you mean 1f1b"),
        ("schedule<1f1b", "which have no order"),
        ("tp", "is not a condition"),
        ("tp<=8 8", "cannot read '8 8'"),
        ("tp<=8 zero=1", "write e.g. tp*cp<=8, zero=1"),
        ("tp in ()", "names no value"),
        ("tp in (1, two)", "'two' is not an integer"),
        ("", "states no condition"),
        ("tp<=schedule", "schedule has words for values"),
    ],
)
def test_a_condition_that_cannot_be_read_says_what(line, message):
    with pytest.raises(InputError) as caught:
        conditions(line)
    assert message in str(caught.value)


def test_options_round_trip_through_a_line():
    options = StackOptions(first_moment="bfloat16", optimizer_offload=0.5, mtp=1, loss_as_layer=True)
    assert StackOptions(**parse(str(options))) == options
    assert str(StackOptions()) == ""
    for word, on in (("1", True), ("true", True), ("ON", True), ("0", False), ("false", False), ("off", False)):
        assert parse(f"loss_as_layer={word}") == {"loss_as_layer": on}
    with pytest.raises(InputError, match="no such option; did you mean master"):
        parse("mastr=float16")


def test_a_job_s_optimizer_of_whole_matrices_is_the_stack_s_unless_that_names_one():
    muon, adam = (Job(8, 64, optimizer=Optimizer(name)) for name in ("muon", "adamw"))
    assert StackOptions().under(muon) == StackOptions(optimizer="muon")
    assert StackOptions().under(adam) == StackOptions()
    assert StackOptions(optimizer="adam").under(muon) == StackOptions(optimizer="adam")
