"""Turns observations into prompts, and replies into actions. Rules and limits in a prompt come from the environment."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragen_jax.agent import templates
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.chat_template import CHATML, TOOL, USER
from ragen_jax.agent.episode import Chat, Limits, Turn
from ragen_jax.agent.long_observations import cut
from ragen_jax.agent.reply_reader import BadCalls, CallDone, ContentDelta, ReplyReader
from ragen_jax.agent.segments import (
  Encoded,
  ImageSpan,
  Observation,
  Segments,
  TokenSegment,
  as_text,
  join,
  map_text,
)
from ragen_jax.agent.tool_format import qwen_tools
from ragen_jax.agent.world_model.formats import Sections, opening_tags, read_answer, read_sections, write_reply
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.tool_calls import CALL, END_CALL, call_json, dump_json, read_call, tagged

CONTEXTS = ('full', 'limited_multi_turn', 'single_turn')
OVERLONG = ('end', 'drop_oldest')
_BLANK_LINES = re.compile(r'\A(?:[^\S\n]*\n)+')
# Takes the place of a lost reply, because a chat format requires a reply between two messages of the user.
NO_REPLY = '(no reply)'
# What stands in the place of a call while the form of its reply is read.
_NO_ANSWER = write_reply('no_think', {'answer': ''})


@dataclasses.dataclass(frozen=True)
class ContextSettings:
  """Fields of `config.agent`."""

  format: str
  force_prefix: bool
  action_sep: str
  request: str
  context: str
  context_turns: int
  overlong: str


@dataclasses.dataclass(frozen=True)
class ParsedReply:
  """The actions of a reply.

  Attributes:
    actions: parsed actions that exist, at most `max_actions_per_turn`.
    known: whether the reply names at least one action, and all actions that it names exist.
  """

  actions: tuple[Any, ...]
  names: tuple[str, ...]
  known: bool
  sections: Sections

  @property
  def valid(self) -> bool:
    """Whether the reply is of its form and its actions are `known`."""
    return self.sections.correct and self.known


@dataclasses.dataclass(frozen=True)
class Prompt:
  """The tokens to feed before a reply.

  Attributes:
    fresh: whether the tokens begin a new row, instead of continuing the current row.
    images: the images among the tokens; columns count from the first id.
  """

  ids: tuple[int, ...]
  fresh: bool
  images: tuple[ImageSpan, ...] = ()


class ContextManager:
  """Writes the prompts of a rollout and reads its replies.

  Attributes:
    reply_prefix: the part of every reply that is forced, by the settings or by the chat template.
  """

  def __init__(self, tokenizer: ChatTokenizer | None, specs: list[EnvSpec], settings: ContextSettings):
    """Prepares the fixed parts of the prompts. Without a tokenizer only `messages` and replies in text can be used.

    Raises UserError if the chat template should list tools (`Game.functions`) and cannot.
    """
    self._functions = [tuple(map(dump_json, spec.env.functions)) for spec in specs]
    for spec, functions in zip(specs, self._functions, strict=True):
      if functions and tokenizer is not None:
        tokenizer.check_tools(f"envs.{spec.tag}.tools_format='template': allowed: 'text' with this model")
    self.tokenizer = tokenizer
    self.settings = settings
    form, tags = CHATML if tokenizer is None else tokenizer.format, opening_tags(settings.format)
    tags = tags if settings.force_prefix else ''
    self._tool_format = qwen_tools(form) if tokenizer is None else tokenizer.tools
    self.reply_prefix, self._spelled_prefix = form.reply_prefix(tags), form.spelled_prefix(tags)
    self._said_prefix = self.reply_prefix.removeprefix(form.no_thought)
    self._specs = specs
    self._tasks = [
      templates.describe_task(s, settings.action_sep) + templates.describe_descriptions(s, settings.format)
      for s in specs
    ]

  def shown(self, env: int, observation: Observation) -> Observation:
    """An observation as prompts show it: cut to the limit of its environment, if it has one."""
    most = self._specs[env].max_observation_tokens
    return cut(observation, most, self.tokenizer) if most else observation

  # -- prompts in tokens -----------------------------------------------------------------------------------------------

  def first_prompt(self, env: int, observation: Observation, actions_left: int) -> Encoded:
    """The conversation up to the first reply."""
    user = self._task_and_turn(env, 0, observation, actions_left)
    return self.tokenizer.encode_segments(self._opening(env, user))

  def next_prompt(self, env: int, past: Sequence[Turn], observation: Observation, actions_left: int) -> Encoded:
    """The continuation of the whole conversation from the last reply (or from the start) up to the next reply.

    Of the `past` turns only their number and the last one are read.
    """
    if not past:
      return self.first_prompt(env, observation, actions_left)
    said = self._after_reply(env, len(past), past[-1], observation, actions_left)
    return self.tokenizer.encode_segments(self._following(env, past[-1], *said))

  def prompt(
    self, env: int, past: Sequence[Turn], observation: Observation, actions_left: int, *, used: int, room: int
  ) -> Prompt | None:
    """The tokens to feed before the next reply, according to the context policy; None if they do not fit.

    Args:
      used: columns of the row so far.
      room: maximum number of columns before the reply.
    """
    settings = self.settings
    if not past:
      first = self.first_prompt(env, observation, actions_left)
      return Prompt(first.ids, True, first.images) if len(first.ids) <= room else None
    if settings.context == 'full':
      following = self.next_prompt(env, past, observation, actions_left)
      if used + len(following.ids) <= room:
        return Prompt(following.ids, False, following.images)
      if settings.overlong == 'end':
        return None
      shown = len(past) - 1
    else:
      shown = min(settings.context_turns - 1, len(past))
    write = self._summary if settings.context == 'single_turn' else self._conversation
    while True:
      whole = write(env, past, shown, observation, actions_left)
      if len(whole.ids) <= room:
        return Prompt(whole.ids, True, whole.images)
      if settings.overlong == 'end' or not shown:
        return None
      shown -= 1

  def check_first_prompt(self, env: int, observation: Observation, actions_left: int, limits: Limits) -> None:
    """Raises UserError if an environment's first prompt and a reply do not fit under any context policy."""
    limits = limits.of(self._specs[env])
    first = self.first_prompt(env, observation, actions_left)
    length, seen = len(first.ids), sum(span.stop - span.start for span in first.images)
    if length > limits.room:
      raise UserError(
        f'agent.max_context={limits.max_context}: a first prompt of {self._specs[env].tag} and its reply need '
        f'{length} + {limits.max_response_tokens} tokens' + (f', {seen} of them for images' if seen else '')
      )

  def count_reply(self, text: str) -> int:
    """Number of tokens that are sampled for a reply of this text, with the token that ends it."""
    return len(self.tokenizer.encode_once(self._without_prefix(text))) + 1

  # -- prompts in messages ---------------------------------------------------------------------------------------------

  def messages(
    self, env: int, past: Sequence[Turn], observation: Observation, actions_left: int,
    content: Callable[[Segments], Any] = as_text,
  ) -> Chat:  # fmt: skip
    """The content of `prompt` as messages, for a policy with its own chat format. The ids of the turns are not read.

    The messages have `role` and `content`; the last one is the user's, or the result of a call. There is no length
    limit and no forced reply prefix. `content` makes the content of a message of the user or of a tool from its
    segments; by default it raises ValueError for an image.
    """
    settings = self.settings
    shown = len(past) if settings.context == 'full' else min(settings.context_turns - 1, len(past))
    chat = [{'role': 'system', 'content': templates.system_of(self._specs[env])}]
    if settings.context == 'single_turn':
      return [
        *chat,
        {'role': 'user', 'content': content(self._summary_text(env, past, shown, observation, actions_left))},
      ]
    for role, message, reply in self._exchanges(env, past, shown, observation, actions_left):
      chat.append({'role': role, 'content': content(message)})
      if reply is not None:
        chat.append({'role': 'assistant', 'content': reply.reply if reply.answered else NO_REPLY})
    return chat

  # -- replies ---------------------------------------------------------------------------------------------------------

  def format_reply(self, actions: Sequence[str], texts: Mapping[str, str]) -> str:
    """A reply of the right form as the policy samples it, without the forced prefix; see `templates.format_reply`."""
    settings = self.settings
    calls = any(self._functions) and ''.join(actions).startswith(CALL)
    whole = templates.format_reply(
      texts, () if calls else actions, form=settings.format, action_sep=settings.action_sep
    )
    if calls:
      thought = whole.removesuffix(_NO_ANSWER)
      whole = thought + ('\n' if thought else '') + self._in_own_form(''.join(actions))
    return self._without_prefix(whole)

  def _in_own_form(self, actions: str) -> str:
    """Calls as the chat template writes them; actions have them as JSON between tags."""
    inside = actions.removeprefix(f'{CALL}\n').removesuffix(f'\n{END_CALL}').split(f'\n{END_CALL}\n{CALL}\n')
    calls = [self._tool_format.call_text(*read_call(call)[:2]) for call in inside]
    return '\n'.join(map(tagged, calls))

  def _without_prefix(self, whole: str) -> str:
    prefixes = (self.reply_prefix, self._said_prefix, self._spelled_prefix)
    return whole.removeprefix(next((prefix for prefix in prefixes if whole.startswith(prefix)), ''))

  def reply_texts(self, replies: list[list[int]]) -> list[str]:
    """The whole replies of sampled ids: with the forced prefix but for an empty thought, without stop tokens."""
    stops = set(self.tokenizer.stop_ids)
    cut = [ids[:-1] if ids and ids[-1] in stops else ids for ids in replies]
    return [self._said_prefix + text for text in self.tokenizer.decode_batch(cut)]

  def pieces(self, env: int, answer: str) -> list[str]:
    """The texts of an answer that should each name an action; none is blank.

    A whole answer loses blank lines around it and white space behind it. Its first line keeps its indentation, which
    later lines may continue, unless it is the only one.
    """
    if not self._specs[env].env.whole_answer:
      return [p.strip() for p in answer.split(self.settings.action_sep) if p.strip()]
    whole = _BLANK_LINES.sub('', answer).rstrip()
    return [whole if '\n' in whole else whole.strip()] if whole else []

  def parse(self, env: int, text: str, ids: Sequence[int] = ()) -> ParsedReply:
    """Parses a reply. It has the actions of its answer even if it is not of its form, see `read_answer`.

    If the chat template lists tools, a call in the place of the answer is an action. The tags of calls are found by the
    sampled `ids`, or in the text if there are none.
    """
    form, calls = self.settings.format, ''
    if self._functions[env]:
      text, calls = self._without_calls(env, text, ids)
    sections, answer = read_sections(text, form), read_answer(text, form)
    if answer is None or (calls and answer):
      return ParsedReply((), (), False, sections)
    spec = self._specs[env]
    pieces = [calls] if calls else self.pieces(env, answer)
    if self._functions[env] and not calls and any(CALL in piece for piece in pieces):
      return ParsedReply((), (), False, sections)
    parsed = [spec.env.read_action(piece) for piece in pieces]
    known = [x for x in parsed if x is not None]
    actions, names = (tuple(x) for x in zip(*known[: spec.actions_a_turn], strict=True)) if known else ((), ())
    return ParsedReply(actions, names, bool(known) and len(known) == len(parsed), sections)

  def _without_calls(self, env: int, text: str, ids: Sequence[int]) -> tuple[str, str]:
    """A reply with an empty answer in the place of its calls, and the calls as one action.

    The text itself and '' if there is no call, or one that cannot be read.
    """
    tags, said = {}, text
    if ids:
      ids = ids[:-1] if ids[-1] in self.tokenizer.stop_ids else ids
      tags, said = self.tokenizer.call_tags, self.tokenizer.decode(ids)
    decode = self.tokenizer.decode if tags else str
    form = self._tool_format
    reader = ReplyReader(
      (CALL, END_CALL), tags, decode, in_thought=False, bad_calls=BadCalls.CONTENT, parallel=True, call_id=str,
      read_call=form.read_call(self._functions[env]), before_calls=form.before_calls,
    )  # fmt: skip
    events = [*reader.feed(ids, said), *reader.finish()]
    reply = reader.reply()
    if reply.problems or not reply.calls:
      return text, ''
    first = next(i for i, event in enumerate(events) if isinstance(event, CallDone))
    before, after = (
      ''.join(event.text for event in part if isinstance(event, ContentDelta))
      for part in (events[:first], events[first:])
    )
    action = '\n'.join(tagged(call_json(call.name, call.arguments)) for call in reply.calls)
    return f'{text.removesuffix(said)}{before}{_NO_ANSWER}{after}', action

  # -- parts of prompts ------------------------------------------------------------------------------------------------

  def _turn(self, env: int, turn: int, observation: Observation, actions_left: int) -> Segments:
    before, behind = templates.turn_frame(self._specs[env], turn, actions_left, observation, self.settings)
    return join(before, map_text(templates.plain, observation), behind)

  def _task_and_turn(self, env: int, turn: int, observation: Observation, actions_left: int) -> Segments:
    return join(self._tasks[env], templates.PARAGRAPH, self._turn(env, turn, observation, actions_left))

  def _after_reply(
    self, env: int, turn: int, before: Turn, observation: Observation, actions_left: int
  ) -> tuple[str, Segments]:
    """The role and the content of the message after a reply: the result of its call, or its reward and the turn."""
    if self._functions[env] and ''.join(before.actions).startswith(CALL):
      return TOOL, map_text(templates.plain, observation)
    return USER, join(templates.reward_line(before.reward), self._turn(env, turn, observation, actions_left))

  def _opening(self, env: int, user: Segments) -> Segments:
    system = templates.system_of(self._specs[env])
    return self.tokenizer.opening(system, user, self.reply_prefix, self._functions[env])

  def _following(self, env: int, before: Turn, role: str, message: Segments) -> Segments:
    tools = bool(self._functions[env])
    return self.tokenizer.following(message, self.reply_prefix, closed=before.closed, role=role, tools=tools)

  def _exchanges(
    self, env: int, past: Sequence[Turn], shown: int, observation: Observation, actions_left: int
  ) -> list[tuple[str, Segments, Turn | None]]:
    """The messages before the replies of the last `shown` turns and of the current one: role, content, and the turn
    that replied."""
    first = len(past) - shown
    states = [(t.observation, t.actions_left) for t in past[first:]] + [(observation, actions_left)]
    messages = [(USER, self._task_and_turn(env, first, *states[0]))]
    for turn, before in enumerate(past[first:], start=first):
      messages.append(self._after_reply(env, turn + 1, before, *states[turn + 1 - first]))
    return [(*message, reply) for message, reply in zip(messages, [*past[first:], None], strict=True)]

  def _conversation(
    self, env: int, past: Sequence[Turn], shown: int, observation: Observation, actions_left: int
  ) -> Encoded:
    """The conversation of the last `shown` turns and the current turn, with replies as they were sampled."""
    exchanges = self._exchanges(env, past, shown, observation, actions_left)
    segments = self._opening(env, exchanges[0][1])
    for (_, _, before), (role, message, _) in itertools.pairwise(exchanges):
      segments += (TokenSegment(before.ids),)
      segments += self._following(env, before, role, message)
    return self.tokenizer.encode_segments(segments)

  def _summary(
    self, env: int, past: Sequence[Turn], shown: int, observation: Observation, actions_left: int
  ) -> Encoded:
    user = self._summary_text(env, past, shown, observation, actions_left)
    return self.tokenizer.encode_segments(self._opening(env, user))

  def _summary_text(
    self, env: int, past: Sequence[Turn], shown: int, observation: Observation, actions_left: int
  ) -> Segments:
    """One message: the task, the actions and rewards of the last `shown` turns, and the current turn."""
    first = len(past) - shown
    memory: Segments = ()
    for i, turn in enumerate(past[first:], start=first):
      before, behind = templates.memory_frame(self._specs[env], i, turn.actions, turn.reward, self.settings.action_sep)
      lead = '\n' if memory else templates.PARAGRAPH + templates.MEMORY
      memory = join(memory, lead, before, map_text(templates.plain, turn.observation), behind)
    present = self._turn(env, len(past), observation, actions_left)
    return join(self._tasks[env], memory, templates.PARAGRAPH, present)
