"""Hugging Face weights: every tensor in its place, any slice, there and back to the bit, and mistakes in one line."""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from ranks import first_loss
from test_models import configs
from tokenizers import Tokenizer
from torch import Tensor
from typer.testing import CliRunner

from phalanx import session
from phalanx.cli import app
from phalanx.nn.hugging_face import container, files
from phalanx.nn.hugging_face.names import is_buffer, plain, sources
from phalanx.nn.initial import create
from phalanx.nn.stored import introduce, open_weights
from phalanx.resume import resumed
from phalanx.runs import claim
from phalanx.spec import jobfile, plan
from phalanx.spec.cluster_presets import preset as cluster
from phalanx.spec.errors import InputError
from phalanx.spec.job import Job
from phalanx.spec.jobfile import make_model
from phalanx.spec.model import ModelSpec, parameters
from phalanx.spec.strategy import Strategy

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GPT_NEOX = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
TINY: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 6},
    "mistral": LLAMA | {"sliding_window": 16},
    "qwen2": LLAMA | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    "qwen3": LLAMA | {"head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "n_inner": 48, "initializer_range": 0.2},
    "gpt_neox": GPT_NEOX | {"rotary_pct": 0.5},
}


def spec_of(folder: Path) -> ModelSpec:
    return make_model({"config": str(folder / "config.json")}, folder)[0]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of random models that transformers has saved, by family, type and size of a shard."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    @cache
    def make(family: str, dtype: torch.dtype = torch.float32, shard: str = "1GB") -> Path:
        torch.manual_seed(1)
        config = AutoConfig.for_model(family, vocab_size=97, bos_token_id=1, eos_token_id=2, **TINY[family])
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        for p in model.parameters():  # biases and norms too: what is lost must show
            torch.nn.init.normal_(p, std=0.2)
        folder = tmp_path_factory.mktemp("theirs") / family
        model.save_pretrained(folder, max_shard_size=shard)
        return folder

    return make


def tensors(folder: Path) -> dict[str, Tensor]:
    found = [safetensors.torch.load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: t for part in found for name, t in part.items()}


