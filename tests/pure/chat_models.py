"""Chat templates with the marks of families of models, written for tests, and a tokenizer of bytes that has special
tokens."""

from collections.abc import Mapping, Sequence

from pdserve.errors import ConfigError
from pdserve.gateway.formats import deepseek
from pdserve.text.chat_template import ChatTemplate, Conversation

QWEN = """\
{%- if tools %}<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.tool_calls %}<|im_start|>assistant
{{ message.content or "" }}
{%- for call in message.tool_calls %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}
{%- endif %}"""

LLAMA = """\
{{- bos_token }}
{%- if tools %}<|start|>system
Respond as {"name": function name, "parameters": dictionary of argument name and its value}
{{ tools | tojson(indent=1) }}<|eot|>
{%- endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}<|python_tag|>
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- else %}{{ message.content | trim }}{% endif %}<|eot|>
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

DEEPSEEK = (
    """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' and message['content'] is none %}
{%- set call = message['tool_calls'][0] %}
{{- 'CALLS_BEGINCALL_BEGIN' + call['type'] + 'SEPARATOR' + call['function']['name'] + '\\n```json\\n' +
    call['function']['arguments'] + '\\n```CALL_ENDCALLS_END' }}
{%- else %}{{ '<' + message['role'] + '>' + message['content'].split('</think>')[-1] }}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | length }} tools{% endif %}
{%- if add_generation_prompt %}<Assistant><think>
{% endif %}"""
    .replace("CALLS_BEGIN", deepseek.CALLS_BEGIN)
    .replace("CALL_BEGIN", deepseek.CALL_BEGIN)
    .replace("CALLS_END", deepseek.CALLS_END)
    .replace("CALL_END", deepseek.CALL_END)
    .replace("SEPARATOR", deepseek.SEPARATOR)
)  # fmt: skip

MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"

PLAIN = "{% for message in messages %}<|{{ message['role'] }}|>{{ '' + message['content'] }}{% endfor %}"


class ByteTokenizer:
    """One token a byte."""

    vocab_size = 262
    eos_token_ids: frozenset[int] = frozenset()
    as_json = "byte"

    def __init__(self, template: str | None, special_tokens: Sequence[str] = ()) -> None:
        tokens = {"bos_token": "<s>"}
        self.chat_template = None if template is None else ChatTemplate(template, special_tokens=tokens)
        self.special_tokens: Mapping[str, int] = {token: 250 + index for index, token in enumerate(special_tokens)}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode_verbatim(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def render_chat(self, conversation: Conversation) -> str:
        if self.chat_template is None:
            raise ConfigError("the model has no chat template")
        return self.chat_template.render(conversation)
