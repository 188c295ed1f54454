"""Files of the history of samples: what is written is read, and everything else is refused by name."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode

import pytest

from lockstep.rollout.speculation.history_file import read_histories, write_histories

VOCAB = 256


def test_what_is_written_is_read(tmp_path):
    samples = [array("i", [0, 255, 7]).tobytes(), array("i", [3]).tobytes()]
    histories = {bytes(range(16)): samples, bytes(16): samples[:1]}
    write_histories(tmp_path / "history.json", histories)
    found = read_histories(tmp_path / "history.json", VOCAB, 1 << 20)
    assert found == histories
    assert list(found) == list(histories)  # the order of their use


def prompts(key: bytes = bytes(16), samples: object = ()) -> str:
    return json.dumps({"format": 1, "prompts": {b64encode(key).decode(): samples}})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[" * 200_000, "recursion"),
        ("[]", 'must be an object with "format": 1'),
        ('{"format": 2, "prompts": {}}', 'must be an object with "format": 1'),
        ('{"format": 1, "prompts": []}', 'and "prompts"'),
        (prompts(key=b"short"), "a name of 16 bytes"),
        (prompts(samples="AAAA"), "a list of samples"),
        (prompts(samples=["AAAA"]), "multiple of"),
        (prompts(samples=[5]), "int"),
        (prompts(samples=["not base64"]), "base64"),
        (prompts(samples=[b64encode(b"\0\1\0\0").decode()]), "outside the vocabulary, which ends at 255"),
        (prompts(samples=[b64encode(b"\xff\xff\xff\xff").decode()]), "outside the vocabulary"),
        ("\xff\xfe{", "history of samples"),
        (" " * (6 << 20), "more than"),
    ],
    ids=lambda value: value[:20].strip() if isinstance(value, str) else "",
)
def test_a_file_that_is_no_history_is_refused_by_name(tmp_path, text, says):
    path = tmp_path / "history.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=str(path)) as caught:
        read_histories(path, VOCAB, 1 << 20)
    assert says in str(caught.value)
