"""Tensor parallelism of modules as researchers write them: a plan is proposed, proved, and trains as one process."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.forked_cli import phalanx as forked
from support.in_process_cli import error_of, json_of, text_of
from support.own_modules import MAMBA_PLAN, OWN, first_step, make_own, plan_of, refusal, train_split, train_whole
from support.rank_pool import Pool
from torch import Tensor, nn

import phalanx
from phalanx.runtime.any_module import split_attention
from phalanx.runtime.any_module.first_pass import largest_deviation, prove
from phalanx.runtime.any_module.first_step import joined_deviation
from phalanx.runtime.any_module.optimizer_probe import looks_beyond_elements
from phalanx.runtime.any_module.split_names import Cut
from phalanx.runtime.comm.communicator import Comm
from phalanx.runtime.process.environment import ALONE, World
from phalanx.spec.errors import InputError
from phalanx.spec.strategy.mesh import mesh
from phalanx.spec.strategy.spec import Strategy

_LAYOUTS = {  # of the first two steps and the next two
    "vit": ("tp=2", "tp=2,zero=3"),
    "unet": ("tp=2,zero=1", "tp=4"),
    "state_space": ("tp=2,zero=2", "zero=3"),
    "mamba": ("tp=2", "tp=4"),
    "two_towers": ("tp=2", "tp=2"),
    "by_width": ("tp=2", "tp=2,zero=3"),
    "by_heads": ("tp=2", "tp=2,zero=1"),
    "dit": ("zero=3,recompute=full", "tp=4,recompute=full"),
    "closed_dit": ("tp=2,zero=1", "tp=2"),
}


@pytest.mark.parametrize("kind", list(OWN))
def test_a_split_module_trains_as_one_process_and_goes_on_over_another_layout(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    """Packed matrices, attention of torch's own, convolutions of all kinds, states: in values and in checkpoints."""
    world = 2 if kind in ("vit", "two_towers", "by_heads") else 4
    lines = _LAYOUTS[kind]
    tps = [int(line[3]) if line.startswith("tp") else 1 for line in lines]
    found = [
        pool.run(world, train_split, kind, line, tp, start, tmp_path)
        for line, tp, start in zip(lines, tps, (0, 2), strict=True)
    ]
    truth = train_whole(kind, (world // tps[0], world // tps[1]))
    for before, after in zip(*found, strict=True):
        np.testing.assert_allclose(before["norms"] + after["norms"], truth["norms"], rtol=1e-9)
        for name, value in truth["state"].items():
            np.testing.assert_allclose(after["state"][name], value, rtol=1e-7, atol=1e-9, err_msg=name)


class _HeadsOfWidth(nn.Module):
    """Scaled by the width of a head, which is computed from that of the input: wrong where heads are divided."""

    """Attention whose size of a head is computed from the width of its input, as in timm before 0.9."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = 6, nn.Linear(48, 144), nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, width = x.shape[:-1], x.shape[-1]
        q, k, v = self.qkv(x).reshape(*rows, 3, self.heads, width // self.heads).transpose(1, 3).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q * (width // self.heads), k, v)
        return self.proj(y.transpose(1, 2).reshape(*rows, width))


def test_what_does_not_run_split_is_not_proposed() -> None:
    mlp = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
    module = nn.Sequential(nn.Sequential(_HeadsOfWidth(), _HeadsOfWidth()), mlp)
    with pytest.warns(UserWarning, match=r"^0\.\* stays whole: split, it does not run .* keep the size of a head"):
        plan = phalanx.propose_tp_plan(module, torch.randn(2, 5, 48), tp=2)
    assert plan == {"1.0": "colwise", "1.2": "rowwise"}
    given = {"0.*.qkv": "colwise:3", "0.*.proj": "rowwise", "0.*.heads": "divided"}
    alone = Comm(World(0, 2, 0, 2), mesh(Strategy(tp=2)), null=True)
    remedy = r'keep sizes as numbers, computed before the split, or .* of a rank: "0\.0": "local_width"'
    with pytest.raises(InputError, match=rf"does not run: .*; .*{remedy}"):
        prove(module, given, alone, (torch.randn(2, 5, 48),), {})


class _Gated(nn.Module):
    """Attention whose heads have a gate each: a layer with as many outputs as there are heads."""

    def __init__(self, step: int = 1) -> None:
        super().__init__()
        self.h, self.size, self.step = 4, 8, step
        self.qkv, self.gate, self.proj = nn.Linear(32, 96), nn.Linear(32, 4), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.h, self.size)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2) * self.gate(x).sigmoid()[..., None]
        per_head = y.new_zeros(self.h if self.step == 1 else 4)  # 4: a number that nothing divides
        return x + self.proj((y + per_head[:, None]).flatten(-2))


def test_a_gate_for_each_head_is_divided_with_them() -> None:
    plan = phalanx.propose_tp_plan(nn.Sequential(_Gated(), nn.Linear(32, 2)), torch.randn(2, 5, 32), tp=2)
    assert plan == {"0.qkv": "colwise:3", "0.gate": "colwise", "0.proj": "rowwise", "0.h": "divided"}
    with pytest.warns(UserWarning, match=r"^1 stays whole: split, it does not run"):
        plan = phalanx.propose_tp_plan(nn.Sequential(_Gated(), _Gated(step=2)), torch.randn(2, 5, 32), tp=2)
    assert {key.partition(".")[0] for key in plan} == {"0"}


def test_what_has_no_elements_or_is_computed_stays_whole() -> None:
    first, last = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2))
    module = nn.Sequential(first, nn.LayerNorm(4), last)
    nn.utils.parametrizations.weight_norm(first[0])
    module.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    assert phalanx.propose_tp_plan(module, torch.randn(3, 4)) == {"2.0": "colwise", "2.2": "rowwise"}


def test_a_proposal_says_what_is_packed_divided_and_summed() -> None:
    of_width = plan_of("by_width", 2)
    assert {key: style for key, style in of_width.items() if style in ("divided", "local_width")} == {
        "packed.n_embd": "divided", "packed.n_head": "divided", "heads.num_heads": "divided",
        "packed": "local_width", "heads": "local_width",
    }  # fmt: skip
    vit = plan_of("vit", 2)
    assert vit["attention.qkv"] == "colwise:16,8,8"  # grouped heads
    assert vit["mlp.gate_up"] == "colwise:2"
    assert vit["attention.q_norm.weight"] == "replicated_with_grad_allreduce"
    assert (vit["attention.heads"], vit["encoder.self_attn"]) == ("divided", "attention_heads")
    assert plan_of("state_space", 2) == {
        "blocks.*.inner": "colwise:2",
        "blocks.*.conv": "per_channel",
        "blocks.*.decay": "per_channel",
        "blocks.*.out": "rowwise",
    }
    assert plan_of("by_heads", 2) == {"qkv": "colwise:3", "proj": "rowwise", "h": "divided"}
    unet = plan_of("unet", 4)
    assert unet["middle.conv1"] == unet["middle.time"] == "colwise"
    assert unet["middle.norm2"] == unet["middle.depthwise"] == "per_channel"
    assert not {"first", "down", "up", "join", "last"} & set(unet)  # what residuals and skips carry is whole
    with pytest.raises(InputError, match=r"tp_plan = 'Mamba': has no layers that 2 ranks could split"):
        phalanx.propose_tp_plan(make_own("mamba"), OWN["mamba"][1](0))
    with pytest.raises(InputError, match=r"Linear.forward takes .* without the targets"):
        phalanx.propose_tp_plan(nn.Linear(4, 4), (torch.ones(2, 4), torch.ones(2)))
    with pytest.raises(InputError, match="no layers that 3 ranks could split"):
        phalanx.propose_tp_plan(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.ones(2, 4), tp=3)


_WITHOUT = [
    ("mamba", "x_proj", "rowwise", r"tp_plan = '\S+': its gradient differs by"),
    ("vit", "attention.qkv", "colwise", "attention compute another function than unsplit"),
    ("vit", "attention.q_norm.weight", None, r"tp_plan = 'attention.q_norm.weight': its gradient differs by"),
    ("vit", "attention.heads", None, r'makes a module that does not run.*divide what .*"attention.heads": "divided"'),
    ("by_heads", "h", None, r'compute another function.* a number of heads as "h": "divided"; else leave'),
    ("closed_dit", "blocks.*.attention.qkv", "colwise", "attention compute another function than unsplit"),
    ("unet", "left.time", None, "makes a module that does not run"),
    (
        "unet",
        "left.depthwise",
        "colwise",
        "splits nn.Linear and convolutions, left.depthwise is a grouped convolution",
    ),
    ("unet", "left.conv1", "per_channel", "splits grouped convolutions, norms of groups and batches, and parameters"),
    ("vit", "mlp.gate_up", "colwise:5", "mlp.gate_up'?: has 96 outputs, and not 5 equal parts"),
    ("vit", "mlp.gate_up", "colwise:40,40", r"has 96 outputs, and not 40 \+ 40"),
    ("vit", "mlp.gate_up", "colwise:1,95", r"tp=2 does not divide the 1 outputs \(of 96\) of mlp.gate_up"),
    ("vit", "mlp.gate_up", "colwise:x", "has counts that are none"),
    ("vit", "mlp.down", "rowwise:2", "takes no counts"),
    ("vit", "attention.hats", "divided", r"is the name of no number.*attention.heads"),
    ("vit", "norms.0", "per_channel", "norms.0 is LayerNorm"),
]


@pytest.mark.parametrize(("kind", "name", "style", "said"), _WITHOUT)
def test_a_plan_that_is_not_right_is_one_line_before_a_step(
    pool: Pool, kind: str, name: str, style: str | None, said: str
) -> None:
    plan = dict(MAMBA_PLAN if kind == "mamba" else plan_of(kind, 2))
    plan.pop(name, None)
    plan |= {name: style} if style else {}
    for line in pool.run(2, refusal, kind, plan):
        assert re.search(said, line), line
        assert "\n" not in line


@pytest.mark.parametrize("counts", [(), (4, 8), (6, 4, 2)])
def test_a_cut_is_joined_as_it_was(counts: tuple[int, ...]) -> None:
    whole, cut = torch.arange(36.0).view(12, 3), Cut(0, counts)
    parts = [cut.part(whole, 2, index) for index in range(2)]
    assert [part.shape for part in parts] == [(6, 3)] * 2
    assert torch.equal(cut.joined(parts), whole)


@pytest.mark.parametrize(
    ("kind", "world", "line", "wrong"),
    [
        ("dit", 4, "tp=2,zero=2", "last.weight"),
        ("two_towers", 2, "zero=3", "text.0.weight"),
        ("state_space", 2, "dp=2", "blocks.1.decay"),
    ],
)
def test_a_first_step_is_compared_with_one_process(pool: Pool, kind: str, world: int, line: str, wrong: str) -> None:
    """All replicas' micro-batches, reduced and joined; a wrong gradient on one rank is named."""
    tp = 2 if "tp" in line else 1
    assert pool.run(world, first_step, kind, line, tp, "") == [""] * world
    for said in pool.run(world, first_step, kind, line, tp, wrong):
        assert f"{wrong}: its gradient differs by" in said, said


class _WithLoss(nn.Module):
    """A model that returns its loss beside the logits, as those of Hugging Face with `labels`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("wish", [0.0, 0.5])
def test_a_loss_beside_the_logits_is_one_gradient(wish: float) -> None:
    """What the user sends to the logits too counts, and what the loss sends to them counts once."""
    model = phalanx.parallelize(_WithLoss(), compare_first="step")
    model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
    out = model(torch.randn(5, 4), labels=torch.tensor([0, 1, 2, 0, 1]))
    model.backward(out["loss"] + wish * out["logits"].square().mean())
    assert model.norm() > 0


def test_a_gradient_that_is_no_number_is_the_worst() -> None:
    truth = {name: torch.ones(2) for name in "abc"}
    for bad in "abc":
        name, most = largest_deviation(truth, lambda key, bad=bad: math.nan if key == bad else 1e-12)
        assert (name, math.isnan(most)) == (bad, True)


_PROGRAM = """
import sys, torch, phalanx
from torch import nn
class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(16, 8), nn.Dropout(0.5)
    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.drop(self.down(torch.sigmoid(gate) * up))
torch.manual_seed(0)
print("said by the program")
plan = {"1.up": sys.argv[2], "1.down": "rowwise"} if "tp" in sys.argv[1] else None
cuts = [2] if "pp" in sys.argv[1] else None
net = nn.Sequential(nn.Linear(4, 8), MLP(), nn.Linear(8, 1))
model = phalanx.parallelize(net, sys.argv[1], tp_plan=plan, cuts=cuts)
optimizer = model.attach(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(int(sys.argv[3])):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(model.replica))
    model.step([(x, x[:, :1]), (2 * x, x[:, 1:2])], nn.functional.mse_loss)
    optimizer.step()
"""


class _OfTensors(torch.optim.SGD):
    """SGD that looks at more than an element in the way that `by` names."""

    def __init__(self, parameters: Any, by: str) -> None:
        super().__init__(parameters, lr=0.0, momentum=0.9)
        self.by = by

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            if self.by == "norm of all":
                p.grad /= norm
            elif self.by == "rows":
                p.grad -= p.grad.mean(-1, keepdim=True)
            elif self.by == "dims" and p.dim() > 1:
                p.grad *= 2
            elif self.by == "noise":
                p.grad += torch.randn_like(p)
            elif self.by == "more":
                p.grad *= p.curvature
        super().step()


@pytest.mark.parametrize(
    ("by", "flat", "split"),
    [
        ("elements", False, False), ("noise", False, False), ("more", False, False),
        ("norm of all", True, True), ("rows", True, False), ("dims", True, False),
    ],
)  # fmt: skip
def test_an_optimizer_of_ones_own_that_looks_at_whole_tensors_is_noticed(by: str, flat: bool, split: bool) -> None:
    """Rows are whole where tensors are split by rows; and the optimizer itself is left as it was."""
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = _OfTensors([weight], by)
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user's ran in the trial"))
    cpu = torch.device("cpu")
    assert looks_beyond_elements(optimizer, cpu, flat=True) == flat
    assert looks_beyond_elements(optimizer, cpu, flat=False) == split
    assert (dict(optimizer.state), weight.grad, optimizer.param_groups[0]["lr"]) == ({}, None, 0.0)
    assert torch.equal(weight, torch.ones(3, 3))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad", "Rprop", "Adamax", "ASGD"])
def test_torchs_optimizers_of_elements_pass(name: str) -> None:
    optimizer = getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(3, 3))], lr=0.01)
    assert not looks_beyond_elements(optimizer, torch.device("cpu"), flat=True)


def _mean(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(out, target) / 2


def _negatives(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out @ target.T, torch.arange(len(out)))


@pytest.mark.parametrize(
    ("loss", "rows", "across"),
    [(_mean, (4, 4), False), (_mean, (4, 2), True), (_negatives, (4, 4), True)],
)
def test_a_loss_that_looks_across_a_batch_is_noticed(loss: Any, rows: tuple[int, int], across: bool) -> None:
    """Means of unequal batches weigh sequences unequally; their common factor does not count."""
    torch.manual_seed(0)
    whole = nn.Linear(3, 5).double()
    batches = [(torch.randn(n, 3).double(), torch.randn(n, 5).double()) for n in rows]
    deviation = joined_deviation(whole, batches, loss)
    assert deviation is not None
    assert (deviation > 1e-3) == across
    assert across or deviation < 1e-12
    assert joined_deviation(whole, [(x, 3) for x, _ in batches], loss) is None


def test_a_programs_first_step_is_answered(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    answer = json_of(tmp_path, "parity --program train.py --ranks 2 --json -- zero=1 - 3", run=forked)
    assert (answer["passed"], answer["passes"], answer["dtype"], answer["strategy"]) == (
        True, 4, "float32", "dp=2,zero=1",
    )  # fmt: skip
    assert answer["parameters"] > answer["zero_gradients"] == 0
    assert answer["joined"] < 1e-4
    assert answer["looks_across"] == ""


def test_a_programs_first_step_is_compared(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    start = "parity --program train.py --ranks 2"
    for line in ("tp=2 colwise:2", "pp=2 -", "zero=1 -"):
        out = text_of(tmp_path, f"{start} -- {line} 3", run=forked)
        assert "10 gradients" in out or "8 gradients" in out
        assert " holds: grad_rel_max" in out
    bad = "model = phalanx.parallelize(net"
    (tmp_path / "nan.py").write_text(
        _PROGRAM.replace(bad, f"net[0].weight.register_hook(lambda g: g * torch.nan)\n{bad}")
    )
    code, out, _ = forked(tmp_path, "parity --program nan.py --ranks 2 -- zero=1 - 3")
    assert (code, "DOES NOT HOLD: grad_rel_max no number (0.weight)" in out) == (1, True)
    (tmp_path / "closed.py").write_text(_PROGRAM.replace("torch.sigmoid(gate)", "0"))
    out = text_of(tmp_path, "parity --program closed.py --ranks 2 -- zero=1 - 3", run=forked)
    assert "but 5 of these gradients are zero" in out
    negatives = _PROGRAM.replace("nn.functional.mse_loss", "lambda out, y: (out @ y.T).logsumexp(-1).mean()")
    (tmp_path / "negatives.py").write_text(negatives)
    out = text_of(tmp_path, "parity --program negatives.py --ranks 2 -- zero=1 - 3", run=forked)
    assert "but two micro-batches have another gradient as one batch, off by" in out
    for line, reason in (
        ("tp=2 colwise 3", "makes 1 compute another function"),
        ("zero=1 - 0", "ended before a step"),
        ("tp=4 colwise:2 0", "start as many: --ranks 4"),
    ):
        code, _, err = forked(tmp_path, f"{start} -- {line}")
        assert code == 2
        assert reason in err.splitlines()[-1]
        assert "Traceback" not in err
    assert "--ranks: is missing" in error_of(tmp_path, "parity --program train.py")
    assert "program = 'none.py': is no file" in error_of(tmp_path, "parity --program none.py --ranks 2")
    assert "--ranks = 2: is of --program" in error_of(tmp_path, "parity job.toml --ranks 2")
    assert "JOB.toml: must be one file" in error_of(tmp_path, "parity")


@pytest.mark.parametrize("per_head", [False, True])
def test_split_attention_hides_what_either_mask_hides(per_head: bool) -> None:
    """A mask of paths between tokens, for all or for each head, and one of padding, of two sequences."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    paths = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mask = paths.expand(4, 5, 5) if per_head else paths
    comm = Comm(ALONE, mesh(Strategy()))
    for p, m in ((padding, None), (None, mask), (padding, mask)):
        expected, _ = layer(x, x, x, key_padding_mask=p, attn_mask=m, need_weights=False)
        torch.testing.assert_close(split_attention._attend(layer, comm, x, x, x, p, m), expected)
