"""A trace of requests, read from CSV.

Columns, by name: `arrival` (or `timestamp`: seconds, or a date and time), `input` (or `ContextTokens`,
`input_length`) and `output` (or `GeneratedTokens`, `output_length`): tokens. Optional: `priority` (lower goes first),
`reused` (leading tokens of the prompt in the cache). Others are ignored. Dates are relative to the first row's.
"""

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from phalanx.serving.simulation.requests import Requests
from phalanx.spec.documents import csv_of, read_packed
from phalanx.spec.errors import InputError

_NAMES = {
    "arrival": ("arrival", "timestamp"),
    "input": ("input", "contexttokens", "input_length"),
    "output": ("output", "generatedtokens", "output_length"),
    "priority": ("priority",),
    "reused": ("reused",),
}
_LARGEST = 2**28


def read(path: Path) -> Requests:
    """Read a trace. Raises InputError with the row and the column."""
    with csv_of(path, "trace"):
        return _read(csv.reader(read_packed(path, "trace", _LARGEST).splitlines()), path)


def _read(rows: Iterator[list[str]], path: Path) -> Requests:
    header = [name.strip().lower() for name in next(rows, [])]
    places: dict[str, int] = {}
    for column, names in _NAMES.items():
        place = next((header.index(name) for name in names if name in header), None)
        if place is not None:
            places[column] = place
        elif column in ("arrival", "input", "output"):
            reason = f"has no column {' or '.join(names)}"
            raise InputError("trace", str(path), reason, "write arrival,input,output as its first line")
    values: dict[str, list[float]] = {column: [] for column in places}
    for number, row in enumerate(rows, 2):
        if not any(cell.strip() for cell in row):
            continue
        for column, place in places.items():
            text = row[place].strip() if place < len(row) else ""
            value = _number(text, column)
            location = f"trace {path.name}, row {number}, {header[place]}"
            if value is None:
                raise InputError(
                    location, text, "is not a number" if column != "arrival" else "is neither seconds nor a date"
                )
            least = 1 if column in ("input", "output") else -1e12 if column == "priority" else 0
            if not least <= value < 1e12:
                reason = "must not be negative" if least == 0 and value < 0 else f"must be from {least:g} to 1e12"
                raise InputError(location, text, reason)
            if column != "arrival" and value != int(value):
                raise InputError(location, text, "is not a whole number")
            if column == "arrival" and values[column] and value < values[column][-1]:
                raise InputError(location, text, "is before the row above", "sort the trace by time")
            values[column].append(value)
    if not values["arrival"]:
        raise InputError("trace", str(path), "has no requests")
    arrival = np.array(values["arrival"])
    if arrival[0] > 1e8:  # dates
        arrival = arrival - arrival[0]
    whole = {column: np.array(values[column], np.int64) for column in places if column != "arrival"}
    return Requests(
        whole["input"], whole["output"], arrival, reused=whole.get("reused"), priority=whole.get("priority")
    )


def _number(text: str, column: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    if column == "arrival":
        try:
            return datetime.fromisoformat(text[:26]).timestamp()
        except (ValueError, OverflowError):
            return None
    return None
