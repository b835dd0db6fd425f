"""Calls of tools as a tag for each argument, as the templates of Qwen3-Coder and Qwen3.5 write them.

<tool_call>
<function=search>
<parameter=query>
Turin
</parameter>
</function>
</tool_call>

Texts are written as they are, other values as JSON; some templates write true, false and null as Python does. So the
schema of the tool tells the type of an argument.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ragen_jax.utils.tool_calls import Problem, dump_json, encodable, parse_json

_FUNCTION = re.compile(r'\s*<function=([^>\n]*)>')
# The end tag is the first one that a parameter or the end of the function follows, so a value may hold the tag.
_PARAMETER = re.compile(
  r'\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))', flags=re.DOTALL
)
_END = re.compile(r'\s*</function>\s*\Z')
_SCALARS = {'true': 'true', 'false': 'false', 'null': 'null', 'none': 'null'}
_KINDS = {
  str: 'string', bool: 'boolean', int: 'integer', float: 'number', list: 'array', dict: 'object', type(None): 'null',
}  # fmt: skip

# Schemas of parameters by their names, of tools by their names.
Schemas = Mapping[str, Mapping[str, Any]]


def write_parameters(name: str, arguments: str, *, as_json: bool) -> str:
  """The text of a call between its tags; arguments that are no JSON object stay as they are.

  Args:
    as_json: whether true, false and null are written as JSON; otherwise as Python's True, False and None.
  """
  try:
    values = parse_json(arguments)
    written = [(key, _text(value, as_json)) for key, value in values.items()] if isinstance(values, dict) else None
  except (ValueError, RecursionError):
    written = None
  if written is None:
    return f'<function={name}>\n{arguments}\n</function>'
  parameters = ''.join(f'<parameter={key}>\n{value}\n</parameter>\n' for key, value in written)
  return encodable(f'<function={name}>\n{parameters}</function>')


def _text(value: Any, as_json: bool) -> str:
  if isinstance(value, str):
    return value
  return dump_json(value) if as_json or isinstance(value, dict | list) else str(value)


def read_parameters(text: str, schemas: Schemas) -> tuple[str, str, Problem | None]:
  """Reads the text between the tags of a call: the name, the arguments as JSON, and the problem.

  With a problem, the name is '' if it cannot be read, and the arguments are the raw text from where reading fails. A
  value is a text where the schema allows texts, and where it names no type and the value is neither an object nor an
  array. A value that is not of its type is a text too. Schemas come from anywhere: what is no schema names no type.
  """
  opening = _FUNCTION.match(text)
  if opening is None or not opening[1].strip():
    return '', text, Problem.INVALID_PARAMETERS if opening is None else Problem.MISSING_NAME
  name, at = encodable(opening[1].strip()), opening.end()
  known = schemas.get(name, {})
  arguments: dict[str, Any] = {}
  while (found := _PARAMETER.match(text, at)) is not None:
    arguments[found[1]] = _typed(found[2], known.get(found[1]))
    at = found.end()
  if _END.match(text, at) is None:
    return name, encodable(text[at:].strip()), Problem.INVALID_PARAMETERS
  return name, dump_json(arguments), None


def _typed(text: str, schema: Any) -> Any:
  """The value of a parameter."""
  kinds, scalar = _kinds(schema), _SCALARS.get(text.strip().lower())
  if scalar == 'null' and 'null' in kinds:
    return None
  if 'string' in kinds:
    return text
  try:
    value = parse_json(scalar or text)
  except ValueError:
    return text
  kind = _KINDS[type(value)]
  if kind == 'integer' or (kind == 'number' and value.is_integer()):
    fits = not kinds.isdisjoint(('integer', 'number'))
  else:  # a schema of null alone may refer to a type that is told elsewhere
    fits = kind in kinds or (kinds <= {'null'} and kind in ('object', 'array'))
  return value if fits else text


def _kinds(schema: Any) -> set[str]:
  """The types that a JSON schema names, or those of the values that it lists; empty if it does neither."""
  if not isinstance(schema, Mapping):
    return set()
  named = schema.get('type')
  kinds = {x for x in _KINDS.values() if x in (named if isinstance(named, list) else [named])}
  for word in ('anyOf', 'oneOf', 'allOf'):
    for inner in _listed(schema.get(word)):
      kinds |= _kinds(inner)
  if not kinds:
    values = [*_listed(schema.get('enum')), *([schema['const']] if 'const' in schema else [])]
    kinds |= {_KINDS[type(x)] for x in values}
  return kinds


def _listed(value: Any) -> list[Any]:
  return value if isinstance(value, list) else []
