"""Published deployments of experts over many GPUs, with the measured and predicted tokens per second.

Prefill and decode were measured separately, each under full load: a prefill step of a GPU has `tokens` tokens of
prompts of `length`; a decoding step of a GPU has `tokens` sequences with `length` cached tokens, each of which yields
1 + accepted x drafted tokens.
"""

from dataclasses import dataclass
from pathlib import Path

from phalanx.cost.analytic.chips import chip_name
from phalanx.planning.lookup import model_named
from phalanx.serving.cost.engines import engine
from phalanx.serving.cost.shape import shape_of
from phalanx.serving.cost.step import BYTES, ChipRates, GpuSplit, StepLoad, product_rate, step_parts
from phalanx.spec.cluster.chips import CHIPS
from phalanx.validate.records import Row, load

DEPLOYMENTS = Path(__file__).parent / "data" / "large_ep.csv"
_NODE, _DOMAIN = 8, {"GB200": 72}


@dataclass(frozen=True)
class LargeEpRun:
    """A published and the predicted throughput, in tokens/s of a GPU."""

    row: Row
    predicted: float

    @property
    def measured(self) -> float:
        """The published throughput."""
        return self.row.number("per_gpu") or 0.0

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def runs(path: Path | None = None) -> list[LargeEpRun]:
    """Predict every published deployment. Raises InputError."""
    needed = ("source", "engine", "model", "gpu", "phase", "ranks", "tokens", "length", "weights", "cache", "per_gpu")
    return [LargeEpRun(row, _tokens_per_s(row)) for row in load(path or DEPLOYMENTS, needed)]


def _tokens_per_s(row: Row) -> float:
    chip = CHIPS[chip_name(row["gpu"])]
    ranks, tokens, length, net = (float(row.number(k) or 0) for k in ("ranks", "tokens", "length", "net_GBps"))
    rate = product_rate(chip, row["weights"])
    domain = float(_DOMAIN.get(row["gpu"], _NODE))
    rates = ChipRates(chip.bandwidth_bytes_per_s, chip.half, rate, rate, chip.link_bytes_per_s, 1e9 * net, domain)
    size = BYTES[row["weights"]]
    split = GpuSplit(1.0, ranks, 1.0, 1.0, ranks, size, size, BYTES[row["cache"]], 1.0)
    every, drafted, accepted = tokens * ranks, row.number("drafted") or 0.0, row.number("accepted") or 0.0
    if row["phase"] == "prefill":
        step = StepLoad(every, every * (length + 1) / 2, every / length, 0.0, 0.0)
    else:
        step = StepLoad(0.0, 0.0, 0.0, every, every * length, 1.0, 1 + drafted)
    parts = step_parts(shape_of(model_named(row["model"])[0]), split, rates, engine(row["engine"]), step)
    return tokens * (1 + accepted * drafted) / float(sum(parts.values()))
