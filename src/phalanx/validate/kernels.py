"""Kernels measured in isolation compared with the kernel model: by kind, chip and library, as columns.

A kind is predicted with constants of the chip's generation and of the library that ran it. Left out by GPU: with
constants fitted without any row of that GPU; if no other GPU of its generation was measured, with common ones.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.cost.hardware.columns import take
from phalanx.cost.kernels.all_reduce import AllReduceLibrary, LinkConstants, node_all_reduce_s
from phalanx.cost.kernels.attention import (
    AttentionLibrary,
    DecodeConstants,
    Heads,
    PromptConstants,
    decode_attention_s,
    prompt_attention_s,
)
from phalanx.cost.kernels.chip import (
    COMMON,
    KernelChip,
    KernelConstants,
    Rows,
    generation_of,
    kernel_chip,
    kernel_constants,
)
from phalanx.cost.kernels.product import (
    ExpertConstants,
    ExpertLayer,
    ExpertLibrary,
    ExpertRate,
    ProductConstants,
    ProductLibrary,
    experts_s,
    product_s,
)
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.validate.records import FOLDER
from phalanx.validate.scores import errors

KERNELS = FOLDER / "kernels.csv.xz"
LEFT_OUT = FOLDER / "kernels_left_out.json"
"""Constants fitted without each GPU."""
Floats = npt.NDArray[np.float64]
_CHIP_OF = {"A100-SXM": "A100", "H100-SXM": "H100"}
_BYTES = {
    **{"fp8": 1.0, "fp8_block": 1.0, "int4_wo": NUMBER_FORMATS["int4"].bytes_per_value},
    **{name: float(NUMBER_FORMATS[name].bytes_per_value) for name in ("bfloat16", "nvfp4")},
    **dict.fromkeys(("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"), NUMBER_FORMATS["mxfp4"].bytes_per_value),
}
_SKEW = {"balanced": 0.0, "power_law_1.01": 1.01, "power_law_1.2": 1.2}
_PRODUCTS = ("bfloat16", "fp8", "fp8_block", "nvfp4")


@dataclass(frozen=True)
class Measured:
    """Rows of one kind as columns."""

    kind: str
    cells: Mapping[str, npt.NDArray[Any]]
    """Columns of the file; numeric ones as arrays of numbers."""

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def seconds(self) -> Floats:
        """Measured."""
        return np.asarray(self.cells["time_us"], float) * 1e-6

    @property
    def gpus(self) -> npt.NDArray[Any]:
        """Chips by name, of each row."""
        return self.cells["gpu"]

    def only(self, keep: npt.NDArray[Any]) -> Measured:
        """Return some of the rows: a mask, or their places."""
        return Measured(self.kind, {name: column[keep] for name, column in self.cells.items()})

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.cells[name]


@dataclass(frozen=True)
class Kind:
    """Prediction of one kind of kernels."""

    constants: type[Any]
    libraries: tuple[tuple[str, type[Any], Callable[[Measured], list[str]]], ...]
    """Tables of libraries' constants: name in the fitted file, class, and the library of each row."""
    seconds: Callable[..., Any]
    """(rows, chip, constants, *libraries) -> seconds."""


def _attention_library(rows: Measured) -> list[str]:
    def name(kernel: str) -> str:
        if "triton" in kernel:
            return "triton"
        if kernel in ("torch_flow", "default"):
            return "trtllm"
        if "trtllm" in kernel:
            return "trtllm-gen"
        if "flashinfer" in kernel:
            return "flashinfer"
        return "flash-attention 3" if "fa3" in kernel else "flash-attention 2"

    return [name(k) for k in rows["kernel"]]


def _expert_library(rows: Measured) -> list[str]:
    names = {
        **{"deepgemm": "deepgemm", "min_latency": "trtllm low latency", "marlin": "marlin", "triton": "triton"},
        **{"trtllm_": "trtllm-gen", "cutlass": "cutlass", "fused_moe": "triton", "nongated": "cutlass"},
    }
    return [next((name for part, name in names.items() if part in k), "trtllm") for k in rows["kernel"]]


def _product_library(rows: Measured) -> list[str]:
    def name(engine: str, dtype: str) -> str:
        return "plain" if dtype == "bfloat16" else f"{engine} {dtype}"

    return [name(e, d) for e, d in zip(rows["framework"], rows["dtype"], strict=True)]


