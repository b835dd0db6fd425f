"""Assumed lengths of episodes in tokens, and episodes of such lengths."""

from __future__ import annotations

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from ragen_jax.planning.abstract import prompt_room, reply_limits, visual_columns

# The spread of the logarithm of a reply's length.
_SPREAD = 0.4
# Share of a first prompt's tokens with which those of other levels begin too, as in FrozenLake.
_COMMON = 0.75


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Tokens of the episodes of a run; the fields of `config.plan`, within the limits of `config.agent`."""

  prompt: int  # of the first observation
  observation: int  # of each later one
  reply: int  # of a reply, on average
  longest: int  # of the longest reply of a turn, over all rows
  turns: int  # of an episode
  whole: bool  # an episode is one row, and not one for each turn
  limit: int  # columns of a row
  common: int  # tokens with which all prompts begin that begin a row

  @property
  def row(self) -> int:
    """Tokens of a row of the update, on average."""
    return min(self._columns(self.reply, self.turns), self.limit)

  @property
  def sampled(self) -> int:
    """Sampled tokens of a row of the update, on average."""
    return min(self.reply * (self.turns if self.whole else 1), self.row)

  @property
  def rows(self) -> int:
    return 1 if self.whole else self.turns

  def _columns(self, reply: int, turns: int) -> int:
    turns = turns if self.whole else 1
    return self.prompt + turns * reply + (turns - 1) * self.observation


def from_config(config: ConfigDict, max_turns: int) -> Lengths:
  """The assumptions of `config.plan`; `max_turns` is that of the environments."""
  p, agent = config.plan, config.agent
  room = prompt_room(config)
  longest = min(p.longest_reply, max(reply_limits(config), default=agent.max_response_tokens))
  seen = visual_columns(config)
  prompt = min(p.prompt_tokens + seen, room)
  return Lengths(
    prompt=prompt,
    observation=min(p.observation_tokens + seen, room),
    reply=min(p.reply_tokens, longest),
    longest=longest,
    turns=min(p.turns or max_turns, max_turns),
    whole=agent.context == 'full',
    limit=agent.max_context,
    common=0 if seen else int(_COMMON * prompt),  # prompts with images are not cut
  )


def assumed(lengths: Lengths, episodes: int) -> tuple[np.ndarray, np.ndarray]:
  """Tokens i64[episodes, turns] of replies, and the turns i64[episodes], which are all the assumed ones.

  Replies are log-normal around the assumed mean, up to the longest, which one of each turn has.
  """
  replies = draw_replies(np.random.default_rng(0), lengths, episodes, lengths.reply, lengths.longest)
  turns = np.arange(lengths.turns)
  replies[turns % episodes, turns] = lengths.longest  # one of each turn
  return replies, np.full(episodes, lengths.turns)


def draw_replies(rng, lengths: Lengths, episodes: int, mean: float, most: int) -> np.ndarray:
  """Tokens i64[episodes, turns] of replies around a mean, at most `most`."""
  drawn = mean * np.exp(rng.normal(-(_SPREAD**2) / 2, _SPREAD, (episodes, lengths.turns)))
  return np.clip(drawn, 1, most).astype(np.int64)
