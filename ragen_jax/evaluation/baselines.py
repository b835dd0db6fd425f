"""Random play, exact solvers and endpoints on the levels of an evaluation."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np

from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.endpoint_speaker import EndpointSpeaker
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Episode, Limits
from ragen_jax.agent.speakers import RandomSpeaker, SolverSpeaker, Speaker
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.evaluation.evaluator import EvaluationSettings
from ragen_jax.viewer.records import Played, first_rows, text_records

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class EvaluationLevels:
  """The levels of one environment in an evaluation.

  Attributes:
    first: seed of the first level.
    envs: the batch that plays the levels, for speakers of text; None if programs outside play.
    best: f32[levels], the best possible success probability on each level; None if unknown.
  """

  spec: EnvSpec
  first: int
  envs: EnvStateManager | None
  best: np.ndarray | None


def evaluation_levels(specs: list[EnvSpec], settings: EvaluationSettings) -> list[EvaluationLevels]:
  """The levels of each environment, with their seeds from the batch of all environments."""
  parts, first = [], settings.first_level
  for spec in specs:
    if spec.env.played_by_programs:
      parts.append(EvaluationLevels(spec, first, None, None))
      first += spec.num_groups
      continue
    envs = EnvStateManager([dataclasses.replace(spec, tile=None)], settings.group_size)  # players of text
    if not envs.has_outside:
      envs.reset(first)
    best = envs.optimal()[:: settings.group_size]
    parts.append(EvaluationLevels(spec, first, envs, None if np.isnan(best).any() else best))
    first += spec.num_groups
  return parts


def play_baseline(
  kind: str,
  levels: EvaluationLevels,
  context: ContextManager,
  settings: EvaluationSettings,
  *,
  endpoint: EndpointSpeaker | None = None,
  limits: Limits,
  step: int,
) -> tuple[list[Episode], list[dict[str, Any]]]:
  """Plays the levels of one environment with a speaker of text, of the kind 'random', 'solver' or 'endpoint'.

  The limits in tokens do not apply. The viewer lists the records under the iteration `step`.

  Returns:
    The episodes, and records of some of them for the trajectory viewer; both empty if it cannot play them.
  """
  spec, speaker = levels.spec, _speaker(kind, levels, endpoint)
  if speaker is None:
    return [], []
  recorded = first_rows([spec], settings.group_size, settings.episodes, one_a_level=True)
  try:
    rollout = AgentProxy(levels.envs, context, limits).rollout(speaker, levels.first, pictured=recorded)
  except ValueError as error:
    if kind != 'solver':
      raise
    _log.info('%s: the solver is left out (%s)', spec.tag, error)
    return [], []
  played = Played(rollout, context.tokenizer, step, kind, settings.group_size)
  records = text_records(played, recorded, whole=context.settings.context == 'full')
  return rollout.episodes, records


def _speaker(kind: str, levels: EvaluationLevels, endpoint: EndpointSpeaker | None) -> Speaker | None:
  """The speaker of a kind; None if it cannot play the environment."""
  env, tag = levels.spec.env, levels.spec.tag
  if kind == 'random':
    if not RandomSpeaker.can_play(levels.envs):
      _log.info('%s: actions are free text, so there is no random play', tag)
      return None
    return RandomSpeaker(np.random.default_rng(levels.first))
  if kind == 'solver':
    if not (env.has_solver or env.has_expert):
      _log.info('%s: has no solver', tag)
      return None
    return SolverSpeaker()
  return endpoint
