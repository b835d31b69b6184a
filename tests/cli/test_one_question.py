"""One argument means one thing: all commands over one drawn question agree in what they share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.in_process_cli import error_of, json_of, phalanx, text_of
from support.sizes import examples

from phalanx.planning.explain.traffic import term_of
from phalanx.spec.files.plan import write_text

_COMMANDS = ("predict", "explain", "lint", "comm", "memory", "roofline")


def _words(command: str) -> tuple[str, ...]:
    return ("tables", command) if command in ("comm", "memory", "roofline") else (command,)


@st.composite
def _questions(draw: st.DrawFn) -> list[str]:
    """Options of a question that several stacks can answer; dp is named or left to fill the GPUs."""
    tp, pp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
    gpus, used = draw(st.sampled_from([32, 64, 96])), tp * pp
    line = [f"tp={tp}", f"pp={pp}", "zero=1", f"micro_batch={draw(st.sampled_from([1, 2]))}"]
    if pp > 1 and draw(st.booleans()):
        line += ["schedule=interleaved", "virtual=2"]
    elif pp == 2 and draw(st.booleans()):
        line += ["layers=12/20"]
    if draw(st.booleans()):
        line += [f"dp={draw(st.sampled_from(sorted({1, min(2, gpus // used), gpus // used})))}"]
    model, seq = draw(st.sampled_from([("llama3-8b", 8192), ("llama2-7b", 4096), ("mixtral-8x7b", 4096)]))
    forms = [[], ["--stack", "nemo-24.11"], ["--precision", "fp8"], ["--stack", "phalanx"]]
    more = draw(st.sampled_from([*forms, ["--options", "first_moment=bfloat16"]]))
    cluster = draw(st.sampled_from(["dgx-h100", "dgx-h200"]))
    words = ["--model", model, "--cluster", cluster, "--gpus", str(gpus), "--batch", "384", "--seq", str(seq)]
    return [*words, "--strategy", ",".join(line), *more]


def _answers(here: Path, asked: list[str]) -> dict[str, Any]:
    found = {}
    for command in _COMMANDS:
        code, out, err = phalanx(here, *_words(command), *asked, "--json")
        assert code in (0, 1), (command, err)
        found[command] = json.loads(out)
        text = phalanx(here, *_words(command), *asked)[1] if command in ("predict", "lint") else ""
        head = f"stack {_question(found[command])['stack']}, "  # behind what is assumed of a file
        assert not text or any(line.startswith(head) for line in text.splitlines())
    return found


def _question(answer: Any) -> dict[str, Any]:
    return answer.get("prediction", answer)["question"]  # type: ignore[no-any-return]


def _agree(here: Path, asked: list[str]) -> None:
    found = _answers(here, asked)
    for command in _COMMANDS[1:]:
        assert _question(found[command]) == _question(found["predict"]), command
    predicted, explained = found["predict"], found["explain"]["prediction"]
    assert explained["step_time_s"] == pytest.approx(predicted["step_time_s"], rel=1e-12)
    assert explained["terms_s"] == pytest.approx(predicted["terms_s"], rel=1e-12)
    assert explained["mfu"] == pytest.approx(predicted["mfu"], rel=1e-12)
    assert explained["memory_bytes"] == predicted["memory_bytes"]
    assert explained["usable_bytes"] == predicted["usable_bytes"]
    assert found["memory"]["tables"][0]["rows"][-1]["takes_bytes"] == pytest.approx(predicted["memory_bytes"])
    sent: dict[str, float] = {}
    alone: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for row in found["comm"]["tables"][0]["rows"]:
        if row["hidden"] is not None:  # the others are of the pipeline's ends
            sent[row["axis"]] = sent.get(row["axis"], 0.0) + row["sent_bytes"]
            term = term_of(row["axis"])
            alone[term] = alone.get(term, 0.0) + row["alone_s"]
            exposed[term] = exposed.get(term, 0.0) + row["alone_s"] * (1 - row["hidden"])
    repeats = "recompute=" in predicted["question"]["strategy"]  # what a repeated pass sends is its term's
    again = explained["terms_s"].get("recompute", 0.0) if repeats else 0.0
    for term, seconds in exposed.items():  # that of experts has permutations and waiting too
        least = min(explained["terms_s"].get(term, 0.0), alone[term])
        assert term == "ep" or least * (1 - 1e-9) <= seconds <= (least + again) * (1 + 1e-9), term
    for row in found["explain"]["communication"]:
        assert sent[row["axis"]] == pytest.approx(row["sent_bytes"], rel=1e-12)
    in_block, operators = found["roofline"]["tables"][1]["rows"], found["explain"]["operators"]
    assert [row["operator"] for row in in_block] == [row["name"] for row in operators]  # blocks may differ: twice
    flops = [row["flops"] for row in operators]
    assert [1e9 * row["gflop"] for row in in_block] == pytest.approx(flops, rel=1e-12)


def _plan_agrees(here: Path, asked: list[str]) -> None:
    """What is planned with the question's tp and pp kept has one price, memory and usable memory in all commands."""
    at = asked.index("--strategy") + 1
    kept = ",".join(part for part in asked[at].split(",") if part.startswith(("tp=", "pp=")))
    code, out, err = phalanx(here, "plan", *asked[:at], kept, *asked[at + 1 :], "--json")
    if code == 2 and "nothing fits" in err:
        return
    assert code == 0, err
    answer = json.loads(out)
    best, found = answer["best"], _answers(here, ["plan.json"])
    for command in _COMMANDS:
        question = _question(found[command])
        assert question == _question(found["predict"]), command
        for field in ("stack", "precision", "gpus", "global_batch", "seq"):
            assert question[field] == _question(answer)[field], (command, field)
        assert question["options"] == answer["options"]
    for command in ("predict", "explain"):
        for figure in ("step_time_s", "mfu"):
            predicted = found[command].get("prediction", found[command])
            assert predicted[figure] == pytest.approx(best[figure], rel=1e-9), (command, figure)
    assert found["explain"]["prediction"]["memory_bytes"] == pytest.approx(best["memory_bytes"], rel=1e-9)
    assert found["explain"]["prediction"]["usable_bytes"] == best["usable_bytes"] == found["predict"]["usable_bytes"]
    assert not {"too-large", "tight-memory"} & {finding["name"] for finding in found["lint"]["findings"]}


