"""Kernels measured in isolation compared with the kernel model: by kind, chip and library, as columns.

A kind is predicted with constants of the chip's generation and of the library that ran it. Scores called `left_out`
use constants fitted without any row of the GPU in question: the common ones if no other GPU of its generation was
measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from phalanx.validate.kernel_rows import BYTES, SKEW, MeasuredKernels, chip_of, rows_of, shipped_rows
from phalanx.validate.records import FOLDER
from phalanx.validate.scores import errors

LEFT_OUT = FOLDER / "kernels_left_out.json"
"""Constants fitted without each GPU."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """How one kind of kernel is predicted."""

    constants: type[Any]
    libraries: tuple[tuple[str, type[Any], Callable[[MeasuredKernels], list[str]]], ...]
    """Tables of libraries' constants: name in the fitted file, class, and the library of each row."""
    seconds: Callable[..., Any]
    """(rows, chip, constants, *libraries) -> seconds."""


def _attention_library(rows: MeasuredKernels) -> list[str]:
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


def _expert_library(rows: MeasuredKernels) -> list[str]:
    names = {
        **{"deepgemm": "deepgemm", "min_latency": "trtllm low latency", "marlin": "marlin", "triton": "triton"},
        **{"trtllm_": "trtllm-gen", "cutlass": "cutlass", "fused_moe": "triton", "nongated": "cutlass"},
    }
    return [next((name for part, name in names.items() if part in k), "trtllm") for k in rows["kernel"]]


def _product_library(rows: MeasuredKernels) -> list[str]:
    def name(engine: str, dtype: str) -> str:
        return "plain" if dtype == "bfloat16" else f"{engine} {dtype}"

    return [name(e, d) for e, d in zip(rows["framework"], rows["dtype"], strict=True)]


def _expert_type(rows: MeasuredKernels) -> list[str]:
    return [f"{lib} {d}" for lib, d in zip(_expert_library(rows), rows["dtype"], strict=True)]


def _reduce_library(rows: MeasuredKernels) -> list[str]:
    def name(library: str, implementation: str) -> str:
        if library == "nccl":
            return "nccl"
        if implementation.startswith("TRTLLM"):
            return "trtllm"
        return f"{library} {'graph' if 'graph' in implementation else 'eager'}"

    return [name(a, b) for a, b in zip(rows["framework"], rows["kernel"], strict=True)]


def _sizes(rows: MeasuredKernels, column: str) -> Floats:
    return np.array([BYTES.get(d, 2.0) for d in rows[column]])


def _peak(rows: MeasuredKernels, chip: KernelChip) -> Any:
    dtype = rows["dtype"]
    eight = np.isin(dtype, ("fp8", "fp8_block", "w4a8_mxfp4_mxfp8"))
    return np.where(dtype == "nvfp4", chip.fp4, np.where(eight, chip.fp8, chip.half))


def _products(rows: MeasuredKernels, chip: KernelChip, c: Any, lib: Any) -> Any:
    return product_s(rows["m"], rows["n"], rows["k"], chip, c, _sizes(rows, "dtype"), _peak(rows, chip), lib)


def _heads(rows: MeasuredKernels) -> Heads:
    if rows.kind == "mla prompt":  # attention over expanded keys of 192 and values of 128
        return Heads(rows["heads"], rows["heads"], 192.0, 128.0, rows["heads"] * 320.0)
    if rows.kind == "mla decode":
        return Heads(rows["heads"], 1.0, 576.0, 512.0, 576.0)
    d, kv = rows["head_dim"], rows["kv_heads"]
    return Heads(rows["heads"], kv, d, d, 2 * kv * d, rows["window"])


def _prompts(rows: MeasuredKernels, chip: KernelChip, c: Any, lib: Any) -> Any:
    sizes = (_sizes(rows, "dtype"), _sizes(rows, "kv_dtype"))
    return prompt_attention_s(rows["batch"], rows["seq"], rows["past"], _heads(rows), chip, c, lib, sizes)


def _decoding(rows: MeasuredKernels, chip: KernelChip, c: Any, lib: Any) -> Any:
    context = rows["past"] + rows["seq"]
    return decode_attention_s(rows["batch"], context, _heads(rows), chip, c, lib, _sizes(rows, "kv_dtype"))


