"""What the lab shows by time: all-reduces over a slow link against its rate and against Gloo, the rate as measured,
and what compression and HSDP win against what was predicted beforehand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab import COMPRESSED, HSDP, QUIET, SERIAL, SHARDED, SHM, WHOLE, crossing
from benchmarks.result import Result
from phalanx.measure import lab
from phalanx.measure.lab import Lab
from phalanx.measure.steal_time import NOTED
from phalanx.schedule.collectives.registry import ALGORITHMS
from phalanx.spec.files.job_file import cluster_from_toml

RATE = "1gbit"
SIZE = 2**24


def _run(made: Lab, ranks: int, **given: Any) -> None:
    code = lab.run(made, ranks, ["-m", "benchmarks.lab", json.dumps(given)])
    assert code == 0, f"ranks in the lab ended with {code}"


def _told(made: Lab, ranks: int, **given: Any) -> Any:
    """What the ranks on the lab's hosts have written."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "told.json"
        _run(made, ranks, out=str(out), **given)
        return json.loads(out.read_text())


def bench_lab() -> Iterator[Result]:
    """The numbers that links of 1 Gbit/s between hosts allow."""
    why = lab.unavailable()
    if why:
        yield Result("the lab", why)
        return
    rate = lab.bytes_per_s(RATE)
    for hosts, least in ((2, 1.25), (4, 1.05)):
        with Lab(hosts, rate) as made:
            times = _told(made, 2, what="reduce", size=SIZE)
        for name in ("native", *ALGORITHMS["all_reduce"], SHM):
            bound = crossing(name, 2 * hosts, 2) * SIZE / rate
            middle = median(times[name])
            shown = f"{middle / bound:.3f} x {bound * 1e3:.0f} ms ({min(times[name]) * 1e3:.0f} to "
            shown += f"{max(times[name]) * 1e3:.0f})"
            bounded = hosts == 2 and name not in (*SERIAL, "native")
            kept = not bounded or middle <= 1.25 * bound
            yield Result(f"{name} over bytes / rate, {hosts} x 2", shown, "1.25" * bounded, kept)
        for name, theirs in (("hierarchical", "native"), (SHM, "native again")):
            ratio = median(times[theirs]) / median(times[name])
            spread = min(times[theirs]) / max(times[name]), max(times[theirs]) / min(times[name])
            shown = f"{ratio:.3f} (rounds {spread[0]:.3f} to {spread[1]:.3f})"
            kept = ratio >= least
            limit = f"at least {least}" if name == SHM else ""
            yield Result(f"Gloo / {name}, {hosts} x 2", shown, limit, kept or not limit)
    for ranks, base, others in ((1, WHOLE, COMPRESSED), (2, SHARDED, (HSDP,))):
        with Lab(2, rate) as made, tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "cluster.toml")
            _run(made, ranks, what="measure", cluster=file)
            network = cluster_from_toml(Path(file)).tiers[-1]
            found = {"rank": network.bandwidth_bytes_per_s_per_gpu_per_direction}
            if ranks > 1:
                found["host"] = network.uplink_bandwidth_bytes_per_s_per_direction or 0.0
            for name, value in found.items():
                shown = f"{value / rate:.3f} of what was set"
                kept = abs(value / rate - 1) <= 0.05
                yield Result(f"the link's rate of a {name}, 2 x {ranks}", shown, "5 %", kept)
            steps = _told(made, ranks, what="train", cluster=file, lines=(base, *others))
        for line in others:
            yield _speed_up(steps, line, base)


def _speed_up(steps: dict[str, Any], line: str, base: str) -> Result:
    """Of a strategy over another, as measured and as predicted before: medians of the rounds in which the machine
    was its own. With a threshold that is not low nobody knows beforehand how many elements are sent: a bound."""
    name, quiet = f"speed-up of {line} over {base}", dict[str, list[float]]()
    for key in (base, line):
        told = zip(steps[key]["seconds"], steps[key]["stolen"], strict=True)
        quiet[key] = sorted(seconds for seconds, stolen in told if stolen < NOTED)
        if len(quiet[key]) < QUIET:
            return Result(name, f"{len(quiet[key])} quiet rounds of {len(steps[key]['seconds'])}", f"{QUIET}", False)
    base_s, line_s = median(quiet[base]), median(quiet[line])
    measured, predicted = base_s / line_s, steps[base]["predicted"] / steps[line]["predicted"]
    off = predicted / measured - 1
    shown = f"measured {measured:.2f}, predicted {predicted:.2f}, {off:+.0%}; steps {base_s * 1e3:.0f} ms and "
    shown += f"{line_s * 1e3:.0f} ({quiet[line][0] * 1e3:.0f} to {quiet[line][-1] * 1e3:.0f}), predicted "
    shown += (
        f"{steps[base]['predicted'] * 1e3:.0f} and {steps[line]['predicted'] * 1e3:.0f}; {len(quiet[line])} rounds"
    )
    bound = "threshold:1e-3" in line
    return Result(name, shown, "15 %, or more" if bound else "15 %", off <= 0.15 and (bound or off >= -0.15))
