"""Processes with odd streams, a terminal of another encoding, and numbers of no usual size: one line, no trace."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.in_process_cli import error_of, phalanx
from support.quick_runs import JOB, TEXT

from phalanx.cli import terminal
from phalanx.runtime.process import launch
from phalanx.runtime.process.environment import ALONE
from phalanx.spec.documents import read_toml
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans

SERVED = "serve plan --model llama3-8b --cluster dgx-h100 --gpus 1 --input 400 --output 50 --ttft 1s --tpot 30ms"
PLAN = "plan --model llama3-8b --cluster dgx-h100 --gpus 8 --batch 64 --seq 4096"


def _shell(folder: Path, words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    line = f"{sys.executable} -m phalanx {words}"
    return subprocess.run(
        ["/bin/sh", "-c", line], cwd=folder, env=os.environ | environment, capture_output=True, check=False
    )


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-", ">&- 2>&- <&-"])
def test_a_command_without_streams_does_its_work(tmp_path: Path, closed: str) -> None:
    """As cron and some daemons start it."""
    done = _shell(tmp_path, f"{PLAN} --out plan.json {closed}")
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["model"]


def test_training_without_a_stderr_ends_with_its_report(tmp_path: Path, cache: Path, measured: None) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text(TEXT)
    done = _shell(tmp_path, "train job.toml --set train.steps=5 2>&-", PHALANX_CACHE=str(cache))
    assert done.returncode == 0
    assert len(list(tmp_path.glob("runs/*/report.html"))) == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_an_encoding_lacks_is_a_question_mark(tmp_path: Path, encoding: str) -> None:
    assert phalanx(tmp_path, *PLAN.split(), "--out", "plan.json")[0] == 0
    content = json.loads((tmp_path / "plan.json").read_text())
    content["cluster"]["name"] = "a\N{RIGHTWARDS ARROW}b"  # a text, which rich does not draw itself
    (tmp_path / "plan.json").write_text(json.dumps(content))
    words = "tables mesh plan.json"
    whole = _shell(tmp_path, words, PYTHONIOENCODING="utf-8").stdout.decode()
    done = _shell(tmp_path, words, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr.count(b"Traceback"), b"a?b" in done.stdout) == (0, 0, True)
    # Lines are drawn with what the encoding has; the words and numbers are the same.
    assert re.findall(r"[\w.,]+", done.stdout.decode(encoding)) == re.findall(r"[\w.,]+", whole)


@pytest.mark.parametrize("words", ["--help", "plan --help", "tables models", "tables models --json"])
def test_a_full_disk_behind_stdout_is_one_line(tmp_path: Path, words: str) -> None:
    done = _shell(tmp_path, f"{words} >/dev/full")
    assert (done.returncode, done.stderr) == (1, b"error: no space left on device\n")


def test_escapes_of_names_reach_neither_pipe_nor_terminal(tmp_path: Path) -> None:
    """Not even those that only colour: they hide what follows."""
    assert phalanx(tmp_path, *PLAN.split(), "--out", "plan.json")[0] == 0
    content = json.loads((tmp_path / "plan.json").read_text())
    content["cluster"]["name"] = content["cluster"]["tiers"][0]["name"] = "\x1b[8mhidden\x1b[2J\r"
    (tmp_path / "plan.json").write_text(json.dumps(content))
    for words in (
        "explain plan.json",
        "predict plan.json",
        "tables mesh plan.json",
        "export plan.json --to torchtitan",
    ):
        piped = _shell(tmp_path, words)
        assert b"\x1b" not in piped.stdout + piped.stderr, words
        assert b"\r" not in piped.stdout
    assert b"hidden" in _shell(tmp_path, "explain plan.json").stdout
    shown = _on_a_terminal(tmp_path, "explain plan.json")
    assert b"\\x1b[8mhidden" in shown
    assert b"\x1b[8m" not in shown
    assert b"\x1b[1m" in shown, "headings are bold as before"


def _on_a_terminal(folder: Path, words: str) -> bytes:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "phalanx", *words.split()]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "160"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 2**16):
                shown += part
        except OSError:  # how Linux ends it
            pass
        assert process.wait() == 0
    os.close(ours)
    return shown


@pytest.mark.parametrize(
    "words",
    [
        f"{SERVED} --chunk {{}}",
        "tables scaling --params 1B --gpus {} --tokens 1B",
        "tables scaling --params {} --gpus 8 --tokens 1B",
        "tables scaling --params 1B --gpus 8 --tokens {}",
        "tables comm --params 1B --compute {}",
        "tables comm --params {}",
        "tables memory --params {}",
        "collectives table --ranks {}",
        "pipeline compare --ranks {} --micro-batches 8",
    ],
)
@pytest.mark.parametrize("odd", ["9" * 20, "1e308", "1e-320", "nan", "inf", "9" * 5000])
def test_a_number_of_no_usual_size_is_answered_or_refused(tmp_path: Path, words: str, odd: str) -> None:
    code, out, err = phalanx(tmp_path, *words.format(odd).split())
    if code == 0:
        assert not {"inf", "nan"} & set(out.split()), out
    else:
        assert (code, err.startswith(("error: ", "note: "))) == (2, True)
        assert err.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize("words", ["tables memory --params 7B", "tables memory --params 7B --json"])
def test_who_reads_no_more_ends_a_command_in_silence(tmp_path: Path, words: str) -> None:
    """As `phalanx tables models | head -1`; here the reader has ended before the first line comes."""
    line = f"({sys.executable} -m phalanx {words} 2> said; echo $? > code) | true"
    done = subprocess.run(["/bin/sh", "-c", line], cwd=tmp_path, capture_output=True, check=False)
    assert (done.stderr, (tmp_path / "code").read_text()) == (b"", "0\n")
    assert all(said.startswith("note: ") for said in (tmp_path / "said").read_text().splitlines())


def test_an_answer_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    assert "is not finite" in phalanx(tmp_path, "tables scaling --params 1e308 --gpus 8 --tokens 1B")[2]
    assert "more than 63 bits" in error_of(tmp_path, "collectives table --ranks 9223372036854775808")


@pytest.mark.parametrize("line", ["a{0} = [[], [], []]\n", "k{0}=0\n", "[[a]]\n", "[t{0}]\n", "#\n"])
def test_a_toml_file_of_over_a_mebibyte_is_not_parsed(tmp_path: Path, line: str) -> None:
    (tmp_path / "job.toml").write_text("".join(line.format(i) for i in range(2**19 + 1)))
    with pytest.raises(InputError, match="larger than 1 MiB"):
        read_toml(tmp_path / "job.toml", "job")


def test_a_cluster_without_a_name_is_not_this_machine(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[model]\npreset = "gpt2"\n[cluster]\npreset = ""\n[job]\nglobal_batch = 8\nseq = 64\n'
    )
    assert "cluster.preset = '': is empty" in error_of(tmp_path, "plan job.toml")


def test_a_full_temporary_folder_is_said_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = launch.shutil.disk_usage("/")
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda _: usage._replace(free=4096))
    with pytest.raises(InputError, match=r"TMPDIR: .* has 4,096 bytes left, 2 ranks need 65,536"):
        launch.launch("none", "", 2, 1)


def test_printable_leaves_lines_and_tabs() -> None:
    assert terminal.printable("a\tb\n\x1b[31mc\u202e\r") == "a\tb\n\\x1b[31mc\\u202e\\r"


@pytest.mark.parametrize("name", ["/dev/null", "/dev/stdout", "null"])
def test_a_device_is_written_to_and_stays_a_device(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root would replace the machine's own; a link of a folder to one is replaced, as any link."""
    (tmp_path / "null").symlink_to("/dev/null")
    if name != "null":
        monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("would be replaced"))
    plans.write_text(tmp_path / name, "written")  # an absolute name stands alone
    assert Path("/dev/null").is_char_device()
    assert (tmp_path / "null").is_symlink() == (name != "null")


@pytest.mark.parametrize(("words", "rank", "shown"), [((), 0, 0), (("--json",), 0, 1), (("--json",), 1, 0)])
def test_generated_text_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], rank: int, shown: int
) -> None:
    """As text it was printed as it came; as JSON by the first rank alone."""
    showing: list[object] = []
    monkeypatch.setattr("phalanx.answers.runs.generate.generate", lambda *_: "an answer")
    monkeypatch.setattr(
        "phalanx.runtime.process.environment.external_world", lambda: replace(ALONE, rank=rank, size=2)
    )
    monkeypatch.setattr("phalanx.cli.output.Display.show", lambda self, answer, **_: showing.append(answer))
    assert phalanx(tmp_path, "generate", "runs/x", "--prompt", "a", *words)[0] == 0
    assert showing == ["an answer"] * shown
