"""The precision of a step's matrix products: the names of --precision, and what devices and stacks have of them."""

from __future__ import annotations

from dataclasses import replace

from phalanx.cost.analytic.chips import chip_name
from phalanx.frameworks.registry import ROWS
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.strategy.stack_options import StackOptions

PRECISIONS = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "float8", "fp8-mx": "float8-mx", "fp4": "float4"}
"""Precisions of matrix products, with the format that prices them: fp16 products take as long as bf16 ones."""
OF_COMPUTE = {"bfloat16": "bf16", "float16": "fp16"}
"""Types of a job's matrix products, with the precision that prices them."""


def precision_on(name: str | None, cluster: ClusterSpec) -> str:
    """Return the precision: as named, or by default what the device has. Raises InputError for an unknown one."""
    if name is None:
        return "bf16" if "bfloat16" in cluster.device.dense_flops_per_s else "fp16"
    if name not in PRECISIONS:
        raise InputError("--precision", name, "is not modelled", nearest(name, PRECISIONS))
    if name == "bf16" and "bfloat16" not in cluster.device.dense_flops_per_s:
        raise InputError("--precision", name, f"is a type that {cluster.device.name} lacks", "use fp16")
    if name.startswith(("fp8", "fp4")):
        chip = CHIPS[chip_name(cluster.device.name)]
        if name[:3] not in chip.narrow_types:
            have = " or ".join(["bf16" if chip.bf16 else "fp16", *chip.narrow_types])
            raise InputError("--precision", name, f"is a type that {cluster.device.name} lacks", f"use {have}")
    return name


def in_precision(pricing: Pricing, precision: str) -> Pricing:
    """Return a question whose matrix products are in a precision."""
    compute = "float16" if precision == "fp16" else "bfloat16"
    if precision in ("bf16", "fp16") and pricing.job.precision.compute == compute:
        return pricing
    job = replace(pricing.job, precision=replace(pricing.job.precision, compute=compute))  # type: ignore[arg-type]
    return replace(pricing, job=job, number_format=PRECISIONS[precision])


def require_precision(stack: str, precision: str) -> None:
    """Require of a search that the stack's row has the products of a precision. Raises InputError."""
    row, products = ROWS.get(stack), PRECISIONS[precision]
    entry = row.options.get("products") if row else None
    if row is None or entry is None or entry.allows(products):
        return
    have = [name for name, kind in PRECISIONS.items() if name != "fp16" and entry.allows(kind)]
    reason = f"{row.title} does not have products={products} ({entry.source})"
    raise InputError("--precision", precision, reason, f"use {' or '.join(have)}")


def with_products(options: StackOptions, precision: str, stack: str) -> StackOptions:
    """Return the options with the narrow products of a precision, where the stack's row says which ones it has."""
    products = PRECISIONS.get(precision, "bfloat16")
    if products == "bfloat16" or options.products != "auto" or "products" not in ROWS[stack].options:
        return options
    return StackOptions(**options.changed() | {"products": products})
