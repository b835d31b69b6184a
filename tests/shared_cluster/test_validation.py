"""What it costs to have GPUs on two nodes, predicted beside measured."""

from __future__ import annotations

import json
from statistics import median

import pytest
from support.in_process_cli import error_of, phalanx

from phalanx.shared_cluster.validation.placements import MACHINES, NAMES, PARAMETERS, Ratio, port_of, scores, step_s
from phalanx.shared_cluster.validation.placements import machine as table_of_machine


def test_a_step_waits_for_what_its_backward_pass_does_not_hide():
    on = MACHINES["aws"]
    seconds = 2 * 4 * 110e6 * 0.5 / 6.25e9  # two GPUs, a ring over the port
    assert step_s(1.0, 110e6, "11", on) == 1.0
    assert step_s(0.03, 110e6, "11", on) == pytest.approx(0.01 + seconds)
    assert step_s(0.03, 110e6, "2", on) == pytest.approx(0.01 + seconds * 6.25 / 12)


def test_a_port_s_rate_is_the_one_that_a_placement_shows():
    on = MACHINES["aws"]
    slow = {b: step_s(1.0 + b, 110e6, "11", on.__class__("", on.inside, 0.2e9)) for b in (1, 2, 3)}
    steps = {("aws", "bert"): {"1": {b: 1.0 + b for b in (1, 2, 3)}, "11": slow}}
    assert port_of("aws", steps, on).port == pytest.approx(0.2e9)


def test_links_as_published_explain_two_machines_and_a_measured_port_the_third():
    errors = [median(abs(r.error) for r in rows) for _, rows in scores()]
    assert [round(100 * e, 1) for e in errors] == [3.0, 3.8, 40.7, 11.3]
    assert all(r.measured > 0 for _, rows in scores() for r in rows)


def test_the_command(tmp_path):
    code, out, _ = phalanx(tmp_path, "cluster validate --json")
    assert (code, len(json.loads(out))) == (0, 4)
    assert "BERT base" in phalanx(tmp_path, "cluster validate")[1]
    error_of(tmp_path, "cluster validate --choices")


def test_a_machine_shows_its_middle_batch_and_the_median_error_of_all():
    """Of the batches of a model as many are smaller as are larger; a model without any has a row without numbers."""
    rows = [
        Ratio("m", model, gpus, batch, 1 + batch / 100, (1 + batch / 100) * (1 + 0.01 * k))
        for model in ("bert", "yolov3")
        for gpus in (2, 8)
        for k, batch in enumerate((1, 2, 4, 8, 16), gpus)
    ]
    grid = table_of_machine(MACHINES["aws"], rows)
    shown = dict(zip(grid.columns[0].cells, zip(*(c.cells for c in grid.columns[1:]), strict=True), strict=True))
    for model in ("bert", "yolov3"):
        size, two, four, eight, error = shown[NAMES[model]]
        assert size == f"{4e-6 * PARAMETERS[model]:.0f} MB"
        assert (two, four, eight) == ("1.04, 1.08", "", "1.04, 1.14")
        assert error == f"{median([0.01 * k for gpus in (2, 8) for k in range(gpus, gpus + 5)]):.1%}"
    assert shown[NAMES["cifar10"]][1:] == ("", "", "", "")
    assert shown["all, 20 ratios"][-1] == error
