"""Tests of an answer run in another process than its code, and see what the code says as values."""

from typing import Any

import pytest

from agentrl.rewards import GroundTruth, MCPScorerFactory
from agentrl.runtime.processes.wall import wall_gap

pytestmark = pytest.mark.skipif(wall_gap() is not None, reason="needs namespaces")

SORT = "def f(a):\n    a.sort()\n"
LRU = """
class LRU:
    def __init__(self, n):
        self.n, self.d = n, {}
    def get(self, k):
        if k not in self.d: return -1
        self.d[k] = self.d.pop(k)
        return self.d[k]
    def put(self, k, v):
        self.d.pop(k, None)
        self.d[k] = v
        if len(self.d) > self.n: self.d.pop(next(iter(self.d)))
"""
VECTOR = """
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    __rmul__ = __mul__
    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)
    def __lt__(self, o): return self.x < o.x
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def __getitem__(self, n): return (self.x, self.y)[n]
    def __repr__(self): return f'Vector({self.x}, {self.y})'
    def __hash__(self): return hash((self.x, self.y))
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __bool__(self): return bool(self.x or self.y)
"""
TREE = "class Node:\n  def __init__(s, v, l=None, r=None): s.value, s.left, s.right = v, l, r\n"
HONEST: dict[str, tuple[str, str, list[str]]] = {
    "mbpp": (
        "def f(a, b): return sorted(set(a) & set(b))",
        "def f(a, b): return sorted(set(a) | set(b))",
        ["assert f((3, 4, 5), (5, 4, 9)) == [4, 5]", "assert set(f([1, 2], [2, 3])) == set([2])"],
    ),
    "a name of a builtin": (
        "def sum(a, b): return len([n for n in range(1, a + 1) if a % n == b % n == 0])",
        "def sum(a, b): return a + b",
        ["assert sum(10, 15) == 2", "assert sum(4, 8) == 3"],
    ),
    "humaneval": (
        "def f(xs): return max(xs)",
        "def f(xs): return min(xs)",
        [
            "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"
            "    assert candidate([1, 2, 3]) == 3\n    assert candidate([5, 3, -5]) == 5\n\n\n"
            "    assert True, 'second'\n\ncheck(f)"
        ],
    ),
    "floats": (
        "def f(r): return 3.14159265 * r * r",
        "def f(r): return 3.0 * r * r",
        [
            "import math\nassert math.isclose(f(2), 12.566, abs_tol=1e-2)",
            "assert abs(f(1) - 3.1415) < 1e-3",
            "assert round(f(3), 1) == 28.3",
        ],
    ),
    "a module that the tests forgot": (
        "import math\ndef f(x): return math.sqrt(x)",
        "import math\ndef f(x): return x",
        ["assert math.isclose(f(4), 2)", "assert math.floor(f(10)) == 3"],
    ),
    "class": (
        LRU,
        LRU.replace("self.d[k] = self.d.pop(k)\n", "pass\n"),
        [
            "c = LRU(2); c.put(1, 1); c.put(2, 2); assert c.get(1) == 1",
            "c.put(3, 3); assert [c.get(1), c.get(2), c.get(3)] == [1, -1, 3]",
            "d = LRU(2); d.put('a', [1]); d.put('b', 0); d.get('a'); d.put('c', 1)\n"
            "assert d.get('a') == [1] and c is not d and len(d.d) == 2",
        ],
    ),
    "in place": (
        SORT,
        "def f(a): return sorted(a)",
        ["a = [3, 1, 2]; b = a; f(a); assert a == [1, 2, 3] and b is a"],
    ),
    "in place, nested": (
        "def f(g):\n  for row in g: row.reverse()\n  g.append(g[0])\n  return g",
        "def f(g):\n  return [row[::-1] for row in g]",
        ["g = [[1, 2], [3, 4]]; r = g[0]; assert f(g) is g and r == [2, 1] and g[2] is r"],
    ),
    "in place, other types": (
        "def f(d, s, b, q):\n  d['x'] = 1; s.discard(1); b[0] = 65; q.popleft()",
        "def f(d, s, b, q): pass",
        [
            "from collections import deque\nd, s, b, q = {}, {1, 2}, bytearray(b'b'), deque([1, 2])\n"
            "f(d, s, b, q); assert (d, s, b, q) == ({'x': 1}, {2}, bytearray(b'A'), deque([2]))"
        ],
    ),
    "exceptions": (
        "def f(n):\n  if n < 0: raise ValueError(f'{n} is negative')\n  return n ** .5",
        "def f(n): return abs(n) ** .5",
        [
            "try:\n    f(-1)\nexcept ValueError as e:\n    assert str(e) == '-1 is negative'\n"
            "else:\n    assert False",
            "import pytest\nwith pytest.raises(ValueError, match='negative'):\n    f(-2)",
        ],
    ),
    "exceptions of its own": (
        "class Low(Exception):\n  pass\nclass Empty(Low):\n"
        "  def __init__(s, k): super().__init__('none'); s.code = k\n"
        "  def __str__(s): return f'no {s.code}'\ndef f(): raise Empty(7)",
        "class Low(Exception): pass\nclass Empty(Exception): pass\ndef f(): raise Empty(7)",
        [
            "try:\n    f()\n    assert False\nexcept Low as e:\n    assert e.code == 7 and str(e) == 'no 7'",
            "assert issubclass(Empty, Low) and issubclass(Empty, Exception)",
        ],
    ),
    "values of all kinds": (
        "def f(x): return x",
        "def f(x): return str(x)",
        [
            "v = [(1, 2), {1: 'a', (2, 3): None}, {4, 5}, frozenset([6]), b'\\xff', 1 + 2j, 2 ** 70000,\n"
            "     -5, True, None, 0.1, float('inf'), 'a\\ud800\"\\n', [[]], range(3), bytearray(b'x')]\n"
            "r = f(v); assert r == v and [type(one) for one in r] == [type(one) for one in v]",
            "n = f(float('nan')); assert n != n and isinstance(f(1.0), float)",
            "from fractions import Fraction\nfrom decimal import Decimal\nimport datetime\n"
            "v = [Fraction(1, 3), Decimal('1.10'), datetime.date(2020, 1, 2), datetime.timedelta(2)]\n"
            "assert f(v) == v",
            "from collections import Counter, OrderedDict, defaultdict, deque\n"
            "v = [Counter('aab'), OrderedDict(a=1), defaultdict(int, a=2), deque([1], 4)]\n"
            "assert f(v) == v and f(v[2])['none'] == 0 and f(v[3]).maxlen == 4",
            "a = []; a.append(a); b = f(a); assert b[0] is b",
            "assert f(int) is int and isinstance(f(3), f(int)) and f(ValueError) is ValueError",
        ],
    ),
    "subclasses of builtins": (
        "from typing import NamedTuple\nfrom enum import Enum, IntEnum\n"
        "class P(NamedTuple):\n  x: int\n  y: str\nclass S(list):\n"
        "  def push(s, v): s.append(v)\nclass C(Enum):\n  RED = 1\nclass I(IntEnum):\n  ONE = 1\n"
        "def f(): return P(1, 'b')",
        "class P(tuple): pass\nclass S(list): push = list.append\ndef f(): return P((2, 'b'))",
        [
            "assert f() == (1, 'b') and f().x == 1 and f()[1] == 'b' and isinstance(f(), tuple)",
            "x, y = f(); assert {f(): 2}[(1, 'b')] == 2 and (1, 'b') in [f()] and f() in {(1, 'b')}",
            "s = S(); s.push(3); assert s == [3] and [3] == s and len(s) == 1 and 3 in s",
            "assert C.RED is C.RED and C.RED == C(1) and C.RED != 1 and C.RED.name == 'RED'",
            "assert I.ONE == 1 and I.ONE + 1 == 2 and 2 - I.ONE == 1 and I.ONE < 2",
        ],
    ),
    "operators": (
        VECTOR,
        VECTOR.replace("self.x + o.x", "self.x - o.x").replace("self.x * k", "k"),
        [
            "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6) != Vector(0, 6)",
            "assert Vector(2, 2) * 3 == Vector(6, 6) == 3 * Vector(2, 2)",
            "v = Vector(3, 4); assert len(v) == 2 and list(v) == [3, 4] and v[1] == 4 and abs(v) == 5\n"
            "assert repr(v + v) == 'Vector(6, 8)' == str(v + v) and f'{v}' == 'Vector(3, 4)'",
            "assert not Vector(0, 0) and Vector(1, 0) and 4 in Vector(3, 4) + Vector(0, 0)\n"
            "assert max(Vector(1, 2), Vector(2, 1)).x == 2 and (Vector(5, 0) + Vector(1, 0)).x == 6",
            "assert len({Vector(1, 1), Vector(1, 1)}) == 1 and isinstance(v, Vector)\n"
            "v.x = 9; assert v.x == 9 and not hasattr(v, 'z') and (v + v).x == 18",
        ],
    ),
    "functions": (
        "def f(g, xs): return [g(x) for x in xs]\ndef adder(n): return lambda m: n + m\n"
        "def twice(g):\n  def inner(*a, **k): return 2 * g(*a, **k)\n  return inner",
        "def f(g, xs): return list(xs)\ndef adder(n): return lambda m: n\ntwice = lambda g: g",
        [
            "assert f(lambda x: x + 1, [1, 2]) == [2, 3] and f(str, [1]) == ['1']",
            "import math\nassert f(math.sqrt, (4,)) == [2] and f(len, iter(['ab'])) == [2]",
            "assert adder(2)(3) == 5 and callable(adder(1))",
            "@twice\ndef g(x, y=1): return x + y\nassert g(2) == 6 and g(2, y=2) == 8",
        ],
    ),
    "callbacks that raise": (
        "def f(g):\n  try: return g(1)\n  except KeyError as e: return repr(e)",
        "def f(g): return g(1)",
        ["def g(x): raise KeyError(x)\nassert f(g) == 'KeyError(1)'"],
    ),
    "objects of the tests": (
        "def f(n): return 0 if n is None else n.value + f(n.left) + f(n.right)\n"
        "def g(n): n.left, n.right = n.right, n.left; n.value += 1; return n",
        "def f(n): return n.value\ndef g(n): return n",
        [
            TREE + "t = Node(1, Node(2), Node(3)); assert f(t) == 6",
            "l = t.left; assert g(t) is t and t.right is l and t.value == 2 and f(t) == 7",
        ],
    ),
    "linked nodes of the code": (
        TREE + "def f(n): return [] if n is None else f(n.left) + [n.value] + f(n.right)",
        TREE + "def f(n): return [n.value]",
        ["t = Node(2, Node(1)); t.right = Node(3); assert f(t) == [1, 2, 3] and t.left.value == 1"],
    ),
    "generators": (
        "def f(n):\n  a, b = 0, 1\n  while n: yield a; a, b, n = b, a + b, n - 1",
        "def f(n):\n  yield n",
        [
            "assert list(f(6)) == [0, 1, 1, 2, 3, 5] and sum(f(4)) == 4",
            "g = f(2); assert (next(g), next(g), next(g, 'end')) == (0, 1, 'end')",
            "for n, x in enumerate(f(3)): assert x == [0, 1, 1][n]\nassert n == 2",
        ],
    ),
    "context managers": (
        "class f:\n  log = []\n  def __enter__(s): s.log.append('in'); return s\n"
        "  def __exit__(s, k, e, t): s.log.append(k and k.__name__); return k is KeyError",
        "class f:\n  log = []\n  def __enter__(s): return s\n  def __exit__(s, k, e, t): pass",
        [
            "with f() as c: pass\nwith f(): raise KeyError(1)\nassert c.log == ['in', None, 'in', 'KeyError']"
        ],
    ),
    "constants and state": (
        "LIMIT = 5\nstack = []\ndef push(x): stack.append(x)\nclass A:\n  n = 0\n  @staticmethod\n"
        "  def s(x): return x\n  @classmethod\n  def c(cls): cls.n += 1; return cls.n",
        "LIMIT = 6\nstack = []\ndef push(x): pass\nclass A: pass",
        [
            "push(1); assert stack == [1] and LIMIT == 5; push(2); assert stack == [1, 2]",
            "assert A.s(3) == 3 and A.c() == 1 and A().c() == 2 and A.n == 2 and A.__name__ == 'A'",
        ],
    ),
    "dataclasses": (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n  x: int\n  y: int = 2",
        "class P:\n  def __init__(s, x, y=2): s.x, s.y = x, y",
        [
            "assert P(1) == P(1, 2) and P(1) < P(2) and str(P(1)) == 'P(x=1, y=2)' and P(1) != (1, 2)"
        ],
    ),
    "numpy": (
        "import numpy as np\ndef f(x): return np.asarray(x) * 2\ndef g(x): return np.float64(x).sum()",
        "import numpy as np\ndef f(x): return np.asarray(x)\ndef g(x): return np.float64(x + 1)",
        [
            "import numpy as np\nassert np.array_equal(f(np.arange(3)), [0, 2, 4])",
            "assert np.allclose(f([[1.0]]), 2) and f([1, 2]).shape == (2,) and f([1, 2]).tolist() == [2, 4]",
            "assert g(3) == 3 and isinstance(g(3), float) and (f(2) == 4)",
        ],
    ),
    "loops in the tests": (
        "def f(x): return x * x",
        "def f(x): return x + x",
        [
            "for n in range(300): assert f(n) == n * n",
            "assert all(f(n) == n ** 2 for n in range(99))",
        ],
    ),
    "long lists": (
        "def f(x): return [n + 1 for n in x]",
        "def f(x): return x",
        ["x = list(range(100_000)); assert f(x) == list(range(1, 100_001))"],
    ),
}