def logits(folder: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", TINY)
def test_every_tensor_of_transformers_is_covered_once(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    @settings(max_examples=6)
    @given(configs(family))
    def covered(arguments: dict[str, Any]) -> None:
        config = AutoConfig.for_model(family, **arguments)
        with torch.device("meta"):
            state = AutoModelForCausalLM.from_config(config).state_dict()
        (tmp_path / "config.json").write_text(config.to_json_string())
        spec = spec_of(tmp_path)
        state = {plain(family, name): t for name, t in state.items()}
        state = {name: t for name, t in state.items() if not is_buffer(spec, name)}
        places = {fqn: replace(s, tensor=plain(family, s.tensor)) for fqn, s in sources(spec).items()}
        rows: dict[str, list[int]] = {name: [] for name in state}
        shapes = {p.fqn: p.shape for p in parameters(spec)}
        for fqn, s in places.items():
            assert tuple(state[s.tensor].shape) == s.shape
            out = shapes[fqn][0]
            rows[s.tensor] += [s.first + r // s.run * s.stride + r % s.run for r in range(out)]
            assert math.prod(s.shape) * out == math.prod(shapes[fqn]) * s.shape[-1 if s.transposed else 0]
        for name, t in state.items():
            axis = next(-1 if s.transposed else 0 for s in places.values() if s.tensor == name)
            assert sorted(rows[name]) == list(range(t.shape[axis]))

    covered()


@pytest.mark.parametrize(("dtype", "shard"), [(torch.float32, "1GB"), (torch.bfloat16, "8KB")])
@pytest.mark.parametrize("family", TINY)
def test_there_and_back_to_the_bit(  # type: ignore[no-untyped-def]
    family: str, dtype: torch.dtype, shard: str, theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = theirs(family, dtype, shard)
    found = CliRunner().invoke(app, ["import", str(folder), "--json"])
    assert found.exit_code == 0, found.output
    command = ["export-weights", f"runs/{family}", "--out", "out", "--shard-size", shard, "--json"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(before[name].dtype == dtype for name in before)
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    assert (len(list(Path("out").glob("*.safetensors"))) > 1) == (shard == "8KB")
    tokens = torch.arange(24)[None] % 97
    assert torch.equal(logits(folder, tokens), logits(tmp_path / "out", tokens))
    assert spec_of(tmp_path / "out") == spec_of(folder)


@pytest.mark.parametrize("family", TINY)
def test_our_logits_are_those_of_transformers(family: str, theirs) -> None:  # type: ignore[no-untyped-def]
    folder = theirs(family)
    spec = spec_of(folder)
    weights = open_weights(folder, spec)
    model = create(spec, torch.float32, torch.device("cpu"))
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights.slice(name, 0, p.numel()).view(p.shape))
        ours, reference = model(tokens), logits(folder, tokens)
    assert (ours - reference).abs().max() <= 1e-5 * max(1.0, float(reference.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_slice_is_that_of_the_whole_and_reads_no_more(  # type: ignore[no-untyped-def]
    family: str, theirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(theirs(family))
    weights = files.read(theirs(family), spec)
    wholes = {p.fqn: weights.slice(p.fqn, 0, p.numel) for p in parameters(spec)}
    fill, counted = container._fill, [0]

    def counting(descriptor: int, memory: Any, offset: int, stored: container.Stored) -> None:
        counted[0] += len(memory)
        fill(descriptor, memory, offset, stored)

    monkeypatch.setattr(container, "_fill", counting)

    @settings(max_examples=60)
    @given(st.sampled_from(parameters(spec)), st.data())
    def equal(p: Any, data: st.DataObject) -> None:
        stop = data.draw(st.integers(0, p.numel))
        start = data.draw(st.integers(0, stop))
        counted[0] = 0
        assert torch.equal(weights.slice(p.fqn, start, stop), wholes[p.fqn][start:stop])
        into = math.prod(p.shape[1:])
        rows = -(-stop // into) - start // into if stop > start else 0
        turned = weights.places[p.fqn][0].transposed
        assert counted[0] == 4 * (rows * into if turned else stop - start)

    equal()


@pytest.mark.parametrize(("family", "strategy"), [("gpt2", Strategy(dp=2)), ("gpt_neox", Strategy(dp=2, zero=3))])
def test_two_ranks_start_at_the_loss_of_transformers(  # type: ignore[no-untyped-def]
    family: str, strategy: Strategy, theirs, pool: Pool
) -> None:
    folder = theirs(family)
    tokens = torch.randint(97, (2, 33), generator=torch.Generator().manual_seed(2))
    found = pool.run(2, first_loss, spec_of(folder), Job(2, 32), strategy, folder, tokens)
    flat = logits(folder, tokens[:, :-1]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(flat.double(), tokens[:, 1:].flatten())
    assert found == pytest.approx([float(expected)] * 2, rel=1e-5)


def test_an_imported_model_writes_the_text_that_transformers_writes(  # type: ignore[no-untyped-def]
    theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its run folder holds, for whoever trains from it, any slice of the same weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "hf", theirs("llama"), lambda t: t)
    words = tokenizer(folder / "tokenizer.json")
    assert CliRunner().invoke(app, ["import", "hf"]).exit_code == 0
    command = ["generate", "runs/hf", "--prompt", "w5 w6", "--temperature", "0", "--tokens", "8"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert CliRunner().invoke(app, ["export-weights", "runs/hf", "--out", "out"]).exit_code == 0
    reader = AutoTokenizer.from_pretrained("out")
    model = AutoModelForCausalLM.from_pretrained("out").eval()
    ids = model.generate(**reader("w5 w6", return_tensors="pt"), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found.stdout.removesuffix("\n") == reader.decode(ids[0])

    words.add_tokens(["another"])
    for broken, said in ((b"{}", "is not a tokenizer.json"), (None, "has 98 entries, model.vocab is 97")):
        words.save("runs/hf/tokenizer.json")
        if broken is not None:
            Path("runs/hf/tokenizer.json").write_bytes(broken)
        found = CliRunner().invoke(app, command)
        assert (found.exit_code, said in found.stderr) == (2, True), found.output

    spec = spec_of(folder)
    other = replace(spec, rope_theta=9.0)
    said = introduce(Path("runs/hf"), other)[1:]
    assert said == ["note: model.rope_theta = 9.0, the weights were made with 10000.0"]
    assert len(introduce(folder, spec)) == 1
    ours, run = open_weights(folder, spec), open_weights(Path("runs/hf"), spec)
    for p in parameters(spec):
        assert torch.equal(ours.slice(p.fqn, 1, p.numel), run.slice(p.fqn, 1, p.numel))


def save(folder: Path, like: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text((like / "config.json").read_text())
    safetensors.torch.save_file(change(tensors(like)), folder / "model.safetensors")
    return folder


def test_older_files_are_read_the_same(theirs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """No prefix, buffers beside weights, a second copy of the tied head: as the hub has GPT-2 and GPT-NeoX."""
    mask = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    scalar = torch.tensor(-1e9)

    def old_gpt2(t: dict[str, Tensor]) -> dict[str, Tensor]:
        bare = {name.removeprefix("transformer."): value for name, value in t.items()}
        head = {"lm_head.weight": bare["wte.weight"].clone()}
        return bare | head | {"h.0.attn.bias": mask, "h.1.attn.masked_bias": scalar}

    def old_neox(t: dict[str, Tensor]) -> dict[str, Tensor]:
        a = "gpt_neox.layers.0.attention"
        return t | {f"{a}.bias": mask.bool(), f"{a}.masked_bias": scalar, f"{a}.rotary_emb.inv_freq": torch.ones(4)}

    for family, change in (("gpt2", old_gpt2), ("gpt_neox", old_neox)):
        new = theirs(family)
        spec = spec_of(new)
        old = files.read(save(tmp_path / family, new, change), spec)
        one = files.read(tmp_path / family / "model.safetensors", spec)
        for p in parameters(spec):
            whole = files.read(new, spec).slice(p.fqn, 0, p.numel)
            assert torch.equal(old.slice(p.fqn, 0, p.numel), whole)
            assert torch.equal(one.slice(p.fqn, 0, p.numel), whole)


def without(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        t = tensors(folder)
        del t[name]
        safetensors.torch.save_file(t, folder / "model.safetensors")

    return damage


def changed(name: str, value: Tensor) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        safetensors.torch.save_file(tensors(folder) | {name: value}, folder / "model.safetensors")

    return damage


def cut(at: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:at])

    return damage


def nested(folder: Path) -> None:
    header = b"[" * 100_000
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def text(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def shard_missing(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_lies(folder: Path) -> None:
    shard_missing(folder)
    one = {"model.norm.weight": torch.ones(32)}
    safetensors.torch.save_file(one, folder / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("model.norm.weight"), "lacks model.norm.weight [32]"),
        (without("lm_head.weight"), "lacks lm_head.weight [97, 32]; set model.tied = true if"),
        (changed("model.norm.weight", torch.ones(33)), "model.norm.weight has shape [33], the model needs [32]"),
        (changed("model.norm.weight", torch.ones(32).to(torch.float8_e4m3fn)), "is stored as F8_E4M3"),
        (changed("lm_head.weight", torch.ones(128, 32)), "has 128 rows, model.vocab is 97; a padded vocabulary"),
        (changed("model.layers.2.norm.weight", torch.ones(2)), "holds model.layers.2.norm.weight [2], which"),
        (cut(5), "is not a safetensors file"),
        (cut(200), "is cut short: 200 bytes, its header alone"),
        (cut(40_000), "is cut short: 40000 bytes of"),
        (text, "is not a safetensors file"),
        (nested, "is not a safetensors file (its header is not JSON)"),
        (only_a_pickle, "holds pytorch_model.bin, a pickle, and no model.safetensors; convert it"),
        (no_config, "config.json': no such file"),
        (shard_missing, "model-00001-of-00002.safetensors': is missing, model.safetensors.index.json names it"),
        (index_lies, "lacks lm_head.weight, which model.safetensors.index.json says is there"),
    ],
)
def test_damage_is_named_in_one_line_before_anything_is_written(  # type: ignore[no-untyped-def]
    damage: Callable[[Path], None], words: str, theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    damage(save(tmp_path / "hf", theirs("llama"), lambda t: t))
    found = CliRunner().invoke(app, ["import", "hf"])
    assert found.exit_code == 2, found.output
    assert words in found.output
    assert found.output.startswith("error: model.config = " if damage is no_config else "error: HF_DIR = ")
    assert found.output.count("\n") == 1
    assert not Path("runs").exists()


def tokenizer(path: Path, first: int = 0) -> Tokenizer:
    """A tokenizer.json of 97 words, w0 to w96, with their ids from `first` on; spaces belong to words, as Llama's."""
    from tokenizers import decoders, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({f"\u2581w{(first + i) % 97}": i for i in range(97)}, "\u2581w0"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    made.decoder = decoders.Metaspace()  # type: ignore[assignment]
    made.save(str(path))
    return made


def test_an_import_moves_nothing_away_before_it_has_succeeded(  # type: ignore[no-untyped-def]
    theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    save(Path("runs/hf"), theirs("llama"), lambda t: t)
    save(Path("hf"), theirs("llama"), lambda t: t)

    def refused(words: str, source: str, name: str) -> None:
        before = sorted(tmp_path.rglob("*"))
        found = CliRunner().invoke(app, ["import", source, "--name", name])
        assert (found.exit_code, words in found.output) == (2, True), found.output
        locks = {p for p in tmp_path.rglob("*.lock")}
        assert set(tmp_path.rglob("*")) - locks == set(before) - locks

    refused("--name = 'hf': runs/hf is where the weights are read from; choose another", "runs/hf", "")
    refused("is where the weights are read from", "runs/../runs/hf", "hf")
    with ExitStack() as stack:
        claim(Path("runs/hf"), stack, "train.name")
        refused("--name = 'hf': is in use by another process", "hf", "hf")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("phalanx.runtime.checkpoint.write_alone", full)
        refused("cannot be made ([Errno 28] No space left on device)", "hf", "hf")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**4))
        refused("the disk has 9.77 KiB free", "hf", "hf")
    assert CliRunner().invoke(app, ["import", "hf"]).exit_code == 0
    assert len(list(Path("runs").glob("hf.*/model.safetensors"))) == 1
    assert Path("runs/hf/model.json").exists()


def test_a_run_takes_the_tokenizer_of_its_weights_and_gives_back_what_lay_beside_them(  # type: ignore[no-untyped-def]
    theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the ranks' work is real; they leave the weights that they were given."""
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "hf", theirs("llama"), lambda t: t)
    tokenizer(folder / "tokenizer.json")
    tokenizer(tmp_path / "other.json", first=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"of_theirs": 1}))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    Path("text.txt").write_text(" ".join(f"w{i * 7 % 97}" for i in range(900)))
    assert CliRunner().invoke(app, ["import", "hf"]).exit_code == 0
    tables = 'model.config = "hf/config.json"\njob = { global_batch = 2, seq = 8 }\nstrategy = "dp=1"\n'
    Path("job.toml").write_text(f'{tables}train = {{ data = "text.txt", weights = "hf", steps = 9 }}\n')

    def ranks(module: str, argument: str, *_: object) -> None:
        shutil.copytree("runs/hf/checkpoint", Path(json.loads(argument)["folder"]) / "checkpoint")

    monkeypatch.setattr("phalanx.runtime.launch.launch", ranks)
    monkeypatch.setattr(session, "resolve_cluster", lambda *_: cluster("dgx-h100", 1))
    monkeypatch.setattr(session, "outcome", lambda *_: None)

    def train(*overrides: str) -> list[str]:
        said: list[str] = []
        session.train(jobfile.load(Path("job.toml"), overrides), False, None, lambda _: None, said.append)
        return said

    def exported(run: str) -> dict[str, str]:
        out = tmp_path / f"{run}-out"
        found = CliRunner().invoke(app, ["export-weights", f"runs/{run}", "--out", str(out)])
        assert found.exit_code == 0, found.output
        return {p.name: p.read_text() for p in out.iterdir() if p.suffix != ".safetensors"}

    own = str(folder / "tokenizer.json")
    assert f"weights: train.tokenizer = {own!r}, which is beside them" in train()
    there = plan.read(Path("runs/job/plan.json"))
    assert there.train.tokenizer == own
    assert resumed(Path("job.toml"), ()).train.tokenizer == own
    assert Tokenizer.from_file("runs/job/tokenizer.json").get_vocab() == Tokenizer.from_file(own).get_vocab()
    out = exported("job")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert out[name] == (folder / name).read_text()
    assert json.loads(out["config.json"])["eos_token_id"] == 2
    assert "of_theirs" in out["config.json"]

    # Another model than the weights': their special tokens, and nothing else of their config.
    train("train.name=turned", "model.rope_theta=9.0")
    turned = json.loads(exported("turned")["config.json"])
    assert (turned["eos_token_id"], turned["rope_theta"], "of_theirs" in turned) == (2, 9.0, False)

    said = train("train.name=another", "train.tokenizer=other.json")
    assert any("is another than the weights' own" in line for line in said)
    out = exported("another")
    assert "chat_template.jinja" not in out
    assert json.loads(out["config.json"])["eos_token_id"] is None
    with pytest.raises(InputError, match=r"^train.weights = .*: is this run's own folder; choose another train.name"):
        train("train.name=hf", 'train.weights="runs/hf"')
    assert Path("runs/hf/checkpoint").exists()
    shutil.rmtree("runs/hf/checkpoint")
    with pytest.raises(InputError, match=r"^train.weights = .*: holds no checkpoint yet"):
        train('train.weights="runs/hf"')
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"^train.weights = .*: holds no model.safetensors"):
        train()


def test_an_export_overwrites_nothing_loses_nothing_and_says_all(  # type: ignore[no-untyped-def]
    theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "hf", theirs("llama"), lambda t: t | {"model.norm.weight": torch.full((32,), 1e5)})
    assert CliRunner().invoke(app, ["import", "hf"]).exit_code == 0

    def refused(words: str, *more: str) -> None:
        found = CliRunner().invoke(app, ["export-weights", "runs/hf", "--out", *more])
        assert (found.exit_code, words in found.output) == (2, True), found.output
        assert not [p for p in tmp_path.iterdir() if "writing" in p.name]

    refused("exists and is not empty", "hf")
    Path("file").touch(0o777)
    refused("error: --out = 'file/out': nothing can be written to", "file/out")
    assert "exporting" not in CliRunner().invoke(app, ["export-weights", "runs/hf", "--out", "file/out"]).output
    for command in (["generate", "hf"], ["export-weights", "hf", "--out", "out"]):
        found = CliRunner().invoke(app, command)
        assert "RUN = 'hf': is no run; phalanx import makes one of Hugging Face weights" in found.output
    save(tmp_path / "half", folder, lambda t: {name: value.bfloat16() for name, value in t.items()})
    assert CliRunner().invoke(app, ["import", "half"]).exit_code == 0
    found = CliRunner().invoke(app, ["export-weights", "runs/half", "--out", "out", "--dtype", "float16"])
    assert "has 99840, which overflows" in found.output  # 10^5 in bfloat16
    refused("has 100000, which overflows", "out", "--dtype", "float16")
    refused("is no type for weights", "out", "--dtype", "int8")
    refused("no such checkpoint; it has 0", "out", "--step", "3")
    refused("is not a size", "out", "--shard-size", "many")
    about = json.loads(Path("runs/hf/model.json").read_text())
    for field, value, words in (
        ("out_bias", False, "the checkpoint has 2 parameters more than the model"),
        (
            "rotary_dim",
            4,
            "model.rotary_dim = 4: a llama config.json of transformers cannot say it (it would mean 6)",
        ),
    ):
        Path("runs/hf/model.json").write_text(json.dumps({**about, "model": about["model"] | {field: value}}))
        refused(words, "out")
    assert not Path("out").exists()
    assert folder.exists()
