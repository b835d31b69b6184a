"""What a run leaves, with mistakes in it: its checkpoint, sealed anew as anybody can seal it, and its weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from phalanx.runtime.checkpoint.manifest import seal
from support.forked_cli import phalanx
from support.fuzz import files
from support.quick_runs import JOB

STEPS = 5
_CHECKPOINT = f"runs/job/checkpoint/step-{STEPS:08}"
_MANIFEST, _TENSORS, _RANK = "phalanx.json", "tensors.json", "rank-00000.safetensors"
_GO_ON = f"train.steps={STEPS + 1}"


@dataclass(frozen=True)
class Run:
    """The files of a run of `STEPS` steps, by their names in its checkpoint and in the folder of its weights."""

    plan: Any
    checkpoint: dict[str, bytes]
    weights: dict[str, bytes]


def train(folder: Path) -> None:
    """Train local.toml as runs/job, and export its weights to hf: by other processes, for one that has computed with
    several threads must not be forked, as cases are."""
    (folder / "local.toml").write_text(JOB)
    for words in (
        ("train", "local.toml", "--set", "train.name=job", "--set", f"train.steps={STEPS}"),
        ("runs", "export", "runs/job", "--out", "hf"),
    ):
        code, _, err = phalanx(folder, *words)
        assert code == 0, err


def of(folder: Path) -> Run | None:
    """Return what `train` left in a folder, None if it was not called."""
    if not (folder / "runs" / "job").exists():
        return None
    checkpoint = {path.name: path.read_bytes() for path in (folder / _CHECKPOINT).iterdir()}
    weights = {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}
    return Run(json.loads((folder / "runs" / "job" / "plan.json").read_text()), checkpoint, weights)


_GENERATE = "generate {} --prompt the --tokens 2"
CHECKPOINT_READERS = (
    _GENERATE.format("runs/job"),
    "runs export runs/job --out x",
    f"train --resume --set {_GO_ON} --json",
    f"train local.toml --resume --set train.name=job --set {_GO_ON} --strategy tp=2,sp=1",
)
"""Commands that read runs/job."""
WEIGHTS_READERS = (
    _GENERATE.format("hf"),
    "runs import hf --name imported --json",
    "tables models hf/config.json --json",
    "train local.toml --set train.weights=hf --set train.steps=4 --json",
)
"""Commands that read hf."""


@st.composite
def checkpoints(draw: st.DrawFn, run: Run) -> dict[str, bytes]:
    """Draw a checkpoint with mistakes in one of its files, most of them sealed anew."""
    sealed = draw(st.sampled_from((True, True, True, False)))
    manifest = json.loads(run.checkpoint[_MANIFEST])
    of_one = draw(st.sampled_from((_MANIFEST, _TENSORS, _TENSORS, _RANK)))
    changed: dict[str, bytes] = {}
    if of_one == _MANIFEST:
        manifest = draw(files.mistaken(manifest))
    else:
        content = run.checkpoint[of_one]
        content = draw(_tensors(content) if of_one == _TENSORS else _safetensors(content))
        changed[of_one] = content
        if sealed:
            manifest["files"][of_one] = [len(content), hashlib.sha256(content).hexdigest()]
    if sealed:
        manifest["seal"] = _seal(manifest)
    return {
        f"{_CHECKPOINT}/{name}": content for name, content in {**changed, _MANIFEST: files.as_json(manifest)}.items()
    }


@st.composite
def weights(draw: st.DrawFn, run: Run) -> dict[str, bytes]:
    """Draw the weights of a model with mistakes in one of their files."""
    name = draw(st.sampled_from(sorted(run.weights)))
    content = run.weights[name]
    if name.endswith(".safetensors"):
        return {f"hf/{name}": draw(_safetensors(content))}
    return {f"hf/{name}": files.as_json(draw(files.mistaken(json.loads(content))))}


@st.composite
def _tensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw an index of tensors with mistakes, half of them in one tensor only: the index has hundreds of values."""
    table = json.loads(content)
    if draw(st.booleans()):
        return files.as_json(draw(files.mistaken(table)))
    name = draw(st.sampled_from(sorted(table)))
    return files.as_json({**table, name: draw(files.mistaken(table[name]))})


@st.composite
def _safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a file of safetensors that is damaged, or whose header has mistakes."""
    if draw(st.booleans()):
        return draw(files.damaged(content))
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = draw(st.sampled_from(sorted(header)))
    header[name] = draw(files.mistaken(header[name]))
    text = files.as_json(header)
    length = draw(st.sampled_from((len(text), len(text), len(text), 2**62, 0, len(text) + 1)))
    return length.to_bytes(8, "little") + text + content[8 + size :]


def _seal(manifest: Any) -> str:
    """Seal what a reader of the file will see of it; what JSON cannot hold is sealed by nobody."""
    try:
        return seal(json.loads(files.as_json(manifest)))
    except (ValueError, RecursionError, AttributeError):
        return ""
