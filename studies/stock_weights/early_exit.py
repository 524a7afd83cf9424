"""python -m studies.stock_weights.early_exit: what a trained adapter would make of early exits of a stock model.

Between the last kept layer and the frozen final norm and output embedding goes a small adapter: a norm and a low-rank
map, added to the hidden state, trained to say what the whole model says (self-distillation). All exits are trained at
once, each from the same frozen forward. Written down are the agreement of each exit with the model on text that was
not trained on, with and without its adapter, and the speedup that follows from it at the measured costs of a study.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from layerskip.command_line.cli import OneLineParser, check_least, quiet_libraries, run_command
from layerskip.config.decode_config import write_atomically
from layerskip.config.skip_mask import SkipMask
from layerskip.machine.host import git_commit
from layerskip.model import LayerSkipModel
from search.predict.costs import CostModel
from studies.demo import corpus
from studies.stock_weights.head_figures import best_speedup as chained_speedup

PROG = "studies.stock_weights.early_exit"
HERE = Path(__file__).resolve().parent
_WINDOW, _BATCH, _PLACES = 256, 4, 256
"""Tokens of a text, texts of a step, and places of these that a step learns from."""


class ExitAdapter(nn.Module):
    """(N, H) hidden states of an exit to what the model's final norm takes. Begins as no change."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size)
        self.down, self.up = nn.Linear(hidden_size, rank, bias=False), nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.up(self.down(self.norm(hidden)))
        return out


