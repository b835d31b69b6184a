"""The sublayers of a model's blocks by Megatron-LM's arguments: a hybrid pattern, or a transformer some of whose
blocks have a gated delta net, a window or no positions (lines of Megatron-LM d98e8a6)."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from phalanx.frameworks.megatron.patterns import WORDS, Flag, HybridPattern
from phalanx.frameworks.values import count
from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.attention import AttentionSizes
from phalanx.spec.model.blocks.linear_attention import DeltaSizes
from phalanx.spec.model.blocks.lowering import Mixer
from phalanx.spec.model.blocks.state_space import MambaSizes
from phalanx.spec.model.mechanisms import MOST_LAYERS, SparseIndex

_VARIANTS = {"gated_delta_net": "gdn"}
"""Older names of --experimental-attention-variant (transformer_config.py:301-309)."""


def variant(flag: Flag) -> str:
    """Return the kind of attention beyond softmax: gdn, dsa, another word, or "" for none."""
    word = flag("experimental_attention_variant", "model.pattern")
    return "" if word is None else _VARIANTS.get(str(word), str(word))


def hybrid(flag: Flag, hidden: int, pattern: HybridPattern, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a ModelSpec with a hybrid pattern. `fields`: those that other arguments state. Raises
    InputError for sizes that contradict each other."""
    sparse = "D" in pattern.symbols
    if sparse and "+" in pattern.symbols:
        reason = "has latent attention with an index and without, which no ModelSpec has"
        raise InputError("model.pattern", pattern.symbols[:80], reason)
    if sparse:
        fields = fields | {"latent": replace(fields["latent"], index=_index(flag))}
    words, window = _attention_words(flag, [WORDS[symbol] for symbol in pattern.symbols])
    return fields | {"window": window} | _pattern(flag, hidden, words)


