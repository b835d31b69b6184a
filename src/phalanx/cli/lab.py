"""`phalanx lab`: several hosts with links of a set rate, simulated on one machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import announce, console, exit_on_error, require_writable

lab = typer.Typer(
    help="Simulate hosts with links of a set rate on this machine; needs root and iproute2.", no_args_is_help=True
)


@lab.callback()
def _lab() -> None:
    """Keep `run` a command of its own: Typer merges a group's only command into the group."""


@lab.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="Command that torchrun starts on every host.")
    ],
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    ranks: Annotated[int, typer.Option(help="Number of ranks on each host.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="Rate of each host's link, such as 1gbit; unlimited by default.")
    ] = None,
    torchrun: Annotated[
        list[str] | None,
        typer.Option("--torchrun", metavar="NAME=VALUE", help="Option for torchrun; may be repeated."),
    ] = None,
    traffic: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the bytes over each link as JSON.")
    ] = None,
) -> None:
    """Run a command on several simulated hosts (network namespaces), and count the bytes that cross their links.

    phalanx lab run --hosts 2 --ranks 2 --rate 1gbit -- phalanx train job.toml
    """
    with exit_on_error(speaks=True):
        from phalanx.answers.this_machine import require_local
        from phalanx.measure import lab as labs
        from phalanx.spec.errors import InputError

        require_writable("--traffic", traffic)
        words = labs.torchrun_words(command)
        require_local(ranks, "--ranks")
        if "--no-python" in words and shutil.which(command[0]) is None:
            raise InputError(
                "command", command[0], "is not a program on this machine", "a script's name must end in .py"
            )
        options = dict(_option(word) for word in torchrun or ())
        speed = labs.bytes_per_s(rate) if rate else None
        with labs.until_stopped(), labs.Lab(hosts, speed) as network:
            for name in network.swept:
                announce(f"removed what was left of {name}, a lab that was killed")
            announce(f"{hosts} hosts x {ranks} ranks, {f'{rate} each' if rate else 'links of unlimited rate'}")
            before = network.traffic()
            code = labs.run(network, ranks, words, options)
            counted = [now - then for now, then in zip(network.traffic(), before, strict=True)]
        if traffic:
            from phalanx.spec.files.plan import write_json

            write_json(traffic, [{"sent": t.sent, "received": t.received} for t in counted])
        out = console()
        for host, t in enumerate(counted):
            out.print(f"host {host}: sent {t.sent:,} B, received {t.received:,} B", highlight=False)
        raise typer.Exit(code)


def _option(word: str) -> tuple[str, str]:
    """Split NAME=VALUE into the name, without dashes, and the value. Raises InputError."""
    from phalanx.spec.errors import InputError

    name, equals, value = word.partition("=")
    if not equals:
        raise InputError("--torchrun", word, "is not of the form name=value", "e.g. max-restarts=3")
    return name.lstrip("-"), value
