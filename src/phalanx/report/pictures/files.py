"""A picture as a file: SVG, a page around it, PNG; or as lines of text."""

import re
import shutil
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from phalanx.report.pictures import bars, diagram, grids, lines
from phalanx.report.pictures.figure import Bars, Diagram, Grids, Heat, Lines, Panel, Picture, Rounds, Timeline, Tree
from phalanx.report.pictures.scene import WIDE, Scene
from phalanx.spec.errors import InputError

KINDS = (".svg", ".html", ".png")
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def svg(picture: Picture) -> str:
    """Return a picture as SVG without scripts, fonts or any other file."""
    return _scene(picture.panels, moving=picture.moving).svg(picture.title, picture.source, picture.note)


def panels_svg(panels: Iterable[Panel], title: str) -> str:
    """Return panels as SVG without title and source, for a page that has them."""
    return _scene(panels, 4.0).bare_svg(title)


def _scene(panels: Iterable[Panel], top: float = 0.0, moving: bool = False) -> Scene:
    scene = Scene(moving)
    scene.y = top
    for panel in panels:
        scene.heading(panel.head)
        _DRAWINGS[type(panel)][0](scene, panel)
        scene.y += 6
    return scene


_DRAWINGS: dict[type, tuple[Callable[[Scene, Any], None], Callable[[Any], list[str]]]] = {
    Lines: (lines.draw, lines.text),
    Bars: (bars.draw, bars.text),
    Timeline: (bars.draw_timeline, bars.timeline_text),
    Diagram: (diagram.draw, diagram.text),
    Tree: (diagram.draw_tree, diagram.tree_text),
    Rounds: (grids.draw_rounds, grids.rounds_text),
    Grids: (grids.draw, grids.text),
    Heat: (grids.draw_heat, grids.heat_text),
}
"""Kind of panel -> (function that draws it as SVG, function that returns it as text)."""


def text(picture: Picture) -> list[str]:
    """Return a picture as lines of at most 80 characters."""
    out = textwrap.wrap(picture.title, 80)
    for panel in picture.panels:
        out += ["", *panel_text(panel)]
    out.append("")
    for line in (picture.note, f"Source: {picture.source}"):
        out += textwrap.wrap(line, 80)
    return out


def panel_text(panel: Panel) -> list[str]:
    """Return a panel as lines of at most 80 characters."""
    return [*([panel.head] if panel.head else []), *_DRAWINGS[type(panel)][1](panel)]


def write(pictures: list[Picture], file: Path) -> None:
    """Write pictures one below the other, as SVG, a page with their text, or PNG, by the file's suffix.

    Raises InputError for PNG where no Chromium is installed to draw it."""
    match file.suffix.lower():
        case ".html":
            file.write_text(_page(pictures[0].title, [(svg(p), "\n".join(text(p))) for p in pictures]))
        case ".png":
            file.write_bytes(png(svgs(pictures)))
        case _:
            file.write_text(svgs(pictures))


def _page(title: str, figures: list[tuple[str, str]]) -> str:
    """Return SVGs as one HTML page, with the text of each for those who do not see it."""
    drawn = "\n".join(
        f"<figure>{one}<details><summary>As text</summary><pre>{escape(words)}</pre></details></figure>"
        for one, words in figures
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        "<style>body{margin:1rem;font-family:system-ui,sans-serif}figure{margin:0 auto 2rem;max-width:1000px}"
        "svg{max-width:100%;height:auto}pre{overflow-x:auto}</style></head><body>\n"
        f"{drawn}\n</body></html>\n"
    )


def svgs(pictures: list[Picture]) -> str:
    """Return several pictures as one SVG, below each other."""
    each = [svg(p) for p in pictures]
    if len(each) == 1:
        return each[0]
    inner, y = [], 0.0
    for one in each:
        inner.append(one.replace("<svg ", f'<svg y="{y:g}" ', 1).rstrip())
        y += size(one)[1]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {y:g}" width="{WIDE}" height="{y:g}">'
    return "\n".join([head, f"<title>{escape(pictures[0].title)}</title>", *inner, "</svg>\n"])


def size(drawn: str) -> tuple[float, float]:
    """Return (width, height) of an SVG."""
    match_ = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
    assert match_ is not None
    return float(match_[1]), float(match_[2])


def require_browser(file: Path | None) -> None:
    """Require Chromium where the file is a PNG. Raises InputError."""
    if file is not None and file.suffix.lower() == ".png" and _browser() is None:
        raise InputError("save", str(file), "needs Chromium, which is not installed", "name a .svg or .html file")


def _browser() -> str | None:
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def png(drawn: str) -> bytes:
    """Return an SVG as PNG, with 2 x 2 pixels a unit. Raises InputError without Chromium, or where it fails."""
    browser = _browser()
    if browser is None:
        raise InputError("save", None, "a PNG needs Chromium, which is not installed", "name a .svg or .html file")
    wide, high = size(drawn)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "picture.html"), Path(folder, "picture.png")
        source.write_text(f'<meta charset="utf-8"><style>body{{margin:0}}svg{{display:block}}</style>{drawn}')
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"),
            f"--user-data-dir={folder}/profile",
            f"--screenshot={target}",
            f"--window-size={wide:.0f},{high:.0f}",
            source.as_uri(),
        ]
        done = subprocess.run([browser, *options], capture_output=True, text=True, timeout=60, check=False)
        if not target.exists():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:120]
            raise InputError("save", None, f"{browser} drew no PNG: {reason}", "name a .svg or .html file")
        return target.read_bytes()
