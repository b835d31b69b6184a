"""Files of others as an attacker writes them: what a few lines stand for is bounded, nothing in them is run, and no
name in them becomes a command of a script that is written."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.fuzz import configurations, files, listings
from support.in_process_cli import error_of, phalanx, text_of

from phalanx.cli.terminal import printable
from phalanx.frameworks.reading.files import document
from phalanx.frameworks.writing.program import Group, Setting
from phalanx.frameworks.writing.script import comment, words
from phalanx.frameworks.writing.yaml import document as yaml_of
from phalanx.serving import plan_file as serving
from phalanx.serving.answer import launch, manifest
from phalanx.shared_cluster.placement.launch import torchrun
from phalanx.shared_cluster.topology import hostlist, slurm
from phalanx.spec.documents import require_finite
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan
from phalanx.spec.files.job_file import build

_RUNS = (
    "$(touch run)",
    "`touch run`",
    "a;touch run",
    "a\ntouch run",
    "a' ; touch run ; '",
    'a" ; touch run ; "',
    "a|b",
    "-x",
)


_HOSTILE = [
    (content, name)
    for contents, name in (
        (configurations._HOSTILE_YAML, "c.yaml"),
        (configurations._HOSTILE_SHELL, "c.sh"),
        (configurations._HOSTILE_PYTHON, "c.py"),
    )
    for content in contents
]


@pytest.mark.parametrize(("content", "name"), _HOSTILE)
def test_a_small_file_stands_for_little_and_runs_nothing(tmp_path: Path, content: bytes, name: str) -> None:
    """Most of these took gigabytes, minutes or a traceback in a reader that trusts its file."""
    path = tmp_path / name
    path.write_bytes(content)
    start = time.process_time()
    with suppress(InputError):
        assert len(json.dumps(document(path))) < 2**20
    code, _, err = phalanx(tmp_path, "read", path.name)
    assert code in (0, 2)
    assert len([line for line in err.splitlines() if not line.startswith("note: ")]) == (code == 2), err
    assert time.process_time() - start < 5


def test_aliases_and_merges_that_people_write_are_followed(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\nd: 2024-01-02\n")
    assert document(tmp_path / "c.yaml") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 1, "y": 2},
        "d": "2024-01-02",
    }


@pytest.mark.parametrize("name", _RUNS)
def test_a_host_is_named_by_letters_and_digits(name: str) -> None:
    for text in (name, f"node0,{name}"):
        with pytest.raises(InputError, match="is not the name of a host"):
            hostlist.expand(text)
    with pytest.raises(InputError, match="is not the name of a host"):
        slurm.launch([name], [0], 1, 1, "hostfile")
    assert not _ran(torchrun([name], [0]))  # and if one came in another way, it is a word


@pytest.mark.parametrize(
    "text", ["a[0-99999]b[0-99999]", "a[0-9999999]", "a[" + "0-99," * 20_000 + "1]", "a[" + "9" * 5000 + "]"]
)
def test_a_host_list_is_bounded(text: str) -> None:
    start = time.process_time()
    with pytest.raises(InputError):
        hostlist.expand(text)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", _RUNS)
def test_a_models_name_is_a_word_of_the_launch_lines(name: str) -> None:
    for content in listings.serving_plan():
        made = build(serving.ServingPlan, {k: v for k, v in content.items() if k not in ("version", "kind")}, "s")
        made = replace(made, model_name=name)
        if name.startswith("-"):
            with pytest.raises(InputError, match="would be read as an option"):
                launch(made)
            continue
        for command in launch(made).commands:
            assert not _ran(command.line())
        if made.engine == "vllm":
            import yaml

            (_, worker) = yaml.safe_load(manifest(made))["spec"]["components"]
            assert name in worker["podTemplate"]["spec"]["containers"][0]["args"]


def test_a_worker_of_several_nodes_has_a_line_for_each_and_its_head_from_the_shell() -> None:
    content = listings.serving_plan()[0]
    workers = {**content["workers"][0], "count": 1, "tp": 16, "moe_tp": 16}
    tables = {k: v for k, v in content.items() if k not in ("version", "kind")} | {"workers": [workers], "gpus": 16}
    first, second = (command.line() for command in launch(build(serving.ServingPlan, tables, "s")).commands)
    assert all('--master-addr "$HEAD"' in line for line in (first, second))
    assert ("--node-rank 0" in first, "--node-rank 1" in second, "--headless" in first) == (True, True, False)


def test_no_text_ends_a_comment_or_a_word_of_an_export() -> None:
    ends = "a\nx: 1\x85y: 2\u2028z: 3\rw: 4"
    assert comment(ends).splitlines() == ["# a x: 1 y: 2 z: 3 w: 4"]
    assert yaml_of([Group("t", ends, (Setting("k", ends),))]).count("\n") == 3
    assert words(Setting("--x", "$(touch run)")) == "--x '$(touch run)'"
    assert words(Setting("--x", "$LR")) == '--x "$LR"'


@pytest.mark.parametrize(
    ("table", "field", "value", "said"),
    [
        ("choices", "chunks", {"blocks": ["x"], "imbalance": 0}, "choices.chunks.blocks"),
        ("choices", "bucket", {"bytes": "1"}, "choices.bucket.bytes"),
        ("choices", "tokens", 3, "choices.tokens"),
        ("choices", "cluster", [], "choices.cluster"),
        ("choices", "stack", {}, "choices.stack"),
        ("prediction", "step_time_s", "1", "prediction.step_time_s"),
        ("prediction", "step_time_s", -1.0, "prediction.step_time_s"),
        ("prediction", "memory_bytes", None, "prediction.memory_bytes"),
        ("prediction", "terms_s", {"dp": "x"}, "prediction.terms_s"),
        ("prediction", "bubble_fraction", 7.0, "prediction.bubble_fraction"),
    ],
)
def test_a_plan_holds_numbers_where_they_belong(
    planned: dict[str, object], table: str, field: str, value: object, said: str
) -> None:
    content = json.loads(json.dumps(planned))
    content[table][field] = value
    with pytest.raises(InputError) as caught:
        plan.from_dict(content, "p.json")
    assert said in str(caught.value)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("plan")
    asked = "--model gpt2 --cluster dgx-h100 --gpus 8 --batch 32 --seq 1024 --strategy dp=8 --out p.json"
    text_of(folder, "plan", *asked.split())
    content: dict[str, object] = json.loads((folder / "p.json").read_text())
    return content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o: o.update(world="8"), "world"),
        (lambda o: o.update(ranks=[]), "ranks"),
        (lambda o: o["ranks"][0].update(peak=-1), "peak"),
        (lambda o: o["ranks"][0]["groups"].__setitem__(0, [0, 99]), "group"),
        (lambda o: o["ranks"][0]["groups"].__setitem__(0, []), "no ranks"),
        (lambda o: o["ranks"][0]["events"][0].__setitem__(2, 7), "damaged"),
        (lambda o: o["ranks"][0]["events"][1][0].update(peer=10**6), "rank 1000000"),
        (lambda o: o["ranks"][0]["events"][1][0].update(bytes=-5), "bytes"),
        (lambda o: o.pop("axes"), "axes"),
    ],
)
def test_an_observation_is_typed(tmp_path: Path, change: object, said: str) -> None:
    content = json.loads(json.dumps(listings.observation()))
    change(content)  # type: ignore[operator]
    (tmp_path / "o.json").write_bytes(files.as_json(content))
    assert said in error_of(tmp_path, "explain o.json --cluster dgx-h100")


def test_a_link_in_the_folder_of_an_export_is_replaced(tmp_path: Path, planned: dict[str, object]) -> None:
    (tmp_path / "p.json").write_text(json.dumps(planned))
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train.sh").symlink_to(tmp_path / "mine")
    text_of(tmp_path, "export p.json --to megatron --out out")
    assert (tmp_path / "mine").read_text() == "kept"
    assert (tmp_path / "out" / "train.sh").read_text().startswith("#!/bin/bash")


def test_a_link_in_a_runs_folder_is_replaced_by_its_page(tmp_path: Path, planned: dict[str, object]) -> None:
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "plan.json").write_text(json.dumps(planned))
    (tmp_path / "metrics.jsonl").write_bytes(listings.METRICS)
    (tmp_path / "report.html").symlink_to(tmp_path / "mine")
    text_of(tmp_path, "runs report .")
    assert (tmp_path / "mine").read_text() == "kept"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_a_terminal_shows_what_a_file_holds_and_does_not_obey_it(tmp_path: Path) -> None:
    """An escape sequence of a key may set a window's title, or write what the next command will read."""
    assert printable("a\x1b]0;title\x07b\x1b[31mred\x1b[0m\n") == "a\\x1b]0;title\\x07b\\x1b[31mred\\x1b[0m\n"
    (tmp_path / "c.json").write_text(json.dumps({"train_batch_size": 8, "x\x1b]0;title\x07[/red]": 1}))
    main, other = pty.openpty()
    command = [sys.executable, "-m", "phalanx", "read", "c.json"]
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, cwd=tmp_path, stdout=other, stderr=other, env=environment)
    os.close(other)
    seen = b""
    while chunk := _chunk(main):
        seen += chunk
    assert process.wait() == 0, seen
    assert b"\x1b]" not in seen
    assert b"\\x1b]0;title" in seen


