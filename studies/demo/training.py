"""A training run: its settings, its steps, and checkpoints that resume it exactly."""

from __future__ import annotations

import dataclasses
import logging
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from studies.demo.recipe import Recipe, training_loss

log = logging.getLogger("demo")
MEASURED_STEPS = range(4, 16)  # steps timed to turn --minutes into a number of steps; the first ones are slower
WARMUP_STEPS = 100


@dataclass(frozen=True)
class Size:
    """A row of the size table: the shape of the model and of a training step."""

    layers: int
    hidden: int
    heads: int
    mlp: int  # width inside
    vocab: int
    window: int  # tokens a training window
    batch: int  # windows a step
    context: int  # most positions
    matrix_lr: float  # peak learning rate: Muon, for the hidden matrices
    vector_lr: float  # likewise: AdamW, for embeddings and norms


SIZES = {
    "tiny": Size(3, 32, 2, 64, 320, 32, 4, 128, 0.02, 0.003),
    "demo": Size(12, 256, 4, 688, 4096, 512, 8, 1024, 0.02, 0.003),
}


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run's weights, apart from the machine."""

    size: Size
    recipe: Recipe
    seed: int
    num_steps: int | None  # None until measured from `minutes`
    minutes: float
    decay_share: float  # share of the steps over which the learning rate falls to zero
    device: str
    dtype: torch.dtype


class Run:
    """A training run: model, optimizers and step count, all of which a checkpoint holds."""

    def __init__(self, settings: Settings, stream: torch.Tensor, fingerprint: str, end_of_text: int) -> None:
        self.settings, self.stream, self.fingerprint = settings, stream, fingerprint
        self.num_steps = settings.num_steps
        self.step, self.seconds, self.recent_loss = 0, 0.0, float("nan")
        self.model = build_model(settings, end_of_text)
        layers = self.model.model.layers
        matrices = [p for p in layers.parameters() if p.ndim == 2]
        inside = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in inside]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=settings.size.matrix_lr, weight_decay=0.05), settings.size.matrix_lr),
            (
                torch.optim.AdamW(others, lr=settings.size.vector_lr, betas=(0.9, 0.95), weight_decay=0.0),
                settings.size.vector_lr,
            ),
        ]

    def train_step(self) -> None:
        """One update; depends on nothing but the weights, the optimizers, the seed and the step's number."""
        started = time.monotonic()
        settings = self.settings
        ids, labels = batch_of(self.stream, settings, self.step)
        scale = lr_scale(self.step, self.num_steps, settings.decay_share)
        for optimizer, lr in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * scale
        rng = random.Random(f"{settings.seed} {self.step}")
        progress = self.step / self.num_steps if self.num_steps else 0.0
        with torch.autocast(
            torch.device(settings.device).type, dtype=settings.dtype, enabled=settings.dtype != torch.float32
        ):
            loss, target = training_loss(self.model, ids, labels, settings.recipe, rng, progress)
        loss.backward()  # type: ignore[no-untyped-call]
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
            "num_steps": self.num_steps,
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
        self.num_steps = self.settings.num_steps or state["num_steps"]


def build_model(settings: Settings, end_of_text: int) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings; the matrices that write to the residual stream start smaller."""
    size = settings.size
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text + 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * size.layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * size.layers) ** -0.5)
    return model.to(settings.device).train()


def batch_of(stream: torch.Tensor, settings: Settings, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one step: each epoch cuts the stream at a fresh phase and shuffles the windows."""
    window, batch = settings.size.window, settings.size.batch
    steps_per_epoch = (len(stream) - window - 1) // window // batch
    epoch, index = divmod(step, steps_per_epoch)
    generator = torch.Generator().manual_seed(settings.seed * 100_003 + epoch)
    phase = int(torch.randint(window, (1,), generator=generator))
    order = torch.randperm((len(stream) - phase - 1) // window, generator=generator)
    rows = [
        stream[phase + w * window : phase + (w + 1) * window + 1] for w in order[index * batch : (index + 1) * batch]
    ]
    tokens = torch.stack(rows).to(settings.device)
    return tokens[:, :-1], tokens[:, 1:]


def lr_scale(step: int, num_steps: int | None, decay_share: float) -> float:
    """Warm-up, constant, then linear to zero over the last share of the steps."""
    warmup = WARMUP_STEPS if num_steps is None else min(WARMUP_STEPS, max(num_steps // 10, 1))
    scale = min(1.0, (step + 1) / warmup)
    if num_steps is not None:
        scale = min(scale, (num_steps - step) / max(decay_share * num_steps, 1))
    return max(scale, 0.0)


def train(run: Run, checkpoint: Path, *, checkpoint_every_s: float = 60.0, stop_after: int | None = None) -> bool:
    """Train to the end of the budget, or until SIGTERM, SIGINT or `stop_after` steps; True when complete."""
    stopping: list[int] = []
    old = {s: signal.signal(s, lambda number, _: stopping.append(number)) for s in (signal.SIGTERM, signal.SIGINT)}
    saved, times = time.monotonic(), []
    try:
        while run.num_steps is None or run.step < run.num_steps:
            before = run.seconds
            run.train_step()
            if run.num_steps is None and run.step in MEASURED_STEPS:
                times.append(run.seconds - before)
            if run.num_steps is None and run.step == MEASURED_STEPS.stop:
                run.num_steps = max(int(run.settings.minutes * 60 / sorted(times)[len(times) // 2]), run.step)
                log.info("budget: %d steps from a median of %.2f s", run.num_steps, sorted(times)[len(times) // 2])
            if run.step % 20 == 0:
                tokens = run.step * run.settings.size.window * run.settings.size.batch
                log.info(
                    "step %d/%s loss %.3f %.0f tokens/s", run.step, run.num_steps, run.recent_loss, tokens / run.seconds
                )
            if stopping or time.monotonic() - saved > checkpoint_every_s or run.step == stop_after:
                run.save(checkpoint)
                saved = time.monotonic()
            if stopping or run.step == stop_after:
                return False
        run.save(checkpoint)
        return True
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
