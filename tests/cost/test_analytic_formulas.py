"""The formulas that price any stack: columns as numbers, terms that sum, known limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cost.analytic.chips import chip_name, system, system_of
from phalanx.cost.analytic.compression import payment
from phalanx.cost.analytic.estimate import Estimate, compression_payment, estimate, estimate_all
from phalanx.cost.analytic.kernels import attention, head, product_s, unfused
from phalanx.cost.analytic.memory import Memory, memory
from phalanx.cost.analytic.profile import profile
from phalanx.cost.analytic.step import FORMULAS, _slower, step
from phalanx.cost.collectives.nccl_model import collective_s, message_s
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.compressed import SPARSE, Compressed
from phalanx.cost.ledger.flops import forward_per_token, hardware_flops, model_flops
from phalanx.cost.ledger.live_bytes import block_bytes
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.pipeline_formulas import bubble, micro_batches_in_flight, schedule_number
from phalanx.cost.ledger.policy import Policy
from phalanx.cost.ledger.rank_layout import FORMAT_INDEX, blocks_by_work, layout
from phalanx.cost.pipeline_time import Costs, price
from phalanx.frameworks.registry import STACKS
from phalanx.schedule.pipeline.schedules import SCHEDULES, build
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.presets import PRESETS
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse
from phalanx.spec.strategy.stack_options import StackOptions

JOB = Job(256, 4096, Precision("bfloat16"))
LINES = (
    "dp=64",
    "dp=64,zero=1",
    "dp=64,zero=3,micro_batch=2",
    "dp=16,zero=1,tp=4,sp=1",
    "dp=4,zero=1,tp=4,pp=4,recompute=full",
    "dp=4,tp=2,pp=8,virtual=2,schedule=interleaved,recompute=selective",
    "dp=8,zero=1,cp=8",
    "dp=32,zero=3,shard=8,tp=2,sp=1,recompute=every:2",
    "dp=64,zero=1,compression=int8",
    "dp=32,cp=2,compression=topk:0.01",
)


def model(name: str = "llama2-7b") -> ModelSpec:
    return make_model({"preset": name}, Path())[0]


def one(line: str, name: str = "llama2-7b", stack: str = "megatron-core") -> Estimate:
    return estimate(model(name), preset("dgx-h100", 8), JOB, Strategy(**parse(line)), stack)


@pytest.mark.parametrize(
    ("device", "chip"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX A5000", "RTX-A5000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GeForce RTX 5090", "RTX-5090"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_a_device_is_the_chip_that_its_driver_names(device: str, chip: str) -> None:
    assert chip_name(device) == chip
    for other in ("Tesla P100-PCIE-16GB", "NVIDIA L40", "Quadro RTX 6000", "Intel(R) Xeon(R) Processor"):
        with pytest.raises(InputError, match="is not a chip with known kernel rates"):
            chip_name(other)


def test_columns_are_what_single_strategies_are() -> None:
    strategies = [Strategy(**parse(line)) for line in LINES]
    columns = estimate_all(model(), preset("dgx-h100", 8), JOB, strategies, "megatron-core")
    for i, line in enumerate(LINES):
        alone = one(line)
        assert columns.seconds[i] == pytest.approx(float(alone.seconds), rel=1e-12)
        assert columns.memory.reserved[i] == pytest.approx(float(alone.memory.reserved), rel=1e-12)
        assert columns.mfu[i] == pytest.approx(float(alone.mfu), rel=1e-12)


@pytest.mark.parametrize("line", LINES)
def test_terms_sum_to_the_step_and_each_has_a_formula(line: str) -> None:
    found = one(line)
    assert sum(map(float, found.step.terms.values())) == pytest.approx(float(found.seconds))
    assert set(found.step.terms) <= set(FORMULAS)
    assert all(float(value) >= -1e-12 for value in found.step.terms.values())
    assert 0 < float(found.mfu) < 1
    assert float(found.hfu) >= float(found.mfu)


@pytest.mark.parametrize("line", LINES)
def test_memory_holds_at_least_the_state(line: str) -> None:
    found = one(line)
    assert float(found.memory.steady) <= float(found.memory.peak) + 1
    assert float(found.memory.peak) <= float(found.memory.reserved)
    assert sum(map(float, found.memory.terms.values())) == pytest.approx(float(found.memory.peak), rel=1e-9)


def test_state_by_zero_stage() -> None:
    """18 bytes per parameter in Megatron: 2 + 4 + 12; sharded 6 + 12/64; ZeRO-3 16/64."""
    n = model().parameter_count
    rest = profile("megatron-core").constant_bytes
    for line, each in (("dp=64", 18), ("dp=64,zero=1", 6 + 12 / 64), ("dp=64,zero=3", 16 / 64)):
        assert float(one(line).memory.steady) - rest == pytest.approx(n * each, rel=1e-6)


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_count_the_parameters_of_every_model(name: str) -> None:
    spec = model(name)
    assert shape(spec).params == pytest.approx(spec.parameter_count, rel=2e-4)  # but for a norm's weights


@pytest.mark.parametrize("vocab", [32_000, 500_000, 5_000_000])
@pytest.mark.parametrize("pp", [2, 3, 8, 16, 31])
def test_blocks_by_work_leave_none_of_the_middle_ranks_idle(pp: int, vocab: int) -> None:
    """However heavy the head is, and the more it weighs, the fewer blocks its rank has."""
    blocks, lighter = (blocks_by_work(shape(replace(model(), vocab=v)), pp) for v in (vocab, 1000))
    assert (len(blocks), sum(blocks)) == (pp, model().layers)
    assert min(blocks[:-1]) >= 1
    assert 0 <= blocks[-1] <= lighter[-1]


def test_flops_are_near_6n_where_attention_is_small() -> None:
    spec = model("llama3-70b")
    blocks, head = forward_per_token(shape(spec), 128)
    assert 3 * (blocks + head) == pytest.approx(6 * (spec.parameter_count - spec.vocab * spec.hidden), rel=0.01)


def test_flops_of_a_large_step_are_more_than_an_integer_holds() -> None:
    spec = model("llama3-405b")
    one_row, many = (
        layout(Strategy(**parse("recompute=full")), Job(batch, 131072, Precision("bfloat16")), spec.layers)
        for batch in (1, 1024)
    )
    for counted in (model_flops, lambda size, how: hardware_flops(size, how, Policy())):
        assert float(counted(shape(spec), many)) == pytest.approx(1024 * float(counted(shape(spec), one_row)))
    assert float(model_flops(shape(spec), many)) > 2**63


def test_written_scores_are_slower_where_tensor_cores_cannot_take_a_head() -> None:
    """And by the square of the sequence. 150 is no multiple of 8 elements."""
    spec, on, stack = model("gpt3-175b"), system("A100", 8, 25e9), profile("megatron-2021")
    laid = layout(Strategy(**parse("tp=8")), JOB, spec.layers)
    sizes = [replace(shape(spec).kinds[0], head_dim=d, value_dim=d) for d in (144, 150, 152)]
    few, odd, more = (float(attention(size, laid, on, stack).forward) for size in sizes)
    assert few < more < odd
    assert more == pytest.approx(few, rel=0.5)
    long = replace(laid, seq=2 * laid.seq)
    assert float(attention(sizes[0], long, on, stack).forward) == pytest.approx(4 * few, rel=0.1)


def test_bubble_of_1f1b_and_interleaved() -> None:
    """(P-1)/M of the work, and a V-th of that with V chunks (Narayanan et al. 2021, section 2.2)."""
    plain, chunked = one("dp=8,pp=8"), one("dp=8,pp=8,virtual=4,schedule=interleaved")
    work = sum(float(plain.step.terms[n]) for n in ("matmul", "attention", "memory", "recompute", "launch"))
    head = float(plain.step.of["head"]["head_s"])
    assert float(plain.step.terms["bubble"]) == pytest.approx(work * 7 / 32, abs=2 * head)
    assert float(chunked.step.terms["bubble"]) == pytest.approx(float(plain.step.terms["bubble"]) / 4, rel=0.01)


def test_nics_are_shared_by_the_ranks_of_a_node() -> None:
    """An all-gather of groups that have one rank in each node goes at one NIC's rate, of whole nodes at eight."""
    on = system_of(preset("dgx-h100", 8))
    n = 8e9
    nic = on.tiers[1].bytes_per_s_per_gpu_per_direction
    apart = float(collective_s("all_gather", n, 8, 8, on))
    whole = float(collective_s("all_gather", n, 64, 1, on))
    assert apart == pytest.approx(n * 7 / 8 / nic, rel=0.02)
    inner = on.tiers[0].bytes_per_s_per_gpu_per_direction
    assert whole == pytest.approx(n * 63 / 64 / min(inner, 8 * nic), rel=0.05)


