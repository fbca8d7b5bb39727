"""Writes chats.json: what transformers makes of conversations by chat templates in the forms of
known models, and which tokens it takes for the assistant's.

    python3 make.py

Each template has {% generation %} around answers; without these statements it writes the same.
"""

import json
import pathlib


import transformers

HERE = pathlib.Path(__file__).parent
TOKENIZERS = HERE.parent.parent / "tokenizer" / "testdata"

TEMPLATES = {
    "chatml": """{% for message in messages %}
{% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nBe of use.<|im_end|>\\n' -}}
{% endif %}
{{ '<|im_start|>' + message.role + '\\n' -}}
{% if message.role == 'assistant' %}
{% generation %}
{{ message.content + '<|im_end|>\\n' -}}
{% endgeneration %}
{% else %}
{{ message.content + '<|im_end|>\\n' -}}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' -}}
{% endif %}""",
    "headers": """{{- bos_token }}
{%- if not date is defined %}
    {%- set date = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date + "\\n\\n" + system }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
        {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "brackets": """{%- if messages[0].role == "system" %}
    {%- set system = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message.role == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate, and message " ~ ns.index ~ " does not") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
    {%- if message.role == "user" %}
        {%- if message == users[-1] and system is defined %}
            {{- "[INST] " + system + "\\n\\n" + message.content + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message.content + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {%- generation %}
        {{- " " + message.content | trim + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}""",
    "turns": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ \
raise_exception('no system role') }}{% endif %}{% for message in messages %}{% if \
(message['role'] == 'assistant') %}{{ '<start_of_turn>model\n' }}{% generation %}{{ \
message['content'] | trim + '<end_of_turn>\n' }}{% endgeneration %}{% else %}{{ \
'<start_of_turn>' + message['role'] + '\n' + message['content'] | trim + '<end_of_turn>\n' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}""",
    "pipes": """{% for message in messages %}{% if message['role'] == 'assistant' %} \
{{'<|assistant|>\n'}}{% generation %}{{ message['content'] + '<|end|>\n' }}{% endgeneration %}\
{% else %} {{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %} {{ '<|assistant|>\n' }}{% elif \
messages[-1]['role'] == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}\
{% else %}{{ eos_token }}{% endif %}""",
    "thinking": """{%- set ns = namespace(last=messages|length - 1, found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and not ns.found %}
        {%- set ns.found = true %}
        {%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip() }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
}

CONVERSATIONS = [
    [("user", "hello"), ("assistant", "Hi there!")],
    [("system", "Be  brief. "), ("user", " What is 1+1?\n"), ("assistant", "2"),
     ("user", "and é漢字 <b>&\"'?"), ("assistant", "three\n\nor so")],
    [("user", "a"), ("assistant", " b"), ("user", "c"), ("assistant", "\nd"), ("user", "e")],
    [("user", "q"), ("assistant", "<think>\nwhy not\n</think>\n\nyes"), ("user", "r"),
     ("assistant", "<think>\nhm\n</think>\n\nno")],
    [("user", "one"), ("user", "two"), ("assistant", "3")],
    [("user", "é"), ("assistant", "漢 and 😀"), ("user", "😀"), ("assistant", "😀")],
]


def main():
    cases, named = [], {}
    for folder in ("llama3", "qwen2", "mistral"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(TOKENIZERS / folder)
        named[folder] = tokenizer.special_tokens_map
        tokens = {"bos_token": "<s>", "eos_token": "</s>"} | tokenizer.special_tokens_map
        for name, template in TEMPLATES.items():
            for messages in CONVERSATIONS:
                messages = [{"role": role, "content": content} for role, content in messages]
                case = {"folder": folder, "template": name, "messages": messages}
                try:
                    out = tokenizer.apply_chat_template(
                        messages, chat_template=template, return_dict=True,
                        return_assistant_tokens_mask=True, **tokens)
                    case["text"] = tokenizer.apply_chat_template(
                        messages, chat_template=template, tokenize=False, **tokens)
                    case["prompt"] = tokenizer.apply_chat_template(
                        messages, chat_template=template, tokenize=False,
                        add_generation_prompt=True, **tokens)
                    case["ids"] = out["input_ids"]
                    case["answers"] = out["assistant_masks"]
                except Exception as error:  # pylint: disable=broad-except
                    case["error"] = str(error)
                cases.append(case)
    with open(HERE / "chats.json", "w", encoding="utf-8") as file:
        json.dump({"transformers": transformers.__version__, "templates": TEMPLATES,
                   "named": named, "cases": cases}, file)


main()
