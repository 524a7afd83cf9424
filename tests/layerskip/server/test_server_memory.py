"""Nothing stays of a request, counted in the allocator's blocks: neither the machine nor the collector decides."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from layerskip import LayerSkipModel
from layerskip.serve import set_startup_aside
from tests.layerskip.serving import Gate, Serving, completion_request, serving, tiny_model, wait_for

pytestmark = pytest.mark.slow

_SPARE_BLOCKS = 500
"""Pools, free lists and the interpreter's own caches, which fill up now and then."""
_NUM_LOOKS, _NUM_TRIES = 10, 3


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> LayerSkipModel:
    return tiny_model(tokenizer)


def settle(server: Serving) -> None:
    """Wait for all work to end, and collect garbage."""
    wait_for(lambda: server.service.worker.num_admitted == 0, "all have left")
    wait_for(lambda: server.num_connections == 0, "all connections are closed")
    wait_for(lambda: not server.server.server_state.tasks, "the work on every request has ended")
    for _ in range(3):  # what a finaliser frees is freed by the next one
        gc.collect()


def objects_by_type() -> Counter[str]:
    return Counter(type(one).__name__ for one in gc.get_objects())


def assert_nothing_stays(server: Serving, ask_all: Callable[[], None], num_requests: int) -> None:
    """Ask twice, then see whether asking twice more leaves a block, or an object of any type, for every request.

    What is only on its way out, the last round of a text whose client has left say, is waited for. A table that grows
    once, after many tests in one process, is told from a leak by asking again: a leak is there every time.
    """
    for _ in range(2):
        ask_all()
    found: list[Any] = []
    for _ in range(_NUM_TRIES):
        growth = _growth(server, ask_all, num_requests)
        if growth is None:
            return
        found.append(growth)
    raise AssertionError(found)


def _growth(server: Serving, ask_all: Callable[[], None], num_requests: int) -> tuple[int, Any] | None:
    """(Blocks, commonest objects) that asking twice leaves, if they are too many; else None."""
    settle(server)
    types = objects_by_type()
    blocks = sys.getallocatedblocks()  # after counting: large counts are blocks, hundreds after many tests
    for _ in range(2):
        ask_all()
    of_library = {"builtin_function_or_method", "ReferenceType"}  # a few, the first time that an operation is used
    grown: Counter[str] = Counter()
    for _ in range(_NUM_LOOKS):
        grown.clear()
        settle(server)
        blocks_after = sys.getallocatedblocks()
        grown = objects_by_type() - types
        is_clean = blocks_after - blocks < _SPARE_BLOCKS + 2 * num_requests
        if is_clean and all(count < num_requests for name, count in grown.items() if name not in of_library):
            return None
        time.sleep(0.5)
    return blocks_after - blocks, grown.most_common(12)


def test_after_each_way_to_be_answered(model: LayerSkipModel) -> None:
    with serving(model) as server:

        def ask_all() -> None:
            for i in range(120):
                fields: dict[str, Any] = {"max_tokens": 3, "stop": f"never {i}", "stream": i % 2 == 0}
                assert server.complete("def " * (i % 9 + 1), **fields)[0] == 200
                if i % 6 == 0:
                    assert server.complete(max_tokens=0)[0] == 400
                    assert server.request("GET", f"/x{i}")[0] == 404

        assert_nothing_stays(server, ask_all, 120)
        assert threading.active_count() < 20


def test_after_many_at_once_and_those_refused(model: LayerSkipModel) -> None:
    with serving(model, queue_limit=20) as server, ThreadPoolExecutor(50) as pool:

        def ask(i: int) -> int:
            return server.complete("def", max_tokens=3, stream=i % 2 == 0)[0]

        def ask_all() -> None:
            assert set(pool.map(ask, range(100))) <= {200, 429}

        assert_nothing_stays(server, ask_all, 100)


def test_after_clients_that_leave_mid_stream(model: LayerSkipModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(model) as server:

        def ask_all() -> None:
            for _ in range(10):
                with monkeypatch.context() as patch:
                    Gate(model, patch).client_leaves(server, completion_request(stream=True))

        assert_nothing_stays(server, ask_all, 10)


def test_no_tensor_of_a_request_waits_for_the_collector(model: LayerSkipModel) -> None:
    """A finished text's keys and values are freed at once: on a device they are most of what a request takes."""
    with serving(model) as server:

        def num_tensors() -> int:
            wait_for(lambda: server.service.worker.num_admitted == 0, "all have left")
            return sum(type(one) is torch.Tensor for one in gc.get_objects())

        assert server.complete(max_tokens=3)[0] == 200
        gc.collect()
        gc.disable()
        try:
            before = num_tensors()
            for _ in range(10):
                assert server.complete(max_tokens=3)[0] == 200
            # The worker drops a job just after its last event.
            wait_for(lambda: num_tensors() <= before, "the last answer is dropped")
        finally:
            gc.enable()


def test_what_startup_made_is_set_aside() -> None:
    """So that the garbage of requests is looked for among their own objects, soon and cheaply."""
    before = gc.get_freeze_count()
    try:
        set_startup_aside()
        assert gc.get_freeze_count() > before + 10_000
    finally:
        gc.unfreeze()
