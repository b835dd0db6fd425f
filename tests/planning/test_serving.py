"""What the plan counts for the server of agents is what its engines hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ragen_jax import build, build_agents, build_frozen
from ragen_jax.agent.language_model import param_state
from ragen_jax.modes.plan_changes import candidates
from ragen_jax.planning import memory
from ragen_jax.planning.abstract import abstract_policy
from ragen_jax.planning.serving import SERVER_CACHE, server_memory
from ragen_jax.runs.workdir import record_config
from ragen_jax.serving.engine.device_rows import DeviceRows
from tests.support.configs import small_config

_WEIGHTS, _CACHES = 'frozen agents: weights', 'frozen agents: caches'


def config_of(*frozen, **fields):
  given = dict(
    train__tags=('Agent',), eval__tags=('Agent',), serve__slots=4, serve__trained='a', serve__frozen=frozen,
    agent__max_context=200, envs__Agent__max_turns=3, model__preset='tiny', model__dtype='float32',
  )  # fmt: skip
  return small_config(**given | fields)


def held(tree) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(tree))


def rows_of(config, model, sampler, params) -> DeviceRows:
  s = build_agents.server_settings(config, model, trains=True).engine
  return DeviceRows(sampler, params, rows=s.slots, columns=s.columns, chunk=s.chunk, widths=s.widths)


def test_the_engines_hold_what_is_counted():
  config = config_of('b=base', 'c=tiny', 'd=base')
  counted = server_memory(config, abstract_policy(config, jnp.float32))
  model = build.load_policy(config)
  engine = rows_of(config, model, model.sampler, param_state(model.model))
  frozen = [rows_of(config, model, x.sampler, x.params) for x in build_frozen.load_frozen(config, model).values()]
  assert len(frozen) == 2 and set(counted) == {SERVER_CACHE, _WEIGHTS, _CACHES}
  assert counted[SERVER_CACHE] == held(engine._state.cache)
  assert counted[_CACHES] == sum(held(x._state.cache) for x in frozen)
  assert counted[_WEIGHTS] == sum(held(x._weights) for x in frozen)


def test_weights_are_counted_in_the_type_of_computations_and_without_a_critic(tmp_path):
  policy = abstract_policy(config_of(), jnp.float32)
  wide = server_memory(config_of('b=base'), policy)[_WEIGHTS]
  narrow = server_memory(config_of('b=base', model__dtype='bfloat16', model__separate_critic=True), policy)[_WEIGHTS]
  assert wide / 2 < narrow < 0.53 * wide
  record_config(tmp_path, config_of(model__separate_critic=True).to_dict())
  assert server_memory(config_of(f'b={tmp_path}@1'), policy)[_WEIGHTS] == wide


def test_without_programs_there_is_no_server():
  config = small_config(serve__frozen=('b=base',), serve__trained='a')
  assert server_memory(config, abstract_policy(config, jnp.float32)) == {}
  assert set(server_memory(config_of(), abstract_policy(config, jnp.float32))) == {SERVER_CACHE}


@pytest.fixture
def uncompiled(monkeypatch):
  monkeypatch.setattr(memory, '_activations', lambda *_: 0)


def test_the_server_stays_during_the_update(uncompiled):
  found = memory.estimate(config_of('b=base', model__dtype='bfloat16'), {})
  for kinds in found.phases.values():
    assert kinds[SERVER_CACHE] and kinds[_WEIGHTS] and kinds[_CACHES] and 'key/value cache' not in kinds
  assert found.phases['update']['server: weights'] and found.cache_rows == {'rollout': 4, 'evaluation': 4}
  without = memory.estimate(config_of(model__dtype='bfloat16'), {})
  added = found.phases['update'][_WEIGHTS] + found.phases['update'][_CACHES]
  assert found.total('update') - without.total('update') == added


def test_fewer_slots_are_advised():
  assert {'serve.slots': 2} in candidates(config_of(), 'rollout', 4)
  assert {'serve.slots': 2} not in candidates(config_of(), 'update', 4)
  assert not any('agent.rows_in_flight' in change for change in candidates(config_of(), 'rollout', 4))
