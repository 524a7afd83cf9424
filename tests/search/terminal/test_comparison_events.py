"""What people and scripts see of a comparison: plain lines and JSON lines."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from search.comparison.plan import ComparisonPlan
from search.terminal.comparison_events import ComparisonBegins, PicksAdvanced, RunAdvanced
from search.terminal.event import Event
from search.terminal.reporter import JsonReporter
from tests.search.comparison.test_compare import Comparison
from tests.search.helpers.fakes import Recorder

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
