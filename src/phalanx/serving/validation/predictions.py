"""Measured serving runs, and the predicted steady state of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from phalanx.cost.analytic.chips import chip_name
from phalanx.cost.hardware.columns import gather
from phalanx.serving.cost.engines import LAUNCHES, engine, release_of
from phalanx.serving.cost.shape import ServingShape, shape_of
from phalanx.serving.cost.steady_state import STEP_TOKENS, SteadyLoad, aggregated, disaggregated
from phalanx.serving.cost.step import BYTES, ChipRates, GpuSplit, product_rate
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.presets import preset
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.number_formats import NUMBER_FORMATS
from phalanx.validate.records import Row, load, readable

_DATA = Path(__file__).parent / "data"
RUNS = _DATA / "runs.csv.xz"
LEFT_OUT = _DATA / "left_out.json"
"""(model, GPU, engine) -> constants of engines, fitted without its runs."""
NEEDED = ("framework", "gpu", "model", "mode", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms")
Floats = npt.NDArray[np.float64]
_DOMAIN = {"GB200": 72, "GB300": 72}
_NAMES = {
    **dict.fromkeys(("bfloat16", "fp16", "float16", "half"), "bf16"),
    **dict.fromkeys(("int4_wo", "w4a16", "awq", "gptq", "w4afp8"), "int4"),
    **dict.fromkeys(("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"), "mxfp4"),
    **{"fp4": "nvfp4", "fp8_e4m3": "fp8", "w4a4_nvfp4": "nvfp4"},
}
"""Other names of types, of engines and their tools."""
_MEAN_LENGTH = 0.9
"""Mean lengths in closed loops over the stated ones: InferenceX draws them between 0.8 and 1 of these."""
_POLLS, _POLLS_FROM = (10.0, 30.0), 16
"""SGLang's --scheduler-recv-interval in InferenceX's recipes: below this number of clients, and from it on."""
_NET = 50e9
"""Bytes/s of a GPU's network port: 400 Gbit/s."""


@dataclass(frozen=True)
class ServingCase:
    """A measured run with the inputs of its steady state."""

    row: Row
    engine: str
    release: str
    """The row of constants: an engine, or a release of it."""
    shape: ServingShape
    chip: ChipRates
    load: SteadyLoad
    prefill: GpuSplit
    """Split of the prefill workers; in aggregated runs the same as `decode`."""
    decode: GpuSplit
    workers: tuple[float, float]
    """Numbers of prefill and decode workers; (1, 1): workers do both."""
    apart: bool
    """Whether prefill and decode workers are separate."""

    @property
    def group(self) -> tuple[str, str, str]:
        """The key by which runs are left out together."""
        return self.row["model"], self.row["gpu"], self.engine


class Unscored(Exception):
    """A run cannot be predicted, for the reason in the message."""


