"""Games in worker processes: the same play as in this process, and what a game that fails there costs."""

from __future__ import annotations

import gc
import logging
import sys

import pytest

from ragen_jax import envs as registry
from ragen_jax.envs.outside.base import TextStep, read_expert, read_observation, read_step
from ragen_jax.envs.outside.processes import game_processes
from ragen_jax.utils.threads import Fault
from ragen_jax.utils.workers import Worker
from tests.support.environments import raises_one_line
from tests.support.light_games import LIGHT, lines, results
from tests.support.text_games import by_hand, by_session

LONG = 200.0  # seconds that no call takes unless it hangs
PUSH = 'tests.support.light_gymnasium'


def make(name, *, processes=2, step_timeout_s=LONG, **more):
  return registry.make(
    'python',
    {'class_path': f'{LIGHT}:{name}', 'processes': processes, 'step_timeout_s': step_timeout_s, **more},
  )


# -- the same play -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('processes', [1, 2, 7])
def test_a_class_plays_in_processes_as_it_does_by_hand_again_and_again(processes):
  env = make('Climb', options={'rungs': 6}, processes=processes)
  assert env.rules() == 'A ladder of 6 rungs.' and env.legend() == {'#': 'you'} and env.action_help == ''
  assert env.action_names == ('Up', 'Down') and env.parse_action('up') == 'Up' and env.parse_action('Left') is None
  session = env.open(4)
  for first in (3, 8):
    seeds, members = [first, first, first + 1, first + 1], [0, 1, 0, 1]
    assert by_session(session, seeds, members) == by_hand(6, seeds, members)
  assert session.reset([2, 0], [4, 3], [1, 0]) == ['rung 1 of 6', 'rung 4 of 6']  # some rows, in any order
  assert [r[0] for r in session.step([0, 2], ['Up', 'Down'])] == ['rung 5 of 6', 'rung 0 of 6']


@pytest.fixture(scope='module')
def liars():
  """Sessions that lie, in this process and in another."""
  return [make('Liar', processes=processes).open(1) for processes in (0, 1)]


@pytest.mark.parametrize('name', results())
def test_results_are_read_alike_in_this_process_and_from_another(name, liars):
  number = list(results()).index(name)
  steps, firsts = [], []
  for session in liars:
    session.reset([0], [0], [0])
    steps.append(read_step(session.step([0], [name])[0]))
    firsts.append(read_observation(session.reset([0], [number], [0])[0]))
  assert _without_addresses(steps[0]) == _without_addresses(steps[1])
  assert isinstance(steps[1], TextStep) == (number < 6)
  if number:  # 0 is an honest first observation
    assert type(firsts[0]) is type(firsts[1]) is Fault and firsts[0].kind == firsts[1].kind


def _without_addresses(step):
  return step if isinstance(step, TextStep) else str(step).partition(' at 0x')[0]


def test_images_come_as_the_environment_made_them():
  pictures = {'images': 1, 'image_size': (4, 6)}
  here, there = (make('Lamp', processes=processes, **pictures) for processes in (0, 2))
  form = here.image_form
  sessions = [env.open(2) for env in (here, there)]
  firsts = [[read_observation(x, form) for x in session.reset([0, 1], [7, 250], [0, 0])] for session in sessions]
  assert firsts[0] == firsts[1] and [x.images[0][0, 0, 0] for x in firsts[1]] == [7, 250]
  assert firsts[1][0].text == 'It is <image>.'
  for action in ('dark', 'turned', 'masked', 'small', 'float', 'list', 'object'):
    steps = [read_step(session.step([1], [action])[0], form) for session in sessions]
    assert steps[0] == steps[1] and isinstance(steps[1], TextStep) == (action in ('dark', 'turned', 'masked'))
  assert steps[1] == Fault('image is not a NumPy array', 'image 0 is object')


# -- failures ----------------------------------------------------------------------------------------------------------

ENDS = {
  'sleep': ('step took longer than 3 s', 'its process was ended'),
  'hold': ('step took longer than 3 s', 'its process was ended'),
  'exit 0': ('step ended its process', 'exit status 0'),
  'exit 3': ('step ended its process', 'exit status 3'),
  'crash': ('step ended its process', 'SIGSEGV; Fatal Python error: Segmentation fault'),
  'eat': ('step ran out of memory', 'the limit is 200 MiB; its process was ended'),
}


