"""The page of `phalanx ui` in a notebook: the kernel serves it, and a frame below the cell shows it."""

import atexit
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl, urlencode

from phalanx.report.local_page.server import LocalServer
from phalanx.spec.errors import InputError, nearest

QUESTION_FIELDS = ("model", "cluster", "stack", "gpus", "batch", "seq", "where", "headroom")


@dataclass(frozen=True)
class LivePage:
    """A page that answers as long as its kernel runs."""

    address: str
    """Address with the question after #; it can be opened on this machine alone."""

    def _repr_html_(self) -> str:
        return f'<iframe style="width:100%;height:50rem;border:0" src="{escape(self.address)}"></iframe>'


def ui(*, runs: str | Path = "runs", sent: str = "", **asked: Any) -> LivePage:
    """Serve the page of `phalanx ui` from this process and show it in a notebook.

        phalanx.ui(model="llama3-8b", cluster="dgx-h100", gpus=16, batch=64, seq=8192)

    `asked`: initial values of its controls; `sent`: another page's address in their place; `runs`: the folder whose
    runs it shows. A browser on another machine needs a tunnel to the address's port. Raises InputError."""
    for name in asked:
        if name not in QUESTION_FIELDS:
            raise InputError(name, asked[name], "is no control of the page", nearest(name, QUESTION_FIELDS))
    question = f"#{urlencode(asked)}" if asked else question_in(sent)
    return LivePage(f"{_server(Path(runs)).address}{question}")


@cache
def _server(folder: Path) -> LocalServer:
    server = LocalServer(0, folder, framed=True)
    Thread(target=server.serve_forever, daemon=True).start()
    atexit.register(server.server_close)
    return server


def question_in(address: str) -> str:
    """Return the part of an address that holds the question, # included, as the page writes it; "" for none. Raises
    InputError."""
    if not address:
        return ""
    given = parse_qsl(address.partition("#")[2])
    if not given or not {name for name, _ in given} <= set(QUESTION_FIELDS):
        reason = "is no address of the page with a question"
        raise InputError("sent", address, reason, "copy it whole, with its # part")
    return f"#{urlencode(given)}"
