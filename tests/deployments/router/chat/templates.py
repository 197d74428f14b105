"""Small chat templates after those of models that call tools and think."""

HERMES = """\
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\nCall as <tool_call>{"name": <name>, "arguments": <object>}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

THINKING = HERMES.replace(
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- elif opens_thoughts is defined %}{{- '<think>\\n' }}{%- endif %}{%- endif %}",
)

LLAMA = """\
{{- bos_token }}
{%- if tools %}{{- 'Respond as {"name": function name, "parameters": dictionary}: ' }}
{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif %}
{%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS]' + (message.tool_calls | tojson) }}
{%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) }}{%- endif %}
"""
