"""Every lint is explained on its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.planning.explain import lint, observed_lint

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "names"), [("planning.md", lint.LINTS), ("observe.md", observed_lint.LINTS)], ids=["plan", "program"]
)
def test_every_lint_is_on_its_page(page: str, names: dict[str, object]) -> None:
    text = (DOCS / page).read_text()
    assert [name for name in names if f"`{name}`" not in text] == []
