"""Checkpoints: whole or not there, checked, of no layout."""

from __future__ import annotations

import errno
import json
import math
import resource
import shutil
from itertools import chain, pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fault_injection, rank_cases
from support.rank_pool import Pool
from support.sizes import examples, sampled

from phalanx.runtime.checkpoint import container, store
from phalanx.runtime.checkpoint.async_saver import Saver, agree_on_newest
from phalanx.runtime.checkpoint.boxes import TensorPart, boxes, full_part, pieces, share
from phalanx.runtime.checkpoint.manifest import CheckpointError, Chunk
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, divisors
from phalanx.training.training_step import Training

SIZES = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 2, "heads": 4, "ffn": 40, "max_seq": 16}
SPEC = build(ModelSpec, complete({**SIZES, "kv_heads": 2, "tied": True}), "model")
MAMBA = {"kind": "mamba", "name": "mamba", "heads": 4, "head_dim": 4, "groups": 2, "state": 3, "chunk": 4}
DELTA = {"kind": "delta", "name": "delta", "key_heads": 4, "value_heads": 8, "key_dim": 3, "value_dim": 4}
MIXED = {
    **{
        "layers": 4,
        "pattern": ["mamba", "delta+experts", "attention+mlp", "mamba+experts"],
        "mixers": [MAMBA, DELTA],
    },
    **{"experts": {"count": 4, "top_k": 2, "ffn": 12, "shared_ffn": 8, "latent": 6}, "norms": "both"},
}
HYBRID = build(ModelSpec, complete({**SIZES, **MIXED}), "model")
LINEAR = {
    "pattern": ["fixed+mlp", "channels+mlp", "short", "few+mlp", "near"],
    "mixers": [
        {"kind": "lightning", "name": "fixed", "heads": 4, "head_dim": 4, "chunk": 4},
        {"kind": "channel_delta", "name": "channels", "heads": 4, "head_dim": 4, "taps": 2, "chunk": 4},
        {"kind": "short_conv", "name": "short", "channels": 16, "taps": 3},
        {"kind": "factorised", "name": "few", "heads": 4, "kv_heads": 2, "head_dim": 4, "q_rank": 6},
        {"kind": "attention", "name": "near", "window": 5, "rotary_dim": 0},
    ],
}
NEWER = build(ModelSpec, complete({**SIZES, **LINEAR, "layers": 5}), "model")
SPARSE = {"kv_rank": 6, "nope_dim": 4, "rope_dim": 2, "v_dim": 4, "q_rank": 6}
SPARSE |= {"index": {"heads": 3, "dim": 6, "top": 3}}
LATENT = build(ModelSpec, complete({**SIZES, "head_dim": 6, "latent": SPARSE}), "model")
COMM = Comm(ALONE, mesh(Strategy()))


def save(folder: Path, step: int, tensors: dict[str, torch.Tensor], keep: int = 2) -> None:
    saver = Saver(folder, COMM, keep)
    saver.save(step, [full_part(name, t) for name, t in tensors.items()], {"seed": 0})
    saver.wait()


