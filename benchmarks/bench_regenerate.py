"""Client overhead against a fake server, beside a bare aiohttp loop in the same run; its memory when it resumes a
large file; tokens/s and busy slots of the embedded server.

python benchmarks/bench_regenerate.py [--rows 4000]
python benchmarks/bench_regenerate.py --memory --rows 1300000
python benchmarks/bench_regenerate.py --embedded --rows 48 --slots 8 16 --repeats 2
"""
import argparse, asyncio, json, resource, subprocess, sys, tempfile, threading, time, urllib.request
from pathlib import Path

import aiohttp

from deepspec.data.chat import parse_answer
from deepspec.data.regenerate import regenerate
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

RESUME = """
import json, re, sys, threading, time
from deepspec.data.regenerate import regenerate
def rss_mb(name): return int(re.search(rf'{name}:\\s+(\\d+)', open('/proc/self/status').read())[1])/1024
before,ended,looks = rss_mb('VmRSS'),threading.Event(),[]
def watch():
    while not ended.wait(.02): looks.append((time.monotonic(), rss_mb('VmRSS')))
thread = threading.Thread(target=watch)
thread.start()
try: summary = regenerate(sys.argv[1], sys.argv[2], [sys.argv[3]], sampling='qwen3', window=64)
finally: ended.set()
began = time.monotonic() - summary.elapsed_s # asking and answering alone; reading what is done came before
thread.join()
answering = max(m for at,m in looks if at > began)
print(json.dumps(dict(rows=summary.num_rows, new_rows=summary.num_new_rows, s=summary.elapsed_s, rss_before_mb=before,
                      rss_answering_mb=answering, rss_peak_mb=rss_mb('VmHWM'))))
"""

def write_done(folder, num_rows, num_due):
    "An input of one-turn rows, and the output of a run that was stopped when `num_due` of them were missing"
    turns = [dict(role='user', content='What is the meaning of this sentence? '*4),
             dict(role='assistant', content='old')]
    line = json.dumps(dict(id='@', conversations=turns))
    made = dict(id='@', conversations=turns, finish_reasons=['stop'], token_ids=[None], model='fake', server='server 0',
                usage=dict(prompt_tokens=28, completion_tokens=3))
    done = json.dumps(made)
    (folder/'out').mkdir()
    with open(folder/'in.jsonl', 'w') as i, open(folder/'out'/'train.jsonl', 'w') as o:
        for n in range(num_rows):
            i.write(line.replace('@', f'row-{n:012d}') + '\n')
            if n >= num_due: o.write(done.replace('@', f'row-{n:012d}') + '\n')

def bench_memory(num_rows, num_due=2000):
    "Peak memory of a resumed run, in a process of its own"
    process,url = fake_server()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_done(folder, num_rows, num_due)
            # a first run of one row writes the settings that the resumed one compares
            write_rows(folder/'one.jsonl', ['q'])
            regenerate(folder/'one.jsonl', folder/'one'/'train.jsonl', [url], sampling='qwen3')
            (folder/'one'/'run.json').rename(folder/'out'/'run.json')
            command = [sys.executable, '-c', RESUME, folder/'in.jsonl', folder/'out'/'train.jsonl', url]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode: raise SystemExit(done.stderr)
            return json.loads(done.stdout)
    finally: process.kill()

def watch_slots(url, out, ended, looks):
    "Append (busy slots, rows that are finished), ten times a second, until `ended` is set"
    while not ended.wait(.1):
        with urllib.request.urlopen(f'{url}/slots', timeout=30) as r: slots = json.load(r)
        busy = sum(s['is_processing'] for s in slots)
        looks.append((busy, out.read_bytes().count(b'\n') if out.exists() else 0))

def children_cpu_s():
    "CPU seconds of all processes that we have started and that have ended"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

def bench_embedded(slots, num_rows, max_tokens):
    "Tokens/s of the embedded server, and how many of its slots were at work, as the server itself says"
    folder = Path(tempfile.mkdtemp())
    prompts = [f'A shop sells {7 + i} apples for {3 + i} coins each and gives every tenth one away. What do {20 + i} '
               'apples cost?'
               for i in range(num_rows)]
    path = write_rows(folder/'in.jsonl', prompts)
    before_s = children_cpu_s()
    with launch_servers(engine=LlamaCpp(slots=slots), log_dir=folder/'logs') as urls:
        ended,looks = threading.Event(),[]
        watch = threading.Thread(target=watch_slots, args=(urls[0], folder/'out'/'train.jsonl', ended, looks))
        watch.start()
        try: summary = regenerate(path, folder/'out'/'train.jsonl', urls, max_tokens=max_tokens, seed=0)
        finally: ended.set()
        watch.join()
    # at the end there are no rows left to fill the slots with
    full = [b for b,finished in looks if num_rows - finished >= slots]
    return dict(slots=slots, rows=num_rows, tokens=summary.completion_tokens, s=summary.elapsed_s,
                tokens_per_s=summary.tokens_per_s, # a busy machine slows this, but not the next one
                tokens_per_cpu_s=round(summary.completion_tokens/(children_cpu_s() - before_s), 1), num_looks=len(looks),
                mean_busy=round(sum(b for b,_ in looks)/len(looks), 2),
                occupancy=round(sum(b for b,_ in looks)/len(looks)/slots, 3),
                occupancy_while_rows_suffice=round(sum(full)/len(full)/slots, 3))

if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rows', type=int, default=4000)
    parser.add_argument('--memory', action='store_true', help='resume a file in which nearly all rows are done')
    parser.add_argument('--embedded', action='store_true', help='the embedded server instead of the fake one')
    parser.add_argument('--slots', type=int, nargs='+', default=[8, 16])
    parser.add_argument('--repeats', type=int, default=1, help='rounds over the numbers of slots')
    parser.add_argument('--max-tokens', type=int, default=128)
    args = parser.parse_args()
    if args.embedded:
        for slots in args.slots*args.repeats:
            print(json.dumps(bench_embedded(slots, args.rows, args.max_tokens)), flush=True)
    elif args.memory:
        few,many = (bench_memory(n) for n in (args.rows//100 + 2000, args.rows))
        grown = (many['rss_peak_mb'] - few['rss_peak_mb'])*2**20/(many['rows'] - few['rows'])
        print(json.dumps(dict(few=few, many=many, nbytes_per_row=round(grown, 1)), indent=1))
    else: print(json.dumps(bench_client(args.rows)))
