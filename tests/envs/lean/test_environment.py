"""Theorems behind a small server on loopback: what pays, what the policy reads, and everything that may go wrong."""

from __future__ import annotations

import json
import os

import pytest

from ragen_jax import envs as registry
from ragen_jax.envs.lean import server as lean_server
from ragen_jax.envs.lean.session import COMMON_TACTICS
from ragen_jax.envs.outside.base import read_step
from ragen_jax.utils.threads import Fault
from tests.support.environments import raises_one_line
from tests.support.lean_server import serve

ROWS = [
  {'formal_statement': 'import Mathlib\n\ntheorem both : True ∧ 2 = 2 ∧ True := by\n  sorry', 'text': 'Three facts.'},
  {'formal_statement': 'theorem two : 2 = 2 := by', 'text': '', 'answer': 'theorem two : 2 = 2 := by\n  rfl\n'},
]


@pytest.fixture(scope='module')
def shared():
  with serve() as server:
    yield server


@pytest.fixture
def server(shared):
  shared.requests, shared.keys = [], []
  shared.trouble, shared.result = lambda body, number: None, lambda snippet, number: None
  return shared


@pytest.fixture
def make(server, tmp_path):
  path = tmp_path / 'statements.jsonl'

  def made(rows=ROWS, **options):
    path.write_text('\n'.join(json.dumps({'text': '', 'answer': ''} | row) for row in rows))
    fields = {'informal': 'text', 'proof': 'answer'}
    given = {'path': str(path), 'url': server.url, 'fields': fields, 'backoff_s': 0.01, 'step_reward': -0.25}
    return registry.make('lean', given | options)

  return made


def seeds_of(env):
  """A seed of each statement, by the theorem's name."""
  return {env.item(seed).gold.name: seed for seed in range(len(env.items))}


def begin(env, *names):
  session = env.open(len(names))
  first = session.reset(range(len(names)), [seeds_of(env)[name] for name in names], [0] * len(names))
  return session, first


def one(session, action):
  """The checked result of an action in row 0."""
  return read_step(session.step([0], [action])[0])


def test_a_proof_in_steps_is_paid_by_its_progress(make):
  session, (first,) = begin(make(), 'both')
  assert first == (
    'Three facts.\n\n```lean4\ntheorem both : True ∧ 2 = 2 ∧ True := by\n```\n\n1 goal is left:\n⊢ True ∧ 2 = 2 ∧ True'
  )
  step = one(session, 'constructor')
  assert (step.reward, step.done, step.success, step.effective) == (0.75, False, False, True)
  assert step.observation == (
    'Accepted.\n\n```lean4\ntheorem both : True ∧ 2 = 2 ∧ True := by\n  constructor\n```\n\n'
    '2 goals are left:\n⊢ True\n\n⊢ 2 = 2 ∧ True'
  )
  assert step.metrics == {'accepted': 1.0, 'progress': 1.0, 'timeouts': 0.0, 'tactics': 1.0}
  step = one(session, 'trivial\nconstructor\nrfl')
  assert (step.reward, step.done) == (0.75, False) and step.observation.endswith('1 goal is left:\n⊢ True')
  step = one(session, '```lean4\ntrivial\n```')
  assert (step.reward, step.done, step.success, step.effective) == (9.75, True, True, True)
  assert step.observation.startswith('The proof is complete.\n\n```lean4') and 'left' not in step.observation


def test_doing_nothing_and_facts_that_nobody_asked_for_do_not_pay(make):
  session, _ = begin(make(), 'both')
  steps = [one(session, action) for action in ('skip', 'have h : True := by trivial', 'show X', 'show Y', 'show X')]
  assert [step.reward for step in steps] == [-0.25, -0.25, 0.75, 0.75, -0.25]
  assert [step.effective for step in steps] == [False, True, True, True, True]
  assert steps[0].observation.startswith('Accepted, but the goals are the same.\n\n')
  # All progress together is limited.
  later = [one(session, f'show Z{i}').reward for i in range(3)]
  assert later == [0.75, -0.25, -0.25]
  session, _ = begin(make(progress_reward=2.0, most_progress=3.0), 'both')
  assert [one(session, f'show Z{i}').reward for i in range(3)] == [1.75, 0.75, -0.25]
  session.reset([0], [0], [0])  # a new episode
  assert one(session, 'show Z0').reward == 1.75


