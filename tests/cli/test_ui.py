"""`phalanx ui`: its page in a real browser, and a server that answers nobody else and reads nothing else."""

from __future__ import annotations

import http.client
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_connection
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import pytest
from support.browser import CHROMIUM, Browser, chromium
from support.in_process_cli import error_of, phalanx

from phalanx.report.local_page.answers import Planner, RecentStrategies, _figures, reply_to
from phalanx.report.local_page.notebook import question_in, ui
from phalanx.report.local_page.server import LocalServer
from phalanx.report.style import seconds, size
from phalanx.spec.errors import InputError

QUESTION = {
    **{"model": "llama3-8b", "cluster": "dgx-h100", "stack": "megatron-core"},
    **{"gpus": 8, "batch": 64, "seq": 4096, "headroom": 0.05, "where": ""},
}
FIRST = "#model=llama3-8b&gpus=8&batch=64"
ANSWERED = "document.getElementById('state').textContent.startsWith('answered')"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run that trains, one half written, one that leads out of the folder."""
    folder = tmp_path_factory.mktemp("ui")
    question = ("--model", "gpt2", "--cluster", "dgx-h100", "--gpus", "1", "--batch", "2", "--seq", "64")
    assert phalanx(folder, "plan", *question, "--out", "plan.json")[0] == 0
    for name in ("trains", "half", "leads-out"):
        (folder / "runs" / name).mkdir(parents=True)
        shutil.copy(folder / "plan.json", folder / "runs" / name)
    _train(folder / "runs" / "trains", 1)
    (folder / "runs" / "half" / "plan.json").write_text('{"version": 1, "mod')
    (folder / "secret").write_text("the secret")
    (folder / "runs" / "leads-out" / "metrics.jsonl").symlink_to(folder / "secret")
    return folder / "runs"


def _train(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        row = {"step": step, "loss": 9.0 / step, "step_time_s": 2.0, "tokens_per_s": 5e3, "mem_bytes": 2**30}
        file.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[LocalServer]:
    local = LocalServer(0, runs)
    thread = Thread(target=local.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield local
    local.shutdown()
    local.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: the page's scripts cannot be run")
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


def _reply(
    server: LocalServer, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    sent = json.dumps(body) if body is not None else None
    connection.request(method, path, sent, {"Content-Type": "application/json"} | (headers or {}))
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text, response.headers


def test_each_control_changes_the_plan(server: LocalServer, browser: Browser) -> None:
    tab = browser.tab(server.address + FIRST)
    tab.wait(ANSWERED)
    figures = "document.getElementById('figures').innerText"

    def changed(control: str, value: object) -> str:
        before = tab.value(figures)
        tab.set(control, value)
        tab.wait(f"{ANSWERED} && {figures} !== {json.dumps(before)}")
        return str(tab.value(figures))

    assert tab.value("document.querySelectorAll('#main figure.svg svg').length") >= 4
    tab.value("URL.createObjectURL = (b) => { b.text().then((t) => { globalThis.saved = t; }); return 'data:,'; }")
    tab.set("export", "megatron")
    tab.wait("globalThis.saved?.startsWith('PK')")
    tab.set("export", "deepspeed")  # the plan's pipeline is interleaved
    tab.wait("document.getElementById('problem').innerText.includes('is not in the stack (deepspeed')")
    tab.click("keep")
    assert "tp=4" in changed("where", "tp=4, zero=1")
    assert "kept" in tab.value("document.getElementById('compared').innerText")
    assert tab.value("document.querySelectorAll('#compared tr.differs').length") > 2
    changed("batch-power", 8)
    assert tab.value("document.getElementById('batch').value") == "256"
    changed("batch", 96)
    assert "96 x 4,096 tokens" in tab.value("document.getElementById('compared').innerText")
    changed("where", "")
    changed("gpus-power", 4)
    changed("seq-power", 13)
    changed("headroom", 40)
    changed("cluster", "dgx-b200")
    changed("stack", "torchtitan")
    changed("model", "mistral-7b")
    assert "model=mistral-7b" in tab.value("location.hash")
    for button, holds in (("plan", '"strategy"'), ("report", "<!doctype html>")):
        tab.value("globalThis.saved = ''")
        tab.click(button)
        tab.wait(f"globalThis.saved.includes({json.dumps(holds)})")
    assert browser.errors == []


def test_what_is_wrong_is_said_above_the_last_answer(server: LocalServer, browser: Browser) -> None:
    tab = browser.tab(server.address + FIRST)
    tab.wait(ANSWERED)
    problem = "document.getElementById('problem').innerText"
    for control, value, said in (
        ("gpus", "", "gpus: is not a whole number"),
        ("gpus", "1.5", "gpus = 1.5: is not a whole number"),
        ("gpus", "8", ""),
        ("where", "tq=8", "'tq' is not a field"),
        ("where", "", ""),
    ):
        tab.set(control, value)
        tab.wait(f"{problem}.includes({json.dumps(said)}) && !!{problem} === {json.dumps(bool(said))}")
        assert tab.value("document.querySelectorAll('#main svg').length") > 3
    typo = browser.tab(server.address + "#model=lama3-8b")
    typo.wait(f"{problem}.includes('did you mean llama3-8b')")
    assert browser.errors == []


def test_a_run_is_looked_at_as_it_trains(server: LocalServer, browser: Browser, runs: Path) -> None:
    tab = browser.tab(server.address + FIRST)
    tab.wait("document.getElementById('runs').options.length === 3")
    tab.click("to-runs")
    shown = "document.querySelector('iframe')?.contentDocument?.body?.innerText ?? ''"
    for name, says in (
        ("half", "plan.json"),
        ("leads-out", "is not followed"),
        ("trains", "loss 9.000 after step 1"),
    ):
        tab.set("runs", name)
        tab.wait(f"({shown}).includes({json.dumps(says)})")
        assert "the secret" not in tab.value(shown)
    _train(runs / "trains", 2)
    tab.wait(f"({shown}).includes('loss 4.500 after step 2')")
    for _ in range(2):  # the second before the first is drawn
        tab.set("runs", "trains")
    tab.wait("document.querySelectorAll('iframe').length === 1")
    assert browser.errors == []


def test_two_tabs_do_not_wait_for_each_other(server: LocalServer) -> None:
    path = f"/{server.token}/"
    long = QUESTION | {"model": "deepseek-v3", "gpus": 8192, "batch": 16384, "id": "long"}
    replies: list[str] = []
    thread = Thread(target=lambda: replies.append(_reply(server, "POST", path + "plan", long)[1]))
    thread.start()
    assert "strategy" in json.loads(_reply(server, "POST", path + "plan", QUESTION | {"id": "short"})[1])["figures"]
    assert replies == []
    far = {"priced": 0, "legal": 0}
    while not far["priced"]:
        time.sleep(0.1)
        far = json.loads(_reply(server, "GET", path + "progress?long")[1]) or far
    assert far["priced"] < far["legal"]
    assert replies == []
    assert _reply(server, "POST", path + "stop", {"id": "long"})[0] == 200
    thread.join(10)
    assert replies == ['{"error": "stopped"}']


def test_a_long_search_is_stopped_by_hand_and_for_the_next_question(server: LocalServer, browser: Browser) -> None:
    """And does not hold up another tab. Many micro-batches of many ranks take ten times as long as the other tab."""
    tab = browser.tab(server.address + "#model=deepseek-v3&stack=phalanx&gpus=16384&batch=737280")
    under_way = "document.getElementById('state').textContent.includes('strategies priced')"
    tab.wait(under_way)
    other = browser.tab(server.address + FIRST)
    other.wait(ANSWERED)
    assert tab.value("document.getElementById('figures').innerText") == ""
    tab.click("stop")
    tab.wait("document.getElementById('state').textContent === 'stopped'")
    tab.set("batch", 1474560)
    tab.wait("document.getElementById('state').textContent.startsWith('searching')")
    tab.value("(() => { const f = fetch; globalThis.to = []; fetch = (u, o) => { to.push(u); return f(u, o); }; })()")
    tab.set("gpus", 8)
    tab.set("model", "llama3-8b")
    tab.wait(f"{ANSWERED} && location.hash.includes('model=llama3-8b')")
    assert tab.value("to.filter((u) => u === 'stop').length") == 1
    assert browser.errors == []


def test_strangers_are_refused(server: LocalServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    own = f"/{server.token}/"
    port = server.server_port
    for method, path, headers in (
        ("GET", "/", {}),
        ("GET", "/runs", {}),
        ("GET", f"/{server.token[:-1]}/runs", {}),
        ("GET", own, {"Host": f"attacker.example:{port}"}),
        ("GET", own + "../../etc/passwd", {}),
        ("POST", own + "plan", {"Origin": "http://attacker.example"}),
        ("POST", own + "plan", {"Origin": "null"}),
    ):
        status, text, _ = _reply(server, method, path, QUESTION if method == "POST" else None, headers)
        assert (status, "figures" in text, "llama" in text) == (404, False, False)
    assert _reply(server, "POST", own + "plan", QUESTION, {"Content-Type": "text/plain"})[0] == 400
    status, text, headers_ = _reply(server, "GET", own)
    assert status == 200
    assert not [name for name in headers_ if name.lower().startswith("access-control")]
    assert "connect-src 'self'" in headers_["Content-Security-Policy"]
    for name in ("..", "../secret", "%2e%2e%2fsecret", "/etc", "", "leads-out"):
        assert "the secret" not in _reply(server, "GET", own + "run?" + name)[1]
    assert _reply(server, "OPTIONS", own + "plan")[0] == 501


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "lama3-8b", "did you mean llama3-8b"),
        ("gpus", True, "is not a whole number"),
        ("gpus", -8, "gpus = -8"),
        ("batch", 7.5, "is not a whole number"),
        ("headroom", 1, "is not a share of the memory"),
        ("headroom", float("nan"), "is not a share of the memory"),
        ("where", "tp<=", "is not a condition"),
    ],
)
def test_a_bad_value_is_named(field: str, value: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        reply_to(QUESTION | {field: value})


def test_the_plan_of_the_page_is_that_of_the_command_line(tmp_path: Path) -> None:
    uneven = QUESTION | {"model": "llama3-70b", "gpus": 64, "batch": 512, "seq": 8192}
    about = [w for name in ("model", "cluster", "gpus", "batch", "seq") for w in (f"--{name}", str(uneven[name]))]
    assert phalanx(tmp_path, "plan", *about, "--out", "plan.json")[0] == 0
    reply = reply_to(uneven)
    plan = json.loads(reply["plan"])
    assert plan == json.loads((tmp_path / "plan.json").read_text())
    assert len(set(plan["strategy"]["layers"])) > 1  # chunks that are not equal
    assert reply["figures"]["step"] in reply["html"].partition("Time of a step")[0]


def test_a_plan_does_not_depend_on_what_was_asked_before() -> None:
    large = QUESTION | {"model": "llama3-70b", "gpus": 64, "batch": 512, "seq": 4096}
    met = RecentStrategies()
    for change in ({"batch": 256}, {"where": "schedule=1f1b"}, {"model": "llama3-8b"}):
        later, alone = reply_to(large | change, None, met), reply_to(large | change)
        assert (later["figures"], later["plan"]) == (alone["figures"], alone["plan"]), change


def test_of_a_hundred_thousand_folders_the_latest_are_looked_into(
    server: LocalServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At LISTED = 2; a run's report looks into no other folder, and what is no run of the folder has none."""
    monkeypatch.setattr("phalanx.report.local_page.server.LISTED", 2)
    monkeypatch.setattr(server, "folder", tmp_path)
    for age, name in enumerate(("young", "empty", "older", "oldest", ".hidden")):
        (tmp_path / name).mkdir()
        if name != "empty":
            (tmp_path / name / "plan.json").write_text("{")
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "link").symlink_to(tmp_path / "older")
    (tmp_path / "plan.json").write_text("{")
    shown, rest = server.runs()
    assert [run["name"] for run in shown] == ["young"]
    assert rest == 3
    monkeypatch.setattr(os, "scandir", lambda *_: pytest.fail("looks into the folder"))
    for name in ("older", "oldest"):
        with pytest.raises(InputError, match="is not JSON"):
            server.report(name)
    for name in ("", ".", "..", "empty", "link", ".hidden", "older/../young", str(tmp_path / "young" / "..")):
        with pytest.raises(InputError, match="is not a run in"):
            server.report(name)


