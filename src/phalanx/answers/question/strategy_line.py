"""A strategy's line resolved on a number of GPUs, which gives dp where the line does not, or into conditions."""

from phalanx.answers.question.query import Query
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build, make_strategy
from phalanx.spec.strategy import spec as strategies
from phalanx.spec.strategy.spec import Strategy


def with_dp(strategy: Strategy, gpus: int) -> tuple[Strategy, str]:
    """Return (a strategy that has its dp, words for where that is from). Raises InputError."""
    _require_ranks(strategy, gpus)
    return strategy, f"dp={strategy.dp} of the plan{_idle(strategy, gpus)}"


def strategy_on(line: str | Strategy, gpus: int) -> tuple[Strategy, str]:
    """Return (the strategy of a line on `gpus` GPUs, words for where its dp is from). Raises InputError."""
    if isinstance(line, Strategy):
        return with_dp(line, gpus)
    table = strategies.parse(line)
    if "dp" in table:
        chosen = make_strategy(table)
        assert chosen is not None
        _require_ranks(chosen, gpus)
        return chosen, f"dp={chosen.dp} as given{_idle(chosen, gpus)}"
    alone = build(Strategy, {axis: table[axis] for axis in ("tp", "pp", "cp") if axis in table}, "strategy")
    split = " x ".join(f"{axis}={getattr(alone, axis)}" for axis in ("tp", "pp", "cp") if axis in table)
    if gpus % alone.world:
        below, above = gpus // alone.world * alone.world, -(-gpus // alone.world) * alone.world
        remedy = f"use {below} or {above} GPUs" if below else f"use {above} GPUs"
        reason = f"{split} = {alone.world} ranks do not divide {gpus} GPUs, so that no dp fills them"
        raise InputError("strategy", line, reason, f"{remedy}, or name dp")
    chosen = make_strategy(table | {"dp": gpus // alone.world})
    assert chosen is not None
    return chosen, _filling(chosen, gpus, split)


def filling(s: Strategy, gpus: int) -> str:
    """Return the words for a dp that is the GPUs over a file's other degrees."""
    return _filling(s, gpus, " x ".join(f"{axis}={n}" for axis in ("tp", "pp", "cp") if (n := getattr(s, axis)) > 1))


def _filling(s: Strategy, gpus: int, split: str) -> str:
    return f"dp={s.dp} fills {gpus} GPUs" + (f" over {split}" if split else "")


def fixed_conditions(line: str | Strategy | None) -> str:
    """Return the conditions that fix the fields of a strategy's line in a search; `pp=*` leaves one open. Raises
    InputError."""
    table = strategies.parse(str(line or ""))
    return ", ".join(f"{name}={strategies.format_field(value)}" for name, value in table.items() if value != "*")


def as_given(error: InputError, query: Query) -> InputError:
    """Return an error about a search's conditions as one about the query's fields that gave them: a search joins the
    conditions of `strategy` and `where`, and both `where` and `options` name options of the stack."""
    if error.field == "options" and not query.options:
        return InputError("where", error.value, error.reason, error.remedy)
    if error.field != "where":
        return error
    of_line, about = fixed_conditions(query.strategy).split(", "), str(error.value).split(", ")
    count = sum(condition in of_line for condition in about)
    name = "strategy" if count == len(about) else "strategy, where" if count else "where"
    return InputError(name, error.value, error.reason, error.remedy)


def _require_ranks(s: Strategy, gpus: int) -> None:
    if s.world > gpus:
        factors = " x ".join(f"{axis}={getattr(s, axis)}" for axis in strategies.AXES)
        raise InputError("strategy", str(s), f"{factors} = {s.world} ranks, but there are {gpus}", "lower a degree")


def _idle(s: Strategy, gpus: int) -> str:
    return f" ({gpus - s.world} of {gpus} GPUs are idle)" if s.world < gpus else ""
