"""The report tells what the study keeps, in every form; escapes what users wrote; and never fails a run."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from layerskip import DecodeConfig, SkipMask
from layerskip.analysis.intervals import geometric_mean
from search import report
from search.confirm.held_out import Counters, HeldOut
from search.context import Tools
from search.reporting.artifacts import attach
from search.reporting.dashboard_page import FIGURES
from search.reporting.digest import digest_of
from search.reporting.figures.counters import counters_of, times_of
from search.reporting.figures.decoding import acceptance_figure, held_out_figure, position_figure, time_figure
from search.reporting.figures.machine import machine_figure, surface_figure
from search.reporting.figures.masks import mask_figure
from search.reporting.figures.pictures import PICTURES
from search.reporting.publish import Publisher
from search.reporting.record import MissingData, StudyRecord, read_record
from search.reporting.render import plain_markdown, to_html, to_markdown, to_short_markdown
from search.reporting.tables import to_csv, to_json
from search.storages.opening import close_storage, open_storage
from search.study.attributes import HELD_OUT, SURFACES
from search.terminal.reporter import Reporter
from tests.search.helpers.fakes import Bench, FakeClock
from tests.search.helpers.studies import copy_of
from tests.search.reporting.test_figures import stored_figures

pytestmark = pytest.mark.publishes
FAST: dict[str, Any] = {"trials": 2, "num_confirm_prompts": 5, "confirm_repeats": 1}
HOSTILE = '</script><img src=x onerror="alert(1)"> | `x` *b*'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a finished search on fakes, never changed: 16 trials, some stopped early."""
    bench = Bench(tmp_path_factory.mktemp("finished"))
    assert bench.run(trials=16) == 0
    return with_study_file(bench.folder)


@pytest.fixture(scope="module")
def record(folder: Path) -> Iterator[StudyRecord]:
    storage = open_storage(Bench(folder).url)
    yield read_record(optuna.load_study(study_name=folder.name, storage=storage))
    close_storage(storage)


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    """The page that the run wrote."""
    return Page((folder / "report.html").read_text(encoding="utf-8"))


