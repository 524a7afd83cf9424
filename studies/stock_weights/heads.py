"""python -m studies.stock_weights.heads: would Medusa's or Hydra's heads draft better than the one-layer EAGLE head?

K heads on the target's last hidden state are trained on the frozen target. Head i says the token i + 1 places after the
last emitted one. All heads of `medusa` see the state alone, those of `medusa_token` the last emitted token too, and a
head of `hydra` besides it the tokens that the heads before it proposed. Written down are, for them and for trained
EAGLE weights, acceptance by position on the target's own text, the time of a draft, and the speedup that follows.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerskip.command_line.cli import check_least, quiet_libraries, run_command
from layerskip.config.decode_config import DecodeConfig, write_atomically
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.skip_mask import SkipMask
from layerskip.drafters.draft_weights import describe_weights
from layerskip.drafters.eagle.head import load_eagle
from layerskip.machine.host import cpu_name, git_commit
from layerskip.model import LayerSkipModel
from layerskip.prompts import encode_prompt, read_prompts
from layerskip.training.data import DataOptions, make_sequences
from studies.eagle.make_weights import training_files
from studies.stock_weights.draft_heads import KINDS, Ends, Heads, KnownTexts, train
from studies.stock_weights.head_figures import (
    Acceptance,
    acceptance,
    best_speedup,
    continuations,
    eagle_rollouts,
    head_rollouts,
    step_seconds,
    subject_parser,
)

PROG = "studies.stock_weights.heads"
HERE = Path(__file__).resolve().parent
REGIMES = {"greedy": SamplingParams(), "t0.7": SamplingParams(do_sample=True, temperature=0.7, top_k=0)}
_TIMED_AFTER = 100
"""Tokens of a text after which steps are timed."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = subject_parser(PROG, __doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", help="what to train on, as of layerskip.train [what EAGLE was trained on]")
    add("--minutes", type=float, default=10.0, help="of training, each kind")
    add("--tokens", type=int, default=800_000, help="to train on at most")
    add("--heads", type=int, default=5, help="of each kind, and most draft tokens")
    add("--seeds", type=int, default=2, help="sampled continuations of a prompt")
    add("--repeats", type=int, default=60, help="of a timing")
    add("--keep", type=Path, help="folder for the trained heads, which are not trained again where it has them")
    arguments = parser.parse_args(given)
    return run_command(PROG, lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    check_least(arguments, tokens=1, heads=1, new_tokens=1, seeds=1, repeats=1)
    quiet_libraries()
    torch.set_num_threads(1)  # of which the time is taken
    model = LayerSkipModel.from_pretrained(arguments.model, engine="fused", looks_for_config=False)
    model.model.requires_grad_(False)  # noqa: FBT003
    weights, count = describe_weights(arguments.eagle), arguments.heads
    eagle = load_eagle(weights, model.model, model.weights_fingerprint())
    if eagle.shape.aux_layers:
        raise ValueError(
            "--eagle: must read the last state alone, as the heads do (--aux-layers with nothing after it), got "
            f"{list(eagle.shape.aux_layers)}"
        )
    model.check_config(
        DecodeConfig(drafter="eagle", skip_mask=SkipMask.none(model.num_layers), gamma=1, draft_weights=weights)
    )
    prompts = [encode_prompt(one, model, room=arguments.new_tokens) for one in read_prompts(arguments.prompts)]
    trained, training = _trained(model, arguments)
    drafts: dict[str, Any] = {"eagle": weights, **trained}
    rollouts = {"eagle": eagle_rollouts(eagle, count), **{name: head_rollouts(one) for name, one in trained.items()}}
    regimes = {}
    for regime, params in REGIMES.items():
        texts = continuations(model, prompts, params, arguments.new_tokens, arguments.seeds)
        seconds = step_seconds(model, texts[0].ids[:_TIMED_AFTER], drafts, count, params, arguments.repeats)
        found = {name: acceptance(texts, model, rollouts[name], params) for name in drafts}
        rows = {name: row_of(found[name], seconds[name], seconds["verify"]) for name in drafts}
        regimes[regime] = {"num_texts": len(texts), "verify_s": _rounded(seconds["verify"], 6), "drafters": rows}
        for name, row in rows.items():
            sys.stdout.write(
                f"{regime} {name}: accepted {row['accepted']}, draft of a step {row['draft_cost']}; "
                f"speedup {row['speedup']:.3f} at gamma {row['gamma']}, "
                f"coupled {row['speedup_coupled']:.3f} at {row['gamma_coupled']}\n"
            )
    result = {
        "command": shlex.join(["python", "-m", PROG, *given]),
        "commit": git_commit(HERE),
        "cpu": cpu_name(),
        "training": training,
        "regimes": regimes,
    }
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
    return 0


def _trained(model: LayerSkipModel, arguments: argparse.Namespace) -> tuple[dict[str, Heads], dict[str, Any]]:
    """Heads of each kind, and how they were trained; taken from --keep where they are there."""
    ends, count, keep = Ends(model), arguments.heads, arguments.keep
    trained: dict[str, Heads] = {}
    facts: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        heads = Heads(kind, count, model.model.config.hidden_size, ends.norm.weight)
        file = None if keep is None else keep / f"{kind}.pt"
        if file is not None and file.is_file():
            state = torch.load(file, weights_only=True)
        else:
            if "known" not in facts:
                facts["known"] = _known_texts(model, arguments)
            steps, losses = train(heads, facts["known"], ends, 60 * arguments.minutes)
            num_parameters = sum(one.numel() for one in heads.parameters())
            own = {"steps": steps, "seconds": 60 * arguments.minutes, "tokens": len(facts["known"].ids)}
            own |= {"parameters": num_parameters, "loss_by_tenth": _rounded(losses, 3)}
            state = {"heads": heads.state_dict(), "facts": own}
            if file is not None:
                keep.mkdir(parents=True, exist_ok=True)
                torch.save(state, file)
        heads.load_state_dict(state["heads"])
        trained[kind] = heads.eval().requires_grad_(False)  # noqa: FBT003
        facts[kind] = state["facts"]
    facts.pop("known", None)
    return trained, facts


def _known_texts(model: LayerSkipModel, arguments: argparse.Namespace) -> KnownTexts:
    training = make_sequences(
        model, arguments.data or training_files(), arguments.keep or HERE / ".work", DataOptions(), _tell
    ).training
    data = [one.ids for one in training]
    order = np.random.default_rng(0).permutation(len(data))
    stop = np.searchsorted(np.cumsum([len(data[i]) for i in order]), arguments.tokens, "right")
    return KnownTexts.of(model, [data[i] for i in order[: max(1, int(stop))]], arguments.heads)


def row_of(found: Acceptance, draft_s: Sequence[float], verify_s: Sequence[float]) -> dict[str, Any]:
    """What a drafter is worth."""
    speedup, gamma = best_speedup(found.chained, draft_s, verify_s)
    speedup_coupled, gamma_coupled = best_speedup(found.coupled, draft_s, verify_s)
    return {
        "accepted": _rounded(found.chained, 4),
        "accepted_coupled": _rounded(found.coupled, 4),
        "draft_cost": _rounded([one / verify_s[0] for one in draft_s], 3),
        "speedup": round(speedup, 4),
        "gamma": gamma,
        "speedup_coupled": round(speedup_coupled, 4),
        "gamma_coupled": gamma_coupled,
    }


def _rounded(values: Sequence[float], digits: int) -> list[float]:
    return [round(one, digits) for one in values]


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
