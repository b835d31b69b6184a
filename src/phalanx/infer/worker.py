"""A rank of a tensor-parallel generation: `python -m phalanx.infer.worker '{"run", "prompt", "how", "out"}'`."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from phalanx.infer.generate import Sampling, generate
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.launch import launch, run_rank
from phalanx.spec.files import plan as plans
from phalanx.spec.files.plan import write_json
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import require_split

_TIMEOUT_S = 300.0


def over_ranks(run: Path, prompt: str, how: Sampling, tp: int) -> str:
    """Run `generate` on `tp` local ranks that split every layer. Raises InputError, RankFailure."""
    require_split(plans.model_of(run), Strategy(tp=tp))
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        out = Path(folder) / "text.json"
        args = {"run": str(run.absolute()), "prompt": prompt, "how": asdict(how), "out": str(out)}
        launch("phalanx.infer.worker", json.dumps(args), tp, 1, None, _TIMEOUT_S)
        return str(json.loads(out.read_text())["text"])


def main() -> None:
    """Run this rank; rank 0 writes the text."""
    args = json.loads(sys.argv[1])
    world = worlds.external() or worlds.ALONE

    def work() -> None:
        comm = Comm(world, mesh(Strategy(tp=world.size)))
        comm.status.now("generation")
        text = generate(Path(args["run"]), args["prompt"], Sampling(**args["how"]), comm)
        if world.rank == 0:
            write_json(Path(args["out"]), {"text": text})

    run_rank(world, _TIMEOUT_S, work)


if __name__ == "__main__":
    main()
