"""`phalanx lab`: hosts with shaped links on this machine, for whoever has one machine and wants to see several."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import announce, console, mistakes, require_writable

lab = typer.Typer(help="Hosts with shaped links on this machine; needs root and iproute2.", no_args_is_help=True)


@lab.callback()
def _lab() -> None:
    pass


@lab.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="What torchrun starts on every host.")
    ],
    hosts: Annotated[int, typer.Option(help="How many.")] = 2,
    ranks: Annotated[int, typer.Option(help="Of each host.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="Of each host's link, such as 1gbit; without it as fast as it can.")
    ] = None,
    torchrun: Annotated[
        list[str] | None, typer.Option("--torchrun", metavar="NAME=VALUE", help="A torchrun option, may be repeated.")
    ] = None,
    traffic: Annotated[Path | None, typer.Option(metavar="FILE", help="Write each link's bytes as JSON.")] = None,
) -> None:
    """Run a command on several hosts made of network namespaces, and count what crosses their links.

    phalanx lab run --hosts 2 --ranks 2 --rate 1gbit -- phalanx train job.toml
    """
    with mistakes():
        from phalanx.measure import lab as labs
        from phalanx.spec.errors import InputError

        require_writable("--traffic", traffic)
        words = labs.torchrun_words(command)
        if ranks < 1:
            raise InputError("--ranks", ranks, "must be at least 1")
        if "--no-python" in words and shutil.which(command[0]) is None:
            raise InputError("command", command[0], "is no program here", "or a script's name ends in .py")
        options = dict(_option(word) for word in torchrun or ())
        speed = labs.bytes_per_s(rate) if rate else None
        with labs.until_stopped(), labs.Lab(hosts, speed) as found:
            for name in found.swept:
                announce(f"removed what was left of {name}, a lab that was killed")
            announce(f"{hosts} hosts x {ranks} ranks, {f'{rate} each' if rate else 'links as fast as they are'}")
            before = found.traffic()
            code = labs.run(found, ranks, words, options)
            counted = [now - then for now, then in zip(found.traffic(), before, strict=True)]
        if traffic:
            from phalanx.spec.files.plan import write_json

            write_json(traffic, [{"sent": t.sent, "received": t.received} for t in counted])
        out = console()
        for host, t in enumerate(counted):
            out.print(f"host {host}: sent {t.sent:,} B, received {t.received:,} B", highlight=False)
        raise typer.Exit(code)


def _option(word: str) -> tuple[str, str]:
    from phalanx.spec.errors import InputError

    name, equals, value = word.partition("=")
    if not equals:
        raise InputError("--torchrun", word, "is not of the form name=value", "e.g. max-restarts=3")
    return name.lstrip("-"), value
