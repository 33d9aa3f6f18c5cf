"""An OpenAI-compatible server that answers at once and fails on request.

Answers are a function of the messages alone, so two runs can be compared. Faults come by chance (`Faults`, seeded),
by marker in the last user turn (`#400`, `#overflow`, `#empty`, `#length`, `#think`, `#call`, `#hang`), or by death and return
(`die`, `revive`, `flap`).
`python tests/fake_server.py PORT` runs one in a process of its own.
"""
import asyncio, hashlib, json, random, sys, threading, time
from dataclasses import dataclass, field

@dataclass
class Faults:
    "Chances of each fault, per request"
    slow: float = 0       # answers after `slow_s`
    slow_s: float = .3
    busy: float = 0       # 429 with Retry-After
    retry_after_s: float = .05
    error: float = 0      # 500
    half: float = 0       # half of the body, then the connection closes
    drop: float = 0       # the connection closes without a word
    bad_json: float = 0   # 200 with something that is not JSON
    seed: int = 0

def answer(messages):
    "The content the fake model gives: fixed by the whole history"
    return 'answer ' + hashlib.sha256(json.dumps([[m['role'], m['content']]
                                                  for m in messages]).encode()).hexdigest()[:16]

class _Connection(asyncio.Protocol):
    "One HTTP/1.1 connection, keep-alive, no pipelining"
    def __init__(self, server): self.server,self.buffer = server,b''
    def connection_made(self, transport):
        self.transport = transport
        self.server.connections.add(self)
    def connection_lost(self, exc): self.server.connections.discard(self)

    def data_received(self, data):
        self.buffer += data
        end = self.buffer.find(b'\r\n\r\n')
        if end < 0: return
        lines = self.buffer[:end].decode('latin1').split('\r\n')
        headers = {k.lower(): v.strip() for k,_,v in (l.partition(':') for l in lines[1:])}
        length = int(headers.get('content-length', 0))
        if len(self.buffer) < end + 4 + length: return
        body,self.buffer = self.buffer[end+4:end+4+length],self.buffer[end+4+length:]
        method,path,_ = lines[0].split(' ')
        self.server.handle(self, method, path, headers, body)

    def send(self, status, obj, headers=(), cut=False):
        if self.transport.is_closing(): return
        body = obj if isinstance(obj, bytes) else json.dumps(obj).encode()
        head = [f'HTTP/1.1 {status} X', 'content-type: application/json', f'content-length: {len(body)}', *headers]
        self.transport.write('\r\n'.join(head).encode() + b'\r\n\r\n' + (body[:len(body)//2] if cut else body))
        if cut: self.transport.close()

@dataclass
class FakeServer:
    "Run with `with FakeServer() as server:`; it lives in a thread of its own"
    faults: Faults = field(default_factory=Faults)
    port: int = 0
    model: str = 'fake'
    owned_by: str = 'sglang'
    api_key: str = None
    slots: int = None      # llama-server's total_slots
    record: bool = True    # keep the bodies of requests
    latency_s: float = 0
    token_ids: bool = False # give them to who asks, where this engine puts them

    def __post_init__(self):
        self.rng = random.Random(self.faults.seed)
        self.requests,self.headers,self.connections = [],[],set()
        self.num_chats = self.in_flight = self.max_in_flight = self.num_faults = 0
        self.listener = None
        self.times = []

    async def open(self):
        if self.listener: return
        self.listener = await asyncio.get_running_loop().create_server(lambda: _Connection(self), '127.0.0.1',
                                                                       self.port, reuse_address=True)
        self.port = self.listener.sockets[0].getsockname()[1]

    async def shut(self):
        if self.listener: self.listener.close()
        self.listener = None
        for c in list(self.connections): c.transport.abort()

    def handle(self, conn, method, path, headers, body):
        if self.api_key and headers.get('authorization') != f'Bearer {self.api_key}':
            return conn.send(401, {'error': {'message': 'invalid api key'}})
        if path == '/health': return conn.send(200, {'status': 'ok'})
        if path == '/v1/models': return conn.send(200, {'data': [{'id': self.model, 'owned_by': self.owned_by}]})
        if path == '/props' and self.slots: return conn.send(200, {'total_slots': self.slots})
        if path != '/v1/chat/completions': return conn.send(404, {'error': {'message': 'not found'}})
        request = json.loads(body)
        self.num_chats += 1
        if self.record:
            self.requests.append(request)
            self.headers.append(headers)
            self.times.append(time.monotonic())
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        delay = self.latency_s
        if self.faults.slow and self.rng.random() < self.faults.slow: delay += self.faults.slow_s
        if delay: asyncio.get_running_loop().call_later(delay, self.reply, conn, request)
        else: self.reply(conn, request)

    def reply(self, conn, request):
        self.in_flight -= 1
        f,dice = self.faults,self.rng.random()
        for name in ('busy', 'error', 'half', 'drop', 'bad_json'):
            chance = getattr(f, name)
            if dice < chance:
                self.num_faults += 1
                return self.fail(name, conn)
            dice -= chance
        messages = request['messages']
        text = messages[-1]['content']
        if '#400' in text:
            return conn.send(400, {'error': {'message': 'roles must alternate', 'type': 'invalid_request_error'}})
        if '#overflow' in text:
            return conn.send(400, {'error': {'message': 'request (9031 tokens) exceeds the available context size '
                                                        '(2048 tokens)',
                                                                   'type': 'exceed_context_size_error'}})
        if '#hang' in text: return
        content = '' if '#empty' in text or '#call' in text else answer(messages)
        message = {'role': 'assistant', 'content': content}
        if '#call' in text:
            message['tool_calls'] = [{'id': 'a', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}]
        if '#think' in text: message['reasoning_content'] = 'Hmm, let me think.'
        choice = {'index': 0, 'message': message, 'finish_reason': 'length' if '#length' in text else 'stop'}
        ids = list(content.encode()) + [2]
        if not self.token_ids: pass
        elif request.get('return_token_ids'):
            choice['response_token_ids' if self.owned_by == 'sglang' else 'token_ids'] = ids
        elif request.get('logprobs') and self.owned_by == 'llamacpp':
            choice['logprobs'] = {'content': [{'id': i} for i in ids]}
        conn.send(200, {'id': 'x', 'model': self.model, 'choices': [choice],
                        'usage': {'prompt_tokens': sum(len(m['content'].split()) for m in messages),
                                  'completion_tokens': len(content.split()) + 1}})

    def fail(self, name, conn):
        if name == 'busy': conn.send(429, {'error': {'message': 'busy'}}, [f'retry-after: {self.faults.retry_after_s}'])
        elif name == 'error': conn.send(500, {'error': {'message': 'CUDA error'}})
        elif name == 'half':
            conn.send(200, {'choices': [{'message': {'content': 'x'*2000}, 'finish_reason': 'stop'}]}, cut=True)
        elif name == 'drop': conn.transport.abort()
        elif name == 'bad_json': conn.send(200, b'<html>gateway</html>')

    # from the test's thread
    @property
    def url(self): return f'http://127.0.0.1:{self.port}'
    def call(self, coro): return asyncio.run_coroutine_threadsafe(coro, self.loop).result(10)
    def die(self): self.call(self.shut())
    def revive(self): self.call(self.open())

    def flap(self, up_s, down_s):
        "Die and return in turns until the server is closed"
        async def turns():
            while True:
                await asyncio.sleep(up_s*self.rng.uniform(.5, 1.5))
                await self.shut()
                await asyncio.sleep(down_s*self.rng.uniform(.5, 1.5))
                await self.open()
        self.flapping = asyncio.run_coroutine_threadsafe(turns(), self.loop)

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.revive()
        return self

    def __exit__(self, *exc):
        if hasattr(self, 'flapping'): self.flapping.cancel()
        self.die()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)

if __name__ == '__main__':
    async def main():
        server = FakeServer(port=int(sys.argv[1]) if len(sys.argv) > 1 else 0, record=False)
        await server.open()
        print(server.url, flush=True)
        await asyncio.Event().wait()
    asyncio.run(main())
