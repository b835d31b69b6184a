"""Times in the lab: all-reduces over a slow link compared with its rate and with Gloo, the rate found by `phalanx
measure`, and the gain of compression and HSDP compared with its prediction."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab import hosts as lab
from benchmarks.lab.hosts import Lab
from benchmarks.lab_ranks import APART, COMPRESSED, HSDP, QUIET, SERIAL, SHARDED, SHM, WHOLE, crossing
from benchmarks.result import Result
from phalanx.cli.terminal import announce
from phalanx.measure.steal_time import NOTABLE_SHARE
from phalanx.schedule.collectives.registry import ALGORITHMS
from phalanx.spec.files.cluster_toml import cluster_from_toml

RATE = "1gbit"
SIZE = 2**24


def run_ranks(network: Lab, ranks: int, **arguments: Any) -> None:
    """Run benchmarks.lab_ranks on the lab's hosts."""
    code = lab.run(network, ranks, ["-m", "benchmarks.lab_ranks", json.dumps(arguments)])
    assert code == 0, f"ranks in the lab ended with {code}"


def _run_and_read(network: Lab, ranks: int, **arguments: Any) -> Any:
    """Run benchmarks.lab_ranks on the lab's hosts and return what its ranks wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        run_ranks(network, ranks, out=str(out), **arguments)
        return json.loads(out.read_text())


def bench_lab() -> Iterator[Result]:
    """Measure collectives and training on hosts with links of 1 Gbit/s."""
    why = lab.unavailable()
    if why:
        yield Result("the lab", why)
        return
    rate = lab.bytes_per_s(RATE)
    for hosts, least in ((2, 1.25), (4, 1.05)):
        with Lab(hosts, rate) as network:
            times = _run_and_read(network, 2, what="reduce", size=SIZE)
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
        with Lab(2, rate) as network, tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "cluster.toml")
            run_ranks(network, ranks, what="measure", cluster=file)
            link = cluster_from_toml(Path(file)).tiers[-1]
            rates = {"rank": link.bandwidth_bytes_per_s_per_gpu_per_direction}
            if ranks > 1:
                rates["host"] = link.uplink_bandwidth_bytes_per_s_per_direction or 0.0
            for name, value in rates.items():
                shown = f"{value / rate:.3f} of the set rate"
                kept = abs(value / rate - 1) <= 0.05
                yield Result(f"the link's rate of a {name}, 2 x {ranks}", shown, "5 %", kept)
            steps = _run_and_read(network, ranks, what="train", cluster=file, lines=(base, *others))
        for line in others:
            yield _speed_up(steps, line, base)


def bench_local() -> Iterator[Result]:
    """Measure replicas that step alone, and compression, over links of three rates, and where the link is fast enough
    for neither to matter."""
    why = lab.unavailable()
    if why:
        yield Result("the lab", why)
        return
    others = (f"{WHOLE},compression=int8", *APART)
    for rate in ("100mbit", RATE, "10gbit"):
        with Lab(2, lab.bytes_per_s(rate)) as network, tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "cluster.toml")
            announce(f"{rate}: measuring the hosts for a minute or two, then {len(others) + 1} strategies in turn")
            run_ranks(network, 1, what="measure", cluster=file)
            steps = _run_and_read(network, 1, what="train", cluster=file, lines=(WHOLE, *others))
        for line in others:
            result = _speed_up(steps, line, WHOLE)
            yield replace(result, name=f"{result.name}, {rate}", limit=result.limit if rate != "10gbit" else "")


def _speed_up(steps: dict[str, Any], line: str, base: str) -> Result:
    """Compare the speed-up of a strategy over another as measured, over undisturbed rounds, and as predicted before.

    The prediction of a threshold that is not low is only a bound: how much it sends is not known beforehand.
    """
    name, quiet = f"speed-up of {line} over {base}", dict[str, list[float]]()
    for key in (base, line):
        rounds = zip(steps[key]["seconds"], steps[key]["stolen"], strict=True)
        quiet[key] = sorted(seconds for seconds, stolen in rounds if stolen < NOTABLE_SHARE)
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
