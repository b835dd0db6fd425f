"""Demonstrations, the warm start that learns from them, and the checkpoint that ships."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil
import signal
import types
import unittest.mock

import numpy as np
import pytest
from safetensors import SafetensorError

from configs import sft_frozenlake, sft_sokoban, sft_tiny, sft_tiny_hybrid, sft_tiny_vl
from ragen_jax import build, train
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.language_model import param_state
from ragen_jax.config.checks import check_config, check_sft
from ragen_jax.evaluation.evaluator import Evaluator
from ragen_jax.models import presets
from ragen_jax.models.layers import is_frozen
from ragen_jax.modes import sft
from ragen_jax.runs.interrupt import Stopped
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.sft.demonstrations import DemonstrationStyle, Demonstrator
from ragen_jax.training.batches import TokenRows, sampled_columns
from ragen_jax.training.optimizer_step import SKIPPED
from ragen_jax.utils.errors import Diverged, UserError
from tests.support import learning
from tests.support.configs import leaves, small_config
from tests.support.paths import ROOT


@pytest.mark.slow
def test_a_warm_start_from_scratch_learns_the_format_and_can_be_loaded(tmp_path):
  config = small_config(
    sft__tags=('Bandit',), sft__levels=(512,), sft__steps=120, sft__batch_size=32, sft__learning_rate=5e-3,
    sft__from_scratch=True, sft__shape=(32, 2, 4, 2, 8, 64), sft__output=str(tmp_path / 'out'),
    eval__tags=('Bandit',), eval__groups=64, length_step=16,
  )  # fmt: skip
  sft.train_sft(config, str(tmp_path / 'sft'))
  config.model.path = str(tmp_path / 'out')
  policy = build.load_policy(config)
  metrics = build.make_evaluator(config, policy)(param_state(policy.model)).metrics
  assert metrics['val-env/Bandit/action_is_valid'] > 0.95  # a random model writes no valid reply in a thousand
  assert metrics['val-greedy/Bandit/success'] > 0.95


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(('success_rate', 'noise'), [(1 / 3, 0.0), (1.0, 0.8)])
def test_the_value_head_learns_what_the_demonstrations_earn(tmp_path, success_rate, noise):
  config = small_config(
    sft__tags=('FrozenLake',), sft__levels=(1024,), sft__steps=250, sft__batch_size=32, sft__learning_rate=5e-3,
    sft__from_scratch=True, sft__shape=(32, 2, 4, 2, 8, 64), sft__output=str(tmp_path / 'out'), sft__value_coef=5.0,
    envs__FrozenLake__size=2, envs__FrozenLake__max_turns=1, envs__FrozenLake__max_actions=1, eval__groups=8,
    envs__FrozenLake__success_rate=success_rate, length_step=64, sft__noise=noise,
  )  # fmt: skip
  sft.train_sft(config, str(tmp_path / 'sft'))
  config.model.path = str(tmp_path / 'out')
  policy = build.load_policy(config)
  specs = build.env_specs(config, ('FrozenLake',), (256,))
  context, limits = build.context_manager(config, policy.tokenizer, specs), build.episode_limits(config, specs)
  style = build.fill(DemonstrationStyle, config.sft, discount=0.97, noise=noise or 0.5, hurry=0.5)
  demonstrator = Demonstrator(np.random.default_rng(9), style)
  proxy = AgentProxy(EnvStateManager(specs, 1), context, limits)
  rollout = proxy.rollout(demonstrator, 5000)
  trajectory = rollout.trajectory
  scoring = learning.scoring()
  columns, mask = sampled_columns(trajectory.loss_mask)
  # The solver's only action earns 1 with the best probability of success; with noise, most actions are random.
  best = np.repeat(proxy.envs.optimal(), mask.sum(axis=1))
  earned = np.repeat([sum(e.turns[0].rewards) for e in rollout.episodes], mask.sum(axis=1))
  _, _, values = learning.score(policy.model, TokenRows(trajectory.tokens, columns, mask), scoring)
  assert best.std() > 0.1  # the goal is beside the player, where slips may miss it, or out of reach
  values, correlation = np.asarray(values)[mask], np.corrcoef(np.asarray(values)[mask], best)[0, 1]
  if noise:
    assert correlation > 0.5 and best.mean() - earned.mean() > 0.15  # a head of optimal play fails the next line
    assert abs(values.mean() - earned.mean()) < 0.05
  else:
    assert correlation > 0.7 and abs(values.mean() - best.mean()) < 0.1
  # A warm start that does not train the head hands it on.
  config.sft.update(from_scratch=False, value_coef=0.0, steps=2, output=str(tmp_path / 'again'))
  sft.train_sft(config, str(tmp_path / 'sft_again'))
  for name in ('out', 'again'):
    config.model.path = str(tmp_path / name)
    assert float(build.load_policy(config).model.value_head.bias[...]) == float(policy.model.value_head.bias[...])


@pytest.mark.parametrize(('data', 'frozen', 'named'), [(2, 'float32 a', 'data'), (1, 'float32 b', 'frozen weights')])
def test_a_warm_start_does_not_go_on_with_other_data_or_other_frozen_weights(data, frozen, named):
  meta = {'data': 1, 'unsaved': {'frozen': 'float32 a'}}
  checkpointer = types.SimpleNamespace(
    set_damaged_aside=lambda: None, latest_step=lambda: 3, restore=lambda like: ({}, meta), meta=lambda step: meta
  )
  trainer = types.SimpleNamespace(state=types.SimpleNamespace(saved=dict, with_saved=lambda arrays, iteration: 'on'))
  assert sft._restore(trainer, checkpointer, meta, 'x', 9) == (3, None) and trainer.state == 'on'
  trainer.state = types.SimpleNamespace(saved=dict)
  with pytest.raises(UserError, match=f'^--workdir=x: the .*{named}'):
    sft._restore(trainer, checkpointer, {'data': data, 'unsaved': {'frozen': frozen}}, 'x', 9)


# -- a whole warm start ------------------------------------------------------------------------------------------------


def _quick(tmp_path, name, **fields):
  config = small_config(
    sft__tags=('Bandit',), sft__levels=(64,), sft__steps=20, sft__batch_size=8, sft__learning_rate=1e-3,
    sft__hurry=0.0, sft__val_fraction=0.1, sft__output=str(tmp_path / name / 'model'), eval__tags=('Bandit',),
    eval__greedy_too=False, **fields,
  )  # fmt: skip
  return config, str(tmp_path / name / 'run')


def _lines(workdir):
  """What was logged, times left out."""
  return [{k: x for k, x in line.items() if not k.startswith('perf/')} for line in read_metrics(workdir)]


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A warm start with adapters and packing that nothing stopped, with two evaluations."""
  tmp_path = tmp_path_factory.mktemp('whole')
  config, workdir = _quick(tmp_path, 'a', lora__rank=4, sft__packing=True, sft__eval_every=10)
  config.sft.save_data = str(tmp_path / 'play.jsonl')
  sft.train_sft(config, workdir)
  return config, workdir


