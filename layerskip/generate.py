"""python -m layerskip.generate --config best.json --prompt TEXT: stream a continuation under a decode config."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerskip.analysis.repetition import NGRAM
from layerskip.command_line.by_hand import add_setting_arguments, setting_by_hand
from layerskip.command_line.cli import OneLineParser, check_least, run_command
from layerskip.command_line.command_model import (
    add_model_arguments,
    confirmed_words,
    load_model,
    max_new_tokens,
    read_config,
)
from layerskip.config.lossy_acceptance import lossy_label
from layerskip.config.sampling_params import asks_to_sample
from layerskip.config.sampling_regime import Sampling

if TYPE_CHECKING:
    from layerskip.command_line.compare import Comparison
    from layerskip.config.decode_config import DecodeConfig
    from layerskip.decoding.text_stream import TextStream
    from layerskip.model import GenerateOutput, LayerSkipModel
    from layerskip.rounds.grammar import Grammar

PROG = "layerskip.generate"
# Style beside colour, so that nothing is told by colour alone; all of them read on dark and on light backgrounds.
_STYLES = {
    "accepted": "green",
    "looked-up": "italic magenta",
    "recovered": "bold red underline",
    "bonus": "bold blue",
    "target-only": "",
}
_REJECTED = "dim strike"


def build_parser() -> OneLineParser:
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__)
    add_model_arguments(parser)
    add_setting_arguments(parser)
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--prompt", help="the prompt; - reads it from standard input")
    text.add_argument("--chat", help="a user message, put through the tokenizer's chat template")
    parser.add_argument(
        "--do-sample",
        action=argparse.BooleanOptionalAction,
        help="sample, or decode greedily [as --temperature and the like ask, else as the model's own defaults]",
    )
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--min-p", type=float)
    for name in ("repetition", "presence", "frequency"):
        parser.add_argument(f"--{name}-penalty", type=float)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="the output is JSON that keeps to the schema in this file"
    )
    parser.add_argument("--show-drafts", action="store_true", help="mark where every token came from")
    parser.add_argument("--compare", action="store_true", help="run plain decoding beside it; print both speeds")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs for --compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    config, by_hand = read_config(arguments), setting_by_hand(arguments)
    check_least(arguments, repeats=1)
    model = load_model(arguments, config, looks_for_config=by_hand is None)
    if by_hand is not None:
        model.config = by_hand(model.num_layers)
    prompt_ids = _prompt_ids(model, arguments)
    generation = _generation_arguments(arguments, model.config)
    if arguments.compare:
        from layerskip.command_line.compare import compare

        comparison = compare(model, prompt_ids, model.config, num_repeats=arguments.repeats, **generation)
        _print_comparison(model, comparison, arguments, _sampling(model, generation))
        return 0
    if arguments.json:
        stream = model.stream(prompt_ids, **generation)
        for _ in stream:
            pass
        _print_json(stream.output(), stream.config, _sampling(model, generation))
        return 0
    _stream(model, prompt_ids, generation, show_drafts=arguments.show_drafts)
    return 0


def _prompt_ids(model: LayerSkipModel, arguments: argparse.Namespace) -> list[int]:
    if arguments.chat is None:
        return model.encode(sys.stdin.read() if arguments.prompt == "-" else arguments.prompt)
    if getattr(model.tokenizer, "chat_template", None) is None:
        raise ValueError("--chat: this model's tokenizer has no chat template, use --prompt")
    messages = [{"role": "user", "content": arguments.chat}]
    encoded = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def _generation_arguments(arguments: argparse.Namespace, config: DecodeConfig) -> dict[str, Any]:
    do_sample = arguments.do_sample
    if do_sample is None:
        do_sample = asks_to_sample(arguments.temperature, arguments.top_p, arguments.top_k, arguments.min_p)
    return {
        "max_new_tokens": max_new_tokens(arguments, config),
        "do_sample": do_sample,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "repetition_penalty": arguments.repetition_penalty,
        "presence_penalty": arguments.presence_penalty,
        "frequency_penalty": arguments.frequency_penalty,
        "stop_strings": arguments.stop,
        "seed": arguments.seed,
        "continues_text": arguments.chat is None,
        "grammar": None if arguments.json_schema is None else _schema(arguments.json_schema),
    }


def _schema(file: Path) -> Grammar:
    from layerskip.rounds.grammar import Grammar

    try:
        return Grammar.json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--json-schema: {file}: {error}") from None


def _sampling(model: LayerSkipModel, generation: dict[str, Any]) -> Sampling:
    """How the text's tokens are chosen."""
    return Sampling.of(model.sampler(**generation).params)


