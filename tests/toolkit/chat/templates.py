"""Chat templates of the tests, in the manner of those that models bring. Those that read parts put the toy's tokens."""

from __future__ import annotations

# In the manner of Qwen2-VL's and Qwen2.5-VL's: texts or parts, pictures counted where that is asked for, no tools.
PARTS = """\
{% set seen = namespace(images=0, videos=0) %}{% for message in messages -%}
{% if loop.first and message.role != 'system' %}<|im_start|>system
Be kind.<|im_end|>
{% endif %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}<|im_end|>
{% else %}{% for part in message.content -%}
{% if part.type == 'image' or 'image_url' in part %}{% set seen.images = seen.images + 1 -%}
{% if add_vision_id %}Picture {{ seen.images }}: {% endif %}<|media|><|image|><|media|>
{%- elif part.type == 'video' or 'video' in part %}{% set seen.videos = seen.videos + 1 -%}
{% if add_vision_id %}Video {{ seen.videos }}: {% endif %}<|media|><|video|><|media|>
{%- elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# In the manner of Qwen3-VL's: a macro for contents, tools, calls, their results, thinking.
TOOLS_AND_PARTS = """\
{%- macro told(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is not none -%}
{%- for part in content -%}
{%- if 'image' in part or part.type == 'image' -%}{{- '<|media|><|image|><|media|>' -}}
{%- elif 'video' in part or part.type == 'video' -%}{{- '<|media|><|video|><|media|>' -}}
{%- elif 'text' in part -%}{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- told(messages[0].content) + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\\n</tools><|im_end|>\\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + told(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set content = told(message.content) | trim -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\\n' + content + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{%- set thought = '' -%}
{%- if message.reasoning_content is string -%}{%- set thought = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if thought -%}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{%- if call.function.arguments is string -%}{{- call.function.arguments -}}
{%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>' + (message.name or '') + '\\n' + content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""

# Contents must be texts, as in most models that read nothing else.
TEXTS = """\
{{ bos_token }}{% for message in messages %}{% if message.role == 'user' -%}
{{ '[INST] ' + message.content + ' [/INST]' }}
{% elif message.role == 'system' %}{{ '<<SYS>>' + message.content + '<</SYS>>' }}
{% else %}{{ message.content + eos_token }}
{% endif %}{% endfor %}"""

# Contents must be parts.
ONLY_PARTS = """\
{% for message in messages %}{{ message.role }}: {% for part in message.content -%}
{% if part.type == 'image' %}<|image|>{% elif part.type == 'text' %}{{ part.text }}{% endif -%}
{% endfor %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
