"""Precision and stack's release as a question names them, and bounds of what is not modelled."""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from phalanx.cost.analytic.chips import chip_name
from phalanx.cost.analytic.estimate import Estimate
from phalanx.cost.analytic.option_effects import SPREAD
from phalanx.cost.analytic.step import step
from phalanx.frameworks.caveats import Caveat
from phalanx.frameworks.registry import DOCUMENTED, FRAMEWORKS, STACKS
from phalanx.planning.search.column_pricing import Pricing
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.cluster.spec import GIB, ClusterSpec
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.job import DTYPE_BYTES
from phalanx.spec.number_formats import PRECISIONS
from phalanx.spec.strategy.stack_options import StackOptions

PRECISION_BY_TYPE = {f.name: word for word, f in PRECISIONS.items() if f.computes}
"""Type of a job's matrix products -> the precision that prices it."""


def precision_on(name: str | None, cluster: ClusterSpec) -> str:
    """Return the named precision, by default bf16 or what the device has in its place. Raises InputError for one that
    is unknown, or that the device lacks."""
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
            reason = f"is a type that {cluster.device.name} lacks"
            raise InputError("precision", name, reason, f"use {' or '.join(have)}")
    return name


def products_in(precision: str) -> str:
    """Return the value of the option `products` for a precision. It is bfloat16 for all types that a job computes in:
    their price follows from their bytes and the device's rate."""
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
    """Require that a stack has the products of a precision, before a search. Raises InputError."""
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


_AS_SAID = {said: name for framework in FRAMEWORKS.values() for said, name in framework.said.items()}
"""What people call frameworks -> the stack that is meant."""


def release_named(name: str) -> tuple[str, str]:
    """Return (the stack that a name means, a note where that is another name).

    `megatron-core-0.13` is the framework `megatron-core` at a release without a row or constants; the nearest release
    is taken. A name of another form, or of an unknown framework, is returned unchanged, for the lookup to refuse."""
    release = re.fullmatch(r"([a-z][a-z-]*?)[-_ ]?v?([0-9]{1,9}(?:\.[0-9]{1,9})*)", name)
    if name in _AS_SAID:
        row = DOCUMENTED[_AS_SAID[name]]
        return row.name, f"{name} is taken for {row.name} ({row.title})"
    if name in DOCUMENTED or name in STACKS or release is None:
        return name, ""
    releases = {
        known: of
        for framework in {release[1], _AS_SAID.get(release[1], release[1])}
        for known in (*DOCUMENTED, *STACKS)
        if (of := _release(known, framework)) is not None
    }
    if not releases:
        return name, ""
    wanted = _number(release[2])
    nearest = min(releases, key=lambda known: (abs(_number(releases[known]) - wanted), -_number(releases[known])))
    title = f" ({DOCUMENTED[nearest].title})" if nearest in DOCUMENTED else ""
    return nearest, f"{name} is not known: {nearest}{title}, the nearest release, is taken"


def _release(known: str, framework: str) -> str | None:
    """Return the release in a stack's name or in the title of its row; None for a stack of another framework."""
    inside = re.fullmatch(rf"{re.escape(framework)}-(\d+(?:\.\d+)*)", known)
    if inside is not None:
        return inside[1]
    if known != framework or known not in DOCUMENTED:
        return None
    titled = re.search(r"\d+(?:\.\d+)+", DOCUMENTED[known].title)
    return titled[0] if titled else None


def _number(release: str) -> float:
    """Return a release as one number, for comparisons: 0.14 is 14, and 1.2.3 is 102.03."""
    parts = [int(part) for part in release.split(".")[:3]]
    return sum(part * 100.0 ** (1 - i) for i, part in enumerate(parts))


def _overestimate(term: str) -> Callable[[Estimate], str]:
    """Return a function that writes the largest amount by which a term of memory may be too high."""
    return lambda e: f"memory by at most {float(e.memory.terms[term]) / GIB:.1f} GiB less"


def _more_exposed(e: Estimate) -> str:
    hidden = float(e.step.of.get("dp", {}).get("hidden_s", 0.0))
    return f"time by at most {hidden:.3g} s a step more"


def _whole_logits(e: Estimate) -> str:
    logits = float(e.layout.tokens * e.shape.vocab / e.layout.tp) * DTYPE_BYTES["bfloat16"]
    return f"memory by at least {logits / GIB:.1f} GiB more"


def _waiting(e: Estimate) -> str:
    routers = (e.profile, replace(e.profile, spread=SPREAD))  # both by formula: a price times its pipeline by action
    even, learned = (step(e.shape, e.layout, e.system, profile).seconds for profile in routers)
    return f"time by about {float(learned - even):.3g} s a step more"


_LIMITS: dict[str, Callable[[Estimate], str]] = {
    "activations": _overestimate("activations"),
    "state": _overestimate("state"),
    "hidden": _more_exposed,
    "routing": _waiting,
    "logits": _overestimate("logits"),
    "slices": _whole_logits,
}


def with_bounds(caveats: Iterable[Caveat], price: Estimate) -> tuple[Caveat, ...]:
    """Return caveats with their bounds filled in from a price, where they have a limit."""
    return tuple(replace(c, bound=_LIMITS[c.limit](price)) if c.limit else c for c in caveats)
