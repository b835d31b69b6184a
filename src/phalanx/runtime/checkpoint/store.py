"""Checkpoints of logical tensors: single-process names, global shapes; the layout never appears.

    checkpoint/step-00000100/      torch.distributed.checkpoint's container: a file of each rank that wrote, .metadata
        parameters.<fqn>           in the master type
        optimizer.<fqn>.<state>    exp_avg, exp_avg_sq, momentum_buffer, step
        phalanx.json               {version, step, seed, data cursor, random state, files: {name: [bytes, sha256]}}

Every rank writes what it owns (`write`), beside the final name; when all have done so one makes it whole and moves it
there (`commit`), so a crash leaves the previous one. No rank waits for another in a collective: runtime/saving.py
does all of it beside the training. The container itself is runtime/container.py. All randomness of a run is a
function of (seed, step): that is the random state.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from phalanx.runtime.checkpoint.boxes import Part
from phalanx.runtime.checkpoint.manifest import MANIFEST, VERSION, CheckpointError, Chunk, about, path_of, read, seal


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder that look whole: every file there, as long as it was. Ascending."""
    found = []
    for step in written(folder):
        try:
            whole = _missing(path_of(folder, step)) is None
        except OSError:
            whole = False
        if whole:
            found.append(step)
    return found


def written(folder: Path) -> list[int]:
    """The steps of everything that has a checkpoint's name, damaged or not. Ascending."""
    found = (p.name.removeprefix("step-") for p in folder.glob("step-*"))
    return sorted(int(name) for name in found if name.isdigit())


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that looks whole."""
    found = steps(folder)
    return path_of(folder, found[-1]) if found else None


def _missing(path: Path) -> str | None:
    """What one sees to be wrong without reading the files; nothing, of a version that is not ours. Raises OSError."""
    try:
        found = read(path)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except ValueError as error:
        return str(error)
    for name, (size, _) in found["files"].items() if found["version"] == VERSION else ():
        try:
            there = (path / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if there != size:
            return f"{name} has {there} bytes, {size} were written"
    return None


def damage(folder: Path, step: int, reader: int = 0, readers: int = 1) -> str | None:
    """What is wrong with a checkpoint; None where nothing is. Of several readers each reads its share of the files.

    Raises CheckpointError for an unknown version, OSError where the disk does not give a file.
    """
    path = path_of(folder, step)
    found = _missing(path)
    if found is not None:
        return found
    for name, (_, digest) in sorted(about(folder, step)["files"].items())[reader::readers]:
        if _digest(path / name) != digest:
            return f"{name} is not as it was written"
    return None


def damage_or_unread(folder: Path, step: int, reader: int = 0, readers: int = 1) -> str | None:
    """The same, where a file that cannot be read is as bad as a damaged one. Raises CheckpointError."""
    try:
        return damage(folder, step, reader, readers)
    except OSError as error:
        return f"cannot be read: {error}"


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def newest_good(folder: Path) -> int:
    """The newest step whose checkpoint is not damaged; newer ones are said. Read by one process. Raises
    CheckpointError where none is good."""
    for step in reversed(written(folder)):
        wrong = damage_or_unread(folder, step)
        if wrong is None:
            return step
        say_damaged(step, wrong)
    raise CheckpointError(f"{folder} holds no good checkpoint")


def say_damaged(step: int, wrong: str) -> None:
    print(f"checkpoint of step {step} is damaged ({wrong})", file=sys.stderr, flush=True)


def set_aside(folder: Path, step: int) -> None:
    """Rename a checkpoint that is damaged beyond doubt, so that nobody meets it again."""
    try:
        if damage(folder, step) is None:
            return
    except OSError:  # the disk may yet give it
        return
    path = path_of(folder, step)
    os.replace(path, _free(path.with_name(f"damaged-{path.name}")))


def _free(path: Path) -> Path:
    """A name like this that nothing has."""
    return next(p for i in count() if not (p := path.with_name(path.name + (f".{i}" if i else ""))).exists())


def write(part: Path, rank: int, chunks: Sequence[Chunk], file_each: bool = False) -> None:
    """Write what one rank owns into the folder of a checkpoint in the making. With `file_each`, chunks are fetched,
    and held, one at a time."""
    from phalanx.runtime.checkpoint import container

    plan, results = container.store(part, rank, chunks, file_each)
    names = sorted({r.storage_data.relative_path for r in results})
    files = {name: ((part / name).stat().st_size, _digest(part / name)) for name in names}
    done = part / f".done-{rank}"
    done.with_suffix(".tmp").write_bytes(pickle.dumps((plan, results, files)))
    os.replace(done.with_suffix(".tmp"), done)


def missing_ranks(part: Path, ranks: int) -> list[int]:
    """Those that have not written their part yet. Raises CheckpointError where one says that it cannot."""
    for failed in part.glob(".failed-*"):
        raise CheckpointError(f"rank {failed.name.removeprefix('.failed-')}: {failed.read_text()}")
    return [rank for rank in range(ranks) if not (part / f".done-{rank}").exists()]


def commit(part: Path, folder: Path, step: int, ranks: int, about: dict[str, Any], keep: int) -> Path:
    """Make whole what all ranks have written, under its final name; keep the last `keep`."""
    from phalanx.runtime.checkpoint import container

    done = [part / f".done-{rank}" for rank in range(ranks)]
    told = [pickle.loads(d.read_bytes()) for d in done]
    container.conclude(part, [(plan, results) for plan, results, _ in told])
    for d in done:
        d.unlink()
    files = {name: found for _, _, own in told for name, found in own.items()}
    files[".metadata"] = ((part / ".metadata").stat().st_size, _digest(part / ".metadata"))
    said = {"version": VERSION, "step": step, **about, "files": files}
    (part / MANIFEST).write_text(json.dumps({**said, "seal": seal(json.loads(json.dumps(said)))}))
    _sync(part / MANIFEST)
    _sync(part)
    final = path_of(folder, step)
    if final.exists():
        _remove(final)
    os.replace(part, final)
    _sync(folder)
    # Later ones are of a future that this run has given up: they are not what it can go back to.
    for old in [s for s in steps(folder) if s <= step][:-keep]:
        _remove(path_of(folder, old))
    return final


def _remove(path: Path) -> None:
    """A checkpoint goes at once, its files in their time; what cannot be removed now is swept up later."""
    old = _free(path.with_name(f".old-{path.name}"))
    try:
        os.replace(path, old)
    except OSError as error:
        print(f"note: {path} cannot be removed ({error})", file=sys.stderr, flush=True)
    shutil.rmtree(old, ignore_errors=True)


def give_up(part: Path, rank: int, why: str) -> None:
    """Say that one rank cannot write its part, and take back what it has written: the disk may be full."""
    with suppress(OSError):
        for file in part.glob(f"__{rank}_*"):
            file.unlink(missing_ok=True)
        (part / f".failed-{rank}").write_text(why)


def sweep(folder: Path) -> None:
    """Clear away what a run that was killed has half written, or half removed."""
    for part in (*folder.glob(".writing-*"), *folder.glob(".old-*")):
        shutil.rmtree(part, ignore_errors=True)


def load(folder: Path, step: int, parts: Iterable[Part], optional: str | None = None) -> None:
    """Fill parts in place; every rank reads what it needs (see container.Reader.fill). Raises CheckpointError."""
    from phalanx.runtime.checkpoint.container import Reader

    Reader(folder, step).fill(parts, optional)


def write_alone(folder: Path, step: int, chunks: Sequence[Chunk], about: dict[str, Any]) -> Path:
    """Write a checkpoint from one process that fetches, and holds, a tensor at a time."""
    part = folder / f".writing-{step:08d}-alone"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part, 0, chunks, file_each=True)
    return commit(part, folder, step, 1, about, keep=1)


def _sync(path: Path) -> None:
    """Ask the disk to have it, before the rename says that it is there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