@pytest.mark.parametrize('action', ENDS)
@pytest.mark.slow_cases('hold')
def test_a_game_that_ends_its_process_costs_the_rows_of_that_process_only(action):
  kind, detail = ENDS[action]
  env = make('Wild', memory_mib=200, step_timeout_s=3.0 if 'took' in kind else LONG)
  session = env.open(6)
  rows = list(range(6))
  for _ in range(2):
    assert session.reset(rows, rows, [0] * 6) == [f'level {row}' for row in rows]
  # Rows 1, 3 and 5 share a process; row 1 plays before its neighbour fails, row 5 would play after it.
  steps = [read_step(x) for x in session.step(rows, ['a', 'a', 'a', action, 'a', 'a'])]
  good = [TextStep(f'level {row}, episode 2, a', 1.0, False, False) for row in rows]
  assert [steps[row] for row in (0, 1, 2, 4)] == [good[row] for row in (0, 1, 2, 4)]
  assert steps[3].kind == kind and steps[3].detail.startswith(detail)
  assert steps[5].kind == 'the process of the row ended' and steps[5].detail.startswith(kind)
  # The other process goes on; the rows that lost their objects begin again.
  steps = [read_step(x) for x in session.step(rows, ['a'] * 6)]
  assert [steps[row] for row in (0, 2, 4)] == [good[row] for row in (0, 2, 4)]
  assert {steps[row].kind for row in (1, 3, 5)} == {'the process of the row ended'}
  assert session.reset(rows, rows, [0] * 6) == [f'level {row}' for row in rows]
  episodes = [read_step(x).observation.split(', ')[1] for x in session.step(rows, ['a'] * 6)]
  assert episodes == ['episode 3', 'episode 1'] * 3


def test_an_exception_costs_its_row_the_object_and_nothing_else(tmp_path):
  path = tmp_path / 'notes'
  session = make('Wild', processes=1, options={'notes': str(path)}).open(3)
  texts = session.reset(range(3), [1, 700, 3], [0] * 3)
  assert [texts[0], texts[2]] == ['level 1', 'level 3'] and texts[1].kind == 'reset raised RuntimeError'
  assert texts[1].detail.startswith('no such level (light_games.py:')
  steps = session.step([0, 2], ['raise', 'a'])
  assert steps[0].kind == 'step raised KeyError' and steps[1][0] == 'level 3, episode 1, a'
  assert session.reset(range(3), [1, 2, 3], [0] * 3) == ['level 1', 'level 2', 'level 3']
  assert [x[0].split(', ')[1] for x in session.step(range(3), ['a'] * 3)] == ['episode 1', 'episode 1', 'episode 2']
  notes = [line.split(' ')[0] for line in lines(path)]
  assert notes.count('made') == 1 + 3 + 2 and notes.count('closed') == 1 + 2  # the first was made to be described
  assert len({line.split(' ')[-1] for line in lines(path)}) == 2


def test_an_error_of_this_process_costs_the_rows_of_the_worker_that_it_was_about(monkeypatch):
  session, call = make('Climb', options={'rungs': 6}).open(4), Worker.call

  def broken(self, what, number, row, *rest, **more):
    if what == 'step' and row % 2:
      raise OSError('too many open files')
    return call(self, what, number, row, *rest, **more)

  session.reset([0, 1, 2, 3], [3, 3, 4, 4], [0, 0, 0, 0])
  monkeypatch.setattr(Worker, 'call', broken)
  found = session.step([0, 1, 2, 3], ['Up'] * 4)
  assert [result[0] for result in found[::2]] == ['rung 5 of 6', 'rung 2 of 6']
  assert all(isinstance(fault, Fault) and 'too many open files' in str(fault) for fault in found[1::2])


def test_output_of_a_game_disturbs_nothing(capfd):
  session = make('Wild').open(2)
  session.reset([0, 1], [1, 2], [0, 0])
  for _ in range(2):
    assert [x[0] for x in session.step([0, 1], ['talk', 'a'])] == ['level 1, episode 1, talk', 'level 2, episode 1, a']
  assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize(('seed', 'kind'), [(900, 'reset took longer than 3 s'), (800, 'reset ended its process')])
