"""Prices, power and carbon of a GPU-hour: dated rows of *.toml and grids.csv, and a line of a user's own values.

    price=2.5, provider=hyperscaler, watts=980, pue=1.2, grid=SWE

price      of a GPU-hour, in any currency
provider   whose price of the table: hyperscaler, specialised (by default) or marketplace; the middle of its range
watts      drawn by a GPU and its part of the node, in every phase
pue        power of the data centre over that of its machines
grid       a country's ISO code (SWE), a zone (SE3), a region of Google Cloud (us-central1), or g CO2e/kWh (45)
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from phalanx.cost.analytic.chips import chip_name
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.rows import Rows, record

_FOLDER = Path(__file__).parent
PROVIDERS = ("specialised", "hyperscaler", "marketplace")
_NONE = "no published figure"


@dataclass(frozen=True)
class ChipExpense:
    """A chip's rental prices and the rated power of it and its part of a node; None without a source."""

    name: str
    hyperscaler: tuple[float, ...] | None = None
    """USD a GPU-hour on demand: lowest and highest."""
    specialised: tuple[float, ...] | None = None
    marketplace: tuple[float, ...] | None = None
    priced: str = ""
    price_source: str = ""
    chip_watts: float | None = None
    rated_watts: float | None = None
    """The node's rated power, divided among its GPUs."""
    power_source: str = ""


@dataclass(frozen=True)
class PublishedFigure:
    """A figure that is measured or published, with its date and source."""

    name: str
    dated: str
    source: str
    value: float = 0.0
    chip_share: float = 0.0
    """For a phase: power drawn by the chip over its rated power."""
    rest_share: float = 0.0
    """For a phase: power drawn by the rest of the node over its rated power."""


CHIP_RATES = Rows(_FOLDER / "chips.toml", record(ChipExpense, "name"))
FIGURES = Rows(_FOLDER / "figures.toml", record(PublishedFigure, "name"))


@dataclass(frozen=True)
class Taken:
    """A value that the user did not give, taken from a table or preset."""

    what: str
    value: str
    source: str


@dataclass(frozen=True)
class ExpenseRates:
    """What a GPU-hour costs; None where no figure is published and none was given."""

    price: float | None
    """In the currency of the user's own price, or USD."""
    watts: Mapping[str, float]
    """Drawn by a GPU and its part of the node, by phase; {} where nothing is known."""
    network_watts: float
    """A GPU's part of links between nodes."""
    pue: float
    g_per_kwh: float
    taken: tuple[Taken, ...] = field(default=())
    """What was not given, with its date and source."""


