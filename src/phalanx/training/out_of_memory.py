"""Out of memory in the middle of a run, in one line: which part is larger than predicted, and what to change.

state      live when the step begins: weights, masters, gradients, optimizer, buffers
passes     added by forward and backward passes at their peak
allocator  memory it cannot hand out: fragments, and other libraries' allocations
"""

from dataclasses import dataclass

from phalanx.cost.step.expand import expand
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.spec import GIB
from phalanx.spec.files.plan import Plan

TOLERANCE = 0.02
"""Relative deviation beyond which a part is named."""


class OutOfMemory(RuntimeError):
    """Raised when a rank has no memory left on its device."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device when an allocation failed, in bytes: allocated `before` the step (0: no step yet), the
    `peak` within it, what the allocator `reserved`, how much of that was `allocated`, and the device's `total`."""

    before: int
    peak: int
    reserved: int
    allocated: int
    total: int


def explain_shortage(plan: Plan, rank: int, device: DeviceMemory) -> OutOfMemory:
    """Return the error that reports where predicted and measured memory differ."""
    program = expand(Layout(plan.model, plan.job, plan.strategy).rank_view(rank))
    state, passes = program.state.total, program.peak_bytes - program.state.total
    rows = (("state", device.before, state), ("passes", device.peak - device.before, passes))
    parts = [f"{name} {ours / GIB:.2f} GiB ({expected / GIB:.2f} predicted)" for name, ours, expected in rows]
    unused = device.reserved - device.allocated
    more = {name: ours - expected for name, ours, expected in rows if ours > expected * (1 + TOLERANCE)}
    if unused > TOLERANCE * device.total:
        more["allocator"] = unused
    remedies = {
        "state": "take a higher zero, or more ranks",
        "passes": "take a smaller micro_batch, or recompute=full",
        "allocator": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    }
    worst = max(more, key=lambda name: more[name], default="")
    if not device.before:  # the state itself was being allocated
        return OutOfMemory(
            f"out of memory: the state takes {state / GIB:.2f} GiB as predicted, of {device.total / GIB:.2f}, and "
            f"{device.peak / GIB:.2f} were there when it did not fit: take a higher zero, or more ranks"
        )
    verdict = f"{worst} is what differs most" if worst else "as predicted: the plan does not fit this device"
    remedy = remedies[worst or "passes"]
    held = f"the allocator holds {unused / GIB:.2f} GiB unused, of {device.total / GIB:.2f}"
    return OutOfMemory(f"out of memory: {', '.join(parts)}, {held}; {verdict}: {remedy}")
