"""One host of the lab: torchrun, without torch's traceback when it is terminated or a rank has failed.

python benchmarks/lab/torchrun.py TORCHRUN_ARGUMENTS
"""

from __future__ import annotations

import logging
import sys
import tempfile

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def _not_of_the_end(record: logging.LogRecord) -> bool:
    """Whether a record says more than that this process is being terminated, which whoever did it knows."""
    return not any(words in record.getMessage() for words in ("death signal", "closing signal"))


if __name__ == "__main__":
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_not_of_the_end)
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        try:
            main([f"--log-dir={folder}", *sys.argv[1:]])  # torch would leave one of its own
        except SignalException as stop:
            sys.exit(128 + int(stop.sigval))
        except ChildFailedError as failed:
            sys.exit(str(failed))
