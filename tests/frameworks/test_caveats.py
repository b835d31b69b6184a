"""What a price does not know of a file stands first in every command and in --json, and fails with --strict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.in_process_cli import error_of, json_of, phalanx, text_of

from phalanx.answers.question.read import origins, read
from phalanx.frameworks.caveats import Caveat, caveats_of
from phalanx.frameworks.reading import files

LLAMA = (
    "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 1 --global-batch-size 64 "
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --vocab-size 128256 --seq-length 4096 --max-position-embeddings 4096 "
    "--use-distributed-optimizer --tensor-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0 "
)
ON = ("--cluster", "dgx-h100")


def written(folder: Path, flags: str) -> Path:
    """Write a script in a folder and return its path."""
    file = folder / "run.sh"
    file.write_text(LLAMA + flags + "\n")
    return file


COMMANDS = pytest.mark.parametrize(
    "command",
    [
        ("read", "run.sh"),
        ("predict", "run.sh", *ON),
        ("lint", "run.sh", *ON),
        ("lint", "run.sh"),
        ("plan", *ON, "--from", "run.sh"),
    ],
)


@COMMANDS
def test_what_is_not_modelled_and_what_is_not_judged_stand_in_the_first_lines(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    written(tmp_path, "--moe-paged-stash --router-of-tomorrow 3")
    first, second, *_ = phalanx(tmp_path, *command)[1].splitlines()
    assert first.startswith("not modelled: moe-paged-stash (keeps activations of experts in pages")
    assert "): memory and time may differ" in first
    assert second.startswith("not judged: router-of-tomorrow is a key of no release that Phalanx knows")


@COMMANDS
def test_chunks_that_the_stack_cannot_have_are_said_first(command: tuple[str, ...], tmp_path: Path) -> None:
    """Megatron-LM arguments.py:963: blocks have to divide by the chunks where no list says otherwise."""
    written(tmp_path, "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 4")
    first = phalanx(tmp_path, *command)[1]
    assert not first.startswith("missing:")
    written(tmp_path, "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3")
    first, *_ = phalanx(tmp_path, *command)[1].splitlines()
    assert first.startswith("missing: a list of the blocks of 12 pipeline chunks, over which 32 do not divide:")


@COMMANDS
def test_strict_fails_on_a_caveat_alone(command: tuple[str, ...], tmp_path: Path) -> None:
    written(tmp_path, "--log-interval 10")
    assert phalanx(tmp_path, *command, "--strict")[0] == phalanx(tmp_path, *command)[0]
    written(tmp_path, "--moe-paged-stash")
    code, out, _ = phalanx(tmp_path, *command, "--json", "--strict")
    found = json.loads(out)
    caveats = found.get("caveats") or found["question"]["caveats"]
    assert (code, [c["keys"] for c in caveats]) == (1, [["moe-paged-stash"]])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--tensor-parallel-num-weight-shards 8", "shards every weight over further ranks"),
        ("--hybrid-context-parallel", "divides sequences over ranks by their lengths"),
    ],
)
def test_a_layout_without_a_price_is_refused(tmp_path: Path, flags: str, reason: str) -> None:
    written(tmp_path, flags)
    error = error_of(tmp_path, "predict", "run.sh", *ON)
    assert reason in error
    assert "has no price" in error
    assert text_of(tmp_path, "read", "run.sh").startswith(
        f"not modelled: {flags.split()[0].removeprefix('--')} ({reason})"
    )


@pytest.mark.parametrize(
    "flags",
    [
        "--dsa-indexer-loss-coeff 0.1",
        "--enable-mhc-connections",
        "--gdp-num-householder 2",
    ],
)
def test_another_network_is_said_to_be_one(tmp_path: Path, flags: str) -> None:
    written(tmp_path, flags)
    first = text_of(tmp_path, "predict", "run.sh", *ON).splitlines()[0]
    assert first.startswith(f"not modelled: {flags.split()[0].removeprefix('--')} (")
    assert first.endswith("a price would be of another program")


def test_a_key_at_its_default_is_no_caveat(tmp_path: Path) -> None:
    assert read([written(tmp_path, "--cuda-graph-impl none --moe-permute-fusion")]).caveats == ()
    assert read([written(tmp_path, "--cuda-graph-use-single-mempool false")]).caveats[0].changes == ("time",)


def test_a_file_of_which_no_key_is_understood_is_refused_with_what_it_seems_to_be(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[job]\ndescription = "x"\n[metrics]\nlog_freq = 1\n')
    error = error_of(tmp_path, "read", str(file), "--kind", "torchtitan")
    assert (
        "seems to be of torchtitan, and none of its 2 keys is understood (job.description, metrics.log_freq)" in error
    )


def test_where_a_value_is_from_is_a_key_a_formula_or_a_default(tmp_path: Path) -> None:
    file = written(tmp_path, "")
    found = json_of(tmp_path, "read", "run.sh", "--json")["from"]
    assert found["tp"] == "tensor-model-parallel-size"
    assert found["dp"] == "derived: world / (tp x pp x cp)"
    assert found["accumulation"] == "derived: global_batch / (micro_batch x dp)"
    assert found["cp"] == "default of Megatron-Core 0.19"
    assert "what follows" not in text_of(tmp_path, "read", "run.sh")
    assert set(origins(read([file]).configuration).values()) >= {"default of Megatron-Core 0.19"}


def test_keys_that_do_the_same_are_one_line_and_another_layout_is_the_first(tmp_path: Path) -> None:
    flags = "--no-rope-fusion --moe-shared-expert-overlap --no-bias-swiglu-fusion --hybrid-context-parallel"
    kinds = [(c.keys, c.changes) for c in caveats_of(read([written(tmp_path, flags)]).configuration)]
    assert kinds == [
        (("hybrid-context-parallel",), ("layout",)),
        (("no-rope-fusion", "no-bias-swiglu-fusion"), ("time", "memory")),
        (("moe-shared-expert-overlap",), ("time",)),
    ]
    assert Caveat("assumed", (), "zero=0").line == "assumed: zero=0"


def test_a_part_of_the_price_bounds_how_far_off_it_is(tmp_path: Path) -> None:
    written(tmp_path, "--fine-grained-activation-offloading")
    found = json_of(tmp_path, "predict", "run.sh", *ON, "--json")
    least = found["memory_terms"]["activations"] / 2**30
    (caveat,) = found["question"]["caveats"]
    assert caveat["bound"] == f"memory by at most {least:.1f} GiB less"
    first = text_of(tmp_path, "predict", "run.sh", *ON).splitlines()[0]
    assert first.endswith(f"memory and time may differ, memory by at most {least:.1f} GiB less")
    assert json_of(tmp_path, "read", "run.sh", "--json")["caveats"][0]["bound"] == ""


def test_a_file_that_is_named_and_missing_is_asked_for_before_anything_is_priced(tmp_path: Path) -> None:
    line = "deepspeed --num_gpus 8 train.py --model_name_or_path m --per_device_train_batch_size 1 --bf16 True"
    (tmp_path / "run.sh").write_text(f"{line} --deepspeed ds_config.json --max_seq_length 512\n")
    assert "missing: ds_config.json, its deepspeed, is not here: give it too" in text_of(tmp_path, "read", "run.sh")
    error = error_of(tmp_path, "predict", "run.sh", *ON, "--model", "llama2-7b")
    assert "run.sh: ds_config.json: its deepspeed, is not here: the layout may be in it" in error
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 3}}')
    assert "zero=3" in text_of(tmp_path, "predict", "run.sh", *ON, "--model", "llama2-7b")


def test_pages_and_csv_say_first_what_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "torchrun --nproc_per_node 8 train.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 "
        "--max_seq_length 2048 --bf16 --of_tomorrow 3\n"
    )
    cluster = ("--cluster", "dgx-h100", "--save")
    for command in (("predict", *cluster), ("lint", *cluster), ("read", "--save")):
        phalanx(tmp_path, command[0], "run.sh", *command[1:], "out.csv")
        head, line, *_ = (tmp_path / "out.csv").read_text().splitlines()
        assert (head, "of_tomorrow" in line) == ("caveat", True), command
        phalanx(tmp_path, command[0], "run.sh", *command[1:], "out.html")
        page = (tmp_path / "out.html").read_text()
        first = page[page.index("<main") :].partition("</section>")[0]
        assert "What this does not know" in first
        assert "of_tomorrow" in first, command


@pytest.mark.parametrize(("model", "said"), [("deepseek-ai/DeepSeek-V4-Flash", True), ("qwen3-next-80b-a3b", False)])
def test_mechanisms_whose_kernels_nobody_timed_are_said(model: str, said: bool, tmp_path: Path) -> None:
    on = ["--cluster", "dgx-h100", "--gpus", "256", "--batch", "256", "--seq", "4096", "--strategy", "ep=8,zero=1"]
    code, out, err = phalanx(tmp_path, "predict", "--model", model, *on)
    assert code == 0
    assert ("no kernel of theirs was timed" in " ".join((out + err).split())) == said


def test_what_stage_3_keeps_gathered_is_read_where_it_stands() -> None:
    names = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
    zero = {f"stage3_{name}": 1_234_567 for name in names}
    usual = dict(zip(zero, (50_000_000, "auto", 1e9, 1e9), strict=True))
    config = {"train_micro_batch_size_per_gpu": 2, "scheduler": {"type": "WarmupLR"}}
    for table, changed in ((zero, True), (usual, False)):
        c = files.READERS["deepspeed"](config | {"zero_optimization": {"stage": 3, **table}}, 8)
        said = [(caveat.keys, caveat.changes, caveat.reason) for caveat in caveats_of(c)]
        keys = tuple(f"zero_optimization.{name}" for name in zero)
        what = "(keeps more or fewer parameters gathered under stage 3)"
        assert said == ([(keys, ("memory", "time"), what)] if changed else [])