def test_who_shows_no_token_keeps_nobody_out(server: LocalServer) -> None:
    """Idle connections beyond a number are dropped, the oldest first; what was asked with the token is not."""
    idle = [create_connection(("127.0.0.1", server.server_port), timeout=20) for _ in range(100)]
    assert _reply(server, "GET", f"/{server.token}/runs")[0] == 200
    ended, _, _ = select.select(idle, [], [], 5)
    dropped = sum(connection.recv(1) == b"" for connection in ended)
    for connection in idle:
        connection.close()
    assert 36 <= dropped < 100


def test_questions_that_were_stopped_too_late_are_forgotten() -> None:
    planner = Planner()
    for i in range(3000):
        planner.stop(str(i))
    assert planner.ask({"id": "2999"}) == {"error": "stopped"}
    assert len(planner._stopped) <= 1000
    planner.close()


def test_a_port_in_use_is_said(server: LocalServer, tmp_path: Path) -> None:
    assert "cannot be used (address already in use)" in error_of(tmp_path, "ui --port", str(server.server_port))


def test_ctrl_c_ends_it_and_its_tabs_say_so(browser: Browser, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "ui"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    tab = browser.tab(process.stdout.readline().strip() + FIRST)
    tab.wait(ANSWERED)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(10) == 0
    assert time.monotonic() - began < 5
    assert "Traceback" not in process.communicate()[1]
    tab.wait("document.getElementById('problem').innerText.startsWith('The server has ended')")
    assert tab.value("document.querySelectorAll('#main svg').length") > 3
    browser.errors.clear()  # what Chromium itself writes of a refused connection


def test_a_question_that_was_sent_is_asked_here() -> None:
    asked = "#model=llama3-8b&gpus=8&where=tp%3C%3D8%2C+zero%3D1"
    assert question_in(f"http://127.0.0.1:9/secret/{asked}") == asked
    assert question_in("") == ""
    for wrong in ("http://127.0.0.1:9/secret/", "x#y=1", "#model"):
        with pytest.raises(InputError, match="no address of the page"):
            question_in(wrong)
    assert "\x1b" not in question_in("#model=\x1b[31m")


def test_a_notebook_shows_it_and_asks(runs: Path) -> None:
    page = ui(runs=runs, model="llama3-8b", cluster="dgx-h100", gpus=8)
    assert page.address.endswith("/#model=llama3-8b&cluster=dgx-h100&gpus=8")
    assert f'src="{page.address.replace("&", "&amp;")}"' in page._repr_html_()
    again = ui(runs=runs, sent="http://127.0.0.1:9/x/#model=gpt2")
    base, _, question = again.address.partition("#")
    assert (base, question) == (page.address.partition("#")[0], "model=gpt2")
    with urlopen(base) as reply:
        assert "frame-ancestors 'self' http://localhost:*" in reply.headers["Content-Security-Policy"]
        assert b"<script>" in reply.read()
    with urlopen(
        Request(f"{base}plan", json.dumps(QUESTION).encode(), {"Content-Type": "application/json"})
    ) as reply:
        assert "error" not in json.loads(reply.read())
    with pytest.raises(InputError, match="modle"):
        ui(modle="gpt2")


def test_no_other_page_frames_the_one_of_the_terminal(server: LocalServer) -> None:
    with urlopen(server.address) as reply:
        assert "frame-ancestors 'self';" in reply.headers["Content-Security-Policy"]


def test_two_answers_are_compared_by_figures_of_their_own_and_terms_that_matter() -> None:
    terms = {"forward": 1.5, "backward": 0.4, "too little": 1e-6}
    best = SimpleNamespace(terms_s=terms, step_time_s=2.0, tokens_per_s=256.0, mfu=0.25, memory_bytes=2**30)
    search = SimpleNamespace(best=SimpleNamespace(strategy="tp=2"))
    asked: Any = SimpleNamespace(
        best=best, question=SimpleNamespace(global_batch=8, seq=64), gpus=1024, search=search
    )
    figures = _figures(asked, {"model": "gpt2"})
    known = {"model": "gpt2", "GPUs": "1,024", "batch": "8 x 64 tokens", "strategy": "tp=2", "tokens/s": "256"}
    known |= {"step": seconds(2.0), "MFU": "25.0%", "memory": size(2**30)}
    assert {name: figures.pop(name) for name in known} == known
    assert list(figures.values()) == [seconds(1.5), seconds(0.4)]
