"""What FSDP gathers at once: our units against those of torch's own policy, and their effect on memory and time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import wrap

from phalanx.cost.analytic.estimate import Estimate, estimate
from phalanx.cost.ledger.model_shape import shape
from phalanx.cost.ledger.units import UnitParams, units
from phalanx.planning.lookup import model_named
from phalanx.spec.cluster.presets import preset
from phalanx.spec.job import Job, Precision
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

LLAMA, _ = model_named("llama-7b")
SIZE = shape(LLAMA)


class Parts(torch.nn.Module):
    """Modules by name, or a weight of so many elements, without memory."""

    def __init__(self, parts: dict[str, torch.nn.Module] | int) -> None:
        super().__init__()
        if isinstance(parts, int):
            self.weight = torch.nn.Parameter(torch.empty(parts, device="meta"))
        else:
            for name, part in parts.items():
                self.add_module(name, part)


class Unit(torch.nn.Module):
    """What torch wraps a module in, here without any process."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def llama() -> Parts:
    """Return the modules of a Llama as transformers has them."""
    m = LLAMA

    def of(*sizes: int) -> Parts:
        return Parts({str(i): Parts(size) for i, size in enumerate(sizes)})

    def block() -> Parts:
        attention, mlp = of(*[m.hidden**2] * 4), of(*[m.hidden * m.ffn] * 3)
        return Parts({"attention": attention, "mlp": mlp, "norm1": Parts(m.hidden), "norm2": Parts(m.hidden)})

    blocks = torch.nn.ModuleList(block() for _ in range(m.layers))
    decoder = Parts({"embed": Parts(m.vocab * m.hidden), "layers": blocks, "norm": Parts(m.hidden)})
    return Parts({"model": decoder, "head": Parts(m.vocab * m.hidden)})


def of_torch(least: int) -> UnitParams:
    """Return the units of torch's policy, the one around the list of blocks counted as part of the root."""
    root = llama()
    policy = partial(wrap.size_based_auto_wrap_policy, min_num_params=least)
    wrap._recursive_wrap(root, policy, Unit, set(), set(), only_wrap_children=True)
    inside = [module for module in root.modules() if isinstance(module, Unit)]
    sizes = []
    for unit in inside:
        below = [p for other in unit.module.modules() if isinstance(other, Unit) for p in other.parameters()]
        own = sum(p.numel() for p in unit.parameters()) - sum({id(p): p.numel() for p in below}.values())
        if not any(isinstance(module, torch.nn.ModuleList) for module in unit.modules()):
            sizes.append(own)
    everything = sum(p.numel() for p in root.parameters())
    return UnitParams(float(everything - sum(sizes)), float(max(sizes, default=0)), float(len(sizes)))


@pytest.mark.parametrize("least", [2000, 5_000, 20_000_000, 60_000_000, 100_000_000, 131_072_001, 10**9, 10**10])
def test_units_by_size_are_those_of_torch(least: int) -> None:
    assert units(SIZE, "remainder", least) == of_torch(least)


def test_units_of_accelerates_fsdp2_count_what_is_inside_them() -> None:
    # Embedding, head, and of each block the MLP, and the block around attention and norms.
    found = units(SIZE, "module", 10**8)
    assert found.count == 2 + 2 * 32
    assert found.largest == 3 * 4096 * 11008
    assert units(SIZE, "model") == UnitParams(SIZE.params, 0.0, 0.0)


def price(level: int = 3, dp: int = 8, compute: str = "bfloat16", **options: object) -> Estimate:
    on = preset("dgx-a100", dp)
    job = Job(dp, 512, Precision(compute))  # type: ignore[arg-type]
    s = Strategy(dp=dp, zero=level)
    return estimate(LLAMA, on, job, s, "accelerate", "bfloat16", StackOptions(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("compute", "width"), [("bfloat16", 2), ("float32", 4)])
def test_a_model_as_one_unit_is_gathered_whole_and_overlaps_nothing(compute: str, width: int) -> None:
    blocks, whole = price(compute=compute), price(compute=compute, units="model")
    # Parameters, and as the backward pass ends their gradients in place of activations.
    least = LLAMA.parameter_count * width
    assert least <= whole.memory.terms["gathered"] <= 2 * least
    assert blocks.memory.terms["gathered"] < 0.2 * least
    sent = whole.step.of["dp"]
    exposed = [p.step.terms["dp"] - p.step.of["dp"]["copied_s"] for p in (blocks, whole)]
    assert exposed[0] < sent["gather_s"] + sent["scatter_s"] <= exposed[1]


def test_units_by_size_lie_between() -> None:
    gathered = {
        least: price(units="remainder", unit_size=least).memory.terms["gathered"] for least in (10**7, 10**8, 10**10)
    }
    assert gathered[10**7] < price().memory.terms["gathered"] < gathered[10**8] < gathered[10**10]
    assert gathered[10**10] == price(units="model").memory.terms["gathered"]
