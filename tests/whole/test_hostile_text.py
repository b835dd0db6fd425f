"""Whatever a policy, an environment or a user writes: parsers are total, nobody escapes a role, and time is linear.

Each property holds for one text. Hypothesis looks for a short text that breaks it; the slow test tries 100,000 texts in
all.
"""

from __future__ import annotations

import html
import html.parser
import itertools
import json
import math
import re
import types

import pytest
from hypothesis import given, settings

from ragen_jax import envs as registry
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.endpoint_client import read_reply
from ragen_jax.agent.episode import Episode, Status, TextReply, Turn
from ragen_jax.agent.reply_reader import BadCalls
from ragen_jax.agent.world_model.descriptions import find_claims
from ragen_jax.agent.world_model.formats import FORMATS, innermost_tags, read_answer, read_sections, write_reply
from ragen_jax.agent.world_model.marks import mark_description
from ragen_jax.agent.world_model.state_reward import score_description
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside.base import read_observation
from ragen_jax.envs.scenes import Scene
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets
from ragen_jax.prompt_search.wording import excerpt, placeholders, quote, read_prompt
from ragen_jax.serving.conversation.chat_format import Family, QwenFormat
from ragen_jax.serving.conversation.matching import ReplyIndex, said_again
from ragen_jax.serving.conversation.messages import Message, Role, TemplateOptions, Tool, canonical, from_canonical
from ragen_jax.serving.engine.text import ReplyText
from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.wire.answers import ENDPOINTS
from ragen_jax.serving.wire.body import read_json
from ragen_jax.sft import conversations
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.tool_calls import ToolCall, read_call
from ragen_jax.viewer.records import token_pieces
from ragen_jax.viewer.tensorboard import transcript
from tests.support import text_games
from tests.support.hostile import PIECES, cut, random_texts, rng_of, texts
from tests.support.speakers import context_settings
from tests.support.wire import CALL_TAGS, QWEN3_TAGS, limits, reader, tokenizer

SCENE = Scene((1, 1), {'box': ((0, 1), (2, 2)), 'target': ((1, 2),), 'hole': ()})
GAMES = ('frozen_lake', 'sokoban', 'sudoku', 'countdown', 'bandit', 'rubik_2x2', 'game_2048')


@pytest.fixture(scope='module')
def world(tmp_path_factory, request):
  """The tokenizers with their formats, and the environments."""
  tags = {Family.PLAIN: (), Family.QWEN25: CALL_TAGS, Family.QWEN3: QWEN3_TAGS}
  tokenizers = {name: tokenizer(tmp_path_factory.mktemp('tokenizer'), tags[name]) for name in tags}
  tokenizers['tiny'] = ChatTokenizer(presets.resolve('tiny', ''))
  shared = presets_dir(request)
  if shared is not None:
    tokenizers['qwen'] = ChatTokenizer(shared)
  budget = Budget(max_actions_per_turn=3, max_actions=10, max_turns=4)
  games = [EnvSpec(name, registry.make(name, {}), budget, 40, 1) for name in GAMES]
  games.append(EnvSpec('Echo', text_games.make('Echo'), budget, 40, 1))
  return types.SimpleNamespace(
    tokenizers=tokenizers,
    formats={name: QwenFormat(tok, keep_thoughts=bool(i % 2)) for i, (name, tok) in enumerate(tokenizers.items())},
    games=games,
    contexts={
      (name, context): ContextManager(tok, games, context_settings(context=context, context_turns=3))
      for name, tok in tokenizers.items()
      for context in ('full', 'limited_multi_turn', 'single_turn')
    },
    workdir=tmp_path_factory.mktemp('run'),
  )


def presets_dir(request):
  """The directory of Qwen2.5's tokenizer, or None."""
  try:
    return request.getfixturevalue('qwen_tokenizer_dir')
  except pytest.skip.Exception:
    return None


def _some(rng, of):
  """One of a few, so that many texts cover all."""
  return [rng.choice(list(of))]


# -- properties --------------------------------------------------------------------------------------------------------


