"""A search of several ways to choose tokens: one study each, one config with a setting for each."""

from __future__ import annotations

import json
import re
import shutil
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna_dashboard import get_note

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.analysis.intervals import geometric_mean
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.sampling_regime import Sampling
from layerskip.model import resolve_model_path
from layerskip.prompts import Prompt
from search import export, report
from search.budget.work import PHASES, TRIAL_OVERHEAD
from search.compact import read_lines
from search.confirm.files import save_spec
from search.confirm.held_out import HeldOut
from search.confirm.passes import RACE_FROM
from search.confirm.regime_settings import read_regimes
from search.confirm.stored_config import stored_config
from search.measure.decoder import Decoded, ModelDecoder
from search.measure.reference import Reference, ReferenceOptions, make_reference
from search.measure.subject import Subject
from search.pipeline import SearchRun
from search.preflight import estimate_regimes, first_regime, foresee, subject_of
from search.regime_run import RegimeRun, regime_study
from search.reporting.digest import regimes_table
from search.reporting.source import Address, opened
from search.run import build_parser, main
from search.storages.opening import open_storage
from search.study.attributes import HELD_OUT
from search.study.prompts import PromptSet, split_held_out
from search.study.spec import StudyPaths
from search.terminal.progress_events import phases
from search.terminal.text import duration
from tests.layerskip import zoo
from tests.search.helpers.fakes import (
    FINGERPRINT,
    MODEL,
    NUM_LAYERS,
    SPACE,
    Bench,
    FakeClock,
    FakeDecoder,
    make_spec,
    prompts,
)

PLAIN = DecodeConfig.plain(zoo.NUM_LAYERS)


def names_in(bench: Bench) -> set[str]:
    return set(optuna.get_all_study_names(open_storage(bench.url)))


def warm(temperature: float) -> SamplingParams:
    return SamplingParams(do_sample=True, temperature=temperature)


def test_each_regime_gets_what_wins_there(bench: Bench) -> None:
    bench.decoder.gain_by_regime = {"t0.7": 0.5, "t1": 0.0}
    assert bench.run_regimes("greedy", "t0.7", "t1", trials=24) == 0
    config, whole = DecodeConfig.load(bench.paths.best), bench.folder.name
    assert names_in(bench) == {whole, f"{whole}/t0.7", f"{whole}/t1"}
    assert config.regime_names == ("greedy", "t0.7", "t1")
    greedy, warmer, hot = (config.for_sampling(params) for params in (SamplingParams(), warm(0.7), warm(1.0)))
    assert greedy.confirmed.speedup > warmer.confirmed.speedup > 1
    assert (hot.gamma, hot.confirmed) == (0, None)
    assert hot.reason is not None
    assert config.for_sampling(warm(0.8)).confirmed == warmer.confirmed

    summary = bench.summary()
    assert {name: one["verdict"] for name, one in summary["by_regime"].items()} == {
        "greedy": "speculate",
        "t0.7": "speculate",
        "t1": "do not speculate",
    }
    assert {one["trials"]["total"] for one in summary["by_regime"].values()} == {8}
    own = DecodeConfig.load(bench.folder / "t0.7" / "best.json")
    assert own.sampling == Sampling.parse("t0.7")
    assert own.confirmed == warmer.confirmed
    told = bench.output.getvalue()
    assert "result    greedy: " in told
    assert "result    t1: " in told


def test_prompts_are_used_where_their_records_say(bench: Bench) -> None:
    """With settings of their own in that regime alone, without in all; both studies go on with theirs."""
    warm_tuning = tuple(replace(one, sampling=Sampling.parse("t0.7")) for one in prompts(3, first=700))
    hot = replace(prompts(1, first=900)[0], sampling=Sampling.parse("t1"))
    whole = Subject(bench.decoder, SPACE, (*prompts(5), hot, *warm_tuning), prompts(6, first=500), FINGERPRINT, MODEL)
    greedy, warmer = (whole.in_regime(Sampling.parse(name)) for name in ("greedy", "t0.7"))
    assert (greedy.tuning, warmer.tuning) == (prompts(5), (*prompts(5), *warm_tuning))
    assert greedy.fingerprint.tuning_prompts != warmer.fingerprint.tuning_prompts != FINGERPRINT.tuning_prompts
    assert greedy.in_regime(Sampling.parse("t0.7")) == warmer
    assert greedy.held_out == whole.held_out
    spec = make_spec(sampler="tpe", regimes=("greedy", "t0.7"), trials=8, storage=bench.url)
    for _ in range(2):
        assert RegimeRun(whole, spec, bench.paths, bench.tools).run() == 0
    assert DecodeConfig.load(bench.paths.best).regime_names == ("greedy", "t0.7")
    with pytest.raises(ValueError, match=r"^regime t1: needs at least 2 tuning prompts, got 1 of 4 whose records"):
        replace(whole, tuning=(hot, *warm_tuning)).in_regime(Sampling.parse("t1"))


