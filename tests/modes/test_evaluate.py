"""`--mode=eval`: its numbers are those of training's evaluations, it leaves runs alone, and it says what is wrong."""

from __future__ import annotations

import json
import logging
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

import ragen_jax
from ragen_jax import build
from ragen_jax.agent.language_model import param_state
from ragen_jax.evaluation.evaluator import Evaluator
from ragen_jax.models import lora
from ragen_jax.modes import chosen_checkpoint, evaluate, export
from ragen_jax.runs.checkpoints import Checkpointer
from ragen_jax.runs.config_fields import free_in_training
from ragen_jax.runs.workdir import record_config
from ragen_jax.training.run_log import BEST
from ragen_jax.utils.errors import Diverged, UserError
from ragen_jax.viewer.store import read_episodes
from tests.support.chat_server import server
from tests.support.configs import small_config
from tests.support.events import read_events
from tests.support.experts import expert_section
from tests.support.paths import ROOT
from tests.support.processes import copy_main

# Few turns and one number of rows: few programs.
FIELDS = dict(
  eval__groups=8, eval__group_size=2, logging__episodes=2, logging__trajectories=2, agent__drop_finished=False,
  envs__FrozenLake__max_turns=2,
)  # fmt: skip


def _run(workdir, amount=0.02, **fields):
  """A workdir with two checkpoints, the first of them the best. The policy gets the weights of the second.

  Args:
    workdir: where.
    amount: how far the weights are moved from those that the run began with.
    **fields: of the config.
  """
  config = small_config(**FIELDS | fields)
  policy = build.load_policy(config)
  trained, frozen = lora.partition(param_state(policy.model))
  record_config(workdir, config.to_dict())
  with Checkpointer(workdir, keep=2, save_best=BEST) as checkpointer:
    for step, score in ((1, 0.4), (2, 0.3)):
      rng = np.random.default_rng(step)
      moved = jax.tree.map(lambda x, rng=rng: x + amount * rng.normal(size=x.shape).astype(np.float32), trained)
      checkpointer.save(step, {'params': moved}, metrics={BEST: score})
  nnx.update(policy.model, lora.join(moved, frozen))
  return config, policy


def _files(directory) -> dict[str, bytes]:
  return {str(p.relative_to(directory)): p.read_bytes() for p in pathlib.Path(directory).rglob('*') if p.is_file()}


def _events(path) -> list[tuple[int, str, float]]:
  events = read_events(path)
  return [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]


@pytest.fixture(scope='module')
def full_run(tmp_path_factory):
  workdir = tmp_path_factory.mktemp('full')
  return workdir, *_run(workdir)


@pytest.fixture(scope='module')
def evaluated(full_run, tmp_path_factory):
  """A run evaluated on another set of tags than it was trained with: (workdir, config, policy, found, shown)."""
  workdir, config, policy = full_run
  workdir = pathlib.Path(shutil.copytree(workdir, tmp_path_factory.mktemp('evaluated') / 'run'))
  config = config.copy_and_resolve_references()
  config.eval.tags = ('FrozenLake', 'Bandit')
  config.num_iterations, config.algorithm.gamma = 7, 0.5  # no business of the weights
  before = _files(workdir)
  found = evaluate.evaluate(config, str(workdir), given=True)
  assert {name: x for name, x in _files(workdir).items() if name in before} == before
  return workdir, config, policy, found


@pytest.mark.slow
def test_the_models_numbers_are_those_of_the_evaluator(evaluated):
  _, config, policy, found = evaluated
  metrics = build.make_evaluator(config, policy)(param_state(policy.model)).metrics
  compared = 0
  for row in found['rows']:
    if row['kind'] == 'model':
      prefix = 'val-greedy' if row['sampling'] == 'greedy' else 'val-env'
      for name, interval in row['metrics'].items():
        told = metrics.get(f'{prefix}/{row["tag"]}/{name}')
        if told is not None:
          mean = 0 if name == 'action_is_effective' and interval['mean'] is None else interval['mean']  # no actions
          assert mean == pytest.approx(told, abs=1e-6), name
          assert interval['low'] is None or interval['low'] <= interval['mean'] + 1e-9 <= interval['high'] + 2e-9
          compared += 1
  assert compared == len(metrics) > 30


