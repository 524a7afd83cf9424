"""Requests as values: every field typed and checked, unknown ones refused, harmless ones dropped."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json

from layerskip.config.sampling_params import LEAST_TEMPERATURE, asks_to_sample
from layerskip.config.validated import describe_validation_error
from layerskip.rounds.grammar import Grammar
from layerskip.rounds.logprobs import MAX_LOGPROBS
from layerskip.server.errors import ApiError
from layerskip.server.settings import MAX_MODEL_ID

_HARMLESS = frozenset(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    )
)
"""What clients send for bookkeeping or speed: the answer is the same without them, so they are dropped."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""What this server cannot do, with the values that ask for nothing (null always does): ignoring any other value would
change the answer, so it is refused."""

MAX_CHOICES = 128
"""Of one request: prompts times `n`."""
MAX_TOOLS = 128
"""Of one request, and calls of one turn."""
_MAX_BIASES = 1024
_MAX_STOPS = 16
_MAX_STOP_CHARS = 256


def _read_stops(value: object) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, (tuple, list)) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("must be text, or a list of texts, none of them empty")
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"must be at most {_MAX_STOPS} texts of at most {_MAX_STOP_CHARS} characters")
    return tuple(stops)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and 0 <= item < 1 << 31 for item in value)


def _read_prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Texts or rows of token ids, of which one may stand for a list of one."""
    several = value if isinstance(value, list) and value and isinstance(value[0], (str, list)) else [value]
    if len(several) > MAX_CHOICES:
        raise ValueError(f"must be at most {MAX_CHOICES} prompts, got {len(several)}")
    return tuple(_read_prompt(one) for one in several)


def _read_prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if _is_token_ids(value):
        return tuple(value)  # type: ignore[arg-type]
    raise ValueError("must be text or a list of token ids, or several of them")


