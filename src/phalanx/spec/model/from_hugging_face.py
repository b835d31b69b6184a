"""Read a model's shape from the `config.json` that Hugging Face's `transformers` keeps with its weights. Missing keys
get the default of `transformers` for the family. Features that our decoder does not support are refused by name,
never dropped.
"""

from __future__ import annotations

from pathlib import Path

from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.families import FAMILIES
from phalanx.spec.model.hugging_face.reading import Config, Fields


def from_hugging_face(path: Path) -> tuple[Fields, list[str]]:
    """Return the fields of a ModelSpec from a Hugging Face `config.json`, and notes on keys that were ignored.

    Raises InputError naming the file if it is missing, is not JSON, or is of a family or asks for something that our
    decoder does not support.
    """
    config = read_json(path, "model.config")
    if not isinstance(config, dict):
        raise InputError("model.config", str(path), "is not a JSON object")
    kind, c = config.get("model_type"), Config(config, path)
    readers = {name: family.read for name, family in FAMILIES.items() if family.read is not None}
    if not isinstance(kind, str) or kind not in readers:
        raise c.wrong(f"model_type {kind!r} is not supported", nearest(str(kind), readers))
    try:
        shape = {"family": kind, **readers[kind](c)}
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, InputError):
            raise
        raise c.wrong(f"has a field that cannot be read ({error!r})") from None
    names = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    dropouts = [k for k in names if config.get(k)]
    notes = [f"dropout set to 0 ({', '.join(dropouts)} in {path.name})"] if dropouts else []
    return shape, notes
