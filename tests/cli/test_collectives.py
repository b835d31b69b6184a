"""`phalanx collectives`: every algorithm drawn, proved on request, and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import json_of
from support.sizes import sampled
from typer.testing import CliRunner

from phalanx.cli.schedules import collectives
from phalanx.planning.tables import collectives as tables
from phalanx.schedule.collectives.registry import ALGORITHMS
from phalanx.spec.cluster import presets

NAMES = [(op, algorithm) for op, names in ALGORITHMS.items() for algorithm in names]

CLUSTER = """
name = "lab"
ranks_per_node = 2
nodes = 2
kernels = []

[device]
name = "test"
kind = "cpu"
memory_bytes = 1000000000
usable_bytes = 1000000000
memory_bandwidth_bytes_per_s = 1e13
dense_flops_per_s = { float32 = 1e11 }
own_communication_engine = false
origin = "estimated"
source = "test"

[[tiers]]
name = "loopback"
ranks = 2
latency_s = 1e-5
bandwidth_bytes_per_s_per_gpu_per_direction = 1e12
origin = "measured"
source = "test"

[[tiers]]
name = "ethernet"
ranks = 4
latency_s = 5e-5
bandwidth_bytes_per_s_per_gpu_per_direction = 125e6
uplink_bandwidth_bytes_per_s_per_direction = 125e6
origin = "measured"
source = "1 Gbit/s"
"""


def invoke(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(collectives, words, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(("op", "algorithm"), NAMES)
@pytest.mark.parametrize("ranks", sampled(range(1, 9), (0, 2, 3, 7)))
def test_everything_is_drawn(op: str, algorithm: str, ranks: int) -> None:
    out = invoke("show", algorithm, "--op", op, "--ranks", str(ranks), "--root", str(ranks - 1))
    assert out.startswith("start")
    if ranks > 1:
        assert "round 1 of" in out
    drawn, _, proved = out.partition("proved:")
    assert proved
    last = [line.split()[1:] for line in drawn.strip().splitlines()[-ranks:]]
    everyone = "ABCDEFGH"[:ranks] if ranks < 4 else f"A-{'ABCDEFGH'[ranks - 1]}"
    if op == "all_reduce":
        assert last == [[everyone] * len(last[0])] * ranks
    elif op == "all_to_all":
        assert last == [[f"{chr(ord('A') + j)}{i}" for j in range(ranks)] for i in range(ranks)]  # A_ij -> A_ji
    elif op == "barrier":
        assert last == [list("ABCDEFGH"[:ranks])] * ranks


def test_an_all_to_all_moves_blocks() -> None:
    """A block that was sent on is gone; one that waits on its way is at its receiver's place."""
    out = invoke("show", "bruck", "--op", "all_to_all", "--ranks", "6")
    assert "1 -> 2: block B2, B4, B0, 2 keeps it" in out
    start, after = [line.split() for line in out.splitlines() if line.split()[:1] == ["2"] and "->" not in line][:2]
    assert start == ["2", "C0", "C1", "C2", "C3", "C4", "C5"]
    assert after == ["2", "B0,C0", "B2", "C2", ".", "B4,C4", "."]


@pytest.mark.parametrize(("op", "algorithm"), [n for n in NAMES if n[0] != "barrier"])
def test_a_proof_counts_what_the_table_counts(op: str, algorithm: str) -> None:
    """The share of its buffer that the busiest rank sends, of two commands."""
    share = float(invoke("show", algorithm, "--op", op).rpartition("at most ")[2].split()[0])
    rows = json.loads(invoke("table", "--op", op, "--ranks", "4", "--bytes", "100B", "--json"))["rows"]
    (row,) = [r for r in rows if r["algorithm"] == algorithm]
    if algorithm != "double_tree":  # the table has the best number of segments
        assert row["sent_bytes"] / 100 == pytest.approx(share, rel=1e-3)


