"""The forms in which people start a training whose flags are known: command lines, scripts, batch scripts, manifests.

A program is its words, ranks and nodes; `forms` writes it in every form that a drawn choice makes, as a text and the
name of its file. Reading any of them gives what its parsed keys give.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Program:
    """What is started: `words` behind the program's name, on `nodes` of `gpus` ranks."""

    name: str
    words: tuple[str, ...]
    nodes: int
    gpus: int

    @property
    def world(self) -> int:
        return self.nodes * self.gpus


def words_of(args: dict[str, Any], assigned: bool = False) -> tuple[str, ...]:
    """Return parsed flags as the words of a command line; `assigned`: as `key=value`."""
    words: list[str] = []
    for name, value in args.items():
        if assigned:
            words.append(f"{name}={_text(value)}")
        elif value is True:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(_text, value)]
        elif value is not None and not isinstance(value, dict):
            words += [f"--{name}", _text(value)]
    return tuple(words)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


Launcher = Callable[[Program, st.DrawFn], str]


def _torchrun(p: Program, draw: st.DrawFn) -> str:
    sep = draw(st.sampled_from(["=", " "]))
    names = draw(st.sampled_from([("--nnodes", "--nproc_per_node"), ("--nnodes", "--nproc-per-node")]))
    start = draw(
        st.sampled_from(["torchrun", "python -m torch.distributed.run", "python3 -u -m torch.distributed.launch"])
    )
    extra = draw(
        st.sampled_from(["", " --rdzv_backend c10d --rdzv-endpoint=$MASTER:29500", " --node_rank $RANK --tee 3"])
    )
    return f"{start} {names[0]}{sep}{p.nodes} {names[1]}{sep}{p.gpus}{extra} {p.name}"


def _srun(p: Program, draw: st.DrawFn) -> str:
    counts = draw(
        st.sampled_from(
            [
                f"-N {p.nodes} -n {p.world}",
                f"--nodes={p.nodes} --ntasks-per-node={p.gpus}",
                f"-N{p.nodes} -n{p.world} -l",
            ]
        )
    )
    return f"srun {counts} --kill-on-bad-exit=1 python -u {p.name}"


def _mpirun(p: Program, draw: st.DrawFn) -> str:
    return f"mpirun -np {p.world} -npernode {p.gpus} --bind-to none -x PATH -x A=1 --mca btl ^openib python {p.name}"


def _deepspeed(p: Program, draw: st.DrawFn) -> str:
    return f"deepspeed --num_nodes {p.nodes} --num_gpus={p.gpus} --master_port 29501 {p.name}"


def _torchx(p: Program, draw: st.DrawFn) -> str:
    return f"torchx run -s slurm dist.ddp -j {p.nodes}x{p.gpus} --script {p.name} --"


def _nested(p: Program, draw: st.DrawFn) -> str:
    return f"srun -N {p.nodes} --ntasks-per-node 1 {_torchrun(p, draw)}"


def _container(p: Program, draw: st.DrawFn) -> str:
    return f"singularity exec --nv -B /data:/data image.sif {_torchrun(p, draw)}"


LAUNCHERS: tuple[Launcher, ...] = (_torchrun, _srun, _mpirun, _deepspeed, _torchx, _nested, _container)


def _quoted(words: Sequence[str]) -> list[str]:
    return [shlex.quote(word) for word in words]


def _line(p: Program, start: str, draw: st.DrawFn) -> tuple[str, str]:
    between = draw(st.sampled_from([" ", " \\\n    "]))
    tail = draw(st.sampled_from(["", " 2>&1 | tee log.txt", " > out.log &", " $EXTRA_ARGS"]))
    return start + between + between.join(_pairs(p.words)) + tail + "\n", "run.sh"


def _pairs(words: Sequence[str]) -> list[str]:
    """Return words with each flag and its values in one piece, as people break lines."""
    pieces: list[str] = []
    for word in _quoted(words):
        if word.startswith("--") or not pieces or "=" in word:
            pieces.append(word)
        else:
            pieces[-1] += f" {word}"
    return pieces


def _array(p: Program, start: str, draw: st.DrawFn) -> tuple[str, str]:
    pieces = _pairs(p.words)
    cut = draw(st.integers(0, len(pieces)))
    text = (
        "#!/bin/bash\nset -euo pipefail\nARGS=(\n"
        + "".join(f"  {piece} # as it was\n" for piece in pieces[:cut])
        + ")\n"
    )
    text += "".join(f"ARGS+=({piece})\n" for piece in pieces[cut:])
    return f'{text}{start} "${{ARGS[@]}}"\n', "run.sh"


