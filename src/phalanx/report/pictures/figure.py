"""What a picture shows, as plain data: panels below each other; each kind of them is drawn twice, as SVG and as text.

Lines     curves over an axis, with marked points and rules (a card's memory, a crossover)
Bars      horizontal bars of parts that add up
Timeline  lanes of blocks over time
Diagram   boxes and arrows on a grid of characters, 80 columns wide: what fits as text fits as SVG
Tree      boxes by indentation, one path marked
Rounds    what each rank holds of each chunk, round by round of a collective
Grids     named grids of cells: the nodes of a mesh with their ranks
Heat      shares over time, a line for each row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["", "year", "count", "parameters", "bytes", "GB", "B/s", "s", "share", "FLOP/s"]


@dataclass(frozen=True)
class PlotAxis:
    """What is measured along an axis: its name with the unit, and how numbers are written."""

    label: str
    unit: Unit = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    base: int = 10
    """Of ticks on a logarithmic axis: 2 for ranks and bytes."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = False
    """Whether points are drawn: where they are the numbers, and the line only joins them."""
    line: bool = True
    """Whether a line joins the points."""
    about: Sequence[str] = ()
    """What is shown where each point is pointed at."""
    stairs: bool = False
    """Whether the value holds until the next point."""
    colour: int | None = None
    """Of the palette; by default its place among the series."""


@dataclass(frozen=True)
class Mark:
    """A point with its name."""

    x: float
    y: float
    label: str
    colour: int = 1


@dataclass(frozen=True)
class RuleLine:
    """A line across the plot at a value of an axis."""

    axis: Literal["x", "y"]
    value: float
    label: str


@dataclass(frozen=True)
class Lines:
    """Curves over an axis."""

    x: PlotAxis
    y: PlotAxis
    series: tuple[Series, ...]
    marks: tuple[Mark, ...] = ()
    rules: tuple[RuleLine, ...] = ()
    head: str = ""
    height: int = 300


@dataclass(frozen=True)
class Bar:
    """A bar of parts, from the left."""

    label: str
    parts: Sequence[tuple[str, float]]
    """(name of the part, its length in the panel's unit)."""
    text: str
    """What stands behind the bar: its number with the unit."""
    start: float = 0.0
    """Where the first part begins: in a waterfall, at the end of the bar above."""
    heading: str = ""
    """A line above this bar, where a group begins."""


@dataclass(frozen=True)
class Bars:
    """Bars of one unit."""

    unit: str
    bars: tuple[Bar, ...]
    limits: tuple[tuple[str, float], ...] = ()
    """Lines across: (name, value)."""
    head: str = ""
    ticks: tuple[tuple[str, float], ...] = ()
    """(what it says, its length), ascending, where lengths are not the numbers themselves: logarithms."""
    end: float = 0.0
    """Where the axis ends at least: the same in panels that are compared."""


@dataclass(frozen=True)
class LaneBlock:
    """What a lane does for a while."""

    start: float
    end: float
    label: str
    kind: str
    """Its colour's name in the legend; as text its first letter."""
    about: str = ""
    """What is shown where it is pointed at; by default its label."""


@dataclass(frozen=True)
class Lane:
    """A line of a timeline."""

    name: str
    blocks: Sequence[LaneBlock]
    remark: str = ""
    """What is said at its end."""


@dataclass(frozen=True)
class Timeline:
    """Lanes over one axis of time."""

    unit: str
    """Of time, with its name: `time, ms`."""
    lanes: tuple[Lane, ...]
    head: str = ""
    end: float | None = None
    """Where the axis ends: by default with the last block."""
    palette: tuple[tuple[str, str], ...] = ()
    """(kind, its letter as text), in the order of colours, where several panels share them."""


@dataclass(frozen=True)
class Box:
    """A box of a diagram: column, row, width and height in characters, the frame included."""

    x: int
    y: int
    w: int
    h: int
    lines: tuple[str, ...] = ()
    colour: int | None = None
    """None: no fill, a frame only."""
    top: bool = False
    """Whether the words stand at the top: a box around other boxes."""


@dataclass(frozen=True)
class Arrow:
    """A path of straight pieces through characters (column, row), with a head at its end, or at both, or at none."""

    points: tuple[tuple[int, int], ...]
    heads: Literal[0, 1, 2] = 1
    hot: bool = False


@dataclass(frozen=True)
class Label:
    """Words on a diagram."""

    x: int
    y: int
    text: str
    strong: bool = False


@dataclass(frozen=True)
class Diagram:
    """Boxes, arrows and words on a grid of characters."""

    items: tuple[Box | Arrow | Label, ...]
    head: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """(columns, rows)."""
        wide = high = 0
        for item in self.items:
            match item:
                case Box():
                    wide, high = max(wide, item.x + item.w), max(high, item.y + item.h)
                case Arrow():
                    wide = max([wide, *(x + 1 for x, _ in item.points)])
                    high = max([high, *(y + 1 for _, y in item.points)])
                case Label():
                    wide, high = max(wide, item.x + len(item.text)), max(high, item.y + 1)
        return wide, high


@dataclass(frozen=True)
class Node:
    """A node of a tree with what is below it."""

    text: str
    below: tuple[Node, ...] = ()
    edge: str = ""
    """What leads here: `yes`, `no`."""
    taken: bool = False
    leaf: bool = False


@dataclass(frozen=True)
class Tree:
    """A tree by indentation."""

    root: Node
    head: str = ""


@dataclass(frozen=True)
class RoundState:
    """A round of a collective, and what each rank holds after it."""

    head: str
    sends: Sequence[tuple[int, int, str]]
    """(source, destination, what)."""
    cells: Sequence[Sequence[str]]
    """Words of each (rank, chunk)."""
    full: Sequence[Sequence[float]]
    """Share of the contributions that are in it, 0 to 1."""
    changed: Sequence[Sequence[bool]]


@dataclass(frozen=True)
class Rounds:
    """Rounds of a collective."""

    rounds: tuple[RoundState, ...]
    column: str = "chunk"
    node: int = 0
    """Ranks of a node: messages between nodes are marked; 0: there are none."""
    across: int = 8
    """Tables side by side at most."""
    head: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a grid, such as a rank."""

    text: str
    colour: int | None
    """Of the palette; None: no fill."""
    about: str = ""
    """What is shown where it is pointed at."""
    dash: str = ""
    """Of its outline, as SVG writes it."""
    outlined: bool = False
    bold: bool = False
    """Whether the outline is a thick one."""


@dataclass(frozen=True)
class Grid:
    """Rows of cells with a name, such as a node with its GPUs."""

    name: str
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Grids:
    """Grids in the order of reading, and lines below them."""

    grids: tuple[Grid, ...]
    foot: tuple[str, ...] = ()
    head: str = ""


@dataclass(frozen=True)
class Heat:
    """Shares from 0 to 1 over one axis of time, a line for each row."""

    rows: Sequence[tuple[str, Sequence[float]]]
    """(name, shares at equal distances)."""
    span: str
    """What the axis covers."""
    head: str = ""


Panel = Lines | Bars | Timeline | Diagram | Tree | Rounds | Grids | Heat


@dataclass(frozen=True)
class Picture:
    """Panels with a title, and where their numbers are from."""

    title: str
    panels: tuple[Panel, ...]
    source: str
    """Which command computes the numbers, from what."""
    note: str = ""
    """What to see in it, in a sentence or two."""
    moving: bool = False
    """As SVG, rounds and blocks of a timeline appear one after another, again and again."""