def _experts(rows: MeasuredKernels, chip: KernelChip, c: Any, lib: Any, of_type: Any) -> Any:
    matrices = np.where([("nongated" in k) for k in rows["kernel"]], 2.0, 3.0)
    of = [rows[k] for k in ("hidden", "inter", "topk", "experts")]
    x = ExpertLayer(of[0], of[1], of[2], of[3], rows["moe_tp"], rows["moe_ep"], matrices)
    skew = np.array([SKEW[d] for d in rows["distribution"]])
    return experts_s(rows["tokens"], x, chip, c, lib, of_type, _sizes(rows, "dtype"), _peak(rows, chip), skew)


def _reductions(rows: MeasuredKernels, chip: KernelChip, c: Any, lib: Any) -> Any:
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


def chips_of(rows: MeasuredKernels) -> tuple[KernelChip, list[str]]:
    """Return the chips of rows as columns, and the generations whose constants they have."""
    names, places = np.unique(rows.gpus, return_inverse=True)
    known = [chip_of(str(n)) for n in names]
    generations = [generation_of(k) for k in known]
    return take([kernel_chip(k) for k in known], places), [generations[p] for p in places]


def columns_of(cls: type[Any], table: Rows, keys: Sequence[str]) -> Any:
    """Return constants as columns, one entry per key; COMMON where a key has no row."""
    names, places = np.unique(np.array(keys), return_inverse=True)
    return take([cls(**table.get(str(n), table.get(COMMON, {}))) for n in names], places)


def predicted_seconds(rows: MeasuredKernels, fitted: KernelConstants | None = None) -> Floats:
    """Return the predicted seconds of rows of one kind, by default with the shipped constants."""
    kind, fitted = KINDS[rows.kind], fitted or kernel_constants()
    chip, generations = chips_of(rows)
    constants = columns_of(kind.constants, fitted.chips[rows.kind], generations)
    of = [columns_of(cls, fitted.libraries[rows.kind + part], keys(rows)) for part, cls, keys in kind.libraries]
    return np.asarray(kind.seconds(rows, chip, constants, *of))


def kernel_scores(path: Path | None = None) -> dict[str, Any]:
    """Score the kernel model on the shipped rows or a file's, as `phalanx validate kernels --json` prints it: errors
    in percent by kind and GPU. `left_out`: with constants fitted without the row's GPU; the shipped ones if none of
    its rows was fitted. Raises InputError."""
    file = shipped_rows() if path is None else rows_of(path)
    without = json.loads(LEFT_OUT.read_text())
    out: dict[str, Any] = {"by_kind": {}, "by_gpu": {}}
    by_gpu: dict[str, list[tuple[Floats, Floats, Floats]]] = {}
    predictions = []
    # Each kind, with the constants that ship and with those fitted without the row's GPU.
    for kind, rows in file.by_kind.items():
        prediction = predicted_seconds(rows)
        blind = prediction.copy()
        for gpu in np.unique(rows.gpus):
            mine = rows.gpus == gpu
            if str(gpu) in without:
                blind[mine] = predicted_seconds(rows.only(mine), KernelConstants(*without[str(gpu)]))
            if kind != "all-reduce":
                by_gpu.setdefault(str(gpu), []).append((prediction[mine], blind[mine], rows.seconds[mine]))
        out["by_kind"][kind] = _scored(prediction, blind, rows.seconds)
        out["by_kind"][kind]["by_gpu"] = {
            str(gpu): _scored(prediction[mine], blind[mine], rows.seconds[mine])
            for gpu in np.unique(rows.gpus)
            for mine in (rows.gpus == gpu,)
        }
        if kind != "all-reduce":
            predictions.append((prediction, blind, rows.seconds))
    # Over all kinds, by GPU and in total.
    for gpu, parts in by_gpu.items():
        out["by_gpu"][gpu] = _scored(*(np.concatenate(column) for column in zip(*parts, strict=True)))
    whole = [np.concatenate(column) for column in zip(*predictions, strict=True)] or [np.empty(0)] * 3
    out["kernels"] = _scored(*whole)
    return out | {"not_modelled": file.other_rows, "refused": dict(file.refused)}


def _scored(prediction: Floats, blind: Floats, seconds: Floats) -> dict[str, Any]:
    return {**errors(prediction, seconds), "left_out": errors(blind, seconds)}
