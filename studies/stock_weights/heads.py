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
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerskip.analysis.timed_steps import HostSteps, Step, TextEnd
from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command
from layerskip.config.decode_config import DecodeConfig, DraftWeights, write_atomically
from layerskip.config.sampling_params import SamplingParams
from layerskip.config.skip_mask import SkipMask
from layerskip.drafters.draft_weights import describe_weights
from layerskip.drafters.eagle_head import EagleHead, load_eagle
from layerskip.machine.host import cpu_name, git_commit
from layerskip.model import LayerSkipModel
from layerskip.prompts import encode_prompt, read_prompts
from layerskip.rounds.sampling import seeded_sampler
from layerskip.training.data import DataOptions, make_sequences
from studies.eagle.make_weights import training_files
from studies.stock_weights.draft_heads import KINDS, Ends, Heads, KnownTexts, LeanHeads, states_of, train

PROG = "studies.stock_weights.heads"
HERE = Path(__file__).resolve().parent
REGIMES = {"greedy": SamplingParams(), "t0.7": SamplingParams(do_sample=True, temperature=0.7, top_k=0)}
_TIMED_AFTER, _WARM = 100, 8
"""Tokens of a text after which steps are timed, and forwards before the first of them."""


@dataclass(frozen=True)
class Text:
    """A prompt with the target's own continuation."""

    ids: list[int]
    num_prompt: int


@dataclass(frozen=True)
class Acceptance:
    """By position in a round: that it and all before it are accepted."""

    chained: list[float]
    """By speculative rejection sampling in its usual form; greedily, that all are the target's tokens."""
    coupled: list[float]
    """By this project's sampler, where draft and target draw with the same noise."""


@torch.no_grad()
def acceptance(
    texts: Sequence[Text], model: LayerSkipModel, rollouts: Callable[..., list[torch.Tensor]], params: SamplingParams
) -> Acceptance:
    """Over every place of the continuations where a whole round of drafts fits. Exact in expectation for texts that
    the target decoded with these params.

    rollouts: normed hidden states of each draft step, from the target's states (1, T, hidden) and the embeddings of
    the tokens after them (1, T + count - 1, hidden).
    """
    ends, temperature, found = Ends(model), params.temperature if params.do_sample else 0.0, []
    for text in texts:
        states = states_of(model, text.ids)
        ids, target = torch.tensor(text.ids), ends.target_logits(states)
        first, embedded = text.num_prompt - 1, ends.embed(ids[1:])
        steps = rollouts(states[None], embedded[None])
        num_places = len(ids) - 1 - len(steps) - first
        if num_places < 1:
            continue
        kept = torch.ones(2, num_places, dtype=torch.double)
        rows = []
        for i, hidden in enumerate(steps):
            own = slice(first + 1 + i, first + 1 + i + num_places)
            logits = ends.logits(hidden[0, first : first + num_places])
            now, coupled, onward = _accepted(target[own], logits, ids[1:][own], temperature)
            rows.append(torch.stack([kept[0] * now, kept[1] * coupled]))
            kept = kept * torch.stack([onward, coupled])
        found.append(torch.stack(rows))
    chained, coupled = torch.cat(found, dim=-1).mean(-1).unbind(1)
    return Acceptance(chained.tolist(), coupled.tolist())


