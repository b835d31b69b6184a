"""Read a config.json by its row: one reader for all model types.

A key that a row does not read is one of three kinds: NEUTRAL, known to change no layer; STRUCTURAL, named like what
changes layers, so that a config with it is refused; or anything else, such as what a tool notes about itself.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.spec.model.hugging_face.expressions import evaluate, names
from phalanx.spec.model.hugging_face.reading import Config, Fields, require_layers, rope
from phalanx.spec.model.hugging_face.rows import FamilyRow

NEUTRAL = frozenset(Path(__file__).with_name("neutral.txt").read_text().split())
"""Keys that change no size and no cost, or that every row reads. Multi-token prediction is among them: it is left out
of totals, as transformers leaves it out, and a note says so."""
STRUCTURAL = re.compile(
    r"^(?!.*_eps(ilon)?$).*"
    r"(heads?(_|$)|layers?(_|$)|(_|^)(dim|rank|size|width|ratio|factor|interval|freq|period|offset)(_|s?$)"
    r"|expert|moe|norm|window|attn|attention|mlp|ffn|mamba|conv|ssm|state|linear|delta|lightning|index|compress"
    r"|(^|_)hc_|altup|laurel|gram|latent|lora|bias|gate|residual|block|pattern|parallel|shared|sink|loop|recur"
    r"|memory|kv_|chunk)"
)
"""Names of keys that change layers, in the vocabulary of the configurations that transformers 5 has."""
_JOINED = "+"
WINDOWED = "windowed"
"""The word of a row for the model's own attention in its window."""


def read(row: FamilyRow, c: Config) -> Fields:
    """Return the fields of a ModelSpec from a config.json of the row's type.

    Raises InputError for keys that are missing, that ask for what no row describes, or that its row does not know.
    """
    for key, usable in row.only.items():
        c.only(key, *usable)
    for feature, part in row.refused.items():
        if _holds(part, c, {}):
            raise c.wrong(f"has {feature}, which is not described", "nothing near it is priced in its place")
    _require_known(row, c)
    read: Fields = dict(row.fixed)
    for name, part in row.keys.items():
        _take(read, name, _value(part, c, read))
    if "layers" in read:
        read["layers"] = require_layers(read["layers"])
    if read.get("position") == "rotary":
        read |= rope(c, row.rope)
    for name in ("latent", "experts", "multipliers"):
        table = getattr(row, name)
        if table and (part := _table(table, c, read)) is not None:
            read[name] = part
    read["only_priced"] = [feature for feature, part in row.only_priced.items() if _holds(part, c, read)]
    read["only_priced"] += read.pop("rope_only_priced", [])
    if not read["only_priced"]:
        del read["only_priced"]
    return read | _pattern(row, c, read)


def _take(read: Fields, name: str, value: Any) -> None:
    """Store a field's value in `read`; None leaves the row's fixed value, or ModelSpec's own default."""
    if value is not None:
        read[name] = value


def _value(part: Any, c: Config, read: Fields, **more: Any) -> Any:
    """Return the value of an expression, or the entry that an expression chooses from a table. Raises InputError for
    a key that is missing and for a choice that the table lacks."""
    if isinstance(part, Mapping):
        chosen = _value(part["of"], c, read, **more)
        if chosen not in part:
            usable = " or ".join(key for key in part if key != "of")
            key = min(names(part["of"]))
            raise c.wrong(f"{key} = {chosen!r} is not supported", f"use {usable}")
        return part[chosen]
    if not isinstance(part, str):
        return part
    value = evaluate(part, c.keys, spec=read, **more)
    if value is None and not re.search(r"\bnone\b|has\(", part):
        first = re.findall(r"[A-Za-z_]+", part)[0]
        raise c.wrong(f"has no {first!r}", "is this a Hugging Face config.json?")
    return value


def _holds(part: Any, c: Config, read: Fields) -> bool:
    """Return whether a condition of a row, an expression or a constant, is true of a config."""
    return bool(evaluate(part, c.keys, spec=read) if isinstance(part, str) else part)


