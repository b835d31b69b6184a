"""Requirements of ranks on GPUs before they join: a driver that torch can use, NCCL, a GPU for each rank, and the
cores near it."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.runtime.process.environment import SHARE_GPUS, gpus_are_shared
from phalanx.spec.errors import InputError

_USE_CPU = "or set CUDA_VISIBLE_DEVICES= (empty) to run on the CPU"


@dataclass(frozen=True)
class Host:
    """GPU support of a host. `driver`: NVIDIA's tools are installed; `hidden`: CUDA_VISIBLE_DEVICES is empty; `cuda`:
    the CUDA that torch was built for, None for a CPU build; `count`: GPUs that torch can use; `bound`: Slurm gives
    each process GPUs of its own, and shows it no others; `shared`: the user lets ranks share a GPU."""

    driver: bool
    hidden: bool
    cuda: str | None
    count: int
    nccl: bool
    bound: bool = False
    shared: bool = False


def this_host() -> Host:
    """Inspect this host."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver = shutil.which("nvidia-smi") is not None
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    nccl, bound = dist.is_nccl_available(), _bound(os.environ)
    return Host(driver, hidden, torch.version.cuda, count, nccl, bound, gpus_are_shared())


def _bound(env: Mapping[str, str]) -> bool:
    """Whether srun was asked for GPUs by process (--gpus-per-task, --tres-per-task, --gpu-bind)."""
    by_process = env.get("SLURM_GPUS_PER_TASK") or "gpu" in env.get("SLURM_TRES_PER_TASK", "")
    kind = env.get("SLURM_GPU_BIND", "").removeprefix("verbose,").partition(":")[0]
    return bool(by_process) or kind in ("single", "per_task", "map_gpu", "mask_gpu")


def shares_gpu(host: Host, ranks: int) -> bool:
    """Whether `ranks` ranks on this host share GPUs, as allowed by the user."""
    return host.shared and not host.bound and 0 < host.count < ranks


def require(host: Host, ranks: int, world: int) -> None:
    """Require that `ranks` ranks, of a world of `world`, can run on this host. Raises InputError."""
    if not host.count:
        if host.driver and host.cuda is not None and not host.hidden:
            raise InputError(
                "GPUs",
                None,
                f"cannot be used by torch for CUDA {host.cuda}: the driver is older, or fails",
                f"nvidia-smi shows the newest CUDA it takes; install a newer driver or a torch for that, {_USE_CPU}",
            )
        return
    if shares_gpu(host, ranks):
        return
    if ranks > host.count and not host.bound:
        raise InputError(
            "ranks on this host",
            ranks,
            f"are more than its GPUs ({host.count}), and NCCL takes one process a GPU",
            f"start {host.count} at most, set {SHARE_GPUS}=1 (ranks then share GPUs, and send through the host), "
            + _USE_CPU,
        )
    if world > 1 and not host.nccl:
        raise InputError("NCCL", None, "is not in this build of torch", f"install a CUDA wheel for Linux, {_USE_CPU}")


def stay_near(gpu: int) -> None:
    """Pin this rank to the cores of its GPU's NUMA node, as torchrun does; if the host does not report them, to all
    cores."""
    with suppress(OSError, ValueError, AttributeError):
        at: Any = torch.cuda.get_device_properties(gpu)
        address = f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"
        cores = cores_near(address, Path("/sys")) & os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(0, cores)


def cores_near(address: str, system: Path) -> set[int]:
    """Return the cores of a PCI device's NUMA node, as Linux's /sys says. Raises OSError or ValueError."""
    node = max(
        int((system / "bus/pci/devices" / address / "numa_node").read_text()), 0
    )  # -1 on a host with a single node
    listed = (system / f"devices/system/node/node{node}/cpulist").read_text().strip()
    ends = [[int(n) for n in part.split("-")] for part in listed.split(",")]
    return {core for low, *high in ends for core in range(low, (high or [low])[0] + 1)}
