"""The grammar of an answer that has to call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from layerskip.rounds.grammar import JSON_BLANKS, Grammar


def calls_alone(
    template: Mapping[str, Any], tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, most_calls: int | None
) -> Grammar | None:
    """Of an answer that calls tools, as their schemas have it, and says nothing else; up to so many calls. None where
    the template has calls that are not JSON between two marks."""
    calls = template["fields"].get("tool_calls", {})
    beginning, ending = calls.get("open_pattern", calls.get("open")), calls.get("close")
    form = calls.get("content"), (calls.get("transform") or {}).get("function")
    if not isinstance(beginning, str) or not isinstance(ending, str) or form != ("json", "{content}"):
        return None
    if (opening := re.fullmatch(r"(?:\\s\*)?(<\w+>)", beginning)) is None:
        return None
    known = tokenizer.get_added_vocab()
    first, last = (f"<[{known[mark]}]>" if mark in known else json.dumps(mark) for mark in (opening[1], ending))
    calls_of, rules = list[str](), list[str]()
    for i, one in enumerate(tools):
        function = one["function"]
        before = json.dumps(f'\n{{"name": {json.dumps(function["name"])}, "arguments": ')
        calls_of.append(f'{before} arguments_{i} "}}\\n"')
        rules.append(f"arguments_{i}: %json {json.dumps(JSON_BLANKS | function.get('parameters', {'type': 'object'}))}")
    more = "" if most_calls == 1 else ' ("\\n" call)*'
    start = [f"start: call{more}", f"call: {first} ({' | '.join(calls_of)}) {last}"]
    return Grammar.lark("\n".join([*start, *rules]))
