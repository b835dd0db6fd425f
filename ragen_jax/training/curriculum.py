"""A curriculum: which items of the data sets an iteration plays, by their difficulty or by the policy's own success.

The items of an iteration are a function of the run's seed, the iteration and, for the order 'success', of what earlier
iterations played, which checkpoints contain. So a resumed run plays the items of an uninterrupted one, and all
processes play items of the same choice. Items of the evaluation are never chosen.

  order       items of an iteration
  sliding     at random from a window that moves from the easiest to the hardest items
  growing     at random from the easiest items, which become more until they are all
  success     at random, those more often whose success rate is near a target; and items that were not played for long
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ragen_jax.agent.episode import Episode, Status
from ragen_jax.agent.outside_pool import as_level
from ragen_jax.envs.dataset.environment import DatasetEnvironment
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.utils.errors import UserError

ORDERS = ('', 'sliding', 'growing', 'success')

_STREAM = 3  # of random numbers; others of an iteration are those of mini-batches, replay and filter


@dataclasses.dataclass(frozen=True)
class CurriculumSettings:
  """Fields of `config.curriculum`, and the following.

  Attributes:
    iterations: iterations until the hardest items are played; never 0 here.
    seed: of the run.
    online_k: `config.train.online_k`.
    max_rollouts: `config.filter.max_rollouts`.
  """

  order: str
  iterations: int
  window: float
  target: float
  width: float
  explore: float
  ema_decay: float
  seed: int
  online_k: int
  max_rollouts: int


class Curriculum:
  """Chooses the items of the data sets among the environments; the levels of other environments stay as they are."""

  def __init__(self, settings: CurriculumSettings, specs: Sequence[EnvSpec], held_out: frozenset[bytes] = frozenset()):
    """Reads no data; `check` does, or the first use. `held_out` are levels that are never chosen."""
    self._settings, self._specs, self._held_out = settings, list(specs), held_out

  @functools.cached_property
  def _parts(self) -> dict[str, _Part]:
    """Tag -> its items, for the tags that are data sets."""
    firsts = np.cumsum([0, *(spec.num_groups for spec in self._specs)]).tolist()
    return {
      spec.tag: _Part(spec, first, self._held_out)
      for spec, first in zip(self._specs, firsts, strict=False)
      if isinstance(spec.env, DatasetEnvironment)
    }

  def check(self) -> None:
    """Reads the items. Raises UserError if the evaluation plays all items of a tag."""
    self._parts  # noqa: B018

  def level_seeds(self, first_seed: int, iteration: int, attempt: int = 0) -> np.ndarray:
    """i64[P], the seeds of the groups' levels in a rollout.

    Args:
      first_seed: of the levels of other environments, which are consecutive.
      iteration: number of finished iterations.
      attempt: number of earlier rollouts of the iteration; they play other items, if there are enough.
    """
    seeds = first_seed + np.arange(sum(spec.num_groups for spec in self._specs), dtype=np.int64)
    for number, part in enumerate(self._parts.values()):
      rng = np.random.default_rng((self._settings.seed, iteration, _STREAM, number))
      chosen = self._choose(part, rng, iteration, attempt)
      seeds[part.first : part.first + part.groups] = [part.env.seed_of(i) for i in chosen.tolist()]
    return seeds

  def _choose(self, part: _Part, rng: np.random.Generator, iteration: int, attempt: int) -> np.ndarray:
    """i64[groups], indices of items."""
    s = self._settings
    if s.order == 'success':
      return _by_success(part, rng, s, attempt)
    items = part.by_difficulty
    # The last iteration that plays has progress 1.
    progress = min(iteration / max(s.iterations - s.online_k, 1), 1.0)
    first, size = window(progress, len(items), s, least=part.groups * s.max_rollouts)
    return _cut(rng.permutation(items[first : first + size]), attempt * part.groups, part.groups)

  def record(self, episodes: Sequence[Episode], iteration: int) -> dict[str, float]:
    """Notes the success of the episodes that an iteration played, and returns the metrics of the curriculum.

    They are `curriculum/<tag>/position`, the mean place of the played items among all from the easiest, 0, to the
    hardest, 1; `.../difficulty`, their mean difficulty, if a field of the rows is the difficulty; `.../past_success`,
    the mean of their success rates before, over those that have one; and `.../seen`, the share of items played so far.
    """
    metrics = {}
    for tag, part in self._parts.items():
      played: dict[int, list[Episode]] = {}
      for episode in episodes:
        if episode.tag == tag:
          played.setdefault(part.env.index_of(episode.level_seed), []).append(episode)
      items = np.asarray(sorted(played), np.int64)
      found = {'position': part.position[items]}
      if part.difficulty is not None:
        found['difficulty'] = part.difficulty[items]
      found['past_success'] = part.rate[items][~np.isnan(part.rate[items])].astype(np.float64)
      metrics |= {f'curriculum/{tag}/{name}': float(x.mean()) for name, x in found.items() if x.size}
      for item in items.tolist():
        part.note(item, played[item], iteration, self._settings.ema_decay)
      metrics[f'curriculum/{tag}/seen'] = float(np.mean(part.last[part.by_difficulty] >= 0))
    return metrics

  # -- checkpoints -----------------------------------------------------------------------------------------------------

  def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was played, for a checkpoint: arrays, and a JSON description of the items that they belong to."""
    arrays = {tag: {'rate': part.rate.copy(), 'last': part.last.copy()} for tag, part in self._parts.items()}
    return arrays, {tag: part.described for tag, part in self._parts.items()}

  def check_described(self, described: Mapping[str, Any], where: str) -> None:
    """Raises UserError, which begins with `where`, if a checkpoint's state is of other items."""
    for tag, part in self._parts.items():
      if (saved := described.get(tag)) != part.described:
        count = 'no' if saved is None else f'{saved["items"]:,}'
        raise UserError(
          f'{where}: envs.{tag}: its curriculum is of {count} other questions, or difficulties, than the '
          f'{part.described["items"]:,} of now; give back the old data, or choose another --workdir'
        )

  def load_state(self, arrays: Mapping[str, Any]) -> None:
    for tag, part in self._parts.items():
      part.rate, part.last = np.array(arrays[tag]['rate']), np.array(arrays[tag]['last'])