@dataclass(frozen=True)
class GivenRates:
    """A user's own values; None where the table decides."""

    price: float | None = None
    provider: str = PROVIDERS[0]
    watts: float | None = None
    pue: float | None = None
    grid: str | None = None

    def __post_init__(self) -> None:
        for name, least, most, what in (
            ("price", 0.0, 1e6, "a price of a GPU-hour, e.g. 2.5"),
            ("watts", 1.0, 1e5, "watts of a GPU with its part of the node, e.g. 980"),
            ("pue", 1.0, 5.0, "from 1, no overhead, to 5"),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InputError(name, value, f"must be {what}")
        if self.provider not in PROVIDERS:
            raise InputError("provider", self.provider, "is no kind of provider", nearest(self.provider, PROVIDERS))
        if self.grid is not None:
            _intensity(self.grid)


AS_PUBLISHED = GivenRates()


def read_rates(line: str | None, price: float | None = None) -> GivenRates:
    """Read a line of a user's own values, and the `price` that an option may give instead. Raises InputError."""
    values: dict[str, float | str] = {}
    for item in filter(None, (part.strip() for part in (line or "").split(","))):
        name, _, text = (part.strip() for part in item.partition("="))
        if name not in GivenRates.__dataclass_fields__ or not text:
            raise InputError("rates", item, "is no rate", nearest(name, GivenRates.__dataclass_fields__))
        if name in values:
            raise InputError("rates", item, "is given twice", "leave one of them out")
        try:
            values[name] = text if name in ("provider", "grid") else float(text)
        except ValueError:
            raise InputError("rates", item, "is not a number", f"e.g. {name}=1.2") from None
    if price is not None:
        if "price" in values:
            raise InputError("price", price, "stands in rates, too", "leave one of them out")
        values["price"] = price
    return GivenRates(**values)  # type: ignore[arg-type]


def rates_on(device: str, given: GivenRates = AS_PUBLISHED, phases: Sequence[str] = ("training",)) -> ExpenseRates:
    """Return the rates on the device of this name, with the power of these phases (figures.toml)."""
    row, taken = _row(device), list[Taken]()
    chip = device if row is None else row.name

    def take(what: str, value: str, dated: str = "", source: str = "") -> None:
        taken.append(Taken(what, value, f"{dated}: {source}" if dated else source or f"give {what}= in rates"))

    price = given.price
    if price is None:
        known: tuple[float, ...] | None = None if row is None else getattr(row, given.provider)
        if known is None or row is None:
            take("price", f"{_NONE} of a {given.provider} provider of {chip}")
        else:
            price = sum(known) / len(known)
            ends = f", the middle of {known[0]:g} to {known[-1]:g}" if known[0] != known[-1] else ""
            take("price", f"{price:g} USD a GPU-hour, {given.provider}{ends}", row.priced, row.price_source)
    watts: dict[str, float] = {}
    if given.watts is not None:
        watts = dict.fromkeys(phases, given.watts)
    elif row is None or row.rated_watts is None or row.chip_watts is None:
        take("watts", f"{_NONE} of a node of {chip}")
    else:
        rest = row.rated_watts - row.chip_watts
        shares = {name: FIGURES[name] for name in phases}
        watts = {name: row.chip_watts * p.chip_share + rest * p.rest_share for name, p in shares.items()}
        take("power", f"{row.rated_watts:,.0f} W a GPU of a node, {row.chip_watts:,.0f} W of it the chip", "rated",
             row.power_source)  # fmt: skip
        for phase in phases:
            take(f"power, {phase}", f"{watts[phase]:,.0f} W a GPU", *_origin(phase))
    network = 0.0 if given.watts is not None else FIGURES["network"].value
    if watts and network:
        take("power, network", f"{network:g} W a GPU over several nodes", *_origin("network"))
    pue = FIGURES["pue"].value if given.pue is None else given.pue
    if given.pue is None:
        take("pue", f"{pue:g}", *_origin("pue"))
    grams, name, kind = _intensity(given.grid)
    if kind:
        take("grid", f"{grams:g} g CO2e/kWh, {name}", *_origin(kind))
    return ExpenseRates(price, watts, network, pue, grams, tuple(taken))


def require_counted(rates: ExpenseRates, objective: str) -> None:
    """Raise InputError if the quantity of a search's objective (money, energy, carbon) has no figure."""
    known = {"money": rates.price is not None, "energy": bool(rates.watts), "carbon": bool(rates.watts)}
    if not known.get(objective, True):
        missing, example = ("price", "2.5") if objective == "money" else ("watts", "980")
        reason = f"is missing: none is published for this chip, and the objective is {objective}"
        raise InputError(missing, None, reason, f"say it with rates, e.g. {missing}={example}")


def _origin(figure: str) -> tuple[str, str]:
    return FIGURES[figure].dated, FIGURES[figure].source


def _row(device: str) -> ChipExpense | None:
    """Return the row of a device such as H100-SXM5-80GB, or None; variants in memory share their chip's row."""
    try:
        name = chip_name(device)
    except InputError:
        return None
    return CHIP_RATES[kind] if (kind := name.split("-")[0]) in CHIP_RATES else None


def _intensity(grid: str | None) -> tuple[float, str, str]:
    """Return (g CO2e/kWh, name of the grid with its year, key of the source in FIGURES) of a grid; the last two are
    "" for a user's own number. Raises InputError."""
    if grid is None:
        return FIGURES["world"].value, "world average: name a grid", "world"
    try:
        grams = float(grid)
    except ValueError:
        known = _grids()
        row = known.get(grid.upper())
        if row is None:
            remedy = f"{nearest(grid.upper(), known)}; or g CO2e/kWh, e.g. 45"
            raise InputError("grid", grid, "is no country (ISO code), zone or region with a figure", remedy) from None
        return float(row["g_per_kwh"]), f"{row['name']} {row['year']}", row["kind"]
    if not 0 <= grams <= 5000:
        raise InputError("grid", grid, "must be from 0 to 5000 g CO2e/kWh")
    return grams, "", ""


@cache
def _grids() -> dict[str, dict[str, str]]:
    with (_FOLDER / "grids.csv").open(newline="") as file:
        return {row["grid"].upper(): row for row in csv.DictReader(file)}
