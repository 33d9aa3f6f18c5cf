"Chat templates in the styles that are in use, tiny tokenizers for them, and what a target would emit"

from dataclasses import dataclass, field
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    'user assistant system tool model',
    'Two and two are four.\n\nHello there, hello!\n',
    'def add(a, b):\n    return a + b\n\n',
    'The cat sat on the mat. 12 + 34 = 46',
    ' answer answers  answered',
    'naïve café über ß',
    '\n\n\n',
    '  \n  ',
]


def byte_level(special, *, post=None, normalizer=None, split=None, rstrip=()):
    "Byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2 have"
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    backend.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
    backend.decoder = decoders.ByteLevel()
    if normalizer:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    if post:
        backend.post_processor = post
    return wrap(backend, special, rstrip)


def metaspace(special, *, scheme='first', rstrip=()):
    "SentencePiece-style BPE with byte fallback, as Llama 2, Mistral and Gemma have"
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token='<unk>'))
    if scheme == 'never':  # Gemma: a normalizer writes the spaces, nothing is put in front
        backend.normalizer = normalizers.Replace(' ', '▁')
        backend.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        strip = [decoders.Strip(' ', 1, 0)]
        backend.decoder = decoders.Sequence(
            [decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    bytes_ = [f'<0x{i:02X}>' for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=['<unk>', *bytes_], show_progress=False)
    backend.train_from_iterator([line.replace(' ', '▁') for line in CORPUS * 3], trainer)
    return wrap(backend, special, rstrip)


def wrap(backend, special, rstrip=()):
    "A transformers tokenizer with these special tokens, the last of them eos, one that starts like <s> or <b the bos"
    bos = next((s for s in special if s[:2] in ('<s', '<b') or s.startswith(('<｜b', '<|b'))), None)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[-1], bos_token=bos)
    tokens = [AddedToken(s, special=True, normalized=False, rstrip=s in rstrip) for s in special]
    tokenizer.add_special_tokens(dict(additional_special_tokens=tokens))
    return tokenizer


def strip(text):
    return text.strip()


def same(text):
    return text


@dataclass(frozen=True)
class Style:
    "A style of chat template, and what its target emits for an answer"

    jinja: str
    special: tuple
    end: str  # end of turn as the target emits it
    shown: callable = same  # what the template makes of a content
    lead: str = ''  # white space that the target emits first
    history_end: str = None  # end of earlier turns where the target emits it, '' where the template puts another token
    strict: bool = False  # roles must alternate
    systems: bool = True  # system turns are allowed
    rstrip: tuple = field(default=())

    def emits(self, content, last):
        return self.lead + self.shown(content) + (self.end if last or self.history_end is None else self.history_end)


CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

SMOLLM = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are a small assistant.<|im_end|>\n' }}{% endif %}""" + CHATML.replace(
    "{% for m in messages %}", ''
).replace("m['", "message['")

GENERATION = """{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}\
{{ m.content }}<|im_end|>\
{% endgeneration %}{{ '\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN3 = """{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}\
{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}\
{{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == 'user' %}{%- set ns.searching = false %}{%- set ns.last_query = index %}\
{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}\
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
{%- set call = call.function or call %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}\
{{- '}\n</tool_call>' }}
{%- endfor %}{%- endif %}{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- endif %}\
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}\
{%- endif %}"""

LLAMA3 = """{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}\
{%- set messages = messages[1:] %}\
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{{- 'Cutting Knowledge Date: December 2023\n\n' }}\
{{- system + '<|eot_id|>' }}
{%- for message in messages %}{%- if message.tool_calls is defined and message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}\
{{- (message.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}
{%- else %}\
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}\
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = messages[0]['content'] %}\
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% if loop.index0 == 0 and system != false %}\
{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}\
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

