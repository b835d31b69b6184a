"""DeepSpeed files that projects ship and that people name, where they are not here: rows of shipped.toml."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

_KEYS = {"stage": "stage", "overlap": "overlap_comm", "bucket": "reduce_bucket_size"}
"""Names of a row -> keys of DeepSpeed's table."""


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def shipped(name: str) -> tuple[dict[str, Any], str] | None:
    """Return the tables of a file and the project that ships it, by the last parts of its path; None for others. A
    file of LLaMA-Factory is known by its name in any folder: no other project has a `ds_z3_config.json`."""
    ends = ["/".join(name.split("/")[-depth:]) for depth in (2, 3)]
    if ends[0].rpartition("/")[2].startswith("ds_z"):
        ends.append(f"examples/deepspeed/{name.rpartition('/')[2]}")
    row = next((row for end in ends if (row := _rows().get(end))), None)
    if row is None:
        return None
    zero: dict[str, Any] = {key: row[name] for name, key in _KEYS.items() if name in row}
    for part in ("optimizer", "param"):
        if part in row:
            zero[f"offload_{part}"] = {"device": row[part]}
    engine = {"enabled": "auto"}
    return {"zero_optimization": zero, "bf16": engine, "fp16": engine, "train_batch_size": "auto"}, str(row["by"])
