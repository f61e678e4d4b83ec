"""What a block that ran once for many requests has left, and each request's share of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from insitu.run.noted import Program, Ref, mapped
from insitu.run.packed import Members, Packed, narrowed
from insitu.run.parcels import Parcel
from insitu.run.sending import Sender


class _Each:
    """One tensor for each request; ``at``: where in ``found``."""

    __slots__ = ("at", "found", "parcel")

    def __init__(self, parcel: Parcel, at: Mapping[int, int]) -> None:
        self.parcel = parcel
        self.at = at
        self.found: list[Any] = []

    def __reduce__(self) -> Any:
        return _Each, (self.parcel, self.at)


class Left:
    """Values with an ``_Each`` wherever requests have a tensor each; ``each`` are all of these. Pickled, it has the
    rows of many requests in one."""

    def __init__(self, saves: Mapping[str, Any], returned: Any, each: Sequence[_Each]) -> None:
        self._saves = saves
        self._returned = returned
        self._each = each

    def __reduce__(self) -> Any:
        return Left, (self._saves, self._returned, self._each)

    def of(self, members: Sequence[int]) -> Left:
        """Of some requests alone."""
        if all(len(one.at) == len(members) for one in self._each):
            return self
        at = {member: number for number, member in enumerate(members)}
        made = {id(one): _Each(one.parcel.of([one.at[member] for member in members]), at) for one in self._each}
        saves, returned = mapped((dict(self._saves), self._returned), _Each, lambda one: made[id(one)])
        return Left(saves, returned, list(made.values()))

    def saves(self, member: int) -> dict[str, Any]:
        """What the request has saved."""
        self._arrive()
        return {name: _picked(value, member) for name, value in self._saves.items()}

    def returned(self, member: int) -> Any:
        self._arrive()
        return _picked(self._returned, member)

    def release(self, member: int) -> None:
        """What the request has left is taken: nothing holds it here."""
        for each in self._each:
            if each.found:
                each.found[each.at[member]] = None

    def _arrive(self) -> None:
        if self._each and not self._each[-1].found:
            for each in self._each:
                each.found = each.parcel.take_apart()


class Shares:
    """Takes values home: each as soon as it is not going to be changed any more, while the engine goes on."""

    def __init__(self, sender: Sender, sent: Mapping[int, tuple[torch.Tensor, int, Members, Parcel]] = {}) -> None:
        self._sender = sender
        self._sent = dict(sent)
        """By the id of a tensor: it, its version, whose rows it has, and the rows under way."""
        self._new: list[int] = []
        self.left: Left = Left({}, None, ())
        self._positions: dict[Members, dict[int, int]] = {}

    def parted(self) -> Shares:
        """For requests that go on apart from here on."""
        other = Shares(self._sender, self._sent)
        other._new = list(self._new)
        return other

    def let_go(self) -> None:
        """What was left is taken, or nobody is going to ask for it."""
        self.left = Left({}, None, ())
        self._sent.clear()

    def note(self, number: int) -> None:
        """There is a value of this number."""
        self._new.append(number)

    def send(self, program: Program, at: int, known: Mapping[int, Any]) -> None:
        """Sends what is left in the end and not changed from step ``at`` of the program on."""
        if not self._sender.in_use:
            return
        later: list[int] = []
        for number in self._new:
            last = program.comes_home.get(number)
            if last is not None and number in known:
                if last < at:
                    mapped(known[number], Packed, self._send)
                else:
                    later.append(number)
        self._new = later

    def _send(self, each: Packed) -> Packed:
        if id(each.tensor) not in self._sent:
            parcel = self._sender.send_packed(each.tensor, each.counts)
            if parcel is not None:
                self._sent[id(each.tensor)] = each.tensor, each.tensor._version, each.members, parcel
        return each

    def leave(self, program: Program, value_of: Any, members: Members) -> None:
        """The block has ended: what it left is these requests'. ``value_of`` gives a value by its number."""
        made: dict[int, _Each] = {}

        def apart(each: Packed) -> _Each:
            found = made.get(id(each.tensor))
            if found is None:
                found = made[id(each.tensor)] = self._each(each, members)
            return found

        def home(value: Any) -> Any:
            return mapped(value, Ref, lambda ref: mapped(value_of(ref.number), Packed, apart))

        saves = {name: home(value) for name, value in program.saves.items()}
        self.left = Left(saves, home(program.returned), list(made.values()))
        self._sent.clear()

    def _each(self, value: Packed, members: Members) -> _Each:
        sent = self._sent.get(id(value.tensor))
        if sent is not None and sent[0] is value.tensor and sent[1] == value.tensor._version:
            return _Each(sent[3], self._positions_of(sent[2]))
        narrowed(value, members)
        parcel = self._sender.send_packed(value.tensor, value.counts)
        parcel = parcel or self._sender.brought(value.tensor, value.counts)
        return _Each(parcel, self._positions_of(value.members))

    def _positions_of(self, members: Members) -> dict[int, int]:
        if members not in self._positions:
            self._positions[members] = {member: number for number, member in enumerate(members)}
        return self._positions[members]


def _picked(value: Any, member: int) -> Any:
    if type(value) is _Each:
        return value.found[value.at[member]]
    if type(value) is list:
        return [each.found[each.at[member]] if type(each) is _Each else _picked(each, member) for each in value]
    return mapped(value, _Each, lambda each: each.found[each.at[member]])
