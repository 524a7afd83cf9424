"""Figures draw the numbers that the study keeps, say what it lacks, and reach the dashboard or leave the run alone."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import optuna
import plotly.graph_objects as go
import pytest
from optuna.trial import FrozenTrial, TrialState
from optuna_dashboard import get_note, save_note
from optuna_dashboard._custom_plot_data import get_plotly_graph_objects

from layerskip import DecodeConfig
from layerskip.analysis.intervals import geometric_mean
from search.measure.reference import Reference
from search.predict.accuracy import describe_ranks, prediction_check_of
from search.predict.costs import CostModel
from search.predict.learnt_costs import CostLearner
from search.predict.sensitivity import Sensitivity, SublayerWorth
from search.reporting.dashboard_page import FIGURES, YOURS, note, push_figures
from search.reporting.figures.outlook import cost_figure, sensitivity_figure
from search.reporting.figures.style import fit_card
from search.reporting.figures.trials import convergence_figure, prediction_figure
from search.reporting.record import MissingData, StudyRecord, read_record, space_of
from search.study.attributes import COSTS, SENSITIVITY
from search.study.space import SearchSpace
from search.trials.objective import standings_of
from tests.search.helpers import outlook as outlook_fakes
from tests.search.helpers.fakes import SPACE, Bench
from tests.search.helpers.studies import copy_of
from tests.search.predict.test_learnt_costs import ALONE, CHEAP, trials_of

pytestmark = pytest.mark.publishes
FAST: dict[str, Any] = {"trials": 2, "num_confirm_prompts": 5, "confirm_repeats": 1}
"""Too few prompts for a bootstrap."""
PREDICTED = {"predicted_ratios", "predicted_speedup", "predicted_tokens_per_s", "replayed_forwards"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> optuna.Study:
    """A finished search on fakes, never changed: 16 trials, some stopped early, one out of memory."""
    bench = Bench(tmp_path_factory.mktemp("finished"))
    decoder = bench.decoder
    decoder.break_on = lambda _config: MemoryError("no room") if decoder.num_decoded == 100 else None
    assert bench.run(trials=16) == 0
    return bench.study()


@pytest.fixture
def study(finished: optuna.Study) -> optuna.Study:
    """A copy of it to do things to."""
    return copy_of(finished)


def complete(study: optuna.Study, *, early: bool) -> list[FrozenTrial]:
    trials = study.get_trials(states=(TrialState.COMPLETE,))
    return [trial for trial in trials if trial.user_attrs["stopped_early"] is early]


def traces(figure: go.Figure) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def facts(figure: go.Figure) -> str:
    text: str = figure.layout.meta["facts"]
    return text


def cost(**changes: object) -> CostModel:
    model = CostModel(
        verify_s=(0.01, 0.012, 0.016),
        fixed_s=0.001,
        attention_s=(0.001, 0.002),
        mlp_s=(0.003, 0.001),
        threshold_s=0.0005,
        fit_error=0.02,
        context_tokens=31,
        measured_on={"device": "cpu", "cpu": "a CPU", "dtype": "float32", "quantization": "int8", "engine": "eager"},
    )
    return replace(model, **changes)


def with_costs(*costs: CostModel) -> optuna.Study:
    study = optuna.create_study()
    study.set_user_attr(COSTS, json.dumps([one.to_json() for one in costs]))
    return study


def test_costs_are_drawn_in_steps_of_their_own_target() -> None:
    middle, latest = cost(verify_s=(1.0, 2.0, 3.0)), cost(verify_s=(0.02, 0.03, 0.04), mlp_s=(0.008, 0.004))
    figure = cost_figure(read_record(with_costs(cost(), middle, latest)))
    drawn = traces(figure)
    first = drawn["first: target step 10.00 ms"]
    assert first.x == (0, 1, 2)
    assert first.y == pytest.approx([1.0, 1.2, 1.6])
    assert first.customdata == pytest.approx([10.0, 12.0, 16.0])
    assert drawn["latest: target step 20.00 ms"].y == pytest.approx([1.0, 1.5, 2.0])
    assert drawn["fixed"].x == pytest.approx([0.1, 0.05])
    assert drawn["2 attentions"].x == pytest.approx([0.3, 0.15])
    assert drawn["2 MLPs"].x == pytest.approx([0.4, 0.6])
    assert drawn["confidence (with a threshold)"].x == pytest.approx([0.05, 0.025])
    assert drawn["2 MLPs"].customdata == pytest.approx([4.0, 12.0])
    assert drawn["fixed"].y == ("first", "latest")
    assert len(drawn) == 6
    where = "a CPU, float32, int8 weights, engine eager; "
    assert facts(figure).startswith(f"3 measurements on texts of about 31 tokens, {where}")
    assert "2.0 % (median)" in facts(figure)


def test_what_trials_taught_of_the_costs_is_drawn_beside_them() -> None:
    study = with_costs(CHEAP)
    study.add_trials(trials_of(20))
    learnt = CostLearner().learn(CHEAP, trials_of(20))
    drawn = traces(cost_figure(read_record(study)))
    steps = [seconds / ALONE for seconds in learnt.verify_s]
    assert drawn["in the trials: target step 10.00 ms"].y == pytest.approx(steps)
    assert drawn["fixed"].y == ("only", "in the trials")
    assert drawn["fixed"].x[1] == pytest.approx(learnt.fixed_s / ALONE)


def with_worths(*worths: tuple[str, float, float], base: str) -> optuna.Study:
    study = optuna.create_study()
    sublayers = tuple(SublayerWorth(*worth) for worth in worths)
    study.set_user_attr(SENSITIVITY, Sensitivity(sublayers, base, 0.4).to_json())
    return study


def test_worths_are_drawn_by_layer_and_kind() -> None:
    worths = [("attn.00", 0.5, 0.2), ("attn.01", 1.0, 0.1), ("mlp.00", 0.1, 0.3), ("mlp.01", 0.96, -0.1)]
    figure = sensitivity_figure(
        read_record(with_worths(*((f"skip.{name}", *rest) for name, *rest in worths), base="2:1"))
    )
    attention, mlp, attention_gain, mlp_gain = figure.data
    assert [trace.name for trace in figure.data] == ["attention", "MLP"] * 2
    assert all(trace.x == (0, 1) for trace in figure.data)
    # The upper half shows what is lost, on a log axis; no loss at all at half the smallest one.
    assert attention.y == pytest.approx([0.5, 0.02])
    assert mlp.y == pytest.approx([0.9, 0.04])
    assert (attention.customdata, mlp.customdata) == ((0.5, 1.0), (0.1, 0.96))
    assert (attention_gain.y, mlp_gain.y) == ((0.2, 0.1), (0.3, -0.1))
    ticks = figure.layout.yaxis
    assert ticks.type == "log"
    assert ticks.autorange == "reversed"
    assert [float(text) for text in ticks.ticktext] == pytest.approx([1 - value for value in ticks.tickvals])
    shaded = next(shape for shape in figure.layout.shapes if shape.type == "rect")
    assert (shaded.x0, shaded.x1) == (-0.5, 0.5)
    assert "hardest to do without: MLP 0 (0.10), attention 0 (0.50), MLP 1 (0.96)" in facts(figure)
    assert facts(figure).endswith("has 0.40")


def test_whole_layers_have_all_figures(tmp_path: Path) -> None:
    space = outlook_fakes.space_of(6, whole=True)
    run_on(tmp_path, space, **FAST)
    study = Bench(tmp_path).study()
    assert {trace.name for trace in sensitivity_figure(read_record(study)).data} == {"whole layer"}
    stored = Sensitivity.from_json(study.user_attrs[SENSITIVITY])
    assert sensitivity_figure(read_record(study)).data[1].y == tuple(one.keep_one_out for one in stored.sublayers)
    assert space_of(study.get_trials()) == space
    for draw in FIGURES.values():
        assert draw(read_record(study)).data


def run_on(folder: Path, space: SearchSpace, **spec: object) -> None:
    assert Bench(folder, space=space).run(**spec) == 0


def test_predictions_are_drawn_against_measurements_on_the_same_prompts(finished: optuna.Study) -> None:
    figure = prediction_figure(read_record(finished))
    drawn: dict[int, tuple[float, float, bool]] = {}
    for trace in figure.data[1:]:
        for x, y, symbol, about in zip(trace.x, trace.y, trace.marker.symbol, trace.customdata, strict=True):
            drawn[int(about.split()[0].removeprefix("#"))] = (x, y, symbol.endswith("-open"))
    trials = finished.get_trials(states=(TrialState.COMPLETE,))
    assert drawn.keys() == {trial.number for trial in trials}
    for trial in trials:
        ratios, predicted = trial.user_attrs["ratios"], trial.user_attrs["predicted_ratios"]
        x, y, is_open = drawn[trial.number]
        assert x == pytest.approx(geometric_mean(predicted[: len(ratios)]))
        assert y == pytest.approx(geometric_mean(ratios))
        assert is_open is trial.user_attrs["stopped_early"]
    assert {is_open for *_, is_open in drawn.values()} == {True, False}
    check = prediction_check_of(trials)
    assert f"{len(trials)} trials: median error {100 * check.median_abs_error:.1f} %" in facts(figure)
    assert f"{describe_ranks(asdict(check))}, predicted / measured {check.bias:.3f}" in facts(figure)


def test_convergence_draws_every_trial_and_what_led(finished: optuna.Study) -> None:
    figure = convergence_figure(read_record(finished))
    drawn = traces(figure)
    for name, early in (("measured", False), ("measured, stopped early", True)):
        some = complete(finished, early=early)
        assert drawn[name].x == tuple(trial.number for trial in some) != ()
        assert drawn[name].y == tuple(trial.user_attrs["speedup"] for trial in some)
    assert drawn["measured"].marker.symbol == "circle"
    assert drawn["measured, stopped early"].marker.symbol == "circle-open"
    predicted = [trial for trial in finished.get_trials() if "predicted_speedup" in trial.user_attrs]
    assert drawn["predicted"].x == tuple(trial.number for trial in predicted)
    assert drawn["predicted"].y == tuple(trial.user_attrs["predicted_speedup"] for trial in predicted)
    reference = Reference.from_json(finished.user_attrs["reference"])
    curve = drawn["leader, pooled lower bound"]
    for number, lower in zip(curve.x, curve.y, strict=True):
        until = [trial for trial in finished.get_trials() if trial.number <= number]
        leader = standings_of(until, SPACE, reference).leader
        assert lower == leader.lower
    assert curve.x == tuple(trial.number for trial in finished.get_trials(states=(TrialState.COMPLETE,)))
    assert f"{len(complete(finished, early=True))} stopped early" in facts(figure)
    failed = [trial for trial in finished.get_trials() if trial.state == TrialState.FAIL]
    assert len(failed) == 1
    assert "1 failed" in facts(figure)
    pool = json.loads(finished.user_attrs["pool"])
    assert f"best of {len(pool)} predicted before the first trial {math.exp(pool[0][-1]):.2f}" in facts(figure)


def test_the_confirmed_number_stands_beside_the_trials(finished: optuna.Study, study: optuna.Study) -> None:
    confirmed = finished.user_attrs["confirmed"]
    point = traces(convergence_figure(read_record(finished)))["confirmed, 95 % interval"]
    assert point.x[0] > finished.get_trials()[-1].number
    assert point.y == (confirmed["speedup"],)
    assert point.y[0] + point.error_y.array[0] == pytest.approx(confirmed["speedup_ci_high"])
    assert point.y[0] - point.error_y.arrayminus[0] == pytest.approx(confirmed["speedup_ci_low"])
    # One prompt has no interval; a bar a thousand times as high would hide everything else.
    alone = {"num_prompts": 1, "speedup_ci_low": 0.001, "speedup_ci_high": 1300.0}
    study.set_user_attr("confirmed", confirmed | alone)
    assert traces(convergence_figure(read_record(study)))["confirmed on one prompt"].error_y.array is None


def test_a_study_without_predictions_has_convergence_alone(finished: optuna.Study) -> None:
    bare = copy_of(finished, without=[*PREDICTED, COSTS, SENSITIVITY, "pool"])
    drawn = traces(convergence_figure(read_record(bare)))
    assert "predicted" not in drawn
    assert drawn["measured"].y == traces(convergence_figure(read_record(finished)))["measured"].y
    for draw in (cost_figure, sensitivity_figure, prediction_figure):
        with pytest.raises(MissingData):
            draw(read_record(bare))
    assert set(FIGURES) - set(push_figures(bare)) == {
        "which-sublayers-matter",
        "what-a-step-costs",
        "predicted-and-measured",
    }


def test_studies_of_other_samplers_have_all_figures(bench: Bench) -> None:
    bench.run(**FAST, sampler="tpe")
    study = bench.study()
    assert all(draw(read_record(study)).data for draw in FIGURES.values())


def test_convergence_needs_the_reference(finished: optuna.Study) -> None:
    with pytest.raises(MissingData, match=r"^reference: study "):
        convergence_figure(read_record(copy_of(finished, without=["reference"])))


def test_text_fits_a_phone_and_the_dashboards_cards() -> None:
    figure = cost_figure(read_record(with_costs(cost())))
    heights = []
    for width in (46, 80):
        title, *lines = [re.sub("<.*?>", "", line) for line in figure.layout.title.text.split("<br>")]
        assert title == "What a step costs"
        assert max(len(line) for line in lines) <= width
        assert " ".join(lines) == facts(figure)
        heights.append(figure.layout.margin.t)
        assert heights[-1] >= 20 * (1 + len(lines))
        figure = fit_card(figure)
    assert heights[1] < heights[0]
    assert figure.layout.height == 450


def stored_figures(study: optuna.Study) -> dict[str, Any]:
    attrs = study._storage.get_study_system_attrs(study._study_id)
    return {name: json.loads(text) for name, text in get_plotly_graph_objects(attrs).items()}


def test_a_run_leaves_its_figures_and_a_note_in_the_study(finished: optuna.Study) -> None:
    stored = stored_figures(finished)
    assert stored.keys() == FIGURES.keys()
    for name, draw in FIGURES.items():
        # The dashboard's Plotly is older than ours: lists, not packed arrays, and no higher than its cards.
        assert stored[name]["data"] == json.loads(draw(read_record(finished)).to_json())["data"]
        assert "bdata" not in json.dumps(stored[name])
        assert stored[name]["layout"]["height"] == 450
    text = get_note(finished)
    confirmed = finished.user_attrs["confirmed"]
    assert text.startswith(f"**Speculate: {confirmed['speedup']:.2f} times as fast**: ")
    assert f"{confirmed['tokens_per_s']:.1f} against {confirmed['plain_tokens_per_s']:.1f} tokens/s" in text
    assert f"{finished.user_attrs['plain_tokens_per_s']:.1f} tokens/s." in text
    config = DecodeConfig(**finished.user_attrs["config"])
    assert f"Best config: `mask {config.skip_mask}, gamma {config.gamma}" in text
    assert "```\npython -m search.run\n```" in text
    assert " that the search had not seen (and was chosen on, which flatters it), up to 17 new tokens each." in note(
        read_record(finished)
    )


def test_a_second_push_replaces_the_first(study: optuna.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    assert push_figures(study) == list(FIGURES)
    attrs = study._storage.get_study_system_attrs(study._study_id)
    before = len(attrs)
    assert max(len(value) for value in attrs.values() if isinstance(value, str)) <= 2045
    assert push_figures(study) == list(FIGURES)
    assert len(study._storage.get_study_system_attrs(study._study_id)) == before
    assert get_note(study).count(YOURS) == 1
    # A smaller figure leaves nothing of the larger one.
    monkeypatch.setitem(FIGURES, "what-a-step-costs", lambda _record: cost_figure(read_record(with_costs(cost()))))
    push_figures(study)
    assert "2 MLPs" in {trace["name"] for trace in stored_figures(study)["what-a-step-costs"]["data"]}


def test_what_a_person_wrote_into_the_note_stays(study: optuna.Study) -> None:
    save_note(study, "Written before any push.")
    push_figures(study)
    assert get_note(study).endswith(f"{YOURS}\n\nWritten before any push.")
    save_note(study, get_note(study) + "\nAdded.")
    push_figures(study)
    text = get_note(study)
    assert text.endswith(f"{YOURS}\n\nWritten before any push.\nAdded.")
    assert text.count("Best config") == text.count(YOURS) == 1


def test_the_note_tells_what_was_decided(study: optuna.Study) -> None:
    study.set_user_attr("verdict", "do not speculate")
    study.set_user_attr("reason", "do not speculate: it *reached*\n0.98x")
    study.set_user_attr("config", DecodeConfig.plain(6).model_dump(mode="json"))
    study.set_user_attr("cannot_win", "no config can win here; the best is estimated at 0.97x")
    text = note(read_record(study))
    assert text.startswith("**Do not speculate**: For ")
    assert r": it \*reached\* 0.98x. The search was cut short: no config can " in text
    leader = standings_of(study.get_trials(), SPACE, Reference.from_json(study.user_attrs["reference"])).leader
    assert f"Best on the tuning prompts: `mask {leader.config.skip_mask}, gamma {leader.config.gamma}" in text
    assert f"{leader.speedup:.2f} times as fast" in text
    study.set_user_attr("cannot_win", None)  # taken back by a later run, with --force
    assert "cut short" not in note(read_record(study))


def test_the_note_of_an_unfinished_study() -> None:
    text = note(read_record(optuna.create_study()))
    assert text.startswith("**No verdict yet**: For greedy text of ")
    assert "none was measured in full" in text
    assert "Made by" not in text


def lines_about_figures(bench: Bench) -> list[str]:
    return [line for line in bench.output.getvalue().splitlines() if "figures" in line]


def test_a_dashboard_that_cannot_be_imported_is_one_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert bench.run(**FAST) == 0
    (line,) = lines_about_figures(bench)
    assert "optuna_dashboard" in line


def test_a_locked_storage_is_one_line(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    locks = []

    def lock(_record: StudyRecord) -> go.Figure:
        locks.append(sqlite3.connect(bench.folder / "study.db", isolation_level=None))
        locks[0].execute("BEGIN IMMEDIATE")
        return go.Figure(layout={"meta": {"title": "", "facts": ""}})

    monkeypatch.setattr("search.storages.database._LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setitem(FIGURES, "speedup-by-trial", lock)
    bench.in_sqlite = True
    assert bench.run(**FAST) == 0
    locks[0].close()
    (line,) = lines_about_figures(bench)
    assert "database is locked" in line
    study = bench.study()
    assert study.user_attrs["verdict"] == "speculate"


def test_ctrl_c_during_a_push_is_not_swallowed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(_study: optuna.Study) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("search.reporting.dashboard_page.push_figures", stop)
    with pytest.raises(KeyboardInterrupt):
        bench.run(**FAST)
    assert bench.paths.summary.exists()
