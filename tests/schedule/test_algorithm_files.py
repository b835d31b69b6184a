"""Collective algorithms from a user's JSON files: proved, priced and run as named ones are, or refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.in_process_cli import phalanx

from phalanx.answers.answer import plain
from phalanx.answers.schedules.collectives import collectives, proof_of, show
from phalanx.planning.auto.transport import cluster_for_transport, decide
from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.proof import prove
from phalanx.schedule.collectives.registry import ALGORITHMS, build, schedule_of_file
from phalanx.spec.cluster.collective_choice import Choice, pick
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError

NAMED = [(op, name) for op, names in ALGORITHMS.items() for name in names]
SEND = {"source": 0, "destination": 1, "chunk": 0, "adds": True}
PAIR: dict[str, Any] = {"op": "all_reduce", "ranks": 2, "chunks": 1, "rounds": [[SEND]]}
BACK = [{"source": 1, "destination": 0, "chunk": 0}]


def written(path: Path, table: Any) -> str:
    path.write_text(json.dumps(table))
    return str(path)


def columns(s: Schedule) -> list[tuple[int, ...]]:
    rows = np.stack([s.round, s.source, s.destination, s.offset, s.length, s.reduces], axis=1)
    return [tuple(row) for row in rows.tolist()]


@pytest.mark.parametrize(("op", "name"), NAMED)
def test_a_printed_algorithm_is_read_back(op: str, name: str, tmp_path: Path) -> None:
    """It is proved, in as many rounds, for any size of buffer."""
    for ranks in (2, 3, 4, 5):
        answer = show(op, name, ranks)
        path = written(tmp_path / f"{ranks}.json", plain(answer))
        assert proof_of(schedule_of_file(path)).rounds == prove(answer.schedule).rounds
        for size in (0, ranks, 7 * ranks):
            prove(build(op, path, ranks, size))
    assert prove(build(op, path, ranks, 5 * ranks)).sent == prove(build(op, name, ranks, 5 * ranks)).sent or name in (
        "double_tree",  # whose pieces a file has as equal chunks
        "chain",
        "doubling",
    )


@pytest.mark.parametrize(("op", "name"), [("all_reduce", "ring"), ("all_gather", "ring"), ("all_to_all", "pairwise")])
def test_it_costs_what_the_named_one_costs(op: str, name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "mine.json", plain(show(op, name, 8)))
    rows = {row.algorithm: row for row in collectives(op, "100MB", 8, files=[path]).rows}
    assert rows[path].seconds == pytest.approx(rows[name].seconds, rel=1e-12)
    assert rows[path].sent_bytes == rows[name].sent_bytes


def test_what_is_no_algorithm_is_refused(tmp_path: Path) -> None:
    whole = {**PAIR, "rounds": [*PAIR["rounds"], BACK]}
    cases: list[tuple[Any, str]] = [
        ([], "has no rounds"),
        ({**PAIR, "rounds": "all"}, "has no rounds"),
        ({**whole, "ranks": 0}, "is no number from 1 to"),
        ({**whole, "chunks": True}, "is no number from 1 to"),
        ({**whole, "op": "all_gather", "chunks": 3}, "is no multiple of 2"),
        ({**whole, "op": "allreduce", "chunks": 2}, "did you mean all_reduce"),
        ({**PAIR, "rounds": [[{**SEND, "destination": 2}]]}, "destination is no number from 0 to 1"),
        ({**PAIR, "rounds": [[{**SEND, "chunk": -1}]]}, "chunk is no number"),
        ({**PAIR, "rounds": [[{**SEND, "destination": 0}]]}, "sends to itself"),
        ({**PAIR, "rounds": [[{**SEND, "adds": 1}]]}, "adds is true or false"),
        ({**PAIR, "rounds": [[{**SEND, "weight": 1}]]}, "is not a send"),
        ({**PAIR, "rounds": [["0 -> 1"]]}, "is not a send"),
        ({**PAIR, "ranks": 4096, "chunks": 4096}, "contributions to follow, more than"),
    ]
    for number, (table, said) in enumerate(cases):
        path = written(tmp_path / f"{number}.json", table)
        with pytest.raises(InputError, match=said):
            schedule_of_file(path)
    path = written(tmp_path / "unproved.json", PAIR)
    with pytest.raises(InputError, match=r"is not proved: rank 0.* lacks the contribution of rank 1"):
        build("all_reduce", path, 2, 10)
    path = written(tmp_path / "whole.json", whole)
    for op, ranks, root in (("all_gather", 2, 0), ("all_reduce", 3, 0), ("all_reduce", 2, 1)):
        with pytest.raises(InputError, match="is for all_reduce of 2 ranks"):
            build(op, path, ranks, 10, root)


def test_a_file_serves_groups_of_its_ranks_alone(tmp_path: Path) -> None:
    """In the plan's choices and in their price; other groups and operations keep what they have."""
    path = written(tmp_path / "mine.json", plain(show("all_reduce", "ring", 4)))
    cluster = preset("dgx-h100", 2)
    choices = decide(cluster, path)
    for op, ranks in product(("all_reduce", "all_gather"), (2, 4, 8)):
        chosen = pick(choices, op, ranks, 2**20)
        wanted = ("p2p", path) if (op, ranks) == ("all_reduce", 4) else ("native", "")
        assert (chosen.transport, chosen.algorithm) == wanted
        assert bool(cluster_for_transport(cluster, path).fits(op, ranks)) == (wanted[0] == "p2p")
    (fit,) = cluster_for_transport(cluster, path).fits("all_reduce", 4)
    rows = {row.algorithm: row for row in collectives("all_reduce", "1MiB", 4).rows}
    assert float(fit.seconds(2**20)) == pytest.approx(rows["ring"].seconds, rel=1e-9)
    measured = Choice("all_reduce", 8, 0, "shm")
    assert pick((*choices, measured), "all_reduce", 2, 2**20) == measured
    few = written(tmp_path / "few.json", plain(show("all_reduce", "ring", 12)))
    with pytest.raises(InputError, match="is for 12 ranks, and dgx-h100 has 2 x 8"):
        decide(cluster, few)


