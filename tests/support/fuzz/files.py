"""Valid files of every kind that a command reads, and mistakes in them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path as FilePath
from typing import Any

from hypothesis import strategies as st

from phalanx.spec.cluster.presets import PRESETS, preset
from phalanx.spec.documents import VERSION
from support.fuzz.leaves import Raw, leaves, near, numbers, words

Tree = Any
Path = tuple[str | int, ...]


def paths(tree: Tree, at: Path = ()) -> Iterator[Path]:
    """Yield the places of all values in nested tables and lists."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from paths(inner, (*at, key))


def _at(tree: Tree, path: Sequence[str | int]) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def mistaken(draw: st.DrawFn, tree: Tree) -> Tree:
    """Change one to three values of a tree: replace, drop, add, repeat or wrap them."""
    tree = copy.deepcopy(tree)
    only_numbers = draw(st.booleans())  # half of the time: wrong types are refused before anything is computed
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        every = [p for p in paths(tree) if not only_numbers or type(_at(tree, p)) in (int, float)]
        if not every:
            break
        *above, last = draw(st.sampled_from(every))
        table = _at(tree, above)
        if only_numbers:
            table[last] = draw(near(table[last]))
            continue
        how = draw(st.sampled_from(("replace",) * 8 + ("drop", "add", "repeat", "wrap")))
        if how == "replace":
            table[last] = draw(leaves(table[last]))
        elif how == "drop":
            del table[last]
        elif how == "wrap":
            table[last] = [table[last]]
        elif isinstance(table, list):
            table.append(copy.deepcopy(table[last]))
        else:
            table[draw(st.sampled_from(("x", "", "a.b", "name", f"{last}s", "\0", "é" * 300)))] = table[last]
    return tree


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Damage a file as text: cut it off, flip or insert bytes, repeat a line, empty it."""
    how = draw(st.sampled_from(("cut", "flip", "insert", "repeat", "empty", "deep", "mark", "lines")))
    place = draw(st.integers(0, len(content)))
    if how == "cut":
        return content[:place]
    if how == "flip" and content:
        place = min(place, len(content) - 1)
        return content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :]
    if how == "insert":
        return content[:place] + draw(st.binary(min_size=1, max_size=4)) + content[place:]
    if how == "repeat":
        lines = content.splitlines(keepends=True) or [b""]
        return content + draw(st.sampled_from(lines))
    if how == "deep":
        return draw(
            st.sampled_from((b"a = " + b"[" * 3000, b"[" * 100_000, b'{"a":' * 50_000, b"a." * 5000 + b"a = 1"))
        )
    if how == "mark":
        return b"\xef\xbb\xbf" + content
    return b"" if how == "empty" else content.replace(b"\n", b"\r\n")


@st.composite
def reworded(draw: st.DrawFn, content: bytes) -> bytes:
    """Replace a word or number of a text by another."""
    text = content.decode(errors="replace")
    place = draw(st.sampled_from(list(re.finditer(r"[\w.]+", text)) or [None]))
    if place is None:
        return content
    word = draw(words() | st.integers(-3, 10**6).map(str) | numbers().map(str).filter(lambda w: len(w) < 4000))
    return (text[: place.start()] + word + text[place.end() :]).encode("utf-8", "replace")


def as_toml(tree: dict[str, Any]) -> bytes:
    """Write tables as TOML, all of them inline."""
    return "".join(f"{_key(k)} = {_toml(v)}\n" for k, v in tree.items() if v is not None).encode("utf-8", "replace")


def _key(name: str) -> str:
    return json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(k))} = {_toml(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(v) for v in value if v is not None) + "]"
    if isinstance(value, float):
        return repr(value)
    return '""' if value is None else json.dumps(value).replace("\x7f", "\\u007f")


def as_json(tree: Any) -> bytes:
    """Write JSON; Raw stands as it is."""
    if isinstance(tree, Raw):
        return tree.text.encode()
    if isinstance(tree, dict):
        return b"{" + b", ".join(json.dumps(str(k)).encode() + b": " + as_json(v) for k, v in tree.items()) + b"}"
    if isinstance(tree, list | tuple):
        return b"[" + b", ".join(map(as_json, tree)) + b"]"
    return json.dumps(tree).encode()


@cache
def _clusters() -> dict[str, Any]:
    names = [n for n in PRESETS if n != "local"]
    return {
        n: {"version": VERSION, **json.loads(json.dumps(asdict(preset(n, -(-16 // preset(n, 1).ranks_per_node)))))}
        for n in names
    }


def clusters() -> st.SearchStrategy[Tree]:
    """The tables of a cluster file."""
    return st.sampled_from(sorted(_clusters())).map(_clusters().__getitem__)


@st.composite
def jobs(draw: st.DrawFn) -> Tree:
    """The tables of a job for the cluster that a measurement left in cluster.toml."""
    heads = draw(st.sampled_from((2, 4)))
    model: Tree = {"family": draw(st.sampled_from(("llama", "qwen3", "gpt2"))), "vocab": 300, "hidden": 32}
    model |= {"layers": draw(st.sampled_from((1, 2, 4))), "heads": heads, "kv_heads": heads, "ffn": 64, "max_seq": 64}
    if draw(st.integers(0, 3)) == 0:
        model |= {"family": "mixtral", "experts": {"count": 4, "top_k": 2, "ffn": 32}}
    strategy: Tree = draw(
        st.sampled_from(
            (
                "auto",
                "dp=2",
                "dp=2,zero=3",
                "tp=2,sp=1",
                "pp=2,micro_batch=2",
                {"dp": 2, "zero": 1, "micro_batch": 2, "bucket": 0.5},
                {"dp": 2, "compression": "topk:0.01", "recompute": "selective"},
                {"pp": 2, "virtual": 1, "schedule": "zb-h1", "layers": "auto"},
            )
        )
    )
    if model["layers"] == 1 and "pp" in strategy:
        strategy = "dp=1"
    return {
        "model": model,
        "cluster": {"file": "cluster.toml"} if draw(st.booleans()) else {"preset": "local", "ranks": 2},
        "job": {
            "global_batch": 8,
            "seq": 32,
            "clip": 1.0,
            "precision": {"compute": "float32"},
            "optimizer": {"name": "adamw", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "strategy": strategy,
        "train": {"data": "text.txt", "lr": 3e-3, "steps": 2, "seed": 1, "sample_tokens": 2, "timeout_s": 60.0},
    }


CONFIGS: dict[str, Tree] = json.loads(FilePath(__file__).with_name("hf_configs.json").read_text())


_PUBLISHED = FilePath(__file__).parents[2] / "spec" / "data" / "published_configs.json"


@cache
def _hybrids() -> list[Tree]:
    """One published configuration of each family whose blocks differ, or that has a mechanism of its own."""
    every = {row[3].get("model_type"): row[3] for row in json.loads(_PUBLISHED.read_text())}
    return [keys for family, keys in every.items() if family not in CONFIGS]


def configs() -> st.SearchStrategy[Tree]:
    """The keys of a Hugging Face config.json."""
    own = st.sampled_from([{"model_type": family, **keys} for family, keys in CONFIGS.items()])
    return own | st.deferred(lambda: st.sampled_from(_hybrids()))


SCHEDULE = b"0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1,\n"
RUNS = (
    b"row_id,source_family,gpu,gpus,model,params_b,layers,hidden,heads,seq_len,gbs,mbs,tp,pp,dp,step_time_s,framework\n"
    b"a,own,H100,64,gpt,22,48,6144,64,2048,64,1,8,1,8,3.1,megatron-lm\n"
    b"b,own,A100-80GB,8,gpt,1.7,24,2304,24,2048,512,16,1,1,8,2.3,megatron-lm\n"
)
NCCL = b"""# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid 3161 on  node01 device  0 [0000:07:00] NVIDIA H100
#  Rank  1 Group  0 Pid 3161 on  node01 device  1 [0000:08:00] NVIDIA H100
 1048576  262144  float    sum     -1   31.1  45.2  54.1      0   29.9  45.9  55.4      0
 33554432  8388608  float    sum     -1   231.1  145.2  254.1      0   229.9  145.9  255.4      0
 67108864  16777216  float    sum     -1   431.1  155.2  264.1      0   429.9  155.9  265.4      0
"""
