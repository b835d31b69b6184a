"""What gives a model its numbers: any slice of any parameter, by our names, read and not held.

Hugging Face folders, checkpoints of runs, and (nn/initial.py) the random generator all answer the same question.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Weights(Protocol):
    """Parameters and buffers by single-process name. Reading holds no more memory than the slice and one tensor."""

    def has(self, fqn: str) -> bool:
        """Whether it is there: parameters all are, and buffers where what was stored had learned them."""
        ...

    def dtype(self, fqn: str) -> torch.dtype:
        """The type in which the parameter is stored."""
        ...

    def slice(self, fqn: str, start: int, stop: int) -> Tensor:
        """Elements start..stop of the flattened parameter, in its stored type, on the CPU."""
        ...
