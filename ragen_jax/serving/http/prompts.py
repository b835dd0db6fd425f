"""HTTP: the prompts of a request as ids, planned by the session of its attempt, or rendered outside of attempts."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence

import numpy as np

from ragen_jax.agent.segments import Encoded
from ragen_jax.serving import errors
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role, from_canonical, images_of_messages
from ragen_jax.serving.conversation.sessions import Plan, Session
from ragen_jax.serving.wire.spec import CallSpec, Kind


def plan(
  chat_format: QwenFormat, session: Session, spec: CallSpec, digest: str,
  pixels: Mapping[bytes, np.ndarray] = types.MappingProxyType({}),
) -> list[Plan]:  # fmt: skip
  """A plan for each reply of a request of an attempt, prompt by prompt; see `Session.plan`. ApiError if the request
  continues a response that the attempt does not have. `pixels` are those of the images of that response, by digest.
  """
  if spec.kind is Kind.COMPLETIONS:
    options = {'agent': spec.agent, 'digest': digest, 'choices': spec.n}
    return [p for given in _given(chat_format, spec) for p in session.plan_ids(given.ids, given.images, **options)]
  return list(
    session.plan(
      _conversation(session, spec, pixels), tools=spec.tools, options=spec.template, agent=spec.agent, digest=digest,
      choices=spec.n, previous=spec.previous_response_id,
    )
  )  # fmt: skip


def outside(chat_format: QwenFormat, spec: CallSpec) -> list[Encoded]:
  """The prompt of each reply of a request outside of attempts; ApiError if the request continues a response, since none
  is stored there."""
  if spec.previous_response_id:
    raise _unknown_response(spec.previous_response_id)
  if spec.kind is Kind.COMPLETIONS:
    prompts = _given(chat_format, spec)
  else:
    ids = tuple(chat_format.render(spec.messages, spec.tools, spec.template))
    prompts = [Encoded(ids, chat_format.images(ids, images_of_messages(spec.messages)))]
  return [p for p in prompts for _ in range(spec.n)]


def _conversation(session: Session, spec: CallSpec, pixels: Mapping[bytes, np.ndarray]) -> Sequence[Message]:
  """The messages of a request, behind those of the response that it continues.

  A system message of the request replaces the earlier one, which otherwise stays, unlike OpenAI's, so that the request
  extends its row.
  """
  previous = spec.previous_response_id
  if not previous:
    return spec.messages
  try:
    texts = session.conversation(previous)
  except KeyError:
    texts = ()
  if not texts:
    raise _unknown_response(previous)
  earlier = [from_canonical(text, pixels) for text in texts]
  if spec.messages[0].role is Role.SYSTEM and earlier[0].role is Role.SYSTEM:
    return [spec.messages[0], *earlier[1:], *spec.messages[1:]]
  return [*earlier, *spec.messages]


def _given(chat_format: QwenFormat, spec: CallSpec) -> list[Encoded]:
  """The prompts of a request to completions; ApiError if the placeholders are not those of its images."""
  if not spec.images:
    return [Encoded(_ids(chat_format, p)) for p in spec.prompts]
  (ids,) = spec.prompts
  is_image, needed = np.asarray(ids) == chat_format.placeholder, sum(image.columns for image in spec.images)
  if is_image.sum() != needed:
    told = f'prompt: has {is_image.sum()} placeholders of images: must have the {needed} of images'
    raise errors.bad_request('prompt', told)
  found = Encoded(ids, chat_format.images(ids, spec.images))
  for i, span in enumerate(found.images):
    if not is_image[span.start : span.stop].all():
      told = f'prompt: the {span.segment.columns} placeholders of images[{i}] are not adjacent'
      raise errors.bad_request('prompt', told)
  return [found]


def _ids(chat_format: QwenFormat, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
  if isinstance(prompt, str):
    return chat_format.encode_untrusted(prompt)
  if chat_format.placeholder in prompt:
    message = (
      f'prompt: has the id {chat_format.placeholder}, which stands for an image: must be without it, or with images'
    )
    raise errors.bad_request('prompt', message, 'unsupported_content')
  return prompt


def _unknown_response(call_id: str) -> errors.ApiError:
  message = f'previous_response_id={call_id!r:.80}: the attempt has no such response'
  return errors.bad_request('previous_response_id', message, 'previous_response_not_found')
