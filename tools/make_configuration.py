"""Writes docs/configuration.md from the comments and values of configs/default.py and environments.py.

The last column of its tables lists the changes of the other configs.

python tools/make_configuration.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ml_collections import ConfigDict  # noqa: E402

from configs import default  # noqa: E402
from ragen_jax.models import presets  # noqa: E402

PAGE = ROOT / 'docs' / 'configuration.md'
# Any pretrained model: the settings of all are the same.
PRETRAINED = 'qwen2.5-0.5b'
# Fields of every environment, which one comment explains for all.
COMMON = ('type', 'max_turns', 'max_actions', 'max_actions_per_turn', 'max_words')

HEAD = """# Configuration

<!-- Written by `python tools/make_configuration.py`. To change this page, change the comments in configs/. -->

This page lists every field of [configs/default.py](../configs/default.py) with its default and meaning. Each field is
a flag of `main.py`, with the prefix `--config.`:

```
python main.py --config=configs/frozenlake_ppo.py --config.algorithm.clip_ratio_high=0.3 --workdir=runs/wider
python main.py --config=configs/frozenlake_ppo.py --config.train.tags="('FrozenLake','Bandit')" --workdir=runs/two
```

A value that is not allowed is refused with an error of one line, before anything is compiled. The other files of
[configs](../configs) change some fields; the last column lists the new values and the configs that set them, by the
NAME of `configs/NAME.py`. A suffix of the file's name selects a pretrained model instead of the built-in model, and
sets the values that are listed for pretrained models:

```
python main.py --config=configs/frozenlake_ppo.py:qwen2.5-0.5b
```

"""


def main() -> None:
  PAGE.write_text(render(), encoding='utf-8')


def render() -> str:
  """The whole page."""
  lines, body = _function('default.py', 'get_config')
  config, changes = default.get_config(), changed_values()
  sections: dict[str, dict[str, Any]] = {'': {'text': '', 'rows': []}}
  parts = []
  for node in body:
    target = _target(node)
    if target is None:
      continue
    section, _, name = target.partition('.')
    comment = _comment(lines, node.lineno - 1)
    if ast.unparse(node.value) == 'ConfigDict()':
      sections[section] = {'text': comment, 'rows': []}
    elif section == 'envs':
      sections[section] = {'text': comment, 'rows': [], 'parts': _environments(config, changes)}
    else:
      field = name or section
      rows = sections[section if name else '']['rows']
      rows.append((field, _value(_get(config, target), node.value), comment, changes.get(target, '')))
  words = ', '.join(f'`{name}`' for name in presets.PRESETS)
  parts.append(f'The models are {words}, each also with the suffix `-lora`.\n')
  links = ', '.join(f'[{name}](#{name})' for name in sections if name)
  parts.append(f'Sections: [the run](#the-run), {links}.\n')
  for name, section in sections.items():
    title, text = _heading(section['text'])
    parts.append(f'## {name or "The run"}\n')
    text = ' '.join(x for x in (f'{title}.' if title else '', text) if x)
    if text:
      parts.append(_escape(text) + '\n')
    if section['rows']:
      parts.append(_table(section['rows'], prefix=f'{name}.' if name else ''))
    parts += section.get('parts', [])
  return HEAD + '\n'.join(parts)


def _function(file: str, name: str) -> tuple[list[str], list[ast.stmt]]:
  """The lines of a file of configs/, and the statements of one of its functions."""
  lines = (ROOT / 'configs' / file).read_text(encoding='utf-8').splitlines()
  tree = ast.parse('\n'.join(lines))
  return lines, next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name).body


def _target(node: ast.stmt, prefix: str = 'config.') -> str | None:
  """'train.groups' for an assignment to `config.train.groups`; None for other statements."""
  if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
    name = ast.unparse(node.targets[0])
    return name.removeprefix(prefix) if name.startswith(prefix) else None
  return None


def _comment(lines: list[str], at: int) -> str:
  """The comment that ends directly above a line, as one line; a section's head stays on a separate line."""
  found = []
  while lines[at - 1].strip().startswith('#'):
    at -= 1
    text = lines[at].strip()[1:].strip()
    if text.startswith('-- '):
      found.insert(0, re.sub(r'\s*-+$', '', text) + '\n')
      break
    found.insert(0, text)
  return ' '.join(found).strip(' ')


def _heading(text: str) -> tuple[str, str]:
  """A section's title and the text after it."""
  if not text.startswith('-- '):
    return '', text
  title, _, rest = text.removeprefix('-- ').partition('\n')
  return title.strip().removesuffix('.'), rest.strip()


def _environments(config: ConfigDict, changes: dict[str, str]) -> list[str]:
  """The parts of the page about the environments, one for each tag."""
  lines, body = _function('environments.py', 'by_tag')
  found = [(node, _target(node, 'envs.')) for node in body]
  return [
    _environment(lines, node.value, tag, _comment(lines, node.lineno - 1), config, changes)
    for node, tag in found
    if tag
  ]


