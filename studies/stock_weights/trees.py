"""How many tokens a round of trained weights gives as a chain, with siblings and as a confidence-ordered tree.

The tree is that of EAGLE-2 (2406.16858): the likeliest paths of each depth are drafted on, and of all drafted tokens
the likeliest are verified, whatever their depth. It is drafted here at every place of the target's own texts and only
counted: nothing of it is decoded or timed. Both are what would be decoded, as draft and target choose with the same
random numbers; a drawn token's likelihood is the softmax of twice the score that decides.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from layerskip.command_line.cli import check_least, quiet_libraries, run_command
from layerskip.config.decode_config import write_atomically
from layerskip.config.sampling_params import SamplingParams
from layerskip.drafters.draft_weights import describe_weights
from layerskip.drafters.eagle_head import EagleHead, load_eagle, rotated
from layerskip.machine.host import git_commit
from layerskip.model import LayerSkipModel
from layerskip.prompts import encode_prompt, read_prompts
from layerskip.rounds.sampling import Sampler, seeded_sampler
from studies.stock_weights.draft_heads import states_of
from studies.stock_weights.head_figures import continuations, subject_parser

PROG = "studies.stock_weights.trees"
HERE = Path(__file__).resolve().parent
REGIMES = {
    "greedy": SamplingParams(),
    "t0.7": SamplingParams(do_sample=True, temperature=0.7, top_k=0),
    "t1": SamplingParams(do_sample=True, temperature=1.0, top_k=0),
}
ROWS = (4, 6, 8, 12, 16, 24, 32, 60)
"""Draft tokens of one verification."""
DEPTH, WIDTH = 8, 10
"""Of a tree, as deep as chains are here: paths drafted on at each depth, and tokens tried behind each of them."""


@dataclass
class _Node:
    token: int
    parent: int
    depth: int
    score: float
    """Log-likelihood of its path."""
    rank: int
    """Among what stands behind its parent, the best being 0."""


@dataclass(frozen=True)
class Round:
    """What the drafts of one place hold of the target's own next tokens."""

    ranks: tuple[int, ...]
    """Of each token of the target's path that was drafted: among what stands behind its parent."""
    places: dict[int, tuple[int, ...]]
    """By the depth that a tree may have, of each such token: how many drafted tokens are likelier."""


class TreeDrafts:
    """Drafts trees by an `EagleHead`. Cost: a layer over up to `WIDTH` rows a depth, and the output embedding."""

    def __init__(self, model: LayerSkipModel, head: EagleHead) -> None:
        self._head, self._model = head, model
        target: Any = model.model
        self._embedding = target.get_input_embeddings().weight
        self._unembedding = target.get_output_embeddings().weight

    def rounds(self, ids: Sequence[int], num_prompt: int, sampler: Sampler) -> Iterator[Round]:
        """One for each place of a text whose next `DEPTH` tokens are known."""
        head, text = self._head, torch.tensor(ids)
        states = head.join(states_of(self._model, ids, head.shape.aux_layers))
        count = len(ids) - 1
        x = head.enter(self._embedding[text[1:]], states[:-1])
        cache = _Keys(head)
        known = cache.run(x, torch.arange(count), torch.ones(count, count, dtype=torch.bool).tril())
        for last in range(num_prompt - 1, len(ids) - 1 - DEPTH):
            yield self._round(cache.until(last + 1), known[last : last + 1], last, ids[last + 2 :], sampler)

    def _round(self, cache: _Keys, state: torch.Tensor, last: int, own: Sequence[int], sampler: Sampler) -> Round:
        """last: position of the last state of the target's; own: the target's tokens from the first drafted one on."""
        nodes = self._behind(state, [-1], [0.0], 1, last + 2, sampler)
        beam, rows, states, start = list(range(len(nodes))), dict[int, int](), {-1: state}, last + 1
        for depth in range(2, DEPTH + 1):
            beam = sorted(beam, key=lambda i: -nodes[i].score)[:WIDTH]
            visible = torch.zeros(len(beam), cache.length + len(beam), dtype=torch.bool)
            visible[:, :start] = True
            for row, i in enumerate(beam):
                rows[i] = cache.length + row
                while i >= 0:
                    visible[row, rows[i]] = True
                    i = nodes[i].parent
            tokens = torch.tensor([nodes[i].token for i in beam])
            entered = self._head.enter(self._embedding[tokens], torch.cat([states[nodes[i].parent] for i in beam]))
            x = cache.run(entered, torch.full((len(beam),), last + depth - 1), visible)
            states |= {i: x[row : row + 1] for row, i in enumerate(beam)}
            first = len(nodes)
            nodes += self._behind(x, beam, [nodes[i].score for i in beam], depth, last + 1 + depth, sampler)
            beam = list(range(first, len(nodes)))
        return _round_of(nodes, own)

    def _behind(
        self, x: torch.Tensor, parents: Sequence[int], scores: Sequence[float], depth: int, place: int, sampler: Sampler
    ) -> list[_Node]:
        logits = sampler.shape(F.linear(self._head.norm(x), self._unembedding), [0] * place)
        likely = logits.log_softmax(-1)
        if not sampler.greedy:
            noise = sampler.noise(place, 1, logits.shape[-1], logits.device)
            likely = (2.0 * (likely - noise.log())).log_softmax(-1)
        best = likely.topk(WIDTH)
        return [
            _Node(token, parent, depth, score + own, rank)
            for parent, score, tokens, values in zip(
                parents, scores, best.indices.tolist(), best.values.tolist(), strict=True
            )
            for rank, (token, own) in enumerate(zip(tokens, values, strict=True))
        ]


