"""The loop that plays episodes: reset; then reply, parse, step and record for the rows that replied, until all end."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import numpy as np

from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.episode import Limits, Status
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.reply_lengths import complete_replies, warn_if_too_long
from ragen_jax.agent.rollout import SENT_TYPES, Rollout, concatenate
from ragen_jax.agent.speakers import Speaker
from ragen_jax.agent.turns import Turns
from ragen_jax.agent.world_model.formats import described_sections
from ragen_jax.distributed import processes
from ragen_jax.distributed.processes import RowShare
from ragen_jax.utils.heartbeat import Heartbeat


class AgentProxy:
  """Plays episodes with any speaker."""

  def __init__(self, envs: EnvStateManager, context: ContextManager, limits: Limits, *, share: RowShare | None = None):
    """Combines the parts; nothing runs before `rollout`.

    Args:
      share: the rows that this process plays, whose environments are `envs`; `rollout` joins them with the rows of the
        other processes. None if this process plays all rows.
    """
    self.envs = envs
    self.context = context
    self.limits = limits
    self._share = share

  def divided(self, shares: int) -> list[AgentProxy]:
    """Proxies of the equal shares of the environments, one for each thread; see `EnvStateManager.divided`."""
    return [AgentProxy(envs, self.context, self.limits) for envs in self.envs.divided(shares)]

  def rollout(
    self,
    speaker: Speaker,
    first_seed: int,
    *,
    first_member: int = 0,
    policy_version: int = 0,
    pictured: Collection[int] = (),
    level_seeds: np.ndarray | None = None,
    heartbeat: Heartbeat | None = None,
  ) -> Rollout:
    """Plays one episode in each row. If processes share the rows, each plays its own, and all return the whole rollout.

    Args:
      first_seed, first_member, level_seeds: see `EnvStateManager.reset`.
      policy_version: number of updates that led to the speaker's weights; recorded in the trajectory.
      pictured: rows of the whole batch whose boards are drawn, for the viewer.
      heartbeat: is told of episodes that are over, after each turn of some rows.

    Raises:
      UserError: the speaker writes tokens, and a first prompt does not fit into the context.
    """
    envs, context = self.envs, self.context
    observations = envs.reset(first_seed, first_member=first_member, level_seeds=level_seeds)
    log = EpisodeLog(envs, context, self.limits, observations, writes_tokens=speaker.writes_tokens, pictured=pictured)
    turns = Turns(envs, self.limits.env_threads if hasattr(speaker, 'idle') else 0)
    over = 0
    with contextlib.closing(turns):
      while (replies := speaker.reply(log)) is not None:
        read = {row: context.parse(int(envs.row_env[row]), reply.text, reply.ids) for row, reply in replies.items()}
        log.replied(replies, read)
        played = turns.play({row: list(own.actions) for row, own in read.items()}, wait=turns.apart and speaker.idle)
        if played is not None:
          log.record(*played)
        if heartbeat is not None:
          before, over = over, int(np.sum(log.status != Status.RUNNING))
          heartbeat.advance(over - before)
    rollout = log.end(policy_version)
    envs.end()
    if self._share is None:
      return rollout
    return concatenate(processes.gather_shares(rollout, self._share, SENT_TYPES), renumber=False)

  def check_first_prompts(self, first_seed: int) -> None:
    """Raises UserError if an environment's first prompt does not fit, before anything large is compiled.

    Warns if the form of replies describes the board, and complete replies are longer than a reply may be. Skips batches
    with external environments: a reset there may have side effects.
    """
    if self.envs.has_outside:
      return
    observations, left = self.envs.reset(first_seed), self.envs.actions_left()
    for env, row in zip(*np.unique(self.envs.row_env, return_index=True), strict=True):
      shown = self.context.shown(int(env), observations[row])
      self.context.check_first_prompt(int(env), shown, int(left[row]), self.limits)
      self._check_replies(int(env))

  def _check_replies(self, env: int) -> None:
    """Warns if complete replies in an environment are too long, on the levels of the last reset."""
    spec, settings = self.envs.specs[env], self.context.settings
    if not (spec.env.scene_kinds and described_sections(settings.format)):
      return
    own = np.flatnonzero(self.envs.row_env == env)
    rows = own[np.unique(self.envs.row_group[own], return_index=True)[1]]  # one of each level
    replies = complete_replies(spec, settings.format, self.envs.scenes(rows.tolist()).values())
    warn_if_too_long(
      spec, replies, self.context.count_reply, form=settings.format,
      max_response_tokens=self.limits.of(spec).max_response_tokens,
    )  # fmt: skip