@pytest.mark.slow
def test_a_checkpoint_is_loaded_for_an_evaluator(full_run):
  workdir, config, policy = full_run
  for step, is_last in (('latest', True), (2, True), ('best', False)):
    loaded, params = ragen_jax.load_checkpoint(config, str(workdir), step)
    same = jax.tree.map(np.array_equal, params, param_state(policy.model))
    assert all(jax.tree.leaves(same)) == is_last and loaded.tokenizer.size == policy.tokenizer.size
  with pytest.raises(UserError, match=r"^step='3': must be latest, best or one of 1, 2$"):
    ragen_jax.load_checkpoint(config, str(workdir), 3)


def test_levels_that_follow_those_of_another_tag_are_told(tmp_path, caplog):
  """A tag's levels begin where those of the tag before it end, so those of FrozenLake depend on the order."""
  config = small_config(eval__groups=8)
  record_config(tmp_path, config.to_dict())
  changed = config.copy_and_resolve_references()
  for tags, told in ((('FrozenLake', 'Bandit'), []), (('Bandit', 'FrozenLake'), ['8 of 8 levels'])):
    caplog.clear()
    changed.eval.update({'tags': tags, 'groups': 16})
    evaluate._warn_of_other_levels(changed, str(tmp_path), ['FrozenLake'], warm_start=False)
    assert [re.match('[0-9]+ of [0-9]+ levels', r.getMessage())[0] for r in caplog.records] == told


@pytest.mark.slow
def test_levels_that_training_did_not_hold_out_are_told(full_run, tmp_path, caplog):
  workdir, config, _ = full_run
  workdir = shutil.copytree(workdir, tmp_path / 'run')

  caplog.set_level(logging.INFO)

  def told(**fields):
    caplog.clear()
    changed = config.copy_and_resolve_references()
    changed.eval.update({'baselines': (), 'greedy_too': False, 'group_size': 1} | fields)
    evaluate.evaluate(changed, str(workdir), given=True)
    return [r.getMessage() for r in caplog.records if 'not those that training' in r.getMessage()]

  assert told() == told(groups=4) == told(tags=('Bandit',)) == []
  (line,) = told(groups=12)
  assert re.match(r'4 of 12 levels are not .*eval\.first_level=\d+, eval\.groups=8\)', line)
  (line,) = told(first_level=config.eval.first_level + 4)
  assert line.startswith('4 of 8 levels')
  # Runs of earlier versions lack fields, and may have environments that this config does not know.
  record = json.loads((workdir / 'config.json').read_text())
  del record['eval']['tag_groups']
  (workdir / 'config.json').write_text(json.dumps(record))
  assert len(told(groups=12)) == 1
  record['eval']['tags'], record['envs']['Mine'] = ['FrozenLake', 'Mine'], {'type': 'gone:Away'}
  (workdir / 'config.json').write_text(json.dumps(record))
  assert told(groups=12) == [] and 'the levels that training held out are not known' in caplog.text


@pytest.mark.slow
def test_the_json_is_as_the_matrix_reads_it(evaluated):
  workdir, config, _, found = evaluated
  path = pathlib.Path(found.pop('path'))
  assert path == workdir / 'evaluation' / 'step_2_FrozenLake_Bandit.json'
  assert json.loads(path.read_text()) == found
  assert (found['version'], found['model'], found['checkpoint'], found['trained_on'], found['seed']) == (
    1, 'tiny', 2, ['FrozenLake'], 0
  )  # fmt: skip
  assert found['eval'] == json.loads(json.dumps(config.eval.to_dict()))
  order = [(row['tag'], row['policy'], row['kind'], row['sampling']) for row in found['rows']]
  assert order == [
    (tag, *policy)
    for tag in ('FrozenLake', 'Bandit')
    for policy in (
      ('checkpoint 2', 'model', 'temperature 0.5'),
      ('checkpoint 2', 'model', 'greedy'),
      ('random', 'random', ''),
      ('solver', 'solver', ''),
    )
  ]
  for row in found['rows']:
    assert (row['levels'], row['episodes']) == (4, 8)
    assert {'success', 'pass@1', 'pass@2', 'episodic_return', 'num_actions', 'num_turns', 'action_is_valid'} | {
      'response_length', 'fraction_of_optimal'
    } <= set(row['metrics'])  # fmt: skip
    assert all(set(x) == {'mean', 'low', 'high'} for x in row['metrics'].values())
  solver = {row['tag']: row['metrics'] for row in found['rows'] if row['kind'] == 'solver'}
  assert solver['Bandit']['success']['mean'] == solver['Bandit']['fraction_of_optimal']['mean'] == 1
  found['path'] = str(path)


