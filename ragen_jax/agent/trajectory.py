"""One timeline of tokens an episode: what the sampler produced is what the loss sees, in the same columns."""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from flax import struct


class Status(enum.IntEnum):
  """How an episode ended."""

  RUNNING = 0
  SUCCESS = 1
  FAILURE = 2
  OUT_OF_TURNS = 3
  OUT_OF_ACTIONS = 4
  OUT_OF_CONTEXT = 5


@struct.dataclass
class Trajectory:
  """B rows of a rollout, groups contiguous. All arrays live on the host until the update places them.

  Attributes:
    tokens: i32[B, T], the ids as fed and as sampled, dense from column 0, then padding.
    loss_mask: bool[B, T], True where the policy sampled the token.
    logprobs: f32[B, T], log p(tokens[t] | tokens[<t]) under the sampler, 0 where not sampled.
    values: f32[B, T], the critic's value of the state that tokens[t] was drawn from, 0 where not sampled.
    entropies: f32[B, T], entropy of the distribution that tokens[t] was drawn from, 0 where not sampled.
    rewards: f32[B, T], the turn's environment reward and penalties, on the turn's last sampled token.
    turn: i32[B, T], index of the turn (its observation and its reply), -1 in padding.
    length: i32[B], used columns.
    group: i32[B], rows of one group share the level, and so the prompt.
    episode: i32[B], rows of one episode share it; one row an episode under full history.
    env: i32[B], index of the environment among those of the rollout.
    status: i32[B], a `Status`.
    policy_version: i32[B], the number of updates that the sampling weights had seen.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  logprobs: np.ndarray
  values: np.ndarray
  entropies: np.ndarray
  rewards: np.ndarray
  turn: np.ndarray
  length: np.ndarray
  group: np.ndarray
  episode: np.ndarray
  env: np.ndarray
  status: np.ndarray
  policy_version: np.ndarray


@dataclasses.dataclass
class Turn:
  """What one turn looked like to a person.

  Attributes:
    observation: the environment's text at the turn's start.
    reply: the whole reply, forced prefix included, stop token not.
    actions: the names of the actions that were carried out.
    reward: from the environment, the format penalty not included.
    penalty: the format penalty, 0 or negative.
    valid: the reply had the right form and every action in it exists.
    effective: how many of the actions changed the state.
  """

  observation: str
  reply: str
  actions: list[str]
  reward: float
  penalty: float
  valid: bool
  effective: int


@dataclasses.dataclass
class Episode:
  """One row of a `Trajectory`, for people and for statistics.

  Attributes:
    tag: the environment's tag in the config.
    group: group id, as in the trajectory.
    level_seed: the seed that the level was made from.
    turns: what happened.
    final_observation: the environment's text after the last action.
    status: how it ended.
  """

  tag: str
  group: int
  level_seed: int
  turns: list[Turn]
  final_observation: str = ''
  status: Status = Status.RUNNING

  @property
  def success(self) -> bool:
    return self.status == Status.SUCCESS

  @property
  def env_return(self) -> float:
    """Sum of the environment's rewards."""
    return sum(t.reward for t in self.turns)

  @property
  def score(self) -> float:
    """Sum of the environment's rewards and of the format penalties: what is trained on."""
    return self.env_return + sum(t.penalty for t in self.turns)


class Timeline:
  """Collects the columns of B rows while a rollout runs, then becomes a `Trajectory`."""

  def __init__(self, rows: int, capacity: int):
    """Empty rows.

    Args:
      rows: B.
      capacity: the most columns that a row may have.
    """
    shape = (rows, capacity)
    self.tokens = np.zeros(shape, np.int32)
    self.loss_mask = np.zeros(shape, bool)
    self.logprobs = np.zeros(shape, np.float32)
    self.values = np.zeros(shape, np.float32)
    self.entropies = np.zeros(shape, np.float32)
    self.rewards = np.zeros(shape, np.float32)
    self.turn = np.full(shape, -1, np.int32)
    self.length = np.zeros((rows,), np.int32)

  def append_context(self, row: int, ids: tuple[int, ...], turn: int) -> None:
    """Adds tokens that the policy did not sample."""
    start, end = self.length[row], self.length[row] + len(ids)
    self.tokens[row, start:end] = ids
    self.turn[row, start:end] = turn
    self.length[row] = end

  def append_reply(self, rows: np.ndarray, reply, turn: int) -> None:
    """Adds what the sampler drew.

    Args:
      rows: i32[b], the timeline's row for each row of the reply.
      reply: a `sampling.Reply` with NumPy leaves, b rows.
      turn: the turn's index.
    """
    for i, row in enumerate(rows):
      n = reply.count[i]
      start, end = self.length[row], self.length[row] + n
      self.tokens[row, start:end] = reply.tokens[i, :n]
      self.loss_mask[row, start:end] = True
      self.logprobs[row, start:end] = reply.logprobs[i, :n]
      self.values[row, start:end] = reply.values[i, :n]
      self.entropies[row, start:end] = reply.entropies[i, :n]
      self.turn[row, start:end] = turn
      self.length[row] = end

  def reward_last_token(self, row: int, reward: float) -> None:
    """Puts a turn's reward on the row's last column, which is the turn's last sampled token."""
    self.rewards[row, self.length[row] - 1] = reward

  def trajectory(self, *, group, episode, env, status, policy_version: int, pad_id: int) -> Trajectory:
    """The rows so far, cut to the longest one."""
    width = max(int(self.length.max()), 1)
    columns = np.arange(width)[None, :]
    tokens = np.where(columns < self.length[:, None], self.tokens[:, :width], pad_id)
    return Trajectory(
      tokens=tokens.astype(np.int32),
      loss_mask=self.loss_mask[:, :width],
      logprobs=self.logprobs[:, :width],
      values=self.values[:, :width],
      entropies=self.entropies[:, :width],
      rewards=self.rewards[:, :width],
      turn=self.turn[:, :width],
      length=self.length,
      group=np.asarray(group, np.int32),
      episode=np.asarray(episode, np.int32),
      env=np.asarray(env, np.int32),
      status=np.asarray(status, np.int32),
      policy_version=np.full((len(self.length),), policy_version, np.int32),
    )
