"""LoRA adapters (Hu et al. 2021): W + B A, with A of (rank, in) and B of (out, rank), not merged into W.

Each step reads the adapters of all requests in its batch (S-LoRA, Sheng et al. 2023). Adapters that are not on the
GPU are copied from the host's memory.
"""

from phalanx.spec.model.spec import ModelSpec, parameters

RANK = 16
"""vLLM's largest rank by default (--max-lora-rank)."""
HOST_BYTES_PER_S = 25e9
"""Copies over PCIe 4.0 x16, one direction: estimated."""


def adapter_bytes(model: ModelSpec) -> float:
    """Return the bytes of a 16-bit adapter of all matrices of attention and dense MLPs; experts have none."""
    matrices = [p.shape for p in parameters(model) if p.role in ("column", "row") and len(p.shape) == 2]
    return 2.0 * RANK * sum(rows + columns for rows, columns in matrices)