def load(folder: Path, step: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.full(shape, -1.0)
    store.load(folder, step, [full_part(name, tensor)])
    return tensor


@st.composite
def layouts(draw: st.DrawFn, spec: ModelSpec) -> Strategy:
    pp = draw(st.sampled_from([1, 1, 2]))
    tp = draw(st.sampled_from([tp for tp in (1, 1, 2, 4) if tp * pp <= 6]))
    indexed = spec.latent is not None  # whose keys no rank has to itself
    cp = draw(st.sampled_from([cp for cp in (1, 1, 1 if indexed else 2) if cp * tp * pp <= 4]))
    dp = draw(st.sampled_from([dp for dp in (1, 2, 3, 4) if dp * tp * pp * cp <= 6]))
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    return Strategy(
        dp=dp,
        tp=tp,
        cp=cp,
        ep=draw(st.sampled_from([ep for ep in (1, 2, 4) if dp * cp * tp % ep == 0])) if spec.experts else 1,
        pp=pp,
        schedule=draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"])) if pp > 1 else "1f1b",
        zero=zero,
        shard=draw(st.sampled_from(divisors(dp))) if zero else None,
        micro_batch=draw(st.sampled_from(divisors(12 // dp))),
        bucket=draw(st.sampled_from([0.002, "auto"])),
    )


@examples(2, 40)
@pytest.mark.parametrize("spec", [SPEC, HYBRID, NEWER, LATENT], ids=["llama", "hybrid", "linear", "latent"])
def test_a_run_goes_on_over_any_layout(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec, examples: int
) -> None:
    """Saved at one layout while it trains on, resumed at another, and a third: the curve of one process, in fp64 to
    1e-9."""

    def run(optimizer: str, strategy: Strategy, folder: Path, steps: tuple[int, int], transport: str) -> list[float]:
        job = Job(12, 8, Precision("float64"), Optimizer(optimizer))  # type: ignore[arg-type]
        return pool.run(strategy.world, rank_cases.continue_run, spec, job, strategy, folder, steps, transport)[0]

    alone, folder = Strategy(micro_batch=6), tmp_path_factory.mktemp("whole")
    curves = {name: run(name, alone, folder / name, (0, 6), "native") for name in ("adamw", "sgd", "muon")}

    @settings(max_examples=examples)
    @given(
        st.tuples(layouts(spec), layouts(spec), layouts(spec)),
        st.sampled_from(["native", "p2p", "shm"]),
        st.sampled_from(["adamw", "sgd", "muon"]),
    )
    def continues(given: tuple[Strategy, ...], transport: str, optimizer: str) -> None:
        folder = tmp_path_factory.mktemp("parts")
        found = [run(optimizer, s, folder, (2 * i, 2 * i + 2), transport) for i, s in enumerate(given)]
        assert list(chain(*found)) == pytest.approx(curves[optimizer], rel=1e-9)

    continues()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [1, 2])
def test_first_weights_that_come_late_are_not_those_of_the_checkpoint(
    pool: Pool, tmp_path: Path, zero: int, dtype: str
) -> None:
    """Whether masters lie in the weights' own memory, as in float32, or beside them."""
    job, strategy = Job(2, 8, Precision(dtype)), Strategy(dp=2, zero=zero)  # type: ignore[arg-type]
    for (straight, resumed), differ in pool.run(
        2, fault_injection.resumed_while_weights_travel, SPEC, job, strategy, tmp_path
    ):
        assert resumed == straight
        assert differ == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_checkpoint_continues_to_the_bit(tmp_path: Path, dtype: str, optimizer: str) -> None:
    job = Job(2, 8, Precision(dtype), Optimizer(optimizer))  # type: ignore[arg-type]

    def batch(step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randint(61, (1, 9), generator=generator) for _ in range(2)]

    first = Training(SPEC, job, Strategy(), COMM, seed=0)
    for i in range(3):
        first.step(batch(i), 1e-2)
    saver = Saver(tmp_path, COMM, keep=1)
    saver.save(3, first.owned(), {})
    saver.wait()
    other = Training(SPEC, job, Strategy(), COMM, seed=9)
    other.load(tmp_path, 3)
    for i in range(3, 6):
        assert first.step(batch(i), 1e-2) == other.step(batch(i), 1e-2)


@pytest.mark.parametrize(
    "strategy",
    sampled(
        [
            Strategy(dp=2, compression="topk:0.1"),
            Strategy(dp=2, zero=1, compression="powersgd:2"),
            Strategy(dp=2, compression="int8"),
            Strategy(dp=4, zero=2, shard=2, compression="int4:stochastic"),
        ],
        (0, 3),
    ),
    ids=str,
)
def test_error_feedback_goes_on_to_the_bit(pool: Pool, tmp_path: Path, strategy: Strategy) -> None:
    """Each rank of the same layout has its own residuals again. Another layout, and one of more ranks than save their
    own, has their sum, split evenly: another course, by at most 0.2 % of the loss when this was measured."""
    for most in (8, 1):
        folder = tmp_path / str(most)
        for straight, resumed in pool.run(
            strategy.world, fault_injection.resumed_with_residuals, SPEC, Job(4, 8), strategy, folder, most
        ):
            if most == 8:
                assert resumed == straight
            else:
                assert resumed != straight
                assert [s.loss for s in resumed] == pytest.approx([s.loss for s in straight], rel=5e-3)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_run_of_elements_is_its_boxes(sizes: list[int], data: st.DataObject) -> None:
    shape, n = tuple(sizes), math.prod(sizes)
    start = data.draw(st.integers(0, n - 1)) if sizes else 0
    stop = data.draw(st.integers(start + 1, n)) if sizes else 1
    tensor = torch.arange(n).view(shape)
    found = []
    for offsets, lengths in boxes(shape, start, stop):
        found += tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].flatten().tolist()
    assert found == list(range(start, stop))
    assert len(boxes(shape, start, stop)) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 7))
