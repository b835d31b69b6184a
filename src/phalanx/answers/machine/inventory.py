"""What this machine has, what is missing, and how to get it, for `phalanx check machine`. Nothing is measured."""

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
class MachineCheck:
    """One thing that this machine should have, and its state."""

    what: str
    state: str
    """What is there."""
    good: bool
    remedy: str = ""
    """How to get it, and what needs it, where it is missing."""


@dataclass(frozen=True)
class MachineState(Answer):
    """What this machine has, and what is missing."""

    plain_field = "checks"
    checks: tuple[MachineCheck, ...]

    @property
    def good(self) -> bool:
        """Whether nothing that is needed is missing."""
        return all(check.good for check in self.checks)


def look_around() -> MachineState:
    """Check everything. Imports torch if it is installed."""
    checks = (_python, _processors, _memory, _torch, _extras, _measurements, _network)
    return MachineState(tuple(result for check in checks for result in check()))


def _python() -> Iterator[MachineCheck]:
    version = platform.python_version()
    yield MachineCheck(
        "Python", f"{version}, {platform.machine()}", sys.version_info >= (3, 11), "needs 3.11 or later"
    )


def _processors() -> Iterator[MachineCheck]:
    cores = len(os.sched_getaffinity(0))
    few = "one core: ranks take turns, so measured times say little about parallel runs"
    yield MachineCheck("cores", f"{cores} for this process", cores > 1, few)


def _memory() -> Iterator[MachineCheck]:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    yield MachineCheck(
        "memory", f"{free / GIB:.1f} GiB available", free > 2 * GIB, "the quickstart needs about 2 GiB"
    )
    if not _SHARED.is_dir():
        yield MachineCheck(
            "shared memory", "no /dev/shm", False, "transport shm is not used; collectives go over Gloo"
        )
        return
    room = shutil.disk_usage(_SHARED).free
    remedy = "raise it (docker: --shm-size 1g), or ranks of this host send over Gloo, which is slower"
    yield MachineCheck("shared memory", f"{room / 2**20:,.0f} MiB free in /dev/shm", room >= _LEAST_SHARED, remedy)


def _torch() -> Iterator[MachineCheck]:
    if importlib.util.find_spec("torch") is None:
        remedy = "pip install '.[train]' in a checkout; planning works without it, train, verify and generate do not"
        yield MachineCheck("torch", "not installed", False, remedy)
        return
    import torch
    import torch.distributed as dist

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield MachineCheck("torch", f"{torch.__version__}, {build}", True)
    yield MachineCheck("Gloo", "there" if dist.is_gloo_available() else "not in this build", dist.is_gloo_available())
    yield from _gpus(torch.cuda.is_available, torch.version.cuda)


def _gpus(available: Callable[[], bool], cuda: str | None) -> Iterator[MachineCheck]:
    import torch
    import torch.distributed as dist

    driver = shutil.which("nvidia-smi")
    if available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield MachineCheck("GPUs", ", ".join(names), True)
        yield MachineCheck(
            "NCCL", "there" if dist.is_nccl_available() else "not in this build", dist.is_nccl_available()
        )
    elif driver and cuda is None:
        remedy = "install a CUDA build of torch, as new as the driver: pytorch.org/get-started says how"
        yield MachineCheck("GPUs", "a driver, but a CPU build of torch", False, remedy)
    elif driver:
        remedy = "is the driver as new as the build asks? torch.cuda.init() says what fails"
        yield MachineCheck("GPUs", f"a driver that torch for CUDA {cuda} cannot use", False, remedy)
    else:
        yield MachineCheck("GPUs", "none: ranks are processes on the CPU, over Gloo", True)


def _extras() -> Iterator[MachineCheck]:
    for package, what in (
        ("transformers", "Hugging Face models under `observe`, and as the reference of weights"),
        ("tensorboard", "train.tensorboard = true"),
        ("pandas", "to_pandas() of answers"),
    ):
        there = importlib.util.find_spec(package) is not None
        state = importlib.metadata.version(package) if there else "not installed (optional)"
        yield MachineCheck(package, state, True, "" if there else f"pip install {package}, for {what}")


def _measurements() -> Iterator[MachineCheck]:
    from phalanx.runtime.process.folder import cache_folder

    folder = cache_folder() / "machines"
    files = sorted(folder.glob("*.json")) if folder.is_dir() else []
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    writable = os.access(parent, os.W_OK)
    state = f"{len(files)} in {folder}" if writable else f"{folder} cannot be written"
    remedy = (
        "" if files else "the first plan of a local job measures this machine, about a minute; --quick takes seconds"
    )
    yield MachineCheck(
        "measurements kept", state, writable, remedy if writable else "set PHALANX_CACHE to a folder of yours"
    )


def _network() -> Iterator[MachineCheck]:
    lab = shutil.which("ip") is not None and os.geteuid() == 0
    state = "possible" if lab else "not possible (optional)"
    yield MachineCheck("lab of shaped links", state, True, "" if lab else "needs root and iproute2")
