"""The loads of a benchmark's command line: lengths, arrivals and number of requests.

A line that runs several benchmarks, as for a list of concurrent requests, has a load for each.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from phalanx.serving.lines.programs import Line
from phalanx.spec.errors import InputError

_SWEPT = ("requests", "concurrency", "rate", "input", "output")
"""Fields of which a line may have several."""


def loads(bench: Line, drawn: Line | None, given: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield the fields of each load of a benchmark, with their caveats. `drawn`: the line that generates the data
    set, if there is one. Raises InputError for unknown lengths."""
    flags = [name for name, field in bench.program.flags.items() if field in _SWEPT]
    several = {name: values for name in flags if isinstance(values := bench.flags.get(name), list)}
    for values in itertools.product(*several.values()):
        yield _load(replace(bench, flags={**bench.flags, **dict(zip(several, values, strict=True))}), drawn, given)


_VARIATION = 1.0
"""Standard deviation over mean of the lengths of a published data set."""


def _load(bench: Line, drawn: Line | None, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    program = bench.program
    of_file = {"dataset": program.of_file} if program.of_file and bench.fields.get("file") else {}
    stated = {**program.defaults, **of_file, **bench.fields, **(drawn.fields if drawn is not None else {})}
    caveats: list[str] = []
    fields: dict[str, Any] = {}
    for name in ("requests", "concurrency"):
        value = stated.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            fields[name] = value
    fields |= _arrivals(stated, given)
    if "seconds" in stated and "requests" not in {**fields, **given}:
        fields |= _until(stated, fields)
        caveats.append("assumed: every request that comes until the clock ends the benchmark is answered")
    if "requests" not in {**fields, **given}:
        caveats.append("missing: how many requests: a load without end is taken; --requests says how many")
    synthetic = str(stated.get("dataset", "")) in program.synthetic or not program.synthetic
    if program.engine == "trtllm" and drawn is None and "input" not in bench.fields:
        synthetic = False
    dataset = str(stated.get("dataset") or "a file")
    drawn_lengths = dict(zip(("input", "output"), program.mean_lengths.get(dataset, ()), strict=False))
    for name in ("input", "output"):
        if name in given:
            continue
        value = stated.get(name) if synthetic or name in bench.fields else drawn_lengths.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            reason = f"missing: the lengths of {dataset} are not in the line"
            raise InputError(name, None, reason, "give the mean, and --variation")
        fields[name] = value if drawn_lengths else _range(program.title, value, stated)
    if drawn_lengths and not {"input", "output"} <= given.keys():
        fields["variation"] = _VARIATION
        caveats.append(
            f"assumed: the lengths of {dataset} have means of {fields.get('input', given.get('input'))} and "
            f"{fields.get('output', given.get('output'))} tokens, and vary as much: --input, --output, --variation"
        )
    caveats += _varied(fields, stated, given)
    prefix = stated.get("prefix")
    if isinstance(prefix, int) and prefix > 0 and "input" in fields:
        low, high = (int(part) for part in f"{fields['input']}:{fields['input']}".split(":")[:2])
        fields["input"] = prefix + low if low == high else f"{prefix + low}:{prefix + high}"
        fields["reuse"] = min(0.99, prefix / (prefix + (low + high) / 2))
        caveats.append(f"assumed: the {prefix:,} tokens that prompts share are cached from the first request on")
    return fields, caveats


def _until(stated: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many requests come at a rate until a benchmark ends by the clock."""
    seconds, rate = stated["seconds"], fields.get("rate", math.inf)
    if not isinstance(seconds, float | int) or isinstance(seconds, bool) or not 0 < rate * seconds < math.inf:
        return {}
    return {"requests": max(1, round(rate * seconds))}


def _arrivals(stated: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of rate and burstiness. An infinite rate: requests come as fast as the limit on concurrent
    ones allows."""
    rate = math.inf if str(stated.get("rate")) in ("inf", "-1") else stated.get("rate")
    fields: dict[str, Any] = {}
    if isinstance(rate, float | int) and not isinstance(rate, bool) and not {"rate", "concurrency"} & given.keys():
        fields["rate"] = float(rate)
    if isinstance(burstiness := stated.get("burstiness"), float | int):
        fields["burstiness"] = float(burstiness)
    if stated.get("arrivals") == "constant":
        fields["burstiness"] = math.inf
    return fields


def _range(title: str, length: int, stated: Mapping[str, Any]) -> int | str:
    """Return the tokens of a request, or a range FROM:TO, as the tool draws them."""
    for name, low, high in (
        ("spread", lambda r: math.floor(length * (1 - r)), lambda r: math.ceil(length * (1 + r))),
        ("least", lambda r: max(int(length * r), 1), lambda r: length),
    ):
        ratio = stated.get(name)
        if isinstance(ratio, float | int) and not isinstance(ratio, bool):
            if not 0 <= ratio <= 1:
                raise InputError("from", ratio, f"{title}: the ratio of lengths must be from 0 to 1")
            if name == "spread" and ratio == 1:  # releases before 0.8.4, whose default it was; later ones refuse it
                return length
            first, last = max(1, low(ratio)), max(1, high(ratio))
            return first if first == last else f"{first}:{last}"
    return length


def _varied(fields: dict[str, Any], stated: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Set the variation of lengths from their standard deviations; yield a caveat if prompts and answers differ."""
    shares = []
    for name in ("input", "output"):
        mean, deviation = fields.get(name), stated.get(f"{name}_deviation", 0)
        if isinstance(mean, int) and isinstance(deviation, float | int):
            shares.append(float(deviation) / mean)
    if any(shares) and "variation" not in given:
        fields["variation"] = max(shares)
        if max(shares) - min(shares) > 0.01:
            yield f"assumed: prompts and answers both vary by {max(shares):.0%} of their mean"
