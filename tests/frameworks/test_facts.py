"""Facts of frameworks: a folder that lacks one, or says one that there is not, cannot be loaded."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.exports import draw

from phalanx import frameworks
from phalanx.frameworks import lints, registry
from phalanx.frameworks.facts import load
from phalanx.frameworks.reading.parts import reader, writer
from phalanx.frameworks.writing.subject import subject
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.stack_options import StackOptions

FOLDERS = Path(registry.__file__).parent


def folder(tmp_path: Path, change: Callable[[str], str] = lambda text: text) -> Path:
    """Return a root with a framework that is nanotron's under another name, and the stacks that it derives from."""
    for name in ("generic", "newcomer"):
        (tmp_path / name).mkdir()
    shutil.copy(FOLDERS / "generic" / "facts.toml", tmp_path / "generic")
    facts = (FOLDERS / "nanotron" / "facts.toml").read_text().replace("stacks.nanotron", "stacks.newcomer")
    facts = facts.replace('parent = "nanotron"', 'parent = "newcomer"').replace('"nanotron"', '"newcomer"')
    (tmp_path / "newcomer" / "facts.toml").write_text(change(facts))
    return tmp_path


def without(pattern: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        changed, count = re.subn(pattern, "", text, count=1, flags=re.M)
        assert count == 1, pattern
        return changed

    return change


def test_one_folder_is_all_that_a_framework_needs(tmp_path: Path) -> None:
    stacks, by_folder = load(folder(tmp_path))
    assert stacks["newcomer"].documented
    assert stacks["newcomer"].lineage == ("newcomer", "eager", "any")
    assert by_folder["newcomer"].stacks == ("newcomer",)
    assert (by_folder["newcomer"].reads, by_folder["newcomer"].writes) == ("newcomer", "newcomer")


def test_reader_writer_and_lints_are_found_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder(tmp_path)
    for part in ("read.py", "write.py", "lints.toml"):
        shutil.copy(FOLDERS / "nanotron" / part, root / "newcomer")
    monkeypatch.setattr(frameworks, "__path__", [*frameworks.__path__, str(root)])
    monkeypatch.setattr(lints, "ROOT", root)
    stacks, by_folder = load(root)
    newcomer = by_folder["newcomer"]
    assert reader(newcomer)({"parallelism": {"dp": 2, "pp": 1, "tp": 4}}, None).layout.world == 8
    assert {row.name for row in lints.lints_of(newcomer)} == {"mesh-vs-world", "micro-batches-vs-pipeline"}
    plan = draw.plan(registry.DOCUMENTED["nanotron"], random.Random(1), ("llama3-8b",), options=False)
    assert "config.yaml" in writer(newcomer)(subject(plan, stacks["newcomer"])).files


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"^tp = .*\n", "newcomer says nothing about tp"),
        (r', source = "parallelism_config:31"', "newcomer.tp has no source"),
        (r"^commit = .*\n", "newcomer has no repository or no commit"),
        (r'^parent = "eager"\n', "newcomer: its constants have no ulysses, without"),
    ],
)
def test_a_missing_fact_is_named(tmp_path: Path, pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(folder(tmp_path, without(pattern)))


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("[stacks.newcomer.option]\nlora = false\n", "option are not facts that a stack has"),
        (
            '[stacks.newcomer.rules.x]\nwhen = "tp>1"\nremedy = "use tp=1"\nsource = "a.py:1"\n',
            "rule x has no reason",
        ),
        ('[stacks.newcomer.rules]\nx = "a.py:1"\n', "rule x has a line and no fact"),
        ('[stacks.further]\nparent = "nobody"\n', "no stack is named nobody"),
        (
            '[stacks.further]\nparent = "any"\n[stacks.further.priced]\nschedules = ["1f2b"]\n',
            "1f2b are no schedules",
        ),
        ("[stacks.newcomer.strategy.tpp]\nvalues = [1]\n", "tpp are neither fields nor options"),
    ],
)
def test_what_is_no_fact_is_named(tmp_path: Path, added: str, message: str) -> None:
    def change(text: str) -> str:
        return f"{text}\n{added}"

    with pytest.raises(ValueError, match=re.escape(message)):
        load(folder(tmp_path, change))


def test_every_folder_with_a_reader_or_a_writer_says_what_it_is_called() -> None:
    for path in FOLDERS.iterdir():
        framework = registry.FRAMEWORKS.get(path.name)
        assert (path / "read.py").is_file() == bool(framework and framework.reads), path.name
        assert (path / "write.py").is_file() == bool(framework and framework.writes), path.name


def test_a_level_that_a_stack_lacks_is_refused_where_it_takes_effect() -> None:
    """On one GPU too, if the optimizer's state is on the host: it is there as shards."""
    offloaded, refused = StackOptions(optimizer_offload=1.0), set()
    for stack in registry.DOCUMENTED.values():
        if "optimizer_offload" not in stack.options:
            continue
        for zero in (1, 2, 3):
            alone = stack.refusal(Strategy(zero=zero), offloaded)
            several = stack.refusal(Strategy(dp=2, zero=zero), offloaded)
            lacks = not stack.strategy["zero"].allows(zero)
            missing = [r is not None and r.reason == "is not in the stack" for r in (alone, several)]
            assert missing == [lacks, lacks], (stack.name, zero)
            assert stack.refusal(Strategy(zero=zero), StackOptions()) is None
            refused.add(lacks)
    assert refused == {False, True}
