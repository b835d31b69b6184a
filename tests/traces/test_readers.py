"""Files of nsys, NCCL and CUDA's allocator are read by their content; a stranger's pickle runs nothing."""

from __future__ import annotations

import copy
import json
import os
import pickle
import sqlite3
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import evidence
from support.in_process_cli import text_of

from phalanx.answers.diagnose.diagnosis import diagnosis_of
from phalanx.answers.question.query import Query
from phalanx.spec.errors import InputError
from phalanx.traces import kineto, nsys
from phalanx.traces.breakdown import breakdown
from phalanx.traces.nccl import read_log
from phalanx.traces.plain_pickle import load

QUERY = Query(model="llama3-8b", cluster="dgx-h100", gpus=16, batch=16, seq=4096, strategy="tp=2,sp=1,zero=1")


def _export(file: Path) -> Path:
    """Write an export of two processes, each with two steps of a product, a collective and a copy."""
    base = sqlite3.connect(file)
    base.executescript(
        "CREATE TABLE StringIds(id INTEGER, value TEXT);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL(start INTEGER, end INTEGER, deviceId INTEGER, globalPid INTEGER,"
        " demangledName INTEGER, shortName INTEGER);"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY(start INTEGER, end INTEGER, copyKind INTEGER, globalPid INTEGER);"
        "CREATE TABLE NVTX_EVENTS(start INTEGER, end INTEGER, text TEXT, textId INTEGER, globalTid INTEGER);"
        "CREATE TABLE TARGET_INFO_GPU(name TEXT);"
        "INSERT INTO TARGET_INFO_GPU VALUES('NVIDIA H100 80GB HBM3');"
        "INSERT INTO StringIds VALUES(1, 'nvjet_tst_128x256'), (2, 'ncclDevKernel_AllReduce_Sum_bf16_RING_LL');"
    )
    ms = 1_000_000
    for rank in range(2):
        pid = (rank + 1) * 2**24
        for step in range(2):
            at = step * 100 * ms
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES(?,?,?,?,1,1)", (at, at + 60 * ms, rank, pid))
            kernel = (at + 60 * ms, at + 80 * ms, rank, pid)
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES(?,?,?,?,2,2)", kernel)
            base.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES(?,?,2,?)", (at + 80 * ms, at + 90 * ms, pid))
            base.execute("INSERT INTO NVTX_EVENTS VALUES(?,?,?,NULL,?)", (at, at + 100 * ms, f"step {step}", pid + 7))
    base.commit()
    base.close()
    return file


def test_an_export_of_nsys_is_charged_to_parts(tmp_path: Path) -> None:
    traces = nsys.read(_export(tmp_path / "run.sqlite"))
    assert [(t.rank, t.device) for t in traces] == [(0, "NVIDIA H100 80GB HBM3"), (1, "NVIDIA H100 80GB HBM3")]
    found = breakdown(traces[0], lambda call: "dp")
    assert found.steps == 2
    assert found.parts == pytest.approx({"products": 0.06, "over dp": 0.02, "copy": 0.01, "host": 0.01})
    assert diagnosis_of([str(tmp_path / "run.sqlite")], Query()).step_s == pytest.approx(0.1)


def test_another_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.sqlite"
    base = sqlite3.connect(file)
    base.execute("CREATE TABLE people(name TEXT)")
    base.commit()
    base.close()
    with pytest.raises(InputError, match="has no table of kernels"):
        nsys.read(file)
    (tmp_path / "cut.sqlite").write_bytes(_export(tmp_path / "run.sqlite").read_bytes()[:5000])
    with pytest.raises(InputError, match="cannot be read as nsys's export"):
        nsys.read(tmp_path / "cut.sqlite")


