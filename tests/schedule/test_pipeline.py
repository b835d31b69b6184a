"""Pipeline schedules: proved, priced as the papers say, understood by torch, and refused where they are wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import error_of, phalanx, text_of
from torch.distributed.pipelining import schedules as torchs

from phalanx.cost.pipeline_time import Costs, price
from phalanx.schedule.pipeline.actions import Action, PipelineSchedule
from phalanx.schedule.pipeline.proof import prove, prove_slots
from phalanx.schedule.pipeline.schedules import SCHEDULES, build
from phalanx.schedule.pipeline.simulate import insert_sends, strip_sends
from phalanx.schedule.pipeline.torch_csv import cells, from_csv, to_csv
from phalanx.spec.errors import InputError, Unproved


def legal(name: str, ranks: int, micro_batches: int) -> PipelineSchedule | None:
    try:
        return build(name, ranks, micro_batches, 3 if name == "interleaved" and ranks % 2 else None)
    except InputError:
        return None


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_proved_and_torch_agrees(name: str) -> None:
    built = 0
    for ranks in (1, 2, 3, 4, 7):
        for m in (1, 2, 3, 4, 7, 8, 14, 17):
            s = legal(name, ranks, m)
            if s is None:
                continue
            built += 1
            whole = insert_sends(s)
            assert prove(s) == prove(whole)
            assert strip_sends(whole) == s
            theirs = {r: [torchs._Action.from_str(str(a)) for a in own] for r, own in enumerate(whole.actions)}
            stage_to_rank = dict(enumerate(s.rank_of)).__getitem__
            torchs._simulate_comms_compute(theirs, stage_to_rank, s.chunks)
    assert built > 10


@settings(max_examples=60)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 9), st.integers(1, 20), st.sampled_from([0.5, 1, 3]))
def test_bubbles_of_one_chunk_per_rank(name: str, p: int, m: int, forward: float) -> None:
    s = build(name, p, m)
    found = price(s, Costs.equal(s.chunks, forward))
    assert found.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert found.bubble_overhead == pytest.approx((p - 1) / m)
    assert found.peak == ((m,) * p if name == "gpipe" else tuple(min(p - r, m) for r in range(p)))


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 4))
def test_the_bubble_of_interleaved_and_its_messages(p: int, rounds: int, virtual: int) -> None:
    m = p * rounds
    found = price(build("interleaved", p, m, virtual), Costs.equal(p * virtual))
    assert found.bubble_fraction == pytest.approx((p - 1) / (m * virtual + p - 1))
    plain = price(build("1f1b", p, m), Costs.equal(p))
    assert found.messages == (plain.messages * (p * virtual - 1) // (p - 1) if p > 1 else 0)


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(0, 12), st.sampled_from([(1, 1, 1), (1, 1.2, 0.9), (2, 2, 1)]))
def test_the_bubble_of_zb_h1(p: int, more: int, costs: tuple[float, float, float]) -> None:
    """(P-1)(F + I - W), a third of 1f1b's where they are equal, with no more memory (Qi et al. 2023, table 2)."""
    f, i, w = costs
    m = 2 * p - 1 + more
    found = price(build("zb-h1", p, m), Costs.equal(p, f, i, w))
    assert found.makespan - m * (f + i + w) == pytest.approx((p - 1) * (f + i - w))
    assert max(found.peak) == min(p, m)


@pytest.mark.parametrize(("name", "most"), [("zb-v", 0), ("dualpipe-v", 1)])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_a_v_leaves_the_ramp_alone(name: str, most: int, p: int) -> None:
    """With equal F, I and W: P-1 forwards of a chunk until the last rank can begin, and no idle time else; twice P
    chunks live, one more in DualPipe's pairs."""
    for m in (2 * p, 3 * p + 1):
        found = price(build(name, p, m), Costs.equal(2 * p))
        assert found.makespan == pytest.approx(6 * m + p - 1)
        assert max(found.peak) == 2 * p + most