def test_nodes_of_any_size() -> None:
    out = invoke("show", "hierarchical", "--ranks", "6", "--node", "3")
    between = [line for line in out.splitlines() if line.endswith("between nodes")]
    assert between
    assert all(int(line.split()[0]) // 3 != int(line.split()[2][:-1]) // 3 for line in between)
    assert len(between) == 2 * 6  # a reduce-scatter and an all-gather between two, of each of 6 ranks


@pytest.mark.parametrize("op", ALGORITHMS)
def test_everything_is_compared(op: str) -> None:
    out = invoke("table", "--op", op, "--ranks", "16", "--bytes", "1MiB")
    assert all(algorithm in out for algorithm in ALGORITHMS[op])
    assert "crossover n* = alpha/beta: nvlink 2.25 MB" in out
    assert "crossover n* = alpha/beta: infiniband 750 kB" in out
    assert ("fastest, by size" in out) == (op != "barrier")


def test_only_tiers_in_use_have_a_crossover() -> None:
    assert "infiniband" not in invoke("table", "--ranks", "8")


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(CLUSTER)
    out = invoke("table", "--cluster", str(file), "--ranks", "4", "--bytes", "16MiB")
    assert "all_reduce of 16MiB over 4 ranks of lab" in out
    assert "ethernet 6.25 kB" in out
    rows = json.loads(invoke("table", "--cluster", str(file), "--ranks", "4", "--bytes", "16MiB", "--json"))["rows"]
    assert rows[0]["algorithm"] == "hierarchical"
    assert rows[0]["seconds"] == pytest.approx(0.1342, rel=0.01)
    invoke("table", "--cluster", str(file), "--ranks", "5", code=2)
    invoke("table", "--cluster", str(tmp_path / "none.toml"), code=2)
    invoke("table", "--cluster", "dgx-h10", code=2)


@pytest.mark.parametrize(
    ("op", "share"),
    [("all_reduce", 1.75), ("all_gather", 0.875), ("reduce_scatter", 0.875), ("all_to_all", 0.875), ("gather", 0.875),
     ("broadcast", 1.0), ("reduce", 1.0), ("barrier", None)],
)  # fmt: skip
@pytest.mark.parametrize("followed", [256, 4])
def test_busbw_is_that_of_nccl_tests(
    op: str, share: float | None, followed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nccl-tests, doc/PERFORMANCE.md: size over time, times the share; less than a link has, on equal links."""
    monkeypatch.setattr(tables, "_FOLLOWED", followed)
    for row in tables.compare(op, 1e8, 8, presets.preset("dgx-h100", 1)).rows:
        if share is None:
            assert row.busbw_bytes_per_s is None
        else:
            assert row.busbw_bytes_per_s == pytest.approx(share * 1e8 / row.seconds)
            assert row.busbw_bytes_per_s < 450e9


def test_the_proof_ends_with_one_line() -> None:
    assert invoke("prove", "--max-ranks", "4").strip().endswith("schedules proved, 1 to 4 ranks")


def test_a_million_ranks_are_priced_by_formula_alone(tmp_path: Path) -> None:
    rows = {row["algorithm"]: row for row in json_of(tmp_path, "collectives table --ranks 1000000 --json")["rows"]}
    ring = rows["ring"]
    assert ring["rounds"] == 2 * (10**6 - 1)
    assert ring["seconds"] == ring["formula_seconds"] > ring["bound"]


def test_formulas_and_followed_messages_agree_where_both_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    one_tier = presets.preset("dgx-h100", 1)
    followed = {row.algorithm: row for row in tables.compare("all_reduce", 1e8, 8, one_tier).rows}
    monkeypatch.setattr(tables, "_FOLLOWED", 4)
    for row in tables.compare("all_reduce", 1e8, 8, one_tier).rows:
        assert row.seconds == pytest.approx(followed[row.algorithm].seconds, rel=1e-6)
        if row.algorithm in ("ring", "rabenseifner", "doubling"):  # in others the busiest rank waits for itself
            assert row.rounds == followed[row.algorithm].rounds
            assert row.sent_bytes == pytest.approx(followed[row.algorithm].sent_bytes, rel=1e-6)
