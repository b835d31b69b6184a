"""What the pages say is refused is refused, in one line that names the field, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.in_process_cli import phalanx

EXAMPLES = Path(__file__).parents[2] / "examples"
JOB = f"plan {EXAMPLES / 'llama3_8b.toml'}"

LLAMA = "--model llama-7b --gpus 8 --batch 8 --seq 2048"


@pytest.mark.parametrize(
    ("page", "words", "named"),
    [
        ("README", f"{JOB} --strategy dp=32,pp=2,compression=int8", "strategy.compression"),
        ("README", f"{JOB} --strategy dp=32,tp=2,compression=int8", "strategy.compression"),
        (
            "README",
            f"{JOB} --set model.preset=mixtral-8x7b --strategy dp=64,ep=8,compression=int8",
            "strategy.compression",
        ),
        ("pipeline", f"{JOB} --strategy dp=32,pp=2,zero=3,reshard=action", "strategy.reshard"),
        ("jobs", f"{JOB} --strategy dp=64,zero=3,prefetch=2", "strategy.prefetch"),
        ("data_parallel", f"{JOB} --strategy dp=64,zero=3,compression=topk:0.01", "strategy.compression"),
        ("models", "verify --model gpt-oss-20b --cluster dgx-h100 --gpus 8 --batch 8 --seq 2048", "model.sinks"),
        ("models", f"{JOB} --set cluster.preset=dgx-1v", "job.precision.compute"),
        ("models", f"predict {LLAMA} --cluster dgx-1v --strategy zero=3 --precision bf16", "--precision"),
        ("models", f"plan {LLAMA} --cluster dgx-1v --precision bf16", "--precision"),
        ("models", f"plan {LLAMA} --cluster dgx-a100 --precision fp8", "use bf16"),
        ("models", f"predict {LLAMA} --cluster dgx-h100 --strategy zero=3 --precision nvfp4", "use bf16 or fp8"),
        ("jobs", f"{JOB} --set train.lr_scaling=linear", "train.lr_scaling"),
    ],
)
def test_what_pages_say_is_refused_is(tmp_path: Path, page: str, words: str, named: str) -> None:
    code, out, err = phalanx(tmp_path, *words.split())
    assert (code, out) == (2, ""), f"{page}: {out[:200]}{err}"
    (line,) = [line for line in err.splitlines() if line.startswith("error")]
    assert named in line, line
