"""Imports of the process from which the pool's ranks and forked runs are forked, so that they are made once.

A small job is planned too: what a command imports once it runs, and makes of the types of its input, is then there.
"""

import gc
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
import torch._dynamo  # torch's optimizers import it when they are created
import torch.distributed.launcher.api

import phalanx.answers.machine.measure
import phalanx.answers.runs.train
import phalanx.cli.app
import phalanx.cli.terminal
import phalanx.observation.parity.worker
import phalanx.report.measured.run_page
import phalanx.report.measured.runs
import phalanx.runtime.checkpoint.container
import phalanx.runtime.process.agent
from support import (
    awkward_module,
    fault_injection,
    forked_cli,
    in_process_cli,
    killed_rank,
    pipeline_cases,
    quick_runs,
    rank_cases,
    tiny_measurement,
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
    "tiny_measurement",
    "tiny_training",
    "tokenizers",
    "torch",
]

phalanx.cli.terminal._SILENT_S = 60.0  # tests count lines, and on a busy machine all takes long

with TemporaryDirectory() as _folder:
    (Path(_folder) / "job.toml").write_text(quick_runs.JOB.replace("ranks = 2", 'preset = "dgx-h100"'))
    in_process_cli.phalanx(Path(_folder), "plan", "job.toml", "--strategy", "dp=8,micro_batch=1")

gc.freeze()  # imported modules stay: neither collections in ranks nor counts of live tensors need scan them
