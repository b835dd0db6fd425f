"""Every field of the config is explained, can be set from the command line, and is read; what cannot run is refused."""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import default, frozenlake_ppo
from ragen_jax import build, train
from ragen_jax import envs as registry
from ragen_jax.config import checks
from ragen_jax.config.checks import check_config, check_sft
from ragen_jax.distributed.processes import RowShare
from ragen_jax.envs import base
from ragen_jax.evaluation import evaluator as evaluate
from ragen_jax.modes import export, plan, sft
from ragen_jax.utils.errors import UserError
from tests.support import builders
from tests.support.paths import ROOT


def test_every_field_has_a_comment_line_above_it():
  lines = (ROOT / 'configs' / 'default.py').read_text().splitlines()
  assigned = [i for i, line in enumerate(lines) if re.match(r'  config\.[\w.]+ = (?!ConfigDict)', line)]
  assigned = [i for i in assigned if not any('def _real_model' in before for before in lines[:i])]
  assert len(assigned) > 50
  for i in assigned:
    assert lines[i - 1].strip().startswith('#'), f'configs/default.py:{i + 1}: {lines[i].strip()} is not explained'
  # Fields of environments: those that all have are explained above them, the others one by one.
  common = {'type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words'}
  for i, line in enumerate(lines):
    option = re.match(r"      '(\w+)': ", line)
    if option and option.group(1) not in common:
      assert lines[i - 1].strip().startswith('#'), f'configs/default.py:{i + 1}: {line.strip()} is not explained'


def _from_command_line(monkeypatch, *fields):
  """The config that configs/default.py and these flags give."""
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file('config', flag_values=values)
  arguments = ['x', f'--config={ROOT}/configs/default.py', *fields]
  monkeypatch.setattr(sys, 'argv', arguments)  # where ml_collections looks for overrides
  values(arguments)
  return holder.value


def test_every_field_can_be_set_from_the_command_line(monkeypatch):
  changed = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x + 0.25, str: lambda x: x + 'z'}
  new = {
    name: changed[type(value)](value) if type(value) in changed else (*value, value[-1] if value else 1)
    for name, value in builders.leaves(default.get_config())
  }
  config = _from_command_line(monkeypatch, *(f'--config.{name}={value}' for name, value in new.items()))
  assert dict(builders.leaves(config)) == new


def test_options_of_environments_are_those_of_their_classes():
  common = {'type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words'}
  for tag, options in default.get_config().envs.items():
    own = {field.name for field in dataclasses.fields(registry.TYPES[options.type])}
    assert set(options) == common | own, tag


def test_an_environment_is_changed_by_flags(monkeypatch):
  config = _from_command_line(
    monkeypatch, '--config.envs.LargerSokoban.dim=(9,7)', "--config.envs.Bandit.arms=(('Clerk','Diver'),)"
  )
  larger, bandit = build.env_groups(config, ('LargerSokoban', 'Bandit'), (1, 1))
  assert larger.env.dim == (9, 7) and '9 rows and 7 columns' in larger.env.rules()
  assert bandit.env.names == ('Clerk', 'Diver')


def test_tags_are_ragens():
  """Against a second listing, from RAGEN's paper and its first version's configs."""
  config = default.get_config()
  tags = tuple(config.envs)
  envs = {spec.tag: spec for spec in build.env_groups(config, tags, (1,) * len(tags))}
  grid = base.Budget(max_turns=5, max_actions=10, max_actions_per_turn=5)
  for tag, dim, boxes, depth, told, words in (
    ('SimpleSokoban', (6, 6), 1, 300, 'grid', 100),
    ('LargerSokoban', (8, 8), 2, 10, 'grid', 100),
    ('SokobanDifferentGridVocab', (6, 6), 1, 30, 'grid', 100),
    ('CoordSokoban', (6, 6), 1, 300, 'grid_coord', 120),
  ):
    env = envs[tag].env
    assert (env.dim, env.num_boxes, env.search_depth, env.observation, envs[tag].max_words) == (
      dim, boxes, depth, told, words,
    )  # fmt: skip
    assert envs[tag].budget == grid
    legend = 'W.GCBA@' if tag == 'SokobanDifferentGridVocab' else '#_O√XPS'
    assert ''.join(env.legend()) == legend
  for tag, told in (('FrozenLake', 'grid'), ('CoordFrozenLake', 'grid_coord')):
    env = envs[tag].env
    assert (env.size, env.p, env.observation) == (4, 0.8, told)
    assert env.slip == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert envs[tag].budget == grid
  for tag, low, high in (
    ('Bandit', 'Phoenix', 'Dragon'),
    ('BanditTest', 'Trader', 'Librarian'),
    ('BanditProfessions', 'Teacher', 'Engineer'),
    ('BanditProfessionsTest', 'Librarian', 'Trader'),
    ('BanditRev', 'Engineer', 'Teacher'),
    ('BanditRevTest', 'Trader', 'Librarian'),
  ):
    env = envs[tag].env
    assert env.arms == ((low, high),) and envs[tag].budget == base.Budget(1, 1, 1)
    assert (env.low_reward, env.high_reward, env.high_probability) == (0.1, 1.0, 0.25)
  assert (len(envs['BanditPairs'].env.arms), len(envs['BanditPairsTest'].env.arms)) == (12, 8)


