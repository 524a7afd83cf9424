"""create_app: the FastAPI application around one model."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from layerskip.config.decode_config import DecodeConfig
from layerskip.decoding.prefix_cache import PrefixCache
from layerskip.drafters import TextStore
from layerskip.model import LayerSkipModel
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
        self.preparer = Preparer(model, settings, self.store, prefixes)
        self.worker = DecodeWorker(self.metrics, settings.queue_limit, lambda: _warm_up(model), self.store)
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
        ticket = self.worker.admit()
        try:
            job = await self.preparer.job(asked, ticket)
            form = AnswerFormat(shape, asked, self.system_fingerprint, job.lossy)
            return Answer(job, form, self.worker)
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
    arguments: dict[str, Any] = {"max_new_tokens": _WARM_UP_TOKENS, "eos_token_id": [], "stop_strings": []}
    model.generate([0], **arguments)
    for sampling in model.config.samplings if model.config.regimes is not None else ():
        model.generate([0], **arguments, **sampling.model_dump())


def create_app(model: LayerSkipModel, settings: ServerSettings) -> FastAPI:
    """Serves `model` under its config. `app.state.service` is the `Service`.

    Start its worker before serving (not here, so that a model that fails its warm-up does not look like a server's
    failure); it ends with the app's lifespan. Raises: ValueError if the model has no tokenizer.
    """
    service = Service(model, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.worker.stop(_STOP_TIMEOUT_S)
        service.preparer.close()

    # The documentation pages would load scripts from elsewhere.
    app = FastAPI(title="layerskip", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.service = service
    app.add_middleware(
        Guard, settings=settings, metrics=service.metrics, num_connections=lambda: service.num_connections()
    )
    _add_error_handlers(app)
    _add_text_routes(app, service)
    _add_other_routes(app, service)
    return app


def _add_text_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Any:
        return await service.answer(request, CompletionRequest, CompletionShape())

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Any:
        return await service.answer(request, ChatRequest, ChatShape())


def _add_other_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    @app.get("/v1/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        if model_id != service.settings.model_id:
            raise ApiError(404, f"model: no such model: {model_id[:80]!a}", param="model", code="model_not_found")
        return service.model_card()

    @app.get("/health")
    async def health() -> JSONResponse:
        worker = service.worker
        status = "shutting down" if worker.draining else "ok" if worker.is_alive else "the decoding thread has ended"
        return JSONResponse({"status": status}, status_code=200 if status == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        where = f"{request.method} {request.url.path[:80]!a}"
        answer = error_response(ApiError(error.status_code, f"{where}: {error.detail}"))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> None:
        """Nobody is there to answer."""

    @app.exception_handler(Exception)
    async def any_error(_: Request, __: Exception) -> JSONResponse:
        # The framework raises it again for the log, after this answer.
        return error_response(ApiError(500, "the server failed on this request; its log says why"))
