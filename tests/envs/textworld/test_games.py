"""The play of one game: a package that is made up here, and the text that a game writes around its own."""

from __future__ import annotations

import types

import pytest

from ragen_jax.envs.textworld.games import TextWorldGame, is_won_by_its_walkthrough, read_feedback


def state(feedback, *, plan=(), known=(), facts=(), score=0, most=4, won=False):
  return types.SimpleNamespace(
    feedback=feedback, policy_commands=list(plan), admissible_commands=list(known), facts=list(facts), score=score,
    max_score=most, won=won, lost=False,
  )  # fmt: skip


class Package:
  """Stories, each a list of states: a command leads to the next one, the last is the end. Notes what is called."""

  def __init__(self, **stories):
    self.stories, self.notes = stories, []

  def EnvInfos(self, **wanted):
    assert all(wanted.values())
    return wanted

  def start(self, file, request_infos):
    self.notes.append(f'start {file}')
    return _Story(self.stories[file], self.notes)


class _Story:
  def __init__(self, states, notes):
    self._states, self._notes = states, notes

  def seed(self, seed):
    self._notes.append(f'seed {seed}')

  def reset(self):
    self._at = 0
    return self._states[0]

  def step(self, command):
    self._at += 1
    now = self._states[self._at]
    return now, now.score, self._at == len(self._states) - 1

  def close(self):
    self._notes.append('close')


def make(package, reward='score', shows_commands=False):
  games = types.SimpleNamespace(
    files=tuple(package.stories), reward=reward, shows_commands=shows_commands, package=package
  )
  return TextWorldGame(games)


STORY = [
  state('Find it.', plan=['open Box', 'take it'], known=['look', 'open Box']),
  state('Dark.', plan=['open Box', 'take it'], known=['look', 'open Box']),
  state('Opened.', plan=['take it'], known=['look', 'take it'], facts=['open'], score=1),
  state('Taken.', known=['look'], facts=['open', 'taken'], score=4, won=True),
]


@pytest.mark.parametrize(('reward', 'paid'), [('score', [0.0, 1.0, 3.0]), ('win', [0.0, 0.0, 1.0])])
def test_rewards_flags_and_metrics_are_those_of_the_story(reward, paid):
  game = make(Package(a=STORY), reward)
  assert game.reset(0, 0) == 'Find it.'
  steps = [game.step(command) for command in ('sing', ' OPEN  box', 'take it')]
  assert [step[0] for step in steps] == ['Dark.', 'Opened.', 'Taken.']
  assert [step[1] for step in steps] == paid
  assert [step[2] for step in steps] == [False, False, True]
  infos = [step[3] for step in steps]
  assert [info['success'] for info in infos] == [False, False, True]
  assert [info['effective'] for info in infos] == [False, True, True]
  metrics = {name: sum(info['metrics'][name] for info in infos) for name in infos[0]['metrics']}
  assert metrics == pytest.approx({'score_share': 1.0, 'admissible_share': 2 / 3})
  assert [info['metrics']['score_share'] for info in infos] == [0.0, 0.25, 0.75]


def test_a_loss_pays_nothing_for_a_win_and_a_game_without_points_has_no_share():
  game = make(Package(a=[state('Eat.', most=0), state('*** You lost! ***', score=-2, most=0)]), 'win')
  game.reset(0, 0)
  text, reward, done, info = game.step('eat poison')
  assert (text, reward, done, info['success']) == ('*** You lost! ***', 0.0, True, False)
  assert info['metrics']['score_share'] == 0.0


def test_the_plan_ends_with_the_game_and_where_the_game_does_not_understand_it():
  game = make(Package(a=STORY))
  game.reset(0, 0)
  assert game.expert() == ['open Box', 'take it'] and game.legal_actions() == ['look', 'open Box']
  game.step('open box')  # in this story, it changes nothing
  assert game.expert() == []
  game.step('open box')
  assert game.expert() == ['take it']
  game.step('take it')
  assert game.expert() == game.legal_actions() == [] and game.rationale() == ''
  game.reset(0, 0)
  game.step('look')
  assert game.expert() == ['open Box', 'take it']  # another command that changed nothing is no refusal


def test_a_plan_may_say_twice_what_changes_something_each_time():
  hall = [state(f'Room {i}.', plan=['go north'] * (2 - i), facts=[f'room {i}']) for i in range(2)]
  game = make(Package(a=[*hall, state('Out.', won=True)]))
  game.reset(0, 0)
  game.step('go north')
  assert game.expert() == ['go north']


def test_commands_are_listed_until_the_game_is_over():
  game = make(Package(a=STORY), shows_commands=True)
  assert game.reset(0, 0) == 'Find it.\n\nPossible commands: look, open Box'
  texts = [game.step('x')[0] for _ in range(3)]
  assert texts == [
    'Dark.\n\nPossible commands: look, open Box',
    'Opened.\n\nPossible commands: look, take it',
    'Taken.',
  ]


def test_an_interpreter_is_kept_while_the_file_stays_and_an_episode_leaves_nothing_to_the_next():
  package = Package(a=STORY, b=STORY[:2])
  game = make(package)
  for index in (0, 0, 1, 0):
    game.reset(index, 3)
    game.step('look')
  assert game.step('open box')[3]['metrics'] == {'score_share': 0.25, 'admissible_share': 0.0}
  game.close()
  game.close()
  assert package.notes == [
    'start a', 'seed 0', 'close', 'start b', 'seed 0', 'close', 'start a', 'seed 0', 'close',
  ]  # fmt: skip


def test_a_walkthrough_wins_or_does_not():
  package = Package(good=[STORY[0], STORY[2], STORY[3]], bad=STORY)
  assert is_won_by_its_walkthrough(package, 'good')
  assert not is_won_by_its_walkthrough(package, 'bad')
  assert package.notes.count('close') == 2


def test_the_frame_of_a_text_is_left_out():
  status = '>' + ' ' * 128 + '-= Spare Room =-0/1'
  banner = '\n\n   ________  __ \n  |   \\|  \\|\n   \\$$$$| $$>  /$$<\n\n'
  assert read_feedback(f'{banner}Welcome!\n\n-= Spare Room =-\nA room.   \n\n\n\nGo > south.\n\n{status}') == (
    'Welcome!\n\n-= Spare Room =-\nA room.\n\nGo > south.'
  )
  question = 'Would you like to RESTART, RESTORE a saved game, QUIT or UNDO the last command?\n'
  end = f'\nYou win.\n\n{" " * 55}*** The End ***\n\nYou scored 1.\n\n\n{question}{status.replace("0/1", "-1/12")}'
  assert read_feedback(end) == 'You win.\n\n*** The End ***\n\nYou scored 1.'
  assert read_feedback('  look:   see\n  go:   walk') == 'look:   see\n  go:   walk'
