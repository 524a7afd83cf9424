"""Texts and readings of teacher forcing, and what every way to run it shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from layerskip.analysis.teacher_forcing.by_weights import Chains, WeightsForcing
from layerskip.analysis.teacher_forcing.rows import MOST_RANK, ForcedText, RowGeometry
from layerskip.analysis.teacher_forcing.trees import TreeReadings
from layerskip.config.decode_config import DraftedBy, DraftWeights
from layerskip.config.skip_mask import SkipMask
from layerskip.rounds.sampling import SamplingParams, choose, chosen_probability, rank_of, seeded_sampler

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class DraftReadings:
    """One mask on P texts of up to T continuation tokens; arrays (D + 1, P, T), zero beyond a text's end.

    Row (d, k) is a draft step whose input is continuation token k, so what it says of token k + 1, in a round that has
    drafted d tokens before it: those positions hold the draft's own keys and values, earlier ones the target's. The
    last d stands for all later ones too.
    """

    accepted: Floats
    """1 where the drafted token is the text's, else 0; 0 at a text's last row, whose next token is unknown."""
    confidence: Floats
    """Top probability of the draft's distribution: what `draft_threshold` looks at."""
    choices: Ints
    """The token that the draft proposes."""
    ranks: Bytes | None = None
    """How many tokens the draft holds better than the text's, 255 standing for all that are more: the siblings of a
    wrong draft have the text's token where there are as many as that. None where it was not kept."""

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        ranks = 0 if self.ranks is None else self.ranks.nbytes
        return self.accepted.nbytes + self.confidence.nbytes + self.choices.nbytes + ranks

    def select(self, texts: Sequence[int]) -> DraftReadings:
        """The readings of the texts at these places."""
        chosen = list(texts)
        ranks = None if self.ranks is None else self.ranks[:, chosen]
        return DraftReadings(self.accepted[:, chosen], self.confidence[:, chosen], self.choices[:, chosen], ranks)


