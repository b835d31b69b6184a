"""What every framework can do, read from the facts.toml of its folder into Stacks.

    [framework]                  what `read` and `export` call it, and how its files are recognized (framework.py)
    [files]                      abbreviations of paths: `arguments:446` is a line of the file that `arguments` names
    [stacks.NAME]                title, repository, commit: a documented release; `position`: its place in lists
        parent                   the stack whose constants, policy and limits it has where it states none
        like                     the stack whose facts it shares: a fact that is a string is the same at another line
        modules, recipes, needs, runs: see Stack
    [stacks.NAME.strategy]       field = { key, words, written, values, note, in_code, values_in_code, source }, false
    [stacks.NAME.options]        the same of options
    [stacks.NAME.operators]      operator = file:line of what runs it; `others`: of what runs all others, or `absent`:
                                 of the list that has no others (OPERATORS of stack.py)
    [stacks.NAME.rules.ID]       when (one condition or several), reason, remedy, source (Rule)
    [stacks.NAME.priced]         zero, zero_in_pipeline, schedules, ulysses, without: what its constants price
    [stacks.NAME.constants]      constants of a Profile that are known from its code
    [stacks.NAME.policy]         fields of Policy that are not the default; `like`: of a stack whose policy it shares

A folder's flags.toml names its keys for the flags of the framework whose facts it shares. A stack that is `like` one
of another commit has only the facts that it gives a line for. A table that is not one of these, a fact without a
source and a field without a fact raise ValueError.
"""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.frameworks.framework import Framework, framework_of
from phalanx.frameworks.stack import OPERATORS, WORDS, FieldFact, Rule, Stack, in_full
from phalanx.schedule.pipeline.schedules import SCHEDULES
from phalanx.spec.strategy.spec import FIELDS
from phalanx.spec.strategy.stack_options import DEFAULTS, OPTION_FIELDS

Table = Mapping[str, Any]
_STACK = frozenset(
    (
        *("title", "repository", "commit", "position", "parent", "like", "modules", "recipes", "dynamic_context"),
        *("needs", "strategy", "options", "operators", "rules", "priced", "constants", "policy", "runs"),
    )
)
_ENTRY = frozenset(("key", "words", "written", "values", "note", "in_code", "values_in_code", "source"))
_PRICED = ("zero", "zero_in_pipeline", "schedules", "ulysses", "without")
_RULE = frozenset(("when", "reason", "remedy", "source"))
_LATER = {"sp": "sp=1", "cp": "cp>1", "recompute": "recompute=selective*"}
"""Ideas younger than some stacks, and the strategies that use them: sequence parallelism and selective recomputation
(Korthikanti et al., May 2022; Megatron-LM v3.0), context parallelism (Megatron Core 0.4.0, December 2023)."""


@dataclass(frozen=True)
class _Folder:
    """A framework's facts.toml: its folder, paths by their abbreviations, and its stacks."""

    name: str
    files: Mapping[str, str]
    stacks: Mapping[str, Table]
    about: Table
    """Its [framework] table."""
    renamed: Mapping[str, str]
    """Keys of the framework whose facts it shares -> its own keys."""

    def source(self, text: Any) -> str:
        """Write out the file of a `file:line`."""
        return in_full(str(text), self.files)


def load(root: Path) -> tuple[dict[str, Stack], dict[str, Framework]]:
    """Return the stacks and the frameworks of every folder of `root` that has a facts.toml, by `position`, and stacks
    that are known by their published runs at the end.

    Raises ValueError naming the stack whose facts are not complete."""
    folders = [_folder(path) for path in sorted(root.glob("*/facts.toml"))]
    tables = {name: (folder, table) for folder in folders for name, table in folder.stacks.items()}
    built: dict[str, Stack] = {}
    for name in tables:
        _build(name, tables, built)
    last = len(tables)
    ordered = sorted(tables, key=lambda name: (int(tables[name][1].get("position", last)),))
    stacks = {name: built[name] for name in ordered}
    frameworks = [framework_of(f.name, f.about, _documented(f, stacks)) for f in folders]
    return stacks, {f.folder: f for f in sorted(frameworks, key=lambda f: f.position)}


def _documented(folder: _Folder, stacks: Mapping[str, Stack]) -> tuple[str, ...]:
    return tuple(name for name, stack in stacks.items() if stack.framework == folder.name and stack.documented)


