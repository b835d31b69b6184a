"""Text that continues prompts, with the weights of a run or of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cost.step.generation import generation_layout
from phalanx.infer.generate import BatchedGeneration, require_context
from phalanx.infer.sampling import Sampling
from phalanx.nn.hugging_face import files
from phalanx.nn.weight_files import errors_about, is_run, run_weights, widest_dtype
from phalanx.nn.weight_source import Weights
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.comm.dtypes import DTYPE_NAMES
from phalanx.runtime.process.environment import ALONE
from phalanx.schedule.generation import BatchingPolicy, Request, enough_pages
from phalanx.spec.documents import read_json
from phalanx.spec.errors import InputError
from phalanx.spec.files import plan as plans
from phalanx.spec.files.job_file import make_model
from phalanx.spec.job import DType, compute_type
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy
from phalanx.training.data.encode import guarded, open_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FIELD = "RUN"
_TOKENS = 80
"""Default number of tokens of a text, if they fit."""
Piece = Callable[[int, str, bool], None]
"""(request, text, whether it is the last); called as text arrives."""


@dataclass(frozen=True)
class TextQuery:
    """A validated request to generate."""

    folder: Path
    model: ModelSpec
    dtype: DType
    requests: tuple[Request, ...]
    how: Sampling
    policy: BatchingPolicy
    strategy: Strategy


def question(
    folder: Path,
    prompts: Sequence[str],
    sampling: Sampling,
    strategy: Strategy = Strategy(),  # noqa: B008 frozen
    policy: BatchingPolicy = BatchingPolicy(),  # noqa: B008 frozen
    precision: str | None = None,
) -> TextQuery:
    """Read a folder's model and tokenizer, encode the prompts, and check that all can be generated. `precision`: the
    type to compute in; None: that of the weights. Raises InputError, CheckpointError."""
    model = model_of(folder)
    generation_layout(model, strategy, "float32")  # refuses a strategy that does not split it
    tokenizer = tokenizer_of(folder, model)
    weights = weights_of(folder, model)
    stops = () if sampling.past_end else _end_tokens(folder)
    if not prompts:
        raise InputError("prompts", None, "has no prompt", "give one on each line")
    requests = []
    for number, prompt in enumerate(prompts):
        ids = tuple(guarded(partial(tokenizer.encode, prompt), folder / "tokenizer.json", FIELD).ids)
        room = model.max_seq - len(ids)
        most = sampling.tokens or max(1, min(_TOKENS, room))
        requests.append(Request(number, ids, most, stops))
    require_context(model, requests)
    enough_pages(requests, policy)
    dtype = compute_type(precision or DTYPE_NAMES[widest_dtype(weights, model)], "precision")
    return TextQuery(folder, model, dtype, tuple(requests), sampling, policy, strategy)


def answer(query: TextQuery, comm: Comm | None = None, piece: Piece = lambda request, text, last: None) -> list[str]:
    """Generate, alone or all ranks of a world together; return each prompt with the text that continues it."""
    comm = comm or Comm(ALONE, mesh(query.strategy))
    weights = weights_of(query.folder, query.model)
    receiver = Texts(tokenizer_of(query.folder, query.model), query.requests, piece)
    generation = BatchedGeneration(
        query.model, query.strategy, comm, weights, query.dtype, query.requests, query.how, query.policy
    )
    while not generation.done:
        generation.step(receiver)
    return receiver.texts


class Texts:
    """Decodes the tokens of requests as they arrive. A token may be a part of a character, so text is emitted only up
    to the last complete one."""

    def __init__(self, tokenizer: Tokenizer, requests: Sequence[Request], piece: Piece) -> None:
        self._tokenizer, self._piece = tokenizer, piece
        self._ids = {r.number: list(r.prompt) for r in requests}
        # Decoded alone, the continuation would lose its leading space.
        self._said = {r.number: len(self._decode(list(r.prompt))) for r in requests}
        self._text: dict[int, list[str]] = {r.number: [] for r in requests}

    def __call__(self, request: int, token: int, last: bool) -> None:
        """Take a new token of a request; `last`: its text is complete."""
        ids = self._ids[request]
        ids.append(token)
        text = self._decode(ids)
        new = text[self._said[request] :]
        if new.endswith("\ufffd") and not last:
            return
        self._said[request] = len(text)
        self._text[request].append(new)
        self._piece(request, new, last)

    def _decode(self, ids: list[int]) -> str:
        return guarded(lambda: self._tokenizer.decode(ids), Path("tokenizer.json"), FIELD)

    @property
    def texts(self) -> list[str]:
        """The continuations, in the order of the requests."""
        return ["".join(self._text[number]) for number in sorted(self._text)]


def model_of(folder: Path) -> ModelSpec:
    """Read the model of a run, or of a Hugging Face folder. Raises InputError."""
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "no such file or folder"
        raise InputError(FIELD, str(folder), reason, "name a run's folder or one of Hugging Face weights")
    if is_run(folder):
        return plans.model_of(folder)
    if not (folder / "config.json").exists():
        reason = "holds no plan.json of a run, and no config.json of Hugging Face weights"
        raise InputError(FIELD, str(folder), reason, "name a run's folder, such as runs/quickstart")
    return make_model({"config": str((folder / "config.json").absolute())}, folder)[0]


def weights_of(folder: Path, model: ModelSpec) -> Weights:
    """Open the newest weights of a run, or the weights of a Hugging Face folder. Raises InputError,
    CheckpointError."""
    with errors_about(FIELD):
        return run_weights(folder, model) if is_run(folder) else files.read(folder, model)


def tokenizer_of(folder: Path, model: ModelSpec) -> Tokenizer:
    """Open a folder's tokenizer. Raises InputError."""
    if not (folder / "tokenizer.json").exists():
        reason = "holds no tokenizer.json" + (": it was trained on token ids" if is_run(folder) else "")
        raise InputError(FIELD, str(folder), reason, "copy the tokenizer's there")
    return open_tokenizer(folder / "tokenizer.json", model.vocab, FIELD)


def _end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end-of-text tokens of the folder's generation_config.json or config.json; empty without either."""
    for name in ("generation_config.json", "config.json"):
        try:
            end = read_json(folder / name, "config")["eos_token_id"]
        except (InputError, KeyError, TypeError):
            continue
        ends = end if isinstance(end, list) else [end]
        return tuple(e for e in ends if isinstance(e, int))
    return ()
