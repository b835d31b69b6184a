"""An SVG of one style, drawn from the top down: colours that colour-blind people can distinguish (Okabe & Ito 2008),
light or dark by the reader's setting, and an estimate of the width of every text, so that texts do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDE, EDGE = 760, 16
_LOOP_S, _SHOWN = 12, 0.8
"""Seconds of one loop of an animated picture, and the share of them after which all of it is shown."""
FILLS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#b0b0b0", "#8fd0b8")
_STROKES = ("#0072b2", "#d55e00", "#007a5a", "#a04a7c", "#8a6d00", "#333333", "#3a9bd6", "#777777")
_STROKES_DARK = ("#56b4e9", "#ff9a4d", "#2fd6a4", "#e39ac4", "#f0e442", "#e6e6e6", "#9ad0f5", "#a8a8a8")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "12 4", "1 2", "6 2 1 2")


def _style() -> str:
    fills = "".join(f".phx .f{i}{{fill:{c}}}" for i, c in enumerate(FILLS))
    strokes = "".join(f".phx .l{i}{{stroke:{c};fill:none}}.phx .d{i}{{fill:{c}}}" for i, c in enumerate(_STROKES))
    dark = "".join(f".phx .l{i}{{stroke:{c}}}.phx .d{i}{{fill:{c}}}" for i, c in enumerate(_STROKES_DARK))
    return (
        ".phx{font-family:system-ui,'Segoe UI','DejaVu Sans',Helvetica,Arial,sans-serif}"
        ".phx .bg{fill:#fff}.phx .t{fill:#1a1a1a}.phx .m{fill:#555}.phx .on{fill:#000}"
        ".phx .halo{paint-order:stroke;stroke:#fff;stroke-width:4px;stroke-linejoin:round}"
        ".phx .o{fill:none;stroke:#555}.phx .paper{fill:#fff;stroke:#555}.phx .g{stroke:#ddd;fill:none}"
        ".phx .a{stroke:#1a1a1a;fill:none}.phx .h{fill:#1a1a1a}.phx .b{stroke:#00000055}"
        ".phx .new{fill:none;stroke:#000;stroke-width:2px}"
        ".phx .hot{stroke:#d55e00;fill:none}.phx .hoth{fill:#d55e00}.phx .hotbox{fill:#fff;stroke:#d55e00}"
        f"{fills}{strokes}"
        "@media (prefers-color-scheme:dark){"
        ".phx .bg{fill:#15181d}.phx .t{fill:#ececec}.phx .m{fill:#b4b4b4}"
        ".phx .halo{stroke:#15181d}.phx .o{stroke:#999}.phx .paper{fill:#15181d;stroke:#999}.phx .g{stroke:#343a42}"
        ".phx .a{stroke:#ececec}.phx .h{fill:#ececec}"
        ".phx .hot{stroke:#ff9a4d}.phx .hoth{fill:#ff9a4d}.phx .hotbox{fill:#15181d;stroke:#ff9a4d}"
        f"{dark}}}"
    )


_WIDTHS = {
    **dict.fromkeys("ijlI|'", 0.30),
    **dict.fromkeys(" .,:;!·", 0.335),
    **dict.fromkeys("ft()[]-/r", 0.41),
    **dict.fromkeys("sczJ_*", 0.55),
    **dict.fromkeys("CDGHNOQRUw&", 0.79),
    **dict.fromkeys("mMW%@", 0.99),
    **dict.fromkeys("+=<>#~", 0.84),
}


def width(text: str, size: float = 12, bold: bool = False) -> float:
    """Estimate the width of a text, as in DejaVu Sans, which is wider than the fonts of most systems."""
    return sum(_WIDTHS.get(c, 0.65) for c in text) * size * (1.12 if bold else 1.0)


def wrap(text: str, room: float, size: float = 12) -> list[str]:
    """Break a text into lines of at most `room`."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


