"""What the ranks of the pool and forked runs import, once, in the process that they are forked from."""

import gc

import torch._dynamo  # torch's optimizers ask for it, when they are made

import phalanx.cli.app
import phalanx.commands.measure
import phalanx.runtime.checkpoint.container
import phalanx.runtime.process.agent
import phalanx.verify.worker
from support import (
    awkward_module,
    fault_injection,
    forked_cli,
    killed_rank,
    pipeline_cases,
    rank_cases,
    tiny_training,
)

__all__ = [
    "awkward_module",
    "fault_injection",
    "forked_cli",
    "killed_rank",
    "phalanx",
    "pipeline_cases",
    "rank_cases",
    "tiny_training",
    "torch",
]

gc.freeze()  # what is imported stays: no collection in a rank need look at it, nor whoever counts live tensors there
