"""Ask the questions that have no recorded answer yet:  cd tests && python -m net.record  (--all: every question)."""

from __future__ import annotations

import json
import lzma
import os
import sys
import tempfile
import time
from typing import Any

from net.answering import HERE, Answer, answer, questions
from net.comparing import masked

ANSWERS = HERE / "answers.jsonl.xz"


def recorded() -> dict[str, Answer]:
    """Return the recorded answers by question."""
    if not ANSWERS.exists():
        return {}
    rows = [json.loads(line) for line in lzma.decompress(ANSWERS.read_bytes()).decode().splitlines()]
    return {row.pop("question"): row for row in rows}


def main() -> None:
    """Record, and show the seconds that each new answer took."""
    os.environ["PHALANX_CACHE"] = tempfile.mkdtemp(prefix="phalanx-net-cache-")
    os.environ.pop("COLUMNS", None)
    answers: dict[str, Any] = {} if "--all" in sys.argv else recorded()
    result = {}
    for question in questions():
        start = time.process_time()
        try:
            result[question] = answers.get(question) or masked(question, answer(question))
        except AssertionError as error:
            print(f"not recorded: {error}")
            continue
        if question not in answers:
            print(
                f"{time.process_time() - start:6.2f} s  exit {result[question]['code']}  phalanx {question}",
                flush=True,
            )
    lines = "".join(json.dumps({"question": q, **found}) + "\n" for q, found in result.items())
    ANSWERS.write_bytes(lzma.compress(lines.encode(), preset=9))


if __name__ == "__main__":
    main()
