"""`import ragen_jax`: a light import, its functions, and the examples of docs/api.md as they stand there."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pytest

import ragen_jax
from configs import frozenlake_ppo
from ragen_jax import api, build, train
from ragen_jax.envs import frozen_lake
from tests.support.paths import ROOT
from tests.support.processes import run_python

PAGE = (ROOT / 'docs' / 'api.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'```python\n(.*?)```', PAGE, re.DOTALL)
CONFIG = 'configs/frozenlake_ppo.py'

# What makes the examples small.
SMALL = {
  'num_iterations': 1, 'train.groups': 4, 'train.group_size': 2, 'eval.groups': 4, 'eval.group_size': 2,
  'eval.greedy_too': False, 'eval.temperature': 1.0, 'optimizer.mini_batch_size': 8, 'optimizer.micro_batch_size': 8,
  'length_step': 512, 'agent.max_response_tokens': 4, 'agent.drop_finished': False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Puddle(frozen_lake.FrozenLake):
  """An environment of a user's own, in a module."""

  name: ClassVar[str] = 'puddle'


@pytest.mark.parametrize(
  ('before', 'after'),
  [
    (None, '--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000'),
    ('--xla_a=1', '--xla_a=1 --xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000'),
    ('--xla_jf_spmd_threshold_for_windowed_einsum_mib=0', '--xla_jf_spmd_threshold_for_windowed_einsum_mib=0'),
  ],
)
def test_tpus_exchange_divided_products_at_once_unless_told_otherwise(before, after):
  code = 'import os, ragen_jax; print(os.environ["LIBTPU_INIT_ARGS"])'
  environment = {k: v for k, v in os.environ.items() if k != 'LIBTPU_INIT_ARGS'}
  environment |= {} if before is None else {'LIBTPU_INIT_ARGS': before}
  assert run_python(code, env=environment).stdout.strip() == after


def test_importing_the_package_imports_nothing_heavy():
  heavy = "{'jax', 'flax', 'numpy', 'ml_collections', 'transformers'}"
  code = f'import sys, ragen_jax; assert ragen_jax.UserError; sys.exit(bool({heavy} & set(sys.modules)))'
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=False).returncode == 0


def test_every_public_name_is_there():
  assert ragen_jax.__all__ == sorted(ragen_jax.__all__)
  for name in ragen_jax.__all__:
    assert getattr(ragen_jax, name).__name__ == name
    assert name in dir(ragen_jax)
  with pytest.raises(AttributeError, match=r'no attribute .Trianer.'):
    ragen_jax.Trianer  # noqa: B018


def test_a_config_is_that_of_the_command_line():
  fields = {'train.groups': 8, 'algorithm.lam': 1, 'train.tags': ['FrozenLake', 'Bandit']}
  config = api.load_config(f'{ROOT}/{CONFIG}', fields)
  expected = frozenlake_ppo.get_config()
  expected.train.groups, expected.algorithm.lam, expected.train.tags = 8, 1.0, ('FrozenLake', 'Bandit')
  assert config.to_dict() == expected.to_dict()
  assert isinstance(config.train.tags, tuple) and isinstance(config.algorithm.lam, float)
  with pytest.raises(AttributeError, match='Did you mean "groups"'):
    config.train.gruops = 8
  real = api.load_config(f'{ROOT}/{CONFIG}:qwen2.5-0.5b')
  assert real.model.preset == 'qwen2.5-0.5b' and real.train.groups == 8


