"""Every field is explained and read; the shipped configs can run, and the tags are RAGEN's."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import re

import pytest
from ml_collections import ConfigDict

from configs import default, frozenlake_ppo
from ragen_jax import build, load_config, train
from ragen_jax import envs as registry
from ragen_jax.config import checks, shipped
from ragen_jax.config.checks import check_config
from ragen_jax.envs import base
from ragen_jax.envs.alfworld.environment import ALFWorldEnvironment
from ragen_jax.envs.spec import OPTIONAL
from ragen_jax.models import presets
from ragen_jax.modes import export, sft
from tests.support import lean_server, webshop_server
from tests.support.configs import leaves, small_config
from tests.support.paths import ROOT


def test_a_warm_start_imitates_the_games_that_are_trained_unless_others_are_named():
  assert load_config('sokoban_ppo').sft.tags == ('SimpleSokoban',)
  assert load_config('frozenlake_ppo', {'train.tags': ('Bandit',)}).sft.tags == ('Bandit',)
  config = load_config('frozenlake_ppo', {'sft.tags': ('Bandit',)})
  assert (config.sft.tags, config.train.tags) == (('Bandit',), ('FrozenLake',))
  assert load_config('sft_tiny').sft.tags == ('FrozenLake', 'SimpleSokoban', 'Bandit')


def test_the_built_in_models_for_text_have_the_same_settings_in_every_config():
  makers = {name: importlib.import_module(f'configs.{name}').get_config for name in shipped.names()}
  makers = {name: make for name, make in makers.items() if inspect.signature(make).parameters}
  assert len(makers) > 30
  for name, make in makers.items():
    tiny, hybrid = (dict(leaves(make(model))) for model in (presets.TINY, presets.TINY_HYBRID))
    assert {field for field in tiny if tiny[field] != hybrid[field]} == {'model.preset'}, name


def test_every_field_has_a_comment_line_above_it():
  lines = (ROOT / 'configs' / 'default.py').read_text().splitlines()
  assigned = [i for i, line in enumerate(lines) if re.match(r'  config\.[\w.]+ = (?!ConfigDict)', line)]
  assigned = [i for i in assigned if not any('def _real_model' in before for before in lines[:i])]
  assert len(assigned) > 150
  for i in assigned:
    assert lines[i - 1].strip().startswith('#'), f'configs/default.py:{i + 1}: {lines[i].strip()} is not explained'


def _defaults(node):
  """(name, default) of the parameters of a function, or of the fields of a class."""
  if isinstance(node, ast.FunctionDef):
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    yield from zip(positional[len(positional) - len(a.defaults) :], a.defaults, strict=True)
    yield from zip(a.kwonlyargs, a.kw_defaults, strict=True)
  elif isinstance(node, ast.ClassDef):
    yield from ((x.target, x.value) for x in node.body if isinstance(x, ast.AnnAssign))


def test_the_default_of_a_field_stands_in_the_config_only():
  """So an option that is forgotten on its way is an error, and not another value than that of the config."""
  sections = ('algorithm', 'filter', 'reward', 'optimizer', 'monitor', 'lora', 'checkpoint')
  fields = {name.split('.')[1] for name, _ in leaves(default.get_config()) if name.startswith(sections)}
  fields |= {'temperature', 'top_p', 'top_k', 'group_size', 'online_k', 'max_age'}
  found, seen = [], 0
  # Options of environments have defaults, and one of them may have the name of a field.
  files = [path for path in (ROOT / 'ragen_jax').rglob('*.py') if ROOT / 'ragen_jax' / 'envs' not in path.parents]
  for path in sorted(files):
    for node in ast.walk(ast.parse(path.read_text())):
      for name, value in _defaults(node):
        name = name.arg if isinstance(name, ast.arg) else ast.unparse(name)
        seen += name in fields
        # None stands for what is not given, such as an array.
        if name in fields and value is not None and not (isinstance(value, ast.Constant) and value.value is None):
          found.append(f'{path.relative_to(ROOT)}:{node.lineno}: {name}={ast.unparse(value)}')
  assert not found and seen > 100


def test_every_option_of_an_environment_has_a_comment_line_above_it():
  """Those that all environments have are explained once, in default.py."""
  lines = (ROOT / 'configs' / 'environments.py').read_text().splitlines()
  common = {'type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words'}
  for i, line in enumerate(lines):
    option = re.match(r"      '(\w+)': ", line)
    if option and option.group(1) not in common:
      assert lines[i - 1].strip().startswith('#'), f'configs/environments.py:{i + 1}: {line.strip()} is not explained'


def test_options_of_environments_are_those_of_their_classes():
  common = {'type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words', *OPTIONAL}
  for tag, options in default.get_config().envs.items():
    own = {field.name for field in dataclasses.fields(registry.TYPES[options.type])}
    drawn = options.type in ('frozen_lake', 'sokoban', 'game_2048', 'rubik_2x2', 'sudoku', 'navigation', 'manipulation')
    own |= {'observation', 'tile'} if drawn else set()
    own |= {'simulator'} if options.type in ('navigation', 'manipulation') else set()
    assert set(options) == common | own, tag


def test_tags_are_ragens():
  """Against a second listing, from RAGEN's paper and its first version's configs."""
  config = default.get_config('qwen2.5-1.5b')
  assert {env.max_words for env in default.get_config().envs.values()} == {25}  # the built-in model replies in fewer
  tags = tuple(config.envs)
  envs = {spec.tag: spec for spec in build.env_specs(config, tags, (1,) * len(tags))}
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


@pytest.mark.parametrize(
  ('model', 'words'), [('', 25), ('qwen2.5-0.5b', 10), ('qwen2.5-0.5b-lora', 10), ('qwen2.5-3b', 100)]
)
def test_small_models_are_asked_for_short_replies_and_pretrained_ones_see_actions_and_an_example(model, words):
  config = default.get_config(model)
  assert config.envs.FrozenLake.max_words == words
  assert ('{actions}' in config.agent.request) == ('{example}' in config.agent.request) == bool(model)


def test_the_large_sudoku_can_be_filled():
  spec = build.env_specs(default.get_config(), ('Sudoku9x9',), (1,))[0]
  assert (spec.env.side, spec.env.empty_cells) == (9, 40)
  assert min(spec.budget.max_actions, spec.budget.max_turns * spec.budget.max_actions_per_turn) >= 40


@pytest.mark.parametrize('name', shipped.names())
def test_the_shipped_configs_can_run(name, monkeypatch):
  config = importlib.import_module(f'configs.{name}').get_config()
  if name == 'arithmetic_grpo':
    pytest.importorskip('reasoning_gym', reason='its questions need requirements-data.txt')
  if name == 'alfworld_grpo':  # a user's data, and optional packages
    monkeypatch.setattr(ALFWorldEnvironment, 'check', lambda self: None)
  if name == 'dataset_grpo':  # a user's file
    config.envs.Dataset.path = str(ROOT / 'docs' / 'examples' / 'questions.jsonl')
  needs = {'played': ()} if name == 'verifiers_grpo' else {}  # a package of the user's
  with contextlib.ExitStack() as servers:
    if name == 'lean_grpo':
      config.envs.Lean.url = servers.enter_context(lean_server.serve()).url
      config.envs.Lean.path = str(ROOT / 'docs' / 'examples' / 'statements.jsonl')
    if name == 'webshop_grpo':
      monkeypatch.setattr(webshop_server, 'GOALS', webshop_server.GOALS * 1000)
      config.envs.WebShop.url = servers.enter_context(webshop_server.serve()).url
      config.envs.WebShop.goals = 2000
    check_config(config, weights=config.model.preset in presets.BUILT_IN, **needs)
  words = name.split('_')
  if name.endswith(('_ppo', '_grpo')):
    assert config.algorithm.adv_estimator == {'ppo': 'gae', 'grpo': 'grpo'}[words[-1]]
    tag = {'frozenlake': 'FrozenLake', 'sokoban': 'SimpleSokoban', 'bandit': 'Bandit'}.get(words[0])
    assert tag is None or (config.train.tags == (tag,) and tag in config.eval.tags)


def test_two_held_out_tags_follow_one_training_tag():
  config = default.get_config()
  config.envs.NavigationTest.fov = 80.0
  config.envs.Navigation.fov, config.envs.Navigation.colours = 70.0, ('red', 'blue')
  for tag, split, fov in (('NavigationValidation', 'validation', 70.0), ('NavigationTest', 'test', 80.0)):
    env = config.envs[tag]
    assert (env.split, env.fov, env.colours) == (split, fov, ('red', 'blue'))
  assert config.envs.Navigation.split == 'train'


def test_held_out_tags_follow_their_training_tags():
  config = default.get_config('qwen2.5-0.5b')
  config.envs.Dataset.path, config.envs.Dataset.fields.question = 'mine.jsonl', 'problem'
  config.envs.Dataset.max_words, config.envs.Dataset.split = 77, 'all'
  test = config.envs.DatasetTest
  assert (test.path, test.fields.question, test.max_words, test.split) == ('mine.jsonl', 'problem', 77, 'test')
  test.path = 'other.jsonl'
  assert (config.envs.Dataset.path, test.path) == ('mine.jsonl', 'other.jsonl')
  config.envs.GSM8K.hub_options.revision = 'main'
  config.envs.GSM8K.hub_options.name = 'socratic'
  assert (config.envs.GSM8KTest.hub_options.name, config.envs.GSM8KTest.hub_options.split) == ('socratic', 'test')
  assert config.envs.MetamathQATest.fields.group == 'original_question'
  config.envs.Dataset.generator_options.update({'size': 5})
  assert test.generator_options.to_dict() == {'size': 5}


def test_tags_of_data_sets_have_ragens_budgets():
  config = default.get_config('qwen2.5-3b')
  for tag in ('MetamathQA', 'MetamathQATest', 'GSM8K', 'GSM8KTest'):
    (spec,) = build.env_specs(config, (tag,), (1,))
    assert (spec.budget, spec.max_words, spec.env.attempts) == (base.Budget(5, 1, 1), 100, 1)


def test_three_games_have_ppo_and_grpo():
  for game in ('frozenlake', 'sokoban', 'bandit'):
    ppo, grpo = (importlib.import_module(f'configs.{game}_{x}').get_config('qwen2.5-0.5b') for x in ('ppo', 'grpo'))
    # For real models nothing else differs.
    theirs = dict(leaves(grpo))
    assert {name for name, value in leaves(ppo) if theirs[name] != value} == {'algorithm.adv_estimator'}
    assert ppo.agent.max_response_tokens == (500 if game == 'bandit' else 400)


def test_a_variant_brings_the_settings_of_its_size():
  config = frozenlake_ppo.get_config('qwen2.5-0.5b')
  assert config.model.preset == 'qwen2.5-0.5b'
  assert (config.optimizer.actor_lr, config.optimizer.critic_lr) == (1e-6, 1e-5)
  assert (config.train.groups, config.train.group_size, config.agent.max_context) == (8, 16, 3600)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_every_field_is_read_by_some_run(tmp_path, monkeypatch):
  """A short training run and a short warm start, with every access to the config written down.

  Checks, and the record of the whole config (`to_dict`), read every field and are left out.
  """
  read, recording = set(), [True]
  original, to_dict = ConfigDict.__getitem__, ConfigDict.to_dict

  def spy(self, key):
    if recording[0]:
      read.add((id(self), key))
    return original(self, key)

  def whole(self, *arguments, **options):
    before, recording[0] = recording[0], False
    try:
      return to_dict(self, *arguments, **options)
    finally:
      recording[0] = before

  fields = dict(
    agent__max_response_tokens=8, agent__max_context=1024, eval__greedy_too=False, num_iterations=1, train__group_size=2
  )
  config = small_config(
    **fields, optimizer__mini_batch_size=8, train__tags=('FrozenLake', 'SimpleSokoban'), train__groups=4,
    eval__tags=('FrozenLake', 'SimpleSokoban', 'Bandit'), eval__groups=3,
  )  # fmt: skip
  config.sft.steps, config.sft.batch_size, config.sft.levels = 1, 4, (8,)
  config.sft.output = str(tmp_path / 'out')
  monkeypatch.setattr(train, 'record_config', lambda *a, **k: None)
  monkeypatch.setattr(sft, 'record_config', lambda *a, **k: None)
  monkeypatch.setattr(export, 'compare_config', lambda *a, **k: None)
  for mode in (train, sft):
    monkeypatch.setattr(mode, 'check_config', lambda *a, **k: None)
  monkeypatch.setattr(ConfigDict, 'to_dict', whole)
  monkeypatch.setattr(ConfigDict, '__getitem__', spy)
  train.train_and_evaluate(config, str(tmp_path / 'run'))
  sft.train_sft(config, str(tmp_path / 'sft'))
  config.sft.from_scratch, config.sft.output = True, str(tmp_path / 'fresh')
  sft.train_sft(config, str(tmp_path / 'sft_fresh'))
  export.export(config, str(tmp_path / 'run'))
  # Environments that no tag of these runs chose.
  build.env_specs(config, tuple(config.envs), (1,) * len(config.envs))
  build.curriculum_settings(config)  # of data sets
  checks.check_plan(config)
  checks.check_eval(config)
  monkeypatch.undo()

  def unread(part, prefix=''):
    for name, value in part.items():
      # An environment gets a group of its options as one, and refuses those that it does not know.
      if isinstance(value, ConfigDict) and not (prefix.startswith('envs.') and prefix.count('.') == 2):
        yield from unread(value, f'{prefix}{name}.')
      elif (id(part), name) not in read:
        yield f'{prefix}{name}'

  assert not list(unread(config))
