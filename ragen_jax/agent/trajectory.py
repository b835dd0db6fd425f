"""Token rows of a rollout: the ids that were fed and sampled are the ids that the loss sees, in the same columns."""

from __future__ import annotations

import numpy as np
from flax import struct


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
    episode: i32[B], the episode of each row. With full context an episode has one row; with other context policies it
      can have several consecutive rows. Rows of length 0 at the end belong to no episode.
    env: i32[B], index of the environment among those of the rollout.
    status: i32[B], an `episode.Status`.
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


_COLUMNS = ('tokens', 'loss_mask', 'logprobs', 'values', 'entropies', 'rewards', 'turn')
# The update points at column 1 for missing tokens, so rows have it even where nothing was sampled.
_MIN_WIDTH = 2


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
    shape = (rows, max(capacity, _MIN_WIDTH))
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

  def append_reply(self, row: int, ids, turn: int, *, logprobs=0.0, values=0.0, entropies=0.0) -> None:
    """Adds a reply, on which the loss is.

    Args:
      row: the episode's.
      ids: i32[n].
      turn: the turn's index.
      logprobs: f32[n], or one number for all tokens; so are `values` and `entropies`.
      values: see `Trajectory`.
      entropies: see `Trajectory`.
    """
    start = self.length[row]
    self.append_context(row, ids, turn)
    columns = slice(start, self.length[row])
    self.loss_mask[row, columns] = True
    self.logprobs[row, columns] = logprobs
    self.values[row, columns] = values
    self.entropies[row, columns] = entropies

  def reward_last_token(self, row: int, reward: float) -> None:
    """Puts a turn's reward on the row's last column, which is the turn's last sampled token."""
    self.rewards[row, self.length[row] - 1] = reward

  def trajectory(self, *, group, episode, env, status, policy_version: int, pad_id: int) -> Trajectory:
    """The rows so far, cut to the longest one.

    Args:
      group: i32[B], of the episodes; so are `episode`, `env` and `status`.
      episode: see `Trajectory`.
      env: see `Trajectory`.
      status: see `Trajectory`.
      policy_version: number of updates behind the weights that sampled.
      pad_id: the token behind a row's last.

    Returns:
      Rows in the order of the episodes; the rows of one episode are consecutive. If there are more than B rows, empty
      rows are added up to a multiple of B / 4, so that few different row counts occur.
    """
    count = len(self.length)
    owner, parts = np.arange(count), {name: getattr(self, name) for name in _COLUMNS}
    length = self.length
    if self._done:
      rows = sorted([(e, i, c) for i, (e, c) in enumerate(self._done)], key=lambda x: x[:2])
      rows += [(e, len(rows), {n: x[e, : self.length[e]] for n, x in parts.items()}) for e in range(count)]
      rows.sort(key=lambda x: x[:2])
      step = max(count // 4, 1)
      empty = {name: x[0, :0] for name, x in parts.items()}
      rows += [(0, 0, empty)] * (-len(rows) % step)
      owner = np.asarray([e for e, _, _ in rows])
      length = np.asarray([len(c['tokens']) for _, _, c in rows], np.int32)
      parts = {name: np.zeros((len(rows), int(length.max())), x.dtype) for name, x in parts.items()}
      parts['turn'] -= 1
      for i, (_, _, columns) in enumerate(rows):
        for name, x in columns.items():
          parts[name][i, : len(x)] = x
    width = max(int(length.max()), _MIN_WIDTH)
    parts = {name: x[:, :width] for name, x in parts.items()}
    parts['tokens'] = np.where(np.arange(width)[None, :] < length[:, None], parts['tokens'], pad_id).astype(np.int32)
    return Trajectory(
      **parts,
      length=length,
      group=np.asarray(group, np.int32)[owner],
      episode=np.asarray(episode, np.int32)[owner],
      env=np.asarray(env, np.int32)[owner],
      status=np.asarray(status, np.int32)[owner],
      policy_version=np.full((len(length),), policy_version, np.int32),
    )
