"""Per-group search: the studies, the matrix, what each group gets, and every way in which it can stop or refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from layerskip import DecodeConfig, LayerSkipModel
from layerskip import generate as generate_command
from search import run
from search.measure.decoder import Decoded
from search.measure.subject import Subject
from search.per_group.run import group_subjects
from search.preflight import estimate_groups
from search.study.fingerprint import FingerprintMismatch
from search.study.trials import counted
from search.terminal.text import duration
from tests.search.conftest import quiet, write_jsonl
from tests.search.helpers.fakes import (
    CALM,
    FINGERPRINT,
    MODEL,
    SPACE,
    WILD,
    Bench,
    FakeClock,
    FakeDecoder,
    group_prompts,
    make_spec,
    truth,
    wild_needs_late_layers,
)

TWO = {"calm": 12, "wild": 12}


def history(bench: Bench, group: str | None = None) -> list[tuple[Any, ...]]:
    return [(trial.params, trial.value) for trial in bench.trials(group) if trial.value is not None]


@pytest.fixture
def apart(bench: Bench) -> Bench:
    bench.decoder.interaction = wild_needs_late_layers
    return bench


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A finished per-group search on prompts that suit different configs; to be read only."""
    done = Bench(tmp_path_factory.mktemp("searched"), decoder=FakeDecoder(interaction=wild_needs_late_layers))
    with pytest.MonkeyPatch.context() as monkeypatch:
        quiet(monkeypatch)
        assert done.run_groups(TWO, trials=18, confirm_repeats=2) == 0
    return done


def test_groups_that_suit_different_configs_get_their_own_settings(searched: Bench) -> None:
    best = DecodeConfig.load(searched.paths.best)
    assert best.groups is not None
    assert list(best.groups) == ["calm", "wild"]
    for name, ids in (("calm", CALM), ("wild", WILD)):
        own = best.for_group(name)
        assert truth(own, ids) > 1.01 * truth(best, ids)
        assert own.confirmed.speedup == pytest.approx(truth(own, ids), rel=0.02)
        assert own.confirmed.num_prompts == 12
        assert own.reason is None
        assert own.provenance == best.provenance
    assert (best.confirmed.num_prompts, best.confirmed.num_choosing) == (12, 12)
    assert [counted(searched.trials(group)) for group in (None, "calm", "wild")] == [18, 18, 18]


def test_the_summary_holds_the_matrix(searched: Bench) -> None:
    summary, best = searched.summary(), DecodeConfig.load(searched.paths.best)
    found = summary["per_group"]
    assert found["num_prompts"]["calm"] == {"tuning": 12, "held_out": 12}
    assert found["num_prompts"]["default"] == {"tuning": 24, "held_out": 24}
    assert list(found["matrix"]) == ["default", "calm", "wild"]
    for row, cells in found["matrix"].items():
        setting = found["settings"][row]["config"]
        config = DecodeConfig(**{name: setting[name] for name in ("skip_mask", "gamma", "draft_threshold")})
        for group, ids in (("calm", CALM), ("wild", WILD)):
            cell = cells[group]
            assert cell["speedup"] == pytest.approx(truth(config, ids), rel=0.03)
            assert cell["speedup_ci_low"] <= cell["speedup"] <= cell["speedup_ci_high"]
            assert (cell["num_prompts"], cell["num_repeats"]) == (12, 2)
            assert [len(repeats) for repeats in cell["raw"]["tokens_per_s"]] == [2] * 12
    assert found["settings"]["wild"]["study"]["name"] == f"{searched.folder.name}/wild"
    assert found["exported"]["wild"]["skip_mask"] == str(best.for_group("wild").skip_mask)
    assert summary["seconds"].keys() >= {"reference", "search", "confirm", "matrix", "total"}
    assert summary["trials"]["counted"] == 18
    assert searched.output.getvalue().isascii()


