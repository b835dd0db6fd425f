"""Training with LoRA: only adapters and the value head change; runs learn, resume and are laid out as others are."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import frozenlake_ppo
from ragen_jax import build, train
from ragen_jax.agent.language_model import param_state
from ragen_jax.config.checks import check_config
from ragen_jax.models import lora
from ragen_jax.models.checkpoint import peft as adapter_files
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.export import write_policy
from ragen_jax.models.checkpoint.load import load_params
from ragen_jax.modes import sft
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training.batches import MiniBatch, micro_batches
from ragen_jax.training.learner import Learner
from ragen_jax.training.trainer import Trainer
from ragen_jax.utils.errors import UserError
from tests.support import learning
from tests.support.adapters import logits as logits_of
from tests.support.configs import small_config
from tests.support.models import random_model
from tests.support.processes import copy_python


def _model(vocab: int = 30):
  """A random model with adapters that are not zero, made without compiling anything."""

  def make():
    model = random_model(vocab)
    lora.attach(model.policy, lora.LoraConfig(2, 4, lora.TARGETS), nnx.Rngs(1))
    return model

  graphdef, params = nnx.split(nnx.eval_shape(make))
  rng = np.random.default_rng(1)
  return nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.2, x.dtype), params))


def _batch(rows: int = 16, width: int = 24, vocab: int = 30) -> tuple[MiniBatch, list]:
  loss_mask = np.zeros((rows, width), bool)
  loss_mask[:, 5:9] = True
  batch = learning.mini_batch(loss_mask, vocab)
  return batch, learning.plans(batch, 8)


def _learner(model, mesh=None, remat='none') -> Learner:
  return learning.learner(model, learning.optimizer(weight_decay=0.01), mesh, remat=remat)


@pytest.mark.slow
def test_only_what_is_trained_has_gradients_and_optimiser_state_and_the_base_stays_where_it_is():
  model = _model()
  learner = _learner(model)
  state = learning.state_of(learner, nnx.split(model)[1])
  trained, frozen = state.trained, state.frozen
  count = sum(x.size for x in jax.tree.leaves(trained))
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert sum(x.size for x in moments) + sum(x.ndim == 0 for x in jax.tree.leaves(trained)) * 2 == 2 * count
  gradients, _ = learner.gradients(state, micro_batches(*_batch()))
  assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, trained)
  before = jax.device_get((trained, frozen))
  buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(frozen)]
  new, metrics = learning.step(learner, state, *_batch())
  new, _ = learning.step(learner, new, *_batch())
  assert metrics['actor/grad_norm'] > 0
  after_trained, after_frozen = lora.partition(new.params)
  assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after_frozen)] == buffers
  for a, b in zip(jax.tree.leaves(after_frozen), jax.tree.leaves(before[1]), strict=True):
    np.testing.assert_array_equal(a, b)
  for a, b in zip(jax.tree.leaves(after_trained), jax.tree.leaves(before[0]), strict=True):
    assert np.abs(np.asarray(a) - b).max() > 1e-3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_recomputing_layers_changes_nothing():
  stepped = []
  for remat in ('none', 'elementwise', 'layers'):
    model = _model()
    learner = _learner(model, remat=remat)
    state = learning.state_of(learner, nnx.split(model)[1])
    stepped.append(learning.step(learner, state, *_batch())[0].params)
  for a, *others in zip(*map(jax.tree.leaves, stepped), strict=True):
    for b in others:
      np.testing.assert_allclose(a, b, atol=1e-5)


# -- runs --------------------------------------------------------------------------------------------------------------

_BANDIT = dict(
  train__tags=('Bandit',), eval__tags=('Bandit',), eval__greedy_too=False, eval__every=0,
  lora__rank=8, lora__alpha=16, model__param_dtype='bfloat16', optimizer__actor_lr=3e-3,
)  # fmt: skip


@pytest.mark.exhaustive
def test_a_run_with_adapters_on_a_bf16_base_learns_resumes_and_leaves_its_base_as_it_was(tmp_path, monkeypatch):
  """From one pull in seven at the wrong arm to hardly any; the KL's reference shares the base."""
  config = small_config(
    **_BANDIT, num_iterations=10, train__groups=32, train__group_size=8, eval__groups=256, eval__group_size=4,
    length_step=64, eval__temperature=1.0, optimizer__mini_batch_size=64, optimizer__micro_batch_size=64,
    algorithm__kl_loss_coef=1e-3, checkpoint__every=3,
    algorithm__lam=0.95,  # the bounds below were measured with it
  )  # fmt: skip
  seen, init = {}, Trainer.init

  def spy(self):
    result = init(self)
    seen.update(base=result.frozen, reference=result.reference)
    return result

  monkeypatch.setattr(Trainer, 'init', spy)
  last = train.train_and_evaluate(config, str(tmp_path / 'run'))
  lines = read_metrics(tmp_path / 'run')
  before, after = lines[0]['val-env/Bandit/success'], last['val-env/Bandit/success']
  assert before < 0.92
  assert after > before + 0.06 and after > 0.97
  assert max(line.get('rollout/logprob_gap_max', 0) for line in lines) < 1e-3
  assert lines[-1]['actor/kl_loss'] > 1e-3
  fresh = build.load_policy(config)
  directory = fresh.directory
  cfg = read_config(directory)
  loaded = dict(nnx.to_flat_state(load_params(directory, cfg, jnp.bfloat16)))
  base = {path[1:]: x for path, x in nnx.to_flat_state(seen['base'])}
  assert base.keys() == loaded.keys()
  for path, x in base.items():
    assert x.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(x[...]), np.asarray(loaded[path][...]), err_msg=str(path))
  # What the KL is measured from: the first adapters, and the same base, not a copy of it.
  first, shared = lora.partition(nnx.State({'policy': seen['reference']}))
  assert all(a is b for a, b in zip(jax.tree.leaves(shared), jax.tree.leaves(seen['base']), strict=True))
  adapters = lora.partition(param_state(fresh.model))[0]['policy']
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(adapters), strict=True):
    np.testing.assert_array_equal(a, b)
  # Checkpoints hold what is trained, and Adam's two moments of it.
  with Checkpointer(tmp_path / 'run', keep=2) as checkpointer:
    saved = checkpointer._read_record(config.num_iterations)['leaves']
  names = {name for name in saved if name.startswith('params/')}
  assert len(names) == len(lora.adapters(fresh.model.policy)) * 2 + 2
  assert all('lora_' in name or 'value_head' in name for name in names)
  # As if it had been stopped after nine iterations.
  shutil.copytree(tmp_path / 'run', tmp_path / 'again')
  shutil.rmtree(tmp_path / 'again' / 'checkpoints' / '10')
  train.train_and_evaluate(config, str(tmp_path / 'again'))
  ours, theirs = (
    {name: x for name, x in read_metrics(tmp_path / run)[-1].items() if not name.startswith(('timing_s/', 'perf/'))}
    for run in ('run', 'again')
  )
  assert ours == theirs and ours['step'] == 10  # floats, to the last bit
  like = {'params': lora.partition(param_state(fresh.model))[0]}
  with Checkpointer(tmp_path / 'run', keep=2) as a, Checkpointer(tmp_path / 'again', keep=2) as b:
    first, second = (c.restore(like, partial=True)[0] for c in (a, b))
  for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_warm_start_with_adapters_lowers_the_loss_and_writes_either_form(tmp_path, monkeypatch):
  losses = []

  class Recorder(sft.Progress):
    def update(self, step, values, **kwargs):
      losses.append(values['loss'])
      super().update(step, values, **kwargs)

  monkeypatch.setattr(sft, 'Progress', Recorder)
  # Names that the built-in model has never seen.
  config = small_config(
    sft__tags=('BanditTest',), sft__levels=(128,), sft__steps=20, sft__batch_size=16, sft__learning_rate=5e-3,
    sft__output=str(tmp_path / 'adapter'), sft__value_coef=0.1, eval__tags=('BanditTest',), eval__greedy_too=False,
    length_step=256, lora__rank=8, export__lora='adapter',
  )  # fmt: skip
  before = param_state(build.load_policy(config).model)
  sft.train_sft(config, str(tmp_path / 'sft'))
  assert losses[-1] < 0.5 * losses[0]
  assert adapter_files.read_config(str(tmp_path / 'adapter')).rank == 8
  # A run begins with the adapters and the value head that were written.
  config.lora.path = str(tmp_path / 'adapter')
  check_config(config)
  policy = build.load_policy(config)
  frozen = lora.partition(param_state(policy.model))[1]
  assert float(policy.model.value_head.bias[...]) != float(before['value_head']['bias'][...])
  assert all(np.abs(a.lora_b[...]).max() > 0 for a in lora.adapters(policy.model.policy).values())
  for a, b in zip(jax.tree.leaves(frozen), jax.tree.leaves(lora.partition(before)[1]), strict=True):
    np.testing.assert_array_equal(a, b)
  # The other form is the same model.
  config.export.lora = 'merged'
  settings = build.export_settings(config, policy)
  write_policy(str(tmp_path / 'merged'), policy.model, settings, with_value_head=True)
  qwen, merged = policy.model.policy, small_config(model__path=str(tmp_path / 'merged'))
  plain = build.load_policy(merged).model.policy
  tokens = jnp.asarray([policy.tokenizer.encode('<think>I am at (1, 2)</think><answer>Trader</answer>')])
  np.testing.assert_allclose(logits_of(plain, tokens), logits_of(qwen, tokens), atol=1e-4)


