"""What people and scripts see of a run: plain lines, JSON lines, the verdict alone, and the live view."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial
from rich.console import Console

from layerskip import DecodeConfig, SkipMask
from layerskip.command_line.cli import quiet_libraries
from layerskip.config.decode_config import UNTRAINED, DraftWeights
from search import run
from search.measure.decoder import Decoded
from search.measure.pairs import PromptCase
from search.measure.reference import Reference
from search.study.leaderboard import Entry
from search.terminal.event import Event, Note, Warned
from search.terminal.event import Told as ReadyMade
from search.terminal.live import LiveReporter, make_reporter
from search.terminal.progress_events import Drifted, ReferenceKnown, SearchBegins, StudyOpened, TrialDone
from search.terminal.reporter import JsonReporter, QuietReporter, Reporter
from search.terminal.result_events import group_verdict, written
from search.terminal.view import LiveView, Pace
from tests.search.conftest import quiet
from tests.search.helpers.fakes import Bench, FakeDecoder, Recorder, Terminal

CASE = PromptCase("p", (1,), (1, 2))
REFERENCE = Reference((CASE,) * 24, 4, 136.5, 0.034, 1.0, ())
CONFIG = DecodeConfig(skip_mask=SkipMask.parse("12:3,5-11,m1,m4"), gamma=8, draft_threshold=0.5)
SMALLER = DraftWeights(drafter="draft_model", path="/models/SmolLM2", fingerprint="f")
LEADER = Entry(CONFIG, {}, (0, 7), 14, 1.44, 1.38)


def trial(
    number: int = 0,
    state: TrialState = TrialState.COMPLETE,
    value: float | None = 192.8,
    gamma: str = "gamma",
    **attrs: Any,
) -> Any:
    told = {
        "origin": "pool",
        "speedup": 1.41,
        "skip_mask": str(CONFIG.skip_mask),
        "num_skipped_attention": 8,
        "num_skipped_mlp": 10,
        "acceptance_rate": 0.83,
        "mean_accepted_length": 3.7,
    }
    one = create_trial(
        state=state,
        value=value if state == TrialState.COMPLETE else None,
        params={gamma: 8},
        distributions={gamma: optuna.distributions.IntDistribution(1, 8)},
        user_attrs=told | attrs,
    )
    one.number = number
    return one


def done(one: FrozenTrial, number_done: int = 1) -> TrialDone:
    return TrialDone(one, number_done, 200, LEADER, 192.0)


def text_of(event: Event) -> list[str]:
    return [str(line) for line in event.lines()]


LINES: list[tuple[Event, list[str]]] = [
    (StudyOpened("demo", "sqlite:///s.db", 0, 200), ["study     demo in sqlite:///s.db: 0 of 200 trials done"]),
    (
        ReferenceKnown(REFERENCE),
        ["reference plain 136.5 tok/s, A/A noise 3.4 % a pair, 4 of 24 prompts a full trial"],
    ),
    (
        ReferenceKnown(Reference((CASE,), 1, 9.0, 0.1, 1.0, ("q",)), now=0.5),
        [
            "reference plain 9.0 tok/s, A/A noise 10.0 % a pair, 1 of 1 prompts a full trial, 1 prompts too short to "
            "time, stored; now 0.50 times as fast"
        ],
    ),
    (SearchBegins(40, 200, "replay", 3), ["search    160 trials, sampler replay, seed 3"]),
    (
        done(trial(speedup_ci_low=1.142, speedup_ci_high=1.751)),
        [
            "trial   1/200    192.8 tok/s  1.41x 1.14..1.75   best 1.44x #0  accept 0.83  len 3.70  "
            "skip attn  8 mlp 10 of 12  gamma 8  [pool]  eta 3:12"
        ],
    ),
    (
        done(trial(skip_mask="12:3,v512,int4", speedup_ci_low=1.142, speedup_ci_high=1.751)),
        [
            "trial   1/200    192.8 tok/s  1.41x 1.14..1.75   best 1.44x #0  accept 0.83  len 3.70  "
            "skip attn  8 mlp 10 of 12 v512 int4  gamma 8  [pool]  eta 3:12"
        ],
    ),
    (
        done(trial(gamma="weights.gamma", draft_weights=SMALLER.model_dump(), stopped_early=True)),
        [
            "trial   1/200 <  192.8 tok/s  1.41x              best 1.44x #0  accept 0.83  len 3.70  "
            "draft_model SmolLM2  gamma 8  [pool]  eta 3:12"
        ],
    ),
    (
        done(trial(stopped_early=True, repeat_of=4, acceptance_rate=None, speedup_ci_low=1.0, speedup_ci_high=2.0), 12),
        [
            "trial  12/200 <  192.8 tok/s  1.41x              best 1.44x #0  accept   -   len 3.70  "
            "skip attn  8 mlp 10 of 12  gamma 8  [repeat of #4]  eta 3:12"
        ],
    ),
    (
        done(trial(state=TrialState.PRUNED, violation="prompt 'p9': differs"), 3),
        ["trial   3/200  NOT LOSSLESS: prompt 'p9': differs; mask 12:3,5-11,m1,m4  [pool]  eta 3:12"],
    ),
    (
        done(trial(state=TrialState.FAIL, failure="MemoryError: no room"), 4),
        ["trial   4/200  failed: MemoryError: no room  [pool]  eta 3:12"],
    ),
    (Drifted(1.234), ["drift     verifying four tokens costs 1.23 times what it did at the start"]),
    (Drifted(1.05), []),
    (Note("matrix", "head\na  b"), ["matrix    head", "          a  b"]),
    (Note(None, "| a |\n| b |"), ["| a |", "| b |"]),
    (Warned("beware"), ["beware"]),
    (
        written("d/best.json and summary.json", ("d/best.json",), {"load": 8.2, "total": 3661}),
        ["written   d/best.json and summary.json (load 0:08, total 1:01:01)"],
    ),
    (written("out: table.md", ("out/table.md",), {}), ["written   out: table.md"]),
    (
        group_verdict("demo/b", "b", DecodeConfig.plain(12, reason="too slow")),
        ["result    'b': plain decoding (too slow)"],
    ),
]


@pytest.mark.parametrize(("event", "lines"), LINES)
def test_the_words_of_an_event(event: Event, lines: list[str]) -> None:
    assert text_of(event) == lines


SHAPE = """\
plan      in all at most about T: reference T, outlook T, search T, confirm T; a token takes N ms, a prompt N ms
study     study in journal:TMP/study.log: N of N trials done
reference plain decoding of tuning prompts, greedy, N tokens each
reference plain N tok/s, A/A noise N % a pair, N of N prompts a full trial
outlook   ...
search    N trials, sampler replay, seed N
trial N
confirm   N candidates and plain decoding on N held-out prompts, the chosen one again on the same
confirm   chosen: mask M, gamma N; measuring it afresh N times
confirm   N of N pairs of the chosen one and plain decoding, about T left
confirm   #N Nx (tuning Nx): mask M, gamma N
outlook   ...
result    N tok/s against N plain: Nx, N % interval N..N, N held-out prompts x N, N identical, N logit ties
result    end to end, prompts included: Nx, N % interval N..N; N% of the outputs' N-grams repeat what came before
result    speculate: mask M, gamma N
          attn ROW
          mlp  ROW
