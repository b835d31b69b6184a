"""What GPU-hours cost in money, energy and carbon."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.planning.expense.rates import ExpenseRates


@dataclass(frozen=True)
class Expense:
    """Money, energy and carbon; None where no figure is published and none was given."""

    of: str
    """What it pays for: a million tokens, or the tokens of a whole training."""
    gpu_hours: float
    money: float | None
    """In the currency of the price, or USD."""
    energy_kwh: float | None
    """With the data centre's overhead."""
    carbon_kg: float | None
    """CO2 equivalent, of the energy alone."""
    money_low: float | None = None
    """`money_low` to `money_high`, and so on: at the step times between which four of five measured ones lie; None if
    that interval is not known."""
    money_high: float | None = None
    energy_low_kwh: float | None = None
    energy_high_kwh: float | None = None
    carbon_low_kg: float | None = None
    carbon_high_kg: float | None = None


A_MILLION = "a million tokens"


def expense_of(
    of: str, gpu_hours: float, rates: ExpenseRates, phases: Mapping[str, float], over_nodes: bool = False
) -> Expense:
    """Return what `gpu_hours` cost. `of`: what they pay for; `phases`: GPU-hours by phase of power (figures.toml);
    `over_nodes`: whether the GPUs are in several nodes."""
    money = None if rates.price is None else gpu_hours * rates.price
    if not rates.watts:
        return Expense(of, gpu_hours, money, None, None)
    network = rates.network_watts * sum(phases.values()) if over_nodes else 0.0
    drawn = sum(rates.watts[phase] * hours for phase, hours in phases.items()) + network
    energy = drawn * rates.pue / 1e3
    return Expense(of, gpu_hours, money, energy, energy * rates.g_per_kwh / 1e3)


def expense_of_hours(e: Expense, of: str, hours: float) -> Expense:
    """Return the expense of `hours` hours, given that of one hour."""
    money, energy, carbon = (value and value * hours for value in (e.money, e.energy_kwh, e.carbon_kg))
    return Expense(of, e.gpu_hours * hours, money, energy, carbon)


def with_interval(e: Expense, low: float, high: float) -> Expense:
    """Return an expense with its interval, if its time may be `low` to `high` times as long."""

    def times(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    return replace(
        e,
        money_low=times(e.money, low),
        money_high=times(e.money, high),
        energy_low_kwh=times(e.energy_kwh, low),
        energy_high_kwh=times(e.energy_kwh, high),
        carbon_low_kg=times(e.carbon_kg, low),
        carbon_high_kg=times(e.carbon_kg, high),
    )