def _expert_type(rows: Measured) -> list[str]:
    return [f"{lib} {d}" for lib, d in zip(_expert_library(rows), rows["dtype"], strict=True)]


def _reduce_library(rows: Measured) -> list[str]:
    def name(library: str, implementation: str) -> str:
        if library == "nccl":
            return "nccl"
        if implementation.startswith("TRTLLM"):
            return "trtllm"
        return f"{library} {'graph' if 'graph' in implementation else 'eager'}"

    return [name(a, b) for a, b in zip(rows["framework"], rows["kernel"], strict=True)]


def _sizes(rows: Measured, column: str) -> Floats:
    return np.array([_BYTES.get(d, 2.0) for d in rows[column]])


def _peak(rows: Measured, chip: KernelChip) -> Any:
    dtype = rows["dtype"]
    eight = np.isin(dtype, ("fp8", "fp8_block", "w4a8_mxfp4_mxfp8"))
    return np.where(dtype == "nvfp4", chip.fp4, np.where(eight, chip.fp8, chip.half))


def _products(rows: Measured, chip: KernelChip, c: Any, lib: Any) -> Any:
    return product_s(rows["m"], rows["n"], rows["k"], chip, c, _sizes(rows, "dtype"), _peak(rows, chip), lib)


def _heads(rows: Measured) -> Heads:
    if rows.kind == "mla prompt":  # attention over expanded keys of 192 and values of 128
        return Heads(rows["heads"], rows["heads"], 192.0, 128.0, rows["heads"] * 320.0)
    if rows.kind == "mla decode":
        return Heads(rows["heads"], 1.0, 576.0, 512.0, 576.0)
    d, kv = rows["head_dim"], rows["kv_heads"]
    return Heads(rows["heads"], kv, d, d, 2 * kv * d, rows["window"])


def _prompts(rows: Measured, chip: KernelChip, c: Any, lib: Any) -> Any:
    sizes = (_sizes(rows, "dtype"), _sizes(rows, "kv_dtype"))
    return prompt_attention_s(rows["batch"], rows["seq"], rows["past"], _heads(rows), chip, c, lib, sizes)


def _decoding(rows: Measured, chip: KernelChip, c: Any, lib: Any) -> Any:
    context = rows["past"] + rows["seq"]
    return decode_attention_s(rows["batch"], context, _heads(rows), chip, c, lib, _sizes(rows, "kv_dtype"))


def _experts(rows: Measured, chip: KernelChip, c: Any, lib: Any, of_type: Any) -> Any:
    matrices = np.where([("nongated" in k) for k in rows["kernel"]], 2.0, 3.0)
    of = [rows[k] for k in ("hidden", "inter", "topk", "experts")]
    x = ExpertLayer(of[0], of[1], of[2], of[3], rows["moe_tp"], rows["moe_ep"], matrices)
    skew = np.array([_SKEW[d] for d in rows["distribution"]])
    return experts_s(rows["tokens"], x, chip, c, lib, of_type, _sizes(rows, "dtype"), _peak(rows, chip), skew)


def _reductions(rows: Measured, chip: KernelChip, c: Any, lib: Any) -> Any:
    return node_all_reduce_s(rows["m"], rows["batch"], chip, c, lib)


def _attention(constants: type[Any], seconds: Callable[..., Any]) -> Kind:
    return Kind(constants, (("", AttentionLibrary, _attention_library),), seconds)


KINDS: dict[str, Kind] = {
    "product": Kind(ProductConstants, (("", ProductLibrary, _product_library),), _products),
    "prompt attention": _attention(PromptConstants, _prompts),
    "decode attention": _attention(DecodeConstants, _decoding),
    "mla prompt": _attention(PromptConstants, _prompts),
    "mla decode": _attention(DecodeConstants, _decoding),
    "experts": Kind(
        ExpertConstants,
        (("", ExpertLibrary, _expert_library), (" by type", ExpertRate, _expert_type)),
        _experts,
    ),
    "all-reduce": Kind(LinkConstants, (("", AllReduceLibrary, _reduce_library),), _reductions),
}
_OF_FILE = {
    **{"gemm": "product", "attn_context": "prompt attention", "attn_generation": "decode attention"},
    **{"mla_context": "mla prompt", "mla_generation": "mla decode", "moe": "experts", "all_reduce": "all-reduce"},
}


