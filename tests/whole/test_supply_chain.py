"""No code of others runs and no secret is written: a scan of the source, and of what a server leaves behind."""

from __future__ import annotations

import ast
import logging
import pathlib

import openai
import pytest

from ragen_jax.serving.play.agent_player import make_runner
from ragen_jax.serving.play.runners import RunWatch
from ragen_jax.serving.types import AttemptState
from tests.support.paths import ROOT
from tests.support.scripted import ADMIN, ScriptedEngine, chat, serve
from tests.support.wire import CALL_TAGS, tokenizer

# Modules that read objects, and with them code, from bytes.
MODULES = {'pickle', 'cPickle', '_pickle', 'dill', 'cloudpickle', 'joblib', 'marshal', 'shelve', 'jsonpickle', 'imp'}
# Functions that run text, or read objects from files.
CALLS = {
  'eval', 'exec', 'compile', '__import__', 'os.system', 'os.popen', 'torch.load', 'yaml.load', 'yaml.unsafe_load',
  'yaml.full_load', 'runpy.run_path', 'runpy.run_module', 'code.interact',
}  # fmt: skip
# Arguments that allow it.
ARGUMENTS = {'trust_remote_code', 'allow_pickle', 'shell', 'weights_only'}


def _name(node: ast.AST) -> str:
  """'a.b' of an expression with that name, else ''."""
  if isinstance(node, ast.Attribute):
    return f'{_name(node.value)}.{node.attr}'
  return node.id if isinstance(node, ast.Name) else ''


def _found(source: str) -> list[str]:
  """What a source file has of the three."""
  found = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      found += [alias.name for alias in node.names if alias.name.partition('.')[0] in MODULES]
    elif isinstance(node, ast.ImportFrom) and (node.module or '').partition('.')[0] in MODULES:
      found.append(node.module)
    elif isinstance(node, ast.Call):
      found += [_name(node.func)] if _name(node.func) in CALLS else []
      for keyword in node.keywords:
        wanted = keyword.arg == 'weights_only'  # the only one that protects where it is True
        is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is wanted
        found += [keyword.arg] if keyword.arg in ARGUMENTS and not is_off else []
  return found


@pytest.mark.slow
def test_no_source_reads_objects_or_runs_text():
  files = [*(ROOT / 'ragen_jax').rglob('*.py'), *(ROOT / 'configs').glob('*.py'), *(ROOT / 'docs').rglob('*.py')]
  files += [ROOT / 'main.py', ROOT / 'setup.py']
  found = {(str(path.relative_to(ROOT)), what) for path in files for what in _found(path.read_text(encoding='utf-8'))}
  # What runs in the sandbox of programs reads them as text.
  inside = {('ragen_jax/envs/dataset/inside.py', what) for what in ('exec', 'compile')}
  assert inside <= found
  found -= inside
  assert len(files) > 200
  assert found == set()


@pytest.mark.parametrize(
  ('source', 'what'),
  [
    ('import pickle', 'pickle'),
    ('def f():\n  from cloudpickle import loads', 'cloudpickle'),
    ('x = eval("1")', 'eval'),
    ('import os\nos.system("ls")', 'os.system'),
    ('subprocess.run("ls", shell=True)', 'shell'),
    ('subprocess.run("ls", shell=flag)', 'shell'),
    ('numpy.load(f, allow_pickle=True)', 'allow_pickle'),
    ('AutoTokenizer.from_pretrained(d, trust_remote_code=True)', 'trust_remote_code'),
    ('torch.load(f)', 'torch.load'),
    ('load(f, weights_only=False)', 'weights_only'),
  ],
)
def test_the_scan_finds_what_it_looks_for(source, what):
  assert _found(source) == [what]
  assert _found('subprocess.run(["ls"], shell=False)\nre.compile("x")\nmodel.eval()\nast.literal_eval("1")') == []


def test_tokenizers_are_read_without_remote_code():
  source = (ROOT / 'ragen_jax' / 'agent' / 'chat.py').read_text()
  reads = [
    n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and _name(n.func).endswith('from_pretrained')
  ]
  (read,) = reads
  assert {k.arg: k.value.value for k in read.keywords if isinstance(k.value, ast.Constant)}[
    'trust_remote_code'
  ] is False


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_no_field_of_the_config_holds_a_secret():
  """`prompt.critic_key` is the name of an environment variable, which a check makes sure of."""
  from configs import default
  from tests.support.configs import leaves

  words = ('key', 'token', 'secret', 'password', 'credential')
  named = [
    name for name, _ in leaves(default.get_config()) if any(w in name.rpartition('.')[2].split('_') for w in words)
  ]
  assert named == ['prompt.critic_key']


def test_the_key_of_an_attempt_is_in_no_file_and_no_log(tmp_path, caplog):
  tok = tokenizer(tmp_path / 'tokenizer', CALL_TAGS)
  with (
    caplog.at_level(logging.DEBUG),
    serve(tmp_path, ScriptedEngine(tok, lambda prompt, number: 'hello'), open_access=False) as server,
  ):
    task = server.attempt()
    assert chat(server.client(task)).choices[0].message.content == 'hello'
    with pytest.raises(openai.AuthenticationError) as wrong:
      chat(openai.OpenAI(base_url=task.base_url, api_key='rk-of-somebody-else', max_retries=0))
    with pytest.raises(openai.BadRequestError):
      chat(server.client(task), temperature='hot')
    server.lifecycle.finish(task.attempt_id, AttemptState.FAILED, 'it broke')
  secrets = [task.api_key, ADMIN, 'rk-of-somebody-else']
  assert not any(secret in str(wrong.value) for secret in secrets)
  written = b''.join(path.read_bytes() for path in tmp_path.rglob('*') if path.is_file())
  assert b'hello' in written and len(written) > 1000
  for secret in secrets:
    assert secret.encode() not in written
    # The HTTP client of this test logs its own headers.
    ours = [record.getMessage() for record in caplog.records if record.name.startswith('ragen_jax')]
    assert not any(secret in line for line in ours)
    assert secret not in repr(task)


def test_a_command_gets_no_secret_of_the_run(tmp_path, monkeypatch):
  names = (
    'RAGEN_ADMIN_KEY', 'HF_TOKEN', 'HUGGING_FACE_HUB_TOKEN', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN', 'CRITIC_KEY',
  )  # fmt: skip
  for name in (*names, 'OPENAI_API_KEY'):
    monkeypatch.setenv(name, f'hidden-{name}')
  monkeypatch.setenv('OTHER', 'shown')
  out = tmp_path / 'environment'
  runner = make_runner('runner', f'sh -c "env > {out}"', ('CRITIC_KEY',))
  from ragen_jax.serving.client import Task

  fields = {'rollout_id': 'r', 'attempt_id': 'r.1', 'number': 1, 'mode': 'train', 'group': '', 'input': None,
            'timeout_s': 60.0, 'heartbeat_s': 0.0, 'prompt': ''}  # fmt: skip
  outcome = runner.run(Task(**fields, server_url='http://127.0.0.1:1', api_key='rk-own'), RunWatch(120.0))
  assert outcome.state is AttemptState.SUCCEEDED, outcome.error
  environment = pathlib.Path(out).read_text()
  assert 'hidden' not in environment and 'OTHER=shown' in environment and 'OPENAI_API_KEY=rk-own' in environment
