"""Decodes plainly and with 8-bit drafts, a few seconds each; prints the tokens a second as JSON. See `teams`."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import patch

import torch

from layerskip import DecodeConfig, LayerSkipModel, SkipMask, openmp
from layerskip.command_line.cli import quiet_libraries, run_command
from layerskip.prompts import encode_prompt, read_prompts

_WARM_UP, _NEW_TOKENS, _GAMMA = 8, 512, 4
SECOND_THREAD = "in a second thread"


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
    folder, dtype, prompts_file, threads, seconds, place, *unwatched = sys.argv[1:]
    quiet_libraries()
    torch.set_num_threads(int(threads))

    def decode(model: LayerSkipModel) -> dict[str, float]:
        torch.set_num_threads(int(threads))  # of this thread
        prompt = encode_prompt(read_prompts(prompts_file)[0], model, room=_NEW_TOKENS)
        drafting = DecodeConfig(skip_mask=SkipMask.none(model.num_layers).rounded(8), gamma=_GAMMA)
        found = {}
        for name, config in {"plain": DecodeConfig.plain(model.num_layers), "speculative": drafting}.items():
            model.generate(prompt, max_new_tokens=_WARM_UP, config=config, do_sample=False, eos_token_id=[])
            found[name] = tokens_per_s(model, config, prompt, float(seconds))
        return found

    with patch.object(openmp, "_library", return_value=None) if unwatched else nullcontext():
        model = LayerSkipModel.from_pretrained(
            folder, device="cpu", dtype=dtype, engine="fused", looks_for_config=False
        )
        if place == SECOND_THREAD:
            with ThreadPoolExecutor(1) as executor:
                found = executor.submit(decode, model).result()
        else:
            found = decode(model)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