@examples(3, 200)
def test_all_commands_agree(tmp_path: Path, examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(_questions())(lambda asked: _agree(tmp_path, asked)))()


@examples(1, 100)
def test_a_plan_is_what_all_commands_say_of_it(tmp_path: Path, examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(_questions())(lambda asked: _plan_agrees(tmp_path, asked)))()


@st.composite
def _small_questions(draw: st.DrawFn) -> list[str]:
    """Options of a question for our own runtime, about a model whose step takes a moment."""
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    zero = draw(st.sampled_from([0, 1, 2, 3] if pp == 1 else [0, 1]))
    line = [f"tp={tp}", f"pp={pp}", f"zero={zero}", f"micro_batch={draw(st.sampled_from([1, 2]))}"]
    gpus = draw(st.sampled_from([8, 16]))
    line += ["schedule=zb-v"] if pp == 2 and draw(st.booleans()) else []
    line += draw(st.sampled_from([[], ["dp=2"] if 2 * tp * pp <= gpus else [], ["sp=1"] if tp > 1 else []]))
    words = ["--model", "config.json", "--cluster", "dgx-h100", "--gpus", str(gpus)]
    return [*words, "--batch", "32", "--seq", "128", "--strategy", ",".join(line)]


def _verify_agrees(here: Path, asked: list[str]) -> None:
    verified = json_of(here, "verify", *asked, "--json")
    found = [
        json.loads(phalanx(here, *_words(c), *asked, "--stack", "phalanx", "--json")[1]) for c in ("predict", "comm")
    ]
    question = _question(found[0])
    assert question == _question(found[1])
    assert question["dp_rule"] in verified["notes"]
    assert set(question["strategy"].split(",")) <= {*verified["strategy"].split(","), *asked[-1].split(",")}
    first = verified["classes"][0]["predicted"]["collectives"]
    run: dict[str, int] = {}
    for row in first:  # the loss and the norm's sums over the world are no traffic of an axis
        if row["axis"] != "world" and row["op"] != "recv":
            axis = "dp" if row["axis"].startswith("dp") else row["axis"]
            run[axis] = run.get(axis, 0) + row["bytes"]
    stages = {"all ranks", "each stage", "both ends", "first stage"}
    told: dict[str, float] = {}
    for row in found[1]["tables"][0]["rows"]:
        if row["by"] in stages:
            told[row["axis"]] = told.get(row["axis"], 0.0) + row["times"] * row["payload_bytes"]
    assert told.keys() == run.keys()
    for axis, bytes_ in run.items():
        # Buckets are padded to equal parts of whole cache lines, as the program alone knows (test_ledger_totals.py).
        padding = 0.01 * bytes_ if axis == "dp" else 0.0
        # Under sp and ZeRO a rank sums the norms in its shard, which holds any of the nine of 64 of 4 bytes, and comm
        # says the mean of all ranks.
        uneven = 4 * 9 * 64 if axis == "tp" and "sp=1" in asked[-1] and "zero=0" not in asked[-1] else 0.0
        assert told[axis] * (1 - 1e-9) - uneven <= bytes_ <= told[axis] * (1 + 1e-9) + padding + uneven, axis