def test_the_inspectors_times_are_compared_with_the_planned_ones(tmp_path: Path) -> None:
    lines = [
        {
            "header": {"rank": rank, "n_ranks": 16, "nnodes": 2},
            "coll_perf": {"coll": "AllReduce", "coll_sn": i, "coll_msg_size_bytes": 2**30, "coll_exec_time_us": 9000},
        }
        for rank in range(2)
        for i in range(3)
    ]
    file = tmp_path / "dump.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n{half of a li")
    found = diagnosis_of([str(file)], QUERY)
    assert found.step_s is None
    (link,) = found.links
    assert (link.collective.op, link.collective.ranks, link.collective.calls) == ("all_reduce", 16, 6)
    assert link.collective.seconds == pytest.approx(9e-3)
    assert link.planned_s is not None
    assert 1e-3 < link.planned_s < 9e-3
    assert "1 lines measure none" in found.used[0]


_LINE = {"n_ranks": 4, "nnodes": 1, "coll_msg_size_bytes": 2**20, "coll_exec_time_us": 90}


@pytest.mark.parametrize("name", _LINE)
def test_lines_of_no_collective_between_ranks_are_counted_and_left_out(name: str, tmp_path: Path) -> None:
    """Numbers that no run writes: what they would be compared with is nothing, or no number."""
    wrong = ["0", "-1", "NaN", "1e999", str(10**400), *(["1"] if name == "n_ranks" else [])]
    lines = []
    for value in (str(_LINE[name]), *wrong):
        header, perf = ({k: v for k, v in _LINE.items() if k.startswith("coll_") is of} for of in (False, True))
        text = json.dumps({"header": {"rank": 0, **header}, "coll_perf": {"coll": "AllReduce", **perf}})
        lines.append(text.replace(f'"{name}": {_LINE[name]}', f'"{name}": {value}'))
    (tmp_path / "dump.jsonl").write_text("\n".join(lines))
    found = diagnosis_of([str(tmp_path / "dump.jsonl")], QUERY)
    assert [link.collective.calls for link in found.links] == [1]
    assert f"{len(wrong)} lines measure none" in found.used[0]


def test_nccls_log_says_which_links_are_used(tmp_path: Path) -> None:
    text = (
        "a:1:2 [0] NCCL INFO comm 0x55 rank 0 nRanks 24 nNodes 3 localRanks 8 localRank 0 MNNVL 0\n"
        "a:1:2 [0] NCCL INFO Channel 00/0 : 9[51000] -> 0[4b000] [receive] via NET/Socket/0\n"
        "a:1:2 [0] NCCL INFO Channel 00/0 : 0[4b000] -> 7[cf000] via P2P/IPC/read\n"
        "a:1:2 [0] NCCL INFO Channel 01/0 : 0[4b000] -> 7[cf000] via P2P/CUMEM\n"
    )
    log = read_log(text)
    assert (log.links, log.ranks, log.nodes) == ({"NET/Socket": 1, "P2P": 2}, 24, 3)
    (tmp_path / "nccl.log").write_text(text)
    assert "sockets" in diagnosis_of([str(tmp_path / "nccl.log")], Query()).cautions[0]


def _snapshot() -> dict[str, Any]:
    """A device that held 6 MiB at its peak, in segments of 20 MiB, and holds 2 now."""
    mib = 2**20
    frames = [{"filename": "train.py", "line": 12, "name": "forward"}]
    block = {"size": 2 * mib, "address": 0, "state": "active_allocated", "frames": frames}
    rest = {"size": 18 * mib, "address": 2 * mib, "state": "inactive"}
    segment = {"device": 0, "address": 0, "total_size": 20 * mib, "blocks": [block, rest], "segment_pool_id": (0, 0)}
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 20 * mib},
        {"action": "alloc", "addr": 0, "size": 2 * mib, "frames": frames},
        {"action": "alloc", "addr": 9, "size": 4 * mib},
        {"action": "free_requested", "addr": 9, "size": 4 * mib},
        {"action": "free_completed", "addr": 9, "size": 4 * mib},
        {"action": "oom", "size": 99 * mib, "device_free": 0},
    ]
    return {"segments": [segment], "device_traces": [trace, []], "allocator_settings": {"max_split_size": -1}}


