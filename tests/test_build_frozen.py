"""Frozen weights are those that the config names, in memory of their own."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax import build, build_frozen
from ragen_jax.agent.language_model import param_state
from ragen_jax.models import presets
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.workdir import record_config
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import UserError
from tests.support.configs import small_config


def config_of(*frozen, **fields):
  return small_config(**{'model__preset': 'tiny', 'serve__frozen': frozen, **fields})


def leaves(params):
  return [np.asarray(x) for x in jax.tree.leaves(params)]


def equal(a, b):
  return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.fixture(scope='module')
def policy():
  return build.load_policy(config_of())


@pytest.fixture(scope='module')
def run(policy, tmp_path_factory):
  """A run with checkpoints 3 and 5, all of whose weights are these numbers."""
  path = str(tmp_path_factory.mktemp('run'))
  record_config(path, config_of().to_dict())
  with Checkpointer(path, keep=2, save_best=BEST) as checkpointer:
    for step in (3, 5):
      params = jax.tree.map(lambda x, step=step: jnp.full_like(x, step), param_state(policy.model))
      checkpointer.save(step, {'params': params}, metrics={BEST: 1 / step})
  return path


def test_entries_are_expressions_and_models():
  config = config_of('critic=base', 'a|b=runs/x@7', '=DIR=x')
  assert build_frozen.frozen_agents(config) == (('critic', 'base'), ('a|b', 'runs/x@7'), ('', 'DIR=x'))


@pytest.mark.parametrize('entry', ['base', 'critic=', '', 3])
def test_other_entries_are_refused(entry):
  with pytest.raises(UserError, match=r"^serve\.frozen=.*: entries must be 'AGENTS=MODEL', such as 'critic=base'$"):
    build_frozen.frozen_agents(config_of(entry))


def test_an_expression_that_is_none():
  with pytest.raises(UserError, match=r"^serve\.frozen='\(=base': '\(' must be a regular expression \(.*\)$"):
    build_frozen.frozen_agents(config_of('(=base'))


def test_the_base_is_loaded_once_and_apart_from_the_policy(policy):
  found = build_frozen.load_frozen(config_of('a=base', 'b=base'), policy)
  (base,) = found.values()
  assert list(found) == ['base'] and base.version == 0
  mine, theirs = (jax.tree.leaves(p) for p in (base.params, param_state(policy.model)))
  assert equal(mine, theirs) and not {id(x) for x in mine} & {id(x) for x in theirs}
  assert base.sampler is policy.sampler, 'its programs are compiled once'


@pytest.mark.parametrize(('step', 'version'), [('3', 3), ('best', 3), ('latest', 5)])
def test_the_checkpoint_of_a_run(policy, run, step, version):
  name = f'{run}@{step}'
  (found,) = build_frozen.load_frozen(config_of(f'a={name}'), policy).values()
  assert found.version == version and all((x == version).all() for x in leaves(found.params))
  assert found.sampler is policy.sampler


def test_weights_are_held_in_the_type_of_computations(run):
  config = config_of(f'a={run}@3', 'b=tiny', model__dtype='bfloat16')
  model = build.load_policy(config)
  for found in build_frozen.load_frozen(config, model).values():
    assert {x.dtype for x in jax.tree.leaves(found.params['policy']) if x.ndim > 1} == {jnp.dtype('bfloat16')}


def test_frozen_models_are_divided_while_tokens_are_sampled_as_the_config_says(policy, monkeypatch):
  own, asked = build.load_policy(config_of()), []
  loaded = dataclasses.replace(own, sampler=types.SimpleNamespace(decode_shards=4))  # on a mesh with four rows' shards
  monkeypatch.setattr(build_frozen.build, 'load_policy', lambda _: loaded)
  monkeypatch.setattr(build_frozen, 'make_sampler', lambda *_, **fields: asked.append(fields) or own.sampler)
  build_frozen.load_frozen(config_of('a=base'), policy)
  assert asked == [{'values': False, 'decode_shards': 4}]


def test_a_separate_critic_is_left_out(policy):
  config = config_of('a=base', model__separate_critic=True)
  (of,) = build_frozen.frozen_models(config).values()
  assert not of.config.model.separate_critic and config.model.separate_critic, 'it is not even loaded'
  (found,) = build_frozen.load_frozen(config, build.load_policy(config)).values()
  assert set(found.params) == {'policy', 'value_head'} and not found.sampler.values
  # The structure is that of a model without adapters and without a critic of its own.
  (same,) = build_frozen.load_frozen(config, policy).values()
  assert same.sampler is policy.sampler


def test_a_checkpoint_with_a_separate_critic(tmp_path):
  config = config_of(model__separate_critic=True)
  model = build.load_policy(config)
  record_config(tmp_path, config.to_dict())
  with Checkpointer(tmp_path, keep=1, save_best=BEST) as checkpointer:
    params = jax.tree.map(lambda x: jnp.full_like(x, 2), param_state(model.model))
    checkpointer.save(1, {'params': params})
  plain = build.load_policy(config_of())
  (found,) = build_frozen.load_frozen(config_of(f'a={tmp_path}@1'), plain).values()
  assert set(found.params) == {'policy', 'value_head'} and all((x == 2).all() for x in leaves(found.params))


def test_a_model_with_another_tokenizer_is_refused(policy, tmp_path):
  directory = tmp_path / 'model@2'
  shutil.copytree(presets.resolve('tiny', ''), directory)
  (same,) = build_frozen.load_frozen(config_of(f'a={directory}'), policy).values()
  assert equal(same.params, param_state(policy.model))
  raw = json.loads((directory / 'tokenizer.json').read_text())
  vocab = raw['model']['vocab']
  a, b = sorted(vocab)[:2]
  vocab[a], vocab[b] = vocab[b], vocab[a]
  (directory / 'tokenizer.json').write_text(json.dumps(raw))
  with pytest.raises(UserError, match=rf"^serve\.frozen: '{directory}': has another tokenizer than the policy"):
    build_frozen.load_frozen(config_of(f'a={directory}'), policy)


def test_models_that_are_not_there(policy, run, tmp_path):
  for name, message in (
    (
      f'{tmp_path}/none',
      r"must be 'base', WORKDIR@STEP, a directory that exists, or one of the presets .*qwen2\.5-0\.5b",
    ),
    (str(tmp_path), 'has no config.json, so it is no Hugging Face checkpoint'),
    (f'{tmp_path}@3', r'holds no run'),
    (f'{run}@4', r"the step='4': must be latest, best or one of 3, 5$"),
  ):
    with pytest.raises(UserError, match=rf"^serve\.frozen: '{name}': .*{message}") as e:
      build_frozen.load_frozen(config_of(f'a={name}'), policy)
    assert '\n' not in str(e.value)


def test_errors_name_no_field_of_the_policy(policy, monkeypatch):
  for told, expected in (
    ("model.preset='x': no/x cannot be downloaded (offline); give --config.model.path=DIR",
     'no/x cannot be downloaded (offline); name this directory instead'),
    ('model.path=/a/b: the tokenizer lacks x', 'the tokenizer lacks x'),
    ("model.path='/a b' does not exist", 'does not exist'),
  ):  # fmt: skip

    def fail(_, told=told):
      raise UserError(told)

    monkeypatch.setattr(build_frozen.build, 'load_policy', fail)
    with pytest.raises(UserError, match=f"^serve\\.frozen: 'base': {re.escape(expected)}$"):
      build_frozen.load_frozen(config_of('a=base'), policy)


def test_a_warm_start_from_scratch_is_refused(tmp_path):
  record_config(tmp_path, config_of(sft__from_scratch=True, sft__output='written').to_dict())
  with pytest.raises(UserError, match=r'a model from scratch has its own tokenizer; name the written model, written$'):
    build_frozen.frozen_models(config_of(f'a={tmp_path}@1'))


def test_the_models_weights_are_those_of_its_run_and_all_else_is_the_configs(run, tmp_path):
  record_config(tmp_path, config_of(lora__rank=4, train__groups=99).to_dict())
  (of,) = build_frozen.frozen_models(config_of(f'a={tmp_path}@1', train__groups=7)).values()
  assert of.config.lora.rank == 4 and of.config.train.groups == 7 and (of.workdir, of.step) == (str(tmp_path), '1')
