"""Write a ModelSpec as the `config.json` from which `transformers` builds the same model (see from_hugging_face.py).

Fields that a family of `transformers` cannot express are left out. To detect them, read the file back and compare.
"""

from __future__ import annotations

from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.families import FAMILIES
from phalanx.spec.model.hugging_face.reading import Fields
from phalanx.spec.model.spec import ModelSpec


def to_hugging_face(spec: ModelSpec) -> Fields:
    """Return the fields of a config.json. Raises InputError for a family whose weights `transformers` cannot load."""
    writers = {name: family.write for name, family in FAMILIES.items() if family.write is not None}
    if spec.family not in writers:
        reason = "has no weight format that both transformers and Phalanx read"
        raise InputError("model.family", spec.family, reason, nearest(spec.family, writers))
    architecture, write = writers[spec.family]
    common = {"vocab_size": spec.vocab, "tie_word_embeddings": spec.tied}
    return {"architectures": [architecture], "model_type": spec.family, **common, **write(spec)}
