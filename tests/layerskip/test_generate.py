"""python -m layerskip.generate: what it prints, and one clear line for every bad input."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from layerskip import (
    Confirmed,
    DecodeConfig,
    GroupSetting,
    LayerSkipModel,
    Provenance,
    RegimeSetting,
    Sampling,
    SkipMask,
)
from layerskip.decoding.text_stream import TextStream
from layerskip.generate import MarkedText, main
from tests.layerskip import tokenizers

DEMO_MODEL = Path(__file__).parents[2] / "studies" / "demo" / "model"
PROMPT = "def read("


@pytest.fixture(scope="module")
def demo_model() -> LayerSkipModel:
    return LayerSkipModel.from_pretrained(DEMO_MODEL, device="cpu", engine="eager")


@pytest.fixture
def config_file(demo_model: LayerSkipModel, tmp_path: Path) -> Path:
    provenance = Provenance(
        model=str(DEMO_MODEL),
        weights_fingerprint=demo_model.weights_fingerprint(),
        device="cpu",
        dtype="float32",
        num_layers=demo_model.num_layers,
        num_threads=1,
    )
    mask = SkipMask.early_exit(demo_model.num_layers, demo_model.num_layers // 2)
    path = tmp_path / "best.json"
    DecodeConfig(skip_mask=mask, gamma=3, provenance=provenance).save(path)
    return path


def run(*arguments: object) -> int:
    """On one engine: to choose the fastest takes two seconds a command, and one test does it."""
    return main([*map(str, arguments), "--engine", "eager"])


def test_streams_the_text_of_plain_decoding(config_file: Path, demo_model: LayerSkipModel, capsys) -> None:
    plain = demo_model.generate(PROMPT, max_new_tokens=24, do_sample=False)
    assert main(["--config", str(config_file), "--prompt", PROMPT, "--max-new-tokens", "24"]) == 0
    out, err = capsys.readouterr()
    assert out == plain.text + "\n"
    assert f"{len(plain.ids)} tokens (length)" in err
    assert "acceptance" in err


def test_show_drafts_prints_the_same_text_and_counts_every_origin(config_file: Path, demo_model, capsys) -> None:
    output = demo_model.generate(PROMPT, max_new_tokens=24, config=DecodeConfig.load(config_file))
    assert run("--config", config_file, "--prompt", PROMPT, "--max-new-tokens", 24, "--show-drafts") == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == output.text.rstrip("\n")
    for origin in ("accepted", "recovered", "bonus", "target-only"):
        assert f"{output.origins.count(origin)} {origin}" in err
    assert f"{output.stats.num_drafted - output.stats.num_accepted} rejected" in err


LOOPS = "a = b\na = b\na ="
MASK = "12:6-11"


@pytest.mark.parametrize(
    ("flags", "looks_up", "gamma"),
    [
        (("--drafter", "prompt_lookup"), True, 10),
        (("--drafter", "prompt_lookup", "--gamma", 3, "--min-match", 1, "--max-match", 2), True, 3),
        (("--drafter", "suffix", "--min-match", 1), True, 10),
        (("--drafter", "hybrid", "--mask", MASK, "--gamma", 2), True, 10),
        (("--drafter", "layer_skip", "--mask", MASK, "--gamma", 2), False, 2),
        (("--mask", MASK, "--gamma", 2, "--draft-threshold", 0.3), False, 2),
        (("--mask", MASK, "--gamma", 2, "--siblings", 2), False, 2),
    ],
)
def test_a_drafter_is_tried_without_a_config(flags: tuple[object, ...], looks_up: bool, gamma: int, demo_model, capsys):
    plain = demo_model.generate(LOOPS, max_new_tokens=16, do_sample=False)
    arguments = ("--model", DEMO_MODEL, "--device", "cpu", "--prompt", LOOPS, "--max-new-tokens", 16)
    assert run(*arguments, *flags, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == plain.ids
    assert len(record["drafted_by_position"]) == gamma
    assert (record["num_looked_up"] > 0) == looks_up
    assert (record["num_drafted"] > record["num_looked_up"]) == (MASK in flags)
    assert (record["num_siblings"] > 0) == ("--siblings" in flags)


def test_show_drafts_tells_what_was_looked_up(demo_model: LayerSkipModel, capsys) -> None:
    """A token that was looked up had no style, and ended the command with its name for an error."""
    flags = ("--model", DEMO_MODEL, "--device", "cpu", "--drafter", "prompt_lookup", "--show-drafts")
    assert run(*flags, "--prompt", LOOPS, "--max-new-tokens", 16) == 0
    out, err = capsys.readouterr()
    plain = demo_model.generate(LOOPS, max_new_tokens=16, do_sample=False)
    assert out.rstrip("\n") == plain.text.rstrip("\n")
    found = re.search(r"looked up in (\d+) of (\d+) rounds: (\d+) of (\d+) tokens accepted", err)
    lookup_rounds, rounds, accepted, drafted = map(int, found.groups())
    assert 0 < lookup_rounds == rounds
    assert 0 < accepted <= drafted
    assert re.search(rf"{accepted} looked-up +\d+ recovered", err)


def test_a_terminal_sees_rejected_drafts_where_they_stood(demo_model) -> None:
    """Struck through, before the token that stands for them; without them the text is the output's."""
    config = DecodeConfig(skip_mask=SkipMask.early_exit(12, 4), gamma=4)
    output = demo_model.generate(PROMPT, max_new_tokens=40, config=config)
    stream = demo_model.stream(PROMPT, max_new_tokens=40, config=config)
    pieces = [(piece.ids[-1], piece.rejected) for piece in stream if piece.rejected]
    assert pieces == [(output.ids[place], rejected) for place, rejected in output.rejected.items()]
    assert all(output.origins[place] == "recovered" for place in output.rejected)
    console = Console(
        file=io.StringIO(), force_terminal=True, soft_wrap=True, color_system="standard", highlight=False, markup=False
    )
    marked = MarkedText(demo_model.tokenizer, TextStream(demo_model.tokenizer))
    marked.write(console, output.ids, output.origins, output.rejected)
    marked.finish(console)
    shown = console.file.getvalue()
    struck = re.findall(r"\x1b\[2;9m(.*?)\x1b\[0m", shown)
    assert "".join(struck) == "".join(
        demo_model.tokenizer.decode(one).replace("\n", "⏎") for one in output.rejected.values()
    )
    kept = re.sub(r"\x1b\[2;9m.*?\x1b\[0m", "", shown)
    assert re.sub(r"\x1b\[[0-9;]*m", "", kept) == output.text


