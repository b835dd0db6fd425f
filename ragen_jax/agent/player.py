"""Who plays the rollouts of training and of evaluations: the policy in our environments, or programs outside."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import jax
import numpy as np

from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.prompt_images import PromptImages
from ragen_jax.agent.rollout import Rollout
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.distributed import processes
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.sampling.sampler import Sampler, Sampling


class Player(Protocol):
  """Plays rollouts with the weights that it is given.

  Attributes:
    specs: the environments, or the tasks, in the order of the rows.
    reply_prefix: the part of every reply that is forced.
    metrics: metrics of the last rollout that its episodes do not tell.
  """

  specs: list[EnvSpec]
  group_size: int
  max_turns: int
  reply_prefix: str
  metrics: dict[str, float]

  def check(self, first_seed: int) -> None:
    """Raises UserError if episodes cannot begin, as far as that shows before anything large is compiled."""

  def play(
    self,
    params: Any,
    key: jax.Array,
    sampling: Sampling,
    first_seed: int,
    *,
    policy_version: int = 0,
    pictured: Collection[int] = (),
    level_seeds: np.ndarray | None = None,
  ) -> Rollout:
    """Plays one episode in each row.

    Args:
      first_seed: seed of the level, or the number of the task, of the first group; the next group has the next one.
      policy_version, pictured: see `AgentProxy.rollout`.
      level_seeds: i64[P], the seeds of the groups' levels in place of consecutive ones, see `Curriculum`. Programs play
        consecutive tasks.
    """

  def levels(self, first_seed: int) -> frozenset[bytes]:
    """The levels of a rollout, as `EnvStateManager(held_out=...)` takes them; none if they cannot be compared."""

  def optimal(self, first_seed: int) -> dict[str, float]:
    """Best possible success probability by tag, averaged over the levels of a rollout; NaN if unknown."""


class EnvironmentPlayer:
  """The policy plays the environments of an `AgentProxy`; see `Player` for the attributes and methods.

  All processes must call `levels` and `optimal`.
  """

  def __init__(self, proxy: AgentProxy, sampler: Sampler, eyes: PromptImages | None = None):
    """Plays nothing. `eyes` is the vision tower of the policy, which is needed if observations contain images."""
    self.proxy = proxy
    self._sampler = sampler
    self._eyes = eyes
    self.specs, self.group_size = proxy.envs.specs, proxy.envs.group_size
    self.metrics: dict[str, float] = {}
    self.max_turns, self.reply_prefix = proxy.limits.max_turns, proxy.context.reply_prefix

  def check(self, first_seed: int) -> None:
    self.proxy.check_first_prompts(first_seed)

  def play(
    self,
    params: Any,
    key: jax.Array,
    sampling: Sampling,
    first_seed: int,
    *,
    policy_version: int = 0,
    pictured: Collection[int] = (),
    level_seeds: np.ndarray | None = None,
  ) -> Rollout:
    speaker = SamplerSpeaker(self._sampler, params, key, sampling, eyes=self._eyes)
    return self.proxy.rollout(
      speaker, first_seed, policy_version=policy_version, pictured=pictured, level_seeds=level_seeds
    )

  def levels(self, first_seed: int) -> frozenset[bytes]:
    own = self.proxy.envs.levels_from(first_seed)
    return frozenset().union(*processes.gather_shares(own, self._sampler.share))

  def optimal(self, first_seed: int) -> dict[str, float]:
    envs = self.proxy.envs
    envs.reset(first_seed)
    parts = processes.gather_shares((envs.optimal(), envs.row_env), self._sampler.share)
    best, env = (np.concatenate(x) for x in zip(*parts, strict=True))
    return {s.tag: float(np.mean(best[env == i])) for i, s in enumerate(envs.specs)}
