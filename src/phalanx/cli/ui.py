"""`phalanx ui`: a local page that plans as its controls move, and shows runs as they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import announce, exit_on_error


def _question_in(address: str) -> str:
    """Return the part of an address that holds the question, # included, as the page writes it; "" for none. Raises
    InputError."""
    from urllib.parse import parse_qsl, urlencode

    from phalanx.spec.errors import InputError

    if not address:
        return ""
    given = parse_qsl(address.partition("#")[2])
    if not given or not {name for name, _ in given} <= set(_ASKED):
        raise InputError(
            "sent", address, "is no address of the page with a question", "copy it whole, with its # part"
        )
    return f"#{urlencode(given)}"


_ASKED = ("model", "cluster", "stack", "gpus", "batch", "seq", "where", "headroom")


def ui(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder whose runs are shown.")] = Path("runs"),
    sent: Annotated[
        str, typer.Option("--sent", metavar="ADDRESS", help="Ask what another user's page asks, by its address.")
    ] = "",
) -> None:
    """Serve a page on this machine: pick model, cluster and numbers, and see the plan change; look at runs.

    Open the address that is printed; only who knows it can ask. Its part behind the # is the question: whoever is
    sent the whole address asks the same here with --sent. Ctrl-C ends it.
    """
    with exit_on_error(speaks=True):
        from phalanx.report.local_page.server import LocalServer

        server = LocalServer(port, runs)
        print(f"{server.address}{_question_in(sent)}", flush=True)
        announce("open it in a browser of this machine; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            announce("ended")
        finally:
            server.server_close()
