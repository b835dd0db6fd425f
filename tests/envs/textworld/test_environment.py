"""Text adventures as an environment: its options, its parts, and episodes beside the package's own loop."""

from __future__ import annotations

import importlib.metadata
import io
import sys

import numpy as np
import pytest

from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.config.checks import check_config
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import read_expert, read_step
from ragen_jax.envs.textworld import library
from ragen_jax.evaluation.baselines import evaluation_levels, play_baseline
from ragen_jax.evaluation.evaluator import EvaluationSettings
from ragen_jax.models import presets
from ragen_jax.modes.play import play
from ragen_jax.modes.sft import train_sft
from tests.support.configs import assert_refused, small_config
from tests.support.environments import raises_one_line
from tests.support.speakers import context_settings, limits
from tests.support.textworld import write_game


def make(**options):
  return registry.make('textworld', {'processes': 1, **options})


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'processes': 0}, r"^textworld: processes=0; allowed: from 1, since TextWorld's parser breaks in threads$"),
    ({'processes': 257}, 'textworld: processes=257; allowed: integers from 0 to 256'),
    ({'memory_mib': 63}, 'textworld: memory_mib=63; allowed: 0 for no limit, or MiB'),
    ({'path': 3}, 'textworld: path=3; allowed: text'),
    ({'cache': ' '}, "textworld: cache=' '; allowed: text that is not blank"),
    ({'games': 0}, 'textworld: games=0; allowed: integers from 1 to 20000'),
    ({'seed': 4001}, 'textworld: seed=4001; allowed: integers from 0 to 4000'),
    ({'rooms': 21}, 'textworld: rooms=21; allowed: integers from 1 to 20'),
    ({'objects': 0}, 'textworld: objects=0; allowed: integers from 1 to 50'),
    ({'quest_length': 1.5}, r'textworld: quest_length=1\.5; allowed: integers from 1 to 20'),
    ({'split': 'val'}, "textworld: split='val'; allowed: all, train, test"),
    ({'test_share': 1}, 'textworld: test_share=1; allowed: numbers between 0 and 1'),
    ({'reward': 'points'}, "textworld: reward='points'; allowed: score, win"),
    ({'show_commands': 'yes'}, "textworld: show_commands='yes'; allowed: True, False"),
    ({'step_timeout_s': 0}, 'textworld: step_timeout_s=0; allowed: seconds, above 0'),
    ({'make_timeout_s': -1}, 'textworld: make_timeout_s=-1; allowed: seconds, above 0'),
    ({'threads': 2}, r'threads is not an option of textworld; .*allowed: path, games'),
  ],
)
def test_wrong_options_are_named_in_one_line(options, message):
  with raises_one_line(message):
    make(**options)


def test_without_the_package_the_command_that_installs_it_is_told(monkeypatch, tmp_path):
  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr(importlib.metadata, 'version', missing)
  message = (
    r"^type='textworld' needs the package textworld, which is missing: pip install -r requirements-textworld\.txt$"
  )
  with raises_one_line(message):
    make(path=str(tmp_path)).check()
  with raises_one_line(message):
    make(cache=str(tmp_path)).check()


def test_a_package_that_cannot_be_loaded_is_told_of_before_the_run(monkeypatch, tmp_path):
  (tmp_path / 'textworld.py').write_text('raise OSError("no interpreter")\n')
  write_game(tmp_path / 'a.z8', 1)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(library, 'check_package', lambda: '1')
  with raises_one_line(r'needs the package textworld, which cannot be loaded \(OSError: no interpreter\): pip install'):
    make(path=str(tmp_path)).check()
  assert 'textworld' not in sys.modules


