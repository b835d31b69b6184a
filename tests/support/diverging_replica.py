"""A training rank whose weights diverge from its replica's, on rank 1 after step 3.

`python -m support.diverging_replica ARGUMENT`
"""

from __future__ import annotations

import torch

from phalanx.training import training_step, worker

update = training_step.Training._update


def and_spoil(self: training_step.Training, lr: float) -> None:
    update(self, lr)
    self.done = getattr(self, "done", 0) + 1  # type: ignore[attr-defined]
    if self.done == 3 and self.comm.world.rank == 1:  # type: ignore[attr-defined]
        with torch.no_grad():
            self.weights["head.norm.weight"].view(-1)[5] = float("nan")


def main() -> None:
    training_step.Training._update = and_spoil  # type: ignore[method-assign]
    worker.main()


if __name__ == "__main__":
    main()