def _chunk(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 2**16)
    except OSError:  # the other end is closed
        return b""


def _ran(script: str) -> bool:
    """Whether a script makes the file `run`, with every program that it starts replaced by `true`."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        bin_ = Path(folder) / "bin"
        bin_.mkdir()
        for name in ("srun", "torchrun", "vllm", "python3", "trtllm-serve", "mpirun", "hostname"):
            (bin_ / name).write_text("#!/bin/sh\n")
            (bin_ / name).chmod(0o755)
        environment = {"PATH": f"{bin_}:{os.environ['PATH']}"}
        subprocess.run(
            ["bash", "-c", script], cwd=folder, env=environment, check=False, capture_output=True, timeout=20
        )
        return (Path(folder) / "run").exists()


def test_the_check_itself_sees_a_command_that_runs() -> None:
    assert _ran("vllm serve $(touch run)")


def test_what_a_document_refers_to_is_counted_as_often_as_it_does() -> None:
    nine: list[object] = ["x"] * 9
    for _ in range(5):
        nine = [nine] * 9
    require_finite({"a": nine})  # 600,000 values
    with pytest.raises(ValueError, match="more than 1,000,000 values"):
        require_finite({"a": [nine, nine]})
    nine.append({"b": nine})
    with pytest.raises(ValueError, match="holds itself"):
        require_finite(nine)
