"""What ends an observation: a step that cannot be observed on fake tensors."""


class Unobservable(RuntimeError):
    """The step does something that has no meaning on fake tensors; the message says what, where, and the remedy."""

    wrong_input = True


class Unsteady(BaseException):
    """A pass whose record was to be repeated turned out to differ. Not an Exception, so that programs do not catch
    it."""


def engine_has_run(error: BaseException) -> bool:
    """Whether an error means that autograd's engine had started before torch knew the fake GPU: it keeps the devices
    of its first backward pass (torch/csrc/autograd/engine.cpp)."""
    return "device_ready_queues_" in str(error)
