"""A ClusterSpec as the TOML file named by `cluster.file`, for people to read, change and keep."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.spec.cluster.presets import LikePreset
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.documents import VERSION, read_toml, tables_of
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build


def to_toml(cluster: ClusterSpec, heading: str = "") -> str:
    """Return TOML that `cluster_from_toml` reads back to an equal ClusterSpec.

    `heading`: lines of comment at the top.
    """
    lines = [f"# {line}" for line in heading.splitlines()]
    tables: list[str] = []
    for key, value in {"version": VERSION, **asdict(cluster)}.items():
        if value is None:
            continue
        if isinstance(value, dict):
            tables += ["", f"[{key}]", *_fields(value)]
        elif isinstance(value, (list, tuple)):
            for row in value:
                tables += ["", f"[[{key}]]", *_fields(row)]
        else:
            lines.append(f"{key} = {_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def cluster_from_toml(path: Path) -> ClusterSpec:
    """Read a ClusterSpec from a TOML file: entire, or what differs from a `preset`. Raises InputError."""
    content = read_toml(path, "cluster.file")
    if "preset" in content:
        return build(LikePreset, content, "cluster").cluster()
    return build(
        ClusterSpec, tables_of(content, content.get("version", VERSION), "cluster.file", str(path)), "cluster"
    )


def calibration_table(path: Path) -> Any:
    """Return the table [calibration] of a TOML file. Raises InputError."""
    content = read_toml(path, "calibration")
    if "calibration" not in content:
        raise InputError(
            "calibration", str(path), "has no table [calibration]", "phalanx measure steps --out writes one"
        )
    return content["calibration"]


def _fields(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(_fields(value)) + " }" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(float(value))  # 1e-05 is TOML too
    return json.dumps(value, ensure_ascii=False)  # strings, integers, true and false