def test_one_command_is_an_action_and_what_is_no_part_of_a_story_is_not():
  env = make()
  assert env.parse_action(' go   north\n') == 'go north'
  for text in ("take half-eaten cook's type 4 key from Box", 'inventory', 's', 'x' * 100, 'examine save'):
    assert env.parse_action(text) == text
  for text in (
    '', ' ', 'go north. look', 'look then go north', 'look, go north', 'look;look', 'UNDO', 'restart', 'Quit now', 'g',
    'tw-print player', 'TW-trace-actions', 'x' * 101, '*** The End ***', '> look', 'nimm Schlüssel',
    'enable print state option', 'Disable print state option', 'restrict commands', 'superbrie', 'transcripts on',
  ):  # fmt: skip
    assert env.parse_action(text) is None
  assert env.parse_action('go north\nlook') == 'go north look'  # one line, which no game understands


def test_the_rules_tell_what_pays_and_whether_commands_are_listed():
  assert 'It pays 1. Each text ends with' in make(reward='win').rules()
  rules = make(show_commands=False).rules()
  assert rules.endswith('Each point of the score pays 1.')


def test_a_budget_must_hold_the_walkthrough_of_games_that_are_made():
  make(quest_length=6).check_budget(Budget(3, 9, 2))
  with raises_one_line(
    r'^quest_length=7; allowed: at most 6, which max_actions, max_turns and max_actions_per_turn leave'
  ):
    make(quest_length=7).check_budget(Budget(3, 9, 2))
  make(path='mine', quest_length=7).check_budget(Budget(3, 9, 2))


# -- parts -------------------------------------------------------------------------------------------------------------


def test_the_parts_have_no_game_in_common_wherever_its_file_is(tmp_path):
  for i in range(40):
    write_game(tmp_path / f'{i}.z8', i % 20)  # each game is there twice
  parts = {x: make(path=str(tmp_path), split=x, test_share=0.4) for x in ('all', 'train', 'test')}
  ids = {x: [game.id for game in env.files] for x, env in parts.items()}
  assert sorted(ids['train'] + ids['test']) == sorted(ids['all']) and len(set(ids['all'])) == 20
  assert ids['train'] and ids['test'] and not set(ids['train']) & set(ids['test'])
  env = parts['train']
  seen = [env.level_id(seed) for seed in range(7, 7 + len(env.files))]
  assert sorted(seen) == sorted(ids['train']) and seen != ids['train']
  write_game(tmp_path / 'one' / '0.z8', 0)
  part = 'test' if parts['all'].files[0].id in ids['test'] else 'train'
  other = {'test': 'train', 'train': 'test'}[part]
  with raises_one_line(rf"path='.*one': none of 1 games is in the part split='{other}' with test_share=0\.4; use more"):
    _ = make(path=str(tmp_path / 'one'), split=other, test_share=0.4).files


def test_the_tags_are_parts_of_the_same_games(tmp_path):
  config = small_config(train__tags=('TextWorld',), eval__tags=('TextWorldTest',))
  config.envs.TextWorld.path, config.envs.TextWorld.max_turns = str(tmp_path), 7
  test = config.envs.TextWorldTest
  assert (test.path, test.max_turns, test.split) == (str(tmp_path), 7, 'test')
  config.envs.TextWorld.processes = 0
  assert_refused(check_config, config, r'^envs\.TextWorld: processes=0; allowed: from 1')
  config.envs.TextWorld.processes = 2
  (spec,) = build.env_specs(config, ('TextWorld',), (1,))
  assert (spec.env.split, spec.env.games, spec.budget) == ('train', 100, Budget(7, 10, 1))


# -- play, with the package --------------------------------------------------------------------------------------------

COMMANDS = ('look', 'dance', 'go nowhere')  # before the walkthrough


def by_the_package(path):
  """(observations, rewards, done, won) of the commands and the walkthrough, by the package's own loop."""
  textworld = pytest.importorskip('textworld')
  infos = textworld.EnvInfos(admissible_commands=True, won=True, extras=['walkthrough'])
  env = textworld.start(path, request_infos=infos)
  state, texts, scores, dones = env.reset(), [], [0], []
  commands = [*COMMANDS, *state['extra.walkthrough']]
  texts.append(state)
  for command in commands:
    state, score, done = env.step(command)
    texts.append(state)
    scores.append(score)
    dones.append(done)
  env.close()
  return commands, texts, np.diff(scores).tolist(), dones, state.won


