"""The container of a checkpoint: torch.distributed.checkpoint's, whose files other tools read too.

It has a file for each rank that wrote, and .metadata, which says which box of which tensor lies where. Imported only
when a checkpoint is written or read: this part of torch takes a second to load.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from phalanx.runtime.checkpoint.boxes import Part, pieces
from phalanx.runtime.checkpoint.manifest import CheckpointError, Chunk, about, path_of

Stored = tuple[SavePlan, list[WriteResult]]
"""The chunks that one rank has written, and where they lie."""


class _Chunks(DefaultSavePlanner):
    """A save planner that fetches the elements of each chunk for the container's writer."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self.fetch = {MetadataIndex(c.name, torch.Size(c.offsets)): c.fetch for c in chunks}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.fetch[write_item.index]()


def store(part: Path, rank: int, chunks: Sequence[Chunk], file_each: bool) -> Stored:
    """Write the chunks of one rank into the folder `part`.

    With `file_each` every chunk has a file of its own, and only one at a time is fetched and held.
    """
    items = [
        WriteItem(
            MetadataIndex(c.name, torch.Size(c.offsets)),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)),
                TensorProperties(c.dtype),
                torch.Size(c.shape),
            ),
        )
        for c in chunks
    ]
    writer = FileSystemWriter(part, single_file_per_rank=not file_each, sync_files=True)
    writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
    plan = writer.prepare_local_plan(SavePlan(items))
    return SavePlan(items), writer.write_data(plan, _Chunks(chunks)).wait()


def conclude(part: Path, stored: Sequence[Stored]) -> None:
    """Write .metadata for what all ranks have stored in the folder `part`."""
    _, metadata = create_default_global_save_plan([plan for plan, _ in stored])
    FileSystemWriter(part, sync_files=True).finish(metadata, [results for _, results in stored])


class _Parts(DefaultLoadPlanner):
    """A load planner that gives the container's reader the memory that elements go to."""

    def __init__(self, places: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self.places = places

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        place = self.places[read_item.dest_index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            place = place.narrow(dim, offset, length)
        return place

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        return


class Reader:
    """An open checkpoint: `contents` is the (shape, type) of every tensor in it, by name. Raises CheckpointError."""

    def __init__(self, folder: Path, step: int) -> None:
        about(folder, step)
        self.path = path_of(folder, step)
        self._reader = FileSystemReader(self.path)
        with self._explained():
            metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        stored = metadata.state_dict_metadata
        self._stored = {name: t for name, t in stored.items() if isinstance(t, TensorStorageMetadata)}
        self.contents = {name: (tuple(t.size), t.properties.dtype) for name, t in self._stored.items()}

    def fill(self, parts: Iterable[Part], optional: str | None = None) -> None:
        """Fill parts in place, by name.

        Only what the parts cover is read, one stored chunk at a time. A part whose name begins with `optional` and is
        not in the checkpoint is left as it is. Raises CheckpointError.
        """
        items: list[ReadItem] = []
        places: dict[MetadataIndex, Tensor] = {}
        with self._explained():
            for part in parts:
                if part.name not in self.contents:
                    if optional is None or not part.name.startswith(optional):
                        raise ValueError(f"{part.name} is not in the checkpoint")
                    continue
                shape = self.contents[part.name][0]
                if shape != part.shape:
                    raise ValueError(f"{part.name} has shape {shape} in the checkpoint, not {part.shape}")
                wanted: list[ChunkStorageMetadata] = []
                for (offsets, sizes), place in pieces(part):
                    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    places[MetadataIndex(part.name, chunk.offsets)] = place
                    wanted.append(chunk)
                items += create_read_items_for_chunk_list(part.name, self._stored[part.name], wanted)
            self._reader.read_data(LoadPlan(items), _Parts(places)).wait()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a flattened tensor, (stop - start,), in its stored type.

        Raises CheckpointError.
        """
        shape, dtype = self.contents[name]
        elements = torch.empty(stop - start, dtype=dtype)
        self.fill([Part(name, shape, start, elements)])
        return elements

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn the errors of torch's reader into a CheckpointError with one line of reason."""
        try:
            yield
        except (OSError, RuntimeError, LookupError, ValueError, EOFError, pickle.UnpicklingError) as error:
            text = str(error).strip()
            first = text.splitlines()[0] if text else type(error).__name__
            raise CheckpointError(f"checkpoint {self.path} cannot be loaded: {first}") from None
