"""The demo model as one with a multi-token-prediction layer: `python -m studies.mtp.make_model --help`."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM

from layerskip.command_line.cli import OneLineParser, run_command
from layerskip.config.decode_config import write_atomically
from layerskip.huggingface.loading import load_pretrained
from studies.demo import corpus
from studies.mtp.checkpoint import agreement, layer_loss, new_layer, save_layer

PROG = "studies.mtp.make_model"
HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "demo" / "model"
TEXT, BATCH, RATE, WARM_UP = 128, 4, 1e-3, 50
_DEPTHS = 4
"""Drafts in a row whose agreement is told."""

log = logging.getLogger(PROG)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = OneLineParser(
        prog=f"python -m {PROG}",
        description="Writes the demo model as a GLM-4-MoE, which says the same, and trains a multi-token-prediction "
        "layer of that architecture on the modules that the demo was trained on. The model itself is frozen.",
    )
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder for the model")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--depth", type=int, default=1, help="drafts in a row that are trained")
    arguments = parser.parse_args(argv)
    return run_command(PROG, lambda: _run(arguments))


def as_glm(llama: Any) -> Glm4MoeForCausalLM:
    """A Llama in the modules of GLM-4-MoE: none of its layers routes, and positions turn all of a head."""
    config = Glm4MoeConfig(
        **{name: getattr(llama.config, name) for name in _SAME},
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        first_k_dense_replace=llama.config.num_hidden_layers,
        moe_intermediate_size=llama.config.intermediate_size // 2,
        n_routed_experts=4,
        num_experts_per_tok=1,
        n_shared_experts=1,
        num_mtp_layers=1,
    )
    model = Glm4MoeForCausalLM(config).eval()
    model.load_state_dict(llama.state_dict())
    model.generation_config = llama.generation_config
    return model


_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    llama, _ = load_pretrained(DEMO, device="cpu", dtype="float32")
    model = as_glm(llama)
    split = corpus.split_modules(corpus.read_modules())
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    stream, held_out = (corpus.token_stream(tokenizer, part) for part in (split.train, split.held_out))
    ids = _windows(held_out, 64)
    torch.testing.assert_close(model(ids[:2]).logits, llama(ids[:2]).logits, rtol=1e-4, atol=1e-3)
    mtp = new_layer(model)
    optimizer = torch.optim.AdamW(mtp.layers.parameters(), lr=RATE, weight_decay=0.01)
    start, step = time.monotonic(), 0
    while (share := (time.monotonic() - start) / (60 * arguments.minutes)) < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1.0 - 0.9 * share)
        optimizer.zero_grad()
        loss = layer_loss(model, mtp, _windows(stream, BATCH), arguments.depth)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mtp.layers.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            log.info("step %d, %.0f %% of the time, loss %.3f", step, 100 * share, loss.item())
        step += 1
    right = agreement(model, mtp.eval(), ids, _DEPTHS)
    log.info("%d steps; right on held-out text, by draft: %s", step, " ".join(f"{one:.3f}" for one in right))
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.out)
    save_layer(mtp, model.config.num_hidden_layers, arguments.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, arguments.out / name)
    facts = {
        "training_minutes": arguments.minutes,
        "threads": arguments.threads,
        "depth": arguments.depth,
        "steps": step,
    }
    facts |= {"held_out_agreement": [round(one, 4) for one in right]}
    write_atomically(arguments.out / "training.json", json.dumps(facts, indent=2) + "\n")
    return 0


def _windows(stream: torch.Tensor, count: int) -> torch.Tensor:
    """(count, TEXT) of random places."""
    starts = torch.randint(len(stream) - TEXT, (count,))
    return torch.stack([stream[at : at + TEXT] for at in starts.tolist()])


if __name__ == "__main__":
    sys.exit(main())
