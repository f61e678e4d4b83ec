"""What the process that engines are forked from imports last."""

import threading

from tests.forked import fork_engines, keep_imports, look_at_models_here

assert threading.active_count() == 1, "a process with threads can't be forked"
look_at_models_here()
keep_imports()
fork_engines()
