"""ServerSettings: what one server allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from layerskip.command_line.api_key import check_api_key

MAX_MODEL_ID = 512
"""Characters."""


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names of one server; `layerskip.serve` checks its numbers. Raises: ValueError for a name or a key."""

    model_id: str
    """What requests call the model."""
    max_context: int
    """Most tokens of prompt and output together."""
    max_new_tokens: int = 4096
    """Most output tokens that a request may ask for."""
    max_batch_size: int = 1
    """Requests that are decoded at once. On an engine that is `batch_invariant` no answer depends on what else is asked
    at that time, on others up to rounding."""
    max_drafting: int | None = None
    """While more are decoded, none of them drafts; None: as the config says."""
    queue_limit: int = 256
    """Requests that may wait besides; one more is answered 429."""
    max_body_bytes: int = 1 << 20
    body_timeout_s: float = 30.0
    """Within this time the head of a request must have arrived, and within as much its body."""
    send_timeout_s: float = 30.0
    """A client that takes nothing for so long is dropped."""
    max_connections: int = 512
    """Requests on further ones are answered 503."""
    api_key: str | None = field(default=None, repr=False)
    hosts: frozenset[str] | None = None
    """Host headers answered, without ports; None is any. Without a key this keeps web pages out whose name was made to
    point to this machine (DNS rebinding)."""
    access_log: bool = True
    store_tokens: int = 200_000
    """Most tokens of earlier requests that are kept to draft from, where the model's config does so; 0 keeps none."""
    prefix_cache_bytes: int = 512 << 20
    """Most bytes of earlier requests' keys and values that are kept for prompts which begin alike; 0 keeps none."""
    response_template: Mapping[str, Any] | None = None
    """How the model writes calls of tools, where neither its tokenizer nor Transformers says so."""

    def __post_init__(self) -> None:
        if not (0 < len(self.model_id) <= MAX_MODEL_ID and self.model_id.isprintable()):
            raise ValueError(
                f"model_id: must be printable text of at most {MAX_MODEL_ID} characters, got {self.model_id!r}"
            )
        if self.api_key is not None:
            check_api_key(self.api_key)
