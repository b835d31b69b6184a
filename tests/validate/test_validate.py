"""How published rows are read, predicted and scored."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.cost.analytic.chips import system
from phalanx.cost.analytic.kernels import product_s
from phalanx.cost.analytic.profile import profile
from phalanx.cost.collectives.nccl_model import collective_s
from phalanx.report.validate import _kernel_table, side_by_side
from phalanx.spec.errors import InputError
from phalanx.validate import records
from phalanx.validate.collectives import link_scores
from phalanx.validate.from_row import cases
from phalanx.validate.prediction_error import compare, scores
from phalanx.validate.scores import errors, fit
from phalanx.validate.stacks import _is_of, stack_of
from phalanx.validate.systems import Benched, corrected_system


def test_all_reduces() -> None:
    found = link_scores(records.load(records.COLLECTIVES, ("hardware", "collective")))
    assert found["all_reduce"]["median"] <= 15
    assert found["all_reduce"]["n"] > 100


def test_results_of_a_row_are_no_input_of_its_prediction() -> None:
    rows = [r for r in records.load(records.RUNS) if r["step_time_s"]][:200]
    blind = []
    for row in rows:
        cells = dict(row.cells)
        for name in (
            "tokens_per_s_per_gpu",
            "tflops_per_gpu",
            "mfu_pct",
            "hfu_pct",
            "peak_mem_gb",
            "mem_allocated_gb",
        ):
            cells[name] = ""
        cells["step_time_s"] = "1"
        blind.append(records.Row(cells))
    seen, unseen = compare(rows), compare(blind)
    assert [p.predicted for p in seen.time] == [p.predicted for p in unseen.time]


def test_vtrains_runs_in_one_node_are_those_of_its_predictor() -> None:
    """Nothing is repeated there, and GPT-2's vocabulary is not padded; over several nodes the table holds."""
    found = cases([r for r in records.load(records.RUNS) if r.family == "vtrain"])[0]
    read = {(c.row.group == "vtrain/single-node", c.profile, c.strategy.recompute, c.model.vocab) for c in found}
    assert read == {(True, "vtrain", "none", 50257), (False, "megatron-2022", "full", 51200)}


def test_a_row_that_contradicts_itself_is_left_out() -> None:
    row = next(r for r in records.load(records.RUNS) if r.family == "vtrain")
    found, skipped = cases([records.Row({**row.cells, "gpus": "7"})])
    assert not found
    assert "is not gpus=7" in skipped[0][1]
    found, skipped = cases([records.Row({**row.cells, "gpu": "TPUv4"})])
    assert "TPUv4 is not modelled" in skipped[0][1]
    (family,) = scores(compare([records.Row({**row.cells, "gpus": "7"})]))["skipped"]["reasons"]
    assert family == "vtrain"


def test_a_file_of_ones_own_may_name_a_preset_and_leave_out_its_shape(tmp_path: Path) -> None:
    """A model by its preset's name; what else is missing is said, and where nothing is left, no empty table."""
    path = tmp_path / "runs.csv"
    columns = "source_family,gpu,gpus,model,framework,precision,tp,pp,dp,gbs,mbs,seq_len,step_time_s"
    blank = "own,H100-SXM-80GB,8,llama3-8b,NeMo,bf16,,,,128,1,8192,14"
    path.write_text(f"{columns}\n{blank}\n")
    done = CliRunner().invoke(app, ["validate", "--runs", str(path)])
    assert done.exit_code == 0
    assert "none of these rows can be predicted\n1 row left out" in done.stdout
    assert "the degrees tp, pp, cp and dp are not stated" in done.stdout
    whole = blank.replace(",,,,", ",2,1,4,")
    path.write_text(f"{columns}\n{whole}\n{whole.replace('bf16', '')}\n")
    done = CliRunner().invoke(app, ["validate", "--runs", str(path)])
    assert re.search(r"own +step time +1 ", done.stdout)
    assert "the precision is not stated" in done.stdout
    (found,), _ = cases(records.load(path))
    assert found.model.layers == 32


def _as_of(framework: str, version: str = "", **cells: str) -> records.Row:
    """A published row as if another framework had run it."""
    row = next(
        r for r in records.load(records.RUNS) if r.family == "nemo-megatron-bridge" and r["model"] == "llama3-8b"
    )
    return records.Row({**row.cells, "framework": framework, "framework_version": version, **cells})


