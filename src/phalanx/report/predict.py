"""One prediction: its figures, time and memory by term as bars, and each term with formula and numbers."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from phalanx.cost.analytic.compression import MOST, Payment
from phalanx.cost.analytic.estimate import Estimate, compression_payment
from phalanx.cost.analytic.step import FORMULAS
from phalanx.planning.search import HEADROOM
from phalanx.report.style import empty_table, seconds, size

_SHOWN = 0.002
"""Terms below this share are not drawn."""


def figures(e: Estimate, line: str) -> Table:
    """Tabulate the main figures: step time, throughput, MFU, HFU, memory and compression."""
    table = empty_table(line)
    table.add_column("")
    table.add_column("predicted", justify="right")
    table.add_column("how it came about")
    tokens, world = e.layout.step_tokens, e.layout.world
    memory, usable = e.memory, float(e.allocatable_bytes)
    six = 6 * e.active_params * tokens
    table.add_row("step", seconds(float(e.seconds)), "estimated: the terms below, summed")
    table.add_row("tokens/s per GPU", f"{tokens / e.seconds / world:,.0f}", f"{tokens:,.0f} tokens a step")
    table.add_row("MFU", f"{e.mfu:.1%}", f"{e.model_flops:.3g} FLOP a step; 6N says {six:.3g}; peak of bf16")
    table.add_row("HFU", f"{e.hfu:.1%}", "including what recomputation repeats")
    share = float(memory.reserved) / usable
    tight = f", tight: {share:.0%}" if share > 1 - HEADROOM else ""
    fits = f"fits{tight}" if e.fits else "does not fit"
    table.add_row("memory, peak", size(float(memory.peak)), "allocated, fullest rank, fullest instant")
    table.add_row("memory, reserved", size(float(memory.reserved)), f"{fits}: {size(usable)} usable (estimated)")
    if e.layout.compressed.bound:
        table.add_row("compression", "a bound", "gradients decide what is sent; priced at the most, one in dp x cp")
    if saved := compression_payment(e):
        _add_payment(table, e, saved)
    return table


def _add_payment(table: Table, e: Estimate, saved: Payment) -> None:
    """Add rows on what compression costs and saves in the gradient exchange, and up to how many ranks it pays."""
    gain = saved.dense_s - saved.sent_s - saved.coding_s
    parts = (
        f"all-reduce {seconds(saved.dense_s)}; compressed {seconds(saved.sent_s)}, coding {seconds(saved.coding_s)}"
    )
    table.add_row("compression", f"{'saves' if gain > 0 else 'costs'} {seconds(abs(gain))}", f"alone, {parts}")
    pays = "never" if saved.ranks is None else "with {} to {} ranks".format(*saved.ranks)
    table.add_row("  pays", pays, f"with coding, of 2 to {MOST:,} ranks of this cluster")
    if saved.by_bytes is not None:
        c, g = e.layout.compressed, float(e.profile.gradient_bytes)
        how = f"2 g / (v g + x) = 2 x {g:g} / ({c.values:g} x {g:g} + {c.beside:g}), g bytes of a gradient"
        table.add_row("  by bytes alone", f"up to {saved.by_bytes:.4g} ranks", how)


def bars(e: Estimate, width: int) -> Text:
    """Draw a bar per term, as long as its share: of the step time, then of peak memory."""
    text = Text(no_wrap=True)
    seconds_by_term = {name: float(value) for name, value in e.step.terms.items()}
    memory = {name: float(value) for name, value in e.memory.terms.items()}
    for terms, write, colour in ((seconds_by_term, seconds, "#56b4e9"), (memory, size, "#e69f00")):
        total = sum(terms.values())
        room = max(10, width - 34)
        for name, value in sorted(terms.items(), key=lambda item: -item[1]):
            if value < _SHOWN * total:
                continue
            text.append(f"{name:12} {write(value):>10} {value / total:5.0%} ")
            text.append("█" * max(1, round(room * value / total)), colour)
            text.append("\n")
        text.append("\n")
    text.rstrip()
    return text


def explained(e: Estimate) -> Table:
    """Tabulate each term's formula and the numbers that went into it."""
    table = empty_table("terms of the step")
    for name in ("term", "seconds", "formula", "with"):
        table.add_column(name, justify="right" if name == "seconds" else "left", overflow="fold")
    for name, value in e.step.terms.items():
        inputs = e.step.of.get(name, {})
        numbers = ", ".join(f"{k} = {_number(k, float(v))}" for k, v in inputs.items())
        table.add_row(name, seconds(float(value)) if float(value) else "0", FORMULAS[name], numbers)
    return table


def _number(name: str, value: float) -> str:
    if name.endswith("_s"):
        return seconds(value) if value else "0"
    return f"{value:,.4g}"
