"""`phalanx ui`: a local page that plans as its controls move, and shows runs as they train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import announce, exit_on_error


def ui(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder whose runs are shown.")] = Path("runs"),
) -> None:
    """Serve a page on this machine: pick model, cluster and numbers, and see the plan change; look at runs.

    Open the address that is printed; only who knows it can ask. Ctrl-C ends it.
    """
    with exit_on_error(speaks=True):
        from phalanx.report.local_page.server import LocalServer

        server = LocalServer(port, runs)
        print(server.address, flush=True)
        announce("open it in a browser of this machine; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            announce("ended")
        finally:
            server.server_close()
