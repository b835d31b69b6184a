"""The table of model families: the fields that each fixes, so that a user writes only sizes, and the format of its
config.json.

Any field may be overridden. To add a family: a row of families.toml; if its weights are exported, a writer below and
their names in nn/hugging_face/names.py.

A model's shape is read from the `config.json` that Hugging Face's `transformers` keeps with its weights. Missing keys
get the default of `transformers` for the family. Features that our decoder does not support are refused by name,
never dropped. `to_hugging_face` writes a `config.json` from which `transformers` builds the same model; fields that
its family cannot express are left out: to detect them, read the file back and compare.
"""

import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError, nearest
from phalanx.spec.model.hugging_face import dense, experts
from phalanx.spec.model.hugging_face.reader import read
from phalanx.spec.model.hugging_face.reading import Config, Fields
from phalanx.spec.model.hugging_face.rows import Families, FamilyRow
from phalanx.spec.model.hugging_face.unquantised import unquantised
from phalanx.spec.model.spec import ModelSpec

FAMILIES = Families(Path(__file__).with_name("families.toml"))
"""Every model type, by name."""
Writer = tuple[str, Callable[[ModelSpec], Fields]]
"""A class of `transformers`, and the function that writes its config.json."""
WRITERS: dict[str, Writer] = {
    "llama": ("LlamaForCausalLM", dense.write_llama),
    "mistral": ("MistralForCausalLM", dense.write_mistral),
    "qwen2": ("Qwen2ForCausalLM", dense.write_qwen2),
    "qwen3": ("Qwen3ForCausalLM", dense.write_qwen3),
    "gpt2": ("GPT2LMHeadModel", dense.write_gpt2),
    "gpt_neox": ("GPTNeoXForCausalLM", dense.write_gpt_neox),
    "mixtral": ("MixtralForCausalLM", experts.write_mixtral),
    "qwen3_moe": ("Qwen3MoeForCausalLM", experts.write_qwen3_moe),
    "deepseek_v2": ("DeepseekV2ForCausalLM", experts.write_deepseek_v2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", experts.write_deepseek_v3),
}
"""The families whose weights are exported."""


def family_of(name: object) -> FamilyRow:
    """Return the row of a family. Raises InputError for an unknown one."""
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError("model.family", name, "is not a family that Phalanx knows", nearest(str(name), FAMILIES))
    return FAMILIES[name]


def complete(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the fields of a ModelSpec with those fixed by `family`, and with sizes derived from others.

    Raises InputError for a missing or unknown family, a mechanism it needs, or heads that do not divide `hidden`.
    """
    family = fields.get("family")
    if family is None:
        remedy = f"families: {', '.join(WRITERS)} and other model types of transformers"
        raise InputError("model", None, "needs a preset, a config, or a family with sizes", remedy)
    # What the family requires and fixes.
    row = family_of(family)
    for name in row.needs:
        if not fields.get(name):
            raise InputError(f"model.{name}", None, f"is missing: family {family} needs it")
    full = {**row.fixed, **fields}
    if isinstance(full.get("experts"), Mapping):
        full["experts"] = {**row.routing, **full["experts"]}
    # Sizes that follow from others.
    heads, hidden, latent = full.get("heads"), full.get("hidden"), full.get("latent")
    if isinstance(latent, Mapping) and all(isinstance(latent.get(d), int) for d in ("nope_dim", "rope_dim")):
        full.setdefault("head_dim", latent["nope_dim"] + latent["rope_dim"])
    if isinstance(heads, int):
        if heads < 1:
            raise InputError("model.heads", heads, "must be at least 1")
        full.setdefault("kv_heads", heads)
        if "head_dim" not in full and isinstance(hidden, int):
            if hidden % heads:
                raise InputError(
                    "model.heads", heads, f"does not divide hidden = {hidden}", "use a divisor, or give head_dim"
                )
            full["head_dim"] = hidden // heads
    if family == "gpt_neox" and isinstance(full.get("head_dim"), int):
        full.setdefault("rotary_dim", max(2, full["head_dim"] // 8 * 2))  # a quarter (Black et al. 2022)
    return full


def _slip(kind: str, known: Collection[str]) -> str:
    """Return the remedy for an unknown model_type: the known one that it misspells, if any. Another release of a
    family is not suggested, since its layers may differ, and with them its cache and parameters."""
    near = get_close_matches(kind, known, 1, 0.85)
    same_release = bool(near) and re.sub(r"\D", "", near[0]) == re.sub(r"\D", "", kind)
    if near and same_release and not kind.startswith(near[0]) and not near[0].startswith(kind):
        return f"did you mean {near[0]}?"
    return "no other model_type represents it: its layers may differ"


def from_hugging_face(path: Path) -> tuple[Fields, list[str]]:
    """Return the fields of a ModelSpec from a Hugging Face `config.json`, and notes on keys that were ignored.

    Raises InputError naming the file if it is missing, is not JSON, or is of a family or asks for something that no
    row describes.
    """
    config = read_json(path, "model.config")
    if not isinstance(config, dict):
        raise InputError("model.config", str(path), "is not a JSON object")
    kind, row, c, notes = _text_part(config, path)
    try:
        shape = {"family": kind, **read(row, c)}
        if whole := unquantised(Config(config, path), shape["layers"]) or unquantised(c, shape["layers"]):
            shape["unquantised"] = whole
    except (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, InputError):
            raise
        raise c.wrong(f"has a field that cannot be read ({error!r})") from None
    names = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    dropouts = [k for k in names if c.keys.get(k)]
    depths = next((k for k in _DEPTHS if c.keys.get(k)), None)
    notes += [f"multi-token prediction is left out ({depths} = {c.keys[depths]})"] if depths else []
    notes += [f"dropout set to 0 ({', '.join(dropouts)} in {path.name})"] if dropouts else []
    return shape, notes


_DEPTHS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_TIED = "tie_word_embeddings"


def _text_part(config: Fields, path: Path) -> tuple[str, FamilyRow, Config, list[str]]:
    """Return the type of the part of a config that is a decoder of text, its row, its keys, and a note on the rest.

    Raises InputError for a type without a row.
    """
    whole, kind, c = Config(config, path), config.get("model_type"), Config(config, path)
    notes: list[str] = []
    while True:
        if not isinstance(kind, str) or kind not in FAMILIES or not FAMILIES[kind].reads:
            readers = [name for name in FAMILIES if FAMILIES[name].reads]
            raise whole.wrong(f"model_type {kind!r} is not supported", _slip(str(kind), readers))
        row = FAMILIES[kind]
        if not row.part:
            return kind, row, c, notes
        part: Any = c.keys
        owner: Any = None
        for name in row.part.split("."):
            owner, part = part, part.get(name) if isinstance(part, dict) else None
        kind = row.inner
        if not isinstance(part, dict):  # configurations of transformers 4 had the text's keys among the others
            continue
        tied = {_TIED: owner[_TIED]} if owner.get(_TIED) is not None else {}
        c = Config({**part, **tied}, path)
        kind = part.get("model_type", kind) if row.any_inner else kind
        notes = [f"the text part of {config['model_type']} is read and priced, without its other parts"]


def to_hugging_face(spec: ModelSpec) -> Fields:
    """Return the fields of a config.json. Raises InputError for a family whose weights `transformers` cannot load."""
    if spec.family not in WRITERS:
        reason = "has no weight format that both transformers and Phalanx read"
        raise InputError("model.family", spec.family, reason, nearest(spec.family, WRITERS))
    architecture, write = WRITERS[spec.family]
    common = {"vocab_size": spec.vocab, "tie_word_embeddings": spec.tied}
    return {"architectures": [architecture], "model_type": spec.family, **common, **write(spec)}
