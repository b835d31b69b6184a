"""Phalanx plans, proves, runs and measures the parallel training of large models.

    import phalanx

    plan = phalanx.plan(model="llama3-70b", cluster="dgx-h100", gpus=64, batch=512, seq=8192)
    plan.strategy, plan.best.step_time_s, plan.best.mfu
    plan.save("plan.json")                                  # what phalanx train, verify and export read
    phalanx.explain("plan.json").plot()                     # in a notebook
    plan.to_pandas()

Functions take names or objects (ModelSpec, ClusterSpec, Strategy) and return frozen dataclasses whose fields name
their units, the same that the commands print with --json. What is wrong with the arguments raises InputError, a
ValueError that names the field and its remedy. Each name is loaded when it is first used; only
`train`, `parallelize`, `propose_tp_plan`, `verify` and `observe` need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phalanx.answers.compare import compare as compare
    from phalanx.answers.configurations.export import export as export
    from phalanx.answers.explanation import explain as explain
    from phalanx.answers.findings import lint as lint
    from phalanx.answers.prediction import predict as predict
    from phalanx.answers.question.query import Query as Query
    from phalanx.answers.question.read import read as read
    from phalanx.answers.runs.train import train as train
    from phalanx.answers.runs.verify import verify as verify
    from phalanx.answers.schedules.collectives import collectives as collectives
    from phalanx.answers.schedules.collectives import prove as prove
    from phalanx.answers.search.model_plan import plan as plan
    from phalanx.answers.search.wishes import Wishes as Wishes
    from phalanx.answers.simulation import simulate as simulate
    from phalanx.answers.tables import memory as memory
    from phalanx.answers.tables import roofline as roofline
    from phalanx.answers.tables import scaling as scaling
    from phalanx.answers.tables import traffic as traffic
    from phalanx.observation.observe import observe as observe
    from phalanx.reliability.answer import goodput as goodput
    from phalanx.report.local_page.notebook import ui as ui
    from phalanx.runtime.any_module.parallelize import parallelize as parallelize
    from phalanx.runtime.any_module.proposal import propose_tp_plan as propose_tp_plan
    from phalanx.serving.answer import serve_plan as serve_plan
    from phalanx.spec.cluster.spec import ClusterSpec as ClusterSpec
    from phalanx.spec.errors import InputError as InputError
    from phalanx.spec.files.plan import Plan as Plan
    from phalanx.spec.job import Job as Job
    from phalanx.spec.model.spec import ModelSpec as ModelSpec
    from phalanx.spec.strategy.spec import Strategy as Strategy

__version__ = "0.1.0"

_FACE = {
    "ClusterSpec": "spec.cluster.spec",
    "InputError": "spec.errors",
    "Job": "spec.job",
    "ModelSpec": "spec.model.spec",
    "Plan": "spec.files.plan",
    "Query": "answers.question.query",
    "Strategy": "spec.strategy.spec",
    "Wishes": "answers.search.wishes",
    "collectives": "answers.schedules.collectives",
    "compare": "answers.compare",
    "explain": "answers.explanation",
    "export": "answers.configurations.export",
    "goodput": "reliability.answer",
    "lint": "answers.findings",
    "memory": "answers.tables",
    "observe": "observation.observe",
    "parallelize": "runtime.any_module.parallelize",
    "plan": "answers.search.model_plan",
    "predict": "answers.prediction",
    "propose_tp_plan": "runtime.any_module.proposal",
    "prove": "answers.schedules.collectives",
    "read": "answers.question.read",
    "roofline": "answers.tables",
    "scaling": "answers.tables",
    "simulate": "answers.simulation",
    "serve_plan": "serving.answer",
    "traffic": "answers.tables",
    "train": "answers.runs.train",
    "ui": "report.local_page.notebook",
    "verify": "answers.runs.verify",
}
"""The public names, and the modules that have them."""

__all__ = ["__version__", *sorted(_FACE)]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(import_module(f"phalanx.{_FACE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
