"""What a draft of heads or of EAGLE weights is worth: acceptance by position, seconds of a draft, speedup of both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from layerskip.analysis.timed_steps import HostSteps, Step, TextEnd
from layerskip.command_line.cli import OneLineParser
from layerskip.config.decode_config import DecodeConfig, DraftWeights
from layerskip.config.sampling_params import SamplingParams
from layerskip.drafters.eagle.head import EagleHead
from layerskip.model import LayerSkipModel
from layerskip.rounds.sampling import Sampler, seeded_sampler
from layerskip.training.data import Text
from studies.stock_weights.draft_heads import Ends, Heads, LeanHeads, states_of

_WARM = 8
"""Forwards before the first timing."""


@dataclass(frozen=True)
class Acceptance:
    """By position in a round: that it and all before it are accepted."""

    chained: list[float]
    """By speculative rejection sampling in its usual form; greedily, that all are the target's tokens."""
    coupled: list[float]
    """By this project's sampler, where draft and target draw with the same noise."""


def subject_parser(prog: str, doc: str) -> OneLineParser:
    """The flags of what figures are of. prog: the module; doc: its docstring."""
    parser = OneLineParser(prog=f"python -m {prog}", description=doc.splitlines()[0])
    add, folder = parser.add_argument, Path(__file__).resolve().parent
    add("--model", default=str(folder.parent / "stock" / "model"), help="the stock twin of the demo model")
    add("--eagle", default=str(folder / "eagle"), help="trained EAGLE weights for it")
    add("--prompts", type=Path, default=folder.parent / "eagle" / "held_out.jsonl", help="whose texts are gone over")
    add("--new-tokens", type=int, default=64, help="of a continuation")
    add("--out", type=Path, help="file for the numbers, as JSON")
    return parser


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
            found.append(Text((*ids, *out.ids), len(ids)))
    return found


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
        first, embedded = text.given - 1, ends.embed(ids[1:])
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

    They are this thread's own, which do not count what else the machine does. drafts: `Heads` or `DraftWeights` by
    name. Each step comes after one of the other sort, as in decoding; all are interleaved.
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


def _seconds_of(step: Step, end: TextEnd, sampler: Sampler, vocab_size: int) -> float:
    step.place(end)
    place = len(end.text_ids) + 1
    sampler.begin(place)
    if not sampler.greedy:  # as decoding leaves it: what the round before rejected has drawn these
        sampler.noise(place, step.num_verified + 1, vocab_size, torch.device("cpu"))
    begin = time.thread_time()
    step.run(end)
    return time.thread_time() - begin
