"""Docs agree with the program: links, modules, fields, commands, quoted errors and the configuration reference."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
import sys
import tomllib
import types

import numpy as np
import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import default, frozenlake_ppo
from ragen_jax import build, train
from ragen_jax.agent import finite, pools
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.config import agreement, checks, command_line
from ragen_jax.distributed import processes, sharding
from ragen_jax.distributed.watchdog import Record, Watchdog
from ragen_jax.models import presets
from ragen_jax.models.checkpoint.names import weights
from ragen_jax.runs.workdir import record_config, workdir_lock
from ragen_jax.serving.play.pool import ABANDONED_PER_PLACE, RunnerStall
from ragen_jax.serving.types import Progress
from ragen_jax.training import run_lines
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.threads import Fault
from tests.support import speakers
from tests.support.chat_templates import CHATML_TOKENS, Kind, write_tokenizer
from tests.support.configs import leaves, small_config
from tests.support.paths import ROOT
from tools import make_configuration

ROOT = ROOT
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').glob('*.md'))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
each_page = pytest.mark.parametrize('page', PAGES, ids=NAMES)

CONFIG = default.get_config()
# With a pretrained model, as docs/from_ragen.md has it.
PRETRAINED = default.get_config('qwen2.5-0.5b')
_FENCE = re.compile(r'^```(\w*)\n(.*?)^```', re.DOTALL | re.MULTILINE)
_FIELD = re.compile(rf'(?<![\w./-])(?:--)?(?:config\.)?((?:{"|".join(CONFIG)})(?:\.\w+)+)')


def _text(page: pathlib.Path) -> str:
  return page.read_text(encoding='utf-8')


def _anchors(page: pathlib.Path) -> set[str]:
  """What GitHub makes of the page's headings."""
  prose = _FENCE.sub('', _text(page))
  headings = re.findall(r'^#+ (.*)$', prose, re.MULTILINE)
  return {re.sub(r'[^\w\- ]', '', h.lower()).strip().replace(' ', '-') for h in headings}


@each_page
def test_relative_links_lead_somewhere(page):
  prose = _FENCE.sub('', _text(page))
  for target in re.findall(r'\]\(([^)\s]+)\)', prose):
    if re.match(r'https?:', target):
      continue
    path, _, anchor = target.partition('#')
    there = (page.parent / path).resolve() if path else page
    assert there.exists(), f'{page.name}: {target}'
    assert ROOT in there.parents, f'{page.name}: {target} leaves the repository'
    assert not anchor or there.suffix != '.md' or anchor in _anchors(there), f'{page.name}: {target}'


def test_readme_leads_to_every_page():
  readme = _text(ROOT / 'README.md')
  assert [page.name for page in PAGES[2:] if f'(docs/{page.name})' not in readme] == []


@each_page
def test_modules_that_a_page_names_exist(page):
  named = re.findall(r'(?<![\w./-])((?:\w+/)+[a-z]\w*\.py)', _text(page))
  roots = (ROOT, ROOT / 'ragen_jax')
  # Other folders are a reader's own or RAGEN's.
  ours = [name for name in named if any((root / name.split('/')[0]).is_dir() for root in roots)]
  assert [name for name in ours if not any((root / name).is_file() for root in roots)] == []


def _block(page: str, text: str) -> list[str]:
  """The lines of the fenced block of a page of docs/ that contains a text."""
  blocks = [block for _, block in _FENCE.findall(_text(ROOT / 'docs' / page)) if text in block]
  assert len(blocks) == 1, text
  return blocks[0].splitlines()


def test_the_design_page_lists_the_package():
  listed = re.findall(r'^  (\w+)(?:/|\.py) ', '\n'.join(_block('design.md', 'ragen_jax/\n')), re.MULTILINE)
  there = [p for p in (ROOT / 'ragen_jax').iterdir() if (p / '__init__.py').is_file() or p.suffix == '.py']
  assert sorted(listed) == sorted(p.stem for p in there if p.stem != '__init__')


def test_the_design_page_has_the_layers_of_the_import_contract():
  contracts = tomllib.loads(_text(ROOT / 'pyproject.toml'))['tool']['importlinter']['contracts']
  layers = next(c['layers'] for c in contracts if c['type'] == 'layers')
  drawn = [line.split() for line in _block('design.md', 'algorithms envs')]
  assert [sorted(line) for line in drawn] == [sorted(re.split(r' [:|] ', layer)) for layer in layers]


