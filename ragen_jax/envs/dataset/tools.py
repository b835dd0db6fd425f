"""What a policy can call in its answers: the interface of tools, and functions of the user as tools.

What goes wrong has one of two outcomes. A mistake of the policy, such as wrong arguments, is told to it. A tool that
raises, hangs or returns no text is a `Fault`, which ends the episode as an error and is never text to learn from.

tool_use.py reads the calls and counts them. Implementations: `FunctionTool`, `SearchTool` in search.py, and `McpTool`
in mcp_tools.py.
docs/search.md has examples.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ragen_jax.envs.json_schema import describe, fits, read_json
from ragen_jax.envs.options import check_seconds, check_text, check_whole_number
from ragen_jax.envs.outside.images import read_text
from ragen_jax.utils.errors import describe_error, one_line
from ragen_jax.utils.imports import import_function
from ragen_jax.utils.threads import Fault, run_calls

CUT_MARK = ' [cut]'
_LEAST_CHARS = 100
_JSON_TYPES = {str: 'string', int: 'integer', float: 'number', bool: 'boolean'}


class WrongArguments(ValueError):
  """The arguments of a call are a mistake of the policy, which reads the message. Functions of users may raise it."""


def cut(text: str, most: int) -> str:
  """The text, of at most `most` characters; a longer one ends with `CUT_MARK`."""
  return text if len(text) <= most else text[: most - len(CUT_MARK)] + CUT_MARK


@dataclasses.dataclass(frozen=True, eq=False)
class Tool(abc.ABC):
  """What a policy can call. Subclasses are frozen dataclasses, whose fields are the options of the tool.

  Class attributes, or properties:
    name: in calls, in `tool_options` and in metrics; in snake case.
    help: what the tool does, in one line that follows its name.
    schema: JSON schema of the arguments: an object, whose properties are checked as far as `json_schema.fits` reads
      them. If the only property is a text, the whole argument of a call is this text; otherwise it is JSON.

  Attributes:
    budget: maximum number of calls in an episode; 0 for no limit.
    timeout_s: time limit of a call, in seconds.
    max_chars: maximum number of characters of a result; longer ones are cut, with a mark.
  """

  name: ClassVar[str]
  help: ClassVar[str]
  schema: ClassVar[Mapping[str, Any]]

  budget: int = 0
  timeout_s: float = 10.0
  max_chars: int = 4000

  def __post_init__(self):
    check_whole_number(self.where, 'budget', self.budget, 0)
    check_seconds(self.where, 'timeout_s', self.timeout_s)
    check_whole_number(self.where, 'max_chars', self.max_chars, _LEAST_CHARS)

  @property
  def where(self) -> str:
    """The section of the config with the tool's options, for errors."""
    return f'tool_options.{self.name}'

  @abc.abstractmethod
  def call(self, batch: Sequence[Mapping[str, Any]]) -> list[str | WrongArguments | Fault]:
    """Calls the tool for several rows.

    Args:
      batch: the arguments of each call, which follow `schema`.

    Returns:
      For each call, in order, the text for the policy; or the policy's mistake; or why there is no result. A call takes
      at most `timeout_s`, apart from repetitions.
    """

  def check(self) -> None:
    """Raises ValueError with one line if a file, a package or a server is missing, before a run begins."""
    return

  @property
  def usage(self) -> str:
    """How a call is written in the text of an answer, such as 'search[query]'."""
    properties = self.schema['properties']
    if _takes_text(self.schema):
      return f'{self.name}[{next(iter(properties))}]'
    return f'{self.name}[{self._arguments if properties else ""}]'

  @property
  def template_usage(self) -> str:
    """What a call has, for calls that are written in the form of the chat template."""
    return f'{self.name} with the arguments {self._arguments}'

  @property
  def _arguments(self) -> str:
    kinds = self.schema['properties'].items()
    optional = {field: '' if self._needs(field) else ' (optional)' for field, _ in kinds}
    return f'{{{", ".join(f"{json.dumps(x)}: {describe(kind)}{optional[x]}" for x, kind in kinds)}}}'

  def _needs(self, field: str) -> bool:
    return field in self.schema.get('required', ())

  def read(self, argument: str) -> dict[str, Any]:
    """The arguments that a call writes between its brackets; raises WrongArguments."""
    if not _takes_text(self.schema):
      return self.read_json(argument if argument or self.schema['properties'] else '{}', self.usage)
    (field,) = self.schema['properties']
    # Halves of surrogate pairs cannot be sent.
    values = {field: argument.encode('utf-8', 'replace').decode()} if argument or self._needs(field) else {}
    return self.checked(values, self.usage)

  def read_json(self, arguments: str, usage: str) -> dict[str, Any]:
    """The arguments in a JSON text; raises WrongArguments, with how a call is written."""
    try:
      values = read_json(arguments)
    except ValueError:
      values = None
    if not isinstance(values, dict):
      raise WrongArguments(f'The argument is not a JSON object; write {usage}.')
    return self.checked(values, usage)

  def checked(self, values: dict[str, Any], usage: str) -> dict[str, Any]:
    """The arguments, if they follow the schema; raises WrongArguments, with how a call is written."""
    properties = self.schema['properties']
    unknown = [field for field in values if field not in properties]
    if unknown:
      raise WrongArguments(f'{one_line(unknown[0])} is no argument; write {usage}.')
    for field, kind in properties.items():
      if field not in values and self._needs(field):
        raise WrongArguments(f'The argument "{field}" is missing; write {usage}.')
      if field in values and not fits(values[field], kind):
        raise WrongArguments(f'"{field}" must be: {describe(kind)}.')
      if _takes_text(self.schema) and self._needs(field) and not values[field].strip():
        raise WrongArguments(f'The {field} is empty.')
    return values