def test_an_accepted_sibling_is_shown_as_accepted(demo_model, capsys) -> None:
    """After the drafts that it stands for, which are struck out, and before the target's own token."""
    config = DecodeConfig(skip_mask=SkipMask.early_exit(12, 4), gamma=4, siblings=2)
    output = demo_model.generate(PROMPT, max_new_tokens=40, config=config)
    assert output.ids == demo_model.generate(PROMPT, max_new_tokens=40, config=DecodeConfig.plain(12)).ids
    found = {place: one for place, one in output.rejected.items() if output.origins[place] == "accepted"}
    assert len(found) == output.stats.num_sibling_hits > 0
    assert all(output.origins[place + 1] == "bonus" for place in found)
    stream = demo_model.stream(PROMPT, max_new_tokens=40, config=config)
    pieces = [(piece.ids[piece.rejected_from], piece.rejected) for piece in stream if piece.rejected]
    assert pieces == [(output.ids[place], rejected) for place, rejected in output.rejected.items()]
    flags = ("--model", DEMO_MODEL, "--device", "cpu", "--mask", "12:4-11", "--gamma", 4, "--siblings", 2)
    assert run(*flags, "--prompt", PROMPT, "--max-new-tokens", 40, "--show-drafts") == 0
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == output.text.rstrip("\n")
    assert f"{output.stats.num_sibling_hits} siblings accepted of {output.stats.num_siblings}" in err


@pytest.mark.parametrize("flags", [(), ("--show-drafts",), ("--compare", "--repeats", 1), ("--json",)])
def test_the_text_goes_on_from_the_prompts_whatever_its_tokenizer_drops(
    flags: tuple[object, ...], tmp_path: Path, capsys
) -> None:
    model, prompt = tokenizers.target_of("byte_fallback"), "The reader opens"
    model.model.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False).text
    assert expected.startswith(" ")
    assert run("--model", tmp_path, "--prompt", prompt, "--max-new-tokens", 6, "--no-do-sample", *flags) == 0
    out = capsys.readouterr().out
    assert (json.loads(out)["text"] if "--json" in flags else out.removesuffix("\n")) == expected


