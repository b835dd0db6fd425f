"""Token rows of a rollout. The loss sees exactly the ids that were fed and sampled, in the same columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from flax import struct

from ragen_jax.agent.segments import ImageSpan


@struct.dataclass
class Trajectory:
  """B rows of a rollout, with contiguous groups. All arrays are on the host until the update places them.

  Attributes:
    tokens: i32[B, T], the ids as fed and as sampled, dense from column 0, then padding.
    loss_mask: bool[B, T], True for tokens that the policy sampled.
    logprobs: f32[B, T], log p(tokens[t] | tokens[<t]) under the sampler, 0 for tokens that were not sampled.
    values: f32[B, T], the critic's value of the state from which tokens[t] was sampled, 0 for tokens that were not
      sampled, or everywhere if the sampler does not record values.
    entropies: f32[B, T], entropy of the distribution of tokens[t], 0 for tokens that were not sampled.
    rewards: f32[B, T], the turn's environment reward and penalties, on the turn's last sampled token.
    reply_rewards: f32[B, T], the rewards of replies for their form and for described states, on the sampled tokens
      where they are paid.
    turn: i32[B, T], index of the turn (its observation and its reply), -1 in padding.
    length: i32[B], number of used columns.
    group: i32[B], the prompt group; rows of a group share the level.
    episode: i32[B], the episode of each row. With full context an episode has one row; with other context policies it
      can have several consecutive rows. Rows of length 0 at the end belong to no episode.
    env: i32[B], index of the environment in the rollout.
    status: i32[B], the `episode.Status` of the row's episode.
    versions: i32[B, T], number of updates that led to the weights that sampled each token, 0 for tokens that were not
      sampled. The tokens of a row may come from several versions if the weights change while agents play.
    image: i32[B, T], the image that each column shows, an index into `Rollout.images`; the k-th column of a run of
      equal numbers shows the image's k-th token. -1 in text columns; None without images.
    experts: [B, T, L, k], the experts that the sampler gave each token to, see `Qwen.run`; None if it does not record
      them.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  logprobs: np.ndarray
  values: np.ndarray
  entropies: np.ndarray
  rewards: np.ndarray
  reply_rewards: np.ndarray
  turn: np.ndarray
  length: np.ndarray
  group: np.ndarray
  episode: np.ndarray
  env: np.ndarray
  status: np.ndarray
  versions: np.ndarray
  image: np.ndarray | None = None
  experts: np.ndarray | None = None

  @property
  def policy_version(self) -> np.ndarray:
    """i32[B]: the oldest version that sampled a token of the row; 0 for rows without sampled tokens."""
    oldest = np.min(self.versions, axis=1, where=self.loss_mask, initial=np.iinfo(np.int32).max)
    return np.where(self.loss_mask.any(axis=1), oldest, 0).astype(np.int32)


_COLUMNS = (
  'tokens', 'loss_mask', 'logprobs', 'values', 'entropies', 'rewards', 'reply_rewards', 'turn', 'versions', 'image',
  'experts',
)  # fmt: skip
# The value of unused columns, where not 0.
_FILL = {'turn': -1, 'image': -1}
# The update uses column 1 for missing tokens, so even rows without sampled tokens have this column.
_MIN_WIDTH = 2


