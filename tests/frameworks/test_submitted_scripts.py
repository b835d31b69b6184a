"""Scripts that a script hands to a batch system: followed where they lie, under what is asked for on the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.frameworks.reading import files
from phalanx.spec.errors import InputError

_JOB = (
    "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n"
    "srun python pretrain_gpt.py --tensor-model-parallel-size ${TP:-2} --micro-batch-size ${1:-1} --num-layers 8\n"
)


@pytest.mark.parametrize(
    ("command", "world", "tp", "micro"),
    [
        ("sbatch job.slurm", 32, 2, 1),
        ("sbatch --nodes=2 --parsable -J x job.slurm 3", 16, 2, 3),
        ("A=$(date)\nsbatch -N8 --export=ALL,TP=4 --dependency=afterok:$ID job.slurm", 64, 4, 1),
        ("TP=8 sbatch --exclusive job.slurm", 32, 8, 1),
        ('sbatch -N 2 --ntasks-per-node 4 --wrap "srun bash job.slurm 5"', 8, 2, 5),
        ("qsub -V -l select=2:ngpus=4:mpiprocs=4 pbs.sh", 8, 4, 1),
    ],
)
def test_a_script_that_is_submitted_is_followed(
    tmp_path: Path, command: str, world: int, tp: int, micro: int
) -> None:
    (tmp_path / "job.slurm").write_text(_JOB)
    python = _JOB.splitlines()[-1].removeprefix("srun python ")
    (tmp_path / "pbs.sh").write_text(f"export TP=4\ntorchrun --nnodes $PBS_NUM_NODES --nproc_per_node 4 {python}")
    (tmp_path / "run.sh").write_text(command)
    c = files.read([tmp_path / "run.sh"])[0]
    assert (c.layout.world, c.layout.tp, c.layout.micro_batch) == (world, tp, micro)
    assert any(note.endswith("which it names, is read too") for note in c.companions)


def test_a_script_that_is_submitted_and_not_here_is_asked_for(tmp_path: Path) -> None:
    for line in ("sbatch -N 2 gone.sbatch", "srun -N 2 gone.slurm"):
        (tmp_path / "run.sh").write_text(line)
        with pytest.raises(InputError, match="starts no training that is known") as caught:
            files.read([tmp_path / "run.sh"])
        assert "is not here: give it too" in caught.value.remedy


@pytest.mark.parametrize("folder", ["$PWD", "${PWD}", "$(pwd)", "$ROOT"])
def test_a_file_under_the_working_directory_is_found_from_the_script_s_parents(tmp_path: Path, folder: str) -> None:
    for name in ("scripts", "configs"):
        (tmp_path / name).mkdir()
    (tmp_path / "configs" / "f.json").write_text('{"zero_optimization": {"stage": 2}}')
    line = "torchrun --nproc_per_node 8 run_clm.py --per_device_train_batch_size 2 --bf16 --deepspeed"
    (tmp_path / "scripts" / "x.sh").write_text(f"{line} {folder}/configs/f.json")
    (tmp_path / "up.sh").write_text("./scripts/x.sh\n")
    for script in ("up.sh", "scripts/x.sh"):
        c = files.read([tmp_path / script])[0]
        assert (c.layout.zero, c.missing) == (2, ())


@pytest.mark.parametrize("form", ["```bash\n{}\n```\n", "> {}\n", ">>> {}\n", "\ufeff{}\r\n", "(base) me@h:~$ {}\n"])
def test_a_line_is_read_as_people_paste_it(tmp_path: Path, form: str) -> None:
    line = "torchrun --nproc_per_node 8 run_clm.py --per_device_train_batch_size 2 --bf16"
    (tmp_path / "a.sh").write_text(form.format(line), encoding="utf-8", newline="")
    layout = files.read([tmp_path / "a.sh"])[0].layout
    assert (layout.world, layout.micro_batch, layout.precision) == (8, 2, "bf16")