def test_a_regime_goes_on_where_it_was_stopped(bench: Bench) -> None:
    assert bench.run_regimes("greedy", "t0.7", trials=6) == 0
    assert bench.run_regimes("greedy", "t0.7", trials=12) == 0
    storage = open_storage(bench.url)
    for name in names_in(bench):
        study = optuna.load_study(study_name=name, storage=storage)
        assert len(study.get_trials()) == 6
        assert study.user_attrs["fingerprint"]["sampling"] in ("greedy", "t0.7")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A search in which greedy text can be sped up and hot text cannot, never changed; with all that it publishes."""
    folder, decoder = tmp_path_factory.mktemp("whole", numbered=False), FakeDecoder(gain_by_regime={"t1": 0.0})
    done = Bench(folder, decoder, in_sqlite=True)
    paths = {"model": str(done.folder / "model"), "prompts": str(done.folder / "p.jsonl")}
    assert done.run_regimes("greedy", "t1", trials=16, num_confirm_prompts=6, confirm_repeats=2, **paths) == 0
    text = 'model = "fake"\nprompts = "./p.jsonl"\nregimes = ["greedy", "t1"]\n'
    done.paths.spec_file.write_text(text, encoding="utf-8")
    return done


def clone_of(finished: Bench, folder: Path) -> Path:
    """All but the database and what is not kept in a repository, in another place."""
    left_out = shutil.ignore_patterns("study.db*", "report.html", "artifacts")
    return Path(shutil.copytree(finished.folder, folder / finished.folder.name, ignore=left_out))


def note_of(folder: Path) -> str:
    with opened(Address(str(folder)), demo=folder) as source:
        return str(get_note(source.load()))


@pytest.mark.slow
@pytest.mark.publishes
def test_every_regimes_folder_is_a_study(finished: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hot = finished.folder / "t1"
    assert {file.name for file in hot.iterdir()} >= {
        *("study.toml", "best.json", "summary.json", "report.html", "study.jsonl.xz")
    }
    text = (hot / "study.toml").read_text()
    for line in ('storage = "sqlite:///../study.db"', 'prompts = "../p.jsonl"', 'regimes = ["t1"]'):
        assert line in text
    provenance = DecodeConfig.load(hot / "best.json").provenance
    assert resolve_model_path(provenance.model, hot / "best.json") == str(finished.folder / "model")
    clone = clone_of(finished, tmp_path)
    assert str(finished.folder) not in json.dumps(read_lines(clone / "t1" / "study.jsonl.xz"))
    for folder in (finished.folder, clone):
        assert report.main([str(folder / "t1"), "--format", "short"]) == 0
        told = capsys.readouterr().out
        assert "plain decoding is the answer for sampled text (t1) like that of p.jsonl" in told
        assert "- tokens chosen: t1\n" in told
    assert not list(clone.glob("**/study.db"))


@pytest.mark.publishes
@pytest.mark.parametrize("cloned", [False, True])
def test_the_first_study_tells_of_all_regimes(
    finished: Bench, tmp_path: Path, cloned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = clone_of(finished, tmp_path) if cloned else finished.folder
    assert report.main([str(folder), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    summary = finished.summary()["by_regime"]
    assert list(data["by_regime"]) == ["greedy", "t1"]
    for name, one in data["by_regime"].items():
        assert one["study"] == summary[name]["study"]["name"]
        assert {key: one[key] for key in ("verdict", "reason", "confirmed", "config")} == {
            key: summary[name][key] for key in ("verdict", "reason", "confirmed", "config")
        }
    table = regimes_table({"by_regime": json.dumps(data["by_regime"])})
    greedy, hot = table.rows
    confirmed = summary["greedy"]["confirmed"]
    interval = f"{confirmed['speedup_ci_low']:.2f}..{confirmed['speedup_ci_high']:.2f}"
    assert greedy[:3] == ("greedy", "speculate", f"{confirmed['speedup']:.2f} ({interval})")
    assert greedy[3:5] == (f"{confirmed['end_to_end_speedup']:.2f}", f"{confirmed['repeated_ngram_share']:.0%}")
    assert greedy[5].startswith("mask 6:")
    assert (hot[0], hot[1], hot[5]) == ("t1", "do not speculate", "plain decoding")
    assert report.main([str(folder), "--format", "md"]) == 0
    told = capsys.readouterr().out
    assert "### Regimes" in told
    assert "decodes greedy text" in told
    note = note_of(finished.folder)
    assert "decodes greedy text" in note
    assert "| t1 | do not speculate |" in note
    page = finished.paths.report.read_text(encoding="utf-8")
    assert page.count('<table id="table-regimes">') == 1
    assert "table-regimes" not in (finished.folder / "t1" / "report.html").read_text(encoding="utf-8")


@pytest.mark.publishes
@pytest.mark.parametrize("cloned", [False, True])
def test_the_config_of_all_regimes_is_written_again(
    finished: Bench, tmp_path: Path, cloned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """From an archive too, which holds the first study alone."""
    folder, file = clone_of(finished, tmp_path) if cloned else finished.folder, tmp_path / "again.json"
    best = DecodeConfig.load(finished.paths.best)
    assert export.main([str(folder), "--config-out", str(file)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"written {file}: speculate, mask {best.skip_mask}, gamma {best.gamma} (greedy); do not ")
    assert said.endswith("gamma 0 (t1)\n")
    again = DecodeConfig.load(file)
    assert again.model_copy(update={"provenance": best.provenance}) == best
    assert best.regimes is not None

    assert export.main([str(folder / "t1"), "--config-out", str(file)]) == 0
    assert capsys.readouterr().out == f"written {file}: do not speculate, mask 6:none, gamma 0 (t1)\n"
    alone, own = DecodeConfig.load(file), DecodeConfig.load(folder / "t1" / "best.json")
    assert alone.regimes is None
    assert alone.model_copy(update={"provenance": own.provenance}) == own


def test_a_regime_that_was_searched_on_alone_is_exported_as_it_is_now(bench: Bench) -> None:
    bench.decoder.gain_by_regime = {"t1": 0.0}
    assert bench.run_regimes("greedy", "t1", trials=16) == 0
    subject = Subject(FakeDecoder(), SPACE, prompts(12), prompts(12, first=500), FINGERPRINT, MODEL)
    spec = make_spec(sampler="tpe", regimes=("greedy", "t1"), trials=24, storage=bench.url)
    spec, paths = regime_study(spec, bench.paths, "t1")
    assert SearchRun(subject.in_regime(Sampling.parse("t1")), spec, paths, bench.tools).run() == 0
    storage = open_storage(bench.url)
    first = optuna.load_study(study_name=bench.folder.name, storage=storage)
    assert read_regimes(first.user_attrs)["t1"]["verdict"] == "do not speculate"
    regimes = stored_config(first, storage, bench.folder).regimes
    assert regimes[0].gamma > 0
    assert regimes[0].confirmed is not None


def test_a_password_is_kept_as_in_the_whole_search(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://me:s3cret@host/db"
    spec, paths = regime_study(make_spec(regimes=("greedy", "t1"), storage=url), bench.paths, "t1")
    paths.folder.mkdir()
    assert save_spec(spec, paths)
    assert stat.S_IMODE(paths.spec_file.stat().st_mode) == 0o600
    monkeypatch.setenv("LAYERSKIP_STORAGE", url)
    assert not save_spec(spec, paths)
    assert "s3cret" not in paths.spec_file.read_text()


def test_a_dry_run_estimates_all_regimes(
    tiny_study: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*tiny_study, "--dry-run", "--regimes", "greedy,t0.7"]) == 0
    told = capsys.readouterr().out
    assert "preflight drafters layer_skip, prompt_lookup, suffix, hybrid; greedy, t0.7\n" in told
    assert "dry run   2 studies (greedy, t0.7) of 2 trials, in all at most about 0:" in told
    assert told.endswith("; nothing was written\n")
    assert not (tmp_path / "study").exists()


def test_the_time_of_regimes_is_that_of_each_by_its_own_speed() -> None:
    """Here both are as fast as each other, and a time limit is shared."""
    subject = Subject(FakeDecoder(noise=0.0), SPACE, prompts(12), prompts(4, first=500), FINGERPRINT, MODEL)
    spec = make_spec(regimes=("greedy", "t1"), trials=31, prompts_per_trial=5)
    specs = {name: regime_study(spec, StudyPaths(Path("/s")), name)[0] for name in ("greedy", "t1")}
    assert specs["t1"].trials == 16
    clock = FakeClock()
    each = [foresee(subject.in_regime(Sampling.parse(name)), spec, None, clock) for name, spec in specs.items()]
    seconds = {phase: sum(one.plan.asked_s[phase] for one in each) for phase in PHASES}
    text = estimate_regimes(subject, specs, clock)
    assert text == f"2 studies (greedy, t1) of 16 trials, in all at most about {phases(seconds)}; nothing was written"
    # A plain token takes 0.01 s, and of a prompt's 17 the first one comes with the prompt.
    assert f"search {duration(2 * 16 * TRIAL_OVERHEAD * 5 * 2 * 16 * 0.01)}," in text
    limited = {name: one.model_copy(update={"timeout_s": 3.0}) for name, one in specs.items()}
    assert "search 0:06," in estimate_regimes(subject, limited, clock)


def stop_in_regime(decoder: FakeDecoder, name: str) -> None:
    original = decoder.with_sampling

    def stopping(sampling: Sampling) -> FakeDecoder:
        if sampling.name == name:
            raise KeyboardInterrupt
        return original(sampling)

    decoder.with_sampling = stopping  # type: ignore[method-assign]


def test_an_interrupted_run_leaves_every_setting_that_there_is(bench: Bench) -> None:
    assert bench.run_regimes("greedy", "t0.7", trials=16) == 0
    before = DecodeConfig.load(bench.paths.best)
    stop_in_regime(bench.decoder, "t0.7")
    with pytest.raises(KeyboardInterrupt):
        bench.run_regimes("greedy", "t0.7", trials=24)
    after = DecodeConfig.load(bench.paths.best)
    assert after.regime_names == ("greedy", "t0.7")
    assert after.provenance.num_trials == 12
    assert after.regimes == before.regimes


@pytest.mark.parametrize("changes", [{"tuning_prompts": "others"}, {"max_new_tokens": 9}, {"weights": "deeper"}])
def test_another_studys_settings_are_not_taken_over(bench: Bench, changes: dict[str, Any]) -> None:
    """Begun in the same folder and stopped after its first regime."""
    assert bench.run_regimes("greedy", "t0.7", trials=8) == 0
    space, fingerprint = SPACE, replace(FINGERPRINT, **changes)
    if "weights" in changes:
        bits = tuple(range(NUM_LAYERS + 1))
        space = replace(SPACE, num_layers=NUM_LAYERS + 1, attention_bits=bits, mlp_bits=bits)
    decoder = bench.decoder.with_new_tokens(fingerprint.max_new_tokens)
    subject = Subject(decoder, space, prompts(12), prompts(12, first=500), fingerprint, MODEL)
    fields = {"sampler": "tpe", "regimes": ("greedy", "t0.7"), "storage": f"journal:{bench.folder / 'other.log'}"}
    spec = make_spec(**fields, trials=8, max_new_tokens=fingerprint.max_new_tokens)
    stop_in_regime(decoder, "t0.7")
    with pytest.raises(KeyboardInterrupt):
        RegimeRun(subject, spec, bench.paths, bench.tools).run()
    after = DecodeConfig.load(bench.paths.best)
    assert after.regime_names == ("greedy",)
    assert after.provenance.num_layers == space.num_layers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regimes": ()}, "regimes: must be 1 to 17 names, got 0"),
        ({"regimes": ("warm",)}, "regimes: regime: must be greedy or tTEMPERATURE, .*; got 'warm'"),
        ({"regimes": ("t0",)}, "regimes: .*temperature: must be at least 0.001"),
        ({"regimes": ("t0.7", "t0.70")}, r"regimes: must name each regime once, got t0\.7 2 times"),
        ({"regimes": ("greedy", "t1"), "per_group": True}, "regimes: must be one in a per-group search, got 2"),
    ],
)
def test_bad_regimes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_spec(**fields)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "0.7"], "temperature: must be left out where do_sample is false"),
        (["--do-sample", "--temperature", "0"], "temperature: must be at least 0.001"),
        (["--do-sample", "--regimes", "greedy"], "regimes: must be given alone"),
        (["--regimes", "greedy,t1", "--devices", "cpu,cpu"], "workers: must be 1 for several regimes, got 2"),
    ],
)
def test_bad_flags(flags: list[str], message: str, refused: Any, tmp_path: Path) -> None:
    files = ["--model", "nowhere", "--prompts", str(tmp_path / "p.jsonl"), "--study", str(tmp_path / "s")]
    error = refused(main, [*files, *flags])
    assert message in error
    assert not (tmp_path / "s").exists()


def test_flags_of_generate_name_a_regime() -> None:
    from search.run import _regimes

    flags = ["--do-sample", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "40"]
    assert _regimes(build_parser().parse_args(flags)) == ["t0.7_p0.9_k40"]
    assert _regimes(build_parser().parse_args([])) is None


def test_without_a_regime_the_models_own_defaults_say() -> None:
    hf = zoo.build("llama")
    model = LayerSkipModel(hf, engine="eager")
    assert first_regime(make_spec(), model).name == "greedy"
    hf.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    assert first_regime(make_spec(), model).name == "t0.6_p0.9"
    assert first_regime(make_spec(regimes=("greedy",)), model).name == "greedy"


@pytest.mark.parametrize(
    ("regimes", "defaults", "said"),
    [
        ("greedy", {}, None),
        ("greedy", {"do_sample": True, "temperature": 0.6, "top_p": 0.8, "top_k": 20}, None),
        ("greedy_r1.3,t0.7_p0.9", {"repetition_penalty": 1.3}, "regime t0.7_p0.9 is .* make it t0.7_p0.9_r1.3: "),
        ("greedy", {"repetition_penalty": 1.3}, "regime greedy is .* make it greedy_r1.3: give --regimes greedy_r1.3 "),
        (
            "greedy,t0.7",
            {"repetition_penalty": 1.1, "top_k": 20, "temperature": 0.6},
            "regimes greedy, t0.7 are tuned as named; this model's own defaults make them greedy_r1.1, t0.7_k20_r1.1: "
            "give --regimes greedy_r1.1,t0.7_k20_r1.1 to tune",
        ),
        ("t0.7_p0.9", {"top_p": 0.8}, None),
        ("greedy", {"num_beams": 4}, None),
    ],
)
def test_regimes_that_the_models_defaults_decode_otherwise_are_told(
    regimes: str, defaults: dict[str, Any], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = zoo.build("llama")
    hf.generation_config.update(**defaults)
    model = LayerSkipModel(hf, zoo.tokenizer_of([f"w{i}" for i in range(zoo.VOCAB)]), engine="eager")
    tuning, held_out = (
        PromptSet("any", tuple(Prompt(f"p{i}", None, "text", (("user", f"w{i} w3"),), f"p:{i}") for i in part))
        for part in (range(4, 8), range(8, 12))
    )
    spec = make_spec(regimes=tuple(regimes.split(",")), max_new_tokens=8)
    subject = subject_of(model, spec, StudyPaths(tmp_path), (tuning, held_out))
    assert subject.sampling.name == spec.regimes[0]
    told = [one for one in caplog.messages if "tuned as named" in one]
    assert len(told) == (said is not None)
    assert said is None or re.match(said, told[0])


@pytest.mark.parametrize("regime", ["t0.7", "t1_p0.9_r1.3"])
def test_the_same_prompt_is_continued_alike_under_every_config(regime: str) -> None:
    model = zoo.layerskip_of("llama fused")
    decoder = ModelDecoder(model, 20).with_sampling(Sampling.parse(regime))
    prompts = [zoo.prompt_of(4, seed) for seed in range(4)]
    texts = [decoder.decode(prompt, PLAIN).ids for prompt in prompts]
    config = DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [1]), gamma=3)
    for prompt, ids in zip(prompts, texts, strict=True):
        assert [decoder.decode(prompt, one).ids for one in (PLAIN, config)] == [ids, ids]
        assert decoder.check(prompt, ids, ids).identical
        other = (*ids[:5], (ids[5] + 1) % zoo.VOCAB, *ids[6:])
        report = decoder.check(prompt, other, ids)
        assert (report.lossless, report.first_difference) == (False, 5)
        assert report.logit_gap is not None
        assert report.logit_gap > 0
    assert [decoder.decode(prompt, PLAIN, seed=1).ids for prompt in prompts] != texts


def test_sampled_prompts_are_continued_anew_until_trials_have_texts_of_their_own() -> None:
    tuning, options = prompts(3), ReferenceOptions(NUM_LAYERS, 0, 1.0, 4)
    greedy = make_reference(FakeDecoder(), tuning, options)
    assert [case.prompt_ids for case in greedy.cases] == list(dict.fromkeys(case.prompt_ids for case in greedy.cases))
    sampled = FakeDecoder().with_sampling(Sampling.parse("t0.7"))
    reference = make_reference(sampled, tuning, replace(options, is_sampled=True))
    assert [case.prompt_ids for case in reference.cases] == 8 * [case.prompt_ids for case in greedy.cases]
    assert len({case.reference_ids for case in reference.cases}) > len(tuning)
    assert len({case.seed for case in reference.cases}) == len(reference.cases)
    assert Reference.from_json(reference.to_json()) == reference
    assert not set(reference.steps(0)) & set(reference.steps(1))


def test_others_report_than_chose_where_there_are_prompts_enough(bench: Bench) -> None:
    """Twelve held-out prompts: with four to report eight are left, of which four would be too few to choose."""
    for num, others in ((4, False), (12, False)):
        choosing, reporting = split_held_out(prompts(12), num)
        assert (bool(choosing), len(reporting)) == (others, num)
    choosing, reporting = split_held_out(prompts(40), 16)
    assert (choosing, reporting) == (prompts(40)[16:32], prompts(40)[:16])
    assert split_held_out(prompts(25), 16) == (prompts(25)[13:], prompts(25)[:13])

    seen: dict[str, set[tuple[int, ...]]] = {"choosing": set(), "fresh": set()}

    def note(prompt_ids: Sequence[int], config: DecodeConfig, _seed: int, out: Decoded) -> Decoded:
        told = bench.output.getvalue()
        if config.speculates and "held-out prompts, the chosen one on 10 others" in told:
            seen["fresh" if "chosen: " in told else "choosing"].add(tuple(prompt_ids))
        return out

    bench.decoder.then = note
    subject = Subject(bench.decoder, SPACE, prompts(12), prompts(20, first=500), FINGERPRINT, MODEL)
    spec = make_spec(sampler="tpe", trials=8, num_confirm_prompts=10, storage=bench.url)
    assert SearchRun(subject, spec, bench.paths, bench.tools).run() == 0
    held_out = [one.ids for one in prompts(20, first=500)]
    assert seen["fresh"] == set(held_out[:10])
    assert set(held_out[10 : 10 + RACE_FROM]) <= seen["choosing"] <= set(held_out[10:])
    config = DecodeConfig.load(bench.paths.best)
    assert (config.confirmed.num_prompts, config.confirmed.num_choosing) == (10, 10)


def test_of_sampled_text_what_chose_does_not_report(bench: Bench) -> None:
    """Each fresh pass decodes a continuation of its own, and none decodes the one that chose."""
    seen: list[tuple[str, tuple[int, ...], int]] = []

    def note(prompt_ids: Sequence[int], config: DecodeConfig, seed: int, out: Decoded) -> Decoded:
        told = bench.output.getvalue()
        if "chosen: " in told:
            seen.append(("fresh", tuple(prompt_ids), seed))
        elif "candidates and plain decoding on" in told and config.speculates:
            seen.append(("choosing", tuple(prompt_ids), seed))
        return out

    bench.decoder.then = note
    assert bench.run_regimes("t0.7", trials=12, num_confirm_prompts=4, confirm_repeats=3) == 0
    seeds = {stage: {one[1:] for one in seen if one[0] == stage} for stage in ("choosing", "fresh")}
    assert (len(seeds["choosing"]), len(seeds["fresh"])) == (4, 12)
    assert not seeds["choosing"] & seeds["fresh"]
    study = bench.study()
    held_out = HeldOut.from_json(study.user_attrs[HELD_OUT])
    assert held_out.texts_differ
    assert held_out.typical["tokens_per_s"] == [geometric_mean(rates) for rates in held_out.tokens_per_s]
    config = DecodeConfig.load(bench.paths.best)
    assert config.confirmed.tokens_per_s == pytest.approx(geometric_mean(held_out.typical["tokens_per_s"]), rel=1e-5)
