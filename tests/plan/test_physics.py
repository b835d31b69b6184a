"""No price breaks what must hold of any machine."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.sizes import examples

from phalanx.plan.explain.analytic import AnalyticSubject
from phalanx.plan.question import cluster_named, model_named, pricing_by_gpus
from phalanx.spec.files.job_file import make_strategy


@st.composite
def _subjects(draw: st.DrawFn) -> AnalyticSubject:
    tp, pp, zero = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 1))
    model, cluster = (
        draw(st.sampled_from(["llama3-8b", "llama2-7b", "llama3-70b"])),
        draw(st.sampled_from(["dgx-h100", "dgx-a100"])),
    )
    line = f"dp={64 // tp // pp},tp={tp},pp={pp},zero={zero},micro_batch={draw(st.sampled_from([1, 2]))}"
    strategy = make_strategy(line)
    assert strategy is not None
    larger = pricing_by_gpus(model_named(model)[0], cluster_named(cluster), 256, 4096, "megatron-core")
    return AnalyticSubject(larger, strategy, 64)


@examples(10, 300)
def test_no_step_is_faster_than_its_products_and_no_rank_holds_less_than_its_weights(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(_subjects())
    def holds(x: AnalyticSubject) -> None:
        assert 0 < x.mfu <= 1
        assert x.hardware_flops >= x.model_flops > 0
        assert x.priced.bytes_ >= 2 * x.model.parameter_count / (x.strategy.tp * x.strategy.pp)

    holds()