def test_a_warm_start_that_begins_anew_with_another_config_has_a_tracker_run_of_its_own(tmp_path, monkeypatch):
  """With the record of the earlier one, steps before its last one would not be sent."""

  def ends(*_):
    raise UserError('the end')

  monkeypatch.setattr(sft, '_examples', ends)
  config, workdir = _quick(tmp_path, 'a')
  record = pathlib.Path(workdir) / 'tracker.json'
  for rate, kept in ((1e-3, True), (1e-3, True), (2e-3, False)):
    config.sft.learning_rate = rate
    record.parent.mkdir(exist_ok=True, parents=True)
    record.write_text('{}')
    with pytest.raises(UserError, match=r'^the end$'):
      sft.train_sft(config, workdir)
    assert record.exists() == kept


@pytest.mark.slow
def test_metrics_are_written_and_explained(whole):
  _, workdir = whole
  lines = _lines(workdir)
  assert [line['step'] for line in lines] == [10, 20]
  page = (ROOT / 'docs' / 'metrics.md').read_text()
  names = {name for line in lines for name in line if name.startswith('sft/')}
  assert names == {'sft/loss', 'sft/grad_norm', 'sft/lr', 'sft/columns_per_token', 'sft/skipped_steps', 'sft/val_loss'}
  for name in names | {'sft/value_loss', 'sft/val_value_loss'}:
    assert f'`{name}`' in page
  assert lines[1]['sft/val_loss'] < lines[0]['sft/val_loss']
  assert all('val-env/success' in line and line['monitor/grad_norm_spike'] in (0, 1) for line in lines)
  assert lines[1]['sft/lr'] == pytest.approx(1e-4, rel=0.2) and lines[0]['sft/lr'] > 4e-4
  assert (pathlib.Path(workdir) / 'tb').is_dir() and (pathlib.Path(workdir) / 'trajectories.html').is_file()


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on_to_the_same_end(whole, tmp_path, monkeypatch):
  reference, workdir = whole
  config = reference.copy_and_resolve_references()
  config.sft.output = str(tmp_path / 'model')
  shutil.copytree(reference.sft.output, config.sft.output)  # an earlier output stays until the new one is whole
  earlier = {p.name: p.read_bytes() for p in (tmp_path / 'model').iterdir()}
  original = sft.SftTrainer.step

  def step(self, batches):
    step.count += 1
    if step.count == 7:
      signal.raise_signal(signal.SIGINT)
    return original(self, batches)

  step.count = 0
  monkeypatch.setattr(sft.SftTrainer, 'step', step)
  with pytest.raises(KeyboardInterrupt):
    sft.train_sft(config, str(tmp_path / 'run'))
  assert {p.name: p.read_bytes() for p in (tmp_path / 'model').iterdir()} == earlier
  shutil.rmtree(tmp_path / 'model')
  sft.train_sft(config, str(tmp_path / 'run'))
  assert step.count == 20  # none of the 7 was taken again
  assert _lines(tmp_path / 'run') == _lines(workdir)  # floats, to the last bit
  ours, theirs = (pathlib.Path(c.sft.output) / 'model.safetensors' for c in (config, reference))
  assert ours.read_bytes() == theirs.read_bytes()
  # Finished: nothing is trained, and the output is there again.
  shutil.rmtree(tmp_path / 'model')
  sft.train_sft(config, str(tmp_path / 'run'))
  assert step.count == 20 and ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize('when', ['step', 'evaluation'])