def test_the_configuration_reference_is_fresh():
  fresh = make_configuration.render()
  assert _text(ROOT / 'docs' / 'configuration.md') == fresh, 'run: python tools/make_configuration.py'
  # A row of a table is one line.
  rows = [line for line in fresh.splitlines() if line.startswith('|')]
  assert [row for row in rows if not row.endswith(' |')] == []
  assert any(row.startswith('| `envs.Dataset.hub_options` | `{}` |') for row in rows)
  # Every field once, and the environments' by the tags that others are derived from.
  for field, _ in leaves(CONFIG):
    if not field.startswith('envs.'):
      assert fresh.count(f'| `{field}` |') == 1, field
  for tag in CONFIG.envs:
    assert f'### envs.{tag}\n' in fresh


def _exists(field: str) -> bool:
  """Whether a dotted name is a field or a section; TAG stands for each environment, own tags for anything."""
  section, _, rest = field.partition('.')
  if section == 'envs' and rest.split('.')[0] not in CONFIG.envs:
    name = rest.partition('.')[2]
    return not name or all(name in env for env in CONFIG.envs.values()) or not rest.startswith('TAG')
  at = CONFIG
  for name in field.split('.'):
    if not isinstance(at, ConfigDict) or name not in at:
      return False
    at = at[name]
  return True


def _fields(text: str) -> set[str]:
  """Dotted names of the config in prose, in tables and in commands."""
  text = re.sub(r'```python\n.*?```', '', text, flags=re.DOTALL)  # those are run by tests
  found = {re.sub(r'\.$', '', name) for name in _FIELD.findall(text)}
  return {name for name in found if not re.search(r'\.(py|json|md|yaml|jsonl|html)$', name)}


@each_page
def test_fields_that_a_page_names_exist(page):
  text = _text(page)
  if page.name == 'from_ragen.md':  # its first columns are RAGEN's keys
    text = re.sub(r'^\|[^|]*\|[^|]*\|', '', text.replace('\\|', ''), flags=re.MULTILINE)
  assert sorted(name for name in _fields(text) if not _exists(name)) == []


def test_the_search_for_fields_finds_them():
  text = 'Set `train.groups` or --config.eval.every=3, config.envs.TAG.size and `mesh`; train.py, es_manager.train.x.'
  assert _fields(text) == {'train.groups', 'eval.every', 'envs.TAG.size'}
  assert _exists('train.groups') and _exists('envs.TAG.max_turns') and not _exists('envs.TAG.size')
  assert not _exists('train.gruops') and not _exists('envs.Sudoku.none')


def test_ragens_keys_have_our_fields_and_values():
  rows = [
    [cell.strip() for cell in re.split(r'(?<!\\)\|', line)[1:-1]]
    for line in _text(ROOT / 'docs' / 'from_ragen.md').splitlines()
    if line.startswith('|')
  ]
  assert 'not built in' not in _text(ROOT / 'docs' / 'from_ragen.md').lower()
  rows = [row for row in rows if len(row) == 5 and row[0] != 'RAGEN' and not row[0].startswith('---')]
  assert len(rows) > 80
  for _, _, ours, value, remark in rows:
    if not ours:
      assert value == '' and remark, remark
      continue
    field = ours.strip('`')
    assert _exists(field), field
    if value:
      at = PRETRAINED
      for name in field.split('.'):
        at = at[name]
      assert value.strip('`').replace('\\|', '|') == repr(at), field


def _commands(text: str) -> list[tuple[str, str]]:
  """(command, what it answers) of each `python main.py` in a page; the answer is that of lines that begin with $."""
  found = []
  for _, block in _FENCE.findall(text):
    lines = re.sub(r'\\\n\s*', '', block).splitlines()
    for i, line in enumerate(lines):
      start = re.search(r'python main\.py (.*)$', line)
      if start:
        answer = lines[i + 1] if line.startswith('$') else ''
        found.append((start.group(1).split(' # ')[0].split(' && ')[0], answer))
  return found


def _config_of(command: str, monkeypatch) -> ConfigDict | None:
  """The config of a command's flags; None where it has none, or that of a file which a reader makes."""
  arguments = [a for a in shlex.split(command) if a.startswith('--config')]
  file = arguments[0].removeprefix('--config=') if arguments else ''
  if not (ROOT / file.partition(':')[0]).is_file():
    return None
  arguments[0] = f'--config={ROOT}/{file}'
  config = command_line.load_config(f'{ROOT}/{file}')
  for argument in arguments[1:]:
    command_line.check_field(config, argument.removeprefix('--config.').split('=')[0])
  values = flags.FlagValues()
  holder = config_flags.DEFINE_config_file('config', flag_values=values)
  monkeypatch.setattr(sys, 'argv', ['main.py', *arguments])
  values(['main.py', *arguments])
  return holder.value


