"""Another program on the same cores: multiplies matrices on as many threads, until its input ends; prints how many."""

from __future__ import annotations

import select
import sys

import torch

_SIDE = 1024


def main() -> int:
    torch.set_num_threads(int(sys.argv[1]))
    matrix = torch.rand(_SIDE, _SIDE)
    count = 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        matrix @ matrix
        count += 1
    sys.stdout.write(f"{count}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
