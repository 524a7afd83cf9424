"""Sublayers compiled for this CPU: the same bits however many rows and threads, and torch's where there are none."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask, cpp_library
from layerskip.engines.eager import EagerEngine
from layerskip.engines.fused import FusedEngine
from layerskip.engines.lean.layers import Attention, FinishedLinear, Mlp
from layerskip.engines.native import library
from layerskip.engines.native.layers import NativeAttention, NativeLayers, NativeMlp, NativeRun
from layerskip.engines.native.linear import NativeLinear, packed_bytes
from layerskip.engines.native.recurrent import NativeLinearAttention, NativeShortConv
from layerskip.engines.tree import DraftTree
from layerskip.huggingface.adapter import ModelAdapter
from layerskip.huggingface.quantization.weights import GROUP
from layerskip.huggingface.rounding import logit_difference
from tests.layerskip import zoo

found = library.load_kernels()
needs_kernels = pytest.mark.skipif(isinstance(found, str), reason=f"no kernels here: {found}")
DTYPES = [torch.float32, torch.bfloat16]
NONE = SkipMask.none(zoo.NUM_LAYERS)
CONTEXT, NUM_ROWS = 9, 40
WIDE, IN_PLACE = " wide", " in place"
WIDER = {
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 118,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
}
"""Heads that are no whole number of vectors, and whose states take all sizes of columns."""


def engine_of(name: str, dtype: torch.dtype, **overrides: Any) -> FusedEngine:
    """After a name `WIDE`, see `WIDER`, and `IN_PLACE`."""
    own = name.removesuffix(IN_PLACE)
    adapter = ModelAdapter(
        zoo.build(own.removesuffix(WIDE), **(WIDER if own.endswith(WIDE) else {}), **overrides).to(dtype)
    )
    engine = FusedEngine(adapter, compiled=True, in_place=name != own)
    assert engine.refusal is None
    for i, (mixer, mlp) in enumerate(engine.layers):
        kept = NativeShortConv if own == "lfm2" else NativeLinearAttention
        expected = kept if i in adapter.recurrent_layers else NativeAttention
        assert (type(mixer), type(mlp)) == (expected, NativeMlp)
    return engine


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2", "qwen3", "mistral-sliding", "qwen3_5", "qwen3_5 wide", "lfm2", "gemma3", "gemma4", "bamba"),
        *("qwen2 in place", "qwen3_5 wide in place", "bamba in place"),
    ],
)
def test_a_rows_bits_do_not_depend_on_what_it_is_computed_with(name: str, dtype: torch.dtype) -> None:
    """Token by token, several at once, with one thread or two, whole weights and rounded ones."""
    engine = engine_of(name, dtype)
    ids = torch.tensor(zoo.prompt_of(CONTEXT + NUM_ROWS))
    threads = torch.get_num_threads()
    some = SkipMask.from_sublayers(zoo.NUM_LAYERS, attention=[1], mlp=[2])
    for mask in (None, NONE.rounded(8), NONE.rounded(4), some):
        rows = []
        try:
            for count, num_threads in ((1, 1), (1, 2), (2, 1), (5, 2), (6, 1), (7, 1), (13, 2), (NUM_ROWS, 1)):
                torch.set_num_threads(num_threads)
                with engine.session(len(ids)):
                    engine.forward(ids[:CONTEXT])
                    each = ids[CONTEXT:].split(count)
                    rows.append(torch.cat([engine.forward(one, mask, num_logits=len(one)) for one in each]).clone())
        finally:
            torch.set_num_threads(threads)
        assert rows[0].isfinite().all()
        assert all(torch.equal(one, rows[0]) for one in rows[1:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["llama", "mistral-sliding", "qwen3_5 wide", "lfm2", "gemma3", "gemma4", "bamba", "qwen3 in place"]
)
def test_a_prompts_bits_do_not_depend_on_its_pieces(name: str, dtype: torch.dtype) -> None:
    engine = engine_of(name, dtype, max_position_embeddings=1024)
    ids = torch.tensor(zoo.prompt_of(600))
    found = []
    for sizes in ([600], [1] * 600, [300, 300], [257, 3, 64, 276]):
        with engine.session(len(ids)):
            found.append(torch.cat([engine.forward(one, num_logits=len(one)).clone() for one in ids.split(sizes)]))
    assert found[0].isfinite().all()
    assert all(torch.equal(one, found[0]) for one in found[1:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 16), (6, 1, 40), (2, 2, 130)], ids=str)
def test_long_texts_are_shared_by_threads_in_parts_of_the_same_bits(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Their keys are summed up in parts of 512, each a thread's task or one after the other, of few queries or many, of
    which the first may not see the last part."""
    sizes = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    engine = engine_of("qwen3", dtype, max_position_embeddings=2048, **sizes)
    ids, tree = torch.tensor(zoo.prompt_of(1300)), DraftTree((0, 1, 0, 2, 2))
    found, threads = [], torch.get_num_threads()
    try:
        for num_threads, pieces in (
            (1, [1290, *[1] * 10]),
            (2, [1290, 9, 1]),
            (5, [1020, 9, 261, 10]),
            (3, [1300]),
        ):
            torch.set_num_threads(num_threads)
            with engine.session(1310):
                rows = [engine.forward(one, num_logits=len(one)).clone() for one in ids.split(pieces)]
                rows.append(engine.verify_tree(ids[: tree.num_rows], tree)[[0, 1, 2, 4]])
                engine.cache.rollback_to(1300)
                path = [engine.forward(one) for one in ids[[0, 1, 2, 4]].split(1)]
                assert torch.equal(torch.cat(path), rows[-1])
            found.append(torch.cat(rows))
    finally:
        torch.set_num_threads(threads)
    assert found[0].isfinite().all()
    assert all(torch.equal(one, found[0]) for one in found[1:])
    eager = EagerEngine(engine._adapter)
    with eager.session(1300):
        difference, tolerance = logit_difference(found[0][:1300], eager.forward(ids, num_logits=1300))
    assert difference <= tolerance


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_that_read_others_keys_compute_the_rows_asked_for_alone(dtype: torch.dtype, monkeypatch: Any) -> None:
    engine, ids, computed = engine_of("gemma4", dtype), torch.tensor(zoo.prompt_of(30)), []

    def run(x: torch.Tensor, gates: Any, steps: Any, mask: SkipMask, layers: range) -> torch.Tensor:
        computed.append((len(x), layers))
        return FusedEngine._run(engine, x, gates, steps, mask, layers)

    monkeypatch.setattr(engine, "_run", run)
    readers = engine._adapter.sources
    assert min(readers) == zoo.NUM_LAYERS - len(readers) < zoo.NUM_LAYERS
    for mask in (None, NONE.rounded(8), SkipMask.from_layers(zoo.NUM_LAYERS, [1])):
        found = []
        for num_logits in (20, 3, 1):
            with engine.session(40):
                engine.forward(ids[:10], mask, num_logits=num_logits)
                rows = engine.forward(ids[10:], mask, num_logits=num_logits)
                assert computed[-1] == (num_logits, range(0 if num_logits == 20 else min(readers), zoo.NUM_LAYERS))
                found.append(torch.cat([rows[-1:], engine.forward(ids[:1], mask)]).clone())
        assert all(torch.equal(one, found[0]) for one in found[1:])


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_branch_of_a_tree_has_the_bits_of_its_path_alone(dtype: torch.dtype) -> None:
    engine = engine_of("qwen3", dtype)
    tree = DraftTree((0, 1, 2, 0, 0, 2, 2, 7, 7))
    context, rows = torch.tensor(zoo.prompt_of(CONTEXT)), torch.tensor(zoo.prompt_of(tree.num_rows, seed=3))
    with engine.session(40):
        engine.forward(context)
        at_once = engine.verify_tree(rows, tree).clone()
    paths = [[0]]
    for row, parent in enumerate(tree.parents, 1):
        paths.append([*paths[parent], row])
    for row, path in enumerate(paths):
        with engine.session(40):
            engine.forward(context)
            alone = [engine.forward(rows[[one]]) for one in path][-1]
            assert torch.equal(at_once[row], alone[0]), path


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_5"])
def test_in_bfloat16_speculative_output_is_plain_decodings(name: str) -> None:
    """Where verification has other bits than a plain step, near-ties flip in one output of a few."""
    model = LayerSkipModel(zoo.build(name).to(torch.bfloat16), engine="fused")
    drafted = 0
    for seed in range(12):
        prompt = zoo.prompt_of(6, seed=seed)
        plain = model.generate(prompt, max_new_tokens=60, config=DecodeConfig.plain(zoo.NUM_LAYERS))
        drafts = (
            (SkipMask.parse("4:1"), 3),
            (NONE.rounded(8), 6),
            (NONE.rounded(4), 4),
            (SkipMask.early_exit(4, 2), 12),
        )
        for mask, gamma in drafts:
            out = model.generate(prompt, max_new_tokens=60, config=DecodeConfig(skip_mask=mask, gamma=gamma))
            assert out.ids == plain.ids
            drafted += out.stats.num_drafted
    assert drafted > 1000