@pytest.mark.slow
def test_every_field_is_read_by_some_run(tmp_path, monkeypatch):
  """A short training run and a short warm start, with every access to the config written down."""
  read = set()
  original = ConfigDict.__getitem__

  def spy(self, key):
    read.add((id(self), key))
    return original(self, key)

  fields = dict(agent__max_response_tokens=8, eval__greedy_too=False, num_iterations=1, train__group_size=2)
  config = builders.small_config(
    **fields, optimizer__mini_batch_size=8, train__tags=('FrozenLake', 'SimpleSokoban'), train__groups=4,
    eval__tags=('FrozenLake', 'SimpleSokoban', 'Bandit'), eval__groups=3,
  )  # fmt: skip
  config.sft.steps, config.sft.batch_size, config.sft.levels = 1, 4, (8,)
  config.sft.output = str(tmp_path / 'out')
  monkeypatch.setattr(train, 'record_config', lambda *a, **k: None)
  monkeypatch.setattr(sft, 'record_config', lambda *a, **k: None)
  monkeypatch.setattr(export, 'compare_config', lambda *a, **k: None)
  monkeypatch.setattr(ConfigDict, '__getitem__', spy)
  train.train_and_evaluate(config, str(tmp_path / 'run'))
  sft.train_sft(config, str(tmp_path / 'sft'))
  config.sft.from_scratch, config.sft.output = True, str(tmp_path / 'fresh')
  sft.train_sft(config, str(tmp_path / 'sft_fresh'))
  export.export(config, str(tmp_path / 'run'))
  # Environments that no tag of these runs chose.
  build.env_groups(config, tuple(config.envs), (1,) * len(config.envs))
  plan.check_plan(config)
  checks.check_eval(config)
  monkeypatch.undo()

  def unread(part, prefix=''):
    for name, value in part.items():
      if isinstance(value, ConfigDict):
        yield from unread(value, f'{prefix}{name}.')
      elif (id(part), name) not in read:
        yield f'{prefix}{name}'

  assert not list(unread(config))


@pytest.mark.parametrize('name', sorted(path.stem for path in (ROOT / 'configs').glob('[a-z]*.py')))
def test_the_shipped_configs_can_run(name):
  config = importlib.import_module(f'configs.{name}').get_config()
  check_config(config)
  words = name.split('_')
  if name.endswith(('_ppo', '_grpo')):
    assert config.algorithm.adv_estimator == {'ppo': 'gae', 'grpo': 'grpo'}[words[-1]]
    tag = {'frozenlake': 'FrozenLake', 'sokoban': 'SimpleSokoban', 'bandit': 'Bandit'}.get(words[0])
    assert tag is None or (config.train.tags == (tag,) and tag in config.eval.tags)


def test_three_games_have_ppo_and_grpo():
  for game in ('frozenlake', 'sokoban', 'bandit'):
    ppo, grpo = (importlib.import_module(f'configs.{game}_{x}').get_config('qwen2.5-0.5b') for x in ('ppo', 'grpo'))
    # For real models nothing else differs.
    theirs = dict(builders.leaves(grpo))
    assert {name for name, value in builders.leaves(ppo) if theirs[name] != value} == {'algorithm.adv_estimator'}
    assert ppo.agent.max_response_tokens == (500 if game == 'bandit' else 400)


