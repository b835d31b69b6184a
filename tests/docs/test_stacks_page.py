"""The tables of docs/stacks.md are what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.frameworks.registry import ROWS
from phalanx.spec.cluster.chips import CHIPS
from phalanx.spec.strategy.stack_options import OPTION_FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "stacks.md").read_text()
QUESTION = "--model llama3-70b --cluster dgx-h100 --gpus 64 --batch 512 --seq 8192"


def lines(text: str) -> list[str]:
    """Return lines without their spaces: the width of columns depends on the terminal."""
    return [re.sub(r"\s+", "", line) for line in text.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)


def test_the_table_of_stacks() -> None:
    for name, row in ROWS.items():
        assert f"| `{name}` | {row.title} | {row.repository} `{row.commit[:7]}` |" in PAGE


def test_the_table_of_options() -> None:
    for option in OPTION_FIELDS:
        stacks = ", ".join(name for name, row in ROWS.items() if option in row.options)
        assert re.search(rf"^\| `{option}` \| .* \| {stacks} \|$", PAGE, re.M), option


def test_links_to_hosts() -> None:
    rates = (f"{CHIPS[name].host_bytes_per_s / 1e9:.0f}" for name in ("H100", "GB200"))
    assert "(PCIe 5: {} GB/s; NVLink-C2C: {} GB/s a GPU)".format(*rates) in PAGE


@pytest.mark.long
@pytest.mark.parametrize("export", [False, True])
def test_blocks_of_commands(export: bool) -> None:
    """What conditions cost; a plan of unequal chunks, and how Megatron-Core writes it."""
    command = "plan --model llama3-405b" if export else "--where"
    (block,) = (b for b in PAGE.split("```")[1::2] if f"{command} " in b and b.strip().startswith("$"))
    for asked, shown in re.findall(r"^\$ phalanx (.+)\n((?:[^$].*\n)*)", block.replace("\\\n", " "), re.M):
        line, _, grep = asked.partition(" && ")
        done = CliRunner().invoke(app, shlex.split(line))
        assert done.exit_code == 0, done.output
        printed = Path("run/train.sh").read_text() if grep else done.stdout
        assert shown
        assert set(lines(shown)) <= set(lines(printed)), asked


def test_all_stacks() -> None:
    done = CliRunner().invoke(app, ["plan", *QUESTION.split(), "--stack", "all"])
    assert done.exit_code == 0, done.output
    table = lines(done.stdout)
    assert set(table) <= set(lines(PAGE)), set(table) - set(lines(PAGE))


def test_chunks_and_number_types_of_a_plan() -> None:
    done = CliRunner().invoke(app, ["plan", *QUESTION.split()])
    assert done.exit_code == 0, done.output
    printed = done.stdout
    table = printed[printed.index("narrower number types") : printed.index("why not")]
    assert set(lines(table)) <= set(lines(PAGE)), table
    printed = CliRunner().invoke(app, ["plan", *QUESTION.split(), "--where", "virtual=2"]).stdout
    chunks = re.search(r"its chunks, in order: (.+), which the plan lists; equal ones take (\S+) s", printed)
    assert chunks is not None
    step = re.search(r"a step of (\S+) s", printed)
    assert step is not None
    times = f"it takes {step[1]} s, where equal chunks take {chunks[2]} s"
    sentence = f"the chunks of the 70B plan with `--where virtual=2` are {chunks[1]}; {times}"
    assert sentence in PAGE.replace("\n", " ")
