"""Shopping in a small shop on loopback, and everything that its server may do wrong."""

from __future__ import annotations

import pytest

from ragen_jax import envs as registry
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import read_step
from ragen_jax.envs.webshop.site import LONGEST_SEARCH, chosen_options, search_words
from ragen_jax.utils.threads import Fault
from tests.support import webshop_server as shop
from tests.support.environments import raises_one_line


@pytest.fixture(scope='module')
def shared():
  with shop.serve() as server:
    yield server


@pytest.fixture
def server(shared):
  shared.paths, shared.sessions = [], {}
  shared.trouble = lambda path, number: None
  return shared


@pytest.fixture
def make(server):
  return lambda **options: registry.make('webshop', {'url': server.url, 'goals': 2, 'backoff_s': 0.01} | options)


def begin(env, *goals):
  seeds = {env.goal(seed): seed for seed in range(2)}
  session = env.open(len(goals))
  first = session.reset(range(len(goals)), [seeds[goal] for goal in goals], [0] * len(goals))
  return session, first


def play(env, session, *actions):
  """The last result of actions in row 0, as they are written."""
  for action in actions:
    step = read_step(session.step([0], [env.parse_action(action)])[0])
  return step


BUY = ('search[Red]', 'click[B01]', 'click[large]', 'click[Buy Now]')


def test_a_purchase_that_fits_pays_1(make, server):
  env = make()
  session, (first,) = begin(env, 0)
  assert first.endswith('lower than 20.00 dollars [SEP] Now [SEP] Search\nPossible actions: search[words]')
  step = play(env, session, *BUY[:3])
  assert (step.reward, step.done, step.effective) == (0.0, False, True)
  shown = step.observation.split('\n')
  assert shown[1] == 'Chosen: size: large' and 'click[buy now], click[color: red], click[blue]' in shown[2]
  assert step.metrics == {'purchases': 0.0, 'raw_reward': 0.0, 'impossible': 0.0}
  step = play(env, session, BUY[3])
  assert (step.reward, step.done, step.success) == (1.0, True, True)
  assert step.observation == 'You bought it. Score: 1.00 of 1.'
  assert step.metrics == {
    'purchases': 1.0, 'raw_reward': 1.0, 'impossible': 0.0, 'r_type': 1.0, 'r_att': 1.0, 'r_price': 1.0
  }  # fmt: skip
  assert server.paths[1] == '/search_results/ragen0_fixed_0/red/1' and len(server.paths) == 5


@pytest.mark.parametrize(('reward', 'paid'), [('success', 0.0), ('raw', 2 / 3)])
def test_a_purchase_that_fits_in_part_is_no_success(make, reward, paid):
  env = make(reward=reward)
  session, _ = begin(env, 0)
  step = play(env, session, *BUY[:2], BUY[3])
  assert step.reward == pytest.approx(paid) and step.done and not step.success
  assert step.metrics['raw_reward'] == pytest.approx(2 / 3)


@pytest.mark.parametrize('reward', ['success', 'raw'])
def test_a_score_above_1_pays_1(make, server, reward):
  env = make(reward=reward)
  session, _ = begin(env, 0)
  server.trouble = lambda path, number: (200, '<h3 id="reward"><pre>1.25</pre></h3>') if 'done' in path else None
  step = play(env, session, *BUY)
  assert (step.reward, step.success, step.metrics['raw_reward']) == (1.0, True, 1.25)
  assert step.observation == 'You bought it. Score: 1.00 of 1.'


@pytest.mark.parametrize(('score', 'shown'), [('0.996', '0.99'), ('0.29', '0.29'), ('0.6666666666666666', '0.66')])
def test_a_score_below_1_is_not_shown_as_1(make, server, score, shown):
  session, _ = begin(make(), 0)
  server.trouble = lambda path, number: (200, f'<h3 id="reward"><pre>{score}</pre></h3>') if 'done' in path else None
  step = play(make(), session, *BUY)
  assert step.observation == f'You bought it. Score: {shown} of 1.' and not step.success