@pytest.mark.slow_cases('900-reset took longer than 3 s')
def test_a_reset_that_ends_its_process_costs_its_row_only(seed, kind, tmp_path):
  path = tmp_path / 'notes'
  limit = 3.0 if seed == 900 else LONG
  session = make('Wild', processes=1, step_timeout_s=limit, options={'notes': str(path)}).open(5)
  rows, seeds = range(5), [0, 1, seed, 3, seed]
  texts = session.reset(rows, seeds, [0] * 5)
  assert [texts[row] for row in (0, 1, 3)] == ['level 0', 'level 1', 'level 3']
  assert [texts[row].kind for row in (2, 4)] == [kind] * 2
  steps = session.step([0, 1, 3], ['a'] * 3)
  assert [x[0] for x in steps] == [f'level {row}, episode 1, a' for row in (0, 1, 3)]
  # The rows whose process ended were reset again when all others were done.
  order = [line.split(' ')[1] for line in lines(path) if line.startswith('reset')]
  assert order == ['0', '1', str(seed), '3', str(seed), '0', '1', '3']


def test_where_every_reset_ends_the_process_the_rest_is_not_tried(tmp_path):
  path = tmp_path / 'notes'
  session = make('Wild', processes=2, options={'notes': str(path)}).open(20)
  texts = session.reset(range(20), [5, 800] * 10, [0] * 20)
  assert texts[::2] == ['level 5'] * 10 and {text.kind for text in texts[1::2]} == {'reset ended its process'}
  assert [text.detail for text in texts[1::2]].count('not tried, because earlier calls ended like this') == 7
  assert sum(line.startswith('reset 800') for line in lines(path)) == 3


def test_rows_of_an_earlier_process_that_are_not_reset_have_lost_their_objects():
  session = make('Wild', processes=1).open(3)
  session.reset(range(3), [0, 1, 2], [0] * 3)
  assert session.reset([1], [800], [0])[0].kind == 'reset ended its process'
  assert session.reset([2], [2], [0]) == ['level 2']
  steps = session.step(range(3), ['a'] * 3)
  assert [type(x) for x in steps] == [Fault, Fault, tuple]
  assert steps[0] == Fault('the process of the row ended', 'reset ended its process: exit status 8')


# -- what runs where ---------------------------------------------------------------------------------------------------


