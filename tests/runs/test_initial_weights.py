"""Weights that come into a run and go out of it: there and back to the bit, with the tokenizer that is theirs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import rank_cases
from support.rank_pool import Pool
from support.saved_models import ROUTED, TINY, logits, save, spec_of, tensors, tokenizer
from tokenizers import Tokenizer
from typer.testing import CliRunner

from phalanx.answers import plan as decisions
from phalanx.answers.runs import train as training
from phalanx.cli.app import app
from phalanx.infer.sampling import Sampling
from phalanx.infer.text import answer, question
from phalanx.nn import weight_files
from phalanx.nn.init import create, fill_buffers
from phalanx.nn.weight_files import introduce, open_weights
from phalanx.runs.initial_weights import companion_files, start_from_weights
from phalanx.runs.resume import resumed_job
from phalanx.spec.cluster.presets import preset as cluster
from phalanx.spec.errors import InputError
from phalanx.spec.files import job_file, plan
from phalanx.spec.model.spec import buffers, parameters
from phalanx.training import data


@pytest.mark.parametrize(("dtype", "shard"), [(torch.float32, "1GB"), (torch.bfloat16, "8KB")])
@pytest.mark.parametrize("family", TINY)
def test_there_and_back_to_the_bit(  # type: ignore[no-untyped-def]
    family: str, dtype: torch.dtype, shard: str, theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = theirs(family, dtype, shard)
    found = CliRunner().invoke(app, ["runs", "import", str(folder), "--json"])
    assert found.exit_code == 0, found.output
    command = ["runs", "export", f"runs/{family}", "--out", "out", "--shard-size", shard, "--json"]
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


def test_an_imported_model_writes_the_text_that_transformers_writes(  # type: ignore[no-untyped-def]
    theirs, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and over tensor-parallel ranks. And its run folder holds, for whoever trains from it, any slice of the
    same weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "hf", theirs("llama"), lambda t: t)
    words = tokenizer(folder / "tokenizer.json")
    assert CliRunner().invoke(app, ["runs", "import", "hf"]).exit_code == 0
    command = ["generate", "runs/hf", "--prompt", "w5 w6", "--temperature", "0", "--tokens", "8"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    assert CliRunner().invoke(app, ["generate", "hf", *command[2:]]).output == found.output  # as it is
    assert CliRunner().invoke(app, ["runs", "export", "runs/hf", "--out", "out"]).exit_code == 0
    reader = AutoTokenizer.from_pretrained("out")
    model = AutoModelForCausalLM.from_pretrained("out").eval()
    ids = model.generate(**reader("w5 w6", return_tensors="pt"), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found.stdout.removesuffix("\n") == reader.decode(ids[0])
    said = pool.run(2, rank_cases.write_on, tmp_path / "runs" / "hf", "w5 w6", Sampling(8, temperature=0))
    assert said == [reader.decode(ids[0])] * 2
    drawn = pool.run(2, rank_cases.write_on, tmp_path / "runs" / "hf", "w5 w6", Sampling(8))
    (text,) = answer(question(tmp_path / "runs" / "hf", ["w5 w6"], Sampling(8)))
    assert drawn == ["w5 w6" + text] * 2

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


@pytest.mark.parametrize("family", ROUTED)
def test_so_does_one_with_experts(  # type: ignore[no-untyped-def]
    family: str, theirs, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "hf", theirs(family), lambda t: t)
    words = tokenizer(folder / "tokenizer.json")
    assert CliRunner().invoke(app, ["runs", "import", "hf"]).exit_code == 0
    command = ["generate", "runs/hf", "--prompt", "w5 w6", "--temperature", "0", "--tokens", "20"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.output
    model = AutoModelForCausalLM.from_pretrained("hf").eval()
    ids = model.generate(torch.tensor([[5, 6]]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert found.stdout.removesuffix("\n") == words.decode(ids[0].tolist())
    said = pool.run(2, rank_cases.write_on, tmp_path / "runs" / "hf", "w5 w6", Sampling(20, temperature=0))
    assert said == [words.decode(ids[0].tolist())] * 2


def test_what_bends_gradients_alone_is_no_other_model(  # type: ignore[no-untyped-def]
    theirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How experts are balanced: an export needs not say it, and weights need not have learned it."""
    monkeypatch.chdir(tmp_path)
    folder = save(tmp_path / "hf", theirs("mixtral"), lambda t: t)
    assert CliRunner().invoke(app, ["runs", "import", "hf"]).exit_code == 0
    about = json.loads(Path("runs/hf/model.json").read_text())

    def exported(out: str, **fields: float) -> str:
        changed = about["model"] | {"experts": about["model"]["experts"] | fields}
        Path("runs/hf/model.json").write_text(json.dumps({**about, "model": changed}))
        return CliRunner().invoke(app, ["runs", "export", "runs/hf", "--out", out]).output

    exported("out", balance_loss=0.5, z_loss=0.1)
    assert tensors(tmp_path / "out").keys() == tensors(folder).keys()
    for field in ({"capacity": 1.25}, {"scale": 2.0}, {"balance_bias": 0.1}):
        assert "model.experts = " in (said := exported("other", **field)), said
        assert "a mixtral config.json of transformers cannot express it" in said
    spec = spec_of(folder)
    assert spec.experts is not None
    biased = replace(spec, experts=replace(spec.experts, balance_bias=0.1))
    model = create(biased, torch.float32, torch.device("cpu"))
    for weights in (open_weights(folder, biased), open_weights(Path("runs/hf"), biased)):
        fill_buffers(model, weights)
        assert not any(model.get_buffer(b.fqn).any() for b in buffers(biased))


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
    assert CliRunner().invoke(app, ["runs", "import", "hf"]).exit_code == 0
    tables = 'model.config = "hf/config.json"\njob = { global_batch = 2, seq = 8 }\nstrategy = "dp=1"\n'
    Path("job.toml").write_text(f'{tables}train = {{ data = "text.txt", weights = "hf", steps = 9 }}\n')

    def ranks(module: str, argument: str, *_: object) -> None:
        shutil.copytree("runs/hf/checkpoint", Path(json.loads(argument)["folder"]) / "checkpoint")

    monkeypatch.setattr("phalanx.runtime.process.launch.launch", ranks)
    monkeypatch.setattr(decisions, "resolve_cluster", lambda *_: cluster("dgx-h100", 1))
    monkeypatch.setattr(training, "outcome", lambda *_: None)

    def train(*overrides: str) -> list[str]:
        said: list[str] = []
        training.run_training(job_file.load(Path("job.toml"), overrides), False, None, lambda _: None, said.append)
        return said

    def exported(run: str) -> dict[str, str]:
        out = tmp_path / f"{run}-out"
        found = CliRunner().invoke(app, ["runs", "export", f"runs/{run}", "--out", str(out)])
        assert found.exit_code == 0, found.output
        return {p.name: p.read_text() for p in out.iterdir() if p.suffix != ".safetensors"}

    own = str(folder / "tokenizer.json")
    assert f"weights: train.tokenizer = {own!r}, from the folder of the weights" in train()
    there = plan.read(Path("runs/job/plan.json"))
    assert there.train.tokenizer == own
    assert resumed_job(Path("job.toml"), ()).train.tokenizer == own
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
    assert any("differs from the weights' own" in line for line in said)
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


