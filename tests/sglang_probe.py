"""What SGLang's own argument parser and protocol models make of command lines and request bodies, as JSON.

Runs in the virtual environment of `test_sglang_contract.py`. Reads
`{"commands": [[word, ...], ...], "flags": [flag, ...], "requests": [body, ...], "choice": {...}}` from stdin.
"""
import argparse
import json
import sys

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ChatCompletionResponseChoice, ModelCard
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.version import __version__

READ = ('model_path', 'host', 'port', 'tp_size', 'dp_size', 'mem_fraction_static', 'context_length')


def parse(command):
    "The parsed values of a command line, or how the parser ended"
    try: args = prepare_server_args(command[command.index('sglang.launch_server') + 1:])
    except SystemExit as e: return dict(refused=e.code)
    return {k: getattr(args, k) for k in READ}


def check(body):
    "Fields that the request model has not got, the values it kept, and what it hands to the sampler"
    unknown = sorted(set(body) - set(ChatCompletionRequest.model_fields))
    request = ChatCompletionRequest(**body)
    kept = {k: getattr(request, k) for k in body if k not in (*unknown, 'messages', 'tools')}
    return dict(unknown=unknown, kept=kept, tools=[t.function.name for t in request.tools or []],
                roles=[m.role for m in request.messages],
                sampler=request.to_sampling_params(stop=[], model_generation_config={}))


asked = json.load(sys.stdin)
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps(dict(
    version=__version__, commands=[parse(c) for c in asked['commands']],
    unknown_flags=[f for f in asked['flags'] if f not in parser._option_string_actions],
    requests=[check(b) for b in asked['requests']], owner=ModelCard(id='m').owned_by,
    choice=ChatCompletionResponseChoice(**asked['choice']).model_dump())))
