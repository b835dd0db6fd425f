"""HTTP: the prompts of a request as ids, planned by the session of its attempt, or rendered outside of attempts."""

from __future__ import annotations

from collections.abc import Sequence

from ragen_jax.serving import errors
from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.messages import Message, Role, from_canonical
from ragen_jax.serving.conversation.sessions import Plan, Session
from ragen_jax.serving.wire.spec import CallSpec, Kind


def plan(chat_format: QwenFormat, session: Session, spec: CallSpec, digest: str) -> list[Plan]:
  """A plan for each reply of a request of an attempt, prompt by prompt; see `Session.plan`. ApiError if the request
  continues a response that the attempt does not have."""
  if spec.kind is Kind.COMPLETIONS:
    prompts = [_ids(chat_format, p) for p in spec.prompts]
    return [p for ids in prompts for p in session.plan_ids(ids, agent=spec.agent, digest=digest, choices=spec.n)]
  return list(
    session.plan(
      _conversation(session, spec), tools=spec.tools, options=spec.template, agent=spec.agent, digest=digest,
      choices=spec.n, previous=spec.previous_response_id,
    )
  )  # fmt: skip


def outside(chat_format: QwenFormat, spec: CallSpec) -> list[tuple[int, ...]]:
  """The ids of the prompt of each reply of a request outside of attempts; ApiError if the request continues a response,
  since none is stored there."""
  if spec.previous_response_id:
    raise _unknown_response(spec.previous_response_id)
  if spec.kind is Kind.COMPLETIONS:
    prompts = [_ids(chat_format, p) for p in spec.prompts]
  else:
    prompts = [tuple(chat_format.render(spec.messages, spec.tools, spec.template))]
  return [p for p in prompts for _ in range(spec.n)]


def _conversation(session: Session, spec: CallSpec) -> Sequence[Message]:
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
  earlier = [from_canonical(text) for text in texts]
  if spec.messages[0].role is Role.SYSTEM and earlier[0].role is Role.SYSTEM:
    return [spec.messages[0], *earlier[1:], *spec.messages[1:]]
  return [*earlier, *spec.messages]


def _ids(chat_format: QwenFormat, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
  return chat_format.encode_untrusted(prompt) if isinstance(prompt, str) else prompt


def _unknown_response(call_id: str) -> errors.ApiError:
  message = f'previous_response_id={call_id!r:.80}: the attempt has no such response'
  return errors.bad_request('previous_response_id', message, 'previous_response_not_found')
