"""Split generation with a KV cache equals one process without one; what it sends and caches is what is predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from support import generation_cases
from support.rank_pool import Pool
from support.saved_models import tokenizer
from support.sizes import examples, sampled

from phalanx.answers.runs import train
from phalanx.cost.step.generation import generation_layout
from phalanx.infer import text, worker
from phalanx.infer.generate import BatchedGeneration, experts_span_replicas, require_context, room_of
from phalanx.infer.sampling import Sampling, choose, uniform
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE
from phalanx.schedule.generation import IDLING, Batch, BatchingPolicy, Request, Scheduler, Slot
from phalanx.spec.errors import InputError
from phalanx.spec.files.job_file import build
from phalanx.spec.model.families import complete
from phalanx.spec.model.spec import ModelSpec
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy, parse


def small(**fields: Any) -> ModelSpec:
    sizes = {"family": "llama", "vocab": 61, "hidden": 16, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 40}
    return build(ModelSpec, complete({**sizes, "max_seq": 64, **fields}), "model")


_EXPERTS = {"count": 8, "top_k": 3, "ffn": 16, "shared_ffn": 16, "dense_layers": [0], "groups": 4, "top_groups": 2}
_LATENT = {"kv_rank": 10, "nope_dim": 8, "rope_dim": 4, "v_dim": 6, "q_rank": 12}
_YARN = {"kind": "yarn", "factor": 4.0, "original_max_seq": 16, "mscale_all_dim": 0.5}
LLAMA = small(rope_scaling={"factor": 8.0, "original_max_seq": 16})
MISTRAL = small(family="mistral", window=5)
DEEPSEEK = small(family="deepseek_v3", kv_heads=4, latent=_LATENT, experts=_EXPERTS, rope_scaling=_YARN)
MIXTRAL = small(family="mixtral", experts={"count": 4, "top_k": 2, "ffn": 24, "capacity": 1.0})
HYBRID = small(
    layers=4,
    norms="both",
    output_gate=True,
    experts={"count": 4, "top_k": 2, "ffn": 24, "latent": 6, "shared_ffn": 8},
    mixers=[
        {"kind": "mamba", "name": "mamba", "heads": 4, "head_dim": 6, "groups": 2, "state": 3, "chunk": 4},
        {"kind": "delta", "name": "delta", "key_heads": 4, "value_heads": 8, "key_dim": 6, "value_dim": 4},
        {"kind": "attention", "name": "near", "window": 3},
    ],
    pattern=["mamba", "delta+experts", "near+mlp", "attention"],
)
MIXED = small(
    layers=3,
    kv_heads=4,
    latent=_LATENT,
    head_dim=12,
    mixers=[{"kind": "factorised", "name": "few", "heads": 4, "head_dim": 8, "q_rank": 12, "kv_heads": 1}],
    pattern=["few", "attention", "few"],
)
INDEXED = small(layers=2, kv_heads=4, latent=_LATENT | {"index": {"heads": 3, "dim": 6, "top": 4}}, head_dim=12)
REQUESTS = [
    Request(number, tuple(np.random.default_rng(number).integers(0, 61, size).tolist()), most, (), arrives)
    for number, (size, most, arrives) in enumerate([(5, 4, 0), (13, 3, 0), (1, 4, 2), (9, 2, 3), (2, 1, 20)])
]
HOW, LIMITS = Sampling(temperature=1.0, top_k=20, top_p=0.95), BatchingPolicy(slots=3, chunk=7, page=4)


def _check(results: list[dict[str, Any]], expected: dict[int, list[int]], case: Any) -> None:
    assert [r["texts"] for r in results] == [expected] * len(results), case
    assert [r["differences"] for r in results] == [[]] * len(results), case
    assert max(r["deviation"] for r in results) < 1e-9, case
    assert all(predicted == actual for r in results for predicted, actual in [r["cache"]]), case
    # Every rank of the last stage has the logits of its replica's tokens: together, of all.
    assert sum(r["looked"] for r in results) >= sum(map(len, expected.values())), case


@examples(4, 100)
def test_one_process(examples: int) -> None:
    @settings(max_examples=examples)
    @given(generation_cases.drawn(1))
    def holds(case: Any) -> None:
        model, _, requests, how, _ = case
        _check([generation_cases.generated(ALONE, *case)], generation_cases.alone(model, requests, how), case)

    holds()


CASES = {
    2: [
        (HYBRID, "tp=2"),
        (HYBRID, "pp=2"),
        (MIXED, "pp=2"),
        (LLAMA, "tp=2"),
        (DEEPSEEK, "tp=2"),
        (MISTRAL, "pp=2"),
        (DEEPSEEK, "dp=2,ep=2"),
        (MIXTRAL, "tp=2,ep=2"),
    ],
    4: [
        (LLAMA, "tp=4"),
        (DEEPSEEK, "pp=2,tp=2,ep=2"),
        (MIXTRAL, "dp=2,tp=2,ep=2,etp=2"),
        (DEEPSEEK, "dp=2,tp=2,ep=4"),
        (HYBRID, "tp=4"),
        (HYBRID, "dp=2,tp=2,ep=4"),
    ],
}
"""With tp=4 neighbouring ranks share a key head, and B and C of a group of Mamba-2; with ep over dp a replica without
work computes for the others."""


@pytest.mark.parametrize("world", sampled(list(CASES), (0,)))
def test_every_split(pool: Pool, world: int) -> None:
    cases = [(m, build(Strategy, _parsed(line), "s"), REQUESTS, HOW, LIMITS) for m, line in CASES[world]]
    by_rank = pool.run(world, generation_cases.several, cases, timeout_s=300.0)
    for number, case in enumerate(cases):
        expected = generation_cases.alone(case[0], REQUESTS, HOW)
        _check([of[number] for of in by_rank], expected, case[1])


@pytest.mark.parametrize("model", [MIXED, INDEXED, MISTRAL], ids=["other attention", "an index", "a window"])
def test_attention_of_any_kind_in_chunks(model: ModelSpec) -> None:
    """Each block caches what its own attention reads again; keys of an index are no part of that."""
    case = (model, Strategy(), REQUESTS, HOW, LIMITS)
    _check([generation_cases.generated(ALONE, *case)], generation_cases.alone(model, REQUESTS, HOW), case)


def _parsed(line: str) -> dict[str, int]:
    return {name: int(value) for name, value in (item.split("=") for item in line.split(","))}


@examples(3, 100)
@pytest.mark.parametrize("world", sampled([2, 4], (1,)))
def test_drawn_splits(pool: Pool, world: int, examples: int) -> None:
    @settings(max_examples=examples)
    @given(generation_cases.drawn(world))
    def equal(case: Any) -> None:
        model, _, requests, how, _ = case
        results = pool.run(world, generation_cases.generated, *case, timeout_s=300.0)
        _check(results, generation_cases.alone(model, requests, how), case)

    equal()


def test_requests_come_and_go() -> None:
    """In chunks, decoding beside prefill; no page is two requests', and every page comes back."""
    policy = BatchingPolicy(slots=2, chunk=4, page=2, pages=9)
    scheduler = Scheduler([Request(0, (1,) * 6, 3), Request(1, (2,) * 7, 2), Request(2, (3,) * 2, 1, (), 4)], policy)
    said, step = [], 0
    while not scheduler.done:
        batch = scheduler.batch(step)
        held = [scheduler.cache_seat(slot) for slot in batch.slots]
        for owned in ([page for of in held for page in of.pages], [of.seat for of in held]):
            assert len(owned) == len(set(owned))
        assert all(0 <= of.seat < scheduler.seats for of in held)
        said.append([(s.request, s.past, s.new, s.samples) for s in batch.slots])
        scheduler.advance(batch, {s.request: 9 for s in batch.slots if s.samples})
        step += 1
    assert said == [
        [(0, 0, 4, False)],
        [(0, 4, 2, True), (1, 0, 2, False)],
        [(0, 6, 1, True), (1, 2, 3, False)],
        [(0, 7, 1, True), (1, 5, 2, True)],
        [(1, 7, 1, True), (2, 0, 2, True)],
    ]
    assert sorted([*scheduler._free, *scheduler._fresh]) == list(range(9))


