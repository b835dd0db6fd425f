"""Small tokenizers with the chat formats of published models. The templates are our own, with the facts of theirs."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import tokenizers

QWEN25_SYSTEM = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'

_CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chatml(default: str) -> str:
  """ChatML with a default system message."""
  system = f'<|im_start|>system\\n{default}<|im_end|>\\n'
  return f"{{% if messages[0].role != 'system' %}}{{{{ '{system}' }}}}{{% endif %}}{_CHATML}"


QWEN25 = chatml(QWEN25_SYSTEM)
SMOLLM2 = chatml('You are a small model.')
QWEN3 = (
  '{% set ns = namespace(asked=-1) %}'
  "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
  "{% for m in messages %}{% set text = m.content %}{% set thought = '' %}"
  "{% if m.role == 'assistant' and '</think>' in text %}"
  "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
  "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
  "{{ '<|im_start|>' + m.role + '\n' }}"
  "{% if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or thought) %}"
  "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
  "{{ text + '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
  "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
_USER, _ASSISTANT = '<\uff5cUser\uff5c>', '<\uff5cAssistant\uff5c>'
_BEGIN, _END = (f'<\uff5c{x}\u2581of\u2581sentence\uff5c>' for x in ('begin', 'end'))
_R1 = (
  (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}"
    '{{ bos_token + ns.system }}'
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ 'REPLY' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    '{% endfor %}'
  )
  .replace('USER', _USER)
  .replace('REPLY', _ASSISTANT)
)
R1 = f"{_R1}{{% if add_generation_prompt %}}{{{{ '{_ASSISTANT}' }}}}{{% endif %}}"
R1_FORCED = f"{_R1}{{% if add_generation_prompt %}}{{{{ '{_ASSISTANT}<think>\\n' }}}}{{% endif %}}"
LLAMA3 = (
  "{{ bos_token }}{% set head = '<|start_header_id|>' %}{% set tail = '<|end_header_id|>\n\n' %}"
  "{% set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}"
  "{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set rest = messages[1:] %}"
  "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
  "{{ head + 'system' + tail + 'Today Date: ' + date + '\n\n' + system + '<|eot_id|>' }}"
  "{% for m in rest %}{{ head + m.role + tail + m.content | trim + '<|eot_id|>' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ head + 'assistant' + tail }}{% endif %}"
)

PHI3 = (
  "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Kind:
  """A tokenizer: its template, special tokens (the first is that of padding), other added tokens, bos and eos."""

  template: str | None
  specials: tuple[str, ...]
  others: tuple[str, ...] = ()
  bos: str | None = None
  eos: str | None = None


CHATML_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
CALL_TAGS = ('<tool_call>', '</tool_call>')
QWEN3_TAGS = (*CALL_TAGS, '<tool_response>', '</tool_response>', '<think>', '</think>')
_R1_KIND = Kind(R1, ('<pad>', _BEGIN, _END), (_USER, _ASSISTANT, '<think>', '</think>', *CALL_TAGS), _BEGIN, _END)
KINDS = {
  'qwen2.5': Kind(QWEN25, CHATML_TOKENS, CALL_TAGS, eos='<|im_end|>'),
  'qwen3': Kind(QWEN3, CHATML_TOKENS, QWEN3_TAGS, eos='<|im_end|>'),
  'smollm2': Kind(SMOLLM2, CHATML_TOKENS, bos='<|im_start|>', eos='<|im_end|>'),
  'r1': _R1_KIND,
  'r1-forced': dataclasses.replace(_R1_KIND, template=R1_FORCED),
  # Where role marks have no tokens, and there are none for tool calls.
  'r1-plain': dataclasses.replace(_R1_KIND, others=('<think>', '</think>')),
  # The beginning without a system message is none with an empty one.
  'phi3': Kind(
    PHI3, ('<pad>', '<s>', '<|end|>', '<|system|>', '<|user|>', '<|assistant|>'), bos='<s>', eos='<|end|>'
  ),
  'llama3': Kind(
    LLAMA3, ('<pad>', '<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>', '<|start_header_id|>', '<|end_header_id|>'),
    bos='<|begin_of_text|>', eos='<|eot_id|>',
  ),
}  # fmt: skip


def write_tokenizer(directory: pathlib.Path, kind: Kind) -> str:
  """Writes a tokenizer with a token for each byte and the added tokens of a kind; returns its directory."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
  backend.normalizer = tokenizers.normalizers.NFC()
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in kind.specials])
  backend.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in kind.others])
  directory.mkdir(exist_ok=True, parents=True)
  backend.save(str(directory / 'tokenizer.json'))
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast', 'pad_token': kind.specials[0], 'bos_token': kind.bos,
    'eos_token': kind.eos, 'chat_template': kind.template,
  }  # fmt: skip
  (directory / 'tokenizer_config.json').write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
  return str(directory)