def forms(world, text):
  """A reply is of a form or not, always in the same way, and what is of a form reads back."""
  del world
  for form in FORMATS:
    read = read_sections(text, form)
    assert read == read_sections(text, form)
    answer = read_answer(text, form)
    if FORMATS[form] is None or not FORMATS[form]:
      assert answer == _plain_answer(text, form)
    if read.correct:
      assert tuple(read.texts) == innermost_tags(form) and answer == read.texts['answer']
      assert read_sections(write_reply(form, read.texts), form) == read
    whole = write_reply(form, dict.fromkeys(innermost_tags(form), text))
    tags = re.search(r'</?(think|answer|observation|reasoning|prediction)>', text)
    assert read_sections(whole, form).correct == (tags is None)


def _plain_answer(text, form):
  """`read_answer` as one regular expression, which takes quadratic time."""
  thought = '' if FORMATS[form] is None else r'<think>.*?</think>\s*'
  match = re.match(rf'\s*{thought}<answer>(.*?)</answer>', text, re.DOTALL)
  return None if match is None else match[1]


def claims(world, text):
  """Claims are stretches of the text in order, and a score is a share."""
  del world
  found = find_claims(text)
  for one, other in itertools.pairwise(found):
    assert one.stop <= other.start
  assert all(0 <= claim.start < claim.stop <= len(text) for claim in found)
  assert 0 <= score_description(text, SCENE) <= 1
  marks, missing = mark_description(text, SCENE)
  assert [mark.claim for mark in marks] == found and len(missing) <= 3


def actions(world, text):
  """A text names no action, or one that is written and read back."""
  for spec in world.games:
    read = spec.env.read_action(text)
    assert read is None or spec.env.read_action(read[1])[1] == read[1]
    parsed = world.contexts['tiny', 'full'].parse(world.games.index(spec), f'<answer>{text}</answer>')
    assert len(parsed.actions) == len(parsed.names) <= spec.budget.max_actions_per_turn
    assert parsed.names or not parsed.known


