"""The table of chips: one row, every fact, read by presets and by predictions alike."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields, replace

import pytest

from phalanx.cost.analytic.chips import generation, shares, system_of
from phalanx.spec.cluster import presets
from phalanx.spec.cluster.chips import CHIPS, Chip


@pytest.mark.parametrize("name", CHIPS)
def test_a_chip_that_lacks_a_fact_cannot_be_made(name: str) -> None:
    row = asdict(CHIPS[name])
    for field in (f.name for f in fields(Chip) if f.default is MISSING):
        with pytest.raises(TypeError, match=field):
            Chip(**{key: value for key, value in row.items() if key != field})


@pytest.mark.parametrize("name", CHIPS)
def test_every_chip_has_a_generation_with_kernel_rates(name: str) -> None:
    assert generation(CHIPS[name].generation).gemm > 0


@pytest.mark.parametrize("name", [n for n in presets.PRESETS if n != "local"])
def test_both_engines_read_one_row(name: str) -> None:
    """The rates of a preset's device are those that predictions take."""
    cluster = presets.preset(name, 1)
    system = system_of(cluster)
    assert (
        system.peak_bf16
        == cluster.device.dense_flops_per_s[
            "bfloat16" if "bfloat16" in cluster.device.dense_flops_per_s else "float16"
        ]
    )
    assert system.memory_bytes_per_s == cluster.device.memory_bandwidth_bytes_per_s


def test_other_makers_chips_reach_what_their_best_products_say() -> None:
    """The rule, tried on a chip whose trainings are known: an A100's best product is 271.2 TFLOP/s (same table)."""
    by_rule = shares(replace(CHIPS["A100"], product=2.712e14)).gemm
    assert by_rule == pytest.approx(generation("ampere").gemm, rel=0.05)
    assert shares(CHIPS["H100"]) == generation("hopper")
    assert shares(CHIPS["B200"]) == generation("blackwell")  # of which there is no such figure, and trainings are
    for name in ("MI250X", "MI300X", "MI325X", "MI350X", "MI355X", "Gaudi-2", "Gaudi-3"):
        chip, found = CHIPS[name], shares(CHIPS[name])
        assert chip.product / chip.half * 0.8 < found.gemm < chip.product / chip.half, name
        assert found.memory == generation(chip.generation).memory
