"""Runs with matrices in 8 bits: what is trained, resumed, exported and planned, on one device and on eight."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build, train
from ragen_jax.agent.language_model import param_state
from ragen_jax.config.checks import check_config
from ragen_jax.config.sft_checks import check_sft
from ragen_jax.models import int8
from ragen_jax.models.checkpoint.config import read_config
from ragen_jax.models.checkpoint.load import load_params
from ragen_jax.modes import export
from ragen_jax.planning import memory
from ragen_jax.runs.metrics import read_metrics
from tests.support.configs import assert_refused, small_config
from tests.support.processes import copy_python

BASE = dict(lora__rank=4, model__weights='int8')
COPY = dict(model__weights='int8', algorithm__old_logprobs='trainer', algorithm__tis_cap=2.0)
_BANDIT = dict(
  train__tags=('Bandit',), eval__tags=('Bandit',), eval__greedy_too=False, eval__every=0, num_iterations=2,
  length_step=64, eval__step='latest',
)  # fmt: skip


def _metrics(workdir) -> list[dict[str, float]]:
  own = ('timing_s/', 'perf/')
  return [{name: x for name, x in line.items() if not name.startswith(own)} for line in read_metrics(workdir)]


@pytest.mark.slow
def test_a_run_over_a_base_in_8_bits_resumes_and_exports_the_published_base_with_its_adapters(tmp_path):
  config = small_config(**_BANDIT, **BASE, optimizer__actor_lr=3e-3)
  train.train_and_evaluate(config, str(tmp_path / 'run'))
  lines = _metrics(tmp_path / 'run')
  assert max(line.get('rollout/logprob_gap_max', 0) for line in lines) < 1e-3  # sampler and update have one base
  shutil.copytree(tmp_path / 'run', tmp_path / 'again')
  shutil.rmtree(tmp_path / 'again' / 'checkpoints' / '2')
  train.train_and_evaluate(config, str(tmp_path / 'again'))
  assert _metrics(tmp_path / 'again')[-1] == lines[-1]
  written = export.export(config, str(tmp_path / 'run'))
  policy, config.model.weights = build.load_policy(config), 'float'
  base = dict(nnx.to_flat_state(load_params(policy.directory, policy.model.policy.cfg, jnp.float32)))
  moved = dict(nnx.to_flat_state(load_params(written, read_config(written), jnp.float32)))
  for path, x in base.items():
    change = np.asarray(moved[path][...]) - np.asarray(x[...])
    if int8.input_axes('/'.join(map(str, path))) is None:
      assert not change.any()
    else:  # of the adapter, which has rank 4, and not of 8 bits
      matrix = change.reshape(-1, *change.shape[1:]) if path[-2] != 'o_proj' else change.reshape(-1, change.shape[-1])
      values = np.linalg.svd(matrix.reshape(len(matrix), -1), compute_uv=False)
      assert values[0] > 0 and values[4:].max(initial=0) < 1e-4 * values[0] + 1e-6


@pytest.mark.slow
def test_a_sampler_in_8_bits_is_made_anew_after_each_update_and_its_gap_is_weighed(tmp_path):
  config = small_config(**_BANDIT, **COPY)
  train.train_and_evaluate(config, str(tmp_path))
  for line in _metrics(tmp_path)[1:]:
    assert 1e-4 < line['rollout/logprob_gap_mean'] < 0.2
    assert 0.5 < line['rollout/importance_mean'] < 2


@pytest.mark.slow
def test_what_has_8_bits_is_said_and_the_rest_of_a_run_has_the_weights():
  policy = build.load_policy(small_config(**COPY))
  params = param_state(policy.model)
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  assert any(x.dtype == jnp.int8 for x in jax.tree.leaves(policy.sampler.decode_weights(params)))
  assert 'float32, matrices of layers in int8' in policy.describe()
  policy = build.load_policy(small_config(**BASE, model__separate_critic=True))
  params = param_state(policy.model)
  assert any(x.dtype == jnp.int8 for x in jax.tree.leaves(params['policy']))
  assert {x.dtype for x in jax.tree.leaves(params['critic'])} == {jnp.dtype('float32')}
  assert policy.sampler.decode_weights(params) is params
  plain = build.load_policy(small_config(lora__rank=4, model__separate_critic=True))
  assert policy.describe().split(',')[0] == plain.describe().split(',')[0]  # scales are no parameters


@pytest.mark.slow
@pytest.mark.parametrize('fields', [BASE | {'model__param_dtype': 'bfloat16'}, COPY])
def test_the_plan_counts_the_bytes_of_the_arrays(fields):
  config = small_config(**fields, model__dtype='float32', plan__memory_gb=1e-6)
  trainer = build.make_trainer(config, build.load_policy(config))
  state = trainer.init()
  found = memory.estimate(config, {})
  (weights,) = (n for name, n in found.phases['update'].items() if name.startswith('weights ('))
  assert weights == sum(x.nbytes for x in jax.tree.leaves(state.params))
  made = trainer.model.sampler.decode_weights(state.params)
  before = {id(x) for x in jax.tree.leaves(state.params)}
  copied = sum(x.nbytes for x in jax.tree.leaves(made) if id(x) not in before)
  assert found.phases['rollout'].get('weights as computed with', 0) == copied
  matrices = [x for x in int8.leaves(made) if isinstance(x, int8.Int8)]
  assert matrices and all(x.value.nbytes == x.size for x in matrices)
  assert found.parameters == sum(x.size for x in int8.leaves(state.params))  # scales are none


def test_a_base_in_8_bits_needs_less_memory_in_the_update():
  found, policies = {}, {}
  for weights in ('float', 'int8'):
    config = small_config(lora__rank=4, model__param_dtype='bfloat16', model__weights=weights)
    policies[weights] = build.load_policy(config)
    found[weights] = build.update_memory(config, policies[weights])
  matrices = [x for x in int8.leaves(param_state(policies['int8'].model)) if isinstance(x, int8.Int8)]
  saved = sum(x.size for x in matrices) - sum(x.scale.nbytes for x in matrices)  # a byte of two
  assert found['float'].kept - found['int8'].kept == saved > 0
  # The layers' weights as computed with are 8 bits here, and float32 there.
  kept = found['float'].saved['none'][0] - found['int8'].saved['none'][0]
  assert kept == sum(3 * x.size - x.scale.nbytes for x in matrices)


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'model__weights': 'int4'}, r"^model\.weights='int4': allowed: float, int8$"),
    ({'model__weights': 'int8'}, r"^model\.weights='int8': without LoRA it needs algorithm\.old_logprobs='trainer'"),
  ],
)
def test_8_bits_that_cannot_be_are_refused(fields, message):
  assert_refused(check_config, small_config(**fields), message)
  check_config(small_config(**BASE))
  check_config(small_config(**COPY))


def test_a_warm_start_keeps_the_weights():
  assert_refused(check_sft, small_config(**BASE), r"^model\.weights='int8': must be 'float' with --mode=sft")


# -- devices -----------------------------------------------------------------------------------------------------------

_ON_A_MESH = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from ragen_jax.distributed.mesh import make_mesh
from ragen_jax.distributed.sharding import place
from ragen_jax.models import int8, lora, qwen
from ragen_jax.sampling.sampler import Sampler, changed_weights
from tests.support import learning
from tests.support.models import EXPERTS, random_model
from tests.whole import test_lora

fields = {'dense': {}, 'experts': EXPERTS | {'mlp_layers': ()}}[sys.argv[1]]
qwen._SCAN_FROM_LAYERS = 2  # layers in a loop, too

def make():
  model = random_model(32, **fields)
  lora.attach(model.policy, lora.LoraConfig(2, 4, lora.targets(model.policy.cfg)), nnx.Rngs(1))
  return model

results = []
for mesh in (None, make_mesh(2, 2, 2)):
  graphdef, params = nnx.split(nnx.eval_shape(make))
  rng = np.random.default_rng(1)
  model = nnx.merge(graphdef, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.2, x.dtype), params))
  int8.quantise(model.policy)
  params = nnx.split(model)[1]
  if mesh is not None:
    params = place(params, lora.shardings(params, mesh))
    kernel = params['policy']['layers'][1]['self_attn']['q_proj']['kernel'].get_value()
    assert kernel.value.sharding.shard_shape(kernel.value.shape) == (16, 2, 8)
    assert kernel.scale.sharding.shard_shape(kernel.scale.shape) == (1, 2, 8)
  learner = test_lora._learner(model, mesh, remat='layers')
  state = learning.state_of(learner, params)
  new, metrics = learning.step(learner, state, *test_lora._batch(vocab=32))
  results.append((jax.device_get(new.params), {name: float(np.sum(x)) for name, x in metrics.items()}))
(one, one_metrics), (many, many_metrics) = results
for name, x in one_metrics.items():
  np.testing.assert_allclose(many_metrics[name], x, rtol=1e-3, atol=1e-5, err_msg=name)
for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
  assert a.dtype == b.dtype
  difference = np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32))
  assert np.quantile(difference, 0.98) < 1e-4 and difference.max() < 2.1e-2

# The sampler's copy of weights that are all trained, gathered or divided among neighbours.
model = random_model(32, **fields)
model.policy.int8 = True
whole = nnx.split(model)[1]
expected = Sampler(model, stop_ids=(1,)).decode_weights(whole)
mesh = make_mesh(2, 2, 2)
params = place(whole, lora.shardings(whole, mesh))
for shards, gathered in ((1, True), (1, False), (2, None)):
  sampler = Sampler(model, stop_ids=(1,), mesh=mesh, decode_shards=shards)
  made = sampler.decode_weights(params, gathered)
  assert not changed_weights(made, sampler.abstract_weights(params, gathered is not False))
  for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
    assert a.dtype == b.dtype
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert np.abs(a - b).max() <= (1 if np.abs(b).max() > 100 else 1e-6) and (a != b).mean() < 1e-2
"""


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['dense', 'experts'])
@pytest.mark.exhaustive_cases('dense')
def test_a_mesh_changes_nothing_in_8_bits(kind):
  copy_python(_ON_A_MESH, kind, devices=8, check=True)