@pytest.mark.parametrize(
  ('action', 'told'),
  [
    ('oops', "line 2: unknown tactic 'oops'"),
    ('have h : False := by skip', 'line 2: unsolved goals\n⊢ False'),
    ('axiomatic', 'It uses the axiom Lean.ofReduceBool, which a proof may not use.'),
    ('sneak', 'It uses the axiom sorryAx, which a proof may not use.'),
    ('give_up', 'It uses sorry.'),
    ('exact sorryAx _ true', 'It has the word sorryAx, which is not allowed.'),
    ('rfl\nmacro "#print" x:ident : command => `(skip)', 'It has the word macro, which is not allowed.'),
    ('slowly', 'Lean took longer than 7 s.'),
  ],
)
def test_what_is_not_accepted_is_told_and_not_added(make, server, action, told):
  session, _ = begin(make(tactic_timeout_s=7), 'two')
  one(session, 'skip')
  asked = len(server.requests)
  step = one(session, action)
  assert step.observation == (
    f'Not accepted; nothing was added.\n{told}\n\n```lean4\ntheorem two : 2 = 2 := by\n  skip\n```\n\n'
    '1 goal is left:\n⊢ 2 = 2'
  )
  assert (step.reward, step.done, step.effective) == (-1.25, False, False)
  assert step.metrics == {'accepted': 0.0, 'progress': 0.0, 'timeouts': float(action == 'slowly'), 'tactics': 1.0}
  assert len(server.requests) - asked == (0 if 'is not allowed' in told else 1)
  assert one(session, 'rfl').success


def test_long_goals_and_messages_are_cut_with_a_mark(make):
  session, _ = begin(make(max_goal_chars=120, max_feedback_chars=100), 'two')
  step = one(session, 'show ' + 'x' * 300)
  goals = step.observation.partition('1 goal is left:\n')[2]
  assert len(goals) == 120 and goals.startswith('⊢ xxx') and goals.endswith('x [cut]')
  told = one(session, 'y' * 300).observation.split('\n')[1]
  assert len(told) == 100 and told.endswith('y [cut]')


def test_the_rows_of_a_step_are_one_request_and_equal_texts_are_checked_once(make, server):
  env = make(tactic_timeout_s=9)
  session, _ = begin(env, 'both', 'two', 'two', 'both')
  assert len(server.requests) == 1 and len(server.checked) == 2
  results = session.step([0, 1, 2, 3], ['constructor', 'rfl', 'rfl', 'skip'])
  assert [read_step(x).done for x in results] == [False, True, True, False] and len(server.requests) == 2
  body = server.requests[-1]
  assert [x['id'] for x in body['snippets']] == ['0', '1', '2'] and (body['timeout'], body['reuse']) == (9, True)
  assert body['snippets'][1]['code'] == f'{env.preamble}\n\ntheorem two : 2 = 2 := by\n  rfl\n\n#print axioms two\n'
  assert body['snippets'][0]['code'].startswith('import Mathlib\n\ntheorem both')
  session.reset([0], [seeds_of(env)['two']], [0])  # its goals are known
  assert len(server.requests) == 2
  session, _ = begin(make(batch_size=1), 'both', 'two')
  assert len(server.requests) == 4


def test_a_busy_server_is_asked_again_and_then_a_fault(make, server):
  server.trouble = lambda body, number: (429, b'') if number in (1, 3, 4, 5) else None
  session, (first,) = begin(make(retries=2), 'two')
  assert isinstance(first, str) and len(server.requests) == 2
  (fault,) = session.step([0], ['rfl'])
  assert isinstance(fault, Fault) and str(fault) == (
    f'check got no answer: {server.url}/api/check: status 429 Too Many Requests, 3 tries'
  )


