"""Case studies: published trainings, the strategy that each used, and what a search chooses instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from phalanx.planning.lookup import cluster_named, model_named, pricing_by_gpus
from phalanx.planning.search import refine, why_not
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.planner import best_on
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.why_not import TERM_NAMES
from phalanx.planning.tables.table import Sheet, columns
from phalanx.schedule.pipeline.stages import check
from phalanx.spec.files.job_file import make_strategy
from phalanx.spec.strategy.spec import Strategy


@dataclass(frozen=True)
class CaseStudy:
    """A published training."""

    name: str
    model: str
    cluster: str
    gpus: int
    batch: int
    seq: int
    used: str
    """The strategy that was used; "" if its layout is not published."""
    stack: str
    """The software stack that prices it."""
    measured_s: float | None
    """Published step time, seconds; None if there is none for this hardware and number format."""
    source: str
    note: str = ""
    """What is unpublished, or differs here."""
    gpu_hours: float | None = None
    """Published GPU-hours of all `tokens`."""
    tokens: float | None = None


def _llama(size: str, hours: int, tokens: float) -> CaseStudy:
    """A case from the GPU-hours and tokens of Touvron et al. 2023a, table 15 and section 2; batches of 4 M tokens."""
    gpus, batch, seq = 2048, 2048, 2048
    return CaseStudy(
        f"LLaMA {size}",
        f"llama-{size.lower()}",
        "dgx-a100",
        gpus,
        batch,
        seq,
        "",
        "eager",
        hours * 3600 / gpus / (tokens / (batch * seq)),
        "Touvron et al. 2023a, table 15: GPU-hours over all tokens",
        "its layout is not published" + ("" if size == "65B" else ", nor how many GPUs: 2,048 as for 65B"),
        hours,
        tokens,
    )


CASES = (
    CaseStudy(
        "GPT-3 175B",
        "gpt3-175b",
        "dgx-a100",
        64,
        64,
        2048,
        "tp=8,sp=1,pp=8,virtual=3,schedule=interleaved,recompute=selective",
        "megatron-2022",
        13.75,
        "Korthikanti et al. 2022, tables 3 and 5",
        "OpenAI's own layout was never published: this is Megatron's",
    ),
    CaseStudy(
        "MT-NLG 530B",
        "mt-nlg-530b",
        "dgx-a100",
        2240,
        1920,
        2048,
        "dp=8,tp=8,pp=35,recompute=full",
        "megatron-deepspeed-2022",
        60.1,
        "Smith et al. 2022, section 2.3",
    ),
    CaseStudy(
        "GPT 1T",
        "gpt-1t",
        "dgx-a100",
        3072,
        3072,
        2048,
        "dp=6,tp=8,pp=64,recompute=full",
        "megatron-2021",
        102.6,
        "Narayanan et al. 2021, table 1",
    ),
    _llama("7B", 82_432, 1e12),
    _llama("13B", 135_168, 1e12),
    _llama("33B", 530_432, 1.4e12),
    _llama("65B", 1_022_362, 1.4e12),
    CaseStudy(
        "LLaMA 2 70B",
        "llama2-70b",
        "dgx-a100",
        2048,
        1024,
        4096,
        "",
        "eager",
        1_720_320 * 3600 / 2048 / (2e12 / (1024 * 4096)),
        "Touvron et al. 2023b, table 2: GPU-hours over all tokens",
        "neither its layout nor how many GPUs is published: 2,048 here",
        1_720_320,
        2e12,
    ),
    CaseStudy(
        "PaLM 540B",
        "palm-540b",
        "dgx-a100",
        6144,
        2048,
        2048,
        "",
        "megatron-core",
        None,
        "Chowdhery et al. 2022, section 4 and table 3",
        "there on 6,144 TPU v4, 12-way model and 256-way sharded data parallel in each of two pods, 46.2 % MFU: of "
        "TPUs no rates are known here",
    ),
    CaseStudy(
        "Llama 3 70B",
        "llama3-70b",
        "dgx-h100",
        1024,
        2048,
        8192,
        "dp=32,zero=1,tp=4,sp=1,cp=2,pp=4,virtual=5,schedule=interleaved",
        "nemo-25.04",
        14.86,
        "NVIDIA dgxc-benchmarking, llama3.1/README_70b.md",
    ),
    CaseStudy(
        "Llama 3 405B",
        "llama3-405b",
        "dgx-h100",
        8192,
        2048,
        8192,
        "dp=64,zero=2,tp=8,sp=1,pp=16,virtual=8,schedule=interleaved",
        "megatron-core",
        None,
        "Grattafiori et al. 2024, table 4 (43 % MFU)",
        "virtual is not published: one block per chunk; its first and last rank have a block less than others",
    ),
    CaseStudy(
        "Llama 3 405B, 128 k",
        "llama3-405b",
        "dgx-h100",
        16384,
        128,
        131072,
        "dp=8,zero=2,tp=8,sp=1,cp=16,pp=16,virtual=8,schedule=interleaved",
        "megatron-core",
        None,
        "Grattafiori et al. 2024, table 4 (38 % MFU)",
        "keys and values are gathered there, not passed round; virtual as above",
    ),
    CaseStudy(
        "Mixtral 8x7B",
        "mixtral-8x7b",
        "dgx-h100",
        64,
        256,
        4096,
        "dp=16,zero=1,ep=8,pp=4,virtual=8,schedule=interleaved",
        "megatron-core",
        None,
        "Megatron-LM, core/transformer/moe/README.md",
        "Mistral's own layout was never published: this is Megatron's",
    ),
    CaseStudy(
        "DeepSeek-V2",
        "deepseek-v2",
        "dgx-h800",
        1024,
        9216,
        4096,
        "dp=64,zero=1,ep=8,pp=16,schedule=zb-h1",
        "megatron-core-flash2",
        172_800 * 3600 / 1024 / (1e12 / (9216 * 4096)),
        "DeepSeek-AI 2024a, section 3.1 (attention on FlashAttention 2): GPU-hours per 10^12 tokens",
        "how many GPUs is not published: 1,024 here; which of a block's values are kept is not either",
        172_800 * 8.1,
        8.1e12,
    ),
    CaseStudy(
        "Llama 3 8B, 1 M tokens",
        "llama3-8b",
        "dgx-h100",
        64,
        4,
        2**20,
        "zero=3,cp=64,recompute=full",
        "megatron-core",
        None,
        "Liu et al. 2023: one ring of all ranks, blocks repeated",
        "the recipe of ring attention; no such training of this model is published with its step",
    ),
    CaseStudy(
        "DeepSeek-V3",
        "deepseek-v3",
        "dgx-h800",
        2048,
        15360,
        4096,
        "dp=128,zero=1,ep=64,pp=16,recompute=full",
        "megatron-core",
        None,
        "DeepSeek-AI 2024b, section 3.2",
        "there on H800, in fp8, with DualPipe, and only norms and projections repeated; ran at 19.9 s a step",
        2_664_000,
        14.8e12,
    ),
)


@dataclass(frozen=True)
class CaseResult:
    """The strategy that was used and the one that a search chooses, priced, with seconds of a step.

    The seconds time the pipeline action by action. `used` is None if not published, `chosen` if nothing fits."""

    case: CaseStudy
    used: PricedStrategy | None
    used_s: float | None
    chosen: PricedStrategy | None
    chosen_s: float | None
    why: str


def study(case: CaseStudy) -> CaseResult:
    """Price the strategy that was used, and search for a better one.

    Raises InputError if the strategy that was used is not legal."""
    pricing = question(case)
    used, seconds = None, None
    if case.used:
        s = strategy(case)
        check(s, pricing.model, pricing.job, case.gpus)
        ((used, _),) = refine.refined(pricing, [s])
        seconds = used.seconds
    best = best_on(pricing, case.gpus)
    if best is None:
        return CaseResult(case, used, seconds, None, None, "nothing fits here")
    why = _why(used, best.priced, pricing) if used else case.note
    return CaseResult(case, used, seconds, best.priced, best.seconds, why)


def question(case: CaseStudy) -> Pricing:
    """Return the model, cluster and job of a case, to be priced under its stack."""
    model, _ = model_named(case.model)
    if case.seq > model.max_seq:  # the training extended the model's context
        model = replace(model, max_seq=case.seq)
    return pricing_by_gpus(model, cluster_named(case.cluster), case.batch, case.seq, case.stack)(case.gpus)


def strategy(case: CaseStudy) -> Strategy:
    """Parse the strategy that a case used."""
    parsed = make_strategy(case.used)
    assert parsed is not None
    return parsed


def _why(used: PricedStrategy, chosen: PricedStrategy, pricing: Pricing) -> str:
    """Name the terms on which the chosen strategy saves most."""
    if not used.fits:
        return f"as used it {why_not.why_not(used, None, pricing)}"
    saved = {name: used.terms[name] - chosen.terms.get(name, 0.0) for name in used.terms}
    most = sorted(saved, key=lambda name: -saved[name])[:2]
    return ", ".join(
        f"{TERM_NAMES[name]} {saved[name] / used.seconds:.0%} less"
        for name in most
        if saved[name] > 0.005 * used.seconds
    )


def sheet(studied: Sequence[CaseResult] | None = None) -> Sheet:
    """Tabulate `studied`, by default all cases."""
    results: Iterable[CaseResult] = map(study, CASES) if studied is None else studied
    rows = []
    for x in results:
        c = x.case
        rows.append(
            (
                f"{c.name}, {c.gpus:,} x {c.cluster}",
                c.used or "not published",
                c.measured_s,
                x.used_s,
                str(x.chosen.strategy) if x.chosen else "none",
                x.chosen_s,
                x.why,
            )
        )
    return Sheet(
        "published trainings: what was used, and what a search chooses",
        columns(
            "training", "used", ("measured", "s"), ("predicted", "s"), "chosen", ("chosen, predicted", "s"), "because"
        ),
        rows,
        "; ".join(f"{c.name}: {c.source}" + (f" ({c.note})" if c.note else "") for c in CASES),
    )


_PRICE = 2.0
"""Dollars a GPU-hour, as DeepSeek-AI 2024b reckons."""


def published() -> Sheet:
    """Tabulate what was published of all cases: the layout, and what the GPU-hours come to."""
    rows = []
    for c in CASES:
        hours = c.gpu_hours
        days = (None, None) if hours is None else (hours / 1000 / 24, hours / c.gpus / 24)
        cost = None if hours is None else round(hours * _PRICE / 1e6, 2)
        rows.append((c.name, c.used or "not published", hours, *days, cost, c.note))
    return Sheet(
        "what was published of trainings",
        columns(
            "training",
            "layout",
            ("GPU-hours", "count"),
            ("days on 1,000 GPUs", "count"),
            ("days on its GPUs", "count"),
            (f"M$ at ${_PRICE:g} an hour", "count"),
            "what is not published, or differs",
        ),
        rows,
        "; ".join(f"{c.name}: {c.gpus:,} GPUs, {c.source}" for c in CASES if c.gpu_hours),
        charted=False,
    )