def _read_content(value: object, info: ValidationInfo) -> str:
    """Text, or the texts of `{"type": "text"}` parts; an assistant that said nothing has null."""
    if isinstance(value, str):
        return value
    if value is None and info.data.get("role") == "assistant":
        return ""
    if not isinstance(value, list) or not value:
        raise ValueError("must be text or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError('must hold parts of the form {"type": "text", "text": ...} only')
    return "".join(part["text"] for part in value)


def _read_role(value: object) -> object:
    # OpenAI's newer name of the same role; no chat template knows it.
    return "system" if value == "developer" else value


def _read_top_k(value: object) -> object:
    # vLLM's value for off.
    return 0 if value == -1 else value


def _read_count(value: object) -> object:
    # As chats have it.
    return None if value is False else value


def _read_temperature(value: float) -> float:
    # Below what can be sampled at there is no choice.
    return 0.0 if value < LEAST_TEMPERATURE else value


def _read_arguments(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return from_json(value or "{}", allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from None


def _read_bias(value: object) -> object:
    """JSON's names are text."""
    if not isinstance(value, dict):
        return value
    if len(value) > _MAX_BIASES:
        raise ValueError(f"must be of at most {_MAX_BIASES} tokens, got {len(value)}")
    wrong = next((one for one in value if not (one.isascii() and one.isdigit() and len(one) < 10)), None)
    if wrong is not None:
        raise ValueError(f"must map token ids to numbers, got {wrong[:80]!a}")
    return {int(one): bias for one, bias in value.items()}


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Temperature = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False), AfterValidator(_read_temperature)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
PositiveInt = Annotated[int, Field(ge=1, lt=1 << 31)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        # Pydantic would collect an error for each, and a body may hold a hundred thousand.
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(f"{name[:80]!a}: unknown field")
        return data


class StreamOptions(_Strict):
    """What a stream should tell besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted and ignored: padding against eavesdroppers who measure sizes, on a connection of your own."""
    continuous_usage_stats: Literal[False] = False


class JsonSchema(_Strict):
    """OpenAI's form of a schema that the answer keeps to."""

    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """The answer keeps to it in any case."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        return data  # its field's name is its alias


class ResponseFormat(_Strict):
    """What the answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: goes with the type json_schema")
        return self


class StructuredOutputs(_Strict):
    """The same in vLLM's words: one of these."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        if isinstance(data, dict) and sum(value is not None for value in data.values()) != 1:
            raise ValueError("must have one of json, regex, choice and grammar")
        return data


class GenerationFields(_Strict):
    """What both endpoints take. None means: what the model's generation config says."""

    model: Annotated[str, Field(max_length=MAX_MODEL_ID)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    """OpenAI's newer name of `max_tokens`."""
    temperature: Temperature | None = None
    """0 is greedy, and so is less than 0.001; above it samples."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[Annotated[int, Field(ge=0, lt=1 << 31)] | None, BeforeValidator(_read_top_k)] = None
    """0 is off, and so is -1."""
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    """Subtracted from the logit of each token that the answer has said."""
    frequency_penalty: Penalty | None = None
    """The same for each time that it said it."""
    logit_bias: Annotated[dict[int, Bias] | None, BeforeValidator(_read_bias)] = None
    """By token id; 100 all but forces a token, -100 all but bans it."""
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """No token ends the answer before so many."""
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    """Answers to each prompt; of one with a seed each has one of its own, the first that seed."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_read_stops)] = ()
    ignore_eos: bool | None = None
    """Go on to `max_tokens`, as those who measure speed do."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    group: Annotated[str, Field(max_length=64)] | None = None
    """Decode with the config's setting for this prompt group."""
    return_token_ids: bool | None = None
    """Adds `token_ids` to the answer's choice."""
    skip_special_tokens: bool | None = None
    """False: the answer's text has them."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _check_together(self) -> GenerationFields:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("max_tokens, max_completion_tokens: must not differ, they mean the same")
        if self.num_choices > MAX_CHOICES:
            raise ValueError(f"n: prompts times n must be at most {MAX_CHOICES}, got {self.num_choices}")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: needs stream = true")
        formats = [self.response_format and self.response_format.type != "text", self.structured_outputs]
        if sum(map(bool, [*formats, self.told_tools])) > 1:
            raise ValueError("response_format, structured_outputs, tools: must be one of these alone")
        return self

    def grammar(self) -> Grammar | None:
        """What the answer has to look like. Raises: ValueError."""
        found, own = self.response_format, self.structured_outputs
        if found is not None and found.type != "text":
            return Grammar.json(None if found.json_schema is None else found.json_schema.schema_)
        if own is None:
            return None
        if own.choice is not None:
            return Grammar.choice(own.choice)
        if own.regex is not None:
            return Grammar.regex(own.regex)
        return Grammar.json(own.json_) if own.grammar is None else Grammar.lark(own.grammar)

    @property
    def num_logprobs(self) -> int | None:
        """Of each token its log-probability is wanted, and those of so many that are likeliest there; None: of none."""
        return None

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def num_prompts(self) -> int:
        """See `n`."""
        return 1

    @property
    def num_choices(self) -> int:
        """Of the answer."""
        return self.num_prompts * (self.n or 1)

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        """As the chat template gets them."""
        return []

    @property
    def num_new_tokens(self) -> int | None:
        """Output tokens asked for, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def do_sample(self) -> bool | None:
        """Whether it asks to sample (True), for greedy (False), or leaves it to the generation config (None)."""
        return asks_to_sample(self.temperature, self.top_p, self.top_k, self.min_p)


class CompletionRequest(GenerationFields):
    """A body of /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_read_prompts)]
    logprobs: Annotated[Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None, BeforeValidator(_read_count)] = None
    """Of each token its log-probability, and those of so many that are likeliest there."""
    echo: bool | None = None
    """The answer begins with the prompt, with log-probabilities of its tokens, too."""

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class CalledFunction(_Strict):
    """Of a call: which function, with what."""

    name: FunctionName
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments)]
    """Given as the JSON of an object."""


class MessageCall(_Strict):
    """A call that an assistant's turn asked for; `index` is what a stream's pieces had."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class _EmptyExtras(_Strict):
    """What clients copy from an answer into the next request's messages; only empty values mean nothing."""

    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class Message(_EmptyExtras):
    """One turn, as the chat template gets it; `developer` is read as `system`."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_read_role)]
    content: Annotated[str, BeforeValidator(_read_content)] = ""
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=MAX_TOOLS)] | None = None
    reasoning_content: str | None = None
    """What an assistant's turn said to itself."""

    @model_validator(mode="after")
    def _check_together(self) -> Message:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError("tool_calls, reasoning_content: must be of an assistant's turn")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content: is needed")
        return self


class ToolFunction(_Strict):
    """A function that the model may ask for."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """Their JSON schema."""
    strict: bool | None = None
    """Accepted; the schema binds where a call is required, and there in any case."""


class Tool(_Strict):
    """One of a request's tools."""

    type: Literal["function"]
    function: ToolFunction


class _Name(_Strict):
    name: FunctionName


class NamedTool(_Strict):
    """The one that has to be called."""

    type: Literal["function"]
    function: _Name


class ChatRequest(GenerationFields):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=1024)]
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    """Variables for the model's chat template, such as enable_thinking."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """What the model is told that it may call; the answer then parts calls and thoughts from what is said."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """`none`: they are not told of; `required`: the answer calls some and says nothing else; a name: it calls that."""
    parallel_tool_calls: bool | None = None
    """False: of several calls in an answer the first alone is told."""
    logprobs: bool | None = None
    """Whether each token of the answer comes with its log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """And with so many that are likeliest there."""

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [one.function.name for one in self.tools or []]
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: must be one of tools, got {self.tool_choice.function.name}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: needs tools to be required")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs = true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def required_tools(self) -> list[dict[str, Any]]:
        """Those of which the answer has to call some; none where it may say what it likes."""
        if isinstance(self.tool_choice, NamedTool):
            return [one for one in self.told_tools if one["function"]["name"] == self.tool_choice.function.name]
        return self.told_tools if self.tool_choice == "required" else []

    @property
    def most_calls(self) -> int | None:
        """None: any number."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, NamedTool) else None

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [one.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for one in tools]


Parsed = TypeVar("Parsed", bound=GenerationFields)


def parse(kind: type[Parsed], body: bytes) -> Parsed:
    """The body as a request. Raises: ApiError 400 naming the field, the rule and the value got."""
    try:
        data = from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"body: not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, f"body: must be a JSON object, got {type(data).__name__}", code="invalid_json")
    fields = _without_extras(kind, data)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        loc = error.errors(include_url=False, include_input=False)[0]["loc"]
        raise ApiError(400, describe_validation_error(error), param=str(loc[0]) if loc else None) from None


def _without_extras(kind: type[GenerationFields], data: dict[str, Any]) -> dict[str, Any]:
    """The fields that `kind` has, once nothing else in `data` would change the answer."""
    for name, value in data.items():
        if name in kind.model_fields or name in _HARMLESS:
            continue
        if name not in _NEUTRAL:
            raise ApiError(400, f"{name[:80]!a}: unknown field", param=name[:80], code="unknown_field")
        if value is not None and not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            message = f"{name}: not supported by this server, and ignoring it would change the answer"
            raise ApiError(400, message, param=name, code="unsupported_field")
    return {name: value for name, value in data.items() if name in kind.model_fields}


def _same(value: object, neutral: object) -> bool:
    # True == 1 in Python.
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