def test_commands_take_files(tmp_path: Path) -> None:
    """And a real run of one sums what one process sums."""
    code, out, _ = phalanx(tmp_path, "collectives show bruck --op all_gather --ranks 3 --json")
    (tmp_path / "mine.json").write_text(out)
    assert code == 0
    assert phalanx(tmp_path, "collectives prove mine.json")[1].startswith("proved: all_gather by mine.json; 2 rounds")
    assert "mine.json" in phalanx(tmp_path, "collectives table mine.json --op all_gather --ranks 3")[1]
    written(tmp_path / "half.json", PAIR)
    code, out, _ = phalanx(tmp_path, "collectives prove half.json")
    assert (code, out) == (
        1,
        "half.json is not proved: rank 0, chunk [0, 1), after round 1: lacks the contribution of rank 1\n",
    )
    written(tmp_path / "wide.json", {**PAIR, "chunks": 65536, "rounds": [*PAIR["rounds"], BACK]})
    assert "has 65,536 chunks, too many to draw" in phalanx(tmp_path, "collectives show wide.json --ranks 2")[2]
    halves = [[{**send, "chunk": c} for c in (0, 1)] for (send,) in (*PAIR["rounds"], BACK)]
    written(tmp_path / "halves.json", {**PAIR, "chunks": 2, "rounds": halves})
    assert "chunk 1" in phalanx(tmp_path, "collectives show halves.json --ranks 2")[1]
    written(tmp_path / "pair.json", {**PAIR, "rounds": [*PAIR["rounds"], BACK]})
    code, out, _ = phalanx(tmp_path, "collectives reduce pair.json --with max --ranks 2")
    assert code == 0
    assert "0 of 2,000 elements differ from one process" in out
    # A file knows its ranks, and what cannot be proved says what to do.
    for words in ("show pair.json", "table pair.json", "reduce pair.json --with max"):
        assert phalanx(tmp_path, f"collectives {words}")[0] == 0
    both = [{"source": 0, "destination": d, "chunk": 0, "adds": True} for d in (1, 2)]
    written(tmp_path / "both.json", {"op": "all_reduce", "ranks": 3, "rounds": [both]})
    assert "at once; a rank sends to one rank" in phalanx(tmp_path, "collectives prove both.json")[1]
