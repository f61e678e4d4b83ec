"""What ``tracer.cache`` brings home: the recorded values of many modules."""

from __future__ import annotations

import os

from insitu.run.cache_file import load_values, save_values
from insitu.tree.cache import Cache as _Cache
from insitu.tree.cache import Records as Records
from insitu.tree.place import Place


class Cache(_Cache):
    """Recorded values by module: ``cache["model.layers.3"].output``, ``cache.model.layers[3].output``.

    A mapping from the paths of the modules that the model called, in the order in which it first came to
    them, to their values; nodes are taken for paths. Values own their memory. A cache pickles, and
    ``save_safetensors`` writes it to a file.
    """

    def save_safetensors(self, file: str | os.PathLike[str]) -> None:
        """Writes the cache to one file; ``Cache.load_safetensors`` makes an equal one of it.

        Each tensor is named by module, place, visit and its position in the value
        (``model.layers.3/output/0/1``). Named tuples come back as tuples.
        """
        visits = {
            f"{place.path}/{place.site}/{i}": visit
            for place, visits in self._records.visits.items()
            for i, visit in enumerate(visits)
        }
        save_values(file, visits, self._records.lists)

    @classmethod
    def load_safetensors(cls, file: str | os.PathLike[str]) -> Cache:
        """The cache that ``save_safetensors`` wrote. Raises ``ArgumentError`` for another file."""
        visits, lists = load_values(file)
        records = Records(lists)
        for name, (step, value) in visits.items():
            path, site, _ = name.split("/")
            records.add(Place(path, site), step, value)
        return cls(records)