def test_groups_inside_a_node_do_not_meet_the_network() -> None:
    slow = system("H100", 8, 1e9)
    fast = system("H100", 8, 100e9)
    assert float(collective_s("all_reduce", 1e8, 8, 1, slow)) == float(collective_s("all_reduce", 1e8, 8, 1, fast))
    assert float(collective_s("all_reduce", 1e8, 16, 1, slow)) > float(collective_s("all_reduce", 1e8, 16, 1, fast))
    assert float(message_s(1e8, 4, slow)) < float(message_s(1e8, 8, slow))
    sites = system_of(preset("sites-h100", 32))
    assert (
        float(message_s(1e8, 64, sites, 2)) < float(message_s(1e8, 64, sites, 4)) == float(message_s(1e8, 128, sites))
    )


def test_the_slowest_chunk_of_a_ring_leaves_every_node() -> None:
    """Of 15 hops over two nodes of eight 2 are between nodes; of 7 over eight nodes with a rank each, all."""
    on = system("H100", 8, 50e9)
    inner, outer = (tier.hop_s for tier in on.tiers)
    assert float(collective_s("all_gather", 0.0, 16, 1, on)) == pytest.approx(13 * inner + 2 * outer)
    assert float(collective_s("all_gather", 0.0, 8, 8, on)) == pytest.approx(7 * outer)


