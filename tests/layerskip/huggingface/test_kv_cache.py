"""One length for all layers, rollback without copies, and what sliding layers show."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from layerskip.huggingface.kv_cache import LengthReadError, SharedLengthCache, StaticCache

WINDOW = 4


def states(positions: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that say their position, and values that say its negative; two heads of width 3."""
    column = torch.tensor(list(positions), dtype=torch.float32).reshape(1, 1, -1, 1).expand(1, 2, len(positions), 3)
    return column, -column


def write(cache: SharedLengthCache, num_tokens: int, layers: tuple[int, ...] = (0, 1)) -> list[list[float]]:
    """A forward that runs only `layers`; returns the positions that each of them got to see."""
    seen = []
    for layer in layers:
        keys, values = cache.update(*states(range(cache.length, cache.length + num_tokens)), layer)
        assert torch.equal(keys, -values)
        seen.append(keys[0, 0, :, 0].tolist())
    cache.advance(num_tokens)
    return seen


def test_every_layer_answers_with_the_shared_length() -> None:
    cache = SharedLengthCache([None, None], 10)
    write(cache, 3)
    write(cache, 2, layers=(1,))  # a draft that skips layer 0
    assert cache.length == 5
    assert [cache.get_seq_length(layer) for layer in (0, 1)] == [5, 5]
    assert [cache.get_mask_sizes(1, layer) for layer in (0, 1)] == [(6, 0), (6, 0)]
    cache.rollback_to(3)
    assert write(cache, 3) == [[0, 1, 2, 3, 4, 5]] * 2  # the target overwrites what the draft left out


def test_rollback_keeps_the_buffers() -> None:
    cache = SharedLengthCache([None, WINDOW], 8)
    write(cache, 6)
    before = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    copies = [layer.keys.clone() for layer in cache.layers]
    cache.rollback_to(2)
    cache.rollback_to(2)
    assert cache.length == 2
    assert all(torch.equal(layer.keys, copy) for layer, copy in zip(cache.layers, copies, strict=True))
    write(cache, 6)
    assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == before
    cache.rollback_to(0)
    assert cache.length == 0


def test_capacity_is_a_clear_error_and_nothing_is_written() -> None:
    cache = SharedLengthCache([None], 4)
    write(cache, 3, layers=(0,))
    with pytest.raises(ValueError, match="cache: capacity is 4 tokens, a forward needs 5"):
        cache.update(*states(range(3, 5)), 0)
    assert cache.length == 3
    with pytest.raises(ValueError, match=r"length: must be in 0..4 \(the cache's capacity\), got 5"):
        cache.advance(2)
    assert write(cache, 1, layers=(0,)) == [[0, 1, 2, 3]]
    for capacity in (0, -1):
        with pytest.raises(ValueError, match=f"capacity: must be at least 1, got {capacity}"):
            SharedLengthCache([None], capacity)


def test_only_back() -> None:
    cache = SharedLengthCache([None], 9)
    write(cache, 3, layers=(0,))
    with pytest.raises(ValueError, match="length: can only roll back, from 3, got 4"):
        cache.rollback_to(4)
    with pytest.raises(ValueError, match=r"length: must be in 0..9 .*got -1"):
        cache.rollback_to(-1)
    assert cache.length == 3


@pytest.mark.parametrize("length", range(9))
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_sliding_layers_show_all_that_any_query_may_see(length: int, num_tokens: int) -> None:
    cache = SharedLengthCache([WINDOW, None], 16)
    if length:
        write(cache, length)
    # The first query sits at `length` and sees itself and the window - 1 positions before it.
    first = max(0, length - WINDOW + 1)
    announced = cache.get_mask_sizes(num_tokens, 0)
    sliding, full = write(cache, num_tokens)
    assert sliding == list(range(first, length + num_tokens))
    assert full == list(range(length + num_tokens))
    assert announced == (len(sliding), first)


