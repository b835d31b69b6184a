"""One host of the lab: torchrun, without torch's traceback when it is terminated or a rank has failed.

python -m phalanx.measure.lab_torchrun TORCHRUN_ARGUMENTS
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except SignalException as stop:
        sys.exit(128 + int(stop.sigval))
    except ChildFailedError as failed:
        sys.exit(str(failed))