def test_pages_and_options_are_kept_by_their_addresses(make):
  env = make(show_actions=False)
  session, _ = begin(env, 0)
  step = play(env, session, 'search[shirt]', 'click[next >]')
  assert 'Page 2 of 12' in step.observation and 'Possible' not in step.observation
  step = play(env, session, 'click[< Prev]', 'click[b01]', 'click[trim: red]', 'click[features]')
  assert 'Features of Red shirt' in step.observation and 'Chosen' not in step.observation
  step = play(env, session, 'click[< prev]')
  assert step.observation.endswith('Price: $12.5\nChosen: trim: red')
  step = play(env, session, 'click[< back to results]')
  assert 'Page 1 of 12' in step.observation


@pytest.mark.parametrize('action', ['click[B01]', 'click[search]', 'click[buy now]', 'search[hat]'])
def test_what_is_not_possible_changes_nothing(make, server, action):
  env = make()
  session, _ = begin(env, 0)
  if action.startswith('search'):
    play(env, session, 'search[red]')
  count = len(server.paths)
  step = play(env, session, action)
  assert step.observation.startswith('This is not possible here.\nInstruction:') and not step.effective
  assert (step.reward, step.done, step.metrics['impossible']) == (0.0, False, 1.0) and len(server.paths) == count


@pytest.mark.parametrize(
  ('text', 'action'),
  [
    ('search[Red  shirt]', 'search[red shirt]'), (' CLICK [Buy\nNow] ', 'click[buy now]'), ('search[<r>]', 'search[r]'),
    ("search[men's 50% a/b #3]", "search[men's 50% a b 3]"), ('search[..]', None), ('search[]', None),
    ('click[ ]', None), ('buy now', None), ('search red', None), ('click[a] click[b]', 'click[a] click[b]'),
  ],
)  # fmt: skip
def test_actions_are_read_as_the_site_can_take_them(make, text, action):
  assert make().parse_action(text) == action
  assert len(search_words('x' * 999)) == LONGEST_SEARCH


def test_chosen_options_are_those_of_an_address():
  assert chosen_options('http://h/item_page/s/B/w/1/%7B%27a%27%3A%20%27b%27%7D') == {'a': 'b'}
  for address in ('http://h/item_page/s/B/w/1/%7B', 'http://h/item_page/s/B/w/1/3', 'http://h/done/s/B/%7B1%3A2%7D'):
    assert chosen_options(address) == {}


def test_random_play_knows_the_clicks_and_a_search(make):
  env = make()
  session, _ = begin(env, 0, 1)
  session.step([1], ['search[hat]'])
  assert env.has_legal_actions and session.legal_actions([1, 0]) == [
    ['click[back to search]', 'click[b03]'],
    ['search[find me a red shirt, with size large]'],
  ]


def test_rows_of_one_goal_begin_alike_in_sessions_of_their_own(make, server):
  env = make()
  session, first = begin(env, 1, 1)
  assert first[0] == first[1] and sorted(server.paths) == ['/ragen0_fixed_1', '/ragen1_fixed_1']
  session.step([0], ['search[hat]'])
  step = read_step(session.step([1], ['search[red]'])[0])
  assert 'B01' in step.observation and 'B03' not in step.observation
  # A further episode uses no further session.
  session.reset([0], [0], [0])
  session.reset([0], [0], [0])
  assert len(server.sessions) == 3


def test_a_busy_server_is_asked_again_and_then_a_fault(make, server):
  server.trouble = lambda path, number: (503, '') if number in (1, 3, 4, 5) else None
  session, (first,) = begin(make(retries=2), 0)
  assert isinstance(first, str) and len(server.paths) == 2
  (fault,) = session.step([0], ['search[red]'])
  assert isinstance(fault, Fault) and 'page got no answer' in str(fault) and 'status 503' in str(fault)
  assert len(server.paths) == 5


def test_lies_are_faults_of_their_rows(make, server):
  env = make(retries=0)
  session, _ = begin(env, 0, 1)
  session.step([0, 1], ['search[red]', 'search[hat]'])
  server.trouble = lambda path, number: (200, '<h1>Bought</h1>') if 'B01' in path else None
  fault, step = session.step([0, 1], ['click[b01]', 'click[b03]'])
  assert isinstance(fault, Fault) and 'neither an instruction nor a score' in str(fault)
  assert 'Blue hat' in read_step(step).observation
  head = (
    '<div id="instruction-text"><h4>Instruction: x</h4></div><form action="{}"><button class="btn">go</button></form>'
  )
  for target in ('http://elsewhere/x', '//elsewhere/x', 'file:///etc/passwd'):
    server.trouble = lambda path, number, target=target: (200, head.format(target))
    session, _ = begin(env, 0)
    count = len(server.paths)
    (fault,) = session.step([0], ['click[go]'])
    assert isinstance(fault, Fault) and fault.kind == 'page names an address of another server'
    assert len(server.paths) == count


