"""Scores of sampled tokens: of columns that read features, and of both forms of the critic."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.models.vision.tower import Features
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.training.batches import TokenRows
from ragen_jax.training.images import CRITIC, POLICY, FrozenFeatures, ImageInputs
from ragen_jax.training.scoring import Scorer, score_tokens, token_rows, value_tokens
from tests.support import learning
from tests.support.models import EXPERTS, random_model

_VOCAB = 30


def _separate() -> ActorCritic:
  """A random policy, and a critic with other random weights."""
  policy, critic = random_model(_VOCAB), random_model(_VOCAB, seed=5)
  model = ActorCritic(policy.policy, critic.policy)
  model.value_head = critic.value_head
  return model


def _batch():
  loss_mask = np.random.default_rng(0).random((6, 24)) < 0.3
  loss_mask[:, 0] = False
  return learning.mini_batch(loss_mask, _VOCAB)


def _as_images(module: ActorCritic, tokens, change=lambda x: x) -> ImageInputs:
  """All columns read features, which are the embeddings of their tokens."""
  trunks = {POLICY: module.policy, CRITIC: module.critic}
  tables = {
    name: Features(change(trunk.embed(tokens)).reshape(tokens.size, -1), None)
    for name, trunk in trunks.items()
    if trunk is not None
  }
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return ImageInputs(jnp.arange(tokens.size).reshape(tokens.shape), positions, FrozenFeatures(tables))


@pytest.mark.parametrize('separate', [False, True])
@pytest.mark.parametrize(
  'remat', ['none', *(pytest.param(x, marks=pytest.mark.slow) for x in ('elementwise', 'layers'))]
)
@pytest.mark.exhaustive_cases('elementwise-False', 'layers-False', 'elementwise-True', 'none-False', 'none-True')
def test_features_that_are_embeddings_give_the_scores_and_gradients_of_the_tokens(separate, remat):
  """Each trunk reads its own table: the same numbers, and the same gradients, the embedding's too."""
  model = _separate() if separate else random_model(_VOCAB)
  graphdef, params = nnx.split(model)
  batch, settings = _batch(), learning.scoring(temperature=1.3, remat=remat)
  weights = np.random.default_rng(1).normal(size=(3, *batch.mask.shape)).astype(np.float32)

  def total(params, given):
    module = nnx.merge(graphdef, params)
    images = _as_images(module, batch.tokens) if given else None
    tokens = batch.tokens
    scores = score_tokens(module, batch.replace(tokens=tokens, images=images), settings)
    values = value_tokens(module, batch.replace(tokens=tokens, images=images), settings)
    return sum(jnp.sum(w * x) for w, x in zip(weights, scores, strict=True)) + jnp.sum(values**2), (scores, values)

  program = jax.jit(jax.grad(total, has_aux=True), static_argnums=1)
  (own, own_scores), (given, given_scores) = (program(params, given) for given in (False, True))
  jax.tree.map(np.testing.assert_array_equal, own_scores, given_scores)
  for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(given), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(np.abs(a).max())))
  assert np.abs(own['policy']['embed_tokens'][...]).max() > 0


@pytest.mark.usefixtures('new_programs')
def test_equal_models_share_programs_which_hold_no_weights():
  """Programs live as long as the process, and the models that they were made for do not."""
  found = []
  for seed in (0, 1):
    model = random_model(_VOCAB, seed=seed)
    sampler, learner = Sampler(model, stop_ids=(3,)), learning.learner(model)
    scorer, own = Scorer(nnx.split(model)[0], learning.scoring()), nnx.split(model)[1]
    jax.eval_shape(scorer.programs['score'], own, token_rows(_batch()))
    found.append((sampler.programs, learner.programs['gradient'], learner.steps['gradient']._programs, scorer.programs))
  assert all(a is b for a, b in zip(*found, strict=True)) and scorer.traces['score'] == 1
  weight = weakref.ref(jax.tree.leaves(own)[0])
  del model, sampler, learner, scorer, own
  gc.collect()
  assert weight() is None


def test_other_features_give_other_scores():
  """Columns that are no tokens: what stands in a column before a token changes it, and what comes behind does not."""
  model, batch, settings = random_model(_VOCAB), _batch(), learning.scoring()
  plain = learning.score(model, batch, settings)[0]
  images = _as_images(model, batch.tokens, lambda x: x.at[:, 5].add(1.0))
  changed = learning.score(model, batch.replace(images=images), settings)[0]
  differs = np.asarray(plain != changed) & batch.mask
  before = batch.columns <= 5
  assert differs[~before & batch.mask].all() and not differs[before].any()


