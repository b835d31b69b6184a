"""Muon: whole matrices from the pieces that ranks hold, under every strategy as in one process, and as predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import rank_cases
from support.proving import prove
from support.rank_pool import Pool
from support.sizes import examples, sampled
from support.strategies import TRANSPORTS, cases, evenly
from torch.optim._muon import _zeropower_via_newtonschulz

from phalanx.answers.configurations.export import export
from phalanx.cost.analytic.estimate import estimate
from phalanx.cost.step.predict import predict
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.nn.optimizers import orthogonalise
from phalanx.observation.parity.parity import BOUNDS
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.schedule.gradients.whole_matrices import Exchange
from phalanx.schedule.layout import Layout
from phalanx.spec.cluster.presets import preset
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_model
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Job, Precision, Train
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec, parameters
from phalanx.spec.optimizers import Optimizer
from phalanx.spec.strategy.legality import require_runnable
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse
from phalanx.spec.strategy.stack_options import StackOptions
from phalanx.training.training_step import Training

MUON = Optimizer("muon")
SIZES = {
    "family": "llama",
    "vocab": 61,
    "hidden": 16,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "ffn": 40,
    "max_seq": 16,
}
SPEC = build(ModelSpec, complete(SIZES | {"max_seq": 16}), "model")


@examples(3, 50)
@pytest.mark.parametrize(
    ("world", "experts"), sampled([(2, False), (2, True), (3, False), (4, False), (4, True), (6, True)], (0, 4))
)
def test_parity_in_fp64(pool: Pool, world: int, experts: bool, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(world, experts=experts), TRANSPORTS)
    def holds(case, transport) -> None:  # type: ignore[no-untyped-def]
        for found in pool.run(world, rank_cases.examine, *case, "float64", 5, transport, ("muon",))[0]:
            assert found.loss_rel_max <= BOUNDS["float64"], found
            assert found.grad_rel_max <= BOUNDS["float64"], found

    holds()


@examples(2, 50)
@pytest.mark.parametrize(
    ("world", "experts"), sampled([(1, False), (2, False), (3, True), (4, False), (4, True)], (3, 4))
)
def test_a_recorded_step_is_the_predicted_one(pool: Pool, world: int, experts: bool, examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(world, small=False, compressed=not experts, experts=experts), TRANSPORTS)
    def equal(case, transport) -> None:  # type: ignore[no-untyped-def]
        case = _under_muon(*case)
        if not experts or evenly(case):
            prove(*case)
        for found in pool.run(world, rank_cases.instrumented_step, *case, transport, experts):
            assert found["differences"] == []
            room = 0.02 if experts else 0.0
            assert found["predicted_peak"] == pytest.approx(found["measured_peak"], rel=room, abs=found["slack"]), (
                case
            )

    equal()


@examples(2, 50)
def test_worlds_that_are_not_here(examples: int) -> None:
    @settings(max_examples=examples)
    @given(cases(64, small=False))
    def proved(case) -> None:  # type: ignore[no-untyped-def]
        prove(*_under_muon(*case))

    proved()


def _under_muon(model: ModelSpec, job: Job, s: Strategy) -> tuple[ModelSpec, Job, Strategy]:
    precision = Precision("bfloat16") if job.precision.compute == "float16" else job.precision
    return model, replace(job, optimizer=MUON, precision=precision), s


@examples(20, 300)
@pytest.mark.parametrize("experts", [False, True])
def test_an_exchange_brings_every_element_to_its_owner(experts: bool, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(cases(24, experts=experts))
    def holds(case) -> None:  # type: ignore[no-untyped-def]
        model, job, s = _under_muon(*case)
        view = Layout(model, job, s).rank_view(0)
        hidden = sum(p.numel for p in parameters(view.local) if p.matrices)
        assert sum(m.elements for x in view.exchanges for m in x.matrices) == hidden
        for x in view.exchanges:
            _complete(x)

    holds()


def _complete(x: Exchange) -> None:
    """Require that what ranks send is what owners wait for, and that this is all of every matrix, once a part."""
    sent = Counter(
        (x.owners[number], sender, number, start, stop)
        for sender in range(len(x.places))
        for number, start, stop in x.pieces(sender)
    )
    awaited = Counter((owner, *piece) for owner in range(len(x.places)) for piece in x.received(owner))
    assert sent == awaited
    parts = {part for _, part in x.places}
    for number, m in enumerate(x.matrices):
        for part in parts:
            here = sorted((a, b) for _, who, i, a, b in sent if i == number and x.places[who][1] == part)
            assert here[0][0] == 0
            assert here[-1][1] == m.elements
            assert all(a[1] == b[0] for a, b in pairwise(here))
    # Owners have about the same products: none could give one away to whom it would still have less.
    loads = [sum(x.rule.product_flops(*x.matrices[i].shape) for i in x.owned(r)) for r in range(len(x.places))]
    least = min(x.rule.product_flops(*m.shape) for m in x.matrices)
    assert max(loads) - min(loads) <= max(x.rule.product_flops(*m.shape) for m in x.matrices)
    assert x.most_flops == max(loads) >= least


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_matrix_is_orthogonalised_as_torch_does(rows: int, columns: int, seed: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    theirs = _zeropower_via_newtonschulz(x.clone(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    torch.testing.assert_close(orthogonalise([x.clone()], 5), theirs)


def test_steps_are_those_of_torch() -> None:
    """torch.optim.Muon and AdamW on the same gradients: matrices of blocks by the one, all else by the other."""
    job = Job(2, 8, Precision("bfloat16"), MUON, clip=0.0)
    ours = Training(SPEC, job, Strategy(), Comm(ALONE, mesh(Strategy())), seed=0)
    theirs = {name: master.clone() for name, master in ours.masters.items()}
    hidden = [p.fqn for p in parameters(SPEC) if p.matrices]
    assert len(hidden) == 2 * 7
    vectors = [theirs[p.fqn] for p in parameters(SPEC) if len(p.shape) == 1]
    tables = [theirs[p.fqn] for p in parameters(SPEC) if len(p.shape) > 1 and not p.matrices]
    optimizers = [
        torch.optim.Muon([theirs[name] for name in hidden], adjust_lr_fn="match_rms_adamw", weight_decay=0.1),
        torch.optim.AdamW([{"params": tables}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)),
    ]
    for group in optimizers[1].param_groups[:1]:
        group["weight_decay"] = 0.1
    for step in range(3):
        lr = 1e-2 * (step + 1)
        tokens = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(step))
        ours.step([tokens[:1], tokens[1:]], lr)
        gradients = ours.gradients()
        for name, weight in theirs.items():
            weight.grad = gradients[name].clone()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        for name, weight in theirs.items():
            torch.testing.assert_close(ours.masters[name], weight, rtol=1e-5, atol=1e-7, msg=name)


def test_muon_keeps_less_and_takes_longer() -> None:
    """In the exact engine and in the formulas, where a job's Muon is the option of a stack."""
    model = make_model({"preset": "llama3-8b"}, Path())[0]
    cluster, s = preset("dgx-h100", 64), Strategy(**parse("dp=32,zero=1,tp=2,sp=1"))
    adam, muon = (Job(64, 4096, Precision("bfloat16"), Optimizer(name)) for name in ("adamw", "muon"))  # type: ignore[arg-type]
    exact = [predict(model, cluster, job, s) for job in (adam, muon)]
    assert exact[1].state_bytes < exact[0].state_bytes
    assert exact[1].optimizer_s > exact[0].optimizer_s
    assert exact[1].exposed_communication_s > exact[0].exposed_communication_s
    first, second, option = (
        estimate(model, cluster, job, s, "megatron-core", options=options)
        for job, options in ((adam, StackOptions()), (muon, StackOptions()), (adam, StackOptions(optimizer="muon")))
    )
    assert float(second.memory.reserved) < float(first.memory.reserved)
    assert float(second.step.terms["optimizer"]) > float(first.step.terms["optimizer"])
    assert float(second.step.seconds) == float(option.step.seconds)
    with pytest.raises(InputError, match=r"muon.*is not in nanotron"):
        estimate(model, cluster, muon, s, "nanotron")


def test_a_stack_that_has_it_is_told_so() -> None:
    model = make_model({"preset": "llama3-8b"}, Path())[0]
    s = Strategy(**parse("dp=4,zero=1,tp=2,sp=1"))
    job = Job(64, 4096, Precision("bfloat16"), replace(MUON, momentum=0.9))
    plan = Plan(model, preset("dgx-h100", 8), job, s, Train(), {}, {})
    assert DOCUMENTED["megatron-core"].options["optimizer"].allows("muon")
    lines = export(plan, "megatron").files["train.sh"]
    for words in ("--optimizer muon", "--muon-momentum 0.9", "--muon-nesterov", "--muon-extra-scale-factor 0.2"):
        assert words in lines
    assert any("muon_momentum" in text for text in export(plan, "bridge").files.values())
    with pytest.raises(InputError, match="muon"):
        export(plan, "nanotron")


def test_float16_has_no_room_for_directions() -> None:
    with pytest.raises(InputError, match="use bfloat16"):
        require_runnable(Strategy(), Job(2, 8, Precision("float16"), MUON))