@dataclass(frozen=True)
class WrongDraft:
    """A draft token that the target does not say, after which the draft goes on until it is unsure or out of room."""

    text: int
    row: int
    """Index of the continuation token that it was drafted after."""
    drafted: int
    """Tokens that its round had drafted before it, all of them right; at most `row`."""
    token: int
    room: int
    """Most tokens that may be drafted after it, at least 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.drafted <= self.row:
            raise ValueError(f"drafted: must be from 0 to the row, {self.row}, got {self.drafted}")
        if self.room < 1:
            raise ValueError(f"room: must be at least 1, got {self.room}")


class TeacherForcing(ABC):
    """The draft under any mask at all positions of fixed texts at once.

    A live draft step attends to the *target's* keys and values of all positions before its round and to the draft's
    own since. `keys` says whether the readings do too (`target`), up to the depth asked for, or whether the draft's own
    keys and values stand in throughout the continuation (`own`), which is an approximation.
    """

    keys: str
    by_weights: WeightsForcing | None = None
    """The same for trained weights."""

    def __init__(self, texts: Sequence[ForcedText], device: torch.device, sampling: SamplingParams | None) -> None:
        """sampling: how the continuations were chosen, and so would drafts be; greedily without it."""
        if not texts:
            raise ValueError("texts: must hold at least one text, got none")
        self.texts = tuple(texts)
        self._device = device
        params = sampling or SamplingParams()
        self._samplers = [seeded_sampler(params, one.seed, device) for one in self.texts]
        for sampler, text in zip(self._samplers, self.texts, strict=True):
            sampler.begin(len(text.prompt_ids))
        self.lengths = np.array([len(text.continuation_ids) for text in texts])
        """Continuation tokens per text, (P,)."""
        self._continuations = [torch.tensor(text.continuation_ids, device=device) for text in texts]
        self.target_probs: Floats = np.zeros(self.shape, dtype=np.float32)
        """The target's probability of each continuation token, (P, T): what `target_threshold` looks at."""

    @property
    def shape(self) -> tuple[int, int]:
        """(P, T)."""
        return len(self.texts), int(self.lengths.max())

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it holds, at most: the target's keys and values, the noise of sampled texts, and what is kept from
        one reading to the next."""

    @property
    def _noise_bytes(self) -> int:
        return sum(sampler.nbytes for sampler in self._samplers)

    @abstractmethod
    def logits(self, mask: SkipMask, rows: Sequence[RowGeometry]) -> Iterator[torch.Tensor]:
        """Per text the draft's logits (R_p, V) at the rows given for it. `keys="target"` only."""

    @abstractmethod
    def draft_logits(
        self, mask: SkipMask, depth: int = 0, texts: Sequence[int] | None = None
    ) -> Iterator[torch.Tensor]:
        """Per text the draft's logits (D + 1, T_p, V), row (d, k) after continuation token k, d tokens into a round.

        D is `depth`, or 0 where the draft's own keys stand in. `texts`: places of those wanted, in ascending order; all
        without it.
        """

    @torch.inference_mode()
    def read(self, drafted_by: DraftedBy, depth: int = 0, texts: Sequence[int] | None = None) -> DraftReadings:
        """Does the draft propose the target's token, and how sure is it?

        `texts`: places of the texts to read, ascending; the arrays hold these alone. All without it.
        Cost: at most depth + 1 draft forwards over all continuation tokens of these texts; of trained weights, which
        are always read some drafts deep, as many layers over these tokens.
        """
        readings = []
        places = range(len(self.texts)) if texts is None else texts
        if isinstance(drafted_by, SkipMask):
            found = self.draft_logits(drafted_by, depth, texts)
        else:
            proposed = [self._by_weights.proposals(drafted_by, i, depth, self._samplers[i]) for i in places]
            if whole := [one for one in proposed if one is not None]:
                return self._collect(whole)
            found = (self._by_weights.logits(drafted_by, i, depth) for i in places)
        for i, logits in zip(places, found, strict=True):
            text, ids = self.texts[i], self._continuations[i]
            context, rest = [*text.prompt_ids, text.continuation_ids[0]], ids[1:]
            shaped = torch.stack([self._samplers[i].shape(level, context, rest) for level in logits])
            tokens = 1 + torch.arange(len(ids))
            noise = self._noise(i, shaped, tokens)
            chosen, top = _chosen(shaped, noise)
            right = chosen[:, :-1] == rest
            rank = rank_of(shaped[:, :-1], None if noise is None else noise[:-1], rest.expand(right.shape))
            known = torch.stack([right.double(), rank.clamp(max=MOST_RANK).double()])
            # Ids are exact in float64, and one transfer serves all.
            readings.append(torch.cat([F.pad(known, (0, 1)), torch.stack([top.double(), chosen.double()])]))
        return self._collect(readings)

    @torch.inference_mode()
    def read_trees(self, weights: DraftWeights, depth: int, texts: Sequence[int] | None = None) -> TreeReadings:
        """The same of weights that draft trees, up to `depth` tokens deep and of their `tree_tokens` or fewer."""
        places = range(len(self.texts)) if texts is None else texts
        found = [self._by_weights.trees(weights, i, depth, self._samplers[i]) for i in places]
        return TreeReadings.join(found, self.shape[1])

    def _noise(self, i: int, shaped: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """(R, V): what decides the continuation tokens `rows` (R,) of one text, the one after the last included; None
        where it is greedy."""
        if self._samplers[i].greedy:
            return None
        start, count = len(self.texts[i].prompt_ids), int(rows.max()) + 1
        return self._samplers[i].noise(start, count, shaped.shape[-1], shaped.device)[rows]

    def _collect(self, readings: Sequence[torch.Tensor]) -> DraftReadings:
        """One array for texts of different lengths, from (4, D + 1, T_p) each."""
        out = np.zeros((4, readings[0].shape[1], len(readings), self.shape[1]))
        for i, one in enumerate(readings):
            out[:, :, i, : one.shape[2]] = one.cpu().numpy()
        right, rank, top, chosen = out
        return DraftReadings(
            right.astype(np.float32), top.astype(np.float32), chosen.astype(np.int64), rank.astype(np.uint8)
        )

    @torch.inference_mode()
    def overrun(self, drafted_by: DraftedBy, wrong: Sequence[WrongDraft], threshold: float) -> list[int]:
        """How many tokens drafting adds after each wrong one before its confidence falls below `threshold`.

        Each goes on from its round, of which it sees the draft's own keys and values, one token at a time, all of them
        side by side. Cost: as many draft forwards over these rounds' tokens as the longest of them has after the wrong
        one. With `keys="own"` all the room is taken to be used.
        """
        if not isinstance(drafted_by, SkipMask):
            return self._overrun_by_weights(drafted_by, wrong, threshold)
        mask = drafted_by
        if self.keys != "target":
            return [one.room for one in wrong]
        rounds = [self.texts[one.text].continuation_ids[one.row - one.drafted : one.row + 1] for one in wrong]
        tokens = [[*begun, one.token] for begun, one in zip(rounds, wrong, strict=True)]
        added = [0] * len(wrong)
        going = list(range(len(wrong)))
        while going:
            rows, places = self._chain_rows(wrong, tokens, going)
            found: dict[int, tuple[int, float]] = {}
            for place, logits in zip(places, self.logits(mask, rows), strict=True):
                if place:
                    i, last = wrong[place[0][0]].text, logits[[row for _, row in place]]
                    chains = [chain for chain, _ in place]
                    shaped = self._shape_chains(i, last, [(wrong[c], tokens[c]) for c in chains])
                    rows_after = [wrong[c].row - wrong[c].drafted + len(tokens[c]) for c in chains]
                    chosen, top = _chosen(shaped, self._noise(i, shaped, torch.tensor(rows_after)))
                    for chain, token, sure in zip(chains, chosen.tolist(), top.tolist(), strict=True):
                        found[chain] = (token, sure)
            for chain, (token, _) in found.items():
                tokens[chain].append(token)
                added[chain] += 1
            going = [c for c in going if found[c][1] >= threshold and added[c] < wrong[c].room]
        return added

    @property
    def _by_weights(self) -> WeightsForcing:
        if self.by_weights is None:
            raise ValueError("draft_weights: this forcing was made without an engine to read them on")
        return self.by_weights

    def _overrun_by_weights(self, weights: DraftWeights, wrong: Sequence[WrongDraft], threshold: float) -> list[int]:
        added = [0] * len(wrong)
        for i in sorted({one.text for one in wrong}):
            own = [place for place, one in enumerate(wrong) if one.text == i]
            rounds = [(wrong[p].row - wrong[p].drafted, wrong[p].drafted + 1 + wrong[p].room) for p in own]
            counts = self._by_weights.proposed_after(weights, i, rounds, threshold, self._samplers[i])
            if counts is not None:
                for place, count in zip(own, counts, strict=True):
                    added[place] = max(0, count - wrong[place].drafted - 1)
                continue
            room = max(most for _, most in rounds)
            with self._by_weights.chains(weights, i, room) as chains:
                for place in sorted(own, key=lambda one: wrong[one].drafted - wrong[one].row):
                    added[place] = self._go_on(chains, wrong[place], threshold)
        return added

    def _go_on(self, chains: Chains, wrong: WrongDraft, threshold: float) -> int:
        """`overrun` of one, by trained weights."""
        i, text, start = wrong.text, self.texts[wrong.text], wrong.row - wrong.drafted
        sampler = self._samplers[i]

        def choose_next(logits: torch.Tensor, drafted: Sequence[int]) -> tuple[int, float]:
            seen = [*text.prompt_ids, *text.continuation_ids[: start + 1], *drafted]
            shaped = sampler.shape(logits, seen)
            chosen, top = _chosen(shaped, self._noise(i, shaped, torch.tensor([start + 1 + len(drafted)])))
            return int(chosen), float(top)

        begun = [*text.continuation_ids[start + 1 : wrong.row + 1], wrong.token]
        return chains.go_on(begun, start, wrong.room, choose_next, threshold)

    def _shape_chains(
        self, i: int, logits: torch.Tensor, chains: Sequence[tuple[WrongDraft, Sequence[int]]]
    ) -> torch.Tensor:
        """(C, V): logits (C, V) after what each chain's round has drafted, shaped."""
        sampler, text = self._samplers[i], self.texts[i]
        if not sampler.reads_text:
            return sampler.shape(logits, ())
        rows = []
        for row, (wrong, drafted) in zip(logits, chains, strict=True):
            before = text.continuation_ids[: wrong.row - wrong.drafted]
            rows.append(sampler.shape(row.unsqueeze(0), [*text.prompt_ids, *before, *drafted]))
        return torch.cat(rows)

    def _chain_rows(
        self, wrong: Sequence[WrongDraft], tokens: Sequence[Sequence[int]], going: Sequence[int]
    ) -> tuple[list[RowGeometry], list[list[tuple[int, int]]]]:
        """Per text the rows of its unfinished chains, and (chain, place of its last row)."""
        rows, places = [], []
        for i, text in enumerate(self.texts):
            ids: list[int] = []
            positions: list[int] = []
            depths: list[int] = []
            rounds: list[int] = []
            place = []
            for chain in (c for c in going if wrong[c].text == i):
                count = len(tokens[chain])
                start = len(text.prompt_ids) + wrong[chain].row - wrong[chain].drafted
                ids += tokens[chain]
                positions += range(start, start + count)
                depths += range(count)
                rounds += [chain] * count
                place.append((chain, len(ids) - 1))
            rows.append(RowGeometry.from_lists(ids, positions, depths, rounds, self._device))
            places.append(place)
        return rows, places

    def _note_target(self, i: int, logits: torch.Tensor) -> None:
        """Fill `target_probs` of one text from the target's logits (T_p + 1, V) or more rows."""
        ids = self._continuations[i]
        shaped = self._samplers[i].shape(logits[: len(ids)], self.texts[i].prompt_ids, ids[:-1])
        self.target_probs[i, : len(ids)] = chosen_probability(shaped, ids).cpu().numpy()


def _chosen(shaped: torch.Tensor, noise: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens chosen from shaped logits (..., R, V) of one text by noise (R, V), and the top probabilities; (..., R)
    both."""
    best = shaped.max(dim=-1)
    top = (best.values - shaped.logsumexp(dim=-1)).exp()
    return (best.indices if noise is None else choose(shaped, noise)), top