def test_json_holds_the_documented_fields(config_file: Path, capsys) -> None:
    arguments = ("--config", config_file, "--prompt", PROMPT, "--max-new-tokens", 16, "--compare", "--json")
    assert run(*arguments, "--repeats", 1) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["identical"] is True
    assert record["num_emitted"] == len(record["tokens"]) == 16
    assert record["tokens_per_s"] > 0
    assert record["speedup"] == pytest.approx(record["tokens_per_s"] / record["plain_tokens_per_s"])
    end_to_end = record["num_emitted"] / (record["prefill_s"] + record["decode_s"])
    assert record["end_to_end_tokens_per_s"] == pytest.approx(end_to_end)
    assert record["end_to_end_speedup"] == pytest.approx(end_to_end / record["plain_end_to_end_tokens_per_s"])
    assert 0.0 <= record["repeated_ngram_share"] <= 1.0
    counted = 1 + record["num_accepted"] + record["num_rounds"] + record["num_target_only"]
    assert counted == record["num_emitted"] + record["num_cut"]


def test_the_length_defaults_to_what_the_config_was_tuned_for(config_file: Path, capsys) -> None:
    config = DecodeConfig.load(config_file)
    tuned = config.provenance.model_copy(update={"max_new_tokens": 9})
    config.model_copy(update={"provenance": tuned}).save(config_file)
    assert run("--config", config_file, "--prompt", PROMPT) == 0
    assert "9 tokens (length)" in capsys.readouterr().err


def test_compare_recalls_what_the_search_confirmed(config_file: Path, capsys) -> None:
    rates = {"tokens_per_s": 300.0, "plain_tokens_per_s": 200.0, "speedup": 1.5}
    interval = {"speedup_ci_low": 1.4, "speedup_ci_high": 1.6, "speedup_prompt_low": 1.1, "speedup_prompt_high": 2.1}
    confirmed = Confirmed(**rates, **interval, num_prompts=24, num_identical=24, num_repeats=3, end_to_end_speedup=1.3)
    config = DecodeConfig.load(config_file)
    assert config.provenance is not None
    for length, chosen, words in ((None, 8, ""), (48, 0, " that it was chosen on, up to 48 new tokens each")):
        made_for = config.provenance.model_copy(update={"max_new_tokens": length})
        measured = confirmed.model_copy(update={"num_choosing": chosen})
        config.model_copy(update={"confirmed": measured, "provenance": made_for}).save(config_file)
        assert run("--config", config_file, "--prompt", PROMPT, "--max-new-tokens", 4, "--compare", "--repeats", 1) == 0
        said = f"confirmed by the search: 1.50x on average over 24 prompts{words} (95 % 1.40..1.60), a single one "
        said += "1.10..2.10; prompt included 1.30x"
        assert said in capsys.readouterr().err


@pytest.fixture
def grouped_file(config_file: Path) -> Path:
    """Drafts one token by default, five for code, none for prose."""
    config = DecodeConfig.load(config_file)
    num_layers = config.skip_mask.num_layers
    code = GroupSetting(skip_mask=SkipMask.none(num_layers), gamma=5)
    prose = GroupSetting(skip_mask=SkipMask.none(num_layers), gamma=0, reason="slower")
    config.model_copy(update={"gamma": 1, "groups": {"code": code, "prose": prose}}).save(config_file)
    return config_file


@pytest.mark.parametrize(("group", "gamma"), [((), 1), (("--group", "code"), 5), (("--group", "prose"), 0)])
def test_a_group_has_its_own_setting_and_the_same_text(
    group: tuple[str, ...], gamma: int, grouped_file: Path, demo_model: LayerSkipModel, capsys
) -> None:
    plain = demo_model.generate(PROMPT, max_new_tokens=16, do_sample=False)
    assert run("--config", grouped_file, "--prompt", PROMPT, "--max-new-tokens", 16, "--json", *group) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == plain.ids
    assert len(record["drafted_by_position"]) == gamma


def test_an_unknown_group_is_one_line(grouped_file: Path, config_file: Path, refused) -> None:
    err = refused(run, "--config", grouped_file, "--prompt", "x", "--group", "verse")
    assert err == "layerskip.generate: error: group: must be one of code, prose; got 'verse'\n"
    DecodeConfig.load(config_file).for_group("code").save(config_file)
    error = refused(run, "--config", config_file, "--prompt", "x", "--group", "code")
    assert "group: this config has no groups, got 'code'" in error


