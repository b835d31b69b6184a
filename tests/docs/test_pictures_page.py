"""docs/pictures.md shows what `phalanx draw` draws: every picture, as it is drawn now."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from phalanx.report.pictures.files import svg
from phalanx.textbook.gallery.registry import PICTURES, picture

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _same(a: str, b: str) -> bool:
    """Compare two SVGs: words as they are, coordinates to a fifth of a pixel, which another NumPy may round away."""
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return False
    pairs = zip(map(float, _NUMBER.findall(a)), map(float, _NUMBER.findall(b)), strict=True)
    return all(abs(x - y) <= 0.2 for x, y in pairs)


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_as_the_command_draws_it(name: str) -> None:
    shown = (FOLDER / f"{name}.svg").read_text()
    assert _same(shown, svg(picture(name))), "run python docs/pictures/make.py"


def test_the_page_has_every_picture_and_no_other(make: ModuleType) -> None:
    text = (FOLDER.parent / "pictures.md").read_text()
    assert text == make.page(), "run python docs/pictures/make.py"
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PICTURES)
    assert all(f"](pictures/{name}.svg)" in text for name in PICTURES)


def test_a_changed_picture_is_noticed() -> None:
    drawn = svg(picture("stack"))
    assert not _same(drawn, drawn.replace("collectives", "collective"))
    assert not _same(drawn, re.sub(r'y="(\d+)', lambda m: f'y="{int(m[1]) + 1}', drawn, count=1))
