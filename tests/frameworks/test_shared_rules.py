"""A release that is like another has its rules: of the same commit all, of another those that it names."""

from __future__ import annotations

from pathlib import Path

import phalanx.frameworks
from phalanx.frameworks import facts


def test_rules_are_shared_by_commit_or_by_name() -> None:
    root = Path(phalanx.frameworks.__file__).parent
    folders = [facts._folder(path) for path in sorted(root.glob("*/facts.toml"))]
    tables = {name: (folder, table) for folder in folders for name, table in folder.stacks.items()}
    alike = {name: table["like"] for name, (_, table) in tables.items() if "like" in table}
    assert len(alike) >= 4
    commits = set()
    for name, other in alike.items():
        folder, table = tables[name]
        same = table.get("commit") == tables[other][1].get("commit")
        commits.add(same)
        given = table.get("rules", {})
        rules, shared = (facts._rules(n, *tables[n], tables) for n in (name, other))
        named = {id_ for id_, fact in given.items() if fact is not False}
        assert rules.keys() == named | ({id_ for id_ in shared if given.get(id_) is not False} if same else set())
        for id_ in rules.keys() & shared.keys():
            line = given.get(id_)
            assert isinstance(line, dict) or [r.when for r in rules[id_]] == [r.when for r in shared[id_]]
            assert not isinstance(line, str) or {r.source for r in rules[id_]} == {folder.source(line)}
    assert commits == {False, True}
