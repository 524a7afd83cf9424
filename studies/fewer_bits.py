"""python -m studies.fewer_bits: drafts by the model in 8 and in 4 bits of its weights: how often right, how costly."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command
from layerskip.engines.recording.stopwatch import SecondsOf, Stopwatch
from layerskip.engines.weight_layout import WeightLayouts
from layerskip.huggingface.int8 import Int8Linear
from layerskip.model import LayerSkipModel
from layerskip.prompts import encode_prompt, read_prompts
from studies.engine.results import facts, markdown_table, say, write_json

GROUP = 32
"""Weights of a row that share a scale and an offset: the fewest that torch's operator takes, and the most accurate."""
TEMPERATURE = 0.7
_PASS_BYTES = 1 << 28
"""Of matrices that one timing goes through, so that they come from memory."""
Forms = dict[str, Callable[[torch.Tensor, torch.Tensor | None], Any]]


class Int4Linear:
    """A product with weights of 4 bits, a scale and an offset for each `GROUP` of a row's, by torch's own operator.

    Activations stay as they are on a CPU, and are bfloat16 on a GPU. Shapes that the operator takes: outputs a
    multiple of 16, inputs of `GROUP`, on a GPU of 128.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        rounded, scales, offsets = four_bits(weight.float())
        self.num_outputs, self._bias = weight.shape[0], bias
        self._dtype = torch.bfloat16 if weight.device.type == "cuda" else weight.dtype
        self._scales = torch.stack([scales, offsets], dim=-1).transpose(0, 1).contiguous().to(self._dtype)
        ops = torch.ops.aten
        if weight.device.type == "cuda":
            pairs = (rounded[:, ::2] << 4 | rounded[:, 1::2]).to(torch.uint8)
            self._packed, self._multiply = ops._convert_weight_to_int4pack(pairs, 8), ops._weight_int4pack_mm
        else:
            self._packed = ops._convert_weight_to_int4pack_for_cpu(rounded, 8)
            self._multiply = ops._weight_int4pack_mm_for_cpu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._multiply(x.to(self._dtype), self._packed, GROUP, self._scales).to(x.dtype)
        return out if self._bias is None else out + self._bias

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual + self(x)


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights (outputs, inputs) as integers 0..15, and the scale and offset (outputs, inputs / GROUP) with which
    (integer - 8) * scale + offset is near them, over the whole range of each group.

    Raises: ValueError if a row is not a whole number of groups.
    """
    if weight.shape[1] % GROUP:
        raise ValueError(f"model: its products must have a multiple of {GROUP} inputs, got {weight.shape[1]}")
    groups = weight.view(weight.shape[0], -1, GROUP)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-8).bfloat16().float()
    offset = (low + 8 * scale).bfloat16().float()
    rounded = ((groups - offset) / scale + 8).round().clamp(0, 15)
    return rounded.flatten(1).int(), scale[..., 0], offset[..., 0]


def in_four_bits(weight: torch.Tensor) -> torch.Tensor:
    rounded, scale, offset = four_bits(weight.float())
    groups = rounded.view(len(rounded), -1, GROUP) - 8
    return (groups * scale[..., None] + offset[..., None]).flatten(1).to(weight.dtype)


def in_eight_bits(weight: torch.Tensor) -> torch.Tensor:
    """As `Int8Linear` has them, its activations apart."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).clamp_min(1e-8)
    return (weight / scale).round() * scale


Rounding = Callable[[torch.Tensor], torch.Tensor]
ROUNDINGS: dict[str, tuple[Rounding, Rounding]] = {
    "8": (in_eight_bits, in_eight_bits),
    "4": (in_four_bits, in_four_bits),
    "4, output embedding 8": (in_four_bits, in_eight_bits),
}
"""Of the layers' products, and of the output embedding's."""


@dataclass(frozen=True)
class Text:
    ids: torch.Tensor
    """(1, T)."""
    start: int
    """Where the continuation begins."""

    @torch.inference_mode()
    def probs(self, model: Any, temperature: float) -> torch.Tensor:
        """(continuation, V) of the tokens to come at each of its places."""
        logits: torch.Tensor = model(self.ids).logits[0, self.start - 1 : -1].float()
        return (logits / temperature).softmax(dim=-1)


@torch.inference_mode()
def continued(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int, **sampling: Any) -> list[Text]:
    """The prompts, each with the model's own continuation."""
    inputs = [torch.tensor([list(one)], device=model.device) for one in prompts]
    own = {"max_new_tokens": num_tokens, "pad_token_id": 0, **sampling}
    return [Text(model.generate(one, attention_mask=torch.ones_like(one), **own), one.shape[1]) for one in inputs]


