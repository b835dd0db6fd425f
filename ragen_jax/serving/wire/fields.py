"""Wire: what the server does with each field of a request, the table of parsers, documentation and tests."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Treatment(enum.StrEnum):
  """What happens to a field."""

  HONOUR = 'honour'  # it has its effect
  LENIENT = 'lenient'  # needs constrained decoding: refused, or accepted with a warning, by the server's setting
  IGNORE = 'ignore'  # accepted without an effect
  REFUSE = 'refuse'  # 400 unless the value has no effect


# Values that are the same as an absent field.
_NOTHING = (None, 0, False, '', [], {})


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a request; `note` says its effect, or why it has none.

  `neutral` are further values of a refused field that have no effect.
  """

  name: str
  treatment: Treatment
  note: str
  neutral: tuple[Any, ...] = ()

  def is_neutral(self, value: Any) -> bool:
    """Whether the value of a refused field has no effect."""
    return value in (*_NOTHING, *self.neutral)

  def allowed(self) -> str:
    """The values of a refused field that are accepted."""
    *first, last = ('null', 'false', '0', 'empty', *map(repr, self.neutral))
    return f'{", ".join(first)} or {last}'


def _honour(name: str, note: str) -> Field:
  return Field(name, Treatment.HONOUR, note)


def _ignore(*names: str) -> tuple[Field, ...]:
  return tuple(Field(name, Treatment.IGNORE, 'has no effect here') for name in names)


def _refuse(name: str, note: str, *neutral: Any) -> Field:
  return Field(name, Treatment.REFUSE, note, neutral)


_OFF_POLICY = 'the sampled distribution would not be that of the policy'
_COMMON = (
  _honour('model', 'name of the policy; name:agent also names the agent that calls'),
  _honour('temperature', 'divides the logits; the trainer may fix it'),
  _honour('top_p', 'smallest set of tokens of this probability; the trainer may fix it'),
  _honour('top_k', 'number of most likely tokens, 0 or -1 for all; the trainer may fix it'),
  _honour('stream', 'server-sent events'),
  _honour('user', 'repeated in the answers of responses; otherwise without effect'),
  _honour('metadata', 'repeated in the answers of responses; otherwise without effect'),
  _honour('seed', 'replaces the key of the draws, except in training'),
  _honour('return_token_ids', 'ids of prompt and reply in the answer'),
  _refuse('min_p', 'the sampler has no such filter'),
  _refuse('frequency_penalty', _OFF_POLICY),
  _refuse('presence_penalty', _OFF_POLICY),
  _refuse('repetition_penalty', _OFF_POLICY, 1),
  _refuse('logit_bias', _OFF_POLICY),
)
_SAMPLES = (
  _honour('n', 'number of replies'),
  _honour('stop', 'text, or at most 4 texts, that end the reply'),
  _honour('stream_options', 'include_usage asks for a last chunk with the usage'),
)
_TEMPLATE = (_honour('chat_template_kwargs', 'enable_thinking: false opens replies with an empty thought'),)
_TOOLS = (
  _honour('tools', 'functions, written into the system message; strict is ignored'),
  Field('tool_choice', Treatment.LENIENT, 'none or auto; others need constrained decoding'),
  _honour('parallel_tool_calls', 'false: the answer has only the first call; no token is cut'),
)
_IGNORED = _ignore(
  'store', 'service_tier', 'prompt_cache_key', 'prompt_cache_retention', 'prompt_cache_options', 'safety_identifier',
  'moderation',
)  # fmt: skip

CHAT = (
  _honour('messages', 'roles system, developer, user, assistant and tool; texts, and images as data URLs'),
  *_COMMON,
  *_SAMPLES,
  *_TOOLS,
  *_TEMPLATE,
  _honour('max_tokens', 'maximum number of tokens of a reply'),
  _honour('max_completion_tokens', 'maximum number of tokens of a reply; takes precedence over max_tokens'),
  _honour('logprobs', 'log-probabilities of the sampled tokens'),
  _honour('top_logprobs', 'number of likeliest alternatives for each token'),
  _honour('add_generation_prompt', 'false: the prompt ends after the last message'),
  _honour('continue_final_message', 'the last message is the beginning of the reply'),
  Field('response_format', Treatment.LENIENT, 'text; others need constrained decoding'),
  *_IGNORED,
  *_ignore('reasoning_effort', 'verbosity', 'prediction', 'web_search_options'),
  _refuse('modalities', 'replies are texts', ['text']),
  _refuse('audio', 'replies are texts'),
  _refuse('functions', 'use tools'),
  _refuse('function_call', 'use tool_choice', 'none', 'auto'),
)

COMPLETIONS = (
  _honour('prompt', 'a text, a list of texts, a list of ids or a list of lists of ids'),
  _honour('images', 'data URLs of the images whose placeholders the prompt has, which must be a list of ids'),
  *_COMMON,
  *_SAMPLES,
  _honour('max_tokens', 'maximum number of tokens of a reply'),
  _honour('logprobs', 'number of likeliest alternatives for each token; 0 gives the sampled token only'),
  _honour('echo', 'puts the prompt before the text'),
  *_ignore('store'),
  _refuse('best_of', 'use n', 1),
  _refuse('suffix', 'the policy only continues texts'),
)

RESPONSES = (
  _honour('input', 'a text, or items: messages, function calls and their outputs; texts, and images as data URLs'),
  _honour('instructions', 'the system message'),
  *_COMMON,
  *_TOOLS,
  *_TEMPLATE,
  _honour('max_output_tokens', 'maximum number of tokens of a reply'),
  _honour('previous_response_id', 'the call that this one continues'),
  Field('text', Treatment.LENIENT, 'format text; others need constrained decoding'),
  *_IGNORED,
  *_ignore(
    'include', 'top_logprobs', 'reasoning', 'truncation', 'max_tool_calls', 'stream_options', 'context_management'
  ),
  _refuse('background', 'an answer is given in the request that asks for it'),
  _refuse('conversation', 'use previous_response_id'),
  _refuse('prompt', 'there are no stored prompts'),
)
