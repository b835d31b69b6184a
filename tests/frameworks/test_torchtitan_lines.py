"""torchtitan's own script and configurations, which people name and do not paste."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.in_process_cli import error_of

from phalanx.frameworks.configuration import Configuration
from phalanx.frameworks.reading import files

_8B = "./torchtitan/models/llama3/train_configs/llama3_8b.toml"


def _read(tmp_path: Path, text: str, world: int | None = None) -> Configuration:
    (tmp_path / "run.sh").write_text(text)
    return files.read([tmp_path / "run.sh"], world=world)[0]


@pytest.mark.parametrize(
    ("text", "world", "wanted"),
    [
        (f'CONFIG_FILE="{_8B}" ./run_train.sh --training.local_batch_size=2', None, (8, 8, 1, 2)),
        (f"NGPU=4 CONFIG_FILE={_8B} uv run --no-sync ./run_train.sh", None, (4, 4, 1, 1)),
        (f"CONFIG_FILE={_8B} ./run_train.sh --parallelism.tensor_parallel_degree 4", 64, (64, 16, 4, 1)),
        (f"srun --nodes 2 --ntasks-per-node 1 bash run_train.sh --job.config_file {_8B}", None, (16, 16, 1, 1)),
        (f"torchrun --nproc_per_node 2 -m torchtitan.train --job.config_file {_8B}", None, (2, 2, 1, 1)),
    ],
)
def test_a_line_that_names_what_torchtitan_ships_is_read(
    text: str, world: int | None, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    c = _read(tmp_path, text, world)
    x = c.layout
    assert (x.world, x.dp, x.tp, x.micro_batch) == wanted
    assert (x.seq, x.recompute, c.stack, c.missing) == (8192, "selective", "torchtitan-eager", ())
    assert c.spec is not None
    assert c.spec.layers == 32
    assert any("is not here: it is taken as that of pytorch/torchtitan" in note for note in c.notes)


def test_a_file_that_is_here_comes_first(tmp_path: Path) -> None:
    (tmp_path / "llama3_8b.toml").write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 3\nseq_len = 64\n'
        "[parallelism]\ntensor_parallel_degree = 2\n"
    )
    c = _read(tmp_path, f"CONFIG_FILE={_8B} ./run_train.sh")
    assert (c.layout.micro_batch, c.layout.seq, c.layout.tp) == (3, 64, 2)


def test_another_script_of_that_name_is_asked_for(tmp_path: Path) -> None:
    for start in ("", "bash ", "bash -x "):
        (tmp_path / "run.sh").write_text(f"{start}./run_train.sh --tensor-model-parallel-size 2 --num-layers 4\n")
        said = error_of(tmp_path, "predict", "run.sh", "--cluster", "dgx-h100", "--model", "llama3-8b", "--gpus", "8")
        assert "./run_train.sh: which it runs, is not here: the layout may be in it; give it too" in said
