"""Exports: a run's checkpoint opens elsewhere with the same logits, and what cannot be exported is told in one line."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ragen_jax import build
from ragen_jax.agent.language_model import param_state
from ragen_jax.config.checks import check_config
from ragen_jax.models import lora
from ragen_jax.modes import export
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.workdir import record_config
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import UserError
from tests.support.adapters import logits as logits_of
from tests.support.configs import small_config
from tests.support.processes import copy_main

TEXT = '<think>I am at (1, 2)</think><answer>Left || Down</answer>'


def _logits(qwen, ids) -> np.ndarray:
  return np.asarray(logits_of(qwen, jnp.asarray([ids])))[0]


def _moved(params, amount: float):
  """Other weights, as training would leave them; the base of adapters stays."""
  rng = np.random.default_rng(0)
  trained, frozen = lora.partition(params)
  trained = jax.tree.map(lambda x: x + amount * rng.normal(size=x.shape).astype(np.float32), trained)
  return trained, lora.join(trained, frozen)


def _run(workdir, **fields):
  """A workdir with two checkpoints, the first of them the best. The policy gets the weights of the second."""
  config = small_config(**fields)
  policy = build.load_policy(config)
  params = param_state(policy.model)
  record_config(workdir, config.to_dict())
  with Checkpointer(workdir, keep=2, save_best=BEST) as checkpointer:
    for step, score in ((1, 0.4), (2, 0.3)):
      trained, whole = _moved(params, 0.02 * step)
      checkpointer.save(step, {'params': trained}, metrics={BEST: score})
  nnx.update(policy.model, whole)
  return config, policy


@pytest.fixture(scope='module')
def lora_run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('lora_run')
  return workdir, *_run(workdir, lora__rank=4, lora__alpha=8)


@pytest.fixture(scope='module')
def full_run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('full_run')
  return workdir, *_run(workdir)


@pytest.fixture(scope='module')
def torch():
  torch = pytest.importorskip('torch', reason='transformers needs PyTorch to run a model')
  torch.set_num_threads(1)
  return torch


def _theirs(torch, model, tokenizer, ids) -> np.ndarray:
  assert tokenizer(TEXT)['input_ids'] == list(ids)
  with torch.no_grad():
    return model.eval()(torch.tensor([list(ids)])).logits[0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize('run', ['full_run', 'lora_run'])
def test_transformers_opens_an_export_and_so_does_another_run(tmp_path, run, request, caplog, torch):
  from transformers import AutoModelForCausalLM, AutoTokenizer

  workdir, config, policy = request.getfixturevalue(run)
  config = config.copy_and_resolve_references()
  config.export.output = str(tmp_path / 'out')
  with caplog.at_level('INFO', 'ragen_jax'):
    assert export.export(config, str(workdir)) == str(tmp_path / 'out')
  assert f'to start a run from it: --config.model.path={tmp_path}/out' in caplog.text
  ids = policy.tokenizer.encode(TEXT)
  expected = _logits(policy.model.policy, ids)
  model = AutoModelForCausalLM.from_pretrained(config.export.output, dtype=torch.float32)
  tokenizer = AutoTokenizer.from_pretrained(config.export.output)
  np.testing.assert_allclose(_theirs(torch, model, tokenizer, ids), expected, atol=1e-4)
  again = build.load_policy(small_config(model__path=config.export.output)).model
  np.testing.assert_allclose(_logits(again.policy, ids), expected, atol=1e-4)
  np.testing.assert_array_equal(again.value_head.kernel[...], policy.model.value_head.kernel[...])


@pytest.mark.slow
def test_peft_opens_an_export_of_adapters_and_so_does_another_run(tmp_path, lora_run, caplog, torch):
  peft = pytest.importorskip('peft', reason='the comparison with PEFT needs it')
  from transformers import AutoModelForCausalLM, AutoTokenizer

  workdir, config, policy = lora_run
  config = config.copy_and_resolve_references()
  config.export.output, config.export.lora = str(tmp_path / 'out'), 'adapter'
  with caplog.at_level('INFO', 'ragen_jax'):
    export.export(config, str(workdir))
  said = caplog.text.split('to start a run from it: ')[1].split()
  ids = policy.tokenizer.encode(TEXT)
  expected = _logits(policy.model.policy, ids)
  base = json.loads((tmp_path / 'out' / 'adapter_config.json').read_text())['base_model_name_or_path']
  model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
  model = peft.PeftModel.from_pretrained(model, config.export.output)
  tokenizer = AutoTokenizer.from_pretrained(config.export.output)
  np.testing.assert_allclose(_theirs(torch, model, tokenizer, ids), expected, atol=1e-4)
  # With the flags that were told.
  fields = dict(flag.removeprefix('--config.').split('=', 1) for flag in said)
  fields = {name: int(x) if x.isdigit() else x for name, x in fields.items()}
  again = small_config(**{name.replace('.', '__'): x for name, x in fields.items()})
  check_config(again)
  again = build.load_policy(again).model
  np.testing.assert_allclose(_logits(again.policy, ids), expected, atol=1e-5)
  np.testing.assert_array_equal(again.value_head.kernel[...], policy.model.value_head.kernel[...])


@pytest.mark.slow
def test_the_step_and_the_type_are_those_that_were_asked_for(tmp_path, full_run):
  workdir, config, policy = full_run
  config = config.copy_and_resolve_references()
  heads = {}
  for step in ('latest', 'best', '1', '2'):
    config.export.step, config.export.output, config.export.dtype = step, str(tmp_path / step), 'bfloat16'
    export.export(config, str(workdir))
    exported = small_config(model__path=config.export.output)
    heads[step] = np.asarray(build.load_policy(exported).model.value_head.kernel[...])
    assert json.loads((tmp_path / step / 'config.json').read_text())['torch_dtype'] == 'bfloat16'
  np.testing.assert_array_equal(heads['latest'], policy.model.value_head.kernel[...])
  np.testing.assert_array_equal(heads['best'], heads['1'])
  np.testing.assert_array_equal(heads['latest'], heads['2'])
  assert (heads['1'] != heads['2']).any()


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'export.step': '7'}, r"export\.step='7': must be latest, best or one of 1, 2"),
    ({'export.lora': 'adapter'}, r"export\.lora='adapter': needs a run with LoRA"),
    ({'algorithm.gamma': 0.9}, r'belongs to another config: algorithm\.gamma was 1\.0 and is 0\.9'),
    ({'lora.rank': 4}, r'belongs to another config: lora\.rank was 0 and is 4'),
    ({'export.output': '{workdir}'}, r'is not empty and is no checkpoint'),
    ({'export.output': '{model}'}, r'export\.output=.*: is where the model comes from'),
  ],
)
def test_what_cannot_be_exported_is_told_in_one_line(full_run, fields, message):
  workdir, config, policy = full_run
  config = config.copy_and_resolve_references()
  fields = {
    n: x.format(workdir=workdir, model=policy.directory) if isinstance(x, str) else x for n, x in fields.items()
  }
  config.update_from_flattened_dict(fields)
  before = sorted(pathlib.Path(workdir).rglob('*'))
  with pytest.raises(UserError, match=message) as e:
    export.export(config, str(workdir))
  assert '\n' not in str(e.value)
  assert sorted(pathlib.Path(workdir).rglob('*')) == before


def test_what_the_config_names_is_uploaded_after_the_export(tmp_path, full_run, monkeypatch):
  workdir, config, _ = full_run
  told = []
  monkeypatch.setattr(export.hub, 'push_model', lambda *x: told.append(x[1:]) or 'address')
  monkeypatch.setattr(export.hub, 'push_episodes', lambda *x: told.append(x[1:]) or 'address')
  output = str(tmp_path / 'out')
  for fields in ({}, {'push': 'me/games'}, {'push_episodes': 'me/played'}):
    changed = config.copy_and_resolve_references()
    changed.export.update({'output': output, 'step': 'best'} | fields)
    export.export(changed, str(workdir))
  assert told == [(str(workdir), output, 1), (str(workdir),)]


def test_a_workdir_without_a_run_is_refused(tmp_path):
  with pytest.raises(UserError, match=r'holds no run: .*config\.json cannot be read \(No such file'):
    export.export(small_config(), str(tmp_path))
  record_config(tmp_path, small_config().to_dict())
  with pytest.raises(UserError, match=r'there is no checkpoint in'):
    export.export(small_config(), str(tmp_path))


def test_the_command_line_exports_the_workdir_of_the_config(tmp_path):
  """The mode is reached, and what it says is one line."""
  result = copy_main('--mode=export', '--config=configs/frozenlake_ppo.py', f'--workdir={tmp_path}/x')
  assert result.returncode == 2 and result.stderr.startswith(f'error: workdir {tmp_path}/x holds no run: ')
  assert len(result.stderr.splitlines()) == 1
