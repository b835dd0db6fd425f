"""The player of environments plays as its rollout loop does, and knows the levels and the best possible success."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.player import EnvironmentPlayer
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config
from tests.support.models import random_policy

SAMPLING = Sampling(0.7, 1.0, 0)


@pytest.fixture(scope='module')
def player_and_policy(tmp_path_factory):
  config = small_config(envs__FrozenLake__max_turns=2)
  policy = random_policy(config, tmp_path_factory.mktemp('policy'))
  specs = build.env_specs(config, ('FrozenLake',), (4,))
  proxy = build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, 2)
  return EnvironmentPlayer(proxy, policy.sampler), policy


def test_it_describes_its_rollouts(player_and_policy):
  player, _ = player_and_policy
  assert [s.tag for s in player.specs] == ['FrozenLake'] and player.group_size == 2
  assert player.max_turns == 2 and player.reply_prefix == '<think>'


@pytest.mark.slow
def test_it_plays_as_the_loop_does(player_and_policy):
  player, policy = player_and_policy
  params, key = param_state(policy.model), jax.random.key(5)
  played = player.play(params, key, SAMPLING, 700, policy_version=3, pictured=[1])
  expected = player.proxy.rollout(SamplerSpeaker(policy.sampler, params, key, SAMPLING), 700)
  np.testing.assert_array_equal(played.trajectory.tokens, expected.trajectory.tokens)
  assert set(played.trajectory.policy_version.tolist()) == {3}
  assert [e.level_seed for e in played.episodes] == [700, 700, 701, 701, 702, 702, 703, 703]
  assert [e.final_picture is not None for e in played.episodes] == [i == 1 for i in range(8)]


def test_levels_and_the_best_possible_success(player_and_policy):
  player, _ = player_and_policy
  envs = EnvStateManager(player.specs, 2)
  assert player.levels(700) == envs.levels_from(700) and len(player.levels(700)) == 4
  envs.reset(700)
  assert player.optimal(700) == {'FrozenLake': pytest.approx(envs.optimal().mean())}


def test_a_first_prompt_that_does_not_fit_is_reported(player_and_policy):
  player, policy = player_and_policy
  player.check(700)
  config = small_config(agent__max_context=60)
  specs = build.env_specs(config, ('FrozenLake',), (4,))
  short = EnvironmentPlayer(build.agent_proxy(config, policy.tokenizer, policy.sampler, specs, 2), policy.sampler)
  with pytest.raises(UserError, match=r'agent\.max_context=60'):
    short.check(700)