@needs_kernels
def test_drafts_in_4_bits_compute_with_weights_rounded_in_groups() -> None:
    """Those of layers; the output embedding has 8 bits."""
    wide = {"hidden_size": 64, "intermediate_size": 96}
    engine = engine_of("llama", torch.float32, **wide)
    ids = torch.tensor(zoo.prompt_of(CONTEXT + NUM_ROWS))

    def drafts(one: Any, mask: SkipMask | None) -> torch.Tensor:
        with one.session(len(ids)):
            return one.forward(ids, mask, num_logits=len(ids)).clone()

    found = drafts(engine, NONE.rounded(4))
    adapter = ModelAdapter(zoo.build("llama", **wide))
    for layer in adapter.layers:
        for linear in (one for one in layer.modules() if isinstance(one, torch.nn.Linear)):
            linear.weight.data = in_groups(linear.weight.data).float()
    scales = adapter.head.weight.data.abs().amax(dim=1, keepdim=True) / 127
    adapter.head.weight.data = (adapter.head.weight.data / scales).round() * scales
    expected = drafts(EagerEngine(adapter), None)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    assert (drafts(engine, None) - expected).abs().max() > 3 * (found - expected).abs().max(), "whole ones are not"


def in_groups(weight: torch.Tensor) -> torch.Tensor:
    """What torchao rounds to four bits in groups, float64; scales have bfloat16's precision in both formats."""
    own = weight.double().unflatten(1, (-1, GROUP))
    low, high = own.amin(dim=2, keepdim=True).clamp(max=0), own.amax(dim=2, keepdim=True).clamp(min=0)
    scales = ((high.float() - low.float()) / 15).bfloat16().double()
    zeros = (-low / scales).round().clamp(0, 15)
    numbers = ((own / scales).round() + zeros).clamp(0, 15)
    return ((numbers - zeros) * scales).flatten(1)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["packed", "in place", "8 bits", "4 bits"])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (5, 3), (64, 16), (65, 17), (200, 131), (65, 64)])
