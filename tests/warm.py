"""What pool ranks and forked runs (forked.py) import: done once, in the process that they are forked from."""

import gc

import awkward
import faults
import forked
import learning
import poison
import ranks
import ranks_pipeline
import torch._dynamo  # torch's optimizers ask for it, when they are made

import phalanx.cli.app
import phalanx.commands.measure
import phalanx.runtime.checkpoint.container
import phalanx.runtime.process.agent
import phalanx.verify.worker

__all__ = ["awkward", "faults", "forked", "learning", "phalanx", "poison", "ranks", "ranks_pipeline", "torch"]

gc.freeze()  # what is imported stays: no collection in a rank need look at it, nor whoever counts live tensors there
