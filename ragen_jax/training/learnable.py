"""Says whether a rollout has something to learn from: replies that can be read, and scores that differ."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ragen_jax.agent.episode import Episode, Status
from ragen_jax.algorithms.filters import ZERO
from ragen_jax.utils.errors import short

# Below this share of valid first replies, most episodes are played by chance.
_VALID = 0.5
# Episodes without a valid reply, and unsuccessful ones with valid replies only, whose mean scores are compared.
_COMPARED = 4
_TRY_REPLIES = (
  "try another wording (agent.request), agent.format='no_think', more agent.max_response_tokens, a lower "
  'temperature, or a warm start (docs/real_models.md)'
)
_TRY_PENALTY = 'try a lower agent.format_penalty, so that an invalid reply costs more than a whole turn of play'
_TRY_CONTEXT = (
  'try more agent.max_context, fewer agent.max_response_tokens, or shorter observations, as by '
  'envs.TAG.max_observation_tokens'
)
_TRY_SCORES = (
  'try easier or harder levels, more episodes of a group (train.group_size), a higher train.temperature, or a warm '
  'start (docs/real_models.md)'
)


def invalid_replies(episodes: Sequence[Episode]) -> list[str]:
  """A warning for each environment in which most first replies are not valid; it quotes one and says what to try."""
  warnings = []
  for tag in dict.fromkeys(e.tag for e in episodes):
    first = [e.turns[0] for e in episodes if e.tag == tag and e.turns and e.turns[0].answered]
    invalid = [turn for turn in first if not turn.valid]
    if first and len(invalid) > (1 - _VALID) * len(first):
      warnings.append(
        f'{tag}: {len(invalid)} of {len(first)} first replies are not valid, such as {short(invalid[0].reply)}; '
        f'{_TRY_REPLIES}'
      )
  return warnings


def paid_invalid_replies(episodes: Sequence[Episode]) -> list[str]:
  """A warning for each environment in which it pays to write invalid replies instead of playing without success.

  The policy learns this first: on Sokoban, an action costs 0.1, and with the default penalty a reply that is not valid
  costs as much as one action (docs/real_models.md#sokoban).
  """
  warnings = []
  for tag in dict.fromkeys(e.tag for e in episodes):
    failed = [e for e in episodes if e.tag == tag and e.turns and e.status not in (Status.SUCCESS, Status.ENV_ERROR)]
    idle = [_trained_score(e) for e in failed if not any(t.valid for t in e.turns)]
    playing = [_trained_score(e) for e in failed if all(t.valid for t in e.turns)]
    if min(len(idle), len(playing)) >= _COMPARED and np.mean(idle) > np.mean(playing) + ZERO:
      warnings.append(
        f'{tag}: invalid replies pay: the mean score is {np.mean(idle):.3g} in {len(idle)} episodes without a valid '
        f'reply, and {np.mean(playing):.3g} in {len(playing)} unsuccessful ones with valid replies only; {_TRY_PENALTY}'
      )
  return warnings


def unplayed_episodes(episodes: Sequence[Episode]) -> list[str]:
  """A warning for each environment with episodes that ended before their first turn, because the prompt is too long."""
  warnings = []
  for tag in dict.fromkeys(e.tag for e in episodes):
    own = [e for e in episodes if e.tag == tag]
    unplayed = sum(e.status == Status.OUT_OF_CONTEXT and not e.turns for e in own)
    if unplayed:
      warnings.append(
        f'{tag}: {unplayed} of {len(own)} episodes ended without a turn, because their first prompt and a reply do not '
        f'fit; {_TRY_CONTEXT}'
      )
  return warnings


def equal_scores(episodes: Sequence[Episode], *, in_groups: bool) -> str:
  """A warning that says what to try if the scores of a rollout teach nothing; '' if they differ.

  `in_groups`: whether the estimator compares the episodes of a group only; otherwise it compares all.
  """
  played = [e for e in episodes if e.turns and e.status != Status.ENV_ERROR]
  if len(played) < 2:
    return ''
  scores, groups = np.asarray([_trained_score(e) for e in played]), np.asarray([e.group for e in played])
  if np.ptp(scores) <= ZERO:
    return f'nothing to learn from: all {len(played)} episodes have the score {scores[0]:.6g}; {_TRY_SCORES}'
  if in_groups and all(np.ptp(scores[groups == g]) <= ZERO for g in np.unique(groups)):
    return f'nothing to learn from: in each of the {len(np.unique(groups))} groups all scores are equal; {_TRY_SCORES}'
  return ''


def _trained_score(episode: Episode) -> float:
  """The score with the rewards of replies, which estimators compare, see `Rollout.trained_scores`."""
  return episode.score + math.fsum(t.reply_reward.format_reward + t.reply_reward.state_reward for t in episode.turns)