def test_a_rolled_back_window_has_lost_nothing() -> None:
    cache = SharedLengthCache([WINDOW], 16)
    write(cache, 3, layers=(0,))
    write(cache, 9, layers=(0,))
    cache.rollback_to(3)
    assert write(cache, 1, layers=(0,)) == [[0, 1, 2, 3]]


def test_unwritten_positions_hold_no_rubbish_that_could_be_nan() -> None:
    cache = SharedLengthCache([None], 8)
    write(cache, 2, layers=(0,))
    assert cache.layers[0].keys[:, :, 2:].eq(0).all()


def test_dtype_follows_what_is_written() -> None:
    cache = SharedLengthCache([None], 8)
    keys, values = (part.to(torch.bfloat16) for part in states(range(2)))
    assert cache.update(keys, values, 0)[0].dtype == torch.bfloat16
    assert cache.layers[0].keys.shape == (1, 2, 8, 3)


# The static form.


def static_cache() -> StaticCache:
    cache = StaticCache([None, WINDOW], 12, torch.device("cpu"))
    cache.restart(8)
    return cache


def static_write(cache: StaticCache, positions: range, num_visible: int) -> list[list[float]]:
    """A static step at these positions, whatever the length; returns what each layer answers with."""
    seen = []
    with cache.static_step(torch.tensor(list(positions)), num_visible):
        for layer in range(2):
            assert cache.get_mask_sizes(len(positions), layer) == (num_visible, 0)
            keys, values = cache.update(*states(positions), layer)
            assert torch.equal(keys, -values)
            seen.append(keys[0, 0, :, 0].tolist())
    return seen


def test_a_static_step_writes_where_it_is_told_and_shows_the_same_to_every_layer() -> None:
    cache = static_cache()
    write(cache, 3)
    assert static_write(cache, range(3, 5), 8) == [[0, 1, 2, 3, 4, 0, 0, 0]] * 2
    assert cache.length == 3  # the device's business
    assert write(cache, 1) == [[0, 1, 2, 3], [0, 1, 2, 3]]  # and outside of it all is as ever


def test_a_static_step_does_not_tell_its_length() -> None:
    cache = static_cache()
    with cache.static_step(torch.tensor([0]), 4), pytest.raises(LengthReadError, match="would freeze it"):
        cache.get_seq_length()
    assert cache.get_seq_length() == 0
    with pytest.raises(RuntimeError, match="lost"), cache.static_step(torch.tensor([0]), 4):
        raise RuntimeError("lost")
    assert cache.step is None


def test_the_position_on_the_device_follows_the_length() -> None:
    cache = static_cache()
    address = cache.position_on_device().data_ptr()
    write(cache, 5)
    assert cache.position_on_device().tolist() == [5]
    cache.rollback_to(2)
    assert cache.position_on_device().tolist() == [2]
    cache.position.distrust()
    cache.position.tensor.add_(3)  # as a round does
    cache.moved_to(5)
    assert (cache.length, cache.position_on_device().tolist()) == (5, [5])
    assert cache.position_on_device().data_ptr() == address
    with pytest.raises(ValueError, match=r"length: must be in 0..8"):
        cache.moved_to(9)


def test_restart_keeps_the_buffers_and_clears_them() -> None:
    cache = static_cache()
    write(cache, 6)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    assert cache.layers[0].keys.shape == (1, 2, 12, 3)
    cache.restart(12)
    assert (cache.length, cache.capacity, cache.num_positions) == (0, 12, 12)
    assert all(not layer.keys.any() and not layer.values.any() for layer in cache.layers)
    write(cache, 12)
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses
    with pytest.raises(ValueError, match=r"capacity: must be in 1..12 \(the buffers' size\), got 13"):
        cache.restart(13)


def test_a_cache_is_freed_with_its_last_reference() -> None:
    """Layers knew their cache and the cache its layers, so buffers lived on until a garbage collection."""
    cache = SharedLengthCache([None, 4], 8)
    cache.layers[0].update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
    keys = weakref.ref(cache.layers[0].keys)
    gc.disable()
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()