@pytest.mark.parametrize(
  ('file', 'fields', 'message'),
  [
    ('configs/none.py', {}, r'^configs/none\.py: there is no such file'),
    ('README.md', {}, r'^README\.md: is not a Python file'),
    ('configs/sft_tiny.py:big', {}, r'has no variants'),
    (CONFIG, {'train.gruops': 8}, r"^train\.gruops: config\.train has no field 'gruops'; did you mean 'groups'"),
    (CONFIG, {'train.groups': '8'}, r"^train\.groups='8': must be a whole number, like the 128 of the config"),
    (CONFIG, {'train.groups': True}, r'^train\.groups=True: must be a whole number'),
    (CONFIG, {'train.groups': None}, r'^train\.groups=None: must be a whole number'),
    (CONFIG, {'algorithm.lam': 'high'}, r"^algorithm\.lam='high': must be a number"),
    (CONFIG, {'train.tags': 'Bandit'}, r"^train\.tags='Bandit': must be a tuple, like the \('FrozenLake',\)"),
    (CONFIG, {'train': 8}, r'^train=8: is a section; name one of its fields: first_level, group_size'),
  ],
)
def test_what_is_no_config_is_refused_in_one_line(monkeypatch, file, fields, message):
  monkeypatch.chdir(ROOT)
  with pytest.raises(ragen_jax.UserError, match=message) as e:
    api.load_config(file, fields)
  assert '\n' not in str(e.value)


@pytest.mark.parametrize(
  ('env_type', 'options', 'message'),
  [
    ('frozen_lake', {'siez': 5}, r"siez is not an option of frozen_lake; did you mean 'size'\? allowed: size"),
    ('frozen_lake', {'size': 1}, r'size=1; allowed: integers from 2 to 64'),
    ('lake', {}, r"type='lake'; allowed: frozen_lake"),
  ],
)
def test_what_is_no_environment_is_refused_in_one_line(env_type, options, message):
  with pytest.raises(ragen_jax.UserError, match=message):
    api.make_env(env_type, **options)


def test_environments_come_back_from_the_config():
  config = api.load_config(f'{ROOT}/configs/sokoban_ppo.py')
  lake, puddle = api.make_env('frozen_lake', size=5, symbols='P.OGX√'), Puddle(p=0.5)
  budget = ragen_jax.Budget(max_turns=2, max_actions=4, max_actions_per_turn=3)
  api.train_on(config, {'FrozenLake': lake, 'Puddle': puddle}, budget, max_words=20)
  assert config.envs.FrozenLake.type == 'frozen_lake' and config.envs.Puddle.type == f'{__name__}:Puddle'
  assert config.is_locked
  for section in ('train', 'eval'):
    counts = build.group_counts(config[section], section)
    specs = build.env_specs(config, config[section].tags, counts)
    assert [(s.tag, s.env, s.budget, s.max_words) for s in specs] == [
      ('FrozenLake', lake, budget, 20),
      ('Puddle', puddle, budget, 20),
    ]
    assert counts[0] == counts[1]


def test_a_class_that_cannot_be_imported_is_refused():
  @dataclasses.dataclass(frozen=True)
  class Local(frozen_lake.FrozenLake):
    name: ClassVar[str] = 'local'

  config = api.load_config(f'{ROOT}/{CONFIG}')
  before = config.to_dict()
  with pytest.raises(ragen_jax.UserError, match=r"environments\['Mine'\]: .*Local.* cannot be imported"):
    api.train_on(config, {'Mine': Local()})
  with pytest.raises(ragen_jax.UserError, match=r'^environments=\{\}: name at least one environment$'):
    api.train_on(config, {})
  assert config.to_dict() == before


@pytest.mark.parametrize(
  ('tag', 'env', 'message'),
  [
    ('a.b', frozen_lake.FrozenLake(), r"^environments: the tag 'a\.b' must be a text without dots"),
    ('', frozen_lake.FrozenLake(), r"^environments: the tag '' must be a text"),
    (3, frozen_lake.FrozenLake(), r'^environments: the tag 3 must be a text'),
    (
      'Mine',
      'frozen_lake',
      r"^environments\['Mine'\]='frozen_lake': must be an environment, such as ragen_jax\.make_env",
    ),
  ],
)
def test_tags_and_values_that_are_no_environments_are_refused(tag, env, message):
  config = api.load_config(f'{ROOT}/{CONFIG}')
  before = config.to_dict()
  with pytest.raises(ragen_jax.UserError, match=message):
    api.train_on(config, {tag: env})
  assert config.to_dict() == before


