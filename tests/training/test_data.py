from __future__ import annotations

import gzip
import hashlib
import json
import os
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.normalizers import Replace

from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import from_tables
from phalanx.spec.job import Train
from phalanx.training.data import Batches, TokenSet, prepare, require_documents, take, texts, validation_windows
from phalanx.training.data.encode import guarded, open_tokenizer
from phalanx.training.data.texts import find_texts, join_chunks, paragraphs
from phalanx.training.data.tokens import HELD_OUT


@given(st.integers(0, 40), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2]))
def test_batches_do_not_depend_on_the_layout(step: int, replicas: int, micro_batch: int) -> None:
    batches = Batches(np.arange(500, dtype=np.uint16), seq=7, global_batch=12, seed=3)
    whole = take(batches.tokens, batches.starts(step), 7)
    shares = [batches.share(step, r, replicas, micro_batch) for r in range(replicas)]
    assert np.array_equal(np.concatenate([b for share in shares for b in share]), whole)
    assert (np.diff(whole, axis=1) == 1).all()  # contiguous windows


@given(st.lists(st.integers(0, 199), max_size=30), st.integers(0, 190), st.integers(1, 9))
def test_places_start_anew_with_each_document(starts: list[int], start: int, seq: int) -> None:
    documents = np.unique(np.array(starts, dtype=np.int64))
    ids, places = take(np.arange(200), np.array([start, 0]), seq, documents)
    assert np.array_equal(ids, [np.arange(start, start + seq + 1), np.arange(seq + 1)])
    for row, of_row in zip(ids, places, strict=True):
        wanted = [0]
        for token in row[1:]:
            wanted.append(0 if token in documents else wanted[-1] + 1)
        assert list(of_row) == wanted


def test_a_batch_does_not_copy_where_documents_begin(tmp_path: Path) -> None:
    """They may be a large file: eight bytes for each of a billion documents."""
    np.save(tmp_path / "documents.npy", np.arange(0, 4_000_000, 4))
    documents = np.load(tmp_path / "documents.npy", mmap_mode="r")
    tokens = np.zeros(4_000_000, dtype=np.uint16)
    tracemalloc.start()
    places = take(tokens, np.array([0, 3_999_000]), 7, documents)[1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert places.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]] * 2
    assert peak < documents.nbytes / 10


def test_an_epoch_shows_every_window_once_and_the_next_another_order() -> None:
    batches = Batches(np.arange(1000, dtype=np.uint16), seq=9, global_batch=10, seed=0)
    assert batches.windows == 110
    epoch = np.concatenate([batches.starts(i) for i in range(11)])
    assert len(np.unique(epoch)) == 110
    assert epoch.max() + 9 < 1000
    assert set(np.diff(np.sort(epoch))) == {9}, "windows tile the text"
    assert not np.array_equal(batches.starts(0), batches.starts(11))


def test_the_order_of_windows_is_that_of_the_releases_before() -> None:
    """A run that was begun with one release is resumed with another."""
    batches = Batches(np.arange(1000, dtype=np.uint16), seq=9, global_batch=10, seed=3)
    assert batches.starts(0).tolist() == [262, 100, 631, 253, 586, 46, 550, 595, 199, 676]
    assert batches.starts(12).tolist() == [11, 695, 290, 758, 713, 911, 416, 200, 218, 812]


def test_too_little_text_is_said() -> None:
    with pytest.raises(InputError, match=r"job\.seq"):
        Batches(np.arange(10), seq=10, global_batch=1, seed=0)


def test_validation_windows_are_spread() -> None:
    tokens = np.arange(101)
    assert list(validation_windows(tokens, 10, 0)) == list(range(0, 100, 10))
    assert list(validation_windows(tokens, 10, 3)) == [0, 40, 90]


def _ids(tokens: TokenSet) -> list[int]:
    return [*tokens.training().tolist(), *tokens.validation().tolist()]


