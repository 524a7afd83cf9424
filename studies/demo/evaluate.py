"""What a checkpoint is worth as a demo: held-out loss, and the predicted speedup of draft masks on prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from studies.demo.recipe import Skip, run_layers, token_loss

MAX_GAMMA = 8
# Cost model of one token on a CPU, in target steps, as measured with this model on two cores: a draft step pays for
# the head and for what it keeps (attention and MLP count the same); a verify pays a little more than a target step.
HEAD_COST = 0.12
VERIFY_COST = 1.25


@dataclass(frozen=True)
class MaskScore:
    """One mask: its agreement with the target's greedy tokens, its draft cost, and its best predicted speedup."""

    mask: str
    acceptance: float
    cost: float
    gamma: int
    speedup: float


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, stream: torch.Tensor, *, window: int = 512, batch: int = 8) -> float:
    """Mean loss in nats a token of the full model over a token stream, in windows."""
    num_windows = (len(stream) - 1) // window
    total, count = 0.0, 0
    for first in range(0, num_windows, batch):
        rows = range(first, min(first + batch, num_windows))
        ids = torch.stack([stream[r * window : (r + 1) * window] for r in rows]).to(model.device)
        labels = torch.stack([stream[r * window + 1 : (r + 1) * window + 1] for r in rows]).to(model.device)
        hidden, _ = run_layers(model, ids, no_skip(model))
        total += float(token_loss(model, hidden, labels)) * len(rows)
        count += len(rows)
    return total / count


def no_skip(model: LlamaForCausalLM) -> list[tuple[bool, bool]]:
    """The mask that runs every sublayer."""
    return [(False, False)] * int(model.config.num_hidden_layers)


class MaskEvaluator:
    """Scores masks on the target's own greedy continuations, which are decoded once."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        prompts: Iterable[str],
        *,
        new_tokens: int = 64,
    ) -> None:
        encoded = tokenizer(list(prompts), return_tensors="pt", padding=True).to(model.device)
        self.model = model
        with torch.inference_mode():
            out = model.generate(**encoded, do_sample=False, min_new_tokens=new_tokens, max_new_tokens=new_tokens)
        # Right-pad again: with causal attention, rubbish on the right changes nothing on its left.
        lengths = encoded["attention_mask"].sum(1).tolist()
        self.starts = [int(n) for n in lengths]
        width = int(encoded["input_ids"].shape[1])
        rows = [row[width - n :] for row, n in zip(out, self.starts, strict=True)]
        self.ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=int(tokenizer.pad_token_id))
        self.new_tokens = new_tokens

    def score(self, name: str, skip: Skip) -> MaskScore:
        """Agreement of the mask with the target, and the best gamma by exact replay. Cost: one forward."""
        agreed = self._agreement(skip)
        kept = sum((not attention) + (not mlp) for attention, mlp in skip) / (2 * len(skip))
        cost = HEAD_COST + (1 - HEAD_COST) * kept
        best_gamma, best = 1, 0.0
        for gamma in range(1, MAX_GAMMA + 1):
            speedup = predicted_speedup(agreed, gamma, cost)
            if speedup > best:
                best_gamma, best = gamma, speedup
        rate = sum(sum(row) for row in agreed) / sum(len(row) for row in agreed)
        return MaskScore(name, round(rate, 4), round(cost, 3), best_gamma, round(best, 3))

    @torch.inference_mode()
    def _agreement(self, skip: Skip) -> list[list[bool]]:
        hidden, _ = run_layers(self.model, self.ids, skip)
        rows = []
        for row, start in enumerate(self.starts):
            span = hidden[row, start - 1 : start - 1 + self.new_tokens]
            predicted = self.model.lm_head(self.model.model.norm(span)).argmax(-1)
            rows.append((predicted == self.ids[row, start : start + self.new_tokens]).tolist())
        return rows


def predicted_speedup(agreed: list[list[bool]], gamma: int, cost: float) -> float:
    """Tokens per target step of speculative decoding, replayed over known agreements."""
    emitted, paid = 0, 0.0
    for row in agreed:
        position = 1  # the first token comes from the prefill
        while position < len(row):
            accepted = 0
            while accepted < gamma and position + accepted < len(row) and row[position + accepted]:
                accepted += 1
            step = min(accepted + 1, len(row) - position)
            emitted += step
            position += step
            paid += gamma * cost + VERIFY_COST
    return emitted / paid


def mask_family(num_layers: int) -> dict[str, list[tuple[bool, bool]]]:
    """Early exits, skipped interior blocks, alternating layers, and attention or MLP skipped alone."""
    on, off = (False, False), (True, True)
    masks = {f"exit {k}": [on] * k + [off] * (num_layers - k) for k in range(1, num_layers)}
    for length in range(2, num_layers - 1):
        for first in range(1, num_layers - length):
            masks[f"skip {first}..{first + length - 1}"] = [
                off if first <= i < first + length else on for i in range(num_layers)
            ]
    masks["alternating"] = [off if i % 2 and i < num_layers - 1 else on for i in range(num_layers)]
    for first in range(0, num_layers - 1, 2):
        masks[f"no attention from {first}"] = [(i >= first, False) for i in range(num_layers)]
        masks[f"no MLP from {first}"] = [(False, i >= first) for i in range(num_layers)]
    return masks


def rank_masks(evaluator: MaskEvaluator, *, climbs: int = 2) -> list[MaskScore]:
    """Every mask of the family, and the ends of `climbs` greedy single-sublayer climbs from the best; best first."""
    num_layers = int(evaluator.model.config.num_hidden_layers)
    family = mask_family(num_layers)
    scores = {name: evaluator.score(name, mask) for name, mask in family.items()}
    by_speed = sorted(scores.values(), key=lambda s: -s.speedup)
    for start in by_speed[:climbs]:
        score, mask = start, list(family[start.mask])
        while True:
            steps = []
            for index in range(2 * num_layers):
                flipped = list(mask)
                attention, mlp = flipped[index // 2]
                flipped[index // 2] = (attention, not mlp) if index % 2 else (not attention, mlp)
                steps.append((evaluator.score(short_form(flipped), flipped), flipped))
            best, best_mask = max(steps, key=lambda item: item[0].speedup)
            if best.speedup <= score.speedup:
                break
            score, mask = best, best_mask
        scores[score.mask] = score
    return sorted(scores.values(), key=lambda s: -s.speedup)


def short_form(skip: Skip) -> str:
    """A mask as one letter a layer: B both run, A attention only, M MLP only, - neither."""
    return "".join({(False, False): "B", (False, True): "A", (True, False): "M", (True, True): "-"}[s] for s in skip)


def as_rows(scores: Iterable[MaskScore]) -> list[dict[str, object]]:
    """Plain values, for JSON."""
    return [asdict(score) for score in scores]