# -- devices -----------------------------------------------------------------------------------------------------------

_ON_A_MESH = """
import jax, numpy as np
from flax import nnx
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import place, tree_shardings
from ragen_jax.models import lora
from tests.support import learning
from tests.whole import test_lora

results = []
for mesh in (None, make_mesh(2, 2, 2)):
  model = test_lora._model(32)
  params = nnx.split(model)[1]
  if mesh is not None:
    params = place(params, tree_shardings(params, mesh))
    for path, leaf in nnx.to_flat_state(lora.partition(params)[0]):
      divided = path[-1] == 'lora_a' or path[-2:] == ('adapter', 'lora_b')
      assert leaf[...].sharding.is_fully_replicated != divided, path
  learner = test_lora._learner(model, mesh)
  state = learning.state_of(learner, params)
  new, metrics = learning.step(learner, state, *test_lora._batch(vocab=32))
  results.append((jax.device_get(new.params), {name: float(np.sum(x)) for name, x in metrics.items()}))
(one, one_metrics), (many, many_metrics) = results
for name, x in one_metrics.items():
  np.testing.assert_allclose(many_metrics[name], x, rtol=1e-3, atol=1e-5, err_msg=name)
for (path, a), (_, b) in zip(nnx.to_flat_state(one), nnx.to_flat_state(many), strict=True):
  difference = np.abs(np.asarray(a[...]) - np.asarray(b[...]))
  # One Adam step of 1e-2: a gradient that is only rounding may fall to either side.
  assert np.quantile(difference, 0.98) < 1e-4 and difference.max() < 2.1e-2, path
"""