@contextmanager
def rounded(model: Any, rounding: str) -> Iterator[None]:
    """Inside, the model's linear modules have rounded weights; what shares the output embedding's keeps its own."""
    of_layers, of_head = ROUNDINGS[rounding]
    head = model.get_output_embeddings()
    modules = [one for one in model.modules() if type(one) is nn.Linear]
    before = [one.weight for one in modules]
    try:
        for one in modules:
            change = of_head if one is head else of_layers
            one.weight = nn.Parameter(change(one.weight.detach()), requires_grad=False)
        yield
    finally:
        for one, weight in zip(modules, before, strict=True):
            one.weight = weight


def agreements(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[dict[str, Any]]:
    """Of each rounding the share of places where its first choice is the model's, on greedy text, and the share of
    drafts that verification would keep, the mean of sum(min(p, q)), on text sampled at `TEMPERATURE`.

    All of a text is computed with rounded weights, the prompt too, of which a draft reads the target's keys and values.
    """
    greedy = continued(model, prompts, num_tokens, do_sample=False)
    torch.manual_seed(0)
    sampled = continued(model, prompts, num_tokens, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0)
    first = [one.probs(model, 1.0).argmax(dim=-1) for one in greedy]
    own = [one.probs(model, TEMPERATURE) for one in sampled]
    rows = []
    for name in ROUNDINGS:
        with rounded(model, name):
            right = [one.probs(model, 1.0).argmax(dim=-1) == ids for one, ids in zip(greedy, first, strict=True)]
            drafts = (one.probs(model, TEMPERATURE) for one in sampled)
            kept = [torch.minimum(draft, probs).sum(dim=-1) for draft, probs in zip(drafts, own, strict=True)]
        shares = {"greedy": float(torch.cat(right).float().mean()), "sampled": float(torch.cat(kept).mean())}
        rows.append({"bits": name, **shares})
    return rows


def shuffle_units(model: Any) -> None:
    """Puts the hidden units of a Llama model, and those within its MLPs, in another order. It computes what it did, but
    weights that were rounded in groups once no longer lie in these groups.
    """
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randperm(model.config.hidden_size, generator=draw)
    inner = torch.randperm(model.config.intermediate_size, generator=draw)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    with torch.no_grad():
        for one in [embedding, *(() if tied else (head,))]:
            one.weight.copy_(one.weight[:, hidden])
        for norm in (one for one in model.modules() if type(one).__name__.endswith("RMSNorm")):
            norm.weight.copy_(norm.weight[hidden])
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for one in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                one.weight.copy_(one.weight[:, hidden])
            for one in (attention.o_proj, mlp.down_proj):
                one.weight.copy_(one.weight[hidden])
            for one in (mlp.gate_proj, mlp.up_proj):
                one.weight.copy_(one.weight[inner])
            mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, inner])


def forms_on(device: torch.device) -> Forms:
    """Ways to keep a weight for products on this device, by bits; as it is in the form that the engine would take."""
    layouts = WeightLayouts(device)
    forms: Forms = {"as it is": lambda weight, bias: layouts.linear([weight], bias), "8": Int8Linear, "4": Int4Linear}
    if device.type == "cuda":
        del forms["8"]  # torch's kernel for it is a CPU's
    return forms


