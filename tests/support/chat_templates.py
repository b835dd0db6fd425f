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
# Contents are stripped, and may be lists with images; a system message comes first or never, and somebody must ask.
# Replies behind the last question have a thought, if only an empty one. Small models do not think unless they are told
# to. Tools stand before the system message, and calls have a tag for each argument.
_QWEN3_5 = (
  '{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}'
  "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}"
  '{% endfor %}{% endif %}{% endmacro %}'
  "{% if tools %}{{ '<|im_start|>system\n# Tools\n\nThere are functions:\n\n<tools>' }}"
  "{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
  "{{ '\n</tools>\n\nA call:\n\n<tool_call>\n<function=a_name>\n<parameter=a_parameter>\na value\n</parameter>\n' }}"
  "{{ '</function>\n</tool_call>' }}"
  "{% if messages[0].role == 'system' and shown(messages[0].content) | trim %}"
  "{{ '\n\n' + shown(messages[0].content) | trim }}{% endif %}"
  "{{ '<|im_end|>\n' }}{% endif %}"
  '{% set ns = namespace(asked=-1) %}'
  "{% for m in messages %}{% if m.role == 'user' and not (shown(m.content) | trim).startswith('<tool_response>') %}"
  '{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}'
  "{% if ns.asked < 0 %}{{ raise_exception('Nobody asks.') }}{% endif %}"
  '{% for m in messages %}{% set text = shown(m.content) | trim %}'
  "{% if m.role == 'system' and not loop.first %}{{ raise_exception('A system message comes first.') }}{% endif %}"
  "{% if m.role == 'assistant' %}{% set thought = (m.reasoning_content or '') | trim %}{% if '</think>' in text %}"
  "{% set thought = text.split('</think>')[0].split('<think>')[-1] | trim %}"
  "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
  "{{ '<|im_start|>assistant\n' }}"
  "{% if loop.index0 > ns.asked %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ text }}"
  "{% for c in m.tool_calls or [] %}{{ '\n' if not loop.first else '\n\n' if text else '' }}"
  "{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
  "{% for name, value in c.function.arguments | items %}{{ '<parameter=' + name + '>\n' }}"
  "{{ VALUE }}{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
  "{% elif m.role == 'tool' %}"
  "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
  "{{ '\n<tool_response>\n' + text + '\n</tool_response>' }}"
  "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
  "{% elif m.role == 'user' or not tools %}{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endif %}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
  "{% if THINKS %}{{ '<think>\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
_PYTHON_VALUE = 'value | tojson if value is mapping or value is sequence and value is not string else value | string'
_JSON_VALUE = 'value if value is string else value | tojson'


def _qwen3_5(thinks: str, value: str = _PYTHON_VALUE) -> str:
  """The template; `thinks` says whether replies think, and `value` writes an argument."""
  return _QWEN3_5.replace('THINKS', thinks).replace('VALUE', value)


QWEN3_5 = _qwen3_5('enable_thinking is not defined or enable_thinking')
QWEN3_5_SMALL = _qwen3_5('enable_thinking is defined and enable_thinking')
QWEN3_6 = _qwen3_5('enable_thinking is not defined or enable_thinking', _JSON_VALUE)
# All replies keep their thoughts, and those without one get an empty one.
QWEN3_8 = QWEN3_6.replace('{% if loop.index0 > ns.asked %}', '{% if true %}')
QWEN3_8_QUIET = _qwen3_5('enable_thinking is defined and enable_thinking', _JSON_VALUE).replace(
  '{% if loop.index0 > ns.asked %}', '{% if true %}'
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

# A system message begins the first question, roles alternate, and contents are stripped but for the system's.
GEMMA3 = (
  "{{ bos_token }}{% if messages[0].role == 'system' %}{% set lead = messages[0].content + '\n\n' %}"
  "{% set rest = messages[1:] %}{% else %}{% set lead = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}"
  "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}{% endif %}"
  "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (lead if loop.first else '') }}"
  "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

PHI3 = (
  "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class Kind:
  """A tokenizer: its template, special tokens (the first is that of padding), other added tokens, bos and eos.

  With `pieces`, its tokens are characters, a mark for the space, and bytes for what is no character of theirs.
  """

  template: str | None
  specials: tuple[str, ...]
  others: tuple[str, ...] = ()
  bos: str | None = None
  eos: str | None = None
  pieces: bool = False


CHATML_TOKENS = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
CALL_TAGS = ('<tool_call>', '</tool_call>')
QWEN3_TAGS = (*CALL_TAGS, '<tool_response>', '</tool_response>', '<think>', '</think>')
_R1_KIND = Kind(R1, ('<pad>', _BEGIN, _END), (_USER, _ASSISTANT, '<think>', '</think>', *CALL_TAGS), _BEGIN, _END)
KINDS = {
  'qwen2.5': Kind(QWEN25, CHATML_TOKENS, CALL_TAGS, eos='<|im_end|>'),
  'qwen3': Kind(QWEN3, CHATML_TOKENS, QWEN3_TAGS, eos='<|im_end|>'),
  'qwen3.5': Kind(QWEN3_5, CHATML_TOKENS, QWEN3_TAGS, eos='<|im_end|>'),
  'qwen3.5-small': Kind(QWEN3_5_SMALL, CHATML_TOKENS, QWEN3_TAGS, eos='<|im_end|>'),
  'qwen3.8': Kind(QWEN3_8, CHATML_TOKENS, QWEN3_TAGS, eos='<|im_end|>'),
  'qwen3.8-quiet': Kind(QWEN3_8_QUIET, CHATML_TOKENS, QWEN3_TAGS, eos='<|im_end|>'),
  'smollm2': Kind(SMOLLM2, CHATML_TOKENS, bos='<|im_start|>', eos='<|im_end|>'),
  'r1': _R1_KIND,
  'r1-forced': dataclasses.replace(_R1_KIND, template=R1_FORCED),
  # Where role marks have no tokens, and there are none for tool calls.
  'r1-plain': dataclasses.replace(_R1_KIND, others=('<think>', '</think>')),
  # The beginning without a system message is none with an empty one.
  'phi3': Kind(
    PHI3, ('<pad>', '<s>', '<|end|>', '<|system|>', '<|user|>', '<|assistant|>'), bos='<s>', eos='<|end|>'
  ),
  'gemma3': Kind(
    GEMMA3, ('<pad>', '<eos>', '<bos>', '<start_of_turn>', '<end_of_turn>'), ('\n\n',), '<bos>', '<eos>', pieces=True
  ),
  'llama3': Kind(
    LLAMA3, ('<pad>', '<|begin_of_text|>', '<|end_of_text|>', '<|eot_id|>', '<|start_header_id|>', '<|end_header_id|>'),
    bos='<|begin_of_text|>', eos='<|eot_id|>',
  ),
}  # fmt: skip


def write_tokenizer(directory: pathlib.Path, kind: Kind) -> str:
  """Writes a tokenizer with a token for each byte and the added tokens of a kind; returns its directory."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  if kind.pieces:
    alphabet = [f'<0x{byte:02X}>' for byte in range(256)] + ['\u2581', *map(chr, range(0x21, 0x7F))]
  vocab = {c: i for i, c in enumerate(alphabet)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=kind.pieces))
  if kind.pieces:
    backend.normalizer = tokenizers.normalizers.Replace(' ', '\u2581')
    parts = [tokenizers.decoders.Replace('\u2581', ' '), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(parts)
  else:
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


# -- with tools --------------------------------------------------------------------------------------------------------

_QWEN_TOOLS = (
  '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n'
  'You are provided with function signatures within <tools></tools> XML tags:\n<tools>'
  '{% for t in tools %}{{ "\n" + t | tojson }}{% endfor %}'
  "{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
  '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
  "</tool_call><|im_end|>\n' }}"
)
_CALLS = (
  '{% for c in m.tool_calls or [] %}{% if text or not loop.first %}{{ "\n" }}{% endif %}'
  '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
  '{% endfor %}'
)
_FIRST = '{% if loop.first or messages[loop.index0 - 1].role != "tool" %}'
_LAST = '{% if loop.last or messages[loop.index0 + 1].role != "tool" %}'
_QWEN_RESULT = (
  f'{_FIRST}{{{{ "<|im_start|>user" }}}}{{% endif %}}'
  '{{ "\n<tool_response>\n" + m.content + "\n</tool_response>" }}'
  f'{_LAST}{{{{ "<|im_end|>\n" }}}}{{% endif %}}'
)
# What a template does with a message is between the two parts.
_TALK_HEAD = (
  '{% for m in messages %}{% set text = m.content or "" %}{% if m.role == "tool" %}RESULT'
  '{% elif m.role != "system" or not loop.first or not tools %}{{ "<|im_start|>" + m.role + "\n" }}'
)
_TALK_TAIL = (
  f'{{{{ text }}}}{{% if m.role == "assistant" %}}{_CALLS}{{% endif %}}{{{{ "<|im_end|>\n" }}}}'
  '{% endif %}{% endfor %}{% if add_generation_prompt %}{{ "<|im_start|>assistant\nFORCED" }}{% endif %}'
)


def _with_tools(beginning: str, thought: str = '', result: str = _QWEN_RESULT, forced: str = '') -> str:
  """A template of ChatML that has `beginning` where there are tools or no system message, and then the messages."""
  talk = _TALK_HEAD.replace('RESULT', result) + thought + _TALK_TAIL.replace('FORCED', forced)
  return beginning + talk


_SYSTEM = '{{ "<|im_start|>system\n" }}{% if messages[0].role == "system" %}{{ messages[0].content + "\n\n" }}'
QWEN25_TOOLS = _with_tools(
  f'{{% if tools %}}{_SYSTEM}{{% else %}}{{{{ "{QWEN25_SYSTEM}\n\n" }}}}{{% endif %}}{_QWEN_TOOLS}'
  '{% elif messages[0].role != "system" %}'
  f'{{{{ "<|im_start|>system\n{QWEN25_SYSTEM}<|im_end|>\n" }}}}{{% endif %}}'
)
_QWEN3_THOUGHT = (
  '{% if m.role == "assistant" %}{% set thought = m.reasoning_content or "" %}{% if "</think>" in text %}'
  "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
  "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
  '{% if loop.index0 > ns.asked and (loop.last or thought) %}'
  '{{ "<think>\n" + thought + "\n</think>\n\n" }}{% endif %}{% endif %}'
)
_QWEN3_BEGINNING = (
  '{% set ns = namespace(asked=-1) %}'
  "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
  f'{{% if tools %}}{_SYSTEM}{{% endif %}}{_QWEN_TOOLS}{{% endif %}}'
)
QWEN3_TOOLS = _with_tools(_QWEN3_BEGINNING, _QWEN3_THOUGHT)
QWEN3_THINKING = _with_tools(_QWEN3_BEGINNING, _QWEN3_THOUGHT, forced='<think>\n')
# Nobody's: tools without their type and before the system message, and results in a turn of their own.
OTHER_TOOLS = _with_tools(
  '{% if tools %}{{ "<|im_start|>system\n" }}I have {% for t in tools %}{{ t.function | tojson }}'
  '{% if not loop.last %} and {% endif %}{% endfor %}.'
  '{% if messages[0].role == "system" %}{{ "\n" + messages[0].content }}{% endif %}{{ "<|im_end|>\n" }}{% endif %}',
  result=f'{_FIRST}{{{{ "<|im_start|>tool\n" }}}}{{% else %}}{{{{ " | " }}}}{{% endif %}}{{{{ m.content }}}}'
  f'{_LAST}{{{{ "<|im_end|>\n" }}}}{{% endif %}}',
)
# A system message begins the first question, and so do tools, or they have a turn of their own.
_JOINED_BEGINNING = (
  "{% set ns = namespace(lead='') %}{% if messages[0].role == 'system' %}"
  "{% set ns.lead = messages[0].content + '\n\n' %}{% endif %}{% if tools %}"
  "{% for t in tools %}{% set ns.lead = ns.lead + (t | tojson) + '\n' %}{% endfor %}OWN{% endif %}"
)
_JOINED = (
  '{% for m in messages %}{% set text = m.content or "" %}{% if m.role == "tool" %}'
  '{{ "<|im_start|>user\n<tool_response>" + text + "</tool_response><|im_end|>\n" }}'
  '{% elif m.role != "system" %}{{ "<|im_start|>" + m.role + "\n" + ns.lead }}{% set ns.lead = "" %}{{ text }}'
  f'{_CALLS}{{{{ "<|im_end|>\n" }}}}{{% endif %}}{{% endfor %}}'
  '{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}'
)
JOINED_TOOLS = _JOINED_BEGINNING.replace('OWN', '') + _JOINED
_OWN_TURN = '{{ "<|im_start|>developer\n" + ns.lead + "<|im_end|>\n" }}{% set ns.lead = "" %}'
APART_TOOLS = _JOINED_BEGINNING.replace('OWN', _OWN_TURN) + _JOINED
TOOL_KINDS = {
  'qwen2.5-tools': Kind(QWEN25_TOOLS, CHATML_TOKENS, CALL_TAGS, eos='<|im_end|>'),
  'qwen3-tools': Kind(QWEN3_TOOLS, CHATML_TOKENS, QWEN3_TAGS, eos='<|im_end|>'),
  'qwen3-thinking': Kind(QWEN3_THINKING, CHATML_TOKENS, QWEN3_TAGS, eos='<|im_end|>'),
  'qwen3.5': KINDS['qwen3.5'],
  'qwen3.5-small': KINDS['qwen3.5-small'],
  'qwen3.8': KINDS['qwen3.8'],
  'qwen3.8-quiet': KINDS['qwen3.8-quiet'],
  # As Qwen3.5 but that true, false and null are written as JSON.
  'qwen3.6': dataclasses.replace(KINDS['qwen3.5'], template=QWEN3_6),
  # Calls are found by text.
  'other-tools': Kind(OTHER_TOOLS, CHATML_TOKENS, eos='<|im_end|>'),
}
