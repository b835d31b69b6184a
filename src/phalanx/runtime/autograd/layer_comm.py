"""The collectives inside layers. Autograd functions call them and cannot pass along which pass is running, so one
object for all layers of a model tracks it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.runtime.autograd.deferred_weight_grads import DeferredGradients
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.schedule.event import Phase, Reduction


class LayerComm:
    """Issues the collectives of a model's layers on behalf of the running pass.

    `micro_batch`: of the running pass. `again`: a forward pass is being repeated within the backward pass, to which
    its collectives then belong. `deferred_gradients`: says whether a backward pass computes input gradients only.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.micro_batch: int | None = None
        self.again = False
        self.deferred_gradients: DeferredGradients | None = None
        self.seed = 1.0
        """Gradient of one token's loss, from which losses inside layers start their backward pass."""

    def _labels(self, unit: str, phase: Phase) -> dict[str, Any]:
        """Return the unit, phase and micro-batch that a collective is recorded with."""
        back: Phase = "I" if self.deferred_gradients is not None and self.deferred_gradients.active else "B"
        phase = back if self.again or phase == "B" else phase
        return {"unit": unit, "phase": phase, "micro_batch": self.micro_batch}

    def all_to_all(
        self,
        target: Tensor,
        source: Tensor,
        axis: str,
        unit: str,
        phase: Phase,
        sends: Sequence[int] = (),
        receives: Sequence[int] = (),
    ) -> Handle:
        """Issue Comm.all_to_all for the current pass."""
        labels = self._labels(unit, phase)
        return self.comm.all_to_all(target, source, axis, sends=sends, receives=receives, **labels)

    def exchange(self, target: Tensor, source: Tensor, axis: str, unit: str, phase: Phase) -> Handle:
        """Issue Comm.exchange for the current pass."""
        return self.comm.exchange(target, source, axis, **self._labels(unit, phase))

    def all_reduce(self, tensor: Tensor, axis: str, unit: str, phase: Phase, reduction: Reduction = "sum") -> Handle:
        """Issue Comm.all_reduce for the current pass."""
        return self.comm.all_reduce(tensor, axis, reduction=reduction, **self._labels(unit, phase))

    def all_gather(self, target: Tensor, source: Tensor, axis: str, unit: str, phase: Phase) -> Handle:
        """Issue Comm.all_gather for the current pass."""
        return self.comm.all_gather(target, source, axis, **self._labels(unit, phase))

    def reduce_scatter(self, target: Tensor, source: Tensor, axis: str, unit: str, phase: Phase) -> Handle:
        """Issue Comm.reduce_scatter for the current pass."""
        return self.comm.reduce_scatter(target, source, axis, **self._labels(unit, phase))
