"""DeviceNumber: an integer in device memory whose value the host knows without reading it."""

from __future__ import annotations

import torch


class DeviceNumber:
    """`tensor` (1,) int64 has a fixed address, for recorded work to read and write. No method waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.long, device=device)
        self._holds: int | None = 0

    def set(self, value: int) -> torch.Tensor:
        """The tensor, made to hold `value`: written only where it is not known to."""
        if self._holds != value:
            self.tensor.fill_(value)
            self._holds = value
        return self.tensor

    def distrust(self) -> None:
        """Work that changes the number is about to run; until `known` it may hold anything."""
        self._holds = None

    def known(self, value: int) -> None:
        """That work has left `value` here."""
        self._holds = value
