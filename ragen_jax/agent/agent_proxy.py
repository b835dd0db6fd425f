"""The loop that plays episodes: reset, reply, parse, step, record, for the rows that replied, until all are over."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Limits
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.rollout import Rollout, concatenate
from ragen_jax.agent.speakers import Speaker
from ragen_jax.distributed import processes
from ragen_jax.distributed.processes import RowShare


class AgentProxy:
  """Plays episodes with any speaker.

  Attributes:
    envs: the environments.
    context: writes the prompts and reads the replies.
    limits: of the episodes.
  """

  def __init__(self, envs: EnvStateManager, context: ContextManager, limits: Limits, *, share: RowShare | None = None):
    """Puts the parts together; nothing runs before `rollout`.

    Args:
      envs: the environments, or this process's share of them.
      context: with the same environments.
      limits: of the episodes.
      share: the rows that this process plays, which `rollout` joins with those of the others. None for a rollout that
        is this process's alone.
    """
    self.envs = envs
    self.context = context
    self.limits = limits
    self._share = share

  def rollout(
    self, speaker: Speaker, first_seed: int, *, policy_version: int = 0, pictured: Collection[int] = ()
  ) -> Rollout:
    """Plays one episode a row. With a share of the rows each process plays its own, and all return the whole.

    Args:
      speaker: gives the replies.
      first_seed: of the levels, see `EnvStateManager.reset`.
      policy_version: number of updates behind the speaker's weights, kept in the trajectory.
      pictured: rows of the whole batch whose boards are drawn, for the viewer.

    Returns:
      The `Rollout`.

    Raises:
      UserError: a first prompt does not fit into the context of a speaker with tokens.
    """
    envs, context = self.envs, self.context
    observations = envs.reset(first_seed)
    log = EpisodeLog(envs, context, self.limits, observations, writes_tokens=speaker.writes_tokens, pictured=pictured)
    while (replies := speaker.reply(log)) is not None:
      if not replies:
        continue
      parsed = {row: context.parse(int(envs.row_env[row]), reply.text) for row, reply in replies.items()}
      result = envs.step([list(parsed[row].actions) if row in parsed else [] for row in range(envs.rows)])
      log.record(replies, parsed, result)
    rollout = log.end(policy_version)
    envs.end()
    if self._share is None:
      return rollout
    return concatenate(processes.gather_shares(rollout, self._share), renumber=False)

  def check_first_prompts(self, first_seed: int) -> None:
    """Checks that the first prompt of each environment fits, before anything large is compiled.

    Skips batches with external environments: a reset there may have side effects.

    Args:
      first_seed: of the levels.

    Raises:
      UserError: one does not fit.
    """
    if self.envs.has_outside:
      return
    observations, left = self.envs.reset(first_seed), self.envs.actions_left()
    for env, row in zip(*np.unique(self.envs.row_env, return_index=True), strict=True):
      self.context.check_first_prompt(int(env), observations[row], int(left[row]), self.limits)