def test_no_code_of_the_class_runs_in_this_process(tmp_path, monkeypatch):
  (tmp_path / 'apart.py').write_text(
    'import os\n\nclass Game:\n  def rules(self):\n    return str(os.getpid())\n\n'
    '  def reset(self, seed):\n    return str(os.getpid())\n\n'
    '  def step(self, action):\n    return str(os.getpid()), 1.0, True, True\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(sys, 'dont_write_bytecode', True)
  env = registry.make('python', {'class_path': 'apart:Game', 'processes': 2})
  session = env.open(4)
  pids = session.reset(range(4), [1] * 4, [0] * 4)
  assert 'apart' not in sys.modules and len({*pids, env.rules()}) == 3
  assert [x[0] for x in session.step(range(4), ['a'] * 4)] == pids and pids[:2] == pids[2:]


@pytest.mark.slow
def test_sessions_share_the_processes_and_leave_nothing_in_them(tmp_path):
  path = tmp_path / 'notes'
  env, alike = (make('Wild', options={'notes': str(path)}) for _ in range(2))  # as training and evaluation make them
  first, second = env.open(4), alike.open(4)
  rows = range(4)
  first.reset(rows, [1] * 4, [0] * 4)
  assert second.reset(rows, [2] * 4, [0] * 4) == ['level 2'] * 4
  assert [x[0] for x in first.step(rows, ['a'] * 4)] == ['level 1, episode 1, a'] * 4
  notes = lines(path)
  assert len({line.split(' ')[-1] for line in notes}) == 1 + 2  # one described the game, once
  del first
  gc.collect()
  second.reset(rows, [3] * 4, [0] * 4)
  assert [x[0] for x in second.step(rows, ['a'] * 4)] == ['level 3, episode 2, a'] * 4
  assert sum(line.startswith('closed') for line in lines(path)) == 1 + 4
  del second, env, alike
  gc.collect()
  assert sum(line.startswith('closed') for line in lines(path)) == 1 + 8


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'processes': -1}, r'python: processes=-1; allowed: integers from 0 to 256'),
    ({'processes': 257}, r'python: processes=257; allowed: integers from 0 to 256'),
    ({'processes': True}, r'python: processes=True; allowed: integers'),
    ({'processes': 2, 'memory_mib': 63}, r'memory_mib=63; allowed: 0 for no limit, or MiB of a process, from 64'),
    ({'processes': 2, 'memory_mib': -1}, r'memory_mib=-1; allowed: 0'),
    ({'processes': 2, 'memory_mib': 1.5}, r'memory_mib=1\.5; allowed: 0'),
    ({'memory_mib': 512}, r'memory_mib=512 with processes=0; allowed: 0, or a limit with processes'),
    ({'processes': 2, 'workers': 4}, r'workers=4 with processes=2; allowed: 1'),
    ({'processes': 2, 'workers': 0}, r'workers=0 with processes=2; allowed: 1'),
    ({'processes': 2, 'step_timeout_s': 0}, r'step_timeout_s=0; allowed: seconds, above'),
    ({'processes': 2, 'options': {'what': object()}}, r'options=.*object object.* with processes=2; allowed: numbers,'),
    ({'processes': 2, 'options': {'else': 1}}, r"options=\{'else': 1\}: .*Choosy does not take them \(TypeError"),
    ({'processes': 2, 'options': {'what': 'raise'}}, r"options=.*does not take them \(KeyError: 'lost'\)"),
    ({'processes': 2, 'options': {'what': 'silent'}}, r"Choosy: rules=''; allowed: text that is not blank"),
    (
      {'processes': 2, 'options': {'what': 'exit'}},
      r'class_path=.*Choosy. cannot be used in a process \(describe ended its process: exit status 6\)',
    ),
    (
      {'processes': 2, 'options': {'what': 'sleep'}, 'step_timeout_s': 3.0},
      r'class_path=.*Choosy. cannot be used in a process \(describe took longer than 3 s',
    ),
    ({'processes': 1, 'class_path': f'{LIGHT}:lines'}, 'class_path=.*lines.* has no reset; allowed: classes'),
    ({'processes': 1, 'class_path': 'nowhere:Game'}, "class_path='nowhere:Game' cannot be imported"),
  ],
)
@pytest.mark.slow_cases('options15-class_path=.*Choosy. cannot be used in a process \\\\(describe took longer than 3 s')
def test_wrong_options_are_named_in_one_line(options, message):
  with raises_one_line(message):
    registry.make('python', {'class_path': f'{LIGHT}:Choosy'} | options)


# -- Gymnasium ---------------------------------------------------------------------------------------------------------


def push(**more):
  functions = {'parse': f'{PUSH}:parse', 'render': f'{PUSH}:describe', 'success': f'{PUSH}:is_won'}
  options = {'id': f'{PUSH}:LightPush-v0', 'task': 'Push.', 'action_help': 'Two numbers.', **functions}
  return registry.make('gymnasium', options | more)


def test_gymnasium_plays_in_processes_as_it_does_here():
  there = push(processes=2, kwargs={'render_mode': 'rgb_array'}, images=1, image_size=(4, 6))
  assert PUSH not in sys.modules  # the functions and the environment are loaded in processes only
  here = push(kwargs={'render_mode': 'rgb_array'}, images=1, image_size=(4, 6))
  played = []
  for env in (here, there):
    session, form, rows = env.open(4), env.image_form, range(4)
    own = [[read_observation(x, form) for x in session.reset(rows, [3, 3, 4, 4], [0, 1, 0, 1])]]
    for _ in range(2):
      own.append([read_step(x, form) for x in session.step(rows, ['1,0.5'] * 4)])
    played.append(own)
  assert played[0] == played[1] and all(isinstance(x, TextStep) for x in played[1][2])
  assert played[1][0][0] == played[1][0][1] and played[1][1][0].observation.text.startswith('<image>\nsum ')


