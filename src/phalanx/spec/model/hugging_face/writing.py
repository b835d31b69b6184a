"""Write a Hugging Face `config.json`: the fields that several families share."""

from dataclasses import asdict

from phalanx.spec.model.hugging_face.reading import Fields
from phalanx.spec.model.mechanisms import Experts
from phalanx.spec.model.spec import ModelSpec


def sizes(spec: ModelSpec) -> Fields:
    """Return the sizes under the names used by most families."""
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": spec.max_seq,
    }


def llama_fields(spec: ModelSpec) -> Fields:
    """Return the fields that all descendants of Llama share."""
    heads = {"num_key_value_heads": spec.kv_heads, "head_dim": spec.head_dim}
    return sizes(spec) | heads | {"rms_norm_eps": spec.norm_eps, "hidden_act": "silu"} | rope(spec)


def rope(spec: ModelSpec, **more: float) -> Fields:
    """Return rotary positions in both forms: as transformers 5 writes them, and as 4 did."""
    scaling: Fields = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        values = asdict(spec.rope_scaling)
        kind = values.pop("kind")
        names = {
            "linear": (),
            "llama3": ("low_freq_factor", "high_freq_factor", "original_max_seq"),
            "yarn": (
                *("beta_fast", "beta_slow", "attention_factor", "truncate", "original_max_seq"),
                *(("mscale_all_dim",) if spec.latent else ()),
            ),
        }[kind]
        scaling = {
            "rope_type": kind,
            "factor": values["factor"],
            **{k: values[k] for k in names if values[k] is not None},
        }
        if "original_max_seq" in scaling:
            scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq")
    return {
        "rope_parameters": {"rope_theta": spec.rope_theta, **scaling, **more},
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling if spec.rope_scaling is not None else None,
    }


def experts(spec: ModelSpec) -> Experts:
    """Return the experts of a model, which must have some."""
    assert spec.experts is not None
    return spec.experts
