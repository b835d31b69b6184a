"""Pages of the site that are not committed under docs/ (a hook of MkDocs, see mkdocs.yml).

    start.md                     the README
    CONTRIBUTING.md and so on    of the repository
    commands.md                  every command with its options, from the command line itself
    pictures.md, pictures/*.svg  what `phalanx learn draw` draws
    textbook/*.md                the rows of textbook/rows_*.toml, the exercises and questions
    frameworks.md                what each framework can do, from the rows that searches read
    stacks_observed.md           the table of stacks_observed.json
    source/...                   files of the repository that a page links, such as ../examples/experts.toml

Links are written as GitHub resolves them; those that leave docs/ are rewritten here.
A link to nothing fails the build.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import frameworks
import observed
import pictures
import textbook
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OF_REPOSITORY = {"start.md": "README.md", **{n: n for n in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}}
_PLACES = {file: page for page, file in OF_REPOSITORY.items()}
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not under docs/, and rewrite the links of those that are."""
    made = generated()
    pages = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()} | OF_REPOSITORY
    outside: set[str] = set()
    for page, name in pages.items():
        text = turned_links((ROOT / name).read_text(), name, page, made.keys(), outside)
        if (committed := files.get_file_from_path(page)) is not None:
            files.remove(committed)
        files.append(File.generated(config, page, content=text))
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    for name in sorted(outside):
        files.append(File.generated(config, f"source/{name}", content=(ROOT / name).read_bytes()))
    return files


def generated() -> dict[str, str]:
    """Return the text of every page and picture that a program writes, by its path in the site."""
    cases = json.loads((ROOT / "docs/stacks_observed.json").read_text())
    return {
        "commands.md": reference(),
        "pictures.md": pictures.page(),
        **{f"pictures/{name}": text for name, text in pictures.drawings().items()},
        **{f"textbook/{name}": text for name, text in textbook.pages().items()},
        "frameworks.md": frameworks.page(),
        "stacks_observed.md": observed.page(cases),
    }


def turned_links(text: str, of_file: str, page: str, made: Collection[str], outside: set[str]) -> str:
    """Return a page with links between files of the repository made links between pages of the site.

    Linked files that are not pages are added to `outside`. Raises PluginError for a link to no file.
    """

    def turned(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(of_file), link[2]))
        if not (ROOT / target).exists() and target.removeprefix("docs/") not in made:
            raise PluginError(f"{of_file}: a link leads to {target}, which does not exist")
        if (ROOT / target).is_dir():
            target = f"{target}/README.md"
        if target in _PLACES:
            there = _PLACES[target]
        elif target.startswith("docs/"):
            there = target.removeprefix("docs/")
        else:
            outside.add(target)
            there = f"source/{target}"
        return link[1] + posixpath.relpath(there, posixpath.dirname(page) or ".") + link[3]

    return _LINK.sub(turned, text)


def reference() -> str:
    """Return every command, what it does and its options, as Markdown."""
    from phalanx.cli.app import app

    lines = ["# Commands", "", "As `phalanx COMMAND --help` prints them.", ""]
    for name, command in sorted(commands(typer.main.get_command(app), ())):
        lines += [f"## phalanx {name}", "", _sentences(command.help), ""]
        arguments = " ".join(_value(p, command) for p in command.params if p.param_type_name != "option")
        lines += ["```", f"phalanx {name} {arguments}".rstrip() + " [OPTIONS]", "```", "", "| | | |", "|---|---|---|"]
        for p in command.params:
            named = p.param_type_name == "option"
            names = (
                ", ".join(f"`{name}`" for name in (*p.opts, *p.secondary_opts))
                if named
                else f"`{_value(p, command)}`"
            )
            value = f"`{_value(p, command)}`" if named and not p.is_flag else ""
            lines.append(f"| {names} | {value} | {_sentences(p.help).replace('|', '&#124;')} |")
        lines.append("")
    return "\n".join(lines)


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (name, command) of every command, those of groups as `group command`."""
    for name, child in getattr(command, "commands", {}).items():
        if getattr(child, "hidden", False):
            continue
        if getattr(child, "commands", None):
            yield from commands(child, (*path, name))
        else:
            yield " ".join((*path, name)), child


def _value(parameter: Any, command: Any) -> str:
    """Return what a parameter takes, as its help shows it."""
    return str(parameter.metavar or parameter.display_type(typer.Context(command)))


def _sentences(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").strip().replace("<", "&lt;")