def _takes_text(schema: Mapping[str, Any]) -> bool:
  """Whether the argument of a call is a text without JSON around it."""
  kinds = list(schema['properties'].values())
  return len(kinds) == 1 and kinds[0].get('type') == 'string' and 'enum' not in kinds[0]


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionTool(Tool):
  """A function of the user. Its name, the first line of its docstring and its signature describe the tool.

  The parameters are text (`str`, or without an annotation), `int`, `float`, `bool` or `Literal` of texts. The function
  returns a string, and raises `WrongArguments` for arguments that are a mistake of the policy.

  Attributes:
    function: 'package.module:function' or 'file.py:function'.
    help: one line about the tool; '' for the first line of the docstring.
    workers: number of threads that call the function at a time. Python cannot stop a thread, so a call that exceeds the
      time limit is left behind.
  """

  function: str = ''
  help: str = ''
  workers: int = 1

  @property
  def name(self) -> str:
    return self.function.rpartition(':')[2].rpartition('.')[2]

  def __post_init__(self):
    super().__post_init__()
    check_whole_number(self.where, 'workers', self.workers, 1)
    function = import_function('tools', self.function)
    if not re.fullmatch(r'[a-z][a-z0-9_]*', self.name):
      raise ValueError(f'tools={self.function!r}; allowed: functions with a name in snake case')
    text = check_text(self.where, 'help', self.help) or (inspect.getdoc(function) or '').partition('\n')[0]
    values = {
      'help': ' '.join(text.split()),
      'schema': _schema_of(self.function, function),
      '_function': function,
    }
    if not values['help']:
      raise ValueError(f"{self.where}: help=''; allowed: a line about the tool, or a docstring of {self.function}")
    for field, value in values.items():
      object.__setattr__(self, field, value)

  def call(self, batch: Sequence[Mapping[str, Any]]) -> list[str | WrongArguments | Fault]:
    calls = [functools.partial(self._call_one, arguments) for arguments in batch]
    how = {'what': self.name, 'workers': self.workers, 'timeout_s': self.timeout_s, 'owner': self}
    return [result if fault is None else fault for result, fault in run_calls(calls, **how)]

  def _call_one(self, arguments: Mapping[str, Any]) -> str | WrongArguments | Fault:
    try:
      result = self._function(**arguments)
    except WrongArguments as e:
      return WrongArguments(str(read_text(str(e))))
    # The result is read here, within the time limit, because it may be an object that answers late.
    text = read_text(result)
    if isinstance(text, Fault):
      return Fault(f'{self.name} returned no usable text', str(text))
    return f'{self.name}: {text}' if text.strip() else f'{self.name} returned an empty text.'


def _schema_of(path: str, function: Any) -> dict[str, Any]:
  """The JSON schema of the parameters of a function; raises ValueError if they cannot be named and written in JSON."""
  allowed = 'a function with parameters that are text, int, float, bool or Literal of texts, each passed by its name'
  try:
    parameters = inspect.signature(function).parameters.values()
    hints = typing.get_type_hints(function)
  except Exception as e:  # annotations are code of the user's
    raise ValueError(f'tools={path!r}: parameters cannot be read ({describe_error(e)}); allowed: {allowed}') from e
  properties, required = {}, []
  for p in parameters:
    hint = hints.get(p.name, str)
    kind = {'type': _JSON_TYPES.get(hint, '') if isinstance(hint, type) else ''}
    if typing.get_origin(hint) is typing.Literal and all(isinstance(x, str) for x in typing.get_args(hint)):
      kind = {'type': 'string', 'enum': list(typing.get_args(hint))}
    if not kind['type'] or p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
      raise ValueError(f'tools={path!r}: parameter {one_line(p, str)}; allowed: {allowed}')
    properties[p.name] = kind
    required += [p.name] if p.default is p.empty else []
  return {'type': 'object', 'properties': properties, 'required': required, 'additionalProperties': False}
