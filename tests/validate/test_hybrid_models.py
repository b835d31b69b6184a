"""Models of published rows whose blocks are of several kinds: as large as published, and found by every name."""

from __future__ import annotations

import pytest

from phalanx.validate.models import depths_of, model_of
from phalanx.validate.records import RUNS, Row, load


def _row(**cells: str) -> Row:
    return Row({"seq_len": "8192", "options": "", "arch": "", **cells})


@pytest.mark.parametrize(
    ("name", "total", "active", "depths"),
    [
        ("Nemotron_3_Nano", 31_577_937_344, 3_580_073_408, 0),
        ("Nemotron_3_5_Lightning", 31_577_937_344, 3_580_073_408, 2),
        ("nemotron-3-super-120b-a12b", 120_668_687_360, 12_770_216_960, 2),
        ("Nemotron_3_Ultra", 549_308_968_960, 56_058_818_560, 2),
        ("qwen3-next-80b-a3b", 79_674_391_296, 3_874_929_408, 0),
    ],
)
def test_a_hybrid_model_is_as_large_as_published(name: str, total: int, active: int, depths: int) -> None:
    model = model_of(_row(model=name))
    assert (model.parameter_count, model.active_count) == (total, active)
    assert depths_of(_row(model=name)) == depths
    assert depths_of(_row(model=name, mtp_layers="1")) == 1


def test_rows_of_hybrid_models_have_a_model() -> None:
    rows = [row for row in load(RUNS) if row["model"].lower().startswith(("nemotron_3", "qwen3-next"))]
    assert len(rows) == 54
    assert all(model_of(row).pattern is not None for row in rows)


def test_tables_of_other_models_leave_depths_out() -> None:
    assert depths_of(_row(model="deepseek-v3", mtp_layers="1")) == 0
