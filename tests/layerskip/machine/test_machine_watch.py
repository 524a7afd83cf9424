"""Clocks, power and memory beside a number: read from a fake nvidia-smi, and none of it needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerskip.machine import nvidia
from layerskip.machine.nvidia import gpu_states
from layerskip.machine.watch import MachineWatch, describe_machine
from tests.layerskip import zoo
from tests.layerskip.tape import graph_model

CELLS = {
    "uuid": "GPU-aa-bb",
    "name": "NVIDIA H100 80GB HBM3",
    "driver_version": "570.86.15",
    "clocks.sm": "1755",
    "clocks.max.sm": "1980",
    "clocks.mem": "2619",
    "clocks.max.mem": "2619",
    "power.draw": "312.40",
    "power.limit": "700.00",
    "temperature.gpu": "[N/A]",
}


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an nvidia-smi on the path that knows two GPUs and answers in the order it is asked in."""

    def install(body: str | None = None, **changed: str) -> None:
        rows = [CELLS | {"uuid": "GPU-cc-dd", "clocks.sm": "345"}, CELLS | changed]
        answer = f"""
import sys
(query,) = [one for one in sys.argv[1:] if one.startswith("--query-gpu=")]
assert "--format=csv,noheader,nounits" in sys.argv
for cells in {rows!r}:
    print(", ".join(cells[field] for field in query.removeprefix("--query-gpu=").split(",")))
"""
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!{sys.executable}\n{body or answer}", encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def test_the_driver_is_asked_by_the_devices_own_ids(smi: Any) -> None:
    smi()
    first, second = gpu_states(["GPU-cc-dd", "aa-bb"])
    assert (first["sm_clock_mhz"], second["sm_clock_mhz"]) == (345.0, 1755.0)
    assert second == {
        "name": "NVIDIA H100 80GB HBM3",
        "driver": "570.86.15",
        "sm_clock_mhz": 1755.0,
        "max_sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 2619.0,
        "max_memory_clock_mhz": 2619.0,
        "power_w": 312.4,
        "power_limit_w": 700.0,
    }, "what the driver does not tell is left out"
    assert gpu_states(["ee-ff"]) == gpu_states([]) == []


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit(9)",
        "print('Unable to determine the device handle for GPU0: Unknown Error')",
        "import sys; sys.stdout.buffer.write(bytes([255, 254, 10]))",
        "import time; time.sleep(60)",
        "",
    ],
    ids=["fails", "says something else", "no text", "hangs", "says nothing"],
)
def test_an_nvidia_smi_that_does_not_work_tells_nothing(smi: Any, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "_TIMEOUT_S", 0.5 if "sleep" in body else 30.0)
    smi(body or "pass")
    assert gpu_states(["aa-bb"]) == []


def test_without_an_nvidia_smi_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_states(["aa-bb"]) == []


def test_a_watch_on_a_cpu_has_what_there_is() -> None:
    model = zoo.layerskip_of("llama")
    record = json.loads(json.dumps(MachineWatch(model).record()))
    assert (record["num_threads"], record["num_preparations"]) == (torch.get_num_threads(), 0)
    assert record["before"]["gpus"] == record["after"]["gpus"] == []
    assert "peak_allocated_bytes" not in record
    assert record["peak_resident_bytes"] > 1 << 20
    words = describe_machine(record)
    assert words.startswith(f"attention {model.engine.attention_backend}, peak resident memory")
    assert "load" in words


def test_a_watch_counts_what_was_recorded_while_it_watched() -> None:
    model, prompt = graph_model("llama"), zoo.prompt_of(5)
    model.generate(prompt, max_new_tokens=4)
    watch = MachineWatch(model)
    assert watch.record()["num_preparations"] == 0
    before = model.engine.num_preparations
    model.generate(prompt, max_new_tokens=24)
    record = watch.record()
    assert record["num_preparations"] == model.engine.num_preparations - before > 0
    assert 0.0 < record["preparation_s"] < model.engine.preparation_s
    assert f"{record['num_preparations']} recordings and compilations in" in describe_machine(record)


def test_a_watch_on_a_gpu_has_its_clocks_and_its_peaks(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = zoo.layerskip_of("llama").engine
    devices = (torch.device("cuda", 0), torch.device("cpu"))
    model: Any = SimpleNamespace(engine=engine, placement=SimpleNamespace(devices=devices))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="aa-bb"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _device: 6 << 30)
    smi(**{"clocks.sm": "1980"})
    watch = MachineWatch(model)
    smi()
    record = watch.record()
    assert [record[when]["gpus"][0]["sm_clock_mhz"] for when in ("before", "after")] == [1980.0, 1755.0]
    said = describe_machine(record)
    assert said.startswith("driver 570.86.15, SM 1980 to 1755 of 1980 MHz, memory 2619 of 2619 MHz, power 312 of 700 W")
    assert "peak GPU memory 3.00 GiB, 6.00 reserved" in said
    smi("raise SystemExit(9)")
    assert "driver" not in describe_machine(watch.record()), "a driver that has stopped telling breaks nothing"