written   TMP/best.json and summary.json (load T, reference T, outlook T, search T, confirm T, total T)
"""


def shape_of(text: str, folder: Path) -> str:
    """A run's lines without what its numbers decide; lines of one shape that follow each other are one."""
    for pattern, name in (
        (re.escape(str(folder)), "TMP"),
        (r"mask \d+:[\w,-]+?(?=, gamma)", "mask M"),
        (r"skip\.\w+\.\d+", "skip.BIT"),
        (r"\d+:\d\d", "T"),
        (r", (draft|target)_threshold \d(\.\d+)?", ""),
        (r"-?\d+(\.\d+)?", "N"),
        (r"trial +N.*", "trial N"),
        (r"outlook   .*", "outlook   ..."),  # the outlook's own words, kept by its tests
        (r"(attn|mlp ) [x.]+", r"\1 ROW"),
    ):
        text = re.sub(pattern, name, text)
    kept: list[str] = []
    for line in text.splitlines():
        if not kept or kept[-1] != line:
            kept.append(line)
    return "\n".join(kept) + "\n"


@dataclass(frozen=True)
class Told:
    """A finished run: what it told, and what it left."""

    bench: Bench
    events: list[Event]

    @property
    def lines(self) -> list[str]:
        return self.bench.output.getvalue().splitlines()

    @property
    def trials(self) -> list[FrozenTrial]:
        return self.bench.trials()


