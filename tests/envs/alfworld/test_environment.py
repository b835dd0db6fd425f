"""ALFWorld as an environment: its options, its parts, and episodes beside the package's own loop."""

from __future__ import annotations

import io
import pathlib

import pytest

from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.config.checks import check_config
from ragen_jax.envs.alfworld import library
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import read_expert, read_step
from ragen_jax.evaluation.baselines import evaluation_levels, play_baseline
from ragen_jax.evaluation.evaluator import EvaluationSettings
from ragen_jax.models import presets
from ragen_jax.modes.play import play
from ragen_jax.modes.sft import lessons
from ragen_jax.sft.data import DemonstrationSettings, collect_demonstrations
from ragen_jax.sft.demonstrations import DemonstrationStyle
from tests.support.alfworld import TASKS, WALKTHROUGHS, fetch, write_game
from tests.support.configs import assert_refused, small_config
from tests.support.environments import raises_one_line
from tests.support.speakers import context_settings, limits


def make(**options):
  return registry.make('alfworld', {'processes': 1, **options})


def with_tasks(env):
  """Task -> a seed of its game."""
  seeds = {env.files[env._index(seed)].task: seed for seed in range(len(env.files))}
  assert set(seeds) == set(TASKS)
  return seeds


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'path': 3}, 'alfworld: path=3; allowed: text'),
    ({'split': 'test'}, "alfworld: split='test'; allowed: train, valid_seen, valid_unseen"),
    ({'tasks': 'look'}, r"alfworld: tasks='look'; allowed: \(\), or some of pick_and_place_simple, look_at"),
    ({'tasks': ('look',)}, "alfworld: tasks='look'; allowed: pick_and_place_simple, look_at"),
    ({'show_commands': 1}, 'alfworld: show_commands=1; allowed: True, False'),
    ({'processes': 0}, r"^alfworld: processes=0; allowed: from 1, since TextWorld's engine breaks in threads$"),
    ({'processes': 257}, 'alfworld: processes=257; allowed: integers from 0 to 256'),
    ({'memory_mib': 63}, 'alfworld: memory_mib=63; allowed: 0 for no limit, or MiB'),
    ({'step_timeout_s': 0}, 'alfworld: step_timeout_s=0; allowed: seconds, above 0'),
    ({'threads': 2}, 'threads is not an option of alfworld; allowed: path, split, tasks'),
  ],
)
def test_wrong_options_are_named_in_one_line(options, message):
  with raises_one_line(message):
    make(**options)


def test_a_package_that_cannot_be_loaded_is_told_of_before_the_run(monkeypatch, tmp_path):
  (tmp_path / 'fast_downward.py').write_text('raise OSError("no library")\n')
  write_game(tmp_path / 'train', library.TASKS[0], 0)
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(library, 'check_packages', lambda: None)
  message = (
    r'needs the packages textworld and fast-downward-textworld, which cannot be loaded \(OSError: no library\): pip'
  )
  with raises_one_line(message):
    make(path=str(tmp_path)).check()


def test_one_command_is_an_action():
  env = make()
  assert env.parse_action(' Go  to desk\n1') == 'Go to desk 1'
  for text in ('look', "examine cook's half-open box 12", 'x' * 100, '7'):
    assert env.parse_action(text) == text
  for text in ('', ' ', 'go to desk 1.', 'look, look', 'look; look', 'x' * 101, '> look', '-look', 'take [mug]'):
    assert env.parse_action(text) is None


def test_the_rules_tell_whether_commands_are_listed():
  assert make(show_commands=False).rules() in make().rules() != make(show_commands=False).rules()
  assert make().rules().endswith('Each text ends with the commands that are possible.')


def test_the_tags_are_the_parts_of_the_same_data(tmp_path):
  config = small_config(train__tags=('ALFWorld',), eval__tags=('ALFWorldSeen', 'ALFWorldUnseen'))
  config.envs.ALFWorld.path, config.envs.ALFWorld.max_turns = str(tmp_path), 7
  config.envs.ALFWorld.tasks = ('pick_two_obj_and_place',)
  for tag, split in (('ALFWorldSeen', 'valid_seen'), ('ALFWorldUnseen', 'valid_unseen')):
    own = config.envs[tag]
    assert (own.path, own.max_turns, own.split, own.tasks) == (str(tmp_path), 7, split, ('pick_two_obj_and_place',))
  (spec,) = build.env_specs(config, ('ALFWorld',), (1,))
  assert (spec.env.split, spec.env.tasks, spec.budget) == ('train', ('pick_two_obj_and_place',), Budget(7, 50, 1))
  config.envs.ALFWorld.processes = 0
  assert_refused(check_config, config, r'^envs\.ALFWorld: processes=0; allowed: from 1')


