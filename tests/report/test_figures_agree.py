"""Every figure with a unit that a command prints, or writes on its page, is one of its answer's: a number as it is,
a share of the whole that it belongs to, or a difference of two that are compared. None that matters is left out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import phalanx

JOB = "--model llama3-8b --cluster dgx-h100 --gpus 16 --batch 64 --seq 8192"
SCRIPT = """torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096
 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 32000 --bf16
 --tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 64""".replace("\n", " ")
COMMANDS = {
    f"predict {JOB} --strategy tp=2,zero=1": ("step_time_s", "memory_bytes", "mfu", "tokens_per_s_per_gpu"),
    f"predict {JOB} --strategy pp=2,recompute=full,zero=1": ("step_time_s", "memory_bytes", "hfu"),
    f"explain {JOB} --strategy tp=2,zero=1": ("step_time_s", "memory_bytes", "takes_s", "exposed_s", "intensity"),
    f"plan {JOB} --strategy tp=2,zero=1 --out p.json --more": ("step_time_s", "memory_bytes"),
    f"compare tp=2,zero=1 zero=3 {JOB}": ("step_time_s", "memory_bytes", "terms_s"),
    f"lint {JOB} --strategy tp=2,zero=1": (),
    f"tables memory {JOB} --strategy tp=2,zero=1": (),
    f"tables comm {JOB} --strategy tp=2,zero=1": ("sent_bytes", "exposed_s"),
    "collectives table --ranks 16 --cluster dgx-h100 --bytes 1MB": (),
    "pipeline show 1f1b gpipe --ranks 4 --micro-batches 8": ("bubble_fraction", "bubble_overhead"),
    "tables clusters dgx-h100": (),
    f"simulate goodput {JOB} --strategy tp=2,zero=1 --days 3 --trials 20": (),
    "predict t.sh --cluster dgx-h100": ("step_time_s", "memory_bytes"),
    "plan --from t.sh --cluster dgx-h100 --out p.json": ("step_time_s",),
}
"""And fields of the answer whose numbers are shown."""
PAGES = ("predict", "lint", "tables memory", "tables clusters")
"""Commands whose pages have no charts with figures of their own."""
_UNITS = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "%": 0.01}
_UNITS |= {"TFLOP/s": 1e12, "GB/s": 1e9}
_FIGURE = re.compile(rf"(?<![\w.\-])[-+]?(\d[\d,]*\.?\d*)(e[-+]?\d+)? ?({'|'.join(_UNITS)})(?![\w/])")
_NAMES = ("80 %", "80%", "80GB", "5% is left free")
"""Of intervals, chips and the room that is left free by default."""


def _figures(text: str) -> Iterator[tuple[str, float, float]]:
    """Yield (as written, value, half of the last digit) of every number with a unit."""
    for found in _FIGURE.finditer(text):
        digits, scale = found[1].replace(",", ""), _UNITS[found[3]] * float(f"1{found[2] or ''}")
        yield found[0], float(digits) * scale, 0.501 * scale / 10 ** len(digits.partition(".")[2])


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(tree, dict | list):
        for name, inner in tree.items() if isinstance(tree, dict) else ((key, inner) for inner in tree):
            yield from _leaves(inner, key if key.endswith("terms_s") else str(name))
    elif isinstance(tree, str):
        yield from ((key, value) for _, value, _ in _figures(tree))
        yield from ((key, float(n.replace(",", ""))) for n in re.findall(r"\d[\d,]*(?:\.\d+)?", tree))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield key, abs(float(tree))


def _tables(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of an answer."""
    for inner in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _tables(inner)
    if isinstance(tree, dict):
        yield tree


def _derived(answer: Any) -> Iterator[float]:
    """Yield shares of wholes, what is left of them, and differences of what is compared."""
    steps, sizes = [], []
    for row in _tables(answer):
        step, memory = row.get("step_time_s"), row.get("memory_bytes")
        parts, held = row.get("terms_s") or {}, row.get("memory_terms") or {}
        if step:
            steps.append(step)
            yield from (seconds / step for seconds in parts.values())
        if memory:
            sizes.append(memory)
            yield from (size / memory for size in held.values())
            left = memory - sum(held.values())
            yield from (left, left / memory)
            if row.get("usable_bytes"):
                yield from (memory / row["usable_bytes"], 0.95 * row["usable_bytes"])
        if "share" in row and isinstance(row["share"], int | float):
            yield row["share"]
    for step in steps:
        yield from (step / other - 1 for other in steps[:3])
        yield from (1 - step / other for other in steps[:3])
        yield from (step - other for other in steps[:3])
    yield from (size - other for size in sizes for other in sizes[:3])
    sides = answer.get("sides", []) if isinstance(answer, dict) else []
    for a, b in ((a, b) for a in sides for b in sides):
        yield from (b[of][name] - a[of].get(name, 0.0) for of in ("terms_s", "memory_terms") for name in b[of])
        yield b["memory_bytes"] - a["memory_bytes"]


@pytest.mark.parametrize("line", COMMANDS, ids=[f"{line.split()[0]} {i}" for i, line in enumerate(COMMANDS)])
def test_what_is_shown_is_what_was_answered(tmp_path: Path, line: str) -> None:
    (tmp_path / "t.sh").write_text(SCRIPT)
    shown = phalanx(tmp_path, *line.split())[1]
    answer = json.loads(phalanx(tmp_path, *line.split(), "--json")[1])
    leaves = list(_leaves(answer))
    known = sorted({value for _, value in leaves} | {abs(value) for value in _derived(answer)})
    texts = {"text": re.sub(r"in \d+\.\d+ s\b", "", shown)}
    if line.startswith(PAGES) and phalanx(tmp_path, *line.split(), "--save", "x.html")[0] == 0:
        whole = (tmp_path / "x.html").read_text()
        bare = re.sub(r"<(script|style)\b.*?</\1>", " ", whole, flags=re.DOTALL)
        texts["page"] = unescape(re.sub(r"<[^>]*>", " ", re.sub(r"<desc>.*?</desc>", " ", bare)))
    for of, text in texts.items():
        assert not re.search(r"\bNone\b", text), of
        for written, value, slack in _figures(text):
            near = any(abs(value - number) <= slack for number in known)
            assert near or written.strip("+-") in _NAMES, f"{of}: {written} is no figure of the answer"
    figures = [(value, slack) for _, value, slack in _figures(shown)]
    figures += [(float(n.replace(",", "")), 0.501) for n in re.findall(r"(?<![\w.])\d[\d,]*(?![\w.])", shown)]
    figures += [(float(n), 0.0051 * float(n)) for n in re.findall(r"(?<![\w.,])\d+\.\d+(?![\w.])", shown)]
    for key in COMMANDS[line]:
        value = next(value for name, value in leaves if name == key and value)
        assert any(abs(value - number) <= slack for number, slack in figures), f"{key} = {value} is not shown"