@pytest.mark.parametrize(
  ('result', 'told'),
  [
    ({'error': 'Lean REPL out of memory'}, 'Lean failed: Lean REPL out of memory'),
    ({'error': 'Lean REPL header command timed out in 30 seconds'}, 'Lean failed: Lean REPL header command timed out'),
    ({'response': {'message': 'Unknown environment.'}}, 'Lean failed: Unknown environment.'),
    ({'error': {'code': 137}}, "Lean failed: {'code': 137}"),
    ({'error': ['a' * 2000]}, "Lean failed: ['aaa"),
  ],
)
def test_a_process_that_fails_is_tried_again_and_then_a_fault(make, server, result, told):
  session, _ = begin(make(), 'two', 'two')
  server.result = lambda snippet, number: result if 'rfl' in snippet['code'] and number == 2 else None
  step, other = map(read_step, session.step([0, 1], ['rfl', 'skip']))
  assert step.success and not other.done and [len(body['snippets']) for body in server.requests] == [1, 2, 1]
  server.result = lambda snippet, number: result if 'show' in snippet['code'] else None
  fault, other = session.step([0, 1], ['show A', 'skip'])
  assert isinstance(fault, Fault) and told in str(fault) and len(str(fault)) < 500 and read_step(other).reward == -0.25
  count = len(server.requests)
  session, _ = begin(make(retries=0), 'two')
  assert isinstance(session.step([0], ['show A'])[0], Fault) and len(server.requests) == count + 2


@pytest.mark.parametrize(
  ('result', 'told'),
  [
    ({'response': {'messages': []}}, 'server answered in another form: it does not say which axioms'),
    ({'response': {'messages': [3]}}, 'server answered in another form: a message has no'),
    ({'response': None}, 'server answered neither a response nor an error'),
  ],
)
def test_lies_are_faults(make, server, result, told):
  session, _ = begin(make(), 'two')
  server.result = lambda snippet, number: result
  (fault,) = session.step([0], ['rfl'])
  assert isinstance(fault, Fault) and told in str(fault) and len(server.requests) == 2


@pytest.mark.parametrize('answer', [b'[]', b'{"results": []}', b'{"results": [{"id": "7"}]}', b'x'])
def test_answers_to_other_texts_are_faults_after_all_tries(make, server, answer):
  session, _ = begin(make(retries=1), 'two')
  server.trouble = lambda body, number: (200, answer)
  assert 'check got no answer' in str(session.step([0], ['rfl'])[0]) and len(server.requests) == 3


def test_a_statement_that_lean_does_not_accept_is_a_fault(make):
  rows = [*ROWS, {'formal_statement': 'theorem bad : True := by\n  oops := by'}]
  session, results = begin(make(rows), 'bad', 'two')
  assert isinstance(results[1], str) and isinstance(results[0], Fault)
  assert results[0].kind == 'Lean does not accept the statement'
  assert read_step(session.step([1], ['rfl'])[0]).success


def test_the_check_has_a_proof_and_a_part_of_one_decided(make, server, monkeypatch):
  env = make()
  env.check()
  assert len(server.requests) == 1 and len(server.checked) == 2 and server.keys == [None]
  assert server.checked[0].startswith('import Mathlib\n\ntheorem ragen_jax_check')
  monkeypatch.setenv(lean_server.KEY_VARIABLE, 'k-1')
  make().check()
  assert server.keys[-1] == 'Bearer k-1'
  monkeypatch.setenv(lean_server.KEY_VARIABLE, 'two words')
  with raises_one_line('^lean: the environment variable LEAN_SERVER_API_KEY has characters that no key has$'):
    make()


def test_a_server_that_says_something_else_is_named_before_anything_begins(make, server):
  env = make()
  server.result = lambda snippet, number: {'response': {'messages': [
    {'severity': 'error', 'pos': {'line': 1}, 'data': "unknown package 'Mathlib'"}]}}  # fmt: skip
  with raises_one_line(
    "the server takes a trial proof for rejected, not for proved .unknown package 'Mathlib'.; allow"
  ):
    env.check()
  server.trouble = lambda body, number: (404, b'')
  with raises_one_line(
    r'^lean: url: check got no answer: http://\S+/api/check: status 404 [^/]*; allowed: the address of kimina'
  ):
    env.check()


