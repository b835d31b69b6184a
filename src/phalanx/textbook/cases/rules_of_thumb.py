"""Rules of thumb, tested: each leaf of the usual decision tree on the GPUs that it names, compared with a search."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.planning.tables.table import Sheet, columns
from phalanx.textbook.cases.case_studies import CaseResult, CaseStudy, study

_STACK = "megatron-core"


def _rule(name: str, model: str, cluster: str, gpus: int, batch: int, seq: int, line: str) -> CaseStudy:
    return CaseStudy(name, model, cluster, gpus, batch, seq, line, _STACK, None, "taught")


RULES = (
    _rule("it fits one GPU: DDP", "gpt2-xl", "dgx-a100", 8, 512, 1024, "dp=8,micro_batch=8"),
    _rule("7B: DDP on 80 GB", "llama-7b", "dgx-a100", 8, 512, 2048, "dp=8"),
    _rule("state does not fit: ZeRO-3", "llama-7b", "dgx-a100", 8, 512, 2048, "dp=8,zero=3"),
    _rule("13B: ZeRO-3", "llama-13b", "dgx-a100", 16, 512, 2048, "dp=16,zero=3"),
    _rule("a layer does not fit: TP in the node", "llama-13b", "dgx-a100", 8, 512, 2048, "tp=8,sp=1"),
    _rule("many nodes: PP across", "llama-65b", "dgx-a100", 64, 512, 2048, "tp=8,pp=8"),
    _rule("70B: TP 8, PP 4, DP", "llama3-70b", "dgx-h100", 256, 1024, 8192, "dp=8,zero=1,tp=8,sp=1,pp=4"),
    _rule("beyond 100B: 3D", "gpt3-175b", "dgx-a100", 1024, 1536, 2048, "dp=8,zero=1,tp=8,sp=1,pp=16"),
    _rule("experts: EP", "mixtral-8x7b", "dgx-h100", 64, 256, 4096, "dp=64,zero=1,ep=8"),
    _rule("long context: CP", "qwen2-7b", "dgx-h100", 64, 64, 131072, "dp=4,zero=1,cp=16"),
)


def sheet(rules: Iterable[CaseStudy] = RULES) -> Sheet:
    """Tabulate rules: what each costs, and what a search chooses instead."""
    return Sheet(
        "taught rules: what following them costs",
        columns(
            "rule",
            "on",
            "as the rule has it",
            ("step", "s"),
            "chosen",
            ("chosen step", "s"),
            ("costs", "share"),
            "because",
        ),
        [_row(study(case)) for case in rules],
        "costs: the rule's step over the chosen one's, less 1; none where the rule's strategy does not fit",
    )


def _row(x: CaseResult) -> tuple[object, ...]:
    c = x.case
    on = f"{c.model}, {c.gpus:,} of {c.cluster}, {c.batch:,} x {c.seq:,}"
    if x.chosen is None or x.chosen_s is None:
        return (c.name, on, c.used, x.used_s, "none", None, None, x.why)
    step = x.used_s if x.used and x.used.fits else None
    costs = step / x.chosen_s - 1 if step else None
    return (c.name, on, c.used, step, str(x.chosen.strategy), x.chosen_s, costs, x.why)