@pytest.mark.usefixtures('new_programs')
def test_values_are_those_of_the_critic_run_by_itself():
  model = _separate()
  graphdef, params = nnx.split(model)
  batch = _batch()
  scorer, plans = Scorer(graphdef, learning.scoring()), learning.plans(batch, 3)
  logprobs, values = scorer.score(params, batch, plans)
  np.testing.assert_array_equal(scorer.values(params, batch, plans), values)
  np.testing.assert_array_equal(scorer.logprobs(params, batch, plans), logprobs)
  assert scorer.traces == {'score': 1, 'logprobs': 1, 'values': 1}
  hidden = np.asarray(jax.jit(lambda tokens: model.critic(model.critic.embed(tokens))[0])(batch.tokens))
  everywhere = hidden @ np.asarray(model.value_head.kernel[...]) + float(model.value_head.bias[...])
  for row, i in zip(*np.nonzero(batch.mask), strict=True):
    np.testing.assert_allclose(values[row, i], everywhere[row, batch.columns[row, i] - 1], atol=1e-5)
  assert not values[~batch.mask].any()


def test_scores_are_those_of_the_experts_that_are_given():
  model = random_model(_VOCAB, **EXPERTS)
  graphdef, params = nnx.split(model)
  batch = _batch()
  scorer, plans = Scorer(graphdef, learning.scoring()), learning.plans(batch, 3)
  expected, _ = scorer.score(params, batch, plans)
  own = np.asarray(model.policy.run(model.policy.embed(batch.tokens), with_choices=True)[2]).astype(np.uint8)
  same, _ = scorer.score(params, batch.replace(experts=own), plans)
  np.testing.assert_allclose(same, expected, atol=1e-5)
  others = batch.replace(experts=(own + 1) % 8)
  assert np.abs(scorer.score(params, others, plans)[0] - expected).max() > 1e-3
  np.testing.assert_allclose(scorer.logprobs(params, others, plans), expected, atol=1e-5)  # routers choose


@pytest.mark.parametrize(('chunk', 'calls'), [(0, []), (12, [4]), (13, [4]), (16, [3]), (47, [2]), (48, [])])
def test_a_chunk_has_as_many_columns_as_its_positions_allow(chunk, calls):
  """Two rows of 24 columns; where one chunk holds them all, there is no loop."""
  module = random_model(_VOCAB)
  tokens = jnp.zeros((2, 25), jnp.int32)
  columns = jnp.broadcast_to(jnp.arange(1, 25), (2, 24))
  settings = learning.scoring(logits_chunk=chunk)
  program = jax.make_jaxpr(lambda tokens: score_tokens(module, TokenRows(tokens, columns, columns > 0), settings))(
    tokens
  )
  assert [e.params['length'] for e in program.eqns if e.primitive.name == 'scan'] == calls


@pytest.mark.slow
def test_the_sum_over_chunks_in_bfloat16_hardly_adds_to_the_error_of_the_head_s_gradient():
  """The gradient of the output projection adds up over chunks in the type of activations; see `_score_in_chunks`."""
  rng, (b, t) = np.random.default_rng(0), (2, 1025)
  tokens = jnp.asarray(rng.integers(0, _VOCAB, (b, t)), jnp.int32)
  columns = jnp.broadcast_to(jnp.arange(1, t), (b, t - 1))
  # Weights of mixed signs with a mean, as advantages have; with a mean, sums grow over the chunks.
  weights = jnp.asarray(rng.normal(size=(b, t - 1)) + 1, jnp.float32)

  def gradient(dtype, chunk):
    model = random_model(_VOCAB)
    policy = Qwen(model.policy.cfg, dtype=dtype, rngs=nnx.Rngs(0))
    nnx.update(policy, nnx.state(model.policy))
    model.policy = policy
    graphdef, params = nnx.split(model)
    settings = learning.scoring(temperature=1.0, logits_chunk=chunk)

    def total(params):
      return jnp.sum(
        score_tokens(nnx.merge(graphdef, params), TokenRows(tokens, columns, columns > 0), settings)[0] * weights
      )

    found = jax.jit(jax.grad(total))(params)
    return np.asarray(found['policy']['embed_tokens'][...])

  exact = gradient(jnp.float32, 0)
  whole, chunked = (
    np.linalg.norm(gradient(jnp.bfloat16, chunk) - exact) / np.linalg.norm(exact) for chunk in (0, 2 * 32)
  )
  assert 0 < whole < 0.02
  assert chunked < 1.5 * whole