@examples(2, 100)
def test_verify_runs_what_the_others_price(tmp_path: Path, examples: int) -> None:
    """verify takes the same strategy, and rank 0 sends what comm tabulates, but for the padding of buckets."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 256}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **heads, **sizes}))
    words = ["--model", "config.json", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "32", "--seq", "128"]
    _verify_agrees(tmp_path, [*words, "--strategy", "tp=4,pp=2,zero=1,sp=1"])  # the last norm is not rank 0's
    _verify_agrees(tmp_path, [*words, "--strategy", "dp=4,pp=2,zero=1,schedule=zb-v"])  # rank 0 has both ends
    settings(max_examples=examples, deadline=None)(
        given(_small_questions())(lambda asked: _verify_agrees(tmp_path, asked))
    )()


def test_dp_fills_the_gpus_or_says_why_not(tmp_path: Path) -> None:
    asked = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--batch", "128", "--seq", "8192"]
    for line, gpus, rule in (
        ("tp=8,zero=1", "64", "dp=8 fills 64 GPUs over tp=8"),
        ("tp=8,dp=2", "64", "dp=2 as given (48 of 64 GPUs are idle)"),
    ):
        for command in _COMMANDS:
            answer = json.loads(
                phalanx(tmp_path, *_words(command), *asked, "--gpus", gpus, "--strategy", line, "--json")[1]
            )
            assert _question(answer)["dp_rule"] == rule
    for command in _COMMANDS:
        for line, reason in (("tp=3", "do not divide 64 GPUs"), ("tp=8,dp=16", "128 ranks, but there are 64")):
            assert reason in error_of(tmp_path, *_words(command), *asked, "--gpus", "64", "--strategy", line)


def test_a_plan_is_explained_as_it_was_priced(tmp_path: Path) -> None:
    """The plan of a search, in every command, has the search's own price, stack and precision."""
    asked = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "4096"]
    more = ["--stack", "nemo-24.11", "--precision", "fp8"]
    text_of(tmp_path, "plan", *asked, "--options", "first_moment=bfloat16", "--json")
    answers = [
        json.loads(phalanx(tmp_path, *_words(c), "plan.json", "--json")[1]) for c in ("predict", "comm", "memory")
    ]
    assert all(_question(answer)["options"]["first_moment"] == "bfloat16" for answer in answers)
    best = json_of(tmp_path, "plan", *asked, *more, "--json")["best"]
    for command in ("predict", "explain"):
        found = json.loads(phalanx(tmp_path, *_words(command), "plan.json", "--json")[1])
        predicted = found.get("prediction", found)
        assert predicted["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)
        assert (_question(found)["stack"], _question(found)["precision"]) == ("nemo-24.11", "fp8")
    again = json.loads(phalanx(tmp_path, "predict", *asked, *more, "--strategy", best["strategy"], "--json")[1])
    assert again["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)


def test_a_search_keeps_the_fields_that_a_line_fixes(tmp_path: Path) -> None:
    asked = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "4096"]
    answer = json_of(tmp_path, "plan", *asked, "--strategy", "zero=1,tp=4,pp=*", "--json")
    for strategy in [answer["best"]["strategy"], *(r["strategy"] for r in answer["alternatives"])]:
        assert {"tp=4", "zero=1"} <= set(strategy.split(","))
    error_of(tmp_path, "plan", *asked, "--strategy", "tp=3")
    assert "did you mean tp" in error_of(tmp_path, "plan", *asked, "--strategy", "tpp=4")


def test_an_option_that_leaves_nothing_is_to_blame(tmp_path: Path) -> None:
    """Userbuffers overlap what sequence parallelism sends: not the line of degrees is at fault."""
    asked = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "64", "--seq", "4096"]
    line = ["--strategy", "tp=4,sp=0,pp=2"]
    err = error_of(tmp_path, "plan", *asked, *line, "--options", "tp_overlap=userbuffers")
    assert err.startswith(
        "error: --options = 'tp_overlap=userbuffers': leaves Megatron-Core 0.19 no strategy over 8 "
    )
    assert "userbuffers overlap the collectives of sequence parallelism" in err
    where = ["--where", "tp=4, sp=0, pp=2, tp_overlap=userbuffers"]
    assert phalanx(tmp_path, "plan", *asked, *where)[2].startswith(
        "error: --where = 'tp_overlap=userbuffers': leaves "
    )
    text_of(tmp_path, "plan", *asked, *line)


