"""python -m layerskip.serve: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from layerskip import (
    Confirmed,
    DecodeConfig,
    LayerSkipModel,
    RegimeSetting,
    Sampling,
    SkipMask,
    SuffixLookup,
)
from layerskip.config.usual_lookups import lookup_else
from layerskip.engines.eager import EagerEngine
from layerskip.serve import KEY_VARIABLE, describe, main
from layerskip.server.settings import ServerSettings
from tests.layerskip import zoo

DEMO_CONFIG = Path(__file__).parents[3] / "studies" / "demo" / "best.json"
DEMO = ("--config", str(DEMO_CONFIG), "--device", "cpu")
KEY = "correct-horse-battery"


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def _no_key(monkeypatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@contextmanager
def program(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A program that does not outlive its test: Popen alone waits for it, and a server never ends by itself."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()  # nothing to one that has ended


def test_a_program_ends_with_a_test_that_fails() -> None:
    with pytest.raises(ZeroDivisionError), program([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        1 / 0  # noqa: B018 (a failure)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_as_a_program_it_says_where_it_serves_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    key_file.chmod(0o600)
    command = [sys.executable, "-m", "layerskip.serve", *DEMO, "--port", "0", "--api-key-file", str(key_file)]
    with program(command) as process:
        setting = DecodeConfig.load(DEMO_CONFIG)
        lines = [process.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("try "):
            lines.append(process.stdout.readline())
        found = re.fullmatch(r"serving   (http://127\.0\.0\.1:([1-9]\d*))\n", lines[0])
        assert found, lines
        confirmed = setting.confirmed
        assert isinstance(confirmed, Confirmed)
        assert lines[1].startswith("model     model: LlamaForCausalLM, 12 layers, float32 on cpu, engine fused, 1 thr")
        assert f"gamma {setting.gamma}" in lines[2]
        assert (f"mask {setting.skip_mask}" in lines[2]) == setting.drafts_by_mask
        assert lines[3].startswith(
            f"confirmed {confirmed.speedup:.2f}x on average over {confirmed.num_prompts} prompts, up to "
        )
        # The example works as it stands; read as a shell would, since curl may not be there.
        assert KEY not in lines[-1]
        words = shlex.split(lines[-1].removeprefix("try       ").replace(f"${KEY_VARIABLE}", KEY))
        headers = dict(words[i + 1].split(": ", 1) for i, word in enumerate(words) if word == "-H")
        body = words[words.index("-d") + 1].encode()
        with urllib.request.urlopen(urllib.request.Request(words[1], body, headers), timeout=60) as answer:
            assert json.load(answer)["object"] == "text_completion"
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key=KEY, max_retries=0)
        text = client.completions.create(model="model", prompt="def read(", max_tokens=8).choices[0].text
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0
    assert out == ""
    assert [line.split(" ", 3)[3].split(" 200 ")[0] for line in err.splitlines()] == ["POST '/v1/completions'"] * 2
    assert KEY not in err
    assert "def read" not in err
    assert text == LayerSkipModel.from_config(DEMO_CONFIG, device="cpu").generate("def read(", max_new_tokens=8).text


BAD_INPUT = {
    "nothing": ([], "give --config FILE, or --model NAME"),
    "missing config": (["--config", "nosuch.json"], "--config: no such file: nosuch.json"),
    "port": ([*DEMO, "--port", "65536"], "--port: must be in 0..65535, got 65536"),
    "text as port": ([*DEMO, "--port", "http"], "--port: invalid int value"),
    "batch": (
        [*DEMO, "--engine", "eager", "--max-batch-size", "4"],
        "--max-batch-size: must be 1 without the engine fused, it is eager; got 4",
    ),
    "queue": ([*DEMO, "--queue", "-1"], "--queue: must be in 0..10000, got -1"),
    "prefix cache": ([*DEMO, "--prefix-cache", "-1"], "--prefix-cache: must be in 0..16777216, got -1"),
    "send timeout": ([*DEMO, "--send-timeout", "0"], "--send-timeout: must be in 0.1..86400, got 0"),
    "grace": ([*DEMO, "--grace", "nan"], "--grace: must be in 0..86400, got nan"),
    "context": (
        [*DEMO, "--engine", "eager", "--port", "0", "--max-context", "5000"],
        "--max-context: must be at most the model's 1024",
    ),
    "other machines without a key": (
        [*DEMO, "--host", "0.0.0.0"],
        "--host: 0.0.0.0 can be reached from other machines",
    ),
    "a name without a key": ([*DEMO, "--host", "example.org"], "can be reached from other machines"),
    "no key file": ([*DEMO, "--api-key-file", "nosuch"], "--api-key-file: no such file: nosuch"),
    "a key on the command line": ([*DEMO, "--api-key", KEY], "unrecognized arguments"),
    "not this machine's": ([*DEMO, "--host", "127.0.0.1.5"], "cannot serve on 127.0.0.1.5"),
    "name": ([*DEMO, "--port", "0", "--served-model-name", "a\nb"], "model_id: must be printable text"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_code_2(case: str, refused, monkeypatch) -> None:
    arguments, expected = BAD_INPUT[case]
    if case == "not this machine's":
        monkeypatch.setenv(KEY_VARIABLE, KEY)
    err = refused(run, *arguments)
    assert err.startswith(("layerskip.serve: error: ", "python -m layerskip.serve: error: "))
    assert expected in err


@pytest.mark.parametrize(
    ("store_tokens", "said"),
    [
        (500, ["store     up to 500 tokens of earlier requests in memory, to draft from"]),
        (0, ["store     none: drafts come from a request's own text alone"]),
    ],
)
def test_it_says_how_it_drafts_and_what_it_keeps(store_tokens: int, said: list[str]) -> None:
    model = zoo.layerskip_of("llama")
    by_mask = DecodeConfig(skip_mask=SkipMask.from_layers(zoo.NUM_LAYERS, [1]), gamma=3, draft_threshold=0.5)
    config = lookup_else(by_mask, SuffixLookup(min_match=2))
    settings = ServerSettings("m", 96, store_tokens=store_tokens)
    lines = describe(LayerSkipModel(model.model, config=config, engine="eager"), settings, None, "http://x")
    lookup = "suffix, min_match 2, gamma 10, target_threshold 0.0"
    assert lines[2] == f"config    none: hybrid: mask 4:1, gamma 3, draft_threshold 0.5, lookup ({lookup})"
    assert [line for line in lines if line.startswith("store")] == said
    assert "prefixes  up to 512 MiB of earlier requests' keys and values in memory" in lines
    without = describe(model, ServerSettings("m", 96, prefix_cache_bytes=0), None, "http://x")
    assert "prefixes  none: every prompt is computed whole" in without
    plain = describe(model, settings, None, "http://x")
    assert not [line for line in plain if line.startswith("store")]


def test_it_says_what_each_regime_is_decoded_with() -> None:
    rates = {"tokens_per_s": 125.0, "plain_tokens_per_s": 100.0, "speedup": 1.25}
    confirmed = Confirmed(
        **rates, speedup_ci_low=1.2, speedup_ci_high=1.3, num_prompts=24, num_identical=24, num_repeats=3
    )
    none, suffix = SkipMask.none(zoo.NUM_LAYERS), SuffixLookup(min_match=2)
    warm = {"sampling": Sampling.parse("t0.7"), "lookup": suffix, "confirmed": confirmed}
    regimes = (
        RegimeSetting(drafter="suffix", skip_mask=none, gamma=16, **warm),
        RegimeSetting(skip_mask=none, gamma=0, sampling=Sampling.parse("t1"), reason="nothing wins"),
    )
    config = DecodeConfig(skip_mask=none, gamma=3, sampling=Sampling(), regimes=regimes)
    model = LayerSkipModel(zoo.model_of("llama"), config=config, engine="eager")
    lines = describe(model, ServerSettings("m", 96), None, "http://x")
    assert lines[2] == "config    none: mask 4:none, gamma 3"
    assert lines[4].startswith("regimes   greedy, t0.7, t1; greedy is the default above")
    assert lines[5].startswith("regime    t0.7: suffix: gamma 16, lookup (suffix, min_match 2); confirmed 1.25x")
    assert lines[6].startswith("regime    t1: gamma 0, plain decoding (nothing wins); confirmed nothing")


def test_a_port_in_use_is_said_before_the_model_is_loaded(capsys, monkeypatch) -> None:
    monkeypatch.setattr("layerskip.serve.load_model", lambda *_: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(*DEMO, "--port", port) == 2
    said = f"layerskip.serve: error: cannot serve on 127.0.0.1:{port}: Address already in use; try another --port\n"
    assert capsys.readouterr().err == said


def test_a_weak_key_is_refused_and_not_shown(tmp_path: Path, capsys, monkeypatch) -> None:
    path = tmp_path / "key"
    path.write_text("secret1")
    path.chmod(0o600)
    assert run(*DEMO, "--api-key-file", path) == 2
    monkeypatch.setenv(KEY_VARIABLE, "secret2")
    assert run(*DEMO) == 2
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert run(*DEMO) == 2
    err = capsys.readouterr().err
    assert err.count("API key: must be at least 16 printable ASCII characters") == 3
    assert "secret" not in err


def test_a_missing_extra_is_one_line_that_names_it(refused, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    err = refused(run, *DEMO)
    assert err.startswith("layerskip.serve: error: needs the serve extra, pip install 'layerskip[serve]': ")


@pytest.mark.parametrize("invariant", [True, False])
def test_it_says_how_many_are_decoded_at_once_and_when_none_drafts(invariant: bool, monkeypatch) -> None:
    monkeypatch.setattr(EagerEngine, "batch_invariant", invariant)

    def said(most: int | None, **asked: int) -> list[str]:
        config = DecodeConfig(skip_mask=SkipMask.from_layers(4, [1]), gamma=3, max_drafting=most)
        one = LayerSkipModel(zoo.model_of("llama"), config=config, engine="eager")
        lines = describe(one, ServerSettings("m", 96, **asked), None, "http://x")
        return [line.removeprefix("batch     ") for line in lines if line.startswith("batch")]

    ties = "" if invariant else "; how many they are may flip near-ties, of seeded ones too"
    up_to, none = "up to 8 requests decoded at once", "none drafts"
    assert said(4, max_batch_size=8) == [f"{up_to}; while they are more than 4 {none}{ties}"]
    assert said(None, max_batch_size=8) == [f"{up_to}; while they are more than 2 {none}{ties}"]
    assert said(4, max_batch_size=8, max_drafting=0) == [f"{up_to}; while they are more than 0 {none}{ties}"]
    assert said(4) == []