def test_tensor_parallelism_between_nodes_hides_nothing() -> None:
    for line, overlap in (("dp=8,tp=8,sp=1", True), ("dp=4,tp=16,sp=1", False)):
        found = one(line)
        bare = step(found.shape, found.layout, found.system, replace(found.profile, tp_overlap=0.0))
        assert (float(bare.terms["tp"]) > float(found.step.terms["tp"])) == overlap


def test_a_ring_merges_its_steps_and_ulysses_has_none() -> None:
    ring, turned, whole = (one(line) for line in ("dp=8,cp=8", "dp=8,cp=8,ulysses=8", "dp=64"))
    seconds = [float(x.step.of["attention"]["forward_s"]) for x in (ring, turned, whole)]
    assert seconds[0] > seconds[1] == pytest.approx(seconds[2] / 8)
    free = step(ring.shape, ring.layout, ring.system, replace(ring.profile, ring_bytes=0.0))
    heads = ring.shape.kinds[0].heads * ring.shape.kinds[0].value_dim
    by = ring.profile.ring_bytes * ring.layout.tokens * heads * 8
    merged = seconds[0] - float(free.of["attention"]["forward_s"])
    assert merged == pytest.approx(float(by / (ring.system.memory_bytes_per_s * ring.system.memory)))


def test_recomputation_by_operation_repeats_every_second_product() -> None:
    """Of Llama 3 8B keys (4096 x 1024), the projection behind attention (4096 x 4096) and w3 (4096 x 14336)."""
    found = one("dp=64,recompute=selective", "llama3-8b", "torchtitan-compiled").step.of
    share = float(found["recompute"]["repeated_s"] / found["matmul"]["forward_s"])
    assert share == pytest.approx(19_456 / 53_248)


def test_recomputation_by_operation_repeats_experts_without_their_exchange() -> None:
    """Results of grouped products are not saved: as much slower as they get, so does their recomputation, and that of
    the permutation. Tokens that travelled to other ranks and back are kept, and not sent again."""
    found, alone = (
        one(f"dp=64,{ep}recompute=selective", "mixtral-8x7b", "torchtitan-compiled") for ep in ("ep=8,", "")
    )

    def seconds(name: str, part: str, system: System = found.system, **changes: float) -> float:
        of = step(found.shape, found.layout, system, replace(found.profile, **changes)).of
        return float(of[name][part])

    slower = {"grouped": found.profile.grouped / 2}
    products = seconds("matmul", "forward_s", **slower) - seconds("matmul", "forward_s")
    assert products > 0
    again = seconds("recompute", "repeated_s", **slower) - seconds("recompute", "repeated_s")
    assert again == pytest.approx(products)
    moved = {"token_bytes": found.profile.token_bytes + 100}
    again = seconds("recompute", "repeated_s", **moved) - seconds("recompute", "repeated_s")
    tokens = float(found.layout.tokens)
    rate = found.system.memory_bytes_per_s * found.system.memory
    assert again == pytest.approx(100 * 2 * tokens * 4096 / rate)
    tiers = tuple(replace(tier, hop_s=2 * tier.hop_s) for tier in found.system.tiers)
    distant = replace(found.system, tiers=tiers)
    assert seconds("ep", "forward_s", distant) > seconds("ep", "forward_s")
    assert seconds("recompute", "repeated_s", distant) == seconds("recompute", "repeated_s")
    kept = [float(x.memory.terms["activations"]) for x in (found, alone)]
    assert kept[0] - kept[1] == pytest.approx(32 * 2 * tokens * 2 * 2 * 4096)


