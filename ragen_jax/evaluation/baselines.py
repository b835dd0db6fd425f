"""Random play, exact solvers and endpoints on the levels of an evaluation."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np

from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.endpoint_speaker import EndpointSpeaker
from ragen_jax.agent.env_manager import EnvGroup, EnvStateManager
from ragen_jax.agent.text_policy import RandomPolicy, SolverPolicy, TextPolicy, play
from ragen_jax.agent.trajectory import Episode
from ragen_jax.evaluation.evaluator import EvaluationSettings, best_success
from ragen_jax.viewer.records import first_rows, text_records

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class EvaluationLevels:
  """The levels of one environment in an evaluation.

  Attributes:
    spec: the environment.
    first: seed of the first level.
    envs: plays the levels, for policies that speak text.
    best: f32[levels], the best possible success probability on each; None if unknown.
  """

  spec: EnvGroup
  first: int
  envs: EnvStateManager
  best: np.ndarray | None


def evaluation_levels(specs: list[EnvGroup], settings: EvaluationSettings) -> list[EvaluationLevels]:
  """The levels of each environment, with the seeds that they have in the batch of all environments."""
  parts, first = [], settings.first_level
  for spec in specs:
    envs = EnvStateManager([spec], settings.group_size)
    best = best_success(envs, first)[:: settings.group_size]
    parts.append(EvaluationLevels(spec, first, envs, None if np.isnan(best).any() else best))
    first += spec.groups
  return parts


def play_baseline(
  kind: str,
  levels: EvaluationLevels,
  context: ContextManager,
  settings: EvaluationSettings,
  *,
  endpoint: EndpointSpeaker | None = None,
  format_penalty: float,
  step: int,
) -> tuple[list[Episode], list[dict[str, Any]]]:
  """Plays the levels of one environment with a policy that speaks text.

  Args:
    kind: 'random', 'solver' or 'endpoint'.
    levels: with the environment of `context`.
    context: writes the prompts.
    settings: how levels are played.
    endpoint: the policy of kind 'endpoint'.
    format_penalty: added to the reward of a turn whose reply is not valid; 0 or negative.
    step: iteration under which the viewer lists the records.

  Returns:
    The episodes, and records of some for the trajectory viewer; none if the policy cannot play this environment.
  """
  spec, policy = levels.spec, _policy(kind, levels, context, endpoint)
  if policy is None:
    return [], []
  recorded = first_rows([spec], settings.group_size, settings.episodes, one_a_level=True)
  try:
    played = play(levels.envs, context, policy, levels.first, format_penalty=format_penalty, pictured=recorded)
  except ValueError as error:
    if kind != 'solver':
      raise
    _log.info('%s: the solver is left out (%s)', spec.tag, error)
    return [], []
  records = text_records(
    played, step=step, split=kind, group_size=settings.group_size, tokenizer=context.tokenizer,
    whole=context.policy.mode == 'full',
  )  # fmt: skip
  return played.episodes, records


def _policy(
  kind: str, levels: EvaluationLevels, context: ContextManager, endpoint: EndpointSpeaker | None
) -> TextPolicy | None:
  """The policy of a kind; None if it cannot play the environment."""
  env, tag = levels.spec.env, levels.spec.tag
  if kind == 'random':
    if not RandomPolicy.can_play(env):
      _log.info('%s: actions are free text, so there is no random play', tag)
      return None
    return RandomPolicy(context, np.random.default_rng(levels.first))
  if kind == 'solver':
    if not env.has_solver:
      _log.info('%s: has no solver', tag)
      return None
    return SolverPolicy(context)
  return endpoint