@pytest.mark.slow
@each_page
def test_commands_of_a_page_have_configs_that_can_run(page, monkeypatch):
  monkeypatch.chdir(ROOT)
  for command, answer in _commands(_text(page)):
    config = _config_of(command, monkeypatch)
    if config is None or '--mode=' in command or 'XLA_FLAGS' in command:
      continue
    if answer.startswith('error: '):
      with pytest.raises(UserError) as e:
        checks.check_config(config)
      assert f'error: {e.value}' == answer, command
    elif config.mesh.fsdp * config.mesh.tensor == 1:
      if config.model.path.startswith('runs/'):  # the model that an earlier command of the page makes
        config.model.path = ''
      try:
        checks.check_config(config, weights=False)
      except UserError as e:  # a package that only some environments need is not installed here
        assert 'is missing: pip install -r requirements-' in str(e), command


# -- docs/troubleshooting.md: every line that it quotes, from the program itself. --------------------------------------


def _error(function, *arguments) -> str:
  with pytest.raises(UserError) as e:
    function(*arguments)
  return f'error: {e.value}'


def _too_long_a_prompt() -> str:
  """A first prompt that does not fit; the sampler is never asked."""
  config = small_config(train__tags=('Countdown',))
  tokenizer = ChatTokenizer(presets.resolve('tiny', ''))
  specs = build.env_specs(config, ('Countdown',), (1,))
  context = build.context_manager(config, tokenizer, specs)
  limits = speakers.limits(max_turns=1, max_response_tokens=32, max_context=128, length_step=64, decode_chunk=32)
  return _error(context.check_first_prompt, 0, 'Target: 24\nNumbers: 1, 2, 3', 1, limits)


def _without_a_hub(monkeypatch) -> str:
  def offline(*_, **__):
    raise ConnectionError('no network')

  monkeypatch.setattr('huggingface_hub.snapshot_download', offline)
  return _error(presets.resolve, 'qwen2.5-0.5b', '')


def _begun_run(tmp_path, monkeypatch) -> str:
  """The workdir of a run with a checkpoint, relative to the present directory."""
  monkeypatch.chdir(tmp_path)
  workdir = 'runs/frozenlake_ppo'
  record_config(workdir, frozenlake_ppo.get_config().to_dict())
  pathlib.Path(workdir, 'checkpoints', '10').mkdir(parents=True)
  return workdir


def _go_on(workdir: str, **changes) -> str:
  config = frozenlake_ppo.get_config()
  config.update(changes)
  return _error(train.train_and_evaluate, config, workdir)


def _go_on_beside_another(workdir: str) -> str:
  with workdir_lock(workdir):
    return _go_on(workdir)


def _undivided_heads() -> str:
  mesh = types.SimpleNamespace(shape={'data': 1, 'fsdp': 1, 'tensor': 4})

  def divide():
    for weight in weights(presets.shape('qwen2.5-0.5b', '')):
      sharding.weight_spec('/'.join(map(str, weight.path)), weight.shape, mesh)

  return _error(divide)


def _row_shards(monkeypatch) -> str:
  monkeypatch.setattr(checks, 'row_shards', lambda mesh: 8)
  config = default.get_config('qwen2.5-0.5b')
  config.optimizer.micro_batch_size = 4
  return _error(checks.check_config, config)


def _different_checkpoints() -> str:
  source = (ROOT / 'ragen_jax' / 'training' / 'restore.py').read_text(encoding='utf-8')
  message = re.search(r"f'(--workdir=\{workdir\}: the processes see different checkpoints.*)'", source).group(1)
  return 'error: ' + message.format(workdir='runs/two', steps=[10, None])


def _stopped() -> str:
  return run_lines.greeting(
    'runs/frozenlake_ppo', '', 45, frozenlake_ppo.get_config().num_iterations, 'empty_filtered_steps', unevaluated=False
  )


def _on_a_cpu() -> str:
  return run_lines.greeting(
    'runs/frozenlake_ppo', 'tiny: 123k parameters, float32, 1 device (cpu)', 0, 100, '', unevaluated=False
  )


def _lost_partner(monkeypatch, capsys) -> str:
  monkeypatch.setattr(processes, 'exit_process', lambda status: None)
  processes._on_error(ValueError, ValueError('Gloo all-reduce failed'), None)
  return capsys.readouterr().err.strip()


def _a_hanging_partner() -> str:
  other = Record(1, 0, 'gen', 'game.py:12, step', 'node7, pid 4242')
  store = types.SimpleNamespace(set=lambda key, text: None)
  store.all = lambda: {'0': json.dumps({'points': 1}), '1': json.dumps(dataclasses.asdict(other))}
  seconds = iter(range(10_000))
  dog = Watchdog(store, 0, 2, patience=600.0, end=lambda message: None, clock=lambda: next(seconds))
  message = ''
  while not message:
    other = dataclasses.replace(other, beat=other.beat + 1)
    dog.exchange()
    message = dog.judge()
  return processes._last_words(message).strip()


