"""What people and scripts see of a comparison: plain lines, JSON lines, and the live view."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from search.comparison.plan import ComparisonPlan
from search.terminal.comparison_events import ComparisonBegins, PicksAdvanced, RunAdvanced
from search.terminal.comparison_view import ComparisonView
from search.terminal.event import Event
from search.terminal.live import LiveReporter
from search.terminal.reporter import JsonReporter
from tests.search.comparison.test_compare import Comparison
from tests.search.helpers.fakes import Recorder, Terminal

PLAN = ComparisonPlan(strategies=("random", "layerskip"), seeds=(0, 1), trials=4, checkpoints=(2, 4), confirm_repeats=2)
NUM_RUN_TURNS = 2 * 2 * 2
"""Strategies, seeds, and two turns of at most three trials each."""


def run_in(folder: Path, plan: ComparisonPlan = PLAN) -> list[Event]:
    """The events of a comparison on fakes."""
    recorder = Recorder(io.StringIO())
    assert Comparison(folder, reporter=recorder).run(plan) == 0
    return recorder.events


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    return run_in(tmp_path_factory.mktemp("compare"))


def test_the_turns_add_up(events: list[Event]) -> None:
    (begins,) = [one for one in events if isinstance(one, ComparisonBegins)]
    assert (begins.num_done, begins.num_trials) == (0, 16)
    turns = [one for one in events if isinstance(one, RunAdvanced)]
    assert len(turns) == NUM_RUN_TURNS
    assert [one.num_done for one in turns] == sorted({one.num_done for one in turns})
    assert turns[-1].num_done == turns[-1].num_trials == 16
    assert turns[-1].eta_s == 0
    assert {(one.strategy, one.seed): one.num_run_trials for one in turns} == dict.fromkeys(PLAN.runs, 4)
    picks = [one for one in events if isinstance(one, PicksAdvanced)]
    assert [one.num_done for one in picks] == list(range(1, 13))  # six prompts, two passes
    assert {one.num_turns for one in picks} == {12}
    assert picks[-1].eta_s == 0


def test_a_comparison_that_goes_on_begins_where_it_was(tmp_path: Path) -> None:
    run_in(tmp_path)
    more = run_in(tmp_path, ComparisonPlan(PLAN.strategies, PLAN.seeds, 5, (2, 5), 2))
    (begins,) = [one for one in more if isinstance(one, ComparisonBegins)]
    assert (begins.num_done, begins.num_trials) == (16, 20)
    assert [one.num_done for one in more if isinstance(one, RunAdvanced)] == [17, 18, 19, 20]


def test_its_lines_and_its_json(events: list[Event]) -> None:
    turn = next(one for one in events if isinstance(one, RunAdvanced))
    (line,) = map(str, turn.lines())
    assert re.fullmatch(r"run       3/16  random, seed 0: 3 trials, (best \d\.\d\dx|none yet), eta \d+:\d\d", line)
    output = io.StringIO()
    reporter = JsonReporter(output)
    for event in events:
        reporter.tell(event)
    told = [json.loads(text) for text in output.getvalue().splitlines()]
    first = next(one for one in told if one["event"] == "run")
    assert (first["strategy"], first["seed"], first["num_done"], first["num_trials"]) == ("random", 0, 3, 16)
    assert [one["num_done"] for one in told if one["event"] == "picks"] == list(range(1, 13))


def test_the_live_view_takes_the_place_of_the_turns_lines(events: list[Event]) -> None:
    """And is gone at the end: what stays is lines."""
    stream = Terminal()
    with LiveReporter(stream, Console(file=stream, width=80, height=30, force_terminal=True)) as reporter:
        for event in events:
            reporter.tell(event)
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", stream.getvalue())
    assert "16 of 16, 0:00 left" in text
    assert "12 of 12, 0:00 left" in text
    assert not re.search(r"^run +\d+/16", text, re.MULTILINE)
    # The last rows that were drawn are erased before the table.
    assert text.rindex("[confirm]") < text.index("| ")
    assert text.splitlines()[-1].startswith("written")


def drawn(events: list[Event], width: int, height: int = 30) -> list[str]:
    view, stream = ComparisonView(), io.StringIO()
    for event in events:
        view.take(event)
    Console(file=stream, width=width, height=height).print(view)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", [40, 80])
def test_the_view_fits_and_tells_strategy_seed_and_trials(events: list[Event], width: int) -> None:
    begun = [one for one in events if isinstance(one, ComparisonBegins | RunAdvanced)]
    rows = drawn(begun[:4], width)  # three turns: random and layerskip with seed 0, random with seed 1
    assert max(map(len, rows)) <= width
    assert rows[0] == "phase   [runs]"
    assert re.search(r"trials  .* 9 of 16, \d+:\d\d left", rows[1])
    assert rows[2] == "run     random, seed 1: 3 trials"
    assert re.match(r"best    (\d\.\d\dx|none ) +random", rows[3])
    assert re.match(r"        (\d\.\d\dx|none ) +layerskip", rows[4])
    if width == 80:
        assert rows[3].endswith("3..3 trials, 2 of 2 seeds")
        assert rows[4].endswith("3..3 trials, 1 of 2 seeds")
