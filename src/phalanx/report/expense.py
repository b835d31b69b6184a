"""Money, energy and carbon in words."""

from phalanx.planning.budget import short_number
from phalanx.planning.expense.expense import Expense
from phalanx.planning.expense.rates import ExpenseRates
from phalanx.planning.tables.table import Sheet, columns
from phalanx.planning.training_cost import TrainingCost
from phalanx.report.style import seconds


def in_words(e: Expense, rates: ExpenseRates) -> str:
    """Write an expense as far as it is known: `12 (at 3 a GPU-hour), 4.9 MWh, 2.3 t CO2e`."""
    money = "" if e.money is None else f"{number(e.money)} (at {rates.price:g} a GPU-hour{_likely(e)})"
    return ", ".join(filter(None, (money, energy(e), carbon(e)))) or "no published price or power of this chip"


def in_days(t: TrainingCost) -> str:
    """Write the length of a whole training: `300B tokens: 71,526 steps, 28.2 days, 86,752 GPU-hours`."""
    failing = "" if t.losses is None else f" with failures, {t.losses.effective_share:.1%} of them work"
    takes = f"{duration(t)}{failing}, {number(t.gpu_hours)} GPU-hours"
    return f"{short_number(t.tokens)} tokens: {t.steps:,.0f} steps, {takes}"


def duration(t: TrainingCost) -> str:
    """Write the time of a training in days; below one day, in hours or seconds."""
    if t.days >= 1:
        return f"{t.days:,.1f} days"
    return f"{24 * t.days:.1f} hours" if 24 * t.days >= 1 else seconds(t.days * 86_400)


def _likely(e: Expense) -> str:
    """Write the interval of money; "" where none is known."""
    if e.money_low is None or e.money_high is None:
        return ""
    return f"; {number(e.money_low)} to {number(e.money_high)} likely"


def number(value: float) -> str:
    """Write an amount with at least three digits, whole from 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def energy(e: Expense) -> str:
    """Write energy in kWh, MWh or GWh; "" where it is not known."""
    if e.energy_kwh is None:
        return ""
    scale, unit = next((each for each in ((1e6, "GWh"), (1e3, "MWh")) if e.energy_kwh >= each[0]), (1.0, "kWh"))
    return f"{number(e.energy_kwh / scale)} {unit}"


def carbon(e: Expense) -> str:
    """Write carbon in kg or t; "" where it is not known."""
    if e.carbon_kg is None:
        return ""
    return f"{number(e.carbon_kg / 1e3)} t CO2e" if e.carbon_kg >= 1e3 else f"{number(e.carbon_kg)} kg CO2e"


def origins(rates: ExpenseRates) -> Sheet:
    """Tabulate the prices, powers and carbon that were looked up because none were given, with date and source."""
    rows = [(t.what, t.value, t.source) for t in rates.taken]
    return Sheet("price, power and carbon that were not given", columns("what", "value", "source"), rows)