def test_a_group_that_drafting_slows_down_decodes_plainly(apart: Bench) -> None:
    apart.decoder.interaction = lambda ids, config: 0.5 if config.speculates and ids[2] == 3 else 1.0
    assert apart.run_groups({"calm": 24, "wild": 12}, trials=10) == 0
    best = DecodeConfig.load(apart.paths.best)
    wild = best.for_group("wild")
    assert (wild.gamma, wild.confirmed) == (0, None)
    assert wild.reason.startswith("do not speculate: the best candidate")
    assert best.for_group("calm").speculates
    assert "1.000 plain*" not in apart.output.getvalue()


def test_no_advantage_at_all_is_plain_decoding_everywhere(bench: Bench) -> None:
    bench.decoder.gain = 0.0
    assert bench.run_groups(TWO, trials=4) == 0
    best = DecodeConfig.load(bench.paths.best)
    assert [best.for_group(name).gamma for name in (None, "calm", "wild")] == [0, 0, 0]
    assert bench.summary()["verdict"] == "do not speculate"


def test_an_interrupted_search_goes_on_in_the_group_it_was_in(
    apart: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = Bench(tmp_path_factory.mktemp("whole"))
    whole.decoder.interaction = wild_needs_late_layers
    whole.run_groups(TWO, trials=5)

    def interrupt(_config: DecodeConfig) -> None:
        if "search 3 of 3" in apart.output.getvalue() and "trial 3/5" in apart.output.getvalue().split("3 of 3")[1]:
            apart.stop.handle(15, None)

    apart.decoder.break_on = interrupt
    with pytest.raises(KeyboardInterrupt):
        apart.run_groups(TWO, trials=5)
    assert not apart.paths.best.exists()
    assert [len(history(apart, group)) for group in (None, "calm", "wild")] == [5, 5, 3]
    assert "confirm" not in apart.output.getvalue()
    resumed = Bench(apart.folder)
    resumed.decoder.interaction = wild_needs_late_layers
    assert resumed.run_groups(TWO, trials=5) == 0
    assert resumed.output.getvalue().count("all 5 trials are done") == 2
    assert [history(resumed, group) for group in (None, "calm", "wild")] == [
        history(whole, group) for group in (None, "calm", "wild")
    ]
    one, other = (DecodeConfig.load(some.paths.best) for some in (resumed, whole))
    assert one.groups == other.groups


def test_the_default_goes_on_with_the_trials_of_an_ordinary_search(bench: Bench) -> None:
    bench.run(trials=6)
    before = history(bench)
    assert bench.run_groups(TWO, trials=6) == 0
    assert history(bench) == before


def test_the_time_limit_is_for_all_searches_together(bench: Bench) -> None:
    assert bench.run_groups(TWO, trials=30, timeout_s=1e-9) == 0
    assert [len(bench.trials(group)) <= 2 for group in (None, "calm", "wild")] == [True] * 3
    again = Bench(bench.folder)
    again.run_groups(TWO, trials=3000, timeout_s=0.3)
    assert again.output.getvalue().count("time limit of 0.1 s reached") == 3


def test_trials_that_keep_failing_end_the_run_before_anything_is_exported(bench: Bench) -> None:
    bench.decoder.break_on = lambda config: RuntimeError("driver gone") if config.skip_mask.num_skipped else None
    assert bench.run_groups(TWO, trials=30, max_failures=3) == 1
    assert not bench.paths.best.exists()


def test_other_prompts_in_a_group_are_refused_before_anything_is_measured(bench: Bench) -> None:
    bench.run_groups(TWO, trials=2)
    again = Bench(bench.folder)
    with pytest.raises(FingerprintMismatch, match=rf"study '{bench.folder.name}/wild': .*tuning_prompts was"):
        again.run_groups({"calm": 12, "wild": 9}, TWO, trials=4)
    assert again.decoder.num_decoded == 0


@pytest.mark.parametrize(
    ("tuning", "held_out", "said"),
    [
        ({"calm": 6, "wild": 1}, {"calm": 6, "wild": 6}, "group 'wild' needs at least 2 tuning and 2 held-out prompts"),
        ({"calm": 6, "wild": 6}, {"calm": 6, "wild": 1}, "prompts, got 6 and 1"),
        ({"calm": 6, "wild": 6}, {"calm": 6}, "group 'wild' .* got 6 and 0"),
        ({"calm": 6}, {"calm": 6, "wild": 6}, "group 'wild' .* got 0 and 6"),
        ({"calm": 6}, {"calm": 6}, r"needs 2 to 64 groups of prompts, got 1 \(calm\)"),
        ({f"g{i}": 2 for i in range(65)}, {f"g{i}": 2 for i in range(65)}, "needs 2 to 64 groups of prompts, got 65"),
    ],
)
def test_too_few_prompts_are_refused_before_anything_is_measured(
    bench: Bench, tuning: dict[str, int], held_out: dict[str, int], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        bench.run_groups(tuning, held_out)
    assert "\n" not in str(caught.value)
    assert bench.decoder.num_decoded == 0
    assert list(bench.folder.iterdir()) == []


def test_two_prompts_are_enough(bench: Bench) -> None:
    assert bench.run_groups({"calm": 2, "wild": 2}, trials=3) == 0


def test_each_search_has_its_prompts_and_the_default_confirms_on_all_groups() -> None:
    """Files are sorted by group, and only so many held-out prompts are used: the first few would be of one group."""
    counts = {"a": 3, "b": 2}
    given = Subject(FakeDecoder(), SPACE, group_prompts(counts), group_prompts(counts, first=500), FINGERPRINT, MODEL)
    subjects = group_subjects(given)
    assert list(subjects) == ["default", "a", "b"]
    assert [prompt.group for prompt in subjects["default"].held_out] == ["a", "b", "a", "b", "a"]
    assert set(subjects["default"].held_out) == set(given.held_out)
    assert subjects["default"].fingerprint == FINGERPRINT
    assert subjects["b"].tuning == given.tuning[3:]
    assert subjects["b"].held_out == given.held_out[3:]
    prints = {one.fingerprint.tuning_prompts for one in subjects.values()}
    assert len(prints) == 3


def test_a_violation_in_the_matrix_alone_is_exit_code_1_and_never_exported(searched: Bench, tmp_path: Path) -> None:
    folder = tmp_path / searched.folder.name
    shutil.copytree(searched.folder, folder)
    calm = DecodeConfig.load(searched.paths.best).for_group("calm")
    again = Bench(folder)

    def break_on_other_prompts(prompt_ids: Sequence[int], config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
        on_other_prompts = config.speculates and config.skip_mask == calm.skip_mask and prompt_ids[2] == WILD[2]
        if on_other_prompts and "every setting on" in again.output.getvalue():
            return Decoded((*out.ids[:5], 99, *out.ids[6:]), out.stats)
        return out

    again.decoder = FakeDecoder(interaction=wild_needs_late_layers, then=break_on_other_prompts)
    assert again.run_groups(TWO, trials=18) == 1
    best = DecodeConfig.load(again.paths.best)
    assert all(best.for_group(name).skip_mask != calm.skip_mask for name in (None, "calm", "wild"))
    (line,) = again.summary()["not_lossless"]
    assert line.startswith("matrix: not lossless: prompt 'wild")
    assert f"NOT LOSSLESS, a bug to report: {line}" in again.output.getvalue()


# The command.


@pytest.fixture
def grouped_study(tiny_study: list[str], tmp_path: Path) -> list[str]:
    """The tiny study with two topics in both files."""
    for name, first in (("tuning", 0), ("held_out", 20)):
        records = [{"prompt": f"w{first + i} w{i} w7", "topic": "odd" if i % 2 else "even"} for i in range(4)]
        write_jsonl(tmp_path / f"{name}.jsonl", records)
    return [*tiny_study, "--trials", "2", "--per-group", "--group-field", "topic"]


@pytest.mark.slow
def test_the_command_end_to_end_and_again(
    grouped_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(grouped_study) == 0
    study = tmp_path / "study"
    best = DecodeConfig.load(study / "best.json")
    assert best.groups is not None
    assert list(best.groups) == ["even", "odd"]
    output = capsys.readouterr().out
    assert output.count("trial 2/2") == 3
    assert "on even" in output
    assert output.isascii()
    model = LayerSkipModel.from_config(study / "best.json")
    same = [model.generate("w1 w2", max_new_tokens=4, group=name).ids for name in (None, "even", "odd")]
    assert same[0] == same[1] == same[2]
    flags = ["--config", str(study / "best.json"), "--prompt", "w1 w2", "--max-new-tokens", "4"]
    assert generate_command.main([*flags, "--group", "odd"]) == 0
    capsys.readouterr()
    assert generate_command.main([*flags, "--group", "prime"]) == 2
    assert "group: must be one of even, odd; got 'prime'" in capsys.readouterr().err
    # study.toml remembers that it is per group, and of which field.
    assert run.main(["--study", str(study), "--trials", "3"]) == 0
    assert capsys.readouterr().out.count("trial 3/3") == 3


def test_a_dry_run_counts_the_prompts_of_each_group_and_writes_nothing(
    grouped_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main([*grouped_study, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "tuning and held-out prompts by 'topic': 'even' 2 and 2; 'odd' 2 and 2" in output
    assert "3 studies (all prompts, and 2 groups) of 2 trials, in all at most about 0:" in output
    assert ", matrix 0:" in output
    assert output.endswith("; nothing was written\n")
    assert not (tmp_path / "study").exists()


def test_the_time_of_groups_has_the_matrix_and_a_shared_time_limit() -> None:
    counts, clock = {"a": 3, "b": 2}, FakeClock()
    given = Subject(FakeDecoder(), SPACE, group_prompts(counts), group_prompts(counts, first=500), FINGERPRINT, MODEL)
    text = estimate_groups(group_subjects(given), make_spec(timeout_s=6.0, confirm_repeats=2), clock)
    # Five held-out prompts, plainly and in two passes of pairs under three settings; a plain token takes 0.01 s.
    assert ", search 0:06, " in text
    assert f", matrix {duration(5 * (1 + 2 * 2 * 3) * 16 * 0.01)};" in text


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "w1"}, "topic: --per-group: must be text of 1 to 64 printable characters"),
        ({"prompt": "w1"}, "got no such field"),
        ({"prompt": "w1", "topic": 7}, "got '7'"),
        ({"prompt": "w1", "topic": "default"}, "not 'default', got 'default'"),
        ({"prompt": "w1", "topic": "x" * 65}, "got 'xxx"),
        ({"prompt": "w1", "topic": "even "}, "without blanks at its ends"),
        ({"prompt": "w1", "topic": "two\nlines"}, r"got 'two\nlines'"),
        ({"question_id": 1, "category": "even", "turns": ["w1"]}, "got no such field"),
    ],
)
def test_a_prompt_without_a_group_is_named(
    record: dict[str, Any], said: str, grouped_study: list[str], tmp_path: Path, refused: Any
) -> None:
    with (tmp_path / "held_out.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    error = refused(run.main, grouped_study)
    assert f"{tmp_path / 'held_out.jsonl'}:5: topic: " in error
    assert said in error
    assert not (tmp_path / "study").exists()


def test_a_small_group_is_refused_before_the_model_is_loaded(
    grouped_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("search.measure.decoder.load_model", lambda _spec: pytest.fail("the model was loaded"))
    with (tmp_path / "tuning.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "w40", "topic": "prime"}) + "\n")
    assert run.main(grouped_study) == 2
    assert "group 'prime' needs at least 2 tuning and 2 held-out prompts, got 1 and 0" in capsys.readouterr().err
