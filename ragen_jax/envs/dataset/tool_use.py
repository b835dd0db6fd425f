"""The calls in answers of a policy: their reading, their budgets, and what the policy is told.

The whole answer is one call, written as `name[argument]`:

    search[who wrote the first program]     calls the tool 'search' with a query
    book[{"city": "Turin", "nights": 2}]    calls a tool with several arguments, as JSON
    finish[Ada Lovelace]                    gives the answer of the episode

Or the chat template lists the tools, and an answer that is a call is its JSON between tags (`utils.tool_calls`); any
other answer is that of the episode.

A mistake of the policy (no call, a tool that does not exist, wrong arguments, a budget that is spent) is told to it,
and nothing is called. `make_toolbox` makes the tools from a config, `Toolbox` describes them, and `ToolUse` calls them
for the rows of a session.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ragen_jax.envs.dataset.mcp_tools import PREFIX, SECTION, McpSettings, McpTool, select_tools, shared_server
from ragen_jax.envs.dataset.search import SearchTool
from ragen_jax.envs.dataset.tools import FunctionTool, Tool, WrongArguments, cut
from ragen_jax.envs.options import check_choice, check_flag, check_mapping
from ragen_jax.utils.errors import did_you_mean, one_line, short
from ragen_jax.utils.threads import Fault, attempt
from ragen_jax.utils.tool_calls import CALL, END_CALL, call_json, dump_json, tagged
from ragen_jax.utils.tool_calls import read_call as read_json_call

FORMATS = ('text', 'template')
FINISH = 'finish'
_FINISH_USAGE = f'{FINISH}[answer]'

_BUILT_IN: dict[str, type[Tool]] = {'search': SearchTool}
_NAME = r'[A-Za-z_]\w*'
_CALL = re.compile(rf'({_NAME})\s*\[(.*)\]', re.DOTALL)
_OTHER_CALL = re.compile(rf'(?<!\w)({_NAME})\s*\[')
_SHOWN = 40  # characters of a name that is told to the policy


# -- calls in answers --------------------------------------------------------------------------------------------------


def write_call(name: str, argument: str) -> str:
  """The answer that calls a tool, or with `FINISH` gives the answer; the inverse of `read_call`."""
  return f'{name}[{argument}]'


def read_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
  """The call that an answer consists of.

  The argument reaches to the last bracket, so that it may contain brackets of any kind, also those of intervals. After
  a bracket that closes the call may stand further brackets, white space and punctuation, but no words.

  Args:
    text: the whole answer.
    names: of the tools, in lower case.

  Returns:
    (name, argument), the name in lower case, whether or not there is such a tool, and the argument without blanks
    around it; None if the text is no call, or words follow the call.

  Raises:
    WrongArguments: a call of one of `names` follows the call.
  """
  match = _CALL.fullmatch(text.strip())
  if match is None:
    return None
  name, argument = match[1].lower(), match[2]
  if any(call[1].lower() in names for call in _OTHER_CALL.finditer(_after_call(argument, '['))):
    raise WrongArguments('An answer is one call, and these are several.')
  # '(0, 1] or [2, 3)' closes no call.
  return None if re.search(r'\w', _after_call(argument, '[(')) else (name, argument.strip())


def _after_call(argument: str, opening: str) -> str:
  """What follows the first square bracket that closes nothing; '' if there is none.

  Args:
    opening: the brackets that a square bracket may close. If '(' is one of them, ')' closes one too.
  """
  depth = 0
  for i, c in enumerate(argument):
    if c in opening:
      depth += 1
    elif c == ']' or (c == ')' and '(' in opening and depth):
      depth -= 1
    if depth < 0:
      return argument[i + 1 :]
  return ''


# -- the tools of an environment ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Final:
  """An answer gives the answer to the question: `answer`, which a verifier scores.

  Attributes:
    metrics: as in `Told`.
  """

  answer: str
  metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Told:
  """What the policy reads after an answer that was not final.

  Attributes:
    text: the result of a call, or what is wrong with the answer and what is allowed.
    valid: whether a tool was called and took the arguments.
    metrics: `invalid_calls`, and `NAME_calls` for each tool; the same names for every answer, 1 where one applies.
  """

  text: str
  valid: bool
  metrics: Mapping[str, float]


class Toolbox:
  """The tools of an environment.

  Attributes:
    free_text_is_answer: whether an answer that is no call of a tool is the final answer, as in RAGEN. Otherwise it is
      a mistake that is told to the policy.
    in_template: whether the chat template lists the tools, in place of the rules.
  """

  def __init__(
    self,
    tools: Sequence[Tool],
    *,
    free_text_is_answer: bool = False,
    in_template: bool = False,
    listed: Callable[[], Sequence[Tool]] | None = None,
  ):
    """Raises ValueError if two tools have the same name, or one has the name 'finish'.

    Args:
      listed: the tools that servers list, which follow `tools`. It is called by `check`, or when they are first needed.
    """
    self._tools, self._listed = tuple(tools), listed
    self.free_text_is_answer, self.in_template = free_text_is_answer, in_template
    _by_name(self._tools)

  @functools.cached_property
  def tools(self) -> dict[str, Tool]:
    """Name -> tool. Raises ValueError, with one line, if a server cannot be asked for its tools."""
    return _by_name([*self._tools, *(self._listed() if self._listed else ())])

  @property
  def functions(self) -> list[dict[str, Any]]:
    """The tools as a chat template lists them."""
    return [
      {'type': 'function', 'function': {'name': tool.name, 'description': tool.help, 'parameters': dict(tool.schema)}}
      for tool in self.tools.values()
    ]

  def rules(self, finish_help: str = 'gives your answer and ends the episode') -> str:
    """The lines of the prompt about the tools. If the template lists them, they only say how often they are called."""
    if not self.in_template:
      lines = ['An answer is one call, written as follows:', *self._usages(finish_help)]
      return '\n'.join(lines + ['Any other text is taken for your answer.'] * self.free_text_is_answer)
    limits = [f'{tool.name} {_often(tool)}' for tool in self.tools.values() if tool.budget]
    return 'A reply has one call of a tool, or your answer.' + (
      f' In an episode you may call {", ".join(limits)}.' if limits else ''
    )

  def _usages(self, finish_help: str) -> list[str]:
    """What each tool does, how it is called in the text of an answer, and how often; and how the answer is given."""
    often = {name: f'; {_often(tool)} in an episode' * bool(tool.budget) for name, tool in self.tools.items()}
    calls = [f'{tool.usage} {tool.help.rstrip(".")}{often[name]}.' for name, tool in self.tools.items()]
    return [*calls, f'{_FINISH_USAGE} {finish_help}.']

  def typing_help(self, finish_help: str) -> str:
    """How a person writes the calls that the policy writes in the form of its chat template; see `typed`."""
    head = 'The model calls tools in the form of its chat template. You type:'
    return '\n'.join([head, *self._usages(finish_help), 'Any other text is your answer, too.'])

  def typed(self, text: str) -> str:
    """The answer that a person means by a text in the form of `typing_help`."""
    name = argument = ''
    try:
      name, argument = read_call(text, (*self.tools, FINISH)) or ('', '')
      if name in self.tools:
        argument = dump_json(self.tools[name].read(argument))
    except WrongArguments:
      pass  # the call is made as it is, and the person reads what is wrong
    return argument if name == FINISH else tagged(call_json(name, argument)) if name in self.tools else text

  def check(self) -> None:
    """Raises ValueError with one line if a tool lacks a file, a package or a server."""
    for tool in self.tools.values():
      tool.check()

  def open(self, rows: int) -> ToolUse:
    """The use of the tools by the rows of a session."""
    return ToolUse(self, rows)


def _often(tool: Tool) -> str:
  return 'once' if tool.budget == 1 else f'at most {tool.budget} times'


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
  """Name -> tool; raises ValueError if a name occurs twice."""
  count = collections.Counter([FINISH, *(tool.name for tool in tools)])
  name, times = count.most_common(1)[0]
  if times > 1:
    raise ValueError(f'tools: two have the name {name!r}; allowed: tools with different names, none of them {FINISH!r}')
  return {tool.name: tool for tool in tools}


class ToolUse:
  """Calls the tools for the rows of a session, and counts the calls of each episode."""

  def __init__(self, toolbox: Toolbox, rows: int):
    self._toolbox = toolbox
    self._used: list[collections.Counter[str]] = [collections.Counter() for _ in range(rows)]

  def reset(self, rows: Sequence[int]) -> None:
    """Begins new episodes: their budgets are whole again."""
    for row in rows:
      self._used[row].clear()

  def step(self, rows: Sequence[int], answers: Sequence[str]) -> list[Final | Told | Fault]:
    """Executes one answer in each of the given rows. All calls of a tool are one batch.

    Returns:
      For each row, in order: the final answer, what the policy is told, or why the episode ends as an error.
    """
    outcomes: list[Any] = []
    waiting: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in self._toolbox.tools}
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
      outcome = self._read(row, answer)
      outcomes.append(outcome)
      if isinstance(outcome, tuple):
        name, arguments = outcome
        waiting[name][i] = arguments
        self._used[row][name] += 1
    for name, calls in waiting.items():
      if calls:
        results = _call(self._toolbox.tools[name], list(calls.values()))
        for i, result in zip(calls, results, strict=True):
          outcomes[i] = self._told(rows[i], name, result)
    return outcomes

  def _read(self, row: int, answer: str) -> Final | Told | tuple[str, dict[str, Any]]:
    """The answer as a tool's name and arguments; what it is instead, if nothing is to be called."""
    box = self._toolbox
    if box.in_template:
      return self._read_json(row, answer)
    usages = [tool.usage for tool in box.tools.values() if self._left(row, tool) != 0]
    allowed = f'Allowed: {", ".join([*usages, _FINISH_USAGE])}.'
    try:
      call = read_call(answer, (*box.tools, FINISH))
      name, argument = call or ('', '')
      if name == FINISH:
        if not argument:
          raise WrongArguments('The answer is empty.')
        return Final(argument, self._metrics())
      if name not in box.tools:
        if box.free_text_is_answer and answer.strip():
          return Final(answer.strip(), self._metrics())
        raise WrongArguments(
          (f'There is no tool {cut(name, _SHOWN)!r}. ' if call else 'This is no call of a tool. ') + allowed
        )
      tool = box.tools[name]
      arguments = tool.read(argument)
      if self._left(row, tool) == 0:
        raise WrongArguments(f'No call of {name} is left. {allowed}')
      return name, arguments
    except WrongArguments as e:
      return Told(str(e), False, self._metrics('invalid_calls'))

  def _read_json(self, row: int, answer: str) -> Final | Told | tuple[str, dict[str, Any]]:
    """`_read` of an answer that may be a call as JSON between tags."""
    if not answer.startswith(CALL):
      return Final(answer.strip(), self._metrics())
    tools = self._toolbox.tools
    usages = [tool.template_usage for tool in tools.values() if self._left(row, tool) != 0]
    allowed = f'Allowed: {", ".join([*usages, "your answer"])}.'
    try:
      name, arguments, problem = read_json_call(answer.removeprefix(CALL).removesuffix(END_CALL))
      if problem:
        raise WrongArguments(f'A reply has one call. {allowed}')
      if name not in tools:
        raise WrongArguments(f'There is no tool {cut(name, _SHOWN)!r}. {allowed}')
      values = tools[name].read_json(arguments, tools[name].template_usage)
      if self._left(row, tools[name]) == 0:
        raise WrongArguments(f'No call of {name} is left. {allowed}')
      return name, values
    except WrongArguments as e:
      return Told(str(e), False, self._metrics('invalid_calls'))

  def _left(self, row: int, tool: Tool) -> int | None:
    """The calls of a tool that are left in the row's episode; None without a limit."""
    return tool.budget - self._used[row][tool.name] if tool.budget else None

  def _told(self, row: int, name: str, result: Any) -> Told | Fault:
    """What the policy is told after a call."""
    if isinstance(result, Fault):
      return result
    tool, valid = self._toolbox.tools[name], not isinstance(result, WrongArguments)
    text = cut(str(result), tool.max_chars)
    left = self._left(row, tool)
    text += '' if left is None else f'\nCalls of {name} left: {left}.'
    return Told(text, valid, self._metrics(f'{name}_calls', *(() if valid else ('invalid_calls',))))

  def _metrics(self, *counted: str) -> dict[str, float]:
    names = ('invalid_calls', *(f'{name}_calls' for name in self._toolbox.tools))
    return {name: float(name in counted) for name in names}


