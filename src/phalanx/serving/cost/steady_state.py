"""Time per token and time to first token of a closed loop of requests, in the steady state, in columns.

C clients repeatedly send a prompt of I tokens and wait for O tokens. With B sequences in a batch, t(B) seconds of a
decoding step at the mean context I + O/2, and T_p seconds that a prompt adds to the steps that compute it,

    F    = T_1 + f (B - 1) T_b + (p - 1) / 2 TPOT   T_1: the prompt's own step; others' before it; looks every p steps
    TPOT = t(B) + (1 - f) (B - 1) T_p / O           in a cycle each of the others' prompts is computed once: either
                                                    before this one (f), or while it decodes
    B    = S O TPOT / (O TPOT + F)                  of the S = min(C, slots) requests, those that decode
    TTFT = t_0 + F + s TPOT + (C - S) / S (O TPOT + F)      s TPOT: tokens leave in intervals; slots: caches that fit

T_b: seconds of a prompt in steps full of prompts, as at the start, when all clients send at once. f is 1/2 where each
client sends one request, and less where it sends several.

Where other workers compute prompts, both are stations of a closed network (Bard 1979; Schweitzer 1979): X requests/s,

    R_p = T_1 (1 + (C - 1)/C Q_p / workers)     R_d = O t(B / workers)     X = C / (R_p + R_d)     Q_p = X R_p
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.cost.hardware.columns import Column
from phalanx.serving.cost.engines import EngineConstants
from phalanx.serving.cost.shape import ServingShape
from phalanx.serving.cost.step import (
    ChipRates,
    GpuSplit,
    StepLoad,
    request_bytes,
    state_bytes,
    step_parts,
    weight_bytes,
)

STEP_TOKENS = 8192
"""Default tokens of a step: as engines have it on GPUs of 80 GB and more."""
SHARE, WORKSPACE = 0.9, 4 * 2**30
"""Share for caches of the memory that weights leave; bytes of activations, graphs and libraries on a GPU."""


@dataclass(frozen=True)
class SteadyLoad:
    """Requests in a closed loop."""

    concurrency: Column
    """Clients of the whole deployment."""
    input: Column
    output: Column
    memory_bytes: Column
    """Memory of a GPU."""
    same_length: Column
    """1: all requests have one length, so they arrive in waves."""
    at_once: Column
    """1: all requests are sent at once, so a prompt waits for half of the others."""
    step_tokens: Column
    """The most prompt tokens of a step."""
    poll_steps: Column
    """Steps between two polls for new requests; 1: the engine polls before each step."""


def _seconds(m: ServingShape, x: GpuSplit, chip: ChipRates, c: EngineConstants, b: StepLoad) -> Any:
    return sum(step_parts(m, x, chip, c, b).values())


def prompt_batch(x: GpuSplit, load: SteadyLoad, sequences: Any, context: Any) -> tuple[StepLoad, Any, Any]:
    """Return (load of a step with prompts and `sequences` that decode, steps of a prompt, prompts of a step of an
    attention group). A step takes the prompts that arrived during the last step, up to its token budget; long prompts
    are cut into chunks."""
    chunks = np.ceil(load.input / load.step_tokens)
    together = np.clip(sequences / load.output / x.attention_dp, 1.0, np.maximum(load.step_tokens / load.input, 1.0))
    tokens = load.input * x.attention_dp * together
    pairs = tokens * (load.input + 1) / 2
    return StepLoad(tokens / chunks, pairs / chunks, x.attention_dp * together, sequences, context), chunks, together


def _waits(c: EngineConstants, load: SteadyLoad) -> Any:
    """Return the share of all concurrent prompts that the mean prompt waits for."""
    return np.where(load.at_once > 0, 0.5, np.where(load.same_length > 0, c.wave, c.burst))


def _burst_s(m: ServingShape, x: GpuSplit, chip: ChipRates, c: EngineConstants, load: SteadyLoad, most: Any) -> Any:
    """Return the seconds of a prompt in steps that hold only prompts."""
    none = 0.0 * most
    together = np.clip(most / x.attention_dp, 1.0, np.maximum(load.step_tokens / load.input, 1.0))
    tokens = load.input * together * x.attention_dp
    chunks = np.ceil(load.input / load.step_tokens)
    batch = StepLoad(tokens / chunks, tokens / chunks * (load.input + 1) / 2, together, none, none)
    return chunks * _seconds(m, x, chip, c, batch) / together / x.attention_dp


def slots(m: ServingShape, x: GpuSplit, load: SteadyLoad) -> Any:
    """Return the requests of mean length whose cache fits at once: at least one per attention group."""
    room = SHARE * (load.memory_bytes - weight_bytes(m, x) - WORKSPACE)
    each = request_bytes(m, x, load.input + load.output / 2) / x.pp
    return np.maximum(room / each, 1.0) * x.attention_dp


def aggregated(
    m: ServingShape, x: GpuSplit, chip: ChipRates, c: EngineConstants, load: SteadyLoad
) -> tuple[Any, Any]:
    """Return (seconds per output token, seconds to the first token) of workers that prefill and decode."""
    most = np.minimum(load.concurrency, slots(m, x, load))
    waits = _waits(c, load)
    batch, none = most, 0.0 * most
    burst = _burst_s(m, x, chip, c, load, most)
    for _ in range(4):
        context = batch * (load.input + load.output / 2)
        decode = _seconds(m, x, chip, c, StepLoad(none, none, none, batch, context))
        decoding, chunks, together = prompt_batch(x, load, batch, context)
        mixed = chunks * _seconds(m, x, chip, c, decoding)
        added = np.maximum(mixed - chunks * decode, 0.0) / x.attention_dp / together
        others = np.maximum(batch - 1, 0.0)
        tpot = decode + (1 - waits) * others * added / load.output
        first = mixed + waits * others * burst + (load.poll_steps - 1) / 2 * tpot
        batch = 0.5 * batch + 0.5 * np.maximum(
            most * load.output * tpot / (load.output * tpot + first), np.minimum(most, 1.0)
        )
    balance = np.where(x.attention_dp > 1, c.balance_steps, 0.0)
    ttft = c.first_s + c.token_s * load.input + first + (c.first_steps + balance) * tpot
    return tpot, ttft + (load.concurrency - most) / most * (load.output * tpot + first)


def disaggregated(
    m: ServingShape,
    prefill: tuple[GpuSplit, Column],
    decode: tuple[GpuSplit, Column],
    chip: ChipRates,
    c: EngineConstants,
    load: SteadyLoad,
) -> tuple[Any, Any]:
    """Return (seconds per output token, seconds to the first token) of separate workers, `prefill` and `decode`:
    (split, number of workers)."""
    (xp, before), (xd, after) = prefill, decode
    none = 0.0 * load.concurrency
    alone, chunks, _ = prompt_batch(xp, load, none, none)
    prompt_s = chunks * _seconds(m, xp, chip, c, alone)
    servers = before * xp.attention_dp
    waiting, total = none, load.concurrency
    room = slots(m, xd, load) * after
    batch = np.minimum(total, room)
    for _ in range(25):
        each = np.maximum(batch / after, 1e-3)
        step = _seconds(m, xd, chip, c, StepLoad(none, none, none, each, each * (load.input + load.output / 2)))
        first = prompt_s * (1 + (total - 1) / total * waiting / servers)
        rate = total / (first + load.output * step)
        waiting = 0.5 * (waiting + rate * first)
        batch = 0.5 * (batch + np.minimum(rate * load.output * step, room))
    first = np.maximum(first, total / rate - load.output * step)
    waits = _waits(c, load)
    sent = (m.cache + m.window_cache) * xp.cache_bytes * load.input + state_bytes(m, xp) * xp.tp
    transfer = sent / chip.net_bytes_per_s
    ttft = (
        c.first_s
        + c.token_s * load.input
        + first
        + transfer
        + c.first_steps * step
        + waits * total * prompt_s / servers
    )
    return step, ttft
