"""Strategies that a stack's formulas priced, and configurations that were read, as plans."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.answers.query import Query
from phalanx.answers.question import resolve
from phalanx.answers.read import Reading, query_by
from phalanx.frameworks.source_file import recorded
from phalanx.planning.search.column_pricing import Pricing
from phalanx.planning.search.priced import PricedStrategy
from phalanx.planning.search.refine import PipelineRun
from phalanx.spec.cluster.spec import ClusterSpec
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import ClusterChoice
from phalanx.spec.files.plan import Plan
from phalanx.spec.job import Train


def plan_of_configuration(reading: Reading, path: Path, query: Query) -> tuple[Plan, tuple[str, ...]]:
    """Return a configuration that was read as a plan, priced on a cluster, with notes for the user. Raises
    InputError for what it leaves open and the query does not say."""
    if query.cluster is None:
        raise InputError("cluster", None, "is missing: a plan is for one", "e.g. dgx-h100")
    q = resolve(*query_by(path, query, reading))
    x = q.subject
    plan = plan_of(q.pricing, x.priced, x.run, x.mfu, query.cluster, q.precision)
    plan.choices["source"] = recorded(reading.title, reading.configuration.kind, reading.config, ())
    return plan, q.notes


def plan_of(
    p: Pricing, priced: PricedStrategy, run: PipelineRun, mfu: float, cluster: str | ClusterSpec, precision: str
) -> Plan:
    """Return a priced strategy as a plan. `cluster`: as a user gave it."""
    name = cluster if isinstance(cluster, str) else cluster.name
    from_file = name.lower().endswith(".toml")
    chosen = ClusterChoice(file=name) if from_file else ClusterChoice(preset=name, nodes=p.cluster.nodes)
    choices: dict[str, Any] = {
        "stack": p.stack,
        "precision": precision,
        "transport": "auto",
        "collectives": [],
        "bucket": None,
        "chunks": {"blocks": list(run.blocks), "imbalance": run.imbalance},
        "peak_flops_per_s": float(p.system.peak_bf16),
        "rates_origin": "estimated",
        "tokens": "",
        "cluster": asdict(chosen),
    }
    prediction = {
        "stack": p.stack,
        "step_time_s": priced.seconds,
        "memory_bytes": int(priced.bytes_),
        "mfu": mfu,
        "bubble_fraction": run.bubble / priced.seconds,
        "terms_s": priced.terms,
        "memory_terms": priced.memory_terms,
    }
    return Plan(p.model, p.cluster, p.job, priced.strategy, Train(), choices, prediction, p.extra)