def _folder(path: Path) -> _Folder:
    document = tomllib.loads(path.read_text())
    _require_known(str(path), document, ("framework", "files", "stacks"))
    flags = path.with_name("flags.toml")
    renamed = tomllib.loads(flags.read_text())["keys"] if flags.is_file() else {}
    files, stacks, about = (document.get(name, {}) for name in ("files", "stacks", "framework"))
    return _Folder(path.parent.name, files, stacks, about, renamed)


def _build(name: str, tables: Mapping[str, tuple[_Folder, Table]], built: dict[str, Stack]) -> Stack:
    """Return a stack, built after those that it derives from."""
    if name in built:
        return built[name]
    if name not in tables:
        raise ValueError(f"no stack is named {name}")
    folder, table = tables[name]
    _require_known(name, table, _STACK)
    parent = _build(table["parent"], tables, built) if "parent" in table else None
    like = _build(table["like"], tables, built) if "like" in table else None
    rules = _rules(name, folder, table, tables)
    same = like is not None and like.commit == table.get("commit")
    built[name] = Stack(
        name=name,
        framework=folder.name,
        parent=parent.name if parent else "",
        title=table.get("title", ""),
        repository=table.get("repository", ""),
        commit=table.get("commit", ""),
        strategy=_entries(name, folder, table.get("strategy", {}), like.strategy if like else {}, same),
        options=_entries(name, folder, table.get("options", {}), like.options if like else {}, same),
        rules=(*_operators(name, folder, table, like, same), *(r for group in rules.values() for r in group)),
        priced=_limits(name, _inherited(name, "priced", tables)),
        modules=tuple(table.get("modules", like.modules if like else ())),
        recipes=tuple(table.get("recipes", like.recipes if like else ())),
        dynamic_context=folder.source(table.get("dynamic_context", "")),
        needs=tuple(table.get("needs", like.needs if like else ())),
        constants={**(parent.constants if parent else {}), **_numbers(table.get("constants", {}))},
        policy=_policy(table, parent, tables, built),
        runs=tuple({column: tuple(each) for column, each in run.items()} for run in table.get("runs", ())),
        lineage=(name, *(parent.lineage if parent else ())),
    )
    return built[name]


def _entries(
    stack: str, folder: _Folder, table: Table, shared: Mapping[str, FieldFact], same: bool
) -> dict[str, FieldFact]:
    """Return the facts of a table. `shared`: of the stack that it is like; at the `same` commit all of them hold, at
    another one those that the table gives a line for."""
    result = {name: entry for name, entry in shared.items() if table.get(name, same) is not False}
    for name, fact in table.items():
        if fact is False:
            continue
        if isinstance(fact, str):
            if name not in shared:
                raise ValueError(f"{stack}.{name} has a line and no fact")
            entry = shared[name]
            if entry.key in folder.renamed:
                entry = replace(entry, key=folder.renamed[entry.key], written=folder.renamed[entry.key])
            result[name] = replace(entry, source=folder.source(fact))
            continue
        _require_known(f"{stack}.{name}", fact, _ENTRY)
        key, words = fact.get("key", ""), fact.get("words", {})
        result[name] = FieldFact(
            values=_legal(name, fact, words),
            written=fact.get("written", key),
            source=folder.source(fact.get("source", "")),
            note=fact.get("note", ""),
            in_code=fact.get("in_code", False),
            values_in_code=tuple(fact.get("values_in_code", ())),
            key=key,
            words=words,
        )
    return {name: result[name] for name in (*FIELDS, *OPTION_FIELDS, *result) if name in result}


def _legal(name: str, fact: Table, words: Table) -> tuple[Any, ...] | None:
    """Return the legal values of a field: those that the fact lists, else those that its key has words for."""
    if "values" in fact:
        return tuple(fact["values"])
    if not words or not all(isinstance(value, str) for value in words.values()):
        return None
    named = [value for value in words.values() if not WORDS[name] or value in WORDS[name]]
    return tuple(dict.fromkeys([*(["auto"] if DEFAULTS.get(name) == "auto" else []), *named]))