def _another_config(monkeypatch) -> str:
  with monkeypatch.context() as patched:
    patched.setattr(processes, 'gather', lambda value: [value, value | {'seed': '1'}])
    return _error(agreement._check_same, {'seed': '0'})


def _a_fault() -> str:
  fault = Fault('step raised ZeroDivisionError', 'division by zero (guess.py:25)')
  return pools.FAULT_MESSAGE % ('Guess', 10003, fault, 'Guess')


def _a_hanging_agent() -> str:
  held = Progress(
    running=0, succeeded=0, failed=0, timed_out=0, cancelled=0, abandoned=16 * ABANDONED_PER_PLACE, error='',
    oldest='ragen_jax-agent-ahead-0-3-0-1.1', full=True, fault='',
  )  # fmt: skip
  times = iter((0.0, 0.0, 600.0, 600.0))
  stall = RunnerStall(lambda: held, list, "envs.Agent.runner='my_agent.py:play'", 600.0, lambda: next(times))
  stall.check()
  return _error(stall.check)


def _echo_trap() -> str:
  monitor = build.make_monitor(small_config())
  for step in range(60):
    sick = step >= 10
    metrics = {
      'rollout/in_group_reward_std': 0.0 if sick else 0.4, 'actor/entropy': 0.5, 'actor/grad_norm': 1.0,
      'rollout/repeated_replies': 0.95 if sick else 0.1, 'critic/score/mean': 0.3,
    }  # fmt: skip
    _, verdict = monitor.after_iteration(metrics, empty=False)
    if verdict.action != 'go_on':
      return f'iteration 37: {verdict.reason}; {run_lines.CONSEQUENCES[verdict.action]}'
  return ''


def _spike() -> str:
  monitor = build.make_monitor(small_config())
  for norm in [0.5] * 10 + [21.0]:
    _, spikes = monitor.after_update({'actor/grad_norm': norm})
  return spikes[0].line('iteration 37')


def _not_finite() -> list[str]:
  what = finite.describe(
    finite.find('x', 'sampled log-probs', np.full((64, 10), np.nan), np.ones((64, 10), bool)).values()
  )
  return [
    f'iteration 12: not finite: {what}; {run_lines.CONSEQUENCES["bad"]}',
    f'error: {run_lines.diverged(12, 14, what, 10)}',
  ]


def _without_a_system_message(tmp_path) -> str:
  template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
  write_tokenizer(tmp_path / 'gemma', Kind(template, CHATML_TOKENS))
  return _error(ChatTokenizer, tmp_path / 'gemma')


@pytest.mark.slow
def test_troubleshooting_quotes_what_the_program_says(tmp_path, monkeypatch, capsys):
  page = _text(ROOT / 'docs' / 'troubleshooting.md')
  workdir = _begun_run(tmp_path, monkeypatch)
  told = [
    _too_long_a_prompt(),
    _without_a_hub(monkeypatch),
    _without_a_system_message(tmp_path),
    _go_on(workdir, seed=1),
    _go_on(workdir, num_iterations=80),
    _go_on_beside_another(workdir),
    _undivided_heads(),
    _different_checkpoints(),
    _stopped(),
    _on_a_cpu(),
    _another_config(monkeypatch),
    _a_hanging_partner(),
    _lost_partner(monkeypatch, capsys),
    _a_fault(),
    _a_hanging_agent(),
    _echo_trap(),
    _spike(),
    _row_shards(monkeypatch),
    *_not_finite(),
  ]
  commands = {answer for _, answer in _commands(page)}
  quoted = [
    line
    for language, block in _FENCE.findall(page)
    for line in block.splitlines()
    if not language and not line.startswith(('python', 'grep')) and line not in commands
  ]
  patterns = [re.compile('.+'.join(re.escape(part) for part in line.split('…'))) for line in quoted]
  unsaid = [line for line, pattern in zip(quoted, patterns, strict=True) if not any(map(pattern.fullmatch, told))]
  assert unsaid == [], told
  assert len(quoted) == len(told)
  for text in ('evaluating before training; most of the first minute is compilation',):
    assert text in page and text in (ROOT / 'ragen_jax' / 'training' / 'run.py').read_text(encoding='utf-8')
  interrupted = 'interrupted; the same command resumes from the last checkpoint, if there is one'
  assert interrupted in page and interrupted in (ROOT / 'ragen_jax' / '__main__.py').read_text(encoding='utf-8')
