"""A reduction of the user's own, proved for a schedule and run on local ranks: `phalanx collectives reduce`."""

import json
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch

from phalanx.answers.answer import Answer
from phalanx.runtime.comm.own_reduction import contribution
from phalanx.runtime.comm.reductions import Combine, reduction_by_name
from phalanx.runtime.process.folder import private_folder
from phalanx.runtime.process.launch import launch
from phalanx.schedule.collectives.reduction import examine, needs
from phalanx.schedule.collectives.registry import build, least_size, two_tiers
from phalanx.spec.errors import InputError

OPS = ("all_reduce", "reduce_scatter", "reduce")
_ELEMENTS = 1000
MOST_RANKS = 8


@dataclass(frozen=True)
class OwnReduction(Answer):
    """A reduction of the user's own, proved for an algorithm and executed. `needs`: the algebra that the algorithm
    requires of the function; `order`: an order in which it combines the ranks."""

    op: str
    algorithm: str
    function: str
    ranks: int
    needs: str
    order: tuple[int, ...]
    elements: int
    wrong: int
    """Elements of all ranks' results that differ from f(f(rank 0, rank 1), ...) of one process."""


def run(op: str, algorithm: str, function: str, ranks: int) -> OwnReduction:
    """Prove and run a reduction over local ranks. Raises InputError, Unproved, RankFailure."""
    tiers = two_tiers(ranks)
    if op not in OPS:
        raise InputError("op", op, "does not reduce", f"use {', '.join(OPS)}")
    if not 1 <= ranks <= MOST_RANKS:
        raise InputError("ranks", ranks, "cannot be run here", f"use 1 to {MOST_RANKS}")
    combine = reduction_by_name(function)
    needed = needs(build(op, algorithm, ranks, least_size(algorithm, ranks), tiers=tiers))
    examine(lambda a, b: _as_array(combine, a, b), needed)
    wanted = reduce(combine, [contribution(rank, _ELEMENTS) for rank in range(ranks)]).tolist()
    with private_folder() as (out, _):
        asked = {"op": op, "algorithm": algorithm, "tiers": tiers, "size": _ELEMENTS}
        asked |= {"function": function, "out": str(out)}
        launch("phalanx.runtime.comm.own_reduction", json.dumps(asked), ranks, 1)
        wrong = elements = 0
        for rank in range(ranks):
            for low, values in json.loads((out / f"{rank}.json").read_text()).items():
                elements += len(values)
                wrong += sum(a != b for a, b in zip(values, wanted[int(low) :], strict=False))
    algebra = "associative and commutative" if needed.commutative else "associative"
    return OwnReduction(op, algorithm, function, ranks, algebra, needed.example, elements, wrong)


def _as_array(combine: Combine, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    try:
        result = combine(torch.from_numpy(a.copy()), torch.from_numpy(b.copy()))
    except Exception as error:  # the user's function, which may raise anything
        raise InputError("with", None, f"the function fails on two tensors: {error}") from None
    if not isinstance(result, torch.Tensor) or result.shape != a.shape or result.dtype != torch.int64:
        raise InputError("with", None, "the function must return a tensor like those it gets")
    return result.numpy()