def test_transfers_and_uneven_chunks() -> None:
    s = build("1f1b", 3, 4)
    slow = Costs([1, 3, 1], [1, 3, 1], [1, 3, 1])
    assert price(s, slow).makespan == pytest.approx(1 + 4 * 9 + 2)  # the slow rank is always busy
    one = build("1f1b", 3, 1)
    assert price(one, Costs.equal(3, transfer=0.25)).makespan == pytest.approx(9 + 4 * 0.25)
    v = build("zb-v", 3, 1)  # at the turn of the V both chunks are of one rank
    costs = Costs.equal(6, 1, 1, 1e-9, transfer=0.25)
    assert price(v, costs).makespan == pytest.approx(12 + 8 * 0.25, abs=1e-6)


def test_a_rank_that_moves_its_own_bytes_computes_later() -> None:
    """The rank in the middle takes and gives two messages a micro-batch; the last one takes one and gives one."""
    s, o = build("1f1b", 3, 20), 0.25
    middle = price(s, Costs([1, 3, 1], [1, 3, 1], [1, 3, 1], o, o))
    assert middle.makespan == pytest.approx(1 + 20 * (9 + 4 * o) + 2 + o, abs=2 * o)
    end = price(s, Costs([1, 1, 3], [1, 1, 3], [1, 1, 3], o, o))
    assert end.makespan == pytest.approx(2 + o + 20 * (9 + 2 * o) + 4 + 2 * o, abs=2 * o)
    assert middle.work == price(s, Costs([1, 3, 1], [1, 3, 1], [1, 3, 1])).work  # it is no pass, but between them
    one = build("1f1b", 3, 1)  # nobody has anything to do meanwhile
    assert (
        price(one, Costs.equal(3, transfer=o)).makespan
        == price(one, replace(Costs.equal(3), transfer=o, overhead=o)).makespan
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_on_one_core_a_bubble_costs_nothing(name: str) -> None:
    """A rank that waits leaves the core to the others: the step is as long as all ranks' work, in any schedule. At a
    pace that others do not change, the step is that of ranks with a core each."""
    s = legal(name, 4, 8)
    assert s is not None
    uneven = [1 + 0.5 * (chunk % 3) for chunk in range(s.chunks)]
    o = 0.125
    costs = Costs(uneven, uneven, uneven, o, o)
    alone = price(s, costs)
    core = price(s, replace(costs, pace=[4.0, 2.0, 4 / 3, 1.0]))
    messages = 2 * o * alone.messages  # each occupies both its ends
    assert core.makespan == pytest.approx((sum(alone.work) + messages) / 4)
    assert alone.makespan > core.makespan * 1.01
    assert [len(times) for times in core.times] == [len(times) for times in alone.times]
    faster = price(s, replace(costs, pace=[2.0] * 4))
    assert faster.makespan == pytest.approx(alone.makespan / 2)
    stuck = changed(s, 1, *map(str, reversed(s.actions[1])))
    with pytest.raises(Unproved, match="rank 1"):
        price(stuck, replace(costs, pace=[2.0] * 4))


def changed(s: PipelineSchedule, rank: int, *actions: str) -> PipelineSchedule:
    own = tuple(_action(word) for word in actions)
    return replace(s, actions=(*s.actions[:rank], own, *s.actions[rank + 1 :]))


def _action(word: str) -> Action:
    kind = word.strip("0123456789")
    chunk, micro_batch = word.split(kind)
    return Action(kind, int(chunk), int(micro_batch))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        (["1F0", "1B0"], "rank 1: 1F1 is missing"),
        (["1F0", "1B0", "1F1", "1B1", "1B1"], "rank 1: 1B1 runs 2 times"),
        (["1F0", "1F1", "1B0", "1I1"], "micro-batch 1 runs 0 times as B, 1 as I and 0 as W"),
        (["1F0", "1B0", "1F1", "1B1", "1W1"], "1 times as B, 0 as I and 1 as W"),
        (["1B0", "1F0", "1F1", "1B1"], "rank 1: 1B0 comes before 1F0"),
        (["1F0", "1F1", "1B0", "1W1", "1I1"], "rank 1: 1W1 comes before 1I1"),
        (["1F0", "1B0", "1F1", "1B1", "0F0"], "rank 1: 0F0 belongs to rank 0"),
        (["1F0", "1B0", "1F1", "1B1", "1F2"], "rank 1: 1F2 is of no chunk or micro-batch"),
        (
            ["1F1", "1B1", "1F0", "1B0"],
            "deadlock: rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1",
        ),
    ],
)
def test_broken_schedules_are_refused(actions: list[str], said: str) -> None:
    s = build("1f1b", 2, 2)
    if said.startswith("deadlock"):
        s = changed(s, 0, "0F0", "0B0", "0F1", "0B1")
    with pytest.raises(Unproved, match=said):
        prove(changed(s, 1, *actions))