@pytest.mark.exhaustive
def test_a_mesh_changes_nothing_with_adapters():
  copy_python(_ON_A_MESH, devices=8, check=True)


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'lora__rank': -1}, r'lora\.rank=-1: must be at least 0'),
    ({'lora__alpha': 0}, r'lora\.alpha=0: must be above 0'),
    ({'lora__targets': 'q_proj,head'}, r"lora\.targets='q_proj,head': allowed: all-linear, or some of q_proj"),
    ({'lora__path': 'x'}, r"lora\.path='x': needs lora\.rank above 0"),
    ({'lora__path': 'x', 'lora__rank': 4}, r"lora\.path='x': has no adapter_config\.json"),
    ({'model__param_dtype': 'float16'}, r"model\.param_dtype='float16': allowed: float32, bfloat16"),
    ({'model__param_dtype': 'bfloat16'}, r"model\.param_dtype='bfloat16': weights that are trained.*lora\.rank above"),
    ({'export__dtype': 'int8'}, r"export\.dtype='int8': allowed: float32"),
    ({'export__lora': 'both'}, r"export\.lora='both': allowed: merged, adapter"),
  ],
)
def test_adapters_that_cannot_be_are_refused_in_one_line(fields, message):
  with pytest.raises(UserError, match=message) as e:
    check_config(small_config(**fields))
  assert '\n' not in str(e.value)


def test_adapters_of_another_shape_and_fresh_models_are_refused(tmp_path):
  config = small_config(lora__rank=4, lora__targets='q_proj')
  policy, adapters = build.load_policy(config), build.lora_config(config)
  qwen, source = policy.model.policy, policy.directory
  adapter_files.save(str(tmp_path), qwen, adapters, 'float32', base='x', tokenizer_dir=source)
  config.lora.path = str(tmp_path)
  check_config(config)
  config.lora.rank = 8
  with pytest.raises(UserError, match=r'lora\.path=.*: has rank 4, alpha 64 and targets q_proj; set lora\.rank') as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_the_variant_is_ragens_preset():
  config = frozenlake_ppo.get_config('qwen2.5-3b-lora')
  assert (config.model.preset, config.model.param_dtype) == ('qwen2.5-3b', 'bfloat16')
  assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (64, 64, 'all-linear')
  assert (config.optimizer.actor_lr, config.optimizer.critic_lr) == (1e-5, 1e-4)
  tiny = frozenlake_ppo.get_config('tiny-lora')
  assert (tiny.model.preset, tiny.model.param_dtype, tiny.lora.rank) == ('tiny', 'float32', 64)
  assert frozenlake_ppo.get_config('qwen2.5-3b').lora.rank == 0
