"""What logit ties were judged by is kept with a study, told where there were any, and shown in its report."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from layerskip.huggingface.rounding import RoundingSpread
from search.preflight import open_subject
from search.reporting.record import read_record
from search.reporting.render import to_markdown
from search.reporting.tables import to_json
from search.study.attributes import ROUNDING
from search.study.prompts import load_prompts
from search.study.spec import StudyPaths
from search.terminal.reporter import JsonReporter, QuietReporter
from tests.search.conftest import write_jsonl
from tests.search.helpers.fakes import Bench, make_spec

SPREAD = RoundingSpread(largest=0.125, num_positions=64)
KEPT = {"largest": 0.125, "tolerance": 0.375, "num_positions": 64}
TOLD = [
    "result    logit ties: 80 outputs of trials, 12 held-out prompts; a token may lie up to 0.375 logits below the "
    "best, 3 times the most that rounding alone changed at 64 positions",
    "result    the proof of the code is identity in float32: python -m layerskip.doctor fake --dtype float32",
]


def tied(folder: Path) -> Bench:
    """Every speculative output parts from the target's by a tie; the spread is there once one was judged."""
    bench = Bench(folder)
    bench.decoder.tie_on = lambda _config: True
    bench.rounding = lambda: SPREAD if bench.decoder.num_checked_ties else None
    return bench


def test_ties_are_told_with_what_they_were_judged_by(tmp_path: Path) -> None:
    bench = tied(tmp_path)
    assert bench.run(trials=16, repeat_every=0) == 0
    num_ties = sum(trial.user_attrs["num_ties"] for trial in bench.study().get_trials())
    told = [TOLD[0].replace("80", str(num_ties)), TOLD[1]]
    lines = bench.output.getvalue().splitlines()
    assert [line for line in lines if line.startswith("result")][-2:] == told
    study = bench.study()
    assert study.user_attrs[ROUNDING] == bench.summary()["rounding"] == KEPT
    report = to_markdown(read_record(study))
    assert "| logit ties | 12 |" in report
    assert "- logit ties: a token may lie up to 0.375 logits below the best" in report
    assert json.loads(to_json(read_record(study)))["rounding"] == KEPT


def test_where_all_is_identical_nothing_is_kept_or_told(bench: Bench) -> None:
    assert bench.run(trials=4) == 0
    assert "float32" not in bench.output.getvalue()
    study = bench.study()
    assert ROUNDING not in study.user_attrs
    assert bench.summary()["rounding"] is None
    assert "logit ties" not in to_markdown(read_record(study))


@pytest.mark.parametrize("reporter", [QuietReporter, JsonReporter])
def test_the_other_views_tell_it_too(tmp_path: Path, reporter: type[QuietReporter] | type[JsonReporter]) -> None:
    bench, output = tied(tmp_path), io.StringIO()
    bench.reporter = reporter(output)
    assert bench.run(trials=2) == 0
    if reporter is QuietReporter:
        assert output.getvalue().splitlines()[-2] == TOLD[1]
    else:
        (told,) = [one for one in map(json.loads, output.getvalue().splitlines()) if one["event"] == "ties"]
        assert (told["num_held_out"], told["rounding"], told["command"]) == (12, KEPT, TOLD[1].split(": ")[1])


def test_it_is_kept_with_the_first_trial_and_of_several_processes_the_widest(tmp_path: Path) -> None:
    bench = tied(tmp_path)
    bench.decoder.break_on = lambda _config: KeyboardInterrupt() if bench.decoder.num_checked_ties > 5 else None
    with pytest.raises(KeyboardInterrupt):
        bench.run(trials=4)
    assert bench.study().user_attrs[ROUNDING] == KEPT
    for largest, kept in ((0.1, 0.125), (0.2, 0.2)):
        again, spread = tied(tmp_path), RoundingSpread(largest, num_positions=32)
        again.rounding = lambda spread=spread: spread
        assert again.run(trials=4) == 0
        assert bench.study().user_attrs[ROUNDING]["largest"] == kept


def test_of_a_real_model_it_is_what_its_ties_were_judged_by(tiny_model: Path, tmp_path: Path) -> None:
    file = str(write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"w{i} w{i + 1} w3"} for i in range(6)]))
    spec = make_spec(model=str(tiny_model), prompts=file, dtype="bfloat16", device="cpu", num_threads=1)
    subject = open_subject(spec, StudyPaths(tmp_path), load_prompts(file, None))
    prompt = subject.tuning[0].ids
    assert subject.decoder.check(prompt, [5, 6], [5, 6]).identical
    assert subject.rounding() is None
    report = subject.decoder.check(prompt, [5, 6], [5, 7])
    spread = subject.rounding()
    assert report.tolerance == spread.tolerance > 0
