"""The serving study: what it reads of a stream is what was sent, its servers are started as said, a run is whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from layerskip.prompts import Prompt, read_prompts
from studies.serving import __main__ as study
from studies.serving.requests import Endpoint, ask, load
from studies.serving.servers import OURS, PLAIN, VLLM, VLLM_NGRAMS, Subject
from tests.layerskip.serving import MODEL_ID, serving, tiny_model
from tests.layerskip.tokenizers import tokenizer_of

OPTIONS = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def prompts_in(folder: Path, count: int = 4) -> tuple[Prompt, ...]:
    path = folder / "held_out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"def f{i}("}) + "\n" for i in range(count)))
    return read_prompts(path)


def test_answers_are_what_the_server_says_to_each(tmp_path: Path) -> None:
    prompts = prompts_in(tmp_path)
    with serving(tiny_model(tokenizer_of("byte_level"))) as server:
        endpoint = Endpoint.at("ours", server.url)
        assert endpoint.model == MODEL_ID
        found = load(endpoint, prompts, 3, OPTIONS)
        for answer, prompt in zip(found.answers, prompts, strict=True):
            _, _, body = server.complete(prompt.messages[0][1], **OPTIONS)
            assert answer.text == body["choices"][0]["text"]
            assert answer.num_tokens == body["usage"]["completion_tokens"] == 6
            assert answer.num_prompt_tokens == body["usage"]["prompt_tokens"]
            assert 0.0 < answer.first_s <= answer.last_s <= found.wall_s
        assert found.tokens_per_s == pytest.approx(24 / found.wall_s)


def test_what_a_server_refuses_is_told(tmp_path: Path) -> None:
    with serving(tiny_model(tokenizer_of("byte_level"))) as server:
        endpoint = Endpoint.at("ours", server.url)
        with pytest.raises(ValueError, match=r"^ours: answered 400, .*temperature"):
            ask(endpoint, prompts_in(tmp_path)[0], OPTIONS | {"temperature": -1})


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "127.0.0.1:1"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url: must be http://HOST:PORT"):
        Endpoint.at("ours", url)


def test_every_server_is_started_for_the_same_weights_and_threads() -> None:
    subject = Subject(Path("best.json"), "some/model", "bfloat16", 2, Path("/env/bin/python"))
    for name in (OURS, PLAIN, VLLM, VLLM_NGRAMS):
        command = subject.command(name, 8001, 4)
        assert command[command.index("--dtype") + 1] == "bfloat16"
        assert command[command.index("--port") + 1] == "8001"
        assert ("some/model" in command) is (name != OURS)
        assert ("--speculative-config" in command) is (name == VLLM_NGRAMS)
    assert subject.command(OURS, 1, 4)[0] == sys.executable
    assert subject.environment(VLLM)["VLLM_CPU_OMP_THREADS_BIND"].count(",") <= 1


def test_vllm_needs_its_python() -> None:
    with pytest.raises(ValueError, match=r"^--vllm: must be the Python that vLLM is installed for"):
        Subject(Path("best.json"), "some/model", "bfloat16", 2, None).command(VLLM, 1, 1)


@pytest.mark.slow
def test_a_run_on_the_demo_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    arguments = ["--requests", "2", "--new-tokens", "6", "--repeats", "2"]
    assert study.main([*arguments, "--at-once", "1", "2", "--temperatures", "0", "--out", str(out)]) == 0
    cells = json.loads(out.read_text())["regimes"][0]["cells"]
    assert [(one["server"], one["at_once"]) for one in cells] == [(OURS, 1), (PLAIN, 1), (OURS, 2), (PLAIN, 2)]
    for cell in cells:
        assert cell["num_same"] == {1: 2, 2: 4}[cell["at_once"]]
        assert cell["num_tokens"] == [6]
        assert len(cell["repeats"]) == 2
    assert "greedy, 2 at once: ours, plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        (["--at-once", "0"], "--at-once: must be at least 1, got 0"),
        (["--server", "nobody"], "--server: must be NAME=URL, got 'nobody'"),
        (["--servers"], "--servers: there is nobody to ask"),
        (["--server", "ours=http://127.0.0.1:1"], "--servers: must have a name each, 'ours' is there twice"),
        (["--vllm", "/no/such/python"], "--vllm: must be a Python, no such file: /no/such/python"),
        (
            ["--config", "studies/smollm2/int8/best.json", "--prompts", "studies/smollm2/held_out.jsonl"],
            "--config: must be of whole weights, which all servers have, got int8",
        ),
    ],
)
def test_bad_arguments_are_named(more: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(more) != 0
    assert rule in capsys.readouterr().err