def test_one_replica_may_have_a_narrow_state(tmp_path: Path) -> None:
    """Its distributed optimizer shards nothing, and an export turns it on."""
    asked = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "64", "--seq", "4096"]
    found = []
    for option in ((), ("--options", "first_moment=bfloat16")):
        found.append(json_of(tmp_path, "plan", *asked, "--strategy", "tp=4,pp=2", *option, "--json")["best"])
    assert found[1]["memory_bytes"] < found[0]["memory_bytes"]
    text_of(tmp_path, "export plan.json --to megatron --out train")
    assert any("--use-distributed-optimizer" in file.read_text() for file in (tmp_path / "train").iterdir())


def test_nothing_is_ignored(tmp_path: Path) -> None:
    """An option that a command cannot honour there is refused by name."""
    asked = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "4096"]
    (tmp_path / "job.toml").write_text("")
    for words, said in (
        (["plan", *asked, "--set", "job.seq=8"], "--set"),
        (["plan", *asked, "--choices"], "--choices"),
        (["plan", "job", "job.toml", *asked[:2]], "--model"),
        (
            ["plan", "job.toml", *asked[:2]],
            "command line: 'job.toml' is the value of no option, and this takes options alone",
        ),
        (["plan", "job.toml", "--gpus", "8"], "--gpus"),
        (["plan", "job.toml", "--objective", "money"], "--objective"),
        (["explain", *asked, "--strategy", "compression=fp16"], "strategy.compression"),
        (["explain", *asked, "--strategy", "bucket=50"], "strategy.bucket"),
    ):
        assert error_of(tmp_path, *words).startswith(f"error: {said}")