def test_episodes_are_those_of_the_package_s_own_loop(made):
  env = make(path=made, split='all', processes=2)
  env.check()
  session = env.open(4)
  seeds = [5, 6, 5, 6]
  paths = {env.level_id(seed): x.path for seed in seeds for x in env.files if x.id == env.level_id(seed)}
  assert len(paths) == 2
  loops = [by_the_package(paths[env.level_id(seed)]) for seed in seeds]
  for _ in range(2):
    played = [session.reset(range(4), seeds, [0, 0, 1, 1])]
    steps = []
    for i in range(len(loops[0][0])):
      assert [read_expert(x)[0] for x in session.expert(range(4))] == [x[0][max(i, len(COMMANDS))] for x in loops] or i
      steps.append([read_step(x) for x in session.step(range(4), [x[0][i] for x in loops])])
      played.append([x.observation for x in steps[-1]])
    for row, (_, states, rewards, dones, won) in enumerate(loops):
      assert [x[row].reward for x in steps] == rewards and [x[row].done for x in steps] == dones
      assert steps[-1][row].success and won
      for text, state in zip(played, states, strict=True):
        told, _, listed = text[row].partition('\n\nPossible commands: ')
        own = ' '.join(state.feedback.split())
        assert ' '.join(told.split()) in own and len(told) > 10
        rest = own.replace(' '.join(told.split()), '')
        assert not rest or rest.split('>')[0].replace('Would you like', '').count(' ') < 60  # banner, prompt, question
        assert listed == ('' if state is states[-1] else ', '.join(state.admissible_commands))
      assert sum(x[row].metrics['score_share'] for x in steps) == 1.0
      assert sum(x[row].metrics['admissible_share'] for x in steps) == pytest.approx(3 / 5)
      assert [x[row].effective for x in steps] == [False, False, False, True, True]


@pytest.mark.slow
def test_random_and_oracle_rows_a_hint_and_a_warm_start(made, tmp_path):
  options = {'path': made, 'split': 'all', 'processes': 2}
  config = small_config(train__tags=('TextWorld',), eval__tags=('TextWorldTest',))
  config.envs.TextWorld.update(options)
  config.envs.TextWorldTest.update(options)
  specs = build.env_specs(config, ('TextWorld',), (2,))
  settings = EvaluationSettings(
    first_level=0, group_size=8, temperature=1.0, top_p=1.0, top_k=0, greedy_too=False, episodes=0
  )
  (levels,) = evaluation_levels(specs, settings)
  context = ContextManager(ChatTokenizer(presets.resolve('tiny', '')), specs, context_settings())
  won = {}
  for kind in ('random', 'solver'):
    episodes, _ = play_baseline(kind, levels, context, settings, limits=limits(max_turns=10), step=0)
    won[kind] = np.mean([e.success for e in episodes])
    assert len(episodes) == 16 and not any(e.status.name == 'ENV_ERROR' for e in episodes)
  assert won['solver'] == 1.0 > won['random']
  out = io.StringIO()
  play(config, io.StringIO('hint\nundo\nlook\nquit\n'), out)
  shown, session = out.getvalue(), specs[0].env.open(1)
  first = session.reset([0], [config.train.first_level], [0])[0]
  assert first in shown and f'{read_expert(session.expert([0])[0])[0]}\n' in shown.replace(first, '')
  config.sft.tags, config.sft.levels, config.sft.steps, config.sft.batch_size = ('TextWorld',), (8,), 2, 2
  config.sft.output = str(tmp_path / 'out')
  config.agent.max_context = 2048
  # All games are those of the evaluation, and training would not repeat them.
  config.eval.tags = ('FrozenLake',)
  train_sft(config, str(tmp_path / 'run'))
  assert (tmp_path / 'out').is_dir()
