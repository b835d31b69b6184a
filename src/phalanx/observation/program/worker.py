"""Observe a user's script in a process of its own. The argument is JSON {"script", "module", "arguments", "request",
"parent", "result"}; `request` has the fields of ObservationRequest, `parent` is the process that started this one,
and `result` the open file that receives the observation, as JSON.

The process imports torch once and forks for every rank (processes.py). The script's output goes to stderr.
"""

import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

from phalanx.observation.program.parent import end_with_parent
from phalanx.observation.request import ObservationRequest
from phalanx.schedule.observation_file import to_json


def main() -> None:
    """Observe a script at a world size, and write the observation or an error."""
    task = json.loads(sys.argv[1])
    end_with_parent(task["parent"])
    # Torch is imported here, for seconds: until then Ctrl-C ends this process at once, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from phalanx.observation.program.processes import observe_program
    from phalanx.observation.unobservable import Unobservable

    signal.signal(signal.SIGINT, signal.default_int_handler)
    script, module, arguments = task["script"], task["module"], task["arguments"]
    sys.path[0] = str(Path(script).resolve().parent) if script else os.getcwd()

    def program() -> None:
        sys.argv = [script or module, *arguments]
        if script:
            runpy.run_path(script, run_name="__main__")
            return
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except ImportError as error:
            if traceback.extract_tb(error.__traceback__)[-1].filename != "<frozen runpy>":
                raise
            raise Unobservable(str(error)) from error  # of the module itself, before any of its lines

    try:
        name = " ".join([script or f"-m {module}", *arguments])
        content = to_json(observe_program(name, program, ObservationRequest(**task["request"])))
    except Unobservable as error:
        content = {"error": str(error)}
    except KeyboardInterrupt:
        return
    with os.fdopen(task["result"], "w") as file:
        json.dump(content, file)


if __name__ == "__main__":
    main()
