"""Mistakes in accelerate's YAML, and in FSDP's table wherever it stands."""

import math
from collections.abc import Mapping

from phalanx.frameworks.configuration import Config, Configuration, Keys
from phalanx.frameworks.lints import Lint, Mistakes
from phalanx.frameworks.values import count

_BLOCKS = {
    "GPT2Block": "gpt2",
    "LlamaDecoderLayer": "llama",
    "MistralDecoderLayer": "mistral",
    "MixtralDecoderLayer": "mixtral",
    "Qwen2DecoderLayer": "qwen",
    "GemmaDecoderLayer": "gemma",
    "BertLayer": "bert",
    "T5Block": "t5",
    "BloomBlock": "bloom",
    "FalconDecoderLayer": "falcon",
    "GPTNeoXLayer": "neox",
    "OPTDecoderLayer": "opt",
    "PhiDecoderLayer": "phi",
}
"""Classes that FSDP wraps -> a part of the names of their models."""
_AXES = 16
"""Sizes at most that are multiplied: a mesh has fewer axes."""


def _mesh(c: Config, x: Configuration) -> Mistakes:
    """Sizes of a mesh whose product is not the number of processes."""
    mesh, world = c.get("parallelism_config"), x.layout.world
    if x.kind == "accelerate" and world and isinstance(mesh, Mapping):
        sizes = [count(v) or 1 for k, v in mesh.items() if str(k).endswith("_size")][:_AXES]
        if math.prod(sizes) != world:
            yield (
                "parallelism_config",
                f"its sizes make {math.prod(sizes)}, and there are {world} processes",
                "sizes that fill them",
            )


def _no_axis_to_shard(c: Config, x: Configuration) -> Mistakes:
    mesh = c.get("parallelism_config")
    if x.kind == "accelerate" and str(c.get("distributed_type")).upper() == "FSDP" and isinstance(mesh, Mapping):
        sharded = [count(v) or 1 for k, v in mesh.items() if "dp_shard" in k or "_cp_" in k][:_AXES]
        if math.prod(sharded) == 1 and (x.layout.tp or 1) > 1:
            yield (
                "parallelism_config",
                "FSDP is on, and tp takes every process: there is no axis to shard over",
                "dp_shard_size over 1",
            )


def _wrapped_class(c: Config, x: Configuration) -> Mistakes:
    table = c.get("fsdp_config")
    name = str(c.get("_model") or x.model_name or "").lower()
    if not isinstance(table, Mapping) or not name:
        return
    wrapped = str(Keys(table).take(("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap"), "") or "")
    family = _BLOCKS.get(wrapped)
    if name.rpartition("/")[2].startswith(("falcon-e", "falcon3")):  # Llamas by their blocks
        name = "llama"
    if family and family not in name.replace("-", ""):
        yield (
            "fsdp_transformer_layer_cls_to_wrap",
            f"{wrapped} is a block of {family} models, the model is {name}",
            "its own block's class",
        )


def _text_for_truth(c: Config, x: Configuration) -> Mistakes:
    env = c.get("env")
    for key, value in env.items() if isinstance(env, Mapping) else ():
        if str(key).startswith(("FSDP_", "ACCELERATE_")) and str(value).lower() == "false":
            yield f"env.{key}", 'the text "false" was read as true by releases before 0.22', "leave it out"


def _older_sharding(c: Config, x: Configuration) -> Mistakes:
    table = c.get("fsdp_config")
    if isinstance(table, Mapping) and Keys(table).count(("fsdp_version", "version"), "") == 2:
        said = Keys(table).take(("fsdp_reshard_after_forward", "reshard_after_forward"), "") is not None
        for name in ("fsdp_sharding_strategy", "sharding_strategy"):
            if name in table and not said:
                yield name, "is of FSDP1, and FSDP2 does not read it", "fsdp_reshard_after_forward: true or false"


LINTS = (
    Lint("mesh-vs-world", "huggingface/nanotron#250, pytorch/torchtitan#1184, deepspeedai/DeepSpeed#2925", _mesh),
    Lint("no-axis-to-shard", "huggingface/accelerate#3798", _no_axis_to_shard),
    Lint("wrapped-class", "hiyouga/ChatGLM-Efficient-Tuning#231", _wrapped_class),
    Lint("text-for-truth", "huggingface/accelerate#1794", _text_for_truth),
    Lint("older-sharding", "huggingface/accelerate#3394", _older_sharding),
)
