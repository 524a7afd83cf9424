"""ServerSettings: what one server allows."""

from __future__ import annotations

from dataclasses import dataclass, field

from layerskip.command_line.api_key import check_api_key

MAX_MODEL_ID = 512
"""Characters."""


@dataclass(frozen=True)
class ServerSettings:
    """Limits and names of one server. Raises: ValueError naming the field, the rule and the value got."""

    model_id: str
    """What requests call the model."""
    max_context: int
    """Most tokens of prompt and output together."""
    max_new_tokens: int = 4096
    """Most output tokens that a request may ask for."""
    queue_limit: int = 16
    """Requests that may wait while the model is busy; one more is answered 429."""
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

    def __post_init__(self) -> None:
        rules = (
            (
                "model_id",
                0 < len(self.model_id) <= MAX_MODEL_ID and self.model_id.isprintable(),
                f"must be printable text of at most {MAX_MODEL_ID} characters",
            ),
            ("max_context", self.max_context >= 2, "must be at least 2"),
            ("max_new_tokens", self.max_new_tokens >= 1, "must be at least 1"),
            ("queue_limit", self.queue_limit >= 0, "must be at least 0"),
            ("max_body_bytes", self.max_body_bytes >= 1024, "must be at least 1024"),
            ("body_timeout_s", self.body_timeout_s > 0, "must be above 0"),
            ("send_timeout_s", self.send_timeout_s > 0, "must be above 0"),
            ("max_connections", self.max_connections >= 1, "must be at least 1"),
            ("store_tokens", self.store_tokens >= 0, "must be at least 0"),
            ("prefix_cache_bytes", self.prefix_cache_bytes >= 0, "must be at least 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name}: {rule}, got {getattr(self, name)!r}")
        if self.api_key is not None:
            check_api_key(self.api_key)
