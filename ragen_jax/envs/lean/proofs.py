"""Lean 4 texts: statements, proofs that are not complete yet, and what the messages about them mean.

A text that is checked has the lines

    PREAMBLE
    theorem NAME ... := by
      TACTICS
    #print axioms NAME

The last line makes Lean name the axioms that the proof uses, and the place of its message tells how the server counts
lines: it leaves out the imports.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from ragen_jax.utils.errors import short

STANDARD_AXIOMS = frozenset({'propext', 'Classical.choice', 'Quot.sound'})
ALLOWED_STATEMENT = "a theorem or lemma with a name that ends in ':= by', with or without 'sorry'"
_UNSOLVED = 'unsolved goals'
_NAME = re.compile(r'(?<![\w.])(?:theorem|lemma)\s+((?:«[^»]*»|[^\s({\[:⦃«])+)')
_BEGINS = re.compile(r'"(?:[^"\\]|\\.)*"|--|/-', re.DOTALL)  # of a comment, or a text in which none begins
_NESTED = re.compile(r'/-|-/')
_SORRY = re.compile(r'(?<![\w.])sorry\s*$')
_AXIOMS = r"'(?:\S+\.)?%s' (?:does not depend on any axioms|depends on axioms: \[(.*?)\])"
_FENCED = re.compile(r'\s*```\w*\n(.*?)\n?\s*```\s*', re.DOTALL)
_UNKNOWN = re.compile(r'\?m\.\d+')

# Words that no step of a proof needs. With them a text could end the theorem and change what the last line prints, run
# programs in the server, or admit a goal. The words of tactics that only some proofs can do without are not among them.
_FORBIDDEN = (
  'abbrev', 'add_decl_doc', 'admit', 'alias', 'apply?', 'attribute', 'axiom', 'binder_predicate', 'class', 'constant',
  'def', 'deriving', 'end', 'eval%', 'example', 'export', 'grind_pattern', 'hint', 'import', 'inductive', 'infix',
  'infixl', 'infixr', 'instance', 'irreducible_def', 'lemma', 'local', 'macro', 'macro_rules',
  'mk_iff_of_inductive_prop', 'mutual', 'namespace', 'noncomputable', 'notation', 'notation3', 'omit', 'opaque',
  'partial', 'plausible', 'polyrith', 'postfix', 'prefix', 'private', 'proof_wanted', 'protected', 'recall', 'scoped',
  'seal', 'section', 'slim_check', 'sorry', 'sorryAx', 'stop', 'structure', 'suppress_compilation', 'syntax',
  'theorem', 'unif_hint', 'universe', 'unsafe', 'unseal', 'unsuppress_compilation', 'variable', 'with_weak_namespace',
)  # fmt: skip
# Families of such words, of which libraries have more.
_FAMILIES = (
  r'builtin_\w+', r'declare_\w+', r'include(?:_\w+)?', r'initialize\w*', r'register_\w+', r'run_\w+',
  r'(?:un)?set_option', r'(?:\w+_)?aesop_rules', r'(?:\w+_)?elab(?:_\w+)?', r'(?:\w+_)?grind_propagator',
  r'(?:\w+_)?d?simproc(?:_\w+)?',
)  # fmt: skip
# What `open` may be: of names other than Lean's, for one step.
_OPENED = r"(?:[ \t]+(?!(?:_root_\.)?Lean\b)[\w.'()]+)+[ \t]+in\b"
_FORBIDDEN_TEXT = re.compile(
  rf"(?<![\w.])(?:(?:{'|'.join([*map(re.escape, _FORBIDDEN), *_FAMILIES])})(?![\w'])"
  rf"|(?:_root_\.)?Lean\.\w+|open(?![\w'])(?!{_OPENED})(?:[ \t]+[\w.]+)?)|(?<!\w)#[a-zA-Z]\w*|@\["
)

# -- statements --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Statement:
  """What is to be proven.

  Attributes:
    name: of the theorem.
    text: the theorem up to ':= by', and what stands before it except imports.
    imports: the lines of imports of the text itself; '' if it has none.
    header: lines for its own preamble; '' for the usual ones.
    informal: the statement in words; '' for none.
  """

  name: str
  text: str
  imports: str = ''
  header: str = ''
  informal: str = ''

  def preamble(self, usual: str) -> str:
    """The lines above the theorem; `usual` stand there where the data have none."""
    return self.header or self.imports or usual

  @property
  def identity(self) -> str:
    """The text without the name and comments, equal for a theorem that is stated under two names."""
    text = _without_comments(self.text)
    found = _find_name(text)
    return text if found is None else f'{text[: found.start()]}theorem {text[found.end() :]}'


def read_statement(raw: Any, header: Any = '', informal: Any = '') -> Statement:
  """The statement that a row of the data has.

  Raises:
    ValueError: it is not one; the message says what is allowed.
  """
  for value in (header, informal):
    if not isinstance(value, str | None):
      raise ValueError(f'allowed: text, not {short(value)}, beside the statement')
  if not isinstance(raw, str):
    raise ValueError(f'allowed: {ALLOWED_STATEMENT}')
  lines = raw.replace('\r\n', '\n').strip().split('\n')
  imports = [line for line in lines if line.startswith('import ')]
  text = _SORRY.sub('', '\n'.join(line for line in lines if not line.startswith('import '))).strip()
  text += ' by' * text.endswith(':=')
  plain = _without_comments(text)
  found = _find_name(plain)
  # `#print axioms` names a theorem without its universes and without _root_.
  name = found[1].removesuffix('.').removeprefix('_root_.') if found else ''
  if not name or not re.search(r':=\s*by\s*$', plain):
    raise ValueError(f'allowed: {ALLOWED_STATEMENT}')
  return Statement(name, text, '\n'.join(imports), (header or '').strip(), (informal or '').strip())


def _find_name(text: str) -> re.Match[str] | None:
  """The last 'theorem NAME' or 'lemma NAME' of a text without comments."""
  return next(reversed(list(_NAME.finditer(text))), None)


def _without_comments(text: str) -> str:
  """A text with blanks in place of its comments, which may be nested."""
  parts, at = [], 0
  while begin := _BEGINS.search(text, at):
    end = begin.end()
    if begin[0] == '--':
      end += len(text[end:].partition('\n')[0])
    depth = int(begin[0] == '/-')
    while depth:
      mark = _NESTED.search(text, end)
      depth = 0 if mark is None else depth + (1 if mark[0] == '/-' else -1)
      end = len(text) if mark is None else mark.end()
    parts.append(text[at : begin.end()] if begin[0][0] == '"' else text[at : begin.start()] + ' ')
    at = end
  return ''.join([*parts, text[at:]])


def read_tactics(text: str) -> str:
  """The lines of tactics in an answer, from column 0: without a fence, tabs, and blank lines at the ends."""
  fenced = _FENCED.fullmatch(text)
  lines = (fenced[1] if fenced else text).expandtabs(2).split('\n')
  block = textwrap.dedent('\n'.join(line.rstrip() for line in lines))
  return block.strip('\n')


def forbidden(tactics: str) -> str:
  """The first word of tactics that is not allowed in a proof; '' if there is none."""
  found = _FORBIDDEN_TEXT.search(re.sub('[«»]', '', tactics))  # which are around words to make them names
  return found[0] if found else ''


# -- texts that are checked --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Draft:
  """A text to be checked.

  Attributes:
    code: the whole text.
    name: of its theorem.
    first: number of the first line of tactics, from 1.
    last: number of the line that prints the axioms.
  """

  code: str
  name: str
  first: int
  last: int


def show(statement: Statement, tactics: Sequence[str]) -> str:
  """The theorem with the tactics so far, as Lean reads it."""
  return '\n'.join([statement.text, *(textwrap.indent(block, '  ') for block in tactics)])


def write_draft(statement: Statement, tactics: Sequence[str], usual: str) -> Draft:
  """The text that checks the tactics so far; with none, `skip` stands there.

  Args:
    usual: the preamble of statements without one of their own.
  """
  above = f'{statement.preamble(usual)}\n\n'
  theorem = show(statement, tactics or ['skip'])
  first = above.count('\n') + statement.text.count('\n') + 2
  last = above.count('\n') + theorem.count('\n') + 3
  return Draft(f'{above}{theorem}\n\n#print axioms {statement.name}\n', statement.name, first, last)


# -- what the server says ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Message:
  """A message of Lean about a text: its kind ('error', 'warning', 'info', 'trace'), its line, and its words."""

  severity: str
  line: int
  text: str


@dataclasses.dataclass(frozen=True)
class Checked:
  """What a server says about a text.

  Attributes:
    messages: Lean's, in the order of the answer.
    has_sorry: whether the text has `sorry` in it.
    timed_out: whether Lean took too long; there are no messages then.
  """

  messages: tuple[Message, ...] = ()
  has_sorry: bool = False
  timed_out: bool = False


PROVED, OPEN, REJECTED, TIMED_OUT = 'proved', 'open', 'rejected', 'timed_out'


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a check means for a proof.

  Attributes:
    kind: PROVED; OPEN, the tactics are right so far and goals are left; REJECTED; or TIMED_OUT.
    goals: the goals that are left, of an OPEN one.
    reason: Lean's words about a REJECTED one.
    is_read: whether the answer was of the form that this module knows. Otherwise `reason` says what was not.
  """

  kind: str
  goals: tuple[str, ...] = ()
  reason: str = ''
  is_read: bool = True