def _variables(p: Program, start: str, draw: st.DrawFn) -> tuple[str, str]:
    """Numbers in variables with defaults and arithmetic, flags in a text, the command in `CMD`."""
    text, words = "#!/bin/bash\n", []
    for place, word in enumerate(p.words):
        if word.isdigit() and draw(st.booleans()):
            form = draw(
                st.sampled_from(["V{0}={1}", "V{0}=${{V{0}:-{1}}}", ": ${{V{0}:={1}}}", "V{0}=$(({1} * 2 / 2))"])
            )
            text += form.format(place, word) + "\n"
            words.append(f"$V{place}")
        else:
            words.append(shlex.quote(word))
    if any("'" in word or '"' in word or "\\" in word for word in words):
        return f"{text}{start} {' '.join(words)}\n", "run.sh"
    form = draw(st.sampled_from(["text", "command", "function"]))
    joined = " ".join(words)
    if form == "text":
        return f'{text}A="{joined}"\n{start} $A\n', "run.sh"
    if form == "command":
        return f'{text}CMD="{start} {joined}"\necho $CMD\neval "$CMD"\n', "run.sh"
    return f"{text}train() {{\n  {start} $@\n}}\ntrain {joined}\n", "run.sh"


def _branches(p: Program, start: str, draw: st.DrawFn) -> tuple[str, str]:
    pieces = _pairs(p.words)
    cut = draw(st.integers(0, len(pieces)))
    rest = " ".join(pieces[cut:])
    text = f"MODE=large\nARGS=({' '.join(pieces[:cut])})\n"
    text += (
        f"if [ $MODE == small ]; then\n  ARGS+=(--never 1)\nelif [[ $MODE = large ]]; then\n  ARGS+=({rest})\nfi\n"
    )
    text += "case $MODE in\n  small) exit ;;\n  *) ;;\nesac\nif [ ! -d /data ]; then echo no data; exit 1; fi\n"
    return f'{text}{start} "${{ARGS[@]}}"\n', "run.sh"


def _batch(p: Program, start: str, draw: st.DrawFn) -> tuple[str, str]:
    """A batch script whose lines say how many nodes and GPUs there are."""
    gpus = draw(
        st.sampled_from([f"--gpus-per-node={p.gpus}", f"--gres=gpu:h100:{p.gpus}", f"--gpus-per-node h100:{p.gpus}"])
    )
    text = (
        f"#!/bin/bash\n#SBATCH --job-name=x\n#SBATCH --nodes {p.nodes}\n#SBATCH {gpus}\n#SBATCH --ntasks-per-node=1\n"
    )
    text += f"module load cuda\nGPUS_PER_NODE={p.gpus}\nWORLD=$((SLURM_NNODES * GPUS_PER_NODE))\n"
    start = draw(
        st.sampled_from(
            [
                f"srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $GPUS_PER_NODE {p.name}",
                f"srun --label torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc-per-node=gpu {p.name}",
                f"mpirun -np $WORLD --npernode $GPUS_PER_NODE python {p.name}",
                f"srun --ntasks-per-node={p.gpus} python {p.name}",
            ]
        )
    )
    pieces = " ".join(_pairs(p.words))
    if (
        draw(st.booleans())
        and "'" not in pieces
        and '"' not in pieces
        and "\\" not in pieces
        and start.startswith("srun")
    ):
        inner = start.removeprefix("srun --label ").removeprefix("srun ")
        if not inner.startswith("--"):
            return f'{text}OPT=({pieces})\nsrun bash -c "{inner} ${{OPT[*]}}"\n', "job.sbatch"
    return f"{text}{start} {pieces}\n", "job.sbatch"


def _here_document(p: Program, start: str, draw: st.DrawFn) -> tuple[str, str]:
    pieces = " \\\n".join(_pairs(p.words))
    shell = draw(st.sampled_from(["bash", "ssh host bash -s", "bash -s"]))
    quote = draw(st.sampled_from(["'", ""])) if "$" not in start + pieces and "`" not in pieces else "'"
    if not quote and "\\" in pieces.replace("\\\n", ""):
        quote = "'"
    return f"{shell} <<{quote}EOF{quote}\n{start} {pieces}\nEOF\n", "run.sh"


SCRIPTS = (_line, _array, _variables, _branches, _batch, _here_document)


