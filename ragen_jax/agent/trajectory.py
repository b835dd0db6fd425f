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
  ENV_ERROR = 6  # its environment failed; says nothing about the policy


def status_after_turn(*, done: bool, success: bool, actions_left: int, last_turn: bool) -> Status:
  """How an episode stands behind a turn that its environment played; the game's own end comes before the limits."""
  if done:
    return Status.SUCCESS if success else Status.FAILURE
  if actions_left <= 0:
    return Status.OUT_OF_ACTIONS
  return Status.OUT_OF_TURNS if last_turn else Status.RUNNING


# Cut off by a limit, before the game was over.
TRUNCATED = (Status.OUT_OF_TURNS, Status.OUT_OF_ACTIONS, Status.OUT_OF_CONTEXT)


@struct.dataclass
class Trajectory:
  """B rows of a rollout, groups contiguous. All arrays live on the host until the update places them.

  Attributes:
    tokens: i32[B, T], the ids as fed and as sampled, dense from column 0, then padding.
    loss_mask: bool[B, T], True where the policy sampled the token.
    logprobs: f32[B, T], log p(tokens[t] | tokens[<t]) under the sampler, 0 where not sampled.
    values: f32[B, T], the critic's value of the state that tokens[t] was drawn from, 0 where not sampled and where
      the sampler does not record them.
    entropies: f32[B, T], entropy of the distribution that tokens[t] was drawn from, 0 where not sampled.
    rewards: f32[B, T], the turn's environment reward and penalties, on the turn's last sampled token.
    turn: i32[B, T], index of the turn (its observation and its reply), -1 in padding.
    length: i32[B], used columns.
    group: i32[B], rows of one group share the level, and so the prompt.
    episode: i32[B], rows of one episode share it; one row an episode under full history. Other context policies give
      several, one after the other, and rows of length 0 at the end that belong to none.
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
    picture: u8[H, W, 3], the board at the turn's start, where it was asked for and the environment draws one.
    tokens: the reply's, its stop token included; 0 where nobody counted them.
    answered: a reply came; only one over a network may not.
  """

  observation: str
  reply: str
  actions: list[str]
  reward: float
  penalty: float
  valid: bool
  effective: int
  picture: np.ndarray | None = None
  tokens: int = 0
  answered: bool = True


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
    outside: its environment lives outside JAX, and may fail.
    error: what went wrong where it failed.
    final_picture: u8[H, W, 3], the board after the last action, as for turns.
  """

  tag: str
  group: int
  level_seed: int
  turns: list[Turn]
  final_observation: str = ''
  status: Status = Status.RUNNING
  outside: bool = False
  error: str = ''
  final_picture: np.ndarray | None = None

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


_COLUMNS = ('tokens', 'loss_mask', 'logprobs', 'values', 'entropies', 'rewards', 'turn')


class Timeline:
  """Collects the columns of B episodes while a rollout runs, then becomes a `Trajectory`.

  Each episode writes to one open row. A context policy that shows less than the whole conversation begins a new row;
  the row before is then put aside as it is.
  """

  def __init__(self, rows: int, capacity: int):
    """Empty rows.

    Args:
      rows: B.
      capacity: the most columns that a row may have.
    """
    shape = (rows, capacity)
    self._done: list[tuple[int, dict[str, np.ndarray]]] = []  # (episode, its columns)
    self.tokens = np.zeros(shape, np.int32)
    self.loss_mask = np.zeros(shape, bool)
    self.logprobs = np.zeros(shape, np.float32)
    self.values = np.zeros(shape, np.float32)
    self.entropies = np.zeros(shape, np.float32)
    self.rewards = np.zeros(shape, np.float32)
    self.turn = np.full(shape, -1, np.int32)
    self.length = np.zeros((rows,), np.int32)

  def begin_row(self, row: int) -> None:
    """Puts the episode's row aside, if there is anything in it, and begins a new one."""
    n = self.length[row]
    if n:
      self._done.append((row, {name: getattr(self, name)[row, :n].copy() for name in _COLUMNS}))
      for name in _COLUMNS:
        getattr(self, name)[row] = -1 if name == 'turn' else 0
      self.length[row] = 0

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
    """The rows so far, cut to the longest one.

    Args:
      group, episode, env, status: i32[B], of the episodes.
      policy_version: number of updates behind the weights that sampled.
      pad_id: the token behind a row's last.

    Returns:
      B rows in the order of the episodes, and where there are more, an episode's rows one after the other, and rows
      without any token at the end, up to a multiple of B / 4: so there are few numbers of rows.
    """
    count = len(self.length)
    of, parts = np.arange(count), {name: getattr(self, name) for name in _COLUMNS}
    length = self.length
    if self._done:
      rows = sorted([(e, i, c) for i, (e, c) in enumerate(self._done)], key=lambda x: x[:2])
      rows += [(e, len(rows), {n: x[e, : self.length[e]] for n, x in parts.items()}) for e in range(count)]
      rows.sort(key=lambda x: x[:2])
      step = max(count // 4, 1)
      empty = {name: x[0, :0] for name, x in parts.items()}
      rows += [(0, 0, empty)] * (-len(rows) % step)
      of = np.asarray([e for e, _, _ in rows])
      length = np.asarray([len(c['tokens']) for _, _, c in rows], np.int32)
      parts = {name: np.zeros((len(rows), int(length.max())), x.dtype) for name, x in parts.items()}
      parts['turn'] -= 1
      for i, (_, _, columns) in enumerate(rows):
        for name, x in columns.items():
          parts[name][i, : len(x)] = x
    # Two columns even where every environment failed at its reset: the update points at column 1 for missing tokens.
    width = max(int(length.max()), 2)
    parts = {name: x[:, :width] for name, x in parts.items()}
    parts['tokens'] = np.where(np.arange(width)[None, :] < length[:, None], parts['tokens'], pad_id).astype(np.int32)
    return Trajectory(
      **parts,
      length=length,
      group=np.asarray(group, np.int32)[of],
      episode=np.asarray(episode, np.int32)[of],
      env=np.asarray(env, np.int32)[of],
      status=np.asarray(status, np.int32)[of],
      policy_version=np.full((len(length),), policy_version, np.int32),
    )
