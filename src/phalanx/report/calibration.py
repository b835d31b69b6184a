"""A calibration as tables: the factors of a step's parts, and each measured step before and after."""

from __future__ import annotations

from phalanx.answers.calibration import Calibrated
from phalanx.planning.tables.table import Sheet, columns
from phalanx.report.view import View

_PARTS = {
    "products": "matrix products",
    "attention": "attention's core",
    "memory": "work bound by memory",
    "inside": "communication inside a node",
    "between": "communication between nodes",
    "host": "launches by the CPU",
}


def view(a: Calibrated) -> View:
    """Show what the steps say, and how far each is off without and with it."""
    factors = [
        (words, a.factors[part], 100 * a.spreads[part], "hardly constrained" if part in a.unconstrained else "")
        for part, words in _PARTS.items()
    ]
    steps = [
        (s.name, s.gpus, s.measured_s, s.predicted_s, s.error, s.calibrated_error, s.left_out_error) for s in a.steps
    ]
    notes = [f"{s.name}: {s.note}" for s in a.steps if s.note]
    return View(
        [
            f"{a.stack} on {a.cluster}: {len(a.steps)} measured step{'s' * (len(a.steps) > 1)}",
            Sheet(
                "",
                columns("part | measured / predicted [number] | ± % [number] | "),
                factors,
                "a factor moves only as far as the steps constrain it; without them it is 1",
                charted=False,
            ),
            Sheet(
                "",
                columns(
                    "step | GPUs [count] | measured s [number] | predicted s [number] | off % [number] "
                    "| calibrated % [number] | by the others % [number]"
                ),
                steps,
                "by the others: calibrated without this step, which says how far an unmeasured one may be off",
                charted=False,
            ),
            *notes,
            *([f"wrote {a.file}: every command that prices takes it with --calibration"] if a.file else []),
        ],
        "calibration",
    )
