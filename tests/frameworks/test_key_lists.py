"""Lists of keys are made from parsers and dataclasses as they are written; a new key is not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibration import parsers
from calibration.keys import judged, listings, written
from phalanx.frameworks import verdicts
from phalanx.frameworks.registry import FRAMEWORKS
from phalanx.frameworks.verdicts import Verdict

ARGUMENTS = """
left_out = ["hidden"]
def add(parser):
    group = parser.add_argument_group("x")
    group.add_argument("--layers", "-l", type=int, default=2)
    group.add_argument("--no-fusion", action="store_false", dest="fusion")
    group.add_argument("--eager", action=argparse.BooleanOptionalAction)
    ArgumentGroupFactory(Config, exclude=left_out).build_group(parser)
    args.world = args.nodes * 8
class Base:
    pass
@dataclass
class Config(Parent):
    deep: int | None = None
    fused: bool = True
    plain: bool = False
    hidden: str = ""
    renamed: float = field(default=0.5, metadata={"argparse_meta": {"arg_names": ["--other-name"]}})
    made: int = field(init=False)
@dataclass
class Parent:
    above: str = "a"
"""
NESTED = """
class Model(BaseModel):
    rate: float = Field(0.1, alias="lr")
    inner: Part | None = None
class Part(BaseModel):
    size: int = 4
    of: ClassVar[int] = 1
class Engine:
    counter: int
"""


def test_flags_of_parsers_and_of_the_classes_that_groups_are_made_of() -> None:
    sources = parsers.parsed({"a.py": ARGUMENTS})
    found = parsers.unique(parsers.arguments(sources, "a.py"))
    assert {name: (key.line, key.switch, key.default) for name, key in found.items()} == {
        "layers": (5, False, "2"),
        "no_fusion": (6, True, "False"),
        "fusion": (6, False, "True"),
        "eager": (7, True, "False"),
        "no_eager": (7, True, "False"),
        "above": (22, False, "a"),
        "deep": (14, False, "None"),
        "no_fused": (15, True, "False"),
        "disable_fused": (15, True, "False"),
        "fused": (15, False, "True"),
        "plain": (16, True, "False"),
        "other_name": (18, False, "0.5"),
        "renamed": (18, False, "0.5"),
        "world": (9, False, ""),
    }


def test_fields_by_paths_parameters_constants_and_tables() -> None:
    sources = parsers.parsed({"b.py": NESTED})
    found = {key.name: key.default for key in parsers.fields(sources, "Model")}
    assert found == {"rate": "0.1", "lr": "0.1", "inner": "None", "inner.size": "4"}
    assert [name for name in sources.classes if parsers.is_record(sources, name)] == ["Model", "Part"]
    sources = parsers.parsed({"c.py": 'BATCH = "batch"\nBATCH_DEFAULT = 3\ndef make(self, a, *, b=True): ...\n'})
    assert [(k.name, k.default) for k in parsers.constants(sources, "c.py")] == [("batch", "3")]
    assert [(k.name, k.default) for k in parsers.parameters(sources, "c.py", ["make"])] == [("a", ""), ("b", "True")]
    keys = parsers.tables("d.yml", "a: 1\nb:\n  c: null\n  d: [1]\n")
    assert [(k.name, k.line, k.default) for k in keys] == [
        *(("a", 1, "1"), ("b", 2, ""), ("b.c", 3, "None")),
        ("b.d", 4, "None"),
    ]


def test_a_key_keeps_its_verdict_and_a_new_one_is_not_judged(tmp_path: Path) -> None:
    known = {
        "old": Verdict("unmodelled", "a.py:1", ("time",), "fuses kernels", "auto"),
        "gone": Verdict("none", "a.py:2"),
    }
    keys = {
        "old": parsers.Declared("a.py", 7, "old", default="None"),
        "new": parsers.Declared("b.py", 3, "new", True),
    }
    result = judged(keys, known)
    path = tmp_path / "verdicts.toml"
    path.write_text(written(result, "# about"))
    assert verdicts.load(path) == {
        "old": Verdict("unmodelled", "a.py:7", ("time",), "fuses kernels", "auto"),
        "new": Verdict("", "b.py:3", switch=True),
    }


@pytest.mark.parametrize("framework", [f.folder for f in FRAMEWORKS.values() if f.reads])
def test_every_framework_that_is_read_says_where_its_keys_stand(framework: str) -> None:
    assert listings(framework)