@pytest.mark.slow
def test_tensorboard_has_a_run_for_each_policy_and_episodes_have_a_page(evaluated):
  workdir, _, _, found = evaluated
  runs = {p.parent.name: {tag: (step, x) for step, tag, x in _events(p)} for p in (workdir / 'tb').rglob('*tfevents*')}
  assert sorted(runs) == ['greedy', 'random', 'sampled', 'solver']
  names = {('model', 'greedy'): 'greedy', ('model', 'temperature 0.5'): 'sampled'}
  for row in found['rows']:
    run = runs[names.get((row['kind'], row['sampling']), row['kind'])]
    for name, interval in row['metrics'].items():
      for end, x in zip(('', '/low', '/high'), interval.values(), strict=True):
        tag = f'eval/{row["tag"]}/{name}{end}'
        assert (tag in run) == (x is not None) and (x is None or run[tag] == (2, pytest.approx(x, rel=1e-6)))
  page = (workdir / 'evaluation' / 'step_2_FrozenLake_Bandit' / 'trajectories.html').read_text()
  listed = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])['episodes']
  kept = [(e['step'], e['split'], e['tag']) for e in listed]
  splits = ('val', 'val-greedy', 'random', 'solver')
  assert {x: kept.count(x) for x in kept} == {(2, s, t): 2 for s in splits for t in ('FrozenLake', 'Bandit')}
  (file,) = read_episodes(workdir / 'evaluation' / 'step_2_FrozenLake_Bandit')
  levels = {s: [r['level'] for r in file.records() if r['split'] == s] for s in splits}
  assert len({tuple(x) for x in levels.values()}) == 1  # everybody the same
  solved = next(r for r in file.records() if r['split'] == 'solver')
  assert 'Turn 1:' in solved['turns'][0]['prompt'] and solved['turns'][0]['picture'] is not None
  assert ''.join(solved['turns'][0]['pieces']).startswith('<think></think><answer>')


@pytest.mark.slow
def test_every_name_in_tensorboard_is_explained(evaluated):
  _, _, _, found = evaluated
  page = (ROOT / 'docs' / 'metrics.md').read_text()
  explained = set(re.findall(r'`([^`\s]+)`', page))
  for name in {name for row in found['rows'] for name in row['metrics']} | {'no_reply', 'env_errors'}:
    name = re.sub(r'pass@\d+', 'pass@K', name)
    assert {f'TAG/{name}', f'eval/TAG/{name}'} & explained, name


@pytest.mark.slow
def test_the_same_again_takes_its_place_and_another_does_not(evaluated):
  workdir, config, _, found = evaluated
  config = config.copy_and_resolve_references()
  config.eval.step, config.eval.baselines, config.eval.tags = 'none', ('random',), ('Bandit',)
  first = evaluate.evaluate(config, str(workdir))
  again = evaluate.evaluate(config, str(workdir))
  assert first == again and (first['model'], first['checkpoint'], first['trained_on']) == ('', None, [])
  events = list((workdir / 'tb' / 'evaluation' / 'random').iterdir())
  assert len(events) == 2  # this one's, and the one of the whole run
  config.agent.format_penalty = -0.5
  assert evaluate.evaluate(config, str(workdir))['path'].endswith('/baselines_Bandit_2.json')
  assert json.loads(pathlib.Path(first['path']).read_text())['agent']['format_penalty'] == -0.1
  assert json.loads(pathlib.Path(found['path']).read_text())['rows'] == found['rows']


