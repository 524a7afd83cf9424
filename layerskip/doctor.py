"""python -m layerskip.doctor MODEL: does this model work here, what can be skipped, is the output identical?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command
from layerskip.command_line.command_model import add_device_map_argument, add_quantization_argument, device_map_of
from layerskip.config.decode_config import ENGINE_NAMES, DecodeConfig
from layerskip.config.lookup_settings import SuffixLookup
from layerskip.config.skip_mask import SkipMask
from layerskip.config.usual_lookups import lookup_alone, lookup_else

if TYPE_CHECKING:
    from layerskip.model import LayerSkipModel

PROG = "layerskip.doctor"
_PROMPT = "def read(path):\n    "


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    name: str
    passed: bool
    detail: str


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    parser.add_argument("model", help="Hugging Face id or folder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_device_map_argument(parser)
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add_quantization_argument(parser)
    parser.add_argument("--engine", default="auto", choices=ENGINE_NAMES, help="how a forward is executed")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to decode per check")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's repository run its own code")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    check_least(arguments, tokens=1)
    device_map = device_map_of(arguments)
    quiet_libraries()
    from layerskip.model import LayerSkipModel

    model = LayerSkipModel.from_pretrained(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        engine=arguments.engine,
        device_map=device_map,
        trust_remote_code=arguments.trust_remote_code,
        looks_for_config=False,  # it looks at the model; a config of other weights must not keep it from that
    )
    facts = describe(model)
    checks = examine(model, num_tokens=arguments.tokens)
    healthy = all(check.passed for check in checks)
    proof = _proof(model, arguments)
    if arguments.json:
        record = {"works": healthy, **facts, "checks": [asdict(check) for check in checks], "proof": proof}
        sys.stdout.write(json.dumps(record) + "\n")
    else:
        _print_report(facts, checks, healthy=healthy)
        if proof is not None:
            sys.stdout.write(f"in {facts['dtype']} ties pass; the proof of the code is identity in float32: {proof}\n")
    return 0 if healthy else 1


def _proof(model: LayerSkipModel, given: argparse.Namespace) -> str | None:
    """The command that proves the code, where this run lets ties pass; None in float32."""
    from layerskip.analysis.identity import float32_command
    from layerskip.huggingface.rounding import is_reduced

    if not is_reduced(model.dtype):
        return None
    return float32_command(
        given.model,
        device=given.device,
        trust_remote_code=given.trust_remote_code,
        quantization=given.quantization,
    )


def describe(model: LayerSkipModel) -> dict[str, Any]:
    """What is known of the model, as plain values."""
    adapter = model.adapter
    apart = adapter.sublayers_skippable
    return {
        "model_class": model.model_class,
        "num_layers": model.num_layers,
        "decoder_stack": adapter.stack_path,
        "device": str(model.placement),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "engine": f"{model.engine_name} ({model.engine_reason})",
        "max_positions": model.max_positions,
        "sliding_window_layers": sum(window is not None for window in adapter.windows),
        "layers_with_a_state": len(adapter.recurrent_layers),
        "skippable": "attention, MLP and whole layers" if all(apart) else "whole layers only",
        "whole_layers_only": [i for i, each in enumerate(apart) if not each],
        "eos_token_ids": sorted(model.eos_token_ids),
        "weights_fingerprint": model.weights_fingerprint(),
    }


def examine(model: LayerSkipModel, *, num_tokens: int) -> list[Check]:
    """Decode a few tokens under several masks and lookups and compare with `model.generate`; compare draft logits two
    ways.

    Cost: about a dozen generations of `num_tokens`.
    """
    prompt_ids = model.encode(_PROMPT) if model.tokenizer is not None else [1, 2, 3, 4]
    if model.max_positions is not None:
        num_tokens = min(num_tokens, model.max_positions - len(prompt_ids))
    reference = huggingface_greedy(model, prompt_ids, num_tokens)
    masks = _masks(model)
    configs = [("plain decoding", DecodeConfig.plain(model.num_layers))]
    configs += [(f"{name}, gamma {g}", DecodeConfig(skip_mask=m, gamma=g)) for name, m in masks for g in (1, 4)]
    checks = [_check_identity(model, name, prompt_ids, reference, config=config) for name, config in configs]
    checks += _check_lookups(model, prompt_ids, reference)
    checks += _check_own_layer(model, prompt_ids, reference)
    return checks + [_check_draft_logits(model, name, mask, prompt_ids) for name, mask in masks]


def huggingface_greedy(model: LayerSkipModel, prompt_ids: list[int], num_tokens: int) -> list[int]:
    """Greedy output of Hugging Face's own `generate`, prompt excluded."""
    import torch

    ids = torch.tensor([prompt_ids], device=model.device)
    hf_model: Any = model.model
    output = hf_model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, num_beams=1
    )
    emitted: list[int] = output[0, len(prompt_ids) :].tolist()
    return emitted