def test_a_parser_in_a_process_that_raises_says_no_and_is_reported_once(caplog):
  env = push(processes=1)
  texts = ('0.5,1', ' 1,1 ', 'Left', '5,5', '')
  assert [env.parse_action(x) for x in texts] == ['0.5,1', '1,1', None, None, None]
  with caplog.at_level(logging.WARNING):
    assert [env.read_action(x) for x in ('crash', 'crash', '1,1')] == [None, None, ('1,1', '1,1')]
  assert ['parse=' in r.getMessage() and 'IndexError: no such thing' in r.getMessage() for r in caplog.records] == [
    True
  ]


def test_a_parser_that_hangs_says_no_and_costs_no_row():
  names = {'id': f'{PUSH}:LightPush-v0', 'parse': f'{PUSH}:parse', 'render': '', 'success': ''}
  settings = {'kwargs': {}, 'action_names': (), 'images': 0, **names}
  games = game_processes('gymnasium', settings, count=1, memory_mib=0, step_timeout_s=LONG)
  assert games.describe('id')['count'] is None
  session = games.open(1)
  session.reset([0], [3], [0])
  games.step_timeout_s = 1.0
  assert games.is_action('sleep') == (False, 'is_action took longer than 1 s: its process was ended')
  games.step_timeout_s = LONG
  assert games.is_action('1,1') == (True, '')
  assert isinstance(read_step(session.step([0], ['1,1'])[0]), TextStep)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'id': f'{PUSH}:Lost-v0'}, r"gymnasium: id='tests.*Lost-v0' with kwargs=\{\} cannot be made"),
    ({'render': f'{PUSH}:PUSH'}, r"gymnasium: render='.*PUSH' cannot be imported"),
    ({'parse': '', 'action_names': ('Go',)}, r'action_names=.*; allowed: none for Box.*which is not a Discrete space'),
    ({'id': 'CartPole-v1', 'parse': '', 'action_names': ('A',)}, r"\('A',\); allowed: one word for each action of Dis"),
    ({'kwargs': {'x': object()}}, r'gymnasium: kwargs=.* with processes=2; allowed: numbers, texts'),
    ({'workers': 2}, r'gymnasium: workers=2 with processes=2; allowed: 1'),
  ],
)
def test_wrong_options_of_gymnasium_are_named_in_one_line(options, message):
  with raises_one_line(message):
    push(processes=2, **options)


# -- what a class tells of itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize('processes', [0, 2])
def test_wording_items_experts_and_metrics_are_those_of_the_class(processes):
  env = make('Quiz', processes=processes)
  assert (env.system, env.state_label, env.counts_turns, env.whole_answer) == ('You answer.', 'Question', False, True)
  assert [env.level_id(seed) for seed in range(4)] == ['item 0', 'item 1', 'item 2', 'item 0']
  with pytest.raises((KeyError, RuntimeError), match='no such item'):
    env.level_id(99)
  session = env.open(3)
  session.reset(range(3), [1, 5, 2], [0] * 3)
  assert env.has_expert and [read_expert(x) for x in session.expert([0, 2])] == [['2'], ['3']]
  assert isinstance(read_expert(session.expert([1])[0]), Fault)
  assert session.rationale([2, 1]) == ['One more than 2.', 'One more than 5.']
  outcomes = [read_step(x) for x in session.step(range(3), ['2', '6', ' 3'])]
  assert [(x.success, x.metrics) for x in outcomes] == [
    (True, {'letters': 1.0}), (True, {'letters': 1.0}), (False, {'letters': 2.0}),
  ]  # fmt: skip


@pytest.mark.parametrize('processes', [0, 2])
def test_a_class_that_tells_nothing_has_the_usual_wording(processes):
  env = make('Climb', options={'rungs': 6}, processes=processes)
  assert (env.system, env.state_label, env.counts_turns, env.whole_answer) == ('', 'State', True, False)
  assert not env.has_expert and env.level_id(3) is None


def test_a_row_without_an_object_has_no_advice():
  session = make('Quiz').open(2)
  session.reset([0], [1], [0])
  (advice,) = session.expert([1])
  assert isinstance(advice, Fault)
