"""The cost of a placement, measured and predicted: data-parallel steps on GPUs of one node and of two.

Rows of data/placements.csv are from the artifact of Sia (Jayaram Subramanya et al., SOSP 2023): small models under
PyTorch's DDP; `placement` 22 means two GPUs on each of two nodes. The score compares the ratio of a step on two nodes
to a step on as many GPUs of one. It is predicted from the time t on one GPU and from published rates alone:

    step = t/3 + max(2t/3, c)       gradients are reduced during the backward pass, two thirds of the work
    c = 2 n (p-1)/p / rate          a ring of p GPUs over n bytes, at the rate of its slowest link: the GPUs' links
                                    inside a node; between nodes the node's port, if it is slower
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.table import Table

from phalanx.report.style import table


@dataclass(frozen=True)
class Machine:
    """The rates of one kind of node, bytes/s in one direction."""

    title: str
    inside: float
    """Of the link between two GPUs of a node."""
    port: float
    """Of the node's network port."""


MACHINES = {
    "dgx": Machine("DGX A100, NVLink, 8 x 200 Gb/s", 300e9, 200e9),
    "rtx": Machine("8 cards, PCIe 3, 50 Gb/s", 12e9, 6.25e9),
    "aws": Machine("4 T4 in the cloud, PCIe 3, 50 Gb/s", 12e9, 6.25e9),
}
PARAMETERS = {
    # Devlin et al. 2019; torchvision's resnet18 with 10 classes and resnet50; Redmon and Farhadi 2018, on Darknet-53.
    "bert": 110e6,
    "cifar10": 11.2e6,
    "imagenet": 25.6e6,
    "yolov3": 61.9e6,
}
NAMES = {"bert": "BERT base", "cifar10": "ResNet-18", "imagenet": "ResNet-50", "yolov3": "YOLOv3"}
PAIRS = (("2", "11"), ("4", "22"), ("8", "44"))
_FIT = ("bert", "11")
"""The model and placement to which the rate of a port is fitted where the published rate is doubtful."""


@dataclass(frozen=True)
class Ratio:
    """The ratio of a step on two nodes to a step on as many GPUs of one node."""

    machine: str
    model: str
    gpus: int
    local_batch: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


Steps = Mapping[str, Mapping[int, float]]
"""Seconds of a step by placement and local batch."""


def load() -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Return the measured steps, by (machine, model)."""
    steps: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    text = (Path(__file__).parent / "data" / "placements.csv").read_text()
    for row in csv.DictReader(text.splitlines()):
        by_batch = steps.setdefault((row["machine"], row["model"]), {}).setdefault(row["placement"], {})
        by_batch[int(row["local_batch"])] = float(row["step_time_s"])
    return steps


def step_s(one: float, parameters: float, placement: str, on: Machine) -> float:
    """Return the predicted seconds of a step. `one`: seconds on one GPU."""
    p = sum(map(int, placement))
    rate = min(on.inside, on.port) if len(placement) > 1 else on.inside
    return one / 3 + max(2 * one / 3, 2 * 4 * parameters * (p - 1) / p / rate)


def ratios(machine: str, steps: Mapping[tuple[str, str], Steps], on: Machine) -> Iterator[Ratio]:
    """Yield the measured and predicted ratios of a machine."""
    for model, parameters in PARAMETERS.items():
        step = steps[machine, model]
        for near, far in PAIRS:
            for batch in sorted(set(step.get(near, {})) & set(step.get(far, {})) & set(step["1"])):
                one = step["1"][batch]
                predicted = step_s(one, parameters, far, on) / step_s(one, parameters, near, on)
                measured = step[far][batch] / step[near][batch]
                yield Ratio(machine, model, sum(map(int, near)), batch, measured, predicted)


def port_of(machine: str, steps: Mapping[tuple[str, str], Steps], on: Machine) -> Machine:
    """Return a machine with its port's rate fitted to one model under one placement, over all batches."""
    model, placement = _FIT
    step, p = steps[machine, model], sum(map(int, placement))
    n = 2 * 4 * PARAMETERS[model] * (p - 1) / p
    rates = [n / (step[placement][b] - step["1"][b] / 3) for b in set(step[placement]) & set(step["1"])]
    return replace(
        on, title=f"{on.title}; {median(rates) * 1e-9:.2f} GB/s as BERT on two GPUs has", port=median(rates)
    )


def scores() -> list[tuple[Machine, list[Ratio]]]:
    """Return each machine with its ratios; the cloud's a second time, with its port's rate fitted to one placement of
    one model, and without the rows of the fit."""
    steps = load()
    rows = [(on, list(ratios(name, steps, on))) for name, on in MACHINES.items()]
    known = port_of("aws", steps, MACHINES["aws"])
    others = [r for r in ratios("aws", steps, known) if (r.model, r.gpus) != (_FIT[0], 2)]
    return [*rows, (known, others)]


def machine(on: Machine, rows: Sequence[Ratio]) -> Table:
    """Tabulate a machine's models: the measured and predicted ratio at the middle batch, and the median error over
    all batches."""
    counts = [sum(map(int, near)) for near, _ in PAIRS]
    columns = ("model", "gradients", *(f"{n} GPUs" for n in counts), "median error")
    grid = table(on.title, *columns, left=("model",))
    for model, n in PARAMETERS.items():
        of_model = [r for r in rows if r.model == model]
        cells = []
        for gpus in counts:
            by_batch = [r for r in of_model if r.gpus == gpus]
            middle = by_batch[len(by_batch) // 2] if by_batch else None
            cells.append(f"{middle.measured:.2f}, {middle.predicted:.2f}" if middle else "")
        error = f"{median(abs(r.error) for r in of_model):.1%}" if of_model else ""
        grid.add_row(NAMES[model], f"{4 * n * 1e-6:.0f} MB", *cells, error)
    every = [abs(r.error) for r in rows]
    grid.add_row(f"all, {len(every)} ratios", "", *("" for _ in PAIRS), f"{median(every):.1%}")
    return grid
