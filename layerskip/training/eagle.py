"""Training an `EagleHead`: its drafts, some tokens deep, against what the frozen target says."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from layerskip.config.decode_config import DraftWeights
from layerskip.drafters.eagle.head import EagleHead, EagleShape
from layerskip.model import LayerSkipModel
from layerskip.training.data import Sequences, Text
from layerskip.training.teacher import Lesson, Teacher

CHECKPOINT_NAME = "checkpoint.pt"
_DEPTH_WEIGHT = 0.8
"""Of each further draft token in the loss, as in EAGLE-3: a round gets there only if those before it were right."""
_WARM_UP = 0.05
_CHECKPOINT_S = 60.0
_TELL_S = 10.0
_MOST_LOGITS_BYTES = 1 << 28
"""Of one draft token's logits; larger ones are computed again on the way back, and held for one depth at a time."""
_NORM_NAMES = ("norm", "final_layernorm", "ln_f", "final_layer_norm")


def usual_aux_layers(num_layers: int) -> tuple[int, ...]:
    """An early layer and one in the middle, about where EAGLE-3 (2503.01840) reads besides the end."""
    return tuple(one for one in sorted({1, num_layers // 2 - 1}) if 0 <= one < num_layers - 1)


@dataclass(frozen=True)
class TrainOptions:
    """How long and how fast."""

    minutes: float | None = 10.0
    """Of training, given without `steps`; pauses between two runs do not count."""
    steps: int | None = None
    batch: int = 8
    depth: int = 5
    """Draft tokens of a round that are trained."""
    learning_rate: float | None = None
    """The highest, after warming up; then it falls to zero by a cosine. None: 0.02 / sqrt(hidden size)."""
    seed: int = 0
    aux_layers: tuple[int, ...] = ()
    """See `EagleShape.aux_layers`."""
    draft_vocab: int | None = None
    """Trained to choose among so many token ids, the commonest of the sequences, as EAGLE-3's are; None: all."""


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    weights: DraftWeights
    facts: dict[str, Any]
    """As they stand in the folder's config, under `training`."""


def train_eagle(
    model: LayerSkipModel,
    sequences: Sequences,
    out: Path,
    options: TrainOptions,
    *,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Trained:
    """Train into the folder `out`, from its checkpoint where there is one, and write the weights.

    Cost a step: a target forward over the batch, and `depth` layers and output embeddings there and back. Memory: the
    head's weights four times in float32 and one step's activations. A checkpoint is written every minute.
    Raises: ValueError if the checkpoint is of another training.
    """
    run = _Run(model, sequences, out, options, clock)
    run.resume(tell)
    run.train(tell)
    return run.finish()


class _Run:
    def __init__(
        self,
        model: LayerSkipModel,
        sequences: Sequences,
        out: Path,
        options: TrainOptions,
        clock: Callable[[], float],
    ) -> None:
        self._model, self._sequences, self._out, self._options, self._clock = model, sequences, out, options, clock
        self._target: Any = model.model
        shape = EagleShape.of(self._target, options.aux_layers, options.draft_vocab)
        torch.manual_seed(options.seed)
        self._head = EagleHead(shape)
        self._head.initialize(_final_norm(model))
        if self._head.draft_ids is not None:
            self._head.draft_ids.copy_(_commonest(sequences.training, shape.vocab_size)[: len(self._head.draft_ids)])
        self._head.to(model.device).train()
        self._rate = options.learning_rate or 0.02 / math.sqrt(shape.hidden_size)
        self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=self._rate, betas=(0.9, 0.95), weight_decay=0.0)
        layers = (*options.aux_layers, model.adapter.num_layers - 1)
        self._teacher = Teacher(model, layers, self._head.draft_ids)
        end = self._target.get_output_embeddings()
        ids = slice(None) if self._head.draft_ids is None else self._head.draft_ids
        self._weight: torch.Tensor = end.weight.detach()[ids]
        self._bias: torch.Tensor | None = None if end.bias is None else end.bias.detach()[ids]
        self._step, self._spent_s = 0, 0.0
        self._identity = {
            "sequences": sequences.fingerprint,
            "target": model.weights_fingerprint(),
            **{name: value for name, value in asdict(options).items() if name not in ("minutes", "steps")},
        }

    def resume(self, tell: Callable[[str], None]) -> None:
        """Go on from the folder's checkpoint, if there is one."""
        file = self._out / CHECKPOINT_NAME
        if not file.is_file():
            return
        try:
            state = torch.load(file, map_location=self._model.device, weights_only=True)
        except Exception as error:  # noqa: BLE001 (a broken file fails in many ways)
            raise ValueError(f"{file}: cannot be read ({type(error).__name__}); remove it to begin anew") from None
        different = [name for name, value in self._identity.items() if state["identity"].get(name) != value]
        if different:
            raise ValueError(
                f"{file}: is of a training with other {', '.join(different)}; remove it or use another --out"
            )
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._spent_s = state["step"], state["spent_s"]
        tell(f"going on from step {self._step}, {self._spent_s / 60:.1f} minutes trained")

    def train(self, tell: Callable[[str], None]) -> None:
        """Until the budget is spent."""
        began = told = saved = self._clock()
        before = self._spent_s
        while (share := self._share()) < 1.0:
            batch = self._batch()
            loss = self._learn(batch, share)
            self._step += 1
            now = self._clock()
            self._spent_s = before + now - began
            if now - told >= _TELL_S:
                told = now
                left = max(0.0, self._spent_s * (1.0 / max(self._share(), 1e-9) - 1.0))
                tell(
                    f"step {self._step}: loss {loss:.3f}, first draft right {_mean(self._right(batch)[0]):.1%}, "
                    f"about {int(left) // 60}:{int(left) % 60:02} left"
                )
            if now - saved >= _CHECKPOINT_S:
                saved = now
                self._save()

    def _share(self) -> float:
        """Of the budget that is spent."""
        if self._options.steps is not None:
            return self._step / self._options.steps
        return self._spent_s / (60.0 * (self._options.minutes or 10.0))

    def _batch(self) -> list[Text]:
        """Of the next step."""
        generator = torch.Generator().manual_seed((self._options.seed << 32) + self._step)
        count = len(self._sequences.training)
        places = torch.randint(count, (self._options.batch,), generator=generator).tolist()
        return [self._sequences.training[i] for i in places]

    def _learn(self, batch: Sequence[Text], share: float) -> float:
        """One step; its loss."""
        rate = self._rate * min(1.0, share / _WARM_UP + 0.01, 0.5 * (1.0 + math.cos(math.pi * share)))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        total = self._loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        self._optimizer.step()
        return float(total.detach())

    def _loss(self, batch: Sequence[Text]) -> torch.Tensor:
        """Mean soft cross-entropy over draft tokens, weighted by depth."""
        weights = [_DEPTH_WEIGHT**d for d in range(self._options.depth)]
        lesson, drafts = self._drafts(batch)
        with self._computing():
            if 4 * lesson.top.numel() * len(self._weight) > _MOST_LOGITS_BYTES:
                losses = [
                    checkpoint(self._difference, hidden, lesson, d, use_reentrant=False)
                    for d, hidden in enumerate(drafts)
                ]
            else:
                losses = [self._difference(hidden, lesson, d) for d, hidden in enumerate(drafts)]
        total: torch.Tensor = torch.stack(losses) @ torch.tensor(weights, device=losses[0].device)
        return total / sum(weights)

    @torch.no_grad()
    def _right(self, batch: Sequence[Text]) -> list[torch.Tensor]:
        """For each place of a round, whether its draft tokens are what the target would say."""
        lesson, drafts = self._drafts(batch)
        ids, found = self._head.draft_ids, []
        for d, hidden in enumerate(drafts):
            rows = lesson.drafts(d)
            with self._computing():
                own = self._unembed(hidden[rows]).argmax(dim=-1)
            found.append((own if ids is None else ids[own]) == lesson.top[rows])
        return found

    def _computing(self) -> torch.autocast:
        """A bfloat16 model's head computes in bfloat16, from weights in float32."""
        in_bfloat16 = self._weight.dtype == torch.bfloat16
        return torch.autocast(self._model.device.type, torch.bfloat16, enabled=in_bfloat16)

    def _drafts(self, batch: Sequence[Text]) -> tuple[Lesson, list[torch.Tensor]]:
        """What the target says; and the head's hidden states (B, T, hidden) by place in the round."""
        lesson = self._teacher.lesson(batch)
        with self._computing():
            return lesson, self._head.rollouts(lesson.states, lesson.embedded, self._options.depth - 1)

    def _difference(self, hidden: torch.Tensor, lesson: Lesson, depth: int) -> torch.Tensor:
        """Cross-entropy with the target's likeliest tokens; of all others' there is less to learn."""
        rows = lesson.drafts(depth)
        logits, probs = self._unembed(hidden[rows]).float(), lesson.probs[rows]
        own = logits.gather(-1, lesson.ids[rows])
        each = probs.sum(-1) * logits.logsumexp(-1) - (probs * own).sum(-1)
        return each.sum() / max(1, len(each))

    def _unembed(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(self._head.norm(hidden).to(self._weight.dtype), self._weight, self._bias)

    def _save(self) -> None:
        self._out.mkdir(parents=True, exist_ok=True)
        file = self._out / CHECKPOINT_NAME
        temporary = file.with_suffix(".tmp")
        state = {
            "identity": self._identity,
            "head": self._head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self._step,
            "spent_s": self._spent_s,
        }
        torch.save(state, temporary)
        temporary.replace(file)

    @torch.no_grad()
    def _held_out(self) -> list[float]:
        """(depth,): share of held-out places, of prompts' continuations alone, where the draft token is the target's,
        by its place in the round, if those before it were the text's."""
        self._head.eval()
        held_out, batch = self._sequences.held_out, self._options.batch
        parts = [self._right(held_out[i : i + batch]) for i in range(0, len(held_out), batch)]
        return [_mean(torch.cat(place)) for place in zip(*parts, strict=True)]

    def finish(self) -> Trained:
        """Write the weights, and drop the checkpoint."""
        acceptance = self._held_out()
        facts = {
            "steps": self._step,
            "seconds": round(self._spent_s, 1),
            "tokens": self._sequences.num_tokens,
            "sequences_fingerprint": self._sequences.fingerprint,
            "batch": self._options.batch,
            "depth": self._options.depth,
            "draft_vocab": self._options.draft_vocab,
            "learning_rate": self._rate,
            "seed": self._options.seed,
            "held_out_agreement": [round(one, 4) for one in acceptance],
            "model": str(self._target.config.name_or_path),
            "parameters": sum(one.numel() for one in self._head.parameters()),
        }
        weights = self._head.save(self._out, self._model.weights_fingerprint(), facts)
        (self._out / CHECKPOINT_NAME).unlink(missing_ok=True)
        return Trained(weights, facts)


def _mean(right: torch.Tensor) -> float:
    """0 of none."""
    return int(right.sum()) / max(1, len(right))


def _commonest(texts: Sequence[Text], vocab_size: int) -> torch.Tensor:
    """(V,): all token ids, by how often they occur."""
    counts = torch.bincount(torch.tensor([token for one in texts for token in one.ids]), minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)


def _final_norm(model: LayerSkipModel) -> torch.Tensor | None:
    """The weights of the target's last norm, where it is one over the root mean square with plain weights."""
    for name in _NORM_NAMES:
        norm = getattr(model.adapter.decoder, name, None)
        if norm is not None and "RMSNorm" in type(norm).__name__ and hasattr(norm, "variance_epsilon"):
            weight: torch.Tensor = norm.weight
            return weight
    return None