def test_the_expert_is_the_proof_of_the_data(make):
  env = make()
  assert env.has_expert and not make(fields={}).has_expert
  session, _ = begin(env, 'both', 'two')
  assert session.expert([0, 1]) == [[], ['rfl']]
  session.step([1], ['skip'])
  assert session.expert([1]) == [[]]
  rows = [{'formal_statement': 'theorem two : 2 = 2 := by', 'answer': '  skip\n  rfl'}]
  session, _ = begin(make(rows), 'two')
  (plan,) = session.expert([0])
  assert plan == ['skip\nrfl'] and one(session, plan[0]).success


def test_random_play_writes_common_tactics(make):
  env = make()
  session, _ = begin(env, 'two', 'both')
  assert session.legal_actions([1, 0]) == [list(COMMON_TACTICS)] * 2 and env.has_legal_actions
  assert all(env.read_action(word) == (word, word) for word in COMMON_TACTICS)
  assert env.read_action('```lean\n```') is None and env.read_action('  simp\n  ring') == ('  simp\n  ring',) * 2


def test_parts_have_no_statement_in_common_and_groups_stay_together(make):
  rows = [{'formal_statement': f'theorem t{i} : {i} = {i} := by', 'answer': f'{i // 2}'} for i in range(40)]
  options = {'rows': rows, 'test_share': 0.4, 'fields': {'group': 'answer'}}
  parts = {split: make(split=split, **options) for split in ('train', 'test', 'all')}
  names = {split: {item.gold.name for item in env.items} for split, env in parts.items()}
  assert names['train'] & names['test'] == set() and names['train'] | names['test'] == names['all']
  assert len(names['all']) == 40 and all(
    (f't{2 * i}' in names['test']) == (f't{2 * i + 1}' in names['test']) for i in range(20)
  )
  env = parts['all']
  assert len({env.level_id(seed) for seed in range(40)}) == 20 and env.level_id(3) == env.item(3).id
  assert len(make(limit=3, rows=rows).items) == 3
  assert [item.gold.name for item in make(max_question_chars=24, rows=[*rows[9:10], *ROWS]).items] == ['t9']


def test_a_theorem_is_on_one_side_of_the_split_however_it_is_written(make):
  forms = (
    'theorem t{i} : {i} = {i} := by', 'import Mathlib\n\nlemma Nat.t{i} : {i}  =  {i} :=\n  by sorry',
    '/-- Obvious. -/\ntheorem «n {i}» : {i} = {i} := sorry', 'theorem _root_.a : {i} = {i} := by -- \n  sorry',
  )  # fmt: skip
  rows = [{'formal_statement': form.format(i=i)} for i in range(24) for form in forms]
  parts = [make(rows, split=split, test_share=0.5).items for split in ('train', 'test')]
  facts = [{item.gold.text.rpartition(' = ')[2].split()[0] for item in items} for items in parts]
  assert not facts[0] & facts[1] and len(facts[0] | facts[1]) == 24
  assert sum(map(len, parts)) == len(rows) and len({item.id for items in parts for item in items}) == 24