def prompts(world, text):
  """An environment's text ends no message and begins none, in any context."""
  observation = read_observation(text)
  rng = rng_of(text)
  turns = rng.randrange(3)
  for name, kind in _some(rng, world.contexts):
    tok, context = world.tokenizers[name], world.contexts[name, kind]
    start, end = tok.added['<|im_start|>'], tok.added['<|im_end|>']
    past = [
      Turn(
        observation, text, [text, 'Up'], (0.5,), 0.0, True, 1, actions_left=9, ids=(70, end)[: 1 + i], closed=bool(i)
      )
      for i in range(turns)
    ]
    prompt = context.prompt(rng.randrange(len(world.games)), past, observation, 5, used=0, room=1 << 20)
    marks = [i for i in prompt.ids if i in (start, end)]
    if not prompt.fresh:  # what follows a reply, which may still be open
      marks = [start, *([] if marks[0] == end else [end]), *marks]
    assert marks == [start, end] * (len(marks) // 2) + [start]
    special = {tok.added[t] for t in tok.specials} - {start, end}
    assert special.isdisjoint(prompt.ids)
    if prompt.fresh:
      replies = ['assistant', 'user'] * ((len(marks) - 5) // 4)
      assert _roles(tok, prompt.ids) == ['system', 'user', *replies, 'assistant']
      for role, content in tok.messages(tok.decode(prompt.ids)):
        assert role in ('system', 'user', 'assistant') and '<|im_' not in content


def _roles(tok, ids):
  """The role of each message, by the ids."""
  start, roles = tok.added['<|im_start|>'], []
  for at, i in enumerate(ids):
    if i == start:
      roles.append(tok.decode(ids[at + 1 : at + 12]).partition('\n')[0])
  return roles


def conversations_of_clients(world, text):
  """A client's messages have the roles that it gave them, whatever they say."""
  rng = rng_of(text)
  half = text[: len(text) // 2], text[len(text) // 2 :]
  calls = (ToolCall('c', half[0] or 'f', half[1]),)
  kinds = [
    Message(Role.USER, text), Message(Role.ASSISTANT, text), Message(Role.ASSISTANT, half[0], calls, reasoning=half[1]),
    Message(Role.TOOL, text, call_id='c'), Message(Role.USER, f'<tool_response>{text}</tool_response>'),
  ]  # fmt: skip
  messages = [Message(Role.SYSTEM, text)] * rng.randrange(2) + [rng.choice(kinds) for _ in range(rng.randrange(1, 5))]
  tools = [Tool('f', json.dumps({'description': text}, ensure_ascii=False))] * rng.randrange(2)
  prefix = rng.choice(('', '<think>', text))
  options = TemplateOptions(bool(rng.randrange(2)), bool(rng.randrange(2)), prefix)
  for name in _some(rng, world.formats):
    tok, fmt = world.tokenizers[name], world.formats[name]
    start = tok.added['<|im_start|>']
    for ids in (fmt.render(messages, tools, options), fmt.following(messages, tools, options, closed=True)):
      if ids is None:
        continue
      opens = [start] if options.add_generation_prompt else []
      marks = [i for i in ids if i in (start, fmt.stop_id)]
      assert marks == [start, fmt.stop_id] * (len(marks) // 2) + opens
      roles = _roles(tok, ids)
      known = messages if messages[0].role is not Role.SYSTEM else messages[1:]
      said = [('user' if m.role is Role.TOOL else str(m.role), m.role is Role.TOOL) for m in known]
      expected = [
        role for i, (role, tool) in enumerate(said) if not (tool and i and said[i - 1][1])
      ] + ['assistant'] * len(opens)  # fmt: skip
      assert [role for role in roles if role != 'system'] == expected
      others = {tok.added[t] for t in tok.specials} - {start, fmt.stop_id}
      assert others.isdisjoint(ids)
    untrusted = fmt.encode_untrusted(text)
    assert fmt._forbidden_ids.isdisjoint(untrusted)
    assert untrusted == fmt.encode_untrusted(text)
  chain = ReplyIndex().chain(canonical(message) for message in messages)
  assert len(chain) == len(messages)
  for message in messages:
    again = from_canonical(canonical(message), {})
    assert (again.role, again.text) == (message.role, message.text)


def replies(world, text):
  """A reply is the same however it arrives, and what is read of it can be sent, compared and written again."""
  rng = rng_of(text)
  wrapped = f'<tool_call>{text}</tool_call>' if rng.randrange(2) else text
  for name in _some(rng, (Family.PLAIN, Family.QWEN25, Family.QWEN3, 'tiny')):
    tok, fmt = world.tokenizers[name], world.formats[name]
    ids = tok.encode_once(wrapped)
    shown = tok.decode(ids)
    options = {'bad_calls': rng.choice(list(BadCalls)), 'parallel': bool(rng.randrange(2))}
    whole, parts, late = (reader(fmt, **options) for _ in range(3))
    whole.feed(ids, shown)
    whole.finish()
    reply = whole.reply()
    # In pieces as the tokens arrive.
    seen = ReplyText(tok.decode, ())
    at = 0
    while at < len(ids):
      some = ids[at : at + rng.choice((1, 2, 5))]
      seen.add(some)
      parts.feed(some, seen.release(final=False))
      at += len(some)
    seen.finish()
    parts.feed((), seen.release(final=True))
    parts.finish()
    assert parts.reply() == reply
    # All ids first, and the text in pieces.
    late.feed(ids, '')
    for piece in cut(shown, rng):
      late.feed((), piece)
    late.finish()
    assert late.reply() == reply
    json.dumps(
      [reply.content, reply.thought, [[c.name, c.arguments] for c in reply.calls]], ensure_ascii=False
    ).encode()
    for message in said_again(reply, ''):
      canonical(message).encode()
    fmt.render([Message(Role.USER, 'a'), *said_again(reply, '')[:1]], (), TemplateOptions(True, True, ''))
  name, arguments, problem = read_call(text)
  assert read_call(text) == (name, arguments, problem)
  assert problem is not None or (name and isinstance(json.loads(arguments), dict))


def sampled_ids(world, text):
  """Ids in any order, also such as no text has: halves of characters and special tokens."""
  rng = rng_of(text)
  for name in _some(rng, world.tokenizers):
    tok = world.tokenizers[name]
    some = [i for part in rng.choices(PIECES, k=2) for i in tok.encode_once(part)]
    specials = [tok.added[s] for s in tok.added]
    ids = [rng.choice((rng.randrange(tok.size), rng.choice(some or [3]), rng.choice(specials))) for _ in range(12)]
    ids = [i for i in ids if tok.token_bytes(i)]
    whole = tok.decode(ids)
    pieces = token_pieces(tok, ids)
    assert ''.join(pieces) == whole and len(pieces) == len(ids)
    stops = tuple({rng.choice(PIECES), text[:3] or 'x'})
    results = []
    for sizes in ((100,), (1,), (3, 1)):
      seen, kept, shown = ReplyText(tok.decode, stops), [], ''
      left, take = ids, itertools.cycle(sizes)
      while left and not seen.stop:
        size = next(take)
        part, left = left[:size], left[size:]
        kept += part[: seen.add(part)]
        shown += seen.release(final=False)
      final = seen.finish()
      shown += seen.release(final=True)
      assert shown == final
      results.append((final, kept, seen.stop))
    assert results[0] == results[1] == results[2]
    assert results[0][0] == whole or results[0][2] in whole


def requests(world, text):
  """A request is read, or refused with the error that clients know."""
  del world
  rng = rng_of(text)
  values = [
    text,
    [text],
    {text: text},
    None,
    0,
    -1,
    1e300,
    True,
    [[1]],
    {'type': text},
    [{'type': 'text', 'text': text}],
  ]
  item = {
    'role': rng.choice(('system', 'user', 'assistant', 'tool', text)), 'content': rng.choice(values),
    'tool_calls': rng.choice([None, text, [{'id': text, 'function': {'name': text, 'arguments': rng.choice(values)}}]]),
    'type': rng.choice(('message', 'function_call', 'function_call_output', text)), 'name': text, 'arguments': text,
    'call_id': rng.choice(values), 'output': rng.choice(values),
  }  # fmt: skip
  body = {'model': text, 'messages': [item], 'input': rng.choice([text, [item], *values]), 'prompt': rng.choice(values)}
  names = ('stop', 'tools', 'temperature', 'n', 'seed', 'stream', 'user', 'metadata', 'tool_choice', 'max_tokens',
           'response_format', 'text', 'logit_bias', 'chat_template_kwargs', 'instructions', 'previous_response_id',
           'stream_options', 'logprobs', 'echo', 'continue_final_message', 'parallel_tool_calls', text)  # fmt: skip
  body |= {name: rng.choice(values) for name in rng.sample(names, 3)}
  raw = json.dumps(body).encode()
  if rng.random() < 0.3:  # not even JSON, or other bytes than UTF-8
    at = rng.randrange(len(raw))
    raw = raw[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(4))) + raw[at + rng.randrange(3) :]
  for data in (raw, text.encode(), rng.randbytes(8)):
    try:
      sent = read_json(data, 1 << 20)
    except ApiError as e:
      assert (e.status, '\n' in e.message) == (400, False)
      continue
    for endpoint in ENDPOINTS.values():
      try:
        spec = endpoint.parse(sent, limits())
      except ApiError as e:
        assert e.status == 400 and '\n' not in e.message and len(e.message) < 1000
        json.dumps(e.body(), ensure_ascii=False).encode()
        continue
      for message in spec.messages:
        canonical(message).encode()


def files(world, text):
  """A line of a file of conversations is one, or the line is named."""
  said = {'role': 'assistant', 'content': text}
  path = world.workdir / 'data.jsonl'
  lines = (
    text.replace('\n', ' '), json.dumps({'messages': [said]}), json.dumps({'messages': [{**said, 'weight': text}]}),
    json.dumps({'messages': [{**said, 'content': f'\ud800{text}'}]}),
  )  # fmt: skip
  for line in _some(rng_of(text), lines):
    path.write_text(line, encoding='utf-8', newline='')
    try:
      found = conversations.read(str(path))
    except UserError as e:
      assert '\n' not in str(e)
      continue
    assert found[0].trained[-1]
    for name in _some(rng_of(text), world.tokenizers):
      tok = world.tokenizers[name]
      try:
        trajectory, _ = conversations.tokenize(found, tok, '', 4096, 'sft.data')
      except UserError as e:
        assert any(special in text for special in tok.specials), e
        continue
      start, end = tok.added['<|im_start|>'], tok.added['<|im_end|>']
      marks = [i for i in trajectory.tokens[0, : trajectory.length[0]].tolist() if i in (start, end)]
      assert marks == [start, end] * (2 if tok.format.no_system else 1)  # with the default system message
  tok = world.tokenizers['tiny']
  assert tok.messages(text) == re.findall(r'<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>', text, re.DOTALL)


def critics(world, text):
  """A critic's reply has one prompt or none, and what is quoted stays quoted."""
  del world
  found = re.search(r'<prompt>(.*)</prompt>', text.rpartition('</think>')[2], re.DOTALL)
  assert read_prompt(text) == (found[1].strip() if found else None)
  assert all(name[0] + name[-1] == '{}' for name in placeholders(text))
  for quoted in (quote(text), excerpt(text * 20, 200)):
    assert all(line.startswith('|') or line.endswith(' are left out here]') for line in quoted.splitlines())


def answers_of_servers(world, text):
  """An answer of a server is a reply that can be written anywhere, or an error that the caller knows."""
  del world
  rng = rng_of(text)
  values = [text, None, 5, [text], {text: text}, 'half \ud800 of it']
  message = {
    'role': text,
    'content': rng.choice(values),
    rng.choice(('reasoning', 'reasoning_content')): rng.choice(values),
  }
  answer = {'choices': [{'message': message}], 'usage': {'completion_tokens': rng.choice([1, -1, text, True, 10**12])}}
  for raw in (json.dumps(answer).encode(), text.encode(), json.dumps(rng.choice(values)).encode()):
    try:
      reply = read_reply(raw)
    except ValueError:
      continue
    assert isinstance(reply, TextReply) and reply.text.encode().decode() == reply.text


class _Elements(html.parser.HTMLParser):
  """The names of all elements, and all text."""

  def __init__(self):
    super().__init__(convert_charrefs=True)
    self.names, self.text = set(), []

  def handle_starttag(self, tag, attrs):
    self.names.add((tag, *(name for name, _ in attrs)))

  def handle_data(self, data):
    self.text.append(data)


def transcripts(world, text):
  """TensorBoard shows a transcript as text: no element of it is not ours."""
  del world
  plugin = pytest.importorskip('tensorboard.plugin_util', reason='needs tensorboard, of requirements.txt')
  turn = Turn(text, text, [text, 'Up'], (0.5,), 0.0, True, 1)
  shown = plugin.markdown_to_safe_html(transcript(Episode('A', 0, 7, [turn], text, Status.ENV_ERROR, error=text)))
  page = _Elements()
  page.feed(shown)
  page.close()
  assert page.names <= {('p',), ('strong',), ('pre',)}
  words = re.sub(r'[\s\ufffd]+', ' ', ''.join(page.text))
  # Whatever is no control character is there, as often as it was written.
  for special in re.findall(r'<[\w/!|][^\s<>\ufffd\x00-\x1f\x7f-\x9f]*>', text):
    assert words.count(special) >= 3
  assert shown.count('<pre>') == 3


PROPERTIES = (
  forms, claims, actions, prompts, conversations_of_clients, replies, sampled_ids, requests, files, critics,
  answers_of_servers, transcripts,
)  # fmt: skip


@pytest.mark.parametrize('check', PROPERTIES, ids=lambda check: check.__name__)
def test_no_text_breaks_a_property(world, check):
  @settings(deadline=None, derandomize=True, max_examples=40, database=None)
  @given(texts())
  def on(text):
    check(world, text)

  on()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize('check', PROPERTIES, ids=lambda check: check.__name__)
@pytest.mark.exhaustive
def test_no_text_of_100_000_breaks_a_property(world, check):
  number = PROPERTIES.index(check)
  for text in random_texts(number, math.ceil(100_000 / len(PROPERTIES))):
    try:
      check(world, text)
    except Exception as e:
      raise AssertionError(f'{check.__name__} fails for {text!r}') from e


# -- time --------------------------------------------------------------------------------------------------------------

MANY = 200_000


def _feed(world, text, *, ids):
  """Reads a reply in pieces, with a token for each tag, or without."""
  name = Family.QWEN3 if ids else Family.PLAIN
  tok, whole = world.tokenizers[name], reader(world.formats[name])
  for at in range(0, len(text), 1000):
    part = text[at : at + 1000]
    whole.feed(tok.encode_once(part), part)
  whole.finish()
  return whole.reply()


def _drip(world, count):
  """Halves of characters, one at a time."""
  tok = world.tokenizers['tiny']
  half = tok.encode('\U0001f642')[:1]
  seen = ReplyText(tok.decode, ())
  for _ in range(count):
    seen.add(half)
  assert seen.finish() == '\ufffd' * count


def _halves(world, count):
  tok = world.tokenizers['tiny']
  assert ''.join(token_pieces(tok, list(tok.encode('\U0001f642')[:1]) * count)) == '\ufffd' * count


def _parse(world, text):
  for spec in world.games:
    spec.env.read_action(text)


def _refuse(raw):
  with pytest.raises(ApiError):
    read_json(raw, 1 << 30)


def _read_forms(world, text):
  del world
  for form in FORMATS:
    read_sections(text, form), read_answer(text, form)


# Of each: a parser, and a text on which one that looks back, or looks ahead again and again, takes minutes to hours.
LONG = {
  'opened thoughts': lambda w: _read_forms(w, '<think>' * MANY),
  'answers without an end': lambda w: _read_forms(w, '<think>' + '</think><answer>' * MANY),
  'blanks before an answer': lambda w: _read_forms(w, '<think></think>' + ' ' * MANY * 5 + '<answer'),
  'nested sections': lambda w: _read_forms(w, '<think><observation>' * MANY + '</observation></think>' * MANY),
  'boxes': lambda w: find_claims('box is above ' * MANY),
  'blanks in a claim': lambda w: find_claims('box' + ' ' * MANY * 5 + 'is above and'),
  'claims': lambda w: mark_description('the box is above and to the left; ' * (MANY // 10), SCENE),
  'blanks in an action': lambda w: _parse(w, f'5{" " * MANY}x'),
  'blanks in a triple': lambda w: _parse(w, f'({" " * MANY}1,{" " * MANY},'),
  'parentheses': lambda w: _parse(w, '(' * MANY),
  'digits': lambda w: _parse(w, '9' * MANY),
  'actions': lambda w: w.contexts['tiny', 'full'].parse(0, f'<answer>{"x||" * MANY}</answer>'),
  'opened messages': lambda w: w.tokenizers['tiny'].messages('<|im_start|>user\n' * MANY),
  'prompts': lambda w: read_prompt('<prompt>' * MANY),
  'braces': lambda w: placeholders('{a' * MANY),
  'calls of tools': lambda w: _feed(w, '<tool_call>' * (MANY // 10), ids=False),
  'calls of tools by their tokens': lambda w: _feed(w, '<tool_call>' * (MANY // 10), ids=True),
  'thoughts by their tokens': lambda w: _feed(w, '<think></think>' * (MANY // 10), ids=True),
  'ends of lines': lambda w: _feed(w, '\n' * MANY, ids=False),
  'arguments': lambda w: read_call('{"name": "f", "arguments": ' + '[' * MANY * 5),
  'keys': lambda w: read_call('{' + '"arguments": {}, ' * (MANY // 4)),
  'spelled tokens': lambda w: w.formats['tiny'].encode_untrusted('<|im_end|>' * (MANY // 10)),
  'a body': lambda w: _refuse(b'[' * MANY * 5),
  'halves of characters': lambda w: _drip(w, MANY // 10),
  'tokens of halves': lambda w: _halves(w, MANY // 10),
  'a transcript': lambda w: transcript(Episode('A', 0, 7, [], '<b>&' * (MANY // 4), Status.SUCCESS, error='\r')),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize('name', LONG)
def test_long_texts_take_linear_time(world, name):
  LONG[name](world)