def case_of(row: Row) -> ServingCase:
    """Return the case of a run. Raises Unscored, or InputError for an unknown name."""
    name = row["framework"].lower()
    engine(name)
    if row["mode"] not in ("aggregated", "disaggregated"):
        raise Unscored(f"mode {row['mode'] or 'unknown'} is neither aggregated nor disaggregated")
    if row["topology"] == "partial":
        raise Unscored("how many workers compute prompts is not recorded")
    if (row.count("prefix") or 0) > 0:
        raise Unscored("requests share prefixes, how often they hit the cache is not recorded")
    chip = chip_name(row["gpu"].replace("_", "-").upper())
    numbers = [row.number(k) for k in ("isl", "osl", "concurrency")]
    if not all(numbers):
        raise Unscored("isl, osl or concurrency is missing")
    isl, osl, clients = (float(n or 0) for n in numbers)
    if osl < 2:
        raise Unscored("one token is generated, so there is no time per further token")
    weights, experts = _types(row, chip)
    data = CHIPS[chip]
    shape = _shape(row["model_path"], row["model"])
    separate = row["mode"] == "disaggregated"
    kv = _cache_bytes(row, name, chip, weights, experts)
    decode = _split(row, "decode_" if separate else "", weights, experts, kv, shape)
    prefill = _split(row, "prefill_", weights, experts, kv, shape) if separate else decode
    workers = (1.0, 1.0)
    if separate:
        counts = [row.number(f"{k}_num_workers") for k in ("prefill", "decode")]
        if not all(counts):
            raise Unscored("how many workers compute prompts is not recorded")
        workers = (float(counts[0] or 0), float(counts[1] or 0))
    rates = ChipRates(
        memory_bytes_per_s=data.bandwidth_bytes_per_s,
        half=data.half,
        weights=product_rate(data, weights),
        experts=product_rate(data, experts),
        link_bytes_per_s=data.link_bytes_per_s,
        net_bytes_per_s=data.link_bytes_per_s if chip in _DOMAIN else _NET,
        domain=_DOMAIN.get(chip, 8),
        launches=LAUNCHES.get(data.generation, 1.0),
    )
    if not separate and (gpus := row.number("n_gpus")):
        clients /= max(1.0, gpus // (decode.tp * decode.attention_dp * decode.pp))  # of one copy of several
    closed = row["load_pattern"] == "closed_loop"
    if closed:
        isl, osl = isl * _MEAN_LENGTH, osl * _MEAN_LENGTH
    poll = 1.0 if name != "sglang" or not closed or separate else _POLLS[clients >= _POLLS_FROM]
    at_once = float(row["load_pattern"] == "burst_inferred")
    stated = row.number("isl") or 0.0
    budget = stated + clients + 64 if name == "trtllm" and closed and not separate else STEP_TOKENS
    load = SteadyLoad(clients, isl, osl, data.memory_bytes, float(not closed), at_once, budget, poll)
    return ServingCase(
        row, name, release_of(name, row["framework_version"]), shape, rates, load, prefill, decode, workers, separate
    )


def _types(row: Row, chip: str) -> tuple[str, str]:
    weights = _NAMES.get(row["weights_dtype"].lower(), row["weights_dtype"].lower())
    experts = _NAMES.get(row["moe_weights_dtype"].lower(), row["moe_weights_dtype"].lower())
    if not row["weights_dtype"]:
        weights = {"fp8": "fp8", "fp4": "nvfp4", "int4": "int4"}.get(row["precision"], "bf16")
    experts = experts if row["moe_weights_dtype"] else weights
    for name, kind in (("weights_dtype", weights), ("moe_weights_dtype", experts)):
        if kind not in BYTES:
            raise InputError(name, kind, "is not a type of weights that Phalanx knows", nearest(kind, BYTES))
        if kind == "nvfp4" and not CHIPS[chip].has(NUMBER_FORMATS["nvfp4"]):
            raise InputError(name, kind, f"needs Blackwell's tensor cores, {chip} has none", "use fp8 or int4")
    return weights, experts


@cache
def _shape(path: str, name: str) -> ServingShape:
    fields = complete(preset(*(n for n in (path, name) if n)))
    return shape_of(build(ModelSpec, fields, "model"))


def _cache_bytes(row: Row, name: str, chip: str, weights: str, experts: str) -> float:
    """Return the bytes of an element of the cache; if the row does not say, by engines' recipes for quantised
    weights."""
    if row["kv_dtype"] in ("fp8", "bf16", "bfloat16", "fp16"):
        return 1.0 if row["kv_dtype"] == "fp8" else 2.0
    quantised = min(BYTES[weights], BYTES[experts]) < 2
    blackwell = CHIPS[chip].has(NUMBER_FORMATS["nvfp4"])
    return 1.0 if quantised and (blackwell or name == "trtllm") else 2.0


def _split(row: Row, side: str, weights: str, experts: str, kv: float, shape: ServingShape) -> GpuSplit:
    tp, dp, moe_tp, moe_ep = (
        float(row.number(f"{side}{k}") or 1) for k in ("tp", "attention_dp", "moe_tp", "moe_ep")
    )
    if moe_tp * moe_ep > tp * dp:
        raise Unscored(f"experts lie over {moe_tp * moe_ep:g} ranks, attention over {tp * dp:g}")
    if moe_tp * moe_ep < tp * dp:
        moe_tp = tp * dp / moe_ep
    if shape.experts and shape.expert_ffn / moe_tp < 128 and moe_tp > 8:
        moe_tp, moe_ep = 1.0, tp * dp  # no kernel has tiles so narrow: the row means expert parallelism
    return GpuSplit(tp, dp, float(row.number("pp") or 1), moe_tp, moe_ep, BYTES[weights], BYTES[experts], kv)


def cases(rows: Sequence[Row]) -> tuple[list[ServingCase], list[tuple[Row, str]]]:
    """Return the cases of rows that can be predicted, and (row, reason) of the others."""
    return readable(rows, case_of, Unscored, InputError)


@dataclass(frozen=True)
class Columns:
    """Cases of one mode as columns."""

    shape: ServingShape
    chip: ChipRates
    load: SteadyLoad
    prefill: GpuSplit
    decode: GpuSplit
    workers: tuple[Floats, Floats]
    engines: tuple[str, ...]
    apart: bool


def columns(cases: Sequence[ServingCase]) -> Columns:
    """Return cases of one mode as columns."""
    return Columns(
        gather([c.shape for c in cases]),
        gather([c.chip for c in cases]),
        gather([c.load for c in cases]),
        gather([c.prefill for c in cases]),
        gather([c.decode for c in cases]),
        (np.array([c.workers[0] for c in cases]), np.array([c.workers[1] for c in cases])),
        tuple(c.release for c in cases),
        cases[0].apart,
    )


def times(c: Columns, fitted: Mapping[str, Mapping[str, float]] | None = None) -> tuple[Floats, Floats]:
    """Return (seconds per output token, seconds to the first token) of cases of one mode. `fitted`: constants by
    engine; None: the shipped ones."""
    kinds = {name: engine(name, fitted) for name in set(c.engines)}
    constants = gather([kinds[name] for name in c.engines])
    if not c.apart:
        return aggregated(c.shape, c.decode, c.chip, constants, c.load)
    before, after = c.workers
    return disaggregated(c.shape, (c.prefill, before), (c.decode, after), c.chip, constants, c.load)


def predict(
    cases: Sequence[ServingCase], fitted: Mapping[str, Mapping[str, float]] | None = None
) -> tuple[Floats, Floats]:
    """Return (seconds per output token, seconds to the first token) of each case. `fitted`: as in `times`."""
    tpot, ttft = np.zeros(len(cases)), np.zeros(len(cases))
    for apart in (False, True):
        which = [i for i, c in enumerate(cases) if c.apart == apart]
        if which:
            tpot[which], ttft[which] = times(columns([cases[i] for i in which]), fitted)
    return tpot, ttft


def load_runs(path: Path | None = None) -> list[Row]:
    """Read measured runs: the shipped ones, or a file with the same columns. Raises InputError."""
    return load(path or RUNS, NEEDED)


def scorable(row: Row) -> tuple[bool, bool]:
    """Return whether a row's time per token, and its time to the first token, are scored."""
    sound = row["spec_decode"] != "likely_mtp" and bool(row.number("tpot_ms"))
    return sound, sound and row["ttft_suspect"] != "1" and bool(row.number("ttft_ms"))