@pytest.mark.parametrize(
    ("framework", "version", "name"),
    [
        ("NeMo", "24.07", "nemo-24.03"),
        ("NeMo", "nemo-25.03", "nemo-25.02"),
        ("NeMo", "27.01", "nemo-25.05"),
        ("Megatron-Bridge", "NeMo 25.10", "megatron-bridge-25.09"),
        ("Megatron-Bridge", "26.02.02-rc1", "megatron-bridge-26.02.01"),
        ("Megatron-Bridge", "main", "megatron-bridge-26.08"),
    ],
)
def test_the_nearest_release_stands_in_for_one_that_is_not_known(framework: str, version: str, name: str) -> None:
    summary = scores(compare([_as_of(framework, version)]))
    (line,) = summary["replaced_stacks"]
    assert (line["priced_as"], line["generic"], line["rows"]) == (name, False, 1)
    assert summary["time"]["n"] == 1
    assert "generic_stacks" not in summary


def test_the_type_of_gradients_follows_the_recipe() -> None:
    for model, version, name in (
        ("Nemotron-340B", "24.07", "nemo-24.03-bf16"),
        ("mixtral-8x7b", "24.11", "nemo-24.11-bf16"),
        ("llama3-8b", "24.11", "nemo-24.11"),
        ("mixtral-8x7b", "25.04", "nemo-25.04"),
    ):
        assert stack_of(records.Row({"framework": "NeMo", "framework_version": version, "model": model})).name == name


@pytest.mark.parametrize(
    ("framework", "options", "name"), [("Theano", "", "eager"), ("Theano", "torch.compile", "compiled")]
)
def test_a_framework_that_is_not_known_is_scored_apart(framework: str, options: str, name: str) -> None:
    known = next(r for r in records.load(records.RUNS) if r.family == "vtrain")
    summary = scores(compare([known, _as_of(framework, options=options), _as_of("JAX of mine")]))
    taken = {line["stated"]: (line["priced_as"], line["generic"]) for line in summary["replaced_stacks"]}
    assert taken == {"Theano": (name, True), "JAX of mine": ("compiled", True)}
    assert summary["time"]["n"] == 1
    assert summary["generic_stacks"]["time"]["n"] == 2
    assert set(summary["by_family"]) == {"vtrain"}
    assert summary["predicted"] == 3


def test_errors_by_hand() -> None:
    found = errors([1.1, 1.8, 3.0, 4.0], [1.0, 2.0, 3.0, 5.0])
    assert found["mape"] == pytest.approx((10 + 10 + 0 + 20) / 4)
    assert found["median"] == pytest.approx(10)
    assert found["bias"] == pytest.approx((10 - 10 + 0 - 20) / 4)
    assert found["spearman"] == pytest.approx(1)
    assert errors([3, 2, 1], [1, 2, 3])["spearman"] == pytest.approx(-1)
    assert errors([1, 1, 2], [1, 2, 3])["spearman"] == pytest.approx(np.sqrt(3) / 2)  # ties share a rank
    assert errors([], [])["n"] == 0


def test_fit_by_hand() -> None:
    found = fit([True, True, False, False, True], [True, False, False, True, True])
    assert found == {"accuracy": 60.0, "tp": 2, "fp": 1, "tn": 1, "fn": 1, "n": 5}


