from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.spec.errors import InputError
from phalanx.train.data import HELD_OUT, Batches, prepare, read_text, take, validation_windows


@given(st.integers(0, 40), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2]))
def test_batches_do_not_depend_on_the_layout(step: int, replicas: int, micro_batch: int) -> None:
    batches = Batches(np.arange(500, dtype=np.uint16), seq=7, global_batch=12, seed=3)
    whole = take(batches.tokens, batches.starts(step), 7)
    shares = [batches.share(step, r, replicas, micro_batch) for r in range(replicas)]
    assert np.array_equal(np.concatenate([b for share in shares for b in share]), whole)
    assert (np.diff(whole, axis=1) == 1).all()  # contiguous windows


def test_an_epoch_shows_every_window_once_and_the_next_another_order() -> None:
    batches = Batches(np.arange(1000, dtype=np.uint16), seq=9, global_batch=10, seed=0)
    assert batches.windows == 110
    epoch = np.concatenate([batches.starts(i) for i in range(11)])
    assert len(np.unique(epoch)) == 110
    assert epoch.max() + 9 < 1000
    assert not np.array_equal(batches.starts(0), batches.starts(11))


def test_too_little_text_is_said() -> None:
    with pytest.raises(InputError, match=r"job\.seq"):
        Batches(np.arange(10), seq=10, global_batch=1, seed=0)


def test_validation_windows_are_spread() -> None:
    tokens = np.arange(101)
    assert list(validation_windows(tokens, 10, 0)) == list(range(0, 100, 10))
    assert list(validation_windows(tokens, 10, 3)) == [0, 40, 90]


def test_the_corpus_is_tokenised_once_and_reads_back(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("It was a dark night.\n\nThe rain fell.\n\n" * 40)
    (tmp_path / "texts" / "b.txt").write_text("Another, é ü 漢字.\n" * 10)
    tokens = prepare(str(tmp_path / "texts"), 300, tmp_path)
    assert tokens.vocab <= 300
    assert tokens.validation_tokens == int((tokens.train_tokens + tokens.validation_tokens) * HELD_OUT)
    from tokenizers import Tokenizer

    ids = np.concatenate([tokens.training(), tokens.validation()])
    text = Tokenizer.from_file(str(tokens.tokenizer)).decode(ids.tolist())
    assert text == read_text(str(tmp_path / "texts"))
    counts = np.bincount(tokens.training())
    p = counts[counts > 0] / counts.sum()
    assert tokens.unigram_entropy == pytest.approx(float(-(p * np.log(p)).sum()))
    before = (tokens.folder / "tokens.npy").stat().st_mtime_ns
    assert prepare(str(tmp_path / "texts"), 300, tmp_path) == tokens
    assert (tokens.folder / "tokens.npy").stat().st_mtime_ns == before


def test_the_shipped_corpus_is_there() -> None:
    text = read_text("austen")
    assert len(text) == 4_025_032
    assert "truth universally acknowledged" in text


def test_unreadable_texts_are_said(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    for name, words in (("empty.txt", "is empty"), ("binary.txt", "UTF-8"), ("folder", "no .txt"), ("no", "no such")):
        with pytest.raises(InputError, match=words):
            read_text(str(tmp_path / name))
