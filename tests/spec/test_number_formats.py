"""The table of number formats: rows whose facts agree, with chips, with torch and with what users may ask for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import get_args, get_type_hints

import pytest
import torch

from phalanx.spec.cluster.chips import CHIPS, Chip
from phalanx.spec.job import DType, Products
from phalanx.spec.number_formats import COMPUTED, MULTIPLIED, NUMBER_FORMATS, NumberFormat
from phalanx.spec.strategy.stack_options import StackProducts


def test_a_row_without_a_fact_cannot_be_made() -> None:
    row = {f.name: getattr(NUMBER_FORMATS["mxfp8"], f.name) for f in fields(NumberFormat)}
    for fact in row:
        with pytest.raises(TypeError, match=fact):
            NumberFormat(**{name: value for name, value in row.items() if name != fact})


@pytest.mark.parametrize(
    ("fact", "value"),
    [("values_per_scale", 0), ("scale_bits", 0), ("peak", None), ("multiple", 48), ("gathers", True)],
)
def test_facts_that_contradict_each_other_are_refused(fact: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"number format mxfp8: {fact} = .* contradicts its row"):
        replace(NUMBER_FORMATS["mxfp8"], **{fact: value})  # type: ignore[arg-type]


def test_bytes_of_an_operand_count_its_numbers_and_the_scales_of_its_blocks() -> None:
    """By hand: 4,096 numbers, one scale of a byte for 32 of them, or for 16 of half a byte each."""
    sizes = {
        name: NUMBER_FORMATS[name].bytes_of(4096) for name in ("float64", "bfloat16", "float8", "mxfp8", "nvfp4")
    }
    assert sizes == {"float64": 32768, "bfloat16": 8192, "float8": 4096, "mxfp8": 4096 + 128, "nvfp4": 2048 + 256}
    assert all(f.bytes_of(4096) == 4096 * f.bytes_per_value for f in NUMBER_FORMATS.values() if f.scales != "tensor")
    assert NUMBER_FORMATS["mxfp8"].bytes_of(33) == 33 + 2  # a block that is not full has a scale


def test_torch_has_the_types_and_their_bits() -> None:
    for f in NUMBER_FORMATS.values():
        if f.dtype is not None:
            dtype: torch.dtype = getattr(torch, f.dtype)
            packed = 2 if f.dtype.endswith("x2") else 1
            assert 8 * dtype.itemsize == f.bits * packed, f.name
        if f.scale_dtype is not None:
            assert 8 * getattr(torch, f.scale_dtype).itemsize == f.scale_bits, f.name


def test_a_chip_has_a_format_where_its_peak_is_above_that_of_wider_ones() -> None:
    """The chips' rows repeat the wider type's FLOP/s where there are no tensor cores of a narrow one."""
    narrow = {chip.generation: (chip.fp8 > chip.half, chip.fp4 > chip.fp8) for chip in CHIPS.values()}
    for generation, (eight, four) in narrow.items():
        assert NUMBER_FORMATS["float8"].on(generation) == eight, generation
        assert NUMBER_FORMATS["nvfp4"].on(generation) == NUMBER_FORMATS["mxfp8"].on(generation) == four, generation
    assert {f.peak for f in NUMBER_FORMATS.values() if f.peak} <= set(get_type_hints(Chip)) | {"tf32"}
    assert all(chip.tf32 == chip.half / 2 for chip in CHIPS.values())
    assert {chip.generation for chip in CHIPS.values()} >= set().union(
        *(f.generations for f in NUMBER_FORMATS.values())
    )


def test_jobs_and_stacks_name_formats_of_the_table() -> None:
    assert set(get_args(DType)) == {f.name for f in COMPUTED}
    assert set(get_args(Products)) == {"compute", *(f.name for f in MULTIPLIED)}
    products = get_args(StackProducts)
    assert set(products) - {"auto"} <= NUMBER_FORMATS.keys()
    assert all(NUMBER_FORMATS[name].priced_as for name in set(products) - {"auto"})
