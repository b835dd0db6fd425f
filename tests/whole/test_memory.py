"""Memory of compiled programs, each beside a control, and the predictions of the plan beside a live run."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build, train
from ragen_jax.agent.language_model import param_state
from ragen_jax.algorithms import losses
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.value_head import ActorCritic
from ragen_jax.planning import abstract, memory
from ragen_jax.planning.lowering import lower_gradient, lower_sampler, step_programs
from ragen_jax.sampling.draw import PLAIN
from ragen_jax.sampling.sampler import Sampler
from ragen_jax.training.batches import MiniBatch, TokenRows
from ragen_jax.training.scoring import score_tokens
from ragen_jax.training.trainer import Trainer
from tests.support import learning, memory_worker
from tests.support.configs import small_config
from tests.support.models import EXPERTS, HYBRID, random_model, random_policy
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

# Of the programs that memory_worker.py compiles: float32 logits of all sampled tokens, four times those of the larger
# chunk, and logits of a whole prompt.
LOGITS = memory_worker.ROWS * memory_worker.REPLIES * memory_worker.VOCAB * 4
PROMPT_LOGITS = memory_worker.ROWS * memory_worker.WIDTH // 2 * memory_worker.VOCAB * 4


@pytest.fixture(scope='module')
def compiled():
  """Temporary bytes of many programs, from one process with eight devices whose programs are ordered for memory."""
  result = subprocess.run(
    [sys.executable, '-m', 'tests.support.memory_worker'],
    cwd=ROOT, env=os.environ | {'PYTHONPATH': str(ROOT)}, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert result.returncode == 0, result.stderr[-3000:]
  assert 'full rematerialization' not in result.stderr  # what a device does not need, it does not make
  return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_in_chunks_no_program_holds_the_logits_of_all_tokens(compiled):
  for program in ('accumulate', 'score'):
    whole, one, two = (compiled[name][program] for name in ('whole', 'chunk_128', 'chunk_256'))
    # Without chunks they are there: for log-probs, and for entropy once more, which only the loss has.
    assert whole > (1.9 if program == 'accumulate' else 1) * LOGITS
    # What there is, is a few times the chunk's, also with twice as many tokens.
    assert two < (6 if program == 'accumulate' else 2.2) * LOGITS / 4
    # Without gradients and entropy, what else the program holds is as much as the smaller chunk.
    assert program == 'score' or one < 0.7 * two
    assert compiled['chunk_128_twice'][program] < 1.1 * one


@pytest.mark.exhaustive
def test_a_prompt_makes_no_logits(compiled):
  assert compiled['rollout']['extend'] * 8 < PROMPT_LOGITS / 4  # of all eight devices together


def test_recomputed_layers_keep_less(compiled):
  assert compiled['remat']['accumulate'] < 0.5 * compiled['keep']['accumulate']


def test_attention_in_blocks_holds_no_scores_of_all_queries(compiled):
  scores = 8 * 8 * 1024 * 1024 * 4
  assert compiled['attention_whole'] > 2 * scores
  assert compiled['attention_blocks'] < scores / 4


def test_on_a_mesh_each_device_works_on_its_own_rows(compiled):
  """Eight devices, eight rows, weights divided: an eighth of the activations, which the compiler does not see to."""
  assert compiled['fsdp']['accumulate'] < compiled['one_device']['accumulate'] / 5
  assert compiled['fsdp_left_alone']['accumulate'] > compiled['one_device']['accumulate'] / 3


def test_the_plan_is_what_a_mesh_of_eight_really_holds(compiled):
  real, planned = compiled['real'], compiled['real']['planned']
  assert planned['weights (float32)'] == real['params']
  # An eighth, but for small arrays; the optimiser's counters are the rest.
  assert 0 <= real['opt_state'] - 2 * planned['gradients'] < 64
  assert planned['gradients'] == real['params'] < 0.15 * real['whole']
  assert planned['reference weights'] == real['reference'] < real['params']  # the policy's, without the value head
  assert (planned["optimiser's state"], planned['cache']) == (real['opt_state'], real['cache'])
  assert planned['activations'] == pytest.approx(real['activations'], rel=0.1)
  # Nothing else is there: the weights as they were loaded, for one, do not stay on the first device.
  assert real['live'] < 1.02 * (2 * real['params'] + real['opt_state'])


def _config(**fields):
  small = dict(train__group_size=2, eval__groups=8, length_step=64, agent__max_context=128, plan__prompt_tokens=64)
  return small_config(**small | {'model__dtype': 'float32'} | fields)


def test_the_plan_is_what_one_device_really_holds():
  config = _config(model__attention='einsum')  # of the plan; by default one CPU device attends row by row
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  state = trainer.init()
  params, opt_state = state.params, state.opt_state
  # The update's programs are those of the mesh's test.
  found = memory.estimate(config, {memory.shaped_by(config, 'update'): 0}).phases
  live = {name: sum(x.nbytes for x in jax.tree.leaves(tree)) for name, tree in (('p', params), ('o', opt_state))}
  cache = policy.sampler.init(8, abstract.cache_columns(config)).cache
  assert found['update']['weights (float32)'] == found['update']['gradients'] == live['p']
  assert found['rollout']["optimiser's state"] == live['o']
  assert found['rollout']['key/value cache'] == sum(x.nbytes for x in jax.tree.leaves(cache))
  assert 'reference weights' not in found['update'] and state.reference is None
  lower = functools.partial(
    lower_sampler, policy.sampler, params, policy.sampler.init(8, abstract.cache_columns(config)),
    width=64, columns=32, sampling=PLAIN,
  )  # fmt: skip
  # All rows sample, and a call feeds a part of them.
  lowered = lower(names=('decode',)) | lower(names=('extend',), rows=abstract.sampler_shapes(config, 8, 1).fed)
  real = max(abstract.temporary_bytes(x) for x in lowered.values())
  assert found['rollout']['activations'] == pytest.approx(real, rel=0.1)


def test_the_reference_is_held_only_while_the_kl_is_on():
  config = _config(algorithm__kl_reward_coef=0.1, plan__memory_gb=1e-6)  # too small for anything to be compiled
  state = build.make_trainer(config, build.load_policy(config)).init()
  phases = memory.estimate(config, {}).phases
  held = sum(x.nbytes for x in jax.tree.leaves(state.reference))
  assert held == sum(x.nbytes for x in jax.tree.leaves(state.params['policy']))
  assert all(kinds['reference weights'] == held for kinds in phases.values())


def test_adapters_and_a_separate_critic_are_counted():
  config = _config(
    lora__rank=4, model__param_dtype='bfloat16', model__separate_critic=True, algorithm__kl_loss_coef=0.1,
    plan__memory_gb=1e-6,
  )  # fmt: skip
  state = build.make_trainer(config, build.load_policy(config)).init()
  params, opt_state, trained = state.params, state.opt_state, state.trained
  kinds = memory.estimate(config, {}).phases['update']
  live = {name: sum(x.nbytes for x in jax.tree.leaves(tree)) for name, tree in (('p', params), ('t', trained))}
  assert live['t'] < live['p']
  assert kinds['weights (bfloat16 and float32)'] == live['p']
  assert kinds['gradients'] == live['t']
  assert kinds["optimiser's state"] == sum(x.nbytes for x in jax.tree.leaves(opt_state))
  assert kinds['reference weights'] == sum(x.nbytes for x in jax.tree.leaves(trained['policy']))


def test_the_states_of_linear_attention_are_counted_beside_the_cache(tmp_path):
  config = _config(plan__memory_gb=1e-6)
  policy = random_policy(config, tmp_path, **HYBRID)
  config.model.path = policy.directory
  kinds = memory.estimate(config, {}).phases['rollout']
  *states, full = policy.sampler.init(1, abstract.cache_columns(config)).cache  # so few rows fit
  assert kinds['states of linear attention'] == sum(x.nbytes for x in jax.tree.leaves(states))
  assert kinds['key/value cache'] == kinds['one layer of it twice'] == sum(x.nbytes for x in jax.tree.leaves(full))


def test_recorded_experts_are_counted(tmp_path):
  config = _config(plan__memory_gb=1e-6, algorithm__replay_experts=True, agent__decode_chunk=7)
  config.model.path = random_policy(config, tmp_path, **EXPERTS).directory
  found, column = memory.estimate(config, {}), 2 * 3  # bytes: two layers, of which one has no experts
  bins, width, _ = found.micro_batch
  assert found.phases['update']['recorded experts'] == bins * width * column
  rows = found.cache_rows['rollout']
  most = max(rows * 7, abstract.sampler_shapes(config, rows, 1).fed * abstract.prompt_columns(config))
  assert found.phases['rollout']['recorded experts'] == most * column
  config.algorithm.replay_experts = False
  assert not any('recorded experts' in kinds for kinds in memory.estimate(config, {}).phases.values())


def test_bfloat16_halves_the_cache_and_adds_the_weights_that_decoding_reads():
  wide, narrow = (memory.estimate(_config(model__dtype=x, plan__memory_gb=1e-6), {}) for x in ('float32', 'bfloat16'))
  assert narrow.phases['rollout']['key/value cache'] * 2 == wide.phases['rollout']['key/value cache']
  policy = build.load_policy(_config(model__dtype='bfloat16'))
  params = param_state(policy.model)
  made = zip(*map(jax.tree.leaves, (params, policy.sampler.decode_weights(params))), strict=True)
  copied = sum(x.nbytes for own, x in made if x is not own)
  assert narrow.phases['rollout']['weights as computed with'] == copied > 0
  assert 'weights as computed with' not in wide.phases['rollout']
  head = 4 * (64 + 1)  # is used as it is kept
  weights = wide.phases['update']['weights (float32)'] - head
  assert narrow.phases['update']['weights as computed with'] * 2 == weights  # kept for the backward pass
  narrow = memory.estimate(_config(model__dtype='bfloat16', model__remat=True, plan__memory_gb=1e-6), {})
  assert 'weights as computed with' not in narrow.phases['update']


# -- Donation ----------------------------------------------------------------------------------------------------------


def _random_batch(rows=8, width=24, replies=12):
  rng = np.random.default_rng(0)
  f32 = {f.name: rng.normal(size=(rows, replies)).astype(np.float32) for f in dataclasses.fields(MiniBatch)}
  columns = np.sort(rng.permuted(np.tile(np.arange(1, width), (rows, 1)), axis=1)[:, :replies], axis=1)
  mask = np.arange(replies)[None] < rng.integers(3, replies + 1, size=(rows, 1))
  return MiniBatch(
    **f32 | {
      'tokens': rng.integers(0, 40, size=(rows, width)).astype(np.int32), 'columns': columns.astype(np.int32),
      'mask': mask, 'trained': mask, 'valued': mask, 'turn': np.zeros((rows, replies), np.int32),
      'importance': np.ones((rows, replies), np.float32), 'old_logprobs': f32['old_logprobs'] - 4,
      'seen_until': None, 'before': None, 'sequence': None, 'images': None,
      'experts': None,
    }
  )  # fmt: skip


def _learner(made, **loss):
  return learning.learner(made, memory_worker.optimizer(), **loss)


def test_the_update_reuses_what_it_is_given():
  made = random_model(40)
  learner, batch = _learner(made), _random_batch()
  batch = batch.replace(weights=batch.mask / batch.mask.sum(), value_weights=batch.mask / batch.mask.sum())
  state = learning.state_of(learner, nnx.split(made)[1])
  donated = (state.trained, state.opt_state)
  sizes = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in donated]
  (apply,) = step_programs(learner, state, batch)
  lowered = {'accumulate': lower_gradient(learner, state, batch), apply.name: apply.lower()}
  aliased = {name: x.compile().memory_analysis().alias_size_in_bytes for name, x in lowered.items()}
  assert aliased['accumulate'] == sizes[0]  # the gradients
  assert aliased['apply'] == sum(sizes)
  plans = learning.plans(batch, 4, length_step=8)
  with warnings.catch_warnings():
    warnings.simplefilter('error')  # also 'Some donated buffers were not usable'
    learning.step(learner, state, batch, plans)
  assert all(x.is_deleted() for x in jax.tree.leaves(donated) if x.size)


def test_the_sampler_reuses_its_cache():
  made = random_model(40)
  sampler, params = Sampler(made, stop_ids=(7,)), nnx.split(made)[1]
  state = sampler.init(4, 32)
  cache = sum(x.nbytes for x in jax.tree.leaves(state.cache))
  lowered = lower_sampler(sampler, params, state, width=8, columns=6, sampling=PLAIN)
  assert all(x.compile().memory_analysis().alias_size_in_bytes > cache for x in lowered.values())
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    after = sampler.extend(params, state, np.full((4, 8), 9, np.int32), np.full(4, 8, np.int32))
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    keys = jax.random.split(jax.random.key(0), 4)
    again, _, _ = sampler.decode(params, after, keys, np.full(4, 6), columns=6, sampling=PLAIN)
    assert all(x.is_deleted() for x in jax.tree.leaves(after))
    moved = sampler.resize(again, 48)
  assert all(x.is_deleted() for x in jax.tree.leaves(again.cache))
  assert not any(x.is_deleted() for x in jax.tree.leaves((moved, params)))


def test_a_run_that_goes_on_holds_no_weights_but_its_own(tmp_path, monkeypatch):
  config, given, init = _config(num_iterations=1, eval__greedy_too=False), [], Trainer.init
  monkeypatch.setattr(Trainer, 'init', lambda self: given.append(init(self)) or given[-1])
  for _ in range(2):
    train.train_and_evaluate(config, str(tmp_path / 'run'))
  assert len(given) == 2 and all(x.is_deleted() for x in jax.tree.leaves(given[1].saved()) if x.size)


# -- Types -------------------------------------------------------------------------------------------------------------


def test_weights_are_float32_activations_bfloat16_and_logits_float32():
  cfg = random_model(40).policy.cfg
  made = ActorCritic(Qwen(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
  tokens = jnp.zeros((2, 8), jnp.int32)
  hidden, _ = made.policy(made.policy.embed(tokens))
  assert {x.dtype for x in jax.tree.leaves(nnx.split(made)[1])} == {np.dtype(np.float32)}
  assert hidden.dtype == jnp.bfloat16
  assert made.policy.logits(hidden).dtype == made.value_head(hidden).dtype == np.float32
  assert {x.dtype for x in jax.tree.leaves(made.policy.init_cache(2, 8))} == {np.dtype(jnp.bfloat16)}
  learner = learning.learner(made, memory_worker.optimizer())
  state = learning.state_of(learner, nnx.split(made)[1])
  gradients, _ = jax.eval_shape(lambda batch: learner.gradients(state, [batch]), _random_batch())
  assert {x.dtype for x in jax.tree.leaves((gradients, state.opt_state)) if x.ndim} == {np.dtype(np.float32)}


def test_the_weights_cast_to_bfloat16_are_kept_for_the_backward_pass_only_without_remat():
  """What a vector-Jacobian product closes over is what lives between the passes."""
  cfg = dataclasses.replace(random_model(40).policy.cfg, hidden_size=512, intermediate_size=768)
  made = nnx.eval_shape(lambda: ActorCritic(Qwen(cfg, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))))
  graphdef, params = nnx.split(made)
  rows = TokenRows(jnp.zeros((2, 8), jnp.int32), jnp.ones((2, 4), jnp.int32), jnp.ones((2, 4), bool))

  def kept(remat):
    def forward(params):
      return score_tokens(nnx.merge(graphdef, params), rows, learning.scoring(remat=remat))[0]

    residuals = jax.eval_shape(lambda p: jax.vjp(forward, p)[1], params)
    shapes = [x.shape for x in jax.tree.leaves(residuals) if x.dtype == jnp.bfloat16]
    return sum({(512, 768), (768, 512)} >= {shape} for shape in shapes)

  assert kept('none') == 3 * cfg.num_layers  # gate, up and down of every layer
  assert kept('elementwise') == kept('layers') == 0


# -- The same numbers --------------------------------------------------------------------------------------------------


def test_micro_batches_and_chunks_change_no_step():
  """Two rows at a time in chunks of 5 columns: the weights and metrics of eight rows at once."""
  batch, made = _random_batch(), random_model(40)
  learners = [(8, _learner(made)), (2, _learner(made, logits_chunk=10))]
  norms = set()
  for mode in losses.AGGREGATIONS:
    weights, value_weights = (
      np.asarray(losses.token_weights(batch.mask, mode=m, norm_length=12)) for m in (mode, 'token-mean')
    )
    batch = batch.replace(weights=weights, value_weights=value_weights)
    found = []
    for size, learner in learners:
      state = learning.state_of(learner, learning.copied(nnx.split(made)[1]))
      new, metrics = learning.step(learner, state, batch, learning.plans(batch, size))
      found.append((jax.tree.leaves(new.trained), metrics))
    for ours, theirs in zip(*(x[0] for x in found), strict=True):
      # The first step of Adam is the gradient's sign; what is only rounding may fall to either side.
      assert np.quantile(np.abs(ours - theirs), 0.99) < 1e-5, mode
    for name in ('actor/grad_norm', 'actor/pg_loss', 'actor/entropy', 'critic/vf_loss'):
      np.testing.assert_allclose(found[0][1][name], found[1][1][name], rtol=1e-4, atol=1e-6, err_msg=f'{mode} {name}')
    norms.add(round(float(found[0][1]['actor/grad_norm']), 4))
  assert len(norms) > 1  # they are not all the same thing