@pytest.mark.parametrize("groups", [1, 2])
def test_a_collective_that_names_no_group_is_of_the_only_one(groups: int) -> None:
    rows = [{"pg_name": str(i), "pg_desc": f"mesh {i}", "ranks": [i, i + 4]} for i in range(groups)]
    call = kineto._call("ncclDevKernel_AllReduce", {}, {"distributedInfo": {"pg_config": rows}})
    assert (call.group, call.ranks) == (("mesh 0", (0, 4)) if groups == 1 else ("", ()))


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_snapshot_gives_peaks_and_who_holds_most(form: str, tmp_path: Path) -> None:
    file = tmp_path / f"memory.{form}"
    file.write_bytes(pickle.dumps(_snapshot()) if form == "pickle" else json.dumps(_snapshot()).encode())
    found = diagnosis_of([str(file)], Query())
    (use,) = found.memory
    mib = 2**20
    assert (use.allocated_bytes, use.peak_allocated_bytes) == (2 * mib, 6 * mib)
    assert (use.reserved_bytes, use.peak_reserved_bytes, use.failures) == (20 * mib, 20 * mib, 1)
    assert use.largest == (("train.py:12 (forward)", 2 * mib),)
    lines = text_of(tmp_path, f"diagnose memory.{form}").splitlines()
    assert lines[0] == "memory"
    (row,) = (line.split() for line in lines if line.startswith(" memory."))
    assert " ".join(row[1:]) == "2.0 MiB 20.0 MiB 6.0 MiB 20.0 MiB"
    assert ["1 allocations failed" in found.cautions[0], "90% of the reserved" in found.cautions[1]] == [True, True]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner, inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@settings(max_examples=15)
@given(PLAIN, st.sampled_from([3, 4, 5]))
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol), "x") == value


class _Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/harm",)


HARMFUL = {
    "call": _Harm(),
    "class": OrderedDict(a=1),
    "nested": {"segments": [_Harm()]},
    "set": {1, 2},
    "complex": 1j,
}


@pytest.mark.parametrize("value", HARMFUL.values(), ids=HARMFUL)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_of_more_is_refused(value: Any, protocol: int) -> None:
    with pytest.raises(InputError, match="more than plain values"):
        load(pickle.dumps(value, protocol), "x")


def test_a_cut_pickle_and_another_layout_are_one_line(tmp_path: Path) -> None:
    data = pickle.dumps(_snapshot())
    for end in range(2, len(data) - 1, 7):
        with pytest.raises(InputError, match="cut or damaged"):
            load(data[:end], "x")
    (tmp_path / "other.pickle").write_bytes(pickle.dumps({"segments": [{"size": 1}]}))
    with pytest.raises(InputError, match="is not laid out as torch's"):
        diagnosis_of([str(tmp_path / "other.pickle")], Query())


_ODD = ("x", "", 3, -1.5, True, None, [], ["x"], {}, {"x": 1}, 10**400, [[[]]])


@pytest.mark.parametrize("place", ["event", "args", "head"])
def test_an_odd_field_of_a_trace_is_left_out_or_refused(tmp_path: Path, place: str) -> None:
    """Each field of each kind of event, of its arguments and of the head; what is left is still read."""
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(evidence.trace()))
    whole = len(kineto.read(file)[0].start)
    kinds = {e.get("name"): i for i, e in enumerate(evidence.trace()["traceEvents"])}
    tried = 0
    for i in kinds.values() if place != "head" else (0,):
        own = evidence.trace()["traceEvents"][i]
        for key in {"event": own, "args": own.get("args", {}), "head": evidence.trace()}[place]:
            for odd in _ODD:
                content = copy.deepcopy(evidence.trace())
                event = content["traceEvents"][i]
                {"event": event, "args": event.get("args"), "head": content}[place][key] = odd
                file.write_text(json.dumps(content))
                tried += 1
                if place == "head" and key == "traceEvents":
                    with pytest.raises(InputError, match="trace"):
                        kineto.read(file)
                else:
                    assert len(kineto.read(file)[0].start) in (whole - 1, whole)
    assert tried > 30
