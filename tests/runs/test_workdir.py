"""A workdir belongs to one config, and to one process at a time."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from flax import traverse_util

from configs import default
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.config_fields import BEFORE, flatten, free_in_training
from ragen_jax.runs.workdir import (
  changed_fields,
  compare_config,
  open_workdir,
  record_config,
  set_store_aside,
  workdir_lock,
)
from ragen_jax.utils.errors import UserError


def _begin(workdir):
  """As if a run had saved its first checkpoint there."""
  (pathlib.Path(workdir) / 'checkpoints' / '1').mkdir(parents=True)


@pytest.mark.parametrize('write', [True, False])
def test_an_empty_workdir_is_not_the_current_folder(tmp_path, monkeypatch, write):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=r'^the workdir is empty; name a directory$'), open_workdir('', write=write):
    pass
  assert not list(tmp_path.iterdir())


def test_before_the_first_checkpoint_another_config_may_take_the_workdir(tmp_path, caplog):
  for _ in range(2):
    record_config(tmp_path, {'seed': 0})
  assert not caplog.messages
  record_config(tmp_path, {'seed': 1})
  assert len(caplog.messages) == 1 and caplog.messages[0].endswith('with another config: seed was 0 and is 1')
  assert json.loads((tmp_path / 'config.json').read_text()) == {'seed': 1}
  (tmp_path / 'config.json').write_bytes(b'{"seed": \xff')  # damaged
  record_config(tmp_path, {'seed': 1})
  assert len(caplog.messages) == 2 and caplog.messages[1].endswith('was not a config that this program wrote')
  _begin(tmp_path)
  with pytest.raises(UserError, match='seed was 1 and is 2'):
    record_config(tmp_path, {'seed': 2})


@pytest.mark.parametrize('name', ['lr=[1e-3]', 'a\\b'])
def test_a_path_that_orbax_reads_as_a_pattern_is_refused(tmp_path, name):
  refused = pytest.raises(UserError, match=r'^--workdir=.*: no checkpoint can be saved below a path with .+;')
  with refused, open_workdir(str(tmp_path / name / 'run'), write=True):
    pass
  assert not (tmp_path / name).exists()
  with open_workdir(str(tmp_path / name), write=False):  # an earlier run's
    pass


@pytest.mark.parametrize('name', ['a b%20c#é', 'a*', 'why?', 'a[', 'q\'uo"te', 'x={1}', '~a', '$b'])
def test_checkpoints_below_other_paths_are_restored(tmp_path, name):
  with open_workdir(str(tmp_path / name), write=True) as workdir, Checkpointer(workdir, keep=1) as checkpointer:
    checkpointer.save(1, {'x': np.arange(3.0)})
    assert checkpointer.restore({'x': np.zeros(3)})[0]['x'].tolist() == [0, 1, 2]


def test_a_config_that_is_no_text_is_told(tmp_path):
  (tmp_path / 'config.json').write_bytes(b'\xff\xfe{')
  with pytest.raises(UserError, match='is not a config that this program wrote'):
    changed_fields(tmp_path, {'seed': 0})


def test_config_is_recorded_and_compared(tmp_path):
  workdir = tmp_path / 'runs' / 'a'
  config = {'seed': 0, 'train': {'num_iterations': 60, 'lr': 1e-3, 'betas': (0.9, 0.999)}, 'env': {'name': 'lake'}}
  free = frozenset({'train.num_iterations'})
  record_config(workdir, config, free)
  _begin(workdir)
  assert json.loads((workdir / 'config.json').read_text())['train'] == {
    'num_iterations': 60,
    'lr': 1e-3,
    'betas': [0.9, 0.999],
  }
  written = (workdir / 'config.json').stat().st_mtime_ns
  record_config(workdir, config, free)
  assert (workdir / 'config.json').stat().st_mtime_ns == written

  longer = {**config, 'train': {**config['train'], 'num_iterations': 100}}
  with pytest.raises(UserError, match=r'train.num_iterations was 60 and is 100; choose another --workdir'):
    record_config(workdir, longer)
  with pytest.raises(UserError, match=r'was 60 and is 100 \(the learning rate falls over it\); choose'):
    record_config(workdir, longer, reasons={'train.num_iterations': 'the learning rate falls over it'})
  record_config(workdir, longer, free)
  assert json.loads((workdir / 'config.json').read_text())['train']['num_iterations'] == 100

  other = {'seed': 1, 'train': {**longer['train'], 'lr': 1e-4}, 'env': {'name': 'lake', 'size': 4}}
  with pytest.raises(UserError) as error:
    record_config(workdir, other, free)
  assert str(error.value) == (
    f'workdir {workdir} belongs to another config: env.size was absent and is 4; seed was 0 and is 1; '
    'train.lr was 0.001 and is 0.0001; choose another --workdir or set these fields back'
  )
  assert sorted(path.name for path in workdir.iterdir()) == ['checkpoints', 'config.json']


def test_a_workdir_of_an_earlier_version_goes_on_with_the_fields_that_do_the_same(tmp_path):
  now = default.get_config().to_dict()
  for think, form in ((True, 'free_think'), (False, 'no_think')):
    old = default.get_config().to_dict()
    old['agent'] |= {'think': think}
    del old['agent']['format']
    for name in BEFORE:
      section, _, field = name.rpartition('.')
      if not section.startswith('envs.'):
        del old[section][field]
    old = {name: value for name, value in old.items() if value != {}}  # sections that are all new
    for env in old['envs'].values():
      env.pop('tile', None)
      if env.get('observation') == 'text':
        del env['observation']
    assert 'tile' in now['envs']['FrozenLake'] and now['envs']['FrozenLake']['observation'] == 'grid'
    workdir = tmp_path / form
    record_config(workdir, old)
    _begin(workdir)
    now['agent']['format'] = form
    compare_config(workdir, now)
    changed = changed_fields(workdir, now | {'reward': now['reward'] | {'state_reward': 1.0}})[1]
    assert changed == {'reward.state_reward': ('0.0', '1.0')}
    now['agent']['format'] = 'world_modeling'
    assert changed_fields(workdir, now)[1] == {'agent.format': (f'"{form}"', '"world_modeling"')}


def test_a_run_of_an_earlier_version_is_resumed(tmp_path):
  """A field that was added since must have its role and, if it matters to a run, its value of before."""
  text = (pathlib.Path(__file__).parent / 'fields_of_2026_11_26.txt').read_text()
  sections = [line.split(': ') for line in text.splitlines()]
  names = {f'{section}.{name}'.removeprefix('.') for section, fields in sections for name in fields.split()}
  now = default.get_config().to_dict()
  now['envs'] = {tag: now['envs'][tag] for tag in ('FrozenLake', 'Navigation', 'PlaceTwoCube')}
  flat = flatten(now)
  recorded = traverse_util.unflatten_dict({name: value for name, value in flat.items() if name in names}, sep='.')
  assert len(names & flat.keys()) > 200
  record_config(tmp_path, recorded)
  _begin(tmp_path)
  record_config(tmp_path, now, *free_in_training(now))


def test_config_values_that_are_hard_to_compare(tmp_path):
  config = {'nan': float('nan'), 'none': None, 'empty': {}, 'flag': True}
  record_config(tmp_path, config)
  _begin(tmp_path)
  record_config(tmp_path, config)
  with pytest.raises(UserError, match='flag was true and is 1;'):
    record_config(tmp_path, {**config, 'flag': 1})
  (tmp_path / 'config.json').write_text('{"seed": ')
  with pytest.raises(UserError, match=r'is not a config that this program wrote .*; choose another --workdir') as error:
    record_config(tmp_path, config)
  assert '\n' not in str(error.value)


def test_two_runs_cannot_share_a_workdir(tmp_path):
  with workdir_lock(tmp_path):
    with pytest.raises(UserError, match='is in use by another run') as error, workdir_lock(tmp_path):
      pass
    assert '\n' not in str(error.value)
  with workdir_lock(tmp_path):
    pass


def test_a_workdir_below_a_file_cannot_be_used(tmp_path):
  (tmp_path / 'file').touch()
  for use in (lambda: record_config(tmp_path / 'file', {}), lambda: workdir_lock(tmp_path / 'file').__enter__()):
    with pytest.raises(UserError, match=r'workdir .*/file cannot be used: it is a file'):
      use()


def test_comparing_writes_nothing(tmp_path):
  with pytest.raises(UserError, match=r'workdir .* holds no run: .*config.json cannot be read'):
    compare_config(tmp_path, {'seed': 0})
  record_config(tmp_path, {'seed': 0, 'train': {'groups': 4}})
  before = (tmp_path / 'config.json').read_bytes()
  other = {'seed': 1, 'train': {'groups': 4}, 'new': None}
  run, changed = changed_fields(tmp_path, other)
  assert run['seed'] == 0 and changed == {'seed': ('0', '1'), 'new': ('absent', 'null')}
  compare_config(tmp_path, other, {'seed', 'new'})
  with pytest.raises(UserError, match='belongs to another config: seed was 0 and is 1; give the flags'):
    compare_config(tmp_path, other, {'new'})
  assert (tmp_path / 'config.json').read_bytes() == before


@pytest.mark.parametrize('text', ['', '{"seed": ', '[1]', '3'])
def test_a_record_that_is_no_config_is_refused(tmp_path, text):
  (tmp_path / 'config.json').write_text(text)
  with pytest.raises(UserError, match=r'config.json is not a config that this program wrote') as error:
    compare_config(tmp_path, {'seed': 0})
  assert '\n' not in str(error.value)


def test_the_store_of_another_config_is_set_aside(tmp_path, caplog):
  told = []

  def record(**config):
    record_config(tmp_path, config, frozenset({'port'}), anew=lambda: told.append(config) or set_store_aside(tmp_path))

  record(seed=0, port=1)
  for name in ('agents.sqlite', 'agents.sqlite-wal', 'agents.sqlite.old-shm'):
    (tmp_path / name).write_text(name)
  record(seed=0, port=1)
  record(seed=0, port=2)  # the attempts are still those of the config
  assert not told
  record(seed=1, port=2)
  record(seed=1, port=2)
  found = {path.name: path.read_text() for path in tmp_path.glob('agents*')}
  assert found == {'agents.sqlite.old': 'agents.sqlite', 'agents.sqlite.old-wal': 'agents.sqlite-wal'}
  assert [m for m in caplog.messages if 'is renamed to agents.sqlite.old' in m]
  (tmp_path / 'config.json').write_text('{')
  record(seed=1, port=2)
  assert told == [{'seed': 1, 'port': 2}] * 2


def test_a_store_that_cannot_be_set_aside_leaves_the_record_as_it_is(tmp_path):
  record_config(tmp_path, {'seed': 0})
  (tmp_path / 'agents.sqlite').write_text('x')
  (tmp_path / 'agents.sqlite.old').mkdir()
  for _ in range(2):
    with pytest.raises(UserError, match=r'agents\.sqlite cannot be renamed to agents\.sqlite\.old: '):
      record_config(tmp_path, {'seed': 1}, anew=lambda: set_store_aside(tmp_path))