def _accepted(
    target: torch.Tensor, draft: torch.Tensor, said: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(T,) each: probability that a draft token is accepted; that the coupled draft is the text's token; and of the
    first, what it is given that text's token, by which the rounds that go on are weighed."""
    if temperature == 0.0:
        agrees = (target.argmax(-1) == draft.argmax(-1)).double()
        return agrees, agrees, agrees
    p, q = ((one.double() / temperature).softmax(-1) for one in (target, draft))
    p_said, q_said = (one.gather(-1, said.unsqueeze(-1)) for one in (p, q))
    # The draws of one exponential noise agree on x with probability 1 / sum of max(p / p(x), q / q(x)).
    coupled = 1.0 / torch.maximum(p, q * (p_said / q_said)).sum(-1)
    return torch.minimum(p, q).sum(-1), coupled, (q_said / p_said).clamp(max=1.0)[:, 0]


def eagle_rollouts(head: EagleHead, count: int) -> Callable[..., list[torch.Tensor]]:
    """See `acceptance`, of trained EAGLE weights."""

    def run(states: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        steps = head.rollouts(states[:, :-1], embedded, count - 1)
        # Step i of a round at place t stands at t + i.
        return [head.norm(one[:, i:]) for i, one in enumerate(steps)]

    return run


def head_rollouts(heads: Heads) -> Callable[..., list[torch.Tensor]]:
    """See `acceptance`."""
    return lambda states, embedded: heads.rollouts(states[:, : embedded.shape[1] - heads.count + 1], embedded)


def best_speedup(accepted: Sequence[float], draft_s: Sequence[float], verify_s: Sequence[float]) -> tuple[float, int]:
    """(Speedup, gamma) of drafts accepted so by position; 1, 0 for none.

    draft_s: entry g - 1, a draft of g tokens; verify_s: entry g, a target forward over g draft tokens and one before.
    Nothing but the steps is counted, which flatters.
    """
    found = [(1.0, 0)]
    for gamma in range(1, len(accepted) + 1):
        emitted = 1.0 + sum(accepted[:gamma])
        found.append((emitted * verify_s[0] / (verify_s[gamma] + draft_s[gamma - 1]), gamma))
    return max(found)


@dataclass
class _HeadsStep:
    """A draft of heads, to be timed; see `Step`."""

    heads: LeanHeads
    engine: Any
    room: int
    num_verified: int = 0
    drafts_on: None = None

    def prepare(self, length: int) -> None:
        pass

    def place(self, end: TextEnd) -> None:
        self.engine.cache.rollback_to(len(end.text_ids))

    def run(self, end: TextEnd) -> None:
        self.heads.draft(self.engine.states[len(end.text_ids) - 1 :][:1], end.next_id, [*end.text_ids, end.next_id])


@torch.inference_mode()
def step_seconds(
    model: LayerSkipModel, text: Sequence[int], drafts: dict[str, Any], count: int, params: SamplingParams, repeats: int
) -> dict[str, list[float]]:
    """Median seconds after a text: "verify" of 0 to `count` draft tokens, and of each draft 1 to `count` tokens.

    drafts: `Heads` or `DraftWeights` by name. Each step comes after one of the other sort, as in decoding; all are
    interleaved.
    """
    engine: Any = model.engine
    sampler = seeded_sampler(params, 0, model.device)
    host = HostSteps(engine, sampler)
    steps: dict[str, list[Step]] = {"verify": [host.verification(1 + n) for n in range(count + 1)]}
    for name, one in drafts.items():
        if isinstance(one, DraftWeights):
            steps[name] = [host.draft(one, gamma, threshold=False) for gamma in range(1, count + 1)]
        else:
            lean = [LeanHeads(one, gamma, engine, sampler) for gamma in range(1, count + 1)]
            steps[name] = [_HeadsStep(heads, engine, count + 1) for heads in lean]
    forward, draft = steps["verify"][0], next(ones[0] for name, ones in steps.items() if name != "verify")
    seconds: dict[tuple[str, int], list[float]] = {(name, i): [] for name in steps for i in range(len(steps[name]))}
    ids = list(text)
    with engine.session(len(ids) + count + 1):
        engine.keep_states()
        for one in (step for ones in steps.values() for step in ones):
            one.prepare(len(ids))
        engine.keep_states()
        end = TextEnd(ids, int(engine.forward(torch.tensor(ids))[-1].argmax()))
        vocab_size = model.model.config.vocab_size
        for _ in range(_WARM):
            _seconds_of(forward, end, sampler, vocab_size)
        for _ in range(repeats):
            for (name, i), found in seconds.items():
                before = draft if name == "verify" and i else forward
                _seconds_of(before, end, sampler, vocab_size)
                found.append(_seconds_of(steps[name][i], end, sampler, vocab_size))
    return {name: [statistics.median(seconds[name, i]) for i in range(len(steps[name]))] for name in steps}


def _seconds_of(step: Step, end: TextEnd, sampler: Any, vocab_size: int) -> float:
    step.place(end)
    place = len(end.text_ids) + 1
    sampler.begin(place)
    if not sampler.greedy:  # as decoding leaves it: what the round before rejected has drawn these
        sampler.noise(place, step.num_verified + 1, vocab_size, torch.device("cpu"))
    begin = time.perf_counter()
    step.run(end)
    return time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default=str(HERE.parent / "stock" / "model"), help="the stock twin of the demo model")
    add("--eagle", default=str(HERE / "eagle"), help="trained EAGLE weights for it")
    add("--prompts", type=Path, default=HERE.parent / "eagle" / "held_out.jsonl", help="for acceptance")
    add("--data", type=Path, nargs="+", help="what to train on, as of layerskip.train [what EAGLE was trained on]")
    add("--minutes", type=float, default=10.0, help="of training, each kind")
    add("--tokens", type=int, default=800_000, help="to train on at most")
    add("--heads", type=int, default=5, help="of each kind, and most draft tokens")
    add("--new-tokens", type=int, default=64, help="of a continuation")
    add("--seeds", type=int, default=2, help="sampled continuations of a prompt")
    add("--repeats", type=int, default=60, help="of a timing")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--keep", type=Path, help="folder for the trained heads, which are not trained again where it has them")
    add("--out", type=Path, help="file for the numbers, as JSON")
    arguments = parser.parse_args(given)
    return run_command(PROG, lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    check_least(arguments, tokens=1, heads=1, new_tokens=1, seeds=1, repeats=1, threads=1)
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    model = LayerSkipModel.from_pretrained(arguments.model, engine="fused", looks_for_config=False)
    model.model.requires_grad_(False)  # noqa: FBT003
    weights, count = describe_weights(arguments.eagle), arguments.heads
    eagle = load_eagle(weights, model.model, model.weights_fingerprint())
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
    data = make_sequences(model, arguments.data or training_files(), DataOptions(), _tell).training
    order = np.random.default_rng(0).permutation(len(data))
    stop = np.searchsorted(np.cumsum([len(data[i]) for i in order]), arguments.tokens, "right")
    return KnownTexts.of(model, [data[i] for i in order[: max(1, int(stop))]], arguments.heads)


def continuations(
    model: LayerSkipModel, prompts: Sequence[Sequence[int]], params: SamplingParams, new_tokens: int, seeds: int
) -> list[Text]:
    """The target's own text after each prompt; sampled, one for each seed."""
    sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0} if params.do_sample else {}
    plain = DecodeConfig.plain(model.num_layers)
    found = []
    for seed in range(seeds if params.do_sample else 1):
        for ids in prompts:
            out = model.generate(ids, max_new_tokens=new_tokens, config=plain, seed=seed, **sampling)
            found.append(Text([*ids, *out.ids], len(ids)))
    return found


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
