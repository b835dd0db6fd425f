"""Threads play equal shares of a rollout; the episodes are those of one speaker that plays all rows."""

from __future__ import annotations

import dataclasses
import logging
import threading
import types

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent import player as players
from ragen_jax.agent.language_model import param_state
from ragen_jax.agent.sampler_speaker import SamplerSpeaker
from ragen_jax.planning import program_list
from ragen_jax.sampling.sampler import Sampling
from ragen_jax.utils import heartbeat
from ragen_jax.utils.observer import Observer
from tests.support.configs import small_config

SAMPLING = Sampling(0.7, 1.0, 0)
TAGS, GROUPS, SIZE = ('FrozenLake', 'Bandit'), (4, 2), 2


@pytest.fixture(scope='module')
def parts():
  config = small_config(length_step=64)
  config.train.tags, config.train.tag_groups, config.train.groups, config.train.group_size = TAGS, GROUPS, 6, SIZE
  policy = build.load_policy(config)  # the built-in model, whose episodes differ in length
  return config, policy, build.env_specs(config, TAGS, GROUPS)


def _player(parts, held_out=frozenset(), specs=None, rows=4):
  """Its shares have at least so many rows."""
  config, policy, own = parts
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(players, '_ROWS_OF_SHARE', rows)
    return build.environment_player(config, policy, specs or own, SIZE, held_out)


@pytest.mark.parametrize('schedule', ['lockstep', 'continuous'])
@pytest.mark.slow
def test_episodes_are_those_of_one_speaker(parts, schedule, monkeypatch, caplog):
  monkeypatch.setattr(heartbeat, 'SECONDS', 0.0)
  caplog.set_level(logging.INFO)
  config, policy, _ = parts
  config.agent.schedule = schedule
  seeds = np.asarray([7, 9, 7, 12, 3, 4])
  player = _player(parts, held_out=_player(parts).levels(7))
  assert [share.envs.rows for share in player._shares] == [4, 4, 4]
  params, key = param_state(policy.model), jax.random.key(3)
  how = dict(policy_version=2, pictured=[1, 6], level_seeds=seeds)
  found = player.play(params, key, SAMPLING, 7, **how)
  whole = player.proxy.rollout(SamplerSpeaker(policy.sampler, params, key, SAMPLING), 7, **how)
  for field in dataclasses.fields(found.trajectory):
    own, expected = getattr(found.trajectory, field.name), getattr(whole.trajectory, field.name)
    if field.name in ('logprobs', 'values', 'entropies'):  # the size of the cache may differ
      np.testing.assert_allclose(own, expected, atol=2e-5, err_msg=field.name)
    else:
      np.testing.assert_array_equal(own, expected, err_msg=field.name)
  assert [(e.tag, e.group, e.level_seed, e.score, e.status, len(e.turns)) for e in found.episodes] == [
    (e.tag, e.group, e.level_seed, e.score, e.status, len(e.turns)) for e in whole.episodes
  ]
  assert [e.final_picture is not None for e in found.episodes] == [i in (1, 6) for i in range(12)]
  same = found.anchors[:, :, None, None] == found.anchors
  np.testing.assert_array_equal(same, whole.anchors[:, :, None, None] == whole.anchors)
  assert found.tokens_sampled == whole.tokens_sampled and len(set(found.trajectory.length.tolist())) > 2
  told = [r.getMessage().partition(' after')[0] for r in caplog.records if r.name == heartbeat.__name__]
  assert len(told) > 3 and 'playing: 12 of 12 episodes are over' in told  # the shares count together


def test_levels_and_the_best_success_are_those_of_all_shares(parts):
  player, whole = _player(parts), _player(parts, rows=100)
  assert (len(player._shares), len(whole._shares)) == (3, 1)
  assert player.levels(50) == whole.levels(50) and len(player.levels(50)) >= 5
  np.testing.assert_equal(player.optimal(50), whole.optimal(50))


def test_only_small_models_on_one_cpu_are_shared(parts):
  config, policy, specs = parts
  limits = build.episode_limits(config, specs)

  def count(groups=(256,), size=2, **changes):
    device = types.SimpleNamespace(platform=changes.get('platform', 'cpu'))
    mesh = types.SimpleNamespace(size=changes.get('devices', 1), devices=np.asarray([device]))
    cfg = dataclasses.replace(policy.sampler.cfg, hidden_size=changes.get('width', 64))
    own = dataclasses.replace(limits, rows_in_flight=changes.get('rows_in_flight', 0))
    outside = types.SimpleNamespace(is_outside=changes.get('outside', False))
    found = [types.SimpleNamespace(num_groups=n, env=outside) for n in groups]
    return players.shares_at_once(types.SimpleNamespace(mesh=mesh, cfg=cfg), own, found, size)

  assert count() == count((128, 128)) == count(rows_in_flight=512) == count(width=511) == 4
  assert count((127,)) == count((128,)) / 2 == count((64,), size=1) == 1
  assert count((129,)) == 1 and count((3 * 129,)) == 3  # shares of groups are equal
  assert {count(**{name: x}) for name, x in (
    ('platform', 'tpu'), ('devices', 2), ('width', 512), ('rows_in_flight', 511), ('outside', True)
  )} == {1}  # fmt: skip


@pytest.mark.slow
def test_a_failure_of_a_share_ends_the_rollout(parts, monkeypatch):
  _, policy, _ = parts
  player = _player(parts)

  def fail(*args, **more):
    raise RuntimeError('a broken share')

  monkeypatch.setattr(player._shares[1], 'rollout', fail)
  with pytest.raises(RuntimeError, match='a broken share'):
    player.play(param_state(policy.model), jax.random.key(3), SAMPLING, 7)
  assert not [t for t in threading.enumerate() if t.name.startswith('ragen_jax-share')]


def test_levels_that_are_too_few_are_told_once(parts, caplog):
  caplog.set_level(logging.INFO, 'ragen_jax')
  logging.getLogger('ragen_jax').propagate = True
  config, policy, _ = parts
  specs = build.env_specs(config, ('Bandit',), (6,))
  every = _player(parts, specs=specs).levels(0)
  player = _player(parts, held_out=every, specs=specs)
  assert len(player._shares) == 3
  player.play(param_state(policy.model), jax.random.key(3), SAMPLING, 0)
  assert sum('are levels of the evaluation too' in record.getMessage() for record in caplog.records) == 1


def test_the_programs_of_shares_are_listed(parts, monkeypatch):
  config, policy, _ = parts
  monkeypatch.setattr(players, '_ROWS_OF_SHARE', 4)
  rows = program_list.rows(config, policy.sampler)
  assert rows == {'rollout': 4, 'evaluation': 4}  # of 12 and 16 episodes
  listed, called = program_list.of_sampler(config, 1, rows), []

  class Listener:
    def runs(self, name, shape, weights):
      called.append((name, shape))

  with policy.sampler.observer.told_to(Listener()):
    _player(parts).play(param_state(policy.model), jax.random.key(3), build.sampling(config.train), 7)
  assert {'extend', 'decode'} <= {name for name, _ in called} and set(called) <= set(listed)


def test_a_listener_is_told_of_one_program_at_a_time():
  observer, inside, most = Observer(), [], []

  class Listener:
    def runs(self, name, shape, weights):
      inside.append(name)
      most.append(len(inside))
      for _ in range(2000):
        pass
      inside.pop()

  with observer.told_to(Listener()):
    threads = [threading.Thread(target=lambda: [observer.runs('extend', ()) for _ in range(300)]) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert len(most) == 1200 and set(most) == {1}
