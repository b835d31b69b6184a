"""Fitted constants ship as data files, which the calibration writes and the prices read."""

from dataclasses import asdict, fields
from pathlib import Path

import pytest

from calibration import write
from phalanx.cost.analytic import fitted_constants as analytic
from phalanx.cost.analytic.chips import Generation
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.kernels import chip as kernels
from phalanx.serving.cost import engines


def test_writing_the_constants_that_ship_writes_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, constants = analytic.FILE.read_bytes(), analytic.fitted_constants()
    monkeypatch.setattr(analytic, "FILE", tmp_path / "analytic.json")
    write.write(constants)
    assert (tmp_path / "analytic.json").read_bytes() == shipped
    write.save(tmp_path / "kernels.json", write.rounded(asdict(kernels.kernel_constants())))
    assert (tmp_path / "kernels.json").read_bytes() == kernels.FILE.read_bytes()
    write.save(tmp_path / "engines.json", write.rounded(engines.fitted()))
    assert (tmp_path / "engines.json").read_bytes() == engines.FITTED_FILE.read_bytes()


def test_every_constant_is_a_field_of_what_it_prices() -> None:
    known = {f.name for kind in (Profile, Generation) for f in fields(kind)} | {"clock"}
    assert {key.rpartition(".")[2] for key in analytic.fitted_constants()} <= known


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "1.0", None])
def test_a_constant_that_is_not_a_positive_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"constant fill of product, hopper, is .*, not a positive number"):
        kernels.KernelConstants({"product": {"hopper": {"fill": value}}}, {})  # type: ignore[dict-item]