def transformer(flag: Flag, hidden: int, dense: Sequence[int], fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a ModelSpec whose blocks have attention or a gated delta net, and an MLP or experts; None
    for frequencies that cannot be read. `dense`: blocks without experts; `fields`: those that other arguments
    state."""
    layers, kind = fields["layers"], variant(flag)
    if kind == "dsa":
        if (latent := fields["latent"]) is None:
            raise InputError("--experimental-attention-variant", "dsa", "needs --multi-latent-attention")
        fields = fields | {"latent": replace(latent, index=_index(flag))}
    written = flag("linear_attention_freq", "model.pattern")
    linear = frequency(written, layers) if kind == "gdn" else [False] * layers
    if linear is None:
        return None
    mixing, window = _attention_words(flag, ["delta" if has else "attention" for has in linear])
    fields = fields | {"window": window}
    if set(mixing) == {"attention"}:
        return fields
    if set(mixing) <= {"attention", "window"}:
        narrow = tuple(i for i, word in enumerate(mixing) if word == "window")
        return fields | {"window": window_tokens(flag), "window_layers": narrow}
    experts = fields["experts"]
    ends = ["mlp" if experts is None or i in dense else "experts" for i in range(layers)]
    if experts is not None:
        fields = fields | {"experts": replace(experts, dense_layers=())}
    return fields | _pattern(flag, hidden, [f"{m}+{e}" for m, e in zip(mixing, ends, strict=True)])


def _pattern(flag: Flag, hidden: int, words: list[str]) -> dict[str, Any]:
    """Return the fields `pattern`, the shortest one that repeats to the words of all blocks, and `mixers`, the sizes
    of the sublayers that it names."""
    n = next(n for n in range(1, len(words) + 1) if words[:n] * (len(words) // n) == words)
    named = {word for words in words[:n] for word in words.split("+")}
    mixers: list[Mixer] = []
    if "mamba" in named:
        mixers.append(_mamba(flag, hidden))
    if "delta" in named:
        mixers.append(_delta(flag))
    for name in ("window", "nope", "window_nope"):
        if name in named:
            window = window_tokens(flag) if "window" in name else None
            mixers.append(AttentionSizes(name, window=window, rotary_dim=0 if "nope" in name else None))
    return {"pattern": tuple(words[:n]), "mixers": tuple(mixers)}


def _attention_words(flag: Flag, words: list[str]) -> tuple[list[str], int | None]:
    """Return the words of blocks with each `attention` by its kind: attention, window, nope (without positions) or
    window_nope; and the window of the model, where all blocks of attention have it."""
    layers = len(words)
    own = [i for i, word in enumerate(words) if word == "attention"]
    window = window_tokens(flag)
    skips, bare = flag("window_attn_skip_freq", "model.window_layers"), flag("no_rope_freq", "model.pattern")
    # 1 is a block with the window (transformer/utils.py:531-542), but one without positions (attention.py:1322).
    narrow = [window is not None] * layers
    if skips is not None and window is not None:
        narrow = frequency(skips, layers) or narrow
    without = [False] * layers if bare is None or count(bare) else frequency(bare, layers)
    if every := count(bare):
        without = [(i + 1) % every == 0 for i in range(layers)]
    if without is None:
        raise InputError("--no-rope-freq", str(bare)[:80], f"is not a list of {layers} blocks")
    shared = all(narrow[i] and not without[i] for i in own)
    name = {(False, False): "attention", (True, False): "window", (False, True): "nope", (True, True): "window_nope"}
    kinds = [name[narrow[i] and not shared, without[i]] for i in range(layers)]
    result = [k if word == "attention" else word for word, k in zip(words, kinds, strict=True)]
    return result, window if shared else None


def frequency(value: Any, layers: int) -> list[bool] | None:
    """Return for each block whether it has a mechanism, by a frequency: of a number n all but every n-th, of a list
    such as `([1]*3+[0])*12` those with 1; None: it cannot be read."""
    if layers > MOST_LAYERS:
        return None
    if every := count(value):
        return [(i + 1) % every != 0 for i in range(layers)]
    numbers = zeros_and_ones(value)
    return [n == 1 for n in numbers] if numbers is not None and len(numbers) == layers else None


def zeros_and_ones(value: Any) -> list[int] | None:
    """Return a list of 0 and 1 that is written in Python, with sums and repetitions: `([1]*3+[0])*12`; None for
    others."""
    try:
        return _evaluated(ast.parse(str(value), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> list[int]:
    if isinstance(node, ast.List):
        values = [x.value for x in node.elts if isinstance(x, ast.Constant) and x.value in (0, 1)]
        if len(values) == len(node.elts):
            return [int(v) for v in values]  # type: ignore[arg-type]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _evaluated(node.left) + _evaluated(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        times = node.right.value
        if isinstance(times, int) and 0 <= times <= MOST_LAYERS:
            return (_evaluated(node.left) * times)[:MOST_LAYERS]
    raise ValueError("no list of blocks")


def window_tokens(flag: Flag) -> int | None:
    """Return the tokens of a sliding window: 128 of `--window-size 127,0`, which counts tokens before the present
    one; None without one."""
    value = flag("window_size", "model.window")
    words = value if isinstance(value, list | tuple) else str(value or "").strip("()").split(",")
    before = count(words[0]) if words and words[0] != "" else None
    return before + 1 if before else None


def _sizes(flag: Flag, names: dict[str, int]) -> list[int]:
    return [count(flag(name, "model.mixers", default)) or default for name, default in names.items()]


def _mamba(flag: Flag, hidden: int) -> MambaSizes:
    """Return the sizes of Mamba-2 (transformer_config.py:1259-1270, core/ssm/mamba_mixer.py:155-180, 250-253)."""
    width, groups, state = _sizes(flag, {"mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128})
    heads = count(flag("mamba_num_heads", "model.mixers")) or 2 * hidden // width
    return MambaSizes("mamba", heads, width, groups, state)


def _delta(flag: Flag) -> DeltaSizes:
    """Return the sizes of gated delta nets (transformer_config.py:370-382)."""
    key_heads, value_heads = _sizes(flag, {"linear_num_key_heads": 16, "linear_num_value_heads": 32})
    key, value = _sizes(flag, {"linear_key_head_dim": 128, "linear_value_head_dim": 128})
    return DeltaSizes(
        "delta", key_heads, value_heads, key, value, count(flag("linear_conv_kernel_dim", "model.mixers")) or 4
    )


def _index(flag: Flag) -> SparseIndex:
    """Return the indexer of sparse attention (transformer_config.py:317-328)."""
    values = [count(flag(f"dsa_indexer_{name}", "model.latent.index")) for name in ("n_heads", "head_dim", "topk")]
    if None in values:
        raise InputError("--dsa-indexer-topk", None, "is missing, with the heads of the indexer or their width")
    if (count(flag("dsa_indexer_topk_freq", "model.latent.index", 1)) or 1) > 1:
        raise InputError("--dsa-indexer-topk-freq", None, "shares keys over blocks, which no ModelSpec has")
    heads, width, top = values
    return SparseIndex(heads, width, top)  # type: ignore[arg-type]