def test_a_signal_saves_the_step_that_it_stops(tmp_path, monkeypatch, when):
  config, workdir = _quick(tmp_path, 'signal', eval__groups=4)
  config.sft.update(steps=4, eval_every=2)
  owner, name = {'step': (sft.SftTrainer, 'step'), 'evaluation': (Evaluator, '__call__')}[when]
  original, steps = getattr(owner, name), []

  def interrupted(self, *args, **kwargs):
    if not steps:
      signal.raise_signal(signal.SIGTERM)
    steps.append(when)
    return original(self, *args, **kwargs)

  monkeypatch.setattr(owner, name, interrupted)
  with pytest.raises(Stopped) as e:
    sft.train_sft(config, workdir)
  assert e.value.status == 143 and len(steps) == 1
  saved = [path.name for path in (pathlib.Path(workdir) / 'checkpoints').iterdir()]
  assert saved == [{'step': '1', 'evaluation': '2'}[when]]


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_not_saved_when_a_signal_comes_in_the_evaluation(tmp_path, monkeypatch):
  config, workdir = _quick(tmp_path, 'signal', eval__groups=4)
  config.sft.update(steps=4, eval_every=2)
  play = Evaluator.__call__

  def interrupted(self, *args, **kwargs):
    signal.raise_signal(signal.SIGTERM)
    return play(self, *args, **kwargs)

  monkeypatch.setattr(Evaluator, '__call__', interrupted)
  monkeypatch.setattr(sft.SftTrainer, 'has_finite_loss', lambda self, batches: False)
  with pytest.raises(Stopped):
    sft.train_sft(config, workdir)
  assert not list((pathlib.Path(workdir) / 'checkpoints').glob('*'))


