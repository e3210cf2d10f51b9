"""Chat templates of our own with the habits that those of real models have."""

from training.models import tiny

HEAD = "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
TAIL = "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
MARKED = (
    HEAD + "{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>\\n' }}"
    "{%- endgeneration %}{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}" + TAIL
)
"""As training variants of templates are written: the marks take in the end of turn and the newline behind it."""
MARKED_SHORT = MARKED.replace(
    "+ '<|im_end|>\\n' }}{%- endgeneration %}", "}}{%- endgeneration %}{{- '<|im_end|>\\n' }}"
)
"""Marks that leave the end of turn out."""
TWO_ENDS = (
    HEAD + "{{- message.content + '<|im_end|>\\n' }}" + TAIL.replace("{%- endif", "{%- else %}<|endoftext|>{%- endif")
)
"""Phi-3's way: the whole conversation has an end of its own, after the last turn's."""
CLOSED = HEAD + "{{- message.content + '<|end_response|><|endoftext|>' }}" + TAIL
"""Cohere 2's way: the end of an answer, and behind it the end of the turn."""
FORGETFUL = HEAD + (
    "{%- if message.role == 'assistant' and not loop.last %}{{- message.content.split('</think>')[-1] }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|im_end|>\\n' }}" + TAIL
)
"""Qwen3's way: thoughts are dropped once another turn follows."""
THINKING = FORGETFUL.replace(" and not loop.last", "").replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
"""DeepSeek-R1's way: never a thought in an answer, but the request for one opens it."""
TOOLS = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    + HEAD
    + "{{- message.content }}{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name + ' ' }}"
    "{{- call.function.arguments | tojson }}{{- '</call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}" + TAIL
)
TEXT_ARGUMENTS = TOOLS.replace("{{- call.function.arguments | tojson }}", "{{- call.function.arguments + '' }}")
OPENS_THOUGHTS = HEAD + (
    "{%- if message.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{{- message.content + '<|im_end|>\\n' }}" + TAIL
)
"""Qwen3's other way: the last answer, and no other, opens with thoughts that nobody had."""
CALLS_WITHOUT_CONTENT = HEAD + (
    "{%- if message.content is none %}{%- for call in message.tool_calls %}{{- '<call>' + call.function.name }}"
    "{{- call.function.arguments | tojson }}{%- endfor %}{%- else %}{{- message.content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}" + TAIL
)
"""DeepSeek-R1's way with tools: calls are shown where the content is null, and nowhere else."""
ONE_CALL = TOOLS.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
"""gpt-oss's way: of several calls the first."""
MERGED = (
    "{%- for message in messages %}{%- if loop.first or message.role != messages[loop.index0 - 1].role %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}{%- endif %}{{- message.content }}"
    "{%- if loop.last or message.role != messages[loop.index0 + 1].role %}{{- '<|im_end|>\\n' }}{%- endif %}" + TAIL
)
"""Gemma 4's way: turns of one speaker become one."""
TWO_MARKS = MARKED + "{%- generation %}{{- '<|endoftext|>' }}{%- endgeneration %}"
"""The marks of TRL's template for Phi-3: another one for the end of the conversation."""
QWEN3 = (
    "{%- set seen = namespace(query=messages | length - 1, looking=true) %}"
    "{%- for message in messages[::-1] %}{%- if seen.looking and message.role == 'user' %}"
    "{%- set seen.looking = false %}{%- set seen.query = messages | length - 1 - loop.index0 %}"
    "{%- endif %}{%- endfor %}" + HEAD + "{%- set content, thought = message.content, '' %}"
    "{%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}"
    "{%- elif message.role == 'assistant' and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if message.role == 'assistant' and loop.index0 > seen.query and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>\\n' }}"
    + TAIL.replace(
        "assistant\\n' }}",
        "assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
    )
)
"""Qwen3's own way as a whole: thoughts from a field or from the content, kept behind the last question alone, an empty
block where the last answer has none; enable_thinking = false asks with such a block."""
EFFORT = TOOLS.replace(
    "{%- if tools %}",
    "{{- '<|im_start|>system\\nReasoning: ' + (reasoning_effort or 'medium') + '<|im_end|>\\n' }}{%- if tools %}",
    1,
)
"""gpt-oss's way: how hard to think is said before everything."""
OWN = {
    "tiny": tiny.CHAT_TEMPLATE,
    **{
        name: text
        for name, text in sorted(globals().items())
        if name.isupper() and isinstance(text, str) and name not in {"HEAD", "TAIL"}
    },
}
"""All of them by name."""