@dataclass(frozen=True)
class Area:
    """A rectangle: left, top, right, bottom."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Area, apart: float = 1.0) -> bool:
        """Whether two rectangles overlap, or are nearer than `apart`."""
        return (
            self.left < other.right + apart
            and other.left < self.right + apart
            and self.top < other.bottom + apart
            and other.top < self.bottom + apart
        )

    def count(self, points: Sequence[tuple[float, float]]) -> int:
        """Return the number of points inside."""
        left, top, right, bottom = self.left, self.top, self.right, self.bottom
        return len([0 for x, y in points if left <= x <= right and top <= y <= bottom])

    def inside(self, other: Area) -> bool:
        """Whether this rectangle is inside another."""
        return (
            other.left <= self.left
            and self.right <= other.right
            and other.top <= self.top
            and self.bottom <= other.bottom
        )


def area_of(x: float, y: float, text: str, size: float = 12, anchor: str = "start", bold: bool = False) -> Area:
    """Return the rectangle of a text whose baseline is at `y`."""
    wide = width(text, size, bold)
    left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
    return Area(left, y - 0.8 * size, left + wide, y + 0.24 * size)


class Scene:
    """A drawing that grows downwards; the next panel begins at `y`."""

    def __init__(self, moving: bool = False) -> None:
        self.y = 0.0
        self._moving = moving
        self._parts: list[str] = []

    @contextmanager
    def appearing(self, share: float) -> Iterator[None]:
        """Let the shapes drawn in this context appear at a share of the loop, if the picture is animated.

        In print and in viewers without SMIL, all shapes are shown."""
        start = len(self._parts)
        yield
        if self._moving and share > 0:
            inside, self._parts[start:] = self._parts[start:], []
            times = f'values="0;1" keyTimes="0;{min(share * _SHOWN, 1):.3f}" calcMode="discrete"'
            moves = f'<animate attributeName="opacity" {times} dur="{_LOOP_S}s" repeatCount="indefinite"/>'
            self._parts.append(f"<g>{moves}{''.join(inside)}</g>")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        kind: str = "t",
        size: float = 12,
        anchor: str = "start",
        bold: bool = False,
    ) -> Area:
        """Write a line; `kind`: t (ink), m (muted), on (on a fill), dN (a colour)."""
        weight = ' font-weight="bold"' if bold else ""
        where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"'
        side = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text {where}{side}{weight} class="{kind}">{escape(text)}</text>')
        return area_of(x, y, text, size, anchor, bold)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        kind: str,
        about: str = "",
        round_: float = 0,
        opacity: float = 1.0,
    ) -> None:
        """Draw a rectangle; `about` is shown when it is pointed at."""
        title = f"<title>{escape(about)}</title>" if about else ""
        corner = f' rx="{round_:g}"' if round_ else ""
        corner += f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
        shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(w, 0.1):.1f}" height="{h:.1f}"{corner} class="{kind}"'
        self._parts.append(f"{shape}>{title}</rect>" if title else f"{shape}/>")

    def path(self, points: Sequence[tuple[float, float]], kind: str, wide: float = 1.0, dash: str = "") -> None:
        """Draw a line through points."""
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(f'<path d="{d}" class="{kind}" stroke-width="{wide:g}"{dashed}/>')

    def curve(self, d: str, kind: str) -> None:
        """Draw an SVG path."""
        self._parts.append(f'<path d="{d}" class="{kind}" stroke-width="1"/>')

    def dot(self, x: float, y: float, kind: str, radius: float = 3, about: str = "") -> None:
        """Draw a dot; `about` is shown when it is pointed at."""
        shape = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"'
        self._parts.append(f"{shape}><title>{escape(about)}</title></circle>" if about else f"{shape}/>")

    def head(self, x: float, y: float, dx: float, dy: float, kind: str = "h", size: float = 6) -> None:
        """Draw an arrow's head at (x, y), pointing along (dx, dy), a unit vector."""
        back = (x - size * 1.3 * dx, y - size * 1.3 * dy)
        side = (-dy * size * 0.55, dx * size * 0.55)
        points = ((x, y), (back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1]))
        self._parts.append(f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" class="{kind}"/>')

    def heading(self, text: str) -> None:
        """Write a panel's heading, if it has one."""
        for line in wrap(text, WIDE - 2 * EDGE, 13.5) if text else ():
            self.y += 20
            self.text(EDGE, self.y, line, size=13, bold=False, kind="t")
        self.y += 8 if text else 0

    def legend(self, entries: Sequence[tuple[str, str, str]]) -> None:
        """Write entries (kind of swatch: fN, lN; dash; text) in rows."""
        x = float(EDGE)
        self.y += 14
        for kind, dash, text in entries:
            wide = 26 + width(text) + 16
            if x + wide > WIDE - EDGE and x > EDGE:
                x = EDGE
                self.y += 18
            if kind.startswith("l"):
                self.path([(x, self.y - 4), (x + 20, self.y - 4)], kind, 2, dash)
            else:
                self.rect(x + 3, self.y - 10, 14, 11, f"{kind} b")
            self.text(x + 26, self.y, text)
            x += wide
        self.y += 8

    def bare_svg(self, title: str) -> str:
        """Return the SVG without title, note and source, for a page that has them."""
        return svg_frame(WIDE, self.y + 4, title, title, self._parts)

    def svg(self, title: str, source: str, note: str) -> str:
        """Return the SVG with the title above and note and source below the drawing."""
        heads = wrap(title, WIDE - 2 * EDGE - 40, 16)
        top = 26.0 + 20 * len(heads)
        foot = Scene()
        foot.y = top + self.y + 8
        for text, kind in ((note, "t"), (f"Source: {source}", "m")):
            for line in wrap(text, WIDE - 2 * EDGE, 11) if text else ():
                foot.text(EDGE, foot.y + 12, line, kind, 11)
                foot.y += 15
            foot.y += 3
        high = foot.y + 10
        above = Scene()
        for i, line in enumerate(heads):
            above.text(EDGE, 28 + 20 * i, line, size=15, bold=True)
        body = [*above._parts, f'<g transform="translate(0 {top:.0f})">', *self._parts, "</g>", *foot._parts]
        return svg_frame(WIDE, high, title, f"{note} Source: {source}".strip(), body)


def svg_frame(wide: float, high: float, title: str, about: str, body: Sequence[str]) -> str:
    """Return an SVG with a drawing's elements: title and description for screen readers, background, colours by
    class."""
    label = escape(title, {'"': "&quot;"})
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="phx" viewBox="0 0 {wide:.0f} {high:.0f}" '
            f'width="{wide:.0f}" height="{high:.0f}" role="img" aria-label="{label}">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(about)}</desc>",
            f"<style>{_style()}</style>",
            f'<rect width="{wide:.0f}" height="{high:.0f}" class="bg"/>',
            *body,
            "</svg>\n",
        ]
    )