def test_a_variant_brings_the_settings_of_its_size():
  config = frozenlake_ppo.get_config('qwen2.5-0.5b')
  assert config.model.preset == 'qwen2.5-0.5b'
  assert (config.optimizer.actor_lr, config.optimizer.critic_lr) == (1e-6, 1e-5)
  assert (config.train.groups, config.train.group_size, config.agent.max_context) == (8, 16, 3600)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('algorithm.adv_estimator', 'ppo', r"algorithm\.adv_estimator='ppo'.*gae.*grpo"),
    ('algorithm.loss_agg_mode', 'mean', r"algorithm\.loss_agg_mode='mean'.*token-mean"),
    ('algorithm.clip_ratio_c', 0.5, r'algorithm\.clip_ratio_c=0\.5.*above 1'),
    ('algorithm.gamma', 1.5, r'algorithm\.gamma=1\.5.*between 0 and 1'),
    ('optimizer.mini_batch_size', 7, r'optimizer\.mini_batch_size=7.*divide.* 16'),
    ('optimizer.micro_batch_size', 3, r'optimizer\.micro_batch_size=3.*divide.* 8'),
    ('train.groups', 0, r'train\.groups=0'),
    ('train.tags', (), r'train\.tags'),
    ('train.tags', ('FrozenLake', 'Bandit', 'SimpleSokoban'), r'train\.groups=4.*multiple of.*3'),
    ('train.tags', ('Nowhere',), r"'Nowhere'.*FrozenLake"),
    ('train.tags', ('FrozenLake', 'FrozenLake'), r'named once'),
    ('train.tag_groups', (2, 2), r"train\.tag_groups=\(2, 2\).*for each of train\.tags=\('FrozenLake',\)"),
    ('train.tag_groups', (0,), r'train\.tag_groups=\(0,\).*positive'),
    ('train.tag_groups', (4.0,), r'train\.tag_groups=\(4\.0,\).*positive'),
    ('eval.tag_groups', (7,), r'eval\.tag_groups=\(7,\): must add up to eval\.groups=16, not 7'),
    ('envs.FrozenLake.symbols', 'P_OGX', r"envs\.FrozenLake.*symbols='P_OGX'; allowed: 6 different"),
    ('train.temperature', 0.0, r'train\.temperature=0\.0.*above 0'),
    ('train.first_level', 120, r'overlap'),
    ('eval.top_p', 0.0, r'eval\.top_p=0\.0'),
    ('envs.FrozenLake.p', 1.5, r'envs\.FrozenLake.*p=1\.5'),
    ('envs.FrozenLake.type', 'lake', r"envs\.FrozenLake.*'lake'.*frozen_lake"),
    ('envs.FrozenLake.max_turns', 0, r'envs\.FrozenLake\.max_turns=0'),
    ('envs.FrozenLake.max_turns', None, r'envs\.FrozenLake\.max_turns=None: must be a whole number of at least 1'),
    ('envs.FrozenLake.max_actions', True, r'envs\.FrozenLake\.max_actions=True: must be a whole number of at least 1'),
    ('envs.FrozenLake.type', None, r'envs\.FrozenLake\.type=None: must name an environment, such as frozen_lake'),
    ('agent.format_penalty', 0.1, r'agent\.format_penalty=0\.1'),
    ('logging.trajectories', 17, r'logging\.trajectories=17: must be at most logging\.episodes = 16'),
    ('logging.episodes_every', -1, r'logging\.episodes_every=-1'),
    ('model.preset', 'gpt', r"model\.preset='gpt'.*tiny"),
    ('model.path', '/does/not/exist', r"model\.path='/does/not/exist' does not exist"),
    ('model.dtype', 'int8', r"model\.dtype='int8'.*bfloat16"),
    ('seed', 500, r'seed=500.*at most 428'),
    ('train.top_p', 0.9, r"algorithm\.old_logprobs='sampler'.*'trainer'"),
  ],
)
def test_what_cannot_run_is_refused_in_one_line(field, value, message):
  config = builders.small_config()
  with config.unlocked():
    config.update_from_flattened_dict({field: value})
  with pytest.raises(UserError, match=message) as e:
    check_config(config)
  assert '\n' not in str(e.value)


@pytest.mark.parametrize('name', ['type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words'])
def test_an_environment_without_a_field_that_all_have_is_refused(name):
  config = builders.small_config()
  with config.unlocked():
    del config.envs.FrozenLake[name]
  with pytest.raises(UserError, match=rf'envs\.FrozenLake\.{name}=None: must ') as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_fractions_of_words_are_refused():
  config = builders.small_config(train__tags=('Own',))
  config.envs.unlock()
  config.envs.Own = {**config.envs.FrozenLake, 'max_words': 2.5}
  with pytest.raises(UserError, match=r'envs\.Own\.max_words=2\.5: must be a whole number of at least 1') as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_a_limit_of_sokoban_that_the_prompt_does_not_tell_is_refused():
  config = builders.small_config(train__tags=('SimpleSokoban',), envs__SimpleSokoban__max_steps=9)
  with pytest.raises(UserError, match=r'envs\.SimpleSokoban: max_steps=9; allowed: at least max_actions=10') as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_a_budget_that_the_solver_refuses_leaves_the_optimum_unknown(tmp_path, caplog):
  tags = ('FrozenLake', 'CoordFrozenLake', 'Bandit')
  config = builders.small_config(
    train__tags=tags, train__groups=6, eval__tags=tags, eval__groups=6, eval__group_size=2,
    envs__FrozenLake__max_actions=16, envs__FrozenLake__max_actions_per_turn=16,
  )  # fmt: skip
  check_config(config)
  evaluator = evaluate.Evaluator(config, builders.random_policy(config, tmp_path))
  optimal = evaluator.optimal()
  assert math.isnan(optimal['FrozenLake']) and 0 < optimal['CoordFrozenLake'] < 1 and optimal['Bandit'] == 1
  messages = [record.getMessage() for record in caplog.records if record.name == 'ragen_jax.agent.env_manager']
  assert len(messages) == 1 and '\n' not in messages[0]
  assert messages[0].startswith('envs.FrozenLake: the best possible success is not known (frozen_lake: budget.max_act')


