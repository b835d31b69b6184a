"""FLOPs and messages of blocks of any operators are those that the model's own passes have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from support.sizes import drawn
from support.strategies import mixed
from support.unit_bytes import flops_of, measured, sends

from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.job import Job, Precision
from phalanx.spec.model.families import complete
from phalanx.spec.model.modules import require_modules
from phalanx.spec.model.spec import ModelSpec, units
from phalanx.spec.strategy.legality import require_context
from phalanx.spec.strategy.spec import Strategy
from phalanx.spec.strategy.split import require_split

STRATEGIES = [Strategy(), Strategy(tp=2), Strategy(tp=2, sp=True), Strategy(tp=4), Strategy(tp=4, sp=True)]
STRATEGIES += [Strategy(cp=2), Strategy(cp=4, ulysses=2), Strategy(tp=2, sp=True, cp=2)]


@drawn(
    12,
    300,
    mixed(small=True),
    st.sampled_from(STRATEGIES),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from([8, 24, 40]),
    st.sampled_from(["float32", "float64", "bfloat16"]),
)
def test_as_the_model_runs(spec: ModelSpec, s: Strategy, recompute: str, seq: int, dtype: str) -> None:
    try:
        require_modules(spec, s.cp)
        require_split(spec, s)
        require_context(spec, seq, s)
        require_modules(spec, s.cp)
    except InputError:
        assume(False)
    spec = replace(spec, tied=False)  # whose product is multiplied when the embedding's rows are ready
    _agree(spec, Job(2, seq, Precision(dtype)), replace(s, micro_batch=2, recompute=recompute))  # type: ignore[arg-type]


@pytest.mark.parametrize("seq", [4, 8])
def test_an_index_scores_keys_where_it_chooses_among_them(seq: int) -> None:
    index = {"heads": 3, "dim": 6, "top": 4}
    latent = {"kv_rank": 4, "nope_dim": 6, "rope_dim": 2, "v_dim": 4, "q_rank": 12, "index": index}
    sizes = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 1, "heads": 4, "ffn": 48, "max_seq": 64}
    spec = build(ModelSpec, complete(sizes | {"latent": latent}), "model")
    for s in (Strategy(), Strategy(tp=2), Strategy(recompute="full")):
        _agree(spec, Job(2, seq), replace(s, micro_batch=2))


def _agree(spec: ModelSpec, job: Job, s: Strategy) -> None:
    seq = job.seq
    found, t = measured(spec, job, s, 0, split=False), 2 * seq // s.cp
    for unit in units(spec):
        of_unit = flops_of(spec, job, s, unit, t)
        for phase in ("F", "B"):
            assert found.flops[phase, unit] == of_unit[phase], (unit, phase)
            expected = list(sends(spec, job, s, unit, phase, t))
            assert found.sent.get((phase, unit), []) == expected, (unit, phase)