class _Keys:
    """Keys and values (heads, T, head_dim) of one layer."""

    def __init__(self, head: EagleHead, keys: torch.Tensor | None = None, values: torch.Tensor | None = None) -> None:
        self._head = head
        empty = torch.empty(head.shape.num_key_value_heads, 0, head.shape.head_dim)
        self._keys, self._values = (empty if one is None else one for one in (keys, values))

    @property
    def length(self) -> int:
        return self._keys.shape[1]

    def until(self, stop: int) -> _Keys:
        """The first ones, to be gone on from."""
        return _Keys(self._head, self._keys[:, :stop], self._values[:, :stop])

    def run(self, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """The layer over rows (R, hidden); visible: (R, T + R), of the keys before and their own."""
        head, attention = self._head, self._head.layer.self_attn
        normed = head.layer.input_layernorm(x)
        query, key, value = (
            part(normed).unflatten(-1, (-1, head.shape.head_dim)).transpose(0, 1)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin = head.rotary(x[None], positions[None])
        query, key = (rotated(one, cos, sin) for one in (query, key))
        self._keys, self._values = torch.cat([self._keys, key], dim=1), torch.cat([self._values, value], dim=1)
        seen = F.scaled_dot_product_attention(
            query[None], self._keys[None], self._values[None], attn_mask=visible, enable_gqa=True
        )
        x = x + attention.o_proj(seen[0].transpose(0, 1).flatten(-2))
        out: torch.Tensor = x + head.layer.mlp(head.layer.post_attention_layernorm(x))
        return out


def _round_of(nodes: Sequence[_Node], own: Sequence[int]) -> Round:
    path: list[int] = []
    at = {(one.parent, one.token): i for i, one in enumerate(nodes)}
    for token in own[:DEPTH]:
        found = at.get((path[-1] if path else -1, token))
        if found is None:
            break
        path.append(found)
    places = {}
    for deepest in range(1, DEPTH + 1):
        scores = torch.tensor([one.score for one in nodes if one.depth <= deepest])
        within = [i for i in path if nodes[i].depth <= deepest]
        places[deepest] = tuple(int((scores > nodes[i].score).sum()) for i in within)
    return Round(tuple(nodes[i].rank for i in path), places)


def tokens_a_round(rounds: Sequence[Round]) -> dict[str, dict[int, float]]:
    """Of the best chain, the best chain with siblings and the best tree of so many rows: tokens a round, the target's
    own one included."""

    def mean(counts: Iterator[int]) -> float:
        return round(1.0 + sum(counts) / len(rounds), 3)

    found: dict[str, dict[int, float]] = {"chain": {}, "siblings": {}, "tree": {}}
    for rows in ROWS:
        chains = [mean(_chained(one, gamma, 0) for one in rounds) for gamma in range(1, min(rows, DEPTH) + 1)]
        beside = [
            mean(_chained(one, gamma, rows // gamma - 1) for one in rounds) for gamma in range(1, min(rows, DEPTH) + 1)
        ]
        trees = [mean(sum(at < rows for at in one.places[depth]) for one in rounds) for depth in range(1, DEPTH + 1)]
        for name, best in (("chain", chains), ("siblings", beside), ("tree", trees)):
            found[name][rows] = max(best)
    return found


def _chained(one: Round, gamma: int, siblings: int) -> int:
    """Accepted tokens of a chain: right ones, and a sibling in the place of the first wrong one."""
    right = next((i for i, rank in enumerate(one.ranks[:gamma]) if rank), min(gamma, len(one.ranks)))
    return right + (right < min(gamma, len(one.ranks)) and one.ranks[right] <= siblings)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = subject_parser(PROG, __doc__)
    parser.add_argument("--num-prompts", type=int, default=12, help="of them")
    arguments = parser.parse_args(given)
    return run_command(PROG, lambda: _run(arguments, given))


@torch.no_grad()
def _run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    check_least(arguments, num_prompts=1, new_tokens=DEPTH + 2)
    quiet_libraries()
    torch.set_num_threads(1)  # small steps, which threads only hold up
    model = LayerSkipModel.from_pretrained(arguments.model, dtype="float32", engine="eager", looks_for_config=False)
    head = load_eagle(describe_weights(arguments.eagle), model.model, model.weights_fingerprint())
    drafts, regimes = TreeDrafts(model, head), {}
    read = read_prompts(arguments.prompts)[: arguments.num_prompts]
    prompts = [encode_prompt(one, model, room=arguments.new_tokens) for one in read]
    for name, params in REGIMES.items():
        rounds: list[Round] = []
        for text in continuations(model, prompts, params, arguments.new_tokens, 1):
            sampler = seeded_sampler(params, 0, model.device)
            sampler.begin(text.num_prompt)
            rounds += drafts.rounds(text.ids, text.num_prompt, sampler)
        counted = tokens_a_round(rounds)
        regimes[name] = {"num_rounds": len(rounds), "tokens_a_round": counted}
        for way, found in counted.items():
            shown = ", ".join(f"{rows}: {tokens:.2f}" for rows, tokens in found.items())
            sys.stdout.write(f"{name} {way}: tokens a round by draft tokens verified {shown}\n")
    result = {"command": shlex.join(["python", "-m", PROG, *given]), "commit": git_commit(HERE), "regimes": regimes}
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