@torch.inference_mode()
def products(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device, seconds_of: SecondsOf | None = None
) -> list[dict[str, Any]]:
    """Microseconds of a product of one row with a matrix (outputs, inputs), and of five, by form."""
    rows, seconds_of = [], seconds_of or Stopwatch(device)
    for num_outputs, num_inputs in shapes:
        weight = torch.randn((num_outputs, num_inputs), device=device).to(dtype)
        count = max(1, min(64, _PASS_BYTES // weight.nbytes))
        for bits, make in forms_on(device).items():
            linears = [make(weight.clone(), None) for _ in range(count)]
            works = [
                _each(linears, torch.randn((num_rows, num_inputs), device=device).to(dtype)) for num_rows in (1, 5)
            ]
            one, five = (1e6 * seconds / count for seconds in seconds_of(works))
            row = {"shape": f"{num_outputs}x{num_inputs}", "dtype": str(dtype).removeprefix("torch."), "bits": bits}
            rows.append({**row, "us": one, "us_of_five": five})
    return rows


def _each(linears: Sequence[Any], x: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        for linear in linears:
            linear(x)

    return work


def shapes_of(config: Any) -> list[tuple[int, int]]:
    """(outputs, inputs) of a Llama model's fused products and of its output embedding."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return [
        (queries + 2 * keys, hidden),
        (hidden, queries),
        (2 * inner, hidden),
        (hidden, inner),
        (config.vocab_size, hidden),
    ]


def _check_shapes(model: Any) -> None:
    """Raises: ValueError for a model whose products torch's operator does not take, or whose units are not known."""
    if type(model).__name__ != "LlamaForCausalLM":
        raise ValueError(f"--model: must be a Llama model, got {type(model).__name__}")
    for num_outputs, num_inputs in shapes_of(model.config):
        if num_outputs % 16 or num_inputs % GROUP:
            raise ValueError(
                f"--model: its products must have a multiple of 16 outputs and of {GROUP} inputs, got {num_outputs} "
                f"and {num_inputs}"
            )


def table(record: dict[str, Any]) -> str:
    """What `main` says."""
    rows = [
        (f"{one['weights']}, {one['bits']} bits", f"{one['greedy']:.1%}", f"{one['sampled']:.1%}")
        for one in record["agreements"]
    ]
    costs = [
        (f"{one['shape']}, {one['dtype']}", one["bits"], f"{one['us']:.0f}", f"{one['us_of_five']:.0f}")
        for one in record["products"]
    ]
    header = ("draft", "right, greedy", f"kept, temperature {TEMPERATURE}")
    return (
        f"{markdown_table(header, rows)}\n"
        f"{markdown_table(('product', 'bits', 'microseconds, one row', 'five rows'), costs)}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    parser = OneLineParser(prog="python -m studies.fewer_bits", description=__doc__)
    parser.add_argument("--model", required=True, help="a Llama model: a folder, or a name on the Hugging Face Hub")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL")
    parser.add_argument("--num-prompts", type=int, default=40, help="the first so many")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--out", type=Path, help="file for the numbers, as JSON")
    arguments = parser.parse_args(given)
    return run_command("studies.fewer_bits", lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    check_least(arguments, num_prompts=1, new_tokens=1, threads=1)
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    record = facts(shlex.join(["python", "-m", "studies.fewer_bits", *argv])) | {"num_threads": arguments.threads}
    model = LayerSkipModel.from_pretrained(arguments.model, dtype="float32")
    _check_shapes(model.model)
    of_file = read_prompts(arguments.prompts)[: arguments.num_prompts]
    prompts = [encode_prompt(one, model, room=arguments.new_tokens) for one in of_file]
    found = []
    for weights in ("as they are", "in another order"):
        if weights == "in another order":
            shuffle_units(model.model)
        found += [{"weights": weights, **one} for one in agreements(model.model, prompts, arguments.new_tokens)]
    timed = [
        one
        for dtype in (torch.float32, torch.bfloat16)
        for one in products(shapes_of(model.model.config), dtype, model.device)
    ]
    record |= {"num_prompts": len(prompts), "agreements": found, "products": timed}
    say(table(record))
    if arguments.out is not None:
        write_json(arguments.out, record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
