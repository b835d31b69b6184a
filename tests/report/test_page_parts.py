"""All that sections say stands in their page, once and in order; its data are the drawn panels."""

from __future__ import annotations

import json
import re
from html import escape, unescape

from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.html.page import Section, body, contents, page, section, with_section
from phalanx.report.pictures.figure import Bar, Bars

BARS = Bars("GiB", (Bar("one", (("part", 2.0),), "2 GiB"),))
SECTIONS = (
    Section(
        "First & best", "a note < here", ("a paragraph", "another > one"), ("name", "value"), [("dp=2,tp=4", "12")]
    ),
    Section("Second", panels=(BARS,), columns=("x",), rows=[("-3.5",), ("words 4",)]),
    Section("Third"),
)


def test_a_page_has_all_parts_of_its_sections_in_order() -> None:
    whole = page("A <title>", "plan", SECTIONS, {"more": [1]})
    bare = re.sub(r"<(script|style|svg)\b.*?</\1>", "", whole, flags=re.DOTALL)
    said = unescape(re.sub(r"<[^>]*>", "|", bare.replace("<wbr>", "")))
    at = 0
    for s in SECTIONS:
        for words in (s.title, *s.text, *s.columns, *(cell for row in s.rows for cell in row), s.note):
            at = said.index(words, at) if words else at
    assert whole.count("<svg") == 1
    assert escape("A <title>") in whole
    assert [bool(re.search(rf"<td class=number>{re.escape(n)}<", whole)) for n in ("12", "-3.5", "words 4")] == [
        True,
        True,
        False,
    ]
    assert whole.count("The numbers") == 1  # under what is drawn of them
    for s in SECTIONS:
        (name,) = re.findall(rf'<section id="([^"]+)"[^>]*><h2[^>]*>{re.escape(escape(s.title))}<', whole)
        assert f'href="#{name}"' in whole
    data = json.loads(re.search(r'id="data">(.*?)</script>', whole, re.DOTALL)[1])  # type: ignore[index]
    assert (data["about"], data["title"], data["more"]) == ("plan", "A <title>", [1])
    (chart,) = data["charts"]
    assert (chart["id"], chart["kind"], chart["bars"][0]["parts"]) == ("second", "bars", [["part", 2.0]])


def test_a_table_is_a_section_with_its_units() -> None:
    sheet = Sheet(
        "a table", columns("what | took [s] | size [bytes]"), [("a", 1e-3, 2**20), ("b", 2.0, None)], "a note"
    )
    s = section(sheet)
    assert (s.title, s.note, s.columns) == ("a table", "a note", ("what", "took", "size"))
    assert list(s.rows) == [("a", "1.0 ms", "1.0 MiB"), ("b", "2.00 s", "")]
    assert s.panels
    other = section(sheet, BARS, title="another", note="said")
    assert (other.title, other.note, other.panels) == ("another", "said", (BARS,))


def test_a_section_goes_before_the_first_and_changes_no_other() -> None:
    whole, more = page("A title", "plan", SECTIONS, {}), Section("What was asked", "a note", ("some words",))
    longer = with_section(whole, more)
    for titles in (r'<li><a href="#[^"]*">([^<]*)</a>', r"<section\b.*?<h2[^>]*>([^<]*)"):
        before, after = (re.findall(titles, text, re.DOTALL) for text in (whole, longer))
        assert len(before) == len(SECTIONS)
        assert after == ["What was asked", *before]
    assert longer.replace(contents([more]), "", 1).replace(body([more]) + "\n", "", 1) == whole
