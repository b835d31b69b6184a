"""`make stacks`: drawn exports before the frameworks' own parsers, each installed in an environment of its own.

    python -m support.exports [--count 200] [--seed 1] [--only megatron] [--sources DIR] [--record]

Environments are kept in .stacks/. `--sources` names a folder with the repositories of what PyPI has not: nanotron,
MaxText, Megatron-Bridge and the Megatron-LM that it pins, and Megatron-LM-0.14 (core_v0.14.0). `--record`
writes the schemas that the suite holds exports against (tests/frameworks/stack_schemas.json).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from phalanx.answers.configurations.export import TARGETS
from phalanx.frameworks.registry import DOCUMENTED
from support.exports.cases import cases

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@dataclass(frozen=True)
class Environment:
    """What a framework's parser needs: a Python, and packages in the order of their installation."""

    python: str
    packages: tuple[tuple[str, ...], ...]
    source: str = ""
    """A repository to install from, where there is no package."""
    paths: tuple[str, ...] = ()
    """Folders of `--sources` that are imported as they are, where installing takes a GPU: what is missing is
    pretended (protocol.py)."""
    target: str = ""
    """What is exported, where the environment is not named after it."""
    stacks: tuple[str, ...] = ()
    """Rows whose release it has; empty: all of the target that no other environment has."""


_TORCH = ("torch==2.13.0", "numpy")
_HUGGING_FACE = (_TORCH, ("transformers==5.23.0", "accelerate==1.15.0"))
ENVIRONMENTS = {
    "megatron": Environment("python3.12", (_TORCH, ("megatron-core==0.19.0", "transformers==5.24.0"))),
    "megatron-core-0.14": Environment(
        "python3.12",
        (_TORCH, ("transformers==5.24.0", "einops", "six")),
        paths=("Megatron-LM-0.14",),
        target="megatron",
        stacks=("megatron-core-0.14",),
    ),
    "torchtitan": Environment("python3.12", (_TORCH, ("torchtitan==0.3.0", "torchao==0.18.0"))),
    "deepspeed": Environment("python3.11", (*_HUGGING_FACE, ("deepspeed==0.19.0",))),
    "accelerate": Environment("python3.11", _HUGGING_FACE),
    "bridge": Environment(
        "python3.12",
        (_TORCH, ("megatron-core==0.19.0", "transformers==5.8.0", "omegaconf", "hydra-core", "einops")),
        paths=("Megatron-LM", "Megatron-Bridge/src"),
    ),
    "maxtext": Environment(
        "python3.12", (("jax", "pydantic", "pyyaml", "jinja2", "numpy", "packaging"),), paths=("maxtext/src",)
    ),
    "nanotron": Environment("python3.11", (*_HUGGING_FACE, ("dacite", "datasets", "einops")), "nanotron"),
}


def python_of(to: str, sources: Path | None) -> Path | None:
    """Return the Python of a framework's environment, made if it is not there; None where it cannot be."""
    wanted, folder = ENVIRONMENTS[to], ROOT / ".stacks" / to
    python = folder / "bin/python"
    needed = (*((wanted.source,) if wanted.source else ()), *wanted.paths)
    if needed and (sources is None or not all((sources / name).is_dir() for name in needed)):
        return None
    if (folder / ".installed").exists():
        return python
    try:
        subprocess.run([wanted.python, "-m", "venv", folder], check=True, env=_with_pyenv(wanted.python))
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    for packages in wanted.packages:
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    if wanted.source and sources is not None:
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", sources / wanted.source], check=True)
    (folder / ".installed").touch()
    return python


def _with_pyenv(python: str) -> dict[str, str]:
    """Return the environment in which pyenv, where it is, finds a version that is not the global one."""
    here = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{python[6:]}.*"))
    return {**os.environ, **({"PYENV_VERSION": here[-1].name} if here else {})}


def main() -> int:
    """Check every framework; print what passed, what was refused and what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m support.exports")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=ENVIRONMENTS)
    parser.add_argument("--python", type=Path, help="an environment that is there already, for --only")
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    failed = 0
    for to in [options.only] if options.only else ENVIRONMENTS:
        python = options.python or python_of(to, options.sources)
        if python is None:
            print(f"{to}: not installed (needs {ENVIRONMENTS[to].python}, and its sources where PyPI has none)")
            continue
        if options.record:
            _record(to, python, _imports(to, options.sources))
        elsewhere = {stack for e in ENVIRONMENTS.values() if e is not ENVIRONMENTS[to] for stack in e.stacks}
        for stack in ENVIRONMENTS[to].stacks or TARGETS[to].stacks:
            if stack not in elsewhere:
                failed += _check(to, stack, python, options.count, options.seed, _imports(to, options.sources))
    return int(failed > 0)


def _imports(to: str, sources: Path | None) -> dict[str, str]:
    """Return the environment in which a framework's sources are imported, where they are not installed."""
    paths = [str((sources or Path()) / name) for name in ENVIRONMENTS[to].paths]
    return {**os.environ, **({"PYTHONPATH": os.pathsep.join(paths)} if paths else {})}


def _check(to: str, stack: str, python: Path, count: int, seed: int, environment: dict[str, str]) -> int:
    target = ENVIRONMENTS[to].target or to
    drawn, subjects, refused = cases(target, DOCUMENTED[stack], count, seed)
    text = "\n".join(map(json.dumps, drawn))
    run = subprocess.run(
        [python, HERE / f"in_{target}.py"], input=text, capture_output=True, text=True, env=environment
    )
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    wrong = Counter(a for a in answers if a)
    print(f"{to} as {stack}: {answers.count('')} of {count} accepted, {sum(refused.values())} refused by Phalanx")
    for reason, n in wrong.most_common(10):
        x = subjects[answers.index(reason)]
        print(f"  {n} x {reason[:300]}\n    e.g. {x.model.family} {x.s} {x.options}")
    if len(answers) < count:
        print(run.stderr[-2000:], file=sys.stderr)
    return count - answers.count("")


def _record(to: str, python: Path, environment: dict[str, str]) -> None:
    path = ROOT / "tests/frameworks/stack_schemas.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    script = HERE / f"in_{ENVIRONMENTS[to].target or to}.py"
    run = subprocess.run([python, script, "--schema"], capture_output=True, text=True, env=environment)
    if run.returncode:
        raise RuntimeError(run.stderr[-2000:])
    row = json.loads(run.stdout)
    row["flags"], row["keys"] = " ".join(row["flags"]), " ".join(row["keys"])
    path.write_text(json.dumps(dict(sorted({**known, to: row}.items())), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    sys.exit(main())