def test_the_large_sudoku_can_be_filled():
  spec = build.env_groups(default.get_config(), ('Sudoku9x9',), (1,))[0]
  assert (spec.env.side, spec.env.empty_cells) == (9, 40)
  assert min(spec.budget.max_actions, spec.budget.max_turns * spec.budget.max_actions_per_turn) >= 40


def test_held_out_levels_of_a_file_are_not_trained_on(tmp_path):
  board = '######\n#@   #\n# $  #\n#  . #\n#    #\n######\n'
  for name in ('train', 'eval'):
    (tmp_path / f'{name}.txt').write_text(f'; 0\n{board}')
  config = builders.small_config(
    train__tags=('SimpleSokoban',), eval__tags=('CoordSokoban',),
    envs__SimpleSokoban__levels=str(tmp_path / 'train.txt'), envs__CoordSokoban__levels=str(tmp_path / 'eval.txt'),
  )  # fmt: skip
  check_config(config)
  config.envs.CoordSokoban.levels = str(tmp_path / '..' / tmp_path.name / 'train.txt')
  with pytest.raises(UserError, match=r'envs\.CoordSokoban\.levels=.*train\.tags, where SimpleSokoban plays it') as e:
    check_config(config)
  assert '\n' not in str(e.value)
  config.sft.tags, config.sft.levels, config.sft.batch_size = ('CoordSokoban',), (8,), 8
  with pytest.raises(UserError, match=r'must be none of sft\.tags, where CoordSokoban plays it'):
    check_sft(config)
  config.envs.SimpleSokoban.levels = str(tmp_path / 'none.txt')
  with pytest.raises(UserError, match=r"envs\.SimpleSokoban: levels='.*none\.txt'; allowed: a file") as e:
    check_config(config)
  assert '\n' not in str(e.value)


def test_processes_play_equal_numbers_of_groups(monkeypatch):
  monkeypatch.setattr(checks, 'row_share', lambda mesh: RowShare(shards=3, first=1, own=1))
  with pytest.raises(UserError, match=r'train\.groups=4: must be a multiple of 3, the parts'):
    check_config(builders.small_config())


def test_grpo_needs_a_group_to_compare_with():
  config = builders.small_config(algorithm__adv_estimator='grpo', train__group_size=1, train__groups=16)
  with pytest.raises(UserError, match=r'train\.group_size=1.*at least 2'):
    check_config(config)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], '--config=FILE is missing'),
    (['--config=configs/none.py'], 'there is no such file'),
    (['--config=configs/sft_tiny.py:big'], 'has no variants'),
    (['--config=configs/frozenlake_ppo.py', '--config.algorithm.gama=0.9'], "did you mean 'gamma'"),
    (['--config=configs/frozenlake_ppo.py', '--config.algorithm.gamma=much'], 'gamma=much: must be a number'),
    (['--config=configs/frozenlake_ppo.py', '--wordkir=x'], 'wordkir'),
    (['--config=configs/frozenlake_ppo.py', 'algorithm.gamma=0.9'], 'unknown argument'),
    (['--config=configs/frozenlake_ppo.py', '--config.model.path=tests'], 'no config.json'),
    (['--config=configs/frozenlake_ppo.py', '--config.optimizer.mini_batch_size=100'], 'must divide'),
    (['--config=configs/frozenlake_ppo.py', '--num_processes=2'], 'need --coordinator=HOST:PORT'),
    (
      ['--config=configs/frozenlake_ppo.py', '--coordinator=localhost:1', '--num_processes=2', '--process_id=2'],
      'which process this is, from 0',
    ),
    (
      ['--config=configs/frozenlake_ppo.py', '--coordinator=localhost', '--num_processes=2', '--process_id=1'],
      'as HOST:PORT',
    ),
    (['--config=configs/frozenlake_ppo.py', '--coordinator=auto', '--process_id=1'], 'must not be given'),
  ],
)
def test_the_command_line_tells_what_is_wrong_in_one_line_and_fails(tmp_path, arguments, message):
  workdir = tmp_path / 'run'
  result = subprocess.run(
    [sys.executable, 'main.py', *arguments, f'--workdir={workdir}'],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  lines = [line for line in result.stderr.splitlines() if line.strip()]
  assert result.returncode != 0
  assert len(lines) == 1 and lines[0].startswith('error: ') and message in lines[0], result.stderr
  assert not workdir.exists()
