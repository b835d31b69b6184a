"""`memory`, `comm` and `serve roofline`: the textbook's figures, to the digit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.in_process_cli import error_of, json_of, phalanx

from phalanx.planning.lookup import model_named
from phalanx.serving.tables import BATCHES, _span, cache


def _rows(here: Path, *words: str) -> list[list[dict[str, Any]]]:
    return [sheet["rows"] for sheet in json_of(here, "serve", *words, "--json")["tables"]]


def test_the_cache_by_type_with_and_without_shared_heads(tmp_path: Path) -> None:
    def per_token(model: str) -> dict[tuple[str, str], float]:
        rows = _rows(tmp_path, "memory", "--model", model)[0]
        return {(row["cache"], row["type"]): row["per_token_bytes"] for row in rows}

    assert per_token("gpt3-175b")["unchanged", "bf16"] == 4_718_592
    llama = per_token("llama3-70b")
    assert llama["unchanged", "bf16"] == 327_680
    assert llama["without grouped queries", "bf16"] == 8 * 327_680 == 2_621_440
    assert llama["unchanged", "fp8"] == 163_840
    deepseek = per_token("deepseek-v3")
    assert deepseek["latents", "bf16"] == 70_272
    assert deepseek["as keys and values of all heads", "bf16"] == 2 * 128 * (192 + 128) * 61


def test_a_duplicated_head_takes_room_again(tmp_path: Path) -> None:
    rows = {row["layout"]: row for row in _rows(tmp_path, "memory", "--model", "llama3-70b", "--seq", "8192")[1]}
    assert rows["tp=8,pp=1"]["cache_of_a_token_bytes"] == 40_960
    assert rows["tp=16,pp=1"]["cache_of_a_token_bytes"] == 40_960
    assert rows["tp=1,pp=16"]["cache_of_a_token_bytes"] == 20_480


def test_the_room_of_the_cache_is_the_share_that_is_named(tmp_path: Path) -> None:
    """vLLM at --gpu-memory-utilization 0.98 has 1,381 blocks of 16 tokens beside 67.7 GiB of 8-bit weights of
    Llama-3.1-70B on one H100 (vllm-project/vllm#12569)."""
    words = ("memory", "--model", "llama3.1-70b", "--gpus", "1", "--weights", "fp8", "--seq", "2048")
    shared = json_of(tmp_path, "serve", *words, "--memory", "0.98", "--json")["tables"][1]
    assert shared["rows"][0]["tokens_that_fit"] == pytest.approx(1381 * 16, rel=0.06)
    assert "74.3 GiB (98% of 79.6 GiB, less 3.8 GiB of workspace): --memory sets the share" in shared["note"]
    assert _rows(tmp_path, *words)[1][0]["tokens_that_fit"] < 6000
    said = error_of(tmp_path, "serve", *words, "--memory", "98")
    assert "--memory = 98.0: must be a share of the GPU's memory, from 0.05 to 1" in said


def test_decoding_is_bound_by_memory_until_the_ridge(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "roofline", "--model", "llama3-70b")[0]
    bound = {row["batch"]: row["weights_bound_by"] for row in rows}
    assert bound[256] == "memory"  # the H100's ridge is 989.4 TFLOP/s over 3.35 TB/s: 295
    assert bound[512] == "compute"
    assert all(row["attention"] == 8 for row in rows)  # 64 query heads on 8 of keys, 2 bytes an element
    shares = [row["cache_of_the_step"] for row in rows]
    assert shares == sorted(shares)
    experts = _rows(tmp_path, "roofline", "--model", "deepseek-v3", "--weights", "fp8")[0]
    assert all(row["experts_bound_by"] == "memory" for row in experts)


def test_tensor_parallelism_pays_in_a_node_and_a_pipeline_never_for_one_request(tmp_path: Path) -> None:
    sent, pays, one = _rows(tmp_path, "comm", "--model", "llama3-70b")
    for row in sent:
        assert row["payload_bytes"] == row["batch"] * 8192 * 2
        assert row["times"] == 160
    assert [row["links"] for row in pays] == ["nvlink", "nvlink", "nvlink", "infiniband"]
    assert all(row["speed_up_at_1"] > 1.4 for row in pays[:3])
    for row in pays:  # what pays at 256 comes sooner there, and halving the work more than doubles nothing
        sooner = row["a_token_comes_sooner_at_batches"] == "1 and more"
        assert (1 < row["at_256"] <= 2) == (1 < row["speed_up_at_1"] <= 2) == sooner
    assert one[-1]["a_token_pp_s"] / one[0]["a_token_pp_s"] == pytest.approx(1.0, abs=0.05)
    assert all(row["a_token_pp_s"] >= one[0]["a_token_pp_s"] for row in one)
    assert one[3]["a_token_tp_s"] < one[0]["a_token_tp_s"] / 3
    # One doubling after the other is as fast as all of them.
    assert math.prod(row["speed_up_at_1"] for row in pays) == pytest.approx(one[-1]["tp_faster_by"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "memory", "--model", "gpt2", "--batch", "4"), "--batch: no such option"),
        (("serve", "memory", "--model", "gpt2", "--kv", "fp6"), "--kv"),
        (("serve", "comm"), "--model: is missing"),
        (("serve", "roofline", "--model", "gpt2", "--seq", "9999"), "longer than the model's context, 1,024"),
        (("serve", "roofline", "--model", "gpt2", "--seq", "0"), "--seq = 0: must be at least 1"),
        (("serve", "roofline", "--model", "gpt2", "--weights", "nvfp4"), "has no tensor cores for it"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    err = error_of(tmp_path, *words)
    assert message in err
    assert err.count("\n") == 1


def test_the_ridge_of_decoding_is_the_datasheets(tmp_path: Path) -> None:
    note = json.loads(phalanx(tmp_path, "serve roofline --model llama3-70b --json")[1])["tables"][0]["note"]
    assert "the chip's ridge is 295 FLOP per byte" in note
    assert "bound by memory at 295 tokens a step" in note
    assert "Attention is bound by memory at any batch: 8 of 295" in note


def test_a_cache_of_several_kinds_lists_each() -> None:
    """Qwen3.5-27B: 16 layers cache, 48 keep a state of 48 x 128 x 128 in 32 bits; Gemma 4's windows end at 1,024."""
    rows = cache(model_named("Qwen/Qwen3.5-27B")[0], 1000).rows
    states = 48 * (48 * 128 * 128 * 4 + 3 * (2 * 16 + 48) * 128 * 2)
    assert rows[0][1:5] == ("2 x 4 heads x 256", "bf16", 65_536, 65_536_000 + states)
    gemma = model_named("google/gemma-4-31B")[0]
    short, long = (cache(gemma, seq).rows[0] for seq in (1024, 2048))
    assert short[1] == "50 of 2 x 16 heads x 256, 10 of 2 x 4 heads x 512"
    assert long[4] - short[4] == 1024 * 10 * 2 * 4 * 512 * 2


@pytest.mark.parametrize(
    ("model", "gpus", "degrees"),
    [("llama3-70b", 16, (2, 4, 8, 16)), ("llama3-70b", 4, (2, 4)), ("gpt2", 9, (2, 4))],
)
def test_heads_are_split_over_as_many_gpus_as_there_are_and_evenly(
    tmp_path: Path, model: str, gpus: int, degrees: tuple[int, ...]
) -> None:
    sent, *_ = _rows(tmp_path, "comm", "--model", model, "--gpus", str(gpus))
    assert [row["tp"] for row in sent] == [tp for tp in degrees for _ in range(4)]


def test_one_cached_token_is_a_context(tmp_path: Path) -> None:
    one, two = (_rows(tmp_path, "memory", "--model", "gpt2", "--seq", seq)[0][0] for seq in ("1", "2"))
    assert one["per_token_bytes"] == two["per_token_bytes"] > 0


def test_batches_are_said_by_their_ends() -> None:
    assert _span([]) == "none"
    assert _span(list(BATCHES[1:4])) == f"{BATCHES[1]} to {BATCHES[3]}"
    assert _span(list(BATCHES[3:])) == f"{BATCHES[3]} and more"
