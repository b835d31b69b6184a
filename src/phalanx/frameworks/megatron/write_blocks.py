"""The blocks of a model as Megatron-LM's arguments: a transformer with frequencies of its kinds of attention, or a
hybrid pattern; the inverse of read_blocks.py.

A block of Mamba-2 and an MLP has no argument of its own: it is written as two, `M-`, which compute the same
(Megatron-LM d98e8a6, docs/user-guide/hybrid-model-migration.md, section 1).
"""

from dataclasses import dataclass

from phalanx.frameworks.writing.program import Setting, settings
from phalanx.spec.errors import InputError
from phalanx.spec.model.blocks.attention import AttentionSizes
from phalanx.spec.model.blocks.linear_attention import DeltaSizes
from phalanx.spec.model.blocks.lowering import JOINED, PARALLEL, Mixer, pattern_of
from phalanx.spec.model.blocks.mlp import MlpSizes
from phalanx.spec.model.blocks.state_space import MambaSizes
from phalanx.spec.model.spec import ModelSpec


def refuse(field: str, value: object, reason: str, remedy: str = "use another model") -> InputError:
    """Return the error of a model that Megatron-LM cannot express."""
    return InputError(f"model.{field}", value, f"Megatron-LM has no argument for it: {reason}", remedy)


@dataclass(frozen=True)
class Blocks:
    """A model's blocks as Megatron divides them."""

    symbols: str
    """Symbols of a hybrid pattern, one for each of Megatron's blocks; "": a transformer, which has no pattern."""
    words: tuple[str, ...]
    """The sublayers of each of Megatron's blocks, in the words of a ModelSpec's pattern: `attention+mlp` of a
    transformer, `mamba` of a hybrid pattern."""
    each: tuple[int, ...]
    """The number of Megatron's blocks for each block of the model."""
    of: ModelSpec

    def _mixers(self, kind: type[Mixer]) -> list[Mixer]:
        return [m for m in self.of.mixers if isinstance(m, kind)]

    @property
    def mamba(self) -> MambaSizes | None:
        return next((m for m in self._mixers(MambaSizes) if isinstance(m, MambaSizes)), None)

    @property
    def delta(self) -> DeltaSizes | None:
        return next((m for m in self._mixers(DeltaSizes) if isinstance(m, DeltaSizes)), None)

    def attention(self, word: str) -> AttentionSizes | None:
        """Return the sizes of the softmax attention of this name; None for other sublayers."""
        if word == "attention":
            return AttentionSizes("attention", window=self.of.window)
        mixer = next((m for m in self.of.mixers if m.name == word), None)
        return mixer if isinstance(mixer, AttentionSizes) else None

    def chunks(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of Megatron's blocks of each pipeline chunk, by the number of the
        model's blocks of each."""
        ends, result = 0, []
        for n in blocks:
            result.append(sum(self.each[ends : ends + n]))
            ends += n
        return tuple(result)


def blocks_of(m: ModelSpec) -> Blocks:
    """Return a model's blocks. Raises InputError for what Megatron-LM has no argument for."""
    for mixer in m.mixers:
        _require_sizes(m, mixer)
    if any(PARALLEL in words for words in pattern_of(m)):
        raise refuse("pattern", None, "its sublayers follow each other")
    parts = [words.split(JOINED) for words in pattern_of(m)]
    two = all(len(p) == 2 and p[1] in ("mlp", "experts") and p[0] not in ("mlp", "experts") for p in parts)
    mamba = any(isinstance(x, MambaSizes) for x in m.mixers)
    if m.pattern is None or (two and not mamba):
        return Blocks("", tuple(map(JOINED.join, parts)), (1,) * m.layers, m)
    flat = [word for p in parts for word in p]
    symbols = "".join(_symbol(m, word) for word in flat)
    return Blocks(symbols, tuple(flat), tuple(map(len, parts)), m)


def _symbol(m: ModelSpec, word: str) -> str:
    own = {"mlp": "-", "experts": "E", "attention": "*" if m.latent is None else "D" if m.latent.index else "+"}
    if word in own:
        return own[word]
    return {MambaSizes: "M", DeltaSizes: "G", AttentionSizes: "*", MlpSizes: "-"}[
        type(next(x for x in m.mixers if x.name == word))
    ]


def _require_sizes(m: ModelSpec, x: Mixer) -> None:
    """Require sizes that arguments can express, and the same sizes of a mechanism in all blocks. Raises
    InputError."""
    fixed: dict[str, object] = {}
    match x:
        case MambaSizes():  # core/ssm/mamba_mixer.py:155-180, 276-277
            fixed = {"taps": 4, "chunk": 128, "conv_bias": True, "bias": False}
            fixed |= {} if x.groups == 1 else {"group_norm": True}
        case DeltaSizes():  # fla's kernel has chunks of 64
            fixed = {"chunk": 64}
        case AttentionSizes():
            own = {"heads": m.heads, "kv_heads": m.kv_heads, "head_dim": m.head_dim, "sinks": m.sinks}
            fixed = {name: value for name, value in own.items() if getattr(x, name) is not None}
            fixed |= {"value_dim": None, "shared_values": False}
            if x.rotary_dim and x.rotary_dim != m.rotary_width:
                raise refuse(f"mixers.{x.name}.rotary_dim", x.rotary_dim, "blocks turn all positions, or none")
            if m.latent is not None:
                raise refuse("latent", "set", "attention along with latent attention")
        case MlpSizes():
            fixed = {"ffn": m.ffn}
        case _:
            raise refuse(f"mixers.{x.name}", x.kind, "it has Mamba-2 and gated delta nets")
    for name, value in fixed.items():
        if getattr(x, name) != value:
            raise refuse(f"mixers.{x.name}.{name}", getattr(x, name), f"all of its blocks have {value}")
    if not isinstance(x, AttentionSizes | MlpSizes) and sum(type(other) is type(x) for other in m.mixers) > 1:
        raise refuse(f"mixers.{x.name}", x.kind, "all blocks of a mechanism have the same sizes")
    windows = {o.window for o in m.mixers if isinstance(o, AttentionSizes) and o.window} | {m.window} - {None}
    if len(windows) > 1:
        raise refuse("window", m.window, "all windows are equal")


def block_settings(b: Blocks) -> tuple[Setting, ...]:
    """Return the arguments of the mechanisms in blocks, but for the hybrid pattern, which depends on the pipeline."""
    m = b.of
    attends = [b.attention(word.split(JOINED)[0]) for word in b.words]
    windows = [a is not None and a.window is not None for a in attends]
    if m.pattern is None and m.window is not None:
        windows = [m.window_of(i) is not None for i in range(m.layers)]
    window = next((a.window for a, has in zip(attends, windows, strict=True) if a and has), None)
    bare = [a is not None and a.rotary_dim == 0 for a in attends]
    some_bare = any(bare) and not positionless(b)
    skipped = window is not None and not all(w for a, w in zip(attends, windows, strict=True) if a is not None)
    linear = [word.split(JOINED)[0] == b.delta.name for word in b.words] if b.delta else []
    variant = "gated_delta_net" if linear and not b.symbols else "dsa" if m.latent and m.latent.index else None
    if linear and m.latent and m.latent.index and not b.symbols:
        raise refuse("latent.index", "set", "one kind of attention beyond softmax", "use one")
    return (
        *settings(
            ("--experimental-attention-variant", variant if not b.symbols else None),
            ("--linear-attention-freq", compact(linear) if linear and not b.symbols else None),
            ("--window-size", f"{window - 1},0" if window else None),
            ("--window-attn-skip-freq", compact(windows) if skipped else None),
            ("--no-rope-freq", compact(bare) if some_bare else None),
        ),
        *(_mamba(b.mamba) if b.mamba else ()),
        *(_delta(b.delta) if b.delta else ()),
        *(_index(m) if m.latent and m.latent.index else ()),
    )


def positionless(b: Blocks) -> bool:
    """Whether none of a model's attention has positions."""
    attends = [b.attention(word.split(JOINED)[0]) for word in b.words]
    return b.of.latent is None and all(a.rotary_dim == 0 for a in attends if a is not None)


def compact(blocks: list[bool]) -> str:
    """Write a list of 0 and 1 with repetitions, as Megatron evaluates it: `([1]*3+[0]*1)*12`."""
    n = next(n for n in range(1, len(blocks) + 1) if all(b == blocks[i % n] for i, b in enumerate(blocks)))
    times, rest = divmod(len(blocks), n)
    if times > 1 and not rest:
        return f"({_runs(blocks[:n])})*{times}"
    return _runs(blocks)


def _runs(blocks: list[bool]) -> str:
    parts: list[list[int]] = []
    for has in blocks:
        if parts and parts[-1][0] == has:
            parts[-1][1] += 1
        else:
            parts.append([int(has), 1])
    return "+".join(f"[{value}]*{count}" for value, count in parts)


def _mamba(x: MambaSizes) -> tuple[Setting, ...]:
    return settings(
        ("--mamba-num-heads", x.heads),
        ("--mamba-head-dim", x.head_dim),
        ("--mamba-num-groups", x.groups),
        ("--mamba-state-dim", x.state),
    )


def _delta(x: DeltaSizes) -> tuple[Setting, ...]:
    return settings(
        ("--linear-num-key-heads", x.key_heads),
        ("--linear-num-value-heads", x.value_heads),
        ("--linear-key-head-dim", x.key_dim),
        ("--linear-value-head-dim", x.value_dim),
        ("--linear-conv-kernel-dim", x.taps),
    )


def _index(m: ModelSpec) -> tuple[Setting, ...]:
    assert m.latent is not None
    assert m.latent.index is not None
    i = m.latent.index
    return settings(
        ("--dsa-indexer-n-heads", i.heads), ("--dsa-indexer-head-dim", i.dim), ("--dsa-indexer-topk", i.top)
    )