def test_the_command_on_another_file(tmp_path: Path) -> None:
    rows = [r for r in records.load(records.RUNS) if r.family == "megatron-sc21"]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0].cells))
        writer.writeheader()
        writer.writerows(r.cells for r in rows)
    done = CliRunner().invoke(app, ["validate", "--runs", str(path), "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["time"]["n"] + found["skipped"]["n"] == len(rows)
    assert set(found["time"]) == {"mape", "median", "p90", "bias", "spearman", "n"}
    assert set(found["by_family"]) == {"megatron-sc21"}


def test_errors_are_shown_as_changes_and_shares() -> None:
    """Of a step that is predicted a tenth too long, and of kernels 5 and 20 % off."""
    cells = {n: "" for n in ("tp", "pp", "vpp", "ep", "dp", "mbs", "act_ckpt", "precision", "model")}
    row = {**cells, "cp": "2", "gpus": "8", "gpu": "H100-SXM", "gbs": "4", "seq_len": "64"}
    run = SimpleNamespace(row=row, measured=2.0, predicted=2.2)
    (shown,) = side_by_side(SimpleNamespace(time=[run])).rows  # type: ignore[arg-type]
    assert shown[-3:] == (2.0, 2.2, pytest.approx(0.1))
    assert (shown[1], shown[2]) == ("8 H100", "cp=2")
    error = {"median": 5.0, "p90": 20.0}
    (shown,) = _kernel_table("kernels", "kind", {"product": {**error, "n": 3, "left_out": error}}).rows
    assert shown == ("product", 3, 0.05, 0.2, 0.05, 0.2)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("source_family,gpu,gpus,model\n")
    with pytest.raises(InputError, match="has no rows"):
        records.load(path)


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="has no column source_family"):
        records.load(path)
    done = CliRunner().invoke(app, ["validate", "--runs", str(path)])
    assert done.exit_code == 2


def test_a_machine_that_its_owners_measured_is_as_they_say() -> None:
    """Its products and memory, whatever the constants of its generation are."""
    known = system("B200", 8, 50e9)
    by = Benched(8, 668e9, 606e9, 668e9, 606e9, product_flops_per_s=1067e12, memory_bytes_per_s=5.33e12)
    for gemm in (known.gemm, 0.5 * known.gemm):
        found = corrected_system(replace(known, gemm=gemm), by)
        seconds = product_s(4096, 57344, 8192, found, found.peak_bf16 * found.gemm, 2)
        assert 2 * 4096 * 57344 * 8192 / float(seconds) == pytest.approx(1067e12, rel=1e-9)
        assert float(found.memory_bytes_per_s * found.memory) == pytest.approx(5.33e12)
    assert float(corrected_system(known, Benched()).gemm) == known.gemm


def test_the_share_of_held_up_jobs_is_that_of_the_rows() -> None:
    """What nanotron is expected to lose where nobody measured: the share of its jobs over several nodes that did."""
    found = cases([r for r in records.load(records.RUNS) if r.family == "hf-ultrascale"])[0]
    observed = [c for c in found if c.strategy.world > 8 and float(np.asarray(c.system.observed))]
    held_up = sum(float(np.asarray(c.system.held_up)) for c in observed)
    assert (held_up, len(observed)) == (740, 1014)
    assert profile("nanotron").held_up == pytest.approx(740 / 1014, abs=0.005)


def test_a_jobs_own_bandwidths_say_whether_its_cpus_hold_it_up() -> None:
    """All-gather over 8 nodes at 55 GB/s beside 242 inside of one: 0.37 ms for each rank beyond; at 125: 0.1."""
    known = system("H100", 8, 50e9, True)
    slow, fast = (corrected_system(known, Benched(64, 95e9, rate, 425e9, 242e9)) for rate in (55e9, 125e9))
    assert (float(slow.held_up), float(fast.held_up)) == (1, 0)
    assert float(slow.tiers[0].bytes_per_s_per_gpu_per_direction) == 242e9
    assert float(slow.reduce_gain) == pytest.approx(425 / 242)
    n = 1.5e9
    assert float(collective_s("all_reduce", n, 64, 1, fast)) == pytest.approx(2 * n * 63 / 64 / 95e9, rel=0.15)


@pytest.mark.parametrize(
    ("run", "cells", "is_of"),
    [
        ({"several": ["pp"]}, {"pp": "2"}, True),
        ({"several": ["pp"]}, {"pp": "1"}, False),
        ({"several": ["pp"]}, {}, False),
        ({"since": ["25.04"]}, {"framework_version": "25.04"}, True),
        ({"since": ["25.04"]}, {"framework_version": "25.02"}, False),
        ({"framework": ["Me*"]}, {"framework": "Megatron"}, True),
        ({"framework": ["Me*"]}, {"framework": "NeMo"}, False),
        ({"not_framework": ["Me*"]}, {"framework": "NeMo"}, True),
        ({"not_framework": ["Me*", "Ne*"]}, {"framework": "NeMo"}, False),
        ({"framework": ["Me*"], "release": ["x", ""]}, {"framework": "Megatron"}, True),
    ],
)
def test_a_run_is_of_a_stack_by_all_its_patterns(
    run: dict[str, list[str]], cells: dict[str, str], is_of: bool
) -> None:
    assert _is_of(records.Row(cells), run) is is_of