def test_a_request_begins_when_it_arrives_and_ends_with_its_last_token() -> None:
    grid, arrivals = mesh(Strategy()), {r.number: r.arrives for r in REQUESTS}
    run = BatchedGeneration(
        LLAMA, Strategy(), Comm(ALONE, grid), generation_cases.Drawn(LLAMA), "float64", REQUESTS, HOW, LIMITS
    )
    began: dict[int, int] = {}
    lasts: dict[int, list[bool]] = {}
    steps = 0
    while not run.done:
        for slot in (
            run.step(lambda request, token, last: lasts.setdefault(request, []).append(last)).batches[0].slots
        ):
            began.setdefault(slot.request, steps)
        steps += 1
    assert {number: began[number] for number in (0, 4)} == {0: 0, 4: arrivals[4]}
    assert all(began[number] >= arrives for number, arrives in arrivals.items())
    assert lasts == {r.number: [False] * (r.most - 1) + [True] for r in REQUESTS}


def test_slots_that_decode_come_first() -> None:
    decodes, prefill = Slot(1, 4, 1, True), Slot(0, 0, 3, False)
    assert Batch.of((prefill, decodes)).slots == (decodes, prefill)


def test_sampling() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    how = Sampling(temperature=0.5, top_k=0, seed=3)  # squares the odds
    draws = [choose(logits, how, 0, place) for place in range(4000)]
    shares = np.bincount(draws, minlength=4) / 4000
    np.testing.assert_allclose(shares, np.array([1, 16, 4, 9]) / 30, atol=0.03)
    assert draws[:99] == [choose(logits + 1e4, how, 0, place) for place in range(99)]
    for how, kept in (
        (Sampling(temperature=0), {1}),
        (Sampling(temperature=1.0, top_k=2), {1, 3}),
        (Sampling(temperature=1.0, top_k=0, top_p=0.65), {1, 3}),
        (Sampling(temperature=1.0, top_k=0, top_p=0.71), {1, 2, 3}),
    ):
        assert {choose(logits, how, 1, place) for place in range(300)} == kept
    assert uniform(0, 1, 2) == uniform(0, 1, 2) != uniform(0, 2, 1)


