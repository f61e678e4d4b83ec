"""Runs blocks beside any torch forward. Knows torch, not vLLM."""

from insitu.run.block_run import BlockRun as BlockRun
from insitu.run.cache import Cache as Cache
from insitu.run.interleaver import Interleaver as Interleaver
from insitu.run.mentions import Text as Text
from insitu.run.program import Home as Home
from insitu.run.program import Outcome as Outcome
from insitu.run.program import outcome_of as outcome_of
from insitu.run.served import Rows as Rows
from insitu.run.served import tensors_of as tensors_of
from insitu.run.standard_names import Names as Names
from insitu.run.standard_names import names_of as names_of
from insitu.run.standard_names import visits as visits
