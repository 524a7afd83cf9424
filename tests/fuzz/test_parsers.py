"""Hostile input: whatever is read, the answer is a value that says what was written, or one line that says why not.

A hundred inputs of each kind in the suite; six thousand under `--hypothesis-profile=fuzz` (`make fuzz`).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip.server.errors import ApiError
from tests.fuzz.mutations import Mutant, edits, mutants
from tests.fuzz.parsers import PARSERS, REFUSALS, Parser

each_parser = pytest.mark.parametrize("parser", PARSERS, ids=[parser.name for parser in PARSERS])
LONGEST_MESSAGE = 2_000
"""Far below what a page of garbage would give if it were repeated."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def outcome(parser: Parser, data: bytes, folder: Path, tally: Counter[tuple[str, str]]) -> str | None:
    """The message of a refusal; None if it was accepted, and rightly."""
    try:
        value = parser.read(data, folder)
    except REFUSALS as error:
        tally[parser.name, "refused"] += 1
        message = str(error)
        assert message.isprintable(), f"not one printable line: {message!a}"
        assert 0 < len(message) < LONGEST_MESSAGE
        if parser.names_file:
            assert str(folder) in message
        if parser.only_field:
            assert message.startswith(f"{parser.only_field}: ")
        status = error.status if isinstance(error, ApiError) else 400
        assert status == 400
        return message
    parser.check(value, folder)
    tally[parser.name, "accepted"] += 1
    return None


@each_parser
@given(data=st.data())
def test_valid_documents_are_accepted(parser: Parser, data: st.DataObject, folder: Path, tally: Any) -> None:
    """Else the mutants below would be refused for another reason than their mutation."""
    message = outcome(parser, parser.dump(data.draw(parser.documents)), folder, tally)
    assert message is None or parser.name == "mask"  # whose texts are made of pieces that hardly ever fit


@each_parser
@given(data=st.data())
def test_one_broken_field_is_named(parser: Parser, data: st.DataObject, folder: Path, tally: Any) -> None:
    mutant: Mutant = data.draw(mutants(parser.documents))
    message = outcome(parser, parser.dump(mutant.document), folder, tally)
    # What is no JSON or TOML at all, such as a bare NaN, has a place instead of a field.
    if message is not None:
        names = {parser.only_field} if parser.only_field else {name[:40] for name in mutant.fields}
        assert any(name in message or ascii(name)[1:-1] in message for name in names) or "not valid" in message


@each_parser
@given(data=st.data())
def test_edited_texts(parser: Parser, data: st.DataObject, folder: Path, tally: Any) -> None:
    outcome(parser, data.draw(edits(parser.documents.map(parser.dump))), folder, tally)


@each_parser
@given(data=st.binary(max_size=80) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(parser: Parser, data: bytes, folder: Path, tally: Any) -> None:
    outcome(parser, data, folder, tally)
