"""Seconds of the operations that carry a step's flows."""

import numpy as np

from phalanx.cost.collectives.nccl_model import collective_s, message_s
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.flow import Flow


class FlowTimer:
    """Seconds of flows on a system; flows of the same bytes over the same ranks are timed once."""

    def __init__(self, system: System) -> None:
        self.system = system
        self._known: dict[tuple[str, int, int], tuple[Flow, Column]] = {}

    def one(self, flow: Flow) -> Column:
        """Return seconds of one of a flow's operations."""
        key = (flow.op, id(flow.bytes), id(flow.ranks))
        if key not in self._known:  # keeps the flow alive, so that ids of its arrays are not reused
            self._known[key] = flow, seconds_of(flow, self.system)
        return self._known[key][1]


def seconds_of(flow: Flow, system: System) -> Column:
    """Return seconds of one of a flow's operations."""
    if flow.op == "send":
        return message_s(flow.bytes, flow.stride, system, flow.chain) * (np.asarray(flow.ranks) > 1)
    return collective_s(flow.op, flow.bytes, flow.ranks, flow.stride, system)
