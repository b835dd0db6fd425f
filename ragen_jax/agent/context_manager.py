"""Observations to new tokens, replies to actions. What the prompt says comes from the environment's configuration."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvGroup

SYSTEM = 'You act in a small world, one turn at a time, and try to reach its goal.'

_WITH_THOUGHT = re.compile(r'\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>', re.DOTALL)
_ANSWER_ONLY = re.compile(r'\s*<answer>(.*?)</answer>', re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ParsedReply:
  """What a reply asks for.

  Attributes:
    actions: parsed actions that exist, at most `max_actions_per_turn`.
    names: how they are written.
    valid: the form is right, there is an action, and every action named exists.
  """

  actions: tuple[Any, ...]
  names: tuple[str, ...]
  valid: bool


def describe_task(spec: EnvGroup, action_sep: str) -> str:
  """The opening of the first user message: rules, legend, actions and limits.

  Args:
    spec: the environment and its budget.
    action_sep: what separates the actions of one turn.
  """
  env, budget = spec.env, spec.budget
  lines = [env.rules()]
  if env.legend():
    lines.append('Symbols: ' + ', '.join(f'{symbol} {meaning}' for symbol, meaning in env.legend().items()) + '.')
  if env.action_names:
    lines.append('Actions: ' + ', '.join(env.action_names) + '.')
  if env.action_help:
    lines.append(env.action_help)
  lines.append(
    f'At most: {budget.max_turns} in number of turns, {budget.max_actions} of actions, {budget.max_actions_per_turn} '
    f'of actions in one turn, separated by {action_sep}.'
  )
  return '\n'.join(lines)


class ContextManager:
  """Writes the prompts of a rollout and reads its replies."""

  def __init__(
    self, tokenizer: ChatTokenizer, specs: list[EnvGroup], *, think: bool, force_prefix: bool, action_sep: str
  ):
    """Prepares the fixed parts of the prompts.

    Args:
      tokenizer: with its chat format.
      specs: the environments of the rollout.
      think: replies have a `<think>` part before the answer.
      force_prefix: the reply's first tag is put there for the policy rather than sampled.
      action_sep: what separates the actions of one turn.
    """
    self.tokenizer = tokenizer
    self.think = think
    self.action_sep = action_sep
    self.reply_prefix = ('<think>' if think else '<answer>') if force_prefix else ''
    self._specs = specs
    self._tasks = [describe_task(s, action_sep) for s in specs]

  def _turn(self, env: int, turn: int, observation: str, actions_left: int) -> str:
    """A turn's part of the user message: number, state, actions left, form and length of the reply."""
    form = '<think>your thoughts</think>' if self.think else ''
    return (
      f'Turn {turn + 1}:\nState:\n{observation}\nActions left: {actions_left}\n'
      f'Answer as {form}<answer>your actions</answer> and nothing else, in at most '
      f'{self._specs[env].max_words} words.'
    )

  def first_segment(self, env: int, observation: str, actions_left: int) -> tuple[int, ...]:
    """Tokens of the conversation up to the first reply.

    Args:
      env: index of the environment.
      observation: its text.
      actions_left: how many actions the episode still has.
    """
    user = self._tasks[env] + '\n\n' + self._turn(env, 0, observation, actions_left)
    return self.tokenizer.encode(self.tokenizer.opening(SYSTEM, user, self.reply_prefix))

  def next_segment(
    self, env: int, turn: int, reward: float, observation: str, actions_left: int, *, closed: bool
  ) -> tuple[int, ...]:
    """Tokens between a reply and the next one.

    Args:
      env: index of the environment.
      turn: index of the turn that begins, from 1.
      reward: the environment's reward in the turn before.
      observation: its text now.
      actions_left: how many actions the episode still has.
      closed: the reply before ended with the chat format's stop token.
    """
    user = f'Reward: {format_reward(reward)}\n\n' + self._turn(env, turn, observation, actions_left)
    return self.tokenizer.encode(self.tokenizer.following(user, self.reply_prefix, closed=closed))

  def reply_texts(self, replies: list[list[int]]) -> list[str]:
    """Sampled ids, stop tokens left out, to whole replies with their forced prefix."""
    stops = set(self.tokenizer.stop_ids)
    cut = [ids[:-1] if ids and ids[-1] in stops else ids for ids in replies]
    return [self.reply_prefix + text for text in self.tokenizer.decode_batch(cut)]

  def parse(self, env: int, text: str) -> ParsedReply:
    """Reads a reply. Text after the answer is ignored; a reply that never closes its answer has no actions."""
    match = (_WITH_THOUGHT if self.think else _ANSWER_ONLY).match(text)
    if match is None:
      return ParsedReply((), (), False)
    game = self._specs[env].env
    limit = self._specs[env].budget.max_actions_per_turn
    pieces = [p.strip() for p in match.group(match.lastindex).split(self.action_sep)]
    parsed = [game.parse_action(p) for p in pieces if p]
    actions = tuple(a for a in parsed if a is not None)
    valid = bool(actions) and len(actions) == len(parsed)
    return ParsedReply(actions[:limit], tuple(game.format_action(a) for a in actions[:limit]), valid)


def format_reward(reward: float) -> str:
  """A reward as the prompt shows it: no trailing zeros, at most two decimals."""
  text = f'{reward:.2f}'.rstrip('0').rstrip('.')
  return '0' if text in ('-0', '') else text