def _call(tool: Tool, batch: list[dict[str, Any]]) -> list[Any]:
  """The results of a batch of calls; faults for all of them if the tool raises."""
  results, fault = attempt(functools.partial(tool.call, batch), tool.name)
  return [fault] * len(batch) if fault is not None else results


def make_toolbox(names: Any, options: Any, form: Any = 'text') -> Toolbox | None:
  """The tools of an environment. Making them starts no server.

  Args:
    names: `tools` of the config: built-in tools ('search'), functions 'package.module:function' or 'file.py:function',
      and MCP servers 'mcp:COMMAND' or 'mcp:ADDRESS'.
    options: `tool_options` of the config: name of a tool -> its options; 'finish' has `free_text_is_answer`, and 'mcp'
      has those of the servers.
    form: `tools_format` of the config: 'text' if the rules describe the tools, 'template' if the chat template does.

  Returns:
    None if no tool is named.

  Raises:
    ValueError: a tool or an option does not exist, or has a value that is not allowed; one line names it.
  """
  options = check_mapping('dataset', 'tool_options', options)
  if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
    kinds = ', '.join(_BUILT_IN)
    raise ValueError(f'tools={one_line(names)}; allowed: a tuple of {kinds}, functions and MCP servers')
  free = check_mapping('tool_options', FINISH, options.pop(FINISH, {}))
  flag = free.pop('free_text_is_answer', False)
  check_flag(f'tool_options.{FINISH}', 'free_text_is_answer', flag)
  if free:
    raise ValueError(f'tool_options.{FINISH}: {next(iter(free))} is no option; allowed: free_text_is_answer')
  settings = McpSettings(**_options_of(SECTION, options, McpSettings))
  servers = [shared_server(name, settings) for name in dict.fromkeys(names) if name.startswith(PREFIX)]
  tools = [_make_tool(name, options) for name in names if not name.startswith(PREFIX)]
  # Options of built-in tools may stay in a config that does not use them.
  known = dict.fromkeys([*_BUILT_IN, *(tool.name for tool in tools)])

  def listed() -> list[Tool]:
    found = select_tools(servers, settings.names)
    _check_sections(options, [*known, *(tool.name for _, tool in found)])
    limits = {name: getattr(settings, name) for name in ('budget', 'timeout_s', 'max_chars')}
    return [
      # A section of a built-in tool is of that tool, and configs have it whether they use the tool or not.
      McpTool(**fixed, **(limits | ({} if tool.name in _BUILT_IN else _options_of(tool.name, options, McpTool, fixed))))
      for server, tool in found
      for fixed in [{'server': server, 'listed': tool}]
    ]

  if not servers:
    _check_sections(options, known)
  check_choice('dataset', 'tools_format', form, FORMATS)
  in_template = form == 'template'
  if in_template and (flag or not names):
    why = f'tool_options.{FINISH}.free_text_is_answer=True' if flag else 'tools=()'
    raise ValueError(f"dataset: tools_format='template'; allowed: 'text' with {why}")
  if not tools and not servers:
    return None
  return Toolbox(tools, free_text_is_answer=bool(flag), in_template=in_template, listed=listed if servers else None)


