"""Decodes plainly and with 8-bit drafts, a few seconds each; prints the tokens a second as JSON. See `spin_counts`."""

from __future__ import annotations

import json
import sys
import time

import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask
from layerskip.command_line.cli import quiet_libraries, run_command
from layerskip.prompts import encode_prompt, read_prompts

_WARM_UP, _NEW_TOKENS, _GAMMA = 8, 512, 4


def tokens_per_s(model: LayerSkipModel, config: DecodeConfig, prompt: tuple[int, ...], seconds: float) -> float:
    """Of greedy text behind its first token, for so long or `_NEW_TOKENS`."""
    began, count = None, 0
    for piece in model.stream(prompt, max_new_tokens=_NEW_TOKENS, config=config, do_sample=False, eos_token_id=[]):
        now = time.perf_counter()
        if began is None:
            began = now
            continue
        count += len(piece.ids)
        if now - began > seconds:
            break
    return count / (now - (began or now))


def main() -> int:
    return run_command("studies.machine.decode", _run)


def _run() -> int:
    folder, dtype, prompts_file, threads, seconds = sys.argv[1:]
    quiet_libraries()
    torch.set_num_threads(int(threads))
    model = LayerSkipModel.from_pretrained(folder, device="cpu", dtype=dtype, engine="fused", looks_for_config=False)
    prompt = encode_prompt(read_prompts(prompts_file)[0], model, room=_NEW_TOKENS)
    drafting = DecodeConfig(skip_mask=SkipMask.none(model.num_layers).rounded(8), gamma=_GAMMA)
    ways = {"plain": DecodeConfig.plain(model.num_layers), "speculative": drafting}
    found = {}
    for name, config in ways.items():
        model.generate(prompt, max_new_tokens=_WARM_UP, config=config, do_sample=False, eos_token_id=[])
        found[name] = tokens_per_s(model, config, prompt, float(seconds))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
