"""The server for agents, tried with the SDK's own client: tools, errors, the fence around files, limits."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters

import phalanx
from phalanx.cli.agents import tool_calls
from phalanx.cli.agents.mcp import server
from phalanx.spec.errors import InputError

ASKED: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100",
    "gpus": 16,
    "batch": 128,
    "seq": 8192,
    "strategy": "tp=8,zero=1",
}
SCRIPT = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --swiglu"
    " --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1"
    " --global-batch-size 256 --vocab-size 128256 --bf16 --tensor-model-parallel-size 8\n"
)


def session(folder: Path, do: Callable[[Any], Awaitable[None]], limit_s: float = 60.0) -> None:
    async def run() -> None:
        async with Client(server(folder.resolve(), limit_s)) as client:
            await do(client)

    asyncio.run(run())


def test_tools_are_the_commands_and_their_schemas_are_small(tmp_path: Path) -> None:
    async def do(client: Any) -> None:
        tools = (await client.list_tools()).tools
        assert {tool.name for tool in tools} == set(tool_calls.TOOLS)
        listed = [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in tools]
        assert len(json.dumps(listed)) < 30_000
        assert all(tool["inputSchema"]["additionalProperties"] is False for tool in listed)
        predict = next(tool["inputSchema"]["properties"] for tool in listed if tool["name"] == "predict")
        assert predict["gpus"]["type"] == "integer"
        assert predict["source"]["type"] == "array"
        assert "json" not in predict

    session(tmp_path, do)


def test_a_tool_answers_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)

    async def do(client: Any) -> None:
        answer = (await client.call_tool("predict", ASKED)).structured_content
        assert answer["step_time_s"] == phalanx.predict(**ASKED).step_time_s
        assert answer["step_time_low_s"] < answer["step_time_s"] < answer["step_time_high_s"]
        of_file = await client.call_tool("predict", {"source": ["run.sh"], "cluster": "dgx-h100"})
        assert of_file.structured_content["question"]["gpus"] == 16
        better = await client.call_tool("improve", {"sources": ["run.sh"], "cluster": "dgx-h100"})
        assert not better.is_error, better.content
        clusters = (await client.read_resource("phalanx://clusters")).contents[0].text
        assert "dgx-h100" in clusters

    session(tmp_path, do)
    assert [file.name for file in tmp_path.iterdir()] == ["run.sh"]


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("predict", {**ASKED, "gpu": 16}, "did you mean gpus?"),
        ("predict", {**ASKED, "": 16}, "error: '' = 16: is no argument"),
        ("predict", {**ASKED, "gpus": 0}, "gpus = 0"),
        ("predict", {**ASKED, "gpus": {"a": 1}}, "is no text or number"),
        ("predict", {**ASKED, "model": "llama3-9b"}, "did you mean llama3-8b"),
        ("predict", {**ASKED, "strategy": "tp=8;rm -rf /"}, "error:"),
        ("predict", {"source": ["/etc/hostname"], "cluster": "dgx-h100"}, "outside of the folder"),
        ("predict", {"source": ["link.sh"], "cluster": "dgx-h100"}, "outside of the folder"),
        ("predict", {"source": ["--help"], "cluster": "dgx-h100"}, "error:"),
        ("predct", {}, "did you mean predict"),
        (
            "serve_plan",
            {"model": "gpt2", "requests": 75_001},
            "requests = 75001: would run for minutes; ask for at most",
        ),
        ("goodput", {"trials": 1_000_000}, "trials = 1000000: would run for minutes; ask for at most 100,000"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_remedy(
    tmp_path: Path, tool: str, arguments: dict[str, Any], said: str
) -> None:
    outside = tmp_path / "outside.sh"
    outside.write_text(SCRIPT)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link.sh").symlink_to(outside)

    async def do(client: Any) -> None:
        result = await client.call_tool(tool, arguments)
        assert result.is_error
        assert said in result.content[0].text
        assert result.content[0].text.count("\n") == 0
        assert result.structured_content["error"] == result.content[0].text

    session(folder, do)


def test_the_most_that_takes_a_minute_is_asked() -> None:
    tool = tool_calls.TOOLS["goodput"]
    assert "--trials=100000" in tool_calls.words_of(tool, {"trials": 100_000})
    with pytest.raises(InputError, match="ask for at most 100,000"):
        tool_calls.words_of(tool, {"trials": 100_001})


def test_a_terminals_ctrl_c_does_not_reach_a_call(tmp_path: Path) -> None:
    call = tool_calls.ToolCall(tool_calls.words_of(tool_calls.TOOLS["models"], {"name": "gpt2"}), tmp_path)
    try:
        pid, own = call._process.pid or 0, False
        while not own and not call.pipe.poll(0.005):
            own = os.getsid(pid) == pid
        assert own
    finally:
        call.stop()


def test_a_call_that_takes_too_long_ends_with_a_word(tmp_path: Path) -> None:
    async def do(client: Any) -> None:
        result = await client.call_tool("plan", {**ASKED, "gpus": 1024, "batch": 4096, "strategy": "tp=*"})
        assert result.is_error
        assert "takes more than 0.2 s" in result.content[0].text
        assert not (await client.call_tool("models", {"name": "gpt2"})).content[0].text.count("Traceback")

    session(tmp_path, do, limit_s=0.2)


@pytest.mark.parametrize(
    ("code", "held"),
    [
        ("open('inside.txt').read()", False),
        ("open('../outside.txt').read()", True),
        ("open('link.txt').read()", True),
        ("open('inside.txt', 'a')", True),
        ("open('new.txt', 'w')", True),
        ("open(scratch / 'plan.json', 'w')", False),
        ("import subprocess; subprocess.run(['true'])", True),
        ("import os; os.system('true')", True),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", True),
    ],
)
def test_a_call_is_fenced_in(tmp_path: Path, code: str, held: bool) -> None:
    folder, scratch = tmp_path / "folder", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    (folder / "inside.txt").write_text("x")
    (tmp_path / "outside.txt").write_text("x")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    start = "import socket, subprocess; from pathlib import Path; from phalanx.cli.agents.tool_calls import _fence; "
    start += f"scratch = Path({str(scratch)!r}); _fence(Path({str(folder)!r}), scratch); "
    done = subprocess.run(
        [sys.executable, "-c", start + code], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ("PermissionError" in done.stderr) == held, done.stderr
    assert held or not done.returncode
    assert not (folder / "new.txt").exists()


def test_words_that_look_like_options_stay_values() -> None:
    words = tool_calls.words_of(tool_calls.TOOLS["predict"], {"model": "--help", "source": ["--version"]})
    assert words == ["predict", "--model=--help", "--json", "--", "--version"]
    with pytest.raises(InputError, match="is no argument of predict"):
        tool_calls.words_of(tool_calls.TOOLS["predict"], {"out": "x"})


def test_a_flag_is_set_by_true_alone() -> None:
    flags = [
        (tool, name, option.opts[0])
        for tool in tool_calls.TOOLS.values()
        for name, option in tool_calls._options(tool).items()
        if getattr(option, "is_flag", False)
    ]
    assert flags
    for tool, name, word in flags:
        assert [word in tool_calls.words_of(tool, {name: value}) for value in (True, False)] == [True, False]


def test_the_command_serves_over_stdio(tmp_path: Path) -> None:
    async def run() -> None:
        command = ["-m", "phalanx", "mcp", "--folder", str(tmp_path)]
        async with Client(
            StdioServerParameters(command=sys.executable, args=command, env=dict(os.environ))
        ) as client:
            answer = await client.call_tool("predict", ASKED)
            assert answer.structured_content["fits"] is True

    asyncio.run(run())
