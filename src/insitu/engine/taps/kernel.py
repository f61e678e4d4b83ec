"""The table's edits and the copies of a place in one kernel."""

# ruff: noqa: ANN001, ANN201, ANN202
# pyright: basic

from vllm.triton_utils import tl, triton


@triton.jit
def _vector(vectors, slot, columns, inside, width):
    return tl.load(vectors + slot.to(tl.int64) * width + columns, mask=inside & (slot >= 0), other=0.0)


@triton.jit
def _edited(value, product, slots, factors, vectors, columns, inside, width):
    scale, weight, bias, turn = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2), tl.load(factors + 3)
    added = _vector(vectors, tl.load(slots), columns, inside, width)
    onto = _vector(vectors, tl.load(slots + 2), columns, inside, width)
    return tl.where(scale == 0.0, 0.0, value * scale) + weight * added + bias + turn * product * onto


@triton.jit
def _loaded(first, second, summed, columns, inside, pair: tl.constexpr):
    """The row as it is: what the tensors hold, and what is edited of them."""
    raw0 = tl.load(first + columns, mask=inside, other=0.0)
    raw1 = raw0
    value0, value1 = raw0.to(tl.float32), raw0.to(tl.float32)
    if pair:
        raw1 = tl.load(second + columns, mask=inside, other=0.0)
        value1 = raw1.to(tl.float32)
        value0 = tl.where(summed == 1, value0 + value1, value0)
    return raw0, raw1, value0, value1


@triton.jit
def edit_and_copy(
    first, second, first_copy, second_copy, slots, factors, vectors, width, first_step, second_step,
    pair: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    slots, factors = slots + row * 7, factors + row * 8
    first, second = first + row.to(tl.int64) * first_step, second + row.to(tl.int64) * second_step
    first_copy, second_copy = first_copy + row.to(tl.int64) * width, second_copy + row.to(tl.int64) * width
    along0, along1, summed = tl.load(slots + 1), tl.load(slots + 4), tl.load(slots + 6)
    begin, end = part * block, (part + 1) * block
    product0, product1 = 0.0, 0.0
    if (along0 >= 0) | (along1 >= 0):
        # One program has the whole row: another would write what it has still to read.
        begin, end = 0, tl.where(part == 0, width, 0)
        sums0, sums1 = tl.zeros([block], tl.float32), tl.zeros([block], tl.float32)
        for start in range(begin, end, block):
            columns = start + tl.arange(0, block)
            inside = columns < width
            _, _, value0, value1 = _loaded(first, second, summed, columns, inside, pair)
            sums0 += value0 * _vector(vectors, along0, columns, inside, width)
            if pair:
                sums1 += value1 * _vector(vectors, along1, columns, inside, width)
        product0, product1 = tl.sum(sums0), tl.sum(sums1)
    for start in range(begin, end, block):
        columns = start + tl.arange(0, block)
        inside = columns < width
        raw0, raw1, value0, value1 = _loaded(first, second, summed, columns, inside, pair)
        new0 = _edited(value0, product0, slots, factors, vectors, columns, inside, width).to(raw0.dtype)
        if pair:
            value1 = _edited(value1, product1, slots + 3, factors + 4, vectors, columns, inside, width)
            new1 = tl.where(summed == 1, 0.0, value1).to(raw1.dtype)
            tl.store(second + columns, new1, mask=inside)
            tl.store(second_copy + columns, new1, mask=inside)
        tl.store(first + columns, new0, mask=inside)
        tl.store(first_copy + columns, new0, mask=inside)
