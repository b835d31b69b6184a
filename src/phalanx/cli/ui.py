"""`phalanx ui`: a local page that plans as its controls move, and shows runs as they train."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.terminal import announce, exit_on_error


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
        from phalanx.report.local_page.notebook import question_in
        from phalanx.report.local_page.server import LocalServer

        question = question_in(sent)
        server = LocalServer(port, runs)
        print(f"{server.address}{question}", flush=True)
        announce("open it in a browser of this machine; Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            announce("ended")
        finally:
            server.server_close()