def test_a_precision_that_a_stack_lacks_is_named_by_every_command(tmp_path: Path) -> None:
    """torchtitan has no 8-bit products with one scale a tensor: a search refuses them, a price says so."""
    asked = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "16", "--batch", "64", "--seq", "4096"]
    asked += ["--stack", "torchtitan", "--precision", "fp8"]
    err = error_of(tmp_path, "plan", *asked)
    assert err.startswith("error: --precision = 'fp8': torchtitan")
    assert err.rstrip().endswith("use bf16 or fp8-block or mxfp8")
    out = phalanx(tmp_path, "predict", *asked, "--strategy", "zero=3")[1]
    assert out.startswith("torchtitan does not run it: options.products = 'float8'")
    out = phalanx(tmp_path, "predict", *asked[:-1], "fp8-block", "--strategy", "zero=3")[1]
    assert "does not run it" not in out


def test_days_against_money_and_a_deadline(tmp_path: Path) -> None:
    asked = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "32", "--batch", "64", "--seq", "8192"]
    paid = ["--price", "2", "--tokens", "2e12", "--objective", "money", "--json"]
    cheap = json_of(tmp_path, "plan", *asked, *paid)
    front = cheap["offers"]
    days, cost = [o["training"]["days"] for o in front], [o["expense"]["money"] for o in front]
    assert days == sorted(days)
    assert cost == sorted(cost, reverse=True)
    assert cheap["gpus"] == front[-1]["gpus"] < 32
    limit = (days[0] + days[1]) / 2
    words = [*paid, "--deadline", f"{limit:.1f}"]
    hurried = json.loads(phalanx(tmp_path, "plan", *asked, *words)[1])
    assert hurried["gpus"] == front[0]["gpus"]
    assert hurried["best"]["training"]["days"] <= limit
    for wish in (["--tokens", "2,000,000,000,000"], paid[:-1]):  # whatever it is to be cheap in, the fastest is told
        late = phalanx(tmp_path, "plan", *asked, *wish, "--deadline", "1")[1]
        assert "error: --deadline = 1.0: 32 GPUs take " in late


def test_a_plan_leaves_room_and_says_what_it_gives(tmp_path: Path) -> None:
    asked = ["--model", "llama2-7b", "--cluster", "dgx-h100", "--gpus", "8", "--batch", "64", "--seq", "4096"]
    taken = {}
    for share in ("0", "0.3"):
        out = phalanx(tmp_path, "plan", *asked, "--headroom", share, "--json")[1]
        taken[share] = json.loads(out)["best"]["memory_bytes"]
        usable = json.loads(phalanx(tmp_path, "explain plan.json --json")[1])["prediction"]["usable_bytes"]
        assert taken[share] <= (1 - float(share)) * usable
    assert taken["0.3"] < taken["0"]
    first = phalanx(tmp_path, "plan", *asked, "--tokens", "1T")[1].splitlines()[:8]
    for word in ("1T tokens: ", "tokens/s", "a GPU", "MFU", "micro-batch", "days", "is left free"):
        assert any(word in line for line in first), word