def test_products_of_every_shape(outputs: int, inputs: int, form: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(outputs)
    kernels = library.load_kernels()
    assert not isinstance(kernels, str)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    expected_weight = weight.double()
    bits, in_place = {"8 bits": 8, "4 bits": 4}.get(form), form == "in place"
    if bits == 4 and inputs % GROUP == 0:
        expected_weight = in_groups(weight)
    elif bits is not None:
        scales = weight.float().abs().amax(dim=1).clamp_min(1e-8) / 127
        expected_weight = (weight.float() / scales[:, None]).round().double() * scales[:, None].double()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 0.15}
    if bits and dtype == torch.float32:  # rows of 16 bits, where this CPU multiplies 8-bit weights with them
        close = {"rtol": 1e-4, "atol": 2e-3}
    halves = [weight[: outputs // 2], weight[outputs // 2 :]] if outputs > 1 else [weight]
    linear = NativeLinear.of(kernels, halves, bias, bits=bits, in_place=in_place)
    few, order = outputs // 2 + 1, torch.randperm(outputs, generator=generator)
    # Its numbers lie apart, as those of a weight that is given transposed.
    transposed = [weight.t().contiguous().t()]
    first = NativeLinear.of(kernels, transposed, bias, bits=bits, in_place=in_place).first(few)
    ordered = NativeLinear.of(kernels, halves, bias, order, bits=bits, in_place=in_place)
    for num_rows in (1, 2, 6, 7, 32, 33, 300):
        # A column of a wider tensor, as the residual of a draft layer is.
        x = torch.randn(num_rows, inputs + 5, generator=generator).to(dtype)[:, :inputs]
        exact = x.double() @ expected_weight.t() + bias.double()
        torch.testing.assert_close(linear(x).double(), exact, **close)
        torch.testing.assert_close(first(x).double(), exact[:, :few], **close)
        assert torch.equal(ordered(x), linear(x)[:, order])
        residual = torch.randn(num_rows, outputs, generator=generator).to(dtype)
        torch.testing.assert_close(linear.add_to(residual, x).double(), exact + residual.double(), **close)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["packed", "in place", "8 bits", "4 bits"])
def test_a_row_is_the_same_to_the_bit_however_many_there_are(form: str, dtype: torch.dtype) -> None:
    kernels = library.load_kernels()
    assert not isinstance(kernels, str)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(70, 1120, generator=generator).to(dtype)  # so many inputs that rows read them in pieces
    bits = {"8 bits": 8, "4 bits": 4}.get(form)
    linear = NativeLinear.of(kernels, [weight], None, bits=bits, in_place=form == "in place")
    x = torch.randn(300, 1120, generator=generator).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (6, 7, 12, 13, 24, 25, 300):
        assert torch.equal(linear(x[:num_rows]), alone[:num_rows])


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_weights_of_16_bits_have_the_same_products_of_half_the_bytes(dtype: torch.dtype) -> None:
    kernels = library.load_kernels()
    assert not isinstance(kernels, str)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(5000, 70, generator=generator).to(dtype).float()
    weight[0], weight[1, 0] = 0.0, 3e-7  # which float16 has with fewer digits
    weight = weight.to(dtype).float()
    other = torch.cat([weight, weight[:1]])
    other[-1, -1] = 1 + 2**-20  # no such number
    half, whole = (NativeLinear.of(kernels, [one], None) for one in (weight, other))
    assert (half.weights[0].dtype, whole.weights[0].dtype) == (dtype, torch.float32)
    assert [packed_bytes(one) for one in (weight, weight.to(dtype), other[-1:])] == [700_000, 700_000, 280]
    x = torch.randn(300, 70, generator=generator)
    for num_rows in (1, 2, 6, 7, 24, 300):
        assert torch.equal(half(x[:num_rows]), whole(x[:num_rows])[:, :5000])


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "gemma4", "bamba"])
def test_weights_in_place_are_the_models_own(name: str) -> None:
    engine, packed = engine_of(name + IN_PLACE, torch.bfloat16), engine_of(name, torch.bfloat16)
    own = {one.data_ptr() for one in engine._adapter.model.parameters()}
    linears = [one for layer in engine.layers for part in layer for one in vars(part).values()]
    linears = [one.linear if isinstance(one, FinishedLinear) else one for one in [*linears, engine.head]]
    weights = [weight for one in linears if isinstance(one, NativeLinear) for weight in one.weights]
    assert len(weights) > 3 * zoo.NUM_LAYERS
    assert {one.data_ptr() for one in weights} <= own
    ids = torch.tensor(zoo.prompt_of(19))
    logits = []
    for one in (engine, packed):
        with one.session(19):
            logits.append(one.forward(ids, num_logits=19).clone())
    difference, tolerance = logit_difference(*logits)
    assert difference <= tolerance


