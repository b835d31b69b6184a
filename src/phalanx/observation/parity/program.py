"""A rank of a user's program, whose first step is compared with one process (runtime/any_module/first_step.py). The
argument is JSON: {"program", "arguments", "out", "timeout_s"}."""

import json
import os
import runpy
import sys
from pathlib import Path

from phalanx.runtime.any_module.first_step import REQUEST
from phalanx.runtime.process.environment import ALONE, external_world
from phalanx.runtime.process.rank import run_rank


def main() -> None:
    """Run the program as one rank, until its first step has been compared."""
    task = json.loads(sys.argv[1])
    os.environ[REQUEST] = task["out"]
    sys.argv = [task["program"], *task["arguments"]]
    sys.path[0] = str(Path(task["program"]).resolve().parent)
    sys.stdout = sys.stderr  # what the program prints is no part of the answer

    def work() -> None:
        try:
            runpy.run_path(task["program"], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"the program ended with {end.code}") from end

    run_rank(external_world() or ALONE, task["timeout_s"], work)


if __name__ == "__main__":
    main()