@pytest.mark.parametrize(
    ("field", "legal", "beyond"),
    [
        ("tokens", (None, 1), (0,)),
        ("top_k", (0,), (-1,)),
        ("top_p", (1e-9, 1), (0, 1 + 1e-9)),
        ("temperature", (0, 1e-3, 1e3), (-1, 0.99e-3, 1.01e3)),
        ("seed", (0,), (-1,)),
    ],
)
def test_how_to_sample_has_bounds(field: str, legal: tuple[Any, ...], beyond: tuple[Any, ...]) -> None:
    for value in legal:
        assert getattr(Sampling(**{field: value}), field) == value
    for value in beyond:
        with pytest.raises(InputError, match=f"^(train.)?{field} = {value}: "):
            Sampling(**{field: value})


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_refused(temperature: float, bad: float) -> None:
    logits = np.array([0.5, bad, -np.inf, 0.1])
    with pytest.raises(InputError, match=r"^weights: give a logit that is not finite"):
        choose(logits, Sampling(temperature=temperature), 0, 0)
    assert choose(np.array([0.5, -np.inf]), Sampling(temperature=temperature), 0, 0) == 0


@pytest.mark.parametrize(
    ("model", "line", "words"),
    [
        (LLAMA, {"dp": 2, "zero": 1}, "strategy.zero = 1: is of training; generation takes dp, tp, pp, ep, etp"),
        (LLAMA, {"pp": 2, "schedule": "gpipe"}, "strategy.schedule = 'gpipe': is of training"),
        (LLAMA, {"tp": 8}, "strategy.tp = 8: is more than the model's 4 heads"),
        (LLAMA, {"pp": 6}, "too many stages for 3 blocks"),
        (LLAMA, {"dp": 2, "ep": 2}, "the model has no experts"),
        (LLAMA, {"pp": 2, "layers": "5/1"}, "gives 6 blocks to 2 chunks; there are 3 blocks and 2 chunks"),
        (
            small(
                family="mixtral",
                experts={"count": 4, "top_k": 2, "ffn": 24, "normalized": False, "chooser": "experts"},
            ),
            {},
            "chooser",
        ),
    ],
)
def test_what_does_not_generate(model: ModelSpec, line: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as refused:
        generation_layout(model, Strategy(**line), "float64")
    assert words in str(refused.value)


def test_a_cache_that_fits_no_request() -> None:
    with pytest.raises(InputError, match=r"pages = 3: hold 12 tokens, and .* need 4 pages; use 4 or more"):
        Scheduler(REQUESTS, BatchingPolicy(page=4, pages=3))


@pytest.mark.parametrize(
    ("asked", "prompt", "room"), [(5, 3, 5), (100, 3, 61), (100, 63, 1), (100, 70, 1), (0, 3, None)]
)
def test_a_trained_model_says_no_more_than_it_has_places_for(
    monkeypatch: pytest.MonkeyPatch, asked: int, prompt: int, room: int | None
) -> None:
    said: list[int] = []
    trained = SimpleNamespace(train=SimpleNamespace(sample_tokens=asked, prompt="a" * prompt))
    encoded = SimpleNamespace(encode=lambda words: SimpleNamespace(ids=list(words)))
    monkeypatch.setattr(train.plan, "read", lambda path: trained)
    monkeypatch.setattr(text, "model_of", lambda folder: LLAMA)  # of 64 places
    monkeypatch.setattr(text, "tokenizer_of", lambda folder, model: encoded)
    monkeypatch.setattr(text, "question", lambda folder, prompts, how: said.append(how.tokens))
    monkeypatch.setattr(text, "answer", lambda question: ["!"])
    assert train.sample(Path()) == ("a" * prompt + "!" if asked else "")
    assert said == [room] * bool(asked)


@pytest.mark.parametrize(("past_end", "ends"), [(False, (2, 3)), (True, ())])
def test_a_text_ends_where_its_model_says_or_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_end: bool, ends: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    encoded = SimpleNamespace(encode=lambda words: SimpleNamespace(ids=list(words.encode())))
    for name, there in (("model_of", LLAMA), ("tokenizer_of", encoded), ("weights_of", None)):
        monkeypatch.setattr(text, name, lambda *_, there=there: there)
    asked = text.question(tmp_path, ["ab", "c" * 63], Sampling(past_end=past_end), precision="float32")
    assert [(r.prompt, r.stops) for r in asked.requests] == [((97, 98), ends), ((99,) * 63, ends)]
    assert [len(r.prompt) + r.most for r in asked.requests] == [64, 64]  # all places of the model
    for other, error in (
        ({"prompts": ()}, "^prompts: has no prompt; give one on each line$"),
        ({"sampling": Sampling(63)}, "^prompt 1: is 2 tokens, and 63 more are 65: "),
        ({"strategy": Strategy(tp=8)}, "^strategy.tp = 8: is more than the model's 4 heads"),
        ({"policy": BatchingPolicy(page=4, pages=3)}, "^pages = 3: hold 12 tokens"),
        ({"precision": "float17"}, "^precision = 'float17'"),
    ):
        with pytest.raises(InputError, match=error):
            text.question(**{"folder": tmp_path, "prompts": ["ab", "c"], "sampling": Sampling(), **other})
    monkeypatch.setattr(text, "widest_dtype", lambda *_: torch.bfloat16)
    for asked_for, dtype in ((None, "bfloat16"), ("float64", "float64")):
        assert text.question(tmp_path, ["ab"], Sampling(), precision=asked_for).dtype == dtype


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ()),
        ({"config.json": '{"eos_token_id": 7}'}, (7,)),
        ({"config.json": '{"eos_token_id": [7, 8, "x"]}', "generation_config.json": "{}"}, (7, 8)),
        ({"config.json": '{"eos_token_id": 7}', "generation_config.json": '{"eos_token_id": 1}'}, (1,)),
        ({"config.json": '{"eos_token_id": 7}', "generation_config.json": '{"eos_token_id": null}'}, ()),
        ({"config.json": "[]", "generation_config.json": "not JSON"}, ()),
    ],
)
def test_which_tokens_end_a_text(tmp_path: Path, files: dict[str, str], ends: tuple[int, ...]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert text._end_tokens(tmp_path) == ends


def test_a_folder_to_generate_from_is_a_run_or_of_hugging_face(tmp_path: Path) -> None:
    """Each part that it lacks is named."""
    folder, file = tmp_path / "hf", tmp_path / "file"
    folder.mkdir()
    file.touch()
    run, copy = "name a run's folder, such as runs/quickstart", "copy the tokenizer's there"
    either = "name a run's folder or one of Hugging Face weights"

    def refused(read: Any, where: Path, said: str) -> None:
        with pytest.raises(InputError) as error:
            read(where)
        assert str(error.value) == str(InputError("RUN", str(where), *said.split("; ")))

    refused(text.model_of, tmp_path / "none", f"no such file or folder; {either}")
    refused(text.model_of, file, f"is not a folder; {either}")
    refused(text.model_of, folder, f"holds no plan.json of a run, and no config.json of Hugging Face weights; {run}")
    opened = partial(text.tokenizer_of, model=LLAMA)
    refused(opened, folder, f"holds no tokenizer.json; {copy}")
    tokenizer(folder / "tokenizer.json")  # of 97 words
    with pytest.raises(InputError, match=r"^RUN = .*/tokenizer.json': has 97 entries, model.vocab is 61"):
        opened(folder)
    assert text.tokenizer_of(folder, replace(LLAMA, vocab=97)).get_vocab_size() == 97
    (folder / "tokenizer.json").unlink()
    (folder / "checkpoint").mkdir()
    refused(opened, folder, f"holds no tokenizer.json: it was trained on token ids; {copy}")


@pytest.mark.parametrize(("rank", "stream", "said"), [(0, True, "ab\n"), (0, False, ""), (1, True, "")])
def test_each_rank_has_the_texts_and_the_first_one_says_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, stream: bool, said: str
) -> None:
    asked: Any = SimpleNamespace(strategy=Strategy())

    def answer(query: Any, comm: Any, piece: Any) -> list[str]:
        piece(0, "b", True)
        return ["b"] if (query, comm) == (asked, rank) else []

    monkeypatch.setattr(worker, "worlds", Mock())
    monkeypatch.setattr(worker, "Comm", lambda world, _: world.rank)
    monkeypatch.setattr(worker, "answer", answer)
    assert worker.as_rank(replace(ALONE, rank=rank, size=2), asked, ["a"], stream) == ["b"]
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(("prompt", "most", "fits"), [(60, 4, True), (60, 5, False), (64, 1, False), (1, 63, True)])
def test_a_prompt_and_its_text_fit_the_model(prompt: int, most: int, fits: bool) -> None:
    asked = Request(0, tuple(range(prompt)), most)
    if fits:
        assert require_context(LLAMA, [asked]) is None  # of 64 places
    else:
        with pytest.raises(InputError, match=f"is {prompt} tokens, and {most} more are {prompt + most}"):
            require_context(LLAMA, [asked])