@pytest.mark.parametrize("weights", ["hf", "hf/model.safetensors"])
@pytest.mark.parametrize(
    ("named", "beside", "ids", "said"),
    [
        ("", True, False, "weights: train.tokenizer = 'HERE/hf/tokenizer.json', from the folder of the weights"),
        (
            "",
            False,
            False,
            "note: no tokenizer.json in the folder of the weights: one is trained on the texts, and th",
        ),
        ("", True, True, ""),
        ("same.json", True, False, ""),
        ("hf", True, False, ""),
        (
            "other.json",
            True,
            False,
            "note: train.tokenizer = 'HERE/other.json' differs from the weights' own, HERE/hf/t",
        ),
        ("other.json", False, False, ""),
    ],
)
def test_whose_tokenizer_a_run_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, named: str, beside: bool, ids: bool, said: str
) -> None:
    for path, text in (("hf/tokenizer.json", "a"), ("hf/merges.txt", "m"), ("same.json", "a"), ("other.json", "b")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "hf/model.safetensors").touch()
    if not beside:
        (tmp_path / "hf/tokenizer.json").unlink()
    monkeypatch.setattr(weight_files, "introduce", lambda path, model: [f"{path.name}: of {model.layers} blocks"])
    monkeypatch.setattr(data, "holds_ids", lambda _: ids)
    train = {"steps": 1, "weights": weights} | ({"tokenizer": named} if named else {})
    file = job_file.from_tables(
        {"model": {"preset": "llama3-8b"}, "job": {"global_batch": 2, "seq": 8}, "train": train}, tmp_path
    )
    said, announced = said.replace("HERE", str(tmp_path)), list[str]()
    taken = start_from_weights(file, announced.append)
    assert announced.pop(0) == f"{Path(weights).name}: of 32 blocks"
    assert [line[: len(said)] for line in announced] == ([said] if said else [])
    own = str(tmp_path / "hf/tokenizer.json") if "from the folder" in said else file.train.tokenizer
    assert taken == replace(file, train=replace(file.train, tokenizer=own))
    theirs = beside and not ids and named != "other.json"
    assert companion_files(taken.train) == [tmp_path / "hf/merges.txt"] * theirs
    assert companion_files(replace(taken.train, weights="")) == []