def test_seeds_play_all_games_of_the_part_before_one_comes_again(data):
  env = make(path=data, split='valid_seen', tasks=library.TASKS[1:])
  assert len(env.files) == 5 and all('valid_seen' in x.path for x in env.files)
  ids = [env.level_id(seed) for seed in range(11, 16)]
  assert sorted(ids) == sorted(x.id for x in env.files) and ids != [x.id for x in env.files]
  parts = [{x.id for x in make(path=data, split=split).files} for split in library.SPLITS]
  assert sum(map(len, parts)) == len(set.union(*parts)) == 18


# -- play, with the packages -------------------------------------------------------------------------------------------

COMMANDS = ('look', 'dance', 'go to desk 9', 'inventory')  # before the walkthrough


def by_the_package(path):
  """(observations, admissible commands, dones) of the commands and the walkthrough, by the package alfworld."""
  textworld = pytest.importorskip('textworld', reason='needs requirements-alfworld.txt')
  theirs = pytest.importorskip('alfworld.agents.environment.alfred_tw_env', reason='needs the package alfworld')
  infos = textworld.EnvInfos(admissible_commands=True, won=True, extras=['walkthrough'])
  env = textworld.start(path, request_infos=infos, wrappers=[theirs.AlfredDemangler(shuffle=False), theirs.AlfredInfos])
  state = env.reset()
  commands = [*COMMANDS, *state['extra.walkthrough']]
  states, dones = [state], []
  for command in commands:
    state, _, done = env.step(command)
    states.append(state)
    dones.append(done)
  return commands, states, dones


@pytest.mark.parametrize('rules', ['ours', pytest.param("alfworld's", marks=pytest.mark.slow)])
def test_episodes_are_those_of_the_package(engine, rules, tmp_path):
  task, changes = library.TASKS[5], {}
  if rules != 'ours':
    info = pytest.importorskip('alfworld.info', reason='needs the package alfworld')
    files = {'pddl_domain': info.ALFRED_PDDL_PATH, 'grammar': info.ALFRED_TWL2_PATH}
    changes = {field: pathlib.Path(file).read_text() for field, file in files.items()}
  path = write_game(tmp_path / 'train', task, 3, walkthrough=WALKTHROUGHS[task](3), **changes)
  commands, states, dones = by_the_package(path)
  env = make(path=str(tmp_path))
  session = env.open(2)
  for _ in range(2):
    seen, steps = session.reset(range(2), [0, 1], [0, 1]), []
    told = [seen[0]]
    assert seen[0] == seen[1]
    for command in commands:
      both = [read_step(x) for x in session.step(range(2), [command, command.upper()])]
      # Letter case does not matter to us.
      assert both[0] == both[1]
      steps.append(both[0])
      told.append(both[0].observation)
    for i, (text, state) in enumerate(zip(told, states, strict=True)):
      own, _, listed = text.partition('\n\nPossible commands: ')
      line = '\n\nYour task is to: put two mug in desk.'
      assert own == state.feedback.strip() + line * (0 < i < len(commands))
      assert listed == ('' if i == len(commands) else ', '.join(state.admissible_commands))
    assert [x.done for x in steps] == dones and states[-1].won
    assert [x.reward for x in steps] == [0.0] * (len(steps) - 1) + [1.0] and steps[-1].success


def test_an_episode_tells_what_is_possible_what_changed_and_which_type_it_is_of(engine, data):
  env = make(path=data, show_commands=False, processes=2)
  env.check()
  seeds = with_tasks(env)
  tasks = list(TASKS)
  session = env.open(len(tasks))
  first = session.reset(range(len(tasks)), [seeds[x] for x in tasks], [0] * len(tasks))
  for row, task in enumerate(tasks):
    plan = WALKTHROUGHS[task](0)
    assert first[row].endswith(f'\n\nYour task is to: {TASKS[task][0]}') and first[row].startswith(
      'You stand in a room.'
    )
    assert read_expert(session.expert([row])[0]) == plan
    steps = [read_step(session.step([row], [command])[0]) for command in ('sing', *plan)]
    assert steps[0].observation == f'Nothing happens.\n\nYour task is to: {TASKS[task][0]}'
    assert [x.done for x in steps] == [x.success for x in steps] == [False] * len(plan) + [True]
    assert [x.reward for x in steps] == [0.0] * len(plan) + [1.0]
    assert [x.effective for x in steps] == [False, False] + [True] * (len(plan) - 1)
    total = {name: sum(x.metrics.get(name, 0) for x in steps) for x in steps for name in x.metrics}
    success = f'success_{task}'
    assert total == {
      'admissible_share': len(plan), 'admissible_share/of': len(plan) + 1, success: 1, f'{success}/of': 1
    }  # fmt: skip
    assert read_expert(session.expert([row])[0]) == read_expert(session.legal_actions([row])[0]) == []


