"""Rows of facts that ship: no row without a fact, and errors that name file, row and field."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import PRESETS
from phalanx.spec.model.spec import MODEL_FIELDS
from phalanx.spec.rows import Rows, record


@dataclass(frozen=True)
class _Engine:
    name: str
    kind: Literal["steam", "diesel"]
    tank_bytes: float
    wheels: int
    top_speed: float | None
    colours: tuple[str, ...] = ()


_WHOLE = 'kind = "steam"\ntank_mib = 2\nwheels = 8\ntop_speed = 1.5\n'


def _rows(tmp_path: Path, text: str) -> Rows[_Engine]:
    path = tmp_path / "engines.toml"
    path.write_text(text)
    return Rows(path, record(_Engine, "name"))


def test_a_row_is_typed_and_has_what_it_states_in_other_units(tmp_path: Path) -> None:
    text = f'[b]\nlike = "a"\ntop_speed = false\ncolours = ["red"]\n[a]\nnote = "green"\n{_WHOLE}'
    rows = _rows(tmp_path, text)
    assert list(rows) == ["b", "a"]
    assert rows["a"] == _Engine("a", "steam", 2**21, 8, 1.5)
    assert rows["b"] == _Engine("b", "steam", 2**21, 8, None, ("red",))


@pytest.mark.parametrize("line", _WHOLE.splitlines())
def test_a_row_without_a_fact_cannot_be_made(tmp_path: Path, line: str) -> None:
    field = line.split()[0].replace("_mib", "_bytes")
    with pytest.raises(ValueError, match=rf"engines.toml: row a: {field} is missing"):
        _rows(tmp_path, f"[a]\n{_WHOLE.replace(line, '')}")["a"]


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("brakes = 1", "row a: brakes is not a field of it"),
        ('like = "z"', "row a: like = 'z' is not another row"),
        ('like = "a"', "row a: like = 'a' is not another row"),
        ("colours = [1]", "row a: colours = 1 is no str"),
    ],
)
def test_an_unknown_fact_is_refused_by_file_row_and_field(tmp_path: Path, added: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"engines.toml: {message}"):
        _rows(tmp_path, f"[a]\n{_WHOLE}{added}\n")["a"]


@pytest.mark.parametrize("value", ["true", '"8"', "8.5", "false"])
def test_a_fact_of_another_type_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match=r"engines\.toml: row a: wheels = "):
        _rows(tmp_path, f"[a]\n{_WHOLE.replace('wheels = 8', f'wheels = {value}')}")["a"]


def test_a_file_is_read_when_a_row_is_first_asked_for(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "later.toml", record(_Engine, "name"))
    (tmp_path / "later.toml").write_text(f"[a]\n{_WHOLE}")
    assert rows["a"].wheels == 8


def test_every_shipped_model_has_a_whole_shape_and_every_chip_a_source() -> None:
    assert all(chip.source for chip in CHIPS.values())
    for fields in PRESETS.values():
        assert set(complete(fields)) <= set(MODEL_FIELDS)