def test_statements_with_other_words_are_told_in_words_of_statements(make, caplog):
  with caplog.at_level('WARNING', 'ragen_jax'):
    make([ROWS[1], ROWS[1] | {'text': 'Two is two.'}]).items  # noqa: B018
  assert '1 statements stand there before with another header or other words' in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
  ('options', 'line'),
  [
    ({'url': 'localhost:8000'}, "lean: url='localhost:8000'; allowed: 'http://host:port/path' or https"),
    ({'hub': 'a/b'}, 'lean: path=.*, hub=.*; allowed: one of them'),
    ({'path': 'x.csv,x.csv'}, 'lean: path=.*; allowed: files that differ'),
    (
      {'fields': {'question': 'x'}},
      "lean: fields.question='x'; allowed: statement, informal, header, proof, group, diff",
    ),
    ({'fields': {'statement': ''}}, "lean: fields.statement=''; allowed: the name of a field of the rows"),
    ({'hub_options': {'x': 1}}, 'lean: hub_options.x=1; allowed: name, split'),
    ({'split': 'dev'}, "lean: split='dev'; allowed: all, train, test"),
    ({'test_share': 1.0}, 'lean: test_share=1.0; allowed: numbers between 0 and 1'),
    ({'bad_rows': 'keep'}, "lean: bad_rows='keep'; allowed: refuse, drop"),
    ({'preamble': 3}, 'lean: preamble=3; allowed: text'),
    ({'limit': -1}, 'lean: limit=-1; allowed: whole numbers from 0'),
    ({'batch_size': 0}, 'lean: batch_size=0; allowed: whole numbers from 1'),
    ({'max_goal_chars': 99}, 'lean: max_goal_chars=99; allowed: whole numbers from 100'),
    ({'tactic_timeout_s': 0}, 'lean: tactic_timeout_s=0; allowed: whole numbers from 1'),
    ({'tactic_timeout_s': 4000, 'timeout_s': 9e3}, 'lean: tactic_timeout_s=4000; allowed: at most 3600'),
    ({'timeout_s': 30.0}, 'lean: timeout_s=30.0; allowed: above tactic_timeout_s=30'),
    ({'backoff_s': 0.0}, 'lean: backoff_s=0.0; allowed: seconds, above 0'),
    ({'success_reward': -1.0}, 'lean: success_reward=-1.0; allowed: numbers from 0'),
    ({'step_reward': 0.1}, 'lean: step_reward=0.1; allowed: numbers up to 0'),
    ({'rejected_reward': float('nan')}, 'lean: rejected_reward=nan; allowed: numbers up to 0'),
    ({'most_progress': 10.0}, r'lean: most_progress=10.0; allowed: below success_reward=10.0, so that no'),
  ],
)
def test_bad_options_are_one_line(make, options, line):
  with raises_one_line(f'^{line}'):
    make(**options)


@pytest.mark.parametrize(
  ('row', 'line'),
  [
    (
      {'formal_statement': 'example : True := by'},
      "line 2: formal_statement='example : True := by' is no statement; allowed: a theorem",
    ),
    ({'formal_statement': None}, 'line 2: formal_statement=None; allowed: text that is not blank'),
    ({'statement': 'x'}, r"line 2 has no field 'formal_statement' \(fields.statement\)"),
    ({'formal_statement': 'theorem a : True := by', 'text': 3}, 'line 2: text=3; allowed: text$'),
    ({'formal_statement': 'theorem a : True := by', 'answer': 3}, 'line 2: answer=3; allowed: text$'),
  ],
)
def test_bad_rows_are_named_with_their_place_or_dropped(make, row, line):
  with raises_one_line(f"^lean: path='.*statements.jsonl': {line}"):
    make([ROWS[1], row]).check()
  assert [item.gold.name for item in make([ROWS[1], row], bad_rows='drop').items] == ['two']


def test_data_that_are_missing_are_named(make, server):
  for options, line in (
    ({'path': ''}, "lean: path=''; allowed: a file of statements"),
    ({'path': os.devnull + '.jsonl'}, "lean: path='/dev/null.jsonl': cannot be read"),
    ({'fields': {'header': 'pre'}}, r"line 1 has no field 'pre' \(fields.header\); its fields are text, answer"),
    ({'fields': {'informal': 'txt'}}, r"no field 'txt' \(fields.informal\); did you mean 'text'"),
    ({'fields': {'proof': 'tactics'}}, r"no field 'tactics' \(fields.proof\); its fields"),
    ({'rows': []}, 'has no rows; allowed: at least one statement$'),
    ({'max_question_chars': 3}, 'all statements have more than max_question_chars=3 characters'),
  ):
    with raises_one_line(line):
      make(**options).check()
  assert server.requests == []
