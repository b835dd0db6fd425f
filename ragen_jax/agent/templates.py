"""All strings of prompts and of the form of replies, and the pieces of the built-in tokenizer.

The built-in model was trained on exactly these texts, and its tokenizer has one token for each fixed stretch of them
(`prompt_pieces`). A change of wording, here or of the default `agent.request`, therefore
requires a new built-in model.
"""

from __future__ import annotations

import re
import string
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ragen_jax.agent.segments import ImageSegment, Observation, join, written
from ragen_jax.agent.world_model.descriptions import CLAIM_SEP, claim_rules, possible_claims
from ragen_jax.agent.world_model.formats import (
  FORMATS,
  describe_form,
  described_sections,
  example_of,
  innermost_tags,
  write_reply,
)
from ragen_jax.envs.spec import EnvSpec

if TYPE_CHECKING:
  from ragen_jax.agent.context_manager import ContextSettings

SYSTEM = 'You act in a small world, one turn at a time, and try to reach its goal.'

# A turn: _TURN n _STATE observation _ACTIONS_LEFT n, then the request for a reply.
_TURN = 'Turn '
_STATE = ':\nState:\n'
_ACTIONS_LEFT = '\nActions left: '
# What an answer holds if it is one action.
_WHOLE_ANSWER = 'your answer'
# What a request may name in braces.
REQUEST_FIELDS = ('form', 'example', 'actions', 'max_words')
# Most actions in the answer of an example.
_EXAMPLE_ACTIONS = 2
# In place of a list of actions, for games whose actions are free text.
_ACTIONS_OF_RULES = 'those that the rules describe'
_REWARD = 'Reward: '
_IMAGE_OF = 'Each state is an image of the {}.'
PARAGRAPH = '\n\n'
# The summary of past turns, for prompts of one message.
MEMORY = 'What you did before:\n'

_THINK, _END_THINK, _ANSWER, _END_ANSWER = '<think>', '</think>', '<answer>', '</answer>'

# Number of levels of each environment from whose texts the pieces are cut.
_SAMPLE_LEVELS = 64
_NUMBER = r'\(\d+, \d+\)|\d+(?:\.\d+)?'


def describe_task(spec: EnvSpec, action_sep: str) -> str:
  """The opening of the first user message: rules, legend, actions and limits."""
  env, budget = spec.env, spec.budget
  lines = [env.rules()]
  if spec.tile is not None:
    shown = f' It shows: {", ".join(env.legend().values())}.' if env.legend() else ''
    lines.append(_IMAGE_OF.format(env.shown_as) + shown)
  elif env.legend():
    lines.append('Symbols: ' + ', '.join(f'{symbol} {meaning}' for symbol, meaning in env.legend().items()) + '.')
  if env.action_names:
    lines.append('Actions: ' + ', '.join(env.action_names) + '.')
  if env.action_help:
    lines.append(env.action_help)
  limits = []
  if env.counts_turns:
    turns, actions = _count(budget.max_turns, 'turn'), _count(budget.max_actions, 'action')
    limits.append(f'The episode has at most {turns} and {actions}.')
  if spec.actions_a_turn > 1:
    limits.append(f'Give at most {spec.actions_a_turn} actions in one turn, separated by {action_sep}.')
  elif not env.whole_answer:
    limits.append('Give one action in each turn.')
  lines += [' '.join(limits)] if limits else []
  return plain('\n'.join(lines))


def system_of(spec: EnvSpec) -> str:
  """The system message of an environment's prompts."""
  return plain(spec.env.system) or SYSTEM


def _count(number: int, noun: str) -> str:
  """'1 turn', '5 turns'."""
  return f'{number} {noun}' if number == 1 else f'{number} {noun}s'


def describe_descriptions(spec: EnvSpec, form: str) -> str:
  """What follows the task if replies of a form describe boards, which have scenes: how to word it; else empty."""
  env = spec.env
  return f'\n{claim_rules(env.scene_words)}' if env.scene_kinds and described_sections(form) else ''


def request_fields(request: str) -> list[str]:
  """The names in braces of a request.

  Raises ValueError if a brace is not closed, or a name has a conversion or a format.
  """
  names = []
  for _, name, form, conversion in string.Formatter().parse(request):
    if form or conversion:
      raise ValueError('a name in braces has no conversion or format')
    names += [] if name is None else [name]
  return names


def check_request(request: str) -> None:
  """Raises ValueError, with what is allowed, if a request names what it cannot be filled with."""
  allowed = f'allowed: text, with {", ".join(f"{{{name}}}" for name in REQUEST_FIELDS)} where their values belong'
  try:
    names = request_fields(request)
  except ValueError as e:
    raise ValueError(f'{e}; {allowed}; a brace itself is {{{{ or }}}}') from e
  if not set(names) <= set(REQUEST_FIELDS):
    raise ValueError(allowed)


