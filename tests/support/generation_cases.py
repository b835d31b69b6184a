"""Generation examined on pool ranks: against one process without a cache, and against its StepPrograms."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from phalanx.cost.step.generation import generation_step
from phalanx.infer.generate import BatchedGeneration
from phalanx.infer.sampling import Sampling
from phalanx.nn.decoder import Decoder
from phalanx.nn.init import draw
from phalanx.observation.diff import differences
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.recorder import RunningPass
from phalanx.runtime.process.environment import World
from phalanx.runtime.tracing.instrument import instrument
from phalanx.schedule.generation import BatchingPolicy, Request, pages_of
from phalanx.spec.errors import InputError
from phalanx.spec.model.spec import ModelSpec, Parameter, buffers, parameters
from phalanx.spec.strategy.generation import require_generation, serving_model
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, divisors
from support.strategies import mixed, models, with_experts


class Drawn:
    """Weights of a model, ten times those that training starts from, so that tokens differ in likelihood; and a
    balance bias that changes choices."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._named: dict[str, Parameter] = {p.fqn: p for p in (*parameters(spec), *buffers(spec))}

    def has(self, fqn: str) -> bool:
        return fqn in self._named

    def dtype(self, fqn: str) -> torch.dtype:
        return torch.float64

    def slice(self, fqn: str, start: int, stop: int) -> Tensor:
        p = self._named[fqn]
        if p.role == "balance":
            return torch.linspace(-0.1, 0.1, p.numel)[start:stop]
        values = torch.from_numpy(draw(self._spec, p, 1, start, stop)).double()
        return values + 0.1 if p.role == "norm" or p.role.endswith("_bias") else values * 10


def _whole(model: ModelSpec) -> Decoder:
    decoder, weights = Decoder(serving_model(model), torch.float64), Drawn(model)
    with torch.no_grad():
        for p in parameters(model):
            decoder.get_parameter(p.fqn).copy_(weights.slice(p.fqn, 0, p.numel).view(p.shape))
        for b in buffers(model):
            decoder.get_buffer(b.fqn).data = weights.slice(b.fqn, 0, b.numel).double()
    return decoder


@torch.no_grad()
def generated(
    world: World,
    model: ModelSpec,
    strategy: Strategy,
    requests: list[Request],
    how: Sampling,
    policy: BatchingPolicy,
    instrumented: int = 2,
) -> dict[str, Any]:
    """Generate, and return the tokens of each request; the largest relative deviation of logits from a whole model
    over the whole text; where the steps differ from their programs; and bytes cached and predicted. Of the first
    `instrumented` steps, units and FLOPs are compared too."""
    comm = Comm(world, mesh(strategy))
    run = BatchedGeneration(model, strategy, comm, Drawn(model), "float64", requests, how, policy)
    texts = {r.number: list(r.prompt) for r in requests}
    new: list[tuple[int, int]] = []
    logits_of: list[tuple[int, int, Tensor]] = []  # by request and the length of its text
    found, cache = [], (0, 0)
    while not run.done:
        new.clear()
        units = run.replica.model.units()
        watched = (
            instrument(units, comm.recorder, lambda: RunningPass(0, "F"))
            if run.number < instrumented
            else nullcontext()
        )
        comm.recorder.clear()
        comm.recorder.keeping = True
        with watched:
            step = run.step(lambda request, token, last: new.append((request, token)))
        comm.recorder.keeping = False
        batch = step.batches[run.replica_index]
        total = sum(b.samples for b in step.batches)
        program = generation_step(run.view, batch, total, run.room)
        expected = [e for e in program.events if e.axis or run.number <= instrumented]
        found += [str(d) for d in differences(expected, comm.recorder.events)]
        cache = program.state.cache, run.replica.cache.nbytes
        rows = [slot for slot in batch.slots if slot.samples]
        for slot, logits in zip(rows, step.logits if step.logits is not None else (), strict=False):
            logits_of.append((slot.request, len(texts[slot.request]), logits.clone()))
        for request, token in new:
            texts[request].append(token)
    comm.barrier()
    whole, deviation = _whole(model), 0.0
    at_once = {request: whole(torch.tensor([texts[request]]))[0] for request in {of for of, _, _ in logits_of}}
    for request, length, logits in logits_of:
        expected_logits = at_once[request][length - 1]  # which no later token changes
        deviation = max(deviation, float((logits - expected_logits).norm() / expected_logits.norm()))
    # On the last stage every request's every token has been looked at.
    return {
        "texts": {r.number: texts[r.number][len(r.prompt) :] for r in requests},
        **{"deviation": deviation, "differences": found, "looked": len(logits_of), "cache": cache},
    }


def alone(model: ModelSpec, requests: list[Request], how: Sampling) -> dict[int, list[int]]:
    """Return the tokens of each request as one process without a cache gets them."""
    from phalanx.infer.sampling import choose

    whole, texts = _whole(model), {}
    with torch.no_grad():
        for r in requests:
            ids = list(r.prompt)
            while len(ids) - len(r.prompt) < r.most and (len(ids) == len(r.prompt) or ids[-1] not in r.stops):
                logits = whole(torch.tensor([ids]))[0, -1].numpy()
                ids.append(choose(logits, how, r.number, len(ids)))
            texts[r.number] = ids[len(r.prompt) :]
    return texts


def several(world: World, cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Run several cases on the same ranks."""
    return [generated(world, *case) for case in cases]


@st.composite
def drawn(draw: st.DrawFn, world: int) -> tuple[ModelSpec, Strategy, list[Request], Sampling, BatchingPolicy]:
    """Draw a model of any family, a strategy of `world` ranks that splits it, prompts, sampling and policy."""
    model = draw(st.one_of(models(small=True), with_experts(small=True), mixed(small=True)).filter(_generates))
    options = [s for s in _strategies(world) if _fits(model, s)]
    strategy = draw(st.sampled_from(options or [Strategy(dp=world)]))
    requests = []
    for number in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, model.vocab - 1), min_size=1, max_size=14))
        stops = draw(st.sampled_from([(), (draw(st.integers(0, model.vocab - 1)),)]))
        requests.append(
            Request(number, tuple(prompt), draw(st.integers(1, 5)), stops, draw(st.sampled_from([0, 0, 2, 7])))
        )
    page = draw(st.integers(1, 7))
    policy = BatchingPolicy(draw(st.integers(1, 4)), draw(st.integers(1, 12)), page)
    if draw(st.booleans()):
        most = max(pages_of(r, policy) for r in requests)
        policy = BatchingPolicy(policy.slots, policy.chunk, page, most + draw(st.integers(0, 4)))
    how = Sampling(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 5])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        seed=draw(st.integers(0, 9)),
    )
    return model, strategy, requests, how, policy


def _generates(model: ModelSpec) -> bool:
    return _fits(model, Strategy())


def _fits(model: ModelSpec, s: Strategy) -> bool:
    try:
        require_generation(model, s)
    except InputError:
        return False
    return True


def _strategies(world: int) -> list[Strategy]:
    made = []
    for pp in divisors(world):
        for tp in divisors(world // pp):
            dp = world // pp // tp
            for ep in divisors(dp * tp):
                made += [Strategy(dp=dp, tp=tp, pp=pp, ep=ep, etp=etp) for etp in divisors(dp * tp // ep)]
    return made
