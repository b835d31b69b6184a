"""The collectives inside of layers. They are called from under autograd, where nobody can be handed what pass runs
now; so that stands here, one for all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from phalanx.runtime.autograd.deferred_weight_grads import PutOff
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.transport import Handle
from phalanx.schedule.event import Phase, Reduction


class Inner:
    """What layers communicate through. `micro_batch`: whose passes run. `again`: a forward pass is repeated, within
    the backward pass, to which what it sends belongs. `put_off`: says whether a backward pass is of inputs alone."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.micro_batch: int | None = None
        self.again = False
        self.put_off: PutOff | None = None
        self.seed = 1.0
        """The gradient of the loss of one token, which losses inside of layers begin from."""

    def _phase(self, phase: Phase) -> Phase:
        back = "I" if self.put_off is not None and self.put_off.active else "B"
        return back if self.again or phase == "B" else phase

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
        """As Comm.all_to_all."""
        return self.comm.all_to_all(
            target,
            source,
            axis,
            unit=unit,
            phase=self._phase(phase),
            micro_batch=self.micro_batch,
            sends=sends,
            receives=receives,
        )

    def exchange(self, target: Tensor, source: Tensor, axis: str, unit: str, phase: Phase) -> Handle:
        """As Comm.exchange."""
        return self.comm.exchange(
            target, source, axis, unit=unit, phase=self._phase(phase), micro_batch=self.micro_batch
        )

    def all_reduce(self, tensor: Tensor, axis: str, unit: str, phase: Phase, reduction: Reduction = "sum") -> Handle:
        """As Comm.all_reduce."""
        return self.comm.all_reduce(
            tensor,
            axis,
            unit=unit,
            phase=self._phase(phase),
            micro_batch=self.micro_batch,
            reduction=reduction,
        )

    def all_gather(self, target: Tensor, source: Tensor, axis: str, unit: str, phase: Phase) -> Handle:
        """As Comm.all_gather."""
        return self.comm.all_gather(
            target, source, axis, unit=unit, phase=self._phase(phase), micro_batch=self.micro_batch
        )

    def reduce_scatter(self, target: Tensor, source: Tensor, axis: str, unit: str, phase: Phase) -> Handle:
        """As Comm.reduce_scatter."""
        return self.comm.reduce_scatter(
            target, source, axis, unit=unit, phase=self._phase(phase), micro_batch=self.micro_batch
        )
