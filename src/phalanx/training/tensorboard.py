"""The lines of metrics.jsonl as TensorBoard scalars; needs the `tensorboard` extra."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.spec.errors import InputError

SHOWN = ("loss", "eval_loss", "grad_norm", "lr", "step_time_s", "tokens_per_s", "mfu", "mem_bytes")


def require() -> None:
    """Require that tensorboard is installed. Raises InputError."""
    if importlib.util.find_spec("tensorboard") is None:
        remedy = "pip install 'phalanx[tensorboard]'; metrics.jsonl is always written"
        raise InputError("train.tensorboard", True, "tensorboard is not installed", remedy)


@contextmanager
def scalars(folder: Path, start: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes the scalars of a line of metrics.jsonl into `folder`. Older scalars of steps after
    `start`, which a resumed run takes again, are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), purge_step=start + 1, flush_secs=10) as writer:

        def write(row: dict[str, Any]) -> None:
            for name in SHOWN:
                if row.get(name) is not None:
                    writer.add_scalar(name, row[name], row["step"])

        yield write
