"""Models with experts, or with windows, play and learn: the update has the numbers of the sampler."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent.episode import TRUNCATED
from ragen_jax.agent.language_model import make_sampler
from ragen_jax.models import vocabulary
from ragen_jax.training.packing import plan_rows
from tests.support.configs import small_config
from tests.support.models import EXPERTS, HYBRID_EXPERTS, WINDOWS, random_policy

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
  ('fields', 'shape'),
  [
    ({'optimizer__packing': True, 'agent__schedule': 'continuous', 'agent__decode_chunk': 5}, EXPERTS),
    ({'optimizer__packing': True, 'model__logits_chunk': 16, 'lora__rank': 2}, WINDOWS),
    ({'model__remat': True, 'algorithm__ratio_level': 'sequence'}, EXPERTS),
    ({'model__separate_critic': True, 'algorithm__old_logprobs': 'trainer'}, EXPERTS),
    ({'optimizer__packing': True}, HYBRID_EXPERTS),
    ({'lora__rank': 2, 'lora__targets': 'all-linear', 'model__remat': 'auto'}, EXPERTS),
  ],
  ids=['packed', 'windows', 'computed again, GSPO', 'separate critic', 'behind memories', 'adapters'],
)
@pytest.mark.exhaustive_cases('windows', 'computed again, GSPO', 'separate critic', 'adapters', 'behind memories')
def test_an_iteration_has_the_log_probs_of_the_sampler(tmp_path, fields, shape):
  config = small_config(agent__max_response_tokens=12, envs__FrozenLake__max_turns=2, **fields)
  saved = random_policy(config, tmp_path, **shape)
  config.model.path = saved.directory
  trainer = build.make_trainer(config, build.load_policy(config))
  state = trainer.init()
  rollout, selection = trainer.collect(state)
  assert rollout.tokens_sampled > 100
  batch, metrics = trainer.estimate(state, selection)
  state, more = trainer.update(state, batch, selection)
  metrics |= more
  gaps = [metrics[name] for name in ('rollout/logprob_gap_max', 'actor/logprob_gap_max') if name in metrics]
  assert gaps and max(gaps) < 1e-4, gaps
  assert metrics['actor/grad_norm'] > 0 and np.isfinite(metrics['actor/pg_loss'])
  if fields.get('optimizer__packing') and shape is not HYBRID_EXPERTS:
    assert metrics['perf/shared_tokens'] > 0  # rows of a bin share their beginnings


def _replaying(tmp_path, shape=EXPERTS, **fields):
  """A trainer and a policy whose sampler records experts."""
  config = small_config(
    agent__max_response_tokens=12, envs__FrozenLake__max_turns=2, algorithm__replay_experts=True, **fields
  )
  config.model.path = random_policy(config, tmp_path, **shape).directory
  return config, build.load_policy(config)


def _with_experts(selection, experts):
  rollout = selection.rollout
  rollout = dataclasses.replace(rollout, trajectory=rollout.trajectory.replace(experts=experts))
  return dataclasses.replace(selection, rollout=rollout)


def _forward(policy, t, experts=None):
  """Rows by themselves: log-probs of their tokens f32[B, T], choices of the routers [B, T, L, k], values f32[B, T]."""
  graphdef, params = nnx.split(policy.model.policy)

  @jax.jit
  def run(params, tokens, experts):
    model = nnx.merge(graphdef, params)
    hidden, _, own = model.run(model.embed(tokens), experts=experts, with_choices=True)
    logits = vocabulary.masked(model.logits(hidden), policy.tokenizer.size, policy.tokenizer.banned, -jnp.inf)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(logprobs, ((0, 0), (1, 0))), own, policy.model.value_head(hidden)

  return jax.device_get(run(params, t.tokens, experts))


def _others(experts, of):
  """The share of `experts` [..., k] that are not among those `of` [..., k]."""
  return ~(experts[..., None] == of[..., None, :]).any(axis=-1)


@pytest.mark.parametrize(
  ('fields', 'shape'),
  [
    ({'optimizer__packing': True, 'agent__schedule': 'continuous', 'agent__decode_chunk': 5}, EXPERTS),
    # Rows wait for a place on the device, prompts are fed in pieces, and each turn has a row.
    (
      {'agent__context': 'single_turn', 'agent__rows_in_flight': 4, 'agent__schedule': 'continuous', 'length_step': 32},
      EXPERTS,
    ),
    (
      {
        'optimizer__packing': True,
        'model__remat': True,
        'lora__rank': 2,
        'algorithm__kl_loss_coef': 0.1,
        'algorithm__bootstrap_truncated': True,
      },
      HYBRID_EXPERTS,
    ),
    ({'model__separate_critic': True, 'algorithm__kl_loss_coef': 0.1, 'algorithm__bootstrap_truncated': True}, EXPERTS),
  ],
  ids=['packed', 'windows', 'adapters behind memories', 'separate critic'],
)
@pytest.mark.exhaustive_cases('windows', 'separate critic', 'adapters behind memories')
def test_the_update_uses_the_experts_that_the_sampler_recorded(tmp_path, fields, shape):
  # One step, so that its metrics are those of the first weights.
  fields = fields | {'algorithm__old_logprobs': 'trainer', 'optimizer__mini_batch_size': 16}
  config, policy = _replaying(tmp_path, shape, **fields)
  trainer = build.make_trainer(config, policy)
  state = trainer.init()
  rollout, selection = trainer.collect(state)
  t = rollout.trajectory
  routed = [i for i, found in enumerate(policy.model.policy.cfg.with_experts) if found]
  # Prompts, observations and replies have what the routers choose, but for experts that are equal up to rounding.
  used = np.arange(t.tokens.shape[1]) < t.length[:, None]
  logprobs, own, _ = _forward(policy, t)
  assert t.experts.dtype == np.uint8 and not t.experts[~used].any()
  assert _others(t.experts, own)[used].mean() < 0.002
  # Other choices, the same for equal tokens: all others in the last layer with experts.
  changed = t.experts.copy()
  changed[:, :, routed[-1]] = (changed[:, :, routed[-1]] + 1) % 8
  selection = _with_experts(selection, changed)
  given, now, values = _forward(policy, t, changed)
  (plans,) = plan_rows([np.flatnonzero(t.length > 0)], t, trainer.settings.estimate.batching)
  batch, metrics = trainer.estimate(state, selection)
  found, _ = trainer.scorer.score(state.params, batch, plans)
  chosen = trainer.scorer.logprobs(state.params, batch, plans)  # as of a reference
  for ours, theirs in ((found, given), (chosen, logprobs), (batch.old_logprobs, given), (batch.ref_logprobs, logprobs)):
    if ours is not None:
      theirs = np.take_along_axis(theirs, batch.columns, axis=1)
      np.testing.assert_allclose(ours[batch.mask], theirs[batch.mask], atol=2e-4)
  assert np.abs(found - chosen).max() > 1e-2
  if 'critic' in state.params:  # its routers choose by themselves
    by_itself = trainer.scorer.values(state.params, batch.replace(experts=None), plans)
    np.testing.assert_allclose(trainer.scorer.values(state.params, batch, plans), by_itself, atol=2e-4)
  elif trainer.settings.estimate.bootstrap_truncated:
    bootstrap, last = trainer.estimator.bootstrap(state.params, selection.rollout), t.length - 1
    cut = np.isin(t.status, TRUNCATED)
    assert cut.any()
    np.testing.assert_allclose(bootstrap[cut], values[np.arange(len(last)), last][cut], atol=2e-4)
  differ = _others(changed, now)[:, :, routed].mean(axis=(2, 3))
  differ = np.take_along_axis(differ, batch.columns - 1, axis=1)[batch.mask].mean()
  assert differ > 0.3 / len(routed)
  _, more = trainer.update(state, batch, selection)
  assert more['actor/experts_differ'] == pytest.approx(differ, abs=0.002)
  assert more['actor/ppo_kl'] == pytest.approx(0, abs=1e-5) and more['actor/grad_norm'] > 0
  assert metrics['rollout/logprob_gap_max'] > 1e-2  # the sampler's log-probs are those of its own choices


@pytest.mark.exhaustive
def test_replay_changes_no_number_where_the_choices_are_the_same(tmp_path):
  # One step, because routers of other weights choose otherwise.
  config, policy = _replaying(tmp_path, optimizer__packing=True, optimizer__mini_batch_size=16)
  found = {}
  for replays in (True, False):
    trainer = build.make_trainer(config, policy)
    state = trainer.init()
    state = state.replace(trained=jax.tree.map(jnp.copy, state.trained))
    _, selection = trainer.collect(state)
    if not replays:
      selection = _with_experts(selection, None)
    batch, _ = trainer.estimate(state, selection)
    _, found[replays] = trainer.update(state, batch, selection)
  assert found[True].pop('actor/experts_differ') < 0.001
  assert 'actor/experts_differ' not in found[False]
  for name in ('actor/pg_loss', 'actor/grad_norm', 'actor/entropy', 'critic/vf_loss'):
    assert found[True][name] == pytest.approx(found[False][name], rel=1e-3), name


def test_replay_lowers_the_gap_of_a_sampler_in_bfloat16(tmp_path):
  config, policy = _replaying(tmp_path, EXPERTS | {'num_layers': 4, 'mlp_layers': ()})
  low = nnx.merge(*nnx.split(policy.model))
  low.policy.dtype = jnp.bfloat16
  policy = dataclasses.replace(policy, sampler=make_sampler(low, policy.tokenizer, policy.mesh, experts=True))
  trainer = build.make_trainer(config, policy)
  state = trainer.init()
  _, selection = trainer.collect(state)
  t = selection.rollout.trajectory
  (plans,) = plan_rows([np.arange(len(t.length))], t, trainer.settings.estimate.batching)
  batch, _ = trainer.estimate(state, selection)
  gaps = [
    np.abs(trainer.scorer.score(state.params, rows, plans)[0] - batch.old_logprobs)[batch.mask]
    for rows in (batch, batch.replace(experts=None))
  ]
  print('gaps of log-probs, mean and largest, with replay and without:', [(g.mean(), g.max()) for g in gaps])
  assert gaps[0].mean() < 0.9 * gaps[1].mean() and gaps[0].max() < 0.5 * gaps[1].max()
