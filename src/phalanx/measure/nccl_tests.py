"""Reader of the output of nccl-tests as measurements: https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.

    # Collective test starting: all_reduce_perf
    #  Rank  0 Group  0 Pid 3161 on  node01 device  0 [0000:07:00] NVIDIA H100
    #    size    count   type  redop   root    time  algbw  busbw #wrong    time  algbw  busbw #wrong
     33554432  8388608  float    sum     -1   231.1  145.2  254.1      0   229.9  145.9  255.4      0

The second half of a line is the in-place variant, which Phalanx's own collectives use too. mpirun writes a tag of the
rank before each line (`--tag-output`). Built without MPI, each process of mpirun is a test of its own GPUs alone.
"""

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
_TEST = re.compile(r"(?:#\s*Collective test (?:starting|concluded):\s*|/)(\w+)_perf(?:_mpi)?\b")
"""The test, by its own line or, before that had one, by the command that ran it."""
_TAG = re.compile(r"^\[\d+,\d+\]<\w+>:", re.M)
_DEVICE = re.compile(r"#\s+Rank\s+\d+\s.*\bdevice\s+\d+\s+\[\S+\]\s+(\S.*?)\s*$", re.M)


def device(text: str) -> str:
    """Return the GPUs of a test, in the driver's words; empty: the file does not say."""
    return line[1] if (line := _DEVICE.search(text)) else ""


def read(text: str, name: str, op: str = "") -> CollectiveFit:
    """Fit a line to the times in the text of one file, which `name` names in messages.

    `op` is the collective, for files of older versions, which omit it. Raises InputError.
    """
    text = _TAG.sub("", text)
    title = _TEST.search(text)
    collective = _OPS.get(title[1], "") if title else op
    if not collective:
        known = ", ".join(_OPS.values())
        if title:
            raise InputError("nccl_tests", name, f"measured {title[1]}", f"phalanx reads tests of {known}")
        raise InputError("nccl_tests", name, "does not say which collective it measured", f"give op, one of {known}")
    listed = _RANK.findall(text)
    hosts = {int(rank): host for rank, host in listed}
    if len(listed) > len(hosts):
        reason = f"lists rank {listed[0][0]} twice: each process tested its own GPUs, and not the links between them"
        raise InputError("nccl_tests", name, reason, "build nccl-tests with make MPI=1; or give one run a file")
    if hosts and max(hosts) >= len(hosts):
        reason = f"names {len(hosts)} of at least {max(hosts) + 1} ranks"
        raise InputError("nccl_tests", name, reason, "keep all lines that begin with # Rank")
    if len(hosts) < 2:
        raise InputError("nccl_tests", name, f"names {len(hosts)} ranks", "keep the lines that begin with # Rank")
    points: list[tuple[int, float]] = []
    for line in text.splitlines():
        words = line.split()
        # size count type redop root, then time algbw busbw wrong twice; without validation, wrong may be N/A
        if len(words) >= 11 and all(re.fullmatch("[0-9]{1,18}", w) for w in words[:2]):
            try:
                size, seconds = int(words[0]), float(words[-4]) * 1e-6
            except ValueError:
                remedy = "give the output as all_reduce_perf wrote it"
                raise InputError("nccl_tests", name, f"{words[-4][:40]!r} is not a time in µs", remedy) from None
            if size and 0 < seconds < float("inf"):
                points.append((size, seconds))
    if len(points) < 2:
        remedy = "measure several sizes: -b 1K -e 1G"
        raise InputError("nccl_tests", name, f"has {len(points)} lines of times", remedy)
    sizes, seconds_ = zip(*sorted(dict(points).items()), strict=True)
    fit = robust_line(sizes, seconds_)
    return CollectiveFit(
        op=collective,
        group_size=len(hosts),
        alpha_s=fit.alpha,
        beta_s_per_byte=fit.beta,
        fit_error=fit.fit_error,
        transport="native",
        points=tuple(zip(sizes, seconds_, strict=True)),
        hosts=len(set(hosts.values())),
        alpha_range=fit.alpha_range,
        beta_range=fit.beta_range,
    )
