"""The layout of a copy of a served model over GPUs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServingLayout:
    """Degrees of parallelism of one copy, on tp x attention_dp x pp GPUs; moe_tp x moe_ep = tp x attention_dp."""

    tp: int = 1
    """Tensor parallelism of attention."""
    pp: int = 1
    """Pipeline stages."""
    attention_dp: int = 1
    """Groups of tp ranks, each of which computes attention for its own requests; MLPs and experts are split over all
    groups."""
    moe_tp: int = 1
    """Tensor parallelism inside experts; in a dense model, of the MLP."""
    moe_ep: int = 1
    """Expert parallelism."""

    @property
    def width(self) -> int:
        """GPUs of one stage."""
        return self.tp * self.attention_dp

    @property
    def gpus(self) -> int:
        """GPUs of one copy."""
        return self.width * self.pp