@cache
def measured() -> tuple[dict[str, Measured], int]:
    """Return the shipped measurements of kernels, by kind, and the number of rows of other kinds."""
    with lzma.open(KERNELS, "rt", newline="") as file:
        reader = csv.reader(io.StringIO(file.read()))
        names = next(reader)
        text = dict(zip(names, map(np.array, zip(*reader, strict=True)), strict=True))
    out, other_rows = {}, len(text["kind"])
    for name, kind in _OF_FILE.items():
        keep = text["kind"] == name
        if kind == "product":
            keep &= np.isin(text["dtype"], _PRODUCTS)
        cells: dict[str, npt.NDArray[Any]] = {}
        for column, values in text.items():
            cell_values = values[keep]
            cells[column] = cell_values
            if column not in ("gpu", "kind", "framework", "version", "dtype", "kv_dtype", "kernel", "distribution"):
                cells[column] = np.array([float(v) if v else np.nan for v in cell_values])
        out[kind] = Measured(kind, cells)
        other_rows -= int(keep.sum())
    return out, other_rows


def chips_of(rows: Measured) -> tuple[KernelChip, list[str]]:
    """Return the chips of rows as columns, and the generations whose constants they have."""
    names, places = np.unique(rows.gpus, return_inverse=True)
    known = [_CHIP_OF.get(str(n), str(n)) for n in names]
    generations = [generation_of(k) for k in known]
    return take([kernel_chip(k) for k in known], places), [generations[p] for p in places]


def columns_of(cls: type[Any], table: Rows, keys: Sequence[str]) -> Any:
    """Return constants as columns, one entry per key; COMMON where a key has no row."""
    names, places = np.unique(np.array(keys), return_inverse=True)
    return take([cls(**table.get(str(n), table.get(COMMON, {}))) for n in names], places)


def predicted(rows: Measured, fitted: KernelConstants | None = None) -> Floats:
    """Return the predicted seconds of rows of one kind, by default with the shipped constants."""
    kind, fitted = KINDS[rows.kind], fitted or kernel_constants()
    chip, generations = chips_of(rows)
    constants = columns_of(kind.constants, fitted.chips[rows.kind], generations)
    of = [columns_of(cls, fitted.libraries[rows.kind + part], keys(rows)) for part, cls, keys in kind.libraries]
    return np.asarray(kind.seconds(rows, chip, constants, *of))


def kernel_scores() -> dict[str, Any]:
    """Score the kernel model as `phalanx validate kernels --json` prints it: by kind and GPU, in percent; `left_out`:
    with constants fitted without the row's GPU."""
    by_kind, other_rows = measured()
    without = json.loads(LEFT_OUT.read_text())
    out: dict[str, Any] = {"by_kind": {}, "by_gpu": {}}
    by_gpu: dict[str, list[tuple[Floats, Floats, Floats]]] = {}
    every = []
    # Each kind, with the constants that ship and with those fitted without the row's GPU.
    for kind, rows in by_kind.items():
        prediction = predicted(rows)
        blind = np.empty(len(rows))
        for gpu in np.unique(rows.gpus):
            mine = rows.gpus == gpu
            blind[mine] = predicted(rows.only(mine), KernelConstants(*without[str(gpu)]))
            if kind != "all-reduce":
                by_gpu.setdefault(str(gpu), []).append((prediction[mine], blind[mine], rows.seconds[mine]))
        out["by_kind"][kind] = {**errors(prediction, rows.seconds), "left_out": errors(blind, rows.seconds)}
        out["by_kind"][kind]["by_gpu"] = {
            str(gpu): {
                **errors(prediction[mine], rows.seconds[mine]),
                "left_out": errors(blind[mine], rows.seconds[mine]),
            }
            for gpu in np.unique(rows.gpus)
            for mine in (rows.gpus == gpu,)
        }
        if kind != "all-reduce":
            every.append((prediction, blind, rows.seconds))
    # Over all kinds, by GPU and in total.
    for gpu, parts in by_gpu.items():
        prediction, blind, true = (np.concatenate(column) for column in zip(*parts, strict=True))
        out["by_gpu"][gpu] = {**errors(prediction, true), "left_out": errors(blind, true)}
    prediction, blind, true = (np.concatenate(column) for column in zip(*every, strict=True))
    out["kernels"] = {**errors(prediction, true), "left_out": errors(blind, true)}
    out["not_modelled"] = other_rows
    return out
