"""The results of a block that a `remat_policy` of MaxText keeps for the backward pass; others are computed again.

Products and attention's result have names, and a policy is a set of names (src/maxtext/layers/decoders.py:346). Norms
and activations have none; names of experts' products (moe_mlpwi_0) are in no set but `custom`. Policies that keep
whole parts of a block are in the stack's facts.
"""

from phalanx.frameworks.configuration import Keys

_AROUND = ("query_proj", "key_proj", "value_proj", "out_proj")
_GATES = ("mlpwi_0", "mlpwi_1")
_ALWAYS_REPEATED = ("qkv_proj", "mlpwo", "decoder_layer_input")
_OFFLOADED = {"minimal_offloaded": "minimal", "qkv_proj_offloaded": "save_qkv_proj"}
"""Policies that keep results on the host (src/maxtext/utils/maxtext_utils.py:229) -> the policy that keeps the same
results on the device."""


def policy(keys: Keys, word: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the policy that keeps the same results as the file's, all on the device, and a note where that differs
    from the file. `word`: the file's policy."""
    hosted: tuple[str, ...] = ("its results",) if word in _OFFLOADED else ()
    if word == "custom":
        word, hosted = _custom(keys)
    if not hosted:
        return word, ()
    return _OFFLOADED.get(word or "", word), (
        f"what remat_policy keeps on the host ({', '.join(hosted)}) is priced as kept on the device: memory is lower",
    )


def _custom(keys: Keys) -> tuple[str, tuple[str, ...]]:
    """Return the policy of the whole parts of a block that `custom` keeps, and the names that it keeps on the
    host."""
    names = (*_AROUND, *_GATES, *_ALWAYS_REPEATED, "mlpwi", "context")
    where = {name: str(keys.take(name, "strategy.recompute", "remat")) for name in names}
    kept = {name for name, place in where.items() if place in ("device", "offload")}
    around = "out_proj" in kept and ("qkv_proj" in kept or {*_AROUND} <= kept)
    inside = "mlpwi" in kept or {*_GATES} <= kept
    if not around:
        word = "full"
    elif "context" in kept:
        word = "minimal_with_context" if inside else "save_dot_with_context_except_mlp"
    else:
        word = "minimal" if inside else "save_dot_except_mlp"
    return word, tuple(name for name, place in where.items() if place == "offload")
