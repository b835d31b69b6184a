"""Hugging Face folders as sources and targets of our parameters, streamed.

`read` reads and checks headers only; a slice then reads its own bytes. `write` makes one tensor at a time.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.nn.hugging_face import container
from phalanx.nn.hugging_face.container import FIELD, FileTensor
from phalanx.nn.hugging_face.names import Source, is_buffer, plain_name, sources
from phalanx.nn.weight_source import Weights
from phalanx.runtime.checkpoint import tensor_file
from phalanx.runtime.checkpoint.tensor_file import Outgoing
from phalanx.spec.byte_sizes import write_bytes
from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec, buffers

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class HuggingFaceWeights:
    """Weights in Hugging Face files; implements Weights. `places`: the parts of each of our parameters and buffers,
    by name."""

    places: Mapping[str, tuple[tuple[Source, FileTensor], ...]]

    def has(self, fqn: str) -> bool:
        return fqn in self.places

    def dtype(self, fqn: str) -> torch.dtype:
        return self.places[fqn][0][1].dtype

    def slice(self, fqn: str, start: int, stop: int) -> Tensor:
        """Read elements start..stop of the flattened parameter, and nothing else; for a transposed tensor, the full
        columns that hold them."""
        if start == stop:
            return torch.empty(0, dtype=self.dtype(fqn))
        parts = self.places[fqn]
        each = math.prod(parts[0][0].ours)
        numbers = range(start // each, -(-stop // each))
        return _cat([_slice(*parts[k], max(start - k * each, 0), min(stop - k * each, each)) for k in numbers])


def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate flat tensors, without a copy of a single one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _slice(source: Source, stored: FileTensor, start: int, stop: int) -> Tensor:
    """Read elements start..stop of one part of a parameter."""
    if source.transposed:
        into = source.shape[0]  # a row of ours
        low, high = start // into, -(-stop // into)
        columns = stored.read_columns(source.first + low, source.first + high)  # (into, high - low)
        return source.ours_of(columns.T.reshape(-1)[start - low * into : stop - low * into])
    width = math.prod(source.rows[1:])
    run, stride, first = source.run * width, source.stride * width, source.first * width
    parts = []
    for k in range(start // run, -(-stop // run)):
        low, high = max(start, k * run), min(stop, (k + 1) * run)
        at = first + k * stride - k * run
        parts.append(stored.read(at + low, at + high))
    return source.ours_of(_cat(parts))


def read(path: Path, spec: ModelSpec) -> HuggingFaceWeights:
    """Open the weights of a folder, or of one safetensors or index file, as parameters of `spec`. Raises InputError,
    naming file and tensor, if a file is missing or damaged, a tensor is missing or has another shape or type, or the
    files hold a weight that this model does not have."""
    wanted = sources(spec)
    by_name = {plain_name(spec.family, stored.name): stored for stored in _stored(path)}
    places = {fqn: tuple((s, _fitting(by_name, path, s, fqn, spec)) for s in parts) for fqn, parts in wanted.items()}
    for fqn, parts in places.items():
        other = next((stored for _, stored in parts if stored.code != parts[0][1].code), None)
        if other is not None:
            reason = f"{other.name} is stored as {other.code}, {parts[0][1].name} as {parts[0][1].code}"
            raise InputError(FIELD, str(other.file), reason, f"{fqn} is all of one type: convert them")
    used = {plain_name(spec.family, s.tensor) for parts in wanted.values() for s in parts}
    left = sorted(name for name in by_name.keys() - used if not is_buffer(spec, name))
    if left:
        stored = by_name[left[0]]
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        reason = f"holds {stored.name} {list(stored.shape)}{more}, which this {spec.family} model does not have"
        raise InputError(FIELD, str(stored.file), reason, "do the weights belong to this config.json?")
    return HuggingFaceWeights(places)


def _stored(path: Path) -> Iterator[FileTensor]:
    """Yield all tensors of the files that `path` names."""
    # Resolve a folder to its file or index; refuse pickles.
    if path.is_dir():
        names = {SINGLE: path / SINGLE, INDEX: path / INDEX}
        path = next((p for p in names.values() if p.exists()), path)
    if path.is_dir():
        old = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        if old:
            reason = f"holds {old[0]}, a pickle, and no {SINGLE}"
            raise InputError(FIELD, str(path), reason, "convert it: load it with transformers and save_pretrained()")
        raise InputError(
            FIELD, str(path), f"holds no {SINGLE} and no {INDEX}", "name a folder of Hugging Face weights"
        )
    if not path.exists():
        raise InputError(FIELD, str(path), "no such file or folder")
    if path.suffix in (".bin", ".pt", ".pth"):
        raise InputError(
            FIELD, str(path), "is a pickle", "convert it: load it with transformers and save_pretrained()"
        )
    if path.suffix != ".json":
        yield from container.contents(path).values()
        return
    # The files of an index, each checked against it.
    placed = _index(path)
    for name in sorted(set(placed.values())):
        file = path.parent / name
        if not file.is_file():
            raise InputError(FIELD, str(file), f"is missing, {path.name} names it", "download it again")
        tensors = container.contents(file)
        for tensor, there in placed.items():
            if there == name and tensor not in tensors:
                raise InputError(FIELD, str(file), f"lacks {tensor}, which {path.name} says is there")
        yield from (stored for tensor, stored in tensors.items() if placed.get(tensor) == name)


def _index(path: Path) -> dict[str, str]:
    """Read an index: tensor name -> file name."""
    try:
        if not path.is_file() or path.stat().st_size > container.LONGEST_HEADER:
            raise ValueError("not a regular file, or larger than 100 MB")
        placed = json.loads(path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(FIELD, str(path), f"is not an index of safetensors files ({error!r})") from None
    if not isinstance(placed, dict) or not all(isinstance(f, str) and f == Path(f).name for f in placed.values()):
        raise InputError(FIELD, str(path), "weight_map does not map tensors to files in its folder")
    return placed


def _fitting(by_name: Mapping[str, FileTensor], path: Path, source: Source, fqn: str, spec: ModelSpec) -> FileTensor:
    """Return the stored tensor named by a source. Raises InputError if it is missing, or has another shape or
    type."""
    stored = by_name.get(plain_name(spec.family, source.tensor))
    if stored is None:
        remedy = "set model.tied = true if the head is the embedding" if fqn == "head.linear.weight" else ""
        raise InputError(FIELD, str(path), f"lacks {source.tensor} {list(source.shape)}", remedy)
    if stored.shape != source.shape:
        reason = f"{stored.name} has shape {list(stored.shape)}, the model needs {list(source.shape)}"
        remedy = "do the weights belong to this config.json?"
        if fqn in ("embed.token.weight", "head.linear.weight") and stored.shape[1:] == source.shape[1:]:
            reason = f"{stored.name} has {stored.shape[0]} rows, model.vocab is {spec.vocab}"
            remedy = f"a padded vocabulary: set model.vocab = {stored.shape[0]}, or cut the rows"
        raise InputError(FIELD, str(stored.file), reason, remedy)
    _ = stored.dtype
    return stored


def require_place(folder: Path) -> None:
    """Require that `folder` can be written: it does not exist, or is empty. Raises InputError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError("out", str(folder), "exists and is not empty", "choose another folder")
    above = next(p for p in folder.absolute().parents if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise InputError("out", str(folder), f"nothing can be written to {above}", "choose another folder")


def write(
    folder: Path,
    spec: ModelSpec,
    weights: Weights,
    dtype: torch.dtype | None,
    shard_bytes: float,
    small_files: Mapping[str, bytes],
) -> list[Path]:
    """Write a folder that `transformers` can load, atomically; returns its safetensors files.

    `dtype`: None keeps each tensor's. A file takes at most `shard_bytes`, or one tensor. `small_files`: to add,
    config.json among them. Raises InputError where the disk is too small, or a value overflows `dtype`.
    """
    tensors = list(_outgoing(spec, weights, dtype))
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed, free = sum(t.bytes for t in tensors), shutil.disk_usage(folder.parent).free
    if needed > free:
        reason = f"needs {write_bytes(needed)}, the disk has {write_bytes(free)} free"
        raise InputError("out", str(folder), reason)
    part = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    part.mkdir()
    try:
        names = _write_shards(part, tensors, shard_bytes)
        for name, content in small_files.items():
            (part / name).write_bytes(content)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part)
        raise
    return [folder / name for name in names]


