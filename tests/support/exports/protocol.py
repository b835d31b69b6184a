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


def answer(derive: Callable[[dict[str, Any]], dict[str, Any]], schema: Callable[[], dict[str, Any]]) -> None:
    """Answer every case; with --schema print the schema instead: version, keys, and choices by key.

    `derive` parses and validates a case, in a folder with its files, and returns what it derives; what it raises or
    exits with is what is wrong."""
    out, sys.stdout = sys.stdout, sys.stderr
    if sys.argv[1:] == ["--schema"]:
        print(json.dumps(schema()), file=out)
        return
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


def fields_of(cls: Any, prefix: str) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the keys of a dataclass or pydantic model under a prefix, and the choices of those that are Literal."""
    import dataclasses
    from typing import get_args, get_origin, get_type_hints

    hints = get_type_hints(cls)
    names = list(cls.model_fields) if hasattr(cls, "model_fields") else [f.name for f in dataclasses.fields(cls)]
    choices = {
        f"{prefix}{n}": list(get_args(hints[n])) for n in names if str(get_origin(hints[n])) == "typing.Literal"
    }
    return [f"{prefix}{n}" for n in names], choices


def pretend(*packages: str) -> None:
    """Make packages importable that are not installed: their attributes are mocks, their versions high."""
    import importlib.machinery
    import importlib.util
    from unittest.mock import MagicMock

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> Any:
            if not any(name == m or name.startswith(f"{m}.") for m in missing):
                return None
            return importlib.machinery.ModuleSpec(name, Loader(), is_package=True)

    class Loader:
        @staticmethod
        def create_module(spec: Any) -> Any:
            module = MagicMock(name=spec.name)
            module.__path__, module.__version__, module.__all__ = [], "99.0", []
            return module

        @staticmethod
        def exec_module(module: Any) -> None:
            pass

    missing = {name for name in packages if importlib.util.find_spec(name) is None}
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
