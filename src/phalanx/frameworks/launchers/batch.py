"""What a batch script asks its scheduler for: `#SBATCH` and `#PBS` lines, and the variables that they set.

Slurm: sbatch(1), OUTPUT ENVIRONMENT VARIABLES; PBS: qsub(1B), `-l select`.
"""

import re
from collections.abc import Mapping

from phalanx.frameworks.launchers.launcher import Allocation

_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus"}
_KIND = re.compile(r"(?:gres/)?(?:gpu[:/])?([A-Za-z][\w.-]*)")
_LINE = re.compile(r"^[ \t]*#(SBATCH|PBS)[ \t]+(.*)$", re.M)


def requests_of(text: str) -> tuple[Allocation, dict[str, str]]:
    """Return the nodes, tasks and GPUs that a script asks for, and the variables that its scheduler sets for it."""
    lines = [(match[1], match[2].split(" #")[0].strip()) for match in _LINE.finditer(text)]
    if not lines:
        return Allocation(), {}
    kinds = {kind for kind, _ in lines}
    options: dict[str, str] = {}
    for _, line in lines:
        if line in ("hetjob", "packjob"):  # Slurm's variables are the first component's
            break
        for name, value in re.findall(r"(?:^|\s)--?([A-Za-z][\w-]*)(?:[= \t]+([^\s-]\S*))?", line):
            attached = re.fullmatch(r"([NnG])(\d+)", name)
            name, value = (attached[1], attached[2]) if attached else (name, value)
            options[_SHORT.get(name, name)] = value
    return _pbs(lines) if "PBS" in kinds else _slurm(options)


def _slurm(options: Mapping[str, str]) -> tuple[Allocation, dict[str, str]]:
    nodes = _number(options.get("nodes", "").rpartition("-")[2])
    per_node = _number(options.get("ntasks-per-node"))
    tasks = _number(options.get("ntasks"))
    gres = options.get("gres", "")
    gpus = _number(options.get("gpus-per-node")) or (_number(gres) or 1 if gres.startswith("gpu") else None)
    per_task = _number(options.get("gpus-per-task"))
    if nodes is None and tasks and per_node:
        nodes = -(-tasks // per_node)
    if gpus is None and per_task and per_node:
        gpus = per_task * per_node
    whole = _number(options.get("gpus"))
    if tasks is None and nodes and per_node:
        tasks = nodes * per_node
    each = gpus or (whole // nodes if whole and nodes else None)
    given = Allocation(nodes, per_node, tasks, each, whole, _kind(options), "#SBATCH")
    names = {
        ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"): nodes,
        ("SLURM_NTASKS", "SLURM_NPROCS"): tasks or nodes,
        ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"): per_node,
        ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"): given.gpus,
        ("SLURM_GPUS",): whole,
    }
    return given, {name: str(value) for several, value in names.items() if value for name in several}


def _pbs(lines: list[tuple[str, str]]) -> tuple[Allocation, dict[str, str]]:
    """Read `-l select=4:ncpus=64:ngpus=8:mpiprocs=8`, or `-l nodes=4:ppn=8:gpus=8`."""
    text = " ".join(line for _, line in lines)
    nodes = re.search(r"(?:select|nodes)=(\d{1,6})", text)
    match = {name: re.search(rf"[:,]{name}=(\d{{1,6}})", text) for name in ("ngpus", "gpus", "mpiprocs", "ppn")}
    value = {name: int(m[1]) for name, m in match.items() if m}
    count = int(nodes[1]) if nodes else None
    each = value.get("mpiprocs", value.get("ppn"))
    tasks, gpus = count * each if count and each else None, value.get("ngpus", value.get("gpus"))
    kind = re.search(r"[:,]gpu_(?:type|model)=([\w.-]+)", text)
    names = {"PBS_NUM_NODES": str(count)} if count else {}
    return Allocation(count, each, tasks, gpus, None, kind[1] if kind else "", "#PBS"), names


def _kind(options: Mapping[str, str]) -> str:
    """Return the kind of GPU of --gres=gpu:a100:4, --gpus-per-node=h100:8 or --constraint=h100; "" where none says
    one."""
    stated = [options.get(name, "") for name in ("gres", "gpus-per-node", "gpus", "gpus-per-task")]
    matches = [_KIND.match(text) for text in stated]
    kinds = [match[1] for match in matches if match and match[1] != "gpu"]
    return next(iter(kinds), options.get("constraint", options.get("C", "")))


def _number(text: str | None) -> int | None:
    """Return the number at the end of one of Slurm's words: 8, h100:8, gpu:h100:8; None for 0 and for other words."""
    match = re.search(r"(?:^|[:=])(\d{1,6})(?:\(|$)", text or "")
    return int(match[1]) or None if match else None