MISTRAL = """{{- bos_token }}{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{- raise_exception('conversation roles must alternate user/assistant') }}{%- endif %}{%- if message.role == 'user' %}\
{{- '[INST]' + message.content + '[/INST]' }}{%- elif message.role == 'assistant' %}{{- message.content + eos_token }}\
{%- endif %}{%- endfor %}"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}\
{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}\
{% elif message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}\
{% elif message['role'] == 'assistant' %}{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""

DEEPSEEK = """{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}\
{% set ns.system = m.content %}{% endif %}{% endfor %}\
{{ bos_token }}{{ ns.system }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}\
{% elif m.role == 'assistant' %}\
{% set content = m.content %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}\
{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

GPTOSS = """{{- '<|start|>system<|message|>You are a model.\nReasoning: medium<|end|>' }}\
{%- if messages[0].role == 'system' %}\
{{- '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '<|end|>' }}\
{%- set loop_messages = messages[1:] %}\
{%- else %}{%- set loop_messages = messages %}{%- endif %}{%- for m in loop_messages %}{%- if m.role == 'assistant' %}\
{%- if loop.last and not add_generation_prompt %}\
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}\
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{%- endif %}\
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

GEMMA2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate') }}{% endif %}\
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GEMMA4 = """{{- bos_token }}{%- for m in messages %}{%- set role = 'model' if m.role == 'assistant' else m.role %}\
{{- '<|turn>' + role + '\n' }}\
{%- if role == 'model' and '<channel|>' in m.content %}{{- m.content.split('<channel|>')[-1] | trim }}{%- else %}\
{{- m.content | trim }}{%- endif %}\
{{- '<turn|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|turn>model\n' }}\
{%- if not enable_thinking | default(false) %}{{- '<|channel>thought\n<channel|>' }}{%- endif %}{%- endif %}"""

ZEPHYR = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

IM = ('<|im_start|>', '<|im_end|>')
STYLES = dict(
    chatml=Style(CHATML, IM, '<|im_end|>'),
    smollm=Style(SMOLLM, IM, '<|im_end|>'),
    generation=Style(GENERATION, IM, '<|im_end|>'),
    qwen3=Style(QWEN3, IM, '<|im_end|>'),  # what it strips of a last answer is tested by itself
    llama3=Style(
        LLAMA3, ('<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>'), '<|eot_id|>', strip
    ),
    llama2=Style(LLAMA2, ('<s>', '</s>'), ' </s>', strip, lead=' ', strict=True),
    mistral=Style(MISTRAL, ('<s>', '[INST]', '[/INST]', '</s>'), '</s>', strict=True, systems=False),
    phi3=Style(
        PHI3,
        ('<|user|>', '<|system|>', '<|assistant|>', '<|end|>', '<|endoftext|>'),
        '<|end|>',
        rstrip=('<|user|>', '<|assistant|>', '<|end|>'),
    ),
    phi4=Style(PHI4, ('<|im_start|>', '<|im_sep|>', '<|im_end|>'), '<|im_end|>'),
    deepseek=Style(
        DEEPSEEK,
        ('<｜begin▁of▁sentence｜>', '<｜User｜>', '<｜Assistant｜>', '<｜end▁of▁sentence｜>'),
        '<｜end▁of▁sentence｜>',
    ),
    gptoss=Style(
        GPTOSS, ('<|start|>', '<|message|>', '<|channel|>', '<|end|>', '<|return|>'), '<|return|>', history_end=''
    ),
    gemma2=Style(
        GEMMA2, ('<bos>', '<start_of_turn>', '<end_of_turn>'), '<end_of_turn>', strip, strict=True, systems=False
    ),
    gemma4=Style(GEMMA4, ('<bos>', '<|turn>', '<|channel>', '<channel|>', '<turn|>'), '<turn|>', strip),
    zephyr=Style(ZEPHYR, ('</s>',), '</s>'),
)

DIGITS = pre_tokenizers.Digits(individual_digits=True)
WORDS = pre_tokenizers.Split(
    Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), 'isolated'
)
KINDS = dict(
    gpt2=lambda special, rstrip: byte_level(special, post=processors.ByteLevel(trim_offsets=True), rstrip=rstrip),
    digits=lambda special, rstrip: byte_level(special, split=DIGITS, rstrip=rstrip),
    words=lambda special, rstrip: byte_level(special, split=WORDS, normalizer=normalizers.NFC(), rstrip=rstrip),
    bos=lambda special, rstrip: byte_level(
        special,
        post=processors.TemplateProcessing(single=f'{special[0]} $A', special_tokens=[(special[0], 0)]),
        rstrip=rstrip,
    ),
    metaspace=lambda special, rstrip: metaspace(special, rstrip=rstrip),
    always=lambda special, rstrip: metaspace(special, scheme='always', rstrip=rstrip),
    gemma=lambda special, rstrip: metaspace(special, scheme='never', rstrip=rstrip),
)


@cache
def make_tokenizer(style, kind):
    "A tiny tokenizer of this kind with the special tokens and the template of this style"
    tokenizer = KINDS[kind](STYLES[style].special, STYLES[style].rstrip)
    tokenizer.chat_template = STYLES[style].jinja
    return tokenizer
