"""What a writer of YAML is given is what readers of YAML find, whatever the types and lengths."""

from __future__ import annotations

import yaml

from phalanx.frameworks.writing.yaml import stream


def test_values_are_read_back_as_they_were_written() -> None:
    table = {
        "floats": [1e-05, 3.0, 1e20],
        "words": ["1e3", "yes", "null", "8000", "a: b", "# no comment", ""],
        "options": [f"--option-{i}" for i in range(20)],
        "empty": {"table": {}, "list": []},
        "containers": [{"name": "main", "ports": [{"containerPort": 8000}]}, {"name": "router"}],
        "file.yaml": "kv_cache_config:\n  dtype: fp8\n\nport: 1\n",
        "indented": "  first\nsecond\n",
        "control": "a\tb\rc\n",
    }
    assert list(yaml.safe_load_all(stream([table, {"second": None}], ["one note"]))) == [table, {"second": None}]


def test_words_that_other_readers_take_for_numbers_are_quoted() -> None:
    assert stream([{"tag": "1e3"}]) == 'tag: "1e3"\n'


def test_a_file_inside_a_document_is_written_in_lines() -> None:
    assert stream([{"data": {"a.yaml": "x: 1\ny: 2\n"}}]) == "data:\n  a.yaml: |\n    x: 1\n    y: 2\n"
