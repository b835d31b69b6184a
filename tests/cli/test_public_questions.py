"""Questions that people asked in public threads are answered rightly by one tool call each."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from phalanx.answers.assertions import failures
from phalanx.cli.agents import tool_calls

QUESTIONS = tomllib.loads(Path(__file__).with_name("public_questions.toml").read_text())["question"]


@pytest.fixture(scope="module")
def warm() -> None:
    tool_calls.warm()


def called(tool: str, arguments: dict[str, Any], folder: Path) -> tool_calls.Reply:
    call = tool_calls.ToolCall(tool_calls.words_of(tool_calls.TOOLS[tool], arguments), folder)
    notes: list[str] = []
    try:
        while True:
            kind, value = call.pipe.recv()
            if kind == "answer":
                return tool_calls.reply(*value, notes)
            notes.append(value)
    finally:
        call.stop()


def test_there_are_forty_with_their_threads() -> None:
    assert len(QUESTIONS) >= 40
    assert all(q["thread"].startswith("https://") and q["why"] for q in QUESTIONS)
    assert all(("holds" in q) != ("refused" in q) for q in QUESTIONS)


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q["asked"])
def test_one_call_answers(question: dict[str, Any], tmp_path: Path) -> None:
    for name, content in question.get("files", {}).items():
        (tmp_path / name).write_text(json.dumps(content))
    reply = called(question["tool"], question["arguments"], tmp_path)
    if "refused" in question:
        assert question["refused"] in reply.error, reply
        return
    assert not reply.error
    assert not failures(question["holds"], reply.data)
