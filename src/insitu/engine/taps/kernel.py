"""The table's edits and the copies of a place in one kernel."""

# ruff: noqa: ANN001, ANN201, ANN202
# pyright: basic

from vllm.triton_utils import tl, triton


@triton.jit
def _edited(value, slot, factors, vectors, columns, inside, width):
    scale, weight, bias = tl.load(factors), tl.load(factors + 1), tl.load(factors + 2)
    added = tl.load(vectors + slot.to(tl.int64) * width + columns, mask=inside & (slot >= 0), other=0.0)
    return tl.where(scale == 0.0, 0.0, value * scale) + weight * added + bias


@triton.jit
def edit_and_copy(
    first, second, first_copy, second_copy, slots, factors, vectors, width, first_step, second_step,
    pair: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    slot0, slot1, summed = tl.load(slots + row * 3), tl.load(slots + row * 3 + 1), tl.load(slots + row * 3 + 2)
    raw0 = tl.load(first + row.to(tl.int64) * first_step + columns, mask=inside)
    value0 = raw0.to(tl.float32)
    if pair:
        raw1 = tl.load(second + row.to(tl.int64) * second_step + columns, mask=inside)
        value1 = raw1.to(tl.float32)
        value0 = tl.where(summed == 1, value0 + value1, value0)
        value1 = _edited(value1, slot1, factors + row * 6 + 3, vectors, columns, inside, width)
        new1 = tl.where(summed == 1, 0.0, value1).to(raw1.dtype)
        tl.store(second + row.to(tl.int64) * second_step + columns, new1, mask=inside)
        tl.store(second_copy + row.to(tl.int64) * width + columns, new1, mask=inside)
    value0 = _edited(value0, slot0, factors + row * 6, vectors, columns, inside, width)
    new0 = value0.to(raw0.dtype)
    tl.store(first + row.to(tl.int64) * first_step + columns, new0, mask=inside)
    tl.store(first_copy + row.to(tl.int64) * width + columns, new0, mask=inside)
