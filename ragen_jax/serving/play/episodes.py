"""Play: finished attempts become a `Rollout`: their token rows, rewards, and calls as turns of episodes.

An attempt is an episode, a call is a turn, and the attempts of a task are a group. Turns are numbered in the order in
which the calls were recorded, over all rows of the episode. Rows are as the engine was fed; a call's tokens are in the
loss if its agent is trained and the sampling was that of training.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.rollout import Rollout
from ragen_jax.agent.segments import ImageSegment, ImageSpan, Observation, join
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.serving.conversation.sessions import NEW_ROW_CAUSES
from ragen_jax.serving.types import AttemptState, Finish, Reward, StoredCall
from ragen_jax.utils.errors import UserError

# What becomes of a group with missing attempts, which were cancelled or ended without a call: 'drop' leaves the group
# out; 'keep' lists them as episodes whose environment failed, and learns from the others.
INCOMPLETE = ('drop', 'keep')

# What becomes of a trained agent's call that was not sampled as training samples: 'exclude' keeps its tokens out of the
# loss; 'error' ends the run.
OFF_POLICY = ('exclude', 'error')


@dataclasses.dataclass(frozen=True)
class EpisodeSettings:
  """How attempts become episodes: fields of `config.serve`, and these.

  Attributes:
    group_size: G, attempts of a task.
    off_policy: one of `OFF_POLICY`.
    temperature, top_p, top_k: how training samples, see `SamplingParams`.
    max_calls: an attempt may make so many calls; an episode that used them all without success is cut off.
    stop_id: the token that ends a reply in the chat format.
    pad_id: the token that fills unused columns.
  """

  group_size: int
  incomplete: str
  off_policy: str
  temperature: float
  top_p: float
  top_k: int
  success_reward: str
  success_score: float
  max_calls: int
  stop_id: int
  pad_id: int


@dataclasses.dataclass(frozen=True)
class FinishedAttempt:
  """An attempt that is over, and why it failed; '' if it did not.

  Its calls are in any order, aborted ones too. `pixels` u8[H, W, 3] are those of their images by digest.
  """

  attempt_id: str
  state: AttemptState
  error: str
  calls: tuple[StoredCall, ...]
  rewards: tuple[Reward, ...]
  pixels: Mapping[bytes, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TaskAttempts:
  """The attempts of a task, which are compared with one another: at most G, one for each rollout of the task.

  `tag` is the kind of the task, and `seed` its number, in metrics and in the viewer.
  """

  tag: str
  seed: int
  attempts: tuple[FinishedAttempt, ...]


@dataclasses.dataclass(frozen=True)
class _Played:
  """An attempt with what training makes of it.

  Attributes:
    missing: whether it was cancelled, or ended without a call.
    calls: the calls that were not aborted, by index.
    in_loss: whether each call's tokens are in the loss.
    rewards: the rewards of each call.
    metrics: what the program measured, by name.
    pixels: see `FinishedAttempt`.
    error: why it has no score; '' if it has one.
    counts: for the metrics.
  """

  missing: bool
  calls: tuple[StoredCall, ...]
  in_loss: tuple[bool, ...]
  rewards: tuple[tuple[float, ...], ...]
  status: Status
  error: str
  counts: collections.Counter[str]
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  pixels: Mapping[bytes, np.ndarray] = dataclasses.field(default_factory=dict)


_SAMPLING = ('temperature', 'top_p', 'top_k')
_FAILURES = (AttemptState.FAILED, AttemptState.TIMEOUT, AttemptState.UNRESPONSIVE)


def build_rollout(
  groups: Sequence[TaskAttempts], settings: EpisodeSettings, decode: Callable[[Sequence[int]], str]
) -> tuple[Rollout | None, dict[str, float]]:
  """Makes a rollout of finished attempts, whose groups are the tasks in their order.

  A call's rewards are on its last sampled token, their exact sum rounded once. A reward for the whole episode, or for
  an agent, is on the last call in the loss, or the agent's last. A reward of a call outside the loss is on the latest
  earlier call in the loss of the same agent, or else on the first later one. Rewards of agents that are not trained are
  left out of the score. An attempt that failed, or that has no reward, is an episode with `Status.ENV_ERROR`, which
  updates leave out; it never counts as one with reward 0. One that made `max_calls` calls without success has
  `Status.OUT_OF_TURNS`.

  Returns:
    The rollout, whose groups have G episodes each; None if no group is left. And metrics: `serving/calls`,
      `serving/calls_<aborted, merged, not_trained, off_policy>` (a merged call extended a row),
      `serving/new_rows/<first, or one of NEW_ROW_CAUSES>`, `serving/attempts_<cancelled, without_calls, failed,
      without_reward>`, `serving/groups_dropped`, `serving/rewards_not_trained`, and for each name of a reward
      `serving/reward/<name>`, its mean sum over the episodes that have such a reward.

  Raises:
    UserError: a trained agent's call was not sampled as training samples, and `off_policy` is 'error'.
    ValueError: an attempt is running, a task has too many attempts, a reward is of an unknown call, or a setting has no
      such value.
  """
  for field, allowed in (('incomplete', INCOMPLETE), ('off_policy', OFF_POLICY)):
    if getattr(settings, field) not in allowed:
      raise ValueError(f'{field} is {getattr(settings, field)!r}; it may be one of {", ".join(allowed)}')
  counts, kept = collections.Counter(), []
  for task in groups:
    if len(task.attempts) > settings.group_size:
      raise ValueError(f'a task {task.tag} has {len(task.attempts)} attempts; group_size={settings.group_size}')
    played = [_played(attempt, settings) for attempt in task.attempts]
    for own in played:
      counts += own.counts
    # Metrics and the viewer count on groups of one size.
    absent = _untold('there was no such attempt', missing=True, counts=collections.Counter())
    played += [absent] * (settings.group_size - len(played))
    missing = sum(own.missing for own in played)
    if missing == settings.group_size or (missing and settings.incomplete == 'drop'):
      counts['groups_dropped'] += 1
    else:
      kept.append((task, played))
  metrics = {f'serving/{name}': float(counts[name]) for name in _COUNTS}
  metrics |= _reward_means(attempt for task in groups for attempt in task.attempts)
  # Of dropped groups too, so that a tag has the same number in all rollouts, which may be joined.
  tags = list(dict.fromkeys(task.tag for task in groups))
  return (_rollout(kept, tags, settings, decode) if kept else None), metrics


_COUNTS = (
  'calls', 'calls_aborted', 'calls_merged', 'calls_not_trained', 'calls_off_policy',
  *(f'new_rows/{cause}' for cause in ('first', *NEW_ROW_CAUSES)),
  'attempts_cancelled', 'attempts_without_calls', 'attempts_failed', 'attempts_without_reward',
  'groups_dropped', 'rewards_not_trained',
)  # fmt: skip


def _untold(error: str, *, missing: bool, counts: collections.Counter[str]) -> _Played:
  """An attempt whose calls are left out."""
  return _Played(missing, (), (), (), Status.ENV_ERROR, error, counts)


def _played(attempt: FinishedAttempt, settings: EpisodeSettings) -> _Played:
  """The calls in the loss, the rewards and the status of an attempt."""
  if attempt.state == AttemptState.RUNNING:
    raise ValueError(f'attempt {attempt.attempt_id} is running')
  calls = tuple(sorted((c for c in attempt.calls if c.generated.finish != Finish.ABORTED), key=lambda call: call.index))
  counts = _call_counts(attempt, calls)
  if attempt.state == AttemptState.CANCELLED:
    counts['attempts_cancelled'] += 1
    return _untold('the attempt was cancelled', missing=True, counts=counts)
  failed = attempt.state in _FAILURES
  fault = (attempt.error or f'the attempt ended as {attempt.state}') if failed else ''
  counts['attempts_failed'] += failed
  if not calls:
    counts['attempts_without_calls'] += not failed
    return _untold(fault or 'the attempt ended without a call', missing=not failed, counts=counts)
  in_loss = tuple(_in_loss(call, settings) for call in calls)
  counts['calls_off_policy'] += sum(call.trained and not own for call, own in zip(calls, in_loss, strict=True))
  credited = [
    (_credited_call(reward, attempt, calls, in_loss), reward) for reward in attempt.rewards if not reward.metric
  ]
  counted = [(at, reward) for at, reward in credited if at is not None]
  counts['rewards_not_trained'] += len(credited) - len(counted)
  error = fault or ('' if counted else 'no reward was posted')
  counts['attempts_without_reward'] += not counted and not failed
  status = Status.ENV_ERROR
  if not error:
    telling = [reward.value for _, reward in counted if settings.success_reward in ('', reward.name)]
    if telling and math.fsum(telling) >= settings.success_score:
      status = Status.SUCCESS
    else:
      status = Status.OUT_OF_TURNS if len(attempt.calls) >= settings.max_calls else Status.FAILURE
  rewards = tuple(tuple(reward.value for at, reward in counted if at == i) for i in range(len(calls)))
  metrics = _sums((reward.metric, reward.value) for reward in attempt.rewards if reward.metric)
  return _Played(False, calls, in_loss, rewards, status, error, counts, metrics, attempt.pixels)


def _call_counts(attempt: FinishedAttempt, calls: Sequence[StoredCall]) -> collections.Counter[str]:
  counts = collections.Counter({'calls': len(attempt.calls), 'calls_aborted': len(attempt.calls) - len(calls)})
  counts['calls_not_trained'] = sum(not call.trained for call in calls)
  rows = set()
  for call in calls:
    counts['calls_merged' if call.row in rows else f'new_rows/{call.new_row_cause or "first"}'] += 1
    rows.add(call.row)
  return counts


def _in_loss(call: StoredCall, settings: EpisodeSettings) -> bool:
  """Whether the tokens of a call are in the loss; UserError if only its sampling forbids it, and that is an error."""
  if not call.trained:
    return False
  own, wanted = ({name: getattr(x, name) for name in _SAMPLING} for x in (call.params, settings))
  if own == wanted or settings.off_policy == 'exclude':
    return own == wanted
  raise UserError(
    f'call {call.call_id} of attempt {call.attempt_id} was sampled with {own}; training samples with {wanted}'
  )


def _credited_call(
  reward: Reward, attempt: FinishedAttempt, calls: Sequence[StoredCall], in_loss: Sequence[bool]
) -> int | None:
  """The position in `calls` of the call that a reward is credited to; None if it is of an agent that is not trained."""
  of = None
  if reward.call_id:
    of = next((call for call in attempt.calls if call.call_id == reward.call_id), None)
    if of is None:
      raise ValueError(f'a reward of attempt {attempt.attempt_id} is of the unknown call {reward.call_id}')
  agent = reward.agent or (None if of is None else of.agent)
  own = [i for i, call in enumerate(calls) if call.trained and agent in (None, call.agent)]
  own = [i for i in own if in_loss[i]] or own
  if not own:
    return None
  if of is None:
    return own[-1]
  return max((i for i in own if calls[i].index <= of.index), default=own[0])


def _sums(values: Iterable[tuple[str, float]]) -> dict[str, float]:
  """The sum of the values of each name."""
  by_name = collections.defaultdict(list)
  for name, value in values:
    by_name[name].append(value)
  return {name: math.fsum(own) for name, own in by_name.items()}


def _reward_means(attempts: Iterable[FinishedAttempt]) -> dict[str, float]:
  sums = collections.defaultdict(list)
  for attempt in attempts:
    for name, value in _sums((reward.name, reward.value) for reward in attempt.rewards if not reward.metric).items():
      sums[name].append(value)
  return {f'serving/reward/{name}': math.fsum(own) / len(own) for name, own in sums.items() if name}


def _rollout(
  groups: Sequence[tuple[TaskAttempts, Sequence[_Played]]], tags: Sequence[str], settings: EpisodeSettings, decode
) -> Rollout:
  """The rollout of groups of G attempts; their environments are numbered by `tags`."""
  flat = [(g, task, own) for g, (task, played) in enumerate(groups) for own in played]
  lengths = [sum(len(ids) for ids in _pieces(row)) for _, _, own in flat for row in _rows(own)]
  timeline = Timeline(len(flat), max(lengths, default=0))
  turns_most = max(1, *(len(own.calls) for _, _, own in flat))
  anchors = np.full((len(flat), turns_most), -1, np.int32)
  numbers: dict[tuple, int] = {}  # what a call begins with -> its anchor
  episodes = []
  for e, (group, task, own) in enumerate(flat):
    for row in _rows(own):
      timeline.begin_row(e)
      for turn, call, trained, rewards in row:
        _write(timeline, e, turn, call, trained, rewards, own.pixels)
        if trained:
          anchors[e, turn] = numbers.setdefault((group, call.agent, call.context, call.images), len(numbers))
    turns = [
      _turn(call, rewards, settings, decode, own.pixels) for call, rewards in zip(own.calls, own.rewards, strict=True)
    ]
    if turns and own.metrics:  # those of an episode are sums over its turns
      turns[-1] = dataclasses.replace(turns[-1], metrics=own.metrics)
    episodes.append(Episode(task.tag, group, task.seed, turns, status=own.status, outside=True, error=own.error))
  trajectory = timeline.trajectory(
    group=[group for group, _, _ in flat],
    episode=np.arange(len(flat)),
    env=[tags.index(task.tag) for _, task, _ in flat],
    status=[own.status for _, _, own in flat],
    policy_version=None,
    pad_id=settings.pad_id,
  )
  scores = np.asarray([episode.score for episode in episodes], np.float32)
  sampled = int(trajectory.loss_mask.sum())
  return Rollout(
    trajectory, episodes, anchors[trajectory.episode], scores, sampled, settings.pad_id, images=tuple(timeline.images)
  )


def _rows(own: _Played) -> list[list[tuple[int, StoredCall, bool, tuple[float, ...]]]]:
  """The rows of an episode: of each call its turn, itself, whether it is in the loss, and its rewards."""
  rows = collections.defaultdict(list)
  for turn, (call, trained, rewards) in enumerate(zip(own.calls, own.in_loss, own.rewards, strict=True)):
    rows[call.row].append((turn, call, trained, rewards))
  return [rows[ordinal] for ordinal in sorted(rows)]


def _pieces(row: Iterable[tuple[int, StoredCall, bool, tuple[float, ...]]]) -> Iterable[tuple[int, ...]]:
  for _, call, _, _ in row:
    yield call.context
    yield call.generated.ids


def _write(
  timeline: Timeline, episode: int, turn: int, call: StoredCall, trained: bool, rewards: Sequence[float],
  pixels: Mapping[bytes, np.ndarray],
) -> None:  # fmt: skip
  """Appends a call to the episode's open row."""
  generated = call.generated
  timeline.append_context(episode, call.context, turn, _spans(call, pixels))
  if not trained:
    timeline.append_context(episode, generated.ids, turn)
    return
  timeline.append_reply(
    episode,
    generated.ids,
    turn,
    logprobs=generated.logprobs,
    values=generated.values,
    entropies=generated.entropies,
    versions=generated.versions,
  )
  timeline.reward_last_token(episode, math.fsum(rewards))


def _spans(call: StoredCall, pixels: Mapping[bytes, np.ndarray]) -> list[ImageSpan]:
  """The images in the context of a call."""
  return [ImageSpan(ImageSegment(pixels[x.digest], x.stop - x.start), x.start, x.stop) for x in call.images]


def _turn(
  call: StoredCall, rewards: tuple[float, ...], settings: EpisodeSettings, decode: Callable[[Sequence[int]], str],
  pixels: Mapping[bytes, np.ndarray],
) -> Turn:  # fmt: skip
  """A call as a turn. What the agent does with the reply is not known, so a turn has no actions."""
  generated, spans = call.generated, _spans(call, pixels)
  seen: list[Observation] = []
  start = 0
  for span in spans:  # without the tokens before and after its placeholders
    seen += [decode(call.context[start : span.start - 1]), (span.segment,)]
    start = span.stop + 1
  rest = decode(call.context[start:])
  return Turn(
    observation=join(*seen, rest) if spans else rest,
    reply=generated.text,
    actions=[],
    rewards=rewards,
    penalty=0.0,
    valid=generated.finish == Finish.STOP,
    effective=0,
    tokens=len(generated.ids),
    ids=generated.ids,
    closed=generated.ids[-1:] == (settings.stop_id,),
  )
