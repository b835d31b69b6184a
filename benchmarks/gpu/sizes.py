"""Llama-like models of 0.2 to 8 B parameters, and the steps that are taken of them."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision, Products
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec


@dataclass(frozen=True)
class Size:
    """A model, and the tokens of a sequence and a micro-batch of one GPU."""

    name: str
    model: ModelSpec
    seq: int
    micro_batch: int

    @property
    def job(self) -> Job:
        """A step of one micro-batch in bf16, over masters in fp32."""
        return self.of("compute")

    def of(self, products: Products) -> Job:
        """The same, whose blocks multiply numbers of another kind."""
        return Job(self.micro_batch, self.seq, Precision("bfloat16", products=products), clip=1.0)


def products_of(way: str) -> Products:
    """Return the operands of products in a way of taking steps, such as ours-float8-row-compiled."""
    return "float8-row" if "float8-row" in way else "float8" if "float8" in way else "compute"


def _size(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, seq: int, batch: int) -> Size:
    fields = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    vocab = 128256 if hidden >= 2048 else 32000 if hidden >= 1024 else 512
    model = build(
        ModelSpec, complete({"family": "llama", "vocab": vocab, "max_seq": seq, "tied": False, **fields}), "model"
    )
    return Size(name, model, seq, batch)


SIZES = (
    _size("0.2B", 12, 1024, 16, 16, 2816, 2048, 8),
    _size("1.5B", 16, 2048, 32, 8, 8192, 4096, 2),
    _size("3.6B", 28, 3072, 24, 8, 8192, 4096, 1),
    _size("8B", 32, 4096, 32, 8, 14336, 4096, 1),
)
TINY = _size("tiny", 2, 64, 2, 2, 128, 64, 2)
"""For machines without a GPU: that the examination itself runs."""