def test_a_config_that_cannot_run_is_refused_before_anything_is_loaded():
  config = api.load_config(f'{ROOT}/{CONFIG}', {'optimizer.mini_batch_size': 100})
  with pytest.raises(ragen_jax.UserError, match=r'optimizer\.mini_batch_size=100: must divide'):
    api.load_policy(config)


def _block(first_line: str) -> str:
  return next(block for block in BLOCKS if first_line in block)


@pytest.fixture
def in_the_repository(monkeypatch, tmp_path):
  """The page's directory, small configs, and the games of docs/add_environment.md."""
  monkeypatch.chdir(ROOT)
  load_config = api.load_config
  monkeypatch.setattr(api, 'load_config', lambda file, fields=None: load_config(file, (fields or {}) | SMALL))
  page = (ROOT / 'docs' / 'add_environment.md').read_text(encoding='utf-8')
  (tmp_path / 'my_games').mkdir()
  for path, text in re.findall(r'```python\n# (my_games/(?:corridor|guess)\.py)\n(.*?)```', page, re.DOTALL):
    (tmp_path / path).write_text(text, encoding='utf-8')
  monkeypatch.syspath_prepend(tmp_path)
  yield
  for name in [name for name in sys.modules if name.split('.')[0] == 'my_games']:
    del sys.modules[name]


@pytest.mark.slow
def test_ten_lines_build_environment_model_and_trainer(in_the_repository, monkeypatch, capsys):
  ten = [line for line in BLOCKS[0].splitlines() if line.strip()]
  assert len(ten) == 10 and ten[0] == 'import ragen_jax'
  assert BLOCKS[0] in (ROOT / 'README.md').read_text(encoding='utf-8')
  names = {}
  exec(BLOCKS[0], names)
  number, success = capsys.readouterr().out.split()
  assert number == '1' and 0 <= float(success) <= 1
  assert {'actor/pg_loss', 'critic/rewards/mean', 'rollout/in_group_reward_std'} <= set(names['metrics'])
  before = names['state']
  assert isinstance(names['trainer'], ragen_jax.Trainer) and isinstance(before, ragen_jax.TrainState)
  for block in (_block('trainer.collect'), _block('ragen_jax.make_evaluator')):
    exec(block, names)
  assert (before.iteration, names['state'].iteration) == (1, 2) and names['rollout'].episodes[0].tag == 'IcyLake'
  assert 0 <= names['evaluation'].metrics['val-env/IcyLake/optimal'] <= 1
  exec(_block('batch.replace'), names)
  batch = names['batch']
  scores = np.asarray(names['rollout'].scores)
  expected = np.where(batch.trained, (scores - scores.mean())[:, None], 0)
  np.testing.assert_allclose(batch.advantages, expected, rtol=0, atol=1e-6)
  # What main.py calls, and other tests run.
  started = []
  monkeypatch.setattr(train, 'train_and_evaluate', lambda *a: started.append(a) or names['evaluation'].metrics)
  exec(_block('train_and_evaluate('), names)
  assert started == [(names['config'], 'runs/icy_lake')]


def test_an_environment_steps_by_itself(capsys):
  names = {}
  exec(_block('env.reset'), names)
  assert names['out'].reward.shape == (1024,) and 0 < float(names['states'].success.mean()) < 1
  assert capsys.readouterr().out.count('\n') == 6  # five rows, and the success


def test_environments_of_a_users_own(in_the_repository):
  names = {}
  exec(_block('my_games.corridor'), names)
  config = names['config']
  assert config.train.tags == config.eval.tags == ('Corridor', 'Guess')
  assert config.envs.Corridor.type == 'my_games.corridor:Corridor' and config.envs.Corridor.length == 6
  assert config.envs.Guess.options.largest == 20 and config.envs.Guess.max_turns == 3
  assert len(BLOCKS) == 8
