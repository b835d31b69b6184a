"""One HTML file that needs nothing else: text, tables and pictures, light and dark, for screens, phones and paper.

Pictures are panels (report/pictures), drawn as SVG when the page is written: they print, scale and can be read out,
and no script draws them. Each has its numbers in a table below it. Panels also lie in the page as JSON,
`document.getElementById("data")`, with a version.

Text of a user (names, strategies) reaches the page escaped, or as JSON in which no tag can close; a content security
policy forbids every request.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from html import escape
from importlib.resources import files
from typing import Any

from phalanx.planning.tables.table import Sheet
from phalanx.report.pictures.figure import Panel
from phalanx.report.pictures.files import panels_svg
from phalanx.report.plots import panels_of
from phalanx.report.style import cell_text

VERSION = 1


@dataclass(frozen=True)
class Section:
    """One part of a page: paragraphs, pictures of the numbers, the numbers as a table of text, and a note."""

    title: str
    note: str = ""
    text: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()
    panels: tuple[Panel, ...] = ()


def section(sheet: Sheet, *panels: Panel, title: str = "", note: str = "") -> Section:
    """Return the section of a table; `panels`: its pictures, by default of the columns that can be drawn."""
    names = tuple(c.name for c in sheet.columns)
    rows = [
        tuple(cell_text(value, c.unit) for value, c in zip(row, sheet.columns, strict=True)) for row in sheet.rows
    ]
    return Section(title or sheet.title, note or sheet.note, (), names, rows, panels or tuple(panels_of(sheet)))


def page(title: str, about: str, sections: Sequence[Section], data: Mapping[str, Any] | None = None) -> str:
    """Return the page. `about`: "plan", "run", ...; `data`: further keys of the page's JSON."""
    return page_of(title, about, contents(sections), body(sections), charts(sections), data)


def page_of(
    title: str,
    about: str,
    links: str,
    sections: str,
    drawn: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any] | None = None,
) -> str:
    """Return the page of sections that are HTML already. `links`: their table of contents; `drawn`: their panels."""
    content = {"version": VERSION, "about": about, "title": title, "charts": drawn, **(data or {})}
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; img-src data:\">"
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{asset('report.css')}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n'
        f'<a class="skip" href="#main">Skip to the content</a><header><h1>{escape(title)}</h1></header>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main id="main">\n'
        + sections
        + '\n</main>\n<footer>Phalanx; the data of this page are JSON in the element "data".</footer>\n'
        f'<script type="application/json" id="data">{safe_json(content)}</script>\n'
        f"<script>{asset('report.js')}</script></body></html>\n"
    )


def with_section(whole: str, section: Section) -> str:
    """Return a page with another section before its first."""
    linked = whole.replace("<ul>", f"<ul>{contents([section])}", 1)
    return linked.replace('<main id="main">\n', f'<main id="main">\n{body([section])}\n', 1)


def contents(sections: Sequence[Section]) -> str:
    """Return the links to the sections, as HTML."""
    return "".join(f'<li><a href="#{_id(s)}">{escape(s.title)}</a></li>' for s in sections)


def body(sections: Sequence[Section]) -> str:
    """Return the sections as HTML."""
    return "\n".join(_section(s) for s in sections)


def charts(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Return the panels of the sections as data."""
    return [
        {"id": _id(s), "kind": type(panel).__name__.lower(), **_plain(panel)} for s in sections for panel in s.panels
    ]


def _plain(value: Any) -> Any:
    """Return dataclasses as dictionaries, in a third of the time of `asdict`, which copies every leaf."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {name: _plain(each) for name, each in vars(value).items()} if is_dataclass(value) else value


def _section(s: Section) -> str:
    parts = [
        f'<section id="{_id(s)}" aria-labelledby="{_id(s)}-title"><h2 id="{_id(s)}-title">{escape(s.title)}</h2>'
    ]
    parts += [f"<p>{escape(line)}</p>" for line in s.text]
    if s.panels:
        parts.append(f'<figure class="svg">{panels_svg(s.panels, s.title)}</figure>')
    if s.rows:
        table = _table(s)
        parts.append(f"<details><summary>The numbers</summary>{table}</details>" if s.panels else table)
    if s.note:
        parts.append(f'<p class="note">{escape(s.note)}</p>')
    return "".join([*parts, "</section>"])


def _table(s: Section) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in s.columns)
    rows = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in s.rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(value: str) -> str:
    number = bool(value) and value.lstrip("+-")[:1].isdigit() and len(value) < 24
    text = escape(value)
    # a strategy may be broken after its commas, which no browser does by itself
    return f"<td class=number>{text}</td>" if number else f"<td>{text.replace(',', ',<wbr>')}</td>"


def _id(s: Section) -> str:
    return "".join(c if c.isalnum() else "-" for c in s.title.lower())


def safe_json(data: Mapping[str, Any]) -> str:
    """Return JSON in which no element of HTML can begin or end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    """Return a file of assets/, as text."""
    return files("phalanx.report.html").joinpath("assets", name).read_text()
