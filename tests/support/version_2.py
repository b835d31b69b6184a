"""Checkpoints as earlier releases wrote them, in torch.distributed.checkpoint's container."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter  # type: ignore[attr-defined]
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from phalanx.runtime.checkpoint import container
from phalanx.runtime.checkpoint.boxes import full_part, pieces, share
from phalanx.runtime.checkpoint.manifest import MANIFEST, path_of, seal


class _Boxes(DefaultSavePlanner):
    def __init__(self, boxes: dict[MetadataIndex, Tensor]) -> None:
        super().__init__()
        self.boxes = boxes

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.boxes[write_item.index]


def as_version_2(folder: Path, step: int, ranks: int = 2) -> Path:
    """Rewrite a checkpoint as if `ranks` ranks of an earlier release had saved it; return its folder."""
    path = path_of(folder, step)
    manifest = json.loads((path / MANIFEST).read_text())
    reader = container.Reader(folder, step)
    parts = []
    for name, (shape, _) in reader.contents.items():
        elements = 1
        for n in shape:
            elements *= n
        parts.append(full_part(name, reader.read(name, 0, elements).view(shape)))
    for file in path.iterdir():
        file.unlink()
    stored = []
    for rank in range(ranks):
        boxes, items = {}, []
        for part in share(parts, rank, ranks):
            for (offsets, sizes), view in pieces(part):
                index = MetadataIndex(part.name, torch.Size(offsets))
                boxes[index] = view.clone()
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                data = TensorWriteData(chunk, TensorProperties(view.dtype), torch.Size(part.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        writer = FileSystemWriter(path, sync_files=False)
        writer.set_up_storage_writer(False, rank=rank, use_collectives=False)
        plan = writer.prepare_local_plan(SavePlan(items))
        stored.append((SavePlan(items), writer.write_data(plan, _Boxes(boxes)).wait()))
    _, metadata = create_default_global_save_plan([plan for plan, _ in stored])
    FileSystemWriter(path, sync_files=False).finish(metadata, [results for _, results in stored])
    reseal(path, manifest | {"version": 2})
    return path


def reseal(path: Path, manifest: dict[str, object] | None = None) -> None:
    """Write a manifest that the files in a checkpoint's folder agree with, as anybody can."""
    manifest = manifest or json.loads((path / MANIFEST).read_text())
    manifest.pop("seal", None)
    manifest["files"] = {
        file.name: [file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()]
        for file in sorted(path.iterdir())
        if file.name != MANIFEST
    }
    (path / MANIFEST).write_text(json.dumps({**manifest, "seal": seal(manifest)}))
