"""Observations to new tokens, replies to actions. What the prompt says comes from the environment's configuration."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvGroup
from ragen_jax.envs.base import Environment
from ragen_jax.envs.outside.text_env import TextEnvironment

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


CONTEXTS = ('full', 'limited_multi_turn', 'single_turn')
OVERLONG = ('end', 'drop_oldest')


@dataclasses.dataclass(frozen=True)
class ContextPolicy:
  """How much of an episode the policy sees when it speaks.

  Attributes:
    mode: 'full', the whole conversation, one row an episode; 'limited_multi_turn', the conversation of the last turns,
      one row a turn; 'single_turn', one message with a summary of the last turns, one row a turn.
    turns: turns that the latter two show, the present one included.
    overlong: what happens where that does not fit: the episode ends ('end'), or its oldest turns are left out
      ('drop_oldest'), under 'full' in a new row that begins there.
  """

  mode: str = 'full'
  turns: int = 5
  overlong: str = 'end'


@dataclasses.dataclass(frozen=True)
class PastTurn:
  """A turn that is over.

  Attributes:
    observation: what was shown.
    actions_left: before it.
    names: the actions that were carried out.
    reward: what they brought.
    ids: the reply as it was sampled, its stop token included.
    closed: it ended with the chat format's stop token.
  """

  observation: str
  actions_left: int
  names: tuple[str, ...]
  reward: float
  ids: tuple[int, ...]
  closed: bool


def _count(n: int, noun: str) -> str:
  return f'{n} {noun}' if n == 1 else f'{n} {noun}s'


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
  limits = f'The episode has at most {_count(budget.max_turns, "turn")} and {_count(budget.max_actions, "action")}. '
  if budget.max_actions_per_turn == 1:
    limits += 'Give one action in each turn.'
  else:
    limits += f'Give at most {budget.max_actions_per_turn} actions in one turn, separated by {action_sep}.'
  lines.append(limits)
  return '\n'.join(lines)


class ContextManager:
  """Writes the prompts of a rollout and reads its replies."""

  def __init__(
    self,
    tokenizer: ChatTokenizer,
    specs: list[EnvGroup],
    *,
    think: bool,
    force_prefix: bool,
    action_sep: str,
    policy: ContextPolicy | None = None,
  ):
    """Prepares the fixed parts of the prompts.

    Args:
      tokenizer: with its chat format.
      specs: the environments of the rollout.
      think: replies have a `<think>` part before the answer.
      force_prefix: the reply's first tag is put there for the policy rather than sampled.
      action_sep: what separates the actions of one turn.
      policy: how much of an episode is seen; all of it where not given.
    """
    self.policy = policy or ContextPolicy()
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
      f'Turn {turn + 1}:\nState:\n{_plain(observation)}\nActions left: {actions_left}\n'
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
    user = self._reward_and_turn(env, turn, reward, observation, actions_left)
    return self.tokenizer.encode(self.tokenizer.following(user, self.reply_prefix, closed=closed))

  def _reward_and_turn(self, env: int, turn: int, reward: float, observation: str, actions_left: int) -> str:
    return f'Reward: {format_reward(reward)}\n\n' + self._turn(env, turn, observation, actions_left)

  def prompt(
    self, env: int, past: list[PastTurn], observation: str, actions_left: int, *, used: int, room: int
  ) -> tuple[tuple[int, ...], bool] | None:
    """What to feed before the next reply, by the context policy.

    Args:
      env: index of the environment.
      past: the episode's turns so far.
      observation: its text now.
      actions_left: how many actions it still has.
      used: columns of the row so far.
      room: the most columns that may be used before the reply.

    Returns:
      (tokens, whether they begin a new row rather than follow what is there), or None where they do not fit.
    """
    policy = self.policy
    if not past:
      ids = self.first_segment(env, observation, actions_left)
      return (ids, True) if len(ids) <= room else None
    if policy.mode == 'full':
      ids = self.next_segment(env, len(past), past[-1].reward, observation, actions_left, closed=past[-1].closed)
      if used + len(ids) <= room:
        return ids, False
      if policy.overlong == 'end':
        return None
      shown = len(past) - 1
    else:
      shown = min(policy.turns - 1, len(past))
    write = self._summary if policy.mode == 'single_turn' else self._conversation
    while True:
      ids = write(env, past, shown, observation, actions_left)
      if len(ids) <= room:
        return ids, True
      if policy.overlong == 'end' or not shown:
        return None
      shown -= 1

  def messages(
    self, env: int, past: list[PastTurn], replies: list[str], observation: str, actions_left: int
  ) -> list[dict[str, str]]:
    """What `prompt` shows, as messages for a policy that has a chat format of its own.

    Args:
      env: index of the environment.
      past: the episode's turns so far; their ids are not read.
      replies: what was said in each.
      observation: its text now.
      actions_left: how many actions it still has.

    Returns:
      Messages with `role` and `content`, the last of them the user's. Their length has no limit, and nothing is put
      there for the policy to go on from.
    """
    policy = self.policy
    shown = len(past) if policy.mode == 'full' else min(policy.turns - 1, len(past))
    chat = [{'role': 'system', 'content': SYSTEM}]
    if policy.mode == 'single_turn':
      return [*chat, {'role': 'user', 'content': self._summary_text(env, past, shown, observation, actions_left)}]
    first = len(past) - shown
    turns = [(t.observation, t.actions_left) for t in past[first:]] + [(observation, actions_left)]
    user = self._tasks[env] + '\n\n' + self._turn(env, first, *turns[0])
    for turn, before in enumerate(past[first:], start=first):
      chat += [{'role': 'user', 'content': user}, {'role': 'assistant', 'content': replies[turn]}]
      user = self._reward_and_turn(env, turn + 1, before.reward, *turns[turn + 1 - first])
    return [*chat, {'role': 'user', 'content': user}]

  def _conversation(
    self, env: int, past: list[PastTurn], shown: int, observation: str, actions_left: int
  ) -> tuple[int, ...]:
    """The conversation of the last `shown` turns and the present one, replies as they were sampled."""
    first = len(past) - shown
    turns = [(t.observation, t.actions_left) for t in past[first:]] + [(observation, actions_left)]
    user = self._tasks[env] + '\n\n' + self._turn(env, first, *turns[0])
    ids = self.tokenizer.encode(self.tokenizer.opening(SYSTEM, user, self.reply_prefix))
    for turn, before in enumerate(past[first:], start=first):
      ids += before.ids
      ids += self.next_segment(env, turn + 1, before.reward, *turns[turn + 1 - first], closed=before.closed)
    return ids

  def _summary(
    self, env: int, past: list[PastTurn], shown: int, observation: str, actions_left: int
  ) -> tuple[int, ...]:
    user = self._summary_text(env, past, shown, observation, actions_left)
    return self.tokenizer.encode(self.tokenizer.opening(SYSTEM, user, self.reply_prefix))

  def _summary_text(self, env: int, past: list[PastTurn], shown: int, observation: str, actions_left: int) -> str:
    """One message: the task, what was done in the last `shown` turns, and the present one."""
    first = len(past) - shown
    memory = [
      f'Turn {i + 1}: {_plain(f" {self.action_sep} ".join(t.names)) or "nothing"} in\n{_plain(t.observation)}\n'
      f'brought reward {format_reward(t.reward)}.'
      for i, t in enumerate(past[first:], start=first)
    ]
    remembered = ['What you did before:\n' + '\n'.join(memory)] if memory else []
    return '\n\n'.join([self._tasks[env], *remembered, self._turn(env, len(past), observation, actions_left)])

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
    parsed = [_read_action(game, p) for p in pieces if p]
    known = [x for x in parsed if x is not None]
    valid = bool(known) and len(known) == len(parsed)
    return ParsedReply(tuple(action for action, _ in known[:limit]), tuple(name for _, name in known[:limit]), valid)


def reply_after_prefix(context: ContextManager, thought: str, actions: list[str]) -> str:
  """A well-formed reply, without the part that is forced."""
  answer = f'<answer>{f" {context.action_sep} ".join(actions)}</answer>'
  text = f'<think>{thought}</think>{answer}' if context.think else answer
  return text.removeprefix(context.reply_prefix)


def _read_action(game: Environment | TextEnvironment, text: str) -> tuple[Any, str] | None:
  """An action and how it is written, None where the text is none. Code outside JAX may fail in it."""
  if isinstance(game, TextEnvironment):
    return game.read_action(text)
  action = game.parse_action(text)
  return None if action is None else (action, game.format_action(action))


def _plain(text: str) -> str:
  """Text of a game or an action, in which nothing can be taken for a special token such as <|im_end|>."""
  return text.replace('<|', '< |')


def format_reward(reward: float) -> str:
  """A reward as the prompt shows it: no trailing zeros, at most two decimals."""
  text = f'{reward:.2f}'.rstrip('0').rstrip('.')
  return '0' if text in ('-0', '') else text