def test_shares_are_a_partition(sizes: list[int], count: int) -> None:
    parts = [TensorPart(str(i), (n + 2,), 2, torch.arange(n)) for i, n in enumerate(sizes)]
    shares = [list(share(parts, index, count)) for index in range(count)]
    for part in parts:
        mine = [p for own in shares for p in own if p.name == part.name]
        assert torch.cat([p.data for p in mine]).equal(part.data)
        assert mine[0].start == 2
        assert all(a.start + a.data.numel() == b.start for a, b in pairwise(mine))
    loads = [sum(p.data.numel() for p in own) for own in shares]
    assert max(loads) - min(loads) <= 1


@settings(max_examples=20)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_any_cut_reads_what_any_other_wrote(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], writers: int, data: st.DataObject
) -> None:
    folder, shape = tmp_path_factory.mktemp("cut"), tuple(sizes)
    tensor = torch.randn(shape)
    part = folder / ".writing"
    for rank in range(writers):
        chunks = [
            Chunk(p.name, p.shape, offsets, lengths, view.dtype, view.clone)
            for p in share([full_part("a", tensor)], rank, writers)
            for (offsets, lengths), view in pieces(p)
        ]
        part.mkdir(exist_ok=True)
        assert rank in store.missing_ranks(part, writers)
        store.write(part, rank, chunks)
    store.commit(part, folder, 1, writers, {}, keep=1)
    start = data.draw(st.integers(0, tensor.numel() - 1))
    stop = data.draw(st.integers(start + 1, tensor.numel()))
    reader = container.Reader(folder, 1)
    assert reader.read("a", start, stop).equal(tensor.flatten()[start:stop])
    assert reader.contents == {"a": (shape, torch.float32)}


@pytest.mark.parametrize("wrong", [-1, 2**63, 1.0, True, "1", None])
@pytest.mark.parametrize("field", ["shape", "begin", "offsets", "sizes"])
def test_a_count_of_an_index_is_an_integer_of_63_bits(tmp_path: Path, field: str, wrong: object) -> None:
    right = {"shape": [1], "begin": 0, "offsets": [0], "sizes": [1]}

    def read(row: dict[str, Any]) -> dict[str, container.StoredTensor]:
        box = ["rank-00000.safetensors", row["begin"], row["offsets"], row["sizes"]]
        index = {"a": {"shape": row["shape"], "dtype": "F32", "boxes": [box]}}
        (tmp_path / container.INDEX).write_text(json.dumps(index))
        return container.read_index(tmp_path, {"rank-00000.safetensors": 4})

    assert read(right)["a"].shape == (1,)
    with pytest.raises(ValueError, match="shape that is none"):
        read(right | {field: wrong if field == "begin" else [wrong]})


def test_other_tools_read_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {"parameters.a": torch.arange(6.0).view(2, 3), "parameters.b": torch.arange(3), "c": torch.tensor(5.0)}
    save(tmp_path, 1, tensors)
    found = load_file(tmp_path / "step-00000001" / "rank-00000.safetensors")
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


