"""Wire: a validated request, whichever endpoint it came to."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from ragen_jax.agent.segments import ImageSegment
from ragen_jax.serving.conversation.messages import Message, TemplateOptions, Tool
from ragen_jax.serving.errors import bad_request, wrong_value
from ragen_jax.serving.types import SamplingParams
from ragen_jax.serving.wire.body import Body
from ragen_jax.serving.wire.images import ImageLimits, RequestImages

# What clients of OpenAI's interface may ask for.
MOST_STOPS = 4
MOST_ALTERNATIVES = 20
HIGHEST_TEMPERATURE = 2.0
# Lower temperatures take the most likely token, as 0 does; clients send such numbers for 0.
LOWEST_TEMPERATURE = 1e-3
_SEEDS = (-(2**63), 2**63 - 1)
_LONGEST_STOP = 256
_NO_TEMPLATE = TemplateOptions(enable_thinking=True, add_generation_prompt=False, reply_prefix='')


class Kind(enum.StrEnum):
  """The endpoint of a request."""

  CHAT = 'chat'
  COMPLETIONS = 'completions'
  RESPONSES = 'responses'


@dataclasses.dataclass(frozen=True)
class RequestLimits:
  """What a request may ask for.

  Attributes:
    vocabulary: number of ids; prompts of ids hold smaller ones.
    context: columns of a row; no request asks for more tokens.
    replies: most replies of one request, over all its prompts.
    messages: most messages, items of an input or prompts.
    lenient: whether requests that need constrained decoding are sampled without it, with a warning; otherwise they are
      refused.
    images: how images are read; None if the policy reads text only.
  """

  vocabulary: int
  context: int
  replies: int
  messages: int
  tools: int
  lenient: bool
  images: ImageLimits | None = None

  def image_reader(self) -> RequestImages | None:
    """The reader of the images of one request; None if the policy reads text only."""
    return None if self.images is None else RequestImages(self.images)


@dataclasses.dataclass(frozen=True)
class AskedSampling:
  """Sampling parameters of a request, see `SamplingParams`; None where the server's values hold."""

  temperature: float | None
  top_p: float | None
  top_k: int | None
  max_tokens: int | None
  stop: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class CallSpec:
  """A request.

  Attributes:
    agent: name of the agent that calls, from a model 'name:agent'; '' for none.
    seed: replaces the key of the draws.
    messages: the conversation of chat and responses, without a message that is the beginning of the reply.
    prompts: the prompts of completions, texts or ids.
    images: those of completions, whose placeholders the only prompt has, which is ids.
    parse_calls: whether tool calls in the reply are told from its content.
    parallel_tool_calls: whether the answer has more than the first call.
    n: number of replies to each prompt.
    include_usage: the stream ends with the usage.
    top_logprobs: number of likeliest alternatives in the answer, for each token.
    echo: the text of completions begins with the prompt.
    previous_response_id: the call that a request to responses continues; '' for none.
    warnings: what the client asked for and does not get, for a header.
    echoed: fields of a request to responses that its answer repeats.
  """

  kind: Kind
  model: str
  agent: str
  seed: int | None
  stream: bool
  return_token_ids: bool
  user: str
  metadata: dict[str, Any]
  sampling: AskedSampling
  messages: tuple[Message, ...] = ()
  prompts: tuple[str | tuple[int, ...], ...] = ()
  images: tuple[ImageSegment, ...] = ()
  tools: tuple[Tool, ...] = ()
  parse_calls: bool = False
  parallel_tool_calls: bool = True
  template: TemplateOptions = _NO_TEMPLATE
  n: int = 1
  include_usage: bool = False
  logprobs: bool = False
  top_logprobs: int = 0
  echo: bool = False
  previous_response_id: str = ''
  warnings: tuple[str, ...] = ()
  echoed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def sampling_params(self, defaults: SamplingParams, *, fixed: bool) -> tuple[SamplingParams, tuple[str, ...]]:
    """The parameters of the engine, and the names of those that differ from what was asked for.

    Args:
      defaults: what holds where the request says nothing; its `max_tokens` is also the most that a request gets.
      fixed: the trainer fixes temperature, top_p and top_k, because it takes the sampled distribution for the policy's.
    """
    asked = {name: getattr(self.sampling, name) for name in ('temperature', 'top_p', 'top_k', 'max_tokens')}
    used = {name: getattr(defaults, name) if value is None else value for name, value in asked.items()}
    used['max_tokens'] = min(used['max_tokens'], defaults.max_tokens)
    if fixed:
      used |= {name: getattr(defaults, name) for name in ('temperature', 'top_p', 'top_k')}
    changed = tuple(name for name, value in asked.items() if value is not None and value != used[name])
    params = SamplingParams(**used, stop=self.sampling.stop, top_logprobs=self.top_logprobs)
    return params, changed


