"""An mpi4py communicator that counts the calls it passes on."""

from collections import Counter

from mpi4py import MPI


class Counted:
    """Everything ``MPI.COMM_WORLD`` does, with the number of calls of each method in ``calls``."""

    def __init__(self):
        self.calls = Counter()

    def __getattr__(self, name):
        inner = getattr(MPI.COMM_WORLD, name)
        if not callable(inner):
            return inner

        def call(*arguments, **options):
            self.calls[name] += 1
            return inner(*arguments, **options)

        return call

    def all_reductions(self):
        return sum(count for name, count in self.calls.items() if "reduce" in name.lower())