def _container_of(p: Program, draw: st.DrawFn, nodes_known: bool = True) -> dict[str, Any]:
    """The container of a manifest, in the ways that people write its command."""
    words = [
        "torchrun",
        f"--nproc_per_node={p.gpus}",
        *([f"--nnodes={p.nodes}"] if nodes_known else []),
        p.name,
        *p.words,
    ]
    form = draw(st.sampled_from(["words", "split", "shell"]))
    command: dict[str, Any] = {"command": words}
    if form == "split":
        command = {"command": words[:2], "args": words[2:]}
    elif form == "shell":
        command = {"command": ["bash", "-c", " ".join(_quoted(words))]}
    limits = {"limits": {"nvidia.com/gpu": p.gpus}}
    return {"name": "train", "image": "x", "resources": limits, "env": [{"name": "A", "value": "1"}], **command}


def _pod(p: Program, draw: st.DrawFn, **more: Any) -> dict[str, Any]:
    return {"spec": {"containers": [_container_of(p, draw, **more)]}}


def _manifest(p: Program, draw: st.DrawFn) -> tuple[str, str]:
    """A manifest of one of the kinds of job."""
    kind = draw(
        st.sampled_from(["PyTorchJob", "JobSet", "Job", "LeaderWorkerSet", "RayJob", "TrainJob", "MPIJob", "task"])
    )
    pod, spec = _pod(p, draw), {}
    if kind == "PyTorchJob":
        groups = {"Master": {"replicas": 1, "template": pod}}
        groups |= {"Worker": {"replicas": p.nodes - 1, "template": pod}} if p.nodes > 1 else {}
        spec = {"pytorchReplicaSpecs": groups}
        if draw(st.booleans()):
            spec |= {"nprocPerNode": str(p.gpus)}
            bare = _pod(p, draw, nodes_known=False)
            for group in groups.values():
                group["template"] = bare
    elif kind == "JobSet":
        job = {
            "name": "w",
            "replicas": 1,
            "template": {"spec": {"parallelism": p.nodes, "completions": p.nodes, "template": pod}},
        }
        spec = {"replicatedJobs": [job]}
    elif kind == "Job":
        spec = {"completions": p.nodes, "parallelism": p.nodes, "template": pod}
    elif kind == "LeaderWorkerSet":
        spec = {"leaderWorkerTemplate": {"size": p.nodes, "workerTemplate": pod}}
    elif kind == "RayJob":
        line = " ".join(
            _quoted(pod["spec"]["containers"][0]["command"] + pod["spec"]["containers"][0].get("args", []))
        )
        group = {
            "replicas": p.nodes,
            "template": {
                "spec": {"containers": [{"name": "r", "resources": {"limits": {"nvidia.com/gpu": p.gpus}}}]}
            },
        }
        spec = {"entrypoint": line, "rayClusterSpec": {"workerGroupSpecs": [group]}}
    elif kind == "TrainJob":
        container = pod["spec"]["containers"][0]
        spec = {"trainer": {"numNodes": p.nodes, "command": container["command"], "args": container.get("args", [])}}
    elif kind == "MPIJob":
        words = ["mpirun", "-np", str(p.world), "python", p.name, *p.words]
        launcher = {"spec": {"containers": [{"name": "l", "command": words}]}}
        worker = {"spec": {"containers": [{"name": "w", "resources": {"limits": {"nvidia.com/gpu": p.gpus}}}]}}
        spec = {
            "slotsPerWorker": p.gpus,
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": launcher},
                "Worker": {"replicas": p.nodes, "template": worker},
            },
        }
    if kind == "task":
        run = f"torchrun --nnodes=$SKYPILOT_NUM_NODES --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE {p.name} "
        whole: dict[str, Any] = {"num_nodes": p.nodes, "resources": {"accelerators": f"H100:{p.gpus}"}}
        whole["run"] = run + " ".join(_quoted(p.words)) + "\n"
    else:
        whole = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "x"}, "spec": spec}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "files"}, "data": {"a.txt": "b"}}
    documents = [config_map, whole] if kind != "task" and draw(st.booleans()) else [whole]
    return "---\n".join(json.dumps(d, indent=1) + "\n" for d in documents), "job.yaml"


@st.composite
def forms(draw: st.DrawFn, program: Program) -> tuple[str, str]:
    """Draw a form of a program: (text, file name)."""
    if draw(st.integers(0, 3)) == 0:
        return _manifest(program, draw)
    start = draw(st.sampled_from(LAUNCHERS))(program, draw)
    if draw(st.booleans()):
        start = draw(st.sampled_from(["CUDA_DEVICE_MAX_CONNECTIONS=1 ", "nohup ", "env A=1 ", "time "])) + start
    return draw(st.sampled_from(SCRIPTS))(program, start, draw)
