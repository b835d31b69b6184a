"""The precision of a step's matrix products: the names of --precision, and what devices and stacks have of them."""

from __future__ import annotations

from dataclasses import replace

from phalanx.cost.analytic.chips import chip_name
from phalanx.frameworks.registry import DOCUMENTED
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.number_formats import PRECISIONS
from phalanx.spec.strategy.stack_options import StackOptions

OF_COMPUTE = {f.name: word for word, f in PRECISIONS.items() if f.computes}
"""Types of a job's matrix products, with the precision that prices them."""


def precision_on(name: str | None, cluster: ClusterSpec) -> str:
    """Return the precision: as named, or by default what the device has. Raises InputError for an unknown one."""
    if name is None:
        return "bf16" if "bfloat16" in cluster.device.dense_flops_per_s else "fp16"
    if name not in PRECISIONS:
        raise InputError("precision", name, "is not modelled", nearest(name, PRECISIONS))
    asked = PRECISIONS[name]
    if name == "bf16" and "bfloat16" not in cluster.device.dense_flops_per_s:
        raise InputError("precision", name, f"is a type that {cluster.device.name} lacks", "use fp16")
    if asked.peak != "half":
        chip = CHIPS[chip_name(cluster.device.name)]
        if chip.has(asked) and not chip.flops_per_s((asked,)):
            reason = f"has no published rate on {cluster.device.name}"
            raise InputError("precision", name, reason, "phalanx measure finds it; or use bf16")
        if not chip.has(asked):
            have = [word for word, f in PRECISIONS.items() if chip.has(f)]
            have = [word for word in have if word != "fp16" or "bf16" not in have]
            have = [word for word in have if PRECISIONS[word].bits <= 16]
            raise InputError(
                "precision", name, f"is a type that {cluster.device.name} lacks", f"use {' or '.join(have)}"
            )
    return name


def products_in(precision: str) -> str:
    """Return the products of a precision as options name them: bfloat16 for all types that a job computes in, whose
    price follows from their bytes and the device's rate."""
    f = PRECISIONS.get(precision)
    return f.name if f is not None and not f.computes else "bfloat16"


def in_precision(pricing: Pricing, precision: str) -> Pricing:
    """Return a question whose matrix products are in a precision."""
    compute, products = PRECISIONS[precision].compute, products_in(precision)
    if (pricing.job.precision.compute, pricing.number_format) == (compute, products):
        return pricing
    job = replace(pricing.job, precision=replace(pricing.job.precision, compute=compute))  # type: ignore[arg-type]
    return replace(pricing, job=job, number_format=products)


def require_precision(stack: str, precision: str) -> None:
    """Require of a search that the stack's row has the products of a precision. Raises InputError."""
    row, products = DOCUMENTED.get(stack), products_in(precision)
    entry = row.options.get("products") if row else None
    if row is None or entry is None or not PRECISIONS[precision].narrow or entry.allows(products):
        return
    have = [name for name, f in PRECISIONS.items() if name != "fp16" and entry.allows(f.name)]
    reason = f"{row.title} does not have products={products} ({entry.source})"
    raise InputError("precision", precision, reason, f"use {' or '.join(have)}")


def with_products(options: StackOptions, precision: str, stack: str) -> StackOptions:
    """Return the options with the narrow products of a precision, where the stack's row says which ones it has."""
    products = products_in(precision)
    if not PRECISIONS[precision].narrow or options.products != "auto" or "products" not in DOCUMENTED[stack].options:
        return options
    return StackOptions(**options.changed() | {"products": products})