def read_outcome(draft: Draft, checked: Checked) -> Outcome:
  """What the answer about a text means.

  Lean reports goals that are left as an error at the theorem's own `by`. The same error inside of the tactics, as of
  `have h : False := by skip`, means that they are not right.
  """
  if checked.timed_out:
    return Outcome(TIMED_OUT)
  errors = [x for x in checked.messages if x.severity == 'error']
  printed = _find_axioms(draft.name, checked.messages)
  if printed is None:
    if errors:
      return Outcome(REJECTED, reason='\n'.join(x.text for x in errors))
    return Outcome(REJECTED, reason='it does not say which axioms the proof uses', is_read=False)
  shift = draft.last - printed[0]
  left = [x for x in errors if x.text.startswith(_UNSOLVED) and x.line + shift < draft.first]
  others = [x for x in errors if x not in left]
  if others:
    return Outcome(REJECTED, reason='\n'.join(_told(x, x.line + shift - draft.first + 1) for x in others))
  if checked.has_sorry:
    return Outcome(REJECTED, reason='It uses sorry.')
  # Lean puts sorryAx in the place of goals that are left.
  foreign = sorted(printed[1] - STANDARD_AXIOMS - ({'sorryAx'} if left else set()))
  if foreign:
    return Outcome(REJECTED, reason=f'It uses the axiom {foreign[0]}, which a proof may not use.')
  if left:
    return Outcome(OPEN, goals=tuple(goal for x in left for goal in _split_goals(x.text)))
  return Outcome(PROVED)