async def score(answer: str, tests: Any) -> tuple[float, str]:
    truth = GroundTruth(query="", answer=tests)
    found = await MCPScorerFactory.get_scorer("python_tests").score(answer, truth)
    return found.value, found.detail


@pytest.mark.parametrize("name", HONEST)
async def test_right_code_passes_and_wrong_code_does_not(name: str) -> None:
    right, wrong, tests = HONEST[name]
    assert await score(right, tests) == (1.0, "")
    value, detail = await score(wrong, tests)
    assert value < 1
    assert detail


ANY = "class E:\n  __eq__ = lambda s, o: True\n  __hash__ = lambda s: 4\n"
"""Equal to everything."""
CHEATS = {
    "the marks of the process that runs it": "import __main__, os, json\nfor n in range(9):\n"
    "  for d in range(9):\n    try: os.write(d, (json.dumps([n, '']) + '\\n').encode())\n"
    "    except OSError: pass\nos._exit(0)",
    "the marks of its frame": "import sys\ng = sys._getframe(1).f_globals\n"
    "for k, v in list(g.items()):\n  if isinstance(v, list): v[:] = ['pass'] * 9",
    "the tests of its main module": "import __main__\n__main__.tests[:] = ['pass'] * 2",
    "compile": "import builtins\nbuiltins.compile = lambda *a, **k: 'pass'\ndef f(x): return 0",
    "equal to everything": ANY + "def f(x): return E()",
    "equal, in a list": ANY + "def f(x): return [E(), E()]",
    "equal, as a dictionary": "class E(dict):\n  __eq__ = lambda s, o: True\ndef f(x): return E()",
    "an int that is equal": "class E(int):\n  __eq__ = lambda s, o: True\n  __hash__ = int.__hash__\n"
    "  __sub__ = __rsub__ = lambda s, o: 0\n  __lt__ = __gt__ = lambda s, o: True\n"
    "def f(x): return E(77)",
    "a str that is equal": "class E(str):\n  __eq__ = lambda s, o: True\n  __ne__ = lambda s, o: False\n"
    "  __hash__ = str.__hash__\ndef f(x): return E('x')",
    "zero from everything": ANY + "  __sub__ = __rsub__ = __truediv__ = __abs__ = lambda *a: 0\n"
    "  __lt__ = __le__ = __gt__ = __ge__ = __contains__ = lambda *a: True\n"
    "  __mod__ = __xor__ = __and__ = __rxor__ = lambda s, o: 0\ndef f(x): return E()",
    "what it is compared with": "class E:\n  def __eq__(s, o): s.o = o; return True\n"
    "  def __sub__(s, o): return s.o - o\n  def __rsub__(s, o): return o - o\n"
    "  def __float__(s): return s.o\n  def __index__(s): return s.o\ndef f(x): return E()",
    "another meaning of builtins": "def abs(x): return 0\ndef isinstance(*a): return True\n"
    "def all(x): return True\ndef any(x): return True\ndef sorted(x): return E()\n"
    "def round(*a): return E()\ndef len(x): return E()\ndef str(x): return E()\ndef set(x): return E()\n"
    + ANY
    + "def f(x): return E()",
    "another meaning of modules": "class math:\n  isclose = staticmethod(lambda *a, **k: True)\n"
    "def f(x): return 0",
    "patched modules": "import math, builtins, json, os, operator\nmath.isclose = lambda *a, **k: True\n"
    'json.dumps = lambda *a, **k: \'["value", true, [], ""]\'\nbuiltins.AssertionError = ValueError\n'
    "builtins.isinstance = lambda *a: True\noperator.eq = lambda *a: True\ndef f(x): return 0",
    "an end without an error": "import os\ndef f(x): os._exit(0)",
    "an exit": "def f(x): raise SystemExit(0)",
    "an end while it is loaded": "import os\nos._exit(0)",
    "an end of the loop": "def f(x): raise StopIteration",
    "an end of a generator": "def f(x): raise GeneratorExit",
    "an exit at the end": "import atexit, os\natexit.register(lambda: os._exit(0))\n"
    "def f(x): raise KeyboardInterrupt",
    "a thread that prints replies": "import os, threading, time\ndef spam():\n"
    '  while True:\n    for d in range(3, 9):\n      try: os.write(d, b\'["value", true, [], ""]\\n\')\n'
    "      except OSError: pass\nthreading.Thread(target=spam, daemon=True).start()\n"
    "def f(x): time.sleep(1); return True",
    "replies on standard output": 'def f(x):\n  print(\'["value", 4, [], ""]\', flush=True)\n  return 0',
    "replies for all calls": "import os\nfor d in range(3, 9):\n  try:\n"
    '    for n in range(99): os.write(d, b\'["value", ["mine", 7, "int"], [], ""]\\n\')\n'
    "  except OSError: pass\ndef f(x): return 0",
    "a reply without end": "import os\ndef f(x):\n"
    "  for d in range(3, 9):\n    try:\n      while True: os.write(d, b'[' * 65536)\n"
    "    except OSError: pass",
    "a deep reply": "import os\ndef f(x):\n  for d in range(3, 9):\n"
    "    try: os.write(d, b'[' * 50_000 + b']' * 50_000 + b'\\n')\n    except OSError: pass",
    "a number without end": "import os\ndef f(x):\n  for d in range(3, 9):\n"
    "    try: os.write(d, b'[\"value\",' + b'9' * 9999 + b',[],\"\"]\\n')\n    except OSError: pass",
    "calls of the tests' functions": "import os\nCALLS = [\n"
    ' \'["call", "builtins:exec", ["raise SystemExit"], {}]\',\n'
    ' \'["call", "os:_exit", [0], {}]\',\n \'["call", ["yours", 0], [["type", "object"]], {}]\',\n'
    ' \'["call", "builtins:getattr", [["yours", 0], "__globals__"], {}]\',\n'
    ' \'["call", ["named", "os:_exit"], [0], {}]\',\n \'["call", ["yours", -1], [], {}]\',\n'
    ' \'["call", "builtins:setattr", [["yours", 0], "__code__", 1], {}]\', \'["call"]\',\n]\n'
    "def f(x):\n  for call in CALLS:\n    for d in range(3, 9):\n"
    "      try: os.write(d, call.encode() + b'\\n')\n      except OSError: pass\n  return 0",
    "what is said of kinds": "import os\ndef f(x):\n  for d in range(3, 9):\n"
    '    try: os.write(d, b\'["raise", ["exception", 1, ["type", "object"], []], [], ""]\\n\')\n'
    "    except OSError: pass\n  return 0",
    "the tests' files": "import glob, os\nfound = [open(n, 'rb').read() for n in\n"
    "  [*glob.glob('/agentrl-code/*'), *glob.glob('/tmp/**', recursive=True), '/proc/self/environ']\n"
    "  if os.path.isfile(n)]\nassert not any(b'assert' in one and b'answer' not in one for one in found)\n"
    "def f(x): return int(b'tests.json' in b''.join(found)) and 0",
    "other processes": "import os, signal\nseen = sorted(int(n) for n in os.listdir('/proc') if n.isdigit())\n"
    "def f(x):\n  for n in seen:\n    if n not in (1, os.getpid()): os.kill(n, signal.SIGKILL)\n"
    "  return len(seen) - 2",
    "its pipes, opened the other way": "import os\nfor n in os.listdir('/proc/self/fd'):\n"
    "  try:\n    d = os.open(f'/proc/self/fd/{n}', os.O_RDWR | os.O_NONBLOCK)\n"
    '    os.write(d, b\'[0, ""]\\n[1, ""]\\n\')\n  except OSError: pass\ndef f(x): return 0',
    "its standard input": "import sys\ntry:\n  sys.stdin.seek(0); said = sys.stdin.read()\n"
    "except Exception: said = ''\nassert 'assert' not in said\ndef f(x): return 0",
    "what the collector sees": "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, str)\n"
    "  and 'assert' + ' f(' in o]\nassert not found\ndef f(x): return 0",
    "memory of the machine": "import ctypes, os\nfor n in (1, 2, os.getppid()):\n"
    "  ctypes.CDLL(None).ptrace(16, n, 0, 0)\n  try: open(f'/proc/{n}/mem', 'r+b').seek(0)\n"
    "  except OSError: pass\ndef f(x): return 0",
    "shared memory": "import os\nopen('/dev/shm/results', 'w').write('[0, \"\"]')\n"
    "import socket\ns = socket.socket(socket.AF_UNIX); s.bind('\\0tests')\ndef f(x): return 0",
    "an address for numpy": "class E:\n  __array_interface__ = {'data': (0, False), 'shape': (1,),\n"
    "    'typestr': '<i8', 'version': 3}\n  __array__ = lambda *a, **k: 0\ndef f(x): return E()",
}
GUARDED = [
    "assert f(2) == 4 and f(2).__eq__(4)",
    "assert f(3) == 9 and f(3) != 8",
    "assert abs(f(2) - 4) < 1e-6",
    "assert math.isclose(f(2), 4)",
    "assert 4 - f(2) == 0",
    "assert f(2) in (4, 5)",
    "assert all(map(lambda n: f(n) == n * n, [2, 3]))",
    "assert [f(2), f(3)] == [4, 9]",
    "assert {f(2): 1} == {4: 1}",
    "assert not f(2) - 4",
    "assert str(f(2)) == '4' and sorted([f(2)]) == [4] and round(f(2), 1) == 4",
    "import numpy as np\nassert np.array_equal(f(2), 4)",
    "try: assert f(2) == 4\nexcept ValueError: pass",
]


