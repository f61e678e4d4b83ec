"""A program of a user that a type checker takes in strict mode. tests/test_types.py gives it to one; it is not run."""

# pyright: strict

import asyncio

import torch

import insitu
from insitu import VLLM, Captured, recipes

model = VLLM("somewhere", dtype="float32", taps=["resid_post[3]"])

with model.trace("text", temperature=0.0, max_tokens=4) as tracer:
    hidden = model.resid_post[3].save()
    model.resid_post[4][:] += hidden
    model.model.layers[5].mlp.output = model.model.layers[5].mlp.output * 2
    for step in tracer.iter[:]:
        norm = model.resid_post[3][-1].norm()
        if step == 2:
            tracer.stop()
    result = tracer.result.save()
print(hidden.shape, result.outputs[0].text)

with model.trace(max_tokens=1) as tracer:
    for prompt in ("one", "two"):
        with tracer.invoke(prompt):
            logits = model.logits.save()
            where = tracer.positions_of("o")
            cache = tracer.cache(modules="model.layers.*.mlp")

with model.edit("steer") as (tracer, edit):
    for step in tracer.all():
        model.resid_post[3][:] += 1
edit.clear()

for output in model.generate(["one", "two"], max_tokens=2):
    print(output.outputs[0].text)

try:
    rows = model.run(lambda tracer: model.resid_post[3], ["one", "two"], max_tokens=1)
    print(torch.stack(rows).shape)
except insitu.LocationError as error:
    print(error.location, error.invoke)

found = insitu.capture(model, ["one"], at="resid_post[3]", out="out")
assert isinstance(found, Captured)
row = found["resid_post[3]"][0]
print(row.values.shape, row.tokens)

metric = recipes.logit_difference(model, " a", " b")
sweep = recipes.patch_positions(model, "one", "two", metric, layers=range(4))
print(sweep.best)
lens = recipes.logit_lens(model, "one")
lens.save_png("lens.png")
steering = recipes.Steering(model, torch.zeros(4), "resid_post[3]", scale=2.0)
print(steering.generate(["one"], max_tokens=4))
report = model.check(show=False)
print(report.passed, model.in_flight(), model.stats().eager_steps)
model.close()


async def main() -> None:
    served = VLLM("somewhere", mode="async")
    async with served.trace("text", max_tokens=1) as tracer:
        hidden = served.resid_post[3].save()
    print(hidden.shape, await served.in_flight())
    with served.trace("text", max_tokens=1) as tracer:
        served.logits.save()
    async for output in tracer.backend:
        print(output.finished)
    served.close()


asyncio.run(main())
remote = insitu.connect("http://localhost:8000")
with remote.trace("text"):
    print(remote.resid_post[3].save())
