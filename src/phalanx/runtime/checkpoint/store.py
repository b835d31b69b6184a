"""Checkpoints of logical tensors: single-process names and global shapes, independent of the parallel layout.

    checkpoint/step-00000100/
        rank-00000.safetensors     the boxes that rank 0 owned, of
            parameters.<fqn>           in the master type
            optimizer.<fqn>.<state>    exp_avg, exp_avg_sq, momentum_buffer, step
        tensors.json               the location of every box of every tensor
        phalanx.json               {version, step, skipped, loss_scale, files: {name: [bytes, sha256]}}

Every rank writes what it owns into a temporary folder (`write`); once all have, one of them completes the checkpoint
and renames it (`commit`), so a crash leaves the previous one intact. No rank waits for another in a collective:
async_saver.py does all of this concurrently with training. The container itself is container.py. All randomness of a
run and its place in the data are functions of (seed, step): the seed is the plan's, the step must be the folder's.

Nothing that came from a file is unpickled, and a checkpoint is read as if an enemy had written it: the checksums show
damage, not authorship (regular_files.py, container.py).
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from phalanx.runtime.checkpoint import container
from phalanx.runtime.checkpoint.boxes import TensorPart
from phalanx.runtime.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    CheckpointError,
    Chunk,
    open_manifest,
    path_of,
    read,
)
from phalanx.runtime.checkpoint.regular_files import open_regular, read_json, size_of
from phalanx.spec.documents import seal

_LARGEST_PART = 2**30  # bytes of a rank's list of boxes


def intact_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that look intact, ascending: every file exists in its full size."""
    intact = []
    for step in all_steps(folder):
        try:
            missing = _missing(path_of(folder, step))
        except OSError:
            continue
        if missing is None:
            intact.append(step)
    return intact


