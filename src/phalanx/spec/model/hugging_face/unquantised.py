"""Modules that a quantised checkpoint keeps in 16 bits: its `quantization_config`.

modules_to_not_convert, ignored_layers     transformers, fbgemm, AWQ, fp8: quantizers/quantizers_utils.py,
                                           should_convert_module: a regular expression from the start of a name up
                                           to the end of a module, or the end of a name
ignore, with targets of its groups         compressed-tensors: a name, or `re:` and a regular expression
ignore, exclude_modules                    ModelOpt: with wildcards
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from phalanx.spec.model.hugging_face.reading import Config

_LISTS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_NUMBERED = re.compile(r"(.*\.(?:layers|h|blocks))\.(\d+)\.(.*)")


def unquantised(c: Config, layers: int) -> list[str]:
    """Return regular expressions over the names of modules in 16 bits; [] where the config has no list of them.

    Raises InputError for a list that is none of words."""
    table = c("quantization_config") or c("compression_config") or {}
    if not isinstance(table, Mapping):
        raise c.wrong("quantization_config is not a table")
    listed: Any = next((table[key] for key in _LISTS if table.get(key)), [])
    words = [listed] if isinstance(listed, str) else listed
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise c.wrong("quantization_config has a list of modules that is none of names")
    expressions, numbers = list[str](), dict[tuple[str, str], set[int]]()
    for word in words:
        if match := _NUMBERED.fullmatch(word):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
        else:
            expressions.append(_expression(word))
    for (before, after), which in numbers.items():
        every = which >= set(range(layers))
        number = r"\d+" if every else f"(?:{'|'.join(map(str, sorted(which)))})"
        expressions.append(_expression(rf"{before}.{number}.{after}"))
    groups = table.get("config_groups")
    targets = (
        [t for group in groups.values() for t in group.get("targets", ())] if isinstance(groups, Mapping) else []
    )
    if targets and "Linear" not in targets:
        expressions.append(f"(?!{'|'.join(map(_expression, targets))}).*")
    return expressions


def _expression(word: str) -> str:
    """Return a word of a list as a regular expression of whole names; one that is none is taken as it stands."""
    if word.startswith("re:"):
        expression = f"{word[3:]}.*"
    elif word.startswith("*"):
        expression = fnmatch.translate(word + "*")
    else:
        expression = rf".*(?:{word})|(?:{word.rstrip('.')})\..*"
    try:
        re.compile(expression)
    except re.error:
        return re.escape(word)
    return expression
