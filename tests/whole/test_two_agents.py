"""Two agents play one game over HTTP: one learns from its own tokens only, the other's weights stay as they were."""

from __future__ import annotations

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ragen_jax
from ragen_jax import build, build_agents
from ragen_jax.agent.language_model import param_state
from ragen_jax.serving.rollouts.tables import Tables
from tests.support.paths import ROOT

pytest.importorskip('starlette')
pytest.importorskip('uvicorn')
pytest.importorskip('openai')

ITERATIONS = 2


def config_of_example():
  """The shipped config, cut down; the learning rate changes the policy visibly."""
  config = ragen_jax.load_config('two_agents_ppo')
  config.update_from_flattened_dict(
    {
      'train.groups': 4, 'train.group_size': 2, 'eval.groups': 2, 'optimizer.mini_batch_size': 8,
      'optimizer.micro_batch_size': 8, 'optimizer.actor_lr': 2e-3, 'optimizer.warmup_steps': 0,
      'optimizer.final_lr_fraction': 1.0, 'serve.port': 0, 'serve.slots': 4, 'serve.max_concurrency': 2,
      'length_step': 256, 'envs.Agent.runner': f'{ROOT}/docs/examples/two_agents.py:play',
    }
  )  # fmt: skip
  return config


def digest(params) -> str:
  found = hashlib.sha256()
  for x in jax.tree.leaves(jax.device_get(params)):
    found.update(np.ascontiguousarray(x).tobytes())
  return found.hexdigest()


@dataclasses.dataclass
class Iteration:
  """What an iteration left behind.

  Attributes:
    rollout: with its batch in the order of the rows.
    params: the weights that the policy was sampled from, on the host.
    batch: of the update.
    calls: the stored calls of each episode.
    frozen: digest of the frozen engine's weights.
    cached: tokens of prompts that the frozen engine has not fed, so far.
  """

  rollout: object
  params: object
  batch: object
  calls: list
  frozen: str
  cached: int


def play(config, policy, directory) -> tuple[list[Iteration], object]:
  """Trains for two iterations. Returns them, and the weights after the last update."""
  found = []
  with build_agents.open_players(config, policy, str(directory)) as players:
    player = players['train']
    server = player.server
    (engine,) = server.engines.frozen.values()
    trainer = build.make_trainer(config, policy, frozenset(), player)
    state = trainer.init()
    for i in range(ITERATIONS):
      params = jax.device_get(state.params)
      rollout, selection = trainer.collect(state)
      assert all(s.paused for s in server.engines.stats().values()), 'no agent is sampled during an update'
      batch, _ = trainer.estimate(state, selection)
      state, _ = trainer.update(state, batch, selection)
      store = server.lifecycle.store
      records = [r for r in store.ask(Tables.completed, 0, 1000) if r.metadata['iteration'] == i]
      records.sort(key=lambda r: r.rollout_id)
      calls = [store.ask(Tables.calls, r.attempt_id) for r in records]
      weights = digest(engine._scheduler.rows._weights)
      found.append(Iteration(rollout, params, batch, calls, weights, engine.stats().cached_tokens))
    stats = server.engines.stats()
  assert not any(s.alive for s in server.engines.stats().values())
  return found, (jax.device_get(state.params), stats)


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(config_of_example())


@pytest.fixture(scope='module')
def base(policy):
  return jax.device_get(param_state(policy.model))


@pytest.fixture(scope='module')
def played(policy, base, tmp_path_factory):
  return play(config_of_example(), policy, tmp_path_factory.mktemp('run'))


@pytest.fixture(scope='module')
def forward(policy):
  graphdef = policy.sampler.graphdef

  @jax.jit
  def logprobs(params, tokens):
    model = nnx.merge(graphdef, params)
    hidden, _ = model.policy(model.policy.embed(tokens[None]))
    logits = model.policy.logits(hidden)[0, :, : policy.tokenizer.size]
    return jax.nn.log_softmax(logits / config_of_example().train.temperature)

  def of(params, ids):
    padded = np.pad(np.asarray(ids, np.int32), (0, 512 - len(ids)))
    found = np.asarray(logprobs(params, padded))[np.arange(len(ids) - 1), ids[1:]]
    return np.concatenate([[0.0], found])

  return of