@pytest.mark.parametrize(("together", "requests", "idles"), [(True, 2, True), (False, 2, False), (True, 0, False)])
def test_a_replica_idles_along_where_experts_span_replicas(together: bool, requests: int, idles: bool) -> None:
    schedulers = [Scheduler(REQUESTS[:requests], BatchingPolicy()), Scheduler([], BatchingPolicy())]
    batches = BatchedGeneration.batches(SimpleNamespace(together=together, number=0, schedulers=schedulers))  # type: ignore[arg-type]
    assert [bool(b.slots) for b in batches] == [requests > 0, idles]


def test_a_replica_that_idles_uses_a_page_and_a_seat_of_its_own() -> None:
    """Beside all that its schedulers may give to requests."""
    seats = []

    class Idle(BatchedGeneration):
        def __init__(self) -> None:
            self.schedulers = [Scheduler([], BatchingPolicy()), Scheduler(REQUESTS, BatchingPolicy())]
            self.room = room_of(self.schedulers, BatchingPolicy(), True)
            self.together, self.number, self.replica_index, self.how = True, 0, 0, Sampling()
            self.replica = SimpleNamespace(  # type: ignore[assignment]
                step=lambda batch, tokens, held: seats.append((batch, tokens, *held.values())),
                choose=lambda *_: [],
                share=lambda chosen, first, total: [0] * total,
            )

    idle = Idle()
    idle.step()
    ((batch, tokens, seat),) = seats
    busy = idle.schedulers[1]
    assert (batch, tokens) == (IDLING, [0])
    assert (seat.pages, seat.seat) == ((idle.room.pages - 1,), idle.room.seats - 1)
    assert seat.pages[0] >= busy.pages
    assert seat.seat >= busy.seats


