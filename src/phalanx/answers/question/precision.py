"""What a question names of its step: precision, releases of stacks; and bounds of what is not modelled."""

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


_AS_SAID = {said: name for framework in FRAMEWORKS.values() for said, name in framework.said.items()}
"""What people call frameworks -> the stack that is meant."""


def release_named(name: str) -> tuple[str, str]:
    """Return (the stack that a name means, what to say about it, "" if it is known).

    `megatron-core-0.13` is the framework `megatron-core` at a release that no row and no constants are of. A name of
    another form, or of no framework that is known, is returned unchanged: the lookup says what is near."""
    asked = re.fullmatch(r"([a-z][a-z-]*?)[-_ ]?v?([0-9]{1,9}(?:\.[0-9]{1,9})*)", name)
    if name in _AS_SAID:
        row = DOCUMENTED[_AS_SAID[name]]
        return row.name, f"{name} is taken for {row.name} ({row.title})"
    if name in DOCUMENTED or name in STACKS or asked is None:
        return name, ""
    releases = {
        known: of
        for framework in {asked[1], _AS_SAID.get(asked[1], asked[1])}
        for known in (*DOCUMENTED, *STACKS)
        if (of := _release(known, framework)) is not None
    }
    if not releases:
        return name, ""
    wanted = _number(asked[2])
    nearest = min(releases, key=lambda known: (abs(_number(releases[known]) - wanted), -_number(releases[known])))
    title = f" ({DOCUMENTED[nearest].title})" if nearest in DOCUMENTED else ""
    return nearest, f"{name} is not known: {nearest}{title}, the nearest release, is taken"


def _release(known: str, framework: str) -> str | None:
    """Return the release of a stack if it is of a framework: in its name, or else in the title of its row."""
    inside = re.fullmatch(rf"{re.escape(framework)}-(\d+(?:\.\d+)*)", known)
    if inside is not None:
        return inside[1]
    if known != framework or known not in DOCUMENTED:
        return None
    titled = re.search(r"\d+(?:\.\d+)+", DOCUMENTED[known].title)
    return titled[0] if titled else None


def _number(release: str) -> float:
    """Return a release as one number, so that they can be compared: 0.14 is 14 and 1.2.3 is 10203 / 100."""
    parts = [int(part) for part in release.split(".")[:3]]
    return sum(part * 100.0 ** (1 - i) for i, part in enumerate(parts))


_GIB = 2**30


def _less(term: str) -> Callable[[Estimate], str]:
    """Return what says how much memory there could be less."""
    return lambda e: f"memory by at most {float(e.memory.terms[term]) / _GIB:.1f} GiB less"


def _more_exposed(e: Estimate) -> str:
    hidden = float(e.step.of.get("dp", {}).get("hidden_s", 0.0))
    return f"time by at most {hidden:.3g} s a step more"


def _waiting(e: Estimate) -> str:
    routers = (e.profile, replace(e.profile, spread=SPREAD))  # both by formula: a price times its pipeline by action
    even, learned = (step(e.shape, e.layout, e.system, profile).seconds for profile in routers)
    return f"time by about {float(learned - even):.3g} s a step more"


_BY_LIMIT: dict[str, Callable[[Estimate], str]] = {
    "activations": _less("activations"),
    "state": _less("state"),
    "hidden": _more_exposed,
    "routing": _waiting,
}


def bounded(caveats: Iterable[Caveat], price: Estimate) -> tuple[Caveat, ...]:
    """Return caveats with the bounds that a price gives them."""
    return tuple(replace(c, bound=_BY_LIMIT[c.limit](price)) if c.limit else c for c in caveats)
