"""A saved value that no name holds is not lost in silence; one that comes home warns of nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import insitu

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0.0, "max_tokens": 1}
DEAD = (
    "no name of the block holds what this line saves when the block ends, so it is lost: give it one, "
    "`name = x.save()`, or put it into a list or dict that is saved"
)


def held_by(name: str) -> str:
    lost = f"`{name}` holds what this line saves and is not saved itself, so it is lost"
    return f"{lost}: write `{name}.save()` in the block"


def deleted(name: str) -> str:
    return (
        f"`{name}` has no value any more when the block ends, so what this line saves is lost: leave `del {name}` out"
    )


class Pair(NamedTuple):
    first: Any
    second: Any


class Keeper:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def add(self, value: Any) -> None:
        self.kept.append(value)


def forget(value: Any) -> None:
    pass


def helper(model: Any, layer: int) -> torch.Tensor:
    return insitu.save(model.resid_post[layer])


# Lost. The line that is to be blamed ends in `# here`.


def comprehension(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        c = [model.resid_post[i].save() for i in range(3)]  # here


def entry_of_a_dict(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        d = {}
        d["k"] = model.logits.save()  # here


def deep_inside(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        d = {"a": [(1, {"b": []})]}
        d["a"][0][1]["b"].append(model.logits.save())  # here


def part_of_a_tuple(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        p = Pair(model.logits.save(), 2)  # here


def number_in_a_list(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        c = []
        for layer in range(2):
            c.append(model.resid_post[layer].norm().item().save())  # here


def argument(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        forget(model.logits.save())  # here


def statement(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.logits.save()  # here


def statement_of_a_tuple(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.model.layers[0].output.save()  # here


def statement_of_a_list(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        [model.logits].save()  # here


def statement_of_a_number(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        model.logits.norm().item().save()  # here


def index_of_what_is_saved(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        h = model.model.layers[0].output.save()[0]  # here


def sum_of_what_is_saved(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        h = model.resid_post[0].save() + 1  # here


def helper_whose_value_nobody_takes(model: Any) -> None:
    def mean(layer: int) -> Any:
        hidden = insitu.save(model.resid_post[layer])  # here
        return hidden.mean()

    with model.trace(PROMPT, **GREEDY):
        m = mean(0)


def each_step(model: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            model.logits.save()  # here


def each_step_of_a_with(model: Any) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        c = []
        with tracer.iter[:]:
            c.append(model.logits.save())  # here


def each_sequence(model: Any) -> None:
    with model.trace(PROMPT, n=3, max_tokens=1, temperature=1.0):
        c = [model.logits.save()]  # here


def in_invokes(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        for _ in range(3):
            with tracer.invoke(PROMPT):
                c = [model.logits.save()]  # here


def list_around_the_invokes(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        rows = []
        for _ in range(3):
            with tracer.invoke(PROMPT):
                rows.append(model.logits.save())  # here


def lists_made_around_the_invokes(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        rows = [[].save() for _ in range(2)]  # here
        for i in range(2):
            with tracer.invoke(PROMPT):
                rows[i].append(model.logits)


def name_that_is_deleted(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        x = model.logits.save()  # here
        del x


def name_of_an_except(model: Any) -> None:
    with model.trace(PROMPT, **GREEDY):
        try:
            raise ValueError
        except ValueError as error:
            error.save()  # here


def name_deleted_in_an_invoke(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            x = model.logits.save()  # here
            del x


LOST: dict[Callable[[Any], None], str] = {
    comprehension: held_by("c"),
    entry_of_a_dict: held_by("d"),
    deep_inside: held_by("d"),
    part_of_a_tuple: held_by("p"),
    number_in_a_list: held_by("c"),
    argument: DEAD,
    statement: DEAD,
    statement_of_a_tuple: DEAD,
    statement_of_a_list: DEAD,
    statement_of_a_number: DEAD,
    index_of_what_is_saved: DEAD,
    sum_of_what_is_saved: DEAD,
    helper_whose_value_nobody_takes: DEAD,
    each_step: DEAD,
    each_step_of_a_with: held_by("c"),
    each_sequence: held_by("c"),
    in_invokes: held_by("c"),
    list_around_the_invokes: held_by("rows"),
    lists_made_around_the_invokes: held_by("rows"),
    name_that_is_deleted: deleted("x"),
    name_of_an_except: deleted("error"),
    name_deleted_in_an_invoke: deleted("x"),
}


@pytest.mark.parametrize("block", LOST, ids=lambda block: block.__name__)
def test_what_is_saved_in_vain_is_told_at_its_line(llama: Any, block: Callable[[Any], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        block(llama)
    assert [(str(one.message), one.category) for one in caught] == [(LOST[block], insitu.UnsavedWarning)]
    assert caught[0].filename == __file__
    with open(__file__) as file:
        assert file.readlines()[caught[0].lineno - 1].endswith("# here\n")


# Not lost.


def name(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        y = model.logits.save()
    return y


def names(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        a, (b, c) = model.resid_post[0].save(), (model.resid_post[1].save(), model.resid_post[2].save())
        d, e = model.model.layers[3].output.save()
        f = g = model.logits.save()
    return a, b, c, d, e, f, g


def starred(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        first, *rest = model.resid_post[0].save(), model.resid_post[1].save()
        rest.save()
    return rest


def walrus(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        if (y := model.logits.save()).sum() != 0:
            forget(z := y.sum().save())
    return y, z


def conditional(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        y = model.resid_post[0].save() if len(PROMPT) else model.resid_post[1].save()
    return y


def rebound(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        for layer in range(3):
            y = model.resid_post[layer].save()
    return y


def rebound_by_a_helper(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        for layer in range(3):
            y = helper(model, layer)
    return y


def saved_list(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        rows = [].save()
        for layer in range(3):
            rows.append(model.resid_post[layer].save())
            rows.append(model.resid_post[layer].norm().item().save())
            rows.append(helper(model, layer))
    return rows[0]


def saved_later(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        rows = {layer: (model.resid_post[layer].save(),) for layer in range(3)}
        rows.save()
    return rows[0]


def saved_list_around_the_invokes(model: Any) -> Any:
    with model.trace(**GREEDY) as tracer:
        rows, table = [], {}.save()
        for i in range(3):
            with tracer.invoke(PROMPT):
                rows.append(model.resid_post[0].save())
                table[i] = [model.logits.save()]
        rows.save()
    return rows[0], table[0]


def named_in_invokes(model: Any) -> Any:
    with model.trace(**GREEDY) as tracer:
        for i in range(3):
            with tracer.invoke(PROMPT):
                y = model.logits.save()
    return y


def handed_to_a_later_invoke(model: Any) -> Any:
    with model.trace(**GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            seen = [model.resid_post[layer].save() for layer in range(2)]
        with tracer.invoke(PROMPT):
            model.resid_post[0] = seen[0]
            y = model.logits.save()
    return y


def function_in_the_block(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):

        def get(layer: int) -> Any:
            found = model.resid_post[layer].save()
            return found

        y = get(1)
        z = (lambda: model.logits.save())()
    return y, z


def part_of_what_is_saved(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        y = torch.stack([model.resid_post[layer].save() for layer in range(3)]).save()
    return y


def object_of_the_caller(model: Any) -> Any:
    keeper = Keeper()
    with model.trace(PROMPT, **GREEDY):
        keeper.add(model.resid_post[0].save())
        keeper.pair = Pair(model.resid_post[1].save(), model.logits.tolist().save())
    return keeper.kept


def same_object_by_a_name(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY):
        y = model.logits
        model.logits.save()
    return y


def each_step_in_a_list(model: Any) -> Any:
    with model.trace(PROMPT, temperature=0.0, max_tokens=3, ignore_eos=True) as tracer:
        rows = [].save()
        for step in tracer.iter[:]:
            rows.append(model.logits.save())
            last = model.samples.save()
    return rows, last


def cache(model: Any) -> Any:
    with model.trace(PROMPT, **GREEDY) as tracer:
        seen = tracer.cache("model.layers.*")
    return seen


def function_form(model: Any) -> Any:
    return model.run(lambda tracer: [insitu.save(model.logits), forget(insitu.save(model.samples))], PROMPT, **GREEDY)


HOME = [
    *(name, names, starred, walrus, conditional, rebound, rebound_by_a_helper, saved_list, saved_later),
    *(saved_list_around_the_invokes, named_in_invokes, handed_to_a_later_invoke, function_in_the_block),
    *(part_of_what_is_saved, object_of_the_caller, same_object_by_a_name, each_step_in_a_list, cache, function_form),
]


@pytest.mark.parametrize("block", HOME, ids=lambda block: block.__name__)
def test_what_comes_home_warns_of_nothing(llama: Any, block: Callable[[Any], Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = block(llama)
    assert [str(one.message) for one in caught] == []
    assert list(_tensors(found)), "something came home"


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, (torch.Tensor, insitu.Cache)):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


OF_THE_MODULE: list[Any] = []


def record(value: Any) -> None:
    OF_THE_MODULE.append(value)


@pytest.mark.parametrize("saved", [True, False])
def test_a_list_that_a_helper_appends_to_is_the_block_s_own(llama: Any, saved: bool) -> None:
    global OF_THE_MODULE
    OF_THE_MODULE = []
    rows: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with llama.trace(PROMPT, **GREEDY):
            (lambda: rows.append("inner"))()
            append = rows.append
            record(len(rows))
            OF_THE_MODULE.append("block")
            sizes = (len(rows), len(OF_THE_MODULE)).save()
            rows.save()
            if saved:
                OF_THE_MODULE.save()
    assert [str(one.message) for one in caught] == []
    assert sizes == (1, 2)
    assert OF_THE_MODULE == [1, "block"]


def test_a_closure_s_list_is_the_block_s_own_in_invokes_too(llama: Any) -> None:
    rows: list[Any] = []

    def keep(value: Any) -> None:
        rows.append(value)

    with llama.trace(**GREEDY) as tracer:
        for i in range(2):
            with tracer.invoke(PROMPT):
                keep(i)
                rows.append(llama.samples.item())
        rows.save()
    assert rows[:2] == [0, 1]  # both invokes run until they wait for what is drawn
    assert len(rows) == 4


APART = (
    "the caller's `rows` was changed while the block ran, by a function that it calls, say, but the block has a copy "
    "of its own, which does not show that; {}. Hand `rows` to the function as an argument"
)


@pytest.mark.parametrize("saved", [True, False])
def test_a_list_changed_behind_the_block_is_told(llama: Any, saved: bool) -> None:
    keeper = Keeper()
    rows = keeper.kept
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with llama.trace(PROMPT, **GREEDY):
            keeper.add(1)
            rows.append(2)
            if saved:
                rows.save()
    done = "the saved copy takes its place, so that change is lost" if saved else "the copy is as it was"
    assert [str(one.message) for one in caught] == [APART.format(done)]
    assert rows == ([2] if saved else [1])
    assert keeper.kept == [1]


def test_a_changed_list_of_the_caller_is_told_once(llama: Any) -> None:
    rows: list[Any] = []
    with pytest.warns(insitu.UnsavedWarning) as caught:
        with llama.trace(PROMPT, **GREEDY):
            rows.append(llama.logits.save())
    assert [str(one.message) for one in caught] == [
        "`rows` was changed in the block but not saved, so the caller's `rows` is as before: write `rows.save()` in "
        "the block"
    ]


def test_a_failed_block_warns_of_nothing(llama: Any) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyError), llama.trace(PROMPT, **GREEDY):
            c = [llama.logits.save()]
            raise KeyError
    assert caught == []
