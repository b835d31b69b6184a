"""A kind of block as plain numbers (BlockKind): sizes of its operators' products, activations and parameters; zero
for operators that it does not have."""

from dataclasses import dataclass

import numpy as np

from phalanx.cost.hardware.columns import Column


@dataclass(frozen=True)
class BlockKind:
    """Equal blocks of a model, and their number. Sizes in elements. Blocks that differ only in whether attention has
    a window are one kind, with the share that has it."""

    label: str
    """Its sublayers in words."""
    count: Column
    hidden: Column
    sublayers: Column = 2.0
    """Mixers and MLPs that add to the stream."""
    norms: Column = 2.0
    """Norms of the stream before the sublayers: fewer than these if some share one, or have none."""
    after_norms: Column = 0.0
    """Norms of sublayers' results."""
    streams: Column = 1.0
    """Residual streams, which hyper-connections mix around each sublayer; 1: a plain residual."""
    rms: Column = 1.0
    """1: norms keep one sum per token, the root mean square; 0: mean and variance."""
    parallel: Column = 0.0
    """1: attention and MLP read the same input, and their outputs are summed (parallel residual)."""

    heads: Column = 0.0
    """Query heads of softmax attention; 0: there is none."""
    kv_heads: Column = 0.0
    head_dim: Column = 0.0
    value_dim: Column = 0.0
    kv_width: Column = 0.0
    """Elements that a key head's products write: keys and values, or only keys if these are the values too."""
    core_dim: Column = 0.0
    """Width of a head in attention's core: that of keys or values, whichever is wider."""
    q_rank: Column = 0.0
    kv_rank: Column = 0.0
    rope_dim: Column = 0.0
    window_share: Column = 0.0
    """Share of these blocks with an attention window, of `window` tokens."""
    window: Column = 0.0
    top: Column = 0.0
    """Most keys per query that an index selects; 0: all."""
    ratio: Column = 0.0
    """Tokens per compressed key; queries see these keys in addition to the nearest `window`. Infinite: there are
    none; 0: other attention."""
    normed_heads: Column = 0.0
    """1: queries and keys are normed."""
    gate: Column = 0.0
    """Elements of an output gate."""
    result_low: Column = 0.0
    """Width of attention's low-rank result, before the last product; 0: the result is not in low rank."""
    result_rank: Column = 0.0
    """The part of that width which a group of heads is projected to."""
    index: Column = 0.0
    """Multiply-adds per token of products that every tp rank computes: an index's, and products that pool keys."""
    index_pair: Column = 0.0
    """Multiply-adds of an index for each pair of a query and a key."""
    index_kept: Column = 0.0
    """Elements per token that these products keep."""

    scan_heads: Column = 0.0
    """Heads of a linear recurrence; 0: there is none."""
    scan_dim: Column = 0.0
    """Width of a head's value; its state is `scan_state` times as large."""
    scan_state: Column = 0.0
    scan_groups: Column = 0.0
    """Groups of heads that share keys and queries."""
    scan_in: Column = 0.0
    """Elements per token that the recurrence reads, without `scan_shared`, which heads of a group share."""
    scan_shared: Column = 0.0
    scan_chunk: Column = 1.0
    """Tokens of a chunk."""
    scan_pairs: Column = 0.0
    """1: the recurrence is a delta rule, which has more products of pairs in a chunk and solves a triangular
    system."""
    scan_flops: Column = 0.0
    """FLOPs per token, token by token, as Megatron-LM counts a model's."""
    scan_sums: Column = 0.0
    """Elements per token that a recurrence reads and that are sums over tp ranks."""
    conv: Column = 0.0
    """Multiply-adds per token of causal convolutions; `conv_channels`: their channels."""
    conv_channels: Column = 0.0
    mixed: Column = 0.0
    """Elements that the first product of a mixer without softmax attention writes; `mixed_shared`: the part of them
    that ranks beyond the groups hold copies of; `mixed_whole`: the part that every tp rank computes."""
    mixed_shared: Column = 0.0
    mixed_whole: Column = 0.0
    mixed_low: Column = 0.0
    """Multiply-adds per token of the mixer's products from those parts."""
    mixed_out: Column = 0.0
    """Elements that the mixer's last product reads."""
    mixed_kept: Column = 0.0
    """Elements of 2 bytes that the mixer keeps; elements in copies are in `mixed_shared_kept`."""
    mixed_shared_kept: Column = 0.0

    ffn: Column = 0.0
    """Width of a dense MLP; 0: there is none."""
    mlp_matrices: Column = 2.0
    """3 with a gate, else 2, in experts too."""
    experts: Column = 0.0
    """Number of experts; 0: there are none."""
    top_k: Column = 0.0
    expert_ffn: Column = 0.0
    expert_dim: Column = 0.0
    """Width of the experts' input: the stream's, or of their latent space."""
    shared_ffn: Column = 0.0
    shared_gate: Column = 0.0
    """1: a gate of one number scales the shared expert."""
    capacity: Column = 0.0
    """Capacity factor of experts; 0: unlimited."""
    experts_choose: Column = 0.0
    """1: experts choose tokens."""
    gathers_choices: Column = 0.0
    """Bytes per token that ranks sharing sequences gather if a choice depends on a sequence's other tokens; else
    0."""
    router_scores: Column = 0.0
    """Numbers per token that a router keeps as scores and weights."""
    router_places: Column = 0.0
    """Bytes per token kept by a router for choices and destinations."""

    params: Column = 0.0
    """Parameters of a block without routed experts."""
    expert_params: Column = 0.0
    """Parameters of all its routed experts."""
    whole: Column = 0.0
    """Number of `params` replicated over tp: norms, biases after a sum, latent projections, the router."""
    kv: Column = 0.0
    """Number of `params` in key and value heads; every rank holds at least one head."""
    own: Column = 0.0
    """Number of `whole` whose gradient on a tp rank covers only its own heads or tokens: latent projections, norms
    inside attention, the router."""
    matrices: Column = 0.0
    """Number of matrices of a block's products, which may be gathered in 8 bits, without experts';
    `expert_matrices`: of one expert."""
    expert_matrices: Column = 0.0
    others: Column = 0.0
    """Number of `params` outside of these matrices: norms, biases, the router."""
    expert_others: Column = 0.0
    """The same among `expert_params`."""
    others_whole: Column = 0.0
    """Number of `others` replicated over tp."""
    others_kv: Column = 0.0
    """Number of `others` in key and value heads."""

    @property
    def attends(self) -> Column:
        """1 where it has softmax attention."""
        return 1.0 * (np.asarray(self.heads) > 0)

    @property
    def recurs(self) -> Column:
        """1 where it has a linear recurrence."""
        return 1.0 * (np.asarray(self.scan_heads) > 0)

    @property
    def mixes(self) -> Column:
        """1 where it has a mixer without softmax attention: a recurrence, or only a convolution."""
        return 1.0 * (np.asarray(self.mixed) > 0)

    @property
    def routes(self) -> Column:
        """1 where it has experts."""
        return 1.0 * (np.asarray(self.experts) > 0)

    @property
    def all_params(self) -> Column:
        """Parameters of a block."""
        return self.params + self.expert_params

    @property
    def active_params(self) -> Column:
        """Parameters that take part in a token's forward pass, with `top_k` of the experts."""
        return self.params + self.expert_params * self.top_k / np.maximum(self.experts, 1)

    @property
    def latent(self) -> Column:
        """1 where queries or keys come from latents."""
        return 1.0 * (np.asarray(self.kv_rank) + self.q_rank > 0)

    @property
    def result(self) -> Column:
        """Elements that attention's last product reads."""
        return np.where(np.asarray(self.result_low) > 0, self.result_low, self.heads * self.value_dim)

    @property
    def mixing(self) -> Column:
        """Multiply-adds per token that compute the weights of hyper-connections: n^2 + 2 n weights of n streams (Xie
        et al. 2025, section 4.2), for each sublayer."""
        n = np.where(np.asarray(self.streams) > 1, self.streams, 0.0)
        return self.sublayers * (n + 2) * n * n * self.hidden

    @property
    def copied_groups(self) -> Column:
        """Number of key heads, or groups of a recurrence, of which ranks hold copies if there are more ranks."""
        return np.where(np.asarray(self.heads) > 0, self.kv_heads, self.scan_groups)

    def on_rank(self, tp: Column) -> Column:
        """Return the number of `params` on each of `tp` ranks (spec/strategy/split.py)."""
        return on_rank(self.params, self.whole, self.kv, self, tp)

    def others_on_rank(self, tp: Column) -> Column:
        """Return the number of `others` on each of `tp` ranks."""
        return on_rank(self.others, self.others_whole, self.others_kv, self, tp)


def on_rank(params: Column, whole: Column, kv: Column, kind: BlockKind, tp: Column) -> Column:
    """Return the number of a block's parameters on each of `tp` ranks."""
    return (params - whole - kv) / tp + kv / np.minimum(tp, np.maximum(kind.copied_groups, 1)) + whole


def groups_on_rank(groups: Column, tp: Column) -> Column:
    """Return the number of groups on a tp rank: if there are fewer than ranks, neighbours hold copies of one."""
    return np.maximum(np.floor(groups / tp), 1.0)
