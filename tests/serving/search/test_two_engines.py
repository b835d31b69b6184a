"""Two engines say how long tokens take in a closed loop: the steady state's formula, with which measured runs are
scored, and the simulation, by which `serve plan` decides. On drawn loads and one price they are held together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.sizes import examples

from phalanx.planning.lookup import cluster_named, model_named
from phalanx.schedule.generation import BatchingPolicy
from phalanx.serving.cost.layout import ServingLayout
from phalanx.serving.cost.roofline import ServingPrice
from phalanx.serving.cost.steady_state import SteadyLoad, aggregated
from phalanx.serving.search.copies import Tabulated
from phalanx.serving.simulation.deployment import Deployment, WorkerSpec
from phalanx.serving.simulation.outcome import outcome
from phalanx.serving.simulation.requests import closed_loop, equal_requests, gamma_requests
from phalanx.serving.simulation.simulation import simulate

_MODELS = {name: model_named(name)[0] for name in ("llama3-8b", "llama3-70b", "deepseek-v3")}
_CLUSTER = cluster_named("dgx-h100")(8)


@examples(8, 80)
@pytest.mark.parametrize("once", [False, True])
def test_the_formula_is_the_simulation_of_its_loop(examples: int, once: bool) -> None:
    """Steady: clients begin within a request's time. `once`: all send at once, and nothing after it.

    The formula leaves out that prompts wait for each other by chance, and that those of one step end together: its
    time to first token is below.
    """
    for seed in range(examples):
        hold(seed, once)


def hold(seed: int, once: bool) -> None:
    """Hold one drawn load's times against each other."""
    draw = np.random.default_rng(seed)
    name = str(draw.choice(list(_MODELS)))
    tp = 8 if name == "deepseek-v3" else int(draw.choice((2, 4, 8)))
    clients, given, made = int(2 ** draw.uniform(1, 6)), int(2 ** draw.uniform(9, 13)), int(2 ** draw.uniform(7, 10))
    price, x = ServingPrice(_MODELS[name], _CLUSTER, "vllm", "fp8", "bf16"), ServingLayout(tp, 1, 1, tp, 1)
    c = replace(price.constants, first_s=0.0, first_steps=0.0, token_s=0.0, burst=0.0)
    load = SteadyLoad(float(clients), float(given), float(made), 1e13, 0.0, float(once), 8192.0, 1.0)
    tpot, ttft = (float(v) for v in aggregated(price.shape, price.split(x), price.chip, c, load))
    table = Tabulated(partial(price.seconds, x), clients, given + made, 8192)
    worker = WorkerSpec(table, BatchingPolicy(clients, 8192 + clients, reserve=False), pages=10**6)
    if once:
        requests = closed_loop(equal_requests(clients, given, made), clients)
    else:
        requests = gamma_requests(8 * clients, given, made, 0.06, given + made + 8192, seed)
        requests = closed_loop(requests, clients, ttft + made * tpot)
    seen = outcome(simulate(Deployment((worker,)), requests, seed), warm=0.0 if once else 0.1)
    assert tpot == pytest.approx(seen.tpot.mean, rel=0.3 if once else 0.06)
    assert (0.55 if once else 0.65) * seen.ttft.mean < ttft < (1.15 if once else 1.04) * seen.ttft.mean