@needs_kernels
def test_other_activations_and_number_formats_are_left_to_torch() -> None:
    layers = FusedEngine(ModelAdapter(zoo.build("llama", hidden_act="gelu")), compiled=True).layers
    assert all(type(one) is NativeAttention and type(two) is Mlp for one, two in layers)
    half = FusedEngine(ModelAdapter(zoo.build("llama").half()), compiled=True)
    assert half.refusal == "not for float16"
    assert all(type(one) is Attention for one, _ in half.layers)
    assert NativeLayers.refusal(torch.device("cuda"), torch.float32) == "not for cuda"


@needs_kernels
def test_hundreds_of_keys_are_attended_to_as_by_torch() -> None:
    engine = engine_of("llama", torch.float32, max_position_embeddings=2048)
    plain = FusedEngine(ModelAdapter(engine._adapter.model))
    ids = torch.tensor(zoo.prompt_of(700))
    logits = []
    for one in (engine, plain):
        with one.session(720):
            one.forward(ids[:690])
            logits.append(one.forward(ids[690:], num_logits=10).clone())
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has compiled nothing yet."""
    library.load_kernels.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "layerskip"


@pytest.mark.usefixtures("fresh")
class TestWhereThereAreNone:
    """Why is told, and torch computes."""

    @pytest.fixture(autouse=True)
    def _forgotten(self) -> Any:
        yield
        library.load_kernels.cache_clear()

    def refusal(self) -> str:
        refusal = library.load_kernels()
        assert isinstance(refusal, str)
        engine = LayerSkipModel(zoo.model_of("llama"), engine="fused").engine
        assert isinstance(engine, FusedEngine)
        assert engine.refusal is not None
        return refusal

    def test_switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(cpp_library.SWITCH, "0")
        assert self.refusal() == "switched off by LAYERSKIP_KERNELS=0"

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.delenv(cpp_library.SWITCH, raising=False)
        monkeypatch.setenv("PATH", "")
        assert self.refusal() == "no C++ compiler (g++ or clang++)"

    @needs_kernels
    def test_a_compiler_that_fails(self, monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
        monkeypatch.setattr(library, "_FLAGS", ["--no-such-flag"])
        assert self.refusal().startswith("compiling them failed: ")
        assert not list(fresh.iterdir())

    def test_another_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(cpp_library.SWITCH, raising=False)
        monkeypatch.setattr("platform.system", lambda: "Darwin")
        assert self.refusal().startswith("not for Darwin on ")

    @needs_kernels
    def test_a_cpu_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "_FLAGS", [one.replace("=native", "=x86-64") for one in library._FLAGS])
        assert "this CPU lacks AVX2, FMA and F16C" in self.refusal()


@pytest.mark.slow
@needs_kernels
def test_they_are_compiled_once_and_found_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[list[str]] = []
    run = subprocess.run

    def noted(command: list[str], **named: Any) -> Any:
        compiled.extend([command] if "-o" in command else [])
        return run(command, **named)

    monkeypatch.setattr(subprocess, "run", noted)
    for _ in range(2):
        assert not isinstance(library.load_kernels(), str)
        library.load_kernels.cache_clear()
    assert len(compiled) == 1
    assert [one.suffix for one in fresh.iterdir()] == [".so"]
    assert fresh.stat().st_mode & 0o077 == 0


@pytest.mark.slow
@needs_kernels
def test_a_cache_that_cannot_be_written_is_gone_without(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.parent.mkdir(exist_ok=True)
    fresh.write_text("a file")
    assert not isinstance(library.load_kernels(), str)
    library.load_kernels.cache_clear()


def test_kernels_of_wrong_numbers_are_left_out_aloud(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(library.load_kernels(), str):
        pytest.skip("no kernels here")
    run = NativeRun.__call__
    monkeypatch.setattr(NativeRun, "__call__", lambda self, x, *rest: run(self, x, *rest).roll(1, -1))
    engine = LayerSkipModel(zoo.build("llama"), engine="fused").engine
    assert isinstance(engine, FusedEngine)
    assert engine.refusal is not None
    assert "compiled sublayers are left out: engine fused: its logits differ" in caplog.text