def _starts(tokens: TokenSet) -> list[int]:
    return [*tokens.training_starts().tolist(), *(tokens.validation_starts() + tokens.train_tokens).tolist()]


def test_the_corpus_is_tokenised_once_and_reads_back(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    texts = "It was a dark night.\n\nThe rain fell.\n\n" * 40, "Another, é ü 漢字.\n" * 10
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    train = Train(data=str(tmp_path / "texts"))
    tokens = prepare(train, 300, tmp_path)
    assert tokens.vocab <= 300
    assert tokens.validation_tokens == int((tokens.train_tokens + tokens.validation_tokens) * HELD_OUT)
    assert Tokenizer.from_file(str(tokens.tokenizer)).decode(_ids(tokens)) == "".join(texts)
    assert (tokens.documents, _ids(tokens).count(0)) == (2, 1)  # one end-of-text, between them
    counts = np.bincount(tokens.training())
    p = counts[counts > 0] / counts.sum()
    assert tokens.unigram_entropy == pytest.approx(float(-(p * np.log(p)).sum()))
    before = (tokens.folder / "tokens.npy").stat().st_mtime_ns
    assert prepare(train, 300, tmp_path) == tokens
    assert (tokens.folder / "tokens.npy").stat().st_mtime_ns == before


def test_the_shipped_corpus_is_what_it_was(tmp_path: Path) -> None:
    """Runs on it go on across versions: its digest stays, and so do the tokens of a text."""
    (austen,) = find_texts("austen")
    text = "".join(austen.chunks())
    assert len(text) == 4_025_032
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "ae4140c6e5ab543c"
    (tmp_path / "some.txt").write_text(text[:200_000])
    tokens = prepare(Train(data=str(tmp_path / "some.txt")), 300, tmp_path)
    assert tokens.digest == "6f4315808ca6d2fb-300-v1"
    assert hashlib.sha256(np.array(_ids(tokens), dtype=np.uint16).tobytes()).hexdigest()[:16] == "287b0776fb4e8e2d"


@pytest.mark.parametrize("how", ["cut", "flipped", "garbage", "gone"])
@pytest.mark.parametrize("name", ["about.json", "documents.npy", "tokenizer.json", "tokens.npy"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, name: str, how: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox\n\njumps over the lazy dog\n\n" * 40)
    train = Train(data=str(text))
    made = prepare(train, 300, tmp_path)
    before = {file.name: file.read_bytes() for file in made.folder.iterdir()}
    file = made.folder / name
    content = before[name]
    changed = {"cut": content[: len(content) // 2], "garbage": b"\xff\x00", "gone": b""}
    changed["flipped"] = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
    file.write_bytes(changed[how])
    if how == "gone":
        file.unlink()
    again = prepare(train, 300, tmp_path)
    assert {file.name: file.read_bytes() for file in again.folder.iterdir()} == before
    assert sorted(again.folder.parent.iterdir()) == [again.folder]


def _tokenizer(path: Path, **parts: Any) -> Path:
    tokenizer = Tokenizer(BPE({"a": 0, "x": 1}, []))
    for part, value in parts.items():
        setattr(tokenizer, part, value)
    tokenizer.save(str(path))
    return path


DOUBLED = Replace("a", "aa")
GROWING: dict[str, dict[str, Any]] = {
    "normalizers": {"normalizer": normalizers.Sequence([DOUBLED] * 40)},
    "nested": {"normalizer": normalizers.Sequence([normalizers.Sequence([DOUBLED] * 20)] * 2)},
    "bytes of bytes": {"normalizer": normalizers.Sequence([normalizers.ByteLevel()] * 40)},
    "decoders": {"decoder": decoders.Sequence([decoders.Replace("a", "aa")] * 40)},
    "one long": {"normalizer": Replace("a", "a" * 1000)},
    "steps": {"normalizer": normalizers.Sequence([normalizers.NFC()] * 1000)},
}


@pytest.mark.parametrize("kind", GROWING)
def test_a_tokenizer_that_grows_texts_is_refused(tmp_path: Path, kind: str) -> None:
    path = _tokenizer(tmp_path / "tokenizer.json", **GROWING[kind])
    with pytest.raises(InputError, match="rewrites text in"):
        open_tokenizer(path, 300, "train.tokenizer")


def test_steps_that_lengthen_nothing_are_kept_however_many(tmp_path: Path) -> None:
    path = _tokenizer(tmp_path / "tokenizer.json", normalizer=normalizers.Sequence([normalizers.Lowercase()] * 30))
    assert open_tokenizer(path, 300, "train.tokenizer").encode("Aa").ids == [0, 0]


def test_steps_that_models_use_are_kept(tmp_path: Path) -> None:
    """As T5's and Llama 2's."""
    steps = [Replace("``", '"'), normalizers.NFKD(), normalizers.Lowercase(), Replace(" ", "\u2581")]
    path = _tokenizer(tmp_path / "tokenizer.json", normalizer=normalizers.Sequence(steps))
    assert open_tokenizer(path, 300, "train.tokenizer").encode("aa").ids == [0, 0]


def test_no_text_is_padded_or_cut(tmp_path: Path) -> None:
    """Whatever the file says: other libraries keep their settings for batches in it."""
    path = _tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_padding(length=8)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    opened = open_tokenizer(path, 300, "train.tokenizer")
    assert [opened.encode("ax" * n).ids for n in (1, 3)] == [[0, 1], [0, 1] * 3]


def test_a_pattern_that_panics_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = _tokenizer(tmp_path / "tokenizer.json", normalizer=Replace(Regex("(x+x+)+y"), "b"))
    (tmp_path / "text.txt").write_text("x" * 60)
    with pytest.raises(InputError, match="retry-limit-in-match"):
        prepare(Train(data=str(tmp_path / "text.txt"), tokenizer=str(path)), 300, tmp_path / "cache")
    assert capfd.readouterr().err == ""


def test_what_a_tokenizer_prints_is_lost_and_nothing_after_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    opened = sorted(os.listdir("/proc/self/fd"))
    for fails in (False, True):
        try:
            guarded(lambda fails=fails: (os.write(2, b"inside "), 1 // (not fails)), tmp_path, "train.data")
        except ZeroDivisionError:
            os.write(2, b"failed ")
        os.write(2, b"after ")
    assert capfd.readouterr().err == "after failed after "
    assert sorted(os.listdir("/proc/self/fd")) == opened


def test_documents_are_the_same_tokens_in_whatever_form(tmp_path: Path) -> None:
    """Text files, JSON lines, flat ids, nanoGPT's folder, Megatron's pair: one stream, the same beginnings."""
    generator = np.random.default_rng(1)
    words = ["the", "quick", " brown\n\n", "fox", "é", " ", "漢字", "\n\n\n"]
    texts = ["x" + "".join(generator.choice(words, size=generator.integers(40))) for _ in range(23)]
    for folder in ("texts", "nano"):
        (tmp_path / folder).mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "texts" / f"{i:02}.txt").write_text(text)
    own = Train(data=str(tmp_path / "texts"))
    trained = prepare(own, 280, tmp_path)
    given = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(trained.tokenizer))
    tokenizer.enable_truncation(3)  # as some that people have
    tokenizer.save(given)
    tokenizer.no_truncation()
    each = [tokenizer.encode(text).ids for text in texts]
    ids = [i for n, of_one in enumerate(each) for i in ([0] if n else []) + of_one]
    starts = np.cumsum([0, *(len(of_one) + 1 for of_one in each[:-1])])
    (tmp_path / "marked.txt").write_text("<|endoftext|>".join(texts))
    lines = "\n".join(json.dumps({"body": text, "id": 1}) for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    np.array(ids, dtype=np.uint16).tofile(tmp_path / "short.bin")
    np.array(ids, dtype=np.uint32).tofile(tmp_path / "long.bin")
    train = len(ids) - int(len(ids) * HELD_OUT)
    np.array(ids[:train], dtype=np.uint16).tofile(tmp_path / "nano" / "train.bin")
    np.array(ids[train:], dtype=np.uint16).tofile(tmp_path / "nano" / "val.bin")
    sequences = np.diff([*starts, len(ids)])
    _write_megatron(tmp_path / "pair", np.array(ids, dtype=np.int32), sequences, np.arange(len(starts) + 1))
    names = (
        "texts",
        "marked.txt",
        "a.jsonl",
        "a.jsonl.gz",
        "short.bin",
        "long.bin",
        "nano",
        "pair",
        "pair.bin",
        "pair.idx",
    )
    for name in names:
        tokens = prepare(Train(data=str(tmp_path / name), tokenizer=given, text_field="body"), 300, tmp_path)
        assert _ids(tokens) == ids, name
        assert set(_starts(tokens)) - set(starts) <= ({train} if name == "nano" else set()), name
        assert set(starts) <= set(_starts(tokens)), name
        assert tokens.tokenizer.exists()
    tables = {"job": {"global_batch": 1, "seq": 8}, "model": {"preset": "gpt2"}, "train": {"data": "pair"}}
    beside = from_tables(tables, tmp_path).train  # named in a job file that lies there
    assert _ids(prepare(beside, 300, tmp_path)) == ids
    bare = prepare(Train(data=str(tmp_path / "pair")), 300, tmp_path)
    assert not bare.tokenizer.exists()
    assert prepare(Train(data=str(tmp_path / "short.bin"), end_of_text=0), 300, tmp_path).documents == len(texts)
    assert prepare(Train(data=str(tmp_path / "short.bin")), 300, tmp_path).documents == 1


def _write_megatron(
    prefix: Path, ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64]
) -> None:
    ids.tofile(prefix.with_suffix(".bin"))
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]) * ids.itemsize
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(firsts)))
        file.write(lengths.astype(np.int32).tobytes() + pointers.astype(np.int64).tobytes())
        file.write(firsts.astype(np.int64).tobytes())


def test_a_changed_file_is_other_tokens(tmp_path: Path) -> None:
    """Whether its content was hashed before or is remembered."""
    path = tmp_path / "a.bin"
    digests = []
    for last in (5, 6, 5):
        np.array([1, 2, 3, 4] * 20 + [last], dtype=np.uint16).tofile(path)
        for age in (0, 100):
            os.utime(path, (time.time() - age, time.time() - age))
            digests.append(prepare(Train(data=str(path)), 300, tmp_path).digest)
    assert digests[0] == digests[1] == digests[4] == digests[5] != digests[2] == digests[3]


def test_a_large_document_is_cut_and_nothing_is_lost() -> None:
    text = ["ab\n\n" * 1_500_000, "c" * 12_000_000, "d" * 20_000_000, "\n\n", "e"]
    pieces = list(join_chunks(iter(text)))
    assert "".join(pieces) == "".join(text)
    assert len(pieces) > 2
    assert pieces[0].endswith("b\n\n")
    assert list(paragraphs(iter(["a\n", "\nb\n\n\nc", ""]))) == ["a\n\n", "b\n\n", "\nc"]


@pytest.mark.parametrize(
    ("line", "begins", "ends"),
    [("some words\n", "some", "words\n"), ("some words ", " ", "words"), ("字", "字", "字")],
    ids=["lines", "words", "characters"],
)
def test_text_without_blank_lines_is_cut_too(line: str, begins: str, ends: str) -> None:
    """After a line, else before a space, else anywhere; the same pieces however it was read."""
    text = line * (3_000_000 // len(line)) + "\n\nend"
    pieces = list(paragraphs(iter([text])))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 2**20
    assert len(pieces) == 4
    assert all(piece.endswith(ends) for piece in pieces[:2])
    assert all(piece.startswith(begins) for piece in pieces[1:-1])
    for size in (2**20, 2**20 + 1, len(text) - 4):
        assert list(paragraphs(text[i : i + size] for i in range(0, len(text), size))) == pieces


@settings(max_examples=40)
@given(st.text("a \n", max_size=60), st.integers(1, 9))
def test_a_long_paragraph_is_cut_after_a_line_else_before_a_space(text: str, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "_PIECE", most)
        *cut, last = texts._shorter(text)
    assert "".join([*cut, last]) == text
    assert len(last) <= most
    at = 0
    for piece in cut:
        window = text[at : at + most]
        lines, words = window.rfind("\n") + 1, window.rfind(" ", 1)
        assert len(piece) == (lines or (words if words > 0 else most))
        at += len(piece)


def test_a_folder_says_how_much_of_it_is_read(tmp_path: Path) -> None:
    """Whatever the case of a name; not what only lies there."""
    names = ("a.txt", "b.json", "c.JSONL", "d.TXT", "e.Txt.GZ", "f.Json.gz", "g.md", "h/i.txt", "h/tokenizer.json")
    folder = tmp_path / "texts"
    (folder / "h").mkdir(parents=True)
    for name in names:
        text = json.dumps({"text": f"of {name} "}) if "json" in name.lower() else f"of {name} "
        (folder / name).write_bytes(gzip.compress(text.encode()) if name.lower().endswith("gz") else text.encode())
    (tmp_path / "some.txt").write_text("some text")
    trained = prepare(Train(data=str(tmp_path / "some.txt")), 300, tmp_path)
    (folder / "h" / "tokenizer.json").write_bytes(trained.tokenizer.read_bytes())
    said: list[str] = []
    tokens = prepare(Train(data=str(folder), tokenizer=str(folder / "h")), 300, tmp_path, said.append)
    text = Tokenizer.from_file(str(tokens.tokenizer)).decode(_ids(tokens))
    assert text == "".join(f"of {name} " for name in names if name not in ("g.md", "h/tokenizer.json"))
    assert said == [f"note: 7 of 8 files in {folder} are read: .txt, .jsonl, .json, .xz, .gz"]


def test_documents_that_are_not_known_cannot_be_kept_apart(tmp_path: Path) -> None:
    """A second file begins a document, but none that is trained on."""
    for name in ("train", "val"):
        np.arange(1, 90, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    with pytest.raises(InputError, match="separate"):
        require_documents(prepare(Train(data=str(tmp_path)), 300, tmp_path))
    require_documents(prepare(Train(data=str(tmp_path), end_of_text=50), 300, tmp_path))


@pytest.mark.parametrize("name", ["ids.bin", "pair"])
def test_ids_that_may_not_be_read_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ids = np.arange(90, dtype=np.int32)
    ids.tofile(tmp_path / "ids.bin")
    _write_megatron(tmp_path / "pair", ids, np.array([90]), np.array([0, 1]))

    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"train\.data = .*Permission denied"):
        prepare(Train(data=str(tmp_path / name), data_dtype="uint32"), 300, tmp_path)


@pytest.mark.parametrize(("version", "code"), [(2, 4), (1, 6), (1, 0), (2, 9)])
def test_an_index_of_another_version_or_type_is_refused(tmp_path: Path, version: int, code: int) -> None:
    """6 and 7 are floating-point numbers."""
    _write_megatron(tmp_path / "pair", np.arange(90, dtype=np.int32), np.array([90]), np.array([0, 1]))
    index = bytearray((tmp_path / "pair.idx").read_bytes())
    index[9:18] = struct.pack("<QB", version, code)
    (tmp_path / "pair.idx").write_bytes(index)
    with pytest.raises(InputError, match=f"has version {version} and type code {code}"):
        prepare(Train(data=str(tmp_path / "pair")), 300, tmp_path)


def test_unusable_data_are_said(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"a text that ends too early" * 9)[:-12])
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"txt": "two"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": \n')
    (tmp_path / "half.jsonl").write_text('{"text": "one"}\n{"text": "bad \\ud83d"}\n')
    (tmp_path / "list.json").write_text('[{"text": "one"}]')
    (tmp_path / "wide.json").write_text(json.dumps({"text": "one"}, indent=1))
    (tmp_path / "d.bin").mkdir()
    (tmp_path / "text.txt").write_text("one two three " * 30)
    (tmp_path / "odd.bin").write_bytes(b"\x01\x00\x02")
    (tmp_path / "none.bin").write_bytes(b"")
    np.array([1, 2, 300], dtype=np.uint16).tofile(tmp_path / "high.bin")
    ids = np.arange(10, dtype=np.int32)
    _write_megatron(tmp_path / "cut", ids[:9], np.array([4, 6]), np.array([0, 1, 2]))
    _write_megatron(tmp_path / "far", ids, np.array([4, 6]), np.array([0, 1, 3]))
    _write_megatron(tmp_path / "gone", ids, np.array([4, 6]), np.array([0, 1, 2]))
    (tmp_path / "gone.bin").unlink()
    (tmp_path / "short.idx").write_bytes((tmp_path / "far.idx").read_bytes()[:-3])
    (tmp_path / "short.bin").write_bytes(ids.tobytes())
    (tmp_path / "other.idx").write_bytes(b"something else altogether, and long enough")
    (tmp_path / "other.bin").write_bytes(ids.tobytes())
    prepare(Train(data=str(tmp_path / "text.txt")), 280, tmp_path)
    tokenizer = next(tmp_path.glob("tokens/*/tokenizer.json")).parent
    for name, words, more in (
        ("empty.txt", "is empty", {}),
        ("binary.txt", "UTF-8", {}),
        ("folder", "holds no .txt", {}),
        ("no", "no such", {}),
        ("cut.txt.gz", "cannot be read", {}),
        ("a.jsonl", "a.jsonl:2 has txt", {}),
        ("b.jsonl", "b.jsonl:2'.* is not JSON", {}),
        ("half.jsonl", r"half.jsonl:2'.* half a surrogate pair", {}),
        ("list.json", "list.json:1'.* is not a JSON object; one object a line", {}),
        ("wide.json", "wide.json:1'.* is not JSON .*; one object a line", {}),
        ("nope.bin", "no such", {}),
        ("d.bin", "holds no .txt", {}),
        ("odd.bin", "3 bytes are no whole number of uint16", {}),
        ("none.bin", "is empty", {}),
        ("high.bin", "token 300 when read as uint16, model.vocab is 299", {}),
        ("cut", "describes 40 bytes, cut.bin holds 36", {}),
        ("far", "outside its sequences", {}),
        ("gone", "gone.bin is missing", {}),
        ("short", "not what 2 sequences", {}),
        ("other", "is not an index", {}),
        ("text.txt", "no such file", {"tokenizer": str(tmp_path / "none.json")}),
        ("text.txt", "is not a tokenizer.json", {"tokenizer": str(tmp_path / "a.jsonl")}),
        ("text.txt", "<|none|>.* is not a token of", {"tokenizer": str(tokenizer), "end_of_text": "<|none|>"}),
        ("text.txt", "is not an id of", {"tokenizer": str(tokenizer), "end_of_text": 299}),
        ("text.txt", "needs a train.tokenizer", {"end_of_text": "</s>"}),
        ("text.txt", "trained here", {"end_of_text": 3}),
        ("high.bin", "is not an id of", {"end_of_text": -1}),
    ):
        with pytest.raises(InputError, match=words.replace("|", r"\|")):
            prepare(Train(data=str(tmp_path / name), **more), 299, tmp_path)
    with pytest.raises(InputError, match=r"entries, model\.vocab is 260"):
        prepare(Train(data=str(tmp_path / "text.txt"), tokenizer=str(tokenizer)), 260, tmp_path)
    with pytest.raises(InputError, match="separate"):
        require_documents(prepare(Train(data=str(tmp_path / "text.txt")), 280, tmp_path))
    assert not list(tmp_path.glob("tokens/.*"))  # nothing half made is left
