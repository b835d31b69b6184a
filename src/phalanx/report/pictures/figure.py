"""A picture as plain data: panels one below the other. Each kind of panel is drawn both as SVG and as text.

Lines     curves over an axis, with marked points and rules (a card's memory, a crossover)
Bars      horizontal bars of parts that add up
Timeline  lanes of blocks over time
Diagram   boxes and arrows on a grid of characters, 80 columns wide: what fits as text fits as SVG
Tree      boxes by indentation, one path marked
Rounds    the contributions in each rank's chunks, round by round of a collective
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
    """An axis: its name with the unit, its range, and how its numbers are written."""

    label: str
    unit: Unit = ""
    log: bool = False
    low: float | None = None
    high: float | None = None
    base: int = 10
    """Base of the ticks on a logarithmic axis: 2 for ranks and bytes."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    dots: bool = False
    """Whether points are drawn, as where the line only joins a few of them."""
    line: bool = True
    """Whether a line joins the points."""
    about: Sequence[str] = ()
    """Words for each point, shown when it is pointed at."""
    stairs: bool = False
    """Whether the value holds until the next point."""
    colour: int | None = None
    """Place in the palette; by default the place among the series."""


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
    """Words at the end of the bar: its number with the unit."""
    start: float = 0.0
    """Value at which the first part begins: in a waterfall, the end of the bar above."""
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
    """(label, length), ascending, where lengths are not the numbers themselves, such as logarithms."""
    end: float = 0.0
    """The least value at which the axis ends: the same in panels that are compared."""


@dataclass(frozen=True)
class LaneBlock:
    """A stretch of time in a lane."""

    start: float
    end: float
    label: str
    kind: str
    """Its colour's name in the legend; as text its first letter."""
    about: str = ""
    """Words shown when it is pointed at; by default its label."""


@dataclass(frozen=True)
class Lane:
    """A line of a timeline."""

    name: str
    blocks: Sequence[LaneBlock]
    remark: str = ""
    """Words at its end."""


@dataclass(frozen=True)
class Timeline:
    """Lanes over one axis of time."""

    unit: str
    """Name and unit of the axis: `time, ms`."""
    lanes: tuple[Lane, ...]
    head: str = ""
    end: float | None = None
    """Time at which the axis ends; by default the end of the last block."""
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
    """Whether the words are at the top, as in a box around other boxes."""


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
    """A node of a tree with the nodes below it."""

    text: str
    below: tuple[Node, ...] = ()
    edge: str = ""
    """Words on the edge that leads here, such as `yes` or `no`."""
    taken: bool = False
    leaf: bool = False


@dataclass(frozen=True)
class Tree:
    """A tree by indentation."""

    root: Node
    head: str = ""


@dataclass(frozen=True)
class RoundState:
    """A round of a collective, and the chunks of each rank after it."""

    head: str
    sends: Sequence[tuple[int, int, str]]
    """(source, destination, words for the chunk)."""
    cells: Sequence[Sequence[str]]
    """Words of each (rank, chunk)."""
    full: Sequence[Sequence[float]]
    """Share of all contributions that each (rank, chunk) has, 0 to 1."""
    changed: Sequence[Sequence[bool]]


@dataclass(frozen=True)
class Rounds:
    """Rounds of a collective."""

    rounds: tuple[RoundState, ...]
    column: str = "chunk"
    node: int = 0
    """Ranks of a node: messages between nodes are marked; 0: there are none."""
    across: int = 8
    """The most tables side by side."""
    head: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell of a grid, such as a rank."""

    text: str
    colour: int | None
    """Place in the palette; None: no fill."""
    about: str = ""
    """Words shown when it is pointed at."""
    dash: str = ""
    """Dashes of its outline, as SVG writes them."""
    outlined: bool = False
    bold: bool = False
    """Whether the outline is thick."""


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
    """Words for the time that the axis covers."""
    head: str = ""


Panel = Lines | Bars | Timeline | Diagram | Tree | Rounds | Grids | Heat


@dataclass(frozen=True)
class Picture:
    """Panels with a title, and the source of their numbers."""

    title: str
    panels: tuple[Panel, ...]
    source: str
    """The command that computes the numbers, and its data."""
    note: str = ""
    """A sentence or two on what to see."""
    moving: bool = False
    """Whether the SVG is animated: rounds and blocks of a timeline appear one after another, in a loop."""
