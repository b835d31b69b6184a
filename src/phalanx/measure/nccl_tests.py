"""What nccl-tests printed, as measurements: https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.

    # Collective test starting: all_reduce_perf
    #  Rank  0 Group  0 Pid 3161 on  node01 device  0 [0000:07:00] NVIDIA H100
    #    size    count   type  redop   root    time  algbw  busbw #wrong    time  algbw  busbw #wrong
     33554432  8388608  float    sum     -1   231.1  145.2  254.1      0   229.9  145.9  255.4      0

The second half of a line is in place, as Phalanx's own collectives are.
"""

from __future__ import annotations

import re

from phalanx.measure.fit import robust_line
from phalanx.spec.cluster.spec import CollectiveFit
from phalanx.spec.errors import InputError

_OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device")
_TEST = re.compile(r"#\s*Collective test starting:\s*(\w+)_perf")


def read(text: str, name: str, op: str = "") -> CollectiveFit:
    """The line through the times of one file. `op`: what was measured, for files of older versions, which do not
    say. Raises InputError."""
    said = _TEST.search(text)
    found = _OPS.get(said[1], "") if said else op
    if not found:
        have = "phalanx has no such collective" if said else "does not say which collective it measured"
        raise InputError("--nccl-tests", name, have, f"give --op, one of {', '.join(_OPS.values())}")
    where = {int(rank): host for rank, host in _RANK.findall(text)}
    if len(where) < 2:
        raise InputError("--nccl-tests", name, f"names {len(where)} ranks", "keep the lines that begin with # Rank")
    points = []
    for line in text.splitlines():
        words = line.split()
        # size count type redop root, then time algbw busbw wrong twice; without validation the last may be N/A
        if len(words) >= 11 and words[0].isdigit() and words[1].isdigit():
            size, seconds = int(words[0]), float(words[-4]) * 1e-6
            if size and seconds:
                points.append((size, seconds))
    if len(points) < 2:
        raise InputError(
            "--nccl-tests", name, f"has {len(points)} lines of times", "measure several sizes: -b 1K -e 1G"
        )
    sizes, seconds_ = zip(*sorted(dict(points).items()), strict=True)
    fit = robust_line(sizes, seconds_)
    return CollectiveFit(
        op=found,
        group_size=len(where),
        alpha_s=fit.alpha,
        beta_s_per_byte=fit.beta,
        residual=fit.residual,
        transport="native",
        points=tuple(zip(sizes, seconds_, strict=True)),
        hosts=len(set(where.values())),
        alpha_range=fit.alpha_range,
        beta_range=fit.beta_range,
    )