def shown_actions(spec: EnvSpec, turn: int, observation: Observation) -> tuple[list[str], list[str]]:
  """The actions that a request shows: those of the example of a reply, and a list of all, empty for free text.

  The turn (from 0) and its observation choose them: members of a group have equal prompts, and over levels and turns
  each action is the first of the example, and of the list, as often as the others.
  """
  words = spec.env.example_actions(written(observation))
  parts = join(observation)
  shown = [s.digest.hex() if isinstance(s, ImageSegment) else spec.env.example_key(s.text) for s in parts]
  number = zlib.crc32('|'.join([str(turn), *shown]).encode())
  count = min(spec.actions_a_turn, _EXAMPLE_ACTIONS)
  *chosen, first = (number // len(words) ** k % len(words) for k in range(count + 1))
  listed = [*words[first:], *words[:first]] if spec.env.action_words else []
  return [words[k] for k in chosen], listed


def _request(spec: EnvSpec, turn: int, observation: Observation, settings: ContextSettings) -> str:
  example, listed = shown_actions(spec, turn, observation)
  separator = f' {settings.action_sep} ' if spec.actions_a_turn > 1 else ' or '  # as in a reply
  answer = {'answer': _WHOLE_ANSWER} if spec.env.whole_answer else {}
  form = describe_form(settings.format, **answer, shown_as=spec.env.shown_as)
  if spec.env.functions:
    form += f' (a call of a tool takes the place of {_ANSWER}{_WHOLE_ANSWER}{_END_ANSWER})'
  return plain(
    (spec.request or settings.request).format(
      form=form,
      example=example_of(settings.format, f' {settings.action_sep} '.join(example)),
      actions=separator.join(listed) or _ACTIONS_OF_RULES,
      max_words=spec.max_words,
    )
  )


def turn_frame(
  spec: EnvSpec, turn: int, actions_left: int, observation: Observation, settings: ContextSettings
) -> tuple[str, str]:
  """The text before and after the observation of a turn (from 0); it decides what the example of an answer shows."""
  env, request = spec.env, _request(spec, turn, observation, settings)
  label = plain(f'{env.state_label}:\n') if env.state_label else ''
  if not env.counts_turns:
    return label, f'\n{request}'
  return f'{_TURN}{turn + 1}:\n{label}', f'{_ACTIONS_LEFT}{actions_left}\n{request}'


def reward_line(reward: float) -> str:
  """The reward of the previous turn, with the blank line that follows it."""
  return f'{_REWARD}{format_reward(reward)}{PARAGRAPH}'


def memory_frame(spec: EnvSpec, turn: int, actions: Sequence[str], reward: float, action_sep: str) -> tuple[str, str]:
  """The text before and after the observation of a past turn (from 0) in a summary."""
  done = plain(f' {action_sep} '.join(actions)) or 'nothing'
  number = f'{_TURN}{turn + 1}: ' if spec.env.counts_turns else ''
  return f'{number}{done} in\n', f'\nbrought reward {format_reward(reward)}.'


def format_reward(reward: float) -> str:
  """A reward as the prompt shows it: no trailing zeros, at most two decimals."""
  text = f'{reward:.2f}'.rstrip('0').rstrip('.')
  return '0' if text in ('-0', '') else text


def plain(text: str) -> str:
  """Changes a text of a game, its rules or an action so that it contains no special token such as <|im_end|>."""
  return text.replace('<|', '< |')


def format_reply(texts: Mapping[str, str], actions: Sequence[str], *, form: str, action_sep: str) -> str:
  """A reply of the right form from tag -> text; tags that the form lacks are ignored, and missing ones are empty."""
  answer = {'answer': f' {action_sep} '.join(actions)}
  return write_reply(form, dict.fromkeys(innermost_tags(form), '') | dict(texts) | answer)


def prompt_pieces(specs: list[EnvSpec], settings: ContextSettings) -> list[str]:
  """The fixed stretches of prompts and demonstrations, each of which is one token of a new tokenizer, in its order.

  Boards, numbers, coordinates and the names of actions vary and are cut out; coordinates and names are pieces too. The
  texts are distinct and not empty.
  """
  form, action_sep = settings.format, settings.action_sep
  pieces = ['user\n', 'assistant\n', 'system\n' + SYSTEM, _THINK, _END_THINK, _ANSWER, _END_ANSWER]
  pieces += [_END_THINK + _ANSWER, f' {action_sep} ', '10', *(str(spec.max_words) for spec in specs), PARAGRAPH]
  pieces += [f'({r}, {c})' for r in range(8) for c in range(8)]
  pieces += [tag for name in FORMATS[form] or () for tag in (f'<{name}>', f'</{name}>')]
  for spec in specs:
    env = spec.env
    keys = jax.vmap(jax.random.key)(jnp.arange(_SAMPLE_LEVELS, dtype=jnp.uint32))
    states = jax.device_get(jax.vmap(env.reset)(keys))
    names = sorted(env.action_words, key=len, reverse=True)
    symbols = list(env.legend())
    pieces += names + [s for s in symbols if len(s.encode()) > 1]
    cut = re.compile('|'.join([_NUMBER, *(re.escape(n) for n in names)]))
    task = describe_task(spec, action_sep)
    if described := describe_descriptions(spec, form):
      pieces += [described, *(lead + claim for lead in ('', CLAIM_SEP) for claim in possible_claims(env.scene_words))]
    # Decimals of the rules (probabilities, rewards) are one token. Whole numbers are digits, because limits can change.
    pieces += re.findall(r'\d+\.\d+', task) + re.split(_NUMBER, task)
    texts = env.rationale(states) if symbols else env.rationale(states) + env.render(states)
    for text in texts:
      pieces += cut.split(text)
    frames = [turn_frame(spec, 0, 0, text, settings) for text in env.render(states)]
    pieces += [_REWARD, PARAGRAPH + _TURN, _STATE, _ACTIONS_LEFT]
    # The last piece of a request first: the order of ids in the tokenizer of the built-in models.
    requests = [cut.split(behind.removeprefix(f'{_ACTIONS_LEFT}0')) for _, behind in frames]
    pieces += [piece for request in requests for piece in reversed(request)]
  return [p for p in dict.fromkeys(pieces) if p]
