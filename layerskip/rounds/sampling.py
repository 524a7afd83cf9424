"""Logits -> probabilities -> token: the one place where temperature, top-k, top-p, penalties and biases act."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from layerskip.config.sampling_params import SamplingParams as SamplingParams
from layerskip.rounds.grammar import GrammarState
from layerskip.rounds.likely_ids import check_possible, ids_at_least, is_large, likeliest_ids, shape_row
from layerskip.rounds.logprobs import TokenLogprobs, token_logprobs
from layerskip.rounds.penalties import LogitEdits, Penalties
from layerskip.rounds.rows import RowKernels, row_kernels


class Sampler:
    """Shapes logits and chooses tokens for one run; draft and target use the same one.

    A drawn token is decided by its place in the text: with the place's own exponential noise e, the token is the one
    with the largest probability / e. Whoever draws for a place, draft or target, uses the same noise, so a draft close
    to the target mostly says what the target will say, and the output does not depend on the draft at all: it is what
    `torch.multinomial` draws one token after another from the same generator, and so what `generate` samples; on a CPU
    up to which ids of a large vocabulary are left at the edge of `top_p`, see `shape_row`.
    Ref: Gumbel coupling, Daliri, Musco and Suresh 2024 (2408.07978).

    `generator` must live on the logits' device; None uses that device's default one, as `generate` does. Cost of a
    drawn token: the numbers of one row of the vocabulary, once for every place, and their memory until it is settled.
    """

    def __init__(
        self,
        params: SamplingParams,
        generator: torch.Generator | None = None,
        grammar: GrammarState | None = None,
        edits: LogitEdits | None = None,
        num_logprobs: int | None = None,
    ) -> None:
        """grammar: of the text, tokens that it does not allow are impossible; edits: other changes of logits; both of
        draft and target alike. num_logprobs: `logprobs` will be asked for, of so many of each place's likeliest."""
        self.params, self.grammar, self.edits, self.num_logprobs = params, grammar, edits, num_logprobs
        self.greedy = not params.do_sample
        self._noise = PlaceNoise(generator)
        self._start = 0
        """Tokens of the prompt."""
        self._penalties = Penalties(params) if params.penalises else None
        self._warpers = [] if self.greedy else _warpers(params)
        self._cuts = not self.greedy and bool(params.top_k or params.top_p < 1.0 or params.min_p)
        self._left: tuple[torch.Tensor | None, list[torch.Tensor]] = (None, [])
        """What was shaped last, and the possible ids of its rows."""

    def shape(self, logits: torch.Tensor, context: Sequence[int], drafted: torch.Tensor | None = None) -> torch.Tensor:
        """Penalised and warped float32 logits.

        Shapes: logits (T, V); row i follows `context` plus the first i tokens of `drafted` (T - 1,), so the penalty of
        a draft position sees the draft tokens before it. Returns (T, V) float32.
        Cost: one device sync with drafted tokens and a penalty or a grammar, else none.
        """
        return self._warped(self._by_text(logits.float(), context, drafted))

    @property
    def reads_text(self) -> bool:
        """Whether what is likely depends on the text or its request besides the model, for a penalty, a grammar or an
        edit."""
        return self._penalties is not None or self.grammar is not None or self.edits is not None

    @property
    def needs_host(self) -> bool:
        """Whether a round that the device makes in one piece would not do."""
        return self.reads_text or self.num_logprobs is not None

    def _by_text(self, scores: torch.Tensor, context: Sequence[int], drafted: torch.Tensor | None) -> torch.Tensor:
        if self.edits is not None:
            scores = self.edits.apply(scores, len(context) - self._start)
        if self._penalties is not None:
            scores = self._penalties.apply(scores, context, [] if drafted is None else drafted.tolist())
        return scores if self.grammar is None else self.grammar.allow(scores, context, drafted)

    def _warped(self, scores: torch.Tensor) -> torch.Tensor:
        if self._cuts and is_large(scores):
            shaped = torch.empty_like(scores)
            left = [shape_row(row, self.params, own) for row, own in zip(scores, shaped, strict=True)]
            self._left = (shaped, left)
            return shaped
        for warper in self._warpers:
            # The ids are not read by these warpers; the penalty is the only one that looks at the text.
            scores = warper(None, scores)
        return scores

    def logprobs(self, logits: torch.Tensor, ids: Sequence[int]) -> list[TokenLogprobs]:
        """Of tokens chosen by the first rows of logits (at least T, V), which are not shaped; none unless wanted."""
        return [] if self.num_logprobs is None else token_logprobs(logits, ids, self.num_logprobs)

    def begin(self, place: int) -> None:
        """A text of so many tokens is about to be continued."""
        self._noise.begin(place)
        self._start = place
        if self._penalties is not None:
            self._penalties.begin(place)
        if self.grammar is not None:
            self.grammar.begin(place)

    def choose(self, shaped: torch.Tensor, place: int) -> torch.Tensor:
        """The tokens at `place` and after it, (T,) int64, from shaped logits (T, V)."""
        if self.greedy:
            return choose(shaped, None)
        if is_large(shaped):
            return torch.cat([self._best(shaped, i, place, 1) for i in range(len(shaped))])
        return choose(shaped, self.noise(place, shaped.shape[0], shaped.shape[1], shaped.device))

    def _best(self, shaped: torch.Tensor, i: int, place: int, count: int) -> torch.Tensor:
        """(n,): of the i-th of rows (T, V), the first of which is at `place`, the `count` tokens that come first, in
        order, or as many as are possible."""
        row = shaped[i]
        if self.greedy:
            ids = likeliest_ids(row, count)
            scores = row[ids]
        else:
            noise = self._noise.row(place + i, row.shape[0], row.device)
            ids = self._left[1][i] if shaped is self._left[0] else _contenders(row, noise, count)
            scores = _scores(row[ids].unsqueeze(0), noise.at(ids))[0]
        return ids[scores.topk(min(count, len(ids))).indices]

    def choose_among(
        self, logits: torch.Tensor, context: Sequence[int], rows: torch.Tensor | slice, place: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(Shaped logits (1, n), the token at `place` (1,)) of logits (1, V) that are finite at these ids alone: the
        same as of all of them, up to rounding, in the time that so few take."""
        few = self._by_text(logits.float(), context, None)[:, rows] if self.reads_text else logits[:, rows]
        shaped = self._warped(few.float())
        noise = None if self.greedy else self._noise.row(place, logits.shape[1], logits.device).at(rows)
        found = choose(shaped, noise)
        return shaped, found if isinstance(rows, slice) else rows[found]

    def siblings(self, shaped: torch.Tensor, place: int, chosen: torch.Tensor, count: int) -> torch.Tensor:
        """(T, count): what `choose` would take next, in order, were the tokens `chosen` (T,) not there."""
        if not is_large(shaped):
            noise = None if self.greedy else self.noise(place, shaped.shape[0], shaped.shape[1], shaped.device)
            return next_best(shaped, noise, chosen, count)
        found = chosen.unsqueeze(1).repeat(1, count)
        for i, own in enumerate(chosen):
            best = self._best(shaped, i, place, count + 1)
            rest = best[best != own][:count]
            found[i, : len(rest)] = rest
        return found

    def likeliest(
        self, logits: torch.Tensor, places: Sequence[int], context: Callable[[int], Sequence[int]], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(R, count) both: of the tokens at each of these places those that a target close to this draft most likely
        chooses, best first: their log-likelihoods and their ids.

        Its choice is the best by a score, see `choose`. So they are a softmax of the draft's scores, the steeper the
        closer the draft is to the target; of drawn tokens in the scale of the logits before the temperature, in which
        the draft's errors are.

        logits: (R, V), not shaped; context: the tokens before the place of each row, asked for where it `reads_text`.
        """
        if not self.reads_text:
            scores = self.shape(logits, ())
        else:
            scores = torch.cat([self.shape(logits[i : i + 1], context(i)) for i in range(len(logits))])
        steepness = _STEEPNESS
        if not self.greedy:
            steepness *= self.params.temperature
            rows = {place: self.noise(place, 1, scores.shape[-1], scores.device) for place in set(places)}
            noise = torch.cat([rows[place] for place in places]) if len(rows) > 1 else rows[places[0]]
            scores = scores - noise.log()
        scores = steepness * scores
        best = scores.topk(count, dim=-1)
        return best.values - scores.logsumexp(dim=-1, keepdim=True), best.indices

    @property
    def nbytes(self) -> int:
        """Of the noise that it holds."""
        return self._noise.nbytes

    def noise(self, place: int, count: int, vocab_size: int, device: torch.device) -> torch.Tensor:
        """(count, vocab_size): what decides the tokens at `place` and after it."""
        return self._noise.rows(place, count, vocab_size, device)

    def settle(self, place: int) -> None:
        """The tokens before `place` are chosen for good; their noise is dropped."""
        self._noise.settle(place)
        if self._penalties is not None:
            self._penalties.settle(place)
        if self.grammar is not None:
            self.grammar.settle(place)

    def end(self, place: int) -> None:
        """The text ends before `place`: the generator goes back to where one token after another would have left it."""
        self._noise.end(place)


def seeded_sampler(params: SamplingParams, seed: int, device: torch.device) -> Sampler:
    """One that draws what `generate` draws with this seed on this device."""
    # Not every device has generators, and a greedy one needs none.
    return Sampler(params, torch.Generator(device=device).manual_seed(seed) if params.do_sample else None)


_STEEPNESS = 1.5
"""See `Sampler.likeliest`; at half and at double of it a tree holds fewer tokens (`studies/engine/trees.md`)."""


class PlaceNoise:
    """Exponential numbers with mean 1, a row for each place of a text, drawn in the order of the places."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generator = generator
        self._first = 0
        """Place of the first row held."""
        self._rows: list[_Row] = []
        self._states: list[torch.Tensor | None] = []
        """Of the generator before each row."""

    @property
    def nbytes(self) -> int:
        """Of the rows held."""
        return sum(row.nbytes for row in self._rows)

    def begin(self, place: int) -> None:
        """Rows from this place on are wanted; those of an earlier text are dropped."""
        self._first, self._rows, self._states = place, [], []

    def rows(self, place: int, count: int, vocab_size: int, device: torch.device) -> torch.Tensor:
        """(count, vocab_size). Raises: ValueError for a place that is settled."""
        return torch.cat([row.all() for row in self._held(place, count, vocab_size, device)])

    def row(self, place: int, vocab_size: int, device: torch.device) -> _Row:
        """A place's."""
        (row,) = self._held(place, 1, vocab_size, device)
        return row

    def _held(self, place: int, count: int, vocab_size: int, device: torch.device) -> list[_Row]:
        if place < self._first:
            raise ValueError(f"place: must be at least {self._first}, those before are settled, got {place}")
        generator = _generator_of(device) if self._generator is None else self._generator
        start = place - self._first
        while len(self._rows) < start + count:
            self._states.append(None if generator is None else generator.get_state())
            self._rows.append(_drawn_row(vocab_size, device, generator))
        return self._rows[start : start + count]

    def settle(self, place: int) -> None:
        """Rows before this place are not wanted any more."""
        num_done = min(max(0, place - self._first), len(self._rows))
        self._first += num_done
        del self._rows[:num_done], self._states[:num_done]

    def end(self, place: int) -> None:
        """Take back the rows from this place on, unless somebody else has drawn from the generator since."""
        self.settle(place)
        if self._rows:
            last = self._rows[-1]
            generator = _generator_of(last.device) if self._generator is None else self._generator
            if generator is not None and self._states[0] is not None:
                now = generator.get_state()
                generator.set_state(self._states[0])
                for _ in self._rows:
                    _drawn_row(last.count, last.device, generator)
                is_ours = torch.equal(generator.get_state(), now)
                generator.set_state(self._states[0] if is_ours else now)
        self.begin(place)


class _Row(Protocol):
    """What `exponential_` draws for a place, (1, V)."""

    count: int
    """V."""
    device: torch.device

    @property
    def nbytes(self) -> int: ...

    def all(self) -> torch.Tensor:
        """(1, V)."""

    def at(self, ids: torch.Tensor | slice) -> torch.Tensor:
        """(1, n)."""

    def below(self, exponent: float) -> torch.Tensor:
        """(n,) int64: the token ids whose numbers are smaller than e to this, and perhaps a few more."""


class _DrawnRow:
    """Drawn, and kept."""

    def __init__(self, count: int, device: torch.device, generator: torch.Generator | None) -> None:
        self.count, self.device = count, device
        self._drawn = torch.empty(1, count, device=device).exponential_(generator=generator)

    @property
    def nbytes(self) -> int:
        return self._drawn.nbytes

    def all(self) -> torch.Tensor:
        return self._drawn

    def at(self, ids: torch.Tensor | slice) -> torch.Tensor:
        return self._drawn[:, ids]

    def below(self, exponent: float) -> torch.Tensor:
        return (self._drawn[0] < _limit(exponent)).nonzero().squeeze(-1)


class _ForeseenRow:
    """The generator's state before they are drawn: on a CPU they are logarithms of uniform numbers, of which those that
    are wanted are computed where they are."""

    def __init__(self, count: int, generator: torch.Generator, kernels: RowKernels) -> None:
        self.count, self.device, self._kernels = count, torch.device("cpu"), kernels
        self._state = generator.get_state()
        after = self._state.clone()
        kernels.skip(after, count)
        generator.set_state(after)
        self._whole: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self._state.nbytes + (0 if self._whole is None else self._whole.nbytes)

    def all(self) -> torch.Tensor:
        if self._whole is None:
            self._whole = _logarithms(self._kernels.uniform(self._state, self.count)).unsqueeze(0)
        return self._whole

    def at(self, ids: torch.Tensor | slice) -> torch.Tensor:
        if isinstance(ids, slice):
            uniform = self._kernels.uniform(self._state, len(range(self.count)[: ids.stop]))[ids]
        else:
            uniform = self._kernels.uniform_at(self._state, ids)
        return _logarithms(uniform).unsqueeze(0)

    def below(self, exponent: float) -> torch.Tensor:
        uniform = self._kernels.uniform(self._state, self.count)
        return (uniform < -math.expm1(-_limit(exponent))).nonzero().squeeze(-1)


def _drawn_row(count: int, device: torch.device, generator: torch.Generator | None) -> _Row:
    kernels = row_kernels() if device.type == "cpu" and generator is not None and _are_logarithms() else None
    if kernels is None or generator is None:
        return _DrawnRow(count, device, generator)
    return _ForeseenRow(count, generator, kernels)


def _limit(exponent: float) -> float:
    return 1.001 * math.exp(min(exponent, _MOST_NOISE))


def _contenders(shaped: torch.Tensor, noise: _Row, count: int) -> torch.Tensor:
    """(n,): ids of a row (V,) that hold the `count` which are drawn first, as far as so many are possible: those that
    are likely, and those whose noise is so small that they come before them all the same."""
    least = float(shaped.max()) - _NATS
    ids = ids_at_least(shaped, least)
    check_possible(ids)
    scores = shaped[ids] - noise.at(ids)[0].log()
    last = float(scores.topk(count).values[-1]) if count <= len(ids) else -math.inf
    lucky = noise.below(least - last)
    own = shaped[lucky]
    return torch.cat([ids, lucky[(own < least) & (own > -math.inf)]])


_NATS = 8.0
"""That the logits of tokens lie within which are looked at first: of the others few are drawn."""
_MOST_NOISE = 10.0
"""Its logarithm, and more: of 53 bits no larger number is drawn."""


def _logarithms(uniform: torch.Tensor) -> torch.Tensor:
    """Exponential numbers from uniform ones in float64."""
    return uniform.neg().log1p_().neg_().float()


@cache
def _are_logarithms() -> bool:
    """Whether this torch draws exponential numbers so, which it promises nowhere."""
    first, second = (torch.Generator().manual_seed(1) for _ in range(2))
    drawn = torch.empty(1, 1 << 12).exponential_(generator=first)
    uniform = torch.empty(1, 1 << 12, dtype=torch.float64).uniform_(generator=second)
    return torch.equal(drawn, _logarithms(uniform)) and torch.equal(first.get_state(), second.get_state())


def choose(shaped: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """A token per row of shaped logits (T, V), (T,) int64: the likeliest, or by noise (T, V) a drawn one."""
    if noise is None:
        return shaped.max(dim=-1).indices
    return _scores(shaped, noise).argmax(dim=-1)


def next_best(shaped: torch.Tensor, noise: torch.Tensor | None, chosen: torch.Tensor, count: int) -> torch.Tensor:
    """(..., count) int64: the best of each row of shaped logits (..., V) after the one that was chosen (...), in order.

    Where fewer are possible at all, the chosen one stands in for those that are missing.
    """
    chosen = chosen.unsqueeze(-1)
    rest = _scores(shaped, noise).scatter(-1, chosen, float("-inf"))
    best = rest.topk(min(count, rest.shape[-1]), dim=-1)
    found = torch.where(best.values > _IMPOSSIBLE[noise is None], best.indices, chosen)
    return torch.cat([found, chosen.expand(*chosen.shape[:-1], count - found.shape[-1])], dim=-1)


def rank_of(shaped: torch.Tensor, noise: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    """(...) int64: how many tokens come before the given ones (...) in rows of shaped logits (..., V), the chosen one
    among them; V where a token is not possible at all. So the i-th of `next_best` has rank i, from 1 on."""
    scores = _scores(shaped, noise)
    own = scores.gather(-1, tokens.unsqueeze(-1))
    before = (scores > own).sum(dim=-1)
    return torch.where(own.squeeze(-1) > _IMPOSSIBLE[noise is None], before, scores.shape[-1])


_IMPOSSIBLE = (0.0, float("-inf"))
"""The score of a token that cannot be chosen, by whether choosing is greedy."""


def _scores(shaped: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """What decides, the larger the better."""
    return shaped if noise is None else shaped.softmax(dim=-1) / noise


def chosen_probability(shaped: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """(T,): the softmax probability of each chosen token (T,) in shaped logits (T, V)."""
    return (shaped.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - shaped.logsumexp(dim=-1)).exp()


def _generator_of(device: torch.device) -> torch.Generator | None:
    """What random numbers on this device come from where no generator is given; None where torch keeps it to itself."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator if device.type == "cpu" else None


def top_probability(logits: torch.Tensor) -> torch.Tensor:
    """(1,): the largest softmax probability of a row (1, V), which a `draft_threshold` looks at."""
    return (logits.max() - logits.logsumexp(-1)).exp()


def _warpers(params: SamplingParams) -> list[LogitsProcessor]:
    """In `generate`'s order."""
    warpers: list[LogitsProcessor] = []
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        warpers.append(TopKLogitsWarper(int(params.top_k)))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers
