"""Speakers that say what a test wrote before, in tokens and in text."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from configs import default
from ragen_jax import build
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager, ContextSettings
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Limits, TextReply
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.agent.world_model.state_reward import ReplyRewardSettings
from ragen_jax.distributed.processes import RowShare
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.sampling.sampler import Reply
from ragen_jax.utils.observer import Observer
from tests.support.configs import small_config

# Of the right form and not; too many actions; unknown ones. Without the forced '<think>'.
REPLIES = [
  'hm</think><answer>Down</answer>',
  'Left',
  '</think><answer>Right || Jump || Left || Up || Left</answer>',
  '</think><answer>Down || Down || Right || Right || Down || Right</answer>',
  '</think><answer>Up</answer>',
]


def limits(**changes) -> Limits:
  """Limits in which 5 turns of short texts fit."""
  fields = dict(
    max_turns=5,
    max_response_tokens=64,
    max_context=1024,
    format_penalty=-0.1,
    length_step=256,
    drop_finished=False,
    schedule='lockstep',
    decode_chunk=64,
    rows_in_flight=0,
    env_threads=0,
    episode_timeout=0.0,
    rollout_timeout=0.0,
    replies=ReplyRewardSettings(format_reward=0.0, state_reward=0.0, state_floor=0.5, state_place='turn'),
  )
  return Limits(**fields | changes)


def context_settings(**changes) -> ContextSettings:
  """The settings of the default config, with changes."""
  fields = dict(
    format='free_think', force_prefix=True, action_sep='||', request=default.get_config().agent.request,
    context='full', context_turns=5, overlong='end',
  )  # fmt: skip
  return ContextSettings(**fields | changes)


def make_proxy(tokenizer: ChatTokenizer, tags, groups=2, size=2, context=None, **changes) -> AgentProxy:
  """A rollout loop.

  Args:
    tokenizer: of the prompts.
    tags: of the default config's environments.
    groups: of each tag.
    size: of a group.
    context: changes of `context_settings`.
    **changes: of `limits`.
  """
  config = small_config(envs__FrozenLake__max_turns=5)
  specs = build.env_specs(config, tags, (groups,) * len(tags))
  context = ContextManager(tokenizer, specs, context_settings(**context or {}))
  return AgentProxy(EnvStateManager(specs, size), context, limits(**changes))


class ScriptedSampler:
  """In a sampler's place: row by row, replies that were written before, each with the stop token."""

  def __init__(self, tokenizer: ChatTokenizer, replies: list[list[str]]):
    self.share = RowShare()
    self.stop_ids = tokenizer.stop_ids
    self.experts = False
    self.observer = Observer()
    self._replies = [[(*tokenizer.encode(r), tokenizer.stop_ids[0]) for r in row] for row in replies]
    self._turn = 0

  def decode_weights(self, params):
    del params
    return nnx.State({})

  def rows_that_fit(self, rows, columns, image_tokens):
    del columns, image_tokens
    return rows

  def init(self, rows, size):
    del size
    return np.arange(rows)

  def resize(self, state, size):
    del size
    return state

  def extend(self, params, state, tokens, count, begins, *, rows, images):
    del params, tokens, count, begins, rows, images
    return state

  def share_rows(self, state, source, columns):
    del source, columns
    return state

  def decode(self, params, state, keys, budget, *, columns, sampling, rows, enough):
    del params, keys, sampling, enough
    part = state if rows is None else state[rows]
    tokens = np.zeros((len(part), columns), np.int32)
    count = np.zeros((len(part),), np.int32)
    for i, row in enumerate(part):
      if budget[i]:
        ids = self._replies[row][self._turn]
        tokens[i, : len(ids)], count[i] = ids, len(ids)
    self._turn += 1
    nothing = np.zeros(tokens.shape, np.float32)
    fields = (tokens, nothing, nothing, nothing, count, np.zeros(len(part), bool))
    return state, Reply(*(jax.numpy.asarray(x) for x in fields)), np.asarray(False)


def scripted_tokens(tokenizer: ChatTokenizer, replies: list[list[str]]) -> SamplerSpeaker:
  """A speaker in tokens: for each row its replies, without the forced prefix."""
  return SamplerSpeaker(ScriptedSampler(tokenizer, replies), None, jax.random.key(0), PLAIN)


class ScriptedText:
  """A speaker in text: in each turn the same reply in all rows, forced prefix included; none in `lost` turns."""

  writes_tokens = False

  def __init__(self, replies: list[str], lost: tuple[int, ...] = ()):
    self._replies, self._lost = replies, lost

  def reply(self, log):
    if not log.live:
      return None
    lost = log.turn in self._lost
    return {row: TextReply('' if lost else self._replies[log.turn], answered=not lost) for row in log.live}