@pytest.fixture
def regimes_file(config_file: Path) -> Path:
    """Drafts one token when greedy, five at temperature 0.7, none at 1.2."""
    none = SkipMask.none(DecodeConfig.load(config_file).skip_mask.num_layers)
    interval = {"speedup_ci_low": 1.2, "speedup_ci_high": 1.3, "num_prompts": 12, "num_identical": 12, "num_repeats": 3}
    measured = Confirmed(tokens_per_s=125.0, plain_tokens_per_s=100.0, speedup=1.25, **interval)
    warm = RegimeSetting(skip_mask=none, gamma=5, sampling=Sampling.parse("t0.7"), confirmed=measured)
    hot = RegimeSetting(skip_mask=none, gamma=0, sampling=Sampling.parse("t1.2"), reason="slower")
    own = measured.model_copy(update={"speedup": 1.5})
    changes = {"gamma": 1, "sampling": Sampling(), "regimes": (warm, hot), "confirmed": own}
    DecodeConfig.load(config_file).model_copy(update=changes).save(config_file)
    return config_file


SAMPLED = ("--do-sample", "--seed", 5, "--temperature")


@pytest.mark.parametrize(
    ("flags", "regime", "gamma", "how", "speedup"),
    [
        ((), "greedy", 1, "gamma 1", "1.50"),
        ((*SAMPLED, 0.7), "t0.7", 5, "gamma 5", "1.25"),
        ((*SAMPLED, 0.8), "t0.7", 5, "gamma 5", "1.25"),
        ((*SAMPLED, 1.1), "t1.2", 0, "plain decoding (slower)", None),
    ],
)
def test_it_says_which_regimes_setting_is_used(
    flags: tuple[object, ...], regime: str, gamma: int, how: str, speedup: str | None, regimes_file: Path, capsys
) -> None:
    arguments = ("--config", regimes_file, "--prompt", PROMPT, "--max-new-tokens", 8, *flags)
    said = f"regime {regime} (of greedy, t0.7, t1.2): {how}\n"
    assert run(*arguments, "--show-drafts") == 0
    shown = capsys.readouterr()
    assert said in shown.err
    assert run(*arguments, "--compare", "--repeats", 1) == 0
    compared = capsys.readouterr()
    assert said in compared.err
    found = re.findall(r"confirmed by the search(?: for t0\.7)?: ([\d.]+)x", compared.err)
    assert found == ([] if speedup is None else [speedup])
    text = f"t{flags[-1]}" if flags else "greedy"
    for err in (shown.err, compared.err):
        assert (f"tuned for {regime}, and this text is {text}:" in err) == (regime != text)
    assert ("plain again" in compared.err) == (gamma == 0)
    assert run(*arguments, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["regime"], len(record["drafted_by_position"])) == (regime, gamma)
    assert record["text"].rstrip("\n") == shown.out.rstrip("\n")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ((), "greedy"),
        (("--temperature", 0.6), "t0.6"),
        (("--do-sample", "--seed", -1), "t1"),
        (("--top-k", 5), "t1_k5"),
    ],
)
def test_tokens_are_chosen_as_the_flags_ask(flags: tuple[object, ...], name: str, config_file: Path, capsys) -> None:
    """Without --do-sample too: a temperature that is given is not ignored."""
    assert run("--config", config_file, "--prompt", PROMPT, "--max-new-tokens", 2, "--json", *flags) == 0
    assert json.loads(capsys.readouterr().out)["sampling"] == name


