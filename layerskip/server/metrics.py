"""What a server counts, in a Prometheus registry of its own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from layerskip.decoding.stats import DecodeStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """Counters since the start, thread-safe.

    The gauges of speed and acceptance are since the start. For those of the last minutes divide rates, as in
    rate(layerskip_accepted_tokens_total[5m]) / rate(layerskip_drafted_tokens_total[5m]), which tells acceptance for
    each source of drafts.
    """

    def __init__(self, regimes: Sequence[str] = ()) -> None:
        """regimes: whose settings the config has, if it tells."""
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "layerskip_requests", "Requests ended, by path and status", ["path", "status"], registry=self.registry
        )
        self._by_regime = Counter(
            "layerskip_requests_by_regime",
            "Requests whose decoding ended, by the regime whose setting they were decoded with",
            ["regime"],
            registry=self.registry,
        )
        for regime in regimes:
            self._by_regime.labels(regime)
        counts = {
            "prompt_tokens": "Tokens of prompts that were decoded",
            "cached_prompt_tokens": "Of these, tokens that an earlier request began with too: not computed",
            "emitted_tokens": "Tokens emitted, those of a last round past a stop string included",
            "target_only_steps": "Steps of the target alone, the prompt's own forward apart",
            "timed_tokens": "Output tokens but for each request's first: those of the decode seconds",
            "prefill_seconds": "Seconds of the prompts' own forwards",
            "decode_seconds": "Seconds from first to last token",
            "failures": "Requests on which the model failed",
            "cancelled": "Requests whose client left, or that the shutdown ended",
        }
        self._counts = {
            name: Counter(f"layerskip_{name}", help_text, registry=self.registry) for name, help_text in counts.items()
        }
        by_source = {
            "drafted_tokens": "Tokens drafted, by where they came from",
            "accepted_tokens": "Drafted tokens that verification kept",
            "rounds": "Rounds of one draft phase and one verification, by where their first draft token came from",
        }
        self._counts |= {
            name: Counter(f"layerskip_{name}", help_text, ["source"], registry=self.registry)
            for name, help_text in by_source.items()
        }
        self.stored_tokens = Gauge(
            "layerskip_stored_tokens", "Tokens of earlier requests that are kept to draft from", registry=self.registry
        )
        self.prefix_cache_bytes = Gauge(
            "layerskip_prefix_cache_bytes", "Keys and values of earlier requests that are kept", registry=self.registry
        )
        self.queue_length = Gauge("layerskip_queue_length", "Requests that wait for the model", registry=self.registry)
        self.running = Gauge("layerskip_running_requests", "Requests being decoded", registry=self.registry)
        self._time_to_first_token = self._histogram("time_to_first_token", "Arrival to first token, waiting included")
        self._request_time = self._histogram("request", "Arrival to the end of the answer")
        self._ratio(
            "tokens_per_second", "Decoding speed of one request since the start", "timed_tokens", "decode_seconds"
        )
        self._ratio("acceptance_rate", "Accepted / drafted since the start", "accepted_tokens", "drafted_tokens")
        # Resident memory, CPU seconds, open files; nothing where there is no /proc.
        ProcessCollector(registry=self.registry)

    def count_run(self, stats: DecodeStats, regime: str | None, *, cancelled: bool, failed: bool) -> None:
        """A run has ended, whole or not; regime: whose setting it followed, None where that is not known."""
        if regime is not None:
            self._by_regime.labels(regime).inc()
        values = {
            "prompt_tokens": stats.num_prompt_tokens if stats.num_emitted else 0,
            "cached_prompt_tokens": stats.num_cached if stats.num_emitted else 0,
            "emitted_tokens": stats.num_emitted,
            "target_only_steps": stats.num_target_only,
            "timed_tokens": max(stats.num_emitted - 1, 0),
            "prefill_seconds": stats.prefill_s,
            "decode_seconds": stats.decode_s,
            "failures": failed,
            "cancelled": cancelled,
        }
        for name, value in values.items():
            self._counts[name].inc(value)
        by_source = {
            "drafted_tokens": (stats.num_drafted, stats.num_looked_up),
            "accepted_tokens": (stats.num_accepted, stats.num_looked_up_accepted),
            "rounds": (stats.num_rounds, stats.num_lookup_rounds),
        }
        for name, (total, looked_up) in by_source.items():
            self._counts[name].labels("looked_up").inc(looked_up)
            self._counts[name].labels("computed").inc(total - looked_up)

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """A request has been answered, or its client has left (status 499)."""
        self._requests.labels(path, str(status)).inc()
        self._request_time.observe(seconds)

    def saw_first_token(self, seconds: float) -> None:
        """A request got its first token so long after it arrived."""
        self._time_to_first_token.observe(seconds)

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"layerskip_{name}_seconds", help_text, buckets=_SECONDS, registry=self.registry)

    def _ratio(self, name: str, help_text: str, numerator: str, denominator: str) -> None:
        gauge = Gauge(f"layerskip_{name}", help_text, registry=self.registry)
        gauge.set_function(lambda: _ratio_of(self._counts[numerator], self._counts[denominator]))


def _ratio_of(numerator: Counter, denominator: Counter) -> float:
    return _value(numerator) / below if (below := _value(denominator)) else float("nan")


def _value(counter: Counter) -> float:
    (metric,) = counter.collect()
    return sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))
