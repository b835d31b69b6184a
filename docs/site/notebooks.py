"""The chapters of the course as notebooks: `python docs/site/notebooks.py FOLDER` writes one of each.

Prose becomes text cells, a command that is shown becomes a cell that runs it, and a picture one that draws it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COURSE = Path(__file__).parents[1] / "course"
_PICTURE = re.compile(r"!\[[^\]]*\]\(\.\./pictures/([\w-]+)\.svg\)\n?")


def notebook(chapter: str) -> dict[str, Any]:
    """Return a chapter's Markdown as a notebook of format 4.5."""
    cells = [
        {"id": f"cell-{i}", "cell_type": kind, "metadata": {}, "source": source.strip("\n"), **_OF_KIND[kind]}
        for i, (kind, source) in enumerate(_cells(chapter))
        if source.strip()
    ]
    return {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}


_OF_KIND: dict[str, dict[str, Any]] = {"markdown": {}, "code": {"outputs": [], "execution_count": None}}


def _cells(chapter: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, source). Output that the page shows is left out: the cell prints it."""
    prose, shown = "", False
    for line in chapter.splitlines(keepends=True):
        if line.startswith("    $ "):
            yield "markdown", prose
            prose, shown = "", True
            yield "code", f"!{line.removeprefix('    $ ')}"
        elif picture := _PICTURE.fullmatch(line):
            yield "markdown", prose
            prose = ""
            draw = f"!phalanx learn draw {picture[1]} --save {picture[1]}.svg"
            yield "code", f"{draw}\nfrom IPython.display import SVG\nSVG('{picture[1]}.svg')"
        elif not (shown and (line.startswith("    ") or not line.strip())):
            prose, shown = prose + line.replace("<details markdown>", "<details>"), False
    yield "markdown", prose


def main(folder: str) -> None:
    """Write the notebooks."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for page in sorted(COURSE.glob("[01]*.md")):
        (Path(folder) / f"{page.stem}.ipynb").write_text(json.dumps(notebook(page.read_text()), indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
