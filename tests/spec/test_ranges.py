"""Every number and text of the specifications has a legal range, and what is out of it is refused by name."""

from __future__ import annotations

import pickle
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from support.fitted_cluster import laptop

from phalanx.spec import documents, ranges
from phalanx.spec.cluster import presets as clusters
from phalanx.spec.cluster.collective_choice import Choice
from phalanx.spec.cluster.spec import ClusterSpec, CollectiveFit, Device, Figure, KernelRates, Rates, Tier
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file
from phalanx.spec.files.job_file import ClusterChoice
from phalanx.spec.job import Job, Train
from phalanx.spec.model.mechanisms import Experts, Latent, RopeScaling
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.spec import Strategy


def numbers_of(kind: Any) -> list[str]:
    """Fields of a specification that hold numbers or texts."""
    hints = get_type_hints(kind)
    return [f.name for f in fields(kind) if {int, float, str} & {hints[f.name], *flat(hints[f.name])}]


def flat(hint: Any) -> list[Any]:
    return [part for inner in get_args(hint) for part in (inner, *flat(inner))]


@pytest.mark.parametrize(
    "kind",
    [
        *(ModelSpec, Experts, Latent, RopeScaling, Job, Optimizer, Train, Strategy),
        *(ClusterSpec, Device, Tier, Rates, KernelRates, CollectiveFit, Figure, Choice, ClusterChoice),
    ],
)
def test_every_number_and_text_is_declared_with_its_range(kind: Any) -> None:
    declared = {name for name, _ in ranges._rules(kind)}
    assert [name for name in numbers_of(kind) if name not in declared] == []


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"memory_bandwidth_bytes_per_s": -1}, "cluster.device.memory_bandwidth_bytes_per_s = -1"),
        ({"dense_flops_per_s": {"bfloat16": 0.0}}, "cluster.device.dense_flops_per_s.bfloat16 = 0"),
        ({"dense_flops_per_s": {"bfloat16": float("nan")}}, "cluster.device.dense_flops_per_s.bfloat16 = nan"),
        ({"usable_bytes": 10**400}, "cluster.device.usable_bytes = 1000"),
    ],
)
def test_numbers_out_of_their_ranges_are_refused_by_name(table: dict[str, Any], name: str) -> None:
    cluster = asdict(clusters.preset("dgx-h100", 1))
    with pytest.raises(InputError) as error:
        job_file.build(ClusterSpec, {**cluster, "device": {**cluster["device"], **table}}, "cluster")
    assert str(error.value).startswith(name)


def test_so_are_rates_of_kernels() -> None:
    rates = laptop(1).kernels[0]
    for name in (f.name for f in fields(rates) if isinstance(getattr(rates, f.name), int | float)):
        wrong: dict[str, Any] = {name: -1}
        with pytest.raises(InputError, match=rf"^cluster\.kernels\.float32\.{name} = -1"):
            replace(rates, **wrong)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"a = " + b"[" * 3000,
        b"a = 1" + b"0" * 5000,
        b"\xff",
        b'{"a": 1' + b"0" * 5000 + b"}",
        b'{"a":' * 50_000,
    ],
)
def test_damaged_documents_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for read in (documents.read_toml, documents.read_json):
        with pytest.raises(InputError, match=r"^plan = .*: (is|cannot|holds)") as error:
            read(path, "plan")
        assert "\n" not in str(error.value)


def test_documents_are_of_bounded_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(InputError, match="is larger than 1 MiB"):
        documents.read_text(path, "plan", 2**20)


def test_an_error_about_input_is_the_same_in_another_process() -> None:
    error = InputError("gpus", 7, "does not divide", "use 8")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.value, again.remedy) == (str(error), "gpus", 7, "use 8")
