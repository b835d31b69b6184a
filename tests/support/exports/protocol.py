"""What the scripts that run inside a framework's environment share: they are given JSON lines and answer each.

A case: {"files": {name: text}, "arguments": [...], "world": n, "environment": {...}, "expected": {name: value}}. The
answer is "" or what is wrong. No Phalanx is imported: the environment has none.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def answer(derive: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer every case. `derive` parses and validates one, in a folder with its files, and returns what it derives
    of the names that are expected; what it raises or exits with is what is wrong."""
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(_wrong(derive, json.loads(line))), file=out, flush=True)


def _wrong(derive: Callable[[dict[str, Any]], dict[str, Any]], case: dict[str, Any]) -> str:
    said, before, environment = io.StringIO(), Path.cwd(), dict(os.environ)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(case["environment"])
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for name, text in case["files"].items():
                Path(name).write_text(text)
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = derive(case)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
    differs = {n: (v, case["expected"][n]) for n, v in found.items() if v != case["expected"].get(n, v)}
    return f"derives {differs}" if differs else ""