def _outgoing(spec: ModelSpec, weights: Weights, dtype: torch.dtype | None) -> Iterator[Outgoing]:
    """Yield the Hugging Face tensors to write, in forward order, each made of our parameters."""
    fixed = {b.fqn for b in buffers(spec)}  # sums of small steps: they keep their type
    ours: dict[str, list[tuple[str, int, Source]]] = {}  # by their name: (our name, part of it, source)
    for fqn, parts in sources(spec).items():
        for i, s in enumerate(parts):
            ours.setdefault(s.tensor, []).append((fqn, i, s))

    def make(tensor: str, pieces: Iterable[tuple[str, int, Source]], kind: torch.dtype) -> Tensor:
        result: Tensor | None = None
        for fqn, i, s in pieces:
            each = math.prod(s.ours)
            value = weights.slice(fqn, i * each, (i + 1) * each)
            value = _cast(s.theirs_of(value), kind, tensor).view(s.ours)
            if s.run == s.stride:  # a tensor of its own
                return value.T if s.transposed else value.view(s.shape)
            if result is None:
                result = torch.empty(s.shape, dtype=kind)
            rows = result.T if s.transposed else result.view(s.rows)
            place = rows.unflatten(0, (-1, s.stride))[:, s.first : s.first + s.run]
            place.copy_(value.unflatten(0, (-1, s.run)))
        assert result is not None
        return result

    for tensor, held in ours.items():
        fqn, _, s = held[0]
        kind = weights.dtype(fqn) if dtype is None or fqn in fixed else dtype
        yield Outgoing(tensor, kind, s.shape, lambda t=tensor, h=held, k=kind: make(t, h, k))  # type: ignore[misc]


def _cast(value: Tensor, dtype: torch.dtype, tensor: str) -> Tensor:
    cast = value.to(dtype)
    if torch.finfo(value.dtype).max > torch.finfo(dtype).max and (lost := cast.isinf() & ~value.isinf()).any():
        largest = float(value[lost].abs().max())
        raise InputError("dtype", str(dtype).removeprefix("torch."), f"{tensor} has {largest:g}, which overflows")
    return cast


def _write_shards(folder: Path, tensors: Sequence[Outgoing], shard_bytes: float) -> list[str]:
    shards: list[list[Outgoing]] = [[]]
    for t in tensors:
        if shards[-1] and sum(u.bytes for u in shards[-1]) + t.bytes > shard_bytes:
            shards.append([])
        shards[-1].append(t)
    if len(shards) == 1:
        tensor_file.write(folder / SINGLE, tensors)
        return [SINGLE]
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        tensor_file.write(folder / name, shard)
    total = sum(t.bytes for t in tensors)
    placed = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": placed}, indent=2) + "\n"
    )
    return names
