"""Mistakes in ConfigContainers and NeMo's recipes."""

from phalanx.frameworks.configuration import Config, Configuration, Keys
from phalanx.frameworks.lints import Lint, Mistakes
from phalanx.frameworks.values import count


def _batches_disagree(c: Config, x: Configuration) -> Mistakes:
    """Sizes of a micro-batch in two sections."""
    if x.kind == "nemo":
        sizes = {p: count(Keys(c).take(f"{p}.micro_batch_size", "")) for p in ("train", "dataset", "data", "model")}
        known = {p: n for p, n in sizes.items() if n}
        if len(set(known.values())) > 1:
            said = ", ".join(f"{p}: {n}" for p, n in known.items())
            yield "micro_batch_size", f"is stated twice ({said})", "one number for both"


LINTS = (Lint("batches-disagree", "NVIDIA-NeMo/Megatron-Bridge#5386", _batches_disagree),)
