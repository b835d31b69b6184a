"""Tables at 80 columns and piped: no word, number or field of a strategy is broken, and nothing is cut off."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.table import Table

from phalanx.cli.terminal import console
from phalanx.report.style import pieces, print_fitted, size, table

_LINE = "dp=16,zero=2,shard=2,tp=2,sp=1,pp=2,virtual=16,schedule=interleaved,micro_batch=4,order=dp/pp/cp/tp"


def _printed(width: int) -> str:
    words = ("family", "strategy", "reason")
    grid = table("the best", *words, *(f"figure {i}" for i in range(6)), left=words)
    grid.add_row("3D", _LINE, "tensor-parallel communication takes longer", *["1,024.0 GiB"] * 6)
    out = io.StringIO()
    print_fitted(Console(width=width, file=out), grid)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 300])
def test_no_word_is_broken(width: int) -> None:
    text = _printed(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("tensor-parallel", "communication", *(f"{field}" for field in _LINE.split(","))):
        assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w])", text), word
    assert text.count("1,024.0 GiB") == 6
    assert all(f"figure {i}" in text or str(i) in text for i in range(6))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_long_list_of_layers_is_broken_between_numbers(width: int) -> None:
    layers = "layers=0/" + "/".join(["1"] * 126) + "/0"
    grid = table("cut", "model", "strategy", left=("model", "strategy"))
    grid.add_row("Llama 3.1 405B", f"dp=4,pp=16,virtual=8,{layers},order=dp/pp")
    out = io.StringIO()
    print_fitted(Console(width=width, file=out), grid)
    text = out.getvalue()
    assert "…" not in text
    assert "Llama 3.1 405B" in " ".join(text.split())
    assert f"{layers},order=dp/pp" in re.sub(r"\s+", "", text)


def test_piped_tables_are_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == 120
    monkeypatch.setenv("COLUMNS", "80")
    assert console().width == 80


def test_a_table_that_fits_is_one() -> None:
    assert _printed(300).count("family") == 1
    assert _printed(80).count("family") > 1  # cut in several, each with its key


@pytest.mark.parametrize("keys", [1, 2, 3])
@pytest.mark.parametrize("width", [8, 20, 30, 40, 55, 66, 69, 80, 200])
def test_a_table_that_is_cut_keeps_its_keys_and_each_column_once(width: int, keys: int) -> None:
    """Keys are repeated, the last of them left out only where the widest column would find no room behind them; no
    part is wider than the terminal, but one of two columns that are; the next column had no room in it (of 66
    characters three fill all, of 69 two keys and the widest)."""
    heads = ("family", "parallelism", "quantity", *(f"figure{i}" for i in range(6)))
    rows = [tuple(f"{head}-of-{row}" for head in heads) for row in ("one", "another")]
    grid = table("", *heads, left=heads[:3])
    for row in rows:
        grid.add_row(*row)
    # Each column with a gap of three behind it, and an edge on either side.
    widths = [len(f"{head}-of-another") + 3 for head in heads]
    seen: list[str] = []
    repeated = []
    for part in pieces(grid, width, keys):
        assert isinstance(part, Table)
        names = [str(column.header) for column in part.columns]
        again = [name for name in names if name in seen]
        assert again == names[: len(again)] == list(heads[: len(again)])
        repeated += [len(again)] if seen else []
        seen += names[len(again) :]
        for column, name in zip(part.columns, names, strict=True):
            assert list(column.cells) == [row[heads.index(name)] for row in rows]
        whole = sum(widths[heads.index(name)] for name in names) - 1
        assert whole <= width or len(names) <= 2
        assert len(seen) == len(heads) or whole + widths[len(seen)] > width
    assert seen == list(heads)
    room = [n for n in range(2, keys + 1) if sum(widths[:n]) + max(widths) - 1 <= width]
    assert set(repeated) <= {max([1, *room])}


def test_a_sentence_is_broken_before_a_name_is() -> None:
    words = ("family", "strategy", "reason")
    grid = table("why not", *words, left=words)
    grid.add_row("with CP", "dp=16,zero=2,shard=2,tp=2,sp=1,pp=2", "needs 99.2 GiB of 73.8 GiB, " * 9)
    out = io.StringIO()
    print_fitted(Console(width=90, file=out), grid)
    assert "with CP" in out.getvalue()
    assert "dp=16,zero=2,shard=2,tp=2,sp=1,pp=2 " in out.getvalue()


def test_a_heading_is_broken_before_a_strategy_is() -> None:
    """The table of `sweep`, piped."""
    figures = [f"memory of kind {i}" for i in range(4)]
    grid = table("families", "strategy", *figures, left=("strategy",))
    grid.add_row("pp=2,schedule=interleaved,virtual=2,micro_batch=6", *["100.4 MiB"] * 4)
    out = io.StringIO()
    print_fitted(Console(width=110, file=out), grid)
    assert "pp=2,schedule=interleaved,virtual=2,micro_batch=6" in out.getvalue()


@pytest.mark.parametrize(
    ("bytes_", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2**10, "1.0 KiB"),
        (3 * 2**19, "1.5 MiB"),
        (2**40 - 2**37, "896.0 GiB"),
        (2**40, "1.0 TiB"),
    ],
)
def test_bytes_are_in_the_largest_unit_that_they_fill(bytes_: int, text: str) -> None:
    assert size(bytes_) == text
