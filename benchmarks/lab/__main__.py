"""Run a command on simulated hosts:  python -m benchmarks.lab --hosts 2 --ranks 2 --rate 1gbit -- COMMAND"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.lab import hosts as labs
from phalanx.answers.machine.this_machine import require_local
from phalanx.cli.terminal import announce, console, exit_on_error, require_writable
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import write_json


def main(
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

    Needs root and iproute2.

    python -m benchmarks.lab --hosts 2 --ranks 2 --rate 1gbit -- phalanx train job.toml
    """
    with exit_on_error(speaks=True):
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
            write_json(traffic, [{"sent": t.sent, "received": t.received} for t in counted])
        out = console()
        for host, t in enumerate(counted):
            out.print(f"host {host}: sent {t.sent:,} B, received {t.received:,} B", highlight=False)
        raise typer.Exit(code)


def _option(word: str) -> tuple[str, str]:
    """Split NAME=VALUE into the name, without dashes, and the value. Raises InputError."""
    name, equals, value = word.partition("=")
    if not equals:
        raise InputError("--torchrun", word, "is not of the form name=value", "e.g. max-restarts=3")
    return name.lstrip("-"), value


APP = typer.Typer(pretty_exceptions_enable=False)
APP.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)

if __name__ == "__main__":
    APP()