def _stream(model: LayerSkipModel, prompt_ids: list[int], generation: dict[str, Any], *, show_drafts: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True, markup=False)
    stream = model.stream(prompt_ids, **generation)
    marked = MarkedText(model.tokenizer, stream.new_text()) if show_drafts else None
    for piece in stream:
        if marked is None:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        else:
            first = len(piece.ids) + piece.rejected_from
            marked.write(console, piece.ids, piece.origins, dict.fromkeys([first], piece.rejected))
    if marked is not None:
        marked.finish(console)
    sys.stdout.write("\n")
    sys.stdout.flush()
    _print_summary(stream.output(), show_legend=show_drafts)
    sys.stderr.write(
        "".join(f"{line}\n" for line in _setting_words(model.config, stream.config, _sampling(model, generation)))
    )


class MarkedText:
    """Prints tokens one by one, each in the style of its origin; on a terminal rejected drafts too, struck through."""

    def __init__(self, tokenizer: Any, text: TextStream) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._origin = "target-only"

    def write(self, console: Any, ids: list[int], origins: list[str], rejected: dict[int, list[int]]) -> None:
        """`rejected`: draft tokens by the place in `ids` of the token that stands for them."""
        for place, (token, origin) in enumerate(zip(ids, origins, strict=True)):
            if console.is_terminal and rejected.get(place):
                text = self._tokenizer.decode(rejected[place]).replace("\n", "⏎")
                console.print(text, style=_REJECTED, end="")
            self._origin = origin
            self._print(console, self._text.push([token]))

    def finish(self, console: Any) -> None:
        self._print(console, self._text.finish())

    def _print(self, console: Any, text: str) -> None:
        if text:
            console.print(text, style=_STYLES[self._origin], end="")