def _rules(
    stack: str, folder: _Folder, table: Table, tables: Mapping[str, tuple[_Folder, Table]]
) -> dict[str, tuple[Rule, ...]]:
    """Return the rules of a stack by ID, its own and the rules of the stack that it is like."""
    given = table.get("rules", {})
    shared: dict[str, tuple[Rule, ...]] = {}
    if "like" in table:
        other_folder, other = tables[table["like"]]
        shared = _rules(table["like"], other_folder, other, tables)
        same = other.get("commit") == table.get("commit")
        shared = {id_: rules for id_, rules in shared.items() if given.get(id_, same) is not False}
    for id_, fact in given.items():
        if fact is False:
            continue
        if isinstance(fact, str):
            if id_ not in shared:
                raise ValueError(f"{stack}: rule {id_} has a line and no fact")
            shared[id_] = tuple(replace(rule, source=folder.source(fact)) for rule in shared[id_])
            continue
        _require_known(f"{stack}: rule {id_}", fact, _RULE)
        if missing := [part for part in _RULE if not fact.get(part)]:
            raise ValueError(f"{stack}: rule {id_} has no {', '.join(sorted(missing))}")
        conditions = [fact["when"]] if isinstance(fact["when"], str) else fact["when"]
        source = folder.source(fact["source"])
        shared[id_] = tuple(Rule(when, fact["reason"], fact["remedy"], source) for when in conditions)
    return shared


def _operators(stack: str, folder: _Folder, table: Table, like: Stack | None, same: bool) -> tuple[Rule, ...]:
    """Return a rule against each operator that a stack does not run."""
    given = table.get("operators", {})
    if not given and same and like is not None:
        return tuple(rule for rule in like.rules if rule.when.removesuffix(">0") in OPERATORS)
    _require_known(f"{stack}.operators", given, (*OPERATORS, "others", "absent"))
    if ("others" in given) == ("absent" in given) and "title" in table:
        raise ValueError(f"{stack}.operators does not say whether it runs others")
    source = folder.source(given.get("absent", ""))
    refused = [name for name in OPERATORS if "absent" in given and name not in given]
    return tuple(Rule(f"{n}>0", f"has no {OPERATORS[n]}", "use a model without it", source) for n in refused)


def _inherited(name: str, part: str, tables: Mapping[str, tuple[_Folder, Table]]) -> dict[str, Any]:
    """Return a table of a stack, completed by its ancestors' tables."""
    table = tables[name][1]
    above = _inherited(table["parent"], part, tables) if "parent" in table else {}
    return {**above, **table.get(part, {})}


def _limits(name: str, priced: Table) -> tuple[Rule, ...]:
    """Return rules against the strategies that a stack's constants do not price."""
    _require_known(name, priced, _PRICED)
    if missing := [part for part in _PRICED if part not in priced]:
        raise ValueError(f"{name}: its constants have no {', '.join(missing)}")

    def listed(values: Iterable[Any]) -> str:
        return ", ".join(map(str, values))

    rules = [_limit(_LATER[idea], "is newer than the stack", "leave it out") for idea in priced["without"]]
    names = priced["schedules"]
    unknown = [name for name in names if name not in (*SCHEDULES, "*.csv")]
    if unknown:
        raise ValueError(f"{name}: {listed(unknown)} are no schedules")
    if names:
        reason = f"is not in the stack, which has {listed(names)}"
        rules.append(_limit(f"schedule not in ({listed(names)}), pp>1", reason, "use one of these, or pp=1"))
    else:
        rules.append(_limit("pp>1", "is not in the stack, which has no pipeline", "use pp=1"))
    if not priced["ulysses"]:
        rules.append(_limit("ulysses>1", "is not in the stack, whose context parallelism is a ring", "leave it out"))
    for levels, ranks, place in (
        (priced["zero"], "pp=1", ""),
        (priced["zero_in_pipeline"], "pp>1", " with a pipeline"),
    ):
        if levels:
            remedy = "use " + " or ".join(f"zero={level}" for level in levels)
            rules.append(_limit(f"zero not in ({listed(levels)}), {ranks}", f"is not in the stack{place}", remedy))
    return tuple(rules)


def _limit(when: str, reason: str, remedy: str) -> Rule:
    return Rule(when, reason, remedy, "")


def _policy(
    table: Table, parent: Stack | None, tables: Mapping[str, tuple[_Folder, Table]], built: dict[str, Stack]
) -> dict[str, float]:
    """Return a stack's policy: its own fields on top of the policy of the stack that it is like; its parent's policy
    where it states none."""
    if "policy" not in table:
        return dict(parent.policy) if parent else {}
    stated = dict(table["policy"])
    like = stated.pop("like", None)
    return {**(_build(like, tables, built).policy if like else {}), **_numbers(stated)}


def _numbers(table: Table) -> dict[str, float]:
    return {name: float(value) for name, value in table.items()}


def _require_known(where: str, table: Table, known: Iterable[str]) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(f"{where}: {', '.join(unknown)} are not facts that a stack has")