@pytest.mark.slow
@pytest.mark.parametrize('form', ['merged', 'adapter'])
@pytest.mark.exhaustive_cases('merged')
def test_a_lora_run_plays_as_what_it_is_exported_to(tmp_path, form):
  """Two ways to the same weights: a checkpoint, and a Hugging Face directory or adapters beside the base."""
  fields = dict(lora__rank=4, lora__alpha=8)
  own = dict(eval__tags=('Bandit',), eval__baselines=(), eval__greedy_too=False, eval__groups=32, logging__episodes=0)
  config, _ = _run(tmp_path / 'run', amount=0.1, **own, logging__trajectories=0, **fields)
  there = evaluate.evaluate(config, str(tmp_path / 'run'), given=True)
  assert there['checkpoint'] == 2 and there['trained_on'] == ['FrozenLake']
  # Weights that were moved so far do not keep to the form, as those that they began with do.
  assert there['rows'][0]['metrics']['action_is_valid']['mean'] < 0.95
  config.export.lora, config.export.output = form, str(tmp_path / 'export')
  export.export(config, str(tmp_path / 'run'))
  other = dict(model__path=config.export.output) if form == 'merged' else fields | {'lora__path': config.export.output}
  other = small_config(**other)
  other.eval, other.logging = config.eval, config.logging
  found = evaluate.evaluate(other, str(tmp_path / 'out'), given=True)
  assert (found['checkpoint'], found['trained_on']) == (None, [])
  assert config.export.output in found['model'] and found['rows'][0]['policy'] == f'model {found["model"]}'
  assert not (tmp_path / 'out' / 'config.json').exists()
  assert found['rows'][0]['metrics'] == there['rows'][0]['metrics']


def test_the_best_checkpoint_is_found(full_run):
  workdir, config, _ = full_run
  with Checkpointer(workdir, keep=2, save_best=BEST) as checkpointer:
    for step, found in (('latest', 2), ('best', 1), ('1', 1), ('base', None), ('none', None)):
      config = config.copy_and_resolve_references()
      config.eval.step = step
      assert chosen_checkpoint.find_step(config, str(workdir), checkpointer, given=True) == found


def test_what_others_do_meanwhile_costs_no_results(full_run, tmp_path, monkeypatch):
  """A run deletes the checkpoint that is evaluated, and another evaluation writes what would have had this name."""
  workdir, config, _ = full_run
  workdir = pathlib.Path(shutil.copytree(workdir, tmp_path / 'run'))
  config = config.copy_and_resolve_references()
  config.eval.tags, config.eval.baselines, config.eval.greedy_too = ('Bandit',), ('random',), False
  play = evaluate.play_baseline

  def meanwhile(*arguments, **options):
    shutil.rmtree(workdir / 'checkpoints')
    (workdir / 'evaluation' / 'step_2_Bandit.json').write_text('{}')
    return play(*arguments, **options)

  monkeypatch.setattr(evaluate, 'play_baseline', meanwhile)
  found = evaluate.evaluate(config, str(workdir), given=True)
  assert found['path'].endswith('/step_2_Bandit_2.json') and len(found['rows']) == 2
  assert (workdir / 'evaluation' / 'step_2_Bandit.json').read_text() == '{}'