@pytest.mark.parametrize(
    "line", ["dp=4,ep=2", "dp=4,ep=4,etp=1", "dp=2,tp=2,ep=2,etp=2", "tp=4,ep=4", "tp=2,dp=2,ep=2"]
)
def test_replicas_step_together_where_a_group_of_experts_has_ranks_of_several(line: str) -> None:
    grid = mesh(build(Strategy, parse(line), "strategy"))
    shared = {
        (grid.replica(a), grid.replica(b))
        for group in grid.groups("ep+etp")
        for a in map(int, group)
        for b in map(int, group)
    }
    assert experts_span_replicas(MIXTRAL, grid) == any(a != b for a, b in shared)
    assert not experts_span_replicas(LLAMA, grid)


@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_whole_characters_and_join_to_the_text(seed: int) -> None:
    """With tokens that are bytes of UTF-8, of which a character has one to four."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("aé≈😀 "), 12)) for _ in range(3)]
    tokens = [list(word.encode()) for word in words]
    tokens[0] = tokens[0][:-1] if seed % 2 else tokens[0]  # an answer may end within a character
    requests = [Request(number, tuple("é:".encode()), 99, ()) for number in range(3)]
    pieces: dict[int, list[tuple[str, bool]]] = {0: [], 1: [], 2: []}
    tokenizer: Any = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))
    receiver = text.Texts(tokenizer, requests, lambda request, new, last: pieces[request].append((new, last)))
    for place in range(max(map(len, tokens))):
        for number, ids in enumerate(tokens):
            if place < len(ids):
                receiver(number, ids[place], place == len(ids) - 1)
    for number, ids in enumerate(tokens):
        news, lasts = zip(*pieces[number], strict=True)
        assert "".join(news) == receiver.texts[number] == bytes(ids).decode(errors="replace")
        assert [last for last in lasts if last] == [True]
        assert not any("\ufffd" in new for new in news[:-1])
        assert all(len(new) == 1 for new in news[:-1])
