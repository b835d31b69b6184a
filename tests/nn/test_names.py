"""The table of families and the names of their weights."""

import json
from pathlib import Path

import pytest
from support.saved_models import FURTHER, HYBRID, TINY

from phalanx.nn.hugging_face.names import NAMINGS
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.job_file import build, make_model
from phalanx.spec.model.families import WRITERS, complete, to_hugging_face
from phalanx.spec.model.spec import ModelSpec

SIZES = {"vocab": 61, "hidden": 16, "layers": 2, "heads": 2, "ffn": 40, "max_seq": 16}


def test_every_family_that_is_written_has_names() -> None:
    assert set(WRITERS) <= set(NAMINGS)


def test_every_family_with_names_is_tested_with_its_weights() -> None:
    assert set(TINY) | set(HYBRID) | set(FURTHER) == set(NAMINGS)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_losses_of_the_router_are_read_back(family: str, tmp_path: Path) -> None:
    experts = {"count": 4, "top_k": 2, "ffn": 40, "balance_loss": 0.02, "z_loss": 0.001}
    spec = build(ModelSpec, complete({**SIZES, "family": family, "experts": experts}), "model")
    (tmp_path / "config.json").write_text(json.dumps(to_hugging_face(spec)))
    assert make_model({"config": str(tmp_path / "config.json")}, tmp_path)[0] == spec


def test_a_file_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    plan.write_model(build(ModelSpec, complete({**SIZES, "family": "llama"}), "model"), tmp_path)
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace('"llama"', '"lama"'))
    with pytest.raises(InputError, match=r"model\.family = 'lama': is not a family that Phalanx knows.*llama"):
        plan.model_of(tmp_path)
