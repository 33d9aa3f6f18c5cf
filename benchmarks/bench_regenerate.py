"""Client overhead against a fake server, beside a bare aiohttp loop in the same run; the embedded server's tokens/s.

python benchmarks/bench_regenerate.py [--rows 4000]
python benchmarks/bench_regenerate.py --embedded --rows 32 --slots 4 8 16
"""
import argparse, asyncio, json, subprocess, sys, tempfile, time
from pathlib import Path

import aiohttp

from deepspec.data.chat import parse_answer
from deepspec.data.regenerate import Patience, regenerate
from deepspec.data.sampling import PRESETS, wire_fields
from deepspec.data.servers import LlamaCpp, launch_servers

def fake_server():
    "A fake server in a process of its own, and its address"
    script = Path(__file__).parent.parent/'tests'/'fake_server.py'
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    return process,process.stdout.readline().strip()

def write_rows(path, prompts):
    "One-turn rows"
    with open(path, 'w') as f:
        for i,p in enumerate(prompts):
            f.write(json.dumps(dict(id=f'r{i}', conversations=[dict(role='user', content=p),
                                                               dict(role='assistant', content='old')])) + '\n')
    return path

async def bare_loop(url, prompts, window):
    "The same requests without any of our bookkeeping: what aiohttp and the fake server can do"
    fields,todo = wire_fields(PRESETS['qwen3'], 2048),iter(prompts)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        async def work():
            for p in todo:
                body = dict(messages=[dict(role='user', content=p)], **fields)
                async with session.post(f'{url}/v1/chat/completions', json=body) as r: parse_answer(await r.read())
        await asyncio.gather(*(work() for _ in range(window)))

def bench_client(num_rows, window=64):
    "Rows/s of the client and of the bare loop, in the same run"
    prompts = [f'Question {i}: ' + 'what is the meaning of this sentence? '*8 for i in range(num_rows)]
    process,url = fake_server()
    try:
        started = time.perf_counter()
        asyncio.run(bare_loop(url, prompts, window))
        bare_s = time.perf_counter() - started
        folder = Path(tempfile.mkdtemp())
        path = write_rows(folder/'in.jsonl', prompts)
        started = time.perf_counter()
        summary = regenerate(path, folder/'out'/'train.jsonl', [url], sampling='qwen3', window=window)
        client_s = time.perf_counter() - started
    finally: process.kill()
    assert summary.num_rows == num_rows
    return dict(rows=num_rows, bare_rows_per_s=round(num_rows/bare_s), client_rows_per_s=round(num_rows/client_s),
                ratio=round(client_s/bare_s, 2))

def bench_embedded(slots, num_rows, max_tokens):
    "Tokens/s of the embedded server and how full its batch was, by number of slots"
    folder = Path(tempfile.mkdtemp())
    prompts = [f'A shop sells {7 + i} apples for {3 + i} coins each and gives every tenth one away. What do {20 + i} '
               'apples cost?'
               for i in range(num_rows)]
    path = write_rows(folder/'in.jsonl', prompts)
    with launch_servers(engine=LlamaCpp(slots=slots), log_dir=folder/'logs') as urls:
        summary = regenerate(path, folder/'out'/'train.jsonl', urls, max_tokens=max_tokens, patience=Patience(sync_s=1))
    series = [json.loads(l) for l in open(folder/'out'/'servers.jsonl')]
    busy = [min(1, s['in_flight']/slots) for s in series[:-1]]
    return dict(slots=slots, rows=num_rows, tokens=summary.completion_tokens, s=summary.elapsed_s,
                tokens_per_s=summary.tokens_per_s,
                occupancy=round(sum(busy)/len(busy), 2) if busy else None)

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', type=int, default=4000)
    parser.add_argument('--embedded', action='store_true', help='the embedded server instead of the fake one')
    parser.add_argument('--slots', type=int, nargs='+', default=[4, 8, 16])
    parser.add_argument('--max-tokens', type=int, default=128)
    args = parser.parse_args()
    if args.embedded:
        for slots in args.slots: print(json.dumps(bench_embedded(slots, args.rows, args.max_tokens)), flush=True)
    else: print(json.dumps(bench_client(args.rows)))