def test_a_config_beside_the_model_is_followed_as_one_that_is_named(config_file: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for file in DEMO_MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    config = DecodeConfig.load(config_file)
    assert config.provenance is not None
    tuned = config.provenance.model_copy(update={"engine": "eager", "max_new_tokens": 7})
    config.model_copy(update={"provenance": tuned}).save_pretrained(folder)
    assert run("--model", folder, "--prompt", PROMPT, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["tokens"]) == 7


def test_sampling_with_a_seed_repeats_itself(config_file: Path, capsys) -> None:
    arguments = ("--config", config_file, "--prompt", PROMPT, "--max-new-tokens", 12, "--do-sample", "--seed", 5)
    assert run(*arguments) == 0
    first = capsys.readouterr().out
    assert run(*arguments) == 0
    assert capsys.readouterr().out == first


def test_stop_text_ends_the_output(config_file: Path, demo_model: LayerSkipModel, capsys) -> None:
    text = demo_model.generate(PROMPT, max_new_tokens=24, do_sample=False).text
    stop = text[5:8]
    assert run("--config", config_file, "--prompt", PROMPT, "--max-new-tokens", 24, "--stop", stop) == 0
    out, err = capsys.readouterr()
    assert stop in out
    assert text.startswith(out.rstrip("\n"))
    assert len(out) <= len(text)
    assert "(stop)" in err


BAD_INPUT = {
    "empty stop": (["--model", str(DEMO_MODEL), "--prompt", "x", "--stop", ""], "stop_strings: must not be empty"),
    "large seed": (
        ["--model", str(DEMO_MODEL), "--prompt", "x", "--do-sample", "--seed", str(1 << 64)],
        "seed: must be",
    ),
    "missing config": (["--config", "nosuch.json", "--prompt", "x"], "no such file: nosuch.json"),
    "group without config": (
        ["--model", str(DEMO_MODEL), "--prompt", "x", "--group", "a"],
        "--group: needs --config",
    ),
    "neither config nor model": (["--prompt", "x"], "give --config FILE, or --model NAME"),
    "unknown model folder": (["--model", "./nosuch", "--prompt", "x"], "no such folder: ./nosuch"),
    "empty prompt": (["--model", str(DEMO_MODEL), "--prompt", ""], "prompt: must hold at least one token"),
    "too long": (["--model", str(DEMO_MODEL), "--prompt", "x", "--max-new-tokens", "5000"], "positions, got"),
    "temperature": (
        ["--model", str(DEMO_MODEL), "--prompt", "x", "--do-sample", "--temperature", "-1"],
        "temperature: must be at least 0.001",
    ),
    "threads": (["--model", str(DEMO_MODEL), "--prompt", "x", "--threads", "-2"], "--threads: must be at least 1"),
    "dtype": (["--model", str(DEMO_MODEL), "--prompt", "x", "--dtype", "int3"], "dtype: must be 'auto' or one of"),
    "chat without a template": (["--model", str(DEMO_MODEL), "--chat", "hi"], "has no chat template"),
    "drafter without a mask": (
        ["--model", "m", "--prompt", "x", "--drafter", "hybrid"],
        "--drafter hybrid: needs --mask",
    ),
    "mask without gamma": (["--model", "m", "--prompt", "x", "--mask", "4:1"], "--mask: needs --gamma"),
    "mask of a lookup": (
        ["--model", "m", "--prompt", "x", "--drafter", "suffix", "--mask", "4:1"],
        "--mask: is nothing that suffix has",
    ),
    "n-gram": (
        ["--model", "m", "--prompt", "x", "--drafter", "suffix", "--max-match", "3"],
        "--max-match: is nothing that suffix has",
    ),
    "device": (["--model", str(DEMO_MODEL), "--prompt", "x", "--device", "toaster"], "device: must be"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(case: str, capsys) -> None:
    arguments, expected = BAD_INPUT[case]
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("layerskip.generate: error: ")
    assert expected in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON"),
        ('{"schema_version": 1, "skip_mask": "12:none", "gamma": 1, "turbo": true}', "turbo: unknown field"),
        ('{"schema_version": 1, "skip_mask": "9:none", "gamma": 1}', "must have the model's 12 layers, got 9"),
    ],
)
def test_corrupt_config_names_file_field_and_rule(text: str, expected: str, tmp_path: Path, refused) -> None:
    path = tmp_path / "best.json"
    path.write_text(text)
    err = refused(run, "--config", path, "--model", DEMO_MODEL, "--prompt", "x")
    assert expected in err
    assert path.read_text() == text


def test_a_config_has_its_own_drafter(config_file: Path, refused) -> None:
    for flags in (("--drafter", "suffix"), ("--mask", "12:1", "--gamma", 2)):
        error = refused(run, "--config", config_file, "--prompt", "x", *flags)
        assert f"{flags[0]}: give it with --model alone, a config has its own" in error


def test_config_for_other_weights_is_refused(config_file: Path, refused) -> None:
    config = DecodeConfig.load(config_file)
    other = config.provenance.model_copy(update={"weights_fingerprint": "0" * 16})
    config.model_copy(update={"provenance": other}).save(config_file)
    assert "the config was made for" in refused(run, "--config", config_file, "--prompt", "x")


@pytest.mark.slow
def test_as_a_program_errors_have_no_traceback_and_a_closed_pipe_is_quiet(config_file: Path) -> None:
    command = [sys.executable, "-m", "layerskip.generate"]
    bad = subprocess.run([*command, "--bogus"], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert bad.stderr.count("\n") == 1
    piped = subprocess.run(
        ["sh", "-c", f"{' '.join(command)} --config {config_file} --prompt x --max-new-tokens 400 | head -c 1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in piped.stderr