def run_recorded(folder: Path, decoder: FakeDecoder, code: int, **spec: Any) -> Told:
    output = io.StringIO()
    recorder = Recorder(output)
    bench = Bench(folder, decoder, output=output, reporter=recorder)
    with pytest.MonkeyPatch.context() as patch:
        quiet(patch)
        assert bench.run(**spec) == code
    return Told(bench, recorder.events)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run in which every trial at gamma 6 fails."""
    decoder = FakeDecoder(break_on=lambda config: MemoryError("no room") if config.gamma == 6 else None)
    return run_recorded(tmp_path_factory.mktemp("study", numbered=False), decoder, 0, trials=12)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run in which layer 2 cannot be skipped without another output."""
    decoder = FakeDecoder(wrong_on=lambda config: config.skip_mask.attention[2])
    return run_recorded(tmp_path_factory.mktemp("wrong"), decoder, 1, trials=6)


def told_to(reporter: Reporter, told: Told) -> None:
    with reporter:
        for event in told.events:
            reporter.tell(event)


def test_the_lines_of_a_run(told: Told) -> None:
    assert shape_of(told.bench.output.getvalue(), told.bench.folder) == SHAPE
    assert sum(line.startswith("trial ") for line in told.lines) == 12


def strictly(text: str) -> list[dict[str, Any]]:
    """JSON lines, without NaN and Infinity, which JSON does not know."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_json_lines_hold_the_run_in_numbers(told: Told) -> None:
    output = io.StringIO()
    told_to(JsonReporter(output), told)
    events, bench = strictly(output.getvalue()), told.bench
    names = [one["event"] for one in events]
    assert [name for i, name in enumerate(names) if name != "note" and name not in names[:i]] == [
        *("plan", "study", "reference", "outlook", "search", "trial", "confirm", "prediction", "result", "written")
    ]
    by_number = {one["number"]: one for one in events if one["event"] == "trial"}
    assert names.count("trial") == len(by_number) == len(told.trials) == 12
    assert {"complete", "fail"} == {one["state"] for one in by_number.values()}
    for one in told.trials:
        event, attrs = by_number[one.number], one.user_attrs
        assert event["state"] == one.state.name.lower()
        assert event["tokens_per_s"] == one.value
        for name in ("speedup", "speedup_ci_low", "speedup_ci_high", "acceptance_rate", "origin", "failure"):
            assert event[name] == attrs.get(name), name
        assert event["gamma"] == one.params["gamma"]
        assert event.keys() == by_number[0].keys()
    summary = bench.summary()
    result = next(one for one in events if one["event"] == "result")
    assert (result["verdict"], result["confirmed"]) == ("speculate", summary["confirmed"])
    assert result["skip_mask"] == summary["config"]["skip_mask"]
    finalists = [(one["trial"], one["speedup"]) for one in events if one["event"] == "confirm"]
    assert finalists == [(one["trials"][0], one["speedup"]) for one in summary["candidates"]]
    reference = next(one for one in events if one["event"] == "reference")
    assert reference["plain_tokens_per_s"] == summary["reference"]["plain_tokens_per_s"]
    assert events[-1]["files"] == [str(bench.paths.best), str(bench.paths.summary)]


def test_json_of_wrong_outputs_and_of_numbers_that_are_none(wrong: Told) -> None:
    output = io.StringIO()
    told_to(JsonReporter(output), wrong)
    facts = {"replay": {"p95": float("nan")}, "prediction": float("inf")}
    JsonReporter(output).tell(ReadyMade("prediction", [], facts))
    *events, last = strictly(output.getvalue())
    assert last == {"event": "prediction", "replay": {"p95": None}, "prediction": None}
    pruned = [one for one in events if one["event"] == "trial" and one["state"] == "pruned"]
    assert pruned
    assert all(one["lossless"] is False and one["tokens_per_s"] is None and one["violation"] for one in pruned)
    warnings = [one["text"] for one in events if one["event"] == "warning"]
    assert sum("NOT LOSSLESS" in text for text in warnings) == len(pruned)


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (ValueError("prompts: are\n none"), "prompts: are none"),
        (BrokenPipeError(), None),
    ],
)
def test_json_of_a_run_that_ends_in_an_error(failing: BaseException, said: str | None) -> None:
    output = io.StringIO()
    with pytest.raises(type(failing)), JsonReporter(output):
        raise failing
    assert strictly(output.getvalue()) == ([{"event": "stopped", "text": said}] if said else [])


def test_json_of_a_run_without_a_result(bench: Bench) -> None:
    bench.reporter = JsonReporter(bench.output)
    bench.decoder.break_on = lambda config: RuntimeError("driver gone") if config.skip_mask.num_skipped else None
    assert bench.run(trials=30, max_failures=3, repeat_every=0) == 1
    last = strictly(bench.output.getvalue())[-1]
    assert last["event"] == "stopped"
    assert "3 trials in a row failed" in last["text"]


def test_quiet_is_the_verdict_and_warnings_elsewhere(wrong: Told) -> None:
    output, errors = io.StringIO(), io.StringIO()
    told_to(QuietReporter(output, errors), wrong)
    lines = wrong.lines
    first = next(i for i, line in enumerate(lines) if line.startswith("result"))
    verdict = [line for line in lines[first:] if not line.startswith("NOT LOSSLESS")]
    assert output.getvalue().splitlines() == verdict
    assert errors.getvalue().splitlines() == [line for line in lines if line.startswith("NOT LOSSLESS")]
    assert verdict[-1].startswith("written")


def live_on(width: int, height: int = 40) -> tuple[LiveReporter, Terminal]:
    stream = Terminal()
    console = Console(file=stream, width=width, height=height, force_terminal=True, color_system="truecolor")
    return LiveReporter(stream, console), stream


def screen_of(written: str) -> list[str]:
    """What a terminal of endless width shows after it was sent this, with all that scrolled out."""
    rows, row, column = [""], 0, 0
    for code, char in re.findall(r"\x1b\[([?\d;]*[a-zA-Z])|([^\x1b])", written):
        if char == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif char == "\r":
            column = 0
        elif char:
            rows[row] = rows[row][:column].ljust(column) + char + rows[row][column + 1 :]
            column += 1
        elif code == "2K":
            rows[row] = ""
        elif code.endswith("A"):
            row -= int(code[:-1])
            assert row >= 0
        else:
            assert code[-1] in "mhl", code
    return "\n".join(line.rstrip() for line in rows).rstrip().split("\n")


@pytest.mark.parametrize("width", [100, 80, 40])
def test_the_live_view_fits_and_leaves_the_lines_alone(told: Told, width: int) -> None:
    reporter, stream = live_on(width)
    views = []
    with reporter:
        for event in told.events:
            reporter.tell(event)
            screen = screen_of(stream.getvalue())
            if any(line.startswith("phase ") for line in screen):
                views.append(screen[next(i for i, line in enumerate(screen) if line.startswith("phase ")) :])
                assert max(map(len, views[-1])) <= width
    kept = [line for line in told.lines if not re.match(r"trial .*tok/s", line)]
    assert screen_of(stream.getvalue()) == kept
    assert views[0][0].split()[:2] == ["phase", "[reference]" if width > 70 else "reference"]
    at_work = next(view for view in views if any("10 of 12" in line for line in view))
    text = "\n".join(at_work)
    assert ("[search]" if width > 70 else "search (3 of 4)") in at_work[0]
    assert re.search(r"trials  .* 10 of 12, \d+:\d\d left", text)
    assert re.search(r"best    1\.\d\dx \d\.\d\d\.\.\d\.\d\d", text)
    assert re.search(r"attn [.x]{6}\n +mlp  [.x]{6}", text)
    assert [int(one) for one in re.findall(r"#(\d+) +(?:failed|\d)", text)] == [9, 8, 7, 6, 5]
    assert re.search(r"machine plain 100\.\d tok/s, (A/A )?noise \d\.\d %", text)
    assert "pace 1.00 of usual: steady" in text


def test_nothing_draws_while_the_clock_runs(tmp_path: Path) -> None:
    reporter, _ = live_on(80)
    others = {one.name for one in threading.enumerate() if one is not threading.current_thread()}  # of earlier tests
    threads: set[str] = set()

    def note(_ids: Sequence[int], _config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
        threads.update(one.name for one in threading.enumerate())
        return out

    with reporter:
        Bench(tmp_path, FakeDecoder(then=note), reporter=reporter).run(trials=2)
    # Three sleep for a minute or more at a time: Optuna's own, the worker's signs of life, and this test's limit.
    asleep = ("signs of life", "pytest_timeout")
    new = threads - others
    drawing = {name for name in new if "heartbeat" not in name and not name.startswith(asleep)}
    assert drawing == {threading.current_thread().name}


@pytest.mark.parametrize("failing", [KeyboardInterrupt(), RuntimeError("driver gone")])
def test_an_error_in_the_middle_leaves_the_terminal_whole(
    told: Told, failing: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = Terminal()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(logging.root, "handlers", [])
    quiet_libraries()
    reporter, stream = live_on(80)

    def tell_until_it_fails() -> None:
        for event in told.events:
            reporter.tell(event)
            if isinstance(event, TrialDone):
                logging.getLogger("x").warning("after trial %d", event.num_done)
                if event.num_done == 3:
                    raise failing

    with pytest.raises(type(failing)), reporter:
        tell_until_it_fails()
    assert sys.stderr is errors
    logging.getLogger("x").warning("at the end")
    assert re.findall(r"\x1b\[\?25([hl])", stream.getvalue())[-1] == "h"
    # Hidden only for the moment in which the view starts: a killed process leaves a cursor too.
    assert re.search(r"\x1b\[\?25l.*?\x1b\[\?25h", stream.getvalue().split("#0")[0], re.DOTALL)
    screen = screen_of(stream.getvalue())
    assert not any(line.startswith(("phase ", "trials ", "best ")) for line in screen)
    assert [line for line in screen if line.startswith("warning")] == [f"warning: after trial {i}" for i in (1, 2, 3)]
    assert errors.getvalue() == "warning: at the end\n"


def view_with(*trials: FrozenTrial) -> LiveView:
    view = LiveView()
    for event in (StudyOpened("s", "", 0, 200), ReferenceKnown(REFERENCE), *map(done, trials)):
        view.take(event)
    return view


def drawn(view: LiveView, width: int, height: int = 40, **console: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, height=height, **({"force_terminal": True} | console)).print(view)
    return re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())


def test_trials_without_numbers_say_why() -> None:
    view = view_with(
        trial(4, TrialState.FAIL, failure="MemoryError: no room " * 9),
        trial(5, TrialState.PRUNED, violation="prompt 'p9'"),
        trial(6, stopped_early=True),
    )
    for width in (100, 40):
        text = drawn(view, width)
        assert all(len(line.rstrip()) <= width for line in text.splitlines())
        assert re.search(r"#4 +failed: MemoryError", text)
        assert re.search(r"#5 +NOT LOSSLESS: p", text)
        assert re.search(r"#6 +1\.41x stopped early", text)


def test_a_picture_wider_than_the_terminal_goes_on_below() -> None:
    attention, mlp = [tuple(i % step == 0 for i in range(80)) for step in (2, 3)]
    leader = Entry(DecodeConfig(skip_mask=SkipMask(attention=attention, mlp=mlp), gamma=2), {}, (0,), 4, 1.2, 0.9)
    view = LiveView()
    view.take(TrialDone(trial(), 1, 2, leader, 1.0))
    text = drawn(view, 40)
    rows = re.findall(r"(attn|mlp ) ([.x]+)", text)
    for name, flags in (("attn", attention), ("mlp ", mlp)):
        assert "".join(row for one, row in rows if one == name) == "".join("x" if flag else "." for flag in flags)
    assert "mask 80:" not in text
    assert "gamma 2" in text


def test_a_low_terminal_drops_the_oldest_trials_first() -> None:
    view = view_with(*map(trial, range(8)))
    assert re.findall(r"#(\d) +1\.", drawn(view, 80)) == list("76543")
    text = drawn(view, 80, height=12)
    assert len(text.splitlines()) <= 12
    assert re.findall(r"#(\d) +1\.", text) == list("7654")
    assert "machine" in text


def test_a_slower_machine_is_named() -> None:
    pace = Pace()
    assert pace.now is None
    for number in range(20):
        rate = 70.0 if number >= 15 else 100.0
        pace.take(trial(number, prompt_steps=[0, 1], plain_tokens_per_s_by_prompt=[rate, 2 * rate]))
    assert pace.now == pytest.approx(0.7)
    view = view_with(
        *[
            trial(i, prompt_steps=[0], plain_tokens_per_s_by_prompt=[70.0 if i >= 15 else 100.0], speedup=1.0)
            for i in range(20)
        ]
    )
    assert "pace 0.70 of usual: DRIFTS" in drawn(view, 40)
    view.take(Drifted(1.3))
    assert "verifying 1.30 of start: DRIFTS" in drawn(view, 40)
    view.take(Drifted(1.02))
    assert "verifying" not in drawn(view, 40)


@pytest.mark.parametrize(
    ("environment", "is_terminal", "kind", "colours"),
    [
        ({"TERM": "xterm"}, True, LiveReporter, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, LiveReporter, False),
        ({"TERM": "dumb"}, True, Reporter, False),
        ({}, True, Reporter, True),
        ({"TERM": "xterm"}, False, Reporter, False),
        ({"TERM": "xterm", "FORCE_COLOR": "1"}, False, Reporter, True),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, False, Reporter, False),
    ],
)
def test_who_tells_a_run(
    environment: dict[str, str],
    is_terminal: bool,
    kind: type[Reporter],
    colours: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert type(make_reporter(quiet=False, json_lines=False)) is kind
    assert type(make_reporter(quiet=True, json_lines=False)) is QuietReporter
    assert type(make_reporter(quiet=False, json_lines=True)) is JsonReporter
    with make_reporter(quiet=False, json_lines=False) as reporter:
        for event in (StudyOpened("s", "url", 0, 2), done(trial()), Warned("beware")):
            reporter.tell(event)
    written = stream.getvalue()
    is_coloured = re.search(r"\x1b\[(\d+;)*3\d[;m]", written) is not None
    assert is_coloured == colours
    assert "beware" in written
    assert ("\x1b[2K" in written) == (kind is LiveReporter)


def test_quiet_and_json_exclude_each_other(refused: Any) -> None:
    assert "not allowed with" in refused(run.main, ["--quiet", "--json"])


def test_the_command_tells_in_json(tiny_study: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([*tiny_study, "--dry-run", "--json"]) == 0
    preflight, plan, note = strictly(capsys.readouterr().out)
    assert preflight["event"] == "preflight"
    assert (preflight["num_layers"], preflight["device"], preflight["dtype"]) == (4, "cpu", "float32")
    assert (preflight["num_tuning_prompts"], preflight["num_held_out_prompts"], preflight["gamma_max"]) == (6, 5, 4)
    assert (preflight["drafters"], preflight["regimes"]) == ([*UNTRAINED], ["greedy"])
    assert plan["event"] == "plan"
    assert sum(plan["expected_s"].values()) > 0
    assert (note["event"], note["phase"]) == ("note", "dry run")


@pytest.mark.parametrize(("pace", "told"), [(1.0, set()), (0.01, {"tuning texts", "prompts", "pairs"})])
def test_the_phases_of_a_slow_model_tell_how_far_they_are(bench: Bench, pace: float, told: set[str]) -> None:
    bench.decoder.pace = pace
    assert bench.run(trials=6, confirm_repeats=2) == 0
    lines = re.findall(
        r"^(?:reference|confirm) +\d+ of \d+ ([a-z- ]+), about [0-9:]+ left$", bench.output.getvalue(), re.M
    )
    assert {one for one in told if any(line.startswith(one) for line in lines)} == told
    assert bool(lines) == bool(told)
