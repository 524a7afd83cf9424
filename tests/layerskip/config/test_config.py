"""DecodeConfig: strict, round-tripping, atomic; and the fingerprint that ties it to one model's weights."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import stat
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from layerskip.config.decode_config import (
    MAX_GAMMA,
    MAX_GROUP_NAME,
    MAX_GROUPS,
    MAX_REGIMES,
    near_path,
)
from layerskip.config.draft_ids import name_of, pack_ids, unpack_ids
from layerskip.huggingface.loading import weights_fingerprint
from layerskip.model import resolve_model_path
from layerskip.rounds.sampling import SamplingParams
from tests.fuzz.configs import CONFIGS, greedy_params, sampled_params, samplings
from tests.layerskip import zoo

PROVENANCE: dict[str, Any] = {
    "model": "./model",
    "weights_fingerprint": "0123456789abcdef",
    "device": "cpu",
    "dtype": "float32",
    "num_layers": 4,
}
CONFIRMED: dict[str, Any] = {
    "tokens_per_s": 150.0,
    "plain_tokens_per_s": 100.0,
    "speedup": 1.5,
    "speedup_ci_low": 1.4,
    "speedup_ci_high": 1.6,
    "num_prompts": 24,
    "num_identical": 24,
    "num_repeats": 3,
}
FULL: dict[str, Any] = {
    "schema_version": 1,
    "skip_mask": "4:1,a2",
    "gamma": 3,
    "draft_threshold": 0.25,
    "target_threshold": 0.5,
    "confirmed": CONFIRMED,
    "provenance": PROVENANCE,
}
GROUPS: dict[str, Any] = {
    "code": {"skip_mask": "4:2", "gamma": 5, "draft_threshold": 0.75, "confirmed": CONFIRMED},
    "écrit à la main": {"skip_mask": "4:none", "gamma": 0, "reason": "slower"},
}

configs = CONFIGS.map(json.dumps).map(DecodeConfig.from_json)


@given(configs)
def test_each_group_has_a_config_of_its_own(config: DecodeConfig) -> None:
    default = config.for_group(None)
    assert default.groups is None
    assert default == config.model_copy(update={"groups": None})
    for name, setting in (config.groups or {}).items():
        own = config.for_group(name)
        assert own.groups is None
        assert own.provenance == config.provenance
        assert GroupSetting(**{field: getattr(own, field) for field in GroupSetting.model_fields}) == setting
        assert DecodeConfig.from_json(own.to_json()) == own


def test_a_config_is_a_value_in_readable_json() -> None:
    config = DecodeConfig.from_json(json.dumps(FULL))
    assert config.skip_mask == SkipMask.parse("4:1,a2")
    assert (config.gamma, config.speculates) == (3, True)
    assert json.loads(config.to_json())["skip_mask"] == "4:1,a2"
    with pytest.raises(ValueError, match="frozen"):
        config.gamma = 4  # type: ignore[misc]
    plain = DecodeConfig.plain(4, reason="slower")
    assert (plain.gamma, plain.speculates, str(plain.skip_mask), plain.reason) == (0, False, "4:none", "slower")


def with_field(path: str, value: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(FULL))
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    place[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gamma", -1, "gamma: input should be greater than or equal to 0, got '-1'"),
        ("gamma", MAX_GAMMA + 1, f"gamma: input should be less than or equal to {MAX_GAMMA}, got"),
        ("draft_threshold", 1.5, "draft_threshold: input should be less than or equal to 1, got '1.5'"),
        ("target_threshold", 1.01, "target_threshold: input should be less than or equal to 1"),
        ("skip_mask", "4:1,a9", r"skip_mask: item must name layers in 0..3, got 'a9'"),
        ("skip_mask", "5:1", r"skip_mask: must have provenance.num_layers = 4 layers, got 5"),
        ("schema_version", 2, "schema_version: input should be 1, got '2'"),
        ("gama", 3, "gama: unknown field"),
        ("confirmed.speedup", 0.0, "confirmed.speedup: input should be greater than 0, got '0.0'"),
        ("confirmed.ci_level", 1.0, "confirmed.ci_level: input should be less than 1"),
        ("confirmed.mean_accepted_length", 0.9, "confirmed.mean_accepted_length: input should be greater than or"),
    ],
)
def test_bad_values_name_field_rule_and_value(path: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        DecodeConfig.from_json(json.dumps(with_field(path, value)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["continue_lookup", "share_prefix"])
@pytest.mark.parametrize("value", [False, True])
def test_a_file_from_before_may_have_a_field_that_decides_nothing_any_more(field: str, value: bool) -> None:
    """In every setting: the tokens are the same without it."""
    sampled = {"sampling": {"do_sample": True, "temperature": 0.7}}
    before: dict[str, Any] = {"schema_version": 1, "skip_mask": "4:2-3", "gamma": 2, "sampling": {"do_sample": False}}
    data = {**before, "regimes": [{"skip_mask": "4:1", "gamma": 3, **sampled}]}
    now = DecodeConfig.from_json(json.dumps(data))
    old = {**data, field: value, "regimes": [{**data["regimes"][0], field: value}]}
    assert DecodeConfig.from_json(json.dumps(old)) == now
    assert field not in now.to_json()


def test_several_faults_come_in_one_line() -> None:
    data = with_field("gamma", -1) | {"draft_threshold": 3, "colour": 1}
    with pytest.raises(ValueError, match=r"gamma: .*; draft_threshold: .*; colour: unknown field"):
        DecodeConfig.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object, got list"),
        ("[" * 100_000, "not valid JSON"),
        (json.dumps(FULL).replace("0.25", "NaN"), "draft_threshold: input should be"),
        (json.dumps(FULL).replace("1.5", "1e999"), "confirmed.speedup: input should be a finite number"),
        (json.dumps(FULL).replace('"gamma": 3', '"gamma": 3, "gamma": 4'), "gamma: is given twice"),
        (json.dumps(FULL | {"reason": "\ud800"}), "reason: must be text, got half of a surrogate pair"),
        (json.dumps(FULL).replace('"gamma": 3', '"gamma": 1' + "0" * 5_000), "gamma: input should be a valid integer"),
    ],
)
def test_bad_json_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        DecodeConfig.from_json(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


# Groups.


def with_groups(groups: Any) -> DecodeConfig:
    return DecodeConfig.from_json(json.dumps(FULL | {"groups": groups}))


def test_a_group_has_its_own_setting_and_the_rest_is_the_default() -> None:
    config = with_groups(GROUPS)
    code = config.for_group("code")
    assert (str(code.skip_mask), code.gamma, code.draft_threshold, code.target_threshold) == ("4:2", 5, 0.75, 0.0)
    assert code.confirmed == Confirmed(**CONFIRMED)
    assert code.provenance == config.provenance
    by_hand = config.for_group("écrit à la main")
    assert (by_hand.gamma, by_hand.reason, by_hand.confirmed) == (0, "slower", None)
    assert (config.gamma, str(config.skip_mask)) == (3, "4:1,a2")
    assert config.for_group(None) == DecodeConfig.from_json(json.dumps(FULL))


def test_a_file_without_groups_says_nothing_of_them() -> None:
    config = DecodeConfig.from_json(json.dumps(FULL))
    assert config.groups is None
    assert "groups" not in json.loads(config.to_json())
    assert next(iter(json.loads(config.to_json()))) == "schema_version"
    assert config.for_group(None) is config


@pytest.mark.parametrize("name", ["prose", "Code", "", "default", "x" * 1_000, "two\nlines"])
def test_an_unknown_group_names_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="group: must be one of code, écrit à la main; got '") as error:
        with_groups(GROUPS).for_group(name)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200
    with pytest.raises(ValueError, match="group: this config has no groups, got '") as error:
        DecodeConfig.plain(4).for_group(name)
    assert "\n" not in str(error.value)


CODE = GROUPS["code"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"code": CODE | {"skip_mask": "5:2"}}, "groups.code.skip_mask: must have the default's 4 layers, got 5"),
        ({"code": CODE | {"turbo": 1}}, "groups.code.turbo: unknown field"),
        ({"code": CODE | {"gamma": 65}}, "groups.code.gamma: input should be less than or equal to 64, got '65'"),
        ({}, "groups: dictionary should have at least 1 item"),
        ({f"g{i}": CODE for i in range(MAX_GROUPS + 1)}, f"groups: dictionary should have at most {MAX_GROUPS} items"),
        ({"": CODE}, "group name must be text of 1 to 64 printable characters.*, got ''"),
        ({"default": CODE}, "groups.default: group name must be .* not 'default', got 'default'"),
        ({"two\nlines": CODE}, r"groups.'two\\nlines': group name must be"),
        ({"x" * (MAX_GROUP_NAME + 1): CODE}, "group name must be text of 1 to 64"),
    ],
)
def test_bad_groups_name_field_rule_and_value(groups: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        with_groups(groups)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_a_group_that_is_given_twice_is_refused() -> None:
    text = json.dumps(FULL | {"groups": {"code": CODE, "prose": CODE}}).replace('"prose"', '"code"')
    with pytest.raises(ValueError, match="code: is given twice"):
        DecodeConfig.from_json(text)


# Regimes.

GREEDY = Sampling()
REGIMES: list[Any] = [
    {"skip_mask": "4:none", "gamma": 16, "drafter": "suffix", "lookup": {"method": "suffix", "min_match": 2}},
    {"skip_mask": "4:none", "gamma": 0, "reason": "slower"},
]
REGIMES[0] |= {"sampling": {"do_sample": True, "temperature": 0.7}, "confirmed": CONFIRMED | {"speedup": 1.25}}
REGIMES[1] |= {"sampling": {"do_sample": True, "temperature": 1.0, "top_p": 0.9}}
IN_REGIMES: dict[str, Any] = FULL | {"sampling": {"do_sample": False}, "regimes": REGIMES}


def sampled(temperature: float, **others: Any) -> SamplingParams:
    return SamplingParams(do_sample=True, temperature=temperature, **others)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("greedy", SamplingParams()),
        ("greedy", SamplingParams(temperature=0.7, top_k=5, top_p=0.5, min_p=0.1)),
        ("greedy_r1.1", SamplingParams(repetition_penalty=1.1)),
        ("greedy_pres1.5_freq-0.25", SamplingParams(presence_penalty=1.5, frequency_penalty=-0.25)),
        ("t0.7", sampled(0.7)),
        ("t1", sampled(1.0)),
        ("t0.7_p0.9_k40_min0.05_r1.1", sampled(0.7, top_p=0.9, top_k=40, min_p=0.05, repetition_penalty=1.1)),
        ("t0.7_k0", sampled(0.7, top_k=0)),
        ("t0.001", sampled(0.001)),
        ("t0.7000000001", sampled(0.7000000001)),
    ],
)
def test_a_way_to_choose_tokens_has_a_name_that_is_read_back(name: str, params: SamplingParams) -> None:
    sampling = Sampling.of(params)
    assert sampling.name == name
    assert Sampling.parse(name) == sampling
    neutral = {} if params.do_sample else {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
    assert sampling.params() == dataclasses.replace(params, **neutral)


@given(samplings)
def test_every_name_is_read_back(sampling: Sampling) -> None:
    assert Sampling.parse(sampling.name) == sampling
    assert Sampling.of(sampling.params()) == sampling


def test_parts_of_a_name_come_in_any_order() -> None:
    assert Sampling.parse("t0.70_k40_p0.9") == Sampling.parse("t0.7_p0.9_k40")
    assert Sampling.parse("t0.7_k50_p1") == Sampling.parse("t0.7")


RULE = "regime: must be greedy or tTEMPERATURE, then any of _pTOP_P, _kTOP_K, _minMIN_P, _rREPETITION_PENALTY, "
TEMPERATURE_RULE = "must be at least 0.001 (use do_sample=False for greedy) and finite"
RULE += "_presPRESENCE_PENALTY and _freqFREQUENCY_PENALTY, each once"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, f"{RULE}; got {name[:80]!a}") for name in ("", "t", "0.7", "Greedy", "sampled", "t0.7_", "t0.7_q1")),
        *((name, f"{RULE}; got {name!a}") for name in ("t0.7_p0.9_p0.8", "t--1", "tnan", "tinf", "t0.7_k1.5", "t٣")),
        ("t" + "9" * 5_000, f"{RULE}; got '{'t' + '9' * 79}'"),
        ("t-1", f"regime 't-1': temperature: {TEMPERATURE_RULE}, got -1.0"),
        ("t0.7_pres3", "regime 't0.7_pres3': presence_penalty: must be in [-2, 2], got 3.0"),
        ("t0", f"regime 't0': temperature: {TEMPERATURE_RULE}, got 0.0"),
        ("t0.7_p0", "regime 't0.7_p0': top_p: must be in (0, 1], got 0.0"),
        ("t0.7_min2", "regime 't0.7_min2': min_p: must be in [0, 1], got 2.0"),
        (
            "greedy_p0.9",
            "regime 'greedy_p0.9': top_p: must be left out where do_sample is false, greedy ignores it; got 0.9",
        ),
        ("two\nlines", f"{RULE}; got 'two\\nlines'"),
    ],
)
def test_a_name_that_cannot_be_read_says_the_rule(name: str, message: str) -> None:
    with pytest.raises(ValueError, match="regime") as error:
        Sampling.parse(name)
    assert str(error.value) == message


def in_regimes(**changes: Any) -> DecodeConfig:
    return DecodeConfig.from_json(json.dumps(IN_REGIMES | changes))


def test_a_request_takes_the_setting_of_its_regime() -> None:
    config = in_regimes()
    assert config.regime_names == ("greedy", "t0.7", "t1_p0.9")
    greedy, warm, hot = (config.for_sampling(one) for one in (SamplingParams(), sampled(0.7), sampled(1.0, top_p=0.9)))
    assert greedy == DecodeConfig.from_json(json.dumps(FULL | {"sampling": {}}))
    assert (warm.drafter, warm.gamma, warm.sampling, warm.regimes) == ("suffix", 16, Sampling.parse("t0.7"), None)
    assert warm.confirmed == Confirmed(**CONFIRMED | {"speedup": 1.25})
    assert warm.provenance == config.provenance
    assert (hot.gamma, hot.speculates, hot.reason, hot.confirmed) == (0, False, "slower", None)
    assert config.looks_into_stores
    assert not greedy.looks_into_stores
    assert config.bare() == DecodeConfig.from_json(json.dumps(FULL)).bare()


@pytest.mark.parametrize(
    ("params", "regime"),
    [
        (SamplingParams(temperature=0.7), "greedy"),
        (SamplingParams(repetition_penalty=1.2), "greedy"),
        (sampled(0.3), "greedy"),  # .3 from greedy, .4 from .7
        (sampled(0.4), "t0.7"),
        (sampled(0.35), "greedy"),  # as far from both, as near in top_p: the first
        (sampled(0.35, top_p=0.9), "greedy"),
        (sampled(0.85), "t0.7"),  # as far from .7 as from 1, whatever rounding says: the nearer top_p
        (sampled(0.85, top_p=0.91), "t1_p0.9"),
        (sampled(9.0), "t1_p0.9"),
        (sampled(0.7, top_k=3, top_p=0.2), "t0.7"),
        (sampled(0.7, presence_penalty=1.2), "t0.7"),
    ],
)
def test_a_request_of_no_regime_takes_the_nearest(params: SamplingParams, regime: str) -> None:
    config = in_regimes()
    assert config.regime_for(params) == regime
    sampling = config.for_sampling(params).sampling
    assert sampling.name == regime


def test_the_same_sampling_comes_before_a_nearer_place() -> None:
    sharp = {"skip_mask": "4:1", "gamma": 2, "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 5}}
    config = in_regimes(regimes=[*REGIMES, sharp])
    assert config.regime_for(sampled(0.7, top_k=5)) == "t0.7_k5"
    assert config.regime_for(sampled(0.7, top_k=6)) == "t0.7"
    penalised = {"skip_mask": "4:1", "gamma": 2}
    penalised |= {"sampling": {"do_sample": True, "temperature": 0.7, "presence_penalty": 1.5}}
    config = in_regimes(regimes=[*REGIMES, penalised])
    assert config.regime_for(sampled(0.7, presence_penalty=1.0)) == "t0.7_pres1.5"
    assert config.regime_for(sampled(0.7, presence_penalty=0.5)) == "t0.7"
    only_sampled = in_regimes(sampling={"do_sample": True, "temperature": 0.5})
    assert only_sampled.regime_for(SamplingParams()) == "t0.5"


@given(configs, greedy_params | sampled_params)
def test_what_is_not_known_is_used_for_every_request(config: DecodeConfig, params: SamplingParams) -> None:
    own = config.for_sampling(params)
    assert own.regimes is None
    assert own.provenance == config.provenance
    assert DecodeConfig.from_json(own.to_json()) == own
    assert own.for_sampling(params) is own
    if config.sampling is None:
        assert own is config
        assert (config.regime_for(params), config.regime_names) == (None, ())
    else:
        assert own.sampling.name == config.regime_for(params) == own.regime_for(params)
        settings = [config.model_copy(update={"regimes": None}), *(config.regimes or ())]
        assert own.model_dump() in [
            one.model_dump()
            | own.model_dump(include={"schema_version", "provenance", "draft_ids", "groups", "regimes"})
            for one in settings
        ]
        assert {config.regime_for(name.params()) for name in map(Sampling.parse, config.regime_names)} == set(
            config.regime_names
        )


WARM, HOT = REGIMES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"regimes": []}, "regimes: tuple should have at least 1 item"),
        ({"regimes": [WARM] * (MAX_REGIMES + 1)}, f"regimes: tuple should have at most {MAX_REGIMES} items"),
        ({"regimes": [WARM, WARM]}, "regimes.1.sampling: must be another than every setting's before it .* got t0.7$"),
        (
            {"sampling": {"do_sample": True, "temperature": 0.7}},
            "regimes.0.sampling: must be another than .*, got t0.7$",
        ),
        ({"sampling": None}, "sampling: is required where there are regimes"),
        ({"groups": GROUPS}, "regimes: must be left out where there are groups"),
        (
            {"regimes": [WARM, HOT | {"skip_mask": "5:1"}]},
            "regimes.1.skip_mask: must have the default's 4 layers, got 5",
        ),
        ({"regimes": [{"skip_mask": "4:1", "gamma": 1}]}, "regimes.0.sampling: is required"),
        (
            {"sampling": {"do_sample": True, "temperature": 0}},
            "^sampling: temperature: must be at least 0.001 .*, got 0.0$",
        ),
        ({"sampling": {"temperature": 0.7}}, "^sampling: temperature: must be left out where .*; got 0.7$"),
        ({"sampling": {"do_sample": True, "top_p": 1.5}}, r"^sampling: top_p: must be in \(0, 1\], got 1.5$"),
    ],
)
def test_bad_regimes_name_field_rule_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        in_regimes(**changes)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_regimes_are_read_and_written() -> None:
    config = in_regimes()
    written = json.loads(config.to_json())
    assert written["sampling"] == {name: getattr(GREEDY, name) for name in Sampling.model_fields}
    assert [one["sampling"]["temperature"] for one in written["regimes"]] == [0.7, 1.0]
    assert DecodeConfig.from_json(config.to_json()) == config
    unknown = json.loads(DecodeConfig.from_json(json.dumps(FULL)).to_json())
    assert not {"sampling", "regimes"} & set(unknown)


def test_reading_a_config_does_not_import_torch() -> None:
    code = "import layerskip, sys; layerskip.Sampling.parse('t0.7'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


# Files.


def test_save_and_load(tmp_path: Path) -> None:
    config = DecodeConfig.from_json(json.dumps(FULL))
    config.save(tmp_path / "best.json")
    assert DecodeConfig.load(tmp_path / "best.json") == config == DecodeConfig.load(str(tmp_path / "best.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"]
    assert stat.S_IMODE((tmp_path / "best.json").stat().st_mode) == 0o644


@pytest.mark.parametrize("part", ["write", "fsync", "replace"])
def test_a_failing_write_leaves_the_old_file(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "best.json"
    old, new = DecodeConfig.plain(4), DecodeConfig(skip_mask=SkipMask.none(4), gamma=2)
    old.save(path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    if part == "write":
        monkeypatch.setattr(DecodeConfig, "to_json", lambda _: "half\ud800")  # a lone surrogate fails in the encoder
    elif part == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises((OSError, UnicodeEncodeError)):
        new.save(path)
    monkeypatch.undo()
    assert DecodeConfig.load(path) == old
    assert [item.name for item in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "best.json: not valid JSON"),
        (b"\xff\xfe", "best.json: not UTF-8 text"),
        (b" " * ((1 << 20) + 1), "best.json: a decode config is at most 1048576 bytes, got 1048577"),
        (json.dumps(FULL | {"gamma": -2}).encode(), "best.json: gamma: input should be"),
    ],
)
def test_bad_files_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "best.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        DecodeConfig.load(tmp_path / "best.json")
    assert "\n" not in str(error.value)


# Which model a config is for.


def test_the_fingerprint_is_the_same_in_every_dtype_and_another_for_other_weights() -> None:
    model = zoo.build("llama")
    first = weights_fingerprint(model)
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert weights_fingerprint(zoo.build("llama")) == first
    assert weights_fingerprint(zoo.build("llama", seed=1)) != first
    assert weights_fingerprint(zoo.build("llama", tie_word_embeddings=True)) != first
    with torch.no_grad():
        changed = zoo.build("llama")
        changed.model.norm.weight.mul_(1.5)
    assert weights_fingerprint(changed) != first
    # From the checkpoint's own precision, as shipped models are, to wider ones and back.
    shipped = model.to(torch.bfloat16)
    fingerprint = weights_fingerprint(shipped)
    assert weights_fingerprint(shipped.to(torch.float32)) == fingerprint == first


def config_for(model: LayerSkipModel, **changes: Any) -> DecodeConfig:
    provenance = PROVENANCE | {"weights_fingerprint": model.weights_fingerprint()} | changes
    return DecodeConfig(skip_mask=SkipMask.from_layers(4, [1]), gamma=2, provenance=Provenance(**provenance))


def test_a_config_for_other_weights_is_refused(tmp_path: Path) -> None:
    hf = zoo.build("llama")
    own = config_for(LayerSkipModel(hf, engine="eager"))
    assert LayerSkipModel(hf, engine="eager", config=own).config == own
    other = config_for(LayerSkipModel(zoo.build("llama", seed=1), engine="eager"))
    message = r"provenance.weights_fingerprint: the config was made for ./model \([0-9a-f]{16}\), this model is"
    with pytest.raises(ValueError, match=message):
        LayerSkipModel(hf, engine="eager", config=other)
    model = LayerSkipModel(hf, engine="eager")
    with pytest.raises(ValueError, match=message):
        model.config = other
    assert model.config == DecodeConfig.plain(4)
    other.save(tmp_path / "other.json")
    with pytest.raises(ValueError, match=message):
        LayerSkipModel(hf, engine="eager", config=tmp_path / "other.json")
    with pytest.raises(ValueError, match=message):
        model.generate([1], max_new_tokens=1, config=other)


def test_a_config_for_another_layer_count_is_refused() -> None:
    with pytest.raises(ValueError, match="skip_mask: must have the model's 4 layers, got 12"):
        LayerSkipModel(zoo.model_of("llama"), engine="eager", config=DecodeConfig.plain(12))


HALF: dict[str, Any] = {"skip_mask": SkipMask.parse("4:a2"), "gamma": 1}


@pytest.mark.parametrize(
    ("place", "settings"),
    [
        ("groups.code", {"groups": {"code": GroupSetting(**HALF)}}),
        ("regimes.0", {"sampling": GREEDY, "regimes": (RegimeSetting(**HALF, sampling=Sampling.parse("t1")),)}),
    ],
)
def test_a_setting_whose_mask_does_not_fit_the_model_is_refused(place: str, settings: dict[str, Any]) -> None:
    whole_layers_only = LayerSkipModel(zoo.model_of("opt-post-norm"), engine="eager")
    config = DecodeConfig(skip_mask=SkipMask.none(4), gamma=1, **settings)
    said = rf"^{place}\.skip_mask: layer 2 of this model can only be skipped whole"
    with pytest.raises(ValueError, match=said):
        whole_layers_only.config = config
    with pytest.raises(ValueError, match=said):
        whole_layers_only.generate([1], max_new_tokens=1, config=config)
    LayerSkipModel(zoo.model_of("llama"), engine="eager").config = config


def test_a_group_decodes_with_its_own_setting() -> None:
    groups = {"three": GroupSetting(skip_mask=SkipMask.none(4), gamma=3)}
    config = DecodeConfig(skip_mask=SkipMask.none(4), gamma=1, groups=groups)
    model = LayerSkipModel(zoo.model_of("llama"), engine="eager", config=config)
    outputs = {
        name: model.generate([1, 2, 3], max_new_tokens=9, eos_token_id=[], group=name) for name in (None, "three")
    }
    # A draft of the whole model is always accepted: gamma drafted tokens and one bonus a round.
    assert [len(outputs[name].stats.drafted_by_position) for name in (None, "three")] == [1, 3]
    assert [outputs[name].stats.num_rounds for name in (None, "three")] == [4, 2]
    assert outputs[None].ids == outputs["three"].ids
    stream = model.stream([1, 2, 3], max_new_tokens=9, eos_token_id=[], group="three")
    assert [len(piece.ids) for piece in stream] == [1, 4, 4]
    own = model.generate([1, 2, 3], max_new_tokens=9, eos_token_id=[], group="three", config=config)
    assert own.stats.num_rounds == 2
    with pytest.raises(ValueError, match="group: must be one of three; got 'two'"):
        model.generate([1, 2, 3], max_new_tokens=9, group="two")
    with pytest.raises(ValueError, match="group: this config has no groups, got 'three'"):
        model.generate([1, 2, 3], max_new_tokens=9, group="three", config=DecodeConfig.plain(4))


def test_relative_models_are_relative_to_the_config() -> None:
    assert resolve_model_path("./model", Path("/a/b/best.json")) == "/a/b/model"
    assert resolve_model_path("../model", Path("/a/b/best.json")) == "/a/model"
    near = (("/a/b/m", "./m"), ("/a/m", "../m"), ("/a/m", "../../../m"), ("/a/m", "/a/m"), ("/m", "/m"))
    for (path, expected), folder in zip(near, ("/a/b", "/a/b", "/a/b/c/d", "/a/b/c/d/e", "/a"), strict=True):
        assert near_path(Path(path), Path(folder)) == expected
    assert resolve_model_path("/m", Path("/a/b/best.json")) == "/m"
    assert resolve_model_path("org/name", Path("/a/b/best.json")) == "org/name"


@given(st.sets(st.integers(0, 300_000), min_size=1, max_size=50))
def test_a_set_of_token_ids_is_read_back(ids: set[int]) -> None:
    packed = pack_ids(ids)
    assert unpack_ids(packed).tolist() == sorted(ids)
    mask = SkipMask.none(4).narrowed(len(ids), name_of(packed))
    config = DecodeConfig(skip_mask=mask, gamma=1, draft_ids={name_of(packed): packed})
    assert DecodeConfig.from_json(config.to_json()) == config


_TOO_LARGE = base64.b64encode(zlib.compress(bytes(1 << 22))).decode()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"12345678": "no base64!"}, "draft_ids: must be a packed set of token ids, got 'no base64!'"),
        ({"12345678": pack_ids([1])}, f"draft_ids: the set 12345678 must be called {name_of(pack_ids([1]))}"),
        ({"first": pack_ids([1])}, "draft_ids.* a name must be 8 hexadecimal digits, got 'first'"),
        (
            {"12345678": base64.b64encode(zlib.compress(bytes(1 << 22))).decode()},
            "draft_ids: must be a packed set of 1 ",
        ),
    ],
)
def test_bad_sets_of_token_ids_are_named(sets: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeConfig(skip_mask=SkipMask.none(4), gamma=1, draft_ids=sets)
