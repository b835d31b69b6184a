"""`phalanx serve launch`: what starts a serving plan."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.command import command
from phalanx.cli.terminal import announce, print_json

if TYPE_CHECKING:
    from phalanx.serving.plan_file import ServingPlan


@command
def launch(plan: Path, starter: str = "engine", json: bool = False) -> None:
    """Print what starts a serving plan: command lines of its engine, or a manifest of Dynamo.

    plan serving.json: A serving plan, written by `serve plan`.
    starter --for engine|dynamo: The engine's command lines, or a manifest of NVIDIA Dynamo.
    """
    from phalanx.serving import plan_file

    require_starter("--for", starter)
    served = plan_file.read(plan)
    if json:
        print_json(as_json_of(served, starter))
    else:
        show(served, starter)


def require_starter(option: str, name: str) -> None:
    """Require a known way to start a plan. Raises InputError."""
    from phalanx.spec.errors import InputError, nearest

    if name not in ("engine", "dynamo"):
        raise InputError(option, name, "is not known", nearest(name, ("engine", "dynamo")))


def as_json_of(plan: ServingPlan, what: str) -> dict[str, Any]:
    """Return what starts a plan. Raises InputError for what its engine cannot do."""
    from phalanx.serving.answer import launch, manifest

    return {"manifest": manifest(plan)} if what == "dynamo" else asdict(launch(plan))


def show(plan: ServingPlan, what: str) -> None:
    """Print what starts a plan. Raises InputError for what its engine cannot do."""
    from phalanx.serving.answer import launch, manifest

    if what == "dynamo":
        print(manifest(plan), end="")
        return
    launch_line = launch(plan)
    for name, content in launch_line.files.items():
        print(f"# {name}\n{content}")
    for each in launch_line.commands:
        print(f"# {each.title}, node {each.node} ({launch_line.engine} {launch_line.version})\n{each.line()}\n")
    for note in launch_line.notes:
        announce(f"note: {note}")