def test_an_endpoint_plays_the_same_levels(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv('NO_PROXY', '*')
  reply = {'choices': [{'message': {'content': '<think>low</think><answer>Dragon</answer>'}}]}
  answers = [(200, {}, json.dumps(reply))] * 15 + [(500, {}, '')] * 10
  config = small_config(
    **FIELDS, eval__tags=('Bandit',), eval__step='none', eval__baselines=('solver',), eval__endpoint_tries=1,
    eval__endpoint_model='some-long-model-name', eval__endpoint_workers=1,
  )  # fmt: skip
  with server(answers) as (url, asked):
    config.eval.endpoint = url
    found = evaluate.evaluate(config, str(tmp_path / 'out'), given=True)
  solver, endpoint = found['rows']
  assert (endpoint['policy'], endpoint['kind'], endpoint['sampling']) == (
    'endpoint some-long-model-name', 'endpoint', 'temperature 0.5'
  )  # fmt: skip
  assert len(asked) == 16 and {body['messages'][0]['role'] for _, _, body in asked} == {'system'}
  assert endpoint['metrics']['no_reply']['mean'] == 1 / 16 and 'no_reply' not in solver['metrics']
  # The model's one word is the low arm on some levels and the high one on others, or always the same.
  (file,) = read_episodes(tmp_path / 'out' / 'evaluation' / 'baselines_Bandit')
  assert {r['split'] for r in file.records()} == {'solver', 'endpoint'}
  shown = capsys.readouterr().out
  assert 'some-long-mode…' in shown and 'no reply' in shown and '/evaluation/baselines_Bandit.json' in shown


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'eval.step': '7'}, r"eval\.step='7': must be latest, best, base, none or one of 1, 2"),
    ({'eval.step': 'newest'}, r"eval\.step='newest': must be latest, best, the number of an iteration, base or none"),
    ({'lora.rank': 4}, r'has checkpoints of another model: lora\.rank was 0 and is 4; .*eval\.step=base'),
    ({'model.path': '{model}'}, r'another model: model\.path was "" and is'),
    ({'eval.endpoint': 'http://127.0.0.1:9/v1', 'eval.endpoint_model': 'm'}, r'eval\.endpoint=.*cannot be reached'),
    (
      {
        'train.tags': ('Agent',),
        'eval.tags': ('Agent',),
        'envs.Agent.runner': 'true',
        'eval.step': 'base',
        'eval.endpoint': 'http://127.0.0.1:9/v1',
        'eval.endpoint_model': 'm',
      },
      r'^eval\.endpoint=.*: must be empty: programs play Agent, and call the model that this command serves$',
    ),
    ({'eval.tags': ('Nowhere',)}, r"'Nowhere'.*FrozenLake"),
    (
      {'eval.step': 'none', 'eval.baselines': ('solver',), 'eval.tags': ('Game2048',)},
      r"^eval\.baselines=\('solver',\): none can play Game2048, and nothing else is evaluated with eval\.step='none'",
    ),
  ],
)
def test_what_cannot_be_evaluated_is_told_in_one_line(full_run, monkeypatch, fields, message):
  monkeypatch.setenv('NO_PROXY', '*')
  workdir, config, policy = full_run
  config = config.copy_and_resolve_references()
  fields = {n: policy.directory if x == '{model}' else x for n, x in fields.items()}
  config.update_from_flattened_dict(fields)

  def there():
    return sorted(p for p in workdir.rglob('*') if p.is_file() or p.name == 'evaluation')

  before = there()
  with pytest.raises(UserError, match=message) as e:
    evaluate.evaluate(config, str(workdir), given=True)
  assert '\n' not in str(e.value)
  assert there() == before


def test_an_environment_that_fails_in_all_episodes_fails_the_evaluation_whose_results_stay(tmp_path):
  config = small_config(
    eval__step='none', eval__baselines=('random', 'solver'), eval__groups=4, eval__tags=('Sums', 'Away')
  )
  with config.unlocked():
    config.envs.Sums, config.envs.Away = expert_section(), expert_section('Away')
  with pytest.raises(UserError, match=r'^envs\.Away: the environment failed in all 2 episodes of random$'):
    evaluate.evaluate(config, str(tmp_path))
  (path,) = tmp_path.glob('evaluation/*.json')
  rows = json.loads(path.read_text())['rows']
  assert {row['tag'] for row in rows} == {'Sums', 'Away'}
  assert {row['metrics']['env_errors']['mean'] for row in rows if row['tag'] == 'Sums'} == {0}


