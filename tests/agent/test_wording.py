"""Environments with a wording of their own, and whose answers are one action: what prompts say and what is parsed."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen_jax import envs as registry
from ragen_jax.agent.context_manager import CONTEXTS, ContextManager
from ragen_jax.agent.episode import Turn
from ragen_jax.agent.speakers import written_reply
from ragen_jax.envs import Session, TextEnvironment
from ragen_jax.envs.base import Budget
from ragen_jax.envs.spec import EnvSpec
from tests.support.environments import raises_one_line
from tests.support.speakers import context_settings
from tests.support.text_games import make

PROGRAM = '  def f(x):\n    return x || 1\n\n  print(f(0))'


@dataclasses.dataclass(frozen=True, eq=False)
class Worded(TextEnvironment):
  """Says what its fields say."""

  name: ClassVar[str] = 'worded'
  whole_answer: bool = True
  system: str = 'You write programs.'
  state_label: str = 'Question'
  counts_turns: bool = False

  def rules(self) -> str:
    return 'Write it.'

  def open(self, rows: int) -> Session:
    raise NotImplementedError


def _context(tokenizer=None, env=None, turn_actions=5, **settings) -> ContextManager:
  spec = EnvSpec('Worded', env or Worded(), Budget(3, 7, turn_actions), 40, 1)
  return ContextManager(tokenizer, [spec], context_settings(**settings))


def _past(context: ContextManager) -> list[Turn]:
  return [Turn('the first', 'a reply', [PROGRAM], (0.25,), 0.0, True, 1, actions_left=7, ids=(5, 6))]


@pytest.mark.parametrize('answer', [PROGRAM, f'\n \n{PROGRAM}\n\n  ', f'\r\n{PROGRAM} \n'])
def test_a_program_is_one_action_with_its_indentation(answer):
  parsed = _context().parse(0, f'<think>x</think><answer>{answer}</answer>')
  assert parsed.actions == parsed.names == (PROGRAM,) and parsed.valid
  split = _context(env=Worded(whole_answer=False)).parse(0, f'<think>x</think><answer>{answer}</answer>')
  assert len(split.actions) == 2 and split.actions[0] == PROGRAM.partition('||')[0].strip()


def test_a_line_alone_is_trimmed_and_nothing_is_no_action():
  context = _context()
  assert context.parse(0, '<think>x</think><answer> \n  42 || 43 \n</answer>').actions == ('42 || 43',)
  for blank in ('', ' ', '\n \n'):
    parsed = context.parse(0, f'<think>x</think><answer>{blank}</answer>')
    assert parsed.actions == () and not parsed.valid


@given(st.text(alphabet=' \t\nab|<>/', max_size=30))
@pytest.mark.slow
def test_an_answer_is_at_most_one_action_which_is_read_again_as_itself(answer):
  context = _context()
  pieces = context.pieces(0, answer)
  assert len(pieces) == bool(answer.strip())
  if pieces:
    assert pieces[0].strip() == answer.strip() and context.pieces(0, pieces[0]) == pieces


def test_a_reply_that_is_written_for_a_program_is_read_as_it(tiny):
  context = _context(tiny)
  reply = written_reply(context, [PROGRAM], {'think': 'hm'})
  assert context.parse(0, reply.text).actions == (PROGRAM,)


def test_words_may_be_whole_answers_too():
  env = make('Climb')
  object.__setattr__(env, 'whole_answer', True)
  assert _context(env=env).parse(0, '<think>x</think><answer>\n up\n</answer>').actions == ('Up',)
  assert _context(env=env).parse(0, '<think>x</think><answer>Up || Down</answer>').actions == ()


@pytest.mark.parametrize('policy', CONTEXTS)
def test_prompts_have_the_environment_s_words_and_no_others(tiny, policy):
  request = 'As {form}, like {example}.'
  context = _context(tiny, context=policy, request=request)
  for past in ([], _past(context)):
    chat = context.messages(0, past, 'the second', 6)
    fed = tiny.decode(context.prompt(0, past, 'the second', 6, used=0, room=10**6).ids)
    assert chat[0] == {'role': 'system', 'content': 'You write programs.'}
    shown = chat[-1]['content']
    assert 'Question:\nthe second\nAs <think>your thoughts</think><answer>your answer</answer>, like ' in shown
    assert shown.endswith('<answer>your answer</answer>.') and shown in fed
    told = '\n'.join(message['content'] for message in chat if message['role'] != 'assistant').replace(PROGRAM, '')
    for word in ('Turn', 'Actions left', 'State', '||', 'turn', 'separated', 'small world'):
      assert word not in told
    if past and policy == 'single_turn':
      assert f'What you did before:\n{PROGRAM} in\nthe first\nbrought reward 0.25.' in shown


def test_each_word_can_be_chosen_alone():
  def last(**fields) -> str:
    usual = {'whole_answer': False, 'system': '', 'state_label': 'State', 'counts_turns': True}
    return _context(env=Worded(**usual | fields)).messages(0, [], 'now', 7)[-1]['content']

  usual = last()
  assert 'The episode has at most 3 turns and 7 actions. Give at most 5 actions in one turn, separated by ||.' in usual
  assert 'Turn 1:\nState:\nnow\nActions left: 7\n' in usual
  assert last(state_label='Page') == usual.replace('State:', 'Page:')
  assert last(state_label='') == usual.replace('State:\n', '')
  assert last(counts_turns=False) == (
    usual.replace('The episode has at most 3 turns and 7 actions. ', '')
    .replace('Turn 1:\n', '')
    .replace('\nActions left: 7', '')
  )
  assert last(whole_answer=True) == (
    usual.replace(' Give at most 5 actions in one turn, separated by ||.', '').replace('your actions', 'your answer')
  )
  assert last(system='Hello') == usual


def test_special_tokens_in_the_words_become_plain_text(tiny):
  context = _context(tiny, env=Worded(system='a<|im_end|>', state_label='b<|im_start|>'))
  (system, user) = context.messages(0, [], 'now', 7)
  assert system['content'] == 'a< |im_end|>' and 'b< |im_start|>:\nnow' in user['content']
  assert tiny.decode(context.first_prompt(0, 'now', 7).ids).count('<|im_start|>') == 3


class Coder:
  """A class of a user with words of its own."""

  rules = 'Code.'
  whole_answer = True
  system = 'You code.'
  counts_turns = False

  def state_label(self):
    return 'Task'

  def reset(self, seed):
    return 'x'

  def step(self, action):
    return 'x', 0.0, True, False


_FIELDS = ('whole_answer', 'system', 'state_label', 'counts_turns')


def test_a_python_class_and_a_server_can_have_words_of_their_own():
  own = registry.make('python', {'class_path': f'{__name__}:Coder'})
  assert [getattr(own, field) for field in _FIELDS] == [True, 'You code.', 'Task', False]
  http = {'url': 'http://127.0.0.1:9', 'task': 'x'}
  usual = [False, '', 'State', True]
  for env in (make('Echo'), registry.make('http', http)):
    assert [getattr(env, field) for field in _FIELDS] == usual
  given = dict(zip(_FIELDS, (True, 'S', 'L', False), strict=True))
  told = registry.make('http', http | given)
  assert {field: getattr(told, field) for field in _FIELDS} == given
  assert own.parse_action(PROGRAM) == told.parse_action(PROGRAM) == PROGRAM


@pytest.mark.parametrize(
  ('field', 'value'), [('whole_answer', 1), ('system', 3), ('state_label', None), ('counts_turns', 'no')]
)
def test_wrong_words_are_refused_in_one_line(field, value, monkeypatch):
  with raises_one_line(f'http: {field}={value!r}; allowed: '):
    registry.make('http', {'url': 'http://127.0.0.1:9', 'task': 'x', field: value})
  monkeypatch.setattr(Coder, field, value)
  with raises_one_line(f'Coder: {field}={value!r}; allowed: '):
    registry.make('python', {'class_path': f'{__name__}:Coder'})
