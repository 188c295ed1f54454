"""A list that tells how much of it is read."""

from __future__ import annotations


class Watched(list):
    """Token ids that count how many of them are read in one operation."""

    most = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        if isinstance(key, slice):
            self.most = max(self.most, len(found))
        return found

    def __iter__(self):
        self.most = max(self.most, len(self))
        return super().__iter__()

    def __eq__(self, other):
        self.most = max(self.most, len(self))
        return super().__eq__(other)
