"""The source of a model's weights: any slice of any parameter, by our names, read on demand.

Hugging Face folders and checkpoints of runs implement it; the random draw of init.py is the alternative.
"""

from typing import Protocol

import torch
from torch import Tensor


class Weights(Protocol):
    """Parameters and buffers by single-process name. Reading takes memory for the slice and at most one tensor."""

    def has(self, fqn: str) -> bool:
        """Whether a tensor is stored: every parameter is, a buffer only if the stored model learned it."""
        ...

    def dtype(self, fqn: str) -> torch.dtype:
        """Return the type in which the parameter is stored."""
        ...

    def slice(self, fqn: str, start: int, stop: int) -> Tensor:
        """Read elements start..stop of the flattened parameter, in its stored type, on the CPU."""
        ...
