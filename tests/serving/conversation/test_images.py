"""Images in conversations: their tokens are those of the template, and rows are told apart by their pixels."""

from __future__ import annotations

import dataclasses
import json

import jinja2
import numpy as np
import pytest

from ragen_jax.agent.segments import ImageSegment, ImageSpan, join
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role, TemplateOptions, images_of_messages
from ragen_jax.serving.conversation.sessions import Session
from ragen_jax.serving.types import PlacedImage, marked
from tests.support.calls import PARAMS
from tests.support.wire import CALL_TAGS, generated, tokenizer

OPEN = TemplateOptions(enable_thinking=True, add_generation_prompt=True, reply_prefix='')
# How templates of models that read images write messages whose contents are lists.
TEMPLATE = (
  '{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == "image" %}'
  '<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}'
  '<|im_start|>assistant\n'
)


@pytest.fixture(scope='module')
def tok(tmp_path_factory):
  return tokenizer(tmp_path_factory.mktemp('tokenizer'), CALL_TAGS, images=True)


@pytest.fixture(scope='module')
def fmt(tok):
  return QwenFormat(tok, keep_thoughts=True)


def image(number: int, rows: int = 1, columns: int = 2) -> ImageSegment:
  return ImageSegment(np.full((8 * rows, 8 * columns, 3), number, np.uint8), rows * columns)


def user(*content) -> Message:
  """A message of texts and images."""
  text, images = '', []
  for part in content:
    if isinstance(part, str):
      text += part
    else:
      images.append((len(text), part))
  return Message(Role.USER, text, images=tuple(images))


def test_a_prompt_has_the_ids_of_a_template_whose_placeholders_are_repeated(tok, fmt):
  talk = [
    Message(Role.SYSTEM, 'Look.'),
    user('first ', image(1), 'second', image(2, 3, 1)),
    Message(Role.ASSISTANT, 'I see.'),
    user(image(3)),
  ]
  parts = [
    [{'type': 'image'} if isinstance(s, ImageSegment) else {'type': 'text', 'text': s.text} for s in m.content]
    for m in talk
  ]
  listed = [{'role': str(m.role), 'content': own} for m, own in zip(talk, parts, strict=True)]
  text = jinja2.Template(TEMPLATE, keep_trailing_newline=True).render(messages=listed)
  whole = ()
  for part, columns in zip(text.split('<|image_pad|>'), (2, 3, 2, 0), strict=True):
    whole += (*tok.encode(part), *(tok.placeholder,) * columns)
  written = fmt.render(talk, (), OPEN)
  assert written == whole
  spans = fmt.images(written, images_of_messages(talk))
  assert [span.segment for span in spans] == [image(1), image(2, 3, 1), image(3)]
  for span in spans:
    assert set(written[span.start : span.stop]) == {tok.placeholder} and span.stop - span.start == span.segment.columns
    assert tok.decode([written[span.start - 1], written[span.stop]]) == '<|vision_start|><|vision_end|>'


def test_text_of_a_client_becomes_no_placeholder(tok, fmt):
  ids = fmt.render([user('<|vision_start|><|image_pad|><|vision_end|>', image(1))], (), OPEN)
  assert ids.count(tok.placeholder) == 2


def test_a_tool_returns_an_image_between_the_texts_of_its_result(tok, fmt):
  result = dataclasses.replace(user('here: ', image(1)), role=Role.TOOL, call_id='c')
  text = tok.decode(fmt.render([Message(Role.USER, 'Look.'), Message(Role.ASSISTANT, 'Yes.'), result], (), OPEN))
  shown = '<|vision_start|><|image_pad|><|image_pad|><|vision_end|>'
  assert f'<tool_response>\nhere: {shown}\n</tool_response><|im_end|>' in text


def test_marked_ids_are_equal_for_equal_images_only():
  def row(number, columns=3):
    return marked((5, *(9,) * columns, 6), [PlacedImage.of(ImageSpan(image(number, 1, columns), 1, 1 + columns))])

  np.testing.assert_array_equal(row(1), row(1))
  assert (row(1)[1:4] != row(2)[1:4]).all() and (row(1)[[0, 4]] == [5, 6]).all() and (row(1)[1:4] < 0).all()
  assert row(1)[1] != row(1)[2], 'both halves of the digest count'


def _call(session, tok, talk, reply='Good.'):
  (plan,) = session.plan(talk, tools=(), options=OPEN, agent='', digest='', choices=1, previous='')
  said = Message(Role.ASSISTANT, reply)
  call = session.commit(
    plan, generated(tok, reply), call_id=f'c{len(session.calls)}', replies=[said], params=PARAMS, trained=True
  )
  return plan, call, [*talk, said]


def test_a_conversation_with_images_is_one_row_and_each_image_is_in_it_once(tok, fmt):
  session = Session('a', fmt)
  first, call, talk = _call(session, tok, [user('One ', image(1))])
  assert call.images == (PlacedImage.of(first.images[0]),) and first.images[0].segment == image(1)
  second, call, talk = _call(session, tok, [*talk, user('Two ', image(2), image(1))])
  assert (second.row, second.cause) == (0, '') and [s.segment for s in second.images] == [image(1), image(2), image(1)]
  start = len(second.prompt) - len(second.context)
  assert call.images == tuple(PlacedImage.of(span, start) for span in second.images[1:])
  for placed in call.images:
    assert set(second.context[placed.start : placed.stop]) == {tok.placeholder}
  whole = fmt.render(talk, (), OPEN)
  assert second.prompt == whole[: len(second.prompt)]
  # After a restart the row goes on.
  again = Session.from_calls('a', fmt, session.calls)
  third, _, _ = _call(again, tok, [*talk, user('Three')])
  assert (third.row, third.cause) == (0, '') and third.prompt[: len(second.prompt)] == second.prompt
  assert [s.segment for s in third.images] == [s.segment for s in second.images]


def test_another_image_in_the_same_place_begins_another_row(tok, fmt):
  session = Session('a', fmt)
  plan, _, talk = _call(session, tok, [user('One ', image(1))])
  other, call, _ = _call(session, tok, [user('One ', image(2))])
  assert other.prompt == plan.prompt and other.images != plan.images
  assert (other.row, call.new_row_cause) == (1, 'conversation')
  same, _, _ = _call(session, tok, [user('One ', image(1))])
  assert (same.row, same.cause) == (2, 'repeated')
  # The reply was to another image.
  forged, _, _ = _call(session, tok, [user('One ', image(3)), *talk[1:], user('And?')])
  assert (forged.row, forged.cause) == (3, 'edited_history') and forged.parent == ''


def test_an_image_and_its_text_are_told_apart(tok, fmt):
  session = Session('a', fmt)
  _call(session, tok, [user('One ')])
  shown, _, _ = _call(session, tok, [user('One ', image(1))])
  assert shown.row == 1
  assert json.loads(session.calls[1].messages)['messages'][0] != json.loads(session.calls[0].messages)['messages'][0]
  assert join('a') == Message(Role.USER, 'a').content