def test_the_expert_knows_the_way_back_from_detours_that_changed_nothing(engine, data):
  env = make(path=data, split='valid_seen')
  session = env.open(1)
  task = 'pick_cool_then_place_in_recep'
  plan = WALKTHROUGHS[task](1)
  assert plan[:3] == fetch('mug 1', 1) == ['look', 'go to sinkbasin 1', 'take mug 1 from sinkbasin 1']

  def advice():
    return read_expert(session.expert([0])[0])

  def say(*commands):
    for command in commands:
      assert read_step(session.step([0], [command])[0]).metrics['admissible_share']

  session.reset([0], [with_tasks(env)[task]], [0])
  say('go to fridge 1', 'open fridge 1', 'inventory')
  assert advice() == plan  # nothing leads back to the middle of the room, and nothing needs to
  say('look', 'go to sinkbasin 1', 'go to desk 1')
  assert advice() == ['go to sinkbasin 1', *plan[2:]]
  say('go to sinkbasin 1')
  assert advice() == plan[2:]
  say('take mug 1 from sinkbasin 1', 'go to microwave 1')
  assert advice() == ['go to sinkbasin 1', *plan[3:]]
  say('heat mug 1 with microwave 1')
  assert advice() == []
  # What the walkthrough opens may be open.
  task = 'pick_clean_then_place_in_recep'
  plan = WALKTHROUGHS[task](1)
  session.reset([0], [with_tasks(env)[task]], [0])
  say('go to fridge 1', 'open fridge 1')
  assert advice() == [x for x in plan if x != 'open fridge 1'] != plan
  for command in advice():
    say(command)
  assert advice() == []


def test_a_walkthrough_that_the_game_does_not_understand_is_no_advice(engine, tmp_path):
  task = library.TASKS[0]
  write_game(tmp_path / 'train', task, 0, walkthrough=['look', 'put mug 1 in desk 1'])
  write_game(tmp_path / 'train', task, 1)
  env = make(path=str(tmp_path))
  session = env.open(2)
  session.reset(range(2), [env._index(0), 1 - env._index(0)], [0, 0])
  assert [read_expert(x) for x in session.expert(range(2))] == [['look', 'put mug 1 in desk 1'], []]
  session.step(range(2), ['look', 'look'])
  assert [read_expert(x) for x in session.expert(range(2))] == [[], []]


def test_equal_seeds_give_equal_texts_in_all_processes(engine, data):
  env = make(path=data, split='valid_unseen', processes=2)
  session = env.open(2)
  session.reset(range(2), [3, 3], [0, 1])
  for _ in range(3):
    (first, second), (text, _) = session.reset(range(2), [4, 4], [0, 1]), session.legal_actions(range(2))
    assert first == second
    steps = session.step(range(2), [text[0]] * 2)
    assert steps[0] == steps[1]


@pytest.mark.slow
def test_random_and_oracle_rows_a_hint(engine, data):
  config = small_config(train__tags=('ALFWorld',), eval__tags=('ALFWorldSeen',))
  config.envs.ALFWorld.path = data
  config.envs.ALFWorld.max_turns = config.envs.ALFWorld.max_actions = 12
  specs = build.env_specs(config, ('ALFWorldSeen',), (6,))
  settings = EvaluationSettings(
    first_level=0, group_size=2, temperature=1.0, top_p=1.0, top_k=0, greedy_too=False, episodes=0
  )
  (levels,) = evaluation_levels(specs, settings)
  context = ContextManager(ChatTokenizer(presets.resolve('tiny', '')), specs, context_settings())
  found = {}
  for kind in ('random', 'solver'):
    episodes, _ = play_baseline(kind, levels, context, settings, limits=limits(max_turns=12), step=0)
    assert len(episodes) == 12 and not any(e.status.name == 'ENV_ERROR' for e in episodes)
    found[kind] = episode_metrics(episodes, 2, 'val')
  assert all(found['solver'][f'val/ALFWorldSeen/success_{task}'] == 1.0 for task in TASKS)
  assert found['solver']['val/ALFWorldSeen/success'] == 1.0 > found['random']['val/ALFWorldSeen/success']
  assert found['random']['val/ALFWorldSeen/admissible_share'] == 1.0
  out = io.StringIO()
  play(config, io.StringIO('hint\nsing\nlook\nquit\n'), out)
  assert 'look' in out.getvalue() and 'Nothing happens.' in out.getvalue() and 'Your task is to:' in out.getvalue()


def test_demonstrations_are_the_walkthroughs(engine, data):
  """The warm start (--mode=sft), up to the conversations that it learns from."""
  config = small_config(train__tags=('ALFWorld',), eval__tags=('ALFWorldSeen',))
  config.envs.ALFWorld.path, config.agent.max_context, config.agent.max_response_tokens = data, 8192, 64
  config.sft.tags, config.sft.levels = ('ALFWorld',), (6,)
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  settings, style = build.fill(DemonstrationSettings, config.sft, seed=1), build.fill(DemonstrationStyle, config.sft)
  parts = collect_demonstrations(lessons(config, tokenizer), style, settings, frozenset(), None)
  (part,) = parts
  texts = tokenizer.decode_batch(part.trajectory.tokens.tolist())
  turns = sorted(text.count('Your task is to: ') for text in texts)
  assert turns == sorted(len(WALKTHROUGHS[task](0)) for task in TASKS)
  assert all('<answer>look</answer>' in text and 'Possible commands: ' in text for text in texts)