@pytest.mark.slow
def test_the_policy_learns_and_the_frozen_weights_stay(played, base):
  iterations, (after, stats) = played
  assert {x.frozen for x in iterations} == {digest(base)}
  assert digest(iterations[0].params) == digest(base)
  changed = [digest(iterations[1].params), digest(after)]
  assert len({digest(base), *changed}) == 3
  assert (stats[''].version, stats['base'].version) == (ITERATIONS - 1, 0)


@pytest.mark.slow
def test_no_token_of_the_frozen_agent_has_a_loss(played):
  for x in played[0]:
    t = x.rollout.trajectory
    own = [call for calls in x.calls for call in calls if call.agent == 'walker']
    others = [call for calls in x.calls for call in calls if call.agent == 'partner']
    assert others and {call.trained for call in own} == {True} and {call.trained for call in others} == {False}
    assert t.loss_mask.sum() == sum(len(call.generated.ids) for call in own)
    assert x.batch.mask.sum() <= t.loss_mask.sum() and x.batch.mask.any()
    in_rows = {tuple(row[mask].tolist()) for row, mask in zip(t.tokens, t.loss_mask, strict=True)}
    of_calls = {sum((c.generated.ids for c in calls if c.agent == 'walker'), ()) for calls in x.calls}
    assert in_rows == of_calls


@pytest.mark.slow
def test_each_agent_is_sampled_from_its_own_weights(played, base, forward):
  second = played[0][1]
  apart = []
  for calls in second.calls:
    row = ()
    for call in calls:
      row += call.context + call.generated.ids
    of_policy, of_base, at = forward(second.params, row), forward(base, row), 0
    for call in calls:
      start = at + len(call.context)
      at = start + len(call.generated.ids)
      ours, other = (of_policy, of_base) if call.agent == 'walker' else (of_base, of_policy)
      np.testing.assert_allclose(call.generated.logprobs, ours[start:at], atol=2e-4)
      apart.append(np.abs(call.generated.logprobs - other[start:at]).max())
      assert set(call.generated.versions.tolist()) == {1 if call.agent == 'walker' else 0}
  assert np.median(apart) > 0.01, 'the weights differ'


@pytest.mark.slow
def test_both_agents_are_in_one_row_and_the_goal_is_the_walkers(played):
  for x in played[0]:
    assert {call.row for calls in x.calls for call in calls} == {0}
    for calls in x.calls:
      assert [c.agent for c in calls] == [('walker', 'partner')[i % 2] for i in range(len(calls))]
    rewarded = x.rollout.trajectory.rewards != 0
    assert not (rewarded & ~x.rollout.trajectory.loss_mask).any()
  assert any(x.rollout.episode_scores.any() for x in played[0])


@pytest.mark.slow
def test_the_frozen_engine_feeds_no_prompt_again_after_an_update(played):
  first, second = played[0]
  shared = min(len(calls[0].context) for calls in second.calls)
  assert second.cached - first.cached >= shared


def test_the_example_is_short():
  assert len((ROOT / 'docs' / 'examples' / 'two_agents.py').read_text().splitlines()) < 60


@pytest.mark.slow
def test_the_same_seed_plays_the_same_episodes(played, base, policy, tmp_path):
  config = config_of_example()
  config.serve.max_concurrency = 1
  nnx.update(policy.model, jax.tree.map(jnp.asarray, base))  # training has used its weights up
  with build_agents.open_players(config, policy, str(tmp_path)) as players:
    trainer = build.make_trainer(config, policy, frozenset(), players['train'])
    again, _ = trainer.collect(trainer.init())
  first = played[0][0].rollout
  np.testing.assert_array_equal(again.trajectory.tokens, first.trajectory.tokens)
  np.testing.assert_array_equal(again.trajectory.loss_mask, first.trajectory.loss_mask)
  np.testing.assert_array_equal(again.episode_scores, first.episode_scores)
