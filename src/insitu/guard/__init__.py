"""Blocks from the network: compiled by RestrictedPython, run under an allow-list, and limited.

``restricted`` makes the blocks of a request into objects that the worker runs in place of ordinary ones.
"""

from insitu.guard.code import GuardedBlock as GuardedBlock
from insitu.guard.code import GuardedFunction as GuardedFunction
from insitu.guard.errors import LimitError as LimitError
from insitu.guard.errors import NotAllowedError as NotAllowedError
from insitu.guard.limits import GuardLimits as GuardLimits
from insitu.guard.trace import RestrictedInvoke as RestrictedInvoke
from insitu.guard.trace import restricted as restricted