def test_parts_are_webshops_and_have_no_goal_in_common(make):
  goals = {
    split: {env.goal(seed) for seed in range(2000)}
    for split in ('train', 'validation', 'test', 'all')
    for env in [make(goals=1600, split=split)]
  }
  assert goals['test'] == set(range(500)) and goals['validation'] == set(range(500, 1500))
  assert goals['train'] == set(range(1500, 1600)) and goals['all'] == set(range(1600))
  env = make(goals=1600, split='test')
  assert [env.goal(seed) for seed in range(9)] != list(range(9)) and env.level_id(5) == f'webshop {env.goal(5)}'
  assert {make(goals=700, split='validation').goal(seed) for seed in range(500)} == set(range(500, 700))


def test_the_check_asks_for_the_first_and_the_last_goal(make, server):
  make().check()
  assert server.paths == ['/ragen0_fixed_0', '/ragen0_fixed_1']
  with raises_one_line(
    r'^webshop: goals=3: goal 2 is not there \(http\S+_2: status 500 .*, 1 try\); allowed: the number of goals that'
  ):
    make(goals=3).check()
  assert len(server.paths) == 4  # an error of the site is its answer, and not tried again
  with raises_one_line('^webshop: goals=0; allowed: the number of goals of the server, which tools/serve_webshop'):
    make(goals=0).check()
  server.trouble = lambda path, number: (200, shop.done(0, 'B01', {}))
  with raises_one_line(
    r'^webshop: url: http\S+: the page has no field for search words; allowed: a server that tools/'
  ):
    make().check()


def test_a_server_that_is_not_there_yet_is_asked_again(make, server):
  server.trouble = lambda path, number: (503, '') if number < 3 else None
  make(retries=2, backoff_s=0.01).check()
  assert server.paths == ['/ragen0_fixed_0'] * 3 + ['/ragen0_fixed_1']
  server.trouble = lambda path, number: (503, '')
  with raises_one_line(
    r'^webshop: url: http\S+_0: status 503 Service Unavailable, 2 tries; allowed: a server that tools/serve_webshop'
  ):
    make(retries=1, backoff_s=0.01).check()


@pytest.mark.parametrize(
  ('options', 'line'),
  [
    ({'url': 'localhost'}, "webshop: url='localhost'; allowed: 'http://host:port/path' or https"),
    ({'goals': -1}, 'webshop: goals=-1; allowed: whole numbers from 0'),
    ({'goals': 1500, 'split': 'train'}, "webshop: goals=1500 with split='train'; allowed: above 1500, where this part"),
    ({'split': 'dev'}, "webshop: split='dev'; allowed: all, train, validation, test"),
    ({'reward': 'score'}, "webshop: reward='score'; allowed: success, raw"),
    ({'show_actions': 1}, 'webshop: show_actions=1; allowed: True, False'),
    ({'workers': 0}, 'webshop: workers=0; allowed: whole numbers from 1'),
    ({'timeout_s': 0.0}, 'webshop: timeout_s=0.0; allowed: seconds, above 0'),
  ],
)
def test_bad_options_are_one_line(make, options, line):
  with raises_one_line(f'^{line}'):
    make(**options)


def test_a_budget_must_allow_a_purchase(make):
  make().check_budget(Budget(3, 3, 1))
  with raises_one_line('max_turns=9, max_actions=2; allowed: at least 3 actions'):
    make().check_budget(Budget(9, 2, 1))


def test_the_prompt_says_what_pays(make):
  assert 'Only a purchase that fits it in all points pays 1.' in make().rules()
  rules = make(reward='raw', show_actions=False).rules()
  assert 'The better it fits, the more it pays, at most 1.' in rules and 'Each page ends' not in rules