@pytest.mark.slow
def test_a_warm_start_whose_numbers_are_not_finite_fails_and_writes_nothing(tmp_path, capsys):
  config, workdir = _quick(tmp_path, 'bad')
  config.sft.update(learning_rate=1e30, eval_every=0, checkpoint_every=1)
  with pytest.raises(
    Diverged,
    match=r'^step 4: not finite: new weights policy/embed_tokens and .* more; the newest checkpoint is that of step 1',
  ) as e:
    sft.train_sft(config, workdir)
  assert e.value.status == 1 and '\n' not in str(e.value)
  # The first step has a learning rate of 0; the others were skipped, and are not saved.
  assert [p.name for p in (tmp_path / 'bad' / 'run' / 'checkpoints').iterdir()] == ['1']
  assert not (tmp_path / 'bad' / 'model').exists()
  told = capsys.readouterr().err
  for step in (2, 3, 4):
    assert f'step {step}: skipped, because not finite: new weights policy/embed_tokens and ' in told


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_spike_is_told_in_a_line_and_on_the_metrics_and_changes_nothing(tmp_path, monkeypatch, capsys):
  config, workdir = _quick(tmp_path, 'spike')
  config.update_from_flattened_dict({'sft.learning_rate': 0.0, 'monitor.baseline_steps': 3})
  watched = sft.SftTrainer.watched
  norms = iter([1.0] * 12 + [50.0] + [1.0] * 7)
  monkeypatch.setattr(
    sft.SftTrainer, 'watched', lambda self, found: watched(self, found) | {sft.GRAD_NORM: next(norms)}
  )
  sft.train_sft(config, workdir)
  line = 'step 13: sft/grad_norm is 50, 50.0 times its usual 1 (monitor.spike_factor)'
  assert capsys.readouterr().err.splitlines().count(line) == 1
  assert [x['monitor/grad_norm_spike'] for x in _lines(workdir)] == [0, 1]


@pytest.mark.slow
def test_a_warm_start_whose_last_evaluation_is_not_finite_fails_and_writes_nothing(tmp_path, monkeypatch):
  config, workdir = _quick(tmp_path, 'bad', eval__groups=4)
  config.sft.update(steps=2, checkpoint_every=1)
  play, played = Evaluator.__call__, []

  def evaluate(self, params, step=0):
    played.append(step)
    bad = '' if len(played) > 1 else '7 of 9 sampled log-probs (row 0)'
    return dataclasses.replace(play(self, params, step), not_finite=bad)

  monkeypatch.setattr(Evaluator, '__call__', evaluate)
  message = (
    r'^step 2: not finite in the evaluation: 7 of 9 sampled log-probs \(row 0\); .* of step 1, sft\.output was not'
  )
  with pytest.raises(Diverged, match=message) as e:
    sft.train_sft(config, workdir)
  assert e.value.status == 1 and '\n' not in str(e.value)
  assert not (tmp_path / 'bad' / 'model').exists()
  # The checkpoint is the one before, so the same command takes the last step and evaluates again.
  sft.train_sft(config, workdir)
  assert played == [2, 2] and (tmp_path / 'bad' / 'model').exists()


@pytest.mark.slow
def test_an_output_that_cannot_be_written_costs_no_step(tmp_path, monkeypatch):
  config, workdir = _quick(tmp_path, 'full', eval__groups=4)
  config.sft.update(steps=2)
  original, steps = sft.SftTrainer.step, []
  monkeypatch.setattr(sft.SftTrainer, 'step', lambda self, batches: steps.append(1) or original(self, batches))
  with monkeypatch.context() as full:
    error = SafetensorError('I/O error: No space left on device')
    full.setattr('ragen_jax.models.checkpoint.save.save_file', unittest.mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=r'model: the model was not written: I/O error: No space left on device; '):
      sft.train_sft(config, workdir)
  assert [path.name for path in (pathlib.Path(workdir) / 'checkpoints').iterdir()] == ['2']
  assert not (tmp_path / 'full' / 'model').exists()
  sft.train_sft(config, workdir)
  assert len(steps) == 2 and (tmp_path / 'full' / 'model' / 'model.safetensors').exists()


@pytest.mark.slow
def test_a_workdir_of_other_data_is_refused(whole, monkeypatch):
  config, workdir = whole
  monkeypatch.setattr(sft, 'record_config', lambda *a, **k: None)
  config = config.copy_and_resolve_references()
  config.sft.first_level += 1000
  config.sft.save_data = ''  # what was written stays for the next test
  with pytest.raises(
    UserError, match=r'--workdir=.*: the training data has changed since the checkpoint; choose another'
  ) as e:
    sft.train_sft(config, workdir)
  assert '\n' not in str(e.value)


@pytest.mark.slow
def test_training_in_the_workdir_of_a_warm_start_is_refused(whole):
  config, workdir = whole
  with pytest.raises(UserError, match=r'--workdir=.*: its checkpoints belong to a warm start; choose another'):
    train.train_and_evaluate(config, workdir)


