"""What `phalanx doctor` looks at: what this machine has, what is missing, and how to get it. Nothing is measured."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.answers.answer import Answer
from phalanx.spec.cluster.spec import GIB

_SHARED = Path("/dev/shm")
_LEAST_SHARED = 256 * 2**20


@dataclass(frozen=True)
class Checked:
    """One thing that was looked at."""

    what: str
    state: str
    """What is there."""
    good: bool
    remedy: str = ""
    """How to get what is missing, and what cannot be done without it."""


@dataclass(frozen=True)
class MachineState(Answer):
    """What this machine has, and what is missing."""

    plain_field = "checks"
    checks: tuple[Checked, ...]

    @property
    def good(self) -> bool:
        """Whether nothing that is needed is missing."""
        return all(check.good for check in self.checks)


def look_around() -> MachineState:
    """Look at everything. Imports torch if it is installed."""
    looks = (_python, _processors, _memory, _torch, _extras, _measured, _network)
    return MachineState(tuple(checked for look in looks for checked in look()))


def _python() -> Iterator[Checked]:
    version = platform.python_version()
    yield Checked("Python", f"{version}, {platform.machine()}", sys.version_info >= (3, 11), "needs 3.11 or later")


def _processors() -> Iterator[Checked]:
    cores = len(os.sched_getaffinity(0))
    few = "one core: ranks take turns, so measured times say little about parallel runs"
    yield Checked("cores", f"{cores} for this process", cores > 1, few)


def _memory() -> Iterator[Checked]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    yield Checked("memory", f"{free / GIB:.1f} GiB available", free > 2 * GIB, "the quickstart needs about 2 GiB")
    if not _SHARED.is_dir():
        yield Checked("shared memory", "no /dev/shm", False, "transport shm is not used; collectives go over Gloo")
        return
    room = shutil.disk_usage(_SHARED).free
    remedy = "raise it (docker: --shm-size 1g), or ranks of this host send over Gloo, which is slower"
    yield Checked("shared memory", f"{room / 2**20:,.0f} MiB free in /dev/shm", room >= _LEAST_SHARED, remedy)


def _torch() -> Iterator[Checked]:
    if importlib.util.find_spec("torch") is None:
        remedy = "pip install '.[train]' in a checkout; planning works without it, train, verify and generate do not"
        yield Checked("torch", "not installed", False, remedy)
        return
    import torch
    import torch.distributed as dist

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Checked("torch", f"{torch.__version__}, {build}", True)
    yield Checked("Gloo", "there" if dist.is_gloo_available() else "not in this build", dist.is_gloo_available())
    yield from _gpus(torch.cuda.is_available, torch.version.cuda)


def _gpus(available: Callable[[], bool], cuda: str | None) -> Iterator[Checked]:
    import torch
    import torch.distributed as dist

    driver = shutil.which("nvidia-smi")
    if available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Checked("GPUs", ", ".join(names), True)
        yield Checked("NCCL", "there" if dist.is_nccl_available() else "not in this build", dist.is_nccl_available())
    elif driver and cuda is None:
        remedy = "install a CUDA build of torch, as new as the driver: pytorch.org/get-started says how"
        yield Checked("GPUs", "a driver, but a CPU build of torch", False, remedy)
    elif driver:
        remedy = "is the driver as new as the build asks? torch.cuda.init() says what fails"
        yield Checked("GPUs", f"a driver that torch for CUDA {cuda} cannot use", False, remedy)
    else:
        yield Checked("GPUs", "none: ranks are processes on the CPU, over Gloo", True)


def _extras() -> Iterator[Checked]:
    for package, what in (
        ("transformers", "Hugging Face models under `observe`, and as the reference of weights"),
        ("tensorboard", "train.tensorboard = true"),
        ("pandas", "to_pandas() of answers"),
    ):
        there = importlib.util.find_spec(package) is not None
        state = importlib.metadata.version(package) if there else "not installed (optional)"
        yield Checked(package, state, True, "" if there else f"pip install {package}, for {what}")


def _measured() -> Iterator[Checked]:
    from phalanx.runtime.process.folder import cache_folder

    folder = cache_folder() / "machines"
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    writable = os.access(parent, os.W_OK)
    state = f"{len(files)} in {folder}" if writable else f"{folder} cannot be written"
    remedy = (
        "" if files else "the first plan of a local job measures this machine, about a minute; --quick takes seconds"
    )
    yield Checked(
        "measurements kept", state, writable, remedy if writable else "set PHALANX_CACHE to a folder of yours"
    )


def _network() -> Iterator[Checked]:
    lab = shutil.which("ip") is not None and os.geteuid() == 0
    state = "possible" if lab else "not possible (optional)"
    yield Checked("lab of shaped links", state, True, "" if lab else "needs root and iproute2")
