"""docs/verifiers.md: its options, its config, and its package, which is played by the built-in model."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest

from ragen_jax import build, train
from ragen_jax.envs.outside.verifiers import VerifiersTasks, shared_package
from ragen_jax.runs.metrics import read_metrics
from tests.support.paths import ROOT

PAGE = (ROOT / 'docs' / 'verifiers.md').read_text(encoding='utf-8')
FILES = {
  block.split('\n')[0].removeprefix('# '): block for block in re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
}


def page_config():
  names = {}
  exec(FILES['my_sums_config.py'], names)
  return names['get_config']()


def test_the_page_has_every_option_and_its_default():
  told = dict(re.findall(r'^\| `(\w+)` \| `([^|]*)` \|', PAGE, re.MULTILINE))
  fields = {field.name: field for field in dataclasses.fields(VerifiersTasks)}
  assert re.search(r'^\| `package` \| \|', PAGE, re.MULTILINE)
  defaults = {name: {} if name in ('options', 'environment') else field.default for name, field in fields.items()}
  del defaults['package']
  assert told == {name: repr(value) for name, value in defaults.items()}


def test_the_page_s_config_has_two_parts_of_one_package():
  config = page_config()
  train_spec, test_spec = build.env_specs(config, ('Verifiers', 'VerifiersTest'), (1, 1))
  assert train_spec.env.settings == test_spec.env.settings and train_spec.budget.max_turns == 4
  assert (train_spec.env.split, test_spec.env.split) == ('train', 'test')
  assert train_spec.env.options == {'largest': 20} and train_spec.env.package == 'my_sums'


@pytest.mark.slow
def test_the_page_s_package_is_trained_on(tmp_path, monkeypatch):
  pytest.importorskip('verifiers', reason='pip install -r requirements-verifiers.txt')
  (tmp_path / 'my_sums.py').write_text(FILES['my_sums.py'], encoding='utf-8')
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path))  # where rollouts have their folders
  config = page_config()
  config.update_from_flattened_dict(
    {
      'num_iterations': 1, 'train.groups': 2, 'train.group_size': 4, 'eval.groups': 4, 'eval.greedy_too': False,
      'optimizer.mini_batch_size': 8, 'optimizer.micro_batch_size': 8, 'agent.max_response_tokens': 8,
      'serve.port': 0, 'serve.slots': 8, 'serve.max_concurrency': 8, 'compilation_cache': '', 'length_step': 1024,
    }
  )  # fmt: skip
  try:
    train.train_and_evaluate(config, str(tmp_path / 'run'))
  finally:
    for spec in build.env_specs(config, ('Verifiers',), (1,)):
      shared_package(spec.env.settings).close()
    sys.modules.pop('my_sums', None)
  before, after = read_metrics(tmp_path / 'run')[:2]
  assert before['val-env/VerifiersTest/reply_chars'] > 0 and after['train/Verifiers/reply_chars'] > 0
  assert after['train/Verifiers/env_errors'] == 0 and after['serving/calls'] >= 8 and 'serving/reward/right' in after