class Exits:
    """A frozen model with an adapter at every exit but the last."""

    def __init__(self, model: Any, rank: int) -> None:
        self._model = model.eval().requires_grad_(False)  # noqa: FBT003
        self.num_layers = int(model.config.num_hidden_layers)
        self.adapters = nn.ModuleList(ExitAdapter(model.config.hidden_size, rank) for _ in range(self.num_layers - 1))

    def states(self, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """((N, H) after each of the first layers, (N, V) the model's own logits). ids: (B, T)."""
        with torch.no_grad():
            out = self._model(ids, output_hidden_states=True)
        return [one.flatten(0, 1) for one in out.hidden_states[1 : self.num_layers]], out.logits.flatten(0, 1)

    def logits(self, hidden: torch.Tensor, adapter: nn.Module | None) -> torch.Tensor:
        """(N, V) of an exit."""
        logits: torch.Tensor = self._model.lm_head(
            self._model.model.norm(hidden if adapter is None else adapter(hidden))
        )
        return logits

    def agreement(self, texts: Sequence[torch.Tensor]) -> tuple[list[float], list[float]]:
        """Share of places where each exit says what the model says, (without its adapter, with it)."""
        right = torch.zeros(2, self.num_layers - 1, dtype=torch.double)
        count = 0
        with torch.no_grad():
            for ids in texts:
                states, target = self.states(ids)
                said = target.argmax(-1)
                count += len(said)
                for i, (hidden, adapter) in enumerate(zip(states, self.adapters, strict=True)):
                    for row, one in enumerate((None, adapter)):
                        right[row, i] += (self.logits(hidden, one).argmax(-1) == said).sum()
        plain, adapted = (right / count).tolist()
        return plain, adapted


def best_speedup(agreement: float, draft: float, verify: Sequence[float]) -> tuple[float, int]:
    """(Speedup, gamma) of drafts that are right with this probability each, at costs in plain steps; 1, 0 for none.

    verify: entry n, verifying n drafts. No threshold stops a draft, which costs a little, and nothing but the steps is
    counted, which flatters.
    """
    counts = range(1, len(verify))
    return chained_speedup([agreement**i for i in counts], [draft * i for i in counts], verify)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = OneLineParser(prog=f"python -m {PROG}", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default=str(HERE.parent / "stock" / "model"), help="the stock twin of the demo model")
    add("--costs", type=Path, default=HERE.parent / "stock" / "summary.json", help="summary of a study of it")
    add("--minutes", type=float, default=10.0, help="of training")
    add("--rank", type=int, default=64, help="of an adapter's map")
    add("--threads", type=int, default=1, help="CPU threads")
    add("--out", type=Path, help="file for the numbers, as JSON")
    arguments = parser.parse_args(given)
    return run_command(PROG, lambda: _run(arguments, given))


def _run(arguments: argparse.Namespace, given: Sequence[str]) -> int:
    check_least(arguments, rank=1, threads=1)
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    cost = CostModel.parse(json.dumps(json.loads(arguments.costs.read_text(encoding="utf-8"))["costs"]["last"]))
    loaded = LayerSkipModel.from_pretrained(arguments.model, engine="eager")
    exits = Exits(loaded.model, arguments.rank)
    split = corpus.split_modules(corpus.read_modules())
    texts = [_windows(loaded, [one.text for one in modules]) for modules in (split.train, split.tuning)]
    steps, loss = train(exits, texts[0], 60 * arguments.minutes)
    plain, adapted = exits.agreement(texts[1].split(_BATCH)[:40])
    both = enumerate(zip(plain, adapted, strict=True), start=1)
    rows = [row_of(depth, exits.num_layers, *agreements, cost) for depth, agreements in both]
    result = {
        "command": shlex.join(["python", "-m", PROG, *given]),
        "commit": git_commit(HERE),
        "steps": steps,
        "last_loss": round(loss, 4),
        "parameters": sum(one.numel() for one in exits.adapters[0].parameters()),
        "costs": {
            "cpu": cost.measured_on.get("cpu"),
            "verify": [round(s / cost.verify_s[0], 3) for s in cost.verify_s],
        },
        "exits": rows,
    }
    if arguments.out is not None:
        write_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
    for row in rows:
        sys.stdout.write(
            f"{row['layers_kept']:2} layers, {row['draft_cost']:.2f} of a step: agreement {row['agreement']:.3f}, "
            f"adapted {row['agreement_adapted']:.3f}; speedup {row['speedup']:.2f}, adapted "
            f"{row['speedup_adapted']:.2f} at gamma {row['gamma_adapted']}\n"
        )
    return 0


def row_of(depth: int, num_layers: int, plain: float, adapted: float, cost: CostModel) -> dict[str, Any]:
    """What an exit after so many layers is worth."""
    draft = cost.draft_s(SkipMask.early_exit(num_layers, depth), threshold=False) / cost.verify_s[0]
    verify = [s / cost.verify_s[0] for s in cost.verify_s]
    (speedup, _), (speedup_adapted, gamma) = (best_speedup(one, draft, verify) for one in (plain, adapted))
    return {
        "layers_kept": depth,
        "draft_cost": round(draft, 4),
        "agreement": round(plain, 4),
        "agreement_adapted": round(adapted, 4),
        "speedup": round(speedup, 4),
        "speedup_adapted": round(speedup_adapted, 4),
        "gamma_adapted": gamma,
    }


def train(exits: Exits, texts: torch.Tensor, seconds: float) -> tuple[int, float]:
    """(Steps, the last ones' mean loss) of so many seconds. texts: (N, T)."""
    optimiser = torch.optim.AdamW(exits.adapters.parameters(), lr=1e-3, weight_decay=0.0)
    rng = np.random.default_rng(0)
    start, steps, losses = time.perf_counter(), 0, [0.0]
    while (spent := time.perf_counter() - start) < seconds:
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * max(0.05, 1.0 - spent / seconds)
        states, target = exits.states(texts[rng.integers(len(texts), size=_BATCH)])
        places = torch.from_numpy(rng.integers(len(target), size=_PLACES))
        wanted = target[places].log_softmax(-1)
        loss = torch.zeros(())
        for hidden, adapter in zip(states, exits.adapters, strict=True):
            said = exits.logits(hidden[places], adapter).log_softmax(-1)
            loss = loss + F.kl_div(said, wanted, log_target=True, reduction="batchmean")
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        steps += 1
        losses.append(loss.item() / len(exits.adapters))
        if steps % 50 == 0:
            sys.stderr.write(f"step {steps}, {spent:.0f} s of {seconds:.0f}, loss {np.mean(losses[-50:]):.3f}\n")
    return steps, float(np.mean(losses[-50:]))


def _windows(model: LayerSkipModel, texts: Sequence[str]) -> torch.Tensor:
    """(N, T) token ids of the texts, cut into windows."""
    ids = [token for text in texts for token in model.encode(text)]
    return torch.tensor(ids[: len(ids) // _WINDOW * _WINDOW]).view(-1, _WINDOW)


if __name__ == "__main__":
    raise SystemExit(main())
