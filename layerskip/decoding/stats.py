"""DecodeStats: the counters and times of one decoding run and the ratios derived from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

_TIMES = (
    "prefill_s",
    "decode_s",
    "draft_s",
    "verify_s",
    "target_only_s",
    "round_s_by_drafted",
    "lookup_round_s_by_drafted",
    "token_s",
)


@dataclass
class DecodeStats:
    """What one `generate` did.

    Before any cut at end-of-text or the length limit: emitted = 1 + accepted + rounds + target-only steps (the first
    token comes from the prompt's own forward). `num_cut` tokens of those were computed and not returned.

    A sibling is a token of another branch than the draft's. One that was accepted counts as accepted at the position of
    the draft token in whose place it stands, and what follows the last of them as the round's bonus token. Siblings
    that were not are counted nowhere but in `num_siblings`, so `acceptance_rate` stays the share of drafted positions
    at which the target's token was found. Of a tree the draft is its likeliest path among the deepest.
    """

    num_prompt_tokens: int = 0
    num_cached: int = 0
    """Of the prompt's tokens, those that an earlier text in a `PrefixCache` had too and that were not computed."""
    num_emitted: int = 0
    """Tokens returned, prompt excluded."""
    num_cut: int = 0
    """Tokens verified in the last round and dropped because the text ended inside it."""
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_siblings: int = 0
    """Verified beside the drafted tokens."""
    num_sibling_hits: int = 0
    """Of the accepted tokens, those that were siblings: the last that a round accepted, of a tree perhaps several."""
    num_recovered: int = 0
    num_bonus: int = 0
    num_target_only: int = 0
    num_lookup_rounds: int = 0
    """Of the rounds, those whose draft tokens were looked up."""
    num_looked_up: int = 0
    """Of the drafted tokens, those that were looked up."""
    num_looked_up_accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    """How often a round drafted a token at position 0..gamma-1."""
    accepted_by_position: list[int] = field(default_factory=list)
    rounds_by_drafted: list[int] = field(default_factory=list)
    """How many rounds drafted 1..gamma tokens, all of them computed."""
    lookup_rounds_by_drafted: list[int] = field(default_factory=list)
    """How many rounds drafted 1..gamma tokens, all of them looked up."""
    prefill_s: float = 0.0
    """Prompt forward, up to and including the first token."""
    decode_s: float = 0.0
    """From the first token to the last."""
    draft_s: float = 0.0
    """Share of decode_s spent drafting. Exact on a CPU; on a GPU the time until the work is launched, and 0 where an
    engine runs whole rounds."""
    verify_s: float = 0.0
    target_only_s: float = 0.0
    round_s_by_drafted: list[float] = field(default_factory=list)
    """Share of decode_s of the rounds in `rounds_by_drafted`: drafting, verification and what lies between."""
    lookup_round_s_by_drafted: list[float] = field(default_factory=list)
    """The same of `lookup_rounds_by_drafted`."""
    token_s: list[float] = field(default_factory=list)
    """Share of decode_s of each token after the first; tokens of one round share its seconds evenly."""

    def make_room(self, gamma: int) -> None:
        """For rounds of up to `gamma` draft tokens."""
        for name in ("drafted_by_position", "accepted_by_position", "rounds_by_drafted", "lookup_rounds_by_drafted"):
            setattr(self, name, [0] * gamma)
        self.round_s_by_drafted, self.lookup_round_s_by_drafted = [0.0] * gamma, [0.0] * gamma

    def count_round(
        self, num_drafted: int, num_accepted: int, *, looked_up: bool, num_siblings: int = 0, num_hits: int = 0
    ) -> None:
        """A round that drafted so many tokens, looked up or computed. num_hits: siblings among the accepted."""
        self.num_rounds += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_siblings += num_siblings
        self.num_sibling_hits += num_hits
        # After a sibling nothing was drafted, so nothing is wrong there.
        is_bonus = num_hits > 0 or num_accepted == num_drafted
        self.num_bonus += is_bonus
        self.num_recovered += not is_bonus
        if looked_up:
            self.num_lookup_rounds += 1
            self.num_looked_up += num_drafted
            self.num_looked_up_accepted += num_accepted
        for i in range(num_drafted):
            self.drafted_by_position[i] += 1
            self.accepted_by_position[i] += i < num_accepted
        (self.lookup_rounds_by_drafted if looked_up else self.rounds_by_drafted)[num_drafted - 1] += 1

    def count_seconds(self, num_drafted: int, seconds: float, *, looked_up: bool) -> None:
        """The time that a round took."""
        (self.lookup_round_s_by_drafted if looked_up else self.round_s_by_drafted)[num_drafted - 1] += seconds

    def add_step(self, seconds: float, num_tokens: int) -> None:
        """Count the seconds of a step after the prompt's own, which emitted so many tokens."""
        self.decode_s += seconds
        self.token_s += [seconds / num_tokens] * num_tokens

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a round emits on average, so 1.0 means no help; None without a round."""
        return (self.num_accepted + self.num_rounds) / self.num_rounds if self.num_rounds else None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.prefill_s

    @property
    def tokens_per_s(self) -> float | None:
        """(emitted - 1) / decode seconds, prefill apart; cut tokens are not counted. None below two tokens."""
        return (self.num_emitted - 1) / self.decode_s if self.num_emitted > 1 and self.decode_s > 0 else None

    @property
    def end_to_end_tokens_per_s(self) -> float | None:
        """Emitted / (prefill + decode) seconds."""
        total = self.prefill_s + self.decode_s
        return self.num_emitted / total if total > 0 else None

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first."""
        rate = self.tokens_per_s
        return 1000 / rate if rate else None

    def counters(self) -> dict[str, object]:
        """The counters alone: what was done, whatever the clock said."""
        return {name: value for name, value in asdict(self).items() if name not in _TIMES}

    def to_dict(self) -> dict[str, object]:
        """Counters and derived ratios as plain JSON values; without `token_s`, which is as long as the text."""
        derived = ("acceptance_rate", "mean_accepted_length", "ttft_s", "tpot_ms", "end_to_end_tokens_per_s")
        values = asdict(self) | {name: getattr(self, name) for name in derived}
        del values["token_s"]
        return values