def all_steps(folder: Path) -> list[int]:
    """Return the steps of all of a folder's checkpoints, ascending, damaged ones included."""
    names = (p.name.removeprefix("step-") for p in folder.glob("step-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def why_none_intact(folder: Path) -> str:
    """Explain why a folder has no intact checkpoint: it has none, or the newest one has a defect."""
    there = all_steps(folder)
    if not there:
        return "holds no checkpoint yet"
    return f"holds no intact checkpoint: that of step {there[-1]} is damaged ({defect(folder, there[-1])})"


def newest_intact(folder: Path) -> Path | None:
    """Return the folder of the newest checkpoint that looks intact, or None."""
    intact = intact_steps(folder)
    return path_of(folder, intact[-1]) if intact else None


def _missing(path: Path) -> str | None:
    """Return a checkpoint's defect as far as file sizes show, or None. For another version, only the manifest is
    checked. Raises OSError."""
    try:
        manifest = read(path)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except ValueError as error:
        return str(error)
    for name, (size, _) in manifest["files"].items() if manifest["version"] == VERSION else ():
        try:
            present = size_of(path / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except ValueError as error:
            return str(error)
        if present != size:
            return f"{name} has {present} bytes, but {size} were written"
    return None


def damage(folder: Path, step: int, reader: int = 0, readers: int = 1) -> str | None:
    """Return the damage of a checkpoint, or None if it is intact. Each of several `readers` verifies its share of the
    files. Raises CheckpointError for an unknown version, OSError if the disk cannot read a file."""
    path = path_of(folder, step)
    missing = _missing(path)
    if missing is not None:
        return missing
    for name, (_, digest) in sorted(open_manifest(folder, step)["files"].items())[reader::readers]:
        if _digest(path / name) != digest:
            return f"{name} differs from what was written"
    return None


def defect(folder: Path, step: int, reader: int = 0, readers: int = 1) -> str | None:
    """Return the damage of a checkpoint, or why it cannot be read; None if it is intact. Raises CheckpointError."""
    try:
        return damage(folder, step, reader, readers)
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"


def _sealed(file: Path) -> list[int | str]:
    """Return a file's entry for the manifest: its size in bytes and its checksum."""
    return [size_of(file), _digest(file)]


def _digest(file: Path) -> str:
    with open(open_regular(file), "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def newest_verified_step(folder: Path) -> int:
    """Return the newest step whose checkpoint is intact, and report the damaged newer ones. For a single process.
    Raises CheckpointError if none is intact."""
    for step in reversed(all_steps(folder)):
        damaged = defect(folder, step)
        if damaged is None:
            return step
        report_damaged(step, damaged)
    raise CheckpointError(f"{folder} holds no intact checkpoint")


def report_damaged(step: int, damaged: str) -> None:
    """Report a damaged checkpoint on stderr."""
    print(f"checkpoint of step {step} is damaged ({damaged})", file=sys.stderr, flush=True)


def set_aside(folder: Path, step: int) -> None:
    """Rename a checkpoint that is damaged beyond doubt to damaged-..., so that it is not considered again."""
    try:
        if damage(folder, step) is None:
            return
    except OSError:  # the disk may recover
        return
    path = path_of(folder, step)
    os.replace(path, _free(path.with_name(f"damaged-{path.name}")))


def _free(path: Path) -> Path:
    """Return this path, or if it exists the first with an added number that does not."""
    return next(p for i in count() if not (p := path.with_name(path.name + (f".{i}" if i else ""))).exists())


def write(partial: Path, rank: int, chunks: Sequence[Chunk]) -> None:
    """Write the chunks that one rank owns into the temporary folder `partial`, and mark the rank as done. Chunks are
    fetched and held one at a time."""
    tensors = container.write_chunks(partial, rank, chunks)
    name = container.rank_file(rank)
    done = partial / f".done-{rank}"
    done.with_suffix(".tmp").write_text(json.dumps({"tensors": tensors, "files": {name: _sealed(partial / name)}}))
    os.replace(done.with_suffix(".tmp"), done)


def missing_ranks(part: Path, ranks: int) -> list[int]:
    """Return the ranks that have not written their part yet. Raises CheckpointError if one has failed."""
    for failed in part.glob(".failed-*"):
        raise CheckpointError(f"rank {failed.name.removeprefix('.failed-')}: {failed.read_text()}")
    return [rank for rank in range(ranks) if not (part / f".done-{rank}").exists()]


def commit(partial: Path, folder: Path, step: int, ranks: int, about: dict[str, Any], keep: int) -> Path:
    """Complete a checkpoint that all ranks have written, rename it, and remove all but the last `keep`.

    `about` goes into the manifest. Returns the final folder.
    """
    done = [partial / f".done-{rank}" for rank in range(ranks)]
    written_parts = [read_json(d, _LARGEST_PART) for d in done]
    index = container.write_index(partial, [of_rank["tensors"] for of_rank in written_parts])
    for d in done:
        d.unlink()
    files = {name: row for of_rank in written_parts for name, row in of_rank["files"].items()}
    files[index] = _sealed(partial / index)
    manifest = {"version": VERSION, "step": step, **about, "files": files}
    (partial / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(json.loads(json.dumps(manifest)))}))
    _sync(partial / MANIFEST)
    _sync(partial)
    final = path_of(folder, step)
    if final.exists():
        _remove(final)
    os.replace(partial, final)
    _sync(folder)
    # Later ones belong to steps that this run has rolled back: they do not count.
    for old in [s for s in intact_steps(folder) if s <= step][:-keep]:
        _remove(path_of(folder, old))
    return final


def _remove(path: Path) -> None:
    """Remove a checkpoint: first its name, then its files. If files remain, `sweep` removes them later."""
    old = _free(path.with_name(f".old-{path.name}"))
    try:
        os.replace(path, old)
    except OSError as error:
        print(f"note: {path} cannot be removed ({error})", file=sys.stderr, flush=True)
    shutil.rmtree(old, ignore_errors=True)


def give_up(part: Path, rank: int, why: str) -> None:
    """Mark a rank as failed, and remove what it has written: the disk may be full."""
    with suppress(OSError):
        (part / container.rank_file(rank)).unlink(missing_ok=True)
        (part / f".why-{rank}").write_text(why)
        os.replace(part / f".why-{rank}", part / f".failed-{rank}")  # other ranks poll for it


def load(folder: Path, step: int, parts: Iterable[TensorPart], optional: str | None = None) -> None:
    """Fill parts in place; every rank reads only what it needs (container.Reader.fill). Raises CheckpointError."""
    container.Reader(folder, step).fill(parts, optional)


def write_alone(folder: Path, step: int, chunks: Sequence[Chunk], about: dict[str, Any]) -> Path:
    """Write a checkpoint from a single process, which fetches and holds one tensor at a time; return its folder."""
    part = folder / f".writing-{step:08d}-alone"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    write(part, 0, chunks)
    return commit(part, folder, step, 1, about, keep=1)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename never precedes the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