def _find_axioms(name: str, messages: Sequence[Message]) -> tuple[int, frozenset[str]] | None:
  """The line of the last message that names a theorem's axioms, and those of all; None if there is no message.

  There are several if the name is ambiguous, or if tactics print such a message. None of them is believed alone.
  """
  # Lean leaves « and » out where a name needs none.
  pattern = re.compile(_AXIOMS % re.sub('[«»]', r'\g<0>?', re.escape(name)), re.DOTALL)
  found = None
  for message in messages:
    match = pattern.fullmatch(message.text.strip()) if message.severity == 'info' else None
    if match:
      names = frozenset(x.strip() for x in (match[1] or '').split(',') if x.strip())
      found = message.line, names | (found[1] if found else frozenset())
  return found


def _split_goals(text: str) -> list[str]:
  """The goals of a message about unsolved goals."""
  goals = text.removeprefix(_UNSOLVED).strip('\n').split('\n\n')
  return [goal.strip('\n') for goal in goals if goal.strip()]


def _told(message: Message, line: int) -> str:
  """An error with its line among all tactics."""
  return f'line {line}: {message.text}' if line > 0 else message.text


def targets(goals: Sequence[str]) -> tuple[str, ...]:
  """What is to be shown in each goal, without the hypotheses; numbers of unknown terms do not matter."""
  ends = [goal.rpartition('⊢')[2] for goal in goals]
  return tuple(' '.join(_UNKNOWN.sub('?m', end).split()) for end in ends)


def same_goals(goals: Sequence[str], others: Sequence[str]) -> bool:
  """Whether two lists of goals are equal but for the numbers of unknown terms."""
  plain = [[' '.join(_UNKNOWN.sub('?m', goal).split()) for goal in part] for part in (goals, others)]
  return plain[0] == plain[1]


def read_messages(response: Mapping[str, Any]) -> Checked:
  """The messages of the server's answer about a text.

  Raises:
    ValueError: it has another form.
  """
  raw, sorries = response.get('messages') or [], response.get('sorries') or []
  if not isinstance(raw, list) or not isinstance(sorries, list):
    raise ValueError(f'messages or sorries are no list: {short(response)}')
  messages = []
  for x in raw:
    place = x.get('pos') if isinstance(x, Mapping) else None
    line = place.get('line') if isinstance(place, Mapping) else None
    if not isinstance(line, int) or not isinstance(x.get('data'), str) or not isinstance(x.get('severity'), str):
      raise ValueError(f'a message has no severity, line or text: {short(x)}')
    messages.append(Message(x['severity'], line, x['data']))
  return Checked(tuple(messages), bool(sorries))
