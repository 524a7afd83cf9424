"""DecodeWorker: one thread that decodes jobs, some at a time, with a bounded number of them waiting."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from layerskip.decoding.stats import DecodeStats
from layerskip.decoding.text_stream import TextStream
from layerskip.drafters import TextStore
from layerskip.engines.batch import Batch, Cancelled
from layerskip.huggingface.messages import MessageParser
from layerskip.model import GenerationStream
from layerskip.server.errors import ApiError, model_failed, queue_full, shutting_down
from layerskip.server.logprobs import Entry, TokenNames
from layerskip.server.metrics import ServerMetrics
from layerskip.server.settings import ServerSettings
from layerskip.server.stop_text import StopText

logger = logging.getLogger(__name__)

_LONGEST_RETRY_S = 60


@dataclass(frozen=True)
class Piece:
    """What one round added to an answer; the text is cut at a stop string, the ids at the token that completes it."""

    text: str
    ids: list[int]
    logprobs: Sequence[Entry] = ()
    """Of each of these, where they were asked for."""


@dataclass(frozen=True)
class Finished:
    """An answer is complete."""

    finish_reason: str
    """`length`, or `stop` for end-of-text and stop strings alike."""
    num_emitted: int
    """Tokens of the answer."""
    stats: DecodeStats
    """Of the run; it may have emitted a few tokens past a stop string."""


Event = Piece | Finished | ApiError


@dataclass(eq=False)
class Job:
    """One choice's decoding, handed to the worker's thread; its events come back on the event loop that made it.

    The events are not limited: they hold one answer at most, which `max_new_tokens` bounds. So a client that reads
    slowly never holds up the model.
    """

    decoding: GenerationStream
    events: asyncio.Queue[tuple[int, Event]]
    """Of all choices of a request, each with its index."""
    index: int = 0
    stops: tuple[str, ...] = ()
    prompt_ids: Sequence[int] = ()
    regime: str | None = None
    """Whose setting it is decoded with; None where that is not known."""
    lossy: str | None = None
    """What must be told of that setting; None where it is lossless."""
    echo: str | None = None
    """The prompt's text, where the answer begins with it."""
    message: MessageParser | None = None
    """What finds thoughts and calls in its text; None: all of it is said. Belongs to the event loop's thread."""
    arrived_s: float = field(default_factory=time.monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    leader: Job | None = None
    """Another one of the same prompt, which goes on from what that has computed of it."""
    prompt_is_known: threading.Event = field(default_factory=threading.Event)
    """Or never will be."""

    @property
    def may_start(self) -> bool:
        """Whether nothing is to be waited for."""
        return self.leader is None or self.leader.prompt_is_known.is_set() or self.leader.cancelled.is_set()

    def send(self, event: Event) -> None:
        """From any thread."""
        _deliver(self.loop, [(self, event)])


def _deliver(loop: asyncio.AbstractEventLoop, events: Sequence[tuple[Job, Event]]) -> None:
    """All of them by waking that loop once."""

    def put() -> None:
        for job, event in events:
            job.events.put_nowait((job.index, event))

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop has ended, so nobody waits for the answers
        for job, _ in events:
            job.cancelled.set()


class DecodeWorker:
    """Up to `max_batch_size` on the model, `queue_limit` waiting, the rest refused.

    prepare_thread is called once in the new thread, before the first job; `start` waits for it and raises what it
    raised. `admit`, `submit` and `cancel` belong to the event loop's thread. store: where finished texts are kept.
    tokenizer: names tokens, in the decoding thread.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        settings: ServerSettings,
        prepare_thread: Callable[[], None],
        store: TextStore | None,
        tokenizer: Any,
    ) -> None:
        self._names = TokenNames(tokenizer)
        self.batch = Batch(settings.max_drafting)
        """Whose runs are the jobs, where several are decoded at once."""
        self._metrics = metrics
        self._settings = settings
        self._prepare_thread = prepare_thread
        self._store = store
        self._unsent: list[tuple[Job, Event]] = []
        """What the step at hand has brought, sent after it: an event loop beside it would slow down every operation."""
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._changed = threading.Condition()
        self._stopping = False
        self._draining = False
        self._num_admitted = 0
        self._mean_job_s = 1.0
        self._ready: threading.Event = threading.Event()
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        """Returns once the thread is ready. Raises: what prepare_thread raised."""
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            raise self._start_error

    def stop(self, timeout_s: float) -> None:
        """End the thread after the forward that it is in; waits for it so long."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self.cancel_all(shutting_down())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("the model has not finished its round within %g s", timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether jobs get decoded."""
        return self._thread.is_alive() and self._ready.is_set()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def num_admitted(self) -> int:
        """Jobs being decoded, waiting, or whose answer is still being sent."""
        return self._num_admitted

    def drain(self) -> None:
        """Refuse new requests; those admitted go on."""
        self._draining = True

    def admit(self, count: int = 1) -> ExitStack:
        """A ticket: the right of so many jobs to be decoded or to wait for it. `close` gives it back, any number of
        times.

        Raises: ApiError 429 if the queue is full, 503 if the server is about to end, 400 for more than it ever takes.
        """
        if self._draining or not self.is_alive:
            raise shutting_down()
        size, limit = self._settings.max_batch_size, self._settings.queue_limit
        if count > size + limit:
            raise ApiError(400, f"n: this server takes at most {size + limit} texts at once, got {count}", param="n")
        if self._num_admitted + count > size + limit:
            wait_s = math.ceil(self._mean_job_s * self._num_admitted / size)
            raise queue_full(limit, min(max(wait_s, 1), _LONGEST_RETRY_S))
        self._num_admitted += count
        ticket = ExitStack()
        ticket.callback(self._leave, count)
        return ticket

    def _leave(self, count: int) -> None:
        self._num_admitted -= count

    def submit(self, job: Job) -> None:
        """Decode it when its turn comes."""
        with self._changed:
            self._waiting.append(job)
            self._metrics.queue_length.set(len(self._waiting))
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody wants the answer: a waiting job is dropped, a running one stops after the forward that it is in."""
        job.cancelled.set()
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                self._metrics.queue_length.set(len(self._waiting))
                self._metrics.count_run(DecodeStats(), job.regime, cancelled=True, failed=False)

    def cancel_all(self, reason: ApiError) -> None:
        """End every job, telling its request why."""
        with self._changed:
            jobs = [*self._waiting, *self._running]
        for job in jobs:
            self.cancel(job)
            job.send(reason)

    def _run(self) -> None:
        try:
            self._prepare_thread()
        except BaseException as error:  # noqa: BLE001 - raised again by start(), in the thread that can report it
            self._start_error = error
            return
        finally:
            self._ready.set()
        try:
            while self._wait():
                while self.batch.num_running < self._settings.max_batch_size and self._start_next():
                    pass
                self.batch.step()
                self._send_all()
        finally:
            self.batch.close()
            self._send_all()

    def _send(self, job: Job, event: Event) -> None:
        self._unsent.append((job, event))
        if self._settings.max_batch_size == 1:
            self._send_all()

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        for loop in {job.loop for job, _ in unsent}:
            _deliver(loop, [one for one in unsent if one[0].loop is loop])

    def _wait(self) -> bool:
        """Until there is something to do; False at the end."""
        with self._changed:
            while not (self._waiting or self.batch.num_running or self._stopping):
                self._changed.wait()
            return self.batch.num_running > 0 or not self._stopping

    def _start_next(self) -> bool:
        """False where no job waits that may start."""
        with self._changed:
            job = next((one for one in self._waiting if one.may_start), None)
            if self._stopping or job is None:
                return False
            self._waiting.remove(job)
            self._running.add(job)
            self._metrics.queue_length.set(len(self._waiting))
            self._metrics.running.set(len(self._running))
        if self._settings.max_batch_size > 1:
            self.batch.start(partial(self._serve, job), job.cancelled.is_set)
        else:
            self._serve(job)
        return True

    def _serve(self, job: Job) -> None:
        started_s = time.monotonic()
        end = self._decode(job)
        # The latest jobs count most; for Retry-After alone.
        self._mean_job_s += 0.2 * (time.monotonic() - started_s - self._mean_job_s)
        with self._changed:
            self._running.discard(job)
            self._metrics.running.set(len(self._running))
        # Last, so that who has the whole answer finds it counted and the model free.
        if end is not None:
            self._send(job, end)

    def _decode(self, job: Job) -> Event | None:
        """The answer's last event; None if the job was cancelled."""
        end: Event | None = None
        failed = False
        try:
            end = self._decode_pieces(job)
            self._keep(job, end)
        except Cancelled:
            end = None
        except Exception:
            # A request must not end the server, whatever the model raised; the client hears no details.
            logger.exception("the model failed on a request")
            failed, end = True, model_failed()
        finally:
            job.prompt_is_known.set()
            job.decoding.close()
            self._metrics.count_run(job.decoding.stats, job.regime, cancelled=end is None, failed=failed)
        return end

    def _keep(self, job: Job, end: Finished | None) -> None:
        """Prompt and answer of a finished job, as far as its client has seen it."""
        if self._store is not None and end is not None:
            self._store.add([*job.prompt_ids, *job.decoding.output().ids[: end.num_emitted]])
            self._metrics.stored_tokens.set(self._store.num_tokens)

    def _decode_pieces(self, job: Job) -> Finished | None:
        cut = _Cut(job.decoding.new_text(), job.stops) if job.stops else None
        num_emitted = 0
        while not job.cancelled.is_set():
            piece = next(job.decoding, None)
            if piece is None:
                return self._finish(job, cut, num_emitted)
            if num_emitted == 0:
                job.prompt_is_known.set()
                self._metrics.saw_first_token(time.monotonic() - job.arrived_s)
                if job.echo is not None:
                    told = self._names.of_prompt(job.prompt_ids, job.decoding.prompt_logprobs) if piece.logprobs else []
                    self._send(job, Piece(job.echo, [], told))
            shown = cut.take(piece.ids) if cut is not None else Piece(piece.text, piece.ids)
            num_emitted += len(shown.ids)
            if piece.logprobs:
                shown = replace(shown, logprobs=self._names.entries(shown.ids, piece.logprobs))
            self._send(job, shown)
            if cut is not None and cut.stopped:
                return Finished("stop", num_emitted, job.decoding.stats)
        return None

    def _finish(self, job: Job, cut: _Cut | None, num_emitted: int) -> Finished:
        if cut is not None and (rest := cut.finish()):
            self._send(job, Piece(rest, []))
        if cut is not None and cut.stopped:
            return Finished("stop", num_emitted, job.decoding.stats)
        reason = job.decoding.output().finish_reason
        return Finished("length" if reason == "length" else "stop", num_emitted, job.decoding.stats)


class _Cut:
    """Text token by token, so that an answer ends with the very token that completes a stop string."""

    def __init__(self, text: TextStream, stops: tuple[str, ...]) -> None:
        self._text = text
        self._stop = StopText(stops)

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def take(self, ids: list[int]) -> Piece:
        text = ""
        for num_taken, token in enumerate(ids, start=1):
            text += self._stop.push(self._text.push([token]))
            if self._stop.stopped:
                return Piece(text, ids[:num_taken])
        return Piece(text, ids)

    def finish(self) -> str:
        return self._stop.push(self._text.finish()) + self._stop.finish()
