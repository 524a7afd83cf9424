"""A training run: its settings, its steps, and checkpoints that resume it exactly."""

from __future__ import annotations

import dataclasses
import logging
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from search.stop import handled_by
from studies.demo.recipe import Recipe, training_loss

log = logging.getLogger("demo")
EXPERTS_PER_TOKEN = 4
WARMUP_STEPS = 100
MIN_TIMED_WARMUP = 20  # steps; a first step slowed by a cold device must not end the warm-up of a timed run


@dataclass(frozen=True)
class Size:
    """A row of the size table: the shape of the model, of a training step, and what the recipe needs to know of it."""

    name: str
    layers: int
    hidden: int
    heads: int
    mlp: int  # width inside
    vocab: int  # rows of the embedding, at least the tokenizer's
    window: int  # tokens a training window
    batch: int  # windows a step
    context: int  # most positions
    matrix_lr: float  # peak learning rate: Muon, for the hidden matrices
    vector_lr: float  # likewise: AdamW, for embeddings and norms
    exits: tuple[int, int]  # layers of the earliest exit that takes a loss, and of the last one in late training
    minutes: float  # training time where no other budget is given
    num_parts: int = 1  # parts that a step's windows are run in, gradients averaged: what memory allows
    own_tokenizer: bool = True  # trained on the corpus; False: the shipped demo model's
    linear_attention: bool = False  # in three of four layers, as Qwen3.5 has it
    experts: int = 0  # in every MLP's place, of which each token takes four, together as wide as the MLP

    def __post_init__(self) -> None:
        if self.batch < 1 or self.batch % self.num_parts:
            raise ValueError(f"batch must be a positive multiple of {self.num_parts} for this size, got {self.batch}")


