"""Whether the server of a command line starts, and the size of its cache, which do not depend on a load."""

from dataclasses import dataclass, field

from phalanx.answers.answer import DRAWN, Answer
from phalanx.planning.lookup import model_named
from phalanx.serving.answer import as_request, memory_words
from phalanx.serving.cost.checkpoint import checkpoint_assumption
from phalanx.serving.lines.reading import STOPS, LinesRead
from phalanx.serving.question import ask
from phalanx.serving.search.search import Search
from phalanx.serving.starting import not_starting


@dataclass(frozen=True)
class ServerRoom(Answer):
    """The cache of a command line's server."""

    model: str
    cluster: str
    engine: str
    gpus: int
    title: str
    """Layout of a copy and type of weights."""
    cache_tokens: int
    """Tokens of an attention replica's cache, for requests of the longest length."""
    replicas: int
    """Attention replicas."""
    longest: int
    """Tokens of the longest request that the server accepts."""
    memory: str
    """The memory of a GPU for weights and cache, in words."""
    caveats: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=(), repr=False, metadata=DRAWN)

    @property
    def passed(self) -> bool:
        """Whether the server starts."""
        return not any(caveat.startswith(STOPS) for caveat in self.caveats)

    def words(self) -> list[str]:
        """Return the description in sentences, the verdict first."""
        fits = "fits" if self.longest <= self.cache_tokens else "does not fit"
        size = f"{self.cache_tokens:,} tokens"
        if self.replicas > 1:
            size += f" in each of {self.replicas:,} replicas, {self.replicas * self.cache_tokens:,} in all"
        verdict = f"starts, as far as memory says: {self.title}, {self.gpus} x GPU"
        return [
            *([verdict] if self.passed else []),
            *self.caveats,
            f"KV cache: {size}; the longest request of {self.longest:,} tokens {fits}",
            f"of a GPU weights and cache have {self.memory}",
            "missing: lengths of requests, without which no time is predicted: --input and --output",
        ]


def server_room(lines: LinesRead) -> ServerRoom:
    """Return the cache of the server of `lines`. Raises InputError."""
    # Tokens are counted in requests of the longest length: layers with a window keep a smaller share of long ones.
    most = min(lines.longest, model_named(str(lines.fields["model"]))[0].max_seq)
    request = as_request({**lines.fields, "input": max(1, most - 1), "output": 1})
    query = ask(request)
    q = query.question
    assert query.layout is not None
    copy = Search(q, query.layout).copy_of(q.weights[0], query.layout)
    group_tokens = copy.cache_tokens // query.layout.attention_dp
    weights = () if group_tokens else (f"{STOPS}: {copy.missing}",)
    taken = checkpoint_assumption(q.model, query.model_name, q.weights[0])
    return ServerRoom(
        model=query.model_name,
        cluster=query.cluster_name,
        engine=q.engine.name,
        gpus=q.gpus,
        title=f"{request.layout}, {q.weights[0]}",
        cache_tokens=group_tokens,
        replicas=q.gpus // query.layout.gpus * query.layout.attention_dp,
        longest=lines.longest,
        memory=memory_words(copy),
        caveats=(
            *(weights or not_starting(lines, copy)),
            *lines.caveats,
            *query.caveats,
            *([taken] if taken else []),
        ),
        notes=(*lines.notes, *query.notes),
    )
