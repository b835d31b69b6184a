"""Fitted constants ship as data files, which the calibration writes and the prices read."""

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import pytest

import calibration.__main__
import calibration.kernels
import calibration.serving
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


@pytest.mark.long
@pytest.mark.parametrize("fit", ["step times", "kernels", "engines"])
def test_a_fit_from_the_defaults_gives_the_constants_that_ship(
    fit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As numbers: another BLAS may round the last digits otherwise."""
    module, file = {
        "step times": (analytic, "FILE"),
        "kernels": (kernels, "FILE"),
        "engines": (engines, "FITTED_FILE"),
    }[fit]
    shipped = getattr(module, file).read_text()
    analytic.fitted_constants(), kernels.kernel_constants(), engines.fitted()  # read before the files move
    for path in (calibration.kernels, calibration.serving):
        monkeypatch.setattr(path, "LEFT_OUT", tmp_path / "left_out.json")
    monkeypatch.setattr(module, file, tmp_path / "constants.json")
    monkeypatch.setattr("sys.argv", [fit])
    if fit == "step times":
        calibration.__main__.main(["--write"])
    else:
        (calibration.kernels if fit == "kernels" else calibration.serving).main()
    assert _numbers((tmp_path / "constants.json").read_text()) == pytest.approx(_numbers(shipped), rel=0.01)


def _numbers(text: str) -> dict[str, float]:
    """Return the numbers of a JSON document by path."""

    def walk(node: object, path: str) -> Iterator[tuple[str, float]]:
        if isinstance(node, dict | list):
            for key, each in node.items() if isinstance(node, dict) else enumerate(node):
                yield from walk(each, f"{path}.{key}")
        elif isinstance(node, int | float):
            yield path, float(node)

    return dict(walk(json.loads(text), ""))
