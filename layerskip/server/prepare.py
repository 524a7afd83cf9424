"""From a parsed request to a job: chat template, tokens, limits, sampling."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from layerskip.config.lossy_acceptance import lossy_label
from layerskip.decoding.prefix_cache import PrefixCache
from layerskip.drafters import TextStore
from layerskip.engines.batch import Batch
from layerskip.huggingface.messages import MessageParser, response_template
from layerskip.model import GenerationStream, LayerSkipModel
from layerskip.rounds.grammar import Grammar
from layerskip.server.errors import ApiError
from layerskip.server.schemas import ChatRequest, CompletionRequest, GenerationFields
from layerskip.server.settings import ServerSettings
from layerskip.server.tool_calls import calls_alone
from layerskip.server.worker import Event, Job

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's own default for /v1/completions; a chat answer may fill the context."""

_CHARS_PER_TOKEN = 8
"""More than text has."""
_IN_TEMPLATE = {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content"}
"""Fields of a message that the chat template gets."""


class Preparer:
    """Makes jobs. Tokenising runs in a thread of its own, so that neither the event loop nor the model waits for it.

    Raises: ValueError if the model has no tokenizer.
    """

    def __init__(
        self,
        model: LayerSkipModel,
        settings: ServerSettings,
        store: TextStore | None = None,
        prefixes: PrefixCache | None = None,
        batch: Batch | None = None,
    ) -> None:
        if model.tokenizer is None:
            raise ValueError("model: has no tokenizer, so there is no text to serve")
        self._model = model
        self._settings = settings
        self._store, self._prefixes, self._batch = store, prefixes, batch
        # A copy: a fast tokenizer that encodes in one thread refuses to decode in another at that moment.
        self._tokenizer = copy.deepcopy(model.tokenizer)
        self._template = settings.response_template or response_template(self._tokenizer, model.model.config.model_type)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")

    async def jobs(self, asked: CompletionRequest | ChatRequest) -> list[Job]:
        """Ready for the worker: one for each choice of the answer. Raises: ApiError 400 or 404."""
        if asked.model != self._settings.model_id:
            name = asked.model[:80]
            message = f"model: this server has {self._settings.model_id!r} only, got {name!a}"
            raise ApiError(404, message, param="model", code="model_not_found")
        run = asyncio.get_running_loop().run_in_executor
        found = await run(self._executor, self._choices, asked)
        events = asyncio.Queue[tuple[int, Event]]()
        jobs = [self._job(asked, *one, index, events) for index, one in enumerate(found)]
        shares = self._prefixes is not None and not self._model.adapter.recurrent_layers
        if shares and self._remembers(asked):
            for index, job in enumerate(jobs):
                first = index - index % (asked.n or 1)
                job.leader = jobs[first] if index > first else None
        return jobs

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _job(
        asked: GenerationFields,
        ids: list[int],
        stream: GenerationStream,
        message: MessageParser | None,
        echo: str | None,
        index: int,
        events: asyncio.Queue[tuple[int, Event]],
    ) -> Job:
        known, rule = stream.config.sampling, stream.config.lossy
        return Job(
            stream,
            events,
            index,
            asked.stop,
            prompt_ids=ids,
            regime=None if known is None else known.name,
            lossy=None if rule is None else lossy_label(rule),
            message=message,
            echo=echo,
        )

    def _choices(
        self, asked: CompletionRequest | ChatRequest
    ) -> list[tuple[list[int], GenerationStream, MessageParser | None, str | None]]:
        prompts = [self._chat_ids(asked)] if isinstance(asked, ChatRequest) else map(self._prompt_ids, asked.prompt)
        return [
            (ids, self._stream(asked, ids, number), self._message(asked, ids), self._echo(asked, ids))
            for ids in prompts
            for number in range(asked.n or 1)
        ]

    def _echo(self, asked: CompletionRequest | ChatRequest, ids: list[int]) -> str | None:
        """The prompt's text where the answer begins with it."""
        if not asked.echoes:
            return None
        text: str = self._tokenizer.decode(ids, skip_special_tokens=asked.skip_special_tokens is not False)
        return text

    def _message(self, asked: CompletionRequest | ChatRequest, ids: list[int]) -> MessageParser | None:
        if not isinstance(asked, ChatRequest) or not (tools := asked.told_tools):
            return None
        assert self._template is not None  # else they were refused
        return MessageParser(self._template, self._tokenizer.decode(ids), tools, most_calls=asked.most_calls)

    def _grammar(self, asked: CompletionRequest | ChatRequest) -> Grammar | None:
        if not isinstance(asked, ChatRequest) or not (tools := asked.required_tools):
            return asked.grammar()
        assert self._template is not None  # else they were refused
        found = calls_alone(self._template, self._tokenizer, tools, most_calls=asked.most_calls)
        if found is None:
            message = "tool_choice: must be auto or none, as this model's calls are not JSON between two marks"
            raise ApiError(400, message, param="tool_choice")
        return found

    def _stream(self, asked: CompletionRequest | ChatRequest, ids: list[int], number: int) -> GenerationStream:
        """number: of a prompt's answer."""
        remembers = self._remembers(asked)
        arguments: dict[str, Any] = {
            "max_new_tokens": self._num_new_tokens(asked, len(ids)),
            "do_sample": asked.do_sample,
            # Greedy ignores it, and its own 0 would be refused.
            "temperature": asked.temperature or None,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "repetition_penalty": asked.repetition_penalty,
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "logit_bias": asked.logit_bias,
            "min_new_tokens": asked.min_tokens,
            "logprobs": asked.num_logprobs,
            "prompt_logprobs": asked.echoes and asked.num_logprobs is not None,
            # From a source of its own, so that nobody's draws follow from another request's.
            "seed": secrets.randbits(63) if asked.seed is None else asked.seed + number,
            # The worker cuts at a request's own stop texts; without any, the generation config's hold.
            "stop_strings": [] if asked.stop else None,
            "eos_token_id": [] if asked.ignore_eos else None,
            "group": asked.group,
            "continues_text": isinstance(asked, CompletionRequest),
            "text_store": self._store if remembers else None,
            "prefix_cache": self._prefixes if remembers else None,
            "batch": self._batch,
            # Calls of tools are between special tokens of some models.
            "skip_special_tokens": asked.skip_special_tokens is not False and not asked.told_tools,
        }
        try:
            # Computes nothing of the model yet.
            return self._model.stream(ids, grammar=self._grammar(asked), **arguments)
        except ValueError as error:
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from None

    def _remembers(self, asked: GenerationFields) -> bool:
        """With a seed an answer has to be the same another day: neither what is drafted nor how a prompt's numbers are
        rounded may show what was asked before."""
        exact = self._model.engine.batch_invariant and not self._model.config.lossy_rules
        return exact or asked.seed is None

    def _prompt_ids(self, prompt: str | tuple[int, ...]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        self._check_length(prompt, "prompt")
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    def _chat_ids(self, asked: ChatRequest) -> list[int]:
        if getattr(self._tokenizer, "chat_template", None) is None:
            message = "messages: this model's tokenizer has no chat template, use /v1/completions"
            raise ApiError(400, message, param="messages", code="no_chat_template")
        variables = asked.chat_template_kwargs or {}
        own = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages", "conversations"}
        if reserved := variables.keys() & own:
            name = min(reserved)
            message = f"chat_template_kwargs: must be variables of the chat template, {name} is the server's to set"
            raise ApiError(400, message, param="chat_template_kwargs")
        if asked.told_tools and self._template is None:
            message = "tools: neither this model's tokenizer nor Transformers says how it writes calls of tools"
            raise ApiError(400, message + "; start the server with --response-template", param="tools")
        for turn in asked.messages:
            for text in (turn.content, turn.reasoning_content or ""):
                self._check_length(text, "messages")
        self._check_length(json.dumps(asked.told_tools), "tools")
        messages = [
            one.model_dump(include=_IN_TEMPLATE, exclude={"tool_calls": {"__all__": {"index"}}}, exclude_none=True)
            for one in asked.messages
        ]
        ids = self._templated(messages, variables)
        if tools := asked.told_tools:
            without, variables = ids, variables | {"tools": tools}
            if (ids := self._templated(messages, variables)) == without:
                raise ApiError(400, "tools: the model's chat template leaves them out", param="tools")
        from_tools = [one for one in messages if one["role"] == "tool"]
        for one in from_tools:
            one["content"] += "."
        if from_tools and self._templated(messages, variables) == ids:
            message = "messages: the model's chat template leaves out messages of the role 'tool'"
            raise ApiError(400, message, param="messages")
        return ids

    def _check_length(self, text: str, param: str) -> None:
        """Whether its beginning is too long already: a whole body of text takes a second to tokenise, which all others
        would wait for. Raises: ApiError 400."""
        context = self._settings.max_context
        head = text[: _CHARS_PER_TOKEN * context]
        if len(head) < len(text) and len(self._tokenizer(head)["input_ids"]) > context:
            raise _too_long(param, f"more than {context} tokens leave no room for output in {context}")

    def _templated(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> list[int]:
        try:
            encoded: Any = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, **variables
            )
        except Exception as error:  # noqa: BLE001 (a template is somebody's program and may raise anything)
            message = f"messages: the model's chat template refuses them: {' '.join(str(error).split())[:200]}"
            raise ApiError(400, message, param="messages") from None
        ids: list[int] = encoded["input_ids"]
        return ids

    def _num_new_tokens(self, asked: GenerationFields, num_prompt_tokens: int) -> int:
        limit, context = self._settings.max_new_tokens, self._settings.max_context
        param = "messages" if isinstance(asked, ChatRequest) else "prompt"
        room = context - num_prompt_tokens
        if room < 1:
            raise _too_long(param, f"{num_prompt_tokens} tokens leave no room for output in {context}")
        wanted = asked.num_new_tokens
        if wanted is None:
            return min(limit, room, DEFAULT_COMPLETION_TOKENS if param == "prompt" else room)
        if wanted > limit:
            raise ApiError(400, f"max_tokens: must be at most {limit} on this server, got {wanted}", param="max_tokens")
        if wanted > room:
            raise _too_long(param, f"{num_prompt_tokens} tokens and max_tokens = {wanted} must fit in {context}")
        return wanted


def _too_long(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="context_length_exceeded")