@pytest.mark.slow
def test_a_file_of_the_same_play_is_learnt_as_the_play_itself(whole, tmp_path):
  config, workdir = whole
  config = config.copy_and_resolve_references()
  path, config.sft.save_data, config.sft.output = config.sft.save_data, '', str(tmp_path / 'model')
  assert len(pathlib.Path(path).read_text().splitlines()) == 64
  config.sft.data = path
  sft.train_sft(config, str(tmp_path / 'run'))
  assert _lines(tmp_path / 'run') == _lines(workdir)  # floats, to the last bit
  ours, theirs = (pathlib.Path(c.sft.output) / 'model.safetensors' for c in (config, whole[0]))
  assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_held_out_boards_are_not_demonstrated(tmp_path, monkeypatch, caplog):
  shown = []

  def join(parts, sight, params):
    del sight, params
    rows = parts[0].trajectory
    shown.append([tokenizer.decode(row[:n]) for row, n in zip(rows.tokens, rows.length, strict=True)])
    raise KeyboardInterrupt

  monkeypatch.setattr(sft, 'join', join)
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  # Of few boards, some come up in any 32.
  fields = {'tags': ('FrozenLake',), 'levels': (32,), 'batch_size': 8, 'output': str(tmp_path / 'model')}
  config = small_config(envs__FrozenLake__size=2, eval__groups=4, envs__FrozenLake__max_turns=1)
  config.sft.update(fields)
  for skipped in (False, True):
    config.sft.skip_held_out = skipped
    caplog.clear()
    with caplog.at_level('INFO'), pytest.raises(KeyboardInterrupt):
      sft.train_sft(config, str(tmp_path / 'run'))
    # What takes long is said before it begins.
    told = ['finding the levels that are not demonstrated, those of the evaluations of this config'] if skipped else []
    told += ['FrozenLake, free_think: the solver plays 32 levels', 'FrozenLake, free_think: 32 demonstrations in']
    lines = [r.getMessage() for r in caplog.records if r.name.startswith(('ragen_jax.sft', 'ragen_jax.modes'))]
    assert [line[: len(start)] for line, start in zip(lines, told, strict=True)] == told
  envs = EnvStateManager(build.env_specs(config, ('FrozenLake',), (4,)), 1)
  boards = [f'State:\n{board}\n' for board in envs.reset(config.eval.first_level)]
  found = [sum(any(board in text for board in boards) for text in texts) for texts in shown]
  assert found[0] > 0 and found[1] == 0


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('module', [sft_frozenlake, sft_sokoban])
@pytest.mark.parametrize('model', ['', 'tiny-lora', 'qwen2.5-0.5b', 'qwen2.5-3b-lora'])
def test_the_shipped_configs_can_run(module, model):
  config = module.get_config(model)
  check_config(config, weights=False)
  check_sft(config)
  assert set(config.sft.tags) == set(config.eval.tags)
  assert (config.lora.rank > 0) == model.endswith('-lora')


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('module', [sft_tiny, sft_tiny_hybrid])
def test_the_config_of_a_built_in_model_makes_a_model(tmp_path, module):
  """As README has it, on fewer levels of its three games, whose episodes have different numbers of turns."""
  config = module.get_config()
  config.sft.levels, config.sft.steps, config.eval.groups = (40, 30, 20), 2, 3
  config.sft.output = str(tmp_path / 'tiny')
  sft.train_sft(config, str(tmp_path / 'run'))
  config.model.path = config.sft.output
  assert build.load_policy(config).model.policy.cfg == presets.shape(config.model.preset, '')


def test_the_built_in_hybrid_is_made_as_the_built_in_model():
  tiny, hybrid = (dict(leaves(module.get_config())) for module in (sft_tiny, sft_tiny_hybrid))
  differ = {'model.preset', 'sft.output', 'sft.shape', 'sft.linear_layers', 'sft.levels', 'sft.steps'}
  assert {name for name in tiny if tiny[name] != hybrid[name]} == differ
  files = [pathlib.Path(presets.resolve(name, ''), 'tokenizer.json') for name in (presets.TINY, presets.TINY_HYBRID)]
  assert files[0].read_text() == files[1].read_text()


