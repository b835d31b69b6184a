"""The server of `phalanx ui`: on 127.0.0.1 alone, every address below a token that nobody can guess.

Python's own http.server: one user, a handful of short requests and no open connection need no framework, and what has to
be right here (the token, the Host header, which folders are read) is checked below in sight. A page of another origin
cannot ask: it does not know the token, its Origin is refused, and no answer allows it to read (no CORS). A name that
is pointed at 127.0.0.1 (DNS rebinding) is refused by its Host header.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from phalanx.commands.local_page.answers import NAMES, Planner
from phalanx.commands.report import of_run
from phalanx.report.html.local_page import POLICY, local_page
from phalanx.spec.errors import InputError

_MOST_BYTES = 64 * 2**10
_KEPT = 16
"""Reports of the latest answers, which a page may still download."""


class LocalServer(ThreadingHTTPServer):
    """Serves the page and its questions. `folder`: where runs lie; nothing outside is read. Raises InputError."""

    daemon_threads = True
    allow_reuse_address = False

    def __init__(self, port: int, folder: Path) -> None:
        self.token = secrets.token_urlsafe(24)
        self.folder = folder
        self.planner = Planner()
        self.reports: OrderedDict[str, str] = OrderedDict()
        self.page = local_page(NAMES["model"], NAMES["cluster"], NAMES["stack"])
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise InputError(
                "--port", port, f"cannot be used ({(error.strerror or '').lower()})", "name another, or 0"
            ) from None

    @property
    def address(self) -> str:
        """The page's URL, token included."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs of the folder, and when each last changed; links are none of them."""
        if not self.folder.is_dir():
            return []
        runs: list[dict[str, Any]] = []
        for run in sorted(self.folder.iterdir()):
            if run.is_dir() and not run.is_symlink() and not run.name.startswith("."):
                files = [
                    f for f in (run / name for name in ("plan.json", "metrics.jsonl", "trace.json")) if f.exists()
                ]
                if files:
                    runs.append({"name": run.name, "changed": max(f.stat().st_mtime for f in files)})
        return runs

    def server_close(self) -> None:
        """Close the port and end the planner."""
        super().server_close()
        self.planner.close()


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer
    timeout = 600

    def do_GET(self) -> None:
        what = self._asked()
        name, _, query = (what or "").partition("?")
        if what is None:
            self._refuse(404, "There is nothing here. Open the address that `phalanx ui` printed.")
        elif name == "":
            self._reply("text/html", self.server.page)
        elif name == "runs":
            self._reply("application/json", json.dumps(self.server.runs()))
        elif name == "run":
            self._run(unquote(query))
        elif name == "report" and query in self.server.reports:
            self._reply("text/html", self.server.reports[query])
        else:
            self._refuse(404, "There is nothing here.")

    def do_POST(self) -> None:
        what, own = self._asked(), f"http://{self.headers.get('Host')}"
        if what not in ("plan", "stop") or self.headers.get("Origin", own) != own:
            return self._refuse(404, "There is nothing here.")
        try:
            length = int(self.headers.get("Content-Length", ""))
            question = json.loads(self.rfile.read(length)) if 0 <= length <= _MOST_BYTES else None
        except (ValueError, RecursionError):
            question = None
        if not isinstance(question, dict) or self.headers.get_content_type() != "application/json":
            return self._reply("application/json", json.dumps({"error": "the question is no JSON object"}), 400)
        name = str(question.get("id", ""))
        if what == "stop":
            self.server.planner.stop(name)
            return self._reply("application/json", "{}")
        answer = self.server.planner.ask(question)
        if "page" in answer:
            self.server.reports[name] = answer.pop("page")
            while len(self.server.reports) > _KEPT:
                self.server.reports.popitem(last=False)
            answer["id"] = name
        self._reply("application/json", json.dumps(answer))

    def _asked(self) -> str | None:
        """Return what is asked for below the token; None for a stranger."""
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        token, slash, what = self.path.removeprefix("/").partition("/")
        known = slash and secrets.compare_digest(token.encode(), self.server.token.encode())
        return what if known and self.headers.get("Host") in hosts else None

    def _run(self, name: str) -> None:
        """Reply with a run's report, or with what is wrong with its folder."""
        if name not in {run["name"] for run in self.server.runs()}:
            return self._refuse(404, "There is no such run.")
        try:
            self._reply("text/html", of_run(self.server.folder / name))
        except (InputError, OSError) as error:
            self._refuse(200, str(error))

    def _refuse(self, status: int, why: str) -> None:
        text = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Phalanx</title><p>{escape(why)}</p></html>'
        )
        self._reply("text/html", text, status)

    def _reply(self, kind: str, text: str, status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        for header, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(header, value)
        self.end_headers()
        try:
            self.wfile.write(content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the tab is closed

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""