def test_gradient_products_an_exchange_are_cut() -> None:
    """In as many parts as ranks, where a stack does it and these are in a node. Parts of whole tiles share waves, so
    that they take as long as the whole; rows that do not fill a tile are lost in each."""

    def forward(seq: int, split: float) -> float:
        line = Strategy(**parse("dp=16,tp=4,sp=1"))
        found = estimate(model(), preset("dgx-h100", 8), replace(JOB, seq=seq), line, "megatron-core")
        by = replace(found.profile, tp_split=split)
        return float(step(found.shape, found.layout, found.system, by).of["matmul"]["forward_s"])

    assert forward(4096, 1.0) == pytest.approx(forward(4096, 0.0))
    assert forward(4096 + 4, 1.0) > 1.05 * forward(4096 + 4, 0.0)
    for seq in range(512, 4096, 100):
        assert forward(seq, 1.0) >= forward(seq, 0.0) * (1 - 1e-9)
    apart = one("dp=16,tp=4,sp=1,order=pp/tp/dp/cp")
    same = [
        step(apart.shape, apart.layout, apart.system, replace(apart.profile, tp_split=split)).seconds
        for split in (0.0, 1.0)
    ]
    assert float(same[0]) == float(same[1])


def test_messages_hide_behind_other_chunks_alone() -> None:
    for line, hides in (("dp=16,pp=4", False), ("dp=16,pp=4,virtual=2,schedule=interleaved", True)):
        found = one(line)
        sent = [
            float(
                step(found.shape, found.layout, found.system, replace(found.profile, pp_overlap=share)).terms[
                    "transfers"
                ]
            )
            for share in (0.0, 1.0)
        ]
        assert (sent[1] < sent[0]) is hides
        assert sent[1] > 0  # a pipeline fills and drains


def test_what_waits_for_the_gpu_is_reserved() -> None:
    """Two whole hidden states of the block at work; of as many as the queue holds where the CPU launches ahead; of
    the warm-up of a pipeline's first rank. None is allocated."""
    quick, slow = (one(f"dp=8,tp=8,sp=1,micro_batch={n}", stack="nanotron") for n in (8, 1))
    late = replace(slow.profile, launch_s=1e-3)
    behind = step(slow.shape, slow.layout, slow.system, late)
    assert (float(quick.step.ahead), float(behind.ahead)) == (1, 0)
    each = 2 * 4096 * 4096 * 2

    def held(ahead: float) -> Memory:
        return memory(slow.shape, slow.layout, slow.profile, ahead)

    idle = held(0.0)
    assert float(idle.first) == float(idle.reserved)
    assert float(held(1.0).reserved - idle.reserved) == pytest.approx((1024 / 40 - 1) * each)
    assert float(held(1.0).peak) == float(idle.peak)
    stages = replace(slow.layout, pp=4, micro_batches=32)
    mended, faulty = (memory(slow.shape, stages, profile(name), 0.0) for name in ("nanotron", "nanotron-early"))
    assert float(mended.first - faulty.first) == pytest.approx((2 * 9 - 1) * each)  # of 9 blocks
    least = float(idle.first) - each
    full = memory(slow.shape, slow.layout, slow.profile, 1.0, least + 8 * each)
    assert float(full.first) == pytest.approx(least + 4 * each)  # half of what is left
    assert float(full.reserved) == float(held(1.0).reserved)  # what it would take


def test_memory_is_that_of_the_fullest_instant() -> None:
    """Logits are gone when the first block is repeated: the larger of both counts."""
    found = one("dp=64,recompute=full,micro_batch=2")

    def peak(logit: float) -> float:
        by = replace(found.profile, kept_logit=logit)
        return float(memory(found.shape, found.layout, by).peak)

    per_logit = 2 * 4096 * 32000
    again = float(block_bytes(found.shape.kinds[0], found.layout, found.profile))
    assert peak(0.5 * again / per_logit) == peak(0.0)
    assert peak(1.5 * again / per_logit) == pytest.approx(peak(0.0) + 0.5 * again)


def test_recomputation_by_operation_keeps_every_second_product() -> None:
    """Input, attention's result, queries, values, one of two wide products and the last: 5 h + ffn, in 2 bytes."""
    none, some, full = (
        float(one(f"dp=64,zero=3,recompute={kind}", stack="torchtitan-compiled").memory.terms["activations"])
        for kind in ("none", "selective", "full")
    )
    assert full < some < none
    assert some == pytest.approx(32 * 4096 * 2 * (5 * 4096 + 11008))


def test_products_that_sum_in_place_keep_a_gradient_of_each_shape() -> None:
    found = one("dp=8,tp=8,sp=1")
    by = replace(found.profile, stand_in=1.0)
    more = memory(found.shape, found.layout, by)
    norms = 2 * 4096  # which every tp rank has
    block = 2 * ((found.shape.kinds[0].params - norms) / 8 + norms)
    assert float(more.steady - found.memory.steady) == pytest.approx(block)
    assert float(more.peak - found.memory.peak) == pytest.approx(block + 2 * 32000 * 4096 / 8)


def test_one_rank_sends_nothing() -> None:
    on = system_of(preset("dgx-a100", 1))
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert float(collective_s(op, 1e9, 1, 1, on)) == 0
    assert float(one("dp=64").step.terms["tp"]) == 0