def test_a_file_with_fewer_conversations_than_a_batch_is_refused(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text(json.dumps({'messages': [{'role': 'assistant', 'content': 'yes'}]}) * 1)
  config, workdir = _quick(tmp_path, 'few', sft__data=str(path))
  with pytest.raises(UserError, match=r'sft\.batch_size=8: must be at most the number of training conversations, 0'):
    sft.train_sft(config, workdir)
  config.sft.data = str(tmp_path / 'none.jsonl')
  with pytest.raises(UserError, match=re.escape(f'sft.data={config.sft.data!r}: cannot be read: No such file')):
    sft.train_sft(config, workdir)


# -- lessons -----------------------------------------------------------------------------------------------------------


def test_the_levels_of_a_tag_are_divided_among_the_forms():
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  config = small_config({'sft.tags': ('FrozenLake', 'Bandit'), 'sft.levels': (9, 4), 'sft.first_level': 100})
  one = sft.lessons(config, tokenizer)
  assert [(x.spec.tag, x.context.settings.format, x.first_level, x.spec.num_groups) for x in one] == [
    ('FrozenLake', 'free_think', 100, 9), ('Bandit', 'free_think', 100, 4),
  ]  # fmt: skip
  config.sft.forms = ('no_think', 'world_modeling')
  two = sft.lessons(config, tokenizer)
  assert [(x.spec.tag, x.context.settings.format, x.first_level, x.spec.num_groups) for x in two] == [
    ('FrozenLake', 'no_think', 100, 4), ('Bandit', 'no_think', 100, 2),
    ('FrozenLake', 'world_modeling', 104, 4), ('Bandit', 'world_modeling', 102, 2),
  ]  # fmt: skip
  assert config.agent.format == 'free_think'


def test_the_first_steps_learn_from_first_replies(tmp_path, monkeypatch):
  lengths = []

  def cut(data, rows, **_):
    lengths.append(int(data.length[rows].max()))
    if len(lengths) == 4:
      raise KeyboardInterrupt
    return []

  monkeypatch.setattr(sft, 'batches', cut)
  monkeypatch.setattr(sft.SftTrainer, 'step', lambda self, batches: (np.zeros(2), {SKIPPED: 0, sft.GRAD_NORM: 0.0}))
  config, workdir = _quick(tmp_path, 'short')
  config.sft.update(tags=('FrozenLake',), levels=(16,), short_steps=2)
  with pytest.raises(KeyboardInterrupt):
    sft.train_sft(config, workdir)
  assert max(lengths[:2]) < min(lengths[2:])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fresh_model_that_sees_learns_from_images_and_can_be_loaded(tmp_path):
  config = sft_tiny_vl.get_config()
  config.sft.update(
    levels=(40, 40), steps=4, short_steps=2, batch_size=16, output=str(tmp_path / 'model'), skip_held_out=False,
    tower=(16, 1, 2, 16), shape=(32, 2, 4, 2, 8, 64),
  )  # fmt: skip
  config.eval.update(groups=4, group_size=1, greedy_too=False)
  config.compilation_cache = ''
  sft.train_sft(config, str(tmp_path / 'run'))
  line = _lines(tmp_path / 'run')[-1]
  assert np.isfinite(line['sft/loss']) and 'val-env/FrozenLake/success' in line
  config.model.path = str(tmp_path / 'model')
  policy = build.load_policy(config)
  assert policy.processor.factor == 8 and not is_frozen(policy.model.policy.visual)
  claim = '; the hole is above and to the left'
  assert all(len(policy.tokenizer.encode(text)) == 1 for text in (claim, '</prediction>', ', the box is at '))


@pytest.mark.slow
def test_the_built_in_model_that_sees_has_the_tokens_of_todays_prompts(tmp_path):
  config = sft_tiny_vl.get_config()
  specs = build.env_specs(config, config.sft.tags, config.sft.levels)
  sft._fresh_policy(config, specs, str(tmp_path))
  shipped = pathlib.Path(presets.resolve(presets.TINY_VL, ''))
  for name in ('tokenizer.json', 'tokenizer_config.json', 'preprocessor_config.json'):
    assert json.loads((tmp_path / name).read_text()) == json.loads((shipped / name).read_text()), name


def test_a_workdir_of_a_training_run_is_refused():
  of_training = types.SimpleNamespace(
    set_damaged_aside=lambda: None, latest_step=lambda: 2, meta=lambda step: {'iteration': step}
  )
  with pytest.raises(UserError, match=r'^--workdir=a: its checkpoints belong to a training run; choose another'):
    sft._restore(None, of_training, {'data': ''}, 'a', 5)