_DEMO = Size("demo", 12, 256, 4, 688, 4096, 512, 8, 1024, 0.02, 0.003, (3, 6), 70.0)
_LIKE_DEMO = dataclasses.replace(_DEMO, own_tokenizer=False)
SIZES = {
    size.name: size
    for size in (
        # All that "1b" has, on a CPU in seconds: padded vocabulary, borrowed tokenizer, a step in two parts.
        Size("tiny", 4, 32, 2, 64, 4352, 32, 4, 512, 0.02, 0.003, (1, 2), 0.2, 2, own_tokenizer=False),
        _DEMO,
        # Drafts for "demo": a sixth of its layers.
        dataclasses.replace(_LIKE_DEMO, name="draft", layers=2, exits=(1, 1), minutes=10.0),
        # Layers that keep a state in place of keys and values.
        dataclasses.replace(_LIKE_DEMO, name="hybrid", linear_attention=True),
        # A mixture of experts; their width is a multiple of what torch's products of groups want.
        dataclasses.replace(_LIKE_DEMO, name="experts", mlp=704, experts=16),
        # Two fifths of its weights are the output embedding: today's small models have a quarter to three fifths there.
        Size("vocab16k", 8, 256, 4, 688, 16_384, 512, 8, 1024, 0.02, 0.003, (2, 4), 40.0),
        # ../gpu/README.md says why these numbers.
        Size("1b", 24, 2048, 16, 5632, 32_768, 512, 32, 1024, 0.02, 0.0006, (4, 8), 4.0, 2, own_tokenizer=False),
    )
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run's weights, apart from the machine."""

    size: Size
    recipe: Recipe
    seed: int
    num_steps: int | None  # None: the budget is `minutes`
    minutes: float
    decay_share: float  # share of the steps over which the learning rate falls to zero
    device: str
    dtype: torch.dtype


class Run:
    """A training run: model, optimizers and step count, all of which a checkpoint holds."""

    def __init__(self, settings: Settings, stream: torch.Tensor, fingerprint: str, end_of_text: int) -> None:
        self.settings, self.stream, self.fingerprint = settings, stream.to(settings.device), fingerprint
        self.step, self.seconds, self.recent_loss = 0, 0.0, float("nan")
        self.model = build_model(settings, end_of_text)
        layers = self.model.model.layers
        matrices = [p for name, p in layers.named_parameters() if p.ndim == 2 and not name.endswith("mlp.gate.weight")]
        inside = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in inside]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=settings.size.matrix_lr, weight_decay=0.05), settings.size.matrix_lr),
            (
                torch.optim.AdamW(
                    others,
                    lr=settings.size.vector_lr,
                    betas=(0.9, 0.95),
                    weight_decay=0.0,
                    fused=torch.device(settings.device).type == "cuda",
                ),
                settings.size.vector_lr,
            ),
        ]

    @property
    def progress(self) -> float:
        """Share of the budget that is spent: of the steps where their number is given, else of the time; to 1."""
        settings = self.settings
        spent = self.seconds / (60 * settings.minutes) if settings.num_steps is None else self.step / settings.num_steps
        return min(spent, 1.0)

    def train_step(self) -> None:
        """One update; depends on the weights, the optimizers, the seed, the step's number and the budget's share alone.

        Cost: a device sync for each part of the step, at its loss.
        """
        started = time.monotonic()
        settings, progress = self.settings, self.progress
        ids, labels = batch_of(self.stream, settings, self.step)
        scale = lr_scale(self.step, progress, settings)
        for optimizer, lr in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        rng = random.Random(f"{settings.seed} {self.step}")
        num_parts, target = settings.size.num_parts, 0.0
        for part_ids, part_labels in zip(ids.chunk(num_parts), labels.chunk(num_parts), strict=True):
            with torch.autocast(
                torch.device(settings.device).type, dtype=settings.dtype, enabled=settings.dtype != torch.float32
            ):
                loss, value = training_loss(self.model, part_ids, part_labels, settings.recipe, rng, progress)
            (loss / num_parts).backward()  # type: ignore[no-untyped-call]
            target += value / num_parts
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)
        self.recent_loss = target if self.step == 0 else 0.95 * self.recent_loss + 0.05 * target
        self.step += 1
        # A suspended process must not count as slow training: cap a step at five times the mean.
        elapsed = time.monotonic() - started
        self.seconds += min(elapsed, 5 * self.seconds / (self.step - 1)) if self.step > 5 else elapsed

    def save(self, path: Path) -> None:
        """Write a checkpoint whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "recent_loss": self.recent_loss,
            "fingerprint": self.fingerprint,
            "recipe": dataclasses.asdict(self.settings.recipe),
            "size": dataclasses.asdict(self.settings.size),
            "seed": self.settings.seed,
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint; raises ValueError if it belongs to another run."""
        state = torch.load(path, map_location=self.settings.device, weights_only=True)
        ours = {
            "fingerprint": self.fingerprint,
            "recipe": dataclasses.asdict(self.settings.recipe),
            "size": dataclasses.asdict(self.settings.size),
            "seed": self.settings.seed,
        }
        for field, value in ours.items():
            if state[field] != value:
                raise ValueError(f"{field}: the checkpoint {path} has {state[field]}, this run has {value}")
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.recent_loss = state["step"], state["seconds"], state["recent_loss"]


def build_model(settings: Settings, end_of_text: int) -> Any:
    """A fresh Llama, Qwen3.5 where the size has linear attention, or Qwen3-MoE where it has experts, with tied
    embeddings; the matrices that write to the residual stream start smaller."""
    size = settings.size
    fields: dict[str, Any] = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.mlp,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "max_position_embeddings": size.context,
        "tie_word_embeddings": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": end_of_text + 1,
    }
    device = torch.device(settings.device)
    # Made where it trains: a thousand million random numbers take a CPU half a minute.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(settings.seed)
        make = _qwen3_5 if size.linear_attention else _qwen3_moe if size.experts else _llama
        model = make(size, fields)
    with torch.no_grad():
        for layer in model.model.layers:
            is_linear = hasattr(layer, "linear_attn")
            written = layer.linear_attn.out_proj if is_linear else layer.self_attn.o_proj
            written.weight.mul_((2 * size.layers) ** -0.5)
            down = layer.mlp.experts.down_proj if size.experts else layer.mlp.down_proj.weight
            down.mul_((2 * size.layers) ** -0.5)
    return model.train()


