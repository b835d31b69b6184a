"""phalanx compare: each side is priced as predict prices it; what differs is named, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import json_of, text_of

from phalanx.answers.compare import differing, sides
from phalanx.answers.question.query import Query
from phalanx.answers.question.resolution import read
from phalanx.spec.errors import InputError

_ASKED = Query(None, "llama3-8b", "dgx-h100", 64, 128, 8192)


def test_sides_have_the_price_of_predict_and_their_own_flags() -> None:
    a, b = sides(["tp=2,sp=1,zero=1", "tp=4,sp=1,zero=1"], _ASKED)
    asked = Query(None, "llama3-8b", "dgx-h100", 64, 128, 8192, "tp=4,sp=1,zero=1")
    assert b.step_time_s == read(asked).subject.priced.seconds
    assert sum(a.terms_s.values()) == pytest.approx(a.step_time_s)
    assert differing([a.settings, b.settings]) == [("--tensor-model-parallel-size", ("2", "4"))]


def test_what_does_not_fit_is_said_first(tmp_path: Path) -> None:
    asked = "--model llama3-8b --cluster dgx-h100 --gpus 8 --batch 64 --seq 8192"
    text = text_of(tmp_path, f"compare zero=3,recompute=full zero=1 {asked}")
    assert "\ndoes not fit in memory: B: " in text
    assert "does not fit" not in text_of(tmp_path, f"compare zero=3,recompute=full tp=8,sp=1,recompute=full {asked}")


def test_one_thing_is_not_compared() -> None:
    with pytest.raises(InputError, match="two or three"):
        sides(["tp=2"], _ASKED)


T3 = """torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py --num-layers 80 --hidden-size 8192
 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192
 --max-position-embeddings 8192 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
 --vocab-size 128256 --untie-embeddings-and-output-weights --tensor-model-parallel-size 8
 --pipeline-model-parallel-size 4 --sequence-parallel --micro-batch-size 1 --global-batch-size 512 --bf16
 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1""".replace("\n", " ")


def test_a_plan_has_the_layout_that_its_export_writes(tmp_path: Path) -> None:
    """Blocks that a plan was priced with are those of its layout, whichever command writes it."""
    (tmp_path / "t3.sh").write_text(T3)
    _ = text_of(tmp_path, "plan --from t3.sh --cluster dgx-h100 --out better.json")
    _ = text_of(tmp_path, "export better.json --to megatron --out better")
    differ = json_of(tmp_path, "compare t3.sh better.json --json")["settings_that_differ"]
    key = "--pipeline-model-parallel-layout"
    assert f"{key} '{differ[key][1]}'" in (tmp_path / "better/train.sh").read_text()
    assert not any("('" in v or v == "True" for values in differ.values() for v in values), differ


def test_where_one_side_cannot_be_written_the_strategies_are_compared(tmp_path: Path) -> None:
    (tmp_path / "t3.sh").write_text(T3)
    differ = json_of(tmp_path, "compare t3.sh dp=128,zero=3 --cluster dgx-h100 --json")["settings_that_differ"]
    assert differ["zero"] == ["0", "3"]
    assert not any(name.startswith("--") for name in differ)


def test_runs_are_compared_as_they_were_measured(tmp_path: Path) -> None:
    asked = "--model gpt2-xl --cluster dgx-h100 --gpus 8 --batch 64 --seq 1024 --json"
    for name, level, measured in (("a", 0, 12.5), ("b", 1, 25.0)):
        (tmp_path / name).mkdir()
        _ = text_of(tmp_path, f"plan {asked} --strategy dp=8,zero={level} --out {name}/plan.json")
        recorded = {"step_time_s": measured, "memory_bytes": 2**30}
        (tmp_path / name / "recorded.json").write_text(json.dumps(recorded))
    text = text_of(tmp_path, "compare a b")
    assert "B, measured: a step of 25.00 s, A's takes 12.50 s: B takes 100.0% more" in text
    assert f"{64 * 1024 / 25:,.0f}" in text
    assert "tokens/s, predicted" in text
