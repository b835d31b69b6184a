"""Servers whose line fixes how many drafted tokens are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.serving.lines.drafts import acceptance
from phalanx.serving.lines.reading import read
from phalanx.serving.question import speculation
from phalanx.serving.simulation.deployment import Speculation

_SGLANG = "python -m sglang.launch_server --model meta-llama/Llama-3.1-8B-Instruct --speculative-algorithm EAGLE"
_VLLM = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
_SYNTHETIC = '"rejection_sample_method": "synthetic", "synthetic_acceptance_length"'


@pytest.mark.parametrize(
    ("text", "drafted", "mean"),
    [
        (f"export SGLANG_SIMULATE_ACC_LEN=3.5\n{_SGLANG} --speculative-num-steps 5", 5, 3.5),
        (f"SGLANG_SIMULATE_ACC_LEN=2 {_SGLANG} --speculative-num-draft-tokens 4", 3, 2.0),
        (f"docker run -e SGLANG_SIMULATE_ACC_LEN=4 -e SGLANG_SIMULATE_ACC_METHOD=match-expected lmsysorg/sglang "
         f"{_SGLANG} --speculative-num-steps 3", 3, 4.0),
        (f"{_VLLM} --speculative-config '{{\"num_speculative_tokens\": 3, {_SYNTHETIC}: 3.12}}'", 3, 3.12),
        (f"{_VLLM} -sc '{{\"num_speculative_tokens\": 6, {_SYNTHETIC}: 1}}'", 6, 1.0),
    ],
)  # fmt: skip
def test_an_acceptance_that_is_fixed_is_priced(tmp_path: Path, text: str, drafted: int, mean: float) -> None:
    """Its mean counts the model's own token. Nothing else of it is asked for or not judged."""
    (tmp_path / "run.sh").write_text(text)
    found = read([tmp_path / "run.sh"], {})
    tokens, rate = speculation(found.fields["speculate"])
    assert tokens == drafted
    assert Speculation(tokens, rate).mean == pytest.approx(mean, abs=1e-4)
    said = [caveat for caveat in found.caveats if "drafts" in caveat or "SIMULATE" in caveat]
    assert len(said) == 1
    assert said[0].startswith(f"assumed: {mean:g} tokens of a step that drafts {drafted}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{_SGLANG} --speculative-num-steps 5", "--speculate says it"),
        (f"SGLANG_SIMULATE_ACC_LEN=9 {_SGLANG} --speculative-num-steps 5", "not judged: SGLANG_SIMULATE_ACC_LEN"),
        (f"SGLANG_SIMULATE_ACC_LEN=$A {_SGLANG} --speculative-num-steps 5", "not judged: SGLANG_SIMULATE_ACC_LEN"),
        (f"{_VLLM} -sc '{{\"num_speculative_tokens\": 3, \"synthetic_acceptance_length\": 2, "
         "\"rejection_sample_method\": \"standard\"}'", "--speculate says it"),
        (f"{_VLLM} -sc '[3]'", "--speculate says it"),
        (f"{_VLLM} -sc.num_speculative_tokens 3", "--speculate says it"),
    ],
)  # fmt: skip
def test_an_acceptance_that_is_open_is_asked_for(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    found = read([tmp_path / "run.sh"], {})
    assert "speculate" not in found.fields
    assert any(said in caveat for caveat in found.caveats)


def test_an_option_goes_before_what_is_fixed(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"SGLANG_SIMULATE_ACC_LEN=2 {_SGLANG} --speculative-num-steps 3")
    assert read([tmp_path / "run.sh"], {"speculate": "3:0.5"}).fields["speculate"] == "3:0.5"


@pytest.mark.parametrize(("drafted", "mean", "rate"), [(1, 1.6, 0.6), (3, 1.875, 0.5), (4, 5.0, 1.0)])
def test_the_rate_of_a_mean(drafted: int, mean: float, rate: float) -> None:
    assert acceptance(drafted, mean) == pytest.approx(rate, abs=1e-6)