def _environment(
  lines: list[str], value: ast.expr, tag: str, comment: str, config: ConfigDict, changes: dict[str, str]
) -> str:
  """An environment's part of the page: a table of its options, or how it differs from another."""
  text = f'### envs.{tag}\n\n' + (_escape(comment) + '\n\n' if comment else '')
  if value.func.id == '_like':
    other = ast.unparse(value.args[0])
    options = ', '.join(f'`{k.arg}={_plain_value(config.envs[tag][k.arg], k.value)}`' for k in value.keywords)
    return text + f'As [{other}](#{other.replace(".", "").lower()}), but {options}.\n'
  entries = {k.value: (k.lineno - 1, v) for k, v in zip(value.args[0].keys, value.args[0].values, strict=True)}
  shared = ', '.join(f'`{name}={config.envs[tag][name]!r}`' for name in COMMON)
  rows = [
    (name, _value(config.envs[tag][name], v), _comment(lines, at), changes.get(f'envs.{tag}.{name}', ''))
    for name, (at, v) in entries.items()
    if name not in COMMON
  ]
  return text + f'{shared}\n\n' + _table(rows, prefix=f'envs.{tag}.')


def _plain_value(value: Any, source: ast.expr | None = None) -> str:
  """A value as Python writes it, or as the file writes it if that is shorter."""
  text = repr(value.to_dict() if isinstance(value, ConfigDict) else value)
  return ast.unparse(source) if source is not None and len(text) > (10 if isinstance(value, float) else 60) else text


def _value(value: Any, source: ast.expr) -> str:
  return f'`{_plain_value(value, source)}`'


def _escape(text: str) -> str:
  """Text for Markdown: characters that look like a tag are escaped outside of code."""
  parts = re.split(r'(`[^`]*`)', text)
  return ''.join(p if p.startswith('`') else p.replace('<', '&lt;').replace('>', '&gt;') for p in parts)


def _table(rows: list[tuple[str, str, str, str]], prefix: str) -> str:
  """A table of field, default, meaning and changes; the last column is omitted if there are no changes."""
  head = ['Field', 'Default', 'Meaning', 'Changed by']
  cells = [[f'`{prefix}{field}`', value, _escape(text), changed] for field, value, text, changed in rows]
  if not any(row[3] for row in cells):
    head, cells = head[:3], [row[:3] for row in cells]
  cells = [[cell.replace('|', '\\|') for cell in row] for row in cells]
  return '\n'.join('| ' + ' | '.join(row) + ' |' for row in [head, ['---'] * len(head), *cells]) + '\n'


def _leaves(config: ConfigDict, prefix: str = '') -> Iterator[tuple[str, Any]]:
  for name, value in config.items():
    if isinstance(value, ConfigDict):
      yield from _leaves(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _get(config: ConfigDict, field: str) -> Any:
  for name in field.split('.'):
    config = config[name]
  return config


def changed_values() -> dict[str, str]:
  """Dotted field -> the values that other configs, pretrained models and LoRA set, as text."""
  tiny, real = (dict(_leaves(default.get_config(model))) for model in ('', PRETRAINED))
  lora, real_lora = (dict(_leaves(default.get_config(f'{model}-lora'))) for model in ('tiny', PRETRAINED))
  names = sorted(p.stem for p in (ROOT / 'configs').glob('[a-z]*.py') if p.stem not in ('default', 'environments'))
  shipped = {name: importlib.import_module(f'configs.{name}').get_config for name in names}
  games = [name for name in names if inspect.signature(shipped[name]).parameters]
  small = {name: dict(_leaves(shipped[name]())) for name in names}
  large = {name: dict(_leaves(shipped[name](PRETRAINED))) for name in games}
  found_changes = {}
  for field in tiny.keys() - {'model.preset'}:
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
      own = small[name][field]
      other = large[name][field] if name in large else own
      if own != tiny[field] and other == own:
        found.setdefault((repr(own), ''), []).append(name)
        continue
      if own != tiny[field]:
        found.setdefault((repr(own), ', built-in model'), []).append(name)
      if name in large and other != real[field]:
        found.setdefault((repr(other), ', pretrained'), []).append(name)
    words = [f'`{value}`: {_patterns(of, games)}{which}' for (value, which), of in found.items()]
    if real[field] != tiny[field]:
      words.append(f'`{real[field]!r}`: pretrained models')
    if lora[field] != tiny[field]:
      words.append(f'`{lora[field]!r}`: `-lora`')
    elif real_lora[field] != real[field]:
      words.append(f'`{real_lora[field]!r}`: `-lora`, pretrained')
    if words:
      found_changes[field] = '; '.join(words)
  return found_changes


def _patterns(names: list[str], games: list[str]) -> str:
  """Names of configs, shorter: 'all games', `*_grpo`, or one by one."""
  if set(names) == set(games):
    return 'all games'
  rest, found = list(names), []
  endings = ('_starpo_s', '_ppo', '_grpo')
  for pattern, matches in [(f'*{e}', [g for g in games if g.endswith(e)]) for e in endings] + [
    (f'{game}_*', [g for g in games if g.startswith(f'{game}_')])
    for game in dict.fromkeys(re.sub('|'.join(f'{e}$' for e in endings), '', g) for g in games)
  ]:
    if len(matches) > 1 and set(matches) <= set(rest):
      rest = [name for name in rest if name not in matches]
      found.append(pattern)
  return ', '.join(f'`{name}`' for name in found + rest)


if __name__ == '__main__':
  main()
