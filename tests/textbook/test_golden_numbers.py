"""Numbers of the textbook, from the functions and commands that print them. G1, C5 ... are its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.in_process_cli import json_of, phalanx

from phalanx.cost.memory.state import State
from phalanx.cost.pipeline_time import Costs, price
from phalanx.cost.step.expand import expand
from phalanx.cost.step.terms import terms
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.tables import textbook
from phalanx.planning.tables.collectives import compare
from phalanx.schedule.collectives.ir import Schedule
from phalanx.schedule.collectives.registry import build as collective
from phalanx.schedule.gradients.buckets import buckets
from phalanx.schedule.gradients.compression import bucket_collectives
from phalanx.schedule.layout import Layout
from phalanx.schedule.pipeline.schedules import build
from phalanx.spec.cluster.presets import preset
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job
from phalanx.spec.strategy.compressors import PLACE_BYTES, factors, parse
from phalanx.spec.strategy.spec import Strategy

_GPT3 = make_model({"preset": "gpt3-175b"}, Path())[0]


# Memory.


@pytest.mark.parametrize(
    ("billions", "gb", "cards"), [(7, 112, 2), (13, 208, 3), (65, 1040, 13), (175, 2800, 35), (540, 8640, 108)]
)
def test_g1_state_and_cards(billions, gb, cards):
    state = textbook.zero_bytes(billions * 1e9, 0, 1)
    assert state == pytest.approx(gb * 1e9)
    assert textbook.cards(state, 80e9) == cards
    assert f"state, {gb} GB: {cards}" in textbook.state(billions * 1e9, (1,), 16, 80e9).note


@pytest.mark.parametrize(("billions", "gb", "cards"), [(1.5, 3, 1), (7, 14, 1), (70, 140, 2), (175, 350, 5)])
def test_g2_weights_and_cards(billions, gb, cards):
    assert f"weights of 2 bytes, {gb} GB: {cards};" in textbook.state(billions * 1e9, (1,), 16, 80e9).note


@pytest.mark.parametrize(
    ("params", "ranks", "gb"),
    [(10e9, 8, (160, 55, 37.5, 20)), (7e9, 8, (112, 38.5, 26.25, 14)), (70e9, 1, (1120,) * 4)],
    ids=["C1", "C2", "C11"],
)
def test_c1_c2_c11_state_by_zero_stage(params, ranks, gb):
    assert textbook.state(params, (ranks,), 16, 80e9).rows[0][1:5] == pytest.approx(gb)


def test_c11_optimizer_alone_is_12_bytes_and_70b_take_14_cards():
    assert textbook.zero_bytes(70e9, 0, 1) == pytest.approx(1120e9)
    assert textbook.zero_bytes(70e9, 0, 1) - 4 * 70e9 == pytest.approx(840e9)
    assert textbook.cards(textbook.zero_bytes(70e9, 0, 1), 80e9) == 14


def test_c12_plain_ddp_ends_at_5b_on_80_gb():
    for card, most in ((40e9, 2.5e9), (80e9, 5e9)):
        assert textbook.state(most, (1,), 16, card).rows[0][-1] == "ZeRO-0"
        assert textbook.state(1.02 * most, (1,), 16, card).rows[0][-1] == "none"


def test_m8_zero_3_gathers_units_and_zero_1_none():
    """Buffers are those of units, whatever the ranks, so that a higher level takes more memory on few of them."""
    model = make_model({"preset": "llama3-8b"}, Path())[0]

    def state(zero: int, dp: int) -> State:
        return expand(Layout(model, Job(dp, 1024), Strategy(dp=dp, zero=zero)).rank_view(0)).state

    whole, few, many = state(1, 2), state(3, 2), state(3, 64)
    assert (whole.buffers, few.parameters) == (0, 0)
    assert 0 < many.buffers < whole.parameters / 2
    assert many.buffers == pytest.approx(few.buffers, rel=0.05)
    assert many.total - many.buffers == pytest.approx((few.total - few.buffers) / 32, rel=0.01)


def test_g3_activations_of_gpt3(tmp_path):
    found = json.loads(phalanx(tmp_path, "tables memory --model gpt3-175b --json")[1])["tables"][1]["rows"][0]
    assert found["none_GB"] == pytest.approx(275.41, abs=0.005)
    assert found["none_GB"] / 96 == pytest.approx(2.869, abs=5e-4)
    # Of tp 1, 8 and 8 with sp: without scores; all; and what full recomputation keeps.
    rows = json.loads(phalanx(tmp_path, "tables memory --model gpt3-175b --json")[1])["tables"][1]["rows"]
    shown = {(r["tp"], r["sp"]): r for r in rows}
    assert shown[1, "no"]["selective_GB"] == pytest.approx(82.14, abs=0.005)
    assert shown[8, "no"]["none_GB"] == pytest.approx(55.57, abs=0.005)
    assert shown[8, "yes"]["none_GB"] == pytest.approx(34.43, abs=0.005)
    assert shown[1, "no"]["full_GB"] == pytest.approx(4.83, abs=0.005)


@pytest.mark.parametrize(
    ("model", "parameters", "active"),
    [("gpt3-175b", 174_604_259_328, 174_604_259_328), ("mixtral-8x7b", 46_702_792_704, 12_879_925_248)],
    ids=["G28", "G23"],
)
def test_g23_g28_parameters(tmp_path, model, parameters, active):
    found = json.loads(phalanx(tmp_path, "tables models", model, "--json")[1])
    assert (found["parameters"], found["active"]) == (parameters, active)


# Data parallelism.


@pytest.mark.parametrize(
    ("params", "ranks", "rate", "gb", "seconds"),
    [
        (70e9, 8, 600e9, 245, 0.408),  # G4
        (70e9, 8, 50e9, 245, 4.9),
        (70e9, 8, 300e9, 245, 0.817),  # C5, in one direction
        (70e9, 8, 25e9, 245, 9.8),
        (8e6, 8, 600e9, 0.028, 0.0467e-3),
        (8e6, 8, 300e9, 0.028, 0.0933e-3),
        (0.5e9, 4, 25e9, 1.5, 0.06),  # G5
        (0.5e9, 1024, 25e9, 1.998, 0.0799),
        (25e6, 1024, 200e9, 0.1, 0.5e-3),  # G13
        (340e6, 1024, 200e9, 1.36, 6.8e-3),
        (1.5e9, 1024, 200e9, 6, 30e-3),
        (7e9, 1024, 200e9, 28, 140e-3),
        (70e9, 1024, 200e9, 280, 1.4),
        (0.5e9, 2, 450e9, 1, 2.22e-3),  # G14
        (5e9, 8, 50e9, 17.5, 0.35),  # C4
    ],
)
def test_g4_g5_g13_g14_c4_c5_gradients(params, ranks, rate, gb, seconds):
    (row,) = textbook.gradient_traffic(params, (ranks,), rate).rows
    assert row[2:4] == pytest.approx((gb, seconds), rel=2e-3)


def test_g6_c8_c9_of_a_cluster_of_1024():
    (row,) = textbook.gradient_traffic(175e9, (1024,), 25e9).rows
    assert row[4] == pytest.approx(716.1, abs=0.05)
    assert row[4] * 1024 / 1023 == pytest.approx(716.8, abs=0.05)  # the limit: 2 x gradients x ranks
    assert (row[3], row[6]) == pytest.approx((28, 42), rel=2e-3)
    assert textbook.gradient_traffic(175e9 / 64, (8,), 25e9).rows[0][1] == pytest.approx(5.47, abs=0.005)


def test_g20_c4_naive_and_ring():
    found = {row.algorithm: row.sent_bytes for row in compare("all_reduce", 10e9, 8, preset("dgx-h100", 1)).rows}
    assert found["naive"] == pytest.approx(70e9)
    assert found["ring"] == pytest.approx(17.5e9)
    assert found["naive"] / found["ring"] == pytest.approx(4.0)


def test_g15_g16_intensity(tmp_path):
    near, far = json.loads(phalanx(tmp_path, "tables roofline --params 7B --json")[1])["tables"]
    ratio = {row["batch_per_rank"]: row["flop_per_byte"] for row in near["rows"]}
    assert [ratio[b] for b in (1, 4, 16, 64, 256)] == [3072, 12288, 49152, 196608, 786432]
    assert ratio[32] == 98304
    assert near["rows"][0]["ridge"] == pytest.approx(2199, abs=0.5)
    assert {row["regime"] for row in near["rows"]} == {"compute-bound"}
    assert "critical batch 0.716 " in near["note"]
    assert far["rows"][0]["ridge"] == pytest.approx(19788)  # C10
    assert far["rows"][0]["efficiency"] == pytest.approx(3072 / 19788)


def test_g17_share_of_communication():
    for compute, percent in ((10, 35.9), (3, 65.1)):
        p = PricedStrategy(Strategy(), compute + 5.6, 0.0, {"matmul": compute, "dp": 5.6}, {}, 1)
        assert 100 * p.communication == pytest.approx(percent, abs=0.05)


def test_g24_years_of_one_gpu():
    (row,) = textbook.training(175e9, 300e9, 28e12, (1,)).rows
    assert row[1] == pytest.approx(356.7, abs=0.1)
    assert row[1] * 3.14e23 / 3.15e23 == pytest.approx(355.6, abs=0.1)  # the paper's own FLOP


def test_c17_operations_of_fsdp():
    """Each block is gathered twice and its gradients are scattered once: 3 x 96."""

    def operations(layers: int) -> int:
        model = replace(_GPT3, layers=layers)
        found = terms(Layout(model, Job(8, 2048), Strategy(dp=8, zero=3)).stage_view())
        return sum(int(t.count) for t in found if t.event.axis == "dp_shard")

    assert (operations(96) - operations(95)) * 96 == 288


def test_c13_topk_is_no_hundredfold():
    """It saves 66.7/P compared with a ring all-reduce in fp32, with indices of 8 bytes; ours take 4."""
    compressor = parse("topk:0.01")
    assert compressor is not None
    for ranks, golden in ((2, 33.3), (8, 8.3), (16, 4.2), (64, 1.04)):
        s, job = Strategy(dp=ranks, bucket=1e6), Job(ranks, 2048)
        (bucket,) = buckets(make_model({"preset": "gpt2"}, Path())[0], job, s)
        (gathered,) = bucket_collectives(compressor, bucket, s, "float32")
        wire = (ranks - 1) / ranks * gathered.bytes
        ring = 2 * (ranks - 1) / ranks * bucket.padded(s) * 4
        assert ring / wire * (4 + PLACE_BYTES) / (4 + 8) == pytest.approx(golden, rel=0.01)


def test_powersgd_ratio():
    """A 4096 x 4096 matrix shrinks 512 times at rank 4 and 64 times at rank 32."""
    model = make_model({"preset": "llama-7b", "layers": 1}, Path())[0]
    (bucket,) = buckets(model, Job(2, 2048), Strategy(dp=2, bucket=1e6))
    for rank, ratio in ((4, 512), (32, 64)):
        compressor = parse(f"powersgd:{rank}")
        assert compressor is not None
        square = next(f for f in factors(compressor, bucket.parameters)[0] if f.n == f.m == 4096)
        assert square.n * square.m / (square.r * (square.n + square.m)) == ratio


# Inside of layers, experts, pipelines.


def _sent(
    here: Path, model: str, strategy: str, batch: int, gpus: int = 8, cluster: str = "dgx-a100", seq: int = 2048
):
    """Return the first row of each axis: what its layers send. Embedding, head and loss have rows of their own."""
    words = ("--model", model, "--cluster", cluster, "--gpus", gpus, "--batch", batch, "--seq", seq)
    answer = json.loads(phalanx(here, "tables comm", *map(str, words), "--strategy", strategy, "--json")[1])
    sheet = answer["tables"][0]
    return {row["axis"]: row for row in reversed(sheet["rows"])}


def test_g19_c3_c7_tensor_parallelism_of_gpt3(tmp_path):
    one = _sent(tmp_path, "gpt3-175b", "tp=8", 1)["tp"]
    assert one["times"] == 4 * 96 == 384
    assert one["sent_bytes"] == pytest.approx(33.82e9, rel=1e-3)
    assert one["sent_bytes"] / 96 == pytest.approx(352.32e6, rel=1e-4)
    many = _sent(tmp_path, "gpt3-175b", "tp=8,micro_batch=32", 32)["tp"]
    assert many["sent_bytes"] == pytest.approx(1082.33e9, rel=1e-5)


def test_g10_g21_payload_of_an_all_reduce(tmp_path):
    assert _sent(tmp_path, "llama-65b", "tp=8,micro_batch=32", 32)["tp"]["payload_bytes"] == 1_073_741_824
    # 131,072 tokens, as 32 of 4,096: the model has positions for 2,048.
    assert _sent(tmp_path, "gpt3-175b", "tp=8,micro_batch=64", 64)["tp"]["payload_bytes"] == pytest.approx(
        3.22e9, 1e-3
    )


def test_g11_g19_c7_messages_of_a_pipeline(tmp_path):
    row = _sent(tmp_path, "llama-65b", "pp=8,micro_batch=16", 512)["pp"]
    assert row["payload_bytes"] == pytest.approx(536.9e6, rel=1e-4)
    assert 2 * row["payload_bytes"] == pytest.approx(1.0737e9, rel=1e-4)
    messages = price(build("1f1b", 8, 32), Costs.equal(8)).messages
    assert messages == 448
    assert messages * row["payload_bytes"] == pytest.approx(240.5e9, rel=1e-3)
    gpt3 = _sent(tmp_path, "gpt3-175b", "pp=8", 32)["pp"]
    assert gpt3["sent_bytes"] == pytest.approx(3.22e9, rel=1e-3)  # of an inner rank
    assert messages * gpt3["payload_bytes"] == pytest.approx(22.55e9, rel=1e-3)  # in the whole pipe


def test_c15_all_to_all_of_mixtral(tmp_path):
    # Tokens to experts; their results, as many bytes, have the second row.
    row = _sent(tmp_path, "mixtral-8x7b", "dp=8,ep=8", 8, cluster="dgx-h100", seq=4096)["ep"]
    assert 2 * row["sent_bytes"] / 32 == pytest.approx(234.9e6, rel=1e-3)  # 235 MB: 4,096 tokens a rank


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "virtual", "bubble"),
    [
        ("1f1b", 4, 32, None, (3, 35)),  # G7
        ("1f1b", 4, 4, None, (3, 7)),
        ("1f1b", 4, 16, None, (3, 19)),
        ("1f1b", 4, 64, None, (3, 67)),
        ("1f1b", 8, 64, None, (7, 71)),
        ("1f1b", 8, 32, None, (7, 39)),
        ("naive", 4, 8, None, (75, 100)),  # G8
        ("interleaved", 4, 4, 2, (3, 11)),  # G9
        ("interleaved", 4, 8, 2, (3, 19)),
    ],
)
def test_g7_g8_g9_bubbles(schedule, ranks, micro_batches, virtual, bubble):
    chunks = ranks * (virtual or 1)
    found = price(build(schedule, ranks, micro_batches, virtual), Costs.equal(chunks))
    assert found.bubble_fraction == pytest.approx(float(Fraction(*bubble)))


@pytest.mark.parametrize(("ranks", "micro_batches", "over", "share"), [(4, 16, 18.75, 15.8), (16, 4, 375, 78.9)])
def test_g25_bubble_over_work_and_of_the_step(ranks, micro_batches, over, share):
    found = price(build("1f1b", ranks, micro_batches), Costs.equal(ranks))
    assert 100 * found.bubble_overhead == pytest.approx(over)
    assert 100 * found.bubble_fraction == pytest.approx(share, abs=0.05)


def test_g22_worlds_are_products():
    taught = [(4, 4, 4, 64), (8, 4, 4, 128), (8, 8, 8, 512), (8, 16, 8, 1024), (8, 8, 32, 2048), (8, 8, 4, 256)]
    for tp, pp, dp, world in taught:
        assert Strategy(tp=tp, pp=pp, dp=dp).world == world


# Collectives.


def _run(s: Schedule, held: np.ndarray) -> np.ndarray:
    """Run a schedule on numbers, (ranks, elements)."""
    for number in range(s.rounds):
        before = held.copy()
        for i in np.flatnonzero(s.round == number):
            there, part = s.destination[i], slice(s.offset[i], s.offset[i] + s.length[i])
            moved = before[s.source[i], part]
            held[there, part] = held[there, part] + moved if s.reduces[i] else moved
    return held


def test_g12_reductions():
    given = np.array([[1, 2, 3], [4, 5, 6], [5, 13, 21]], dtype=float)
    assert (_run(collective("all_reduce", "ring", 3, 3), given.copy()) == [10, 20, 30]).all()
    scatter = collective("reduce_scatter", "ring", 3, 3)
    found = _run(scatter, given.copy())
    for rank, offset, length in zip(scatter.end.rank, scatter.end.offset, scatter.end.length, strict=True):
        assert length == 1
        assert found[rank, offset] == [10, 20, 30][offset]


def test_g27_all_to_all_transposes_and_a_ring_takes_three_and_three(tmp_path):
    blocks = np.full((4, 16), np.nan)
    for rank in range(4):
        blocks[rank, 4 * rank : 4 * rank + 4] = [10 * rank + to for to in range(4)]
    found = _run(collective("all_to_all", "pairwise", 4, 4), blocks)
    for rank in range(4):
        assert [found[rank, 4 * of + rank] for of in range(4)] == [10 * of + rank for of in range(4)]
    ring = collective("all_reduce", "ring", 4, 4)
    assert ring.rounds == 6
    assert [bool(ring.reduces[ring.round == n].all()) for n in range(6)] == [True] * 3 + [False] * 3
    shown = json.loads(phalanx(tmp_path, "collectives show ring --ranks 4 --json")[1])["rounds"]
    between = shown[3]["holds"]  # what the command shows after the first three rounds
    assert [[chunk for chunk in range(4) if len(between[r][chunk]) == 4] for r in range(4)] == [[r] for r in range(4)]


def _joined(inner: float, outer: float, outer_rate: float = 50e9, nodes: int = 8) -> ClusterSpec:
    """Return a DGX H100 with these latencies and rates, where additions take no time, as in the texts."""
    found = preset("dgx-h100", nodes)
    near, far = found.tiers
    rate = "bandwidth_bytes_per_s_per_gpu_per_direction"
    near, far = replace(near, latency_s=inner), replace(far, latency_s=outer, **{rate: outer_rate})
    return replace(found, device=replace(found.device, gamma_s_per_byte=0.0), tiers=(near, far))


def test_c6_crossovers_by_a_command(tmp_path: Path) -> None:
    for alpha, rate, size in (
        ("1", "450", 450_000),
        ("1.5", "25", 37_500),
        ("5", "12.5", 62_500),
        ("50", "12.5", 625_000),
    ):
        said = json_of(tmp_path, f"collectives table --alpha {alpha} --rate {rate} --bytes 1MB --ranks 2 --json")
        assert [c["bytes"] for c in said["crossovers"]] == [pytest.approx(size)]
        ring = next(row for row in said["rows"] if row["algorithm"] == "ring")
        assert ring["seconds"] == pytest.approx(
            2 * (float(alpha) * 1e-6 + 0.5e6 / (float(rate) * 1e9))
        )  # no additions
    for wrong in ("--alpha 5", "--rate 5", "--alpha 0 --rate 5", "--alpha 5 --rate 5 --cluster dgx-h100"):
        assert phalanx(tmp_path, f"collectives table {wrong}")[0] == 2


def test_c6_crossovers():
    for alpha, rate, size in (
        (1e-6, 450e9, 450_000),
        (1.5e-6, 25e9, 37_500),
        (5e-6, 12.5e9, 62_500),
        (50e-6, 12.5e9, 625_000),
    ):
        near, far = compare("all_reduce", 1e6, 16, _joined(1e-6, alpha, rate, nodes=2)).crossovers
        assert (near.bytes, far.bytes) == pytest.approx((450_000, size))


def test_c14_hierarchical_against_one_flat_ring():
    def at(size: float) -> dict[str, tuple[int, float]]:
        rows = compare("all_reduce", size, 64, _joined(1e-6, 2e-6)).rows
        return {row.algorithm: (row.rounds, row.seconds) for row in rows}

    large, small = at(1e9), at(65536)
    assert large["ring"] == (126, pytest.approx(39.6e-3, rel=2e-3))
    assert large["hierarchical"] == (14 + 14, pytest.approx(8.3e-3, rel=5e-3))  # 14 of them between nodes
    assert small["ring"][1] == pytest.approx(255e-6, rel=5e-3)
    assert small["hierarchical"][1] == pytest.approx(43e-6, rel=0.015)


# Fragmentation.


def test_c21_a_job_of_four_waits_though_eight_are_free(tmp_path):
    trace = str(Path(__file__).parents[2] / "examples" / "fragmentation.csv")
    line = ("cluster", "simulate", "--trace", trace, "--cluster", "4x8", "--policy", "fifo", "--json")
    packed = json.loads(phalanx(tmp_path, *line)[1])["policies"][0]
    assert packed["queue"]["quantiles"][-1] == 50 * 60
    assert packed["fragmented"] == 4 * 50 * 60
    assert packed["fragmented"] / 3600 == pytest.approx(3.3, abs=0.05)
    scattered = json.loads(phalanx(tmp_path, *line, "--placement", "scatter")[1])["policies"][0]
    assert scattered["queue"]["quantiles"][-1] == 0
    # As taught, with four free on each node, it starts at once.
    rows = (tmp_path / "taught.csv", "submit,duration,gpus\n" + "0,3600,4\n" * 4 + "600,1800,4\n")
    rows[0].write_text(rows[1])
    taught = json.loads(phalanx(tmp_path, *line[:3], str(rows[0]), *line[4:])[1])["policies"][0]
    assert taught["queue"]["quantiles"][-1] == 0


@pytest.mark.parametrize(
    ("strategy", "apart", "together", "loss"),
    [("tp=4,micro_batch=2,recompute=full", 13.5, 9.4, 30), ("dp=2,zero=1,tp=2,sp=1", 6.5, 6.4, 0.8)],
)
def test_c21_what_scattering_costs(tmp_path, strategy, apart, together, loss):
    words = "plan --model llama3-8b --cluster dgx-h100 --gpus 4 --batch 32 --seq 8192 --out p4.json"
    assert phalanx(tmp_path, *words.split())[0] == 0
    (tmp_path / "free.json").write_text('{"free": {"node[0-3]": "6-7"}, "nodes": "node[0-3]"}')
    line = ("cluster", "place", "p4.json", "--free", "free.json", "--strategy", strategy, "--no-search", "--json")
    answer = json.loads(phalanx(tmp_path, *line)[1])
    assert answer["step_time_s"] == pytest.approx(apart, abs=0.1)
    assert answer["empty_cluster_s"] == pytest.approx(together, abs=0.1)
    assert 100 * (1 - answer["empty_cluster_s"] / answer["step_time_s"]) == pytest.approx(loss, abs=1)
