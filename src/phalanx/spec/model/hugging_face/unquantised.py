"""Modules that a quantised checkpoint keeps in 16 bits: its `quantization_config`.

modules_to_not_convert, ignored_layers     transformers, fbgemm, AWQ, fp8: quantizers/quantizers_utils.py,
                                           should_convert_module: a regular expression from the start of a name up
                                           to the end of a module, or the end of a name
ignore, with targets of its groups         compressed-tensors: a name, or `re:` and a regular expression
ignore, exclude_modules                    ModelOpt: with wildcards

A stranger's regular expression may take forever. In practice these lists hold names with gaps, numbers and
alternatives, which wildcards express too and match in linear time (fnmatch); other expressions are refused.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.spec.model.hugging_face.reading import Config

_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_NUMBERED = re.compile(r"(.*\.(?:layers|h|blocks))\.(\d+)\.(.*)")
_MOST_MODULES = 2000
_GAPS = {r"\d+": "*", r"[0-9]+": "*", r"\d": "?", ".*": "*", ".+": "?*", r"\.": ".", "[.]": "."}
"""Parts of regular expressions, longest first where one begins another, and the equal wildcards. A point alone stays
a point, as in names."""
_GAP_PATTERN = re.compile("|".join(map(re.escape, _GAPS)))
_ALTERNATIVES = re.compile(r"\((?:\?:)?([^()]*)\)")


def unquantised(c: Config, layers: int) -> list[str]:
    """Return wildcards for the names of the modules in 16 bits or, each behind `!`, of the only modules that are
    quantised; [] where the config has no list of them.

    Raises InputError for a list of anything but words, or too long, and for an expression without equal wildcards."""
    table = c("quantization_config") or c("compression_config") or {}
    if not isinstance(table, Mapping):
        raise c.wrong("quantization_config is not a table")
    listed: Any = next((table[key] for key in _LISTS if table.get(key)), [])
    words = [listed] if isinstance(listed, str) else listed
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise c.wrong("quantization_config has a list of modules that is none of names")
    groups: Any = table.get("config_groups")
    groups = groups.values() if isinstance(groups, Mapping) else ()
    targets = [t for group in groups for t in group.get("targets", ())]
    wildcards = [glob for word in _merged(words, layers) for glob in _wildcards(c, word)]
    if targets and "Linear" not in targets:
        wildcards += [f"!{glob}" for word in targets for glob in _wildcards(c, word)]
    if len(wildcards) > _MOST_MODULES:
        raise c.wrong(f"quantization_config lists more than {_MOST_MODULES:,} modules")
    return wildcards


def _merged(words: list[str], layers: int) -> Iterator[str]:
    """Yield the words of a list, with one wildcard in place of words that name the same module of every layer."""
    numbers = dict[tuple[str, str], set[int]]()
    for word in words:
        if match := _NUMBERED.fullmatch(word):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
        else:
            yield word
    for (before, after), which in numbers.items():
        every = which >= set(range(layers))
        yield from (f"{before}.{i}.{after}" for i in (["*"] if every else sorted(which)))


def _wildcards(c: Config, word: str) -> Iterator[str]:
    """Yield a word of a list as wildcards of whole names. Raises InputError for an expression without equal ones."""
    expression = word.removeprefix("re:")
    spelt = _spelt(expression.removeprefix("^").removesuffix("$"))
    if word != expression:
        repeated = re.search("[*+?{]", _GAP_PATTERN.sub("", expression.replace("(?:", "(")))
        if repeated or not spelt or not all(re.fullmatch(r"(?:[\w.*?/-]|\[[\w-]+\])*", name) for name in spelt):
            raise c.wrong(f"quantization_config has an expression that is not read: {word[:100]}")
    for name in spelt or [re.sub(r"([*?[])", r"[\1]", word)]:
        if word == expression and not word.startswith("*"):
            yield f"*{name}"
            yield f"{name}.*"
        else:
            yield name if word.endswith("$") else f"{name}*"


def _spelt(expression: str) -> list[str]:
    """Return a regular expression as wildcards, one for each of its alternatives; [] if there are over 64."""
    spelt = [_GAP_PATTERN.sub(lambda part: _GAPS[part[0]], expression)]
    while any(_ALTERNATIVES.search(each) for each in spelt):
        spelt = [
            f"{each[: match.start()]}{alternative}{each[match.end() :]}"
            for each in spelt
            for match in [_ALTERNATIVES.search(each)]
            if match
            for alternative in match[1].split("|")
        ]
        if len(spelt) > 64:
            return []
    return spelt
