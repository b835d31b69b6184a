"""Exposed seconds of expert parallelism in a block: dispatch and combine, permutation, the router, and waiting for
the rank whose experts got the most tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from phalanx.cost.analytic.flow_times import seconds_of
from phalanx.cost.analytic.kernels import Passes
from phalanx.cost.analytic.profile import Profile
from phalanx.cost.hardware.columns import Column
from phalanx.cost.hardware.system import System
from phalanx.cost.ledger.flow import Flow
from phalanx.cost.ledger.kind import BlockKind
from phalanx.cost.ledger.layer_flows import routed_rows
from phalanx.cost.ledger.rank_layout import LayoutColumns


def expert_parallel(
    flows: Sequence[Flow],
    kind: BlockKind,
    layout: LayoutColumns,
    system: System,
    profile: Profile,
    products: Passes,
    compute: Passes,
) -> Passes:
    """Return exposed seconds of expert parallelism in one block: all-to-alls (dispatch and combine), permutation on
    both sides, the router, the overhead of each of a rank's experts, and waiting for the rank whose experts got the
    most tokens (`products`: the experts'; `compute`: all of a block's)."""
    forward: Column = 0.0
    backward: Column = 0.0
    for flow in flows:
        flow_s = seconds_of(dispatch_flow(flow, kind, layout, system, profile), system)
        forward, backward = forward + flow.count("F") * flow_s, backward + flow.count("B") * flow_s
    if np.any(profile.overlaps_experts):
        # Another micro-batch's products run meanwhile; the uncovered part is exposed, and the products are slowed.
        slowed, overlaps = profile.contention - 1, np.asarray(profile.overlaps_experts) > 0
        forward, backward = (
            np.where(overlaps, np.maximum(sent - own, 0) + slowed * np.minimum(sent, own), sent)
            for sent, own in ((forward, compute.forward), (backward, compute.backward))
        )
    fixed = permutation_s(_permuted_rows(kind, layout), kind, system, profile)
    expert_s = profile.expert_s * np.maximum(kind.experts / layout.ep, 1)
    shown, waits = 1 - profile.ep_overlap, np.where(np.asarray(layout.ep) > 1, profile.imbalance, 0.0)
    most = most_loaded(kind, layout, profile)
    return Passes(
        (forward * shown + fixed) * (1 + most) + expert_s + (waits + most) * products.forward,
        (backward * shown + fixed) * (1 + most) + 2 * expert_s + (waits + most) * products.backward,
    )


def repeated_experts(
    kind: BlockKind, layout: LayoutColumns, system: System, profile: Profile, products: Column
) -> Column:
    """Return the forward seconds of what recomputation by operation repeats of a block's experts on the most loaded
    rank: all but the exchange of tokens, since grouped products are not among the operations whose results are saved
    (torchtitan c4e2291, torchtitan/models/deepseek_v3/infra/parallelize.py; b5bcd76, distributed/
    activation_checkpoint.py:31)."""
    fixed = permutation_s(_permuted_rows(kind, layout), kind, system, profile)
    return (1 + most_loaded(kind, layout, profile)) * (products + fixed)


def _permuted_rows(kind: BlockKind, layout: LayoutColumns) -> Column:
    """Return the rows that a rank permutes: of an expert cut over etp ranks, the rows that all of them gathered."""
    return routed_rows(kind, layout, np.maximum(kind.experts, 1)) * (1 + np.asarray(layout.etp)) / 2


def most_loaded(kind: BlockKind, layout: LayoutColumns, profile: Profile) -> Column:
    """Return the excess over the mean of the tokens of the most loaded rank's experts, as a share of the mean.

    With n = experts / ep experts on a rank, independent, each of relative standard deviation `spread`, a rank's
    tokens deviate by spread / sqrt(n); the largest of ep such deviations is E[max of ep normal ones] of them. That is
    Blom's (1958) quantile at (ep - 3/8) / (ep + 1/4), by Tukey's lambda of 0.14."""
    if not np.any(profile.spread):
        return 0.0
    ranks = np.asarray(layout.ep)
    p = (ranks - 0.375) / (ranks + 0.25)
    largest = np.where(ranks > 1, 4.91 * (p**0.14 - (1 - p) ** 0.14), 0.0)
    return profile.spread * largest / np.sqrt(np.maximum(kind.experts / layout.ep, 1))


def permutation_s(rows: Column, kind: BlockKind, system: System, profile: Profile) -> Column:
    """Return the seconds of the router, and of permuting `rows` rows to their experts or back."""
    moved = profile.token_bytes * rows * kind.expert_dim
    return moved / (system.memory_bytes_per_s * system.memory) + profile.router_s


def dispatch_flow(flow: Flow, kind: BlockKind, layout: LayoutColumns, system: System, profile: Profile) -> Flow:
    """Return the operation that carries tokens to their experts, or back, as the stack sends it: an all-to-all with
    one copy per expert, or per node (within a node: per rank) that has any (DeepEP; of `k` experts drawn from `n`
    nodes, n (1 - (1 - 1/n)^k) are distinct); or all tokens to every rank."""
    if flow.op != "all_to_all" or flow.axis != "ep":
        return flow
    k = np.maximum(kind.top_k, 1)
    if np.any(profile.sends_once):
        node = system.tiers[0].ranks
        places = np.where(layout.ep * layout.etp > node, np.ceil(layout.ep * layout.etp / node), layout.ep)
        distinct = places * (1 - (1 - 1 / places) ** k) / k
        flow = replace(flow, bytes=flow.bytes * np.where(profile.sends_once > 0, np.minimum(distinct, 1.0), 1.0))
    if np.any(profile.gathers_tokens):
        return replace(flow, op="all_gather", bytes=flow.bytes / k * layout.ep)
    return flow
