"""The position of a program in its training step: phase, module, micro-batch, and the line that issued a call.

forward     inside a module's call: the stack of modules that global hooks keep
backward    inside autograd (B; or I and W where a pipeline separates gradients of inputs from gradients of weights).
            Each node carries a sequence number, taken from a counter as the forward pass created it; the node belongs
            to the module's call during which the counter stood there. No hook is on a tensor, so observing keeps
            nothing alive longer
optimizer   inside step() of a torch optimizer, and everything between the last backward pass and it (clipping)

A step ends where the next begins: with the first forward pass of a module after the steps of all optimizers (a
generator's and a discriminator's, say). An optimizer is known once it has taken a step.
"""

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.fsdp import _runtime_utils as fsdp1
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import stage as pipeline_stage
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from phalanx.observation.recorder.models import ModelNames, model_of
from phalanx.observation.recorder.operations import of_node
from phalanx.observation.recorder.places import caller_line
from phalanx.schedule.event import Phase
from phalanx.schedule.observation import Site

_ACCUMULATE = 2**63  # sequence numbers from here on are of nodes that accumulate gradients
_current_node: Callable[[], Any] = torch._C._current_autograd_node
_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module: its name, and the micro-batch that it belongs to."""

    module: str
    micro_batch: int | None


@dataclass
class _Spans:
    """Spans of sequence numbers: from starts[i] on, nodes belong to calls[i]."""

    starts: list[int] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)

    def mark(self, start: int, call: ModuleCall) -> None:
        if self.starts and self.starts[-1] == start:
            self.calls[-1] = call
        else:
            self.starts.append(start)
            self.calls.append(call)

    def at(self, number: int) -> ModuleCall | None:
        i = bisect_right(self.starts, number) - 1
        return self.calls[i] if i >= 0 else None


OUTSIDE = ModuleCall("", None)


class Position:
    """Follows a program through its steps. `ended` is called when a step ends, `second` when the second micro-batch
    of a step begins, `begins_backward` with its results when a backward pass does."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.ended = ended
        self.second: Callable[[], None] = lambda: None
        self.begins_backward: Callable[[Iterable[Any]], None] = lambda results: None
        self._stack: list[ModuleCall] = []
        self.names = ModelNames()
        self._roots: dict[bool, weakref.WeakKeyDictionary[nn.Module, int]] = {
            with_grad: weakref.WeakKeyDictionary() for with_grad in (True, False)
        }
        self._most_calls: Counter[bool] = Counter()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self.partial = False
        """Whether the step that ends is a part of a longer one: an optimizer took its first after the others'."""
        self._spans: dict[int, _Spans] = {}
        self._after_backward = self._optimizing = self._stepped = False
        self._backward = OUTSIDE
        self.backwards = 0
        self._part: Phase = "B"
        self._served: nn.Module | None = None
        self._main = threading.get_ident()
        self.optimizers: dict[str, None] = {}
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._optimize),
            register_optimizer_step_post_hook(self._optimized),
        ]

    def _during(self, owner: Any, name: str, attribute: str, value_of: Callable[..., Any]) -> Any:
        """Return a patch of a function of `owner` that sets an attribute of this position while it runs."""
        run = getattr(owner, name)

        def runs(*args: Any, **kwargs: Any) -> Any:
            before = getattr(self, attribute)
            setattr(self, attribute, value_of(*args))
            try:
                return run(*args, **kwargs)
            finally:
                setattr(self, attribute, before)

        return patch.object(owner, name, runs)

    @contextmanager
    def parts_of_backward(self) -> Iterator[None]:
        """Distinguish the passes of torch's zero-bubble schedules: I computes gradients of inputs, W of weights
        (torch.distributed.pipelining.stage calls both)."""

        def part(phase: Phase, name: str) -> Any:
            return self._during(pipeline_stage, name, "_part", lambda *args: phase)

        with part("I", "stage_backward_input"), part("W", "stage_backward_weight"):
            yield

    @contextmanager
    def backward_passes(self) -> Iterator[None]:
        """Count the calls of the autograd engine, except nested ones (reentrant checkpoints)."""
        run = torch.autograd.graph._engine_run_backward
        inside = False

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return run(*args, **kwargs)
            inside = True
            self.backwards += 1
            self.begins_backward(args[0])
            try:
                return run(*args, **kwargs)
            finally:
                inside = False

        with ExitStack() as stack:
            for module in (torch.autograd, torch.autograd.graph):
                stack.enter_context(patch.object(module, "_engine_run_backward", run_backward))
            yield

    @contextmanager
    def owners_in_fsdp(self) -> Iterator[None]:
        """Attribute prefetched gathers and delayed reductions of fully_shard and FSDP1 to the right module."""

        def of_group(group: Any, *args: Any) -> nn.Module:
            return group.modules[0]  # type: ignore[no-any-return]

        def of_handle(handle: Any, *args: Any) -> nn.Module:
            return handle._fully_sharded_module  # type: ignore[no-any-return]

        with ExitStack() as stack:
            for owner, name, served in (
                (FSDPParamGroup, "unshard", of_group),
                (FSDPParamGroup, "post_backward", of_group),
                (FlatParamHandle, "unshard", of_handle),
                (fsdp1, "_reduce_grad", lambda state, handle: of_handle(handle)),
            ):
                stack.enter_context(self._during(owner, name, "_served", served))
            yield

    def owner(self, call: ModuleCall) -> str:
        """Return the name of the module that a collective issued during `call` serves."""
        return call.module if self._served is None else self.names.of(self._served, call.module)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has taken a step since the last forward pass."""
        return self._stepped

    @property
    def micro_batches(self) -> int:
        """Forward passes of the root module that is called most, since the step began; passes without gradients (of
        a reference, of an evaluation) count if there are no others."""
        return self._most_calls[True] or self._most_calls[False]

    def calls(self) -> dict[nn.Module, int]:
        """Return how often each root module was called since the step began."""
        return {} if self._stepped else dict(self._roots[True])

    def called(self, more: Mapping[nn.Module, int], after_backward: bool) -> None:
        """Count calls of root modules in passes that are repeated; `after_backward`: whether these end in a backward
        pass."""
        for module, n in more.items():
            self._count(module, n)
        self._after_backward = after_backward

    def _count(self, module: nn.Module, calls: int = 1, with_grad: bool = True) -> None:
        roots = self._roots[with_grad]
        roots[module] = roots.get(module, 0) + calls
        self._most_calls[with_grad] = max(self._most_calls[with_grad], roots[module])

    @property
    def after_backward(self) -> bool:
        """Whether a backward pass has run since the last forward pass."""
        return self._after_backward

    def _enter(self, module: nn.Module, args: object) -> None:
        inside = bool(self._stack) or torch._C._current_graph_task_id() != -1
        if not inside and self._stepped:
            self._stepped = False
            if self._complete():
                self._end()
        if not inside:
            self._after_backward = False
        name = self.names.of(module, type(module).__name__) if self._stack else self.names.of_root(module)
        with_grad = torch.is_grad_enabled()
        roots = self._roots[with_grad]
        if self._stack:
            micro_batch = self._stack[-1].micro_batch
        elif inside:
            micro_batch = self.call().micro_batch
        elif module not in roots and (called := _calls_of_model(module, roots)):
            micro_batch = called - 1
        else:
            micro_batch = roots.get(module, 0)
            if micro_batch == 1 and with_grad and self.micro_batches == 1:
                self.second()
            self._count(module, with_grad=with_grad)
        call = ModuleCall(name, micro_batch)
        self._stack.append(call)
        self._span().mark(_sequence(), call)

    def _complete(self) -> bool:
        """Whether every known optimizer has taken its step, one has taken two, or a new one its first."""
        steps, known = set(self._steps), set(self._optimizers)
        return not known - steps or bool(steps - known) or max(self._steps.values()) > 1

    def _end(self) -> None:
        self.partial = bool(self._optimizers) and not set(self._steps) <= set(self._optimizers)
        self._optimizers.update(self._steps)
        self.ended()
        for roots in self._roots.values():
            roots.clear()
        self._most_calls.clear()
        self._spans.clear()
        self._steps.clear()

    def _leave(self, module: nn.Module, args: object, out: object) -> None:
        if self._stack:
            left = self._stack.pop()
            self._span().mark(_sequence(), self._stack[-1] if self._stack else ModuleCall("", left.micro_batch))

    def _span(self) -> _Spans:
        return self._spans.setdefault(threading.get_ident(), _Spans())

    def _optimize(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._optimizing = True
        self.optimizers[type(optimizer).__name__] = None

    def _optimized(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._optimizing, self._stepped = False, True
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def now(self) -> tuple[Phase, ModuleCall]:
        """Return the current phase and module's call."""
        if torch._C._current_graph_task_id() != -1:
            self._after_backward = True
            return self._part, self._stack[-1] if self._stack else self.call()
        if self._stack:
            return "F", self._stack[-1]
        return ("opt" if self._optimizing or self._after_backward or self._stepped else "F"), OUTSIDE

    def call(self) -> ModuleCall:
        """Return the module's call whose backward pass runs."""
        node = _current_node()
        if node is None:
            return OUTSIDE
        number = node._sequence_nr()
        if number >= _ACCUMULATE or number < 0:
            owner = self.names.of_parameter(getattr(node, "variable", None), model_of(self._backward.module))
            return ModuleCall(owner, self._backward.micro_batch)
        span = self._spans.get(self._main)
        self._backward = (span and span.at(number)) or OUTSIDE
        return self._backward

    def backward_of(self) -> str:
        """Return the operation whose backward pass runs; "" in a module's call, which recomputes, and outside."""
        node = None if self._stack else _current_node()
        return "" if node is None else of_node(node.name())

    def site(self) -> Site:
        """Return the innermost line outside torch and Phalanx that led here."""
        return caller_line(main=self._main)


def _calls_of_model(module: nn.Module, roots: Mapping[nn.Module, int]) -> int:
    """Return how often the model that contains a module was called since the step began, for a module that is called
    by itself, such as a head by chunks of tokens."""
    return next((n for x, n in roots.items() if any(inner is module for inner in x.modules())), 0)
