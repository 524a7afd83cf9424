"""create_app: the Starlette application around one model."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from layerskip.config.decode_config import DecodeConfig
from layerskip.decoding.prefix_cache import PrefixCache
from layerskip.drafters import TextStore
from layerskip.model import LayerSkipModel
from layerskip.rounds.rows import row_kernels
from layerskip.server.answers import AnswerFormat, ChatShape, CompletionShape
from layerskip.server.errors import ApiError
from layerskip.server.metrics import ServerMetrics
from layerskip.server.prepare import Preparer
from layerskip.server.schemas import ChatRequest, CompletionRequest, parse
from layerskip.server.settings import ServerSettings
from layerskip.server.transport.guard import Guard, error_response
from layerskip.server.transport.transport import Answer, read_body
from layerskip.server.worker import DecodeWorker

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30.0
_WARM_UP_TOKENS = 8


class Service:
    """What the routes share: one model, its worker, its counters."""

    def __init__(self, model: LayerSkipModel, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = ServerMetrics(model.config.regime_names)
        self.store = text_store(model.config, settings)
        prefixes = PrefixCache(settings.prefix_cache_bytes) if settings.prefix_cache_bytes else None
        if prefixes is not None:
            self.metrics.prefix_cache_bytes.set_function(lambda: prefixes.num_bytes)
        self.worker = DecodeWorker(self.metrics, settings, lambda: _warm_up(model), self.store, model.tokenizer)
        batch = self.worker.batch if settings.max_batch_size > 1 else None
        self.preparer = Preparer(model, settings, self.store, prefixes, batch)
        self.created = int(time.time())
        self.num_connections: Callable[[], int] = lambda: 0
        """Open ones; set by the server that runs the application."""
        both = f"{model.weights_fingerprint()} {model.dtype} {model.config.to_json()}"
        self.system_fingerprint = "fp_" + hashlib.sha256(both.encode()).hexdigest()[:12]

    def model_card(self) -> dict[str, Any]:
        """OpenAI's model object."""
        return {"id": self.settings.model_id, "object": "model", "created": self.created, "owned_by": "layerskip"}

    async def answer(
        self, request: Request, kind: type[CompletionRequest | ChatRequest], shape: CompletionShape
    ) -> Answer:
        """The response to a request for text; decoding starts when it is sent. Raises: ApiError."""
        asked = parse(kind, await read_body(request, self.settings))
        ticket = self.worker.admit(asked.num_choices)
        try:
            jobs = await self.preparer.jobs(asked)
            messages = [one.message for one in jobs]
            form = AnswerFormat(shape, asked, self.system_fingerprint, jobs[0].lossy, messages)
            return Answer(jobs, ticket, form, self.worker)
        except BaseException:
            ticket.close()
            raise


def text_store(config: DecodeConfig, settings: ServerSettings) -> TextStore | None:
    """Where the texts of earlier requests are kept; None where the config would not look there, or none may be kept.

    A server has one key or none, so the store is of that key alone.
    """
    return TextStore(settings.store_tokens) if settings.store_tokens and config.looks_into_stores else None


def _warm_up(model: LayerSkipModel) -> None:
    """In the decoding thread, before the first request: the thread's own settings, and the slow first forwards."""
    # OpenMP keeps the number of threads per calling thread: a new one would take every core.
    torch.set_num_threads(torch.get_num_threads())
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)
    if model.device.type == "cpu":
        row_kernels()  # which are compiled when a machine draws its first token
    arguments: dict[str, Any] = {"max_new_tokens": _WARM_UP_TOKENS, "eos_token_id": [], "stop_strings": []}
    model.generate([0], **arguments)
    for sampling in model.config.samplings if model.config.regimes is not None else ():
        model.generate([0], **arguments, **sampling.model_dump())


def create_app(model: LayerSkipModel, settings: ServerSettings) -> Starlette:
    """Serves `model` under its config. `app.state.service` is the `Service`.

    Start its worker before serving (not here, so that a model that fails its warm-up does not look like a server's
    failure); it ends with the app's lifespan. Raises: ValueError if the model has no tokenizer.
    """
    service = Service(model, settings)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        service.worker.stop(_STOP_TIMEOUT_S)
        service.preparer.close()

    guard = Middleware(
        Guard, settings=settings, metrics=service.metrics, num_connections=lambda: service.num_connections()
    )
    app = Starlette(routes=_routes(service), middleware=[guard], exception_handlers=_ERROR_HANDLERS, lifespan=lifespan)
    app.state.service = service
    return app


def _routes(service: Service) -> list[Route]:
    async def completions(request: Request) -> Response:
        return await service.answer(request, CompletionRequest, CompletionShape())

    async def chat_completions(request: Request) -> Response:
        return await service.answer(request, ChatRequest, ChatShape())

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [service.model_card()]})

    async def one_model(request: Request) -> Response:
        model_id = request.path_params["model_id"]
        if model_id != service.settings.model_id:
            raise ApiError(404, f"model: no such model: {model_id[:80]!a}", param="model", code="model_not_found")
        return JSONResponse(service.model_card())

    async def health(_: Request) -> Response:
        worker = service.worker
        status = "shutting down" if worker.draining else "ok" if worker.is_alive else "the decoding thread has ended"
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model_id:path}", one_model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:80]!a}"
    answer = error_response(ApiError(error.status_code, f"{where}: {error.detail}"))
    answer.headers.update(error.headers or {})
    return answer


async def _client_left(_: Request, __: Exception) -> Response:
    return Response()  # nobody is there to read it


async def _any_error(_: Request, __: Exception) -> Response:
    # The framework raises it again for the log, after this answer.
    return error_response(ApiError(500, "the server failed on this request; its log says why"))


_ERROR_HANDLERS = {
    ApiError: _api_error,
    HTTPException: _http_error,
    ClientDisconnect: _client_left,
    Exception: _any_error,
}