class Timeline:
  """Collects the columns of B episodes during a rollout; `trajectory` then makes a `Trajectory` of them.

  Each episode writes to one open row of at most `capacity` columns. A context policy that shows less than the whole
  conversation begins a new row and closes the previous row.

  `images` are the images so far, u8[H, W, 3] each, equal ones once.
  """

  def __init__(self, rows: int, capacity: int):
    shape = (rows, max(capacity, _MIN_WIDTH))
    self._done: list[tuple[int, dict[str, np.ndarray]]] = []  # (episode, its columns)
    self.tokens = np.zeros(shape, np.int32)
    self.loss_mask = np.zeros(shape, bool)
    self.logprobs = np.zeros(shape, np.float32)
    self.values = np.zeros(shape, np.float32)
    self.entropies = np.zeros(shape, np.float32)
    self.rewards = np.zeros(shape, np.float32)
    self.reply_rewards = np.zeros(shape, np.float32)
    self.turn = np.full(shape, -1, np.int32)
    self.image = np.full(shape, -1, np.int32)
    self.images: list[np.ndarray] = []
    self._numbers: dict[bytes, int] = {}
    self.versions = np.zeros(shape, np.int32)
    self.experts: np.ndarray | None = None
    self.length = np.zeros((rows,), np.int32)

  def record_experts(self, shape: tuple[int, int], dtype: np.dtype) -> None:
    """Makes room for experts of `shape` (L, k) in each column. Speakers write those of a prompt before the prompt."""
    self.experts = np.zeros((*self.tokens.shape, *shape), dtype)

  def _columns(self) -> dict[str, np.ndarray]:
    return {name: x for name in _COLUMNS if (x := getattr(self, name)) is not None}

  def begin_row(self, row: int) -> None:
    """Closes the episode's row, unless it is empty, and begins a new one."""
    n = self.length[row]
    if n:
      self._done.append((row, {name: x[row, :n].copy() for name, x in self._columns().items()}))
      for name, x in self._columns().items():
        x[row, :n] = _FILL.get(name, 0)
      self.length[row] = 0

  def append_context(self, row: int, ids: tuple[int, ...], turn: int, images: Sequence[ImageSpan] = ()) -> None:
    """Adds tokens that the policy did not sample. The columns of the images among them count from the first token."""
    start, end = self.length[row], self.length[row] + len(ids)
    for span in images:
      number = self._numbers.setdefault(span.segment.digest, len(self.images))
      if number == len(self.images):
        self.images.append(span.segment.image)
      self.image[row, start + span.start : start + span.stop] = number
    self.tokens[row, start:end] = ids
    self.turn[row, start:end] = turn
    self.length[row] = end

  def append_reply(
    self, row: int, ids, turn: int, *, logprobs=0.0, values=0.0, entropies=0.0, versions=0, experts=None
  ) -> None:
    """Adds a reply, the sampled ids i32[n], whose tokens are in the loss.

    The other arguments are those of `Trajectory`: an array [n], or one number for all tokens.
    """
    start = self.length[row]
    self.append_context(row, ids, turn)
    columns = slice(start, self.length[row])
    self.loss_mask[row, columns] = True
    self.logprobs[row, columns] = logprobs
    self.values[row, columns] = values
    self.entropies[row, columns] = entropies
    self.versions[row, columns] = versions
    if experts is not None:
      self.experts[row, columns] = experts

  def reward_last_token(self, row: int, reward: float) -> None:
    """Writes a turn's reward to the row's last column, which is the turn's last sampled token."""
    self.rewards[row, self.length[row] - 1] = reward

  def add_reply_reward(self, row: int, reward: float, before_end: int) -> None:
    """Adds to the reward of the last reply of a row, on the token that `before_end` of the reply's tokens follow."""
    self.reply_rewards[row, self.length[row] - 1 - before_end] += reward

  def trajectory(self, *, group, episode, env, status, policy_version: int | None, pad_id: int) -> Trajectory:
    """The rows so far, cut to the length of the longest row.

    The arrays i32[B] are by episode. `policy_version` is that of all sampled tokens; None if `append_reply` got them.

    Returns:
      Rows in the order of the episodes; the rows of one episode are consecutive. If there are more than B rows, empty
      rows are added up to a multiple of B / 4, so that few different row counts occur.
    """
    count = len(self.length)
    owner, parts = np.arange(count), self._columns()
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
      parts = {name: np.zeros((len(rows), int(length.max()), *x.shape[2:]), x.dtype) for name, x in parts.items()}
      for name, fill in _FILL.items():
        parts[name] += fill
      for i, (_, _, columns) in enumerate(rows):
        for name, x in columns.items():
          parts[name][i, : len(x)] = x
    width = max(int(length.max()), _MIN_WIDTH)
    parts = {name: x[:, :width] for name, x in parts.items()}
    if not self.images:
      parts['image'] = None
    parts['tokens'] = np.where(np.arange(width)[None, :] < length[:, None], parts['tokens'], pad_id).astype(np.int32)
    if policy_version is not None:
      parts['versions'] = np.where(parts['loss_mask'], policy_version, 0).astype(np.int32)
    return Trajectory(
      **parts,
      length=length,
      group=np.asarray(group, np.int32)[owner],
      episode=np.asarray(episode, np.int32)[owner],
      env=np.asarray(env, np.int32)[owner],
      status=np.asarray(status, np.int32)[owner],
    )
