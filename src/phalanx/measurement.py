"""What `phalanx measure` does beyond this machine: under torchrun, and from what others have measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.job import compute_type

if TYPE_CHECKING:
    from phalanx.runtime.process.world import World


def measure_ranks(world: World, dtype: str, threads: int) -> ClusterSpec | None:
    """The cluster whose ranks somebody else has started, measured by all of them; None but on rank 0. Raises
    InputError, RankFailure."""
    import torch

    from phalanx.measure.all_hosts import measure as measure_all
    from phalanx.runtime.process import world as worlds
    from phalanx.runtime.process.launch import named

    kind = compute_type(dtype, "--dtype")
    torch.set_num_threads(threads)
    with named(world):
        worlds.join(world, 600)
        found = measure_all(world, kind, threads)
        worlds.leave()
    return found


def from_nccl_tests(files: Sequence[Path], preset: str, op: str) -> ClusterSpec:
    """A preset with what nccl-tests measured on it. Raises InputError."""
    from phalanx.measure.nccl_tests import read

    fits = []
    for file in files:
        try:
            fits.append(read(file.read_text(), str(file), op))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError("--nccl-tests", str(file), f"cannot be read ({error})") from None
    return replace(clusters.preset(preset, max(fit.hosts for fit in fits)), collectives=tuple(fits))