@pytest.mark.parametrize("name", CHEATS)
async def test_nothing_but_the_right_values_passes(name: str) -> None:
    value, detail = await score(CHEATS[name], GUARDED)
    assert value == 0.0
    assert "assert" not in detail


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdin.seek(0); raise ValueError(sys.stdin.read())",
        "import inspect\ndef f(x): raise ValueError([i.code_context for i in inspect.stack()])",
        "import sys\ndef f(x): raise ValueError(sys._getframe(1).f_locals)",
        "import gc\ndef f(x): raise ValueError([o for o in gc.get_objects() if 'SECRET' in str(o)][:3])",
        "class E(Exception):\n  def __init__(s, x): s.x = x\n  def __str__(s): return open('tests.json').read()"
        "\ndef f(x): raise E(x)",
    ],
)
async def test_the_detail_holds_nothing_of_a_test(code: str) -> None:
    test = "expected = 'SECRET' + '123'\nassert f(2) == expected, expected"
    value, detail = await score(code, [test])
    assert value == 0.0
    assert detail.startswith("test 1 of 1: ")
    assert "SECRET123" not in detail
    assert "expected" not in detail


async def test_what_a_test_raises_itself_is_named_without_its_text() -> None:
    tests = [
        "expected = 4\nassert f(2) == expected, f'not {expected}'",
        "assert g(2) == 4",
        "(",
        "1 / 0",
    ]
    assert (await score("f = abs", tests[:1]))[1] == "test 1 of 1: AssertionError"
    assert (await score("f = abs", tests[1:]))[1] == "test 1 of 3: NameError"
    assert (await score("f = abs", tests[2:]))[1] == "test 1 of 2: SyntaxError"
    assert (await score("f = abs", tests[3:]))[1] == "test 1 of 1: ZeroDivisionError"


async def test_what_a_test_passes_is_used_as_it_is_meant() -> None:
    code = (
        "def f(g, node, lines):\n  seen = [g(1), node.value, lines.read()]\n"
        "  for one, name in ((g, '__globals__'), (g, 'name'), (node, '__class__'), (node, '_hidden')):\n"
        "    try: getattr(one, name)\n    except (TypeError, AttributeError): pass\n"
        "    else: seen.append(name)\n"
        "  try: setattr(node, '__class__', int)\n  except (TypeError, AttributeError): pass\n"
        "  return seen"
    )
    test = (
        "import io\nclass Node:\n  value, _hidden = 2, 3\n"
        "r = f(lambda x: x, Node(), io.StringIO('text'))\nassert r[:3] == [1, 2, 'text'], r\n"
        "assert '__globals__' not in r and '_hidden' not in r and 'name' not in r"
    )
    assert await score(code, [test]) == (1.0, "")
    value, detail = await score("def f(m): return 1", ["import math\nassert f(math) == 1"])
    assert (value, detail) == (0.0, "test 1 of 1: TypeError")
