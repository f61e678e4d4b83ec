"""Ordinary Python, as blocks have it."""

from __future__ import annotations

SAME: dict[str, str] = {
    "in-place on items": """
x = torch.ones(3, 4)
x[:] += 2
x[0][1:] *= 3
x[1, 2] -= 1
d = {'a': [1]}
d['a'] += [2]
""",
    "in-place on names": """
x = torch.arange(3.)
y = x
x += 1
z = 'a'
z += 'b'
n = 7
n //= 2
n **= 2
n <<= 1
n |= 1
""",
    "in-place on an index once": """
calls = []
def at():
    calls.append(1)
    return 0
x = [1]
x[at()] += 1
""",
    "read before the right side": """
log = []
def n(v):
    log.append(v)
    return v
x = {1: 5}
x[n(1)] += n(2)
""",
    "unpacking": """
a, (b, *c), [d, e] = 1, (2, 3, 4), [5, 6]
*f, g = 'xyz'
h = [i + j for i, j in zip([1, 2], [3, 4])]
""",
    "loops": """
x = []
for i, (a, b) in enumerate([(1, 2), (3, 4)]):
    if i:
        continue
    x.append(a + b)
else:
    y = 1
""",
    "while and break": """
n = 0
while True:
    n += 1
    if n > 5:
        break
else:
    n = 99
""",
    "comprehensions": """
a = [x * y for x in range(3) if x for y in range(2)]
b = {x: x * 2 for x in 'ab'}
c = {x % 2 for x in range(5)}
""",
    "generators": """
def g(n):
    for i in range(n):
        yield i
    yield from [7, 8]
a = list(g(2))
b = sum(i for i in g(3))
""",
    "functions": """
def f(n, *more, k=2, **named):
    return n + sum(more) + k + len(named)
a = f(1, *[2, 3], k=4, **{'x': 1})
""",
    "recursion and closures": """
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
a = fib(12)
g = (lambda k: lambda v: v * k)(3)
b = g(2)
""",
    "nonlocal and global": """
n = 0
def f():
    global n
    n += 1
    def g():
        k = 1
        def h():
            nonlocal k
            k += 1
        h()
        return k
    return g()
a = f()
""",
    "exceptions": """
try:
    1 / 0
except (KeyError, ZeroDivisionError) as e:
    a = str(e)
else:
    a = 0
finally:
    b = 1
try:
    {}['x']
except:
    c = 2
""",
    "raising": """
def f():
    raise ValueError('no', 3)
try:
    f()
except ValueError as e:
    a = e.args
""",
    "comparisons": """
a = 0 < 5 < 7
x = 3
b = 1 < x <= 3 != 4
c = 2 in [1, 2], 'a' not in 'bc', None is None, x is not None
""",
    "formats": """
x = 3.14159
n = 7
a = f'{x:.2f}|{n:>4}|{n!r}|{[1, (2,)]}|{n=}|{x:{n}.2f}|{n:%}|{"é"!a}'
""",
    "texts": """
a = ' Ab c '.strip().lower().split()
b = ','.join(a).replace('b', 'dd')
c = 'x'.ljust(3, '.') + 'y'.zfill(3)
d = 'ab'[::-1] * 2
""",
    "texts of containers": """
a = str({'a': [1, (2,), {3}], 'b': None})
b = repr('q')
c = str(torch.ones(2))
d = str(set())
""",
    "lists": """
x = [3, 1, 2]
x.sort(key=lambda v: -v)
y = sorted(x)
x.insert(0, 9)
x.extend(range(2))
z = x.pop(), x.index(9), x.count(1)
del x[0]
x[1:2] = [5, 6]
""",
    "dicts and sets": """
d = dict(a=1, **{'b': 2})
d.update({'c': 3})
e = list(d.items()), d.get('z', 0), d.pop('a')
s = {1, 2} | {3}
s.add(4)
t = s - {1}, s.union([9]), len(s)
""",
    "built-ins": """
a = max([1, 3, 2], key=lambda v: -v), min(1, 2), sum([[1], [2]], []), abs(-1)
a2 = round(2.567, 2), divmod(7, 2)
b = any([0, 1]), all([])
b2 = list(map(lambda x: x + 1, [1])), list(filter(None, [0, 1])), list(reversed([1, 2]))
c = int('7'), float('1.5'), bool(0), tuple([1])
c2 = pow(2, 3, 5), isinstance(1, (int, str)), len('ab'), next(iter([4]))
""",
    "conditions": """
a = 1 if [] else 2
b = not 0 and (3 or 4)
c = (y := 5) + y
""",
    "walrus in a comprehension": """
a = [last := v for v in [1, 2]]
b = last
""",
    "no_grad": """
with torch.no_grad():
    a = torch.ones(2)
for i in range(3):
    with torch.inference_mode():
        if i == 1:
            continue
    b = i
""",
    "tensors": """
x = torch.arange(12.).reshape(3, 4)
a = x[1:, ::2], x[x > 3], x[[0, 2]], x[..., None].shape
a2 = x.T, -x, x @ x.T
b = x.max(-1).values, x.mean().item()
b2 = x.topk(2).indices.tolist(), (x > 1).any().item()
""",
    "torch's functions": """
x = torch.linspace(-1, 1, 6)
a = torch.softmax(x, -1), torch.cat([x, x]), torch.stack([x, x]).sum(0)
a2 = torch.where(x > 0, x, 0.0)
b = torch.nn.functional.gelu(x), torch.linalg.norm(x)
b2 = torch.einsum('i,i->', x, x), torch.tensor([1, 2], dtype=float)
""",
    "masks": """
x = torch.zeros(4)
x[torch.tensor([True, False, True, False])] = 1
x.index_add_(0, torch.tensor([1]), torch.tensor([5.]))
x.clamp_(max=2)
""",
    "math": "a = math.sqrt(2), math.pi, math.log(3), math.isclose(1, 1 + 1e-12)",
    "annotations": """
x: int = 3
y: 'a name that is not there'
def f(a: nothing, b: int = 1) -> nothing: return a + b
z = f(1)
""",
}