def test_a_crash_while_writing_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"parameters.a": torch.arange(4.0)}
    save(tmp_path, 1, tensors)

    def crash(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("_sync", "_digest"):
        monkeypatch.setattr(store, broken, crash)
        with pytest.raises(CheckpointError, match=r"step 2 cannot be written: .*No space left"):
            save(tmp_path, 2, tensors)
        monkeypatch.undo()
    assert store.intact_steps(tmp_path) == [1]
    assert load(tmp_path, 1, "parameters.a", (4,)).tolist() == [0, 1, 2, 3]
    for step in (2, 3):
        save(tmp_path, step, tensors)
    assert store.intact_steps(tmp_path) == [2, 3]
    assert not list(tmp_path.glob(".writing*"))


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": torch.zeros(9)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 cannot be written: File too large: the disk is full, or"):
            save(tmp_path, 2, {"a": torch.zeros(30_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.intact_steps(tmp_path) == [1]
    assert not list(tmp_path.rglob("*.safetensors"))[1:]


def test_training_goes_on_while_its_past_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, changed, write = torch.ones(5), Event(), store.write

    def later(*args: object) -> None:
        assert changed.wait(10)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "write", later)
    saver = Saver(tmp_path, COMM, keep=1)
    saver.save(1, [full_part("a", tensor)], {})
    tensor.zero_()
    assert store.intact_steps(tmp_path) == []
    changed.set()
    saver.wait()
    assert load(tmp_path, 1, "a", (5,)).tolist() == [1] * 5


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


DAMAGES = {
    "a flipped bit": lambda path: _flip(path / "rank-00000.safetensors"),
    "a short file": lambda path: _truncate(path / "rank-00000.safetensors"),
    "a file that is gone": lambda path: (path / "rank-00000.safetensors").unlink(),
    "no index": lambda path: (path / "tensors.json").unlink(),
    "a damaged index": lambda path: _flip(path / "tensors.json"),
    "another seed": lambda path: _edit(path / "phalanx.json", '"seed": 0', '"seed": 1'),
    "nothing that it says of itself": lambda path: (path / "phalanx.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: str) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, {"parameters.a": torch.full((300,), float(step))}, keep=3)
    DAMAGES[damage](tmp_path / "step-00000003")
    assert agree_on_newest(tmp_path, COMM) == 2
    assert capfd.readouterr().err.startswith("checkpoint of step 3 is damaged (")
    assert load(tmp_path, 2, "parameters.a", (300,)).unique().tolist() == [2]
    # It does not count among those that are kept.
    save(tmp_path, 4, {"parameters.a": torch.zeros(300)}, keep=2)
    assert store.intact_steps(tmp_path) == [2, 4]


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    save(tmp_path, 1, {"parameters.a": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"cannot be loaded: parameters\.b is not in the checkpoint"):
        load(tmp_path, 1, "parameters.b", (2,))
    with pytest.raises(CheckpointError, match=r"has shape \(2,\) in the checkpoint, not \(3,\)"):
        load(tmp_path, 1, "parameters.a", (3,))
    about = tmp_path / "step-00000001" / "phalanx.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "version": 7}))
    # Of a version that is not ours nothing is set aside: somebody else can read it.
    with pytest.raises(CheckpointError, match="version 7"):
        agree_on_newest(tmp_path, COMM)
    shutil.rmtree(tmp_path / "step-00000001")
    assert agree_on_newest(tmp_path, COMM) is None
    save(tmp_path, 2, {"parameters.a": torch.zeros(2)})
    (tmp_path / "step-00000002" / "tensors.json").unlink()
    with pytest.raises(CheckpointError, match="no intact checkpoint"):
        agree_on_newest(tmp_path, COMM)


def test_what_the_disk_does_not_give_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"parameters.a": torch.zeros(2)})
    digest = store._digest

    def fails(file: Path) -> str:
        if file.parent.name.endswith("2"):
            raise OSError(errno.EIO, "Input/output error")
        return digest(file)

    monkeypatch.setattr(store, "_digest", fails)
    assert agree_on_newest(tmp_path, COMM) == 1
    monkeypatch.undo()
    assert agree_on_newest(tmp_path, COMM) == 2


def test_a_writer_that_cannot_even_tidy_up_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(store, "_sync", read_only)
    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(CheckpointError, match="Read-only"):
        save(tmp_path, 1, {"a": torch.zeros(2)})


def test_all_ranks_hear_of_one_that_cannot_write(pool: Pool, tmp_path: Path) -> None:
    said = pool.run(3, rank_cases.one_cannot_write, tmp_path, 1)
    assert said == ["the checkpoint of step 1 cannot be written: rank 1: OSError: [Errno 5] gone"] * 3
    assert store.all_steps(tmp_path) == []


def test_a_step_is_saved_anew_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (1.0, 2.0):
        save(tmp_path, 3, {"a": torch.full((2,), value)}, keep=1)
    assert load(tmp_path, 3, "a", (2,)).tolist() == [2, 2]
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a reader holds the files of the old one
    save(tmp_path, 4, {"a": torch.zeros(2)}, keep=1)
    monkeypatch.undo()
    assert store.all_steps(tmp_path) == [4]
    Saver(tmp_path, COMM, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]
