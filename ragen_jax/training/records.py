"""Training episodes kept for the trajectory viewer."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.episode import Episode
from ragen_jax.agent.player import Player
from ragen_jax.agent.rollout import Rollout
from ragen_jax.training.batches import TrainBatch
from ragen_jax.training.selection import Selection
from ragen_jax.viewer.records import Played, episode_records, first_rows, on_timeline


@dataclasses.dataclass(frozen=True)
class RecordSettings:
  """The episodes that are kept, and their recorded numbers. Fields of `config.logging` and `EstimateSettings`.

  `prompts_trained`: whether the loss covers all tokens, instead of sampled tokens only. `online_k`: iterations that use
  one rollout.
  """

  episodes: int
  episodes_every: int
  prompts_trained: bool
  online_k: int
  records_values: bool
  needs_critic: bool


class Recorder:
  """Selects episodes of training rollouts and makes their records, token by token."""

  def __init__(self, settings: RecordSettings, player: Player, tokenizer: ChatTokenizer):
    self._settings = settings
    self._player = player
    self._tokenizer = tokenizer

  def rows(self, iteration: int) -> list[int]:
    """The rows of an iteration's first rollout whose episodes are kept; [] if the iteration keeps none.

    A rollout that several iterations use, of which `iteration` is the first, is kept if one of them is.
    """
    every, end = self._settings.episodes_every, iteration + self._settings.online_k
    if not every or (iteration > 0 and end // every == iteration // every):
      return []
    player = self._player
    return first_rows(player.specs, player.group_size, self._settings.episodes, one_a_level=False)

  def records(
    self, rollout: Rollout, selection: Selection, batch: TrainBatch, iteration: int
  ) -> tuple[list[Episode], list[dict[str, Any]]]:
    """The kept episodes of an iteration, counted from 0, and their records from `viewer.records.episode_records`."""
    s = self._settings
    rows = [row for row in self.rows(iteration) if row < len(rollout.episodes)]
    t, fresh = rollout.trajectory, selection.fresh
    columns, mask, width = batch.columns[:fresh], batch.mask[:fresh], t.tokens.shape[1]
    values = t.values if s.records_values else None
    if values is None and s.needs_critic:
      values = on_timeline(np.asarray(batch.old_values)[:fresh], columns, mask, width)
    records = episode_records(
      Played(rollout, self._tokenizer, iteration + 1, 'train', self._player.group_size),
      rows,
      reply_prefix=self._player.reply_prefix,
      advantages=on_timeline(np.asarray(batch.advantages)[:fresh], columns, mask, width),
      learnt=selection.keep[:fresh],
      prompts_trained=s.prompts_trained,
      values=values,
    )
    return [rollout.episodes[row] for row in rows], records
