"""Imports of the process from which the pool's ranks and forked runs are forked, so that they are made once."""

import gc

import torch._dynamo  # torch's optimizers import it when they are created

import phalanx.cli.app
import phalanx.cli.terminal
import phalanx.commands.measure
import phalanx.runtime.checkpoint.container
import phalanx.runtime.process.agent
import phalanx.verify.worker
from support import (
    awkward_module,
    fault_injection,
    forked_cli,
    in_process_cli,
    killed_rank,
    pipeline_cases,
    rank_cases,
    tiny_training,
)

__all__ = [
    "awkward_module",
    "fault_injection",
    "forked_cli",
    "in_process_cli",
    "killed_rank",
    "phalanx",
    "pipeline_cases",
    "rank_cases",
    "tiny_training",
    "torch",
]

gc.freeze()  # imported modules stay: neither collections in ranks nor counts of live tensors need scan them

phalanx.cli.terminal._SILENT_S = 60.0  # tests count lines, and on a busy machine all takes long