def _make_tool(name: str, options: Mapping[str, Any]) -> Tool:
  if ':' in name:
    cls, fixed, short_name = FunctionTool, {'function': name}, name.rpartition(':')[2].rpartition('.')[2]
  elif name in _BUILT_IN:
    cls, fixed, short_name = _BUILT_IN[name], {}, name
  else:
    hint = did_you_mean(name.partition(':')[0], (*_BUILT_IN, PREFIX[:-1]))
    functions = "'package.module:function', 'mcp:COMMAND'"
    raise ValueError(f'tools: {short(name)}; {hint}allowed: {", ".join(_BUILT_IN)}, {functions}')
  return cls(**fixed, **_options_of(short_name, options, cls, fixed))


def _options_of(section: str, options: Mapping[str, Any], cls: type, fixed: Collection[str] = ()) -> dict[str, Any]:
  """The options in a section of `tool_options`; raises ValueError if one is no field of `cls`, or is fixed."""
  own = check_mapping('tool_options', section, options.get(section, {}))
  allowed = [field.name for field in dataclasses.fields(cls) if field.name not in fixed]
  unknown = [option for option in own if option not in allowed]
  if unknown:
    hint = did_you_mean(unknown[0], allowed)
    raise ValueError(f'tool_options.{section}: {unknown[0]} is no option; {hint}allowed: {", ".join(allowed)}')
  return own


def _check_sections(options: Mapping[str, Any], tools: Collection[str]) -> None:
  """Raises ValueError if a section of `tool_options` belongs to none of the tools."""
  known = [*dict.fromkeys(tools), SECTION, FINISH]
  unknown = [name for name in options if name not in known]
  if unknown:
    hint = did_you_mean(unknown[0], known)
    raise ValueError(f'tool_options.{unknown[0]}: there is no such tool; {hint}allowed: {", ".join(known)}')