def test_a_workdir_that_was_named_and_has_no_checkpoint_does_not_pass_for_a_model(tmp_path):
  workdir = tmp_path / 'run'
  with pytest.raises(UserError, match=r'--workdir=.*/run: there is no checkpoint in it; --config\.eval\.step=base ev'):
    evaluate.evaluate(small_config(), str(workdir), given=True)
  assert not workdir.exists()
  record_config(workdir, small_config().to_dict())  # a run that has not come to its first checkpoint
  for fields in ({}, {'eval__step': 'best'}, {'model__path': str(ROOT / 'ragen_jax/models/tiny')}):
    with pytest.raises(UserError, match='there is no checkpoint in it'):
      evaluate.evaluate(small_config(**fields), str(workdir))


def test_other_fields_do_not_tie_a_run_and_those_of_play_are_told(full_run, caplog):
  workdir, config, _ = full_run
  config = config.copy_and_resolve_references()
  config.eval.step, config.eval.baselines, config.eval.endpoint = 'best', (), 'http://localhost/v1'
  for name, value in (('endpoint_model', 'm'), ('endpoint_timeout', 1.0), ('endpoint_workers', 2)):
    config.eval[name] = value
  config.eval.endpoint_tries, config.eval.endpoint_max_tokens = 1, 7
  record_config(workdir, config.to_dict(), *free_in_training(config.to_dict()))  # training goes on
  config.agent.format, config.envs.FrozenLake.size = 'no_think', 5
  with caplog.at_level('INFO', 'ragen_jax'):
    assert chosen_checkpoint.compare_with_run(config, str(workdir)) == ['FrozenLake']
  assert 'different from training: agent.format was "free_think" and is "no_think"' in caplog.text
  assert 'different from training: envs.FrozenLake.size was 4 and is 5' in caplog.text


@pytest.mark.slow
def test_a_warm_start_was_trained_on_what_was_demonstrated(full_run, tmp_path):
  workdir, config, _ = full_run
  config = config.copy_and_resolve_references()
  config.sft.tags, config.sft.levels, config.eval.step, config.eval.baselines = ('Bandit',), (8,), '3', ()
  workdir = shutil.copytree(workdir, tmp_path / 'run')
  with Checkpointer(workdir, keep=3) as checkpointer:
    params = lora.partition(param_state(build.load_policy(config).model))[0]
    checkpointer.save(3, {'params': params}, {'data': 'checksum'})
  for fields, trained_on in (({}, ['Bandit']), ({'sft.data': 'play.jsonl'}, []), ({'sft.from_scratch': True}, None)):
    config.update_from_flattened_dict(fields)
    (workdir / 'config.json').write_text(json.dumps(config.to_dict()))
    if trained_on is None:
      with pytest.raises(UserError, match=r'--workdir=.* its own tokenizer; .*--config\.model\.path=runs/sft/ch'):
        evaluate.evaluate(config, str(workdir), given=True)
    else:
      assert evaluate.evaluate(config, str(workdir), given=True)['trained_on'] == trained_on


def test_several_processes_are_refused(monkeypatch, tmp_path):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  with pytest.raises(UserError, match=r'--mode=eval runs in one process, there are 2'):
    evaluate.evaluate(small_config(), str(tmp_path))


@pytest.mark.slow
def test_the_command_line_reaches_the_mode(tmp_path):
  result = copy_main('--mode=eval', '--config=configs/frozenlake_ppo.py', f'--workdir={tmp_path}/x')
  assert result.returncode == 2 and result.stderr.startswith(f'error: --workdir={tmp_path}/x: there is no checkpoint')
  assert len(result.stderr.splitlines()) == 1 and not (tmp_path / 'x').exists()


def test_a_checkpoint_whose_numbers_are_not_finite_has_no_result(full_run, tmp_path, monkeypatch):
  workdir, config, _ = full_run
  workdir = pathlib.Path(shutil.copytree(workdir, tmp_path / 'run'))
  bad = [], [], [], '7 of 9 sampled log-probs (row 0)'
  monkeypatch.setattr(Evaluator, 'episodes', lambda self, params, step=0: bad)
  with pytest.raises(Diverged, match=r'^checkpoint 2: not finite: 7 of 9 sampled log-probs \(row 0\); ') as e:
    evaluate.evaluate(config, str(workdir), given=True)
  assert e.value.status == 1 and '\n' not in str(e.value)
  assert not list((workdir / 'evaluation').glob('*'))