def test_the_textbook_1f1b_deadlocks_where_sends_block() -> None:
    """Its listing sends forward and backward as soon as there is something: fine as long as sends are buffered."""
    s = changed(
        changed(build("1f1b", 2, 2), 0, "0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"),
        1,
        *("1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"),
    )
    with pytest.raises(
        Unproved, match="deadlock with sends that block: rank 0 at 0SEND_F1 against rank 1 at 1SEND_B0"
    ):
        prove(s)
    prove(build("1f1b", 2, 2))


def test_sends_that_are_wrong_are_refused() -> None:
    s = insert_sends(build("1f1b", 2, 1))
    assert [list(map(str, own)) for own in s.actions] == [
        ["0F0", "0SEND_F0", "0RECV_B0", "0B0"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0"],
    ]
    for actions, said in (
        (["0SEND_F0", "0F0", "0RECV_B0", "0B0"], "rank 0: 0SEND_F0 comes before 0F0"),
        (["0F0", "0SEND_F0", "0B0", "0RECV_B0"], "rank 0: 0RECV_B0 comes after 0B0"),
        (["0F0", "0SEND_F0", "0B0"], "rank 0: 0RECV_B0 is missing"),
        (["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0SEND_B0"], "rank 0: 0SEND_B0 has no use on any rank"),
    ):
        with pytest.raises(Unproved, match=said):
            prove(changed(s, 0, *actions))


PICTURE = "0F0,0F1,,,,,0B0,0B1\n,1F0,1F1,,,,1B0,1B1\n,,2F0,2F1,,,2B0,2B1\n,,,3F0,3F1,,3B0,3B1\n"


def test_a_picture_with_one_backward_on_all_ranks_at_once_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "picture.csv"
    path.write_text(PICTURE)
    with pytest.raises(
        Unproved, match="6 actions come too early; rank 0: 0B0 is in slot 6 and needs 1B0, which is in"
    ):
        prove_slots(from_csv(path), cells(path))
    code, out, _ = phalanx(tmp_path, "pipeline prove picture.csv --slots")
    assert (code, out.startswith("picture.csv: 6 actions come too early")) == (1, True)
    path.write_text("0F0,0SEND_F0,,,0RECV_B0,0B0\n,1RECV_F0,1F0,1B0,1SEND_B0,\n")
    prove_slots(from_csv(path), cells(path))
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n")
    prove_slots(from_csv(path), cells(path))


def test_a_picture_that_leaves_passes_out_is_refused(tmp_path: Path) -> None:
    """GPipe as it is drawn: stage 2 without B3, stage 3 without F3, B3 and B2."""
    path = tmp_path / "picture.csv"
    drawn = to_csv(build("gpipe", 4, 4))
    for left_out in ("2B3", "3F3", "3B3", "3B2"):
        assert drawn.count(left_out) == 1
        drawn = drawn.replace(left_out, "")
    path.write_text(drawn)
    code, out, _ = phalanx(tmp_path, "pipeline prove picture.csv")
    assert (code, "rank 2: the backward pass of chunk 2 for micro-batch 3 runs 0 times" in out) == (1, True)


@pytest.mark.parametrize(("names", "said"), [(["picture.csv", "1f1b"], "1f1b"), ([], "naive")])
def test_slots_of_what_is_no_file_are_refused(names: list[str], said: str, tmp_path: Path) -> None:
    """Before anything is proved: what nobody looked at is not said to be proved."""
    (tmp_path / "picture.csv").write_text(PICTURE)
    code, out, err = phalanx(tmp_path, "pipeline prove", *names, "--slots")
    reason = f"only the cells of a CSV file are time slots, and {said} is not one"
    assert (code, out, err) == (2, "", f"error: --slots: {reason}; name files, or leave it out\n")


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_goes_there_and_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    for s in (build(name, 3, 6), insert_sends(build(name, 3, 6))):
        path.write_text(to_csv(s))
        again = from_csv(path)
        assert again == replace(s, name="s.csv")


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("0UNSHARD,0F0,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1,0RESHARD\n".replace("(0F1;", "1F0,(0F1;"))
    s = from_csv(path)
    assert " ".join(map(str, s.actions[0])) == "0F0 1F0 0F1 1B0 1F1 0B0 1B1 0B1"
    prove(s)
    for text, said in (
        ("0F0,0X0\n", r"s\.csv, line 1, cell 2 = '0X0': is not an action"),
        ("0F0,0B0\n2F0,2B0\n", "has chunk 2, but no action of chunk 1"),
        ("\n", "holds no action"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            from_csv(path)


def test_the_command_draws_compares_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = text_of(tmp_path, "pipeline show 1f1b zb-h1 --ranks 2 --micro-batches 3")
    assert "rank 0 F0F1····B0  F2B1  ··B2    idle  25%, at most   2 live" in out
    monkeypatch.setenv("COLUMNS", "24")
    narrow = phalanx(tmp_path, "pipeline show interleaved --ranks 2 --micro-batches 4")[1]
    monkeypatch.delenv("COLUMNS")
    assert all(len(line) <= 24 for line in narrow.splitlines() if line.startswith("rank 0"))
    shown = "".join(line.partition("rank 0 ")[2].strip() for line in narrow.splitlines() if "rank 0 " in line)
    drawn = {(k, int(n)) for k, n in re.findall(r"([FBfb])(\d)", shown)}
    assert drawn == {(k, n) for k in "FBfb" for n in range(4)}  # each pass with its number, second chunk small
    assert "idle" in narrow
    assert "·" in narrow
    assert "bubble fraction 25.0% of the step, bubble overhead 33.3% over the ideal; at most 2 activations" in out
    _, out, _ = phalanx(tmp_path, "pipeline table --json --micro-batches 8")
    figures = {s["name"]: s for s in json.loads(out)["schedules"]}
    assert set(figures) == set(SCHEDULES)
    assert figures["gpipe"]["peak_activations"] == [8] * 4
    _, out, _ = phalanx(tmp_path, "pipeline csv 1f1b --ranks 2 --micro-batches 1")
    assert out == "0F0,0B0\n1F0,1B0\n"
    _, sends, _ = phalanx(tmp_path, "pipeline csv 1f1b --ranks 2 --sends")
    (tmp_path / "s.csv").write_text(sends)
    assert phalanx(tmp_path, "pipeline csv s.csv --sends")[1] == sends
    for words, said in (
        (("show", "1fb1"), "no such schedule; did you mean 1f1b"),
        (("show", "1f1b", "--ranks", "0"), "ranks = 0: must be at least 1"),
        (("show", "missing.csv"), "missing.csv': no such file"),
        (("show", "1f1b", "--costs", "1,2"), "is not three numbers"),
        (("show", "1f1b", "--virtual", "0"), "virtual = 0: must be at least 1"),
        (("show", "1f1b", "--ranks", "100000"), "forward passes are too many to follow"),
        (("table", "--ranks", "3", "--micro-batches", "8000"), "168,000 forward passes are too many to follow"),
        (("show", "1f1b", "--virtual", "3"), "virtual = 3: 1f1b has 1 per rank"),
        (("csv", "dualpipe-v", "--micro-batches", "7"), "needs two per rank to fill both ways, 8"),
    ):
        assert said in error_of(tmp_path, "pipeline", *words)
