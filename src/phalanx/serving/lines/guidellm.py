"""GuideLLM's command line in plain flags, one for each field of a load.

Its values have parts, `--data prompt_tokens=256,output_tokens=128` and since 0.7 `--profile kind=constant,rate=2`,
and a profile says what a rate is: requests at once, requests per second, or the number of benchmarks of a sweep
(vllm-project/guidellm, v0.6.1: src/guidellm/__main__.py, benchmark/profiles.py; v0.7.3: src/guidellm/cli/run.py,
benchmark/profiles).
"""

from collections.abc import Iterator, Mapping, Sequence

from phalanx.frameworks.tables import documents

_THROUGHPUT_REQUESTS = "512"
"""Concurrent requests of a benchmark of throughput (v0.7.3, benchmark/profiles/sweep.py:48)."""
_SWEEP = "10"
"""Benchmarks of a sweep (v0.7.3, benchmark/profiles/sweep.py:38)."""
_PARTED = {"data": "data", "profile": "profile", "rate-type": "profile", "constraint": "constraint"}
"""Flags whose values have parts -> the name of the parts."""
_RATES = ("rate", "override")
_LENGTHS = ("prompt_tokens", "output_tokens", "prompt_tokens_stdev", "output_tokens_stdev")
_CONSTRAINTS = {"max_requests": ("count", "--max-requests"), "max_duration": ("seconds", "--max-seconds")}


def plain_flags(words: Sequence[str]) -> list[str]:
    """Return the words of a line with the parts of its data, profile and constraints as flags of their own."""
    rest: list[str] = []
    parts: dict[str, dict[str, str]] = {"data": {}, "profile": {}, "constraint": {}}
    rates: list[str] = []
    for name, values in _flags(words):
        if name in _PARTED:
            for value in values:
                part = _parts(value)
                if _PARTED[name] == "constraint":
                    rest += _constraint(part)
                parts[_PARTED[name]] |= part
        elif name in _RATES:
            rates += [rate for value in values if not value.startswith("profile.") for rate in value.split(",")]
        else:
            rest += [f"--{name}" if name else "", *values]
    data = parts["data"]
    lengths = [word for name in _LENGTHS if name in data for word in (f"--{name}", data[name])]
    named = [] if lengths or not data else ["--data", data.get("source", data.get("kind", ""))]
    return [*filter(None, rest), *lengths, *named, *_load(parts["profile"], rates)]


def _load(profile: Mapping[str, str], rates: list[str]) -> list[str]:
    """Return the flags of a profile's loads."""
    kind = profile.get("kind", "sweep")
    rates = rates or [part for name in ("streams", "rate", "sweep_size") for part in profile.get(name, "").split()]
    most = profile.get("max_concurrency", _THROUGHPUT_REQUESTS)
    match kind:
        case "synchronous":
            return ["--concurrency", "1"]
        case "concurrent":
            return ["--concurrency", *rates]
        case "throughput":
            return ["--concurrency", *(rates or [most])]
        case "sweep":
            arrivals = profile.get("strategy_type", "constant")
            return ["--concurrency", "1", most, "--sweep", (rates or [_SWEEP])[0], "--arrivals", arrivals]
    return ["--rate", *rates, "--arrivals", kind.replace("async", "constant")]


def _constraint(part: Mapping[str, str]) -> list[str]:
    name, flag = _CONSTRAINTS.get(part.get("kind", ""), ("", ""))
    return [flag, part[name]] if name in part else []


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of a flag, the words that are its value); without a name the words before the first flag."""
    name, values = "", list[str]()
    for word in words:
        if word.startswith("-") and len(word) > 1 and not word[1].isdigit():
            yield name, values
            name, equals, value = word.lstrip("-").partition("=")
            values = [value] if equals else []
        else:
            values.append(word)
    yield name, values


def _parts(text: str) -> dict[str, str]:
    """Return the parts of a value: JSON, `name=value` with commas between, or a word that is its kind. The elements
    of a list have spaces between."""
    if text.lstrip().startswith("{"):
        table = documents(text, ".yaml", "--data")[0]
    elif "=" in text:
        table = dict(part.partition("=")[::2] for part in text.split(",") if "=" in part)
    else:
        table = {"kind": text}
    items = table.items() if isinstance(table, Mapping) else ()
    return {str(key): " ".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in items}
