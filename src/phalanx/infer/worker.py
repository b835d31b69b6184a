"""Generation on ranks: `python -m phalanx.infer.worker FILE`, which `over_ranks` launched with FILE; or `as_rank`,
which torchrun or srun started."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from phalanx.infer.sampling import Sampling
from phalanx.infer.text import Piece, TextQuery, answer, question
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process import world as worlds
from phalanx.runtime.process.environment import ALONE, World, external_world
from phalanx.runtime.process.folder import private_folder
from phalanx.runtime.process.launch import launch
from phalanx.runtime.process.rank import naming_rank, run_rank
from phalanx.schedule.generation import BatchingPolicy
from phalanx.spec.files.plan import write_json
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_TIMEOUT_S = 300.0


def over_ranks(query: TextQuery, prompts: list[str], stream: bool) -> list[str]:
    """Answer a question on local ranks. With `stream`, rank 0 prints text as it comes. Raises RankFailure."""
    with private_folder() as (folder, _):
        file, out = folder / "question.json", folder / "texts.json"
        content = {
            **{"run": str(query.folder.absolute()), "prompts": prompts, "how": asdict(query.how)},
            **{"policy": asdict(query.policy), "strategy": asdict(query.strategy), "precision": query.dtype},
            **{"stream": stream, "out": str(out)},
        }
        write_json(file, content)
        launch("phalanx.infer.worker", str(file), query.strategy.world, 1, None, _TIMEOUT_S)
        return list(json.loads(out.read_text()))


def as_rank(world: World, query: TextQuery, prompts: list[str], stream: bool) -> list[str]:
    """Answer a question as one rank of a world that torchrun or srun started. Raises RankFailure."""
    with naming_rank(world):
        worlds.join(world, _TIMEOUT_S)
        comm = Comm(world, mesh(query.strategy))
        piece = text_printer(prompts) if stream and world.rank == 0 else lambda request, text, last: None
        texts = answer(query, comm, piece)
        worlds.leave()
        return texts


def text_printer(prompts: list[str]) -> Piece:
    """Return a callback that prints text as it arrives: piece by piece for one prompt; for several, each when it is
    complete, in their order."""
    texts: dict[int, str] = {}
    complete: set[int] = set()
    shown = 0

    def piece(request: int, text: str, last: bool) -> None:
        nonlocal shown
        if len(prompts) == 1:
            print((prompts[0] if not texts else "") + text, end="\n" if last else "", flush=True)
            texts[0] = ""
            return
        texts[request] = texts.get(request, prompts[request]) + text
        if last:
            complete.add(request)
        while shown in complete:
            print(("\n" if shown else "") + texts[shown], flush=True)
            shown += 1

    return piece


def main() -> None:
    """Run as a launched rank, with the question's file as argument; rank 0 writes the texts."""
    args = json.loads(Path(sys.argv[1]).read_text())
    world = external_world() or ALONE
    strategy = Strategy(**args["strategy"])

    def work() -> None:
        comm = Comm(world, mesh(strategy))
        comm.status.now("opening the weights")
        how, policy, prompts = Sampling(**args["how"]), BatchingPolicy(**args["policy"]), args["prompts"]
        asked = question(Path(args["run"]), prompts, how, strategy, policy, args["precision"])
        stream = text_printer(prompts) if args["stream"] and world.rank == 0 else lambda request, text, last: None
        texts = answer(asked, comm, stream)
        if world.rank == 0:
            write_json(Path(args["out"]), texts)

    run_rank(world, _TIMEOUT_S, work)


if __name__ == "__main__":
    main()