def _print_summary(output: GenerateOutput, *, show_legend: bool = False) -> None:
    """Figures go to stderr, so that stdout holds the text alone."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    if show_legend:
        legend = Text("tokens: ")
        for origin, style in _STYLES.items():
            if count := output.origins.count(origin):
                legend.append(f"{count} ").append(origin, style=style).append("  ")
        legend.append(f"{sum(map(len, output.rejected.values()))} ").append("rejected", style=_REJECTED)
        console.print(legend, soft_wrap=True)
    stats = output.stats
    rate, length = stats.tokens_per_s, stats.mean_accepted_length
    parts = [f"{stats.num_emitted} tokens ({output.finish_reason})"]
    parts += [f"{rate:.1f} tokens/s"] if rate else []
    if stats.acceptance_rate is not None:
        parts += [f"acceptance {stats.acceptance_rate:.2f}", f"mean accepted length {length:.2f}"]
    if stats.num_siblings:
        parts += [f"{stats.num_sibling_hits} siblings accepted of {stats.num_siblings}"]
    if stats.num_looked_up:
        found = f"{stats.num_looked_up_accepted} of {stats.num_looked_up} tokens accepted"
        parts += [f"looked up in {stats.num_lookup_rounds} of {stats.num_rounds} rounds: {found}"]
    console.print(", ".join(parts), soft_wrap=True)


def _print_comparison(
    model: LayerSkipModel, comparison: Comparison, arguments: argparse.Namespace, sampling: Sampling
) -> None:
    if arguments.json:
        _print_json(comparison.output, comparison.config, sampling, comparison)
        return
    if arguments.show_drafts:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True, markup=False)
        marked = MarkedText(model.tokenizer, comparison.stream.new_text())
        marked.write(console, comparison.output.ids, comparison.output.origins, comparison.output.rejected)
        marked.finish(console)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(comparison.output.text + "\n")
    sys.stdout.flush()
    _print_summary(comparison.output, show_legend=arguments.show_drafts)
    lines = ["too short to time"]
    if comparison.tokens_per_s is not None and not comparison.config.speculates:
        lines = [
            f"plain        {comparison.plain_tokens_per_s:8.1f} tokens/s",
            f"plain again  {comparison.tokens_per_s:8.1f} tokens/s   the setting is plain decoding",
        ]
    elif comparison.tokens_per_s is not None:
        lines = [
            f"plain        {comparison.plain_tokens_per_s:8.1f} tokens/s",
            f"speculative  {comparison.tokens_per_s:8.1f} tokens/s   speedup {comparison.speedup:.2f}x "
            f"(median of {arguments.repeats} pairs)",
            f"end to end, prompt included: {comparison.end_to_end_tokens_per_s:.1f} against "
            f"{comparison.plain_end_to_end_tokens_per_s:.1f} tokens/s, speedup {comparison.end_to_end_speedup:.2f}x",
        ]
    if comparison.repeated_ngram_share is not None:
        lines.append(f"repeated {NGRAM}-grams: {comparison.repeated_ngram_share:.0%} of the output's")
    lines.append(f"tokens identical: {_identity_words(comparison)}")
    lines += _setting_words(model.config, comparison.config, sampling)
    if confirmed := confirmed_words(comparison.config):
        tuned = comparison.config.sampling
        lines.append(f"confirmed by the search{'' if tuned in (None, sampling) else f' for {tuned.name}'}: {confirmed}")
    sys.stderr.write("\n".join(lines) + "\n")


def _setting_words(config: DecodeConfig, followed: DecodeConfig, sampling: Sampling) -> list[str]:
    """Whether what was followed is lossy, or says not to speculate; which of a config's settings it is, where that has
    several regimes; and whether it was tuned for text whose tokens are chosen in another way."""
    lines = [] if followed.lossy is None else [lossy_label(followed.lossy)]
    tuned = followed.sampling
    how = f"gamma {followed.gamma}" if followed.speculates else "plain decoding"
    how += f" ({' '.join(followed.reason.split())})" if followed.reason else ""
    if config.regimes is not None and tuned is not None:
        lines.append(f"regime {tuned.name} (of {', '.join(config.regime_names)}): {how}")
    elif not followed.speculates and followed.reason:
        lines.append(f"the config says: {how}")
    if tuned not in (None, sampling):
        lines.append(f"tuned for {tuned.name}, and this text is {sampling.name}: search for that, too")
    return lines


def _identity_words(comparison: Comparison) -> str:
    identity = comparison.identity
    if identity is None:
        return "not compared (drawn from a generator that goes on)"
    if identity.identical:
        return "yes" if comparison.config.lossy is None else "yes, though a lossy setting does not promise it"
    if comparison.config.lossy is not None:
        return f"no, from token {identity.first_difference} on: the setting is lossy"
    if identity.is_tie:
        return f"up to a logit tie at token {identity.first_difference} (gap {identity.logit_gap:.2g})"
    return f"NO, from token {identity.first_difference} on: please report this as a bug"


def _print_json(
    output: GenerateOutput, followed: DecodeConfig, sampling: Sampling, comparison: Comparison | None = None
) -> None:
    record: dict[str, Any] = {
        "text": output.text,
        "tokens": output.ids,
        "origins": output.origins,
        "finish_reason": output.finish_reason,
        "sampling": sampling.name,
        "regime": None if followed.sampling is None else followed.sampling.name,
        "lossy": None if followed.lossy is None else followed.lossy.model_dump(),
        "tokens_per_s": output.stats.tokens_per_s,
    }
    if comparison is not None:
        identity = comparison.identity
        record |= {
            "tokens_per_s": comparison.tokens_per_s,
            "end_to_end_tokens_per_s": comparison.end_to_end_tokens_per_s,
            "plain_tokens_per_s": comparison.plain_tokens_per_s,
            "speedup": comparison.speedup,
            "plain_end_to_end_tokens_per_s": comparison.plain_end_to_end_tokens_per_s,
            "end_to_end_speedup": comparison.end_to_end_speedup,
            "repeated_ngram_share": comparison.repeated_ngram_share,
            "identical": None if identity is None else identity.identical,
            "is_tie": None if identity is None else identity.is_tie,
        }
    record = output.stats.to_dict() | record
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
