"""What pool ranks import: done once, in the process that they are forked from."""

import gc

import awkward
import faults
import learning
import ranks
import torch._dynamo  # torch's optimizers ask for it, when they are made

__all__ = ["awkward", "faults", "learning", "ranks", "torch"]

gc.freeze()  # what is imported stays: no collection in a rank need look at it, nor whoever counts live tensors there
