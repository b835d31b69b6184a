"""What ended a run is read from torch's own messages, of every release that words them differently."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.answers.diagnose.diagnosis import diagnosis_of
from phalanx.answers.question.query import Query
from phalanx.spec.byte_sizes import write_bytes
from phalanx.traces import failures

_SINCE_2_1 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU {gpu} has a total capacity of "
    "79.1 GiB of which {free} GiB is free. Including non-PyTorch memory, this process has 78.5 GiB memory in use. Of "
    "the allocated memory {held} GiB is allocated by PyTorch, {pools}and {idle} GiB is reserved by PyTorch but "
    "unallocated. "
)
_BEFORE = (
    "RuntimeError: CUDA out of memory. Tried to allocate {asked} GiB (GPU {gpu}; 79.1 GiB total capacity; {held} GiB "
    "already allocated; {free} GiB free; {reserved} GiB reserved in total by PyTorch)"
)
_GIB = st.integers(0, 80)
_STEP = " iteration {}/ 100 | elapsed time per iteration (ms): 2000.0 |\n"


def _timeout(rank: int, number: int, elements: int | None = None) -> str:
    sizes = "" if elements is None else f", NumelIn={elements}, NumelOut={elements}"
    return (
        f"[rank{rank}]:[E1 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={number}, OpType=ALLREDUCE{sizes}, Timeout(ms)=600000) ran for 600061 milliseconds before "
        "timing out.\n"
    )


@given(st.integers(1, 80), _GIB, _GIB, _GIB, st.integers(0, 7), st.booleans())
def test_memory_is_in_pieces_where_what_is_idle_and_free_would_hold_the_tensor(
    asked: int, free: int, held: int, idle: int, gpu: int, pools: bool
) -> None:
    graphs = "with 1.5 GiB allocated in private pools (e.g., CUDA Graphs), " * pools
    words = {"asked": asked, "free": free, "held": held, "idle": idle, "gpu": gpu}
    for text in (_SINCE_2_1.format(**words, pools=graphs), _BEFORE.format(**words, reserved=held + idle)):
        found = failures.read(f"before\n{text}\nafter").allocation
        assert found is not None
        sizes = (found.asked_bytes, found.free_bytes, found.allocated_bytes, found.idle_bytes)
        assert (found.device, *sizes) == (str(gpu), *(2**30 * n for n in (asked, free, held, idle)))
        assert ("pieces" in found.verdict) == (asked <= free + idle)
        if asked > free + idle:
            assert f"{write_bytes(2**30 * (asked - free - idle))} are missing" in found.verdict


def test_a_message_that_says_no_sizes_is_no_failed_allocation() -> None:
    assert not failures.read("CUDA out of memory. Tried to allocate 2.00 GiB. The rest is cut\n" + "x" * 2000)


@given(st.dictionaries(st.integers(0, 99), st.integers(1, 10**6), min_size=1, max_size=6), st.randoms())
def test_ranks_that_wait_in_one_collective_wait_for_others_and_in_several_for_each_other(
    numbers: dict[int, int], shuffled: object
) -> None:
    lines = [_timeout(rank, n + later, 8) for rank, n in numbers.items() for later in (0, 3)]
    shuffled.shuffle(lines)  # type: ignore[attr-defined]
    found = failures.read("".join(lines))
    assert {one.rank: one.number for one in found.stuck} == numbers
    assert {(one.op, one.elements, one.timeout_s) for one in found.stuck} == {("all_reduce", 8, 600.0)}
    (said,) = found.verdicts
    assert ("different collectives" in said) == (len(set(numbers.values())) > 1)


def test_the_same_number_of_other_elements_is_another_collective() -> None:
    assert "different collectives" in failures.read(_timeout(0, 5, 8) + _timeout(1, 5, 9)).verdicts[0]
    assert "did not get there" in failures.read(_timeout(0, 5) + _timeout(1, 5)).verdicts[0]


@pytest.mark.parametrize("steps", [0, 4])
def test_a_log_that_ends_in_a_failure_is_diagnosed_with_or_without_steps(steps: int, tmp_path: Path) -> None:
    text = "".join(map(_STEP.format, range(1, steps + 1)))
    memory = _BEFORE.format(asked=2, gpu=0, held=19, free=1, reserved=28)
    (tmp_path / "run.log").write_text(text + _timeout(3, 7) + memory)
    answer = diagnosis_of([str(tmp_path / "run.log")], Query())
    assert answer.step_s == (2.0 if steps else None)
    assert ["out of memory" in said for said in answer.cautions] == [True, False]
    query = Query(model="llama3-8b", cluster="dgx-h100", gpus=8, batch=8, seq=4096, strategy="zero=3")
    planned = diagnosis_of([str(tmp_path / "run.log")], query)
    assert planned.cautions[0].endswith(f"the plan takes {write_bytes(planned.planned_bytes or 0)}")


def test_a_training_log_with_nccls_lines_has_its_steps_too(tmp_path: Path) -> None:
    link = "a:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0\n"
    (tmp_path / "run.log").write_text(link + "".join(map(_STEP.format, range(1, 5))))
    answer = diagnosis_of([str(tmp_path / "run.log")], Query())
    assert answer.step_s == 2.0
    assert any("NET/Socket" in said for said in answer.cautions)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        # pytorch/pytorch issue 79388, and a release that counts in ms.
        (
            "The client socket has timed out after 60s while trying to connect to (slurm-bm-13, 29500).",
            "nothing answered at slurm-bm-13 port 29500 for 60 s",
        ),
        (
            "The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 56321).",
            "nothing answered at 10.0.0.1 port 56321 for 60000 ms",
        ),
        (
            "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 8/16 clients joined.",
            "8 of 16 processes joined the store in 901 s",
        ),
        ("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError", "fewer nodes met than --nnodes asks for"),
        # NVIDIA/nccl issue 1769.
        ("Cuda failure 802 'system not yet initialized'", "its fabric manager does not run"),
        (
            "init.cc:871 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 9000",
            "ranks 1 and 0 are on one GPU (9000)",
        ),
    ],
)
def test_ranks_that_never_met_are_said_with_what_to_see_to(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(f"[rank1]: Traceback\n[rank1]: {line}\n")
    ended = diagnosis_of([str(tmp_path / "run.log")], Query())
    assert any(said in caution for caution in ended.cautions)