def _masks(model: LayerSkipModel) -> list[tuple[str, SkipMask]]:
    num_layers = model.num_layers
    masks = [
        ("no layer skipped", SkipMask.none(num_layers)),
        (f"exit at layer {max(1, num_layers // 2)}", SkipMask.early_exit(num_layers, max(1, num_layers // 2))),
        ("layer 0 skipped", SkipMask.from_layers(num_layers, [0])),
    ]
    apart = [i for i, whole in enumerate(model.whole_layers_only) if not whole]
    if apart:
        masks.append(("every second attention skipped", SkipMask.from_sublayers(num_layers, attention=apart[::2])))
        masks.append(("every second MLP skipped", SkipMask.from_sublayers(num_layers, mlp=apart[1::2])))
    return masks


def _check_lookups(model: LayerSkipModel, prompt_ids: list[int], reference: list[int]) -> list[Check]:
    """In the text itself with layer skipping behind it, and in an earlier text that is right in most places."""
    from layerskip.drafters import TextStore

    earlier = list(reference)
    earlier[4::5] = earlier[3 : len(earlier) - 1 : 5]  # so that some drafts are rejected
    store = TextStore(len(prompt_ids) + len(earlier))
    store.add([*prompt_ids, *earlier])
    lookup = SuffixLookup(min_match=1, factor=4.0)
    half = DecodeConfig(skip_mask=SkipMask.early_exit(model.num_layers, max(1, model.num_layers // 2)), gamma=4)
    hybrid = lookup_else(half, lookup, 2)
    return [
        _check_identity(model, "lookup in the text, else half the layers", prompt_ids, reference, config=hybrid),
        _check_identity(
            model,
            "lookup in an earlier text, gamma 8",
            prompt_ids,
            reference,
            config=lookup_alone(model.num_layers, lookup, 8),
            text_store=store,
        ),
    ]


def _check_own_layer(model: LayerSkipModel, prompt_ids: list[int], reference: list[int]) -> list[Check]:
    """By the multi-token-prediction layer of the model's checkpoint, where the config tells of one; that the checkpoint
    lacks it is no fault of the model."""
    if model.mtp_refusal is not None:
        return []
    name = "its own multi-token-prediction layer, gamma 3"
    try:
        weights = model.mtp_weights()
    except ValueError as error:
        return [Check(name, passed=True, detail=f"not there: {error}")]
    config = DecodeConfig(drafter="mtp", skip_mask=SkipMask.none(model.num_layers), gamma=3, draft_weights=weights)
    return [_check_identity(model, name, prompt_ids, reference, config=config)]


def _check_identity(
    model: LayerSkipModel, name: str, prompt_ids: list[int], reference: list[int], **decoding: Any
) -> Check:
    """decoding: what `generate` is told besides the prompt and the length."""
    from layerskip.analysis.identity import check_identity

    output = model.generate(prompt_ids, max_new_tokens=max(1, len(reference)), do_sample=False, **decoding)
    report = check_identity(model, prompt_ids, output.ids, reference)
    rate = output.stats.acceptance_rate
    accepted = f", acceptance {rate:.2f}" if rate is not None else ""
    if output.stats.num_looked_up:
        accepted += f", {output.stats.num_looked_up_accepted} of {output.stats.num_looked_up} looked-up tokens accepted"
    if report.identical:
        detail = f"{len(reference)} of {len(reference)} tokens identical to generate{accepted}"
    elif report.is_tie:
        gap = f"gap {report.logit_gap:.2g}, rounding explains {report.tolerance:.2g}"
        detail = f"differs at token {report.first_difference} by a logit tie ({gap}){accepted}"
    else:
        detail = f"differs from generate at token {report.first_difference} (logit gap {report.logit_gap})"
    return Check(name, report.lossless, detail)


def _check_draft_logits(model: LayerSkipModel, name: str, mask: SkipMask, prompt_ids: list[int]) -> Check:
    """A wrong draft is silent (its tokens are rejected): so compare its logits one token at a time and in one go."""
    import torch

    from layerskip.huggingface.rounding import logit_difference

    adapter = model.adapter
    ids = torch.tensor(prompt_ids, device=model.device)
    with torch.inference_mode(), adapter.attached():
        at_once = adapter.forward(ids, adapter.new_cache(len(ids)), mask, num_logits=len(ids))
        cache = adapter.new_cache(len(ids))
        steps = [adapter.forward(ids[i : i + 1], cache, mask, num_logits=1) for i in range(len(ids))]
        difference, tolerance = logit_difference(torch.cat(steps), at_once)
    detail = f"relative difference {difference:.1g} (rounding explains {tolerance:.1g})"
    return Check(f"draft logits, {name}", difference <= tolerance, detail)


def _print_report(facts: dict[str, Any], checks: list[Check], *, healthy: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        if name != "whole_layers_only" or value:
            table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    console.print()
    table = Table("", "check", "result", box=None, pad_edge=False)
    for check in checks:
        style = "green" if check.passed else "bold red"
        table.add_row(f"[{style}]{'ok' if check.passed else 'FAIL'}[/]", check.name, check.detail)
    console.print(table)
    console.print()
    console.print(
        "[green]works:[/] every output is the target's own"
        if healthy
        else "[bold red]does not work:[/] see the failed checks; please report them with the library versions"
    )


if __name__ == "__main__":
    sys.exit(main())
