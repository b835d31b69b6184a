"""The server of `phalanx ui`: on 127.0.0.1 alone, every address below a token that cannot be guessed.

It is Python's own http.server: one user and a few short requests need no framework, and the checks that matter (the
token, the Host header, which folders are read) are in this file. A page of another origin cannot ask: it does not
know the token, its Origin is refused, and no answer lets it read (no CORS). A foreign name that resolves to 127.0.0.1
(DNS rebinding) is refused by its Host header.
"""

import json
import os
import secrets
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from heapq import nlargest
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from socket import SHUT_RDWR, socket
from typing import Any
from urllib.parse import unquote
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from phalanx.answers.configurations.export import TARGETS, export
from phalanx.report.html.page import asset, page_of
from phalanx.report.local_page.answers import NAMES, Planner
from phalanx.report.measured.run_page import of_run
from phalanx.spec.errors import InputError
from phalanx.spec.files.plan import from_dict

_FRAMERS = "frame-ancestors 'self'"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    f"frame-src 'self'; {_FRAMERS}; form-action 'none'; base-uri 'none'"
)
"""Content security policy: the page requests nothing from any other server."""


def local_page(
    models: Sequence[str], clusters: Sequence[str], stacks: Sequence[str], frameworks: Sequence[str]
) -> str:
    """Return the page. The lists are the choices of its controls; `frameworks`: targets of exports."""

    def select(name: str, names: Sequence[str], chosen: str) -> str:
        options = "".join(f"<option{' selected' if n == chosen else ''}>{escape(n)}</option>" for n in names)
        return f'<label>{name}<select id="{name}">{options}</select></label>'

    def amount(name: str, text: str, power: int, most: int) -> str:
        """A number and a slider over powers of two."""
        return (
            f'<div class="amount"><label for="{name}">{text}</label>'
            f'<input type="number" id="{name}" min="1" value="{2**power}">'
            f'<input type="range" id="{name}-power" aria-label="{text}, powers of two" min="0" max="{most}" '
            f'value="{power}"></div>'
        )

    form = (
        select("model", models, "llama3-70b")
        + select("cluster", clusters, "dgx-h100")
        + select("stack", stacks, "megatron-core")
        + amount("gpus", "GPUs", 6, 13)
        + amount("batch", "batch, sequences", 9, 14)
        + amount("seq", "sequence, tokens", 12, 17)
        + '<label>conditions<input id="where" placeholder="tp&lt;=8, zero=1" autocomplete="off" spellcheck="false">'
        '</label><label><span>memory left free <output id="headroom-shown"></output></span>'
        '<input type="range" id="headroom" min="0" max="50" value="5"></label>'
    )
    buttons = (
        '<button type="button" id="stop" disabled>Stop</button>'
        '<button type="button" id="keep" disabled>Keep for comparison</button>'
        '<button type="button" id="plan" disabled>Download plan.json</button>'
        '<button type="button" id="report" disabled>Download the report</button>'
    )
    buttons += (
        '<select id="export" aria-label="Download for a framework" disabled>'
        '<option value="">Download for ...</option>'
        + "".join(f"<option>{escape(name)}</option>" for name in frameworks)
        + "</select>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>Phalanx</title><style>{asset('report.css')}{asset('local_page.css')}</style></head><body>\n"
        '<a class="skip" href="#main">Skip to the answer</a>'
        '<header><h1>Phalanx</h1><div role="tablist" aria-label="What is shown">'
        '<button role="tab" id="to-plan" aria-selected="true" aria-controls="planned">Plan</button>'
        '<button role="tab" id="to-runs" aria-selected="false" aria-controls="trained">Runs</button></div>'
        '<span id="state" role="status"></span></header>'
        '<p id="problem" role="alert" hidden></p>\n'
        f'<div id="planned" role="tabpanel" aria-labelledby="to-plan"><form id="question">{form}'
        f'<div class="buttons">{buttons}</div><progress id="searching" hidden></progress></form>\n'
        '<div><dl id="figures"></dl><div id="compared" class="wide"></div>\n<main id="main">'
        "<noscript>This page needs scripts.</noscript></main></div></div>\n"
        '<div id="trained" role="tabpanel" aria-labelledby="to-runs" hidden>'
        '<label>run<select id="runs"></select></label><p id="no-runs" class="note" hidden></p>'
        '<div id="run"></div></div>\n'
        f"<script>{asset('report.js')}</script><script>{asset('local_page.js')}</script></body></html>\n"
    )


