"""Agents are sampled from their own weights, and all engines are held and continued together."""

from __future__ import annotations

import types

import numpy as np
import pytest

from ragen_jax.serving.engine.engines import Engines
from ragen_jax.serving.errors import EngineStopped
from tests.support.serving import expected_logprobs, prompts, request, small_sampler, start, submit, weights

FROZEN = 3  # seed of the frozen weights


@pytest.fixture(scope='module')
def made():
  """The sampler, weights, and engines that share the sampler's programs."""
  sampler, params = small_sampler()
  with start(sampler, params) as policy, start(sampler, weights(FROZEN)) as frozen:
    yield sampler, params, Engines(policy, {'old': frozen}, (('b.*', 'old'), ('judge', 'old')))


def test_names_are_matched_whole(made):
  _, _, engines = made
  for agent in ('b', 'bob', 'judge'):
    assert engines.of(agent) is engines.frozen['old'] and engines.is_frozen(agent)
  for agent in ('', 'a', 'ab', 'judges'):
    assert engines.of(agent) is engines.policy and not engines.is_frozen(agent)


def test_the_first_expression_counts():
  engines = Engines('policy', {'one': 1, 'two': 2}, (('a', 'two'), ('a|b', 'one')))
  assert (engines.of('a'), engines.of('b'), engines.of('c')) == (2, 1, 'policy')


def test_every_name_has_an_engine():
  with pytest.raises(ValueError, match='no engine of three, two'):
    Engines('policy', {'one': 1}, (('a', 'one'), ('b', 'two'), ('c', 'three')))


@pytest.mark.slow
def test_each_engine_has_its_own_weights_and_keeps_them(made):
  sampler, _, engines = made
  asked = request(prompts(1, 30)[0], max_tokens=6)

  def logprobs(agent):
    reply = submit(engines.of(agent), asked).reply()
    return reply, reply.logprobs

  reply, found = logprobs('bob')
  np.testing.assert_allclose(
    found, expected_logprobs(sampler, weights(FROZEN), asked.prompt, reply.ids), rtol=0, atol=1e-4
  )
  before = engines.stats()['old'].fed_tokens
  engines.pause(drain=True)
  engines.policy.set_weights(weights(5), version=1, keep_cache=False)
  engines.resume()
  again, same = logprobs('bob')
  assert again.ids == reply.ids and engines.stats()['old'].fed_tokens - before <= 1, 'the prompt is still there'
  np.testing.assert_allclose(same, found, rtol=0, atol=1e-4)
  mine, found = logprobs('alice')
  np.testing.assert_allclose(found, expected_logprobs(sampler, weights(5), asked.prompt, mine.ids), rtol=0, atol=1e-4)
  stats = engines.stats()
  assert list(stats) == ['', 'old'] and (stats[''].version, stats['old'].version) == (1, 0)
  assert set(again.versions.tolist()) == {0} and set(mine.versions.tolist()) == {1}


@pytest.mark.parametrize('drain', [True, False])
def test_all_are_held_together(made, drain):
  _, _, engines = made
  engines.pause(drain=drain)
  assert all(s.paused for s in engines.stats().values())
  waiting = [submit(engines.of(agent), request(prompts(1, 12, seed=7)[0], max_tokens=3)) for agent in ('a', 'b')]
  assert [s.queued for s in engines.stats().values()] == [1, 1] and not any(x.outcomes for x in waiting)
  engines.resume()
  assert [len(x.reply().ids) > 0 for x in waiting] == [True, True]
  assert not any(s.paused for s in engines.stats().values())


@pytest.mark.parametrize('drain', [True, False])
def test_replies_of_all_end_first_or_none(drain):
  asked = []
  engines = [types.SimpleNamespace(pause=lambda *, drain: asked.append(drain)) for _ in range(2)]
  Engines(engines[0], {'old': engines[1]}, ()).pause(drain=drain)
  assert asked == [drain, drain]


def test_an_engine_that_has_stopped_is_told(made):
  sampler, params, _ = made
  with start(sampler, params) as policy, start(sampler, params) as frozen:
    frozen.close()
    engines = Engines(policy, {'old': frozen}, ())
    with pytest.raises(EngineStopped):
      engines.pause(drain=True)
    assert [s.alive for s in engines.stats().values()] == [True, False]


def test_all_are_compiled():
  compiled = []
  policy, frozen = (types.SimpleNamespace(compile=lambda name=name: compiled.append(name)) for name in 'pf')
  Engines(policy, {'old': frozen}, ()).compile()
  assert compiled == ['p', 'f']