def _table(part: Mapping[str, Any], c: Config, read: Fields) -> Fields | None:
    """Return the fields of a mechanism; None if the expression `if` says that the config has none."""
    if not _holds(part.get("if", True), c, read):
        return None
    inside: Fields = {}
    for name, value in part.items():
        if name == "kind":
            inside[name] = value
        elif name != "if":
            nested = isinstance(value, Mapping) and "of" not in value
            inner = _table(value, c, read) if nested else _value(value, c, read)
            if inner is not None:
                inside[name] = inner
    return inside


def _require_known(row: FamilyRow, c: Config) -> None:
    """Raise InputError for a key that may change the layers and that the row does not know."""
    for key, value in c.keys.items():
        if key in row.known or key in NEUTRAL or not STRUCTURAL.search(key):
            continue
        if value not in (None, False, 0, "", [], {}):
            remedy = f"remove {key} if it changes neither the layers nor their sizes"
            raise c.wrong(
                f"{key} = {str(value)[:40]} is not known for model_type {c.keys.get('model_type')!r}", remedy
            )


def _pattern(row: FamilyRow, c: Config, read: Fields) -> Fields:
    """Return the fields for the layers' kinds: `window_layers` and `experts.dense_layers` if layers differ in windows
    and experts only, else `pattern` with its `mixers`."""
    if not row.layer:
        return {}
    layers, experts = read["layers"], read.get("experts")
    drafting = c.keys.get("num_nextn_predict_layers")  # layers that some files count among them, behind all others
    counts = (layers, layers + (drafting if isinstance(drafting, int) else 0))
    for key in sorted({key for part in row.layer for key in names(part)}):
        if isinstance(kinds := c.keys.get(key), list) and key.endswith("types") and len(kinds) not in counts:
            raise c.wrong(f"{key} has {len(kinds)} entries for {layers} layers", "name the kind of each layer")
    pattern = [_words(row, c, read, i) for i in range(layers)]
    used = {word for words in pattern for word in _sublayers(words)}
    plain = all(re.fullmatch(r"\w+\+\w+", words) for words in pattern)
    if used <= {"attention", WINDOWED, "mlp", "experts"} and plain:
        windows = [i for i, words in enumerate(pattern) if words.startswith(WINDOWED)]
        dense = [i for i, words in enumerate(pattern) if words.endswith("mlp")]
        window = {"window": read.get("window") if windows else None}
        if windows and read.get("window") is not None:
            window["window_layers"] = windows if names(row.layer[0]) else None
        return window | {"experts": None if experts is None else experts | {"dense_layers": dense}}
    mixers = [{"name": name, **(_table(part, c, read) or {})} for name, part in row.mixers.items() if name in used]
    if WINDOWED in used:
        mixers.append({"name": WINDOWED, "kind": "attention", "window": read.get("window")})
    period = next(n for n in range(1, layers + 1) if all(pattern[i] == pattern[i % n] for i in range(layers)))
    return {
        "window": None,
        "experts": experts if "experts" in used else None,
        "mixers": mixers,
        "pattern": pattern[:period],
    }


def _sublayers(words: str) -> set[str]:
    """Return the sublayers that a block of a pattern names."""
    return set(re.split("[+&]", re.sub(":[a-z]+", "", words)))


def _words(row: FamilyRow, c: Config, read: Fields, i: int) -> str:
    """Return the sublayers of layer `i`."""
    sublayers = []
    for part in row.layer:
        word = _value(part, c, read, i=i)
        own = _sublayers(str(word)) <= {"attention", WINDOWED, "mlp", "experts", "", *row.mixers}
        known = row.words.get(word, word if own else None)
        if known is None:
            raise c.wrong(f"layer type {word!r} is not supported", f"use {' or '.join(row.words)}")
        sublayers += [known] if known else []
    return _JOINED.join(sublayers)