class Page(HTMLParser):
    """What a browser would see: elements with attributes, text by element id, and the figures' JSON."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.source = text
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[dict[str, Any]] = []
        self.text = ""
        self._inside: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag, attrs = self._inside[-1] if self._inside else ("", {})
        if tag == "script" and attrs.get("type") == "application/json":
            self.figures.append(json.loads(data))
        elif tag not in ("script", "style"):
            self.text += data

    @property
    def values(self) -> dict[str, float]:
        """What `data` elements hold."""
        found = [attrs for tag, attrs in self.elements if tag == "data"]
        return {str(one["id"]).removeprefix("number-"): float(str(one["value"])) for one in found}


def with_study_file(folder: Path) -> Path:
    text = f'model = "fake"\nprompts = "./p.jsonl"\nstorage = "{Bench(folder).url}"\n'
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return folder


def altered(record: StudyRecord, **changes: Any) -> StudyRecord:
    """The same study in memory, changed as `copy_of` says."""
    return read_record(copy_of(record.study, **changes))


def test_the_page_of_a_run_has_every_figure_and_asks_no_network(page: Page, folder: Path) -> None:
    assert "Not drawn" not in page.text
    assert len(page.figures) == len(PICTURES)
    assert all(figure["data"] for figure in page.figures)
    ids = [attrs.get("id") for tag, attrs in page.elements if tag == "figure"]
    assert ids == [picture.key for picture in PICTURES]
    for picture in PICTURES:
        assert picture.reading in page.text
    for _tag, attrs in page.elements:
        for name in ("src", "href", "action", "poster", "data"):
            value = attrs.get(name)
            assert value is None or value.startswith("#")
    policy = next(attrs["content"] for tag, attrs in page.elements if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_the_page_can_be_read_without_seeing_it(page: Page) -> None:
    plots = [attrs for _, attrs in page.elements if attrs.get("class") == "plot"]
    assert len(plots) == len(PICTURES)
    assert all(attrs["role"] == "img" and len(str(attrs["aria-label"])) > 40 for attrs in plots)
    assert [tag for tag, _ in page.elements if re.fullmatch("h[1-3]", tag)][:3] == ["h1", "h2", "h3"]
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [str(attrs["href"])[1:] for tag, attrs in page.elements if tag == "a"]
    assert set(links) <= set(ids)


def test_the_numbers_on_the_page_are_those_exported(page: Page, folder: Path) -> None:
    confirmed = json.loads((folder / "best.json").read_text(encoding="utf-8"))["confirmed"]
    assert page.values == {name: confirmed[name] for name in page.values}
    assert {"speedup", "speedup_ci_low", "speedup_ci_high", "tokens_per_s", "plain_tokens_per_s"} <= page.values.keys()
    low, high = f"{confirmed['speedup_ci_low']:.2f}", f"{confirmed['speedup_ci_high']:.2f}"
    assert f"{confirmed['speedup']:.2f} times as fast as plain decoding (95 % interval {low} to {high})" in page.text
    assert f"{confirmed['tokens_per_s']:.1f} against {confirmed['plain_tokens_per_s']:.1f} tokens/s" in page.text
    where = "that the search had not seen (and was chosen on, which flatters it), up to 17 new tokens each."
    assert f"over 12 prompts of p.jsonl {where}" in page.text
    assert "driver 570.1, SM 1755 MHz, attention math" in page.text, "the state of the machine that they are from"


def test_the_end_to_end_speedup_and_the_share_of_repeats_stand_beside_the_speedup(page: Page, folder: Path) -> None:
    """The page told how much faster decoding is, not how much sooner the answer is there, nor that the text loops."""
    confirmed = json.loads((folder / "best.json").read_text(encoding="utf-8"))["confirmed"]
    assert 1.0 < confirmed["end_to_end_speedup"] < confirmed["speedup"]
    assert page.values["end_to_end_speedup"] == confirmed["end_to_end_speedup"]
    assert page.values["end_to_end_speedup_ci_low"] == confirmed["end_to_end_speedup_ci_low"]
    assert page.values["repeated_ngram_share"] == confirmed["repeated_ngram_share"] == 0.0, "the fake counts upwards"
    said = f"in the seconds it is {confirmed['end_to_end_speedup']:.2f} times as fast"
    assert said in page.text


def test_held_out_prompts_are_drawn_with_their_own_speeds(record: StudyRecord, folder: Path) -> None:
    raw = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["raw"]
    plain, fast = held_out_figure(record).data[1:]
    drawn = {about[0]: (x, other) for about, x, other in zip(plain.customdata, plain.x, fast.x, strict=True)}
    for i, name in enumerate(record.held_out.prompt_ids):
        expected = median(raw["plain_tokens_per_s"][i]), median(raw["tokens_per_s"][i])
        assert drawn[name] == pytest.approx(expected, rel=1e-5)
    ratios = [about[1] for about in plain.customdata]
    assert ratios == sorted(ratios)
    assert geometric_mean(ratios) == pytest.approx(record.attrs["confirmed"]["speedup"], rel=1e-5)


def test_what_the_confirm_stage_counted_survives_storage(record: StudyRecord) -> None:
    held_out = record.held_out
    assert held_out.config == DecodeConfig(**record.attrs["config"])
    assert HeldOut.from_json(held_out.to_json()) == held_out
    counters = held_out.counters
    decodings = len(held_out.prompt_ids) * len(held_out.tokens_per_s[0])
    # The fake decodes 17 tokens in 8 rounds, drafts 10 and gets 8 of them right, whatever the config.
    assert (counters.num_tokens, counters.num_rounds) == (16 * decodings, 8 * decodings)
    assert (counters.num_drafted, counters.num_accepted) == (10 * decodings, 8 * decodings)
    assert counters.drafted_by_position == (8 * decodings, 2 * decodings)
    assert counters.accepted_by_position == (6 * decodings, 2 * decodings)
    rates = [rate for rates in held_out.tokens_per_s for rate in rates]
    assert counters.decode_s == pytest.approx(sum(16 / rate for rate in rates), rel=1e-4)
    plain = [rate for rates in held_out.plain_tokens_per_s for rate in rates]
    assert counters.plain_decode_s == pytest.approx(sum(16 / rate for rate in plain), rel=1e-4)


def test_the_speedup_is_drawn_over_the_length_of_a_text(record: StudyRecord) -> None:
    held_out = record.held_out
    figure = position_figure(record)
    bars, line = figure.data
    assert bars.x == line.x == tuple(range(2, 18)), "the fake decodes 17 tokens, the first of them in the prefill"
    # Plain tokens of the fake take equally long; the i-th of 16 speculative ones takes 2 (16 - i) / 17 of their mean.
    whole = held_out.counters.plain_decode_s / held_out.counters.decode_s
    assert bars.y == pytest.approx([17 / (2 * (16 - i)) * whole for i in range(16)], rel=1e-4)
    spent = [sum(2 * (16 - j) / 17 for j in range(i + 1)) for i in range(16)]
    assert line.y == pytest.approx([(i + 1) / spent[i] * whole for i in range(16)], rel=1e-4)
    decodings = len(held_out.prompt_ids) * len(held_out.tokens_per_s[0])
    assert [(one[0], one[1]) for one in bars.customdata] == [(f"token {i}", decodings) for i in range(2, 18)]
    told = f"{line.y[3]:.2f} after 5, {line.y[7]:.2f} after 9, {whole:.2f} after 17 tokens"
    assert told in figure.layout.meta["facts"]


def test_acceptance_is_drawn_by_position_as_shares_of_rounds(record: StudyRecord) -> None:
    accepted, rejected = acceptance_figure(record).data
    assert accepted.x == (1, 2)
    assert accepted.y == pytest.approx([75.0, 25.0])
    assert rejected.y == pytest.approx([25.0, 0.0])
    assert accepted.text == ("0.75", "1.00")


def test_the_time_of_a_token_is_split_up_and_set_against_the_best_possible() -> None:
    times = times_of(
        Counters(
            num_tokens=100,
            num_rounds=30,
            num_drafted=80,
            num_accepted=60,
            num_target_only=10,
            accepted_by_position=(30, 30),
            drafted_by_position=(40, 40),
            draft_s=0.08,
            verify_s=0.45,
            target_only_s=0.1,
            decode_s=0.7,
            plain_decode_s=1.0,
        )
    )
    assert times["plain"] == pytest.approx({"target step": 10.0})
    spent = {"draft": 0.8, "verify": 4.5, "target-only": 1.0, "loop": 0.7}
    assert times["speculative"] == pytest.approx(spent)
    # 40 forwards of the target at 10 ms a step, for 100 tokens.
    assert times["verifying =<br>one step"] == pytest.approx({"draft": 0.8, "target step": 4.0})
    assert times["and drafts<br>free"] == pytest.approx({"target step": 4.0})


def test_an_old_study_shows_the_times_of_its_trials(record: StudyRecord) -> None:
    old = altered(record, without=[HELD_OUT])
    assert old.held_out is None
    with pytest.raises(MissingData, match="held_out: study"):
        held_out_figure(old)
    trials = old.trials_of(old.choice.config)
    assert trials
    shown = counters_of(old)
    assert shown.source == f"{len(trials)} trials of it on tuning prompts"
    rates = [rate for trial in trials for rate in trial.user_attrs["tokens_per_s_by_prompt"]]
    assert shown.counters.num_tokens == 16 * len(rates)
    assert shown.counters.decode_s == pytest.approx(sum(16 / rate for rate in rates))
    assert shown.counters.num_drafted == 10 * len(rates)
    assert shown.counters.num_rounds == 8 * len(rates)
    assert time_figure(old).data
    # Nothing at all is known of a config that was never measured.
    never = DecodeConfig(skip_mask=SkipMask.parse("6:0-4"), gamma=1).model_dump(mode="json")
    with pytest.raises(MissingData, match="counters: study"):
        counters_of(altered(record, without=[HELD_OUT], config=never))


def test_the_surface_around_the_chosen_config_is_kept_and_drawn(record: StudyRecord) -> None:
    stored = json.loads(record.attrs[SURFACES])
    config = DecodeConfig(**record.attrs["config"])
    (mine,) = [
        one
        for one in stored
        if one["skip_mask"] == str(config.skip_mask) and one["target_threshold"] == config.target_threshold
    ]
    figure = surface_figure(record)
    heat, *_, chosen = figure.data
    assert [list(row) for row in heat.z] == mine["speedups"]
    assert (list(heat.y), list(heat.x)) == (mine["gammas"], mine["draft_thresholds"])
    assert (chosen.x, chosen.y) == ((config.draft_threshold,), (config.gamma,))
    best = max(max(row) for row in mine["speedups"])
    assert f"predicted best {best:.2f}×" in figure.layout.meta["facts"]
    with pytest.raises(MissingData, match="surfaces: study"):
        surface_figure(altered(record, without=[SURFACES]))


def test_masks_are_drawn_layer_by_layer(record: StudyRecord) -> None:
    attention, chosen_attention, mlp, chosen_mlp = mask_figure(record).data
    assert attention.x == mlp.x == tuple(trial.number for trial in record.measured)
    for column, trial in enumerate(record.measured):
        mask = SkipMask.parse(trial.user_attrs["skip_mask"])
        assert tuple(bool(row[column]) for row in attention.z) == mask.attention
        assert tuple(bool(row[column]) for row in mlp.z) == mask.mlp
    chosen = DecodeConfig(**record.attrs["config"]).skip_mask
    for drawn, flags in ((chosen_attention, chosen.attention), (chosen_mlp, chosen.mlp)):
        assert [list(row) for row in drawn.z] == [[int(one)] for one in flags]
        assert [list(row) for row in drawn.text] == [["×" if one else ""] for one in flags]
        assert drawn.x[0] > attention.x[-1]


def test_drift_is_drawn_against_the_same_prompt(record: StudyRecord) -> None:
    drift = machine_figure(record).data[0]
    by_step: dict[int, list[float]] = {}
    for trial in record.measured:
        steps, rates = trial.user_attrs["prompt_steps"], trial.user_attrs["plain_tokens_per_s_by_prompt"]
        for step, rate in zip(steps, rates, strict=True):
            by_step.setdefault(step, []).append(rate)
    expected = [rate / median(rates) for rates in by_step.values() if len(rates) > 1 for rate in rates]
    assert sorted(drift.y) == pytest.approx(sorted(expected), abs=1e-4)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.key)
def test_every_figure_names_what_an_empty_study_lacks(picture: Any) -> None:
    with pytest.raises(MissingData, match=r"^\w+: .*study 'empty one'"):
        picture.draw(read_record(optuna.create_study(study_name="empty one")))


def test_a_study_that_keeps_little_has_a_page_all_the_same(record: StudyRecord) -> None:
    bare = altered(record, without=[key for key in record.attrs if key not in ("fingerprint", "spec", "reference")])
    page = Page(to_html(bare))
    assert "No verdict yet" in page.text
    assert page.text.count("Not drawn: ") == len(PICTURES) - len(page.figures) > 0
    assert page.values == {}


def test_what_users_wrote_is_shown_and_never_run(record: StudyRecord) -> None:
    stored = json.loads(record.held_out.to_json())
    stored["prompt_ids"][0] = HOSTILE
    spec = record.attrs["spec"] | {"model": HOSTILE, "held_out": f"/x/{HOSTILE}"}
    hostile = altered(record, name=HOSTILE, spec=spec, command=HOSTILE, **{HELD_OUT: json.dumps(stored)})
    page = Page(to_html(hostile))
    assert {tag for tag, _ in page.elements}.isdisjoint({"img", "iframe", "object", "b"})
    assert len([tag for tag, _ in page.elements if tag == "script"]) == len(PICTURES) + 2
    assert HOSTILE in page.text
    assert len(page.figures) == len(PICTURES)
    for text in (to_markdown(hostile), to_short_markdown(hostile)):
        outside = re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert "<img" not in outside.replace("\\<img", "")
        for line in outside.splitlines():
            if line.startswith("|") and "onerror" in line:
                assert len(re.findall(r"(?<!\\)\|", line)) == 6


def test_markdown_shows_text_as_it_is() -> None:
    assert plain_markdown("a|b `c`\n*d* @team") == "a\\|b \\`c\\` \\*d\\* @\u200bteam"


def test_no_password_leaves_the_study(record: StudyRecord) -> None:
    spec = record.attrs["spec"] | {"storage": "postgresql+psycopg://me:geheim@host/db"}
    secret = altered(record, spec=spec)
    for text in (to_html(secret), to_markdown(secret), to_short_markdown(secret), to_json(secret), to_csv(secret)):
        assert "geheim" not in text
    assert ("storage", "postgresql+psycopg://me:***@host/db") in digest_of(secret).made


def test_a_local_model_is_named_without_the_path_to_it(record: StudyRecord) -> None:
    spec = record.attrs["spec"] | {"model": "/home/somebody/studies/demo/model", "prompts": "/home/somebody/p.jsonl"}
    private = altered(record, spec=spec)
    for text in (to_html(private), to_markdown(private), to_json(private)):
        assert "somebody" not in text
    assert "demo/model on " in digest_of(private).verdict


def test_plain_decoding_as_the_answer_is_reported_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.decoder.gain = 0.0
    assert bench.run(trials=6) == 0
    page = Page(bench.paths.report.read_text(encoding="utf-8"))
    summary = bench.summary()
    assert summary["verdict"] == "do not speculate"
    assert "Do not speculate" in page.text
    assert "plain decoding is the answer" in page.text
    assert page.values["speedup"] == summary["confirmed"]["speedup"]
    assert "the best candidate, not good enough to be exported" in page.text.lower()
    assert "layerskip.generate" not in page.text
    assert "Not drawn" not in page.text


def test_a_single_held_out_prompt_claims_no_interval(record: StudyRecord) -> None:
    confirmed = record.attrs["confirmed"] | {"num_prompts": 1, "speedup_ci_low": 0.001, "speedup_ci_high": 1300.0}
    told = digest_of(altered(record, confirmed=confirmed))
    assert "interval" not in told.verdict
    assert "over 1 prompt of" in told.verdict
    assert not [number for number in told.numbers if "interval" in number.label]


@pytest.mark.slow
def test_a_report_of_a_study_that_is_going_on(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(tmp_path / "going")
    bench.folder.mkdir()
    bench.decoder.break_on = lambda _config: KeyboardInterrupt() if bench.decoder.num_decoded > 150 else None
    with pytest.raises(KeyboardInterrupt):
        bench.run(trials=30)
    with_study_file(bench.folder)
    storage = open_storage(bench.url)
    study = optuna.load_study(study_name="going", storage=storage)
    done = len([trial for trial in study.get_trials() if trial.state == TrialState.COMPLETE])
    assert done >= 2
    study.ask()  # another process is at it
    # The interrupted run left a report by itself; now it is made anew.
    assert "No verdict yet" in bench.paths.report.read_text(encoding="utf-8")
    bench.paths.report.unlink()
    assert report.main([str(bench.folder)]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")
    page = Page(bench.paths.report.read_text(encoding="utf-8"))
    assert f"{done} of 30 trials are done; mask " in page.text
    assert "the confirm stage has not been reached" in page.text
    assert page.figures
    assert "held_out: study 'going' keeps no speeds" in page.text
    close_storage(storage)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert report.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_all_forms_from_the_command_line(
    folder: Path, record: StudyRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = str(folder)
    rows = list(csv.DictReader(io.StringIO(run(capsys, study, "--format", "csv"))))
    assert [int(row["number"]) for row in rows] == [trial.number for trial in record.trials]
    assert [float(row["speedup"]) for row in rows] == [trial.user_attrs["speedup"] for trial in record.trials]
    assert list(rows[0])[:4] == ["number", "state", "tokens_per_s", "speedup"]
    data = json.loads(run(capsys, study, "--format", "json"))
    assert data["confirmed"] == record.attrs["confirmed"]
    assert [trial["ratios"] for trial in data["trials"]] == [trial.user_attrs["ratios"] for trial in record.trials]
    assert data["held_out"]["prompt_ids"] == list(record.held_out.prompt_ids) if record.held_out else False
    assert data["cost_model"][0]["verify_s"]
    markdown = run(capsys, study, "--format", "md")
    assert markdown.startswith("# Speculate: ")
    assert "### Candidates on the held-out prompts" in markdown
    assert "- **Acceptance by draft position**: " in markdown
    short = run(capsys, study, "--format", "short")
    assert short.startswith("**Speculate: ")
    assert len(short) < 3000
    out = tmp_path / "elsewhere.html"
    assert run(capsys, study, "--out", str(out)).strip() == str(out)
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert run(capsys, f"{study}/study.toml", "--out", "-").startswith("<!doctype html>")


def test_bad_input_is_one_line(tmp_path: Path, folder: Path, refused: Any) -> None:
    def error(*arguments: str) -> str:
        return str(refused(report.main, list(arguments)))

    assert "no such file; a study is a folder with a study.toml" in error(str(tmp_path / "nowhere"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with_study_file(empty)
    assert "no such study yet" in error(str(empty))
    assert not (empty / "study.log").exists()
    storage = open_storage(Bench(empty).url)
    optuna.create_study(study_name="empty", storage=storage)
    close_storage(storage)
    assert "study 'empty': no trial has finished yet, so there is nothing to report" in error(str(empty))
    assert f"has no study 'other', only: {folder.name}" in error(str(folder), "--study-name", "other")
    assert "invalid choice: 'pdf'" in error(str(folder), "--format", "pdf")
    assert "No such file or directory" in error(str(folder), "--out", str(tmp_path / "no" / "where.html"))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("render.to_html", "no report.html"),
        ("dashboard_page.push_figures", "no figures for the dashboard"),
        ("surface", "no surface to draw"),
        ("archive.write_lines", "no study.jsonl.xz"),
    ],
)
def test_what_cannot_be_published_is_one_line(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str, said: str
) -> None:
    def fail(*_arguments: object) -> str:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("search.pipeline.store_surfaces" if part == "surface" else f"search.reporting.{part}", fail)
    assert bench.run(**FAST) == 0
    assert bench.paths.best.exists()
    assert bench.paths.report.exists() == (part != "render.to_html")
    assert bench.output.getvalue().count(f"\n{said}: ZeroDivisionError: two\n") == 1


def test_a_run_offers_its_files_in_the_dashboard(folder: Path, record: StudyRecord) -> None:
    ids = json.loads(record.attrs["attached"])
    assert ids.keys() == {"best.json", "report.html"}
    for name, artifact_id in ids.items():
        assert (folder / "artifacts" / artifact_id).read_bytes() == (folder / name).read_bytes()


def test_files_are_attached_once_and_anew_when_deleted(tmp_path: Path) -> None:
    study, store, file = optuna.create_study(), tmp_path / "artifacts", tmp_path / "best.json"
    file.write_text("1")
    first = attach(study, store, [file, tmp_path / "missing.html"])
    assert first.keys() == {"best.json"}
    file.write_text("2")
    assert attach(study, store, [file]) == first
    assert (store / first["best.json"]).read_text() == "2"
    assert len(list(store.iterdir())) == 1
    (store / first["best.json"]).unlink()  # as the dashboard's bin does
    second = attach(study, store, [file])
    assert second != first
    assert (store / second["best.json"]).read_text() == "2"


def test_the_dashboard_is_refreshed_now_and_then(
    bench: Bench, record: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, pushed = FakeClock(), []

    def push(_study: optuna.Study) -> None:
        pushed.append(clock.now)
        clock.advance(3.0)

    monkeypatch.setattr("search.reporting.dashboard_page.push_figures", push)
    publisher = Publisher(bench.paths, Tools(Reporter(bench.output), bench.stop, "", clock), page=True)
    while clock.now < 400:
        publisher(record.study, record.trials[0])
        clock.advance(10.0)
    # After a minute, and then with fifty times its own duration between two of them.
    assert [later - earlier for earlier, later in pairwise(pushed)] == pytest.approx([160, 160], abs=10)
    assert math.isclose(pushed[0], 60.0)
    assert not bench.paths.report.exists()


@pytest.mark.slow
def test_a_search_per_group_reports_the_matrix(bench: Bench) -> None:
    assert bench.run_groups({"calm": 4, "wild": 4}, **FAST | {"trials": 1}) == 0
    page = Page(bench.paths.report.read_text(encoding="utf-8"))
    assert "table-per-group" in [attrs.get("id") for tag, attrs in page.elements if tag == "table"]
    storage = open_storage(bench.url)
    for name in optuna.get_all_study_names(storage):
        stored = stored_figures(optuna.load_study(study_name=name, storage=storage))
        assert FIGURES.keys() - stored.keys() == {"noise-and-drift"}  # one trial measures nothing twice
    close_storage(storage)
    matrix = bench.summary()["per_group"]["matrix"]
    for cells in matrix.values():
        for cell in cells.values():
            assert f"{cell['speedup']:.2f}" in page.text
    assert bench.output.getvalue().count("report.html") <= 1