class _Part:
  """The items of one tag.

  Attributes:
    first, groups: the tag's groups in a rollout.
    by_difficulty: i64[n], the items that may be played, the easiest first; in the order of the source if there is no
      difficulty or it is equal.
    position: f64[items], their place among these, from 0 to 1.
    difficulty: f64[items]; None if no field of the rows has it.
    rate: f32[items], the success rate of late; NaN before an item was played.
    last: i32[items], the last iteration that played an item; -1 for none.
    described: a description of the items, for checkpoints.
  """

  def __init__(self, spec: EnvSpec, first: int, held_out: frozenset[bytes]):
    self.env, self.first, self.groups = spec.env, first, spec.num_groups
    items = spec.env.items
    own = [i for i, item in enumerate(items) if as_level(item.id) not in held_out]
    if not own:
      raise UserError(
        f'curriculum.order: the evaluation asks all {len(items):,} questions of envs.{spec.tag}; set a smaller '
        'eval.groups, or name a test file'
      )
    known = items[0].difficulty is not None
    self.difficulty = np.asarray([item.difficulty for item in items]) if known else None
    self.by_difficulty = np.asarray(own)
    if known:
      self.by_difficulty = self.by_difficulty[np.argsort(self.difficulty[own], kind='stable')]
    self.position = np.zeros(len(items))
    self.position[self.by_difficulty] = np.linspace(0, 1, len(own)) if len(own) > 1 else 0
    self.rate = np.full(len(items), np.nan, np.float32)
    self.last = np.full(len(items), -1, np.int32)
    digest = hashlib.blake2b(digest_size=12)
    for item in items:  # those of a group have its id in common
      digest.update(json.dumps((item.id, item.question, item.difficulty)).encode())
    self.described = {'items': len(items), 'digest': digest.hexdigest()}

  def note(self, item: int, episodes: Sequence[Episode], iteration: int, decay: float) -> None:
    """Adds the episodes of an item in an iteration; those whose environment failed say nothing about success."""
    self.last[item] = iteration
    wins = [episode.success for episode in episodes if episode.status != Status.ENV_ERROR]
    if wins:
      new, old = np.mean(wins), float(self.rate[item])
      self.rate[item] = new if math.isnan(old) else decay * old + (1 - decay) * new


def window(progress: float, count: int, settings: CurriculumSettings, *, least: int) -> tuple[int, int]:
  """The first item of the window and its size, of `count` items from the easiest to the hardest.

  Args:
    progress: from 0 to 1.
    least: number of items that an iteration may play; the window is not smaller if there are as many.
  """
  size = min(max(math.ceil(settings.window * count), least), count)
  if settings.order == 'growing':
    return 0, size + round(progress * (count - size))
  return round(progress * (count - size)), size


def _by_success(part: _Part, rng: np.random.Generator, settings: CurriculumSettings, attempt: int) -> np.ndarray:
  """i64[groups], items near the target, and others that were not played for the longest time."""
  items = part.by_difficulty
  # Never played items come first, equal ones at random.
  waiting = rng.permutation(items)
  waiting = waiting[np.argsort(part.last[waiting], kind='stable')]
  worth = 1 - np.abs(np.nan_to_num(part.rate[items], nan=np.inf).astype(np.float64) - settings.target) / settings.width
  near, worth = items[worth > 0], worth[worth > 0]
  # The order of a race whose times are exponential with these rates is that of draws without replacement.
  near = near[np.argsort(rng.exponential(size=len(near)) / worth, kind='stable')]
  own = part.groups - max(round(settings.explore * part.groups), 1)
  near = near[: own * settings.max_rollouts]
  others = waiting[~np.isin(waiting, near)]
  chosen, before = near[attempt * own : (attempt + 1) * own], len(near[: attempt * own])
  rest = _cut(others if len(others) else waiting, attempt * part.groups - before, part.groups - len(chosen))
  return np.concatenate([chosen, rest])


def _cut(items: np.ndarray, first: int, count: int) -> np.ndarray:
  """`count` items from the place `first` on; after the last one comes the first one again."""
  return items[(first + np.arange(count)) % len(items)]