def test_products_come_in_waves() -> None:
    """One tile more than the processors hold costs more than its share, and a product never beats its rate."""
    on = system_of(preset("dgx-h100", 1))
    rate = on.peak_bf16 * on.gemm
    full = float(product_s(1024, 1024, 4096, on, rate, 2))  # 128 tiles of 128 x 64 for 132 processors
    more = float(product_s(1024, 1088, 4096, on, rate, 2))  # 136
    assert more > full * 1.3
    m = np.array([64, 256, 1024, 4096, 16384])
    best = 2 * m * 4096 * 4096 / rate
    found = product_s(m, 4096, 4096, on, rate, 2)
    assert np.all(found > best)
    assert np.all(np.diff(best / found) > -1e-9)
    assert best[-1] / found[-1] > 3 * best[0] / found[0]


def test_launches_are_a_floor_and_not_a_sum() -> None:
    small = make_model({"preset": "gpt2"}, Path())[0]
    strategy, job = Strategy(dp=8), Job(8, 128, Precision("bfloat16"))
    found = estimate(small, preset("dgx-h100", 1), job, strategy, "eager")
    by = found.profile
    floor = 12 * by.launches * by.launch_s * (1 + by.launch_backward)
    assert float(found.seconds) > floor
    slower = replace(by, launch_s=by.launch_s * 2)
    again = step(found.shape, found.layout, found.system, slower)
    assert float(again.seconds) - float(found.seconds) == pytest.approx(floor, rel=1e-6)
    large = one("dp=64,micro_batch=4", stack="eager")
    assert float(large.step.terms["launch"]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("modules", ["core_attn", "layernorm", "mlp", "core_attn+layernorm+mlp"])
def test_what_runs_again_is_launched_again(modules: str) -> None:
    """Where the GPU waits for launches, recomputation costs those of its parts, and less than all of a block's."""
    small, job = make_model({"preset": "gpt2"}, Path())[0], Job(8, 128, Precision("bfloat16"))
    seconds = {
        kind: float(estimate(small, preset("dgx-h100", 1), job, Strategy(dp=8, recompute=kind), "nemo-25.04").seconds)
        for kind in ("none", f"selective:{modules}", "full")
    }
    none, some, full = seconds.values()
    assert none * 1.001 < some < full


def test_every_stack_has_constants_that_make_sense() -> None:
    for name in STACKS:
        p = profile(name)
        for share in ("tp_overlap", "dp_overlap", "gather_overlap", "ep_overlap", "pp_overlap"):
            assert 0 <= getattr(p, share) <= 1, (name, share)
        assert 0.5 < p.gemm < 1.5, name
        assert 0 <= p.launch_s < 5e-3, name
        assert p.contention >= 1, name


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("dp=64,zero=3,compression=topk:0.01", "compression"),
        ("dp=64,bucket=50", "bucket"),
        ("dp=64,zero=3,prefetch=2", "prefetch"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(line: str, field: str) -> None:
    with pytest.raises(InputError, match=f"strategy.{field}"):
        one(line)


def test_chips_that_are_not_known_are_refused() -> None:
    known = preset("dgx-h100", 8)
    cluster = replace(known, device=replace(known.device, name="MI100-32GB"))
    with pytest.raises(InputError, match=r"cluster\.device"):
        estimate(model(), cluster, JOB, Strategy(dp=64), "megatron-core")


@pytest.mark.parametrize(
    ("name", "ranks", "m"),
    [
        (name, ranks, m)
        for name in SCHEDULES
        for ranks, m in ((2, 4), (4, 2), (4, 5), (4, 8), (4, 13))
        if name != "interleaved" and not SCHEDULES[name].refusal(ranks, m)  # 1f1b's formula has its chunks
    ],
)
def test_activations_in_flight_are_those_of_the_schedules(name: str, ranks: int, m: int) -> None:
    run = price(build(name, ranks, m), Costs.equal(ranks * (2 if SCHEDULES[name].v_shaped else 1)))
    each = 2 if SCHEDULES[name].v_shaped else 1
    first, last = (float(n) for n in micro_batches_in_flight(schedule_number(name), m, ranks))
    if name == "1f1b":
        first, last = min(ranks, m), 1
    assert (first, last) == (run.peak[0] / each, run.peak[-1] / each)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_bubbles_of_equal_chunks_are_those_of_the_schedules(name: str, ranks: int) -> None:
    """Whatever the number of micro-batches, fewer than ranks included; F, I and W take the same time."""
    facts = SCHEDULES[name]
    for m in range(1, 2 * ranks + 3):
        if facts.refusal(ranks, m):
            continue
        costs = Costs([1.0] * ranks * facts.chunks, [1.0] * ranks * facts.chunks, [1.0] * ranks * facts.chunks)
        run = price(build(name, ranks, m), costs)
        idle = run.makespan - 3 * m * facts.chunks
        assert 3 * (ranks - 1) * float(bubble(schedule_number(name), m, ranks, facts.chunks)) == pytest.approx(
            idle
        ), m


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v"])
def test_zero_bubble_steps_take_as_long_as_their_schedules_run(schedule: str) -> None:
    found, plain = (one(f"dp=16,pp=4,schedule={name}", stack="phalanx") for name in (schedule, "1f1b"))
    assert 0 <= float(found.step.terms["bubble"]) < 0.7 * float(plain.step.terms["bubble"])
    (_, block), head = found.step.blocks[0], found.step.head
    n = 8 if SCHEDULES[schedule].v_shaped else 4
    forward = [32 / n * float(block.forward)] * n
    backward = [32 / n * float(block.backward)] * n
    forward[-1] += float(head.forward)
    backward[-1] += float(head.backward)
    half = [b / 2 for b in backward]
    whole = price(build(schedule, 4, 16), Costs(forward, half, half)).makespan  # every action, no round left out
    assert found.step.of["bubble"]["makespan_s"] == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("order", ["pp/dp/cp/tp", "dp/pp/cp/tp", "tp/cp/dp/pp", "cp/pp/dp/tp", "pp/tp/dp/cp"])
def test_strides_are_those_of_the_mesh(order: str) -> None:
    s = Strategy(dp=4, cp=2, tp=2, pp=4, zero=1, order=order)
    own, grid = layout(s, JOB, 32), mesh(s)
    for axis, stride in (("tp", own.tp_stride), ("cp", own.cp_stride), ("dp_shard", own.dp_stride)):
        assert set(np.diff(grid.groups(axis)).flat) == {stride}
    assert set(np.diff(grid.groups("pp")).flat) == {own.pp_stride}
    for node in (4, 8, 16, 32):
        together = max(int(np.bincount(group // node).max()) for group in grid.groups("dp_shard+cp"))
        assert min(8, max(node // float(own.data_stride(node)), 1)) == together


def test_an_order_with_tensor_parallelism_between_nodes_is_slower() -> None:
    near, far = one("dp=16,tp=4,sp=1"), one("dp=16,tp=4,sp=1,order=pp/tp/cp/dp")
    assert float(far.step.terms["tp"]) > 2 * float(near.step.terms["tp"])
    assert float(far.step.terms["dp"]) < float(near.step.terms["dp"])


def test_ulysses_turns_heads_into_tokens() -> None:
    """Two all-to-alls a pass of queries, keys, values and the result: 2 bytes x tokens x 4 x hidden a block, which
    is copied three times."""
    found = one("dp=8,cp=8,ulysses=8")
    sent = sum(float(collective_s("all_to_all", 2 * 4096 / 8 * n * 4096, 8, 1, found.system)) for n in (3, 1))
    each = 2 * 4096 / 8 * 4 * 4096
    copied = 3 * 2 * each / float(found.system.memory_bytes_per_s * found.system.memory)  # read and written
    assert float(found.step.terms["cp"]) == pytest.approx(32 * 32 * 2 * (sent + copied), rel=1e-9)


def test_what_compressed_gradients_send() -> None:
    """By the formulas of cost/analytic/compression.py, bucket by bucket."""
    n = model().parameter_count
    on, by = one("dp=64").system, profile("megatron-core")
    full = np.ceil(n * by.gradient_bytes / max(by.bucket_bytes, 64 * by.rank_bucket_bytes))

    def seconds(op: str, each: float, buckets: float = full) -> float:
        return buckets * float(collective_s(op, n * each / buckets, 64, 1, on))

    for name, sent in (
        ("topk:0.01", seconds("all_gather", 64 * 0.01 * (4 + 4))),
        ("randk:0.01", seconds("all_reduce", 0.04)),
        ("int8", seconds("all_to_all", 1 + 4 / 256) + seconds("all_gather", 1 + 4 / 256)),
        ("bf16", seconds("all_to_all", 2) + seconds("all_gather", 2)),
    ):
        found = one(f"dp=64,compression={name}")
        assert float(found.step.of["dp"]["again_s"]) == pytest.approx(sent, rel=1e-4), name
        assert float(found.step.terms["coding"]) > 0
        assert float(found.memory.peak) > float(one("dp=64").memory.peak)
    sharded = one("dp=64,zero=3,compression=int8")
    blocks = seconds("all_to_all", 1 + 4 / 256, 32)
    assert float(sharded.step.of["dp"]["scatter_s"]) == pytest.approx(blocks, rel=1e-4)


def test_sparse_stops_paying_where_its_bytes_say() -> None:
    """Links alone: the all-gather of p messages outweighs the dense all-reduce from p = 2 g / (v g + x) on."""
    c = Compressed(SPARSE, 0.01, 0.04)
    slow = system("H100", 1, 1e8)  # every rank has a slow link of its own; latency is nothing beside its bytes
    found = payment(c, 1e9, 64, 1, slow, profile("megatron-core"))
    assert found.by_bytes == pytest.approx(2 * 4 / (0.01 * 4 + 0.04))
    assert found.ranks is not None
    assert found.ranks[0] == 2
    assert found.ranks[1] == pytest.approx(found.by_bytes, abs=2)
    assert compression_payment(one("dp=64,compression=threshold:0.1")) is None
    assert compression_payment(one("dp=64")) is None


def test_powersgd_sends_its_factors() -> None:
    found = one("dp=64,compression=powersgd:4").layout.compressed
    spec = model()
    h, f = spec.hidden, spec.ffn
    block = 4 * 4 * 2 * h + 3 * 4 * (h + f) + 2 * h
    assert found.values == pytest.approx((32 * block + 2 * 4 * (spec.vocab + h) + h) / spec.parameter_count)


def test_measured_links_and_products_stand_as_they_are() -> None:
    plain = preset("dgx-h100", 2)
    tiers = tuple(replace(t, origin="measured", latency_s=1e-5) for t in plain.tiers)
    rates = tuple(replace(k, peak_flops_per_s=700e12, origin="measured") for k in plain.kernels)
    device = replace(plain.device, name="NVIDIA H100 80GB HBM3", origin="measured")
    found = system_of(replace(plain, device=device, tiers=tiers, kernels=rates))
    assert [t.bytes_per_s_per_gpu_per_direction for t in found.tiers] == [450e9, 50e9]
    assert [t.hop_s for t in found.tiers] == [1e-5, 1e-5]
    n = 4096
    assert 2 * n**3 / product_s(n, n, n, found, found.peak_bf16 * found.gemm, 2) == pytest.approx(700e12, rel=0.02)
    assert found.attention / found.gemm == pytest.approx(system_of(plain).attention / system_of(plain).gemm)


def test_a_gpu_and_its_launches_hold_each_other_up() -> None:
    """The slower one's time; an eighth more where both are as fast, nothing where one takes half as long."""
    gpu, cpu = np.meshgrid(np.linspace(0.0, 4.0, 41), np.linspace(0.0, 4.0, 41))
    both, most = _slower(gpu, cpu), np.maximum(gpu, cpu)
    assert np.all((both >= most) & (both <= most * 1.125))
    assert np.all(both[np.minimum(gpu, cpu) <= most / 2] == most[np.minimum(gpu, cpu) <= most / 2])
    assert np.diag(both) == pytest.approx(np.diag(gpu) * 1.125)
    assert np.all(np.diff(both, axis=0) >= 0)
    assert np.all(np.diff(both, axis=1) >= 0)


def test_heads_that_are_no_multiple_of_four_have_no_fused_softmax() -> None:
    """Of llama2-7b's 32 heads a rank has two at tp=16, one sequence at a time; two sequences are four matrices."""
    single, pair, flash = (
        one(f"dp=4,tp=16{more}", stack=stack)
        for more, stack in (("", "megatron-2022"), (",micro_batch=2", "megatron-2022"), ("", "megatron-core"))
    )
    assert [float(unfused(x.shape.kinds[0], x.layout, x.profile)) for x in (single, pair, flash)] == [1, 0, 0]
    fused = replace(single.profile, unfused_launches=0.0)
    launched = (
        single.step.of["launch"]["forward_s"]
        / step(single.shape, single.layout, single.system, fused).of["launch"]["forward_s"]
    )
    assert float(launched) == pytest.approx(1 + single.profile.unfused_launches / single.profile.launches)


def test_logits_over_an_odd_vocabulary_are_slow_where_nobody_pads_it() -> None:
    """GPT-2's 50,257 is odd; half of it, rounded down, is 8 x 3,141; a quarter is 4 x 3,141."""
    seconds = {}
    for pads in (0.0, 1.0):
        for tp in (1, 2, 4):
            x = one(f"dp={8 // tp},tp={tp}")
            odd = replace(x.shape, vocab=50257.0)
            seconds[pads, tp] = head(odd, x.layout, x.system, replace(x.profile, pads_vocab=pads))[0].forward
    share = x.system.odd
    for tp, slower in ((1, 1 / share), (2, 1.0), (4, share ** (-1 / 3))):
        assert seconds[0.0, tp] == pytest.approx(seconds[1.0, tp] * slower)


@pytest.mark.parametrize(("name", "line"), [("llama3-8b", "dp=4,tp=8,sp=1,pp=2"), ("gpt2-xl", "dp=8,tp=8,zero=1")])
def test_a_padded_vocabulary_costs_what_its_rows_do_and_is_no_work_of_the_model(name: str, line: str) -> None:
    """128,256 over 8 ranks in multiples of 128 are 129,024 rows; 50,257 are 51,200."""
    spec, s, cluster = model(name), Strategy(**parse(line)), preset("dgx-h100", 8)
    rows = {"llama3-8b": 129_024, "gpt2-xl": 51_200}[name]
    wider = replace(spec, vocab=rows)
    asked, larger, plain = (
        estimate(m, cluster, JOB, s, "megatron-core", options=StackOptions(vocab_multiple=n))
        for m, n in ((spec, 128), (wider, 0), (spec, 0))
    )
    assert float(asked.seconds) == pytest.approx(float(larger.seconds), rel=1e-9)
    assert float(asked.memory.reserved) == pytest.approx(float(larger.memory.reserved), rel=1e-9)
    assert asked.hardware_flops == larger.hardware_flops > plain.hardware_flops
    assert asked.model_flops == plain.model_flops
    assert asked.active_params == plain.active_params


def test_nothing_runs_around_collectives_of_stacks_whose_launches_are_hardly_ahead() -> None:
    """Four all-reduces a block and pass of both directions; none without tensor parallelism."""
    for tp, collectives in ((1, 0), (4, 4)):
        x = one(f"dp={8 // tp},tp={tp}", stack="megatron-2022")
        found = [
            step(x.shape, x.layout, x.system, replace(x.profile, joined=j, list_s=1e-3, tp_overlap=0.0)).terms["tp"]
            for j in (0.0, 1.0)
        ]
        blocks = float(x.layout.micro_batches) * float(x.shape.layers)
        assert float(found[1] - found[0]) == pytest.approx(blocks * collectives * 1e-3)


@pytest.mark.parametrize("tp", [1, 4])
def test_weights_are_cast_in_both_passes_unless_they_were_gathered_narrow(tp: int) -> None:
    x = one(f"dp={8 // tp},tp={tp},zero=3", stack="torchtitan-compiled")
    on, (kind,) = replace(x.layout, format=FORMAT_INDEX["float8"]), x.shape.kinds
    found = [
        float(step(x.shape, on, x.system, replace(x.profile, recasts=r, parameter_bytes=b)).terms["memory"])
        for r, b in ((0.0, 2.0), (1.0, 2.0), (1.0, 1.0))
    ]
    weights = float(kind.params - kind.others) / tp
    each = weights * float(x.profile.cast_bytes) / float(x.system.memory_bytes_per_s * x.system.memory)
    assert found[1] - found[0] == pytest.approx(2 * float(on.micro_batches) * float(x.shape.layers) * each)
    assert found[2] == pytest.approx(found[0])


def test_units_are_copied_out_of_what_was_gathered_and_into_what_is_reduced() -> None:
    """Two gathers of 2 + 2 bytes a parameter, a reduction of 2 + 4; nothing at level 2, which keeps parameters."""
    for zero, each in ((3, 2 * 4 + 6), (2, 0)):
        x = one(f"dp=8,zero={zero}", stack="torchtitan-compiled")
        with_, without = (
            step(x.shape, x.layout, x.system, replace(x.profile, copies_units=c)).terms["dp"] for c in (1.0, 0.0)
        )
        moved = float(x.layout.micro_batches) * each * float(x.shape.params)
        assert float(with_ - without) * float(x.system.memory_bytes_per_s * x.system.memory) == pytest.approx(moved)


def test_each_part_of_an_expert_permutes_the_rows_that_all_of_them_gathered() -> None:
    for etp in (1, 4):
        x = one(f"dp=2,tp=4,ep={8 // etp},etp={etp},sp=1", "mixtral-8x7b")
        moved = [
            float(step(x.shape, x.layout, x.system, replace(x.profile, token_bytes=b)).terms["ep"]) for b in (0, 100)
        ]
        rows = float(x.layout.tokens) / 4 * 2 * (1 + etp) / 2
        each = 100 * rows * 4096 / float(x.system.memory_bytes_per_s * x.system.memory)
        assert moved[1] - moved[0] == pytest.approx(2 * float(x.layout.micro_batches) * 32 * each)


def test_each_of_a_ranks_experts_takes_its_time() -> None:
    """Half as many expert-parallel ranks: twice as many experts on a rank, 3 passes of each."""
    per = 1e-3
    for ep in (4, 8):
        found = one(f"dp=64,ep={ep},micro_batch=4", "mixtral-8x7b")
        with_, without = (
            step(found.shape, found.layout, found.system, replace(found.profile, expert_s=s)).terms["ep"]
            for s in (per, 0.0)
        )
        m, blocks = float(found.layout.micro_batches), float(found.shape.layers)
        assert float(with_ - without) == pytest.approx(m * blocks * 3 * per * 8 / ep)