_MOST_BYTES = 64 * 2**10
LISTED = 1_000
"""The most folders in which the page looks for runs, every two seconds."""
_FILES = ("plan.json", "metrics.jsonl", "recorded.json", "trace.json")
"""Files of a run that are read."""
_MOST_ANSWERS = 16
"""Latest answers whose report, plan and exports a page may still download."""
_CONNECTIONS = 64
"""Connections that have not shown the token yet; of one more, the oldest is dropped."""


class LocalServer(ThreadingHTTPServer):
    """Serves the page and its questions. `folder`: where runs lie; nothing outside is read; `framed`: whether pages
    of this machine, such as a notebook, may show it in a frame. Raises InputError."""

    daemon_threads = True
    request_queue_size = 128  # with 5, the default, a connection of a burst waits a second or more for its next try

    def __init__(self, port: int, folder: Path, framed: bool = False) -> None:
        self.policy = POLICY.replace(
            _FRAMERS, f"{_FRAMERS} http://localhost:* http://127.0.0.1:*" if framed else _FRAMERS
        )
        self.token = secrets.token_urlsafe(24)
        self.folder = folder
        self.planner = Planner()
        self.strangers: OrderedDict[socket, None] = OrderedDict()
        self._most = min(_CONNECTIONS, getrlimit(RLIMIT_NOFILE)[0] // 4)
        self.reports: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.plans: OrderedDict[str, str] = OrderedDict()
        self.page = local_page(NAMES["model"], NAMES["cluster"], NAMES["stack"], list(TARGETS))
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            reason = f"cannot be used ({(error.strerror or '').lower()})"
            raise InputError("port", port, reason, "name another, or 0") from None
        self.planner.warm()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own; it counts as a stranger until it shows the token."""
        self.strangers[request] = None
        while len(self.strangers) > self._most:
            with suppress(OSError, KeyError):  # it has ended, or shown the token, meanwhile
                self.strangers.popitem(last=False)[0].shutdown(SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self.strangers.pop(request, None)
        super().shutdown_request(request)

    @property
    def address(self) -> str:
        """The page's URL, token included."""
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def runs(self) -> tuple[list[dict[str, Any]], int]:
        """Return (the runs among the LISTED folders that changed last, as {"name", "changed"} by name; the number of
        folders that were skipped)."""
        try:
            with os.scandir(self.folder) as entries:
                folders = [(e.stat().st_mtime, e.name) for e in entries if e.is_dir(follow_symlinks=False)]
        except OSError:
            return [], 0
        runs = [(name, self._changed(name)) for name in sorted(name for _, name in nlargest(LISTED, folders))]
        shown = [{"name": name, "changed": changed} for name, changed in runs if changed is not None]
        return shown, max(0, len(folders) - LISTED)

    def _changed(self, name: str) -> float | None:
        """Return when a run of the folder last changed; None for a link, a hidden folder and whatever is no run."""
        run = self.folder / name
        if not name or name.startswith(".") or run.parent != self.folder or run.is_symlink() or not run.is_dir():
            return None
        return max((file.stat().st_mtime for of in _FILES if (file := run / of).is_file()), default=None)

    def report(self, name: str) -> str:
        """Return the report of a run. Raises InputError for what is no run of the folder, or leads out of it."""
        if self._changed(name) is None:
            raise InputError("run", name, f"is not a run in {self.folder}")
        run = self.folder / name
        for file in _FILES:
            if (run / file).is_symlink() or ((run / file).exists() and not (run / file).is_file()):
                raise InputError("run", name, f"its {file} is a link or no file, and is not followed")
        return of_run(run)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a tab that was closed before it had its reply; show any other error with its trace."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Close the port and end the planner."""
        super().server_close()
        self.planner.close()


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer
    timeout = 20

    def do_GET(self) -> None:
        what = self._asked()
        name, _, query = (what or "").partition("?")
        if what is None:
            self._refuse(404, "There is nothing here. Open the address that `phalanx ui` printed.")
        elif name == "":
            self._reply("text/html", self.server.page)
        elif name == "runs":
            shown, rest = self.server.runs()
            said = {"folder": str(self.server.folder), "runs": shown, "rest": rest}
            self._reply("application/json", json.dumps(said))
        elif name == "run":
            self._run(unquote(query))
        elif name == "progress":
            self._reply("application/json", json.dumps(self.server.planner.progress.get(query)))
        elif name == "export":
            self._export(query)
        elif name == "report" and query in self.server.reports:
            self._reply("text/html", page_of(about="plan", **self.server.reports[query]))
        else:
            self._refuse(404, "There is nothing here.")

    def do_POST(self) -> None:
        request, own = self._asked(), f"http://{self.headers.get('Host')}"
        if request not in ("plan", "stop") or self.headers.get("Origin", own) != own:
            return self._refuse(404, "There is nothing here.")
        try:
            length = int(self.headers.get("Content-Length", ""))
            question = json.loads(self.rfile.read(length)) if 0 <= length <= _MOST_BYTES else None
        except (ValueError, RecursionError):
            question = None
        if not isinstance(question, dict) or self.headers.get_content_type() != "application/json":
            return self._reply("application/json", json.dumps({"error": "the question is no JSON object"}), 400)
        name = str(question.get("id", ""))
        if request == "stop":
            self.server.planner.stop(name)
            return self._reply("application/json", "{}")
        answer = self.server.planner.ask(question)
        if "report" in answer:
            about = answer.pop("report")
            self.server.reports[name] = about | {"sections": answer["html"], "drawn": answer["charts"]}
            self.server.plans[name] = answer["plan"]
            for kept in (self.server.reports, self.server.plans):
                while len(kept) > _MOST_ANSWERS:
                    kept.popitem(last=False)
            answer["id"] = name
        self._reply("application/json", json.dumps(answer))

    def _asked(self) -> str | None:
        """Return the path below the token; None for a stranger."""
        hosts = [f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")]
        token, slash, what = self.path.removeprefix("/").partition("/")
        known = slash and secrets.compare_digest(token.encode(), self.server.token.encode())
        if not known or self.headers.get("Host") not in hosts:
            return None
        self.server.strangers.pop(self.connection, None)
        return what

    def _export(self, query: str) -> None:
        """Reply with a zip of the files that express an answer's plan in a framework."""
        name, _, to = query.partition("&")
        plan = self.server.plans.get(name)
        if plan is None:
            return self._refuse(404, "That plan is no longer kept.")
        try:
            result = export(from_dict(json.loads(plan), "of this page"), to)
        except InputError as error:
            return self._reply("application/json", json.dumps({"error": str(error)}))
        content = BytesIO()
        with ZipFile(content, "w", ZIP_DEFLATED) as archive:
            for file, text in result.files.items():
                entry = ZipInfo(f"{to}/{file}")
                entry.external_attr = (0o755 if file.endswith(".sh") else 0o644) << 16
                archive.writestr(entry, text)
        self._reply("application/zip", content.getvalue())

    def _run(self, name: str) -> None:
        """Reply with a run's report, or with what is wrong with its folder."""
        try:
            self._reply("text/html", self.server.report(name))
        except (InputError, OSError) as error:
            self._refuse(200, f"{error}. If the run is just being written, reload the page later.")

    def _refuse(self, status: int, why: str) -> None:
        text = (
            '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Phalanx</title>'
            f'<p style="font:16px/1.5 system-ui,sans-serif;margin:1rem">{escape(why)}</p></html>'
        )
        self._reply("text/html", text, status)

    def _reply(self, kind: str, what: str | bytes, status: int = 200) -> None:
        content = what.encode() if isinstance(what, str) else what
        self.send_response(status)
        for header, value in (
            ("Content-Type", kind if isinstance(what, bytes) else f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Content-Security-Policy", self.server.policy),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""