def _llama(_: Size, fields: dict[str, Any]) -> Any:
    return LlamaForCausalLM(LlamaConfig(**fields))


def _qwen3_moe(size: Size, fields: dict[str, Any]) -> Any:
    config = Qwen3MoeConfig(
        **fields,
        head_dim=size.hidden // size.heads,
        num_experts=size.experts,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        moe_intermediate_size=size.mlp // EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config)


def _qwen3_5(size: Size, fields: dict[str, Any]) -> Any:
    width = size.hidden // size.heads
    heads = {f"linear_num_{kind}_heads": size.heads for kind in ("key", "value")}
    widths = {"head_dim": width} | {f"linear_{kind}_head_dim": width for kind in ("key", "value")}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**fields, **heads, **widths))


def batch_of(stream: torch.Tensor, settings: Settings, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one step, on the stream's device, (batch, window) int64.

    Each epoch cuts the stream at a fresh phase and shuffles the windows. Cost: one small copy to the device.
    Raises: ValueError for a stream shorter than a step.
    """
    window, batch = settings.size.window, settings.size.batch
    steps_per_epoch = (len(stream) - window - 1) // window // batch
    if steps_per_epoch < 1:
        raise ValueError(
            f"corpus: must hold {window * (batch + 1) + 1} tokens for a step of this size, got {len(stream)}"
        )
    epoch, index = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(settings.seed * 100_003 + epoch)
    phase = int(torch.randint(window, (1,), generator=generator))
    order = torch.randperm((len(stream) - phase - 1) // window, generator=generator)
    starts = phase + order[index * batch : (index + 1) * batch] * window
    tokens = stream[(starts.unsqueeze(1) + torch.arange(window + 1)).to(stream.device)]
    return tokens[:, :-1], tokens[:, 1:]


def lr_scale(step: int, progress: float, settings: Settings) -> float:
    """Warm-up, constant, then linear to zero over the last `decay_share` of the budget."""
    if settings.num_steps is not None:
        warmup = min(WARMUP_STEPS, max(settings.num_steps // 10, 1))
    elif progress > 0:
        warmup = min(WARMUP_STEPS, max(int(step / progress) // 10, MIN_TIMED_WARMUP))
    else:
        warmup = WARMUP_STEPS
    scale = min(1.0, (step + 1) / warmup, (1.0 - progress) / max(settings.decay_share, 1e-9))
    return max(scale, 0.0)


def train(
    run: Run, checkpoint: Path | None, *, checkpoint_every_s: float = 60.0, stop_after: int | None = None
) -> bool:
    """Train to the end of the budget, or until SIGTERM, SIGINT or `stop_after` steps; True when complete.

    Without a checkpoint's path none is written, and what was trained is lost with the process.
    """
    stopping: list[int] = []
    saved = time.monotonic()
    with handled_by(lambda number, _: stopping.append(number), (signal.SIGTERM, signal.SIGINT)):
        while run.progress < 1:
            run.train_step()
            if run.step % 20 == 0:
                log.info("%s", progress_line(run))
            stopped = bool(stopping) or run.step == stop_after
            if checkpoint is not None and (stopped or time.monotonic() - saved > checkpoint_every_s):
                run.save(checkpoint)
                saved = time.monotonic()
            if stopped:
                return False
        if checkpoint is not None:
            run.save(checkpoint)
        return True


def progress_line(run: Run) -> str:
    """Where a run stands, for the log."""
    size = run.settings.size
    speed = run.step * size.window * size.batch / max(run.seconds, 1e-9)
    return f"step {run.step}, {run.progress:.1%} of the budget, loss {run.recent_loss:.3f}, {speed:.0f} tokens/s"
