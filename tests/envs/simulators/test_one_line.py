"""One field of the config chooses the simulator: what else is the same, and what the run knows of its images."""

from __future__ import annotations

import json

import numpy as np
import pytest

from configs import vagen_manipulation, vagen_navigation
from ragen_jax import build
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.image_observations import observed_images, shows_images
from ragen_jax.agent.outside_pool import OutsidePool
from ragen_jax.envs.simulators.base import SimulatorSession
from ragen_jax.models import presets
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.threads import Fault
from tests.envs.simulators.test_ai2thor import task
from tests.envs.simulators.test_maniskill import Arm
from tests.support.thor import house


@pytest.fixture
def navigation(tmp_path):
  """VAGEN's config with tasks of the stand-in."""
  config = vagen_navigation.get_config()
  file = tmp_path / 'tasks.json'
  file.write_text(json.dumps([task(scene) for scene in house.SCENES]))
  config.envs.Navigation.simulator.tasks = str(file)
  return config


def specs(config):
  return build.env_specs(config, config.train.tags, (1,) * len(config.train.tags))


def test_the_type_is_the_only_change_and_held_out_tags_follow_it(navigation):
  (rooms,) = specs(navigation)
  navigation.envs.Navigation.type = 'ai2thor'
  (scenes,) = specs(navigation)
  (held_out,) = build.env_specs(navigation, navigation.eval.tags, (1,))
  assert not rooms.env.is_outside and scenes.env.is_outside and held_out.env.name == 'ai2thor'
  assert (scenes.budget, scenes.max_words, scenes.request) == (rooms.budget, rooms.max_words, rooms.request)
  assert scenes.env.rules() == rooms.env.rules() and scenes.env.world == rooms.env
  parts = [{x.env.level(seed).start['scene'] for seed in range(50)} for x in (scenes, held_out)]
  assert all(parts) and not parts[0] & parts[1]


@pytest.mark.parametrize('preset, size', [('qwen2.5-vl-3b', (252, 252)), ('qwen3-vl-2b', (256, 256))])
def test_frames_are_counted_as_the_tower_reads_them(navigation, preset, size):
  navigation.envs.Navigation.type = 'ai2thor'
  (spec,) = specs(navigation)
  assert shows_images(spec) and observed_images(spec, presets.processor(preset, '')) == (1, size)


def test_skills_of_the_arm_are_described_for_the_state_reward():
  config = vagen_manipulation.get_config()
  config.train.tags = ('StackThreeCube',)
  config.envs.StackThreeCube.type = 'maniskill'
  config.envs.StackThreeCube.simulator.size = 40
  (spec,) = specs(config)
  pool = OutsidePool(spec, 2, 2, None)
  arm = Arm(spec.env)
  pool._opened = SimulatorSession(spec.env, lambda: arm)
  pool.reset(np.array([3, 3]), np.array([0, 1]))
  picked = pool.expert([0, 1])
  step = pool.step([own[:2] for own in picked])
  assert step.executed.tolist() == step.effective.tolist() == [2, 2]
  assert step.rewards[0] == pytest.approx((1.9, 1.9), abs=1e-6) and not pool.faults
  scenes = pool.scenes([0, 1])
  assert scenes[0] == scenes[1] and scenes[0].words == spec.env.scene_words
  assert spec.env.scene_kinds == ('red cube', 'green cube', 'purple cube')


def test_a_simulator_that_does_not_begin_costs_its_rows_only():
  config = vagen_manipulation.get_config()
  config.train.tags = ('StackThreeCube',)
  config.envs.StackThreeCube.type = 'maniskill'
  config.envs.StackThreeCube.simulator.size = 40
  envs = EnvStateManager(specs(config), 2)
  (pool,) = envs.pools.values()
  arm = Arm(pool.spec.env)
  begin = arm.reset
  arm.reset = lambda rows, *start: [*begin(rows, *start)[:1], Fault('it did not start')]
  pool._opened = SimulatorSession(pool.spec.env, lambda: arm)
  envs.reset(3)
  assert envs.faults.keys() == {1} and envs.scenes([0, 1]).keys() == {0}


@pytest.mark.parametrize(
  'change, told',
  [
    (('observation', 'text'), "envs.Navigation: observation='text'; allowed: image, with type='ai2thor'"),
    (('type', 'maniskill'), ' is not an option of manipulation; allowed: task'),
  ],
)
def test_what_a_simulator_does_not_play_gives_one_line(navigation, change, told):
  navigation.envs.Navigation.type = 'ai2thor'
  navigation.envs.Navigation[change[0]] = change[1]
  with pytest.raises(UserError) as error:
    specs(navigation)
  assert told in str(error.value) and '\n' not in str(error.value)
