"""Files of torchtitan's repository that people name and do not give: configurations, and run_train.sh, the script
that starts one."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

REVISION = "pytorch/torchtitan 238fa995"


@cache
def _rows() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def shipped(name: str) -> dict[str, Any] | None:
    """Return the tables of a configuration of the repository, by the last three parts of its path; None for
    others."""
    row = _rows().get("/".join(name.removesuffix(".toml").split("/")[-3:]))
    if row is None:
        return None
    module, flavor = row["model"]
    parallel = {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "context_parallel_degree": 1}
    degrees = {"tensor": row.get("tp", 1), "pipeline": row.get("pp", 1)}
    degrees |= {name: row[key] for name, key in (("expert", "ep"), ("expert_tensor", "etp")) if key in row}
    recompute = {"mode": row.get("recompute", "selective"), "selective_ac_option": "op"}
    compiled = ["loss"] if row.get("loss") else ["model", "loss"]
    return {
        "model": {"name": module, "flavor": flavor},
        "training": {"local_batch_size": row["batch"], "seq_len": row["seq"]},
        "parallelism": parallel
        | {f"{name}_parallel_degree": degree for name, degree in degrees.items()}
        | {"enable_async_tensor_parallel": row.get("async_tp", False)},
        "activation_checkpoint": recompute,
        "compile": {"enable": bool(row.get("compile") or row.get("loss")), "components": compiled},
    }


def script_launch(
    program: str, args: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[dict[str, Any], int] | None:
    """Return the flags and the number of ranks with which run_train.sh starts torchtitan.train; None for another
    script."""
    file = environment.get("CONFIG_FILE", "")
    name = environment.get("CONFIG", "")  # of a function of the registry, since 9810191b
    named = {"module": environment.get("MODULE", "llama3"), "config": name} if name else {}
    flagged = any(re.match(r"(training|parallelism|job|model)\.", name) for name in args)
    of_titan = file.endswith(".toml") or flagged or ("MODULE" in environment and bool(name))
    if program.rpartition("/")[2] != "run_train.sh" or not of_titan:
        return None
    ranks = environment.get("NGPU", "8")
    if file and not {"job.config_file", "job.config-file"} & args.keys():
        base = {"job.config_file": file}
    else:
        base = {} if file else named
    return {**base, **args}, int(ranks) if ranks.isdigit() else 8