def test_a_plan_has_one_figure_for_its_step(tmp_path: Path) -> None:
    """The tables' row of the chosen strategy has the plan's figures, also where the plan lists the blocks of chunks;
    explain splits the memory that the plan names, and place finds no gain in the plan's own strategy."""
    asked = ["--model", "llama3-70b", "--cluster", "dgx-h100", "--gpus", "64", "--batch", "512", "--seq", "8192"]
    out = text_of(tmp_path, "plan", *asked, "--where", "tp=4, pp=4, virtual=2", "--more")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["strategy"]["layers"] != "auto"  # else this shows nothing
    headline = re.search(r"MFU ([\d.]+%); a step of ([\d.]+ m?s)", out)
    memory = re.search(r"^memory (\S+ GiB) of", out, re.MULTILINE)
    rows = re.findall(r"→ .*?([\d.]+ m?s) +([\d.]+%) .* (\S+ GiB)", out)
    assert headline is not None
    assert memory is not None
    assert len(rows) >= 2
    assert set(rows) == {(headline[2], headline[1], memory[1])}

    out = text_of(tmp_path, "explain plan.json")
    parts = out.split("where the memory goes")[1].split("figures against targets")[0]
    total = float(re.findall(r"([\d.]+) GiB", parts)[0])
    found = re.findall(r"([\d.]+) ([GM])iB +[\d.]+%", parts)
    sizes = [float(n) / (1 if unit == "G" else 1024) for n, unit in found]
    assert sum(sizes) == pytest.approx(total, abs=0.05 * len(sizes) + 0.001 * total)

    free = {"nodes": "node[0-9]", "free": {"node[0-5]": "0-7", "node[6-9]": "0-3"}}
    (tmp_path / "free.json").write_text(json.dumps(free))
    out = text_of(tmp_path, "cluster place plan.json --free free.json --json")
    own = re.sub(r",(layers|order)=[^,]*", "", json.loads(out)["strategy"])
    for other in json.loads(out)["others"]:
        assert re.sub(r",(layers|order)=[^,]*", "", other["strategy"]) != own


def test_a_file_that_cannot_be_written_is_named_as_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.mkdir()
    with pytest.raises(OSError, match=re.escape(f"'{file}'")):
        write_text(file, "{}")
    assert list(tmp_path.iterdir()) == [file]


def test_conditions_are_named_by_the_option_that_gave_them(tmp_path: Path) -> None:
    """What `--strategy` fixes in a search had been refused as a `--where` that the user had not written."""
    asked = [
        "plan",
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "64",
        "--batch",
        "128",
        "--seq",
        "8192",
    ]
    for words, said in (
        (["--strategy", "tp=8,pp=3"], "error: --strategy = 'pp=3': "),
        (["--where", "tp=8, pp=3"], "error: --where = 'pp=3': "),
        (["--strategy", "tp=8", "--where", "pp=3"], "error: --where = 'pp=3': "),
        (["--strategy", "tp=8", "--where", "pp=16"], "error: --strategy, --where = 'tp=8, pp=16': "),
        (["--strategy", "tp=8,pp<=2"], "error: --strategy = 'pp<=2': is a condition, "),
    ):
        assert error_of(tmp_path, *asked, *words).startswith(said)


def test_a_misspelt_model_is_answered_with_the_options_that_were_meant(tmp_path: Path) -> None:
    words = ("--modle", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8")
    assert "did you mean --model" in error_of(tmp_path, "plan", *words)


_SIZES = 'family = "gpt2"\nvocab = 256\nhidden = 64\nlayers = 4\nheads = 4\nffn = 256\nmax_seq = 512\n'


def test_a_model_is_a_preset_a_config_its_folder_or_toml(tmp_path: Path) -> None:
    """A folder that has the name of a preset hides it nowhere; a wrong file gets one line."""
    (tmp_path / "m.toml").write_text(f"[model]\n{_SIZES}")
    (tmp_path / "sizes.toml").write_text(_SIZES)
    (tmp_path / "llama3-8b").mkdir()
    (tmp_path / "wrong.toml").write_text("[model]\nhiden = 64\n")
    shown = {name: json_of(tmp_path, "tables", "models", name, "--json") for name in ("m.toml", "sizes.toml")}
    assert shown["m.toml"]["parameters"] == shown["sizes.toml"]["parameters"]
    words = ("--cluster", "dgx-h100", "--gpus", "8", "--batch", "8", "--seq", "256", "--strategy", "tp=2")
    for name in ("m.toml", "llama3-8b"):
        assert json_of(tmp_path, "predict", "--model", name, *words, "--json")["fits"]
    assert "did you mean hidden?" in error_of(tmp_path, "predict", "--model", "wrong.toml", *words)
    assert "no such file" in error_of(tmp_path, "predict", "--model", "absent.toml", *words)
