"""Parts of the server by themselves: stop texts, requests as values, what counts as this machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip.command_line.api_key import check_api_key, is_loopback
from layerskip.server.schemas import CompletionRequest, parse
from layerskip.server.stop_text import StopText

LETTERS = st.text("ab", max_size=14)


def shown(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    stop = StopText(stops)
    text = "".join(stop.push(piece) for piece in pieces)
    return text + stop.finish(), stop.stopped


@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_stop_that_is_complete_first_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    whole = "".join(pieces)
    ends = [(end, -len(stop)) for stop in stops for end in range(len(whole) + 1) if whole[:end].endswith(stop)]
    expected = whole[: min(ends)[0] + min(ends)[1]] if ends else whole
    assert shown(pieces, stops) == (expected, bool(ends))


@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_nothing_shown_is_ever_taken_back(pieces: list[str], stops: list[str]) -> None:
    final, _ = shown(pieces, stops)
    stop, text = StopText(stops), ""
    for piece in pieces:
        text += stop.push(piece)
        assert final.startswith(text)


def test_text_that_cannot_become_a_stop_is_shown_at_once() -> None:
    stop = StopText(["abc"])
    assert [stop.push(piece) for piece in ("xa", "b", "y", "ab", "cz", "more")] == ["x", "", "aby", "", "", ""]


@pytest.mark.parametrize(
    ("fields", "do_sample"),
    [
        ({}, None),
        ({"temperature": 0}, False),
        ({"temperature": 0, "top_p": 0.5}, False),
        ({"temperature": 0.5}, True),
        ({"top_p": 1}, None),
        ({"top_p": 0.9}, True),
        ({"top_k": 0}, None),
        ({"top_k": 5}, True),
        ({"min_p": 0.0}, None),
        ({"min_p": 0.1}, True),
    ],
)
def test_when_a_request_samples(fields: dict[str, Any], do_sample: bool | None) -> None:
    body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    assert parse(CompletionRequest, body).do_sample is do_sample


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("192.168.0.2", False),
        ("localhost.example", False),
    ],
)
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_keys_are_checked_and_a_key_is_not_repeated() -> None:
    for key in ("", "short", "with blank 1234567890", "naïve-key-1234567890"):
        with pytest.raises(ValueError, match="at least 16 printable ASCII") as raised:
            check_api_key(key)
        assert not key or key not in str(raised.value)