# -- fields that several endpoints share -------------------------------------------------------------------------------


def read_common(body: Body) -> dict[str, Any]:
  """The fields of `CallSpec` that all endpoints have, by their names."""
  model = body.string('model')
  if not model:
    raise bad_request('model', 'model is missing: must be the name of a model of /v1/models')
  name, _, agent = model.partition(':')
  return {
    'model': name,
    'agent': agent,
    'seed': body.integer('seed', *_SEEDS),
    'stream': body.boolean('stream', False),
    'return_token_ids': body.boolean('return_token_ids', False),
    'user': body.string('user'),
    'metadata': body.mapping('metadata'),
  }


def read_sampling(body: Body, max_tokens: int | None, stop: tuple[str, ...]) -> AskedSampling:
  """The sampling parameters; the endpoints name the last two in their own ways."""
  top_k = body.integer('top_k', -1, 2**31 - 1)
  temperature = body.number('temperature', 0.0, HIGHEST_TEMPERATURE)
  return AskedSampling(
    temperature=0.0 if temperature is not None and temperature < LOWEST_TEMPERATURE else temperature,
    top_p=body.number('top_p', 0.0, 1.0, above=True),
    top_k=None if top_k is None else max(top_k, 0),
    max_tokens=max_tokens,
    stop=stop,
  )


def read_stop(body: Body) -> tuple[str, ...]:
  """The texts that end a reply."""
  value = body.value('stop')
  texts = [value] if isinstance(value, str) else [] if value is None else value
  right = isinstance(texts, list) and len(texts) <= MOST_STOPS
  if not right or not all(isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP for text in texts):
    allowed = f'a text or at most {MOST_STOPS} texts, each of 1 to {_LONGEST_STOP} characters'
    raise wrong_value('stop', value, allowed)
  return tuple(dict.fromkeys(texts))


def read_n(body: Body, limits: RequestLimits, prompts: int) -> int:
  """The number of replies to each of the prompts."""
  n = body.integer('n', 1, limits.replies) or 1
  if n * prompts > limits.replies:
    raise bad_request('n', f'n={n} for {prompts} prompts: must ask for at most {limits.replies} replies')
  return n


def read_template(body: Body, *, add_generation_prompt: bool, reply_prefix: str) -> TemplateOptions:
  """How the prompt opens the reply; other arguments of the template than enable_thinking have no effect."""
  thinking = body.mapping('chat_template_kwargs').get('enable_thinking')
  if thinking is not None and not isinstance(thinking, bool):
    raise wrong_value('chat_template_kwargs.enable_thinking', thinking, 'true or false')
  return TemplateOptions(thinking is not False, add_generation_prompt, reply_prefix)


def read_tool_choice(body: Body, limits: RequestLimits) -> tuple[bool, tuple[str, ...]]:
  """Whether tool calls are told from content, and warnings."""
  choice = body.value('tool_choice')
  if choice is None or choice in ('auto', 'none'):
    return choice != 'none', ()
  if not isinstance(choice, dict) and choice != 'required':
    raise wrong_value('tool_choice', choice, 'none or auto')
  return True, _unconstrained('tool_choice', choice, 'none or auto', limits)


def read_text_format(value: Any, name: str, limits: RequestLimits) -> tuple[str, ...]:
  """Warnings about the form that a reply should have."""
  if value is None:
    return ()
  kind = value.get('type') if isinstance(value, dict) else None
  if kind == 'text':
    return ()
  if kind not in ('json_object', 'json_schema'):
    raise wrong_value(name, value, 'an object of the type text')
  return _unconstrained(name, kind, 'of the type text', limits)


def _unconstrained(name: str, value: Any, allowed: str, limits: RequestLimits) -> tuple[str, ...]:
  if not limits.lenient:
    raise wrong_value(name, value, f'{allowed}; the server has no constrained decoding')
  return (f'{name} is not enforced',)


def header_warnings(spec: CallSpec, changed: tuple[str, ...]) -> dict[str, str]:
  """Headers that tell what a request does not get; `changed` is from `sampling_params`."""
  headers = {'x-ragen-warning': '; '.join(spec.warnings)} if spec.warnings else {}
  return headers | ({'x-ragen-changed': ', '.join(changed)} if changed else {})
