"""Finds numbers that are not finite in rollouts and batches, with their count and rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ragen_jax.agent.rollout import Rollout

# Maximum number of rows that a message names; the others are counted.
_ROWS_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class NotFinite:
  """Numbers that are not finite, as an entry of an iteration's metrics.

  Attributes:
    count: number of affected numbers or optimiser steps.
    text: text for a message, such as '12 of 640 sampled log-probs (rows 0, 3)'.
  """

  count: int
  text: str


def find(name: str, words: str, x: np.ndarray | None, mask: np.ndarray) -> dict[str, NotFinite]:
  """{'not_finite/<name>': finding} for the numbers [B, ...] under a mask of their shape; {} if all of them are finite.

  `words` name the quantity in a message; `x` is None for an array that does not exist.
  """
  if x is None:
    return {}
  bad = mask & ~np.isfinite(x)
  if not bad.any():
    return {}
  rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1)).tolist()
  count, whole = int(bad.sum()), int(mask.sum())
  return {f'not_finite/{name}': NotFinite(count, f'{count} of {whole} {words} ({_in_words(rows, len(bad))})')}


def _in_words(rows: list[int], total: int) -> str:
  return f'all {total} rows' if len(rows) == total > 1 else describe_rows(rows)


def describe_rows(rows: list[int]) -> str:
  """Row numbers as text: 'row 3', 'rows 0, 3', 'rows 0, 1, 2, 3 and 2 more'."""
  shown = ', '.join(map(str, rows[:_ROWS_SHOWN]))
  more = len(rows) - _ROWS_SHOWN
  return f'row{"s" if len(rows) > 1 else ""} {shown}' + (f' and {more} more' if more > 0 else '')


def of_rollout(rollout: Rollout) -> dict[str, NotFinite]:
  """Findings in the numbers of a rollout: log-probs, entropies, values, rewards, rewards of replies, and scores."""
  t = rollout.trajectory
  scores = rollout.scores
  return (
    find('sampled_logprobs', 'sampled log-probs', t.logprobs, t.loss_mask)
    | find('sampled_entropies', 'sampled entropies', t.entropies, t.loss_mask)
    | find('sampled_values', 'sampled values', t.values, t.loss_mask)
    | find('rewards', 'rewards', t.rewards, t.loss_mask)
    | find('reply_rewards', 'rewards of replies', t.reply_rewards, t.loss_mask)
    | find('scores', 'scores', scores, np.ones(scores.shape, bool))
  )


def findings(metrics: Mapping[str, Any]) -> list[NotFinite]:
  return [x for x in metrics.values() if isinstance(x, NotFinite)]


def describe(found: Iterable[NotFinite]) -> str:
  """Findings as text; '' if there are none."""
  return ', '.join(x.text for x in found)


def scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
  """The metrics, with each finding replaced by its count."""
  return {name: x.count if isinstance(x, NotFinite) else x for name, x in metrics.items()}
